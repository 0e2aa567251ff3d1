"""Products of integers and dynamic quantization by the kernels, against NumPy's int32 and JAX's own operations."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter.lowering.linear import MatMulInteger
from transmuter.lowering.named import named
from transmuter.lowering.quantization import DYNAMIC, DynamicQuantizeLinear, dynamically_quantized
from transmuter.native import integers, library
from transmuter.segments.integers import dynamic_quantization, integer_products
from transmuter.segments.preparation import Trace, evaluate, flatten
from transmuter.segments.rewriting import rewritten

pytestmark = pytest.mark.skipif(
    not library.available(), reason="the package was installed without kernels, or this processor can run none of them"
)
with_instructions = pytest.mark.skipif(
    not integers.multiplies_integers(), reason="this processor has no instructions for products of int8 (AVX512-VNNI)"
)
KINDS = [np.int8, np.uint8]


@pytest.fixture(params=["avx512vnni", "avx512", "avx2"])
def _variant(request: pytest.FixtureRequest) -> Iterator[None]:
    before = library.variant()
    if not library.choose(request.param):
        pytest.skip(f"this processor cannot run the kernels of {request.param}")
    yield
    library.choose(before)


def drawn(seed: int, kind: Any, *shape: int, extremes: bool = False) -> np.ndarray:
    random, bounds = np.random.default_rng(seed), np.iinfo(kind)
    if extremes:
        return random.choice(np.array([bounds.min, bounds.max], kind), shape)
    return random.integers(bounds.min, bounds.max + 1, shape).astype(kind)


def product(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """In int32; uint8 stands for what is 128 less."""
    shift = 128 if rows.dtype == np.uint8 else 0
    return (rows.astype(np.int32) - shift) @ matrix.astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from(KINDS),
    st.booleans(),
    st.integers(0, 99),
)
def test_products_are_exact(rows: int, depth: int, columns: int, kind: Any, extremes: bool, seed: int) -> None:
    left = drawn(seed, kind, rows, depth, extremes=extremes)
    right = drawn(seed + 1, np.int8, depth, columns, extremes=extremes)
    packed = integers.packed_integers(jnp.asarray(right))
    actual = integers.integer_product(jnp.asarray(left), *packed)
    np.testing.assert_array_equal(actual, product(left, right), strict=True)
    np.testing.assert_array_equal(integers.pure_integer_product(left, *packed), actual, strict=True)


@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "columns"),
    [((1, 384), 384), ((128, 384), 100), ((300, 64), 65), ((3, 9001), 33), ((2, 5, 7), 3), ((4, 0), 5), ((0, 4), 5)],
)
def test_shapes_that_take_another_path(kind: Any, shape: tuple[int, ...], columns: int) -> None:
    left, right = drawn(0, kind, *shape), drawn(1, np.int8, shape[-1], columns)
    actual = integers.integer_product(jnp.asarray(left), *integers.packed_integers(jnp.asarray(right)))
    np.testing.assert_array_equal(actual, product(left, right), strict=True)


def test_the_pure_form_is_what_other_platforms_compute() -> None:
    packed = integers.packed_integers(jnp.asarray(drawn(0, np.int8, 6, 5)))
    lowered = jax.jit(integers.integer_product).trace(drawn(1, np.uint8, 3, 6), *packed)
    assert "dot_general" in lowered.lower(lowering_platforms=("tpu",)).as_text()


# ---- dynamic quantization -------------------------------------------------------------------------------------------

_by_xla = jax.jit(dynamically_quantized)
_by_kernel = jax.jit(integers.dynamic_quantization)


def assert_same_steps(x: np.ndarray) -> None:
    """The kernel's results have the bits of XLA's."""
    for actual, expected in zip(_by_kernel(x), _by_xla(x), strict=True):
        np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.usefixtures("_variant")
@pytest.mark.parametrize("size", [1, 15, 255, 257, 1000, 100_003])
@pytest.mark.parametrize("sign", ["both", "positive", "negative"])
def test_steps_are_those_of_xla(size: int, sign: str) -> None:
    values = np.random.default_rng(size).standard_normal(size, np.float32)
    assert_same_steps({"both": values, "positive": abs(values), "negative": -abs(values)}[sign])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(-40, 40), st.integers(-255, 0))
def test_halves_are_rounded_to_even(seed: int, exponent: int, low: int) -> None:
    steps = np.random.default_rng(seed).integers(2 * low, 2 * (low + 255) + 1, 200) / 2
    assert_same_steps(np.float32([low, low + 255, *steps]) * np.float32(2.0**exponent))


@pytest.mark.parametrize(
    "values", [[0, 0], [np.nan, 1, -1], [np.inf, 1], [-np.inf, 1, 2], [3e38, -3e38, 1], [1e-38, 2e-38], [1e-44, 3e-41]]
)
def test_ranges_without_a_usual_scale(values: list[float]) -> None:
    assert_same_steps(np.float32(values))


# ---- rules ----------------------------------------------------------------------------------------------------------


def names(trace: Trace) -> list[str]:
    return [op.equation.primitive.name for op in trace.operations]


def results(trace: Trace, *arguments: Any) -> list[Any]:
    return evaluate(trace.operations, {**trace.constants, **dict(zip(trace.inputs, arguments))}, trace.outputs)


@with_instructions
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(4, 20), (2, 3, 20), (1, 20), (2, 1, 20), (20,)])
def test_a_product_with_a_weight_is_the_kernel(kind: Any, shape: tuple[int, ...]) -> None:
    def lowered(rows: Any, matrix: Any) -> Any:
        return MatMulInteger(rows, matrix, jnp.asarray(3, kind), None)

    rows, matrix = drawn(0, kind, *shape), drawn(1, np.int8, 20, 9)
    trace = flatten(jax.make_jaxpr(lowered)(rows, matrix))
    ours = rewritten(trace, trace.inputs[1:], (integer_products,))
    (call,) = [op for op in ours.operations if op.equation.primitive.name == "cpu_integer_product"]
    assert (call.equation.invars[0].aval.dtype, call.equation.invars[0].aval.shape) == (kind, shape)
    np.testing.assert_array_equal(*results(ours, rows, matrix), *results(trace, rows, matrix), strict=True)


@with_instructions
def test_a_product_of_activations_stays() -> None:
    trace = flatten(jax.make_jaxpr(MatMulInteger)(drawn(0, np.int8, 4, 5), drawn(1, np.int8, 5, 6)))
    assert names(rewritten(trace, (), (integer_products,))) == names(trace)


@pytest.mark.parametrize("shape", [(7,), (3, 50), ()])
def test_dynamic_quantization_is_the_kernel(shape: tuple[int, ...]) -> None:
    x = np.asarray(np.random.default_rng(0).standard_normal(shape), np.float32)
    trace = flatten(jax.make_jaxpr(DynamicQuantizeLinear)(x))
    ours = rewritten(trace, (), (dynamic_quantization,))
    assert names(ours) == ["cpu_dynamic_quantization"]
    for actual, expected in zip(results(ours, x), results(trace, x), strict=True):
        np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_other_computations_with_a_name_stay(kind: Any) -> None:
    function = functools.partial(named, "another" if kind == np.float32 else DYNAMIC, dynamically_quantized)
    trace = flatten(jax.make_jaxpr(function)(np.zeros((3, 50), kind)))
    assert names(trace) == names(rewritten(trace, (), (dynamic_quantization,))) == ["named"]


# ---- a model --------------------------------------------------------------------------------------------------------


def test_a_compiled_model_has_the_integers_of_an_eager_one() -> None:
    random = np.random.default_rng(0)
    weights = [drawn(i, np.int8, *shape) for i, shape in enumerate([(40, 70), (40, 33)])]
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"])]
    nodes += [helper.make_node("MatMulInteger", ["q", f"w{i}", "zero"], [f"y{i}"]) for i in range(2)]
    rows = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "rows", 40])
    outputs = [helper.make_tensor_value_info(f"y{i}", TensorProto.INT32, None) for i in range(2)]
    initializers = [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)]
    graph = helper.make_graph(nodes, "two products", [rows], outputs, initializers)
    model = transmuter.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
    compiled = transmuter.compile(model)
    for shape in [(1, 1, 40), (2, 30, 40)]:
        inputs = {"x": random.standard_normal(shape, np.float32)}
        expected = transmuter.run(model, inputs)
        for name, actual in compiled(inputs).items():
            np.testing.assert_array_equal(actual, expected[name], strict=True)

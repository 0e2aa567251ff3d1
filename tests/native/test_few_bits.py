"""Products with weights of few bits by the kernel, against NumPy in float64, JAX's own operations and ONNX Runtime."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from few_bits_weights import drawn_weight
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import by_each_variant, needs_kernels
from onenode import one_node, ort_node

import transmuter
from transmuter import native
from transmuter.lowering.few_bits import in_packing, product
from transmuter.native import few_bits
from transmuter.native.products import packed
from transmuter.segments import few_bits as rules
from transmuter.segments.few_bits import products_by_xla, products_of_few_bits
from transmuter.segments.preparation import Trace, evaluate, flatten
from transmuter.segments.rewriting import rewritten

pytestmark = needs_kernels


def drawn(bits: int, block: int, blocks: int, columns: int, zeros: str, seed: int = 0) -> tuple[list[Any], np.ndarray]:
    """The words, scales and zero points of a weight, and the weight itself in float64."""
    codes, scales, zero, weight = drawn_weight(bits, block, blocks, columns, zeros, seed)
    fields = 32 // bits
    shifts = bits * np.arange(fields, dtype=np.uint32)[:, None]
    words = np.bitwise_or.reduce(
        codes.reshape(block * blocks // fields, fields, columns).astype(np.uint32) << shifts, 1
    )
    return [words.view(np.int32), scales] + ([] if zero is None else [zero]), weight


def panels(operands: list[Any]) -> list[jax.Array]:
    return [packed(jnp.asarray(x)) for x in operands]


def assert_close(actual: Any, x: np.ndarray, weight: np.ndarray) -> None:
    """A sum's roundings are within 1e-6 of what its summands come to without their signs."""
    x = x.astype(np.float64)
    assert actual.shape == (x.shape[0], weight.shape[1])
    assert actual.dtype == np.float32
    assert np.all(np.abs(actual - x @ weight) <= 1e-6 * (np.abs(x) @ np.abs(weight)) + 1e-6 * np.abs(x).sum(1)[:, None])


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from(few_bits.BITS),
    block=st.sampled_from([16, 32, 48, 64, 128, 256]),
    blocks=st.integers(1, 9),
    columns=st.integers(1, 100),
    rows=st.one_of(st.integers(0, 20), st.sampled_from([40, 169, 200])),
    zeros=st.sampled_from(["none", "integers", "floats"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_every_variant(
    bits: int, block: int, blocks: int, columns: int, rows: int, zeros: str, seed: int
) -> None:
    operands, weight = drawn(bits, block, blocks, columns, zeros, seed)
    x = np.random.default_rng(seed).normal(size=(rows, block * blocks)).astype(np.float32)
    how = {"bits": bits, "columns": columns}
    for actual in by_each_variant(functools.partial(native.product_of_few_bits, **how), x, *panels(operands)):
        assert_close(actual, x, weight)
    assert_close(few_bits.pure_few_bits(jnp.asarray(x), *panels(operands), **how), x, weight)


@pytest.mark.parametrize("zeros", ["none", "integers", "floats"])
@pytest.mark.parametrize("rows", [1, 3, 30])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_not_finite_stays_in_its_row(value: float, rows: int, zeros: str) -> None:
    operands, weight = drawn(4, 32, 3, 40, zeros)
    x = np.random.default_rng(0).normal(size=(rows, 96)).astype(np.float32)
    x[rows // 2, 50] = value
    with np.errstate(all="ignore"):
        expected = (x.astype(np.float64) @ weight).astype(np.float32)
    function = functools.partial(native.product_of_few_bits, bits=4, columns=40)
    for actual in by_each_variant(function, x, *panels(operands)):
        is_finite = np.isfinite(expected)
        if abs(value) == np.inf or np.isnan(value):
            np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
            np.testing.assert_array_equal(actual[np.isinf(expected)], expected[np.isinf(expected)])
        else:  # which overflows a float32, in one order of the summands or the other
            is_finite[rows // 2] = False
        np.testing.assert_allclose(actual[is_finite], expected[is_finite], 1e-4, 1e-4)


@pytest.mark.parametrize(("depth", "columns"), [(0, 5), (64, 0), (0, 0)])
@pytest.mark.parametrize("rows", [0, 1, 30])
def test_nothing_to_add_up_is_zero(rows: int, depth: int, columns: int) -> None:
    operands, _ = drawn(4, 32, depth // 32, columns, "integers")
    function = functools.partial(native.product_of_few_bits, bits=4, columns=columns)
    for actual in by_each_variant(function, np.ones((rows, depth), np.float32), *panels(operands)):
        np.testing.assert_array_equal(actual, np.zeros((rows, columns), np.float32), strict=True)


def test_many_tasks_share_what_is_large() -> None:
    operands, weight = drawn(4, 32, 32, 3072, "integers")
    for rows in (1, 8, 300):
        x = np.random.default_rng(rows).normal(size=(rows, 1024)).astype(np.float32)
        function = functools.partial(native.product_of_few_bits, bits=4, columns=3072)
        for actual in by_each_variant(function, x, *panels(operands)):
            assert_close(actual, x, weight)


def test_the_pure_form_is_what_other_platforms_compute() -> None:
    operands, _ = drawn(4, 32, 2, 5, "none")
    multiply = jax.jit(functools.partial(native.product_of_few_bits, bits=4, columns=5))
    lowered = multiply.trace(np.ones((2, 64), np.float32), *panels(operands)).lower(lowering_platforms=("tpu",))
    assert "dot_general" in lowered.as_text()


# ---- the rule -------------------------------------------------------------------------------------------------------


def names(trace: Trace) -> list[str]:
    return [op.equation.primitive.name for op in trace.operations]


def results(trace: Trace, *arguments: Any) -> list[Any]:
    return evaluate(trace.operations, {**trace.constants, **dict(zip(trace.inputs, arguments))}, trace.outputs)


@pytest.mark.parametrize("zeros", ["none", "integers", "floats"])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_product_with_a_weight_is_the_kernel(rows: int, zeros: str) -> None:
    operands, weight = drawn(4, 32, 2, 9, zeros)
    x = np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)
    with in_packing("keep"):
        multiply = lambda x, *operands: product(x, *operands, *[None] * (3 - len(operands)), 4)
        trace = flatten(jax.make_jaxpr(multiply)(x, *operands))
    assert names(trace) == ["named"]
    ours = rewritten(trace, trace.inputs[1:], (products_of_few_bits, products_by_xla))
    assert names(ours).count("cpu_few_bits") == 1
    assert "named" not in names(ours)
    (actual,) = results(ours, x, *operands)
    assert_close(actual, x, weight)
    by_xla = rewritten(trace, (), (products_of_few_bits, products_by_xla))  # the words are no weight
    assert not {"cpu_few_bits", "named"}.intersection(names(by_xla))
    assert_close(results(by_xla, x, *operands)[0], x, weight)


# ---- models ---------------------------------------------------------------------------------------------------------


def matmul(rows: int, depth: int, columns: int, *, zeros: bool, bias: bool) -> tuple[list[Any], dict[str, Any]]:
    """Operands and attributes of MatMulNBits."""
    rng = np.random.default_rng(depth + columns)
    blocks = -(-depth // 32)
    inputs = [rng.normal(size=(2, rows, depth)).astype(np.float32)]
    inputs.append(rng.integers(0, 256, (columns, blocks, 16)).astype(np.uint8))
    inputs.append(rng.uniform(0.5, 1.5, columns * blocks).astype(np.float32))
    inputs.append(rng.integers(0, 256, columns * -(-blocks // 2)).astype(np.uint8) if zeros else None)
    inputs += [None, rng.normal(size=columns).astype(np.float32) if bias else None]
    return inputs, {"K": depth, "N": columns, "bits": 4, "block_size": 32}


def calls(compiled: transmuter.CompiledModel) -> list[str]:
    """The operations of ours in the last segment that was compiled."""
    (executable,) = compiled.segments[-1].executables
    text = str(executable.main.trace(executable.values, [np.zeros(*x) for x in arguments(compiled)]).jaxpr)
    return re.findall(r"cpu_few_bits|named", text)


def arguments(compiled: transmuter.CompiledModel) -> tuple[Any, ...]:
    return compiled.segments[-1].signature.arguments


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(1, 64, 32), (1, 77, 45), (5, 64, 33), (30, 77, 64)])
def test_a_model_is_equal_with_kernels_and_without(
    rows: int, depth: int, columns: int, zeros: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, attributes = matmul(rows, depth, columns, zeros=zeros, bias=bias)
    known = [i for i, x in enumerate(inputs) if i and x is not None]
    proto = one_node("MatMulNBits", inputs, attributes, known=known, domain="com.microsoft")
    compiled = transmuter.compile(transmuter.load(proto), inputs[:1])
    assert calls(compiled) == ["cpu_few_bits"]
    actual = compiled(inputs[:1])["y0"]
    (expected,) = ort_node("MatMulNBits", inputs, attributes, known=known, domain="com.microsoft")
    np.testing.assert_allclose(actual, expected, 1e-5, 1e-3)
    monkeypatch.setattr(rules, "has_kernels", lambda: False)
    by_xla = transmuter.compile(transmuter.load(proto), inputs[:1])
    assert calls(by_xla) == []
    np.testing.assert_allclose(actual, by_xla(inputs[:1])["y0"], 1e-5, 1e-3)


@pytest.mark.parametrize("rows", [1, 5, 30])
def test_transforms_of_a_compiled_model(rows: int) -> None:
    inputs, attributes = matmul(rows, 77, 45, zeros=True, bias=False)
    proto = one_node("MatMulNBits", inputs, attributes, known=(1, 2, 3), domain="com.microsoft")
    model, x = transmuter.load(proto), inputs[0]
    compiled = transmuter.compile(model, [x])
    square = lambda y: jnp.sum(y * y)
    actual = jax.grad(lambda x: square(compiled({"x0": x})["y0"]))(x)
    expected = jax.grad(lambda x: square(model.apply(model.params, {"x0": x})["y0"]))(x)
    np.testing.assert_allclose(actual, expected, 1e-4, 1e-4 * np.abs(expected).max())
    stacked = jax.vmap(lambda x: compiled({"x0": x})["y0"])(np.stack([x, 2 * x]))
    np.testing.assert_allclose(stacked, np.stack([y := compiled([x])["y0"], 2 * y]), 1e-5, 1e-3)


def test_segments_share_the_packed_words() -> None:
    inputs, attributes = matmul(1, 64, 40, zeros=True, bias=False)
    proto = one_node("MatMulNBits", inputs, attributes, known=(1, 2, 3), domain="com.microsoft")
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "rows"
    model = transmuter.load(proto)
    compiled = transmuter.compile(model, inputs[:1])
    compiled([np.repeat(inputs[0], 30, 1)])
    first, second = ([id(x) for x in s.executables[0].values] for s in compiled.segments)
    assert first == second
    np.testing.assert_array_equal(model.buffers["x1"], inputs[1])  # given back from what is packed

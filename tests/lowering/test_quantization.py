"""Quantized operators against ONNX Runtime, exactly wherever they give integers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, ort_node, reference_node, run_node
from onnx import TensorProto, helper

import transmuter
from transmuter.lowering.quantization import quantized, quotient

F32 = np.float32
MICROSOFT = "com.microsoft"
INTEGERS = [np.uint8, np.int8, np.uint16, np.int16]
SMALL_FLOATS = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float4_e2m1fn"]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def element(kind: Any) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(kind))


def drawn(rng: np.random.Generator, kind: Any, *shape: int) -> np.ndarray:
    bounds = ml_dtypes.iinfo(kind)
    return np.asarray(rng.integers(bounds.min, bounds.max + 1, shape)).astype(kind)


def scale(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(rng.random(shape) * 0.1 + 0.01, F32)


def assert_same(op: str, inputs: list[Any], attributes: dict[str, Any] | None = None, **options: Any) -> None:
    """Eager and compiled results have ONNX Runtime's integers, or its floats to 1e-5."""
    expected = ort_node(op, inputs, attributes, **options)
    for compiled in (False, True):
        results = run_node(op, inputs, attributes, compiled=compiled, **options)
        for actual, wanted in zip(results, expected, strict=True):
            assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
            if wanted.dtype.kind == "f":
                np.testing.assert_allclose(actual, wanted, 1e-5, 1e-5)
            else:
                np.testing.assert_array_equal(actual, wanted)


# ---- one step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divisor", [0.1, 5 / 255, 0.37, 3e-7])
def test_quotients_round_as_numpy_does(divisor: float, rng: np.random.Generator) -> None:
    divisor = F32(divisor)
    ties = ((np.arange(-300, 300) + 0.5).astype(F32) * divisor).astype(F32)
    x = np.concatenate([ties, rng.normal(size=10000).astype(F32), np.array([np.inf, -np.inf, np.nan, 0], F32)])
    for divide in (quotient, jax.jit(quotient), jax.jit(lambda x, _: quotient(x, divisor))):
        np.testing.assert_array_equal(divide(jnp.asarray(x), divisor), x / divisor)


@pytest.mark.parametrize("kind", [*INTEGERS, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2])
def test_saturation_is_exact(kind: Any) -> None:
    bounds = ml_dtypes.iinfo(kind)
    x = np.array([-np.inf, -1e30, -0.5, 0.5, 1.5, 2.5, 1e30, np.inf], F32)
    for zero in {bounds.min, 0, bounds.max}:
        wanted = np.clip(np.rint(np.clip(x, -1e9, 1e9)) + zero, bounds.min, bounds.max)
        (y,) = run_node("QuantizeLinear", [x, F32(1), np.array(zero, kind)], opset=25, output_types=[element(kind)])
        np.testing.assert_array_equal(y.astype(int), wanted)


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(INTEGERS),
    granularity=st.sampled_from(["tensor", "axis", "block"]),
    axis=st.integers(-3, 2),
    has_zero=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear_quantization(kind: Any, granularity: str, axis: int, has_zero: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape, block = (4, 6, 8), 3
    x = (rng.normal(size=shape) * 10).astype(F32)
    blocks = list(shape)
    blocks[axis] = -(-shape[axis] // block)
    of = {"tensor": (), "axis": (shape[axis],), "block": tuple(blocks)}[granularity]
    attributes = {"axis": axis, **({"block_size": block} if granularity == "block" else {})}
    scales, zero = scale(rng, *of), drawn(rng, kind, *of) if has_zero else None
    extra = {} if has_zero else {"output_dtype": element(kind)}
    assert_same("QuantizeLinear", [x, scales, zero], {**attributes, **extra}, output_types=[element(kind)])
    assert_same(
        "DequantizeLinear", [drawn(rng, kind, *shape), scales, zero], attributes, output_types=[TensorProto.FLOAT]
    )


@pytest.mark.parametrize("opset", [10, 13, 19, 21, 23, 25])
def test_every_opset_quantizes_by_tensor(opset: int, rng: np.random.Generator) -> None:
    x, s, zero = rng.normal(size=(3, 4)).astype(F32), scale(rng), np.array(100, np.uint8)
    (q,) = run_node("QuantizeLinear", [x, s, zero], opset=opset, output_types=[TensorProto.UINT8])
    np.testing.assert_array_equal(q, np.clip(np.rint(x / s) + 100, 0, 255))
    (y,) = run_node("DequantizeLinear", [q, s, zero], opset=opset, output_types=[TensorProto.FLOAT])
    np.testing.assert_allclose(y, (q.astype(F32) - 100) * s)


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_small_floats(name: str, rng: np.random.Generator) -> None:
    kind = np.dtype(getattr(ml_dtypes, name))
    largest = float(ml_dtypes.finfo(kind).max)
    x = np.concatenate([rng.normal(size=200) * largest, [0, 1e9, -1e9, np.inf, -np.inf]]).astype(F32)
    zero = np.zeros((), kind)
    (y,) = run_node("QuantizeLinear", [x, F32(1), zero], output_types=[element(kind)])
    np.testing.assert_array_equal(y.astype(F32), np.clip(x, -largest, largest).astype(kind).astype(F32))
    if name.startswith("float8"):
        (y,) = run_node("QuantizeLinear", [x, F32(1), zero], {"saturate": 0}, output_types=[element(kind)])
        np.testing.assert_array_equal(y.astype(F32), x.astype(kind).astype(F32))
    (back,) = run_node("DequantizeLinear", [y, F32(0.5)], output_types=[TensorProto.FLOAT])
    np.testing.assert_array_equal(back, y.astype(F32) * F32(0.5))


def test_the_result_of_dequantization_has_the_scales_dtype_or_the_one_asked_for(rng: np.random.Generator) -> None:
    q, half = drawn(rng, np.int8, 4, 5), np.array(0.3, np.float16)
    (y,) = run_node("DequantizeLinear", [q, half], output_types=[TensorProto.FLOAT16])
    np.testing.assert_array_equal(y, (q.astype(F32) * F32(half)).astype(np.float16))
    attributes = {"output_dtype": TensorProto.FLOAT}
    (y,) = run_node("DequantizeLinear", [q, half], attributes, opset=24, output_types=[TensorProto.FLOAT])
    assert y.dtype == F32


FEW_BITS = [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2]


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from([*INTEGERS, *FEW_BITS, *(np.dtype(getattr(ml_dtypes, name)) for name in SMALL_FLOATS)]),
    wide=st.sampled_from([F32, np.float16, ml_dtypes.bfloat16]),
    of=st.sampled_from([(), (6,), (4, 2)]),
    has_zero=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_dtype_against_the_reference(
    kind: Any, wide: Any, of: tuple[int, ...], has_zero: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    is_small_float = "float" in np.dtype(kind).name
    x, scales = (rng.normal(size=(4, 6)) * 3).astype(wide), (scale(rng, *of) * 8).astype(wide)
    zero = None if not has_zero else np.zeros(of, kind) if is_small_float else drawn(rng, kind, *of)
    attributes = {"axis": 1, **({"block_size": 3} if len(of) == 2 else {})}
    q = x.astype(kind) if is_small_float else drawn(rng, kind, 4, 6)
    for op, operand, target in (("QuantizeLinear", x, kind), ("DequantizeLinear", q, wide)):
        given = attributes | ({"output_dtype": element(kind)} if op == "QuantizeLinear" and not has_zero else {})
        options = {"opset": 25, "output_types": [element(target)]}
        (y,) = run_node(op, [operand, scales, zero], given, **options)
        (wanted,) = reference_node(op, [operand, scales, zero], given, **options)
        assert (y.dtype, y.shape) == (np.dtype(target), x.shape)
        tolerance = 0 if op == "QuantizeLinear" else 1e-6 if wide is F32 else 2.0**-7
        np.testing.assert_allclose(y.astype(F32), np.asarray(wanted).astype(F32), tolerance, tolerance)


@pytest.mark.parametrize("x", [[], 3.0, [np.inf, 1], [3e38, -3e38], [-1, -2], [-0.0], [0.5, 1.5, 254.5, 255]])
def test_dynamic_quantization_of_extremes(x: Any) -> None:
    types = {"outputs": 3, "output_types": [TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8]}
    with np.errstate(all="ignore"):
        assert_same("DynamicQuantizeLinear", [np.asarray(x, F32)], **types)


def test_dynamic_quantization(rng: np.random.Generator) -> None:
    types = {"outputs": 3, "output_types": [TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8]}
    for x in (rng.normal(size=(9, 50)), rng.random((3, 4)) + 1, -rng.random(5) - 1, np.zeros(3)):
        assert_same("DynamicQuantizeLinear", [x.astype(F32)], **types)


def test_scales_have_gradients(rng: np.random.Generator) -> None:
    q, scales = drawn(rng, np.int8, 4, 6), scale(rng, 2, 6)
    zero = drawn(rng, np.int8, 2, 6)
    model = transmuter.load(one_node("DequantizeLinear", [q, scales, zero], {"axis": 0, "block_size": 2}))

    def dequantize(scales: jax.Array) -> jax.Array:
        return model.apply({}, {"x0": q, "x1": scales, "x2": zero})["y0"]

    check_grads(dequantize, (jnp.asarray(scales),), 1, modes=["rev"], rtol=1e-2, atol=1e-2)


def test_all_is_the_same_with_64_bits_off(rng: np.random.Generator) -> None:
    x, s, zero = rng.normal(size=(3, 40)).astype(F32), scale(rng), np.uint8(9)
    with jax.enable_x64(False), jax.numpy_dtype_promotion("strict"):
        model = transmuter.load(one_node("DynamicQuantizeLinear", [x], outputs=3))
        jax.block_until_ready(jax.jit(lambda x: model.apply({}, [x]))(x))
        y = jax.jit(lambda x: quantized(x, s, zero, np.dtype(np.uint8)))(x)
    np.testing.assert_array_equal(y, np.clip(np.rint(x / s) + 9, 0, 255))


@pytest.mark.parametrize(
    ("scale_shape", "attributes", "message"),
    [
        ((5,), {"axis": 1}, "does not fit axis 1"),
        ((3,), {"axis": 7}, "axis 7"),
        ((3, 3), {"axis": 1, "block_size": 2}, "3 blocks of 2 elements do not make up 4"),
    ],
)
def test_misfits_are_errors(scale_shape: tuple[int, ...], attributes: dict[str, int], message: str) -> None:
    x = np.zeros((3, 4), F32)
    with pytest.raises(transmuter.TransmuterError, match=message):
        run_node("QuantizeLinear", [x, np.ones(scale_shape, F32)], attributes, output_types=[TensorProto.UINT8])


# ---- products -------------------------------------------------------------------------------------------------------

PAIRS = [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8)]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_products_of_8_bits(a: Any, b: Any, rng: np.random.Generator) -> None:
    x, w, zero = drawn(rng, a, 4, 300), drawn(rng, b, 300, 7), np.array(drawn(rng, a))
    scales, zeros, unit = scale(rng, 7), drawn(rng, b, 7), np.array(40, F32)
    addend = rng.integers(-1000, 1000, 7).astype(np.int32)
    out = {"output_types": [element(a)]}
    floats = {"output_types": [TensorProto.FLOAT], "domain": MICROSOFT, "known": (3,)}
    assert_same("QLinearMatMul", [x, scale(rng), zero, w, scales, zeros, unit, zero], **out)
    stack = [np.stack([x, x]), scale(rng), zero, np.stack([w, w]), scale(rng), zeros[0], unit, zero]
    assert_same("QLinearMatMul", [np.asarray(v) for v in stack], **out)
    gemm = [x, scale(rng), zero, w.T.copy(), scales, zeros * 0, addend, unit, zero]
    options = {"known": (3, 4, 5, 6), "domain": MICROSOFT}
    assert_same("QGemm", gemm, {"transB": 1, "alpha": 0.5}, **out, **options)
    assert_same("QGemm", [x, scale(rng), zero, w, scale(rng), np.asarray(zeros[0]), addend], **floats)
    bias = rng.normal(size=7).astype(F32)
    assert_same("MatMulIntegerToFloat", [x, w, scale(rng), scales, zero, zeros, bias], **{**floats, "known": (1,)})


@settings(max_examples=15, deadline=None)
@given(
    kinds=st.sampled_from([*PAIRS, (np.int8, np.uint8)]),
    shapes=st.sampled_from([((5,), (5, 4)), ((3, 5), (5,)), ((2, 3, 5), (5, 4)), ((2, 1, 3, 5), (2, 5, 4))]),
    has_zeros=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_integers(kinds: tuple, shapes: tuple, has_zeros: tuple[bool, bool], seed: int) -> None:
    rng = np.random.default_rng(seed)
    operands = [drawn(rng, kind, *shape) for kind, shape in zip(kinds, shapes, strict=True)]
    zeros = [np.asarray(drawn(rng, kind)) if has else None for kind, has in zip(kinds, has_zeros, strict=True)]
    options = {"output_types": [TensorProto.INT32]}
    (expected,) = ort_node("MatMulInteger", [*operands, *zeros], **options)
    (actual,) = run_node("MatMulInteger", [*operands, *zeros], **options)
    assert actual.dtype == np.int32
    np.testing.assert_array_equal(actual, expected)


@settings(max_examples=15, deadline=None)
@given(
    b=st.sampled_from([np.uint8, np.int8]),
    per_column=st.tuples(st.booleans(), st.booleans()),
    has_bias=st.booleans(),
    magnitude=st.sampled_from([0, 1e-6, 1, 1e6]),
    offset=st.sampled_from([0, -3, 7]),
    seed=st.integers(0, 2**32 - 1),
)
def test_dynamically_quantized_products_of_every_magnitude(
    b: Any, per_column: tuple[bool, bool], has_bias: bool, magnitude: float, offset: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = ((rng.normal(size=(2, 64)) + offset) * magnitude).astype(F32)
    of = [(5,) if per_column[0] else (), (5,) if per_column[0] and per_column[1] else ()]
    bias = rng.normal(size=5).astype(F32) if has_bias else None
    inputs = [x, drawn(rng, b, 64, 5), scale(rng, *of[0]), drawn(rng, b, *of[1]), bias]
    options = {"known": (1,), "domain": MICROSOFT}
    (expected,) = ort_node("DynamicQuantizeMatMul", inputs, **options)
    (actual,) = run_node("DynamicQuantizeMatMul", inputs, **options)
    np.testing.assert_allclose(actual, expected, 1e-5, 1e-6 * max(np.abs(expected).max(), 1))


@pytest.mark.parametrize("b", [np.uint8, np.int8])
def test_dynamically_quantized_products(b: Any, rng: np.random.Generator) -> None:
    x, bias = rng.normal(size=(2, 4, 300)).astype(F32), rng.normal(size=7).astype(F32)
    options = {"known": (1,), "output_types": [TensorProto.FLOAT], "domain": MICROSOFT}
    w, scales, zeros = drawn(rng, b, 300, 7), scale(rng, 7), drawn(rng, b, 7)
    assert_same("DynamicQuantizeMatMul", [x, w, scales, zeros, bias], **options)
    assert_same("DynamicQuantizeMatMul", [x, w, scale(rng)], **options)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_convolutions(a: Any, b: Any, rng: np.random.Generator) -> None:
    x, w, zero = drawn(rng, a, 2, 4, 9, 9), drawn(rng, b, 6, 4, 3, 3), np.array(drawn(rng, a))
    addend, unit = rng.integers(-1000, 1000, 6).astype(np.int32), np.array(30, F32)
    options = {"output_types": [element(a)], "known": (3, 4, 5)}
    rest = [np.full(6, 3 if b is np.uint8 else 0, b), unit, zero, addend]
    attributes = {"pads": [1, 1, 1, 1], "strides": [2, 1]}
    assert_same("QLinearConv", [x, scale(rng), zero, w, scale(rng, 6), *rest], attributes, **options)
    last = [x.transpose(0, 2, 3, 1).copy(), scale(rng), zero, w, scale(rng, 6), *rest]
    assert_same("QLinearConv", last, {**attributes, "channels_last": 1}, domain=MICROSOFT, **options)
    grouped = [x, scale(rng), zero, w[:, :2].copy(), scale(rng), rest[0][:1].reshape(()), unit, zero]
    assert_same("QLinearConv", grouped, {"group": 2, "dilations": [2, 1]}, **options)


WINDOWS = [
    {"pads": [1, 0, 2, 1]},
    {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"auto_pad": "SAME_LOWER", "strides": [2, 1], "group": 2},
    {"dilations": [2, 2], "group": 4},
]


@settings(max_examples=15, deadline=None)
@given(
    kinds=st.sampled_from(PAIRS),
    window=st.sampled_from(WINDOWS),
    per_channel=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_convolutions_of_every_window(
    kinds: tuple, window: dict[str, Any], per_channel: bool, has_bias: bool, seed: int
) -> None:
    (a, b), rng = kinds, np.random.default_rng(seed)
    x, w = drawn(rng, a, 2, 4, 7, 6), drawn(rng, b, 8, 4 // window.get("group", 1), 3, 2)
    zero, w_zero = np.array(drawn(rng, a)), np.array(drawn(rng, b))
    scales = scale(rng, 8) if per_channel else scale(rng)
    w_zeros = np.full(8, w_zero if b is np.uint8 else 0, b) if per_channel else w_zero
    bias = rng.integers(-1000, 1000, 8).astype(np.int32) if has_bias else None
    inputs = [x, scale(rng), zero, w, scales, w_zeros, np.array(20, F32), np.array(drawn(rng, a)), bias]
    options = {"output_types": [element(a)], "known": (3, 4, 5)}
    (expected,) = ort_node("QLinearConv", inputs, window, **options)
    (actual,) = run_node("QLinearConv", inputs, window, **options)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual, expected)
    options = {"output_types": [TensorProto.INT32]}
    (expected,) = ort_node("ConvInteger", [x, w, zero, w_zero], window, **options)
    (actual,) = run_node("ConvInteger", [x, w, zero, w_zero], window, **options)
    np.testing.assert_array_equal(actual, expected)


def test_float8_products(rng: np.random.Generator) -> None:
    kind = ml_dtypes.float8_e4m3fn
    a, b = (rng.normal(size=s).astype(kind) for s in ((3, 5), (5, 4)))
    zero, unit = np.zeros((), kind), np.array(0.5, F32)
    (y,) = run_node("QLinearMatMul", [a, unit, zero, b, unit, zero, unit, zero], output_types=[element(kind)])
    np.testing.assert_array_equal(y.astype(F32), (a.astype(F32) @ b.astype(F32) * F32(0.5)).astype(kind).astype(F32))


# ---- element by element, pooling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
def test_operators_that_quantize_again(kind: Any, rng: np.random.Generator) -> None:
    def parameters() -> list[np.ndarray]:
        return [scale(rng), np.array(drawn(rng, kind))]

    out = {"output_types": [element(kind)], "domain": MICROSOFT}
    a, b, x = drawn(rng, kind, 4, 5, 64), drawn(rng, kind, 5, 64), drawn(rng, kind, 2, 3, 9, 8)
    unit = [np.array(1 / 255, F32), np.array(ml_dtypes.iinfo(kind).min, kind)]
    for op in ("QLinearAdd", "QLinearMul"):
        assert_same(op, [a, *parameters(), b, *parameters(), *parameters()], **out)
    assert_same("QLinearWhere", [b > 9, a, *parameters(), b, *parameters(), *parameters()], **out)
    assert_same("QLinearConcat", [*parameters(), a, *parameters(), a[:, :2], *parameters()], {"axis": 1}, **out)
    assert_same("QLinearLeakyRelu", [a, *parameters(), *parameters()], {"alpha": 0.1}, **out)
    assert_same("QLinearSigmoid", [a, *parameters(), *unit], **out)
    for channels_last in (0, 1):
        layout = {"channels_last": channels_last}
        window = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "count_include_pad": channels_last}
        assert_same("QLinearGlobalAveragePool", [x, *parameters(), *parameters()], layout, **out)
        assert_same("QLinearAveragePool", [x, *parameters(), *parameters()], layout | window, **out)


# ---- weights of few bits --------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(
    bits=st.sampled_from([2, 4, 8]),
    sizes=st.sampled_from([(64, 5, 16), (70, 6, 32), (40, 7, 16)]),
    zeros=st.sampled_from(["none", "packed", "float"]),
    flat=st.booleans(),
    seed=st.integers(0, 99),
)
def test_matmul_of_few_bits(bits: int, sizes: tuple[int, int, int], zeros: str, flat: bool, seed: int) -> None:
    rng, (k, n, block) = np.random.default_rng(seed), sizes
    blocks = -(-k // block)
    x, bias = rng.normal(size=(2, 3, k)).astype(F32), rng.normal(size=n).astype(F32)
    packed = drawn(rng, np.uint8, n, blocks, block * bits // 8)
    scales = scale(rng, n, blocks) * F32(2.0 ** (4 - bits))  # weights of one size, so that 1e-5 means the same for all
    zero = {
        "none": None,
        "packed": drawn(rng, np.uint8, n, -(-blocks * bits // 8)),
        "float": None if bits == 8 else (rng.random((n, blocks)) * 4).astype(F32),  # ONNX Runtime has no kernel for 8
    }[zeros]
    if flat:
        scales, zero = scales.reshape(-1), None if zero is None else zero.reshape(-1)
    known = (1, 2, 5) if zero is None else (1, 2, 3, 5)
    attributes = {"K": k, "N": n, "bits": bits, "block_size": block}
    assert_same("MatMulNBits", [x, packed, scales, zero, None, bias], attributes, known=known, domain=MICROSOFT)


def test_matmul_of_few_bits_with_blocks_out_of_order(rng: np.random.Generator) -> None:
    x, packed, scales = rng.normal(size=(3, 64)).astype(F32), drawn(rng, np.uint8, 5, 4, 8), scale(rng, 5, 4)
    order = rng.integers(0, 4, 64).astype(np.int32)
    attributes = {"K": 64, "N": 5, "bits": 4, "block_size": 16}
    assert_same("MatMulNBits", [x, packed, scales, None, order], attributes, known=(1, 2, 4), domain=MICROSOFT)


def test_an_omitted_weight_is_zero(rng: np.random.Generator) -> None:
    x, bias = rng.normal(size=(2, 40)).astype(F32), rng.normal(size=7).astype(F32)
    inputs = [x, np.zeros((7, 0, 8), np.uint8), scale(rng, 7, 3), None, None, bias]
    attributes = {"K": 40, "N": 7, "bits": 4, "block_size": 16}
    assert_same("MatMulNBits", inputs, attributes, known=(1, 2, 5), domain=MICROSOFT)


def test_matmul_of_few_bits_in_half_precision(rng: np.random.Generator) -> None:
    x, packed = rng.normal(size=(2, 3, 64)).astype(np.float16), drawn(rng, np.uint8, 5, 4, 8)
    inputs = [x, packed, scale(rng, 5, 4).astype(np.float16)]
    options = {"known": (1, 2), "domain": MICROSOFT}
    attributes = {"K": 64, "N": 5, "bits": 4, "block_size": 16}
    (actual,) = run_node("MatMulNBits", inputs, attributes, **options)
    (wanted,) = ort_node("MatMulNBits", inputs, attributes, **options)
    assert actual.dtype == np.float16
    np.testing.assert_allclose(actual, wanted, 4e-3, 4e-3)


def test_operands_of_few_bits_have_gradients(rng: np.random.Generator) -> None:
    x, packed, scales = rng.normal(size=(3, 32)).astype(F32), drawn(rng, np.uint8, 5, 2, 8), scale(rng, 5, 2)
    attributes = {"K": 32, "N": 5, "bits": 4, "block_size": 16}
    model = transmuter.load(one_node("MatMulNBits", [x, packed, scales], attributes, domain=MICROSOFT))

    def product(x: jax.Array, scales: jax.Array) -> jax.Array:
        return model.apply({}, {"x0": x, "x1": packed, "x2": scales})["y0"]

    check_grads(product, (jnp.asarray(x), jnp.asarray(scales)), 1, modes=["rev"], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("quant_type", [0, 1])
@pytest.mark.parametrize("sizes", [(64, 5), (33, 7)])
def test_bitsandbytes(quant_type: int, sizes: tuple[int, int], rng: np.random.Generator) -> None:
    k, n = sizes
    packed, largest = drawn(rng, np.uint8, (k * n + 1) // 2), scale(rng, -(-k * n // 16))
    attributes = {"K": k, "N": n, "block_size": 16, "quant_type": quant_type}
    options = {"known": (1, 2), "domain": MICROSOFT}
    assert_same("MatMulBnb4", [rng.normal(size=(2, 3, k)).astype(F32), packed, largest], attributes, **options)
    (columns,) = run_node("MatMulBnb4", [np.eye(k, dtype=F32), packed, largest], attributes, **options)
    (rows,) = run_node("MatMulBnb4", [np.eye(n, dtype=F32), packed, largest], {**attributes, "transB": 0}, **options)
    np.testing.assert_array_equal(rows, columns.T)


@pytest.mark.parametrize(("gather", "axis"), [(0, 1), (0, 2), (1, 2), (1, 0), (1, 1)])
@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4])
def test_gathered_blocks(gather: int, axis: int, kind: Any, rng: np.random.Generator) -> None:
    data, shape = drawn(rng, kind, 32, 32, 32), [32, 32, 32]
    shape[axis] = 2
    at = np.array([[1, -2], [31, 0]], np.int64)
    attributes = {"block_size": 16, "gather_axis": gather, "quantize_axis": axis}
    for zero in (None, drawn(rng, kind, *shape)):
        known = (0, 2) if zero is None else (0, 2, 3)
        options = {"output_types": [TensorProto.FLOAT], "known": known, "domain": MICROSOFT}
        assert_same("GatherBlockQuantized", [data, at, scale(rng, *shape), zero], attributes, **options)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gathered_bytes(bits: int, rng: np.random.Generator) -> None:
    data, at = drawn(rng, np.uint8, 20, 8 * bits), np.array([[1, -2], [19, 25]], np.int64)
    attributes = {"block_size": 16, "bits": bits}
    for zero in (None, drawn(rng, np.uint8, 20, -(-4 * bits // 8))):
        known = (0, 2) if zero is None else (0, 2, 3)
        options = {"output_types": [TensorProto.FLOAT], "known": known, "domain": MICROSOFT}
        assert_same("GatherBlockQuantized", [data, at, scale(rng, 20, 4), zero], attributes, **options)


INDICES = [np.array([0, -1]), np.array(1, np.int32), np.array([[2, -3], [99, 0]], np.int32), np.zeros(0, np.int64)]


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from([ml_dtypes.int4, ml_dtypes.uint4]),
    axes=st.sampled_from([(0, 2), (-1, 2), (1, 0), (-3, -2), (2, -3)]),
    block=st.sampled_from([16, 32]),
    at=st.sampled_from(INDICES),
    has_zero=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_gathered_along_every_axis(
    kind: Any, axes: tuple[int, int], block: int, at: np.ndarray, has_zero: bool, seed: int
) -> None:
    """Blocks are cut short: 40 elements are no whole number of them."""
    rng, shape, of = np.random.default_rng(seed), [5, 6, 7], [5, 6, 7]
    shape[axes[1]], of[axes[1]] = 40, -(-40 // block)
    inputs = [drawn(rng, kind, *shape), at, scale(rng, *of), drawn(rng, kind, *of) if has_zero else None]
    options = {"output_types": [TensorProto.FLOAT], "known": (0, 2, 3) if has_zero else (0, 2), "domain": MICROSOFT}
    attributes = {"block_size": block, "gather_axis": axes[0], "quantize_axis": axes[1]}
    (expected,) = ort_node("GatherBlockQuantized", inputs, attributes, **options)
    (actual,) = run_node("GatherBlockQuantized", inputs, attributes, **options)
    np.testing.assert_allclose(actual, expected, 1e-6)


@settings(max_examples=15, deadline=None)
@given(
    bits=st.sampled_from([2, 4, 8]),
    shape=st.sampled_from([(9, 40), (9, 3, 40)]),
    kind=st.sampled_from([F32, np.float16]),
    at=st.sampled_from(INDICES),
    has_zero=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_bytes_gathered(
    bits: int, shape: tuple[int, ...], kind: Any, at: np.ndarray, has_zero: bool, seed: int
) -> None:
    rng, (*rows, size) = np.random.default_rng(seed), shape
    zero = drawn(rng, np.uint8, *rows, -(-3 * bits // 8)) if has_zero else None
    inputs = [drawn(rng, np.uint8, *rows, size * bits // 8), at, scale(rng, *rows, 3).astype(kind), zero]
    options = {"output_types": [element(kind)], "known": (0, 2, 3) if has_zero else (0, 2), "domain": MICROSOFT}
    attributes = {"block_size": 16, "bits": bits, "quantize_axis": len(rows)}
    (expected,) = ort_node("GatherBlockQuantized", inputs, attributes, **options)
    (actual,) = run_node("GatherBlockQuantized", inputs, attributes, **options)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(actual, expected, 1e-6 if kind is F32 else 2e-3)

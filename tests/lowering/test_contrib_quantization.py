"""Quantized operators of com.microsoft: against ONNX Runtime where its CPU has them, else against plain NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, ort_node, run_node
from onnx import TensorProto

import transmuter

F32, BF16, E4M3 = np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
CONTRIB = {"domain": "com.microsoft"}
SEEDS = st.integers(0, 2**32 - 1)


def drawn(rng: np.random.Generator, kind: Any, *shape: int) -> np.ndarray:
    bounds = np.iinfo(kind)
    return np.asarray(rng.integers(bounds.min, bounds.max, shape, endpoint=True)).astype(kind)


def scale(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(rng.random(shape) * 0.1 + 0.01, F32)


def rounded(x: np.ndarray, kind: Any) -> np.ndarray:
    bounds = np.iinfo(kind)
    return np.clip(np.rint(x), bounds.min, bounds.max).astype(kind)


# ---- with a kernel on the CPU ---------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(kind=st.sampled_from([0, 1]), sizes=st.sampled_from([(32, 1), (70, 5), (128, 4)]), seed=SEEDS)
def test_matmul_of_blobs(kind: int, sizes: tuple[int, int], seed: int) -> None:
    rng, (k, n) = np.random.default_rng(seed), sizes
    blob = drawn(rng, np.uint8, n, -(-k // 32), 20 + kind)
    blob[..., :4] = scale(rng, *blob.shape[:2], 1).view(np.uint8)
    if kind == 1:
        blob[..., 4] &= 15  # a zero point is one of the codes
    inputs = [rng.normal(size=(2, 3, k)).astype(F32), blob.reshape(-1), np.array([k, n])]
    options = {"known": (1, 2), **CONTRIB}
    expected = ort_node("MatMulFpQ4", inputs, {"blk_quant_type": kind}, **options)
    assert_equal(run_node("MatMulFpQ4", inputs, {"blk_quant_type": kind}, **options), expected, atol=1e-4, rtol=1e-5)


def test_matmul_of_blobs_of_64() -> None:
    rng = np.random.default_rng(0)
    q, scales = rng.integers(0, 16, (3, 2, 2, 2, 16)), scale(rng, 3, 2)  # columns, blocks, groups of 32, halves
    data = (q[:, :, :, 0] | q[:, :, :, 1] << 4).astype(np.uint8).reshape(3, 2, 32)
    blob = np.concatenate([scales[..., None].view(np.uint8), data], -1)
    weight = (q.reshape(3, 2, 64) - 8) * scales[..., None]
    inputs = [np.eye(128, dtype=F32), blob.reshape(-1), np.array([128, 3])]
    (y,) = run_node("MatMulFpQ4", inputs, {"blk_quant_type": 2}, known=(2,), **CONTRIB)
    np.testing.assert_array_equal(y, weight.reshape(3, 128).T.astype(F32))


@settings(max_examples=15, deadline=None)
@given(kind=st.sampled_from([np.uint8, np.int8]), has_segments=st.booleans(), has_mask=st.booleans(), seed=SEEDS)
def test_quantized_embeddings(kind: Any, has_segments: bool, has_mask: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids, segments = rng.integers(0, 7, (2, 3)).astype(np.int32), rng.integers(0, 2, (2, 3)).astype(np.int32)
    tables = [drawn(rng, kind, *shape) for shape in ((7, 8), (5, 8), (2, 8), (8,), (8,))]
    scales, zeros = [scale(rng) for _ in tables], [np.asarray(drawn(rng, kind)) for _ in tables]
    if not has_segments:
        tables[2] = scales[2] = zeros[2] = None
    mask = rng.integers(0, 2, (2, 3)).astype(np.int32) if has_mask else None
    inputs = [ids, segments if has_segments else None, *tables, mask, *scales, *zeros]
    options = {"outputs": 2, "output_types": [TensorProto.FLOAT, TensorProto.INT32], **CONTRIB}
    expected = ort_node("QEmbedLayerNormalization", inputs, {"epsilon": 1e-5}, **options)
    actual = run_node("QEmbedLayerNormalization", inputs, {"epsilon": 1e-5}, **options)
    assert_equal(actual, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    bits=st.sampled_from([2, 4, 8]),
    block=st.sampled_from([16, 32, 64, 128, 256]),
    zeros=st.sampled_from(["none", "packed", "float"]),
    has_order=st.booleans(),
    has_bias=st.booleans(),
    seed=SEEDS,
)
def test_matmul_of_few_bits_has_blocks_of_every_size(
    bits: int, block: int, zeros: str, has_order: bool, has_bias: bool, seed: int
) -> None:
    rng, k, n = np.random.default_rng(seed), 280, 3
    blocks = -(-k // block)
    has_order = has_order and bits == 4 and zeros != "float"  # what ONNX Runtime has a kernel for
    zeros = "packed" if zeros == "float" and bits == 8 else zeros
    zero = {
        "none": None,
        "packed": drawn(rng, np.uint8, n, -(-blocks * bits // 8)),
        "float": (rng.random((n, blocks)) * 4).astype(F32),
    }[zeros]
    in_order = (np.arange(k) // block).astype(np.int32)
    order = None if not has_order else in_order if zeros == "packed" else rng.permutation(in_order)
    bias = rng.normal(size=n).astype(F32) if has_bias else None
    x, packed = rng.normal(size=(2, k)).astype(F32), drawn(rng, np.uint8, n, blocks, block * bits // 8)
    inputs = [x, packed, scale(rng, n, blocks), zero, order, bias]
    known = tuple(i for i, value in enumerate(inputs) if i and value is not None)
    attributes = {"K": k, "N": n, "bits": bits, "block_size": block}
    actual = run_node("MatMulNBits", inputs, attributes, known=known, **CONTRIB)
    if order is in_order:  # which changes nothing, but that ONNX Runtime takes zero points for the default
        inputs[4], known = None, tuple(i for i in known if i != 4)
    expected = ort_node("MatMulNBits", inputs, attributes, known=known, **CONTRIB)
    assert_equal(actual, expected, rtol=1e-5, atol=2e-5 * 2**bits)


# ---- without ---------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from([np.uint8, np.int8]),
    shape=st.sampled_from([(2, 3, 4), (1, 3, 1)]),
    axes=st.sampled_from([[-1], [1, -3], [0, 1, 2]]),
    keepdims=st.integers(0, 1),
    has_zeros=st.booleans(),
    seed=SEEDS,
)
def test_reductions(
    kind: Any, shape: tuple[int, ...], axes: list[int], keepdims: int, has_zeros: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, (s, t) = drawn(rng, kind, *shape), (scale(rng), scale(rng))
    zero, new_zero = (np.asarray(drawn(rng, kind)) if has_zeros else None for _ in range(2))
    attributes, over = {"axes": axes, "keepdims": keepdims}, tuple(axes) or None
    dequantized = (x.astype(np.int32) - (zero.astype(np.int32) if has_zeros else 0)).astype(F32) * s
    mean = np.mean(dequantized, over, keepdims=bool(keepdims), dtype=F32) / t
    wanted = rounded(np.rint(mean) + (new_zero.astype(np.int32) if has_zeros else 0), kind)
    kind_of = {np.uint8: TensorProto.UINT8, np.int8: TensorProto.INT8}[kind]
    (y,) = run_node("QLinearReduceMean", [x, s, zero, t, new_zero], attributes, output_types=[kind_of], **CONTRIB)
    assert (y.dtype, y.shape) == (wanted.dtype, wanted.shape)
    is_tie = np.abs(mean - np.floor(mean) - 0.5) < 1e-4  # the order of a sum decides it
    np.testing.assert_array_equal(y[~is_tie], wanted[~is_tie])
    wide = np.int32 if kind is np.int8 else np.uint32
    output = TensorProto.INT32 if kind is np.int8 else TensorProto.UINT32
    (y,) = run_node("ReduceSumInteger", [x], attributes, output_types=[output], **CONTRIB)
    assert_equal(y, np.sum(x, over, dtype=wide, keepdims=bool(keepdims)))


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from([np.uint8, np.int8]),
    shapes=st.sampled_from([((2, 3), (3,)), ((2, 3), ()), ((0, 3), (1, 3)), ((1, 3), (2, 1))]),
    has_zeros=st.tuples(st.booleans(), st.booleans()),
    seed=SEEDS,
)
def test_products_of_elements(kind: Any, shapes: tuple, has_zeros: tuple[bool, bool], seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (np.asarray(drawn(rng, kind, *shape)) for shape in shapes)
    zeros = [np.asarray(drawn(rng, kind)) if has else None for has in has_zeros]
    (y,) = run_node("MulInteger", [a, zeros[0], b, zeros[1]], output_types=[TensorProto.INT32], **CONTRIB)
    a, b = (
        x.astype(np.int32) - (0 if zero is None else zero.astype(np.int32))
        for x, zero in zip((a, b), zeros, strict=True)
    )
    assert_equal(y, a * b)


def weight_of_few_bits(rng: np.random.Generator, n: int, k: int, kind: Any) -> tuple[list[np.ndarray], np.ndarray]:
    """Packed codes and scales (of blocks of 32), and what they stand for."""
    q, scales = rng.integers(0, 16, (n, k // 32, 32)), scale(rng, n, k // 32).astype(kind)
    packed = (q[..., 0::2] | q[..., 1::2] << 4).astype(np.uint8)
    return [packed, scales], ((q - 8) * scales.astype(F32)[..., None]).reshape(n, k)


def normalized(x: np.ndarray, gain: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon) * gain


@pytest.mark.parametrize("has_skip", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norms_before_several_products(has_skip: bool, has_bias: bool) -> None:
    rng, k = np.random.default_rng(0), 64
    x, skip, gain = (rng.normal(size=s).astype(F32) for s in ((2, 3, k), (2, 3, k), (k,)))
    rows = (8, 4, 4)
    weights = [weight_of_few_bits(rng, n, k, F32) for n in rows]
    biases = [rng.normal(size=n).astype(F32) if has_bias else None for n in rows]
    operands = [[*packed, bias] for (packed, _), bias in zip(weights, biases, strict=True)]
    total = x + skip if has_skip else x
    sums = [total] if has_skip else []
    a = normalized(total, gain, 1e-6)
    products = [a @ w.T + (0 if b is None else b) for (_, w), b in zip(weights, biases, strict=True)]
    first = [x, skip if has_skip else None, gain]
    attributes = {"K": k, "block_size": 32}
    actual = run_node(
        "MatMulNBitsQkv",
        [*first, *operands[0], *operands[1], *operands[2]],
        {**attributes, "Nq": 8, "Nkv": 4},
        outputs=3 + has_skip,
        **CONTRIB,
    )
    assert_equal(actual, [y.astype(F32) for y in products + sums], rtol=1e-4, atol=1e-4)
    attributes |= {"N": 4, "epsilon": 1e-6, "activation": "silu"}
    actual = run_node(
        "MatMulNBitsMlp", [*first, *operands[1], *operands[2]], attributes, outputs=1 + has_skip, **CONTRIB
    )
    gated = products[1] / (1 + np.exp(-products[1])) * products[2]
    assert_equal(actual, [y.astype(F32) for y in [gated, *sums]], rtol=1e-4, atol=1e-4)


def test_products_without_a_norm() -> None:
    rng = np.random.default_rng(0)
    x, (gate, g), (up, u) = rng.normal(size=(3, 64)).astype(F32), *(weight_of_few_bits(rng, 4, 64, F32) for _ in "gu")
    attributes = {"K": 64, "N": 4, "block_size": 32, "activation": "silu"}
    (y,) = run_node("MatMulNBitsMlp", [x, None, None, *gate, None, *up], attributes, **CONTRIB)
    gated = x @ g.T
    assert_equal(y, (gated / (1 + np.exp(-gated)) * (x @ u.T)).astype(F32), rtol=1e-4, atol=1e-4)
    with pytest.raises(transmuter.TransmuterError, match="'gelu' is not supported"):
        run_node("MatMulNBitsMlp", [x, None, None, *gate, None, *up], {**attributes, "activation": "gelu"}, **CONTRIB)
    with pytest.raises(transmuter.TransmuterError, match="skip without norm_scale"):
        run_node("MatMulNBitsMlp", [x, x, None, *gate, None, *up], attributes, **CONTRIB)


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from([np.float16, BF16]),
    sizes=st.sampled_from([(32, 3, 16), (40, 2, 16), (24, 3, 8)]),
    has_bias=st.booleans(),
    seed=SEEDS,
)
def test_weights_of_float4(kind: Any, sizes: tuple[int, int, int], has_bias: bool, seed: int) -> None:
    rng, (k, n, block) = np.random.default_rng(seed), sizes
    codes, blocks = rng.integers(0, 16, (n, k)), -(-k // block)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    scales, overall = (rng.random((n, blocks)) * 4).astype(E4M3), scale(rng)
    x, bias = rng.normal(size=(2, k)).astype(kind), rng.normal(size=n).astype(kind) if has_bias else None
    weight = np.zeros((n, k), F32)
    for row in range(n):
        for column in range(k):
            code = codes[row, column]
            value = E2M1[code & 7] * (-1 if code & 8 else 1)
            weight[row, column] = F32(value) * (F32(scales[row, column // block]) * overall)
    wanted = x.astype(F32) @ weight.astype(kind).astype(F32).T + (bias.astype(F32) if has_bias else 0)
    inputs = [x, packed, scales.view(np.uint8), overall, None, bias]
    (y,) = run_node("MatMulBlockQuantizedFp4Weight", inputs, {"block_size": block}, **CONTRIB)
    assert_equal(y, wanted.astype(kind), rtol=1e-2, atol=1e-3)


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from([np.float16, BF16]),
    sizes=st.sampled_from([(32, 3, 16), (40, 2, 16), (128, 3, 128)]),
    has_scale=st.booleans(),
    has_bias=st.booleans(),
    seed=SEEDS,
)
def test_weights_of_float8(kind: Any, sizes: tuple[int, int, int], has_scale: bool, has_bias: bool, seed: int) -> None:
    rng, (k, n, block) = np.random.default_rng(seed), sizes
    x, w = rng.normal(size=(2, k)).astype(kind), rng.normal(size=(n, k)).astype(E4M3)
    scales, bias = scale(rng, n, -(-k // block)), rng.normal(size=n).astype(kind) if has_bias else None
    activation = np.asarray(0.001, F32) if has_scale else None  # many saturate
    a = x.astype(F32)
    if has_scale:
        a = np.clip(a / activation, -448, 448).astype(E4M3).astype(F32) * activation
    weight = np.stack([w[:, i].astype(F32) * scales[:, i // block] for i in range(k)], 1)
    wanted = a @ weight.T + (bias.astype(F32) if has_bias else 0)
    inputs = [x, w, scales, activation, bias]
    (y,) = run_node("MatMulBlockQuantizedFp8Weight", inputs, {"block_size": block}, **CONTRIB)
    assert_equal(y, wanted.astype(kind), rtol=1e-2, atol=1e-3)


@settings(max_examples=20, deadline=None)
@given(
    kinds=st.sampled_from([(E4M3, E4M3, F32), (ml_dtypes.float8_e5m2, E4M3, np.float16), (F32, F32, E4M3)]),
    transposed=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    activation=st.sampled_from(["NONE", "RELU", "GELU"]),
    has_c=st.booleans(),
    has_scales=st.booleans(),
    factors=st.tuples(st.sampled_from([1.0, 0.5]), st.sampled_from([0.0, 2.0])),
    seed=SEEDS,
)
def test_gemm_of_float8(
    kinds: tuple,
    transposed: tuple[int, int],
    activation: str,
    has_c: bool,
    has_scales: bool,
    factors: tuple[float, float],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(3, 4)).astype(kinds[0]), rng.normal(size=(4, 2)).astype(kinds[1])
    c = rng.normal(size=(3, 2)).astype(F32) if has_c else None
    scales = [scale(rng) for _ in range(3)] if has_scales else [None] * 3
    units = [F32(1) if s is None else s for s in scales]
    y = factors[0] * (a.astype(F32) * units[0]) @ (b.astype(F32) * units[1]) + (factors[1] * c if has_c else 0)
    if activation == "RELU":
        y = np.maximum(y, 0)
    if activation == "GELU":
        y = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    element = {F32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16, E4M3: TensorProto.FLOAT8E4M3FN}[kinds[2]]
    attributes = {
        "transA": transposed[0],
        "transB": transposed[1],
        "activation": activation,
        "alpha": factors[0],
        "beta": factors[1],
        "dtype": element,
    }
    inputs = [a.T.copy() if transposed[0] else a, b.T.copy() if transposed[1] else b, c, *scales]
    (actual,) = run_node("GemmFloat8", inputs, attributes, output_types=[element], **CONTRIB)
    rtol = 0.13 if kinds[2] is E4M3 else 1e-3  # a step of float8
    assert_equal(actual, (y * units[2]).astype(kinds[2]), rtol=rtol, atol=0.002)


# ---- orders of cuBLAS ------------------------------------------------------------------------------------------------


def in_order(x: np.ndarray, order: int) -> np.ndarray:
    """Matrices (batch, rows, columns) as they lie in memory in an order of cuBLAS."""
    place = {
        0: lambda r, c, rows, columns: c * rows + r,
        1: lambda r, c, rows, columns: r * columns + c,
        2: lambda r, c, rows, columns: c // 32 * 32 * rows + r * 32 + c % 32,
    }[order]
    y = np.zeros_like(x).reshape(x.shape[0], -1)
    for r in range(x.shape[1]):
        for c in range(x.shape[2]):
            y[:, place(r, c, *x.shape[1:])] = x[:, r, c]
    return y.reshape(x.shape)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("kind", [F32, np.float16])
def test_quantization_into_an_order_and_back(kind: Any, order: int) -> None:
    rng = np.random.default_rng(0)
    x, s = (rng.normal(size=(2, 3, 64)) * 9).astype(kind), scale(rng)
    wanted = rounded(x.astype(F32) / s, np.int8)
    attributes = {"order_input": 1, "order_output": order}
    (q,) = run_node("QuantizeWithOrder", [x, s], attributes, output_types=[TensorProto.INT8], **CONTRIB)
    assert_equal(q, in_order(wanted, order))
    element = TensorProto.FLOAT if kind is F32 else TensorProto.FLOAT16
    attributes = {"order_input": order, "order_output": 1, "to": element}
    (y,) = run_node("DequantizeWithOrder", [q, s], attributes, output_types=[element], **CONTRIB)
    assert_equal(y, (wanted * s).astype(kind), rtol=1e-6)


@pytest.mark.parametrize(("order_a", "order_b"), [(1, 0), (2, 2), (1, 1)])
@pytest.mark.parametrize("has_addends", [False, True])
@pytest.mark.parametrize("per_column", [False, True])
def test_products_in_an_order(order_a: int, order_b: int, has_addends: bool, per_column: bool) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (drawn(rng, np.int8, *shape) for shape in ((2, 4, 32), (32, 64), (1, 4, 64)))
    scales = scale(rng), scale(rng, 64) if per_column else scale(rng), np.asarray(3, F32), scale(rng)
    bias = rng.normal(size=64).astype(F32) if has_addends else None
    y = (a.astype(np.int32) @ b.astype(np.int32)).astype(F32) * (scales[0] * scales[1])
    if has_addends:
        y = y + bias + c * scales[3]
    inputs = [
        in_order(a, order_a),
        scales[0],
        in_order(b[None], order_b)[0],
        *scales[1:3],
        *([bias, in_order(c, order_a), scales[3]] if has_addends else []),
    ]
    attributes = {"order_A": order_a, "order_B": order_b, "order_Y": order_a}
    (actual,) = run_node("QOrderedMatMul", inputs, attributes, **CONTRIB)
    assert_equal(actual, in_order(rounded(y / scales[2], np.int8), order_a))


@pytest.mark.parametrize("order", [1, 2])
def test_layers_in_an_order(order: int) -> None:
    rng = np.random.default_rng(0)
    x, s, t = drawn(rng, np.int8, 2, 4, 32), scale(rng), np.asarray(0.02, F32)
    (y,) = run_node("QOrderedGelu", [in_order(x, order), s, t], {"order_X": order}, **CONTRIB)
    gelu = np.asarray(jax.nn.gelu(jnp.asarray(x * s), approximate=False))
    assert_equal(y, in_order(rounded(gelu / t, np.int8), order))
    gain, bias = rng.normal(size=(2, 32)).astype(np.float16)
    wide = (x * s).astype(np.float64)
    wide = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    for b in (bias, None):
        attributes = {"order_X": order, "order_Y": order}
        (y,) = run_node("QOrderedLayerNormalization", [in_order(x, order), s, gain, b, t], attributes, **CONTRIB)
        wanted = wide * gain + (0 if b is None else b)
        assert_equal(y, in_order(rounded(wanted / t, np.int8), order))


def test_orders_of_tensor_cores_are_refused() -> None:
    x, s = np.zeros((32, 32), F32), np.asarray(1, F32)
    for order in (3, 4):
        with pytest.raises(transmuter.TransmuterError, match=f"the order {order} is not supported"):
            run_node("QuantizeWithOrder", [x, s], {"order_input": 1, "order_output": order}, **CONTRIB)


# ---- gradients -------------------------------------------------------------------------------------------------------


def check(op: str, inputs: list[Any], attributes: dict[str, Any], *through: int, **options: Any) -> None:
    """The gradients of the first output with respect to the operands at the positions `through`."""
    model = transmuter.load(one_node(op, inputs, attributes, **CONTRIB, **options))
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in options.get("known", ())}

    def output(*operands: jax.Array) -> jax.Array:
        given = {f"x{i}": x for i, x in zip(through, operands, strict=True)}
        return model.apply({}, feeds | given)["y0"]

    check_grads(output, [jnp.asarray(inputs[i]) for i in through], 1, ["rev"], rtol=2e-2, atol=2e-2)


def test_gradients() -> None:
    rng = np.random.default_rng(0)
    x, gain = rng.normal(size=(2, 64)).astype(F32), rng.normal(size=64).astype(F32)
    (gate, _), (up, _) = (weight_of_few_bits(rng, 3, 64, F32) for _ in "gu")
    attributes = {"K": 64, "N": 3, "block_size": 32, "activation": "silu"}
    check("MatMulNBitsMlp", [x, x, gain, *gate, None, *up], attributes, 0, 1, 2, 4, 7)
    attributes = {"K": 64, "Nq": 3, "Nkv": 3, "block_size": 32}
    check("MatMulNBitsQkv", [0 * x, None, gain, *gate, None, *up, None, *up], attributes, 2, 4)
    blob = drawn(rng, np.uint8, 3, 2, 20)
    blob[..., :4] = scale(rng, 3, 2, 1).view(np.uint8)
    check("MatMulFpQ4", [x, blob.reshape(-1), np.array([64, 3])], {"blk_quant_type": 0}, 0, known=(2,))
    a, b, c = (rng.normal(size=s).astype(F32) for s in ((2, 4), (4, 3), (2, 3)))
    scales = [scale(rng) for _ in range(3)]
    check("GemmFloat8", [a, b, c, *scales], {"beta": 2.0, "activation": "GELU"}, 0, 1, 2, 3, 4, 5)

"""Quantized operators of ONNX Runtime's com.microsoft domain.

What has a plain counterpart dequantizes, computes in float32 and quantizes again. Products of 8-bit matrices are
exact in int32. Weights of few bits stay packed where that is as fast (see `few_bits`); otherwise they are unpacked and
dequantized by themselves, so that this is done once per compile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from transmuter.lowering import arrays, normalization
from transmuter.lowering import quantization as plain
from transmuter.lowering.arrays import Array, cast, dims, is_float
from transmuter.lowering.few_bits import in_words, product, times, times_rows, unpacked
from transmuter.lowering.linear import MatMulInteger
from transmuter.lowering.pooling import AveragePool, GlobalAveragePool
from transmuter.lowering.quantization import dequantized, in_blocks, per_row, quantized, quotient, rescaled, saturated
from transmuter.lowering.registry import operator

_DOMAIN = "com.microsoft"


@operator(domain=_DOMAIN, differentiable=False)
def QuantizeLinear(x, y_scale, y_zero_point=None, *, axis=1):
    return plain.QuantizeLinear(
        x, y_scale, y_zero_point, axis=axis, block_size=0, output_dtype=0, precision=0, saturate=1
    )


@operator(domain=_DOMAIN)
def DequantizeLinear(x, x_scale, x_zero_point=None, *, axis=1):
    return plain.DequantizeLinear(x, x_scale, x_zero_point, axis=axis, block_size=0, output_dtype=0)


# ---- element by element ---------------------------------------------------------------------------------------------


@operator(domain=_DOMAIN, differentiable=False)
def QLinearAdd(A, A_scale, A_zero_point, B, B_scale, B_zero_point, C_scale, C_zero_point=None):
    total = dequantized(A, A_scale, A_zero_point) + dequantized(B, B_scale, B_zero_point)
    return quantized(total, C_scale, C_zero_point, A.dtype)


@operator(domain=_DOMAIN, differentiable=False)
def QLinearMul(A, A_scale, A_zero_point, B, B_scale, B_zero_point, C_scale, C_zero_point=None):
    product = dequantized(A, A_scale, A_zero_point) * dequantized(B, B_scale, B_zero_point)
    return quantized(product, C_scale, C_zero_point, A.dtype)


@operator(domain=_DOMAIN, differentiable=False)
def QLinearWhere(condition, X, x_scale, x_zero_point, Y, y_scale, y_zero_point, z_scale, z_zero_point):
    picked = jnp.where(condition, dequantized(X, x_scale, x_zero_point), dequantized(Y, y_scale, y_zero_point))
    return quantized(picked, z_scale, z_zero_point, X.dtype)


@operator(domain=_DOMAIN, differentiable=False)
def QLinearConcat(Y_scale, Y_zero_point, *inputs, axis):
    parts = [dequantized(*inputs[i : i + 3]) for i in range(0, len(inputs), 3)]
    return quantized(jnp.concatenate(parts, axis), Y_scale, Y_zero_point, Y_zero_point.dtype)


@operator(domain=_DOMAIN, differentiable=False)
def QLinearLeakyRelu(X, X_scale, X_zero_point, Y_scale, Y_zero_point=None, *, alpha=0.01):
    x = dequantized(X, X_scale, X_zero_point)
    return quantized(jnp.where(x < 0, alpha * x, x), Y_scale, Y_zero_point, X.dtype)


@operator(domain=_DOMAIN, differentiable=False)
def QLinearSigmoid(X, X_scale, X_zero_point, Y_scale, Y_zero_point=None):
    return quantized(jax.nn.sigmoid(dequantized(X, X_scale, X_zero_point)), Y_scale, Y_zero_point, X.dtype)


@operator(domain=_DOMAIN, differentiable=False)
def QLinearSoftmax(X, X_scale, x_zero_point, y_scale, y_zero_point, *, opset, axis=-1):
    """Before opset 13 the axis is the first of those that are taken together."""
    axes = axis if opset >= 13 else tuple(range(axis % X.ndim, X.ndim))
    return quantized(jax.nn.softmax(dequantized(X, X_scale, x_zero_point), axes), y_scale, y_zero_point, X.dtype)


@operator(domain=_DOMAIN, differentiable=False)
def MulInteger(A, A_zero_point=None, B=None, B_zero_point=None):
    a, b = (
        cast(x, np.int32) if zero is None else cast(x, np.int32) - cast(zero, np.int32)
        for x, zero in ((A, A_zero_point), (B, B_zero_point))
    )
    return a * b


# ---- reductions -----------------------------------------------------------------------------------------------------


@operator(domain=_DOMAIN, differentiable=False)
def QLinearReduceMean(data, data_scale, data_zero_point, reduced_scale, reduced_zero_point=None, *, axes, keepdims):
    mean = jnp.mean(dequantized(data, data_scale, data_zero_point), axes or None, keepdims=bool(keepdims))
    return quantized(mean, reduced_scale, reduced_zero_point, data.dtype)


@operator(domain=_DOMAIN, differentiable=False)
def ReduceSumInteger(data, *, axes, keepdims):
    wide = np.int32 if data.dtype == np.int8 else np.uint32
    return jnp.sum(data, axes or None, dtype=wide, keepdims=bool(keepdims))


@operator(domain=_DOMAIN)
def QEmbedLayerNormalization(
    input_ids,
    segment_ids,
    word_embedding_quant,
    position_embedding_quant,
    segment_embedding,
    gamma_quant,
    beta_quant,
    mask,
    word_embedding_scale,
    position_embedding_scale,
    segment_embedding_scale,
    gamma_scale,
    beta_scale,
    word_embedding_zero_point,
    position_embedding_zero_point,
    segment_embedding_zero_point,
    gamma_zero_point,
    beta_zero_point,
    *,
    epsilon=1e-12,
):
    if segment_embedding is not None:
        segment_embedding = dequantized(segment_embedding, segment_embedding_scale, segment_embedding_zero_point)
    return normalization.EmbedLayerNormalization(
        input_ids,
        segment_ids,
        dequantized(word_embedding_quant, word_embedding_scale, word_embedding_zero_point),
        dequantized(position_embedding_quant, position_embedding_scale, position_embedding_zero_point),
        segment_embedding,
        dequantized(gamma_quant, gamma_scale, gamma_zero_point),
        dequantized(beta_quant, beta_scale, beta_zero_point),
        mask,
        epsilon=epsilon,
    )[:2]


# ---- pooling and convolution ----------------------------------------------------------------------------------------


def _channels_first(function: Callable[[Array], Array], x: Array, channels_last: int) -> Array:
    """`function`, which takes the channels of `x` to be at axis 1."""
    return jnp.moveaxis(function(jnp.moveaxis(x, -1, 1)), 1, -1) if channels_last else function(x)


@operator(domain=_DOMAIN, differentiable=False)
def QLinearAveragePool(
    X,
    x_scale,
    x_zero_point,
    y_scale,
    y_zero_point=None,
    *,
    kernel_shape,
    auto_pad="NOTSET",
    ceil_mode=0,
    channels_last=0,
    count_include_pad=0,
    pads=None,
    strides=None,
):
    def pool(x: Array) -> Array:
        return AveragePool(
            x,
            auto_pad=auto_pad,
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            dilations=None,
            kernel_shape=kernel_shape,
            pads=pads,
            strides=strides,
        )

    pooled = _channels_first(pool, dequantized(X, x_scale, x_zero_point), channels_last)
    return quantized(pooled, y_scale, y_zero_point, X.dtype)


@operator(domain=_DOMAIN, differentiable=False)
def QLinearGlobalAveragePool(X, x_scale, x_zero_point, y_scale, y_zero_point, *, channels_last=0):
    pooled = _channels_first(GlobalAveragePool, dequantized(X, x_scale, x_zero_point), channels_last)
    return quantized(pooled, y_scale, y_zero_point, X.dtype)


@operator(domain=_DOMAIN, differentiable=False)
def QLinearConv(
    x,
    x_scale,
    x_zero_point,
    w,
    w_scale,
    w_zero_point,
    y_scale,
    y_zero_point,
    B=None,
    *,
    auto_pad="NOTSET",
    channels_last=0,
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
):
    def convolve(x: Array) -> Array:
        return plain.QLinearConv(
            x,
            x_scale,
            x_zero_point,
            w,
            w_scale,
            w_zero_point,
            y_scale,
            y_zero_point,
            B,
            auto_pad=auto_pad,
            dilations=dilations,
            group=group,
            kernel_shape=kernel_shape,
            pads=pads,
            strides=strides,
        )

    return _channels_first(convolve, x, channels_last)


def _biased(product: Array, bias: Array | None, wanted: np.dtype) -> Array:
    """A product in float32, plus a bias if there is one, as `wanted`."""
    return cast(product if bias is None else product + cast(bias, np.float32), wanted)


# ---- products of 8-bit matrices -------------------------------------------------------------------------------------


@operator(domain=_DOMAIN)
def QGemm(
    A,
    a_scale,
    a_zero_point,
    B,
    b_scale,
    b_zero_point,
    C=None,
    y_scale=None,
    y_zero_point=None,
    *,
    alpha=1.0,
    transA=0,
    transB=0,
):
    total = MatMulInteger(A.T if transA else A, B.T if transB else B, a_zero_point, b_zero_point)
    if C is not None:
        total = total + C
    unit = alpha * a_scale * b_scale
    if y_scale is None:
        return rescaled(total, unit)
    return saturated(rescaled(total, quotient(unit, y_scale)), y_zero_point, y_zero_point.dtype)


@operator(domain=_DOMAIN)
def MatMulIntegerToFloat(A, B, a_scale, b_scale, a_zero_point=None, b_zero_point=None, bias=None):
    total = MatMulInteger(A, B, a_zero_point, b_zero_point)
    product = rescaled(total, rescaled(per_row(a_scale, A), b_scale))
    return _biased(product, bias, a_scale.dtype)


@operator(domain=_DOMAIN)
def DynamicQuantizeMatMul(A, B, b_scale, b_zero_point=None, bias=None):
    a, a_scale, a_zero_point = plain.DynamicQuantizeLinear(A)
    return MatMulIntegerToFloat(a, B, a_scale, b_scale, a_zero_point, b_zero_point, bias)


# ---- weights of few bits --------------------------------------------------------------------------------------------


@operator(domain=_DOMAIN)
def MatMulNBits(
    A,
    B,
    scales,
    zero_points=None,
    g_idx=None,
    bias=None,
    *,
    K,
    N,
    block_size,
    accuracy_level=0,
    bits=4,
    weight_prepacked=0,
):
    """Computes in floats whatever `accuracy_level` allows. An empty B stands for a weight of zeros. Zero points count
    with `g_idx`, too, where ONNX Runtime takes them for the default."""
    if weight_prepacked:
        raise ValueError("the weight is packed for a CUDA kernel (weight_prepacked)")
    blocks = -(-K // block_size)
    if 0 in B.shape:
        return _biased(jnp.zeros((*A.shape[:-1], N), np.float32), bias, A.dtype)
    scales = scales.reshape(N, blocks)
    if zero_points is not None:
        zeros = zero_points.reshape(N, -1)
        zero_points = zeros if is_float(zeros) else unpacked(zeros, bits)[:, :blocks]
    if g_idx is None:
        x = jnp.pad(A.reshape(math.prod(A.shape[:-1]), K), [(0, 0), (0, blocks * block_size - K)])
        parameters = (None if p is None else p.T for p in (scales, zero_points))
        y = product(x, in_words(B.reshape(N, -1)), *parameters, bits).reshape(*A.shape[:-1], N)
    else:
        zero_points = np.full(scales.shape, 2 ** (bits - 1), np.uint8) if zero_points is None else zero_points

        def weight(rows: Sequence[Array]) -> jax.Array:
            q, scale, zero = rows
            scale, zero = (jnp.take(cast(p, np.float32), g_idx[:K], axis=1) for p in (scale, zero))
            return (cast(unpacked(q, bits)[:, :K], np.float32) - zero) * scale

        y = times_rows(A, (B.reshape(N, -1), scales, zero_points), weight)
    return _biased(y, bias, A.dtype)


def _normalized(a: Array, skip: Array | None, scale: Array | None, epsilon: float) -> tuple[Array, Array | None]:
    """`a`, or `a + skip`, through a SimplifiedLayerNormalization if it has a scale, and the sum before it."""
    if scale is None:
        if skip is not None:
            raise ValueError("skip without norm_scale is not defined")
        return a, None
    if skip is None:
        return normalization.SimplifiedLayerNormalization(a, scale, epsilon=epsilon)[0], None
    y, _, _, total = normalization.SkipSimplifiedLayerNormalization(a, skip, scale, epsilon=epsilon)
    return y, total


@operator(domain=_DOMAIN)
def MatMulNBitsQkv(
    A,
    skip,
    norm_scale,
    q_B,
    q_scales,
    q_bias,
    k_B,
    k_scales,
    k_bias,
    v_B,
    v_scales,
    v_bias=None,
    *,
    K,
    Nq,
    Nkv,
    block_size,
    accuracy_level=0,
    bits=4,
    epsilon=1e-6,
):
    x, total = _normalized(A, skip, norm_scale, epsilon)
    weights = ((q_B, q_scales, q_bias, Nq), (k_B, k_scales, k_bias, Nkv), (v_B, v_scales, v_bias, Nkv))
    products = (
        MatMulNBits(x, B, scales, bias=bias, K=K, N=N, block_size=block_size, bits=bits)
        for B, scales, bias, N in weights
    )
    return *products, total


@operator(domain=_DOMAIN)
def MatMulNBitsMlp(
    A,
    skip,
    norm_scale,
    gate_B,
    gate_scales,
    gate_bias,
    up_B,
    up_scales,
    up_bias=None,
    *,
    K,
    N,
    activation,
    block_size,
    accuracy_level=0,
    bits=4,
    epsilon=1e-5,
):
    """ONNX Runtime names one activation, "silu"."""
    if activation != "silu":
        raise ValueError(f"the activation {activation!r} is not supported")
    x, total = _normalized(A, skip, norm_scale, epsilon)
    gate, up = (
        MatMulNBits(x, B, scales, bias=bias, K=K, N=N, block_size=block_size, bits=bits)
        for B, scales, bias in ((gate_B, gate_scales, gate_bias), (up_B, up_scales, up_bias))
    )
    return jax.nn.silu(gate) * up, total


_BLOCKS = (32, 32, 64)
"""How many elements the blocks of MatMulFpQ4 have, by `blk_quant_type`."""


@operator(domain=_DOMAIN, known=("B_shape",))
def MatMulFpQ4(A, B, B_shape, *, blk_quant_type=1):
    """A block of a column is its scale, in type 1 its zero point, and its elements: the low halves of 16 bytes are 16
    of them, the high halves the next 16. ONNX Runtime takes type 2 for type 1."""
    if blk_quant_type not in range(len(_BLOCKS)):
        raise ValueError(f"blk_quant_type is {blk_quant_type}, not 0, 1 or 2")
    block, (k, n) = _BLOCKS[blk_quant_type], dims(B_shape)

    def weight(blob: Array) -> jax.Array:
        scale, blob = lax.bitcast_convert_type(blob[..., :4], np.float32), blob[..., 4:]
        zero, blob = (blob[..., :1], blob[..., 1:]) if blk_quant_type == 1 else (np.uint8(8), blob)
        halves = unpacked(blob, 4).reshape(blob.shape[0], -1, 16, 2)
        q = jnp.swapaxes(halves, -1, -2).reshape(*scale.shape, block)
        return dequantized(q, scale[..., None], zero).reshape(blob.shape[0], -1)[:, :k]

    return times_rows(A, B.reshape(n, -(-k // block), -1), weight)


# ---- weights of small floats ----------------------------------------------------------------------------------------

_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
"""What four bits stand for as a float4."""


@operator(domain=_DOMAIN)
def MatMulBlockQuantizedFp4Weight(A, B, weight_scale, weight_scale_2, input_scale=None, bias=None, *, block_size=16):
    """The weight is rounded to the dtype of A; `input_scale` changes nothing."""

    def weight(rows: Sequence[Array]) -> jax.Array:
        packed, scale = rows
        scale = cast(lax.bitcast_convert_type(scale, ml_dtypes.float8_e4m3fn), np.float32) * weight_scale_2
        levels = jnp.asarray(_E2M1)[unpacked(packed, 4)]
        return cast(levels * in_blocks(scale, block_size, 1, levels.shape[1]), A.dtype)

    return _biased(times_rows(A, (B, weight_scale), weight), bias, A.dtype)


@operator(domain=_DOMAIN)
def MatMulBlockQuantizedFp8Weight(A, B, b_scale, a_scale=None, bias=None, *, block_size=128):
    """An activation beyond the range of float8 saturates."""
    x = A if a_scale is None else dequantized(quantized(A, a_scale, None, B.dtype), a_scale)

    def weight(rows: Sequence[Array]) -> jax.Array:
        small, scale = rows
        return cast(small, np.float32) * in_blocks(scale, block_size, 1, small.shape[1])

    return _biased(times_rows(x, (B, b_scale), weight), bias, A.dtype)


@operator(domain=_DOMAIN)
def GemmFloat8(
    A,
    B,
    C=None,
    scaleA=None,
    scaleB=None,
    scaleY=None,
    *,
    activation="NONE",
    alpha=1.0,
    beta=0.0,
    dtype=1,
    transA=0,
    transB=0,
):
    """Scales multiply, also that of the result, as in cuBLAS. GELU is the approximation by tanh; a float8 saturates."""
    activations = {"NONE": lambda y: y, "RELU": jax.nn.relu, "GELU": jax.nn.gelu}
    if activation not in activations:
        raise ValueError(f"the activation {activation!r} is not one of {[*activations]}")
    a, b = cast(A.T if transA else A, np.float32), cast(B if transB else B.T, np.float32)
    y = alpha * times(a if scaleA is None else a * scaleA, b if scaleB is None else b * scaleB)
    y = activations[activation](y if C is None else y + beta * cast(C, np.float32))
    y = y if scaleY is None else y * scaleY
    return (
        saturated(y, None, arrays.dtype(dtype)) if arrays.dtype(dtype).itemsize == 1 else cast(y, arrays.dtype(dtype))
    )


_FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
_NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)
_FOUR_BITS = (np.concatenate([_FP4, -_FP4]), _NF4)
"""What four bits stand for, by `quant_type`."""


@operator(domain=_DOMAIN)
def MatMulBnb4(A, B, absmax, *, K, N, block_size, quant_type, training_mode=0, transB=1):
    levels = jnp.asarray(_FOUR_BITS[quant_type])[unpacked(B.reshape(-1), 4, highest_first=True)[: N * K]]
    weight = levels * in_blocks(cast(absmax.reshape(-1), np.float32), block_size, 0, N * K)
    return cast(times(A, weight.reshape(N, K), 1 if transB else 0), A.dtype)


@operator(domain=_DOMAIN)
def GatherBlockQuantized(
    data, indices, scales, zero_points=None, *, bits=4, block_size=128, gather_axis=0, quantize_axis=1
):
    """Dequantizes what it has gathered, not the whole table. Indices out of range give zeros."""
    gather, axis = gather_axis % data.ndim, quantize_axis % data.ndim
    rows, block = data.shape[gather], block_size or data.shape[axis]
    inside = (indices >= -rows) & (indices < rows)
    at = jnp.where(inside, jnp.where(indices < 0, indices + rows, indices), 0)
    is_packed = data.dtype == np.uint8

    def gathered(table: Array, at: Array) -> Array:
        return jnp.take(table, at if table.shape[gather] > 1 else jnp.zeros_like(at), axis=gather, mode="clip")

    q, block_at = gathered(data, at), at // block if gather == axis else at
    scale = gathered(scales, block_at)
    zero = gathered(zero_points, block_at) if zero_points is not None else None
    if is_packed:
        q = unpacked(q, bits)
        zero = np.full((1,) * q.ndim, 2 ** (bits - 1), np.uint8) if zero is None else unpacked(zero, bits)
        zero = zero[..., : scale.shape[-1]]
    if gather != axis:
        axis += indices.ndim - 1 if axis > gather else 0
        scale = in_blocks(scale, block, axis, q.shape[axis])
        zero = zero if zero is None or zero.size == 1 else in_blocks(zero, block, axis, q.shape[axis])
    result = cast(dequantized(q, scale, zero), scales.dtype)
    inside = inside.reshape((1,) * gather + inside.shape + (1,) * (data.ndim - gather - 1))
    return jnp.where(inside, result, 0)


# ---- 8-bit matrices in an order of cuBLAS ---------------------------------------------------------------------------


def _reordered(x: Array, order: int, *, by_rows: bool) -> Array:
    """Matrices from one of cuBLAS's orders (0 by columns, 1 by rows, 2 by rows of 32 columns at a time) to that by rows
    which their shape says, or the other way."""
    *batch, rows, columns = x.shape if x.ndim > 1 else (1, *x.shape)
    width = {0: 1, 1: columns, 2: 32}.get(order)
    if width is None or columns % width:
        raise ValueError(f"the order {order} is not supported for {columns} columns")
    outer = (columns // width, rows) if by_rows else (rows, columns // width)
    return jnp.swapaxes(x.reshape(*batch, *outer, width), -2, -3).reshape(x.shape)


def _from_order(x: Array, order: int) -> Array:
    return _reordered(x, order, by_rows=True)


def _to_order(x: Array, order: int) -> Array:
    return _reordered(x, order, by_rows=False)


_INT8 = np.dtype(np.int8)


@operator(domain=_DOMAIN, differentiable=False)
def QuantizeWithOrder(input, scale_input, *, order_input, order_output):
    """The orders COL4_4R2_8C and COL32_2R_4R4 are not supported, here and in the operators below."""
    return _to_order(quantized(_from_order(input, order_input), scale_input, None, _INT8), order_output)


@operator(domain=_DOMAIN)
def DequantizeWithOrder(input, scale_input, *, order_input, order_output, to):
    plain_order = _to_order(_from_order(input, order_input), order_output)
    return cast(dequantized(plain_order, scale_input), arrays.dtype(to))


@operator(domain=_DOMAIN, differentiable=False)
def QOrderedMatMul(A, scale_A, B, scale_B, scale_Y, bias=None, C=None, scale_C=None, *, order_A, order_B, order_Y):
    y = rescaled(MatMulInteger(_from_order(A, order_A), _from_order(B, order_B)), rescaled(scale_A, scale_B))
    y = y if bias is None else y + bias
    y = y if C is None else y + dequantized(_from_order(C, order_Y), scale_C)
    return _to_order(quantized(y, scale_Y, None, _INT8), order_Y)


@operator(domain=_DOMAIN, differentiable=False)
def QOrderedGelu(X, scale_X, scale_Y, *, order_X=None, order_Y=None):
    if order_X != order_Y and None not in (order_X, order_Y):
        raise ValueError(f"order_Y is {order_Y}, but order_X {order_X}")
    return quantized(jax.nn.gelu(dequantized(X, scale_X), approximate=False), scale_Y, None, _INT8)


@operator(domain=_DOMAIN, differentiable=False)
def QOrderedLayerNormalization(X, scale_X, scale, B, scale_Y, *, axis=-1, epsilon=1e-5, order_X=1, order_Y=1):
    x = dequantized(_from_order(X, order_X), scale_X)
    scale, B = (None if v is None else cast(v, np.float32) for v in (scale, B))
    y, _, _ = normalization.LayerNormalization(x, scale, B, axis=axis, epsilon=epsilon, stash_type=1)
    return _to_order(quantized(y, scale_Y, None, _INT8), order_Y)

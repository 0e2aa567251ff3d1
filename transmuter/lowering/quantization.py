"""Quantized tensors: small integers, or small floats, that stand for `(q - zero_point) * scale`.

Everything here is one of two steps, `quantized` and `dequantized`, around arithmetic in float32 or int32. Scales and
zero points belong to the whole tensor, to one axis, or to blocks along an axis; `spread` lines them up with the tensor.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, dtype, in_jax, is_float, readable
from transmuter.lowering.convolution import ConvInteger
from transmuter.lowering.linear import MatMulInteger, matmul
from transmuter.lowering.named import named
from transmuter.lowering.registry import operator

DYNAMIC = "dynamic quantization"
"""Its name in a trace, where a kernel can take its place."""


def spread(parameter: Array, shape: tuple, axis: int | None, block_size: int | None = None) -> Array:
    """A scale or zero point, in a form that broadcasts with the tensor of `shape` which it belongs to."""
    if parameter.size == 1 and not block_size:
        return parameter.reshape(())
    if axis is None:
        raise ValueError(f"a scale or zero point of shape {parameter.shape}, but no axis that it belongs to")
    if not -len(shape) <= axis < len(shape) and len(shape) > 1:
        raise ValueError(f"axis {axis} is not one of the {len(shape)} axes of the operand")
    axis = axis % len(shape) if len(shape) > 1 else 0
    if block_size:
        return in_blocks(parameter, block_size, axis, shape[axis])
    if parameter.ndim != 1 or parameter.shape[0] != shape[axis]:
        raise ValueError(f"a scale or zero point of shape {parameter.shape} does not fit axis {axis} of {shape}")
    return parameter.reshape((-1,) + (1,) * (len(shape) - axis - 1))


def in_blocks(parameter: Array, block_size: int, axis: int, size: int) -> Array:
    """A parameter with one value for each block of `block_size` elements along an axis of length `size`, element by
    element. The last block may be cut short."""
    blocks = parameter.shape[axis]
    if blocks != -(-size // block_size):
        raise ValueError(f"{blocks} blocks of {block_size} elements do not make up {size}")
    shape = parameter.shape
    repeated = jnp.broadcast_to(
        jnp.expand_dims(parameter, axis + 1), (*shape[: axis + 1], block_size, *shape[axis + 1 :])
    ).reshape(*shape[:axis], blocks * block_size, *shape[axis + 1 :])
    return lax.slice_in_dim(repeated, 0, size, axis=axis)


def quotient(x: Array, scale: Array) -> Array:
    """`x / scale`, correctly rounded.

    XLA multiplies by the reciprocal of a divisor that it broadcasts. That is an ulp off: where the quotient is halfway
    between two integers, a whole step. A divisor that depends on `x` it leaves alone.
    """
    x, scale = cast(x, np.float32), cast(scale, np.float32)
    return x / jnp.where(jnp.isnan(x), 1, scale)


def saturated(value: Array, zero_point: Array | None, target: np.dtype, saturate: int | None = 1) -> Array:
    """`value + zero_point` as `target`, rounded (half to even) before the addition and clipped to the target's range.

    Small floats overflow to NaN or infinity if not `saturate`.
    """
    zero = 0 if zero_point is None else cast(zero_point, value.dtype)
    if not jnp.issubdtype(target, jnp.floating):
        bounds = jnp.iinfo(target)
        return cast(jnp.clip(jnp.round(value), bounds.min - zero, bounds.max - zero) + zero, target)
    largest = float(ml_dtypes.finfo(target).max)
    value = jnp.clip(value + zero, -largest, largest) if saturate else value + zero
    return cast(value if in_jax(target) else readable(value, "x"), target)


def quantized(x: Array, scale: Array, zero_point: Array | None, target: np.dtype, saturate: int | None = 1) -> Array:
    """`x / scale + zero_point` as `target`; scale and zero point broadcast with `x`."""
    return saturated(quotient(x, scale), zero_point, target, saturate)


def dequantized(x: Array, scale: Array, zero_point: Array | None = None) -> jax.Array:
    """`(x - zero_point) * scale` in float32."""
    if zero_point is not None:
        wide = np.float32 if is_float(x) else np.int32
        x = cast(x, wide) - cast(zero_point, wide)
    return cast(x, np.float32) * cast(scale, np.float32)


@operator(differentiable=False)
def QuantizeLinear(x, y_scale, y_zero_point=None, *, axis, saturate, block_size, output_dtype, precision):
    """The division is done in float32 also where scale or `precision` is a half type, and then rounded to that type,
    which ONNX Runtime leaves out for blocks."""
    target = dtype(output_dtype) if output_dtype else np.dtype(np.uint8) if y_zero_point is None else y_zero_point.dtype
    if y_zero_point is not None:
        if y_zero_point.dtype != target:
            raise ValueError(f"output_dtype says {target}, the zero point {y_zero_point.dtype}")
        y_zero_point = spread(y_zero_point, x.shape, axis, block_size)
    divided = quotient(x, spread(y_scale, x.shape, axis, block_size))
    computed_in = dtype(precision) if precision else y_scale.dtype
    if jnp.issubdtype(computed_in, jnp.floating) and jnp.finfo(computed_in).bits == 16:
        divided = cast(cast(divided, computed_in), np.float32)
    return saturated(divided, y_zero_point, target, saturate)


@operator()
def DequantizeLinear(x, x_scale, x_zero_point=None, *, axis, block_size, output_dtype):
    """The multiplication is done in float32 also where the result has a half type."""
    if x_zero_point is not None:
        x_zero_point = spread(x_zero_point, x.shape, axis, block_size)
    result = dequantized(x, spread(x_scale, x.shape, axis, block_size), x_zero_point)
    return cast(result, dtype(output_dtype) if output_dtype else x_scale.dtype)


@operator()
def DynamicQuantizeLinear(x):
    """An all-zero operand has scale 1, as in ONNX Runtime; the specification leaves 0 / 0 open."""
    return named(DYNAMIC, dynamically_quantized, x)


def dynamically_quantized(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Elements as uint8, scale and zero point."""
    low, high = jnp.min(x, initial=0), jnp.max(x, initial=0)
    scale = jnp.where(low == high, 1, quotient(high - low, jnp.asarray(255, x.dtype)))
    zero_point = saturated(quotient(-low, scale), None, np.dtype(np.uint8))
    return quantized(x, scale, zero_point, zero_point.dtype), scale, zero_point


def per_row(parameter: Array, matrix: Array) -> Array:
    """A scale or zero point of the rows of `matrix`: a vector becomes a column."""
    return parameter[:, None] if parameter.ndim == 1 and parameter.size > 1 and matrix.ndim > 1 else parameter


def rescaled(total: Array, multiplier: Array) -> jax.Array:
    """An int32 or float32 accumulator times what its unit is worth."""
    return cast(total, np.float32) * cast(multiplier, np.float32)


@operator(differentiable=False)
def QLinearMatMul(a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point):
    if is_float(a) or is_float(b):
        one = np.float32(1)
        total = matmul(dequantized(a, one, per_row(a_zero_point, a)), dequantized(b, one, b_zero_point))
    else:
        total = MatMulInteger(a, b, a_zero_point, b_zero_point)
    multiplier = quotient(rescaled(per_row(a_scale, a), b_scale), y_scale)
    return saturated(rescaled(total, multiplier), y_zero_point, y_zero_point.dtype)


@operator()
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
    auto_pad,
    dilations,
    group,
    kernel_shape,
    pads,
    strides,
):
    window = {
        "auto_pad": auto_pad,
        "dilations": dilations,
        "kernel_shape": kernel_shape,
        "pads": pads,
        "strides": strides,
    }
    total = ConvInteger(x, w, x_zero_point, w_zero_point, group=group, **window)
    if B is not None:
        total = total + spread(B, total.shape, 1)
    multiplier = spread(quotient(x_scale * w_scale, y_scale), total.shape, 1)
    return saturated(rescaled(total, multiplier), y_zero_point, y_zero_point.dtype)

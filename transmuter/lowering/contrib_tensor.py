"""com.microsoft: operators on tensors that are older siblings of standard ones, and small ones that have none."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from transmuter.lowering import creation, indexing, shape
from transmuter.lowering.arrays import Array, cast, dims, xp
from transmuter.lowering.linear import activated
from transmuter.lowering.random import Dropout_12
from transmuter.lowering.registry import operator

operator = functools.partial(operator, domain="com.microsoft")

# ---- siblings of standard operators --------------------------------------------------------------------------------


@operator()
def SampleOp(X):
    return X


operator("GatherND")(indexing.GatherND)


@operator(known=("pads",))
def Pad(data, pads, value=None, *, mode="constant"):
    return shape.Pad_11(data, pads, value, mode=mode)


@operator(known=("start", "limit", "delta"), differentiable=False)
def Range(start, limit, delta=None):
    return creation.Range(start, limit, np.ones_like(start) if delta is None else delta)


@operator()
def Trilu(X, k=None, *, upper=1):
    return shape.Trilu(X, k, upper=upper)


@operator(known=("axis",))
def ExpandDims(X, axis):
    return shape.Unsqueeze(X, axes=dims(axis))


@operator(reads=("x",))
def Unique(x):
    """NaNs are equal to each other; ONNX Runtime counts each for itself."""
    y, _, idx, counts = indexing.Unique(x, axis=None, sorted=0)
    return y, idx, counts


@operator()
def UnfoldTensor(input, *, size, dim=-1, step=1):
    dim = dim % input.ndim
    if size > input.shape[dim]:
        raise ValueError(f"slices of {size} elements do not fit a dimension of {input.shape[dim]}")
    starts = np.arange(0, input.shape[dim] - size + 1, step)
    return xp.moveaxis(xp.take(input, starts[:, None] + np.arange(size), dim), dim + 1, -1)


@operator(known=("padding_idx", "scale_grad_by_freq"))
def TorchEmbedding(weight, indices, padding_idx=None, scale_grad_by_freq=None):
    rows = indexing.Gather(weight, indices, axis=0)
    if scale_grad_by_freq is not None and scale_grad_by_freq.item():
        flat = indices.reshape(-1)
        count = jnp.zeros(weight.shape[0], np.int32).at[flat].add(1)[flat]
        rows = _with_gradient_scaled(rows, 1 / cast(count, rows.dtype).reshape(*indices.shape, 1))
    if padding_idx is not None:
        is_padding = indices == cast(padding_idx, indices.dtype).reshape(())
        rows = xp.where(is_padding[..., None], jax.lax.stop_gradient(rows), rows)
    return rows


@jax.custom_jvp
def _with_gradient_scaled(x: Array, factor: Array) -> Array:
    return x


@_with_gradient_scaled.defjvp
def _(primals, tangents):
    return primals[0], tangents[0] * primals[1]


# ---- numbers -------------------------------------------------------------------------------------------------------


@operator(differentiable=False)
def IsAllFinite(*input, isinf_only=0, isnan_only=0):
    if isinf_only and isnan_only:
        raise ValueError("isinf_only and isnan_only exclude each other")
    wrong = jnp.isinf if isinf_only else jnp.isnan if isnan_only else lambda x: jnp.logical_not(jnp.isfinite(x))
    return jnp.logical_not(jnp.any(jnp.stack([jnp.any(wrong(x)) for x in input])))


@operator()
def Inverse(X):
    wide = cast(jnp.asarray(X), np.promote_types(X.dtype, np.float32))
    return cast(jnp.linalg.inv(wide), X.dtype)


@operator()
def CDist(A, B, *, metric="sqeuclidean"):
    """Only the Euclidean distance and its square are defined, as in ONNX Runtime. The distance of equal points has the
    gradient 0."""
    if metric not in ("euclidean", "sqeuclidean"):
        raise ValueError(f"the metric {metric!r} is not supported, only euclidean and sqeuclidean")
    difference = jnp.expand_dims(A, 1) - B
    square = jnp.sum(difference * difference, axis=-1)
    apart = square > 0
    return square if metric == "sqeuclidean" else jnp.where(apart, jnp.sqrt(jnp.where(apart, square, 1)), square)


@operator()
def BiasSoftmax(data, bias, *, is_inner_broadcast, axis=1):
    """`bias` has the outer dimensions of the batch of `data` if the broadcast is an inner one, else the inner ones."""
    axis = axis % data.ndim
    batch, elements = math.prod(data.shape[:axis]), math.prod(data.shape[axis:])
    rows = jnp.reshape(bias, (-1, elements))
    times = batch // max(len(rows), 1)
    rows = jnp.repeat(rows, times, axis=0) if is_inner_broadcast else jnp.tile(rows, (times, 1))
    return activated(data + rows.reshape(data.shape), "Softmax", axis=axis)


# ---- images --------------------------------------------------------------------------------------------------------


@operator(known=("crop_size",))
def CropAndResize(X, rois, batch_indices, crop_size, *, mode="bilinear", extrapolation_value=0.0):
    """The corners of a region lie on the outermost pixels of its crop; one pixel stands for the middle."""
    if mode not in ("bilinear", "nearest"):
        raise ValueError(f"the mode is {mode!r}, not bilinear or nearest")
    y, inside = jnp.take(X, batch_indices, axis=0, mode="clip"), True
    for axis, length in zip((2, 3), dims(crop_size)):
        size = X.shape[axis]
        at = _between(rois[:, axis - 2] * (size - 1), rois[:, axis] * (size - 1), length)
        at = jnp.expand_dims(at, [i for i in range(4) if i not in (0, axis)])
        inside = inside & (at >= 0) & (at <= size - 1)
        low = jnp.floor(at)
        share = at - low
        below, above = (
            jnp.take_along_axis(y, cast(jnp.clip(i, 0, size - 1), np.int32), axis) for i in (low, jnp.ceil(at))
        )
        y = below + (above - below) * share if mode == "bilinear" else jnp.where(share < 0.5, below, above)
    return jnp.where(inside, y, jnp.asarray(extrapolation_value, X.dtype))


def _between(start: Array, end: Array, count: int) -> Array:
    """`count` positions from each start to its end, [N, count]; the middle if there is one."""
    start, end = start[:, None], end[:, None]
    if count == 1:
        return (start + end) / 2
    steps = np.arange(count)
    inner = start + steps.astype(start.dtype) * ((end - start) / (count - 1))
    return jnp.where(steps == count - 1, end, inner)


# ---- dropout -------------------------------------------------------------------------------------------------------


@operator()
def BiasDropout(data, bias, residual=None, ratio=None, training_mode=None, *, seed=None, key):
    y, kept = Dropout_12(data + bias, ratio, training_mode, seed=seed, key=key, output_count=2)
    return y if residual is None else y + residual, kept


@operator()
def BitmaskBiasDropout(data, bias, residual=None, ratio=None, training_mode=None, *, seed=None, key):
    y, kept = BiasDropout(data, bias, residual, ratio, training_mode, seed=seed, key=key)
    return y, _packed(kept)


@operator()
def BitmaskDropout(data, ratio=None, training_mode=None, *, seed=None, key):
    y, kept = Dropout_12(data, ratio, training_mode, seed=seed, key=key, output_count=2)
    return y, _packed(kept)


def _packed(bits: jax.Array) -> jax.Array:
    """Bits as 32-bit words, the first one lowest; those after the last element are set."""
    bits = bits.reshape(-1)
    words = jnp.pad(bits, (0, -bits.size % 32), constant_values=True).reshape(-1, 32)
    return jnp.sum(cast(words, np.uint32) << np.arange(32, dtype=np.uint32), axis=1, dtype=np.uint32)

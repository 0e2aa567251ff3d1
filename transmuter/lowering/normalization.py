"""Normalization: by batch, instance, group, layer and root mean square, and what optimisers fuse with it.

Statistics are taken in float32 at least, and in two passes: the mean of the squares minus the square of the mean would
cancel where the mean is large, for a quarter of the time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, dtype
from transmuter.lowering.platform import on_cpu
from transmuter.lowering.registry import operator


def _wide(*xs: Array) -> list[Array]:
    """Arrays in the widest of their dtypes, float32 at least."""
    widest = functools.reduce(np.promote_types, [x.dtype for x in xs], np.dtype(np.float32))
    return [cast(x, widest) for x in xs]


def _unit(x: Array, axes: Sequence[int], epsilon: float) -> tuple[jax.Array, jax.Array]:
    """`x` with a root mean square of 1 over `axes`, and the factor that gave it."""
    factor = lax.rsqrt(jnp.mean(x * x, axes, keepdims=True) + epsilon)
    return x * factor, factor


def _standard(x: Array, axes: Sequence[int], epsilon: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`x` with mean 0 and variance 1 over `axes`, its mean, and one over its standard deviation."""
    mean = jnp.mean(x, axes, keepdims=True)
    normalized, factor = _unit(x - mean, axes, epsilon)
    return normalized, mean, factor


def _axes_from(axis: int, x: Array) -> tuple[int, ...]:
    return tuple(range(axis % x.ndim, x.ndim))


def _per_channel(v: Array, x: Array) -> Array:
    """A value for each channel of `x`, in a shape that lines up with axis 1 of `x` (the only one of a vector)."""
    return v.reshape(-1, *[1] * (x.ndim - 2))


# ---- batch ---------------------------------------------------------------------------------------------------------


def _batch(x, scale, bias, mean, var, epsilon, momentum, *, training, spatial=True):
    """Y, and in training the running mean and variance, and the batch's own."""
    shape = (-1, *[1] * (x.ndim - 2)) if spatial else x.shape[1:]
    out = x.dtype
    x, scale, bias, old_mean, old_var = _wide(x, scale, bias, mean, var)
    scale, bias = scale.reshape(shape), bias.reshape(shape)
    if not training:
        factor = scale * lax.rsqrt(old_var.reshape(shape) + epsilon)
        return cast(x * factor + (bias - old_mean.reshape(shape) * factor), out)
    channels_last = spatial and x.ndim > 2 and on_cpu()  # as it convolves: a step of ResNet-18 takes 0.8 of the time
    if channels_last:
        x, scale, bias = jnp.moveaxis(x, 1, -1), scale.reshape(-1), bias.reshape(-1)
    axes = (0,) if not spatial else tuple(range(x.ndim - 1)) if channels_last else (0, *range(2, x.ndim))
    new_mean = jnp.mean(x, axes, keepdims=True)
    centered = x - new_mean
    new_var = jnp.mean(centered * centered, axes, keepdims=True)
    y = centered * (scale * lax.rsqrt(new_var + epsilon)) + bias
    new_mean, new_var = (s.reshape(old_mean.shape) for s in (new_mean, new_var))
    return (
        cast(jnp.moveaxis(y, -1, 1) if channels_last else y, out),
        cast(old_mean * momentum + new_mean * (1 - momentum), mean.dtype),
        cast(old_var * momentum + new_var * (1 - momentum), var.dtype),
        cast(new_mean, mean.dtype),
        cast(new_var, var.dtype),
    )


@operator()
def BatchNormalization(
    X, scale, B, mean, var, *, epsilon, momentum, is_test, spatial, output_count, consumed_inputs=None
):
    """A node with one output is in test mode whatever `is_test` says: the schema lists five for training."""
    training = not is_test and output_count > 1
    return _batch(X, scale, B, mean, var, epsilon, momentum, training=training, spatial=spatial)


@operator()
def BatchNormalization_7(X, scale, B, mean, var, *, epsilon, momentum, output_count, spatial=1):
    """Nodes with more than one output train, on the variance of the population, as version 14 says explicitly."""
    return _batch(X, scale, B, mean, var, epsilon, momentum, training=output_count > 1, spatial=spatial)


@operator()
def BatchNormalization_14(X, scale, B, input_mean, input_var, *, epsilon, momentum, training_mode):
    outputs = _batch(X, scale, B, input_mean, input_var, epsilon, momentum, training=training_mode)
    return outputs[:3] if training_mode else outputs


# ---- instance, group -----------------------------------------------------------------------------------------------


def _group(x: Array, groups: int, epsilon: float) -> Array:
    """`x` with each of its groups of channels normalized, in the dtype of `x`."""
    if x.shape[1] % groups:
        raise ValueError(f"{x.shape[1]} channels do not divide into {groups} groups")
    (wide,) = _wide(x)
    grouped = wide.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return cast(_standard(grouped, _axes_from(2, grouped), epsilon)[0].reshape(x.shape), x.dtype)


@operator()
def InstanceNormalization(input, scale, B, *, epsilon, consumed_inputs=None):
    return _group(input, input.shape[1], epsilon) * _per_channel(scale, input) + _per_channel(B, input)


@operator()
def GroupNormalization(X, scale, bias, *, epsilon, num_groups):
    """Scale and bias are those of groups until version 21, which has them per channel."""
    scale, bias = (jnp.repeat(v, X.shape[1] // num_groups) for v in (scale, bias))
    return GroupNormalization_21(X, scale, bias, epsilon=epsilon, num_groups=num_groups)


@operator()
def GroupNormalization_21(X, scale, bias, *, epsilon, num_groups, stash_type=1):
    return _group(X, num_groups, epsilon) * _per_channel(scale, X) + _per_channel(bias, X)


@operator(domain="com.microsoft")
def SkipGroupNorm(X, gamma, beta, skip=None, bias=None, *, groups, activation, epsilon=1e-5, channels_last=1):
    out = X.dtype
    (total,) = _wide(X)
    if skip is not None:
        total = total + cast(skip.reshape(skip.shape[0], *[1] * (4 - skip.ndim), *skip.shape[1:]), total.dtype)
    if bias is not None:
        total = total + cast(bias if channels_last else _per_channel(bias, X), total.dtype)
    x = jnp.moveaxis(total, -1, 1) if channels_last else total
    gamma, beta = (_per_channel(cast(v, x.dtype), x) for v in (gamma, beta))
    y = _group(x, groups, epsilon) * gamma + beta
    y = jax.nn.silu(y) if activation else y
    return cast(jnp.moveaxis(y, 1, -1) if channels_last else y, out), cast(total, out)


@operator(domain="com.microsoft")
def GroupNorm(X, gamma, beta, *, groups, activation, epsilon=1e-5, channels_last=1):
    return SkipGroupNorm(
        X, gamma, beta, groups=groups, activation=activation, epsilon=epsilon, channels_last=channels_last
    )[0]


# ---- layer, root mean square ---------------------------------------------------------------------------------------


@operator()
def LayerNormalization(X, Scale, B=None, *, axis, epsilon, stash_type):
    (wide,) = _wide(X)
    normalized, mean, factor = _standard(wide, _axes_from(axis, X), epsilon)
    y = cast(normalized, X.dtype) * Scale
    return y if B is None else y + B, cast(mean, dtype(stash_type)), cast(factor, dtype(stash_type))


@operator("SimplifiedLayerNormalization")
@operator(domain="com.microsoft")
def SimplifiedLayerNormalization(X, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """The result has the dtype of `scale`. Exporters also write this operator into ai.onnx, which does not have it."""
    (wide,) = _wide(X)
    normalized, factor = _unit(wide, _axes_from(axis, X), epsilon)
    return cast(normalized, scale.dtype) * scale, cast(factor, dtype(stash_type))


@operator()
def RMSNormalization(X, scale, *, axis, epsilon, stash_type):
    return SimplifiedLayerNormalization(X, scale, axis=axis, epsilon=epsilon, stash_type=stash_type)[0]


def _sum(*xs: Array | None) -> Array:
    """The operands that are there, added in float32 at least."""
    return functools.reduce(jnp.add, _wide(*[x for x in xs if x is not None]))


@operator(domain="com.microsoft")
def SkipLayerNormalization(input, skip, gamma, beta=None, bias=None, *, epsilon=1e-12):
    total = _sum(input, skip, bias)
    normalized, mean, factor = _standard(total, (-1,), epsilon)
    y = cast(normalized, gamma.dtype) * gamma
    return y if beta is None else y + beta, mean, factor, cast(total, input.dtype)


@operator(domain="com.microsoft")
def SkipSimplifiedLayerNormalization(input, skip, gamma, bias=None, *, epsilon=1e-12):
    """There is no mean to return."""
    total = _sum(input, skip, bias)
    normalized, factor = _unit(total, (-1,), epsilon)
    return cast(normalized, gamma.dtype) * gamma, None, factor, cast(total, input.dtype)


@operator(domain="com.microsoft")
def EmbedLayerNormalization(
    input_ids,
    segment_ids,
    word_embedding,
    position_embedding,
    segment_embedding,
    gamma,
    beta,
    mask=None,
    position_ids=None,
    *,
    epsilon=1e-12,
    mask_index_type=0,
):
    """The mask index counts the ones in each row of the mask, as ONNX Runtime does."""
    batch, length = input_ids.shape
    words = jnp.take(word_embedding, input_ids, axis=0)
    positions = (
        position_embedding[:length] if position_ids is None else jnp.take(position_embedding, position_ids, axis=0)
    )
    segments = None if segment_ids is None else jnp.take(segment_embedding, segment_ids, axis=0)
    y, _, _, total = SkipLayerNormalization(words, positions, gamma, beta, segments, epsilon=epsilon)
    ones = jnp.zeros(batch, np.int32) if mask is None else jnp.sum(mask == 1, axis=1, dtype=np.int32)
    return y, ones, total


@operator(domain="com.microsoft")
def BranchwiseRMSNorm(X, scale=None, *, num_branches=0, epsilon=1e-5):
    (wide,) = _wide(X)
    branches = wide.reshape(*X.shape[:-1], num_branches, -1) if num_branches else wide
    y, _ = _unit(branches, (-1,), epsilon)
    if scale is not None:
        y = y * cast(scale, y.dtype).reshape(-1, y.shape[-1])
    return cast(y.reshape(X.shape), X.dtype)


@operator(domain="com.microsoft")
def GatedRMSNorm(X, scale, gate, *, activation="silu", epsilon=1e-5):
    x, scale, gate = _wide(X, scale, gate)
    y, _ = _unit(x.reshape(*X.shape[:-1], -1, scale.size), (-1,), epsilon)
    opened = jax.nn.sigmoid(gate) if activation == "sigmoid" else jax.nn.silu(gate)
    return cast((y * scale).reshape(X.shape) * opened, X.dtype)


@operator(domain="com.microsoft")
def BiasAdd(X, bias, skip):
    return X + bias + skip


@operator(domain="com.microsoft")
def BiasSplitGelu(X, bias):
    value, gate = jnp.split(X + bias, 2, axis=-1)
    return value * jax.nn.gelu(gate, approximate=False)


# ---- norms without parameters --------------------------------------------------------------------------------------


@operator()
def LRN(X, *, alpha, beta, bias, size):
    (wide,) = _wide(X)
    channels, before = X.shape[1], (size - 1) // 2
    squares = jnp.pad(wide * wide, [(0, 0), (before, size - 1 - before), *[(0, 0)] * (X.ndim - 2)])
    window = sum(lax.slice_in_dim(squares, i, i + channels, axis=1) for i in range(size))
    return cast(wide * (bias + alpha / size * window) ** -beta, X.dtype)


@operator()
def LpNormalization(input, *, axis, p):
    if p not in (1, 2):
        raise ValueError(f"p is {p}, but the operator is defined for 1 and 2")
    (x,) = _wide(input)
    total = jnp.sum(jnp.abs(x) if p == 1 else x * x, axis, keepdims=True)
    total = jnp.where(total == 0, jnp.ones_like(total), total)  # 0 / 1 is the 0 that is wanted
    return cast(x / (total if p == 1 else jnp.sqrt(total)), input.dtype)


@operator()
def MeanVarianceNormalization(X, *, axes):
    """A constant slice gives 0, by the 1e-9 that the operator's function adds; ONNX Runtime gives NaN."""
    (x,) = _wide(X)
    centered = x - jnp.mean(x, axes, keepdims=True)
    variance = jnp.mean(centered * centered, axes, keepdims=True)
    constant = variance == 0
    deviation = jnp.where(constant, 0.0, jnp.sqrt(jnp.where(constant, 1.0, variance)))
    return cast(centered / (deviation + 1e-9), X.dtype)

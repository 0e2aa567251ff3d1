"""Operators that draw random numbers, from the node's key or from its own `seed`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter.lowering.arrays import canonical, cast, contents, dtype
from transmuter.lowering.registry import operator


def _key(key: jax.Array, seed: float | int | None) -> jax.Array:
    """The key to draw with. A node's `seed` replaces the key, so that every run draws the same."""
    if seed is None:
        return key
    return jax.random.key(np.float32(seed).view(np.uint32) if isinstance(seed, float) else seed % 2**32)


def _dtype(element_type: int | None, x: Any) -> np.dtype:
    """The result's dtype, which is that of `x` where the attribute is not given."""
    return x.dtype if element_type is None else dtype(element_type)


# ---- distributions -------------------------------------------------------------------------------------------------


def _normal(key: jax.Array, shape: Any, wanted: Any, mean: float, scale: float) -> jax.Array:
    return mean + scale * jax.random.normal(key, shape, canonical(wanted))


def _uniform(key: jax.Array, shape: Any, wanted: Any, low: float, high: float) -> jax.Array:
    return jax.random.uniform(key, shape, canonical(wanted), low, high)


@operator(differentiable=False)
def RandomNormal(*, shape, dtype, mean, scale, seed, key):
    return _normal(_key(key, seed), shape, _dtype(dtype, None), mean, scale)


@operator(differentiable=False)
def RandomNormalLike(input, *, dtype, mean, scale, seed, key):
    return _normal(_key(key, seed), input.shape, _dtype(dtype, input), mean, scale)


@operator(differentiable=False)
def RandomUniform(*, shape, dtype, low, high, seed, key):
    return _uniform(_key(key, seed), shape, _dtype(dtype, None), low, high)


@operator(differentiable=False)
def RandomUniformLike(input, *, dtype, low, high, seed, key):
    return _uniform(_key(key, seed), input.shape, _dtype(dtype, input), low, high)


@operator()
def Multinomial(input, *, dtype, sample_size, seed, key):
    logits = jnp.asarray(input)
    drawn = jax.random.categorical(_key(key, seed), logits, shape=(sample_size, logits.shape[0]))
    return cast(drawn.T, _dtype(dtype, None))


@operator(differentiable=False)
def Bernoulli(input, *, dtype, seed, key):
    probability = jnp.asarray(input)
    return cast(_uniform(_key(key, seed), input.shape, probability.dtype, 0, 1) < probability, _dtype(dtype, input))


# ---- Dropout -------------------------------------------------------------------------------------------------------


def _dropout(data: Any, ratio: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scaled elements that are kept, and which those are."""
    ratio = jnp.asarray(ratio, data.dtype)
    kept = _uniform(key, data.shape, data.dtype, 0, 1) >= ratio
    scale = jnp.where(kept, 1 / (1 - ratio), jnp.zeros((), data.dtype))
    return jnp.where(kept, data * scale, jnp.zeros((), data.dtype)), kept


def _undropped(data: Any, mask_dtype: Any, output_count: int) -> Any:
    return data if output_count == 1 else (data, jnp.ones(data.shape, mask_dtype))


@operator()
def Dropout(data, *, ratio, is_test, consumed_inputs=None, key, output_count):
    if is_test:
        return _undropped(data, data.dtype, output_count)
    kept, mask = _dropout(jnp.asarray(data), ratio, key)
    return kept, cast(mask, data.dtype)


@operator()
def Dropout_7(data, *, ratio, output_count):
    return _undropped(data, data.dtype, output_count)


@operator()
def Dropout_10(data, *, ratio, output_count):
    return _undropped(data, bool, output_count)


@operator()
def Dropout_12(data, ratio=None, training_mode=None, *, seed, key, output_count):
    training = np.array(False) if training_mode is None else contents(training_mode)
    if training is not None and not training.reshape(()):
        return _undropped(data, bool, output_count)
    data = jnp.asarray(data)
    ratio = 0.5 if ratio is None else cast(jnp.reshape(jnp.asarray(ratio), ()), data.dtype)
    kept, mask = _dropout(data, ratio, _key(key, seed))
    if training is None:
        training = jnp.reshape(training_mode, ())
        kept, mask = jnp.where(training, kept, data), mask | ~training
    return kept, mask

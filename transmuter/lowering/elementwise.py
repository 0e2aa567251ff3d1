"""Operators that work element by element: arithmetic, comparison, logic, rounding, activations, Cast, Where."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, dtype, is_float, xp
from transmuter.lowering.registry import operator

# ---- arithmetic ----------------------------------------------------------------------------------------------------


def _broadcast_from_axis(a: Array, b: Array, broadcast: int, axis: int | None) -> Array:
    """`b` with the trailing dimensions of size 1 that opset 1 to 6 left implicit: it lines up with `a` from `axis` on."""
    if not broadcast or axis is None:
        return b
    return xp.reshape(b, b.shape + (1,) * (a.ndim - axis % a.ndim - b.ndim))


@operator()
def Add(a, b, *, broadcast, axis=None):
    return xp.add(a, _broadcast_from_axis(a, b, broadcast, axis))


@operator()
def Add_7(a, b):
    return xp.add(a, b)


@operator()
def Div_7(a, b):
    """Integer division truncates towards zero, as C++ does."""
    if is_float(a):
        return xp.divide(a, b)
    if isinstance(a, jax.Array) or isinstance(b, jax.Array):
        return lax.div(*jnp.broadcast_arrays(a, b))
    if a.dtype == object or b.dtype == object:  # symbolic dimensions, which are never negative
        return np.floor_divide(a, b)
    quotient = xp.floor_divide(a, b)
    inexact = xp.not_equal(xp.multiply(quotient, b), a)
    return cast(quotient + (inexact & ((a < 0) != (b < 0))), a.dtype)


@operator("Max_8")
def _max(*xs):
    return functools.reduce(xp.maximum, xs)


# ---- activations ---------------------------------------------------------------------------------------------------


@operator()
def Relu(x, *, consumed_inputs=None):
    return jnp.maximum(x, jnp.zeros((), x.dtype))


@operator()
def LeakyRelu(x, *, alpha, consumed_inputs=None):
    return jnp.where(x < 0, x * jnp.asarray(alpha, x.dtype), x)


# ---- dtypes --------------------------------------------------------------------------------------------------------


@operator()
def Cast_6(x, *, to):
    return cast(x, dtype(to))


@operator()
def Where(condition, x, y):
    return xp.where(condition, x, y)

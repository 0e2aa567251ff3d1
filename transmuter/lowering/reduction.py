"""Operators that combine the elements along axes: sums, extremes, cumulative sums, softmax."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.lib.array_utils import normalize_axis_tuple

from transmuter.lowering.arrays import Array, cast, dims, is_float, is_known, shape_vector, xp
from transmuter.lowering.elementwise import divide, truncate, widened
from transmuter.lowering.registry import operator

Axes = tuple[int, ...]

# ---- reductions ----------------------------------------------------------------------------------------------------


def _reduction(function: Callable[[Array, Axes], Array]) -> Callable[[Array, Axes], Array]:
    """Registers `function`, which reduces along axes and keeps them with size 1: with axes as an attribute and, from
    opset 18 on (13 for ReduceSum), as an operand."""
    name = function.__name__

    def reduce(data: Array, axes: Axes, keepdims: int) -> Array:
        axes = normalize_axis_tuple(axes, data.ndim)
        result = function(widened(data), axes)
        if result.dtype != data.dtype:
            result = cast(result, data.dtype) if is_float(data) else truncate(result, data.dtype)
        return result if keepdims else xp.squeeze(result, axis=axes)

    @operator(name)
    def by_attribute(data, *, axes, keepdims):
        return reduce(data, axes or tuple(range(data.ndim)), keepdims)

    @operator(f"{name}_{13 if name == 'ReduceSum' else 18}", known=("axes",))
    def by_operand(data, axes=None, *, keepdims, noop_with_empty_axes):
        axes = () if axes is None else dims(axes)
        return reduce(data, axes if axes or noop_with_empty_axes else tuple(range(data.ndim)), keepdims)

    by_attribute.__doc__ = by_operand.__doc__ = function.__doc__
    return function


@_reduction
def ReduceSum(x, axes):
    """Integers wrap around; those of ONNX Runtime stop at their extremes."""
    return xp.sum(x, axis=axes, dtype=x.dtype, keepdims=True)


@_reduction
def ReduceProd(x, axes):
    return xp.prod(x, axis=axes, dtype=x.dtype, keepdims=True)


@_reduction
def ReduceMean(x, axes):
    """The mean of nothing, which ONNX leaves undefined, is 0, as in ONNX Runtime."""
    sizes = [x.shape[axis] for axis in axes]
    count = xp.prod(cast(shape_vector(sizes), x.dtype), dtype=x.dtype)
    return divide(ReduceSum(x, axes), xp.maximum(count, 1) if 0 in sizes else count)


@_reduction
def ReduceMax(x, axes):
    """NaN where one is NaN; ONNX Runtime passes over some."""
    return xp.max(x, axis=axes, keepdims=True, initial=_extreme(x, "min") if 0 in x.shape else None)


@_reduction
def ReduceMin(x, axes):
    """NaN where one is NaN; ONNX Runtime passes over some."""
    return xp.min(x, axis=axes, keepdims=True, initial=_extreme(x, "max") if 0 in x.shape else None)


@_reduction
def ReduceL1(x, axes):
    return ReduceSum(xp.abs(x), axes)


@_reduction
def ReduceL2(x, axes):
    """The derivative where all elements are 0 is 0."""
    return guarded(ReduceSumSquare(_as_float(x), axes), xp.sqrt, 0)


@_reduction
def ReduceSumSquare(x, axes):
    return ReduceSum(xp.square(x), axes)


@_reduction
def ReduceLogSum(x, axes):
    return xp.log(ReduceSum(_as_float(x), axes))


@_reduction
def ReduceLogSumExp(x, axes):
    x = _as_float(x)
    largest = ReduceMax(lax.stop_gradient(x) if isinstance(x, jax.Array) else x, axes)
    largest = xp.where(xp.isfinite(largest), largest, 0)
    return xp.add(guarded(ReduceSum(xp.exp(xp.subtract(x, largest)), axes), xp.log, -np.inf), largest)


def _extreme(x: Array, which: str) -> float | bool | np.ndarray:
    """The smallest (`"min"`) or largest value of the dtype of `x`; JAX takes no Python integer as large as a uint64."""
    if is_float(x):
        return {"min": -np.inf, "max": np.inf}[which]
    return which == "max" if x.dtype == bool else np.asarray(getattr(np.iinfo(x.dtype), which), x.dtype)


def _as_float(x: Array) -> Array:
    return x if is_float(x) else cast(x, np.float64)


def guarded(x: Array, function: Callable[[Array], Array], at_zero: float) -> Array:
    """`function` of a sum that may be 0, where its derivative would be infinite: there it is 0."""
    zero = xp.equal(x, 0)
    return xp.where(zero, at_zero, function(xp.where(zero, 1, x)))


# ---- indices of extremes -------------------------------------------------------------------------------------------


def _index(name: str, function: Callable[..., Array], extreme: Callable[..., Array]) -> None:
    """Registers `function` (argmax, argmin), which finds the first element that is the `extreme`, or NaN."""

    def first(x: Array, axis: int, keepdims: bool) -> Array:
        if is_known(x) or axis not in (-1, x.ndim - 1):
            return function(x, axis=axis, keepdims=keepdims)
        # XLA on CPUs is several times faster in two passes, which it vectorises, along the last axis
        found = (x == extreme(x, axis=-1, keepdims=True)) | (x != x)
        position = lax.broadcasted_iota(np.int32, x.shape, x.ndim - 1)
        return jnp.min(jnp.where(found, position, np.iinfo(np.int32).max), axis=-1, keepdims=keepdims)

    @operator(name)
    def lowering(data, *, axis, keepdims, select_last_index):
        """NaN is the extreme, as in NumPy; ONNX Runtime passes over it."""
        if not select_last_index:
            return cast(first(data, axis, bool(keepdims)), np.int64)
        from_end = cast(first(xp.flip(data, axis), axis, bool(keepdims)), np.int64)
        return data.shape[axis] - 1 - from_end


_index("ArgMax", xp.argmax, jnp.max)
_index("ArgMin", xp.argmin, jnp.min)


# ---- cumulative sums -----------------------------------------------------------------------------------------------


def _cumulative(name: str, function: Callable[..., Array], identity: int) -> None:
    """Registers `function` (cumsum, cumprod), whose exclusive form starts with its `identity`."""

    @operator(name, known=("axis",))
    def lowering(x, axis, *, exclusive, reverse):
        (axis,) = dims(axis)
        y = widened(xp.flip(x, axis) if reverse else x)
        if exclusive:
            one = (slice(None),) * (axis % x.ndim)
            first = xp.full_like(y[(*one, slice(0, 1))], identity)
            y = xp.concatenate([first, y], axis=axis)[(*one, slice(0, -1))]
        y = function(y, axis=axis, dtype=y.dtype)
        return cast(xp.flip(y, axis) if reverse else y, x.dtype)


_cumulative("CumSum_11", xp.cumsum, 0)
_cumulative("CumProd_26", xp.cumprod, 1)


# ---- softmax -------------------------------------------------------------------------------------------------------


def rounded(x: jax.Array, kind: np.dtype) -> jax.Array:
    """What is left of `x` when a graph of bfloat16 has stored it as that; `x` for other kinds.

    The specification spells softmax and attention out as functions, in which each step has the operands' type.
    """
    return lax.reduce_precision(x, 8, 7) if kind == jnp.bfloat16 else x


def softmax_sum(powers: jax.Array, axis: int, kind: np.dtype) -> jax.Array:
    """The sum that softmax divides by, kept as an axis of size 1. In bfloat16 each addition is rounded: those of eight
    neighbours one after the other, then of eight such sums, and so on, so that long sums do not stand still."""
    if kind != jnp.bfloat16 or not isinstance(powers.shape[axis], int):
        return jnp.sum(powers, axis=axis, keepdims=True)
    sums = jnp.moveaxis(powers, axis, -1)
    while (count := sums.shape[-1]) != 1:
        sums = jnp.pad(sums, [(0, 0)] * (sums.ndim - 1) + [(0, max(-count % 8, 8 - count))])
        eights = jnp.moveaxis(sums.reshape(*sums.shape[:-1], -1, 8), -1, 0)
        sums = functools.reduce(lambda a, b: rounded(a + b, kind), eights)
    return jnp.moveaxis(sums, -1, axis)


def _along_axis(name: str, function: Callable[[Array, int, np.dtype], Array], differentiable: bool = True) -> None:
    """Registers `function`: from opset 13 on along one axis, before along all axes from `axis` on together."""

    def computed(x: Array, axis: int) -> Array:
        return x if 0 in x.shape else cast(function(widened(x), axis, np.dtype(x.dtype)), x.dtype)

    @operator(name, differentiable=differentiable)
    def flattened(x, *, axis):
        before = x.shape[:axis]
        return jnp.reshape(computed(jnp.reshape(x, (*before, math.prod(x.shape[len(before) :]))), -1), x.shape)

    @operator(f"{name}_13", differentiable=differentiable)
    def along(x, *, axis):
        return computed(x, axis)


def _hardmax(x: Array, axis: int, kind: np.dtype) -> Array:
    first = jnp.argmax(x, axis=axis, keepdims=True)
    return cast(lax.broadcasted_iota(first.dtype, x.shape, axis % x.ndim) == first, x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _softmax(x: jax.Array, axis: int, kind: np.dtype) -> jax.Array:
    powers = rounded(jnp.exp(rounded(x - jnp.max(x, axis=axis, keepdims=True), kind)), kind)
    return powers / softmax_sum(powers, axis, kind)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def log_softmax(x: jax.Array, axis: int, kind: np.dtype) -> jax.Array:
    """The logarithm of the softmax; nothing is rounded to `kind`. Rows of -inf alone leave no NaN in a gradient."""
    shifted = x - jnp.max(x, axis=axis, keepdims=True)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=axis, keepdims=True))


def _weights(x: jax.Array, axis: int) -> jax.Array:
    """The softmax, as derivatives need it: where all elements are -inf, it is NaN, but no NaN may reach a gradient."""
    return _softmax(jnp.maximum(x, jnp.finfo(x.dtype).min), axis, x.dtype)


@_softmax.defjvp
def _(axis, kind, primals, tangents):
    (x,), (dx,) = primals, tangents
    weights = _weights(x, axis)
    return _softmax(x, axis, kind), weights * dx - weights * jnp.sum(weights * dx, axis=axis, keepdims=True)


@log_softmax.defjvp
def _(axis, kind, primals, tangents):
    (x,), (dx,) = primals, tangents
    return log_softmax(x, axis, kind), dx - jnp.sum(_weights(x, axis) * dx, axis=axis, keepdims=True)


_along_axis("Softmax", _softmax)
_along_axis("LogSoftmax", log_softmax)
_along_axis("Hardmax", _hardmax, differentiable=False)

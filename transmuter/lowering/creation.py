"""Operators that make tensors out of little: constants, ranges, one-hot vectors, windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from transmuter.lowering import arrays
from transmuter.lowering.arrays import (
    Array,
    canonical,
    cast,
    dims,
    dtype,
    is_float,
    is_string,
    is_symbolic,
    readable,
    traced,
    xp,
)
from transmuter.lowering.registry import operator

_KNOWN_UP_TO = 1 << 20
"""Results of more elements are made where they are needed: as known values they would be baked into the executable."""


def can_be_known(shape: Sequence[Any]) -> bool:
    """Whether an array of that shape may be known: it has no symbolic dimension, and is no burden as a constant."""
    return all(isinstance(d, int) for d in shape) and math.prod(shape) <= _KNOWN_UP_TO


def positions(size: Any) -> Array:
    """The integers from 0 to `size - 1`: known, unless the size is symbolic."""
    return np.arange(size) if isinstance(size, int) else jnp.arange(size, dtype=canonical(np.int64))


# ---- constants -----------------------------------------------------------------------------------------------------


@operator(differentiable=False)
def Constant(
    *,
    value=None,
    value_float=None,
    value_floats=None,
    value_int=None,
    value_ints=None,
    value_string=None,
    value_strings=None,
    sparse_value=None,
):
    typed = (
        (value, None),
        (sparse_value, None),
        (value_float, np.float32),
        (value_floats, np.float32),
        (value_int, np.int64),
        (value_ints, np.int64),
        (value_string, object),
        (value_strings, object),
    )
    given = [np.asarray(held, held_dtype) for held, held_dtype in typed if held is not None]
    if len(given) != 1:
        raise ValueError(f"{len(given)} attributes hold a value, not one")
    return given[0]


@operator(known=("shape",), differentiable=False)
def ConstantOfShape(shape, *, value):
    value = np.zeros((), np.float32) if value is None else value.reshape(())
    shape = dims(shape)
    if any(isinstance(d, int) and d < 0 for d in shape):
        raise ValueError("a dimension is negative")
    return np.broadcast_to(value, shape) if can_be_known(shape) else jnp.broadcast_to(traced(value), shape)


# ---- ranges and diagonals ------------------------------------------------------------------------------------------


@operator(known=("start", "limit", "delta"), differentiable=False)
def Range(start, limit, delta, *, stash_type=1):
    """Element i is `start + i * delta`, as the specification has it; ONNX Runtime adds up deltas."""
    if any(is_symbolic(v) for v in (start, limit, delta)):
        return jnp.arange(*(dims(v)[0] for v in (start, limit, delta)), dtype=canonical(np.int64))
    if delta == 0:
        raise ValueError("delta is 0")
    count = max(math.ceil((limit - start).item() / delta.item()), 0)
    exact = np.float64 if is_float(start) else np.int64
    return (start.astype(exact) + np.arange(count) * delta.astype(exact)).astype(start.dtype).reshape(-1)


@operator(differentiable=False)
def EyeLike(x, *, dtype, k):
    rows, columns = x.shape
    diagonal = xp.equal(xp.expand_dims(positions(rows) + k, 1), positions(columns))
    return cast(diagonal, x.dtype if dtype is None else arrays.dtype(dtype))


@operator(known=("depth",))
def OneHot(indices, depth, values, *, axis):
    """A negative index is hot nowhere; in ONNX Runtime it counts from the back in all versions."""
    return _one_hot(indices, depth, values, axis, negative=False)


@operator(known=("depth",))
def OneHot_11(indices, depth, values, *, axis):
    return _one_hot(indices, depth, values, axis, negative=True)


def _one_hot(indices: Array, depth: np.ndarray, values: Array, axis: int, negative: bool) -> Array:
    """`negative` indices count from the back; the others outside of the range are hot nowhere."""
    indices = readable(indices, "indices") if is_string(values) else indices
    indices = xp.expand_dims(cast(indices, np.int64), axis)
    depth = dims(depth)[0]
    classes = cast(positions(depth), indices.dtype)
    classes = classes.reshape([-1 if i == axis % indices.ndim else 1 for i in range(indices.ndim)])
    hot = xp.equal(indices, classes)
    if negative:
        hot = xp.logical_or(hot, xp.equal(indices, classes - depth))
    return xp.where(hot, values[1:], values[:1])


# ---- windows -------------------------------------------------------------------------------------------------------


def _cosine_window(size: np.ndarray, periodic: int, output_datatype: int, *terms: float) -> np.ndarray:
    """Sum of `terms[i] * cos(2 pi i n / period)`, small terms first: so it is 0 and 1 exactly where it should be. A
    symmetric window of one sample is 1."""
    period = size.item() - (not periodic)
    phase = 2 * np.pi * np.arange(size.item()) / period if period else np.zeros(size.item())
    window = sum(terms[i] * np.cos(i * phase) for i in reversed(range(len(terms))))
    return (window if period else np.ones_like(phase)).astype(dtype(output_datatype))


@operator(known=("size",), differentiable=False)
def HannWindow(size, *, periodic, output_datatype):
    """A symmetric window of one sample is 1; that of ONNX Runtime is NaN."""
    return _cosine_window(size, periodic, output_datatype, 0.5, -0.5)


@operator(known=("size",), differentiable=False)
def HammingWindow(size, *, periodic, output_datatype):
    """A symmetric window of one sample is 1; that of ONNX Runtime is NaN."""
    return _cosine_window(size, periodic, output_datatype, 25 / 46, -21 / 46)


@operator(known=("size",), differentiable=False)
def BlackmanWindow(size, *, periodic, output_datatype):
    """A symmetric window of one sample is 1; that of ONNX Runtime is NaN."""
    return _cosine_window(size, periodic, output_datatype, 0.42, -0.5, 0.08)

"""Operators that make tensors out of little: constants, ranges, one-hot vectors, windows."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from transmuter.lowering.arrays import canonical, dims, is_symbolic, traced
from transmuter.lowering.registry import operator

_KNOWN_UP_TO = 1 << 20
"""Results of more elements are made where they are needed: as known values they would be baked into the executable."""


@operator()
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


@operator(known=("shape",))
def ConstantOfShape(shape, *, value):
    value = np.zeros((), np.float32) if value is None else value.reshape(())
    shape = dims(shape)
    if all(isinstance(d, int) for d in shape) and math.prod(shape) <= _KNOWN_UP_TO:
        return np.broadcast_to(value, shape)
    return jnp.broadcast_to(traced(value), shape)


@operator(known=("start", "limit", "delta"))
def Range(start, limit, delta):
    """As the specification has it, element i is `start + i * delta`; ONNX Runtime adds up deltas."""
    if any(is_symbolic(v) for v in (start, limit, delta)):
        start, limit, delta = (dims(v)[0] for v in (start, limit, delta))
        count = -((start - limit) // delta)
        return jnp.arange(count, dtype=canonical(np.int64)) * delta + start
    number = float if start.dtype.kind == "f" else int
    first, last, step = (number(v.item()) for v in (start, limit, delta))
    count = max(math.ceil((last - first) / step), 0)
    return (np.arange(count) * delta.reshape(()) + start.reshape(())).astype(start.dtype)

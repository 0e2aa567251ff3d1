"""Operators that move elements and leave them as they are: shape, order, concatenation, slices, padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from transmuter.lowering.arrays import Array, dims, shape_vector, traced, xp
from transmuter.lowering.registry import operator


def _fit_for(data: Array, sizes: Sequence[Any]) -> Array:
    """`data`, but traced if it is to have a symbolic dimension of `sizes`, which no NumPy array has."""
    return data if all(isinstance(d, int) for d in sizes) else traced(data)


# ---- shapes --------------------------------------------------------------------------------------------------------


@operator()
def Shape(data, *, start=0, end=None):
    return shape_vector(data.shape[start:end])


@operator()
def Size(data):
    return shape_vector([math.prod(data.shape)]).reshape(())


@operator()
def Identity(x):
    return x


@operator()
def Reshape(data, *, shape=(), consumed_inputs=None):
    return _reshape(data, shape)


@operator(known=("shape",))
def Reshape_5(data, shape, *, allowzero=0):
    return _reshape(data, dims(shape), allowzero)


def _reshape(data: Array, shape: Sequence[Any], allowzero: int = 0) -> Array:
    """A dimension 0 is that of `data`, unless `allowzero`; one dimension -1 is what is left."""
    if not allowzero:
        shape = [data.shape[i] if isinstance(d, int) and d == 0 else d for i, d in enumerate(shape)]
    return xp.reshape(_fit_for(data, shape), tuple(shape))


@operator()
def Flatten(x, *, axis):
    return _reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])), allowzero=1)


@operator()
def Squeeze(data, *, axes=None):
    if axes is None:
        axes = [i for i, d in enumerate(data.shape) if isinstance(d, int) and d == 1]
    return xp.squeeze(data, tuple(axes))


@operator(known=("axes",))
def Squeeze_13(data, axes=None):
    return Squeeze(data, axes=None if axes is None else dims(axes))


@operator()
def Unsqueeze(data, *, axes):
    return xp.expand_dims(data, tuple(axes))


@operator(known=("axes",))
def Unsqueeze_13(data, axes):
    return Unsqueeze(data, axes=dims(axes))


@operator(known=("shape",))
def Expand(x, shape):
    rank = max(x.ndim, shape.size)
    own, wanted = ((1,) * (rank - len(s)) + s for s in (x.shape, dims(shape)))
    target = tuple(o if isinstance(w, int) and w == 1 else w for o, w in zip(own, wanted))
    return xp.broadcast_to(_fit_for(x, target), target)


@operator()
def Transpose(data, *, perm):
    return xp.transpose(data, perm)


# ---- several tensors -----------------------------------------------------------------------------------------------


@operator()
def Concat(*inputs, axis=1):
    return xp.concatenate(inputs, axis)


@operator()
def Concat_4(*inputs, axis):
    return Concat(*inputs, axis=axis)


# ---- slices --------------------------------------------------------------------------------------------------------


@operator()
def Slice(data, *, starts, ends, axes=None):
    return _slice(data, starts, ends, axes, None)


@operator(known=("starts", "ends", "axes", "steps"))
def Slice_10(data, starts, ends, axes=None, steps=None):
    return _slice(data, *(None if bounds is None else dims(bounds) for bounds in (starts, ends, axes, steps)))


def _slice(
    data: Array,
    starts: Sequence[Any],
    ends: Sequence[Any],
    axes: Sequence[int] | None,
    steps: Sequence[int] | None,
) -> Array:
    axes = range(len(starts)) if axes is None else axes
    index = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps or itertools.repeat(1, len(starts)), strict=True):
        index[axis] = _within(data.shape[axis], start, end, step)
    bounds = [b for s in index for b in (s.start, s.stop) if b is not None]
    return _fit_for(data, bounds)[tuple(index)]


def _within(size: Any, start: Any, end: Any, step: int) -> slice:
    """ONNX counts bounds as Python does, except that an end before the first element, which only a step backwards
    reaches, has no Python spelling but None."""
    if all(isinstance(d, int) for d in (size, start, end)):
        start, end, step = slice(start, end, step).indices(size)
        return slice(start, end if end >= 0 else None, step) if range(start, end, step) else slice(0, 0)
    forward = 1 if step > 0 else -1  # bounds out of reach would stay in the expression of a symbolic size
    return slice(
        None if isinstance(start, int) and -start * forward >= _OUT_OF_REACH else start,
        None if isinstance(end, int) and end * forward >= _OUT_OF_REACH else end,
        step,
    )


_OUT_OF_REACH = 2**31 - 1

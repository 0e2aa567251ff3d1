"""Operators that move elements and leave them as they are: shape, order, concatenation, slices, padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from transmuter.lowering.arrays import Array, cast, dims, is_known, is_string, readable, shape_vector, traced, xp
from transmuter.lowering.creation import can_be_known, positions
from transmuter.lowering.padding import partly_known
from transmuter.lowering.registry import operator


def _to_have(shape: Sequence[Any], data: Array) -> Array:
    """`data`, traced if it is to have a shape that no known array may have."""
    return data if can_be_known(shape) or is_string(data) else traced(data)


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
    return xp.reshape(data if all(isinstance(d, int) for d in shape) else traced(data), tuple(shape))


@operator()
def Flatten(x, *, axis):
    return xp.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@operator()
def Squeeze(data, *, axes=None):
    if axes is None:
        axes = [i for i, d in enumerate(data.shape) if isinstance(d, int) and d == 1]
    return xp.squeeze(data, tuple(axes))


@operator(known=("axes",))
def Squeeze_13(data, axes=None):
    """An empty list of axes names none; in ONNX Runtime it names all of size 1."""
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
    return x if target == x.shape else xp.broadcast_to(_to_have(target, x), target)


@operator(known=("tiles", "axis"))
def Tile(x, tiles, axis):
    repeats = np.ones(x.ndim, np.int64)
    repeats[int(axis.item())] = tiles.item()
    return Tile_6(x, repeats)


@operator(known=("repeats",))
def Tile_6(x, repeats):
    repeats = dims(repeats)
    if len(repeats) != x.ndim:
        raise ValueError(f"there are {len(repeats)} repeats for {x.ndim} dimensions")
    return xp.tile(_to_have([d * r for d, r in zip(x.shape, repeats)], x), repeats)


# ---- order ---------------------------------------------------------------------------------------------------------


@operator()
def Transpose(data, *, perm):
    return xp.transpose(data, perm)


@operator()
def DepthToSpace(x, *, blocksize, mode="DCR"):
    n, c, h, w = x.shape
    depth = c // blocksize**2
    if mode == "DCR":
        blocks = x.reshape(n, blocksize, blocksize, depth, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(n, depth, blocksize, blocksize, h, w).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, depth, h * blocksize, w * blocksize)


@operator()
def SpaceToDepth(x, *, blocksize, mode="DCR"):
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize)
    blocks = blocks.transpose((0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4))
    return blocks.reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


@operator()
def ReverseSequence(x, sequence_lens, *, batch_axis, time_axis):
    """Lengths are not checked: one beyond the axis repeats its last element."""
    sequence_lens = readable(sequence_lens, "sequence_lens") if is_string(x) else sequence_lens
    lengths = xp.expand_dims(sequence_lens, time_axis)
    time = xp.expand_dims(cast(positions(x.shape[time_axis]), sequence_lens.dtype), batch_axis)
    source = xp.where(time < lengths, lengths - 1 - time, time)
    source = source.reshape(source.shape + (1,) * (x.ndim - 2))
    if is_known((x, source)):
        return np.take_along_axis(x, source, time_axis)
    return jnp.take_along_axis(x, source, time_axis, mode="clip")


# ---- parts ---------------------------------------------------------------------------------------------------------


@operator()
def Concat(*inputs, axis=1):
    return xp.concatenate(inputs, axis)


@operator()
def Concat_4(*inputs, axis):
    if not is_known(inputs) and (dimensions := partly_known(inputs)) is not None:
        return dimensions
    return xp.concatenate(inputs, axis)


@operator(known=("sizes",))
def Split(x, sizes=None, *, axis=0, split=None, output_count):
    """Until opset 13, the sizes may also be an attribute."""
    return _split(x, axis, split if sizes is None else dims(sizes), output_count)


@operator(known=("split",))
def Split_18(x, split=None, *, axis, num_outputs, output_count):
    """`num_outputs` that do not divide the axis leave its last part smaller."""
    if split is None and num_outputs is not None:
        size = x.shape[axis]
        part = -(-size // num_outputs)
        return _split(x, axis, [*[part] * (num_outputs - 1), size - part * (num_outputs - 1)], num_outputs)
    return _split(x, axis, None if split is None else dims(split), output_count)


def _split(x: Array, axis: int, sizes: Sequence[Any] | None, count: int) -> tuple[Array, ...]:
    """`x` cut along an axis into parts of these sizes, or into equal ones."""
    whole = x.shape[axis]
    sizes = [whole // count] * count if sizes is None else sizes
    if sum(sizes) != whole or any(isinstance(size, int) and size < 0 for size in sizes):
        raise ValueError(f"parts of sizes {', '.join(map(str, sizes))} do not make up an axis of {whole} elements")
    ends = itertools.accumulate(sizes)
    before = (slice(None),) * (axis % x.ndim)
    return tuple(x[(*before, slice(end - size, end))] for size, end in zip(sizes, ends))


@operator()
def Slice(data, *, starts, ends, axes=None):
    return _slice(data, starts, ends, axes)


@operator(known=("starts", "ends", "axes", "steps"))
def Slice_10(data, starts, ends, axes=None, steps=None):
    """A step backwards with the largest integer as its end takes nothing; ONNX Runtime reads it as no end."""
    return _slice(data, *(None if given is None else dims(given) for given in (starts, ends, axes, steps)))


def _slice(
    data: Array,
    starts: Sequence[Any],
    ends: Sequence[Any],
    axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Array:
    axes = range(len(starts)) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    index = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = _within(data.shape[axis], start, end, step)
    symbolic = any(not isinstance(bound, (int, type(None))) for part in index for bound in (part.start, part.stop))
    return (traced(data) if symbolic else data)[tuple(index)]


_OUT_OF_REACH = 2**31 - 1


def _within(size: Any, start: Any, end: Any, step: int) -> slice:
    """ONNX counts bounds as Python does, but a step backwards from before the first element starts at that one."""
    if all(isinstance(d, int) for d in (size, start, end)):
        start = max(start, -size) if step < 0 else start
        step = min(max(step, -max(size, 1)), max(size, 1))  # beyond, one element as well, but too far for XLA
        start, end, step = slice(start, end, step).indices(size)
        return slice(start, end if end >= 0 else None, step) if range(start, end, step) else slice(0, 0)
    forward = 1 if step > 0 else -1  # a bound out of reach would stay in the expression of the symbolic size
    return slice(
        None if isinstance(start, int) and -start * forward >= _OUT_OF_REACH else start,
        None if isinstance(end, int) and end * forward >= _OUT_OF_REACH else end,
        step,
    )


@operator()
def Trilu(x, k=None, *, upper):
    k = np.asarray(0) if k is None else k.reshape(())
    k = readable(k, "k") if is_string(x) else k
    rows, columns = (cast(positions(d), k.dtype) for d in x.shape[-2:])
    diagonal = xp.subtract(columns, xp.expand_dims(rows, 1))
    keep = xp.greater_equal(diagonal, k) if upper else xp.less_equal(diagonal, k)
    return xp.where(keep, x, np.array("", object) if is_string(x) else np.zeros((), x.dtype))


# ---- padding -------------------------------------------------------------------------------------------------------


@operator()
def Pad(data, *, paddings, mode, value):
    return Pad_2(data, pads=paddings, mode=mode, value=value)


@operator()
def Pad_2(data, *, pads, mode, value):
    return _pad(data, _by_axis(pads, None, data.ndim), mode, np.asarray(value, data.dtype))


@operator(known=("pads", "axes"))
def Pad_11(data, pads, constant_value=None, axes=None, *, mode):
    """Elements are taken away, where a pad is negative, before others are added."""
    return _pad(data, _by_axis(dims(pads), None if axes is None else dims(axes), data.ndim), mode, constant_value)


def _by_axis(pads: Sequence[Any], axes: Sequence[int] | None, rank: int) -> list[tuple[Any, Any]]:
    """The begin and end of every axis, from all begins followed by all ends."""
    widths: list[tuple[Any, Any]] = [(0, 0)] * rank
    axes = range(rank) if axes is None else axes
    if len(pads) != 2 * len(axes):
        raise ValueError(f"there are {len(pads)} pads for {len(axes)} axes")
    for axis, begin, end in zip(axes, pads, pads[len(axes) :]):
        widths[axis] = (begin, end)
    return widths


def _pad(data: Array, widths: Sequence[tuple[Any, Any]], mode: str, value: Array | None = None) -> Array:
    """`data` with elements added around it, or taken away where a width is negative: that comes first."""
    crop = [tuple(max(-w, 0) if isinstance(w, int) else 0 for w in pair) for pair in widths]
    if any(isinstance(d, int) and sum(pair) > d for d, pair in zip(data.shape, crop)):
        raise ValueError("more elements are taken away than the axis has")
    data = data[tuple(slice(begin, d - end) for d, (begin, end) in zip(data.shape, crop))]
    grow = [tuple(max(w, 0) if isinstance(w, int) else w for w in pair) for pair in widths]
    data = _to_have([d + begin + end for d, (begin, end) in zip(data.shape, grow)], data)
    if mode != "constant":
        return xp.pad(data, grow, mode=mode)
    if value is None:
        value = np.asarray("", object) if is_string(data) else np.zeros((), data.dtype)
    return xp.pad(data, grow, constant_values=value.reshape(()))


@operator(known=("shape",))
def CenterCropPad(data, shape, *, axes):
    """Of an odd difference, the larger half is at the end of the axis."""
    widths = [(0, 0)] * data.ndim
    for axis, target in zip(range(data.ndim) if axes is None else axes, dims(shape), strict=True):
        missing = target - data.shape[axis]
        begin = missing // 2 if missing > 0 else -(-missing // 2)
        widths[axis] = (begin, missing - begin)
    return _pad(data, widths, "constant")

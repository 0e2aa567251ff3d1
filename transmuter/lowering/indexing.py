"""Operators that pick, place and find elements by index: gather, scatter, selection, sorting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, contents, dims, is_known, is_string, traced, xp
from transmuter.lowering.creation import positions
from transmuter.lowering.registry import operator


def _from_front(indices: Array, size: Any) -> Array:
    """Indices counted from the front. Known ones are checked; traced ones that lie outside of the axis read the element
    that is nearest, and write nothing."""
    if isinstance(size, int):
        if is_known(indices) and indices.size and not (-size <= indices.min() and indices.max() < size):
            raise ValueError(f"an index lies outside of an axis of {size} elements")
        return xp.where(indices < 0, indices + size, indices)
    if is_known(indices) and (indices >= 0).all():
        return indices
    indices = traced(indices)
    return jnp.where(indices < 0, indices + cast(jnp.asarray(size), indices.dtype), indices)


def _readable(data: Array, indices: Array) -> Array:
    """Indices into a string tensor as NumPy, as strings are."""
    return contents(indices) if is_string(data) else indices


# ---- gather --------------------------------------------------------------------------------------------------------


@operator()
def Gather(data, indices, *, axis):
    """An index outside of the axis is an error if it is known; else it reads the nearest element."""
    axis = axis % data.ndim
    indices = _from_front(_readable(data, indices), data.shape[axis])
    if is_known((data, indices)):
        return np.asarray(np.take(data, indices, axis), data.dtype)
    if is_known(indices) and indices.ndim == 0:
        return data[(slice(None),) * axis + (indices.item(),)]
    return jnp.take(traced(data), indices, axis, mode="clip")


@operator()
def GatherElements(data, indices, *, axis):
    """An index outside of the axis is an error if it is known; else it reads the nearest element."""
    axis = axis % data.ndim
    indices = _from_front(_readable(data, indices), data.shape[axis])
    data = data[tuple(slice(None) if i == axis else slice(d) for i, d in enumerate(indices.shape))]
    if is_known((data, indices)):
        return np.take_along_axis(data, indices, axis)
    return jnp.take_along_axis(traced(data), jnp.maximum(indices, 0), axis, mode="clip")


@operator()
def GatherND(data, indices, *, batch_dims=0):
    """An index outside of its axis is an error if it is known; else it reads the nearest element."""
    index = _coordinates(data, _readable(data, indices), batch_dims)
    if is_known((data, *index)):
        return np.asarray(data[index], data.dtype)
    return traced(data).at[index].get(mode="clip", wrap_negative_indices=False)


def _coordinates(data: Array, indices: Array, batch_dims: int = 0) -> tuple[Array, ...]:
    """One index array per leading axis of `data`: positions in the batch, then what `indices` has on its last axis."""
    where = indices.shape[:-1]
    if indices.shape[-1] == 0:
        raise ValueError("an index has no coordinates")
    tuples = [_from_front(indices[..., i], data.shape[batch_dims + i]) for i in range(indices.shape[-1])]
    return (*(_along(where, axis) for axis in range(batch_dims)), *tuples)


def _along(shape: tuple[Any, ...], axis: int) -> Array:
    """The positions on one axis, to be broadcast to `shape`."""
    return positions(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])


# ---- scatter -------------------------------------------------------------------------------------------------------


_REDUCTIONS = {
    "none": ("set", None),
    "add": ("add", np.add),
    "mul": ("mul", np.multiply),
    "min": ("min", np.minimum),
    "max": ("max", np.maximum),
}


def _scatter(data: Array, index: tuple[Array, ...], updates: Array, reduction: str = "none") -> Array:
    """`data` with `updates` placed at `index`, or combined with what is there. Truth values are added by "or" and
    multiplied by "and"."""
    if data.dtype == bool:
        reduction = {"add": "max", "mul": "min"}.get(reduction, reduction)
    method, ufunc = _REDUCTIONS[reduction]
    if not is_known((data, updates, *index)):
        data, updates = traced(data), traced(updates)
        if reduction == "mul":
            return _multiplied(data, tuple(xp.where(i < 0, np.iinfo(i.dtype).max, i) for i in index), updates)
        return getattr(data.at[index], method)(updates, wrap_negative_indices=False)
    result = np.array(data, np.result_type(data, updates))
    if ufunc is None:
        result[index] = updates
    else:
        ufunc.at(result, index, updates)
    return result


@jax.custom_jvp
def _multiplied(data: jax.Array, index: tuple[Array, ...], updates: jax.Array) -> jax.Array:
    """JAX itself has no gradient of this where an index repeats."""
    return data.at[index].mul(updates)


@_multiplied.defjvp
def _derivative_of_multiplied(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    """A factor's derivative is the product of the other ones: that of all but zeros, if no other one is zero."""
    data, index, updates = primals
    zeros = (data == 0).astype(np.int32).at[index].add((updates == 0).astype(np.int32))
    product = _multiplied(jnp.where(data == 0, 1, data), index, jnp.where(updates == 0, 1, updates))

    def others(factor: jax.Array, zeros: jax.Array, product: jax.Array) -> jax.Array:
        is_zero = factor == 0
        return jnp.where(zeros == is_zero.astype(np.int32), product / jnp.where(is_zero, 1, factor), 0)

    d_data, _, d_updates = tangents
    d_updates = d_updates * others(updates, zeros[index], product[index])
    return _multiplied(*primals), (d_data * others(data, zeros, product)).at[index].add(d_updates)


@operator("Scatter", "ScatterElements")
def ScatterElements(data, indices, updates, *, axis, reduction="none"):
    """An index outside of the axis is an error if it is known; else it writes nothing. NaN wins in extremes."""
    axis = axis % data.ndim
    index = [_along(indices.shape, i) for i in range(data.ndim)]
    index[axis] = _from_front(_readable(data, indices), data.shape[axis])
    return _scatter(data, tuple(index), updates, reduction)


@operator()
def ScatterND(data, indices, updates, *, reduction="none"):
    """An index outside of its axis is an error if it is known; else it writes nothing. NaN wins in extremes."""
    return _scatter(data, _coordinates(data, _readable(data, indices)), updates, reduction)


@operator()
def TensorScatter(past_cache, update, write_indices=None, *, mode, axis):
    cache, update = (xp.moveaxis(x, axis, 1) for x in (past_cache, update))
    batch, length = update.shape[:2]
    place = xp.expand_dims(positions(length), 0)
    if write_indices is not None:
        write_indices = _readable(past_cache, write_indices)
        place = cast(place, write_indices.dtype) + xp.expand_dims(write_indices, 1)
    if mode == "circular":
        place = place % cache.shape[1]
    return xp.moveaxis(_scatter(cache, (_along((batch, length), 0), place), update), 1, axis)


# ---- selection -----------------------------------------------------------------------------------------------------


@operator(known=("condition",))
def Compress(x, condition, *, axis):
    chosen = np.flatnonzero(condition)
    return Gather(xp.reshape(x, -1), chosen, axis=0) if axis is None else Gather(x, chosen, axis=axis)


@operator(known=("x",))
def NonZero(x):
    """The place of the only element of a scalar has no coordinates."""
    return np.argwhere(x).T


@operator(reads=("x",))
def Unique(x, *, axis, sorted):
    """Y takes its elements from X, so that gradients flow. Without `axis`, NaNs are equal to each other; in ONNX
    Runtime they are equal to all numbers."""
    if axis is None:
        x, axis = xp.reshape(x, -1), 0
    held = contents(x)
    held = held.astype(str) if is_string(held) else held
    _, first, inverse, counts = np.unique(held, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    order = np.arange(first.size) if sorted else np.argsort(first)
    inverse = np.argsort(order)[inverse.reshape(-1)]
    return Gather(x, first[order], axis=axis), first[order], inverse, counts[order]


# ---- sorting -------------------------------------------------------------------------------------------------------


@operator()
def TopK(x, *, k, axis):
    return _top_k(x, k, axis, largest=True)


@operator(known=("k",))
def TopK_10(x, k, *, axis, largest=1, sorted=1):
    return _top_k(x, dims(k)[0], axis, bool(largest))


def _top_k(x: Array, k: Any, axis: int, largest: bool) -> tuple[Array, Array]:
    """The lower index comes first among equals; NaN is the largest value."""
    if isinstance(k, int) and isinstance(x.shape[axis], int) and not 0 <= k <= x.shape[axis]:
        raise ValueError(f"k is {k}, but the axis has {x.shape[axis]} elements")
    if largest and isinstance(x, jax.Array):
        order = lax.top_k(jnp.where(x == 0, jnp.zeros((), x.dtype), x), k, axis=axis % x.ndim)[1]  # -0 equals 0
    elif largest:
        order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis, stable=True), axis)
    else:
        order = xp.argsort(x, axis, stable=True)
    order = order[(slice(None),) * (axis % x.ndim) + (slice(k),)]
    return GatherElements(x, order, axis=axis), cast(order, np.int64)


# ---- non-maximum suppression ---------------------------------------------------------------------------------------


@operator(known=("boxes", "scores", "max_output_boxes_per_class", "iou_threshold", "score_threshold"))
def NonMaxSuppression(
    boxes, scores, max_output_boxes_per_class=None, iou_threshold=None, score_threshold=None, *, center_point_box
):
    most = 0 if max_output_boxes_per_class is None else max_output_boxes_per_class.item()
    overlap = np.float32(0 if iou_threshold is None else iou_threshold.item())
    corners = corners_of(boxes, center_point_box)
    selected = [np.zeros((0, 3), np.int64)]
    for batch, of_class in np.ndindex(scores.shape[:2]):
        score = scores[batch, of_class]
        candidates = np.argsort(-score, stable=True)
        if score_threshold is not None:
            candidates = candidates[score[candidates] > score_threshold.item()]
        kept = _suppress([x[batch] for x in corners], candidates, most, overlap)
        selected.append(np.array([(batch, of_class, box) for box in kept], np.int64).reshape(-1, 3))
    return np.concatenate(selected)


def corners_of(boxes: Array, center_point_box: int) -> tuple[Array, Array, Array]:
    """The lowest and the highest coordinates of boxes, [..., 2] each, and their areas."""
    one, other = boxes[..., :2], boxes[..., 2:]
    if center_point_box:
        one, other = one - other / 2, one + other / 2
    low, high = xp.minimum(one, other), xp.maximum(one, other)
    return low, high, xp.prod(high - low, axis=-1)


def overlaps(one: Sequence[Array], other: Sequence[Array]) -> Array:
    """The shares of what two boxes cover that both do; of boxes as `corners_of` has them."""
    (low, high, area), (other_low, other_high, other_area) = one, other
    sides = xp.minimum(high, other_high) - xp.maximum(low, other_low)
    shared = xp.prod(xp.maximum(sides, 0), axis=-1)
    return shared / (area + other_area - shared)


_BLOCK = 512


def _suppress(corners: Sequence[np.ndarray], candidates: np.ndarray, most: int, limit: np.float32) -> list[int]:
    """Of candidates in order of preference, at most so many, of which no two overlap by more than `limit`.

    They are looked at in blocks, since most of them come after the last one that is kept.
    """

    def clash(one: Any, other: Any) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            return overlaps([x[one] for x in corners], [x[other] for x in corners]) > limit

    kept: list[int] = []
    for start in range(0, candidates.size, _BLOCK):
        block = candidates[start : start + _BLOCK]
        block = block[~clash(np.array(kept, np.int64)[:, None], block).any(0)]
        while block.size and len(kept) < most:
            kept.append(block[0])
            block = block[1:][~clash(block[0], block[1:])]
        if len(kept) >= most:
            break
    return kept

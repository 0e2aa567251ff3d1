"""Pooling over windows (MaxPool, AveragePool, LpPool), everything (Global*) and regions (RoiAlign, MaxRoiPool)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, contents, dims, readable, traced
from transmuter.lowering.linear import accumulator
from transmuter.lowering.platform import on_cpu
from transmuter.lowering.registry import operator
from transmuter.lowering.windows import Window, between, strided, window

_MOST_VIEWS = 9
"""How many elements of a window are combined as arrays of their own; more are left to XLA's reduce_window."""
_MANY_CHANNELS = 16
"""From so many on, the CPU pools with channels last, as it convolves: in a quarter of the time."""


def _pooled(x: Array, by: Window, combine: Callable[..., Any], neutral: Any) -> jax.Array:
    """`x`, whose last dimensions are spatial, with the elements of each window combined."""
    neutral, rank = np.asarray(neutral, x.dtype), len(by.size)
    has_channels = x.ndim == rank + 2 and isinstance(x.shape[1], int)
    if not (on_cpu() and has_channels and x.shape[1] >= _MANY_CHANNELS):
        return _along_each(x, by, combine, neutral, x.ndim - rank)
    return jnp.moveaxis(_along_each(jnp.moveaxis(x, 1, -1), by, combine, neutral, 1), -1, 1)


def _along_each(x: Array, by: Window, combine: Callable[..., Any], neutral: np.ndarray, first: int) -> jax.Array:
    """`x` with each window combined, one dimension after the other; `first` is the first spatial axis.

    All dimensions at once are as fast for windows of 3 by 3, but their gradient takes 4 to 20 times as long.
    """
    counts = by.positions(x.shape[first : first + len(by.size)])
    for dimension, (size, stride, dilation) in enumerate(zip(by.size, by.strides, by.dilations)):
        axis = first + dimension
        if size <= _MOST_VIEWS or dilation > 1:  # with dilation, reduce_window has no gradient of the maximum
            x = functools.reduce(combine, _views(x, by, dimension, counts, neutral, axis))
        else:
            x = _bordered(x, by, dimension, neutral, axis)
            sizes, strides = ([n if i == axis else 1 for i in range(x.ndim)] for n in (size, stride))
            x = lax.reduce_window(x, neutral, combine, sizes, strides, "VALID")
    return x


def _bordered(x: Array, by: Window, dimension: int, value: Any, axis: int) -> Array:
    """`x` with the padding of a spatial dimension around its axis."""
    borders = [(0, 0, 0)] * x.ndim
    before, after = by.padding[dimension]
    borders[axis] = (before, after + by.overhang[dimension], 0)
    return x if set(borders) == {(0, 0, 0)} else lax.pad(x, value, borders)


def _views(
    x: Array, by: Window, dimension: int, counts: tuple[Any, ...], value: Any, axis: int | None = None
) -> list[jax.Array]:
    """What the elements of the window's `dimension` see of `x` at each of its positions, one array for each.

    Its axis is given where the spatial ones are not the last.
    """
    axis = x.ndim - len(by.size) + dimension if axis is None else axis
    x = _bordered(x, by, dimension, value, axis)
    if on_cpu() and by.size[dimension] > 1:
        x = lax.optimization_barrier(x)  # XLA would compute what leads to it once per view
    dilation, stride = by.dilations[dimension], by.strides[dimension]
    return [strided(x, axis, i * dilation, counts[dimension], stride) for i in range(by.size[dimension])]


def _lowest(dtype: np.dtype) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


# ---- windows -------------------------------------------------------------------------------------------------------


@operator()
def MaxPool(x, *, auto_pad, ceil_mode, dilations, kernel_shape, pads, storage_order, strides, output_count):
    """With auto_pad VALID, ceil_mode makes no difference, in the specification's formulas for all poolings, but in ONNX
    Runtime it does. A window of nothing but padding gives -inf, there the lowest finite number."""
    by = window(x.shape[2:], kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    y = _pooled(x, by, lax.max, _lowest(x.dtype))
    return (y, _places(x, by, storage_order)) if output_count > 1 else y


@operator(domain="com.microsoft")
def NhwcMaxPool(x, *, kernel_shape, auto_pad="NOTSET", ceil_mode=0, dilations=None, pads=None, strides=None):
    by = window(x.shape[1:-1], kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    return jnp.moveaxis(_pooled(jnp.moveaxis(x, -1, 1), by, lax.max, _lowest(x.dtype)), 1, -1)


@operator(domain="com.microsoft")
def MaxpoolWithMask(x, mask, *, kernel_shape, auto_pad="NOTSET", pads=None, storage_order=0, strides=None):
    """In each row of a window the elements from the first masked one on do not count, but an image's first one always
    does. A window where none counts gives the lowest number. Masks repeat over batch and channels; ONNX Runtime
    misplaces all but the first."""
    by, last = window(x.shape[2:], kernel_shape, strides, pads, None, auto_pad), len(kernel_shape) - 1
    lowest = np.asarray(np.finfo(x.dtype).min, x.dtype)
    seen = jnp.resize(mask != 0, x.shape)
    if last:
        seen = seen.at[(..., *[0] * len(by.size))].set(True)
    counts = by.positions(x.shape[2:])
    going = itertools.accumulate(_views(seen, by, last, counts, np.True_), jnp.logical_and)
    views = zip(going, _views(x, by, last, counts, lowest))
    rows = functools.reduce(lax.max, (jnp.where(seen, view, lowest) for seen, view in views))
    by = replace(by, size=(*by.size[:-1], 1), strides=(*by.strides[:-1], 1), padding=(*by.padding[:-1], (0, 0)))
    return _pooled(rows, by, lax.max, lowest)


def _places(x: Array, by: Window, storage_order: int | None) -> jax.Array:
    """Where in `x`, as one row of elements, the first of the largest elements of each window is."""
    batch, channels, *spatial = x.shape
    order = "F" if storage_order else "C"
    place = np.arange(math.prod(spatial), dtype=np.int64).reshape(spatial, order=order)
    x, place, counts = lax.stop_gradient(x), jnp.broadcast_to(traced(place), x.shape), by.positions(spatial)
    for dimension in reversed(range(len(spatial))):
        values = _views(x, by, dimension, counts, np.asarray(_lowest(x.dtype), x.dtype))
        places = _views(place, by, dimension, counts, np.asarray(-1, place.dtype))
        x, place = functools.reduce(_larger, zip(values, places))
    start = jnp.arange(batch * channels, dtype=place.dtype) * math.prod(spatial)
    return place + jnp.reshape(start, (batch, channels, *(1,) * len(spatial)))


def _larger(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Of two values with their places the larger one, else the first that is not in the padding (-1)."""
    second = (b[0] > a[0]) | (a[1] < 0)
    return jnp.where(second, b[0], a[0]), jnp.where(second, b[1], a[1])


@operator()
def AveragePool(x, *, auto_pad, ceil_mode, count_include_pad, dilations, kernel_shape, pads, strides):
    by = window(x.shape[2:], kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    total = _pooled(cast(x, accumulator(x)), by, lax.add, 0)
    return cast(total / _counts(by, x.shape[2:], count_include_pad, total.dtype), x.dtype)


def _counts(by: Window, spatial: tuple[Any, ...], include_pad: int | None, dtype: np.dtype) -> jax.Array:
    """How many elements each window has, 1 at least: of the array alone or with its padding, but not the overhang."""
    cells = jnp.ones(spatial, dtype)
    if include_pad:
        cells = lax.pad(cells, np.ones((), dtype), [(lo, hi, 0) for lo, hi in by.padding])
        by = replace(by, padding=((0, 0),) * len(by.size))
    return jnp.maximum(_pooled(cells, by, lax.add, 0), 1)


@operator()
def LpPool(x, *, auto_pad, ceil_mode, dilations, kernel_shape, p, pads, strides):
    by = window(x.shape[2:], kernel_shape, strides, pads, dilations, auto_pad, ceil_mode)
    return _root(_pooled(_power(x, p), by, lax.add, 0), p, x.dtype)


@operator(known=("output_shape",))
def MaxUnpool(x, places, output_shape=None, *, kernel_shape, pads, strides):
    """An `output_shape` beyond what the attributes say adds zeros at the end; places count without them, unlike in ONNX
    Runtime."""
    by = window(x.shape[2:], kernel_shape, strides, pads)
    spatial = [(n - 1) * s + k - lo - hi for n, s, k, (lo, hi) in zip(x.shape[2:], by.strides, by.size, by.padding)]
    shape = (*x.shape[:2], *spatial)
    y = jnp.zeros(math.prod(shape), x.dtype).at[jnp.reshape(places, -1)].set(jnp.reshape(x, -1))
    y = jnp.reshape(y, shape)
    if output_shape is None:
        return y
    return lax.pad(y, np.zeros((), x.dtype), [(0, wanted - n, 0) for wanted, n in zip(dims(output_shape), shape)])


def _power(x: Array, p: float) -> jax.Array:
    return jnp.abs(cast(x, accumulator(x))) ** p


def _root(total: jax.Array, p: float, dtype: np.dtype) -> jax.Array:
    """The p-th root, whose gradient at zero is zero."""
    if p == 1:
        return cast(total, dtype)
    positive = jnp.where(total > 0, total, 1)
    root = jnp.sqrt(positive) if p == 2 else positive ** (1 / p)
    return cast(jnp.where(total > 0, root, 0), dtype)


# ---- everything ----------------------------------------------------------------------------------------------------


def _spatial(x: Array) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@operator()
def GlobalAveragePool(x):
    """A sum of shares, not the share of a sum: XLA merges a last multiplication with what follows without rounding it,
    and then a Softmax of features around 1e10 subtracts a maximum that none of them has."""
    share = jnp.reciprocal(cast(jnp.asarray(math.prod(x.shape[2:])), accumulator(x)))
    return cast(jnp.sum(cast(x, accumulator(x)) * share, _spatial(x), keepdims=True), x.dtype)


@operator()
def GlobalMaxPool(x):
    return jnp.max(x, _spatial(x), keepdims=True)


@operator()
def GlobalLpPool(x, *, p):
    return _root(jnp.sum(_power(x, p), _spatial(x), keepdims=True), p, x.dtype)


# ---- regions -------------------------------------------------------------------------------------------------------


@operator()
def MaxRoiPool(x, rois, *, pooled_shape, spatial_scale):
    """Corners round half away from zero; a bin that has no element of the image is 0."""
    corners = rois * jnp.asarray(spatial_scale, rois.dtype)
    corners = cast(jnp.sign(corners) * jnp.floor(jnp.abs(corners) + 0.5), np.int32)
    y = x[cast(rois[:, 0], np.int32)]
    for axis, bins in ((3, pooled_shape[1]), (2, pooled_shape[0])):
        start, end = (corners[:, i, None, None, None] for i in (4 - axis, 6 - axis))
        size = jnp.maximum(end - start + 1, 1)
        place = lax.broadcasted_iota(np.int32, (x.shape[axis], *(1,) * (3 - axis)), 0)
        parts = []
        for i in range(bins):
            inside = (place >= start + i * size // bins) & (place < start - (-(i + 1) * size // bins))
            parts.append(jnp.max(jnp.where(inside, y, -np.inf), axis, keepdims=True))
        y = jnp.concatenate(parts, axis)
    return jnp.where(y == -np.inf, 0, y)


@operator()
def RoiAlign(x, rois, batch_indices, *, mode, output_height, output_width, sampling_ratio, spatial_scale):
    return RoiAlign_16(
        x,
        rois,
        batch_indices,
        coordinate_transformation_mode="output_half_pixel",
        mode=mode,
        output_height=output_height,
        output_width=output_width,
        sampling_ratio=sampling_ratio,
        spatial_scale=spatial_scale,
    )


@operator()
def RoiAlign_16(
    x,
    rois,
    batch_indices,
    *,
    coordinate_transformation_mode,
    mode,
    output_height,
    output_width,
    sampling_ratio,
    spatial_scale,
):
    """The maximum is taken over the four weighted neighbours of each sample, as the reference and ONNX Runtime do."""
    wide, half_pixel = accumulator(x), coordinate_transformation_mode == "half_pixel"
    corners = cast(rois, wide) * jnp.asarray(spatial_scale, wide) - (0.5 if half_pixel else 0)
    start, size = corners[:, :2], corners[:, 2:] - corners[:, :2]
    if not half_pixel:
        size = jnp.maximum(size, 1)
    bins = jnp.asarray([output_width, output_height], wide)
    step = size / bins
    if sampling_ratio:
        samples, most = jnp.full(step.shape, sampling_ratio, wide), (sampling_ratio, sampling_ratio)
    else:
        samples = jnp.ceil(step)
        samples = jnp.where((samples - 1) * bins >= size, samples - 1, samples)  # XLA may round the quotient up
        counted = readable(samples, "rois") if mode == "max" else contents(samples)
        most = None if counted is None else [int(n) for n in np.max(counted, 0, initial=1)]
    columns, rows = (
        (start[:, i], step[:, i], samples[:, i], bins, x.shape[3 - i])
        for i, bins in enumerate((output_width, output_height))
    )
    image, batch = jnp.moveaxis(cast(x, wide), 1, -1), cast(batch_indices, np.int32)
    if most is not None:
        y = _sampled(image, batch, _grid(*rows, most[1]), _grid(*columns, most[0]), mode)
    else:
        y = _weighted(image, batch, _shares(*rows), _shares(*columns))
    if mode == "avg":
        y = y / jnp.reshape(jnp.maximum(samples[:, 0] * samples[:, 1], 1), (-1, 1, 1, 1))
    return cast(jnp.moveaxis(y, -1, 1), x.dtype)


def _grid(start, step, samples, bins: int, size: int, most: int):
    """Along one axis the samples (regions, bins, `most`): which exist, and the two elements each lies between."""
    start, step, samples = (v[:, None, None] for v in (start, step, samples))
    number = jnp.arange(most, dtype=start.dtype)
    position = start + step * (jnp.arange(bins, dtype=start.dtype)[:, None] + (number + 0.5) / jnp.maximum(samples, 1))
    exists = jnp.broadcast_to(number < samples, position.shape)
    near = exists & (position >= -1) & (position <= size)
    neighbours = between(jnp.clip(position, 0, size - 1), size)
    return exists, [(index, jnp.where(near, share, 0)) for index, share in neighbours]


def _sampled(image: jax.Array, batch: jax.Array, rows, columns, mode: str) -> jax.Array:
    """The sum or maximum of the samples in each bin, (regions, rows, columns, channels), each from four neighbours."""
    batch = batch[:, None, None, None, None]
    (row_exists, rows), (column_exists, columns) = rows, columns
    terms = []
    for (row, row_share), (column, column_share) in itertools.product(rows, columns):
        share = row_share[:, :, :, None, None] * column_share[:, None, None]
        terms.append(image[batch, row[:, :, :, None, None], column[:, None, None]] * share[..., None])
    if mode == "avg":
        return jnp.sum(functools.reduce(jnp.add, terms), (2, 4))
    exists = row_exists[:, :, :, None, None] & column_exists[:, None, None]
    y = jnp.max(jnp.where(exists[..., None], functools.reduce(jnp.maximum, terms), -np.inf), (2, 4))
    return jnp.where(y == -np.inf, 0, y)


def _shares(start, step, samples, bins: int, size: int) -> jax.Array:
    """Along one axis how much each element counts in each bin (regions, bins, `size`), for any number of samples.

    Samples are more than half an element apart: at most six, from the one before the first, come near an element.
    """
    start, step, samples = (v[:, None, None] for v in (start, step, samples))
    start = start + step * jnp.arange(bins, dtype=start.dtype)[:, None]
    apart = jnp.where(samples > 0, step / jnp.maximum(samples, 1), 1)
    element = jnp.arange(size, dtype=start.dtype)
    first = jnp.maximum(jnp.ceil((element - 1 - start) / apart - 0.5) - 1, 0)
    total = jnp.zeros((), start.dtype)
    for i in range(6):
        position = start + apart * (first + i + 0.5)
        near = (first + i < samples) & (position >= -1) & (position <= size)
        share = jnp.maximum(1 - jnp.abs(element - jnp.clip(position, 0, size - 1)), 0)
        total = total + jnp.where(near, share, 0)
    return total


def _weighted(image: jax.Array, batch: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Sums over the image weighted by `rows` and `columns`, one region after the other."""

    def one(region):
        index, row, column = region
        return jnp.einsum("ih,hwc,jw->ijc", row, image[index], column)

    return lax.map(one, (batch, rows, columns))

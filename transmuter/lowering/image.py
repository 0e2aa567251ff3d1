"""Images: resizing, sampling at the points of a grid, decoding."""

from __future__ import annotations

import functools
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter.lowering.arrays import Array, cast, dims, is_string, xp
from transmuter.lowering.registry import operator


def _wide(x: Array) -> Array:
    """`x` in the dtype in which it is interpolated: float32, or float64 and complex numbers as they are."""
    if is_string(x):
        raise ValueError("strings cannot be interpolated")
    return x if x.dtype == np.float64 or x.dtype.kind == "c" else cast(x, np.float32)


def _linear(distance: Array) -> Array:
    return xp.maximum(1 - abs(distance), 0)


def _cubic(distance: Array, a: float = -0.75) -> Array:
    """The kernel of cubic convolution, with the slope `a` at a distance of 1."""
    d = abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = (((d - 5) * d + 8) * d - 4) * a
    return xp.where(d < 1, near, xp.where(d < 2, far, 0))


# ---- resizing ------------------------------------------------------------------------------------------------------
#
# Resizing is separable, and where the elements of a resized axis come from depends on shapes alone. So one axis after
# the other is read at known indices, with known weights.


@dataclass(frozen=True)
class _Axis:
    """An axis to resize from `original` to `resized` elements. `length` is `resized` before rounding."""

    number: int
    original: Any
    resized: Any
    scale: float
    length: float
    roi: tuple[float, float]


@dataclass(frozen=True)
class _Resampling:
    """How Resize reads an axis: the operator's attributes, by default what they are before version 11."""

    mode: str = "nearest"
    coordinate_transformation_mode: str = "asymmetric"
    nearest_mode: str = "floor, or ceil to shrink"
    cubic_coeff_a: float = -0.75
    exclude_outside: int = 0
    extrapolation_value: float = 0.0
    antialias: int = 0

    @property
    def crops(self) -> bool:
        return self.coordinate_transformation_mode == "tf_crop_and_resize"

    def positions(self, axis: _Axis) -> np.ndarray:
        """Where the elements of the resized axis lie in the original one: in float32, to round as ONNX Runtime does."""
        i = np.arange(axis.resized, dtype=np.float32)
        n, scale = axis.original, np.float32(axis.scale)
        match self.coordinate_transformation_mode:
            case "asymmetric":
                return i / scale
            case "tf_half_pixel_for_nn":
                return (i + 0.5) / scale
            case "half_pixel":
                return (i + 0.5) / scale - 0.5
            case "half_pixel_symmetric":
                shift = np.float32(n / 2) * (1 - np.float32(axis.resized) / np.float32(axis.length))
                return shift + (i + 0.5) / scale - 0.5
            case "pytorch_half_pixel":
                return (i + 0.5) / scale - 0.5 if axis.resized > 1 else i
            case "align_corners":  # of the length that is not rounded, as the conformance suite has it
                return i * (n - 1) / np.float32(axis.length - 1) if axis.length != 1 else i
            case "tf_crop_and_resize":
                start, end = np.float32(axis.roi)
                if axis.resized == 1:
                    return i + (start + end) / 2 * (n - 1)
                return start * (n - 1) + i * (end - start) * (n - 1) / (axis.resized - 1)
        raise ValueError(f"the coordinate transformation mode {self.coordinate_transformation_mode!r} is not defined")

    def nearest(self, positions: np.ndarray, axis: _Axis) -> np.ndarray:
        """The index into the original axis for each resized element."""
        match self.nearest_mode:
            case "round_prefer_floor":
                index = np.ceil(positions - 0.5)
            case "round_prefer_ceil":
                index = np.floor(positions + 0.5)
            case "floor":
                index = np.floor(positions)
            case "ceil":
                index = np.ceil(positions)
            case _:
                index = np.floor(positions) if axis.scale >= 1 else np.ceil(positions)
        return np.clip(index, 0, axis.original - 1).astype(np.int32)

    def taps(self, positions: np.ndarray, axis: _Axis) -> tuple[np.ndarray, np.ndarray]:
        """Indices into the original axis and their weights, a row for each resized element.

        To antialias is to stretch the kernel by as much as the axis shrinks.
        """
        kernel, radius = (_linear, 1) if self.mode == "linear" else (lambda d: _cubic(d, self.cubic_coeff_a), 2)
        stretch = max(1.0, 1 / axis.scale) if self.antialias else 1.0
        index = np.ceil(positions - radius * stretch)[:, None] + np.arange(math.ceil(2 * radius * stretch))
        weights = kernel((index - positions[:, None]) / stretch)
        if self.exclude_outside:
            weights = np.where((index >= 0) & (index < axis.original), weights, 0)
        total = weights.sum(axis=1, keepdims=True)
        return np.clip(index, 0, axis.original - 1).astype(np.int32), weights / np.where(total == 0, 1, total)


def _resize(x: Array, axes: Sequence[_Axis], resampling: _Resampling) -> Array:
    if resampling.mode not in ("nearest", "linear", "cubic"):
        raise ValueError(f"the mode {resampling.mode!r} is not defined")
    y = x if resampling.mode == "nearest" else _wide(x)
    for axis in axes:
        if axis.scale == 1 and axis.resized == axis.original and not resampling.crops:
            continue
        if not isinstance(axis.original, int) or not isinstance(axis.resized, int):
            raise ValueError(f"axis {axis.number} is resized from {axis.original} to {axis.resized} elements: fix both")
        if axis.original == axis.resized == 0:  # twice as long as nothing
            continue
        positions = resampling.positions(axis)
        if resampling.mode == "nearest":
            resized = _pick(y, axis.number, resampling.nearest(positions, axis))
        else:
            resized = _interpolate(y, axis.number, *resampling.taps(positions, axis))
        if resampling.crops:
            outside = _along(axis.number, y, (positions < 0) | (positions > axis.original - 1))
            resized = jnp.where(outside, jnp.asarray(resampling.extrapolation_value, y.dtype), resized)
        y = resized
    return cast(y, x.dtype)


def _along(axis: int, x: Array, v: np.ndarray) -> np.ndarray:
    """A vector in a shape that lines up with an axis of `x`."""
    return v.reshape(-1, *[1] * (x.ndim - axis - 1))


def _pick(x: Array, axis: int, index: np.ndarray) -> Array:
    """The elements of `x` at `index` along an axis; to repeat all equally often is twice as fast as to gather them."""
    repeats = len(index) // x.shape[axis]
    if np.array_equal(index, np.repeat(np.arange(x.shape[axis]), repeats)):
        return xp.repeat(x, repeats, axis)
    return xp.take(x, index, axis, mode="clip")


def _interpolate(x: Array, axis: int, index: np.ndarray, weights: np.ndarray) -> Array:
    """Weighted sums of the elements of `x` at `index` along an axis.

    It is quick to gather whole rows, but not to gather within them: along the last axis a product with the weights as a
    matrix is faster, as long as that is not too sparse. (It spreads an infinity or NaN over its row.)
    """
    n, taps = x.shape[axis], weights.shape[1]
    weights = weights.astype(x.dtype)
    if axis == x.ndim - 1 and n <= 64 * taps:
        matrix = np.zeros((n, len(index)), x.dtype)
        np.add.at(matrix, (index.T, np.arange(len(index))), weights.T)
        return jnp.matmul(x, matrix)
    terms = (jnp.take(x, i, axis, mode="clip") * _along(axis, x, w) for i, w in zip(index.T, weights.T, strict=True))
    return functools.reduce(jnp.add, terms)


def _scaled(
    x: Array, scales: np.ndarray, axes: Sequence[int], regions: Sequence[tuple[float, float]]
) -> Iterator[_Axis]:
    """Axes that become `scales` as long, rounded down (whatever part of it is the region of interest)."""
    for axis, scale, roi in zip(axes, scales.tolist(), regions, strict=True):
        n = x.shape[axis]
        if scale == 1:
            yield _Axis(axis, n, n, scale, n, roi)
        elif isinstance(n, int):
            length = float(np.float32(scale) * np.float32(n))
            yield _Axis(axis, n, int(length), scale, length, roi)
        else:
            raise ValueError(f"axis {axis}, which is scaled by {scale}, has the unknown length {n}: fix it")


def _sized(
    x: Array, sizes: Sequence[Any], axes: Sequence[int], regions: Sequence[tuple[float, float]], policy: str
) -> Iterator[_Axis]:
    """Axes that become `sizes` long, or as near to it as `policy` allows at the same aspect ratio."""
    scales = [1.0 if size == x.shape[axis] else size / x.shape[axis] for axis, size in zip(axes, sizes, strict=True)]
    if policy != "stretch":
        scale = (min if policy == "not_larger" else max)(scales)
        scales = [scale] * len(axes)
        sizes = [math.floor(scale * x.shape[axis] + 0.5) for axis in axes]
    for axis, size, scale, roi in zip(axes, sizes, scales, regions, strict=True):
        n = x.shape[axis]
        yield _Axis(axis, n, size, scale, size if policy == "stretch" else scale * n, roi)


@operator()
def Upsample(X, *, height_scale, width_scale, mode):
    return Upsample_7(X, scales=(1.0, 1.0, height_scale, width_scale), mode=mode)


@operator()
def Upsample_7(X, *, scales, mode):
    return Resize(X, np.asarray(scales, np.float32), mode=mode)


@operator("Upsample_9", "Resize_10", known=("scales",))
def Resize(X, scales, *, mode):
    everything = range(X.ndim)
    axes = _scaled(X, scales, everything, [(0.0, 1.0) for _ in everything])
    return _resize(X, axes, _Resampling(mode="linear" if mode == "bilinear" else mode))


@operator(known=("roi", "scales", "sizes"))
def Resize_11(
    X,
    roi=None,
    scales=None,
    sizes=None,
    *,
    coordinate_transformation_mode,
    cubic_coeff_a,
    exclude_outside,
    extrapolation_value,
    mode,
    nearest_mode,
    antialias=0,
    axes=None,
    keep_aspect_ratio_policy="stretch",
):
    """Integers are interpolated in float32 and truncated. To antialias means the same wherever the positions lie, which
    it does not in ONNX Runtime, and a region of interest counts on axes that keep their length, too.

    Where a scale gives a length that is no integer, align_corners goes by that length, as the conformance suite does;
    ONNX Runtime goes by the rounded one.
    """
    axes = range(X.ndim) if axes is None else [axis % X.ndim for axis in axes]
    roi, scales, sizes = (None if v is None or not v.size else v for v in (roi, scales, sizes))
    if (scales is None) == (sizes is None):
        raise ValueError("exactly one of scales and sizes has to be given")
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    if crops and roi is None:
        raise ValueError("tf_crop_and_resize needs a region of interest")
    regions = roi.reshape(2, -1).T.tolist() if crops else [(0.0, 1.0) for _ in axes]
    resampling = _Resampling(
        mode,
        coordinate_transformation_mode,
        nearest_mode,
        cubic_coeff_a,
        exclude_outside,
        extrapolation_value,
        antialias,
    )
    if sizes is None:
        return _resize(X, _scaled(X, scales, axes, regions), resampling)
    return _resize(X, _sized(X, dims(sizes), axes, regions, keep_aspect_ratio_policy), resampling)


# ---- sampling at points --------------------------------------------------------------------------------------------


def _reflect(position: jax.Array, low: float, high: float) -> jax.Array:
    """`position`, mirrored at `low` and `high` until it lies between them."""
    span = high - low
    if span == 0:
        return jnp.full_like(position, low)
    return high - abs(jnp.mod(position - low, 2 * span) - span)


def _grid_taps(
    coordinate: jax.Array, n: int, mode: str, padding: str, align_corners: int
) -> Iterator[tuple[jax.Array, jax.Array | None, jax.Array | None]]:
    """What an axis of `n` elements has at coordinates from -1 to 1: indices, their weights, which of them count."""
    position = (coordinate + 1) / 2 * (n - 1) if align_corners else ((coordinate + 1) * n - 1) / 2
    position = jnp.round(position) if mode == "nearest" else position
    low, high = (0, n - 1) if align_corners else (-0.5, n - 0.5)
    outside = (position < low) | (position > high)
    if padding == "border":
        position = jnp.where(outside, jnp.clip(position, 0, n - 1), position)
    elif padding == "reflection":
        position = jnp.where(outside, _reflect(position, low, high), position)
    first = jnp.floor(position)
    kernel, offsets = {"nearest": (None, (0,)), "linear": (_linear, (0, 1)), "cubic": (_cubic, (-1, 0, 1, 2))}[mode]
    for offset in offsets:
        at = first + offset
        counts = (at >= 0) & (at <= n - 1) if padding == "zeros" else None
        weight = kernel(position - at) if kernel else None
        at = jnp.trunc(_reflect(at, low, high)) if padding == "reflection" else at
        yield cast(jnp.clip(at, 0, n - 1), np.int32), weight, counts


@operator()
def GridSample(X, grid, *, align_corners, mode, padding_mode):
    """Each axis is padded for itself, and before it is interpolated, in cubic mode too."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    lengths, points = X.shape[2:], grid.shape[1:-1]
    if len(lengths) != grid.shape[-1]:
        raise ValueError(f"points of {grid.shape[-1]} coordinates do not fit {len(lengths)} spatial axes")
    x = X if mode == "nearest" else _wide(X)
    flat = x.reshape(*x.shape[:2], math.prod(lengths))
    coordinates = _wide(grid).reshape(grid.shape[0], math.prod(points), len(lengths))
    axes = [
        tuple(_grid_taps(coordinates[..., -1 - i], n, mode, padding_mode, align_corners)) for i, n in enumerate(lengths)
    ]
    terms = []
    for taps in itertools.product(*axes):
        index = functools.reduce(lambda i, axis: i * axis[0] + axis[1][0], zip(lengths, taps, strict=True), 0)
        term = jnp.take_along_axis(flat, index[:, None], axis=2, mode="clip")
        if padding_mode == "zeros":
            inside = functools.reduce(jnp.logical_and, [counts for _, _, counts in taps])
            term = jnp.where(inside[:, None], term, jnp.zeros((), x.dtype))
        if mode != "nearest":
            term = term * cast(functools.reduce(jnp.multiply, [weight for _, weight, _ in taps]), x.dtype)[:, None]
        terms.append(term)
    return cast(functools.reduce(jnp.add, terms), X.dtype).reshape(*X.shape[:2], *points)


@operator("GridSample", domain="com.microsoft")
def _grid_sample(X, Grid, *, align_corners=0, mode="bilinear", padding_mode="zeros"):
    return GridSample(X, Grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


@operator(known=("size",))
def AffineGrid(theta, size, *, align_corners):
    """With align_corners the only point of an axis is at -1, as in the operator's function; in ONNX Runtime at 0."""
    lengths = dims(size)[2:]
    centers = [(2 * np.arange(n) + 1) / n - 1 for n in lengths]
    if align_corners:
        centers = [np.linspace(-1, 1, n) for n in lengths]
    points = np.stack([*reversed(np.meshgrid(*centers, indexing="ij")), np.ones(lengths)], axis=-1)
    flat = points.reshape(-1, points.shape[-1])
    grid = jnp.matmul(flat.astype(_wide(theta).dtype), jnp.swapaxes(_wide(theta), 1, 2))
    return cast(grid.reshape(theta.shape[0], *lengths, len(lengths)), theta.dtype)


# ---- decoding ------------------------------------------------------------------------------------------------------


@operator(known=("encoded_stream",))
def ImageDecoder(encoded_stream, *, pixel_format):
    """A stream that cannot be decoded gives an image without pixels, as the specification wants it."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ValueError("decoding images needs Pillow: pip install pillow") from error
    if pixel_format not in ("RGB", "BGR", "Grayscale"):
        raise ValueError(f"the pixel format {pixel_format!r} is not defined")
    channels = 1 if pixel_format == "Grayscale" else 3
    try:
        with Image.open(io.BytesIO(encoded_stream.tobytes())) as image:
            pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    except (UnidentifiedImageError, OSError):
        return np.zeros((0, 0, channels), np.uint8)
    pixels = pixels.reshape(*pixels.shape[:2], channels)
    return pixels[..., ::-1].copy() if pixel_format == "BGR" else pixels

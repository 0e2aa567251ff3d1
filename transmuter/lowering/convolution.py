"""Convolutions: Conv, ConvTranspose, ConvInteger, DeformConv, CausalConvWithState, Col2Im, and those of ONNX Runtime.

All are one function, `convolve`. On the CPU it computes with channels last and splits a kernel's work by what XLA is
fast at; the transposes around it cancel between layers, and those of a weight are computed once per compile.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator as operators
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, dims, is_string
from transmuter.lowering.linear import accumulator, activated, in_int8, integer_matmul, matmul
from transmuter.lowering.named import named
from transmuter.lowering.platform import on_cpu
from transmuter.lowering.registry import operator
from transmuter.lowering.windows import Window, between, window

_MOST_TAPS = 128
"""Larger depthwise kernels are left to XLA: each element of the kernel is an operation of its own otherwise."""
_BLOCK = 32
"""Groups of a convolution are joined until they have so many channels."""
_MOST_BLOCKS = 32
"""Each is a convolution of its own; more are a loop."""
_FEW_PRODUCTS = 64
"""Up to so many per result, a convolution with strides is faster as one of more channels without (0.7 of the time for
the first layer of a MobileNet), though it multiplies more."""
DEPTHWISE = "depthwise convolution"
"""The name of one in a trace, whose place a kernel can take; its params are `by`, a `Window`."""
_COLUMNS = 1024
"""Copies of what integer kernels see have about so many columns at most, which bounds their memory."""


def convolve(x: Array, w: Array, by: Window, group: int = 1, *, channels_last: bool = False) -> jax.Array:
    """`x` (batch, channels, spatial) convolved with `w` (outputs, channels of a group, spatial).

    Halves accumulate in float32.
    """
    *spatial, channels = x.shape[1:] if channels_last else (*x.shape[2:], x.shape[1])
    _check_fit(spatial, channels, w, by, group)
    if not on_cpu():
        return _in_one_piece(x, w, by, group, channels_last)
    y = _on_cpu(x if channels_last else jnp.moveaxis(x, 1, -1), w, by, group)
    y = cast(y, x.dtype)
    return y if channels_last else jnp.moveaxis(y, -1, 1)


def _check_fit(spatial: Sequence[Any], channels: int, w: Array, by: Window, group: int) -> None:
    if by.size != w.shape[2:]:
        raise ValueError(f"the attributes describe a kernel of shape {by.size}, the weight has one of {w.shape[2:]}")
    by.positions(spatial)  # which checks that the kernel fits
    if channels != w.shape[1] * group or w.shape[0] % group:
        raise ValueError(f"{channels} channels and a weight of shape {w.shape} do not fall into {group} groups")


def _in_one_piece(x: Array, w: Array, by: Window, group: int, channels_last: bool) -> jax.Array:
    spatial = "0123456789"[: len(by.size)]
    layout = f"N{spatial}C" if channels_last else f"NC{spatial}"
    return _xla(x, w, by, (layout, f"OI{spatial}", layout), group)


def _on_cpu(x: Array, w: Array, by: Window, group: int) -> jax.Array:
    """`convolve` with channels last; shifted multiply-adds are 10 to 50 times as fast as XLA's depthwise kernels."""
    if group == 1:
        return _dense(x, jnp.moveaxis(w, (1, 0), (-2, -1)), by)
    if w.shape[1] == 1 and by.taps <= _MOST_TAPS:
        return _depthwise(x, jnp.moveaxis(w[:, 0], 0, -1), by, group)
    return _grouped(x, w, by, group)


def _grouped(x: Array, w: Array, by: Window, group: int) -> jax.Array:
    """Groups of few channels are joined to blocks of about `_BLOCK`, with zeros from one to the other.

    Measured against one grouped convolution of XLA, the layers of a ResNeXt-50 (32 groups) take 0.25 to 0.9 of the
    time, and 0.4 to 0.7 of that of a loop over all groups.
    """
    outputs, channels, *size = w.shape
    most = max(_BLOCK // channels, 1) if by.taps <= _MOST_TAPS else 1
    joined = next(n for n in range(min(most, group), 0, -1) if group % n == 0)
    blocks = group // joined
    kernels = jnp.reshape(w, (blocks, joined, outputs // group, channels, *size))
    none, zero, rank = (0, 0, 0), np.zeros((), w.dtype), len(size)
    places = [(i * channels, (joined - 1 - i) * channels, 0) for i in range(joined)]
    padded = [lax.pad(kernels[:, i], zero, [none, none, place, *[none] * rank]) for i, place in enumerate(places)]
    kernels = jnp.concatenate(padded, 1)
    kernels = jnp.moveaxis(kernels, (2, 1), (-2, -1))
    if blocks <= _MOST_BLOCKS:
        parts = jnp.split(x, blocks, -1)
        return jnp.concatenate([_dense(part, kernels[i], by) for i, part in enumerate(parts)], -1)
    parts = jnp.moveaxis(jnp.reshape(x, (*x.shape[:-1], blocks, joined * channels)), -2, 0)
    y = jnp.moveaxis(lax.map(lambda pair: _dense(*pair, by), (parts, kernels)), 0, -2)
    return jnp.reshape(y, (*y.shape[:-2], outputs))


def _dense(x: Array, kernel: Array, by: Window) -> jax.Array:
    """One group: `kernel` is (spatial, channels, outputs)."""
    x, kernel = cast(x, accumulator(x)), cast(kernel, accumulator(kernel))
    if by.is_pointwise:
        every = (slice(None), *(slice(None, None, s) for s in by.strides))
        return matmul(x[every], jnp.reshape(kernel, kernel.shape[-2:]))
    counts = by.positions(x.shape[1:-1])
    is_plain = set(by.dilations + by.stretch) == {1} and all(isinstance(n, int) and n > 0 for n in counts)
    if is_plain and min(by.strides) > 1 and by.taps * x.shape[-1] <= _FEW_PRODUCTS:
        x, kernel, by = _strides_as_channels(x, kernel, by, counts)
    spatial = "0123456789"[: len(by.size)]
    return _xla(x, kernel, by, (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"))


def _strides_as_channels(
    x: Array, kernel: Array, by: Window, counts: Sequence[int]
) -> tuple[jax.Array, jax.Array, Window]:
    """The same convolution without strides: what lies between two positions of the kernel becomes channels."""
    rank, steps = len(by.size), by.strides
    taps = tuple(-(-k // s) for k, s in zip(by.size, steps))
    ends = [(n - 1 + t) * s - lo - size for n, t, s, (lo, _), size in zip(counts, taps, steps, by.padding, x.shape[1:])]
    borders = [(lo, end, 0) for (lo, _), end in zip(by.padding, ends)]
    x = _split(lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *borders, (0, 0, 0)]), range(1, rank + 1), steps)
    missing = [(0, t * s - k) for k, t, s in zip(by.size, taps, steps)]
    kernel = _split(jnp.pad(kernel, [*missing, (0, 0), (0, 0)]), range(rank), steps)
    none = ((0, 0),) * rank
    return x, kernel, replace(by, size=taps, strides=(1,) * rank, padding=none, overhang=(0,) * rank)


def _split(x: jax.Array, axes: range, steps: Sequence[int]) -> jax.Array:
    """`x` with each step of these axes as one element, and what is in it as channels, the axis behind them."""
    shape = list(x.shape)
    for axis, step in zip(reversed(axes), reversed(steps)):
        shape[axis : axis + 1] = [shape[axis] // step, step]
    x, last = jnp.reshape(x, shape), axes.stop + len(axes)
    x = jnp.moveaxis(x, [axis + 1 + i for i, axis in enumerate(axes)], range(axes.stop, last))
    return jnp.reshape(x, (*x.shape[: axes.stop], math.prod(x.shape[axes.stop : last + 1]), *x.shape[last + 1 :]))


def _depthwise(x: Array, kernel: Array, by: Window, group: int) -> jax.Array:
    """Each channel has kernels of its own: `kernel` is (spatial, outputs)."""
    x, kernel = cast(x, accumulator(x)), cast(kernel, accumulator(kernel))
    if kernel.shape[-1] > group:
        x = jnp.repeat(x, kernel.shape[-1] // group, -1)
    return named(DEPTHWISE, _shifted, x, kernel, by=by)


def _shifted(x: jax.Array, kernel: jax.Array, *, by: Window) -> jax.Array:
    """A convolution with channels last of each channel with a kernel of its own, (spatial, channels)."""
    return functools.reduce(operators.add, (view * kernel[index] for index, view in by.views(x)))


def _xla(x: Array, kernel: Array, by: Window, layout: tuple[str, str, str], group: int = 1) -> jax.Array:
    if on_cpu():
        x, by = _padded_where_unusual(x, by, layout[0])
    return lax.conv_general_dilated(
        x,
        kernel,
        by.strides,
        by.padding,
        lhs_dilation=by.stretch,
        rhs_dilation=by.dilations,
        dimension_numbers=layout,
        feature_group_count=group,
    )


def _padded_where_unusual(x: Array, by: Window, layout: str) -> tuple[Array, Window]:
    """The same with padding of its own where a convolution's is less than none, or more than the kernel spans: XLA's
    CPU convolutions read beside an operand of which they are to cut off the start and pad the end. What is padded by
    more than the kernel spans has such a convolution for a gradient."""
    borders, padding, stretch = [(0, 0, 0)] * x.ndim, list(by.padding), list(by.stretch)
    for i, ((lo, hi), extent) in enumerate(zip(by.padding, by.extents)):
        if isinstance(lo, int) and isinstance(hi, int) and (lo < 0 or max(lo, hi) >= extent):
            borders[layout.index(str(i))] = (lo, hi, stretch[i] - 1)
            padding[i], stretch[i] = (0, 0), 1
    if padding == list(by.padding):
        return x, by
    return lax.pad(x, np.zeros((), x.dtype), borders), replace(by, padding=tuple(padding), stretch=tuple(stretch))


def _in_integers(x: Array, w: Array, x_zero: Array, w_zero: Array, by: Window, group: int) -> jax.Array:
    """`convolve` with channels last of int8 operands less their zero points, exact in int32.

    What the kernel sees at each position is copied side by side, up to `_COLUMNS` elements of a group at a time, and
    multiplied as a matrix. On a CPU that is 2 to 6 times as fast as XLA's convolution in float32.
    """
    outputs, channels = w.shape[:2]
    if channels == 1 and group > 1 and by.taps <= _MOST_TAPS:  # few enough products for exact sums in float32
        x, kernel = (
            cast(v, np.float32) - cast(zero, np.float32)
            for v, zero in ((x, x_zero), (jnp.moveaxis(w[:, 0], 0, -1), w_zero))
        )
        return cast(_depthwise(x, kernel, by, group), np.int32)
    kernel = jnp.moveaxis(jnp.reshape(w, (group, outputs // group, channels, by.taps)), (3, 2), (1, 2))
    w_zero = w_zero if w_zero.ndim == 0 else jnp.reshape(w_zero, (group, 1, outputs // group))
    views = [view for _, view in by.views(x, cast(x_zero, np.int8))]
    shape, step, total = views[0].shape[:-1], max(1, _COLUMNS // channels), np.int32(0)
    for some in (slice(i, i + step) for i in range(0, by.taps, step)):
        seen = jnp.stack(views[some], -2)
        seen = jnp.moveaxis(jnp.reshape(seen, (math.prod(shape), seen.shape[-2], group, channels)), 2, 0)
        columns = seen.shape[-2] * channels
        pair = jnp.reshape(seen, (group, math.prod(shape), columns)), jnp.reshape(kernel[:, some], (group, columns, -1))
        total += integer_matmul(*pair, x_zero, w_zero)
    return jnp.reshape(jnp.moveaxis(total, 0, -2), (*shape, outputs))


def _per_channel(vector: Array, like: Array) -> Array:
    """A vector over the channels, ready to broadcast against `like`, in which they are dimension 1."""
    return jnp.reshape(vector, (-1, *(1,) * (like.ndim - 2)))


@operator()
def Conv(x, w, b=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    by = window(x.shape[2:], kernel_shape or w.shape[2:], strides, pads, dilations, auto_pad)
    y = convolve(x, w, by, group)
    return y if b is None else y + _per_channel(b, y)


@operator()
def ConvInteger(x, w, x_zero_point=None, w_zero_point=None, *, auto_pad, dilations, group, kernel_shape, pads, strides):
    by = window(x.shape[2:], kernel_shape or w.shape[2:], strides, pads, dilations, auto_pad)
    _check_fit(x.shape[2:], x.shape[1], w, by, group)
    (x, x_zero), (w, w_zero) = in_int8(x, x_zero_point), in_int8(w, w_zero_point)
    x_zero, w_zero = (jnp.reshape(zero, ()) if np.size(zero) == 1 else zero for zero in (x_zero, w_zero))
    return jnp.moveaxis(_in_integers(jnp.moveaxis(x, 1, -1), w, x_zero, w_zero, by, group), -1, 1)


@operator()
def ConvTranspose(
    x, w, b=None, *, auto_pad, dilations, group, kernel_shape, output_padding, output_shape, pads, strides
):
    """An `output_shape` beyond what the kernel reaches gets zeros (and the bias) at its end. So does auto_pad SAME_*,
    where ONNX Runtime leaves the result shorter."""
    forward = window(x.shape[2:], kernel_shape or w.shape[2:], strides, pads, dilations)
    rank = len(forward.size)
    extra = output_padding or (0,) * rank
    padding = forward.padding
    if auto_pad in ("SAME_UPPER", "SAME_LOWER") and not output_shape:
        output_shape = [n * s for n, s in zip(x.shape[2:], forward.strides)]
    if output_shape:
        full = [(n - 1) * s + e for n, s, e in zip(x.shape[2:], forward.strides, forward.extents)]
        surplus = [f + more - wanted for f, more, wanted in zip(full, extra, output_shape[-rank:])]
        halves = [max(total, 0) // 2 if auto_pad == "SAME_UPPER" else (max(total, 0) + 1) // 2 for total in surplus]
        padding = [(half, total - half) for half, total in zip(halves, surplus)]
    elif auto_pad == "VALID":
        padding = [(0, 0)] * rank
    backward = replace(
        forward,
        strides=(1,) * rank,
        stretch=forward.strides,
        padding=tuple((e - 1 - lo, e - 1 - hi + more) for e, (lo, hi), more in zip(forward.extents, padding, extra)),
    )
    y = convolve(x, _mirrored(w, group), backward, group)
    return y if b is None else y + _per_channel(b, y)


@operator(domain="com.microsoft", known=("pads",))
def ConvTransposeWithDynamicPads(
    x,
    w,
    pads=None,
    b=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    output_padding=None,
    strides=None,
):
    given = {"auto_pad": auto_pad, "dilations": dilations, "group": group, "kernel_shape": kernel_shape}
    pads = None if pads is None else dims(pads)
    return ConvTranspose(x, w, b, **given, output_padding=output_padding, output_shape=None, pads=pads, strides=strides)


def _mirrored(w: Array, group: int) -> jax.Array:
    """The weight of a transposed convolution (channels, outputs of a group, spatial) as that of the forward one."""
    channels, outputs, *size = w.shape
    w = jnp.swapaxes(jnp.reshape(w, (group, channels // group, outputs, *size)), 1, 2)
    return jnp.flip(jnp.reshape(w, (group * outputs, channels // group, *size)), range(2, w.ndim - 1))


def causal(
    x: Array, w: Array, b: Array | None, past: Array | None, activation: str, dilation: int = 1
) -> tuple[jax.Array, jax.Array]:
    """A depthwise convolution (batch, channels, length) that sees what came before only, and `past` with `x` behind it.

    An absent past is as long as the kernel reaches back, and zero.
    """
    if activation not in ("none", "silu", "swish"):
        raise ValueError(f"there is no activation {activation!r}")
    reach = (w.shape[-1] - 1) * dilation
    if past is None:
        past = jnp.zeros((*x.shape[:2], reach), x.dtype)
    whole = jnp.concatenate([past, x], 2)
    x = whole[:, :, past.shape[2] - reach :]
    y = convolve(x, w, window(x.shape[2:], w.shape[2:], dilations=(dilation,)), w.shape[0])
    if b is not None:
        y = y + _per_channel(b, y)
    return y if activation == "none" else jax.nn.silu(y), whole


@operator()
def CausalConvWithState(x, w, b=None, past_state=None, *, activation):
    y, whole = causal(x, w, b, past_state, activation)
    return y, whole[:, :, whole.shape[2] - (w.shape[-1] - 1) :]


@operator(known=("image_shape", "block_shape"))
def Col2Im(x, image_shape, block_shape, *, dilations, pads, strides):
    """ONNX Runtime misplaces elements of some images that have one or three dimensions."""
    if is_string(x):
        raise ValueError("strings cannot be added up")
    image, block = dims(image_shape), dims(block_shape)
    by = window(image, block, strides, pads, dilations)
    counts = by.positions(image)
    y = jnp.reshape(x, (x.shape[0], x.shape[1] // by.taps, *block, *counts))
    axis = len(block) + 1  # where the positions of the first dimension are, once its kernel is summed up
    for k, d, s, n, count, (lo, _) in zip(block, by.dilations, by.strides, image, counts, by.padding):
        starts = [i * d - lo for i in range(k)]
        end = n - (count - 1) * s - 1
        parts = (_spread(y[:, :, i], axis, (start, end - start, s - 1)) for i, start in enumerate(starts))
        y = functools.reduce(operators.add, parts)
    return y


def _spread(x: Array, axis: int, borders: tuple[int, int, int]) -> jax.Array:
    """`x` with zeros before, after and between the elements of an axis; negative numbers of them cut off."""
    return lax.pad(x, np.zeros((), x.dtype), [borders if i == axis else (0, 0, 0) for i in range(x.ndim)])


@operator()
def DeformConv(x, w, offset, b=None, mask=None, *, dilations, group, kernel_shape, offset_group, pads, strides):
    by = window(x.shape[2:], kernel_shape or w.shape[2:], strides, pads, dilations)
    wide, result = accumulator(x), x.dtype
    x, w, offset = cast(x, wide), cast(w, wide), cast(offset, wide)
    batch, channels, *spatial = x.shape
    rank, counts = len(spatial), by.positions(spatial)
    offset = jnp.reshape(offset, (batch, offset_group, by.taps, rank, *counts))
    taps = np.indices(by.size).reshape(rank, by.taps)
    neighbours = []
    for axis, (tap, d, s, count, (lo, _)) in enumerate(zip(taps, by.dilations, by.strides, counts, by.padding)):
        regular = jnp.reshape(jnp.arange(count) * s - lo, (-1, *(1,) * (rank - 1 - axis)))
        regular = regular + jnp.asarray(tap * d).reshape(-1, *(1,) * rank)
        neighbours.append(between(cast(regular, x.dtype) + offset[:, :, :, axis], spatial[axis]))
    columns = 0
    flat = jnp.reshape(x, (batch, offset_group, channels // offset_group, math.prod(spatial)))
    for corner in itertools.product(*neighbours):
        place, weight = 0, 1 if mask is None else jnp.reshape(cast(mask, wide), (batch, offset_group, by.taps, *counts))
        for (index, share), n in zip(corner, spatial):
            place, weight = place * n + index, weight * share
        place = jnp.reshape(place, (batch, offset_group, 1, by.taps * math.prod(counts)))
        columns += jnp.take_along_axis(flat, place, -1) * jnp.reshape(weight, place.shape)
    columns = jnp.reshape(columns, (batch, group, channels // group * by.taps, math.prod(counts)))
    y = matmul(jnp.reshape(w, (group, w.shape[0] // group, -1)), columns)
    y = jnp.reshape(cast(y, result), (batch, w.shape[0], *counts))
    return y if b is None else y + _per_channel(b, y)


# ---- fused ---------------------------------------------------------------------------------------------------------


def _fused(channels_last):
    def fused_conv(
        x,
        w,
        b=None,
        z=None,
        *,
        activation=None,
        activation_params=None,
        auto_pad="NOTSET",
        dilations=None,
        group=1,
        kernel_shape=None,
        pads=None,
        strides=None,
    ):
        spatial = x.shape[1:-1] if channels_last else x.shape[2:]
        by = window(spatial, kernel_shape or w.shape[2:], strides, pads, dilations, auto_pad)
        y = convolve(x, w, by, group, channels_last=channels_last)
        if b is not None:
            y = y + (b if channels_last else _per_channel(b, y))
        if z is not None:
            y = y + z
        names = ("min", "max") if activation == "Clip" else ("alpha", "beta")
        return activated(y, activation, **dict(zip(names, activation_params or ())))

    return fused_conv


FusedConv = operator("FusedConv", domain="com.microsoft")(_fused(channels_last=False))
operator("NhwcConv", "NhwcFusedConv", domain="com.microsoft")(_fused(channels_last=True))

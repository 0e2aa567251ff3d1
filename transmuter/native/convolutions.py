"""Convolutions of float32 with channels last, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax
from jax.interpreters import mlir

from transmuter.native.library import run_eagerly
from transmuter.native.products import PANEL, unpacked

Wanted = Literal["output", "input", "kernel"]
_WANTED: tuple[Wanted, ...] = ("output", "input", "kernel")
"""As the kernel numbers them."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of an input [batch, spatial, channels] with one or two spatial dimensions.

    Attributes:
        wanted: What is computed: the `"output"` of an input and a kernel; the gradient of the `"input"`, of one of the
            output and a kernel; or the gradient of the `"kernel"`, of an input and a gradient of the output.
        groups: Into how many groups the channels fall.
        input, output, kernel: Sizes of the spatial dimensions.
        channels, features: Channels of the input and of the output, in each group.
        strides, dilations: Of the kernel's positions, and of its elements.
        low: Zeros before the first element of each spatial dimension.
        steps: Of the kernel's array (or the gradient's) in elements: along the spatial dimensions, the channels and the
            features. Groups follow each other along the features.
        is_packed: Whether the kernel is as `packed_kernel` makes it; only for the output.
    """

    wanted: Wanted
    batch: int
    groups: int
    channels: int
    features: int
    input: tuple[int, ...]
    output: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    low: tuple[int, ...]
    steps: tuple[int, ...]
    is_packed: bool = False


def packed_kernel(kernel: jax.Array, groups: int) -> jax.Array:
    """A kernel [spatial, channels, features of all groups] as the library reads it: packed matrices, one a group."""
    *inner, outputs = kernel.shape
    depth, features = math.prod(inner), outputs // groups
    panels = -(-features // PANEL)
    split = lax.reshape(kernel, (*inner, groups, features))
    if missing := panels * PANEL - features:
        split = lax.pad(split, np.zeros((), kernel.dtype), [(0, 0, 0)] * (len(inner) + 1) + [(0, missing, 0)])
    split = lax.reshape(split, (*inner, groups, panels, PANEL))  # dimensions are joined last: one copy does it all
    rank = len(inner)
    return lax.reshape(lax.transpose(split, (rank, rank + 1, *range(rank), rank + 2)), (groups, panels, depth, PANEL))


def convolution(first: jax.Array, second: jax.Array, how: Convolution, shape: Sequence[int]) -> jax.Array:
    """What is `how.wanted`, an array of this shape, of two float32 operands."""
    return convolution_p.bind(first, second, how=how, shape=tuple(shape))


convolution_p = jex.Primitive("cpu_convolution")


@convolution_p.def_abstract_eval
def _(first: Any, second: Any, *, how: Convolution, shape: tuple[int, ...]) -> Any:
    return jax.core.ShapedArray(shape, first.dtype)


def pure_convolution(input: jax.Array, panels: jax.Array, *, how: Convolution, shape: tuple[int, ...]) -> jax.Array:
    """The output, of an input and a packed kernel, by JAX's own operations."""
    matrices = lax.transpose(unpacked(panels, how.features), (1, 0, 2))
    kernel = lax.reshape(matrices, (*how.kernel, how.channels, how.groups * how.features))
    spatial = "HW"[-len(how.kernel) :]
    extents = [(k - 1) * d + 1 for k, d in zip(how.kernel, how.dilations)]
    needed = [(n - 1) * s + extent for n, s, extent in zip(how.output, how.strides, extents)]
    padding = [(low, n - size - low) for low, n, size in zip(how.low, needed, how.input)]
    if min(how.low) < 0:  # of which XLA's CPU convolutions read what is beside the input
        borders = [(0, 0, 0), *((lo, hi, 0) for lo, hi in padding), (0, 0, 0)]
        input, padding = lax.pad(input, np.zeros((), input.dtype), borders), [(0, 0)] * len(padding)
    return lax.conv_general_dilated(
        input,
        kernel,
        how.strides,
        padding,
        rhs_dilation=how.dilations,
        dimension_numbers=(f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"),
        feature_group_count=how.groups,
    )


def _lowering(
    ctx: mlir.LoweringRuleContext, first: Any, second: Any, *, how: Convolution, shape: tuple[int, ...]
) -> Any:
    def spatial(values: Sequence[int], missing: int) -> tuple[int, ...]:
        return (*(missing,) * (2 - len(values)), *values)

    sizes = [spatial(size, 1) for size in (how.input, how.output, how.kernel)]
    window = [spatial(how.strides, 1), spatial(how.dilations, 1), spatial(how.low, 0)]
    call = jax.ffi.ffi_lowering("transmuter_convolution")
    return call(
        ctx,
        first,
        second,
        wanted=np.int64(_WANTED.index(how.wanted)),
        sizes=np.array([how.batch, how.groups, how.channels, how.features, *sum(sizes, ())], np.int64),
        window=np.array(sum(window, ()), np.int64),
        kernel=np.array([*spatial(how.steps[:-2], 0), *how.steps[-2:]], np.int64),
        is_packed=how.is_packed,
    )


mlir.register_lowering(convolution_p, _lowering, platform="cpu")
run_eagerly(convolution_p)

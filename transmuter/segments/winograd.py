"""Winograd's convolution with kernels of 3 by 3: 16 products of matrices do the work of 36.

Four neighbouring results come from the same 4 by 4 elements. These, and the kernel, are transformed by sums and
differences; then every result is a product in the transformed space (Lavin and Gray, 2016, F(2x2, 3x3)). The kernel's
transform is a prepared weight. In float32 the rounding errors are those of the direct form, relative to the largest
element of a tile: what a zero of the kernel hides from the direct form, and infinities, count here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from transmuter.lowering.platform import on_cpu
from transmuter.segments.preparation import Operation
from transmuter.segments.rewriting import Replacement, View

_FEWEST_CHANNELS = 64
"""With fewer, the transforms cost more than the products save (with 32, it takes 0.8 to 1.3 times as long)."""
_MOST_BYTES = 13 << 20
"""Of the transformed array: with 20 MB, it takes 0.8 to 1.4 times as long, and in bands twice."""

_OF_INPUT = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
_OF_KERNEL = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
_OF_OUTPUT = ((1, 1, 1, 0), (0, 1, -1, -1))

_CHANNELS_LAST = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))
"""The dimension numbers of a convolution of NHWC with HWIO."""


def by_winograd(view: View) -> Iterator[Replacement]:
    """A rule: on the CPU, convolutions for which it is faster take 0.6 to 0.9 of the time."""
    if on_cpu():
        for op in view.trace.operations:
            if op.equation.primitive.name == "conv_general_dilated" and _is_faster(op, view):
                convolution = partial(_convolution, padding=op.equation.params["padding"])
                yield Replacement(op.results, convolution, op.operands)


def _is_faster(op: Operation, view: View) -> bool:
    x, kernel = map(view.aval, op.operands)
    params = op.equation.params
    numbers = params["dimension_numbers"]
    steps = (*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"])
    groups = (params["feature_group_count"], params["batch_group_count"])
    if (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) != _CHANNELS_LAST or kernel.shape[:2] != (3, 3):
        return False
    if x.dtype != np.float32 or {*steps, *groups} != {1} or min(map(min, params["padding"])) < 0:
        return False
    batch, rows, columns, outputs = view.aval(op.results[0]).shape
    tiles = batch * -(-rows // 2) * -(-columns // 2)
    channels = kernel.shape[2]
    return (
        op.operands[1] in view.weights
        and min(channels, outputs) >= _FEWEST_CHANNELS
        and 16 * tiles * max(channels, outputs) * x.dtype.itemsize <= _MOST_BYTES
        and outputs <= 2 * tiles  # else reading the transformed kernel, 16/9 as large, takes longest
    )


def _convolution(x: jax.Array, kernel: jax.Array, *, padding: Sequence[tuple[int, int]]) -> list[jax.Array]:
    batch, *spatial, channels = x.shape
    outputs = kernel.shape[-1]
    counts = [n + lo + hi - 2 for n, (lo, hi) in zip(spatial, padding)]
    rows, columns = (-(-count // 2) for count in counts)
    borders = [(lo, 2 * tiles + 2 - n - lo) for n, (lo, _), tiles in zip(spatial, padding, (rows, columns))]
    x = jnp.pad(x, [(0, 0), *borders, (0, 0)])
    x = jnp.stack(_combined(_OF_INPUT, [x[:, i : i + 2 * rows - 1 : 2] for i in range(4)]))
    x = jnp.stack(_combined(_OF_INPUT, [x[:, :, :, i : i + 2 * columns - 1 : 2] for i in range(4)]), 1)
    kernel = jnp.stack(_combined(_OF_KERNEL, list(kernel)))
    kernel = jnp.stack(_combined(_OF_KERNEL, [kernel[:, i] for i in range(3)]), 1)
    y = jnp.reshape(x, (16, batch * rows * columns, channels)) @ jnp.reshape(kernel, (16, channels, outputs))
    y = jnp.reshape(y, (4, 4, batch, rows, columns, outputs))
    halves = [_combined(_OF_OUTPUT, list(half)) for half in _combined(_OF_OUTPUT, list(y))]
    y = jnp.stack([jnp.stack(pair, 3) for pair in halves], 2)
    y = jnp.reshape(y, (batch, 2 * rows, 2 * columns, outputs))
    return [y[:, : counts[0], : counts[1]]]


def _combined(matrix: Sequence[Sequence[float]], parts: Sequence[jax.Array]) -> list[jax.Array]:
    """The product of a matrix of few numbers with a vector of arrays, without the terms that are zero."""
    results = []
    for row in matrix:
        terms = [part if factor == 1 else part * np.float32(factor) for factor, part in zip(row, parts) if factor]
        results.append(sum(terms[1:], terms[0]))
    return results

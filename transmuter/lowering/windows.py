"""How a kernel slides over an array: shared by convolution, pooling and Col2Im."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast


@dataclass(frozen=True)
class Window:
    """The positions of a kernel, with one entry per spatial dimension in each field.

    `overhang` is how far the last position reaches beyond the padding, as ceil_mode allows. `stretch` is how far apart
    the elements are pulled before the kernel slides over them: the stride of a transposed convolution.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    padding: tuple[tuple[Any, Any], ...]
    overhang: tuple[Any, ...]
    stretch: tuple[int, ...]

    @property
    def taps(self) -> int:
        """How many elements the kernel touches at each position."""
        return math.prod(self.size)

    @property
    def extents(self) -> tuple[int, ...]:
        """From the first to the last element that the kernel touches."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.size, self.dilations))

    @property
    def is_pointwise(self) -> bool:
        """Whether each position sees one element, and none of the padding."""
        none = all(isinstance(p, int) and p == 0 for pair in self.padding for p in pair)
        return self.taps == 1 and none and set(self.stretch) == {1}

    def positions(self, spatial: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of the result over an array of shape `spatial`."""
        padded = tuple(
            (n - 1) * t + 1 + lo + hi + more
            for n, t, (lo, hi), more in zip(spatial, self.stretch, self.padding, self.overhang)
        )
        counts = tuple((n - extent) // s + 1 for n, extent, s in zip(padded, self.extents, self.strides))
        if any(isinstance(count, int) and count < 0 for count in counts):
            raise ValueError(f"a window that spans {self.extents} elements does not fit into {padded}")
        return counts

    def views(self, x: Array, padding: Array | int = 0) -> Iterator[tuple[tuple[int, ...], jax.Array]]:
        """For each element of the kernel its index and what it sees of `x`, in which channels come last."""
        borders = [(lo, hi + more, t - 1) for (lo, hi), more, t in zip(self.padding, self.overhang, self.stretch)]
        padded = lax.pad(x, jnp.asarray(padding, x.dtype), [(0, 0, 0), *borders, (0, 0, 0)])
        # XLA would compute what leads to `padded` once per view
        padded = lax.optimization_barrier(padded)
        counts = self.positions(x.shape[1:-1])
        for index in np.ndindex(self.size):
            view = padded
            for axis, (i, d, n, s) in enumerate(zip(index, self.dilations, counts, self.strides), 1):
                view = strided(view, axis, i * d, n, s)
            yield index, view


def window(
    spatial: Sequence[Any],
    size: Sequence[int],
    strides: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    auto_pad: str | None = None,
    ceil_mode: int | None = 0,
) -> Window:
    """The window that ONNX's attributes describe over an array of shape `spatial`.

    With ceil_mode the last position may overhang the padding, but it must not start in the padding at the end. SAME_*
    never cuts off elements, which ONNX Runtime does in some operators where strides exceed the kernel.
    """
    rank = len(size)
    if len(spatial) != rank:
        raise ValueError(f"a kernel of shape {tuple(size)} does not slide over {len(spatial)} spatial dimensions")
    ones = (1,) * rank
    strides, dilations = tuple(strides or ones), tuple(dilations or ones)
    extents = [(k - 1) * d + 1 for k, d in zip(size, dilations)]
    overhang: tuple[Any, ...] = (0,) * rank
    if auto_pad not in (None, "", "NOTSET"):
        padding = lax.padtype_to_pads(spatial, extents, strides, "SAME" if auto_pad == "SAME_UPPER" else auto_pad)
    else:
        padding = list(zip(pads[:rank], pads[rank:])) if pads else [(0, 0)] * rank
        if ceil_mode:
            overhang = tuple(
                min(-((extent - n - lo - hi) // s), (n + lo - 1) // s) * s + extent - (n + lo + hi)
                for n, (lo, hi), extent, s in zip(spatial, padding, extents, strides)
            )
    return Window(tuple(size), strides, dilations, tuple(padding), overhang, ones)


def strided(x: Array, axis: int, start: int, count: Any, stride: int) -> jax.Array:
    """`count` elements of an axis from `start` on, `stride` apart."""
    if isinstance(count, int) and count == 0:
        return lax.slice_in_dim(x, 0, 0, axis=axis)
    return lax.slice_in_dim(x, start, start + (count - 1) * stride + 1, stride, axis)


def between(position: jax.Array, size: int) -> list[tuple[jax.Array, jax.Array]]:
    """The two elements of an axis that fractional positions lie between: indices and shares, 0 for one outside."""
    low = jnp.floor(position)
    return [
        (cast(jnp.clip(i, 0, size - 1), np.int32), jnp.where((i >= 0) & (i < size), 1 - jnp.abs(position - i), 0))
        for i in (low, low + 1)
    ]

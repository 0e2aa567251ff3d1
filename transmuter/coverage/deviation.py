"""How a value differs from the reference's: what both are like, where they differ most, and in how many elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from transmuter.coverage.verdicts import difference

_ROUNDED = 0.01
"""The share of a quantised result's elements that may be one step off: rounding noise decides a tie."""


@dataclass(frozen=True)
class Statistics:
    """What a value is like: `kind` is its dtype and shape; `minimum`, `maximum` and `mean` are those of its finite
    elements, None where it has none or is no tensor of numbers."""

    name: str
    kind: str
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    nans: int = 0
    infinities: int = 0

    @classmethod
    def of(cls, name: str, value: Any) -> Statistics:
        """The statistics of an array, or what kind of sequence, map, text or absent value it is."""
        if isinstance(value, (list, dict)):
            what = "map" if isinstance(value, dict) else "sequence"
            held = [cls.of("", x).kind for x in (value.values() if isinstance(value, dict) else value)]
            return cls(name, f"{what} of {len(held)}: {', '.join(held[:4])}{', ...' if len(held) > 4 else ''}")
        if value is None:
            return cls(name, "absent")
        array = np.asarray(value)
        kind = f"{'string' if array.dtype == object else array.dtype.name}{list(array.shape)}"
        if array.dtype.kind in "OUSTc":
            return cls(name, kind)
        wide = array.astype(np.float64)
        finite = wide[np.isfinite(wide)]
        numbers = (finite.min(), finite.max(), finite.mean()) if finite.size else (None, None, None)
        plain = (None if x is None else float(x) for x in numbers)
        return cls(name, kind, *plain, int(np.isnan(wide).sum()), int(np.isinf(wide).sum()))

    def __str__(self) -> str:
        numbers = "" if self.mean is None else f"  {self.minimum:.6g} to {self.maximum:.6g}, mean {self.mean:.6g}"
        odd = [f"{n} {what}" for n, what in ((self.nans, "NaN"), (self.infinities, "infinite")) if n]
        return f"{self.kind}{numbers}{', ' * bool(odd)}{', '.join(odd)}"


@dataclass(frozen=True)
class Extreme:
    """Where a difference is largest: the element's index, how large it is there, and both values."""

    index: tuple[int, ...]
    difference: float
    actual: float
    reference: float

    def __str__(self) -> str:
        return f"{self.difference:.4g} at {list(self.index)}: {self.actual:.8g}, reference {self.reference:.8g}"


@dataclass(frozen=True)
class Deviation:
    """How one output differs from the reference.

    Attributes:
        name: The output; for an element of a sequence or map, with its place behind.
        reference, actual: What both are like.
        count, size: How many elements differ beyond the tolerance, of how many.
        rms: The root of the mean square difference, relative to that of the reference.
        absolute, relative: The largest difference, and the largest one relative to the reference, of elements beyond
            the tolerance; None where no elements can be compared.
        odd: What else is wrong: another dtype, shape or kind.
    """

    name: str
    reference: Statistics
    actual: Statistics
    count: int = 0
    size: int = 0
    rms: float = math.inf
    absolute: Extreme | None = None
    relative: Extreme | None = None
    odd: str = ""

    def __str__(self) -> str:
        lines = [f"output {self.name}", f"  reference  {self.reference}", f"  ours       {self.actual}"]
        if self.odd:
            lines.append(f"  {self.odd}")
        if self.absolute is not None:
            lines += [
                f"  {self.count} of {self.size} elements are beyond the tolerance",
                f"  largest absolute difference {self.absolute}",
                f"  largest relative difference {self.relative}",
            ]
        return "\n".join(lines)


def deviation(
    name: str, actual: Any, expected: Any, absolute: float, relative: float, rounds: bool
) -> tuple[Deviation | None, float]:
    """How a value differs from the reference, if it does, and its rms-relative error; of a sequence or a map the first
    element that differs, and the largest error."""
    ours, theirs = dict(_leaves(actual)), dict(_leaves(expected))
    if ours.keys() != theirs.keys():
        both = Statistics.of(name, expected), Statistics.of(name, actual)
        return Deviation(name, *both, odd="Its structure is another."), math.inf
    found = [_leaf(name + at, ours[at], x, absolute, relative, rounds) for at, x in theirs.items()]
    return next((d for d, _ in found if d is not None), None), max((rms for _, rms in found), default=0.0)


def _leaf(
    name: str, actual: Any, expected: Any, absolute: float, relative: float, rounds: bool
) -> tuple[Deviation | None, float]:
    """`deviation` for an array, a plain number or text, or an absent value."""

    def told(**found: Any) -> Deviation:
        return Deviation(name, Statistics.of(name, expected), Statistics.of(name, actual), **found)

    if actual is None or expected is None:
        return (None, 0.0) if actual is expected else (told(odd="One is absent."), math.inf)
    ours, theirs = np.asarray(actual), np.asarray(expected)
    if not isinstance(expected, np.ndarray) or (theirs.dtype == np.float16 and ours.dtype == np.float32):
        with np.errstate(over="ignore"):  # a number of a map; or a half that was computed in float32
            ours = ours.astype(theirs.dtype)
    found = difference(name, ours, theirs, absolute, relative)
    if found.is_near:
        return None, found.rms
    if found.odd:
        return told(odd=found.odd), math.inf
    is_float, is_small = theirs.dtype.kind in "fcV", theirs.dtype in (np.int8, np.uint8)
    wide = np.complex128 if theirs.dtype.kind == "c" else np.float64
    ours, theirs = ours.astype(wide), theirs.astype(wide)
    with np.errstate(all="ignore"):
        same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        error = np.where(same, 0, np.abs(ours - theirs))
        error = np.where(np.isnan(error), np.inf, error)
        size = np.abs(theirs)
        bound = np.where(np.isfinite(size), absolute + relative * size, 0) if is_float else 0
    if rounds and is_small and error.max() <= 1 and error.mean() <= _ROUNDED:
        return None, found.rms
    beyond = error > bound
    share = np.where(beyond, error / np.maximum(size, 1e-30), 0)

    def extreme(of: np.ndarray) -> Extreme:
        index = np.unravel_index(int(np.argmax(of)), of.shape)
        return Extreme(tuple(map(int, index)), float(of[index]), ours[index].item(), theirs[index].item())

    largest = {"absolute": extreme(error), "relative": extreme(share)}
    return told(count=int(beyond.sum()), size=error.size, rms=found.rms, **largest), found.rms


def _leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays in a value, with their places in it."""
    if isinstance(value, (list, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{at}[{key!r}]")
    else:
        yield at, value


def rounds_floats(operands: Iterable[Any]) -> bool:
    """Whether a node with these operands makes integers of floats."""
    return any(hasattr(x, "dtype") and x.dtype.kind in "fV" for x in operands)


def nbytes(value: Any) -> int:
    """The bytes of an array, or of those in a sequence or map."""
    return sum(getattr(x, "nbytes", 8) for _, x in _leaves(value))

"""How far results are from the reference, and what follows from it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HALF = 2e-3
"""The rms-relative error up to which a graph in half precision is as near as ONNX Runtime is to itself."""
_AMPLIFIED = 2
"""So many times a model's own noise a result may differ."""


class Verdict(enum.StrEnum):
    """What the matrix says of a model, from best to worst."""

    MATCH = "match"
    """Every output is within the tolerance."""
    NOISE = "noise"
    """Some are not, but within what the model makes of rounding by itself."""
    UNSUPPORTED = "unsupported"
    """Operators have no lowering."""
    DIFFER = "differ"
    ERROR = "error"
    TIMEOUT = "timeout"

    @property
    def is_good(self) -> bool:
        """Whether the model works."""
        return self in (Verdict.MATCH, Verdict.NOISE)


@dataclass(frozen=True)
class Difference:
    """How far one output is from the reference.

    Attributes:
        absolute, relative: The largest absolute difference, and the largest one relative to the reference's element.
        rms: The root of the mean square difference, relative to that of the reference.
        is_near: Whether every element is within the tolerance.
        argmax: For logits, how many of the positions have the largest element in the same place; else None.
        odd: What else is wrong: another dtype or shape, another text.
    """

    absolute: float = 0.0
    relative: float = 0.0
    rms: float = 0.0
    is_near: bool = True
    argmax: float | None = None
    odd: str = ""


def difference(name: str, actual: Any, expected: Any, absolute: float, relative: float) -> Difference:
    """How far an output is from the reference: floats by the tolerance, everything else exactly."""
    if not isinstance(expected, np.ndarray):
        is_near = _is_near(actual, expected, absolute, relative)
        return Difference(is_near=is_near, odd="" if is_near else f"{actual!r:.80}, not {expected!r:.80}")
    actual = np.asarray(actual)
    if expected.dtype.kind in "OUST":
        same = actual.shape == expected.shape and bool(np.all(actual.astype(str) == expected.astype(str)))
        return Difference(is_near=same, odd="" if same else "another text")
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        is_odd = f"{actual.dtype}{list(actual.shape)}, not {expected.dtype}{list(expected.shape)}"
        return Difference(np.inf, np.inf, np.inf, False, odd=is_odd)
    if expected.size == 0:
        return Difference()
    argmax = None
    if "logit" in name and expected.ndim and expected.dtype.kind not in "biu":
        argmax = float(np.mean(np.argmax(actual, -1) == np.argmax(expected, -1)))
    is_float = expected.dtype.kind in "fcV"
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    same = actual == expected  # in their own dtype: float64 does not hold every integer
    actual, expected = actual.astype(wide), expected.astype(wide)
    with np.errstate(all="ignore"):
        same |= np.isnan(actual) & np.isnan(expected)
        least = 0 if is_float else 1  # integers that differ do so by as much, though float64 may not show it
        error = np.where(same, 0, np.maximum(np.abs(actual - expected), least))
        error = np.where(np.isnan(error), np.inf, error)
        size = np.abs(expected)
        share = np.where(error > 0, error / np.maximum(size, 1e-30), 0)
        bound = np.where(np.isfinite(size), absolute + relative * size, 0) if is_float else 0
        finite = np.isfinite(size)
        is_near = bool((same | (is_float & (error <= bound))).all())
        scale = np.sqrt(np.mean(size[finite] ** 2)) if finite.any() else 0.0
        rms = np.sqrt(np.mean(error**2)) / max(scale, 1e-30)
    return Difference(float(error.max()), float(share.max()), float(rms), is_near, argmax)


def _is_near(actual: Any, expected: Any, absolute: float, relative: float) -> bool:
    """Whether a sequence or map is near the reference's, element by element; keys are texts, as JSON has them."""
    if isinstance(expected, Mapping):
        found = {str(key): value for key, value in actual.items()} if isinstance(actual, Mapping) else {}
        wanted = {str(key): value for key, value in expected.items()}
        return found.keys() == wanted.keys() and all(_is_near(found[k], wanted[k], absolute, relative) for k in wanted)
    actual = actual.tolist() if hasattr(actual, "tolist") else actual
    expected = expected.tolist() if hasattr(expected, "tolist") else expected
    if isinstance(expected, (list, tuple)):
        is_long = isinstance(actual, (list, tuple)) and len(actual) == len(expected)
        return is_long and all(_is_near(a, b, absolute, relative) for a, b in zip(actual, expected, strict=True))
    if isinstance(expected, float) and isinstance(actual, float):
        return bool(np.isclose(actual, expected, relative, absolute, equal_nan=True))
    return type(actual) is type(expected) and actual == expected


@dataclass
class Judged:
    """The verdict on one case of a model, and its largest differences.

    Attributes:
        verdict, why: The verdict, and the output that decided it.
        absolute, relative, rms: The largest of all outputs.
        argmax: The smallest agreement among outputs that are logits.
    """

    verdict: Verdict = Verdict.MATCH
    why: str = ""
    absolute: float = 0.0
    relative: float = 0.0
    rms: float = 0.0
    argmax: float | None = None
    outputs: dict[str, Difference] = field(default_factory=dict)


def judged(
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    noise: Mapping[str, float],
    absolute: float,
    relative: float,
) -> Judged:
    """The verdict on some outputs.

    Args:
        actual, expected: Outputs by name, ours and the reference's.
        noise: For each output, how far ONNX Runtime is from itself, rms-relative.
        absolute, relative: The tolerance.
    """
    result = Judged()
    for name, wanted in expected.items():
        if name not in actual:
            result.verdict, result.why = Verdict.DIFFER, f"{name!r} is missing"
            continue
        found = result.outputs[name] = difference(name, actual[name], wanted, absolute, relative)
        result.absolute, result.relative = max(result.absolute, found.absolute), max(result.relative, found.relative)
        result.rms = max(result.rms, found.rms)
        if found.argmax is not None:
            result.argmax = min(found.argmax, 1.0 if result.argmax is None else result.argmax)
        if found.is_near:
            continue
        if not found.odd and found.rms <= _AMPLIFIED * noise.get(name, 0.0):
            if result.verdict is Verdict.MATCH:
                result.verdict, result.why = Verdict.NOISE, f"{name!r}: rms {found.rms:.1e} of {noise[name]:.1e}"
        elif result.verdict is not Verdict.DIFFER:
            what = found.odd or f"{found.absolute:.2e} at most, rms {found.rms:.1e}"
            result.verdict, result.why = Verdict.DIFFER, f"{name!r}: {what}"
    return result

"""What counts as a match, as noise, and as a difference."""

from __future__ import annotations

import numpy as np
import pytest

from transmuter.coverage.verdicts import Verdict, difference, judged

WANTED = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, -6.0]], np.float32)


def verdict(actual, noise: float = 0.0, expected=WANTED) -> Verdict:
    return judged({"y": actual}, {"y": expected}, {"y": noise}, 1e-4, 1e-3).verdict


@pytest.mark.parametrize(
    ("actual", "noise", "wanted"),
    [
        (WANTED, 0.0, Verdict.MATCH),
        (WANTED * np.float32(1.0009), 0.0, Verdict.MATCH),
        (WANTED * np.float32(1.01), 0.0, Verdict.DIFFER),
        (WANTED * np.float32(1.01), 6e-3, Verdict.NOISE),
        (WANTED * np.float32(1.01), 4e-3, Verdict.DIFFER),
        (WANTED.astype(np.float64), 1.0, Verdict.DIFFER),
        (WANTED[:1], 1.0, Verdict.DIFFER),
        (np.where(WANTED == 2, np.nan, WANTED).astype(np.float32), 1.0, Verdict.DIFFER),
    ],
)
def test_floats(actual, noise, wanted):
    assert verdict(actual, noise) is wanted


def test_not_a_number_and_infinities():
    odd = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    assert verdict(odd, expected=odd) is Verdict.MATCH
    assert verdict(np.array([np.nan, 1e38, -np.inf, 1], np.float32), 1.0, expected=odd) is Verdict.DIFFER
    assert difference("y", odd, np.full(4, np.nan, np.float32), 1e-4, 1e-3).rms == np.inf


def test_all_else_is_exact():
    ids = np.array([1, 2])
    assert verdict(ids, 1.0, expected=ids) is Verdict.MATCH
    assert verdict(ids + 1, 0.0, expected=ids) is Verdict.DIFFER
    large = np.array([2**60])
    assert verdict(large + 1, 0.0, expected=large) is Verdict.DIFFER
    texts = np.array(["a", "b"], object)
    assert verdict(texts, expected=texts) is Verdict.MATCH
    assert verdict(texts[::-1], expected=texts) is Verdict.DIFFER
    maps = [{"0": 0.25, "1": 0.75}]
    assert verdict([{0: np.float32(0.25), 1: np.float32(0.75)}], expected=maps) is Verdict.MATCH
    assert verdict([{0: np.float32(0.5)}], expected=maps) is Verdict.DIFFER
    empty = np.zeros((0, 3), np.float32)
    assert verdict(empty, expected=empty) is Verdict.MATCH


def test_the_figures():
    actual = WANTED.copy()
    actual[0] = [2.5, 2.0, 1.0]
    result = judged({"logits": actual, "y": WANTED}, {"logits": WANTED, "y": WANTED}, {}, 1e-4, 1e-3)
    assert (result.absolute, result.relative, result.argmax) == (2.0, 1.5, 0.5)
    np.testing.assert_allclose(result.rms, np.sqrt((1.5**2 + 2**2) / np.sum(WANTED**2)), rtol=1e-6)
    assert result.why.startswith("'logits': 2.00e+00")
    assert judged({}, {"y": WANTED}, {}, 0, 0).why == "'y' is missing"

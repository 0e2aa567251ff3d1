"""Strict comparison of results with a reference."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_equal(
    actual: Any, expected: Any, *, rtol: float = 1e-3, atol: float = 1e-4, where: str = "result", values: bool = True
) -> None:
    """Same kind, dtype and shape; integers, booleans and strings exactly, floats within `atol + rtol * |expected|`.

    Sequences and maps are compared element by element. Without `values`, only kind, dtype and shape count.
    """
    if expected is None or isinstance(expected, (str, int)):
        assert actual == expected, f"{where}: {actual!r}, not {expected!r}"
        return
    if isinstance(expected, (list, dict)):
        assert type(actual) is type(expected), f"{where}: {type(actual).__name__}, not {type(expected).__name__}"
        assert len(actual) == len(expected), f"{where}: {len(actual)} elements, not {len(expected)}"
        keys = expected if isinstance(expected, dict) else range(len(expected))
        for key in keys:
            assert_equal(actual[key], expected[key], rtol=rtol, atol=atol, where=f"{where}[{key}]", values=values)
        return
    actual, expected = np.asarray(actual), np.asarray(expected)
    is_text = expected.dtype.kind in "OUT"
    assert (actual.dtype.kind in "OUT") if is_text else actual.dtype == expected.dtype, (
        f"{where}: {actual.dtype}, not {expected.dtype}"
    )
    assert actual.shape == expected.shape, f"{where}: {actual.shape}, not {expected.shape}"
    if not values or actual.size == 0:
        return
    if is_text or expected.dtype.kind == "b":
        np.testing.assert_array_equal(actual, expected, err_msg=where)
        return
    if "int" in expected.dtype.name:
        wrong = actual != expected
        assert not wrong.any(), f"{where}: {wrong.sum()} of {wrong.size} integers differ"
        return
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    actual, expected = actual.astype(wide), expected.astype(wide)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(all="ignore"):
        error = np.where(same, 0, np.where(np.isnan(actual), np.inf, np.abs(actual - expected)))
        near = same | (np.isfinite(expected) & (error <= atol + rtol * np.abs(expected)))
    assert near.all(), (
        f"{where}: {(~near).sum()} of {near.size} differ, by {np.max(np.where(near, 0, error)):.3g} at most "
        f"(atol {atol:g}, rtol {rtol:g})"
    )

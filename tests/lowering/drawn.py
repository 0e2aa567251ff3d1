"""Operands drawn for one operator, and its results compared with those of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from comparison import assert_equal
from hypothesis import strategies as st
from onenode import ort_node, reference_node, run_node
from onnx import helper

SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-30, np.nan, np.inf, -np.inf)


def numbers(dtype: Any, largest: float = 30) -> st.SearchStrategy:
    """Numbers of a dtype: small ones, and the extremes of integers or what is special among floats."""
    if dtype == np.bool_:
        return st.booleans()
    if np.dtype(dtype).kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return st.one_of(st.sampled_from([low, high, low + 1, 0, 1]), st.integers(max(low, -9), 9))
    return st.one_of(st.sampled_from(SPECIAL), st.floats(-largest, largest, width=16))


def arrays(dtype: Any, shape: Sequence[int], elements: st.SearchStrategy | None = None) -> st.SearchStrategy:
    """Arrays of such numbers."""
    count = int(np.prod(shape))
    drawn = st.lists(numbers(dtype) if elements is None else elements, min_size=count, max_size=count)
    return drawn.map(lambda values: np.array(values, dtype).reshape(shape))


def subsets(axes: int, least: int = 0) -> st.SearchStrategy:
    """Some of so many axes, each counted from the front or from the back."""
    if not axes:
        return st.just([])
    signed = st.integers(-axes, axes - 1)
    return st.lists(signed, unique_by=lambda axis: axis % axes, min_size=least, max_size=axes)


def element_type(dtype: Any) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def expected(op: str, inputs: Sequence[Any], attributes: Mapping[str, Any], **kwargs: Any) -> list[Any]:
    """What ONNX Runtime makes of it, or the reference evaluator where it has no kernel for these dtypes."""
    from onnxruntime.capi.onnxruntime_pybind11_state import InvalidGraph, NotImplemented

    unknown = any(x is not None and x.dtype.type.__module__ == ml_dtypes.__name__ for x in inputs)
    try:
        return (
            reference_node(op, inputs, attributes, **kwargs) if unknown else ort_node(op, inputs, attributes, **kwargs)
        )
    except (NotImplemented, InvalidGraph):
        with np.errstate(all="ignore"):
            return reference_node(op, inputs, attributes, **kwargs)


def check(
    op: str,
    inputs: Sequence[Any],
    attributes: Mapping[str, Any] | None = None,
    *,
    results: Sequence[Any] | None = None,
    known: Collection[int] = (),
    tolerance: float = 1e-5,
    compiled: bool = False,
    **kwargs: Any,
) -> None:
    """Asserts that traced operands (all but those at the positions `known`), and known ones as well, give `results`, by
    default those of ONNX Runtime."""
    attributes = attributes or {}
    wanted = expected(op, inputs, attributes, **kwargs) if results is None else results
    everything = [i for i, x in enumerate(inputs) if x is not None]
    for given in (known, everything):
        found = run_node(op, inputs, attributes, known=given, compiled=compiled, **kwargs)
        for actual, one in zip(found, wanted, strict=True):
            assert_equal(actual, one, rtol=tolerance, atol=tolerance, where=f"{op} {attributes}, known={list(given)}")

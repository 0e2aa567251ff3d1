"""Prepared weights that only move or widen elements, made by NumPy instead of XLA.

XLA would compile each operation for each shape, 15 ms a time, and queue them, so that copies and originals are there at
once. Here a weight takes one copy, or none where a reshape is all; its original can go before the next one is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from transmuter.lowering.arrays import HALVES
from transmuter.reading import aligned
from transmuter.segments.preparation import Operation, Ref, Weight, only_appends

_BLOCK = 128
"""Rows and columns that are copied at a time, so that what a block reads and writes stays in the cache."""


def moved(weight: Weight, originals: Mapping[Ref, Any]) -> jax.Array | None:
    """The prepared weight, or None if it is not on the CPU or if there is more to do than to move elements.

    Args:
        weight: What to make of which originals.
        originals: By reference, what it starts from.
    """
    forms = [_form(op) for op in weight.operations]
    if not forms or None in forms or not all(map(_is_on_cpu, originals.values())):
        return None
    values = {ref: np.asarray(x) for ref, x in originals.items()}
    for op, form in zip(weight.operations, forms, strict=True):
        [result] = op.results
        values[result] = form([values[operand] for operand in op.operands if isinstance(operand, Ref)])
    first = next(iter(originals.values()))
    return jax.device_put(_contiguous(values[weight.ref]), first.sharding if first.committed else None, may_alias=True)


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, jax.Array) and {device.platform for device in value.devices()} == {"cpu"}


def _form(op: Operation) -> Callable[[list[np.ndarray]], np.ndarray] | None:
    """An operation of NumPy arrays; of the same elements where it can."""
    params, shape = op.equation.params, op.equation.outvars[0].aval.shape
    before = op.equation.invars[0].aval
    if op.equation.primitive.name == "pad" and _appends_zeros(op):
        return lambda operands: _extended(operands[0], shape)
    if not all(isinstance(operand, Ref) for operand in op.operands):
        return None
    match op.equation.primitive.name:
        case "transpose":
            return lambda operands: operands[0].transpose(params["permutation"])
        case "reshape" if params["dimensions"] is None:
            return lambda operands: _reshaped(operands[0], shape)
        case "squeeze" | "expand_dims":
            return lambda operands: _reshaped(operands[0], shape)
        case "broadcast_in_dim" if math.prod(before.shape) == math.prod(shape):
            return lambda operands: _reshaped(operands[0], shape)
        case "bitcast_convert_type":
            return lambda operands: _contiguous(operands[0]).view(params["new_dtype"]).reshape(shape)
        case "concatenate":
            return lambda operands: _joined(operands, params["dimension"])
        case "convert_element_type" if before.dtype in HALVES and params["new_dtype"] == np.float32:
            return lambda operands: _copied(operands[0], np.dtype(np.float32))
    return None


def _appends_zeros(op: Operation) -> bool:
    array, value = op.operands
    is_zero = isinstance(array, Ref) and isinstance(value, jex.Literal) and value.val == 0
    return is_zero and only_appends(op)


def _extended(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`array` with zeros behind it in each dimension."""
    extended = _empty(shape, array.dtype)
    for axis, size in enumerate(array.shape):
        extended[(*map(slice, array.shape[:axis]), slice(size, None))] = 0
    extended[tuple(map(slice, array.shape))] = array
    return extended


def _reshaped(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`array` in another shape, without a copy where strides can say it."""
    try:
        return np.reshape(array, shape, copy=False)
    except ValueError:
        return _contiguous(array).reshape(shape)


def _contiguous(array: np.ndarray) -> np.ndarray:
    return array if array.flags.c_contiguous else _copied(array, array.dtype)


def _joined(arrays: list[np.ndarray], axis: int) -> np.ndarray:
    shape = list(arrays[0].shape)
    shape[axis] = sum(array.shape[axis] for array in arrays)
    joined = _empty(tuple(shape), arrays[0].dtype)
    return np.concatenate(arrays, axis, out=joined)


def _copied(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy in C order; in blocks, as NumPy by itself takes two to four times as long for what is transposed."""
    copy = _empty(array.shape, dtype)
    if array.ndim < 2 or array.flags.c_contiguous:
        np.copyto(copy, array)
        return copy
    for i in range(0, array.shape[-2], _BLOCK):
        for j in range(0, array.shape[-1], _BLOCK):
            copy[..., i : i + _BLOCK, j : j + _BLOCK] = array[..., i : i + _BLOCK, j : j + _BLOCK]
    return copy


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return aligned(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

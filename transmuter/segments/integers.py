"""Products of integers by the CPU's kernels, and the dynamic quantization of what they multiply."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax

from transmuter.lowering.named import has_name
from transmuter.lowering.platform import on_cpu
from transmuter.lowering.quantization import DYNAMIC
from transmuter.native import integers
from transmuter.segments.preparation import Operation
from transmuter.segments.rewriting import Operand, Replacement, View

_Padding = tuple[tuple[int, ...], ...]
"""A `padding_config`; without any, there is none."""


def integer_products(view: View) -> Iterator[Replacement]:
    """A rule: on the CPU, the kernel multiplies int8 with weights that are packed once.

    A product of 128 rows takes 0.2 to 0.3 of XLA's time. The kernel multiplies by bytes without sign, so that it takes
    uint8 before `in_int8` has shifted them, and no rows of zeros that are there for XLA's sake (`integer_matmul`).
    To join products of the same rows, such as queries, keys and values, gains nothing.
    """
    if not (on_cpu() and integers.multiplies_integers()):
        return
    for op in view.trace.operations:
        if _is_with_weight(op, view):
            left, weight = op.operands
            rows, padding = _unpadded(view, left)
            yield Replacement(op.results, functools.partial(_product, padding), [_unshifted(view, rows), weight])


def _is_with_weight(op: Operation, view: View) -> bool:
    """Whether an operation is a product of int8 rows with a weight, in int32."""
    if op.equation.primitive.name != "dot_general":
        return False
    left, right = map(view.aval, op.operands)
    return (
        {left.dtype, right.dtype} == {np.dtype(np.int8)}
        and view.aval(op.results[0]).dtype == np.int32
        and len(right.shape) == 2
        and op.equation.params["dimension_numbers"] == (((len(left.shape) - 1,), (0,)), ((), ()))
        and op.operands[1] in view.weights
        and op.operands[0] not in view.weights
        and all(isinstance(n, int) for n in (*left.shape, *right.shape))
    )


def _unpadded(view: View, rows: Operand) -> tuple[Operand, _Padding]:
    """Rows without zeros that are appended to them, but to none of them, and how to append those."""
    pad = view.producer(rows, "pad")
    if pad is None or not isinstance(pad.operands[1], jex.Literal) or pad.operands[1].val != 0:
        return rows, ()
    *before, last = padding = tuple(tuple(map(int, sizes)) for sizes in pad.equation.params["padding_config"])
    is_of_rows = before and last == (0, 0, 0) and min(map(min, before)) >= 0
    return (pad.operands[0], padding) if is_of_rows else (rows, ())


def _unshifted(view: View, operand: Operand) -> Operand:
    """The uint8 that an int8 operand is 128 less than, as `in_int8` makes it; or the operand itself."""
    narrow = view.producer(operand, "convert_element_type")
    shift = None if narrow is None else view.producer(narrow.operands[0], "sub")
    wide = None if shift is None else view.producer(shift.operands[0], "convert_element_type")
    if wide is None or not isinstance(shift.operands[1], jex.Literal) or shift.operands[1].val != integers.SHIFT:
        return operand
    kinds = view.aval(wide.operands[0]).dtype, view.aval(wide.results[0]).dtype
    return wide.operands[0] if kinds == (np.uint8, np.int16) else operand


def _product(padding: _Padding, rows: jax.Array, weight: jax.Array) -> list[jax.Array]:
    total = integers.integer_product(rows, *integers.packed_integers(weight))
    return [lax.pad(total, np.int32(0), padding) if padding else total]


def dynamic_quantization(view: View) -> Iterator[Replacement]:
    """A rule for what is compiled, and not differentiated any more: the kernel finds the range and rounds in one call.

    It takes 0.2 to 0.4 of the time of XLA's four.
    """
    for op in view.trace.operations:
        if has_name(op.equation, DYNAMIC):
            x = view.aval(op.operands[0])
            if x.dtype == np.float32 and all(isinstance(n, int) and n > 0 for n in x.shape):
                yield Replacement(op.results, integers.dynamic_quantization, op.operands)

"""Products of float32 matrices. Transposes of operands and of the result are strides, which cost nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax
from jax.interpreters import mlir

from transmuter.native.library import run_eagerly

PANEL = 32
"""Columns of a packed matrix that lie side by side."""
_BATCH = 3
"""Dimensions of a stack that the kernel takes, once those that lie behind each other are one."""


@dataclass(frozen=True)
class Form:
    """Which dimensions of two operands are what, and in which order the result has its own.

    Attributes:
        left: The left operand's dimensions: those of the stack, of the rows, and what is summed over.
        right: The right one's: those of the stack, what is summed over, and the columns.
        result: The result has its dimensions (stack, rows, columns) in this order.
        batch: How many dimensions a stack has.
        depth: Over how many dimensions is summed.
        columns: How many columns the right operand has, if that is packed matrices (stack, depth, columns); else None.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    batch: int
    depth: int
    columns: int | None = None


@dataclass(frozen=True)
class _Strides:
    """What the kernel takes: sizes of stack, rows, depth and columns; strides of all in elements."""

    sizes: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    is_swapped: bool
    """Whether it computes the transposed product of the operands in the other order."""


def packed_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of packed matrices."""
    *stack, depth, columns = shape
    return (*stack, -(-columns // PANEL), depth, PANEL)


def packed(matrices: jax.Array) -> jax.Array:
    """Matrices [..., depth, columns] as the kernel reads them: [..., panels, depth, `PANEL`], with zeros at the end."""
    *stack, depth, columns = matrices.shape
    panels, rank = -(-columns // PANEL), len(stack)
    if missing := panels * PANEL - columns:
        none = [(0, 0, 0)] * (rank + 1)
        matrices = lax.pad(matrices, np.zeros((), matrices.dtype), [*none, (0, missing, 0)])
    split = lax.reshape(matrices, (*stack, depth, panels, PANEL))
    return lax.transpose(split, (*range(rank), rank + 1, rank, rank + 2))


def unpacked(panels: jax.Array, columns: int) -> jax.Array:
    """The matrices that `packed` was given."""
    *stack, count, depth, width = panels.shape
    rank = len(stack)
    joined = lax.transpose(panels, (*range(rank), rank + 1, rank, rank + 2))
    return lax.reshape(joined, (*stack, depth, count * width))[..., :columns]


def product(left: jax.Array, right: jax.Array, form: Form) -> jax.Array:
    """The product of float32 operands."""
    return product_p.bind(left, right, form=form)


def fits(form: Form, left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether the kernel takes operands of these shapes in this form."""
    return _strides(form, left, right) is not None


# ---- the primitive -------------------------------------------------------------------------------------------------

product_p = jex.Primitive("cpu_product")


def _shapes(form: Form, left: Sequence[int], right: Sequence[int]) -> tuple[list[int], list[int]]:
    """The sizes of the operands' dimensions, in the order of the form."""
    lefts = [left[i] for i in form.left]
    if form.columns is not None:
        return lefts, [*lefts[: form.batch], lefts[-1], form.columns]
    return lefts, [right[i] for i in form.right]


@product_p.def_abstract_eval
def _(left: Any, right: Any, *, form: Form) -> Any:
    lefts, rights = _shapes(form, left.shape, right.shape)
    canonical = [*lefts[: len(lefts) - form.depth], *rights[form.batch + form.depth :]]
    return jax.core.ShapedArray(tuple(canonical[i] for i in form.result), left.dtype)


def pure_product(left: jax.Array, right: jax.Array, *, form: Form) -> jax.Array:
    """`product` by JAX's own operations."""
    right = right if form.columns is None else unpacked(right, form.columns)
    rows_end = len(form.left) - form.depth
    contracted = form.left[rows_end:], form.right[form.batch : form.batch + form.depth]
    y = lax.dot_general(left, right, (contracted, (form.left[: form.batch], form.right[: form.batch])))
    # dot_general keeps the other dimensions in the order of the operands
    rows = sorted(form.left[form.batch : rows_end])
    columns = sorted(form.right[form.batch + form.depth :])
    order = [
        *range(form.batch),
        *(form.batch + rows.index(i) for i in form.left[form.batch : rows_end]),
        *(form.batch + len(rows) + columns.index(i) for i in form.right[form.batch + form.depth :]),
    ]
    return lax.transpose(y, [order[i] for i in form.result])


def _strides(form: Form, left: Sequence[int], right: Sequence[int]) -> _Strides | None:
    lefts, rights = _shapes(form, left, right)
    rows_end = len(lefts) - form.depth
    canonical = [*lefts[:rows_end], *rights[form.batch + form.depth :]]
    if not all(isinstance(n, int) for n in (*lefts, *rights)):
        return None
    steps_of_left = [steps_of(left)[i] for i in form.left]
    packed_steps = [*steps_of(right)[: form.batch], PANEL, 1]
    steps_of_right = [steps_of(right)[i] for i in form.right] if form.columns is None else packed_steps
    moved = steps_of([canonical[i] for i in form.result])
    steps_of_result = [moved[form.result.index(i)] for i in range(len(canonical))]

    stack = _merged(zip(lefts[: form.batch], steps_of_left, steps_of_right, steps_of_result))
    rows = _merged(zip(lefts[form.batch : rows_end], steps_of_left[form.batch :], steps_of_result[form.batch :]))
    depth = _merged(zip(lefts[rows_end:], steps_of_left[rows_end:], steps_of_right[form.batch :]))
    columns = _merged(
        zip(rights[form.batch + form.depth :], steps_of_right[form.batch + form.depth :], steps_of_result[rows_end:])
    )
    if len(stack) > _BATCH or max(map(len, (rows, depth, columns))) > 1:
        return None
    stack = [*[(1, 0, 0, 0)] * (_BATCH - len(stack)), *stack]
    ((m, left_row, result_row),) = rows or [(1, 0, 0)]
    ((k, left_depth, right_depth),) = depth or [(1, 0, 0)]
    ((n, right_column, result_column),) = columns or [(1, 1, 1)]
    sizes, of_left, of_right, of_result = (tuple(dimension[i] for dimension in stack) for i in range(4))
    if result_column == 1 or n == 1:
        return _Strides(
            (*sizes, m, k, n),
            (*of_left, left_row, left_depth),
            (*of_right, right_depth, right_column),
            (*of_result, result_row),
            is_swapped=False,
        )
    if form.columns is None and (result_row == 1 or m == 1):
        return _Strides(
            (*sizes, n, k, m),
            (*of_right, right_column, right_depth),
            (*of_left, left_depth, left_row),
            (*of_result, result_column),
            is_swapped=True,
        )
    return None


def steps_of(shape: Sequence[int]) -> list[int]:
    """The strides of an array in row-major order."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _merged(dimensions: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Dimensions (a size, and strides in some arrays) with those that lie behind each other in all arrays as one."""
    found: list[tuple[int, ...]] = []
    for size, *steps in dimensions:
        if size == 1:
            continue
        if found and all(outer == size * inner for outer, inner in zip(found[-1][1:], steps)):
            found[-1] = (found[-1][0] * size, *steps)
        else:
            found.append((size, *steps))
    return found


def _lowering(ctx: mlir.LoweringRuleContext, left: Any, right: Any, *, form: Form) -> Any:
    strides = _strides(form, *(aval.shape for aval in ctx.avals_in))
    if strides is None:
        raise ValueError(f"the kernel takes no operands of {ctx.avals_in} in the form {form}")
    operands = (right, left) if strides.is_swapped else (left, right)
    call = jax.ffi.ffi_lowering("transmuter_product")
    avals_in = ctx.avals_in[::-1] if strides.is_swapped else ctx.avals_in
    return call(
        ctx.replace(avals_in=avals_in),
        *operands,
        sizes=np.array(strides.sizes, np.int64),
        left=np.array(strides.left, np.int64),
        right=np.array(strides.right, np.int64),
        result=np.array(strides.result, np.int64),
        is_packed=form.columns is not None,
    )


mlir.register_lowering(product_p, _lowering, platform="cpu")
mlir.register_lowering(product_p, mlir.lower_fun(pure_product, multiple_results=False))
run_eagerly(product_p)

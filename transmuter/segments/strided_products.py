"""Products by the CPU's kernels: weights are packed beforehand, and transposes around a product are strides of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax

from transmuter import native
from transmuter.lowering.platform import has_kernels
from transmuter.segments.rewriting import Replacement, View

_FEWEST = 1 << 14
"""So many multiplications a product has for a call of the kernel, which takes some microseconds itself, to pay."""
_FEW_ROWS = 16
"""Up to so many rows, a kernel that packs its right operand in the call is no faster than XLA."""


def packed_weights(view: View) -> Iterator[Replacement]:
    """A rule: the kernel multiplies with weights that are packed once. A weight that is used elsewhere, too, stays."""
    if not has_kernels():
        return
    for op in view.trace.operations:
        if not _is_product(op.equation):
            continue
        left, weight = op.operands
        transpose = view.producer(weight, "transpose")
        sources = [weight] if transpose is None else [weight, *transpose.operands]
        is_own = weight in view.weights and all(len(view.users[ref]) == 1 for ref in sources)
        shapes = [view.aval(value).shape for value in (*op.operands, *op.results)]
        how = _form(op.equation, *(range(len(shape)) for shape in shapes))
        if is_own and left not in view.weights and (how.depth, len(how.right) - how.batch) == (1, 2):
            order, columns = how.right, shapes[1][how.right[-1]]
            how = replace(how, right=tuple(range(len(order))), columns=columns)
            if native.fits(how, shapes[0], native.packed_shape([shapes[1][i] for i in order])):
                yield Replacement(op.results, partial(_with_packed, how, order), op.operands)


def strided_products(view: View) -> Iterator[Replacement]:
    """A rule for what is differentiated no more: the kernel computes products of operands as they lie."""
    products = [op for op in view.trace.operations if _is_product(op.equation)]
    ends = [view.end(op.results[0]) for op in products]
    taken = {result for result, _ in ends}
    for op, (result, order) in zip(products, ends):
        # what ends another product is no operation of its own any more
        (left, left_order), (right, right_order) = (
            (operand, range(len(view.aval(operand).shape))) if operand in taken else view.source(operand)
            for operand in op.operands
        )
        how = _form(op.equation, left_order, right_order, order)
        shapes = view.aval(left).shape, view.aval(right).shape
        rows = math.prod(shapes[0][i] for i in how.left[how.batch : len(how.left) - how.depth])
        if rows > _FEW_ROWS and native.fits(how, *shapes):
            yield Replacement([result], partial(_strided, how), [left, right])


def _is_product(equation: jex.JaxprEqn) -> bool:
    """Whether it is a product of float32 matrices that is large enough for a call."""
    if equation.primitive.name != "dot_general":
        return False
    left, right, result = (v.aval for v in (*equation.invars, *equation.outvars))
    if {left.dtype, right.dtype, result.dtype} != {np.dtype(np.float32)}:
        return False
    if not all(isinstance(n, int) for n in (*left.shape, *right.shape)):
        return False
    (contracted, _), _ = equation.params["dimension_numbers"]
    return math.prod(result.shape) * math.prod(left.shape[i] for i in contracted) >= _FEWEST


def _form(equation: jex.JaxprEqn, left: Sequence[int], right: Sequence[int], result: Sequence[int]) -> native.Form:
    """The form of a product whose operands are transposes by `left` and `right`, and whose result is by `result`."""
    (left_depth, right_depth), (left_batch, right_batch) = equation.params["dimension_numbers"]
    rows = [i for i in range(len(left)) if i not in (*left_depth, *left_batch)]
    columns = [i for i in range(len(right)) if i not in (*right_depth, *right_batch)]
    return native.Form(
        tuple(left[i] for i in (*left_batch, *rows, *left_depth)),
        tuple(right[i] for i in (*right_batch, *right_depth, *columns)),
        tuple(result),
        len(left_batch),
        len(left_depth),
    )


def _with_packed(how: native.Form, order: Sequence[int], left: jax.Array, weight: jax.Array) -> list[jax.Array]:
    return [native.product(left, native.packed(lax.transpose(weight, order)), how)]


def _strided(how: native.Form, left: jax.Array, right: jax.Array) -> list[jax.Array]:
    return [native.product(left, right, how)]

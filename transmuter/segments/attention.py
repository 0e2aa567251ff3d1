"""Attention by the CPU's kernel, which keeps its scores in the cache, forwards and backwards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax import lax

from transmuter import native
from transmuter.lowering.platform import has_kernels
from transmuter.segments.fusion import is_softmax, scales
from transmuter.segments.preparation import Operation
from transmuter.segments.rewriting import Operand, Replacement, View

_FEWEST = 1 << 16
"""So many multiplications the scores take at least, for a call of the kernel to pay."""


@dataclass(frozen=True)
class _Scores:
    """What a softmax is taken of: `scale` times a product, plus a bias that is broadcast once it has this shape."""

    product: Operation
    scale: float
    bias: Operand | None
    shape: Sequence[int]


def attention(view: View) -> Iterator[Replacement]:
    """A rule: values mixed by the softmax of products of queries and keys are computed without these in memory."""
    if not has_kernels():
        return
    for op in view.trace.operations:
        softmax = view.producer(op.operands[0], "custom_jvp_call") if _is_stack(view, op) else None
        if softmax is None or not is_softmax(softmax) or view.sole_user(softmax.results[0]) is not op:
            continue
        ((mixed, _), _) = op.equation.params["dimension_numbers"]
        if mixed != (len(view.aval(op.operands[0]).shape) - 1,):  # shares are summed over something else than the keys
            continue
        scores = _scores(view, softmax.operands[0], softmax)
        if scores is not None:
            yield _replacement(view, scores, op)


def _is_stack(view: View, op: Operation) -> bool:
    """Whether it is a stack of products of float32 matrices, of known sizes, that has one or two dimensions ahead."""
    if op.equation.primitive.name != "dot_general":
        return False
    avals = [view.aval(value) for value in (*op.operands, *op.results)]
    (left, right), (left_batch, right_batch) = op.equation.params["dimension_numbers"]
    batch = tuple(range(len(avals[2].shape) - 2))
    return (
        len(batch) in (1, 2)
        and (left_batch, right_batch) == (batch, batch)
        and len(left) == len(right) == 1
        and {aval.dtype for aval in avals} == {np.dtype(np.float32)}
        and all(isinstance(n, int) for aval in avals for n in aval.shape)
    )


def _scores(view: View, operand: Operand, user: Operation) -> _Scores | None:
    shape = view.aval(operand).shape
    add = view.producer(operand, "add")
    if add is None:
        return _scaled(view, operand, user, None, ())
    if view.sole_user(operand) is not user or add.operands[0] == add.operands[1]:
        return None
    for product, bias in (add.operands, add.operands[::-1]):
        source, narrow = _before_broadcast(view, bias, len(shape))
        fits = len(narrow) == len(shape) and all(n in (1, full) for n, full in zip(narrow, shape))
        if fits and (found := _scaled(view, product, add, source, narrow)) is not None:
            return found
    return None


def _before_broadcast(view: View, operand: Operand, rank: int) -> tuple[Operand, Sequence[int]]:
    """What an operand is a broadcast of, if it is one, and the shape that it has once its dimensions are in place."""
    shape = view.aval(operand).shape
    broadcast = view.producer(operand, "broadcast_in_dim")
    if broadcast is None:
        return operand, shape or [1] * rank
    [source] = broadcast.operands
    sizes = dict(zip(broadcast.equation.params["broadcast_dimensions"], view.aval(source).shape))
    return source, [sizes.get(i, 1) for i in range(rank)]


def _scaled(
    view: View, operand: Operand, user: Operation, bias: Operand | None, shape: Sequence[int]
) -> _Scores | None:
    """The product that an operand is, or is a multiple of, if nothing else needs it and it is large enough."""
    scale, scaling = 1.0, view.producer(operand, "mul") or view.producer(operand, "div")
    if scaling is not None and view.sole_user(operand) is user:
        for product, number in scales(view, scaling):
            scale = float(number.val) if scaling.equation.primitive.name == "mul" else 1 / float(number.val)
            operand, user = product.results[0], scaling
    product = view.producer(operand, "dot_general")
    if product is None or view.sole_user(operand) is not user or not _is_stack(view, product):
        return None
    ((depth,), _), _ = product.equation.params["dimension_numbers"]
    size = math.prod(view.aval(operand).shape) * view.aval(product.operands[0]).shape[depth]
    return _Scores(product, scale, bias, shape) if size >= _FEWEST else None


def _replacement(view: View, scores: _Scores, mixture: Operation) -> Replacement:
    (queries, keys), (_, values) = scores.product.operands, mixture.operands
    ((query_depth,), (key_depth,)), _ = scores.product.equation.params["dimension_numbers"]
    (_, (value_row,)), (batch, _) = mixture.equation.params["dimension_numbers"]
    stack = len(batch)
    # of the two dimensions behind those of the stack, one is the other's complement
    other = lambda dimension: 2 * stack + 1 - dimension
    lies = [
        (queries, other(query_depth), query_depth),
        (keys, other(key_depth), key_depth),
        (values, value_row, other(value_row)),
    ]
    operands, orders = [], []
    for operand, *last in lies:
        source, order = view.source(operand)
        operands.append(source)
        orders.append(_with_heads([order[i] for i in (*batch, *last)]))
    result, order = view.end(mixture.results[0])
    form = native.Heads(*orders, _with_heads(order), scores.scale)
    bias = [] if scores.bias is None else [scores.bias]
    return Replacement([result], partial(_attended, form, tuple(scores.shape)), [*operands, *bias])


def _with_heads(order: Sequence[int]) -> tuple[int, ...]:
    """The order of four dimensions; a stack of one has one of size 1 ahead."""
    return (0, *(i + 1 for i in order)) if len(order) == 3 else tuple(order)


def _attended(form: native.Heads, shape: Sequence[int], *operands: jax.Array) -> list[jax.Array]:
    query, key, value, *bias = operands
    biases = [lax.reshape(x, shape) for x in bias]
    if query.ndim == 4:
        return [native.attention(query, key, value, *biases, form=form)]
    ahead = [lax.expand_dims(x, [0]) for x in (query, key, value, *biases)]
    return [lax.squeeze(native.attention(*ahead, form=form), [0])]

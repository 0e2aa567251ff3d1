"""Rules for transformers: attention, and decoding token by token, in the forms that XLA computes fastest.

Each holds wherever its pattern does; none looks for an architecture.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.segments.preparation import Operation
from transmuter.segments.rewriting import Operand, Replacement, View

_FEW_ROWS = 8
"""Up to so many rows, a product takes no longer than reading the matrix that it multiplies."""
_SCALES = 1e-6, 1e6
"""A scale between these does not make operands overflow, nor vanish, where their products do not."""
_SOFTMAX = ["reduce_max", "broadcast_in_dim", "sub", "exp", "reduce_sum", "broadcast_in_dim", "div"]

Products = Callable[..., list[jax.Array]]


def scaled_operands(view: View) -> Iterator[Replacement]:
    """A product that is scaled by a number has its smaller operand scaled instead.

    The scores of attention are larger than the queries, and XLA scales these for nothing while it transposes them: 0.9
    of the time of attention, in MiniLM for 8x128 tokens.
    """
    for op in view.trace.operations:
        for product, number in scales(view, op):
            sizes = [math.prod(view.aval(operand).shape) for operand in product.operands]
            if min(sizes) < math.prod(view.aval(product.results[0]).shape):
                function = _product_scaled(product, op, smaller=sizes.index(min(sizes)))
                yield Replacement(op.results, function, [*product.operands, number])


def scales(view: View, op: Operation) -> Iterator[tuple[Operation, Operand]]:
    """The product and the number, if this operation scales one by the other."""
    orders = {"mul": [op.operands, op.operands[::-1]], "div": [op.operands]}
    for scaled, number in orders.get(op.equation.primitive.name, ()):
        product = view.producer(scaled, "dot_general")
        if product is None or not isinstance(number, jex.Literal) or view.sole_user(scaled) is not op:
            continue
        kinds = {view.aval(value).dtype for value in (*product.operands, scaled, number)}
        if len(kinds) > 1 or not jnp.issubdtype(*kinds, jnp.floating):
            continue
        is_moderate = _SCALES[0] < abs(float(number.val)) < _SCALES[1]
        # a scaled weight would not give the original back
        if is_moderate and view.weights.isdisjoint(product.operands):
            yield product, number


def _again(op: Operation, *operands: jax.Array, **changed: Any) -> Any:
    """What an operation computes of other operands."""
    primitive = op.equation.primitive
    return primitive.bind(*operands, **primitive.get_bind_params({**op.equation.params, **changed}))


def _product_scaled(product: Operation, scale: Operation, smaller: int) -> Products:
    def function(left: jax.Array, right: jax.Array, number: jax.Array) -> list[jax.Array]:
        operands = [left, right]
        operands[smaller] = _again(scale, operands[smaller], number)
        return [_again(product, *operands)]

    return function


def late_normalization(view: View) -> Iterator[Replacement]:
    """Where the shares of a softmax mix values, the mixture is divided by the sum of the powers, not each share.

    The mixture is smaller if there are more keys than elements of a value. Attention takes 0.7 of the time so, in
    MiniLM for 8x128 tokens and in ViT-S for 4 images.
    """
    for op in view.trace.operations:
        if op.equation.primitive.name != "dot_general":
            continue
        shares, values = op.operands
        softmax = view.producer(shares, "custom_jvp_call")
        shape = view.aval(shares).shape
        (contracted, _), (batch, _) = op.equation.params["dimension_numbers"]
        mixes = contracted == (len(shape) - 1,) and batch == tuple(range(len(batch)))
        shrinks = math.prod(view.aval(op.results[0]).shape) < math.prod(shape)
        if softmax is not None and is_softmax(softmax) and view.sole_user(shares) is op and mixes and shrinks:
            yield Replacement(op.results, _mixture(softmax, op), [*softmax.operands, values])


def is_softmax(op: Operation) -> bool:
    """Whether it is the softmax along the last axis."""
    equations = op.equation.params["call_jaxpr"].eqns
    names = [equation.primitive.name for equation in equations]
    return names == _SOFTMAX and equations[0].params["axes"] == (len(op.equation.invars[0].aval.shape) - 1,)


def _mixture(softmax: Operation, product: Operation) -> Products:
    def as_written(scores: jax.Array, values: jax.Array) -> jax.Array:
        return _again(product, *_again(softmax, scores), values)

    @jax.custom_jvp
    def mixture(scores: jax.Array, values: jax.Array) -> jax.Array:
        powers = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
        mixed = _again(product, powers, values)
        total = jnp.sum(powers, axis=-1)
        return mixed / total.reshape(*total.shape, *[1] * (mixed.ndim - total.ndim))

    @mixture.defjvp
    def _(primals, tangents):
        return jax.jvp(as_written, primals, tangents)

    return lambda scores, values: [mixture(scores, values)]


def products_of_parts(view: View) -> Iterator[Replacement]:
    """The product of a few rows with a concatenation: the products with its parts, concatenated or added up.

    A decoder's step appends to its keys and values, and attends to them. XLA would copy them once more for the product
    than for the result: GPT-2 with 256 cached tokens would take 1.1 times as long.
    """
    for op in view.trace.operations:
        if op.equation.primitive.name != "dot_general":
            continue
        rows, matrix = op.operands
        transpose = view.producer(matrix, "transpose")
        joined = view.producer(matrix if transpose is None else transpose.operands[0], "concatenate")
        if joined is None or matrix in view.weights or _row_count(view, op) > _FEW_ROWS:
            continue
        rank = len(view.aval(matrix).shape)
        order = tuple(range(rank)) if transpose is None else transpose.equation.params["permutation"]
        parts = _Parts(op, joined.equation.params["dimension"], order)
        if parts.are_matrices:
            yield Replacement(op.results, parts.function, [rows, *joined.operands])


class _Parts:
    """The product of rows with matrices that are joined of parts along `axis`; their axes are the parts in `order`."""

    def __init__(self, product: Operation, axis: int, order: Sequence[int]):
        (self.contracted, contracted), (self.batch, batch) = product.equation.params["dimension_numbers"]
        self.product, self.axis = product, axis
        self.part_contracted, self.part_batch = (tuple(order[i] for i in axes) for axes in (contracted, batch))
        left_rank = len(product.equation.invars[0].aval.shape)
        is_matrix = len(contracted) == 1 and left_rank == len(order) == len(batch) + 2
        self.are_matrices = is_matrix and axis not in self.part_batch

    def function(self, rows: jax.Array, *parts: jax.Array) -> list[jax.Array]:
        if self.axis not in self.part_contracted:
            return [lax.concatenate([self._product(rows, part) for part in parts], rows.ndim - 1)]
        bounds = np.cumsum([0, *(part.shape[self.axis] for part in parts)])
        taken = [lax.slice_in_dim(rows, *ends, axis=self.contracted[0]) for ends in itertools.pairwise(bounds)]
        return [functools.reduce(lax.add, map(self._product, taken, parts))]

    def _product(self, rows: jax.Array, part: jax.Array) -> jax.Array:
        contracted, batch = (self.contracted, self.part_contracted), (self.batch, self.part_batch)
        if self.part_contracted[0] != part.ndim - 1:
            return _again(self.product, rows, part, dimension_numbers=(contracted, batch))
        # XLA transposes a stack of matrices on the right, but not on the left
        numbers = contracted[::-1], batch[::-1]
        return jnp.swapaxes(_again(self.product, part, rows, dimension_numbers=numbers), -1, -2)


def _row_count(view: View, product: Operation) -> int:
    """How many rows the left operand of a product has, in each matrix of a stack."""
    (contracted, _), (batch, _) = product.equation.params["dimension_numbers"]
    shape = view.aval(product.operands[0]).shape
    return math.prod(n for i, n in enumerate(shape) if i not in (*contracted, *batch))


def tied_weights(view: View) -> Iterator[Replacement]:
    """The product of one row with a transposed weight that is needed as it is, too: without a transposed copy.

    It takes no longer, and a decoder whose embedding is the weight of its head keeps that once: 154 MB of GPT-2.
    """
    for op in view.trace.operations:
        if op.equation.primitive.name != "dot_general":
            continue
        row, matrix = op.operands
        transpose = view.producer(matrix, "transpose")
        if transpose is None or matrix not in view.weights or _row_count(view, op) > 1:
            continue
        weight = transpose.operands[0]
        if len(view.aval(weight).shape) == 2 and len(view.users[weight]) > 1:
            yield Replacement(op.results, _untransposed(op), [row, weight])


def _untransposed(product: Operation) -> Products:
    (left, right), batch = product.equation.params["dimension_numbers"]
    numbers = ((left, tuple(1 - i for i in right)), batch)
    return lambda row, weight: [_again(product, row, weight, dimension_numbers=numbers)]

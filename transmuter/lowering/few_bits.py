"""Products with weights of few bits, in blocks that share a scale: from the packed weights, or unpacked once.

A product of one row reads its weights once, so that their bytes bound its speed. Here words of 32 bits hold weights
that follow each other in a column, and lie row by row: an operation on all words of a row is one on vectors, the same
for every column. That leaves to XLA a single loop which unpacks and multiplies in registers. What is here is for XLA; a
trace has a product as one operation with a name, in whose place a kernel of ours can be.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast
from transmuter.lowering.named import named
from transmuter.lowering.platform import on_cpu

PRODUCT = "product with words"
"""The name of a product with packed weights, for rules. Its params are `bits`."""
Packing = Literal["auto", "keep", "unpack"]
"""Which weights stay packed: those whose products are as fast, all, or none."""
packing: ContextVar[Packing] = ContextVar("packing", default="auto")
"""What holds for the graph that is being lowered."""


@contextlib.contextmanager
def in_packing(choice: Packing) -> Iterator[None]:
    """A context in which graphs are lowered with that choice."""
    token = packing.set(choice)
    try:
        yield
    finally:
        packing.reset(token)


_ROW = 32
"""Weights of a column that one step of the loop for a single row multiplies: XLA compiles them one by one, in 0.1 s for
each matrix. With 64 a decoder's step takes 0.93 of the time, but compiling twice as long, and 100 MB more for 29
matrices."""
_SINGLE_ROWS = 8
"""Up to so many rows XLA multiplies one by one, in 0.2 ms each for 1024x3072 weights of 4 bits on two cores (float32
unpacked once 0.5). All of them unpack for 1 ms first, and multiply then."""
_BLOCK = 2**20
"""How many weights a loop unpacks at a time: 4 MB of float32, which stay in the cache."""


def keeps_packed(*, is_fast: bool = False) -> bool:
    """Whether a product takes its weights packed; `is_fast` says that it is no slower then."""
    return packing.get() == "keep" or (packing.get() == "auto" and is_fast)


def unpacked(packed: Array, bits: int, *, highest_first: bool = False) -> jax.Array:
    """The unsigned integers of `bits` bits that bytes hold along the last axis."""
    if bits not in (2, 4, 8):
        raise ValueError(f"bits is {bits}, not 2, 4 or 8")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = jnp.right_shift(packed[..., None], shifts[::-1] if highest_first else shifts)
    return (parts & np.uint8(2**bits - 1)).reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))


def times(x: Array, weight: Array, contracted: int = 1) -> jax.Array:
    """`x @ weight.T` in float32, or `x @ weight`, contracted with its axis 0."""
    return lax.dot_general(cast(x, np.float32), cast(weight, np.float32), (((x.ndim - 1,), (contracted,)), ((), ())))


def times_rows(x: Array, packed: Any, unpack: Callable[[Any], jax.Array]) -> jax.Array:
    """`x @ unpack(packed).T` in float32, for arrays with an entry for each row of the weight."""
    count = jax.tree.leaves(packed)[0].shape[0]
    if not keeps_packed():
        return times(x, unpack(packed))

    def part(some: Any) -> jax.Array:
        return times(x, unpack(some))

    return _by_parts(part, packed, axis=0, count=count, width=x.shape[-1])


def _by_parts(part: Callable[[Any], jax.Array], packed: Any, *, axis: int, count: int, width: int) -> jax.Array:
    """`part` of pieces of packed weights along an axis, joined along the last. A loop, in which XLA cannot unpack one
    piece before it is done with another. Gradients unpack again."""
    pieces = max(2, math.ceil(count * width / _BLOCK))
    size = max(1, count // pieces)
    whole = count // size
    part = jax.checkpoint(part)

    def at(start: Any, size: int) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis), packed)

    y = lax.map(lambda start: part(at(start, size)), size * np.arange(whole, dtype=np.int32))
    y = jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], whole * size)
    rest = count - whole * size
    return jnp.concatenate((y, part(at(whole * size, rest))), axis=-1) if rest else y


# ---- words ---------------------------------------------------------------------------------------------------------


def in_words(packed: Array) -> jax.Array:
    """The bytes of columns (..., columns, bytes) as words of 32 bits, (..., words, columns)."""
    words = lax.bitcast_convert_type(packed.reshape(*packed.shape[:-1], -1, 4), np.int32)
    return jnp.swapaxes(words, -1, -2)


def product(x: Array, words: Array, scales: Array, zeros: Array | None, bits: int) -> jax.Array:
    """`x` (rows, depth) times the weight (depth, columns) that words, as `in_words` has them, stand for, in float32.

    Scales and zero points are (blocks, columns), of the blocks that the depth falls into, which fill words. Without
    zero points half of the range is the zero.
    """
    if not keeps_packed(is_fast=on_cpu()):
        return times(x, _columns(words, scales, zeros, bits), 0)
    operands = (x, words, scales) if zeros is None else (x, words, scales, zeros)
    return named(PRODUCT, _product, *map(jnp.asarray, operands), bits=bits, is_for_cpu=on_cpu())


def _product(
    x: Array, words: Array, scales: Array, zeros: Array | None = None, *, bits: int, is_for_cpu: bool
) -> jax.Array:
    packed = lax.optimization_barrier((words, scales, zeros))  # which stay as they are while weights are prepared
    rows = x.shape[0]
    if isinstance(rows, int) and rows <= _SINGLE_ROWS and is_for_cpu:
        row = functools.partial(_single_row, bits=bits)
        return row(x, *packed) if rows == 1 else lax.map(lambda one: row(one[None], *packed)[0], x)
    x = cast(x, np.float32)
    return _by_parts(
        lambda some: times(x, _columns(*some, bits), 0), packed, axis=1, count=words.shape[1], width=x.shape[1]
    )


def _field(words: Array, i: int, bits: int) -> jax.Array:
    """The numbers in field `i` of words, in float32."""
    shifted = lax.shift_right_logical(words, np.int32(i * bits)) if i else words
    return cast(shifted & np.int32(2**bits - 1), np.float32)


def _zero(zeros: Array | None, bits: int) -> Any:
    return np.float32(2 ** (bits - 1)) if zeros is None else cast(zeros, np.float32)


def _columns(words: Array, scales: Array, zeros: Array | None, bits: int) -> jax.Array:
    """The weight (depth, columns)."""
    blocks, columns = scales.shape
    fields, shape = 32 // bits, (blocks, -1, columns)
    scales, zero = cast(scales, np.float32)[:, None], _zero(zeros, bits)
    zero = zero if zeros is None else zero[:, None]
    parts = [((_field(words.reshape(shape), i, bits) - zero) * scales).reshape(-1, columns) for i in range(fields)]
    return jnp.stack(parts, axis=1).reshape(-1, columns)


@functools.partial(jax.jit, static_argnames="bits")
def _single_row(x: Array, words: Array, scales: Array, zeros: Array | None, bits: int) -> jax.Array:
    """`product` with one row.

    XLA fuses what is elementwise over columns into one loop, but no sum over words. So what it adds up is spelled out,
    up to the sum over the loop's steps, which a product with ones spares from YNNPACK: that takes additions and
    multiplications out of the loop.
    """
    depth, (blocks, columns) = x.shape[1], scales.shape
    step = math.gcd(_ROW, depth)
    shared = math.gcd(step, depth // blocks)  # so many weights of a step share a scale
    steps, parts, fields = depth // step, step // shared, 32 // bits
    x, words = cast(x, np.float32).reshape(steps, step), words.reshape(steps, step // fields, columns)

    def per_part(parameter: Array) -> Array:
        """A parameter of blocks for each step, (parts, steps, columns)."""
        repeated = jnp.broadcast_to(parameter[:, None], (blocks, steps * parts // blocks, columns))
        return jnp.moveaxis(repeated.reshape(steps, parts, columns), 1, 0)

    scales, zero = per_part(cast(scales, np.float32)), _zero(zeros, bits)
    zero = [zero] * parts if zeros is None else per_part(zero)
    total = 0
    for part in range(parts):
        first, sums = part * shared, 0
        for i in range(first, first + shared):
            sums += _field(words[:, i // fields], i % fields, bits) * x[:, i, None]
        centre = jnp.sum(x[:, first : first + shared], axis=1, keepdims=True) * zero[part]
        total += (sums - centre) * scales[part]
    return jnp.ones((1, steps), np.float32) @ total

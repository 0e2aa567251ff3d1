"""Attention without its scores in memory, and its gradients, which compute the scores anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from transmuter.native.library import run_eagerly
from transmuter.native.products import steps_of

Order = tuple[int, int, int, int]


@dataclass(frozen=True)
class Heads:
    """How operands and the result of attention lie, and what the scores are multiplied by.

    Attributes:
        query: Which dimensions of the queries are the batch, the heads, the rows, and the elements of a row.
        key: The same for the keys.
        value: The same for the values.
        result: The result has its dimensions (batch, heads, rows, elements) in this order.
        scale: A number.
    """

    query: Order
    key: Order
    value: Order
    result: Order
    scale: float


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None, *, form: Heads
) -> jax.Array:
    """softmax(scale * query * key^T + bias) * value, of float32 operands with no size of 0.

    The bias is (batch, heads, queries, keys), each of which may be 1. Where all keys are masked by -inf, the result is
    NaN; the gradients are those of equal shares then.
    """
    return attention_p.bind(*([query, key, value] if bias is None else [query, key, value, bias]), form=form)


# ---- by JAX's own operations ---------------------------------------------------------------------------------------


@jax.custom_jvp
def _softmax(scores: jax.Array) -> jax.Array:
    powers = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return powers / jnp.sum(powers, axis=-1, keepdims=True)


def _shares(scores: jax.Array) -> jax.Array:
    """The softmax, as derivatives need it: with no NaN where all is -inf."""
    return _softmax(jnp.maximum(scores, jnp.finfo(scores.dtype).min))


@_softmax.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (scores,), (moved,) = primals, tangents
    shares = _shares(scores)
    return _softmax(scores), shares * (moved - jnp.sum(shares * moved, axis=-1, keepdims=True))


@jax.custom_jvp
def _mixture(scores: jax.Array, value: jax.Array) -> jax.Array:
    return jnp.matmul(_softmax(scores), value)


@_mixture.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (scores, value), (moved_scores, moved_value) = primals, tangents
    shares = _shares(scores)
    moved_shares = shares * (moved_scores - jnp.sum(shares * moved_scores, axis=-1, keepdims=True))
    return _mixture(scores, value), jnp.matmul(moved_shares, value) + jnp.matmul(shares, moved_value)


def pure_attention(query: jax.Array, key: jax.Array, value: jax.Array, *bias: jax.Array, form: Heads) -> jax.Array:
    """`attention` by JAX's own operations."""
    query, key, value = (
        lax.transpose(x, order) for x, order in zip((query, key, value), (form.query, form.key, form.value))
    )
    scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2)) * np.asarray(form.scale, query.dtype)
    return lax.transpose(_mixture(scores + bias[0] if bias else scores, value), form.result)


def pure_tangent(*operands: jax.Array, form: Heads) -> jax.Array:
    """What the result of `attention` moves by, when query, key and value move by the last three operands."""
    primals, moved = operands[:-3], operands[-3:]
    function = lambda *primary: pure_attention(*primary, *primals[3:], form=form)
    return jax.jvp(function, primals[:3], moved)[1]


def pure_gradients(
    query: jax.Array, key: jax.Array, value: jax.Array, output: jax.Array, *bias: jax.Array, form: Heads
) -> list[jax.Array]:
    """The gradients of `attention` for query, key and value, of those for its result."""
    function = lambda *primary: pure_attention(*primary, *bias, form=form)
    return list(jax.vjp(function, query, key, value)[1](output))


# ---- the primitives ------------------------------------------------------------------------------------------------

attention_p = jex.Primitive("cpu_attention")
attention_tangent_p = jex.Primitive("cpu_attention_tangent")
attention_gradients_p = jex.Primitive("cpu_attention_gradients")
attention_gradients_p.multiple_results = True


def _result(query: Any, key: Any, value: Any, *others: Any, form: Heads) -> Any:
    *outer, _ = (query.shape[i] for i in form.query)
    sizes = (*outer, value.shape[form.value[-1]])
    return jax.core.ShapedArray(tuple(sizes[i] for i in form.result), query.dtype)


attention_p.def_abstract_eval(_result)
attention_tangent_p.def_abstract_eval(_result)


@attention_gradients_p.def_abstract_eval
def _(query: Any, key: Any, value: Any, *others: Any, form: Heads) -> Any:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in (query, key, value)]


def _instantiated(tangents: Sequence[Any]) -> list[Any]:
    return [ad.instantiate_zeros(tangent) for tangent in tangents]


def _moved(primals: Sequence[Any], tangents: Sequence[Any], *, form: Heads) -> Any:
    if any(type(tangent) is not ad.Zero for tangent in tangents[3:]):  # a bias that is learned
        return jax.jvp(partial(pure_attention, form=form), tuple(primals), tuple(_instantiated(tangents)))
    result = attention_p.bind(*primals, form=form)
    return result, attention_tangent_p.bind(*primals, *_instantiated(tangents[:3]), form=form)


def _transposed(output: Any, *operands: Any, form: Heads) -> list[Any]:
    primals, moved = operands[:-3], operands[-3:]
    if type(output) is ad.Zero:
        return [None] * len(operands)
    query, key, value, *bias = primals
    gradients = attention_gradients_p.bind(query, key, value, output, *bias, form=form)
    wanted = (gradient if ad.is_undefined_primal(x) else None for gradient, x in zip(gradients, moved, strict=True))
    return [*(None for _ in primals), *wanted]


def _moved_purely(function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of differentiation: as JAX has it for the pure form."""

    def rule(primals: Sequence[Any], tangents: Sequence[Any], *, form: Heads) -> Any:
        return jax.jvp(partial(function, form=form), tuple(primals), tuple(_instantiated(tangents)))

    return rule


def _mapped(primitive: jex.Primitive, function: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of batching: the pure form, mapped."""

    def rule(operands: Sequence[Any], axes: Sequence[Any], *, form: Heads) -> Any:
        results = jax.vmap(partial(function, form=form), in_axes=tuple(axes))(*operands)
        return (results, [0] * len(results)) if primitive.multiple_results else (results, 0)

    return rule


def _lowering(ctx: mlir.LoweringRuleContext, *operands: Any, form: Heads) -> Any:
    query, key, value, *others = (aval.shape for aval in ctx.avals_in)
    is_gradient = len(ctx.avals_out) == 3
    bias = others[1:] if is_gradient else others
    steps = [_steps(shape, order) for shape, order in ((query, form.query), (key, form.key), (value, form.value))]
    batch, heads, queries, depth = (query[i] for i in form.query)
    sizes = batch, heads, queries, key[form.key[2]], depth, value[form.value[3]]
    output = (others[0] if is_gradient else ctx.avals_out[0].shape), tuple(map(form.result.index, range(4)))
    biased = [[0 if n == 1 else step for n, step in zip(shape, steps_of(shape))] for shape in bias]
    results = steps if is_gradient else [_steps(*output)]
    given = [*steps, *([_steps(*output)] if is_gradient else []), *biased]
    call = jax.ffi.ffi_lowering("transmuter_attention")
    return call(
        ctx,
        *operands,
        sizes=np.array(sizes, np.int64),
        steps=np.array([*given, *results], np.int64).reshape(-1),
        scale=np.float64(form.scale),
    )


def _steps(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    return [steps_of(shape)[i] for i in order]


def _complete(primitive: jex.Primitive, function: Callable[..., Any]) -> None:
    """What a primitive of these needs beyond the kernel: its forms everywhere else."""
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=primitive.multiple_results))
    batching.primitive_batchers[primitive] = _mapped(primitive, function)
    run_eagerly(primitive)


ad.primitive_jvps[attention_p] = _moved
ad.primitive_jvps[attention_tangent_p] = _moved_purely(pure_tangent)
ad.primitive_jvps[attention_gradients_p] = _moved_purely(pure_gradients)
ad.primitive_transposes[attention_tangent_p] = _transposed
_complete(attention_p, pure_attention)
_complete(attention_tangent_p, pure_tangent)
_complete(attention_gradients_p, pure_gradients)
mlir.register_lowering(attention_p, _lowering, platform="cpu")
mlir.register_lowering(attention_gradients_p, _lowering, platform="cpu")

"""Attention and what belongs to it: Attention, FlexAttention, LinearAttention, RotaryEmbedding, SwiGLU.

Queries, keys and values are (batch, heads, sequence, size); keys and values may have fewer heads than queries, each of
which then serves a group of adjacent query heads. Every kind of softmax attention is `scores`, `probabilities` and
`mixed` with something of its own in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, dtype, shape_vector, traced
from transmuter.lowering.control_flow import varying, varying_axes
from transmuter.lowering.linear import accumulator
from transmuter.lowering.reduction import rounded, softmax_sum
from transmuter.lowering.registry import operator

# ---- the steps of attention ----------------------------------------------------------------------------------------


def heads(x: Array, count: int) -> jax.Array:
    """(batch, sequence, count * size) as (batch, count, sequence, size)."""
    batch, length, hidden = x.shape
    if hidden % count:
        raise ValueError(f"{hidden} elements are no multiple of {count} heads")
    return jnp.swapaxes(x.reshape(batch, length, count, hidden // count), 1, 2)


def merged(x: Array) -> jax.Array:
    """(batch, heads, sequence, size) as (batch, sequence, heads * size)."""
    batch, count, length, size = x.shape
    return jnp.swapaxes(x, 1, 2).reshape(batch, length, count * size)


def _grouped(x: Array, groups: int) -> Array:
    """The heads of `x` in groups, (batch, groups, heads of a group, ...)."""
    if x.shape[1] % groups:
        raise ValueError(f"{x.shape[1]} heads of queries are no multiple of {groups} heads of keys")
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def scores(query: Array, key: Array, scale: float | None = None) -> jax.Array:
    """Scaled products of queries with keys, (batch, heads, queries, keys), in float32 at least."""
    wide = accumulator(query)
    groups = _grouped(query, key.shape[1])
    products = jnp.einsum("bkgqd,bktd->bkgqt", groups, key, preferred_element_type=wide)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return products.reshape(*query.shape[:3], key.shape[2]) * jnp.asarray(scale, wide)


def _scores_in_steps(query: Array, key: Array, scale: float | None) -> jax.Array:
    """`scores` as the specification's function has them: both operands scaled by the root, each step rounded."""
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    query, key = (x * jnp.asarray(root, x.dtype) for x in (query, key))
    return rounded(scores(query, key, 1), query.dtype)


def capped(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Scores bent smoothly to lie between plus and minus `softcap`; as they are where it is 0."""
    return jnp.tanh(scores / softcap) * softcap if softcap else scores


def probabilities(scores: jax.Array, sink: Array | None = None, kind: Any = np.float32) -> jax.Array:
    """Softmax over the keys. Where all are masked by -inf the result is 0, and so is its gradient.

    `sink` is one more score, which takes its share of the probability and belongs to no key. `kind` is the dtype that
    each step is `rounded` to.
    """
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    top = top if sink is None else jnp.maximum(top, sink)
    top = lax.stop_gradient(jnp.where(jnp.isneginf(top), 0, top))
    weights = rounded(jnp.exp(rounded(scores - top, kind)), kind)
    total = softmax_sum(weights, -1, kind)
    total = total if sink is None else total + jnp.exp(sink - top)
    return rounded(weights / jnp.where(total == 0, 1, total), kind)


def mixed(probabilities: Array, value: Array) -> jax.Array:
    """The values in the proportions that the queries give them, in the dtype of `value`."""
    groups, wide = _grouped(cast(probabilities, value.dtype), value.shape[1]), accumulator(value)
    sums = jnp.einsum("bkgqt,bktd->bkgqd", groups, value, preferred_element_type=wide)
    return cast(sums, value.dtype).reshape(*probabilities.shape[:3], value.shape[3])


def positions(count: Any, start: Any = 0) -> jax.Array:
    """The positions of `count` tokens from `start` on, which is a dimension or one position per leading axis."""
    first = start[..., None] if isinstance(start, Array) else traced(shape_vector((start,)))
    return cast(first, np.int32) + jnp.arange(count, dtype=np.int32)


def owners(bounds: Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Which of the sequences between `bounds` each of `count` packed tokens belongs to, and its position in there."""
    token = jnp.arange(count, dtype=np.int32)
    sequence = jnp.sum(token[:, None] >= bounds[1:], axis=1, dtype=np.int32)
    return sequence, token - bounds[sequence]


def within(queries: Array, keys: Array, left: Any, right: Any) -> jax.Array | None:
    """Which keys each query sees, (..., queries, keys): those from `left` before to `right` after its own position.

    A bound of None lets it see all on that side.
    """
    return both(
        None if left is None else keys >= queries[..., None] - left,
        None if right is None else keys <= queries[..., None] + right,
    )


def both(a: Array | None, b: Array | None) -> Array | None:
    """The conjunction of two masks, of which None allows everything."""
    return b if a is None else a if b is None else jnp.logical_and(a, b)


def masked(scores: jax.Array, visible: Array | None) -> jax.Array:
    """Scores with -inf for keys that are not visible."""
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


# ---- Attention -----------------------------------------------------------------------------------------------------


def _padded(mask: Array, length: Any) -> Array:
    """`mask` with the keys that it leaves out at the end masked."""
    missing = length - mask.shape[-1]
    if isinstance(missing, int) and missing <= 0:
        return mask
    fill = False if mask.dtype == np.bool_ else -jnp.inf
    return jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=fill)


@operator()
def Attention_23(
    Q,
    K,
    V,
    attn_mask=None,
    past_key=None,
    past_value=None,
    nonpad_kv_seqlen=None,
    *,
    is_causal,
    kv_num_heads,
    left_window_size=-1,
    q_num_heads,
    qk_matmul_output_mode,
    right_window_size=-1,
    scale,
    softcap,
    softmax_precision,
):
    """A query that sees no key yields zeros. ONNX Runtime forgets `is_causal` where there is but one query."""
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value come together or not at all")
    if packed := Q.ndim == 3:
        if not q_num_heads or not kv_num_heads:
            raise ValueError("3-D operands need the attributes q_num_heads and kv_num_heads")
        Q, K, V = heads(Q, q_num_heads), heads(K, kv_num_heads), heads(V, kv_num_heads)
    start = 0
    if past_key is not None:
        start = past_key.shape[2]
        K, V = jnp.concatenate((past_key, K), axis=2), jnp.concatenate((past_value, V), axis=2)
    keys, visible = positions(K.shape[2]), None
    if nonpad_kv_seqlen is not None:
        lengths = cast(jnp.reshape(nonpad_kv_seqlen, (-1, 1)), np.int32)
        visible = keys < lengths[..., None, None]
        start = lengths - Q.shape[2] if past_key is None else start
    left = left_window_size if left_window_size >= 0 else None
    right = 0 if is_causal else right_window_size if right_window_size >= 0 else None
    visible = both(visible, within(positions(Q.shape[2], start), keys, left, right))

    kind, is_halved = np.dtype(Q.dtype), Q.dtype == jnp.bfloat16
    stages = [_scores_in_steps(Q, K, scale) if is_halved else scores(Q, K, scale)]
    stages.append(rounded(capped(stages[-1], softcap), kind))
    biased = stages[-1]
    if attn_mask is not None:
        if attn_mask.dtype == np.bool_:
            visible = both(visible, _padded(attn_mask, K.shape[2]))
        else:
            bias = _padded(cast(attn_mask, biased.dtype), K.shape[2])
            biased = masked(rounded(biased + bias, kind), jnp.logical_not(jnp.isneginf(bias)))
    stages.append(masked(biased, visible))
    if softmax_precision:
        kind = dtype(softmax_precision)
    shares = probabilities(cast(stages[-1], kind) if softmax_precision else stages[-1], kind=kind)
    stages.append(shares)

    y = cast(mixed(shares, V), Q.dtype)
    return merged(y) if packed else y, K, V, cast(stages[qk_matmul_output_mode], Q.dtype)


@operator(domain="ai.onnx.preview")
def FlexAttention(Q, K, V, *, prob_mod, scale, score_mod, softmax_precision):
    precision = dtype(softmax_precision) if softmax_precision else accumulator(Q)
    shares = cast(scores(Q, K, scale), precision)
    if score_mod is not None:
        (shares,) = score_mod(shares)
    shares = probabilities(shares)
    if prob_mod is not None:
        (shares,) = prob_mod(shares)
    return cast(mixed(shares, cast(V, precision)), Q.dtype)


# ---- linear attention ----------------------------------------------------------------------------------------------


_RULES = {"linear": (False, False), "gated": (True, False), "delta": (False, True), "gated_delta": (True, True)}


def gates_of(update_rule: str, decay: Array | None, beta: Array | None) -> tuple[Array | None, Array | None]:
    """The decay and the update rate that a rule of linear attention has; None for one that it has not."""
    if update_rule not in _RULES:
        raise ValueError(f"there is no update_rule {update_rule!r}")
    for name, operand, has in zip(("decay", "beta"), (decay, beta), _RULES[update_rule]):
        if has and operand is None:
            raise ValueError(f"update_rule {update_rule!r} needs {name}")
    return tuple(x if has else None for x, has in zip((decay, beta), _RULES[update_rule]))


def spread(x: Array, count: int) -> Array:
    """Heads (the last axis but one) repeated, each as often as makes `count` of them."""
    if count % x.shape[-2]:
        raise ValueError(f"{count} heads cannot share {x.shape[-2]}")
    return x if x.shape[-2] == count else jnp.repeat(x, count // x.shape[-2], axis=-2)


def linear_step(state: jax.Array, token: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One token of linear attention: the new state, what the queries read from it, and what the key has added to it.

    The state is (batch, heads, size, value size), the token's queries are (batch, heads, group, size). Its decay (in
    logarithms) and update rate may be None.
    """
    queries, key, value, decay, rate = token
    if decay is not None:
        state = state * jnp.exp(decay)[..., None]
    if rate is not None:
        value = rate * (value - jnp.einsum("bkdv,bkd->bkv", state, key))
    state = state + key[..., :, None] * value[..., None, :]
    return state, (jnp.einsum("bkgd,bkdv->bkgv", queries, state), value)


def _seen_step(state: jax.Array, token: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    state, (output, _) = linear_step(state, token)
    return state, (output, state)


def scanned(step: Callable[[Any, Any], tuple[Any, Any]], state: jax.Array, tokens: Any) -> tuple[Any, Any]:
    """`lax.scan` over tokens; inside of `jax.shard_map` the state varies over the axes that they vary over."""
    return lax.scan(step, varying(state, varying_axes((state, tokens))), tokens)


def linear_attention(
    query: Array,
    key: Array,
    value: Array,
    past_state: Array | None,
    decay: Array | None,
    beta: Array | None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float,
    update_rule: str,
    window: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """The outputs and the last state, or the last `window` states: zeros for those from before the first token.

    Heads of keys, too, may be fewer than those of values, and so may those of queries.
    """
    decay, beta = gates_of(update_rule, decay, beta)
    batch, length, _ = query.shape
    size, value_size, wide = query.shape[2] // q_num_heads, value.shape[2] // kv_num_heads, accumulator(query)

    def by_token(x: Array | None, *shape: int) -> jax.Array | None:
        return None if x is None else jnp.moveaxis(cast(x, wide).reshape(batch, length, *shape), 1, 0)

    readers = max(q_num_heads, kv_num_heads)
    queries = spread(by_token(query, q_num_heads, size), readers) * (scale or 1 / math.sqrt(size))
    tokens = (
        queries.reshape(length, batch, kv_num_heads, readers // kv_num_heads, size),
        spread(by_token(key, key.shape[2] // size, size), kv_num_heads),
        by_token(value, kv_num_heads, value_size),
        None if decay is None else by_token(decay, kv_num_heads, decay.shape[2] // kv_num_heads),
        None if beta is None else by_token(beta, beta.shape[2], 1),
    )
    kept = query.dtype if past_state is None else past_state.dtype
    if past_state is None:
        past_state = jnp.zeros((batch, kv_num_heads, size, value_size), wide)
    state = cast(traced(past_state), wide)
    if not window:
        state, (outputs, _) = scanned(linear_step, state, tokens)
    else:
        seen = min(window, length)
        early, late = (jax.tree.map(lambda x, part=part: x[part], tokens) for part in _split(length - seen))
        state, (before, _) = scanned(linear_step, state, early)
        _, (outputs, state) = scanned(_seen_step, state, late)
        outputs = jnp.concatenate((before, outputs))
        state = jnp.pad(state, [(window - seen, 0), *[(0, 0)] * 4])
    output = jnp.moveaxis(outputs, 0, 1).reshape(batch, length, readers * value_size)
    return cast(output, query.dtype), cast(state, kept)


def _split(at: int) -> tuple[slice, slice]:
    return slice(None, at), slice(at, None)


@operator()
def LinearAttention_27(
    query,
    key,
    value,
    past_state=None,
    decay=None,
    beta=None,
    *,
    chunk_size,
    kv_num_heads,
    q_num_heads,
    scale,
    update_rule,
):
    """The recurrence itself, token by token in float32; `chunk_size` is a hint for other ways to compute the same."""
    heads = {"q_num_heads": q_num_heads, "kv_num_heads": kv_num_heads}
    return linear_attention(query, key, value, past_state, decay, beta, **heads, scale=scale, update_rule=update_rule)


# ---- rotary embedding ----------------------------------------------------------------------------------------------


def rotated(x: Array, cos: Array, sin: Array, interleaved: int) -> jax.Array:
    """`x` with pairs of its first elements turned by an angle each, whose cosines and sines broadcast against `x`.

    A pair is two neighbours if `interleaved`, else an element and its counterpart in the other half.
    """
    size = 2 * cos.shape[-1]
    if size > x.shape[-1]:
        raise ValueError(f"{size // 2} angles for heads of {x.shape[-1]} elements")
    turned, rest = x[..., :size], x[..., size:]
    shape = (*x.shape[:-1], size // 2, 2) if interleaved else (*x.shape[:-1], 2, size // 2)
    axis = -1 if interleaved else -2
    a, b = (jnp.squeeze(part, axis) for part in jnp.split(turned.reshape(shape), 2, axis))
    turned = jnp.stack((a * cos - b * sin, a * sin + b * cos), axis).reshape(turned.shape)
    return jnp.concatenate((turned, rest), axis=-1) if size < x.shape[-1] else turned


@operator()
def RotaryEmbedding_23(X, cos_cache, sin_cache, position_ids=None, *, interleaved, num_heads, rotary_embedding_dim):
    if X.ndim == 3 and not num_heads:
        raise ValueError("a 3-D operand needs the attribute num_heads")
    x = X if X.ndim == 4 else X.reshape(*X.shape[:2], num_heads, X.shape[2] // num_heads)
    if position_ids is not None:
        cos_cache, sin_cache = (jnp.take(cache, position_ids, axis=0) for cache in (cos_cache, sin_cache))
    if 2 * cos_cache.shape[-1] != (rotary_embedding_dim or x.shape[-1]):
        raise ValueError(f"{cos_cache.shape[-1]} angles for {rotary_embedding_dim or x.shape[-1]} elements")
    axis = 1 if X.ndim == 4 else 2
    cos, sin = jnp.expand_dims(cos_cache, axis), jnp.expand_dims(sin_cache, axis)
    return rotated(x, cos, sin, interleaved).reshape(X.shape)


# ---- gated activation ----------------------------------------------------------------------------------------------


@operator()
def SwiGLU_28(A, B, *, alpha):
    return A * jax.nn.sigmoid(A * jnp.asarray(alpha, A.dtype)) * B

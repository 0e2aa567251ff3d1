"""Attention in ONNX Runtime's domain com.microsoft, as its CPU kernels compute it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, contents, traced
from transmuter.lowering.attention import (
    both,
    capped,
    heads,
    masked,
    merged,
    mixed,
    positions,
    probabilities,
    rotated,
    scores,
    within,
)
from transmuter.lowering.linear import matmul
from transmuter.lowering.registry import operator

operator = functools.partial(operator, domain="com.microsoft")

# ---- caches --------------------------------------------------------------------------------------------------------


def _padded(x: Array, length: Any, axis: int = -1) -> Array:
    """`x` with zeros after its end, up to `length` elements along an axis."""
    missing = length - x.shape[axis]
    if isinstance(missing, int) and missing <= 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def _written(cache: Array, new: Array, start: Array) -> jax.Array:
    """`cache` with the tokens of `new` from position `start` (batch, 1) on. Everything else in it stays."""
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(write)(traced(cache), traced(new), start[:, 0])


def _by_beam(cache: Array, beams: Array, past: Array) -> jax.Array:
    """The tokens that belong to each beam. `beams` (batch, beams, length) says which beam wrote a past token."""
    rows, length = cache.shape[0], cache.shape[2]
    own = jnp.arange(rows, dtype=np.int32)[:, None]
    writers = cast(beams, np.int32).reshape(rows, -1)[:, :length] + own // beams.shape[1] * beams.shape[1]
    writers = jnp.where(positions(length) < past, writers, own)
    return jnp.take_along_axis(cache, writers[:, None, :, None], axis=0)


# ---- attention with as many heads of keys as of queries ------------------------------------------------------------


def _unpadded(mask: Array, batch: Any, start: Any, queries: Any, total: Any) -> Array | None:
    """Which keys a padding mask lets the queries see, (batch, 1, queries or 1, keys); None for all.

    A 1-D mask holds the end of each sequence, then perhaps its start; a 4-D one is made for the longest sequence.
    """
    if mask.ndim == 1:
        limits, keys = cast(mask, np.int32)[:, None, None, None], positions(total)
        return both(keys < limits[:batch], keys >= limits[batch:] if mask.shape[0] == 2 * batch else None)
    if mask.ndim == 2 and mask.shape[1] == 1 != total:
        return None
    if mask.ndim == 4:
        mask = mask[:, 0, start : start + queries, :total]
    if mask.shape[-1] != total:
        raise ValueError(f"a mask of {mask.shape[-1]} keys where there are {total}")
    return jnp.expand_dims(mask > 0, (1, 2) if mask.ndim == 2 else 1)


def _attended(
    q: Array,
    k: Array,
    v: Array,
    past: tuple[Array | None, Array | None] = (None, None),
    past_length: Array | None = None,
    *,
    mask: Array | None,
    mask_filter_value: float,
    bias: Array | None,
    scale: float,
    unidirectional: int = 0,
    beams: Array | None = None,
) -> tuple[jax.Array, Array, Array, jax.Array]:
    """The attention of new tokens to past and new ones, the keys and values of all of them, and the scores.

    With `past_length` the past is a buffer with so many tokens in use, and the new ones are written behind them. A
    padded key is not forbidden: `mask_filter_value` is added to its score, which shows where a query sees no other.
    """
    batch, _, new, _ = q.shape
    start = 0 if past[0] is None else past[0].shape[2]
    buffered = past[0] is not None and past_length is not None
    if past[0] is not None and not buffered:
        k, v = (jnp.concatenate(pair, axis=2) for pair in zip(past, (k, v), strict=True))
    if buffered:
        start = jnp.broadcast_to(cast(jnp.reshape(past_length, (1, 1)), np.int32), (batch, 1))
        k, v = (_written(cache, tokens, start) for cache, tokens in zip(past, (k, v), strict=True))
        mask = mask if mask is None or mask.ndim == 1 else _padded(mask, k.shape[2])
        bias = bias if bias is None else _padded(bias, k.shape[2])
    present = k, v
    if beams is not None:
        k, v = (_by_beam(cache, beams, start) for cache in present)

    logits = scores(q, k, scale or None)
    if bias is not None:
        logits = logits + cast(bias, logits.dtype)
    keys, lowest = positions(k.shape[2]), jnp.finfo(logits.dtype).min
    seen = None if mask is None else _unpadded(mask, batch, start, new, k.shape[2])
    hidden = 0 if seen is None else jnp.where(seen, 0, jnp.asarray(mask_filter_value, logits.dtype))
    if unidirectional:  # the last query is taken for the last key's, and sees all
        causal = jnp.logical_or(within(positions(new, start), keys, None, 0), positions(new)[:, None] == new - 1)
        hidden = jnp.where(causal, hidden, lowest)
    logits = logits + hidden
    if buffered:
        logits = masked(logits, keys < start[..., None, None] + new)
    y = merged(cast(mixed(probabilities(logits), v), q.dtype))
    used = contents(past_length) if buffered else None
    return y, *present, logits if used is None else logits[..., : int(used.reshape(())) + new]


def _neox_rotated(x: jax.Array, size: int, start: Any) -> jax.Array:
    """`x` with its first `size` elements turned by the usual angles, those of base 10000."""
    frequencies = jnp.asarray(10000.0 ** -(np.arange(0, size, 2) / size), np.float32)
    angles = cast(positions(x.shape[2], start), np.float32)[..., None] * frequencies
    return rotated(x, cast(jnp.cos(angles), x.dtype), cast(jnp.sin(angles), x.dtype), False)


@operator()
def Attention(
    input,
    weights,
    bias=None,
    mask_index=None,
    past=None,
    attention_bias=None,
    past_sequence_length=None,
    *,
    num_heads,
    do_rotary=0,
    mask_filter_value=-10000.0,
    past_present_share_buffer=0,
    qkv_hidden_sizes=None,
    rotary_embedding_dim=0,
    scale=0.0,
    unidirectional=0,
):
    """The CPU kernel has no rotary embedding, shared buffer or 4-D mask: these follow the operator's documentation."""
    sizes = qkv_hidden_sizes or [weights.shape[1] // 3] * 3
    qkv = matmul(input, weights)
    qkv = qkv if bias is None else qkv + bias
    q, k, v = (heads(part, num_heads) for part in jnp.split(qkv, np.cumsum(sizes[:2]), axis=-1))
    if do_rotary:
        start = 0 if past is None else past.shape[3] if past_sequence_length is None else past_sequence_length
        q, k = (_neox_rotated(x, rotary_embedding_dim or x.shape[3], start) for x in (q, k))
    y, k, v, _ = _attended(
        q,
        k,
        v,
        (None, None) if past is None else (past[0], past[1]),
        past_sequence_length if past_present_share_buffer else None,
        mask=mask_index,
        mask_filter_value=mask_filter_value,
        bias=attention_bias,
        scale=scale,
        unidirectional=unidirectional,
    )
    return y, jnp.stack((k, v)) if k.shape == v.shape else None


def _projected(query: Array, key: Array | None, value: Array | None, bias: Array | None, num_heads: int) -> list[Array]:
    """Queries, keys and values with their biases, as (batch, heads, sequence, size), from any form they come in.

    Keys and values of four dimensions have this form already, and their bias.
    """
    if query.ndim == 5:  # (batch, sequence, heads, 3, size)
        parts = [query[:, :, :, i].reshape(*query.shape[:2], -1) for i in range(3)]
    elif key is None:
        parts = jnp.split(query, 3, axis=-1)
    elif key.ndim == 5:  # (batch, sequence, heads, 2, size)
        parts = [query, *(key[:, :, :, i].reshape(*key.shape[:2], -1) for i in range(2))]
    else:
        parts = [query, key, value]
    if bias is not None:
        hidden = parts[0].shape[-1]
        biases = jnp.split(bias, [hidden, 2 * hidden])
        parts = [part + b if part.ndim == 3 else part for part, b in zip(parts, biases, strict=True)]
    return [heads(part, num_heads) if part.ndim == 3 else part for part in parts]


@operator()
def MultiHeadAttention(
    query,
    key=None,
    value=None,
    bias=None,
    key_padding_mask=None,
    attention_bias=None,
    past_key=None,
    past_value=None,
    past_sequence_length=None,
    cache_indirection=None,
    *,
    num_heads,
    mask_filter_value=-10000.0,
    scale=0.0,
    unidirectional=0,
):
    """The CPU kernel refuses packed operands of five dimensions, which are no different once they are unpacked."""
    return _attended(
        *_projected(query, key, value, bias, num_heads),
        (past_key, past_value),
        past_sequence_length,
        mask=key_padding_mask,
        mask_filter_value=mask_filter_value,
        bias=attention_bias,
        scale=scale,
        unidirectional=unidirectional,
        beams=cache_indirection,
    )


@operator()
def DecoderMaskedMultiHeadAttention(
    query,
    key=None,
    value=None,
    mask_index=None,
    attention_bias=None,
    past_key=None,
    past_value=None,
    past_sequence_length=None,
    beam_width=None,
    cache_indirection=None,
    bias=None,
    *,
    num_heads,
    mask_filter_value=-10000.0,
    output_qk=0,
    past_present_share_buffer=0,
    scale=0.0,
):
    return _attended(
        *_projected(query, key, value, bias, num_heads),
        (past_key, past_value),
        past_sequence_length if past_present_share_buffer else None,
        mask=mask_index,
        mask_filter_value=mask_filter_value,
        bias=attention_bias,
        scale=scale,
        beams=cache_indirection,
    )


# ---- attention with groups of query heads --------------------------------------------------------------------------


@operator()
def GroupQueryAttention(
    query,
    key=None,
    value=None,
    past_key=None,
    past_value=None,
    seqlens_k=None,
    total_sequence_length=None,
    cos_cache=None,
    sin_cache=None,
    position_ids=None,
    attention_bias=None,
    head_sink=None,
    k_scale=None,
    v_scale=None,
    q_norm_weight=None,
    k_norm_weight=None,
    query_seqlens=None,
    *,
    num_heads,
    kv_num_heads,
    causal=1,
    do_rotary=0,
    k_norm_epsilon=0.0,
    k_quant_type="NONE",
    kv_cache_bit_width=0,
    local_window_size=-1,
    q_norm_epsilon=0.0,
    qk_norm_epsilon=1e-6,
    qk_output=0,
    rotary_interleaved=0,
    scale=0.0,
    sliding_window_cache=0,
    smooth_softmax=-1,
    softcap=0.0,
    v_quant_type="NONE",
):
    """`seqlens_k` says how many tokens each sequence has, less one; its new ones are the last of them.

    The present caches are as long as the past ones, or longer if the sequence no longer fits: `total_sequence_length`
    tokens. Where its contents are hidden, the past caches count as full. Cached tokens behind a sequence's end stay
    as they are, as when ONNX Runtime shares one buffer between past and present.
    """
    if sliding_window_cache or k_quant_type != "NONE" or v_quant_type != "NONE":
        raise ValueError("a cache that is quantized or holds only a window is not supported")
    if key is None:
        size = query.shape[2] // (num_heads + 2 * kv_num_heads)
        query, key, value = jnp.split(query, [num_heads * size, (num_heads + kv_num_heads) * size], axis=-1)
    q, k, v = heads(query, num_heads), heads(key, kv_num_heads), heads(value, kv_num_heads)
    if q_norm_weight is not None:
        q = _normalized(q, q_norm_weight, q_norm_epsilon or qk_norm_epsilon)
        k = _normalized(k, k_norm_weight, k_norm_epsilon or qk_norm_epsilon)

    new, past = q.shape[2], 0 if past_key is None else past_key.shape[2]
    held = None if total_sequence_length is None else contents(total_sequence_length)
    total = past + k.shape[2] if held is None else int(held.reshape(()))
    lengths = cast(jnp.reshape(seqlens_k, (-1, 1)), np.int32) + 1
    fresh = jnp.minimum(lengths, new) if query_seqlens is None else cast(query_seqlens, np.int32).reshape(-1, 1)
    start = lengths - fresh
    queries = positions(new, start)[:, 0]
    if do_rotary:
        where = queries if position_ids is None else position_ids
        if position_ids is not None and total == new:  # of a prompt, the kernel reads the first position alone
            where = position_ids[:1, :1] + jnp.arange(new, dtype=position_ids.dtype)
        cos, sin = (jnp.take(cache, where, axis=0)[:, None] for cache in (cos_cache, sin_cache))
        q, k = (rotated(x, cos, sin, rotary_interleaved) for x in (q, k))

    if past_key is not None:
        capacity = total if held is None else max(past, total)
        cached = (_padded(cache, capacity, axis=2) for cache in (past_key, past_value))
        k, v = (_written(cache, x, start) for cache, x in zip(cached, (k, v), strict=True)) if k.shape[2] else cached

    keys, last = positions(k.shape[2]), jnp.minimum(queries, lengths - 1)[:, None]
    left = local_window_size - 1 if local_window_size >= 0 else None
    visible = within(last, keys, left, 0) if causal else keys < lengths[..., None, None]
    logits = capped(scores(q, k, scale or None), softcap)
    if attention_bias is not None:
        logits = logits + cast(_padded(attention_bias, k.shape[2]), logits.dtype)
    sink = jnp.zeros((), logits.dtype) if smooth_softmax == 1 else None
    if head_sink is not None:
        sink = cast(head_sink, logits.dtype)[:, None, None]
    shares = probabilities(masked(logits, visible), sink)
    y = merged(cast(mixed(shares, v), query.dtype))
    qk = {1: jnp.where(visible, logits, 0), 2: shares}.get(qk_output)
    return y, k, v, None if qk is None else cast(qk[..., :total], query.dtype)


def _normalized(x: jax.Array, weight: Array, epsilon: float) -> jax.Array:
    """Heads divided by their root mean square."""
    wide = cast(x, np.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return cast(wide, x.dtype) * weight


# ---- rotary embedding ----------------------------------------------------------------------------------------------


@operator()
def RotaryEmbedding(
    input,
    position_ids,
    cos_cache,
    sin_cache,
    *,
    interleaved=0,
    is_packed_batching=0,
    num_heads=0,
    rotary_embedding_dim=0,
    scale=1.0,
):
    """The kernels ignore `scale`, and so does this."""
    size = input.shape[2] // num_heads if num_heads and rotary_embedding_dim else 2 * cos_cache.shape[1]
    x = input if input.ndim == 4 else input.reshape(*input.shape[:2], input.shape[2] // size, size)
    axis = 1 if input.ndim == 4 else 2
    if position_ids.ndim == 1:  # the first token's
        position_ids = position_ids[:, None] + jnp.arange(x.shape[3 - axis], dtype=position_ids.dtype)
    cos, sin = (jnp.expand_dims(jnp.take(cache, position_ids, axis=0), axis) for cache in (cos_cache, sin_cache))
    return rotated(x, cos, sin, interleaved).reshape(input.shape)

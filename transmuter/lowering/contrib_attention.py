"""Attention in ONNX Runtime's domain com.microsoft, as its CPU kernels compute it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
from jax import lax

from transmuter.lowering.arrays import Array, cast, contents, dtype, traced
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
from transmuter.lowering.linear import MatMulInteger, accumulator, matmul
from transmuter.lowering.quantization import dequantized, quantized, quotient, rescaled, saturated
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


def written(cache: Array, new: Array, start: Array) -> jax.Array:
    """`cache` with the tokens of `new` from position `start` (batch, 1) on. Everything else in it stays."""
    write = functools.partial(lax.dynamic_update_slice_in_dim, axis=1)
    return jax.vmap(write)(traced(cache), traced(new), start[:, 0])


def _sliding(start: Array, fresh: Array, new: Any, capacity: Any, window: int) -> tuple[jax.Array, jax.Array]:
    """The positions (batch, rows) that rows of a cache for a window and new tokens behind them have, -1 where there is
    no token, and which of these rows the cache then keeps.

    Where it is full, a cache drops as many tokens as it has rows more than it needs.
    """
    drop = capacity - window + 1
    if not 0 < window <= capacity:
        raise ValueError(f"a cache of {capacity} tokens for a window of {window}")

    def first(length: Array) -> Array:
        """The position of the first token in the cache when there are so many."""
        return drop * jnp.maximum(0, -((capacity - length) // drop))

    kept, came = positions(capacity, first(start)[:, 0]), positions(new, start[:, 0])
    kept, came = jnp.where(kept < start, kept, -1), jnp.where(came < start + fresh, came, -1)
    keep = positions(capacity, first(start + fresh)[:, 0])
    return jnp.concatenate((kept, came), axis=1), jnp.where(keep < start, keep - first(start), capacity + keep - start)


def _by_beam(cache: Array, beams: Array, past: Array) -> jax.Array:
    """The tokens that belong to each beam. `beams` (batch, beams, length) says which beam wrote a past token."""
    rows, length = cache.shape[0], cache.shape[2]
    own = jnp.arange(rows, dtype=np.int32)[:, None]
    writers = cast(beams, np.int32).reshape(rows, -1)[:, :length] + own // beams.shape[1] * beams.shape[1]
    writers = jnp.where(positions(length) < past, writers, own)
    return jnp.take_along_axis(cache, writers[:, None, :, None], axis=0)


def stored(x: Array, cache: Array, scale: Array | None) -> Array:
    """Keys or values in the form of a `cache`: as they are, or int8, float8, or 4 bits plus 8 and two to a byte."""
    if cache.dtype == x.dtype:
        return x
    if cache.dtype != np.uint8:
        return quantized(x, scale, None, cache.dtype)
    halves = jnp.clip(saturated(quotient(x, scale), np.uint8(8), cache.dtype), 0, 15).reshape(*x.shape[:-1], -1, 2)
    return halves[..., 0] | halves[..., 1] << 4


def loaded(cache: Array, scale: Array | None, kind: np.dtype) -> Array:
    """What `stored` has put into a cache."""
    if cache.dtype == kind:
        return cache
    if cache.dtype != np.uint8:
        return cast(dequantized(cache, scale), kind)
    halves = jnp.stack((cache & 15, cache >> 4), axis=-1).reshape(*cache.shape[:-1], -1)
    return cast(dequantized(halves, scale, np.uint8(8)), kind)


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
        k, v = (written(cache, tokens, start) for cache, tokens in zip(past, (k, v), strict=True))
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


def _self_attended(
    qkv: Array,
    num_heads: int,
    sizes: Sequence[int] | None,
    past: Array | None,
    past_length: Array | None = None,
    *,
    do_rotary: int,
    rotary_size: int = 0,
    buffered: int = 0,
    **how: Any,
) -> tuple[jax.Array, Array, Array]:
    """The attention of tokens to themselves and to the past, from all their projections, as `_attended` has it."""
    sizes = sizes or [qkv.shape[2] // 3] * 3
    q, k, v = (heads(part, num_heads) for part in jnp.split(qkv, np.cumsum(sizes[:2]), axis=-1))
    if do_rotary:
        start = 0 if past is None else past.shape[3] if past_length is None else past_length
        q, k = (_neox_rotated(x, rotary_size or x.shape[3], start) for x in (q, k))
    caches = (None, None) if past is None else (past[0], past[1])
    return _attended(q, k, v, caches, past_length if buffered else None, **how)[:3]


def _stacked(key: Array, value: Array) -> jax.Array | None:
    """The present of an operator that keeps keys and values in one array."""
    return jnp.stack((key, value)) if key.shape == value.shape else None


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
    qkv = matmul(input, weights)
    y, k, v = _self_attended(
        qkv if bias is None else qkv + bias,
        num_heads,
        qkv_hidden_sizes,
        past,
        past_sequence_length,
        do_rotary=do_rotary,
        rotary_size=rotary_embedding_dim,
        buffered=past_present_share_buffer,
        mask=mask_index,
        mask_filter_value=mask_filter_value,
        bias=attention_bias,
        scale=scale,
        unidirectional=unidirectional,
    )
    return y, _stacked(k, v)


@operator()
def QAttention(
    input,
    weight,
    bias,
    input_scale,
    weight_scale,
    mask_index=None,
    input_zero_point=None,
    weight_zero_point=None,
    past=None,
    *,
    num_heads,
    do_rotary=0,
    mask_filter_value=-10000.0,
    past_present_share_buffer=0,
    scale=0.0,
    unidirectional=0,
):
    """Rotary embedding, which the CPU kernel lacks, is that of Attention."""
    if past_present_share_buffer:
        raise ValueError("a buffer shared by past and present is not supported: no operand says how full it is")
    total = MatMulInteger(input, weight, input_zero_point, weight_zero_point)
    qkv = rescaled(total, rescaled(weight_scale, input_scale)) + cast(bias, np.float32)
    y, k, v = _self_attended(
        cast(qkv, bias.dtype),
        num_heads,
        None,
        past,
        do_rotary=do_rotary,
        mask=mask_index,
        mask_filter_value=mask_filter_value,
        bias=None,
        scale=scale,
        unidirectional=unidirectional,
    )
    return y, _stacked(k, v)


def _reordered(keys: Array, *, back: bool = False) -> jax.Array:
    """Keys as the CUDA kernels of decoding keep them, 16 bytes of each token after another, in the order of tokens."""
    batch, count, length, size = keys.shape
    chunk = 16 // keys.dtype.itemsize
    shape = (length, size // chunk) if back else (size // chunk, length)
    return jnp.swapaxes(keys.reshape(batch, count, *shape, chunk), 2, 3).reshape(keys.shape)


@operator(exact_dtypes=True)
def DecoderMaskedSelfAttention(
    input,
    weights,
    bias,
    mask_index=None,
    past=None,
    attention_bias=None,
    past_sequence_length=None,
    beam_width=None,
    cache_indirection=None,
    *,
    num_heads,
    do_rotary=0,
    mask_filter_value=-10000.0,
    past_present_share_buffer=0,
    scale=0.0,
):
    if past_present_share_buffer:
        past = jnp.stack((_reordered(past[0]), past[1]))
    y, k, v = _self_attended(
        matmul(input, weights) + bias,
        num_heads,
        None,
        past,
        past_sequence_length,
        do_rotary=do_rotary,
        buffered=past_present_share_buffer,
        mask=mask_index,
        mask_filter_value=mask_filter_value,
        bias=attention_bias,
        scale=scale,
        beams=cache_indirection,
    )
    return y, _stacked(_reordered(k, back=True) if past_present_share_buffer else k, v)


@operator(known=("static_kv", "use_past", "has_layer_state", "has_key_padding_mask"))
def DecoderAttention(
    query,
    key,
    q_weight,
    kv_weight,
    bias,
    key_padding_mask=None,
    key_cache=None,
    value_cache=None,
    static_kv=None,
    use_past=None,
    has_layer_state=None,
    has_key_padding_mask=None,
    *,
    num_heads,
    mask_filter_value=-10000.0,
):
    """The padding mask is true for padding, which takes no part whatever `mask_filter_value`, as in the CUDA kernel."""
    hidden, cached = query.shape[2], bool(use_past) and bool(has_layer_state)

    def projected(x: Array, weight: Array, bias: Array, parts: int) -> list[jax.Array]:
        y = jnp.swapaxes(matmul(x, weight) + bias, 0, 1)
        return [heads(part, num_heads) for part in jnp.split(y, parts, axis=-1)]

    (q,) = projected(query, q_weight, bias[:hidden], 1)
    if static_kv and cached:
        k, v = key_cache, value_cache
    else:
        k, v = projected(key if static_kv else query, kv_weight, bias[hidden:], 2)
        if cached:
            k, v = jnp.concatenate((key_cache, k), axis=2), jnp.concatenate((value_cache, v), axis=2)
    visible = jnp.logical_not(key_padding_mask)[:, None, None] if has_key_padding_mask else None
    y = mixed(probabilities(masked(scores(q, k), visible)), v)
    return jnp.swapaxes(merged(cast(y, query.dtype)), 0, 1), k, v


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


def grouped_heads(
    query: Array, key: Array | None, value: Array | None, num_heads: int, kv_num_heads: int
) -> tuple[Array, Array, Array]:
    """Queries, keys and values as (batch, heads, sequence, size), also from one array that holds them all."""
    if key is None:
        size = query.shape[2] // (num_heads + 2 * kv_num_heads)
        query, key, value = jnp.split(query, [num_heads * size, (num_heads + kv_num_heads) * size], axis=-1)
    return heads(query, num_heads), heads(key, kv_num_heads), heads(value, kv_num_heads)


def normalized(x: Array, weight: Array, epsilon: float) -> jax.Array:
    """Heads divided by their root mean square."""
    wide = cast(x, accumulator(x))
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return cast(wide, x.dtype) * weight


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
    as they are, as when ONNX Runtime shares one buffer between past and present. Attention reads a quantized cache
    for new tokens too, as the CPU kernel does.
    """
    if sliding_window_cache and qk_output:
        raise ValueError("scores of a cache that holds only a window are not supported")
    if past_key is None and k_quant_type != "NONE":
        raise ValueError("a quantized cache needs a past, which says how it is quantized")
    q, k, v = grouped_heads(query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None:
        q = normalized(q, q_norm_weight, q_norm_epsilon or qk_norm_epsilon)
        k = normalized(k, k_norm_weight, k_norm_epsilon or qk_norm_epsilon)

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

    present, keys, scales = (k, v), positions(k.shape[2]), (k_scale, v_scale)
    if past_key is not None:
        caches = past_key, past_value
        if sliding_window_cache:
            keys, keep = _sliding(start, fresh, new, past, local_window_size)
            rows = [jnp.concatenate(pair, 2) for pair in zip(caches, map(stored, (k, v), caches, scales), strict=True)]
            present = [jnp.take_along_axis(x, keep[:, None, :, None], axis=2, mode="clip") for x in rows]
            keys = keys[:, None, None]
        else:
            rows = [_padded(cache, total if held is None else max(past, total), axis=2) for cache in caches]
            if k.shape[2]:
                rows = [
                    written(cache, x, start) for cache, x in zip(rows, map(stored, (k, v), rows, scales), strict=True)
                ]
            present, keys = rows, positions(rows[0].shape[2])
        k, v = (loaded(cache, scale, q.dtype) for cache, scale in zip(rows, scales, strict=True))

    last = jnp.minimum(queries, lengths - 1)[:, None]
    left = local_window_size - 1 if local_window_size >= 0 else None
    visible = within(last, keys, left, 0) if causal else keys < lengths[..., None, None]
    visible = jnp.logical_and(visible, keys >= 0) if sliding_window_cache else visible
    logits = capped(scores(q, k, scale or None), softcap)
    if attention_bias is not None:
        bias = _padded(attention_bias, k.shape[2])
        bias = jnp.take_along_axis(bias, keys, axis=3, mode="clip") if sliding_window_cache else bias
        logits = logits + cast(bias, logits.dtype)
    sink = jnp.zeros((), logits.dtype) if smooth_softmax == 1 else None
    if head_sink is not None:
        sink = cast(head_sink, logits.dtype)[:, None, None]
    shares = probabilities(masked(logits, visible), sink)
    y = merged(cast(mixed(shares, v), query.dtype))
    qk = {1: jnp.where(visible, logits, 0), 2: shares}.get(qk_output)
    return y, *present, None if qk is None else cast(qk[..., :total], query.dtype)


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


@operator()
def MRotaryEmbedding(
    input,
    position_ids,
    cos_cache,
    sin_cache,
    *,
    mrope_section,
    interleaved=0,
    is_packed_batching=0,
    mrope_layout=0,
    num_heads=0,
    rotary_embedding_dim=0,
    scale=1.0,
):
    pairs = np.arange(cos_cache.shape[1])
    if sum(mrope_section) != pairs.size:
        raise ValueError(f"sections of {sum(mrope_section)} angles where the caches have {pairs.size}")
    # which of a token's positions, in time, height or width, turns a pair
    stream = np.repeat(np.arange(3), mrope_section)
    if mrope_layout:
        stream = np.where(pairs < 3 * np.take(mrope_section, pairs % 3), pairs % 3, 0)
    rows = jnp.moveaxis(position_ids[stream], 0, -1)
    cos, sin = (traced(cache)[rows, pairs][:, None] for cache in (cos_cache, sin_cache))
    cos, sin = (x * jnp.asarray(scale, x.dtype) for x in (cos, sin))
    if input.ndim == 4:
        return rotated(input, cos, sin, interleaved)
    return merged(rotated(heads(input, num_heads), cos, sin, interleaved))


@operator()
def GemmaRotaryEmbedding(emb, q, q_rot, k, k_rot):
    cos, sin = (cast(f(emb), q.dtype)[:, None] for f in (jnp.cos, jnp.sin))
    return q * cos + q_rot * sin, k * cos + k_rot * sin


@operator(known=("prefill_numerics",))
def RMSNormRotary(
    X,
    scale,
    position_ids,
    cosine,
    sine,
    prefill_numerics=None,
    *,
    rotary_embedding_dim,
    epsilon=1e-6,
    flatten_batch=0,
    input_start=0,
    input_width=0,
    output_fp16=0,
    use_fp32_arithmetic=1,
):
    """The roundings to bfloat16 take place where the model computes in bfloat16."""
    batch, length, count, stride = X.shape
    target, wide = dtype(onnx.TensorProto.FLOAT16 if output_fp16 else onnx.TensorProto.BFLOAT16), np.dtype(np.float32)
    rounded = X.dtype if {X.dtype, target, cosine.dtype} == {np.dtype(ml_dtypes.bfloat16)} else wide
    width = input_width or stride - input_start
    x = cast(X[..., input_start : input_start + width], wide)
    square = jnp.mean(x * x, axis=-1, keepdims=True) + epsilon
    x = x * lax.rsqrt(square) if prefill_numerics else x / jnp.sqrt(square)
    x = cast(x * scale, rounded)

    if position_ids.size == 1:
        steps = np.arange(batch * length if flatten_batch else length, dtype=position_ids.dtype)
        position_ids = position_ids.reshape(()) + steps
    rows = jnp.broadcast_to(position_ids.reshape(-1, length), (batch, length))
    turned_in = rounded if prefill_numerics or not use_fp32_arithmetic else wide
    cos, sin = (jnp.take(cast(cache, turned_in), rows, axis=0)[:, :, None] for cache in (cosine, sine))
    if 2 * cos.shape[-1] != rotary_embedding_dim:
        raise ValueError(f"{cos.shape[-1]} angles for {rotary_embedding_dim} elements")
    y = cast(rotated(cast(x, turned_in), cos, sin, False), target)
    tokens = (1, batch * length) if flatten_batch else (batch, length)
    return y.reshape(*tokens, count * width), cast(x, wide)

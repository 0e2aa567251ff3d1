"""Attention of com.microsoft to less than a rectangle of tokens: packed sequences, pages of a cache, blocks, windows.

Packed sequences follow each other without padding. `token_offset` says where their tokens are in the padded batch,
then where its padding is; `cumulative_sequence_length` where each sequence starts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from transmuter.lowering.arrays import Array, cast, contents, traced
from transmuter.lowering.attention import (
    both,
    capped,
    heads,
    masked,
    merged,
    mixed,
    owners,
    positions,
    probabilities,
    rotated,
    scores,
    within,
)
from transmuter.lowering.contrib_attention import grouped_heads, loaded, normalized, stored, written
from transmuter.lowering.linear import matmul
from transmuter.lowering.registry import operator

operator = functools.partial(operator, domain="com.microsoft")

# ---- packed sequences ----------------------------------------------------------------------------------------------


@operator(reads=("sequence_token_count",))
def RemovePadding(input, sequence_token_count):
    """Where the counts are hidden, this is a graph break: they decide how many tokens there are."""
    batch, length, hidden = input.shape
    counts = contents(sequence_token_count).astype(np.int32)
    padding = np.arange(length) >= counts[:, None]
    offsets = np.argsort(padding.reshape(-1), kind="stable").astype(np.int32)
    tokens = jnp.take(input.reshape(batch * length, hidden), offsets[: counts.sum()], axis=0)
    ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return tokens, offsets.reshape(batch, length), ends, counts.max(initial=0, keepdims=True)


@operator()
def RestorePadding(input, token_offset):
    batch, length = token_offset.shape
    padded = jnp.zeros((batch * length, input.shape[1]), input.dtype)
    used = jnp.reshape(token_offset, -1)[: input.shape[0]]
    return padded.at[used].set(input).reshape(batch, length, input.shape[1])


def _packed_attention(
    query: Array,
    key: Array,
    value: Array,
    token_offset: Array,
    ends: Array,
    bias: Array | None,
    num_heads: int,
    scale: float,
) -> jax.Array:
    """The attention of the tokens of each sequence to each other, for packed tokens (tokens, heads * size)."""
    q, k, v = (heads(RestorePadding(x, token_offset), num_heads) for x in (query, key, value))
    logits = scores(q, k, scale or None)
    if bias is not None:
        logits = logits + cast(bias, logits.dtype)
    lengths = cast(ends[1:] - ends[:-1], np.int32)
    y = merged(mixed(probabilities(masked(logits, positions(k.shape[2]) < lengths[:, None, None, None])), v))
    used = jnp.reshape(token_offset, -1)[: query.shape[0]]
    return jnp.take(y.reshape(-1, y.shape[2]), used, axis=0)


@operator()
def PackedAttention(
    input,
    weights,
    bias,
    token_offset,
    cumulative_sequence_length,
    attention_bias=None,
    *,
    num_heads,
    qkv_hidden_sizes=None,
    scale=0.0,
):
    sizes = qkv_hidden_sizes or [weights.shape[1] // 3] * 3
    parts = jnp.split(matmul(input, weights) + bias, np.cumsum(sizes[:2]), axis=-1)
    return _packed_attention(*parts, token_offset, cumulative_sequence_length, attention_bias, num_heads, scale)


@operator()
def PackedMultiHeadAttention(
    query,
    key=None,
    value=None,
    bias=None,
    token_offset=None,
    cumulative_sequence_length=None,
    attention_bias=None,
    *,
    num_heads,
    mask_filter_value=-10000.0,
    scale=0.0,
):
    """Padding takes no part, whatever `mask_filter_value`."""
    parts = [query, key, value] if key is not None else [query[:, :, i].reshape(query.shape[0], -1) for i in range(3)]
    if bias is not None:
        hidden = parts[0].shape[1]
        parts = [part + b for part, b in zip(parts, jnp.split(bias, [hidden, 2 * hidden]), strict=True)]
    return _packed_attention(*parts, token_offset, cumulative_sequence_length, attention_bias, num_heads, scale)


# ---- biases by distance --------------------------------------------------------------------------------------------


@operator(known=("query_length", "key_length"))
def RelativePositionBias(bias_table, query_length, key_length, *, max_distance, is_bidirectional=0):
    """A key that comes after the query is as far away as one before it, unless `is_bidirectional`."""
    queries, keys = int(query_length.reshape(())), int(key_length.reshape(()))
    distance = np.arange(keys) - np.arange(queries)[:, None]
    buckets = bias_table.shape[0] // (2 if is_bidirectional else 1)
    after = np.where(distance > 0, buckets, 0) if is_bidirectional else 0
    distance = np.abs(distance).astype(np.float32)
    exact = buckets // 2
    if not 0 < exact < max_distance:
        raise ValueError(f"a max_distance of {max_distance}, but {exact} buckets for single distances")
    far = np.log(np.maximum(distance, exact) / np.float32(exact)) / np.log(np.float32(max_distance) / np.float32(exact))
    far = np.minimum(exact + np.trunc(far * np.float32(buckets - exact)), buckets - 1)
    bucket = after + np.where(distance < exact, distance, far).astype(np.int32)
    return jnp.moveaxis(jnp.take(bias_table, bucket, axis=0), 2, 0)[None]


@operator()
def GatedRelativePositionBias(query_layer, query_bias, rel_pos, weight, bias, eco_a, token_offset=None, *, num_heads):
    """Of packed tokens the padding is restored, as queries of zeros."""
    query = query_layer if token_offset is None else RestorePadding(query_layer, token_offset)
    gates = matmul(heads(query + query_bias, num_heads), weight) + bias
    update, reset = (jax.nn.sigmoid(jnp.sum(half, axis=-1, keepdims=True)) for half in jnp.split(gates, 2, axis=-1))
    return (update * (reset * eco_a - 1) + 2) * rel_pos


# ---- windows and blocks --------------------------------------------------------------------------------------------


@operator()
def LongformerAttention(input, weight, bias, mask, global_weight, global_bias, flags, *, num_heads, window):
    """Masked tokens yield zeros, as in the CUDA kernel."""

    def attended(weight: Array, bias: Array, visible: Array | None) -> jax.Array:
        q, k, v = (heads(x, num_heads) for x in jnp.split(matmul(input, weight) + bias, 3, axis=-1))
        logits = scores(q, k)
        logits = masked(logits + cast(mask, logits.dtype)[:, None, None], visible)
        return merged(mixed(probabilities(logits), v))

    tokens, is_global = positions(input.shape[1]), flags != 0
    near = jnp.logical_or(within(tokens, tokens, window, window), is_global[:, None])
    local = attended(weight, bias, near[:, None])
    y = jnp.where(is_global[..., None], attended(global_weight, global_bias, None), local)
    return jnp.where(mask[..., None] < 0, 0, y)


def _blocks(rows: Array, columns: Array) -> jax.Array:
    """The block masks (layouts, blocks, blocks) of CSR indices, whose columns may end in padding."""
    count = rows.shape[1] - 1
    entry = jnp.arange(columns.shape[1], dtype=rows.dtype)
    row = jnp.sum(entry >= rows[:, 1:, None], axis=1, dtype=np.int32)
    layout = jnp.arange(rows.shape[0], dtype=np.int32)[:, None]
    blocks = jnp.zeros((rows.shape[0], count, count), np.bool_)
    return blocks.at[layout, row, jnp.where(columns < 0, count, columns)].set(True, mode="drop")


@operator()
def SparseAttention(
    query,
    key,
    value,
    past_key,
    past_value,
    block_row_indices,
    block_col_indices,
    total_sequence_length,
    key_total_sequence_lengths,
    cos_cache=None,
    sin_cache=None,
    *,
    num_heads,
    kv_num_heads,
    sparse_block_size,
    do_rotary=0,
    rotary_interleaved=0,
    scale=0.0,
):
    """The caches are buffers that keep their length. A query whose row has no block sees all keys up to its own.

    Of a batch, ONNX Runtime's CPU kernel misreads the scores of sequences that are shorter than the longest.
    """
    q, k, v = grouped_heads(query, key, value, num_heads, kv_num_heads)
    new = q.shape[2]
    is_prompt = jnp.reshape(total_sequence_length, ()) == new
    lengths = cast(jnp.reshape(key_total_sequence_lengths, (-1, 1)), np.int32)
    start = jnp.where(is_prompt, 0, lengths - new)
    queries = positions(new, start)[:, 0]
    if do_rotary:
        cos, sin = (jnp.take(cache, queries, axis=0)[:, None] for cache in (cos_cache, sin_cache))
        q, k = (rotated(x, cos, sin, rotary_interleaved) for x in (q, k))
    k, v = (written(cache, x, start) for cache, x in ((past_key, k), (past_value, v)))

    keys = positions(k.shape[2])
    blocks = _blocks(block_row_indices, block_col_indices)
    seen = jnp.take(jnp.take(blocks, queries // sparse_block_size, axis=1), keys // sparse_block_size, axis=3)
    seen = jnp.tile(jnp.moveaxis(seen, 0, 1), (1, num_heads // seen.shape[0], 1, 1))
    logits = scores(q, k, scale or None)
    logits = masked(jnp.where(seen, logits, jnp.finfo(logits.dtype).min), within(queries, keys, None, 0)[:, None])
    return merged(cast(mixed(probabilities(logits), v), query.dtype)), k, v


# ---- pages ---------------------------------------------------------------------------------------------------------


@operator()
def PagedAttention(
    query,
    key=None,
    value=None,
    key_cache=None,
    value_cache=None,
    cumulative_sequence_length=None,
    past_seqlens=None,
    block_table=None,
    cos_cache=None,
    sin_cache=None,
    slot_mapping=None,
    head_sink=None,
    q_norm_weight=None,
    k_norm_weight=None,
    k_scale=None,
    v_scale=None,
    attention_metadata=None,
    *,
    num_heads,
    kv_num_heads,
    do_rotary=0,
    is_causal=1,
    k_cache_dtype="",
    k_quant_type="NONE",
    kv_cache_layout="SEPARATE",
    local_window_size=-1,
    qk_norm_epsilon=1e-6,
    rotary_interleaved=0,
    rotary_offset=0,
    scale=0.0,
    softcap=0.0,
    v_cache_dtype="",
    v_head_size=0,
    v_quant_type="NONE",
):
    """Where `cumulative_sequence_length` is hidden, each sequence is padded to the length of all of them."""
    if np.uint8 in (key_cache.dtype, None if value_cache is None else value_cache.dtype):
        raise ValueError("a cache with elements of less than a byte is not supported")
    if kv_cache_layout == "LATENT":  # a value is the start of its key
        value = key
        if v_head_size not in (0, key_cache.shape[3]) and not scale:
            raise ValueError("values narrower than keys need the attribute scale")
    packed = (None if x is None else x[None] for x in (query, key, value))
    q, k, v = grouped_heads(*packed, num_heads, kv_num_heads)
    if q_norm_weight is not None:
        q, k = normalized(q, q_norm_weight, qk_norm_epsilon), normalized(k, k_norm_weight, qk_norm_epsilon)

    held = contents(cumulative_sequence_length)
    ends, past, table = (traced(cast(x, np.int32)) for x in (cumulative_sequence_length, past_seqlens, block_table))
    sequence, index = owners(ends, q.shape[2])
    position = index + past.at[sequence].get(mode="clip")
    if do_rotary:
        cos, sin = (jnp.take(cache, position, axis=0, mode="clip") for cache in (cos_cache, sin_cache))
        q, k = (
            jnp.concatenate((x[..., :rotary_offset], rotated(x[..., rotary_offset:], cos, sin, rotary_interleaved)), -1)
            for x in (q, k)
        )

    pages, page_size = key_cache.shape[:2]
    table = jnp.where((table >= 0) & (table < pages), table, -1)
    if slot_mapping is None:
        page = table.at[sequence, position // page_size].get(mode="fill", fill_value=-1)
        slot_mapping = jnp.where(page < 0, -1, page * page_size + position % page_size)
    slots = jnp.where(slot_mapping < 0, pages * page_size, slot_mapping)

    def paged(cache: Array, new: Array, scale: Array | None) -> tuple[jax.Array, jax.Array]:
        """The cache with the new tokens in their slots, and all that each sequence has in it."""
        flat = cache.reshape(pages * page_size, *cache.shape[2:])
        flat = flat.at[slots].set(jnp.swapaxes(stored(new[0], cache, scale), 0, 1), mode="drop")
        cache = flat.reshape(cache.shape)
        own = jnp.take(cache, table, axis=0, mode="clip")
        own = jnp.swapaxes(own.reshape(table.shape[0], table.shape[1] * page_size, *cache.shape[2:]), 1, 2)
        return cache, loaded(own, scale, q.dtype)

    key_cache, k = paged(key_cache, k, k_scale)
    value_cache, v = (None, k[..., : v_head_size or None]) if value_cache is None else paged(value_cache, v, v_scale)

    longest = q.shape[2] if held is None else int(np.max(np.diff(held), initial=0))
    rows = jnp.zeros((past.shape[0], longest, *q.shape[1::2]), q.dtype)
    rows = jnp.swapaxes(rows.at[sequence, index].set(jnp.swapaxes(q[0], 0, 1), mode="drop"), 1, 2)
    keys, queries = positions(k.shape[2]), positions(longest, past[:, None])
    total = past + ends[1:] - ends[:-1]
    visible = both(keys < total[:, None], jnp.repeat(table >= 0, page_size, axis=1))[:, None, None]
    left = local_window_size - 1 if local_window_size >= 0 else None
    visible = both(visible, within(queries, keys, left, 0 if is_causal else None))
    logits = masked(capped(scores(rows, k, scale or None), softcap), visible)
    sink = None if head_sink is None else cast(head_sink, logits.dtype)[:, None, None]
    y = jnp.swapaxes(mixed(probabilities(logits, sink), v), 1, 2)
    y = y.at[sequence, index].get(mode="fill", fill_value=0)
    return cast(y.reshape(y.shape[0], -1), query.dtype), key_cache, value_cache

"""What ONNX Runtime's language models with recurrent layers carry from token to token, and return for the next call:
samples of a causal convolution, states of linear attention, the last tokens of hashed n-grams.

Sequences of different lengths come packed, one after the other; `cumulative` offsets tell where each begins and ends.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, contents, traced
from transmuter.lowering.attention import gates_of, linear_attention, linear_step, owners, scanned, spread
from transmuter.lowering.convolution import causal
from transmuter.lowering.linear import accumulator
from transmuter.lowering.registry import operator

operator = functools.partial(operator, domain="com.microsoft")

# ---- packed sequences ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Packed:
    """Where each token of packed sequences belongs: `position` counts from the beginning of its own sequence."""

    starts: jax.Array
    lengths: jax.Array
    sequence: jax.Array
    position: jax.Array

    @classmethod
    def within(cls, cumulative: Array, tokens: int) -> _Packed:
        bounds = cast(traced(cumulative), np.int32)
        return cls(bounds[:-1], bounds[1:] - bounds[:-1], *owners(bounds, tokens))

    @classmethod
    def evenly(cls, count: Any, length: Any) -> _Packed:
        sequence, position = (lax.broadcasted_iota(np.int32, (count, length), axis).reshape(-1) for axis in (0, 1))
        lengths = jnp.full(count, length, np.int32)
        return cls(jnp.arange(count, dtype=np.int32) * lengths, lengths, sequence, position)

    def at(self, x: Array, past: Array, sequence: Array, position: Array) -> jax.Array:
        """The tokens of `x` at positions of their sequences, of which negative ones lie in `past` (sequences, length,
        ...), counted from its end."""
        before = now = None
        if past.shape[1]:
            before = past[sequence, jnp.clip(past.shape[1] + position, 0, past.shape[1] - 1)]
        if before is None or x.shape[0] != 0:
            now = jnp.take(x, jnp.clip(self.starts[sequence] + position, 0, x.shape[0] - 1), axis=0)
        if now is None or before is None:
            return before if now is None else now
        return jnp.where(jnp.expand_dims(position >= 0, tuple(range(position.ndim, now.ndim))), now, before)

    def earlier(self, x: Array, past: Array, steps: int) -> jax.Array:
        """What each token's sequence held so many steps before it."""
        return self.at(x, past, self.sequence, self.position - steps) if steps else x

    def first(self, x: Array, length: int) -> jax.Array:
        """Each sequence's first token, as a past of this length."""
        return jnp.broadcast_to(x[self.starts][:, None], (self.starts.shape[0], length))

    def tail(self, x: Array, past: Array, ends: Array) -> jax.Array:
        """The last tokens before `ends` (sequences, ...) of each sequence, as many as `past` has."""
        sequence = jnp.arange(ends.shape[0], dtype=np.int32).reshape(-1, *[1] * ends.ndim)
        return self.at(x, past, sequence, ends[..., None] + jnp.arange(-past.shape[1], 0, dtype=np.int32))

    def captured(self, counts: Array, capacity: int) -> tuple[jax.Array, jax.Array]:
        """The first `capacity` positions of each sequence, and whether they are among the first of `counts`."""
        slots = jnp.broadcast_to(jnp.arange(capacity, dtype=np.int32), (self.starts.shape[0], capacity))
        return slots, slots < jnp.minimum(counts, self.lengths)[:, None]

    def prefix(self, x: Array, counts: Array, capacity: int) -> jax.Array:
        """The first tokens of each sequence (sequences, capacity, ...), those beyond `counts` zero."""
        slots, is_used = self.captured(counts, capacity)
        first = jnp.take(x, jnp.clip(self.starts[:, None] + slots, 0, x.shape[0] - 1), axis=0)
        return jnp.where(jnp.expand_dims(is_used, tuple(range(2, first.ndim))), first, 0)


def _check_capture(capacity: int, count: Array | None) -> None:
    if (count is not None) != (capacity > 0):
        raise ValueError("capture_count is wanted exactly where state_update_capacity is positive")


# ---- causal convolution --------------------------------------------------------------------------------------------


@operator()
def CausalConvWithState(
    input,
    weight,
    bias=None,
    past_state=None,
    *,
    activation="none",
    channels_last=0,
    dilation=1,
    input_channel_offset=0,
    input_channels=0,
    ndim=1,
    state_channels_last=-1,
    state_length=0,
    state_update_capacity=0,
    state_window=0,
):
    """Of images and volumes it is not said how the other dimensions are padded; ONNX Runtime's kernels refuse them."""
    if ndim != 1:
        raise ValueError("only one spatial dimension is supported")
    if input_channels:
        input = input[..., input_channel_offset : input_channel_offset + input_channels]
    is_last = channels_last if state_channels_last < 0 else state_channels_last
    x = _channels_first(input) if channels_last else input
    batch, channels, length = x.shape
    kept = state_length or (weight.shape[2] - 1) * dilation
    if past_state is None:
        past_state = jnp.zeros((batch, channels, kept), x.dtype)
    else:
        past_state = past_state[-1] if state_window else past_state
        past_state = _channels_first(past_state) if is_last else past_state
    y, whole = causal(x, weight, bias, past_state, activation, dilation)

    def state(begin: int) -> jax.Array:
        """What is kept from a position on; nothing from before the past."""
        is_there = not state_window or begin > 0
        samples = whole[:, :, begin : begin + kept] if is_there else jnp.zeros((batch, channels, kept), x.dtype)
        trailing = input.shape[2:] if channels_last else (channels,)
        return jnp.swapaxes(samples, 1, 2).reshape(batch, kept, *trailing) if is_last else samples

    first = jnp.swapaxes(x[:, :, :state_update_capacity], 1, 2)
    states = [state(length - back) for back in range(state_window - 1, -1, -1)]
    return (
        jnp.swapaxes(y, 1, 2).reshape(input.shape) if channels_last else y,
        jnp.stack(states) if state_window else state(length),
        jnp.pad(first, [(0, 0), (0, state_update_capacity - first.shape[1]), (0, 0)]),
    )


def _channels_first(x: Array) -> jax.Array:
    """(batch, length, channels in any number of dimensions) as (batch, channels, length)."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], math.prod(x.shape[2:])), 1, 2)


@operator()
def VarlenCausalConvWithState(
    input,
    weight,
    cumulative_sequence_length,
    bias=None,
    initial_state=None,
    capture_count=None,
    kernel_delta=None,
    previous_mask=None,
    *,
    activation="none",
    delta_offset=0,
    dilation=1,
    group_size=1,
    state_update_capacity=0,
):
    if activation not in ("none", "silu", "swish"):
        raise ValueError(f"there is no activation {activation!r}")
    _check_capture(state_update_capacity, capture_count)
    tokens, taps = _Packed.within(cumulative_sequence_length, input.shape[0]), weight.shape[2]
    past = jnp.swapaxes(initial_state, 1, 2)
    seen = [tokens.earlier(input, past, (taps - 1 - tap) * dilation) for tap in range(taps)]
    if kernel_delta is not None:
        if taps != 2 or dilation != 1 or activation != "none" or bias is not None or previous_mask is None:
            raise ValueError(
                "a kernel_delta needs a previous_mask, two taps, and neither dilation, activation nor bias"
            )
        deltas = jnp.repeat(kernel_delta[:, delta_offset : delta_offset + 2], group_size, axis=2)
        previous, current = (x * (weight[:, 0, tap] + deltas[:, 1 - tap]) for tap, x in enumerate(seen))
        y = current + previous * previous_mask
    else:
        wide = accumulator(input)
        y = sum(cast(x, wide) * cast(weight[:, 0, tap], wide) for tap, x in enumerate(seen))
        y = y if bias is None else y + cast(bias, wide)
        y = cast(y if activation == "none" else jax.nn.silu(y), input.dtype)
    state = jnp.swapaxes(tokens.tail(input, past, tokens.lengths), 1, 2)
    return y, state, tokens.prefix(input, capture_count, state_update_capacity) if state_update_capacity else None


# ---- linear attention ----------------------------------------------------------------------------------------------


@operator()
def LinearAttention(
    query,
    key,
    value,
    past_state=None,
    decay=None,
    beta=None,
    *,
    kv_num_heads,
    q_num_heads,
    chunk_size=64,
    scale=0.0,
    state_window=0,
    update_rule="gated_delta",
):
    return linear_attention(
        query,
        key,
        value,
        past_state[-1] if state_window and past_state is not None else past_state,
        decay,
        beta,
        q_num_heads=q_num_heads,
        kv_num_heads=kv_num_heads,
        scale=scale,
        update_rule=update_rule,
        window=state_window,
    )


def _packed_step(states: jax.Array, token: Any) -> tuple[jax.Array, Any]:
    """`linear_step` where the states are those of all sequences, and a token says which one is its own."""
    sequence, *parts = token
    new, results = linear_step(states[sequence][None], [part if part is None else part[None] for part in parts])
    return states.at[sequence].set(new[0]), [result[0] for result in results]


@operator()
def GatedDeltaNet(
    query,
    key=None,
    value=None,
    cu_seqlens=None,
    decay=None,
    beta=None,
    initial_state=None,
    a_log=None,
    dt_bias=None,
    capture_count=None,
    state_update_active=None,
    *,
    beta_activation="none",
    chunk_size=64,
    gate_activation="none",
    gate_lower_bound=-5.0,
    qk_l2_norm=0,
    scale=0.0,
    state_update_capacity=0,
    update_rule="gated_delta",
):
    """Entries of the state update beyond the captured ones are zero."""
    _check_capture(state_update_capacity, capture_count)
    decay, beta = gates_of(update_rule, decay, beta)
    if key is None:
        query, key, value = _apart(query, initial_state)
    *leading, _, size = query.shape
    heads, value_size = value.shape[-2:]
    if initial_state is None:
        batch = leading[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = jnp.zeros((batch, heads, value_size, size), np.float32)
    batch, count, wide = initial_state.shape[0], math.prod(leading), accumulator(query)
    q, k, v, g, b = (
        None if x is None else cast(x, wide).reshape(count, *x.shape[len(leading) :])
        for x in (query, key, value, decay, beta)
    )
    if qk_l2_norm:
        q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-12) for x in (q, k))
    if g is not None:
        g = _log_decay(g if g.ndim == 3 else g[..., None], a_log, dt_bias, gate_activation, gate_lower_bound)
    if b is not None:
        b = _rate(b, beta_activation)[..., None]
    parts = (spread(q, heads)[:, :, None] * (scale or 1 / math.sqrt(size)), spread(k, heads), v, g, b)

    states = cast(jnp.swapaxes(initial_state, 2, 3), wide)
    if cu_seqlens is None:
        length = leading[1] if len(leading) == 2 else count // batch
        tokens = _Packed.evenly(batch, length)
        steps = (x if x is None else jnp.swapaxes(x.reshape(batch, length, *x.shape[1:]), 0, 1) for x in parts)
        states, results = scanned(linear_step, states, tuple(steps))
        output, delta = (jnp.swapaxes(x, 0, 1).reshape(count, *x.shape[2:]) for x in results)
    else:
        tokens = _Packed.within(cu_seqlens, count)
        states, (output, delta) = scanned(_packed_step, states, (tokens.sequence, *parts))

    update = None
    if state_update_capacity:
        rows = (jnp.ones((count, heads), wide) if g is None else jnp.exp(g), k, delta)
        captured = [tokens.prefix(row, capture_count, state_update_capacity).reshape(batch, -1) for row in rows]
        update = cast(jnp.concatenate(captured, axis=1), np.float32)
        if state_update_active is not None:
            update = jnp.where(state_update_active != 0, update, 0)
    output = cast(output.reshape(*leading, heads, value_size), query.dtype)
    return output, cast(jnp.swapaxes(states, 2, 3), initial_state.dtype), update


def _apart(packed: Array, state: Array) -> list[jax.Array]:
    """Queries, keys and values (..., heads, size) that lie in one tensor; the state tells their sizes."""
    _, heads, value_size, size = state.shape
    shared = (packed.shape[-1] - heads * value_size) // 2
    parts = jnp.split(packed, [shared, 2 * shared], axis=-1)
    sizes = (size, size, value_size)
    return [x.reshape(*x.shape[:-1], x.shape[-1] // n, n) for x, n in zip(parts, sizes, strict=True)]


def _log_decay(raw: jax.Array, a_log: Array | None, bias: Array | None, activation: str, lowest: float) -> jax.Array:
    """The logarithm of the decay (tokens, heads, size or 1) that a raw one stands for."""
    if activation == "none":
        return raw
    if bias is not None:
        raw = raw + cast(bias, raw.dtype).reshape(raw.shape[1], -1)
    rate = jnp.exp(cast(a_log, raw.dtype))[:, None]
    if activation in ("softplus", "qwen"):
        return -rate * jax.nn.softplus(raw)
    if activation in ("sigmoid", "kda"):
        return lowest * jax.nn.sigmoid(rate * raw)
    raise ValueError(f"there is no gate_activation {activation!r}")


def _rate(raw: jax.Array, activation: str) -> jax.Array:
    if activation not in ("none", "sigmoid"):
        raise ValueError(f"there is no beta_activation {activation!r}")
    return jax.nn.sigmoid(raw) if activation == "sigmoid" else raw


# ---- hashed n-grams ------------------------------------------------------------------------------------------------


def _hashed(
    tokens: _Packed,
    ids: Array,
    multipliers: Array,
    vocab_sizes: Array,
    past: Array | None,
    head_offsets: Array | None,
    end: Array | None,
    segments: Array | None,
    past_segments: Array | None = None,
    *,
    max_ngram_size: int,
    n_head_per_ngram: int,
    pad_id: int,
    reset_on_eos: int,
) -> tuple[jax.Array, Array]:
    """A hash of the last 2, 3, ... ids at each token, as many of each as there are heads; and the past that was taken.

    An id is replaced where an `end`, or a segment's border, lies between it and the token.
    """
    ids, multipliers, sizes = traced(ids), traced(multipliers), contents(vocab_sizes)
    if sizes is not None and (sizes <= 0).any():
        raise ValueError("a vocabulary has no words")
    fill = jnp.asarray(pad_id, ids.dtype) if end is None else jnp.reshape(end, ())
    if past is None:
        past = jnp.full((tokens.starts.shape[0], max_ngram_size - 1), fill)
    if segments is not None and past_segments is None:
        past_segments = tokens.first(segments, past.shape[1])
    mixed, is_cut, mixes = ids * multipliers[0], jnp.zeros(ids.shape, bool), []
    for steps in range(1, max_ngram_size):
        earlier = tokens.earlier(ids, past, steps)
        if end is not None and reset_on_eos:
            is_cut = is_cut | (earlier == fill)
        if segments is not None:
            a, b = (tokens.earlier(segments, past_segments, n) for n in (steps - 1, steps))
            is_cut = is_cut | (a != b)
        mixed = mixed ^ (jnp.where(is_cut, fill, earlier) * multipliers[steps])
        mixes.append(mixed)
    hashes = jnp.repeat(jnp.stack(mixes, -1), n_head_per_ngram, axis=-1) % vocab_sizes
    return hashes if head_offsets is None else hashes + head_offsets, past


@operator(differentiable=False)
def NGramHashMapping(
    input_ids,
    multipliers,
    vocab_sizes,
    past_ids=None,
    head_offsets=None,
    eos_token_id=None,
    segment_ids=None,
    *,
    max_ngram_size,
    n_head_per_ngram,
    pad_id,
    reset_on_eos=0,
):
    """Products that leave 32 bits need jax_enable_x64."""
    tokens, ids = _Packed.evenly(*input_ids.shape), jnp.reshape(input_ids, -1)
    segments = None if segment_ids is None else jnp.reshape(segment_ids, -1)
    how = {"max_ngram_size": max_ngram_size, "n_head_per_ngram": n_head_per_ngram, "pad_id": pad_id}
    rest = (past_ids, head_offsets, eos_token_id, segments)
    hashes, past = _hashed(tokens, ids, multipliers, vocab_sizes, *rest, **how, reset_on_eos=reset_on_eos)
    return hashes.reshape(*input_ids.shape, hashes.shape[1]), tokens.tail(ids, past, tokens.lengths)


@operator(differentiable=False)
def VarlenNGramHashMapping(
    input_ids,
    multipliers,
    vocab_sizes,
    cumulative_sequence_length,
    past_ids=None,
    head_offsets=None,
    eos_token_id=None,
    segment_ids=None,
    past_segment_ids=None,
    capture_count=None,
    *,
    max_ngram_size,
    n_head_per_ngram,
    pad_id,
    reset_on_eos=0,
    state_update_capacity=0,
):
    """Products that leave 32 bits need jax_enable_x64. There are no present segments without segments."""
    _check_capture(state_update_capacity, capture_count)
    tokens, ids = _Packed.within(cumulative_sequence_length, input_ids.shape[0]), input_ids
    how = {"max_ngram_size": max_ngram_size, "n_head_per_ngram": n_head_per_ngram, "pad_id": pad_id}
    rest = (past_ids, head_offsets, eos_token_id, segment_ids, past_segment_ids)
    hashes, past = _hashed(tokens, ids, multipliers, vocab_sizes, *rest, **how, reset_on_eos=reset_on_eos)
    segments = update = None
    if segment_ids is not None:
        before = tokens.first(segment_ids, past.shape[1]) if past_segment_ids is None else past_segment_ids
        segments = tokens.tail(segment_ids, before, tokens.lengths)
    if state_update_capacity:
        slots, is_used = tokens.captured(capture_count, state_update_capacity)
        update = jnp.where(is_used[..., None], tokens.tail(ids, past, slots + 1), jnp.asarray(pad_id, ids.dtype))
    return hashes, tokens.tail(ids, past, tokens.lengths), segments, update

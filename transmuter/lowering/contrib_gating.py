"""Gates, mixtures of branches and routers of ONNX Runtime's language models."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast
from transmuter.lowering.elementwise import widened
from transmuter.lowering.linear import matmul
from transmuter.lowering.normalization import RMSNormalization
from transmuter.lowering.registry import operator

operator = functools.partial(operator, domain="com.microsoft")


# ---- gates ---------------------------------------------------------------------------------------------------------


@operator()
def LinearAttentionGate(a, dt_bias, decay_scale, b=None):
    decay = decay_scale * jax.nn.softplus(cast(a, dt_bias.dtype) + dt_bias)
    return cast(decay, a.dtype), None if b is None else jax.nn.sigmoid(b)


@operator()
def EngramGate(key, query, value, key_norm_scale, query_norm_scale, conv_norm_scale=None, *, epsilon=1e-5):
    kind = key.dtype
    key, query, value, key_scale, query_scale = map(widened, (key, query, value, key_norm_scale, query_norm_scale))
    unit = functools.partial(RMSNormalization, axis=-1, epsilon=epsilon, stash_type=1)
    fit = jnp.sum(unit(key, key_scale) * unit(query, query_scale), -1, keepdims=True) / np.sqrt(key.shape[-1])
    gate = jax.nn.sigmoid(jnp.sign(fit) * jnp.sqrt(jnp.maximum(jnp.abs(fit), 1e-6)))
    y = gate * value[:, :, None]
    normed = None if conv_norm_scale is None else cast(unit(y, cast(conv_norm_scale, y.dtype)), kind)
    return cast(y, kind), normed


@operator()
def GatedAdd(X, Y, gate, gate_weight=None):
    if gate_weight is not None:
        gate = cast(jax.nn.sigmoid(widened(matmul(gate, gate_weight))), gate.dtype)
    return X + Y * gate


@operator()
def ScaledSiLU(X, scale=None, *, alpha=1.0):
    wide = widened(X)
    z = cast(wide * (alpha if scale is None else cast(scale.reshape(()), wide.dtype)), X.dtype)
    return z * cast(jax.nn.sigmoid(widened(z)), X.dtype)


@operator()
def SwiGLU(gate, up=None, *, activation_alpha=1.0, activation_beta=0.0, limit=0.0, round_activation=0):
    kind = gate.dtype
    gate, up = map(widened, jnp.split(gate, 2, axis=-1) if up is None else (gate, up))
    if limit > 0:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    opened = gate * jax.nn.sigmoid(gate * activation_alpha)
    if round_activation:
        opened = cast(cast(opened, kind), opened.dtype)
    return cast(opened * (up + activation_beta if activation_beta else up), kind)


# ---- branches ------------------------------------------------------------------------------------------------------


def _branches(streams: Array, count: int) -> jax.Array:
    """Streams (..., branches, features) in float32 at least, from those or flattened ones."""
    wide = widened(streams)
    return wide.reshape(*wide.shape[:-1], count, wide.shape[-1] // count) if count else wide


def _per_branch(gates: Array, streams: jax.Array) -> jax.Array:
    """Gates (..., branches, features or 1), from those or flattened ones."""
    gates = cast(gates, streams.dtype)
    if gates.ndim == streams.ndim:
        return gates
    branches = streams.shape[-2]
    return gates.reshape(*gates.shape[:-1], branches, gates.shape[-1] // branches)


@operator()
def HyperConnectionPreMix(streams, pre_mix, *, num_branches=0, reduction_scale=1.0):
    wide = _branches(streams, num_branches)
    return cast(jnp.sum(wide * _per_branch(pre_mix, wide), axis=-2) * reduction_scale, streams.dtype)


@operator()
def HyperConnectionPostMix(streams, block_output, post_mix, stream_mix=None, *, num_branches=0):
    wide = _branches(streams, num_branches)
    mixed = wide
    if stream_mix is not None:
        mixed = jnp.einsum("...ck,...ch->...kh", cast(stream_mix, wide.dtype), wide)
    y = mixed + _per_branch(post_mix, wide) * cast(block_output, wide.dtype)[..., None, :]
    return cast(y.reshape(streams.shape), streams.dtype)


# ---- routing -------------------------------------------------------------------------------------------------------


def _among_top(scores: jax.Array, k: int) -> jax.Array:
    """Whether each of the scores is one of the `k` largest of its row, the first of equal ones before others."""
    _, chosen = lax.top_k(scores, k)
    return jnp.any(chosen[..., None] == jnp.arange(scores.shape[-1], dtype=chosen.dtype), axis=-2)


@operator()
def MoEGroupRouter(
    logits,
    expert_bias,
    projection_weight=None,
    *,
    top_k,
    group_topk=2,
    n_group=1,
    router_sentinel=-10000.0,
    topk_group=1,
):
    kind, logits = logits.dtype, cast(logits, expert_bias.dtype)
    if projection_weight is not None:
        logits = jnp.matmul(logits, cast(projection_weight, logits.dtype).T)
    experts = expert_bias.shape[0]
    weights = jax.nn.sigmoid(logits.reshape(-1, experts))
    scores = weights + expert_bias
    groups = lax.stop_gradient(scores).reshape(-1, n_group, experts // n_group)
    best, _ = lax.top_k(groups, min(group_topk, groups.shape[-1]))
    is_active = _among_top(jnp.sum(best, axis=-1), topk_group)[..., None]
    groups = jnp.where(is_active, groups, -jnp.inf).reshape(scores.shape)
    is_chosen = _among_top(groups, top_k) & (groups > -jnp.inf)  # the active groups may have fewer experts
    routed = jnp.where(is_chosen, jnp.log(jnp.maximum(weights, 1e-20)), router_sentinel)
    return cast(routed, kind), scores, weights

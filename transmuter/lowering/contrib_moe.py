"""Mixtures of experts in ONNX Runtime's domain com.microsoft, as its CPU kernels compute them: MoE and QMoE.

What only the GPU kernels know (separate or concatenated gates, GEGLU) follows the operators' documentation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, traced
from transmuter.lowering.few_bits import in_words, keeps_packed, product, unpacked
from transmuter.lowering.linear import matmul
from transmuter.lowering.platform import on_cpu
from transmuter.lowering.registry import operator

operator = functools.partial(operator, domain="com.microsoft")


def _route(logits: Array, k: int, normalize: int) -> tuple[jax.Array, jax.Array]:
    """The `k` experts of each token, of equally probable ones the last, and their shares: probabilities among all
    experts, or among the chosen ones."""
    logits = cast(logits, np.float32)
    chosen, from_last = lax.top_k(jnp.flip(logits, -1), k)
    total = jax.nn.logsumexp(chosen if normalize else logits, axis=-1, keepdims=True)
    return logits.shape[-1] - 1 - from_last, jnp.exp(chosen - total)


def _activation(
    kind: str, fusion: int, alpha: float, beta: float, limit: float | None, limit_after: int
) -> Callable[[Array, Array | None], jax.Array]:
    """What lies between an expert's layers: a function of the first layer's result and, if it is there, the third's."""
    plain = {
        "relu": jax.nn.relu,
        "relu2": lambda x: jnp.square(jax.nn.relu(x)),
        "gelu": jax.nn.gelu,
        "silu": jax.nn.silu,
        "identity": lambda x: x,
    }
    if kind in plain:
        return lambda x, third: plain[kind](x) if third is None else plain[kind](x) * third

    def gated(x: Array, third: Array | None) -> jax.Array:
        if fusion == 1:
            gate, value = x[..., 0::2], x[..., 1::2]
        else:
            gate, value = jnp.split(x, 2, axis=-1) if fusion else (x, third)
        if kind == "geglu":
            return jax.nn.gelu(gate) * value
        if limit is not None:
            gate = gate if limit_after else jnp.minimum(gate, limit)
            value = jnp.clip(value, -limit, limit)
        gate = gate * jax.nn.sigmoid(gate * alpha)
        gate = jnp.minimum(gate, limit) if limit is not None and limit_after else gate
        return gate * (value + beta)

    return gated


def _product(rows: Array, weight: Array) -> jax.Array:
    return matmul(rows, weight.T)


def _mixture(
    x: Array,
    experts: Array,
    shares: Array,
    layers: Any,
    activate: Callable[..., jax.Array],
    products: Sequence[Callable[[Array, Any], jax.Array]] = (_product,) * 3,
) -> jax.Array:
    """The sum of what its experts make of each token, by their shares. `layers` are three of weights and biases, which
    `products` multiply with rows of tokens.

    Few tokens fetch the weights of their own experts; many pass through all experts, one after the other.
    """

    def expert(rows: Array, layers: Any) -> jax.Array:
        first, second, third = (
            None if w is None else lambda x, w=w, b=b, by=by: by(x, w) if b is None else by(x, w) + b
            for (w, b), by in zip(layers, products, strict=True)
        )
        return second(activate(first(rows), None if third is None else third(rows)))

    tokens, count = x.reshape(-1, x.shape[-1]), jax.tree.leaves(layers)[0].shape[0]
    layers, shares = jax.tree.map(traced, layers), cast(shares, x.dtype)
    if isinstance(tokens.shape[0], int) and experts.size <= count:

        def by_own(pair: tuple[Array, Array]) -> jax.Array:
            token, index = pair
            return expert(token[None], jax.tree.map(lambda w: w[index], layers))[0]

        pairs = jnp.repeat(tokens, experts.shape[-1], axis=0), experts.reshape(-1)
        results = lax.map(by_own, pairs).reshape(*experts.shape, -1)
        return jnp.sum(results * shares[..., None], axis=1).reshape(x.shape)
    is_own = experts[..., None] == jnp.arange(count, dtype=experts.dtype)
    by_expert = jnp.sum(jnp.where(is_own, shares[..., None], 0), axis=1)

    def add(total: jax.Array, one: Any) -> tuple[jax.Array, None]:
        layers, share = one
        return total + share[:, None] * expert(tokens, layers), None

    total, _ = lax.scan(add, jnp.zeros(tokens.shape, x.dtype), (layers, by_expert.T))
    return total.reshape(x.shape)


@operator()
def MoE(
    input,
    router_probs,
    fc1_experts_weights,
    fc1_experts_bias=None,
    fc2_experts_weights=None,
    fc2_experts_bias=None,
    fc3_experts_weights=None,
    fc3_experts_bias=None,
    *,
    activation_alpha=1.0,
    activation_beta=0.0,
    activation_type="relu",
    k=1,
    normalize_routing_weights=0,
    swiglu_fusion=0,
    swiglu_limit=None,
    swiglu_limit_after_activation=0,
    use_sparse_mixer=0,
):
    if use_sparse_mixer:
        raise ValueError("use_sparse_mixer is not supported")
    layers = (
        (fc1_experts_weights, fc1_experts_bias),
        (fc2_experts_weights, fc2_experts_bias),
        (fc3_experts_weights, fc3_experts_bias),
    )
    activate = _activation(
        activation_type, swiglu_fusion, activation_alpha, activation_beta, swiglu_limit, swiglu_limit_after_activation
    )
    return _mixture(input, *_route(router_probs, k, normalize_routing_weights), layers, activate)


def _quantized(
    packed: Array | None, scales: Array | None, zeros: Array | None, bits: int
) -> tuple[Any, Callable[[Array, Any], jax.Array]]:
    """The weights (experts, rows, columns) of a layer, whose rows have one scale, or one for each of their blocks, and
    what multiplies with those of one expert."""
    if packed is None:
        return None, _product
    experts, rows, columns = *packed.shape[:2], packed.shape[2] * (8 // bits)
    blocked = scales.ndim == 3
    scales = scales if blocked else scales[..., None]
    blocks = scales.shape[2]
    if zeros is not None:
        zeros = unpacked(zeros, bits)
        zeros = zeros[..., :blocks] if blocked else zeros[:, :rows, None]
    if keeps_packed(is_fast=on_cpu()) and columns // blocks * bits % 32 == 0:
        by_block = (None if x is None else jnp.swapaxes(x, 1, 2) for x in (scales, zeros))
        return (in_words(packed), *by_block), lambda rows, words: cast(product(rows, *words, bits), rows.dtype)
    codes = unpacked(packed, bits).reshape(experts, rows, blocks, columns // blocks)
    centred = cast(codes, scales.dtype) - (2 ** (bits - 1) if zeros is None else cast(zeros, scales.dtype)[..., None])
    return (centred * scales[..., None]).reshape(experts, rows, columns), _product


@operator()
def QMoE(
    input,
    router_probs,
    fc1_experts_weights,
    fc1_scales=None,
    fc1_experts_bias=None,
    fc2_experts_weights=None,
    fc2_scales=None,
    fc2_experts_bias=None,
    fc3_experts_weights=None,
    fc3_scales=None,
    fc3_experts_bias=None,
    fc1_zero_points=None,
    fc2_zero_points=None,
    fc3_zero_points=None,
    router_weights=None,
    *,
    accuracy_level=0,
    activation_alpha=1.0,
    activation_beta=0.0,
    activation_type="relu",
    block_size=0,
    expert_weight_bits=4,
    fc1_expert_weight_bits=0,
    fc2_expert_weight_bits=0,
    fc3_expert_weight_bits=0,
    k=1,
    normalize_routing_weights=0,
    quant_type="int",
    swiglu_fusion=0,
    swiglu_limit=None,
    swiglu_limit_after_activation=0,
    use_sparse_mixer=0,
    weights_prepacked=-1,
):
    """Shares are probabilities among the chosen experts, whether `normalize_routing_weights` says so or not."""
    bits = [b or expert_weight_bits for b in (fc1_expert_weight_bits, fc2_expert_weight_bits, fc3_expert_weight_bits)]
    if use_sparse_mixer or weights_prepacked == 1 or quant_type != "int" or not {2, 4, 8}.issuperset(bits):
        raise ValueError("only weights in 2, 4 or 8 bits that are not prepacked, and no sparse mixer, are supported")
    quantized = (
        (fc1_experts_weights, fc1_scales, fc1_zero_points),
        (fc2_experts_weights, fc2_scales, fc2_zero_points),
        (fc3_experts_weights, fc3_scales, fc3_zero_points),
    )
    weights, products = zip(*(_quantized(*layer, b) for layer, b in zip(quantized, bits, strict=True)), strict=True)
    layers = tuple(zip(weights, (fc1_experts_bias, fc2_experts_bias, fc3_experts_bias), strict=True))
    experts, shares = _route(router_probs, k, True)
    if router_weights is not None:
        shares = jnp.take_along_axis(router_weights, experts, axis=-1)
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True) if normalize_routing_weights else shares
    activate = _activation(
        activation_type, swiglu_fusion, activation_alpha, activation_beta, swiglu_limit, swiglu_limit_after_activation
    )
    return _mixture(input, experts, shares, layers, activate, products)

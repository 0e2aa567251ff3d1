"""MoE and QMoE against ONNX Runtime, and what only its GPU kernels know against NumPy; gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, ort_node, run_node

import transmuter

RNG = np.random.default_rng(0)
CONTRIB = {"domain": "com.microsoft"}
TOKENS, HIDDEN, INNER, EXPERTS = 5, 64, 32, 4


def draw(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (RNG.standard_normal(shape) / 4).astype(dtype)


def layers(gates: int = 1) -> list[np.ndarray]:
    rows = gates * INNER
    return [draw(EXPERTS, rows, HIDDEN), draw(EXPERTS, rows), draw(EXPERTS, HIDDEN, INNER), draw(EXPERTS, HIDDEN)]


def check(op: str, operands: list, attributes: dict) -> None:
    expected = ort_node(op, operands, attributes, **CONTRIB)
    with jax.numpy_dtype_promotion("strict"):
        assert_equal(run_node(op, operands, attributes, compiled=True, **CONTRIB), expected)


SWIGLU = {"activation_type": "swiglu", "activation_alpha": 1.7, "activation_beta": 1.0, "swiglu_limit": 0.3}


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity", "swiglu"])
def test_moe(activation: str, normalize: int, tokens: int) -> None:
    attributes: dict[str, Any] = {"activation_type": activation, "k": 2, "normalize_routing_weights": normalize}
    if activation == "swiglu":
        attributes |= {**SWIGLU, "swiglu_fusion": 1}
    weights = layers(2 if activation == "swiglu" else 1)
    check("MoE", [draw(1, tokens, HIDDEN), draw(tokens, EXPERTS), *weights], attributes)


@settings(max_examples=15, deadline=None)
@given(
    activation=st.sampled_from(["relu", "gelu", "silu", "identity"]),
    k=st.sampled_from([1, 2, EXPERTS]),
    normalize=st.integers(0, 1),
    has_bias=st.booleans(),
    tokens=st.sampled_from([(1,), (2, 3)]),
    logits=st.lists(st.sampled_from([0.0, 0.5, -0.5]), min_size=6 * EXPERTS, max_size=6 * EXPERTS),
)
def test_equally_probable_experts(
    activation: str, k: int, normalize: int, has_bias: bool, tokens: tuple[int, ...], logits: list[float]
) -> None:
    router = np.array(logits, np.float32).reshape(6, EXPERTS)[: np.prod(tokens)]
    first, bias, second, other = layers()
    weights = [first, bias if has_bias else None, second, other if has_bias else None]
    attributes = {"activation_type": activation, "k": k, "normalize_routing_weights": normalize}
    operands = [draw(*tokens, HIDDEN), router, *weights]
    expected = ort_node("MoE", operands, attributes, **CONTRIB)
    assert_equal(run_node("MoE", operands, attributes, **CONTRIB), expected)


def test_layouts_of_gates_are_the_same() -> None:
    x, router, (first, bias, *second) = draw(TOKENS, HIDDEN), draw(TOKENS, EXPERTS), layers(2)
    attributes = {"k": 2, **SWIGLU}
    expected = run_node("MoE", [x, router, first, bias, *second], {**attributes, "swiglu_fusion": 1}, **CONTRIB)
    gate, value = (first[:, 0::2], bias[:, 0::2]), (first[:, 1::2], bias[:, 1::2])
    joined = [np.concatenate(pair, 1) for pair in zip(gate, value, strict=True)]
    assert_equal(
        run_node("MoE", [x, router, *joined, *second], {**attributes, "swiglu_fusion": 2}, **CONTRIB), expected
    )
    assert_equal(run_node("MoE", [x, router, *gate, *second, *value], attributes, **CONTRIB), expected)


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes in bytes, the first in the lowest bits; a last byte is filled up with zeros."""
    each = 8 // bits
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % each)])
    groups = codes.reshape(*codes.shape[:-1], -1, each) << (bits * np.arange(each, dtype=np.uint8))
    return np.bitwise_or.reduce(groups, -1).astype(np.uint8)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("block", [0, 16, 32])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qmoe(bits: int, block: int, has_zeros: bool) -> None:
    weights, zeros = [], []
    for rows, columns in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        blocks = columns // block if block else 1
        scales = RNG.random((EXPERTS, rows, blocks)).astype(np.float32) / 2**bits / 4
        codes, centres = (RNG.integers(0, 2**bits, (EXPERTS, rows, n)).astype(np.uint8) for n in (columns, blocks))
        weights += [packed(codes, bits), scales if block else scales[..., 0], draw(EXPERTS, rows)]
        zeros += [packed(centres if block else centres[..., 0], bits)]
    operands = [draw(TOKENS, HIDDEN), draw(TOKENS, EXPERTS), *weights]
    operands += [None, None, None, *zeros] if has_zeros else []
    attributes = {
        "k": 2,
        "swiglu_fusion": 1,
        "expert_weight_bits": bits,
        **SWIGLU,
        **({"block_size": block} if block else {}),
    }
    check("QMoE", operands, attributes)


@pytest.mark.parametrize("normalize", [0, 1])
def test_router_weights(normalize: int) -> None:
    weights = []
    for rows, columns in ((INNER, HIDDEN), (HIDDEN, INNER)):
        codes = RNG.integers(0, 256, (EXPERTS, rows, columns // 2)).astype(np.uint8)
        weights += [codes, RNG.random((EXPERTS, rows)).astype(np.float32) / 64, draw(EXPERTS, rows)]
    shares = RNG.random((TOKENS, EXPERTS)).astype(np.float32)
    operands = [draw(TOKENS, HIDDEN), draw(TOKENS, EXPERTS), *weights, *[None] * 6, shares]
    check("QMoE", operands, {"k": 2, "activation_type": "silu", "normalize_routing_weights": normalize})


def test_what_is_not_supported_is_refused() -> None:
    operands = [draw(TOKENS, HIDDEN), draw(TOKENS, EXPERTS), *layers()]
    with pytest.raises(transmuter.TransmuterError, match="use_sparse_mixer"):
        run_node("MoE", operands, {"use_sparse_mixer": 1}, **CONTRIB)


@pytest.mark.parametrize("tokens", [1, 3])
def test_gradients(tokens: int) -> None:
    operands = [draw(tokens, 4), 8 * draw(tokens, 4), draw(4, 6, 4), draw(4, 6), draw(4, 4, 3), draw(4, 4)]
    model = transmuter.load(
        one_node("MoE", operands, {"k": 2, "swiglu_fusion": 1, "activation_type": "swiglu"}, **CONTRIB)
    )
    call = lambda *operands: model.apply({}, {f"x{i}": x for i, x in enumerate(operands)})["y0"]
    check_grads(call, [jnp.asarray(x) for x in operands], 1, ["rev"], atol=2e-2, rtol=2e-2)

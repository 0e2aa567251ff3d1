"""Operators of contrib_gating.py: ONNX Runtime, plain NumPy for what its CPU kernels lack, half types, gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, ort_node, run_node
from onnx import helper

import transmuter

RNG = np.random.default_rng(0)
CONTRIB = {"domain": "com.microsoft"}
FLOAT = 1
few = settings(max_examples=15, deadline=None)
EDGES = np.array([0.0, -0.0, 1e-30, -90, 90, np.inf, -np.inf, np.nan], np.float32)


def draw(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def check(op: str, operands: list, attributes: dict | None = None, types: tuple | None = None) -> None:
    """ONNX Runtime gives the same; in halves, but for the last bits."""
    kind = operands[0].dtype
    options = {"outputs": len(types or "1"), "output_types": types, **CONTRIB}
    tolerance = {} if kind == np.float32 else {"rtol": 4 * float(ml_dtypes.finfo(kind).eps), "atol": 2e-3}
    expected = ort_node(op, operands, attributes, **options)
    for actual, wanted in zip(run_node(op, operands, attributes, **options), expected, strict=True):
        assert_equal(actual, wanted, **tolerance)


dtypes = st.sampled_from([np.float32, np.float16])

# ---- gates ---------------------------------------------------------------------------------------------------------


@few
@given(dtypes, st.booleans(), st.booleans())
def test_linear_attention_gate(kind: type, has_rate: bool, at_edges: bool) -> None:
    a, b = draw(2, 4, 4, dtype=kind), draw(2, 4, 4, dtype=kind)
    if at_edges:
        a = b = EDGES.reshape(2, 1, 4).astype(kind)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    operands = [a, draw(4), -abs(draw(4)), *([b] if has_rate else [])]
    check("LinearAttentionGate", operands, types=(element,) * (2 if has_rate else 1))


@few
@given(dtypes, st.booleans(), st.sampled_from([1, 1e-4, 0]), st.sampled_from([1e-5, 0.1]))
def test_engram_gate(kind: type, normed: bool, size: float, epsilon: float) -> None:
    key, query = (draw(2, 3, 2, 4) * size).astype(kind), draw(2, 3, 2, 4, dtype=kind)
    operands = [key, query, draw(2, 3, 4, dtype=kind), *(draw(2, 4, dtype=kind) for _ in range(3 if normed else 2))]
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    check("EngramGate", operands, {"epsilon": epsilon}, (element,) * (2 if normed else 1))


@few
@given(dtypes, st.sampled_from([(2, 3), (1, 3), (0, 3), (4, 2, 3)]))
def test_gated_add(kind: type, shape: tuple) -> None:
    operands = [draw(*shape, dtype=kind), draw(*shape, dtype=kind), draw(*shape[:-1], 1, dtype=kind)]
    check("GatedAdd", operands)


def test_gated_add_with_a_projected_gate() -> None:
    x, y, gate, weight = draw(2, 3), draw(2, 3), draw(2, 4), draw(4, 1)
    expected = x + y / (1 + np.exp(-gate @ weight))
    assert_equal(run_node("GatedAdd", [x, y, gate, weight], **CONTRIB), [expected])
    halves = [v.astype(ml_dtypes.bfloat16) for v in (x, y, gate, weight)]
    (actual,) = run_node("GatedAdd", halves, **CONTRIB)
    assert_equal(actual, expected.astype(ml_dtypes.bfloat16), atol=0.05, rtol=0.02)


@few
@given(dtypes, st.sampled_from([(2, 4), (0, 3), ()]), st.sampled_from([1.0, -0.5]), st.booleans(), st.booleans())
def test_scaled_silu(kind: type, shape: tuple, alpha: float, scaled: bool, at_edges: bool) -> None:
    x = EDGES.reshape(2, 4)[:, :3].astype(kind) if at_edges else draw(*shape, dtype=kind)
    check("ScaledSiLU", [x, *([np.array(1.5, kind)] if scaled else [])], {"alpha": alpha})


@few
@given(
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    st.sampled_from([0.0, -1.0, 0.7]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0, 1]),
    st.booleans(),
)
def test_swiglu(kind: type, limit: float, beta: float, rounded: int, joined: bool) -> None:
    gate, up = draw(2, 3, dtype=kind), draw(2, 3, dtype=kind)
    g, u = gate.astype(np.float32), up.astype(np.float32)
    if limit > 0:
        g, u = np.minimum(g, limit), np.minimum(np.maximum(u, -limit), limit)
    opened = g / (1 + np.exp(-np.float32(1.7) * g))
    opened = opened.astype(kind).astype(np.float32) if rounded else opened
    operands = [np.concatenate([gate, up], 1)] if joined else [gate, up]
    attributes = {"activation_alpha": 1.7, "activation_beta": beta, "limit": limit, "round_activation": rounded}
    (actual,) = run_node("SwiGLU", operands, attributes, **CONTRIB)
    assert_equal(actual, (opened * (u + beta)).astype(kind), rtol=2 * float(ml_dtypes.finfo(kind).eps), atol=1e-6)


# ---- branches ------------------------------------------------------------------------------------------------------

FORMS = ["(C)", "(C, 1)", "(C, H)", "(C * H)"]


@few
@given(dtypes, dtypes, st.sampled_from([(2,), (0,), (2, 3), ()]), st.sampled_from(FORMS), st.booleans())
def test_hyper_connection_pre_mix(kind: type, of_gates: type, leading: tuple, form: str, flat: bool) -> None:
    flat = flat or form == "(C * H)"
    streams = draw(*leading, *((6,) if flat else (2, 3)), dtype=kind)
    gates = draw(*leading, *{"(C)": (2,), "(C, 1)": (2, 1), "(C, H)": (2, 3), "(C * H)": (6,)}[form], dtype=of_gates)
    attributes = {"reduction_scale": 0.5, "num_branches": 2 if flat else 0}
    check("HyperConnectionPreMix", [streams, gates], attributes)


@few
@given(dtypes, dtypes, st.sampled_from([(2,), (0,), (2, 3)]), st.sampled_from(FORMS[:3]), *[st.booleans()] * 2)
def test_hyper_connection_post_mix(
    kind: type, of_gates: type, leading: tuple, form: str, flat: bool, mixed: bool
) -> None:
    streams = draw(*leading, *((6,) if flat else (2, 3)), dtype=kind)
    gates = draw(*leading, *{"(C)": (2,), "(C, 1)": (2, 1), "(C, H)": (2, 3)}[form], dtype=of_gates)
    operands = [streams, draw(*leading, 3, dtype=kind), gates]
    operands += [draw(*leading, 2, 2, dtype=of_gates)] if mixed else []
    check("HyperConnectionPostMix", operands, {"num_branches": 2 if flat else 0})


# ---- routing -------------------------------------------------------------------------------------------------------


@few
@given(
    dtypes,
    st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    st.sampled_from([1, 2, 9]),
    st.sampled_from([1, 5]),
    st.booleans(),
    st.sampled_from([(3,), (2, 2), (0,)]),
)
def test_moe_group_router(kind: type, groups: tuple, of_group: int, k: int, tied: bool, leading: tuple) -> None:
    logits = (RNG.integers(-1, 2, (*leading, 8)) if tied else 3 * draw(*leading, 8)).astype(kind)
    bias = np.zeros(8, np.float32) if tied else draw(8)
    attributes = {"top_k": k, "n_group": groups[0], "topk_group": groups[1], "group_topk": of_group}
    check("MoEGroupRouter", [logits, bias], attributes)


def test_moe_group_router_with_a_projection() -> None:
    x, bias, weight = draw(3, 256), draw(4), draw(4, 256) / 16
    _, scores, weights = run_node("MoEGroupRouter", [x, bias, weight], {"top_k": 1}, outputs=3, **CONTRIB)
    expected = 1 / (1 + np.exp(-x @ weight.T))
    assert_equal([scores, weights], [expected + bias, expected])


# ---- gradients -----------------------------------------------------------------------------------------------------

GRADIENTS = {
    "LinearAttentionGate": ([draw(1, 2, 3), draw(3), draw(3), draw(1, 2, 3)], {}, 2),
    "EngramGate": ([draw(1, 2, 2, 3), draw(1, 2, 2, 3), draw(1, 2, 3), *(draw(2, 3) for _ in range(3))], {}, 2),
    "GatedAdd": ([draw(2, 3), draw(2, 3), draw(2, 4), draw(4, 1)], {}, 1),
    "ScaledSiLU": ([draw(2, 3), draw()], {}, 1),
    "SwiGLU": ([draw(2, 6)], {"activation_beta": 1.0}, 1),
    "HyperConnectionPreMix": ([draw(2, 2, 3), draw(2, 2)], {}, 1),
    "HyperConnectionPostMix": ([draw(2, 6), draw(2, 3), draw(2, 2), draw(2, 2, 2)], {"num_branches": 2}, 1),
    "MoEGroupRouter": ([draw(2, 4), draw(4)], {"top_k": 1, "n_group": 2, "router_sentinel": 0.0}, 1),
}


def derivative(op: str, operands: list, attributes: dict, outputs: int) -> tuple:
    model = transmuter.load(one_node(op, operands, attributes, outputs=outputs, **CONTRIB), compute_type=None)
    return lambda *xs: [*model.apply({}, {f"x{i}": x for i, x in enumerate(xs)}).values()]


@pytest.mark.parametrize("op", GRADIENTS)
def test_gradients(op: str) -> None:
    operands, *rest = GRADIENTS[op]
    wide = [np.float64(x) for x in operands]
    with jax.enable_x64(True):
        check_grads(jax.jit(derivative(op, wide, *rest)), [jnp.asarray(x) for x in wide], 1, ["rev"])


def test_gradients_at_zero_are_finite() -> None:
    """Of an Engram gate for a key of zeros, whose root and norm have none, and of a router without experts' scores."""
    operands = [np.zeros((1, 1, 1, 2), np.float32), draw(1, 1, 1, 2), draw(1, 1, 2), draw(1, 2), draw(1, 2), draw(1, 2)]
    call = derivative("EngramGate", operands, {}, 2)
    gradients = jax.grad(lambda *xs: sum(jnp.sum(y) for y in call(*xs)), range(6))(*map(jnp.asarray, operands))
    assert all(np.isfinite(g).all() for g in gradients)
    call = derivative("MoEGroupRouter", [np.full((1, 2), -200, np.float32), draw(2)], {"top_k": 1}, 1)
    assert np.isfinite(jax.grad(lambda x: jnp.sum(call(x, jnp.zeros(2))[0]))(jnp.full((1, 2), -200.0))).all()

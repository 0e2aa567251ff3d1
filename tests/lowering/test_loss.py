"""Operators of loss.py: all reductions against NumPy, old versions, gradients, half types, x64 off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, run_node

import transmuter
from transmuter.lowering import loss

RNG = np.random.default_rng(0)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    shifted = scores - scores.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def expected(log_prob, labels, weights, ignore_index, reduction):
    counts = labels != ignore_index
    picked = np.take_along_axis(log_prob, np.where(counts, labels, 0)[:, None], 1)[:, 0]
    weight = (np.ones(log_prob.shape[1]) if weights is None else weights)[np.where(counts, labels, 0)] * counts
    losses = -picked * weight
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / weight.sum()}[reduction]


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["none", "sum", "mean"]),
    st.booleans(),
    st.sampled_from([None, 1, -1, 100]),
    st.lists(st.integers(1, 3), max_size=3),
    st.sampled_from([np.int32, np.int64]),
    st.sampled_from([12, 13, 22]),
)
def test_as_numpy(reduction, weighted, ignore_index, inner, index, opset) -> None:
    scores = RNG.standard_normal((5, 4, *inner)).astype(np.float32)
    labels = RNG.integers(0, 4, (5, *inner)).astype(index)
    if ignore_index is not None:
        labels[1:][RNG.random(labels[1:].shape) < 0.3] = ignore_index
        labels[0] = 2
    inputs = [scores, labels, *([RNG.random(4).astype(np.float32) + 0.5] if weighted else [])]
    attributes = {"reduction": reduction} | ({} if ignore_index is None else {"ignore_index": ignore_index})
    wanted = (inputs[2] if weighted else None, ignore_index, reduction)
    (y,) = run_node("NegativeLogLikelihoodLoss", inputs, attributes, opset=opset)
    np.testing.assert_allclose(y, expected(scores, labels, *wanted), rtol=1e-4, atol=1e-6)
    y, log_prob = run_node("SoftmaxCrossEntropyLoss", inputs, attributes, outputs=2, opset=opset)
    np.testing.assert_allclose(y, expected(log_softmax(scores), labels, *wanted), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(log_prob, log_softmax(scores), rtol=1e-4, atol=1e-6)


def test_a_label_that_is_no_class_shows() -> None:
    scores = np.zeros((3, 4), np.float32)
    (y,) = run_node("NegativeLogLikelihoodLoss", [scores, np.array([0, 4, -1])], {"reduction": "none"})
    assert np.isnan(y).tolist() == [False, True, True]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_gradients(reduction: str) -> None:
    labels = jnp.array([[2, -1], [0, 3]])
    with jax.enable_x64(True):
        scores, weights = jnp.asarray(RNG.standard_normal((2, 4, 2))), jnp.asarray(RNG.random(4))

        def function(scores, weights):
            return loss.SoftmaxCrossEntropyLoss(scores, labels, weights, ignore_index=-1, reduction=reduction)

        check_grads(function, (scores, weights), 1, ["rev"])
        ignored = jax.grad(lambda s: jnp.sum(function(s, weights)[0]))(scores)[0, :, 1]
        assert not ignored.any()


def test_half_types_are_summed_in_float32() -> None:
    scores = np.zeros((8192, 2), np.float16)
    (y,) = run_node(
        "NegativeLogLikelihoodLoss", [scores - np.float16(1), np.zeros(8192, np.int64)], {"reduction": "sum"}
    )
    assert y.dtype == np.float16
    assert y == 8192


@pytest.mark.parametrize("x64", [False, True])
def test_apply_under_jit(x64: bool) -> None:
    scores, labels = RNG.standard_normal((3, 4)), np.array([0, 3, 1])
    model = transmuter.load(one_node("SoftmaxCrossEntropyLoss", [scores, labels], outputs=2))
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        feeds = {"x0": jnp.asarray(scores), "x1": jnp.asarray(labels)}
        y, _ = jax.jit(lambda feeds: model.apply(model.params, feeds))(feeds).values()
    assert y.dtype == (np.float64 if x64 else np.float32)
    np.testing.assert_allclose(y, expected(log_softmax(scores), labels, None, None, "mean"), rtol=1e-5)

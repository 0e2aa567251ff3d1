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
from lowering import drawn
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
    st.sampled_from([(), (2,), (1, 2)]),
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


@settings(max_examples=20, deadline=None)
@given(
    st.data(),
    st.sampled_from(["none", "sum", "mean"]),
    st.sampled_from([None, 0, -1]),
    st.booleans(),
    st.sampled_from([(), (2,), (0,), (1, 2)]),
)
def test_as_the_reference_evaluator(draw, reduction, ignore_index, weighted, inner) -> None:
    scores = draw.draw(drawn.arrays(np.float32, (2, 3, *inner), st.sampled_from([-300.0, -1.0, 0.0, 0.5, 88.0, 300.0])))
    classes = st.integers(0, 2) if ignore_index is None else st.sampled_from([ignore_index, 0, 1, 2])
    labels = draw.draw(drawn.arrays(draw.draw(st.sampled_from([np.int32, np.int64])), (2, *inner), classes))
    inputs = [scores, labels]
    if weighted:
        inputs.append(draw.draw(drawn.arrays(np.float32, (3,), st.sampled_from([0.25, 1.0, 2.0]))))
    attributes = {"reduction": reduction} | ({} if ignore_index is None else {"ignore_index": ignore_index})
    if reduction == "mean" and (labels == ignore_index).all():
        return  # the mean of nothing
    drawn.check("NegativeLogLikelihoodLoss", inputs, attributes, opset=22)
    drawn.check("SoftmaxCrossEntropyLoss", inputs, attributes, opset=22, outputs=2, output_types=[1, 1])


def test_ignored_elements_may_be_masked() -> None:
    """Neither the loss nor its gradient is NaN where all scores of an ignored element are -inf."""
    scores = np.array([[-np.inf] * 3, [1, 2, -np.inf]], np.float32)
    labels = np.array([-1, 1])

    def f(scores):
        return loss.SoftmaxCrossEntropyLoss(scores, labels, ignore_index=-1, reduction="mean")[0]

    value, gradient = jax.value_and_grad(f)(jnp.asarray(scores))
    np.testing.assert_allclose(value, np.log1p(np.exp(-1)), rtol=1e-5)
    np.testing.assert_allclose(gradient[0], [0, 0, 0])
    np.testing.assert_allclose(gradient[1], [1 / (1 + np.e), -1 / (1 + np.e), 0], rtol=1e-5)


def test_the_gradient_of_extreme_scores_is_finite() -> None:
    scores = jnp.array([[3e38, -3e38, 0], [-3e38, 3e38, 3e38]])
    for reduction in ("sum", "mean"):
        f = lambda s, r=reduction: loss.SoftmaxCrossEntropyLoss(s, np.array([0, 1]), ignore_index=None, reduction=r)[0]
        assert np.isfinite(jax.grad(f)(scores)).all()

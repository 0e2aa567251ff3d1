"""Losses against ONNX's reference, and against sums over all alignments and pairs."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import transmuter
from transmuter.train import losses

RANDOM = np.random.default_rng(0)


def onnx_cross_entropy(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None) -> float:
    names = ["scores", "labels", *(["weights"] if weights is not None else [])]
    node = helper.make_node("SoftmaxCrossEntropyLoss", names, ["loss"], ignore_index=losses.IGNORED, reduction="mean")
    values = dict(zip(names, [np.moveaxis(logits, -1, 1), labels, weights], strict=False))
    return float(ReferenceEvaluator(node).run(None, values)[0])


@pytest.mark.parametrize("shape", [(6,), (3, 4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_that_of_onnx(shape, weighted):
    logits = RANDOM.normal(size=(*shape, 5)).astype(np.float32)
    labels = RANDOM.integers(0, 5, shape)
    labels.flat[1] = losses.IGNORED
    weights = np.array([0.5, 1, 2, 0, 3], np.float32) if weighted else None
    loss, metrics = losses.cross_entropy(class_weights=weights)({"logits": logits}, {"labels": labels})
    np.testing.assert_allclose(loss, onnx_cross_entropy(logits, labels, weights), rtol=1e-5)
    hits = (logits.argmax(-1) == labels)[labels != losses.IGNORED]
    np.testing.assert_allclose(metrics["accuracy"], hits.mean(), rtol=1e-6)


def test_smoothing_spreads_a_share_over_all_classes():
    logits, labels = RANDOM.normal(size=(6, 5)).astype(np.float32), RANDOM.integers(0, 5, 6)
    targets = 0.8 * np.eye(5)[labels] + 0.2 / 5
    expected = -(targets * np.asarray(jax.nn.log_softmax(logits))).sum(-1).mean()
    loss, _ = losses.cross_entropy(smoothing=0.2)({"logits": logits}, {"labels": labels})
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_batch_in_which_nothing_counts_has_no_loss_and_no_gradient():
    labels = np.full(4, losses.IGNORED)
    of_logits = lambda logits: losses.cross_entropy()({"logits": logits}, {"labels": labels})[0]
    value, grads = jax.value_and_grad(of_logits)(jnp.ones((4, 3)))
    assert value == 0
    np.testing.assert_array_equal(grads, 0)


def test_causal_lm_compares_with_the_next_token():
    logits, ids = RANDOM.normal(size=(2, 5, 7)).astype(np.float32), RANDOM.integers(0, 7, (2, 5))
    ids[0, 3:] = losses.IGNORED
    loss, metrics = losses.causal_lm()({"logits": logits}, {"labels": ids})
    np.testing.assert_allclose(loss, onnx_cross_entropy(logits[:, :-1], ids[:, 1:]), rtol=1e-5)
    np.testing.assert_allclose(metrics["perplexity"], np.exp(loss), rtol=1e-5)


def test_multi_label():
    logits, labels = RANDOM.normal(size=(4, 3)).astype(np.float32), RANDOM.integers(0, 2, (4, 3))
    p = 1 / (1 + np.exp(-logits))
    expected = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).mean()
    loss, metrics = losses.multi_label()({"y": logits}, {"labels": labels})
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], ((p > 0.5) == labels).mean(), rtol=1e-6)


@pytest.mark.parametrize("delta", [None, 0.5])
def test_regression(delta):
    given, labels = RANDOM.normal(size=(4, 1)).astype(np.float32), RANDOM.normal(size=4).astype(np.float32)
    error = np.abs(given[:, 0] - labels)
    expected = error**2 if delta is None else np.where(error < delta, error**2 / 2, delta * (error - delta / 2))
    loss, metrics = losses.regression(delta=delta)({"y": given}, {"labels": labels})
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["rmse"], np.sqrt((error**2).mean()), rtol=1e-5)


@pytest.mark.parametrize("pooling", [None, "mean", "first"])
def test_contrastive_is_cross_entropy_among_the_pairs(pooling):
    tokens = RANDOM.normal(size=(6, 4, 8)).astype(np.float32)
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]] * 3)
    pooled = {"mean": (tokens * mask[..., None]).sum(1) / mask.sum(1)[:, None], "first": tokens[:, 0]}
    vectors = pooled.get(pooling, tokens[:, 1])
    unit = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    expected = onnx_cross_entropy(20 * unit[:3] @ unit[3:].T, np.arange(3))
    given = tokens if pooling else vectors
    loss, metrics = losses.contrastive(pooling=pooling)({"e": given}, {"attention_mask": mask})
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert 0 <= metrics["accuracy"] <= 1


def test_contrastive_has_a_gradient_at_zero():
    grads = jax.grad(lambda e: losses.contrastive()({"e": e}, {})[0])(jnp.zeros((4, 3)))
    assert np.isfinite(grads).all()


def collapsed(path: tuple[int, ...]) -> list[int]:
    return [c for c, _ in itertools.groupby(path) if c]


def test_ctc_is_the_sum_over_alignments():
    logits = RANDOM.normal(size=(3, 4, 3)).astype(np.float32)
    labels, frames = np.array([[1, 2], [2, -1], [1, 1]]), np.array([4, 3, 4])
    probabilities = np.asarray(jax.nn.softmax(logits))
    each = []
    for p, row, count in zip(probabilities, labels, frames, strict=True):
        wanted = [c for c in row if c >= 0]
        paths = [path for path in itertools.product(range(3), repeat=count) if collapsed(path) == wanted]
        total = sum(np.prod([p[t, c] for t, c in enumerate(path)]) for path in paths)
        each.append(-np.log(total) / len(wanted))
    loss = losses.ctc(logit_lengths="frames")({"logits": logits}, {"labels": labels, "frames": frames})
    np.testing.assert_allclose(loss, np.mean(each), rtol=1e-4)
    sized = losses.ctc(logit_lengths="frames", label_lengths="counts")
    again = sized({"logits": logits}, {"labels": np.abs(labels), "frames": frames, "counts": np.array([2, 1, 2])})
    np.testing.assert_allclose(again, loss, rtol=1e-6)


def test_half_precision_is_summed_in_float32():
    logits = jnp.full((4096, 2), 3.0, jnp.float16)
    loss, _ = losses.cross_entropy()({"y": logits}, {"labels": np.zeros(4096, int)})
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-5)


def test_outputs_are_named():
    outputs = {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))}
    batch = {"labels": np.zeros(2, int)}
    with pytest.raises(transmuter.InputError, match="outputs a, b"):
        losses.cross_entropy()(outputs, batch)
    with pytest.raises(transmuter.InputError, match="no output 'c'"):
        losses.cross_entropy("c")(outputs, batch)
    losses.cross_entropy("a")(outputs, batch)
    with pytest.raises(transmuter.InputError, match="pooling is 'max'"):
        losses.contrastive(pooling="max")
    with pytest.raises(transmuter.InputError, match="even number of rows"):
        losses.contrastive("a")({"a": jnp.ones((3, 4))}, {})


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_that_is_no_class_makes_the_loss_nan(label):
    loss, _ = losses.cross_entropy()({"y": jnp.ones((2, 3))}, {"labels": np.array([0, label])})
    assert np.isnan(loss)

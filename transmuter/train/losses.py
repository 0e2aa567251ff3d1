"""Losses for `fit` and `make_step`: each makes a function of a model's outputs and of the batch that gives a scalar.

    loss = losses.cross_entropy(logits="logits", labels="labels")
    loss({"logits": logits}, {"labels": labels})

A loss takes from the outputs what it names, or the only output where it names none; labels come from the batch. What is
computed in half precision is summed in float32. Any function of that form will do in their place; it may return a pair
of the loss and a dict of further metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from transmuter.errors import InputError

Loss = Callable[[Mapping[str, jax.Array], Mapping[str, Any]], Any]
"""A scalar, or a pair of it and a dict of metrics, from a model's outputs and a batch."""

IGNORED = -100
"""The label of what does not count, as in PyTorch and transformers."""


def cross_entropy(
    logits: str | None = None, *, labels: str = "labels", smoothing: float = 0.0, class_weights: Any = None
) -> Loss:
    """Softmax cross-entropy with integer labels, and the accuracy.

    Args:
        logits: The output with the logits, [..., classes].
        labels: The entry of the batch with the classes, [...] integers; -100 does not count, and what is no class makes
            the loss NaN.
        smoothing: The share of the target that is spread over all classes.
        class_weights: A weight for each class; the loss is then the weighted mean, as in torch.nn.CrossEntropyLoss.
    """

    def loss(outputs: Mapping[str, jax.Array], batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        scores, wanted = _wide(outputs, logits), _labels(batch, labels)
        _check(wanted, scores.shape[:-1], labels)
        if not jnp.issubdtype(wanted.dtype, jnp.integer):
            raise InputError(f"{labels!r} is {wanted.dtype}, but classes are integers.")
        counts, classes = wanted != IGNORED, scores.shape[-1]
        is_class = (wanted >= 0) & (wanted < classes)
        wanted = jnp.clip(wanted, 0, classes - 1)
        log_probabilities = jax.nn.log_softmax(scores)
        each = -jnp.take_along_axis(log_probabilities, wanted[..., None], -1)[..., 0]
        each = jnp.where(counts & ~is_class, jnp.nan, each)
        weights = counts.astype(scores.dtype)
        if class_weights is not None:
            table = jnp.asarray(class_weights, scores.dtype)
            weights = weights * table[wanted]
            log_probabilities = log_probabilities * table
        spread = -jnp.mean(log_probabilities, -1) * counts
        total = (1 - smoothing) * jnp.sum(each * weights) + smoothing * jnp.sum(spread)
        accuracy = _mean((jnp.argmax(scores, -1) == wanted).astype(scores.dtype), counts)
        return total / _at_least_one(jnp.sum(weights)), {"accuracy": accuracy}

    return loss


def multi_label(logits: str | None = None, *, labels: str = "labels") -> Loss:
    """The mean sigmoid cross-entropy; labels are 0 or 1 (or between), in the shape of the logits."""

    def loss(outputs: Mapping[str, jax.Array], batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        scores = _wide(outputs, logits)
        wanted = _labels(batch, labels).astype(scores.dtype)
        _check(wanted, scores.shape, labels)
        accuracy = jnp.mean((scores > 0) == (wanted > 0.5))
        return jnp.mean(optax.sigmoid_binary_cross_entropy(scores, wanted)), {"accuracy": accuracy}

    return loss


def regression(predictions: str | None = None, *, labels: str = "labels", delta: float | None = None) -> Loss:
    """The mean squared error, or Huber's loss with `delta`; a last dimension of 1 may be absent in the labels."""

    def loss(outputs: Mapping[str, jax.Array], batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        given = _wide(outputs, predictions)
        wanted = _labels(batch, labels).astype(given.dtype)
        if given.shape == (*wanted.shape, 1):
            given = given[..., 0]
        _check(wanted, given.shape, labels)
        squares = (given - wanted) ** 2
        each = squares if delta is None else optax.huber_loss(given, wanted, delta=delta)
        return jnp.mean(each), {"rmse": jnp.sqrt(jnp.mean(squares))}

    return loss


def causal_lm(logits: str | None = None, *, labels: str = "labels") -> Loss:
    """Cross-entropy of each next token; labels are the ids of the tokens themselves, with -100 where none counts.

    The logits of a position are compared with the label of the next one, as in transformers.
    """
    of_classes = cross_entropy("logits", labels="labels")

    def loss(outputs: Mapping[str, jax.Array], batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        scores, wanted = _wide(outputs, logits), _labels(batch, labels)
        _check(wanted, scores.shape[:-1], labels)
        mean, metrics = of_classes({"logits": scores[..., :-1, :]}, {"labels": wanted[..., 1:]})
        return mean, {"token_accuracy": metrics["accuracy"], "perplexity": jnp.exp(mean)}

    return loss


def contrastive(
    embeddings: str | None = None, *, pooling: str | None = None, mask: str = "attention_mask", scale: float = 20.0
) -> Loss:
    """Cross-entropy of each text's pair among all in the batch, for embedding models.

    The rows of a batch are the anchors and then, in the same order, their positives; what belongs to other anchors is a
    negative (sentence-transformers' MultipleNegativesRankingLoss). Similarities are cosines, times `scale`.

    Args:
        embeddings: The output with them: [2 * pairs, size], or [2 * pairs, tokens, size] with a `pooling`.
        pooling: `"mean"` (over the tokens that `mask` counts) or `"first"` makes one vector of those of the tokens.
        mask: The entry of the batch that counts tokens, [2 * pairs, tokens].
        scale: The inverse of the temperature.
    """
    if pooling not in (None, "mean", "first"):
        raise InputError(f"pooling is {pooling!r}, but must be 'mean', 'first' or None.")

    def loss(outputs: Mapping[str, jax.Array], batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        vectors = _wide(outputs, embeddings)
        if pooling == "first":
            vectors = vectors[:, 0]
        elif pooling == "mean":
            weights = _labels(batch, mask).astype(vectors.dtype)[..., None]
            vectors = jnp.sum(vectors * weights, 1) / jnp.maximum(jnp.sum(weights, 1), 1e-9)
        if vectors.ndim != 2 or len(vectors) % 2:
            raise InputError(
                f"The embeddings have the shape {list(vectors.shape)}. A batch is an even number of rows, anchors and "
                "then their positives; embeddings of tokens need a pooling."
            )
        # the gradient of a norm is no number at zero
        vectors = vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, -1, keepdims=True), 1e-24))
        anchors, positives = jnp.split(vectors, 2)
        pairs = jnp.arange(len(anchors))
        return of_classes({"logits": scale * anchors @ positives.T}, {"labels": pairs})

    of_classes = cross_entropy("logits")
    return loss


def ctc(
    logits: str | None = None,
    *,
    labels: str = "labels",
    logit_lengths: str | None = None,
    label_lengths: str | None = None,
    blank: int = 0,
) -> Loss:
    """Connectionist temporal classification, as the mean over the batch of each sequence's loss per label.

    Args:
        logits: The output with the logits, [batch, frames, classes].
        labels: The entry of the batch with the classes, [batch, labels]; negative ones are padding at the end.
        logit_lengths: The entry with the number of frames of each row; None counts all.
        label_lengths: The entry with the number of labels of each row; None counts those that are not negative.
        blank: The class of blanks.
    """

    def loss(outputs: Mapping[str, jax.Array], batch: Mapping[str, Any]) -> jax.Array:
        scores, wanted = _wide(outputs, logits), _labels(batch, labels)
        if scores.ndim != 3 or wanted.ndim != 2 or len(scores) != len(wanted):
            raise InputError(
                f"CTC takes logits [batch, frames, classes] and labels [batch, labels], but they have the shapes "
                f"{list(scores.shape)} and {list(wanted.shape)}."
            )
        frames, places = jnp.arange(scores.shape[1]), jnp.arange(wanted.shape[1])
        label_padding = wanted < 0 if label_lengths is None else places >= _labels(batch, label_lengths)[:, None]
        if logit_lengths is None:
            logit_padding = jnp.zeros(scores.shape[:2], scores.dtype)
        else:
            logit_padding = (frames >= _labels(batch, logit_lengths)[:, None]).astype(scores.dtype)
        each = optax.ctc_loss(
            scores,
            logit_padding,
            jnp.where(label_padding, 0, wanted),
            label_padding.astype(scores.dtype),
            blank_id=blank,
        )
        return jnp.mean(each / _at_least_one(jnp.sum(~label_padding, -1)))

    return loss


# ---- parts ---------------------------------------------------------------------------------------------------------


def _wide(outputs: Mapping[str, jax.Array], name: str | None) -> jax.Array:
    """The output that a loss is of, in float32 at least."""
    if name is None:
        if len(outputs) != 1:
            raise InputError(f"The model has the outputs {', '.join(outputs)}. Name the one that the loss is of.")
        (name,) = outputs
    if name not in outputs:
        raise InputError(f"There is no output {name!r} for the loss. The model's are {', '.join(outputs)}.")
    value = jnp.asarray(outputs[name])
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))


def _labels(batch: Mapping[str, Any], name: str) -> jax.Array:
    if name not in batch:
        raise InputError(f"The batch has no {name!r} for the loss. It has {', '.join(batch) or 'nothing'}.")
    return jnp.asarray(batch[name])


def _check(labels: jax.Array, wanted: tuple[int, ...], name: str) -> None:
    if labels.shape != tuple(wanted):
        raise InputError(f"{name!r} has the shape {list(labels.shape)}, but the outputs take labels {list(wanted)}.")


def _mean(values: jax.Array, counts: jax.Array) -> jax.Array:
    return jnp.sum(values * counts) / _at_least_one(jnp.sum(counts))


def _at_least_one(count: jax.Array) -> jax.Array:
    """A divisor: of nothing, the mean is 0 and so is its gradient."""
    return jnp.where(count == 0, jnp.ones_like(count), count)

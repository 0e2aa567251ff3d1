"""Losses of classification."""

from __future__ import annotations

import jax.numpy as jnp

from transmuter.lowering.arrays import Array, cast
from transmuter.lowering.elementwise import widened
from transmuter.lowering.reduction import log_softmax
from transmuter.lowering.registry import operator


def _negative_log_likelihood(
    log_prob: Array, labels: Array, weights: Array | None, ignore_index: int | None, reduction: str
) -> Array:
    """A label that is no class and not ignored gives NaN."""
    counts = jnp.ones_like(labels, bool) if ignore_index is None else labels != ignore_index
    labels = jnp.where(counts, labels, jnp.zeros_like(labels))
    labels = jnp.where(labels < 0, jnp.full_like(labels, log_prob.shape[1]), labels)
    weight = jnp.ones((), log_prob.dtype) if weights is None else jnp.take(weights, labels, axis=0)
    weight = jnp.where(counts, weight, jnp.zeros_like(weight))
    picked = jnp.take_along_axis(log_prob, labels[:, None], axis=1)[:, 0]
    loss = jnp.where(counts, -weight * picked, jnp.zeros_like(picked))  # where it is ignored, it may be NaN
    if reduction == "none":
        return loss
    if reduction == "sum":
        return jnp.sum(loss)
    if reduction == "mean":
        return jnp.sum(loss) / jnp.sum(weight)
    raise ValueError(f"the reduction {reduction!r} is not defined")


@operator()
def NegativeLogLikelihoodLoss(input, target, weight=None, *, ignore_index, reduction):
    weight = None if weight is None else widened(weight)
    return cast(_negative_log_likelihood(widened(input), target, weight, ignore_index, reduction), input.dtype)


@operator()
def SoftmaxCrossEntropyLoss(scores, labels, weights=None, *, ignore_index, reduction):
    log_prob = log_softmax(widened(scores), 1, scores.dtype)
    loss = NegativeLogLikelihoodLoss(log_prob, labels, weights, ignore_index=ignore_index, reduction=reduction)
    return cast(loss, scores.dtype), cast(log_prob, scores.dtype)

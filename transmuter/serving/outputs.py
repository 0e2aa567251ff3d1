"""Outputs of a graph: which is the one that a task needs, and scores of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transmuter.errors import ModelError
from transmuter.model import Model


def find_output(model: Model, names: Sequence[str], task: str) -> str:
    """The first output of these names, or the only one that there is.

    Raises:
        ModelError: There are several outputs of other names.
    """
    found = next((name for name in names if name in model.outputs), None)
    if found is not None:
        return found
    if len(model.outputs) == 1:
        return next(iter(model.outputs))
    raise ModelError(
        f"The model has the outputs {', '.join(model.outputs)}, and none is named {' or '.join(names)}. "
        f"Use a model that is exported for {task}."
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Of each; without overflow where logits are far below 0."""
    powers = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1 / (1 + powers), powers / (1 + powers))

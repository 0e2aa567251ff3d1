"""What the gradient reference and the test that reads it share: the graph, its inputs, the loss, the summaries."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import graphs

VOCAB = 1000
REFERENCE = Path(__file__).with_name("minilm.npz")
_PROJECTIONS = 16


def model() -> onnx.ModelProto:
    """MiniLM-L6's encoder, with a small vocabulary."""
    return graphs.bert(vocab=VOCAB, positions=64, seed=7)


def batch() -> dict[str, np.ndarray]:
    """Three sentences of 12, 9 and 6 tokens."""
    return graphs.bert_inputs(3, 12, vocab=VOCAB, padding=3, seed=7)


def target() -> np.ndarray:
    """What the loss compares the mean-pooled hidden states with, by their mean squared difference."""
    return np.random.RandomState(8).standard_normal((3, 384)).astype(np.float32)


def summary(gradient: np.ndarray) -> np.ndarray:
    """A few numbers which tell gradients apart: the norm, then projections on random vectors of signs.

    The root mean square of a difference's projections estimates the difference's norm without bias.
    """
    flat = gradient.astype(np.float64).reshape(-1)
    random = np.random.RandomState(flat.size % 2**31)
    signs = [random.randint(0, 2, flat.size, np.int8) * 2.0 - 1.0 for _ in range(_PROJECTIONS)]
    return np.array([np.linalg.norm(flat), *(vector @ flat for vector in signs)])


def weights_checksum(weights: dict[str, np.ndarray]) -> float:
    """Differs as soon as the drawn weights are not those of the recording."""
    return float(sum(np.abs(weights[name].astype(np.float64)).sum() for name in sorted(weights)))

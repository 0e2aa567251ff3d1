"""Weights of few bits for tests, drawn."""

from __future__ import annotations

import numpy as np


def drawn_weight(
    bits: int, block: int, blocks: int, columns: int, zeros: str, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """The codes of a weight (depth, columns), its scales and zero points, and the weight itself in float64."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (columns, blocks * block)).astype(np.uint8).T
    scales = rng.uniform(0.5, 1.5, (blocks, columns)).astype(np.float32)
    zero = {
        "none": None,
        "integers": rng.integers(0, 2**bits, (blocks, columns)).astype(np.uint8),
        "floats": rng.uniform(0, 2**bits, (blocks, columns)).astype(np.float32),
    }[zeros]
    centre = np.full(scales.shape, 2 ** (bits - 1)) if zero is None else zero
    weight = (codes.astype(np.float64) - np.repeat(centre, block, 0)) * np.repeat(scales, block, 0)
    return codes, scales, zero, weight

"""Lowerings called by themselves, on known (NumPy) and on traced (JAX) operands."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transmuter.lowering import registry


def lower(op: str, *operands: Any, opset: int = 23, **attributes: Any) -> Any:
    """The result of a lowering itself, which tells known (NumPy) from traced (JAX)."""
    lowering = registry.find("", op, opset)
    given = dict.fromkeys(lowering.attributes) | lowering.defaults(opset) | attributes
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        return lowering.function(*operands, **given)


def both_paths(op: str, *operands: Any, known: Collection[int] = (), **attributes: Any) -> np.ndarray:
    """The result for known operands, after a check that it is known and equal to that for traced ones."""
    result = lower(op, *operands, **attributes)
    assert not isinstance(result, jax.Array)
    with jax.enable_x64(True):
        traced = [x if i in known else jnp.asarray(x) for i, x in enumerate(operands)]
    from_traced = lower(op, *traced, **attributes)
    assert isinstance(from_traced, jax.Array)
    assert from_traced.dtype == result.dtype
    assert from_traced.shape == result.shape
    np.testing.assert_allclose(np.asarray(from_traced), result, rtol=1e-5)
    return result

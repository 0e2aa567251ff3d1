"""Operators that pick, place and find elements by index: gather, scatter, selection, sorting."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, contents, is_known, is_string, traced
from transmuter.lowering.registry import operator

# ---- gather --------------------------------------------------------------------------------------------------------


def _from_front(indices: Array, size: Any) -> Array:
    """Indices counted from the front. Known ones are checked; of traced ones nobody knows, so JAX clips them."""
    if isinstance(indices, jax.Array):
        size = size if isinstance(size, int) else lax.convert_element_type(jnp.asarray(size), indices.dtype)
        return jnp.where(indices < 0, indices + size, indices)
    if not isinstance(size, int):
        return indices
    if indices.size and not (-size <= indices.min() and indices.max() < size):
        raise ValueError(f"an index lies outside of the axis, which has {size} elements")
    return np.where(indices < 0, indices + size, indices)


@operator()
def Gather(data, indices, *, axis):
    if is_string(data):
        indices = contents(indices)
    axis = axis % data.ndim
    indices = _from_front(indices, data.shape[axis])
    if is_known((data, indices)):
        return np.asarray(np.take(data, indices, axis), data.dtype)
    if is_known(indices) and indices.ndim == 0 and indices >= 0:
        return lax.index_in_dim(data, int(indices), axis, keepdims=False)
    return jnp.take(traced(data), indices, axis, mode="clip")

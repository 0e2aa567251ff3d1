"""Whether the caller stages our operations out, and the dtypes that follow from it."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import jax
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE as _under_a_jit


def staged() -> bool:
    """Whether a `jit`, `checkpoint`, `scan`, `shard_map` or `export` around the call records what we do. `grad` and `vmap`
    alone do not."""
    return _under_a_jit()


def exact_dtypes() -> AbstractContextManager[None]:
    """64-bit types for the block, whatever `jax_enable_x64` says; where the caller stages, its own setting holds, since
    a change inside of a trace breaks operations that are lowered later."""
    return contextlib.nullcontext() if staged() else jax.enable_x64(True)

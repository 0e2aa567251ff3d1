"""Whether the caller stages our operations out, and the dtypes that follow from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE as _under_a_jit


def staged() -> bool:
    """Whether a `jit`, `checkpoint`, `scan`, `shard_map` or `export` around the call records what we do. `grad` and
    `vmap` alone do not."""
    return _under_a_jit()


def exact_dtypes() -> AbstractContextManager[None]:
    """64-bit types for the block, whatever `jax_enable_x64` says; where the caller stages, its own setting holds, since
    a change inside of a trace breaks operations that are lowered later."""
    return contextlib.nullcontext() if staged() else jax.enable_x64(True)


def differentiated(values: Iterable[Any]) -> bool:
    """Whether a reverse-mode transform (`grad`, `vjp`) directly around the call follows one of `values`."""
    return any(type(value).__name__ == "LinearizeTracer" for value in values)


def transposed_exactly(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with its pullback under 64-bit types.

    A pullback runs after the call, when the caller's setting holds again. JAX's gather then makes float32 zeros for a
    float64 operand, and fails.
    """

    @jax.custom_vjp
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    def forward(*arguments: Any) -> tuple[Any, Any]:
        return jax.vjp(function, *arguments)

    def backward(pullback: Any, cotangents: Any) -> Any:
        with jax.enable_x64(True):
            return pullback(cotangents)

    call.defvjp(forward, backward)
    return call

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
    """Whether a reverse-mode transform (`grad`, `vjp`) around the call follows one of `values`, through `vmap` too."""
    return any(map(_is_followed, values))


def _is_followed(value: Any) -> bool:
    kind = type(value).__name__
    return kind == "LinearizeTracer" or (kind == "BatchTracer" and _is_followed(value.val))


def transposed_exactly(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, with its pullback under 64-bit types.

    A pullback runs after the call, when the caller's setting holds again. With x64 off, JAX then makes float32 zeros
    for the float64 operand of a gather, or compares int64 indices with int32 bounds, and fails.
    """
    leaves, structure = jax.tree.flatten(arguments)
    followed = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]

    def of_followed(values: list[Any]) -> Any:
        given = dict(zip(followed, values, strict=True))
        return function(*jax.tree.unflatten(structure, [given.get(i, leaf) for i, leaf in enumerate(leaves)]))

    def forward(values: list[Any]) -> tuple[Any, Any]:
        return jax.vjp(of_followed, values)

    def backward(pullback: Any, cotangents: Any) -> Any:
        with jax.enable_x64(True):
            return pullback(cotangents)

    exact = jax.custom_vjp(of_followed)
    exact.defvjp(forward, backward)
    return exact([leaves[i] for i in followed])

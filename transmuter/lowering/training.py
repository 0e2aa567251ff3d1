"""ai.onnx.preview.training: Gradient, and optimiser steps, each for any number of tensors at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from transmuter.lowering.arrays import cast, traced
from transmuter.lowering.reduction import guarded
from transmuter.lowering.registry import operator

_DOMAIN = "ai.onnx.preview.training"


@operator(domain=_DOMAIN)
def Gradient(*inputs, xs, y, zs=(), region):
    """Derivatives of the sum of `y`. The operands may be other values than those that `xs` and `zs` name: the nodes in
    between are evaluated on them."""
    variables, others = map(list, (map(traced, inputs[: len(xs)]), inputs[len(xs) :]))
    value, pullback = jax.vjp(lambda variables: region(*variables, *others), variables)
    return tuple(pullback(jnp.ones_like(value))[0])


# ---- optimisers ----------------------------------------------------------------------------------------------------


def _step(update: Callable[..., tuple[Any, ...]], operands: Sequence[Any], kinds: int) -> tuple[Any, ...]:
    """Applies `update` to each tensor with its gradient and state. Operands and results stand in order of kind: all
    tensors, all gradients, all states of the first kind, ..."""
    count, odd = divmod(len(operands), kinds)
    if odd:
        raise ValueError(f"{len(operands)} tensors are not {kinds} for each one to optimise")
    groups = [operands[k * count : (k + 1) * count] for k in range(kinds)]
    return tuple(result for results in zip(*(update(*group) for group in zip(*groups))) for result in results)


@operator(domain=_DOMAIN)
def Adagrad(R, T, *inputs, norm_coefficient, decay_factor, epsilon):
    rate = R / (1 + cast(T, R.dtype) * decay_factor)

    def update(x, gradient, squares):
        gradient = norm_coefficient * x + gradient
        squares = squares + gradient * gradient
        return x - cast(rate, x.dtype) * gradient / (guarded(squares, jnp.sqrt, 0) + epsilon), squares

    return _step(update, inputs, 3)


@operator(domain=_DOMAIN)
def Adam(R, T, *inputs, alpha, beta, epsilon, norm_coefficient, norm_coefficient_post):
    steps = jnp.maximum(cast(T, R.dtype), 1)  # step 0 has the plain rate
    rate = jnp.where(T > 0, R * jnp.sqrt(1 - beta**steps) / (1 - alpha**steps), R)

    def update(x, gradient, mean, squares):
        gradient = norm_coefficient * x + gradient
        mean = alpha * mean + (1 - alpha) * gradient
        squares = beta * squares + (1 - beta) * gradient * gradient
        moved = x - cast(rate, x.dtype) * mean / (guarded(squares, jnp.sqrt, 0) + epsilon)
        return (1 - norm_coefficient_post) * moved, mean, squares

    return _step(update, inputs, 4)


@operator(domain=_DOMAIN)
def Momentum(R, T, *inputs, alpha, beta, mode, norm_coefficient):
    if mode not in ("standard", "nesterov"):
        raise ValueError(f"mode is {mode!r}, neither 'standard' nor 'nesterov'")

    def update(x, gradient, velocity):
        gradient = norm_coefficient * x + gradient
        velocity = alpha * velocity + jnp.where(T > 0, jnp.asarray(beta, x.dtype), 1) * gradient
        direction = velocity if mode == "standard" else gradient + alpha * velocity
        return x - cast(R, x.dtype) * direction, velocity

    return _step(update, inputs, 3)

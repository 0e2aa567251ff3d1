"""Gradients of a MiniLM-sized encoder with respect to every weight, against those that PyTorch computes in float64."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gradients import encoder

import transmuter

REFERENCE = np.load(encoder.REFERENCE)
TOLERANCE = 1e-5
"""Of the norm of a gradient's error, relative to the gradient's norm."""
ROUNDING = 1e-8
"""Relative to the norm of all gradients together: those of the keys' biases are zero but for rounding."""


@pytest.fixture(scope="module")
def model() -> transmuter.Model:
    return transmuter.load(encoder.model())


def loss(outputs: dict[str, jax.Array]) -> jax.Array:
    mask = jnp.asarray(encoder.batch()["attention_mask"], jnp.float32)[:, :, None]
    pooled = (outputs["last_hidden_state"] * mask).sum(1) / mask.sum(1)
    return jnp.mean((pooled - encoder.target()) ** 2)


def through_apply(model: transmuter.Model) -> Callable[[dict], tuple]:
    # Captured inputs would be known values, and the graph's head a constant: give them as traced ones.
    inputs = jax.tree.map(jnp.asarray, encoder.batch())
    return lambda params: jax.jit(jax.value_and_grad(lambda p, x: loss(model.apply(p, x))))(params, inputs)


def through_compile(model: transmuter.Model) -> Callable[[dict], tuple]:
    compiled = transmuter.compile(model)
    return jax.value_and_grad(lambda params: loss(compiled(encoder.batch(), params=params)))


def test_the_weights_are_the_recorded_ones(model: transmuter.Model) -> None:
    assert {f"gradient:{name}" for name in model.params} == {k for k in REFERENCE if k.startswith("gradient:")}
    checksum = encoder.weights_checksum({name: np.asarray(p) for name, p in model.params.items()})
    assert checksum == pytest.approx(float(REFERENCE["checksum"]), rel=1e-12)


@pytest.mark.parametrize("differentiate", [through_apply, through_compile])
def test_gradients_are_those_of_pytorch(model: transmuter.Model, differentiate: Callable) -> None:
    value, gradients = differentiate(model)(model.params)
    assert float(value) == pytest.approx(float(REFERENCE["loss"]), rel=1e-5)
    total = np.sqrt(sum(REFERENCE[f"gradient:{name}"][0] ** 2 for name in gradients))
    errors = {}
    for name, gradient in gradients.items():
        actual, expected = encoder.summary(np.asarray(gradient)), REFERENCE[f"gradient:{name}"]
        error = np.sqrt(np.mean((actual - expected)[1:] ** 2))  # the projections'
        limit = TOLERANCE * expected[0] + ROUNDING * total
        if not max(error, abs(actual[0] - expected[0])) <= limit:
            errors[name] = f"{error:.3g} with a norm of {expected[0]:.3g}"
    assert not errors

"""Activations that gradients compute again: which they are, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from transmuter.segments.recomputation import recomputed_activations
from transmuter.segments.rewriting import rewriting

X = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


def by_erf(x: jax.Array) -> jax.Array:
    return x * 0.5 * (1 + jax.lax.erf(x / np.float32(2**0.5)))


def mixed(x: jax.Array) -> jax.Array:
    """Two activations that share an operand, and a third of both."""
    return jax.nn.silu(by_erf(x) + x * jnp.tanh(x))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "by erf": by_erf,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "by tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "mixed": mixed,
}
OTHERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "scaled": lambda x: 2 * jnp.tanh(x / 3) + 1,
    "gate": lambda x: jax.nn.sigmoid(x) * X,
    "sum": lambda x: jnp.tanh(x + X[0]),
}


def layer(activation: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, w: jnp.sum(activation(x @ w + 0.1) @ w)


def kept(function: Callable[..., jax.Array], *arguments: jax.Array) -> list[tuple[int, ...]]:
    """Shapes of the arrays that the forward pass hands to the gradients."""
    return [x.shape for x in jax.tree.leaves(jax.vjp(function, *arguments)[1]) if np.ndim(x)]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_their_operand_alone(name: str) -> None:
    plain = layer(ACTIVATIONS[name])
    recomputing = rewriting(plain, recomputed_activations)
    assert "remat" in str(jax.make_jaxpr(recomputing)(X, W))
    assert len(kept(recomputing, X, W)) <= len(kept(plain, X, W))
    np.testing.assert_allclose(recomputing(X, W), plain(X, W), rtol=1e-6)
    for mine, expected in zip(jax.grad(recomputing, (0, 1))(X, W), jax.grad(plain, (0, 1))(X, W), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
    check_grads(rewriting(plain, recomputed_activations), (X, W), 2, modes=["fwd", "rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_its_gradient_of_its_result_stays(name: str) -> None:
    plain = layer(OTHERS[name])
    assert str(jax.make_jaxpr(rewriting(plain, recomputed_activations))(X, W)) == str(jax.make_jaxpr(plain)(X, W))


def test_a_value_that_is_needed_elsewhere_is_there() -> None:
    def function(x: jax.Array) -> jax.Array:
        inner = jax.lax.erf(x * 0.7)
        return jnp.sum(x * (inner + 1)) + jnp.sum(inner**2)

    recomputing = rewriting(function, recomputed_activations)
    np.testing.assert_allclose(jax.grad(recomputing)(X), jax.grad(function)(X), rtol=1e-6)

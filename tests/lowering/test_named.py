"""Computations with a name: what rules find, and no transform, gradient or batch has to know of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from transmuter.lowering.named import named

X, Y = np.float32([[1, 2], [3, 4]]), np.int32([2, 3])


def scaled(x: jax.Array, y: jax.Array, *, by: float) -> jax.Array:
    return jnp.sin(x) * y * by


def by_name(x: jax.Array, y: jax.Array) -> jax.Array:
    return named("scaling", scaled, x, y, by=2.0)


def plain(x: jax.Array, y: jax.Array) -> jax.Array:
    return scaled(x, y, by=2.0)


def test_a_trace_has_one_operation_with_name_and_params() -> None:
    (equation,) = jax.make_jaxpr(by_name)(X, Y).eqns
    assert equation.primitive.name == "named"
    assert (equation.params["name"], equation.params["by"]) == ("scaling", 2.0)


@pytest.mark.parametrize("form", [lambda f: f, jax.jit, jax.checkpoint])
def test_it_computes_what_the_function_does(form) -> None:
    np.testing.assert_allclose(form(by_name)(X, Y), plain(X, Y), 1e-6)


def test_gradients_and_batches_are_those_of_the_function() -> None:
    check_grads(lambda x: by_name(x, Y), (X,), 2, rtol=1e-2, atol=1e-2)
    check_grads(jax.jit(jax.checkpoint(lambda x: by_name(x, Y))), (X,), 1, rtol=1e-2, atol=1e-2)
    for axes in [(0, None), (None, 0), (1, 0)]:
        actual, expected = (jax.vmap(f, axes)(X, Y) for f in (by_name, plain))
        np.testing.assert_allclose(actual, expected, 1e-6)
    both = [jax.vmap(jax.grad(lambda x, y, f=f: f(x, y).sum()), (0, None))(X, Y) for f in (by_name, plain)]
    np.testing.assert_allclose(*both, 1e-6)
    assert "named" not in str(jax.make_jaxpr(jax.vmap(by_name, (0, None)))(X, Y))
    assert "named" not in str(jax.make_jaxpr(jax.grad(lambda x: by_name(x, Y).sum()))(X))


def test_it_is_exported_for_any_size_and_platform() -> None:
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 2"), np.float32)
    exported = jax.export.export(jax.jit(by_name), platforms=["cpu", "tpu"])(shape, Y)
    np.testing.assert_allclose(exported.call(X, Y), plain(X, Y), 1e-6)


def test_it_is_in_loops_and_branches() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jax.lax.cond(True, by_name, plain, x, Y), None), x, length=3)[0]

    expected = plain(plain(plain(X, Y), Y), Y)
    np.testing.assert_allclose(loop(X), expected, 1e-5)
    check_grads(loop, (X,), 1, modes=["rev"], rtol=1e-2, atol=1e-2)


def test_results_have_the_structure_of_the_functions() -> None:
    double = named("both", lambda x: {"twice": 2 * x, "size": (x.size, -x)}, X)
    np.testing.assert_array_equal(double["twice"], 2 * X)
    np.testing.assert_array_equal(double["size"][1], -X)

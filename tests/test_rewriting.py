"""Rewriting of traces, and what prepared weights give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transmuter.segments.preparation import Trace, evaluate, flatten, inverses, split
from transmuter.segments.rewriting import Replacement, View, rewritten


def traced(function: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> Trace:
    return flatten(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, np.float32) for s in shapes)))


def results(trace: Trace, *arguments: np.ndarray) -> list[jax.Array]:
    environment = {**trace.constants, **dict(zip(trace.inputs, map(jnp.asarray, arguments), strict=True))}
    return evaluate(trace.operations, environment, trace.outputs)


def primitives(trace: Trace) -> list[str]:
    return [op.equation.primitive.name for op in trace.operations]


def doubled_sines(view: View) -> Iterator[Replacement]:
    """sin(x) by 2 sin(x/2) cos(x/2), whose halves join at an array that the rule makes."""
    for op in view.trace.operations:
        if op.equation.primitive.name == "sin":
            yield Replacement(op.results, lambda x: [jnp.sin(x / 2) * jnp.cos(x / 2) * jnp.full(3, 2.0)], op.operands)


@pytest.fixture
def x() -> np.ndarray:
    return np.array([0.3, -2.0, 7.0], np.float32)


def test_a_rule_replaces_what_it_finds(x):
    trace = traced(lambda x: jnp.sin(jnp.sin(x)) + jnp.sin(x), (3,))
    new = rewritten(trace, (), [doubled_sines])
    assert primitives(trace).count("sin") == 3  # the original is as it was
    assert primitives(new).count("cos") == 3
    np.testing.assert_allclose(results(new, x)[0], np.sin(np.sin(x)) + np.sin(x), rtol=1e-5)


def test_rules_see_what_those_before_them_made(x):
    new = rewritten(traced(jnp.sin, (3,)), (), [doubled_sines, doubled_sines])
    assert primitives(new).count("cos") == 2
    np.testing.assert_allclose(results(new, x)[0], np.sin(x), rtol=1e-5)


def test_a_result_that_the_trace_returns_is_replaced(x):
    new = rewritten(traced(lambda x: (jnp.sin(x), x), (3,)), (), [doubled_sines])
    np.testing.assert_allclose(results(new, x)[0], np.sin(x), rtol=1e-5)
    np.testing.assert_array_equal(results(new, x)[1], x)


def test_a_replacement_takes_what_is_computed_later(x):
    """The first of two products moves behind the operand of the second."""

    def rule(view: View) -> Iterator[Replacement]:
        products = [op for op in view.trace.operations if op.equation.primitive.name == "mul"]
        if len(products) == 2:
            results = [ref for op in products for ref in op.results]
            operands = [operand for op in products for operand in op.operands]
            two = lambda left, right: jnp.stack([left, right])
            join = lambda a, b, c, d: list(two(a, c) * two(b, d))
            yield Replacement(results, join, operands)

    new = rewritten(traced(lambda x, y: x * y - jnp.exp(x) * y, (3,), (3,)), (), [rule])
    assert primitives(new).count("mul") == 1
    np.testing.assert_allclose(results(new, x, x)[0], x * x - np.exp(x) * x, rtol=1e-6)


def test_a_replacement_of_another_shape_is_an_error():
    def rule(view: View) -> Iterator[Replacement]:
        yield Replacement(view.trace.operations[0].results, lambda x: [x[:2]], view.trace.inputs)

    with pytest.raises(TypeError, match="a rule replaces"):
        rewritten(traced(jnp.sin, (3,)), (), [rule])


def test_a_view_knows_weights_and_users():
    trace = traced(lambda w, x: (jnp.tanh(w.T) @ x, x), (3, 4), (3,))
    w, x = trace.inputs
    view = View(trace, [w])
    (product,) = (op for op in trace.operations if op.equation.primitive.name == "dot_general")
    assert product.operands[0] in view.weights
    assert product.results[0] not in view.weights
    assert view.producer(product.operands[0], "tanh").results[0] == product.operands[0]
    assert view.producer(product.operands[0], "transpose") is None
    assert view.producer(x, "tanh") is None
    assert view.sole_user(w).equation.primitive.name == "transpose"
    assert view.sole_user(x) is None  # it is returned, too


def test_joined_weights_give_the_originals_back():
    trace = traced(lambda a, b, c: jnp.concatenate([a, b.T, c * 2], 1), (2, 3), (4, 2), (2, 1))
    names = dict(zip(trace.inputs, "abc", strict=True))
    (weight,) = split(trace, names, [], prepare=True).weights
    values = [np.random.default_rng(0).normal(size=s).astype(np.float32) for s in ((2, 3), (4, 2), (2, 1))]
    restores = inverses(weight)
    assert set(restores) == {"a", "b"}  # a product is not exactly undone
    (joined,) = results(trace, *values)
    np.testing.assert_array_equal(restores["a"](joined), values[0])
    np.testing.assert_array_equal(restores["b"](joined), values[1])

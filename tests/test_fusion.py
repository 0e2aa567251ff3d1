"""The rules for transformers: what they match, and that results and gradients stay those of the graph as written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lowering.paths import lower
from transmuter.lowering.linear import matmul
from transmuter.segments import fusion
from transmuter.segments.preparation import Operation, Trace, evaluate, flatten
from transmuter.segments.rewriting import Rule, rewritten


def normal(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.RandomState(0)
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def results(trace: Trace, arguments: Sequence[Any]) -> list[jax.Array]:
    environment = {**trace.constants, **dict(zip(trace.inputs, map(jnp.asarray, arguments), strict=True))}
    return evaluate(trace.operations, environment, trace.outputs)


def operations(trace: Trace, primitive: str) -> list[Operation]:
    return [op for op in trace.operations if op.equation.primitive.name == primitive]


def checked(
    rule: Rule, function: Callable[..., Any], arguments: list[np.ndarray], weights: Sequence[int] = ()
) -> Trace:
    """The trace of `function` under a rule, after a check of its results and of its gradients by all arguments."""
    trace = flatten(jax.make_jaxpr(function)(*arguments))
    new = rewritten(trace, [trace.inputs[i] for i in weights], [rule])

    def loss(trace: Trace, arguments: Sequence[Any]) -> jax.Array:
        return sum(jnp.sum(jnp.sin(y)) for y in results(trace, arguments))

    for ours, as_written in zip(results(new, arguments), results(trace, arguments), strict=True):
        np.testing.assert_allclose(ours, as_written, rtol=1e-5, atol=1e-5)
    gradients = (jax.grad(loss, argnums=1)(t, list(map(jnp.asarray, arguments))) for t in (new, trace))
    for ours, as_written in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, as_written, rtol=1e-4, atol=1e-5)
    return new


def softmax(x: jax.Array, axis: int = -1) -> jax.Array:
    return lower("Softmax", x, axis=axis)


# ---- scaled operands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [lambda s: s / 3, lambda s: s * 0.5, lambda s: 0.5 * s], ids=["div", "mul", "left"])
def test_scores_are_scaled_by_way_of_the_queries(scale):
    new = checked(
        fusion.scaled_operands, lambda q, k: jnp.exp(scale(matmul(q, k))), normal((2, 3, 9, 4), (2, 3, 4, 11))
    )
    assert {op.equation.outvars[0].aval.shape for name in ("mul", "div") for op in operations(new, name)} == {
        (2, 3, 9, 4)
    }


def test_the_smaller_operand_is_scaled():
    new = checked(fusion.scaled_operands, lambda q, k: matmul(q, k) * 0.5, normal((9, 4), (4, 3)))
    assert [op.equation.outvars[0].aval.shape for op in operations(new, "mul")] == [(4, 3)]


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k: matmul(q, k) * 1e38,
        lambda q, k: matmul(q, k) / 1e-38,
        lambda q, k: jnp.matmul(q.astype(np.float16), k.astype(np.float16), preferred_element_type=np.float32) * 0.5,
        lambda q, k: matmul(q, k) * jnp.sum(q),
        lambda q, k: 2 / matmul(q, k),
        lambda q, k: (lambda s: s * 0.5 + s)(matmul(q, k)),
        lambda q, k: matmul(q, k)[:, :1] * 0.5,
    ],
    ids=["large", "small", "widened", "computed", "divided", "used twice", "sliced"],
)
def test_other_scales_stay(function):
    arguments = normal((9, 4), (4, 11))
    trace = flatten(jax.make_jaxpr(function)(*arguments))
    assert rewritten(trace, (), [fusion.scaled_operands]) is trace


def test_a_scale_of_a_product_that_is_smaller_than_its_operands_stays():
    trace = flatten(jax.make_jaxpr(lambda q, k: matmul(q, k) * 0.5)(*normal((3, 64), (64, 3))))
    assert rewritten(trace, (), [fusion.scaled_operands]) is trace


def test_weights_are_not_scaled():
    trace = flatten(jax.make_jaxpr(lambda x, w: matmul(x, w) * 0.5)(*normal((9, 4), (4, 3))))
    assert rewritten(trace, [trace.inputs[1]], [fusion.scaled_operands]) is trace


# ---- late normalization --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [(), (3,), (1, 3), (2, 3)])
def test_the_mixture_is_normalized(stack):
    arguments = normal((*stack, 7, 11), (*stack, 11, 4))
    new = checked(fusion.late_normalization, lambda s, v: matmul(softmax(s * 9), v), arguments)
    (mixture,) = operations(new, "custom_jvp_call")
    assert mixture.equation.outvars[0].aval.shape == (*stack, 7, 4)


def test_queries_that_see_nothing_are_nan_and_leave_no_nan_in_gradients():
    scores, values = normal((5, 9), (9, 4))
    scores[2] = -np.inf
    trace = flatten(jax.make_jaxpr(lambda s, v: matmul(softmax(s), v))(scores, values))
    new = rewritten(trace, (), [fusion.late_normalization])
    assert new is not trace
    mixed = np.asarray(results(new, [scores, values])[0])
    np.testing.assert_array_equal(np.isnan(mixed).any(axis=1), np.arange(5) == 2)
    slope = jax.grad(lambda s: jnp.sum(results(new, [s, values])[0][:2]))(jnp.asarray(scores))
    assert np.isfinite(slope).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda s, v: matmul(softmax(s, axis=0), v),
        lambda s, v: (lambda shares: (matmul(shares, v), shares))(softmax(s)),
        lambda s, v: matmul(softmax(s), jnp.concatenate([v, v, v], axis=1)),
        lambda s, v: matmul(softmax(s).T, s),
    ],
    ids=["another axis", "shares are an output", "a larger mixture", "shares of another order"],
)
def test_other_softmaxes_stay(function):
    trace = flatten(jax.make_jaxpr(function)(*normal((7, 11), (11, 4))))
    assert rewritten(trace, (), [fusion.late_normalization]) is trace


# ---- products of parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_attends_to_past_and_new_keys_by_themselves(count):
    def step(query, past_key, key, past_value, value):
        keys, values = jnp.concatenate([past_key, key], axis=2), jnp.concatenate([past_value, value], axis=2)
        shares = softmax(matmul(query, jnp.swapaxes(keys, 2, 3)))
        return matmul(shares, values), keys, values

    past, new = (1, 3, 12, 4), (1, 3, count, 4)
    rewritten = checked(fusion.products_of_parts, step, normal(new, past, new, past, new))
    read = {ref for op in operations(rewritten, "dot_general") for ref in op.operands}
    joined = {ref for op in operations(rewritten, "concatenate") for ref in op.results} - {rewritten.outputs[0]}
    assert read.isdisjoint(joined & set(rewritten.outputs))
    assert {rewritten.inputs[1], rewritten.inputs[3]} <= read


def test_keys_that_are_kept_transposed_are_parts_too():
    def scores(query, past_key, key):
        return matmul(query, jnp.concatenate([past_key, key], axis=2))

    new = checked(fusion.products_of_parts, scores, normal((3, 1, 4), (3, 4, 12), (3, 4, 1)))
    assert len(operations(new, "dot_general")) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a, b: matmul(jnp.tile(x, (1, 9, 1)), jnp.concatenate([a, b], axis=2)),
        lambda x, a, b: matmul(jnp.concatenate([x, x], axis=0), jnp.concatenate([a, b], axis=0)),
    ],
    ids=["many rows", "joined stacks"],
)
def test_other_products_of_concatenations_stay(function):
    trace = flatten(jax.make_jaxpr(function)(*normal((3, 1, 4), (3, 4, 5), (3, 4, 5))))
    assert rewritten(trace, (), [fusion.products_of_parts]) is trace


# ---- tied weights --------------------------------------------------------------------------------------------------


def test_a_head_reads_the_embedding_as_it_is():
    def step(row, table):
        return matmul(row + table[3], table.T)

    new = checked(fusion.tied_weights, step, normal((1, 1, 4), (9, 4)), weights=[1])
    assert not operations(new, "transpose")


@pytest.mark.parametrize("rows", [1, 5])
def test_a_head_of_its_own_or_of_many_rows_has_its_weight_transposed(rows):
    def step(row, table):
        return matmul(row if rows == 1 else row + table[3], table.T)

    trace = flatten(jax.make_jaxpr(step)(*normal((1, rows, 4), (9, 4))))
    assert rewritten(trace, [trace.inputs[1]], [fusion.tied_weights]) is trace

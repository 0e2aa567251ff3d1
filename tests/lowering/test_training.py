"""The optimiser steps: every mode against the reference evaluator and a plain form of the specification."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, run_node
from onnx.reference import ReferenceEvaluator

import transmuter
from lowering.drawn import arrays, element_type
from transmuter.lowering import training

DOMAIN = "ai.onnx.preview.training"
DRAWN = settings(max_examples=20, deadline=None)
RATE = st.sampled_from([0.0, 0.1, 1.0])
EPSILON = st.sampled_from([1e-6, 0.1])
FACTOR = st.sampled_from([0.0, 0.25, 0.9])


def adagrad(rate, step, x, gradient, squares, *, norm_coefficient, decay_factor, epsilon):
    gradient = gradient + norm_coefficient * x
    squares = squares + gradient**2
    return x - rate / (1 + step * decay_factor) * gradient / (np.sqrt(squares) + epsilon), squares


def adam(rate, step, x, gradient, mean, squares, *, alpha, beta, epsilon, norm_coefficient, norm_coefficient_post):
    gradient = gradient + norm_coefficient * x
    mean = alpha * mean + (1 - alpha) * gradient
    squares = beta * squares + (1 - beta) * gradient**2
    rate = rate * np.sqrt(1 - beta**step) / (1 - alpha**step) if step > 0 else rate
    return (1 - norm_coefficient_post) * (x - rate * mean / (np.sqrt(squares) + epsilon)), mean, squares


def momentum(rate, step, x, gradient, velocity, *, alpha, beta, norm_coefficient, mode):
    gradient = gradient + norm_coefficient * x
    velocity = alpha * velocity + (beta if step > 0 else 1) * gradient
    return x - rate * (gradient + alpha * velocity if mode == "nesterov" else velocity), velocity


STEPS = {
    "Adagrad": (
        adagrad,
        1,
        {"norm_coefficient": FACTOR, "decay_factor": FACTOR, "epsilon": st.sampled_from([1e-6, 0.1])},
    ),
    "Adam": (
        adam,
        2,
        {
            "alpha": FACTOR,
            "beta": FACTOR,
            "epsilon": EPSILON,
            "norm_coefficient": FACTOR,
            "norm_coefficient_post": FACTOR,
        },
    ),
    "Momentum": (
        momentum,
        1,
        {
            "alpha": FACTOR,
            "beta": FACTOR,
            "norm_coefficient": FACTOR,
            "mode": st.sampled_from(["standard", "nesterov"]),
        },
    ),
}


@pytest.mark.parametrize("op", STEPS)
@DRAWN
@given(
    draw=st.data(),
    dtype=st.sampled_from([np.float32, np.float64]),
    rate=RATE,
    step=st.sampled_from([0, 1, 7]),
    shapes=st.lists(st.sampled_from([(2, 3), (), (0, 3)]), min_size=1, max_size=2),
)
def test_steps(op, draw, dtype, rate, step, shapes):
    function, states, strategies = STEPS[op]
    attributes = draw.draw(st.fixed_dictionaries(strategies))
    values = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0])
    positive = st.sampled_from([0.0, 0.25, 1.0, 3.0])
    of_each = [
        [draw.draw(arrays(dtype, shape, values)), draw.draw(arrays(dtype, shape, values))]
        + [draw.draw(arrays(dtype, shape, positive)) for _ in range(states)]
        for shape in shapes
    ]
    inputs = [dtype(rate).reshape(()), np.array(step), *(x for kind in zip(*of_each) for x in kind)]
    wanted = [function(rate, step, *(x.astype(np.float64) for x in xs), **attributes) for xs in of_each]
    wanted = [np.asarray(y).astype(dtype) for kind in zip(*wanted) for y in kind]
    more = {"domain": DOMAIN, "outputs": len(wanted), "output_types": [element_type(dtype)] * len(wanted)}
    for actual, one in zip(run_node(op, inputs, attributes, **more), wanted, strict=True):
        assert_equal(actual, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["standard", "nesterov"])
@pytest.mark.parametrize("op", STEPS)
def test_steps_are_those_of_the_reference_evaluator(op, mode):
    random = np.random.default_rng(0)
    states = STEPS[op][1]
    attributes = {"norm_coefficient": 0.01}
    attributes |= {"mode": mode, "alpha": 0.9, "beta": 0.5} if op == "Momentum" else {}
    inputs = [np.array(0.1, np.float32), np.array(3), *(random.random((2, 3), np.float32) for _ in range(2 + states))]
    more = {"domain": DOMAIN, "outputs": 1 + states}
    model = one_node(op, inputs, attributes, **more)
    wanted = ReferenceEvaluator(model).run(None, {f"x{i}": x for i, x in enumerate(inputs)})
    for actual, one in zip(run_node(op, inputs, attributes, **more), wanted, strict=True):
        assert_equal(actual, one.astype(np.float32), rtol=1e-5, atol=1e-6)


def test_a_step_from_zero_is_no_nan():
    for op, states in (("Adagrad", 1), ("Adam", 2)):
        zeros = [np.zeros(2, np.float32)] * (2 + states)
        results = run_node(op, [np.array(0.1, np.float32), np.array(0), *zeros], domain=DOMAIN, outputs=1 + states)
        assert not np.isnan(results).any()


GIVEN = {
    "Adagrad": {"norm_coefficient": 0.1, "decay_factor": 0.1, "epsilon": 1e-6},
    "Adam": {"alpha": 0.9, "beta": 0.9, "epsilon": 1e-6, "norm_coefficient": 0.1, "norm_coefficient_post": 0.1},
    "Momentum": {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.1, "mode": "nesterov"},
}


@pytest.mark.parametrize("op", STEPS)
def test_gradients_through_a_step(op):
    def step(rate, *operands):
        return getattr(training, op)(rate, np.array(2), *operands, **GIVEN[op])

    with jax.enable_x64(True):
        random = np.random.default_rng(1)
        operands = [random.random(3) + 0.5 for _ in range(2 + STEPS[op][1])]
        check_grads(step, (np.float64(0.1), *operands), 1, ["rev"])
    zeros = [np.zeros(3, np.float32)] * (2 + STEPS[op][1])
    for gradient in jax.grad(lambda *xs: sum(map(jnp.sum, step(np.float32(0.1), *xs))), tuple(range(len(zeros))))(
        *zeros
    ):
        assert np.isfinite(gradient).all()


def test_operands_that_do_not_fit():
    scalars, x = [np.array(0.1, np.float32), np.array(0)], np.zeros(2, np.float32)
    with pytest.raises(transmuter.LoweringError, match="4 tensors are not 3 for each one"):
        run_node("Adagrad", [*scalars, *[x] * 4], domain=DOMAIN, outputs=2)
    attributes = {"mode": "other", "alpha": 0.1, "beta": 0.1, "norm_coefficient": 0.0}
    with pytest.raises(transmuter.LoweringError, match="neither 'standard' nor 'nesterov'"):
        run_node("Momentum", [*scalars, *[x] * 3], attributes, domain=DOMAIN, outputs=2)

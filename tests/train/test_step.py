"""Steps of training: equal to optax by hand, with parts, devices, breaks, dropout and running statistics."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from building import info, model_of
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter import train
from transmuter.train import losses

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 3, 8)
BATCH = {"x": X, "labels": LABELS}
BY_CONTENTS = [
    helper.make_node("ReduceSum", ["h"], ["total"], keepdims=0),
    helper.make_node("Mul", ["total", "zero"], ["nothing"]),
    helper.make_node("Cast", ["nothing"], ["none"], to=TensorProto.INT64),
    helper.make_node("Add", ["none", "sizes"], ["shape"]),
    helper.make_node("Reshape", ["h", "shape"], ["wide"]),
    helper.make_node("Reshape", ["wide", "back"], ["m"]),
]
"""`m` is `h`, by way of a shape that is computed from contents: a break."""
CONSTANTS = tuple(
    numpy_helper.from_array(np.asarray(array), name)
    for name, array in (("sizes", np.array([4, 10])), ("back", np.array([-1, 5])), ("zero", np.float32(0)))
)


def classifier(middle: list | None = None, constants: tuple = ()) -> transmuter.Model:
    """softmax of tanh(x @ w1 + b1) @ w2; `middle` are nodes that give `m` from `h`."""
    random = np.random.default_rng(2)
    weights = {"w1": random.normal(size=(6, 5)), "b1": random.normal(size=5), "w2": random.normal(size=(5, 3))}
    tensors = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["xw"]),
        helper.make_node("Add", ["xw", "b1"], ["z"]),
        helper.make_node("Tanh", ["z"], ["h"]),
        *(middle or [helper.make_node("Identity", ["h"], ["m"])]),
        helper.make_node("MatMul", ["m", "w2"], ["logits"]),
    ]
    proto = model_of(nodes, [info("x", ("n", 6))], [info("logits", ("n", 3))], [*tensors, *constants])
    return transmuter.load(proto, trainable=True)


def by_hand(model: transmuter.Model, optimizer: optax.GradientTransformation, steps: int) -> tuple[dict, list[float]]:
    def loss(params):
        h = jnp.tanh(X @ params["w1"] + params["b1"])
        return optax.softmax_cross_entropy_with_integer_labels(h @ params["w2"], LABELS).mean()

    params, found = model.params, []
    state = optimizer.init(params)
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(value))
    return params, found


def trained(step: train.Step, steps: int, batch: dict = BATCH) -> tuple[train.TrainState, list[float]]:
    state, found = step.init(), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return state, found


@pytest.mark.parametrize("accumulate", [1, 4])
def test_steps_are_those_of_optax(accumulate):
    model = classifier()
    step = train.Step(model, losses.cross_entropy(), optax.adamw(1e-2), accumulate=accumulate)
    state, found = trained(step, 5)
    params, expected = by_hand(model, optax.adamw(1e-2), 5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert int(state.step) == 5
    for name, array in step.params(state).items():
        np.testing.assert_allclose(array, params[name], rtol=1e-4, atol=1e-6)
    assert step.params(state).keys() == model.params.keys()
    assert not any(array.is_deleted() for array in model.params.values())  # the state has copies


@pytest.mark.parametrize("compute_type", [None, "bfloat16"])
def test_a_loss_gets_outputs_in_the_graphs_order(compute_type):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["logits"]), helper.make_node("Relu", ["logits"], ["hidden"])]
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    proto = model_of(nodes, [info("x", ("n", 4))], [info("logits", None), info("hidden", None)], [weight])
    seen = []

    def loss(outputs, batch):
        seen.append(list(outputs))
        return outputs["logits"].mean()

    step = train.Step(transmuter.load(proto, trainable=True), loss, optax.sgd(1.0), compute_type=compute_type)
    step(step.init(), {"x": np.ones((2, 4), np.float32)})
    assert set(map(tuple, seen)) == {("logits", "hidden")}


def test_frozen_params_stay():
    model = classifier()
    step = train.Step(model, losses.cross_entropy(), optax.sgd(0.1), trainable="w2")
    state, _ = trained(step, 2)
    assert list(state.params) == ["w2"]
    after = step.params(state)
    np.testing.assert_array_equal(after["w1"], model.params["w1"])
    assert np.abs(after["w2"] - model.params["w2"]).max() > 1e-3


def test_gradients_flow_through_a_break():
    """The shape of a Reshape is computed from contents."""
    step = train.Step(
        classifier(BY_CONTENTS, CONSTANTS), losses.cross_entropy(), optax.adamw(1e-2), trainable=["w?", "b1"]
    )
    _, found = trained(step, 3)
    assert len(transmuter.compile(step.model, {"x": X}).segments) == 2
    np.testing.assert_allclose(found, by_hand(classifier(), optax.adamw(1e-2), 3)[1], rtol=1e-5)


def test_a_later_batch_may_reach_a_break():
    """From 8 rows on a branch is taken whose Reshape needs contents."""
    shape = helper.make_tensor_value_info("m", TensorProto.FLOAT, ["n", 5])
    as_it_is = helper.make_graph([helper.make_node("Identity", ["h"], ["m"])], "as_it_is", [], [shape])
    reshaped = helper.make_graph(BY_CONTENTS, "reshaped", [], [shape])
    middle = [
        helper.make_node("Shape", ["h"], ["rows"], end=1),
        helper.make_node("Less", ["rows", "eight"], ["few"]),
        helper.make_node("Squeeze", ["few"], ["condition"]),
        helper.make_node("If", ["condition"], ["m"], then_branch=as_it_is, else_branch=reshaped),
    ]
    constants = *CONSTANTS, numpy_helper.from_array(np.array([8]), "eight")
    step = train.Step(classifier(middle, constants), losses.cross_entropy(), optax.sgd(0.1), trainable=["w?", "b1"])
    plain = train.Step(classifier(), losses.cross_entropy(), optax.sgd(0.1))
    states = [step.init(), plain.init()]
    for rows in (3, 8, 3):
        batch = {"x": X[:rows], "labels": LABELS[:rows]}
        (states[0], found), (states[1], wanted) = (s(state, batch) for s, state in zip((step, plain), states))
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-5)


def test_a_step_that_is_not_finite_changes_nothing():
    model = classifier()
    step = train.Step(model, losses.cross_entropy(), optax.adamw(1e-2))
    state, _ = trained(step, 1)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, {"x": np.full_like(X, np.nan), "labels": LABELS})
    assert not metrics["finite"]
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, before, state.params)


def test_large_gradients_are_scaled():
    step = train.Step(classifier(), losses.cross_entropy(), optax.sgd(1.0), max_norm=1e-3)
    start = jax.tree.map(np.asarray, step.init().params)
    state, metrics = step(step.init(), BATCH)
    assert metrics["grad_norm"] > 1e-2
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, start)
    np.testing.assert_allclose(optax.tree.norm(moved), 1e-3, rtol=1e-3)


def test_several_devices_take_the_same_step():
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    flags["PYTHONPATH"] = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, __file__], env={**os.environ, **flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_several_devices() -> None:
    step = train.Step(classifier(), losses.cross_entropy(), optax.adamw(1e-2), devices=jax.devices())
    state, found = trained(step, 3)
    np.testing.assert_allclose(found, by_hand(step.model, optax.adamw(1e-2), 3)[1], rtol=1e-5)
    assert len(state.params["w1"].devices()) == 8
    with pytest.raises(transmuter.InputError, match="4 rows, which do not divide into 8"):
        step(state, {"x": X[:4], "labels": LABELS[:4]})
    options = {"compute_type": "bfloat16", "remat": "dots_saveable"}
    step = train.Step(classifier(), losses.cross_entropy(), optax.adamw(1e-2), devices=jax.devices(), **options)
    np.testing.assert_allclose(trained(step, 3)[1], found, rtol=0.01)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "batch is empty"),
        ({"labels": LABELS}, "no 'x', which is an input"),
        ({"x": X}, "no 'labels' for the loss"),
        ({"x": X[:0], "labels": LABELS[:0]}, "has no rows"),
        ({"x": X, "labels": LABELS[:, None]}, r"'labels' has the shape \[8, 1\]"),
        ({"x": X, "labels": LABELS.astype(np.float32)}, "classes are integers"),
        ({**BATCH, "texts": np.array(["a"] * 8)}, "'texts' in the batch is <U1, but a loss takes numbers"),
        ({**BATCH, "texts": np.array(["a"] * 8, object)}, "'texts' in the batch is object"),
        ({**BATCH, "masks": [[1, 1], [1]]}, "'masks' in the batch is no array but a list"),
        ({**BATCH, "extra": None}, "'extra' in the batch is no array but a NoneType"),
    ],
)
def test_a_bad_batch_is_named(batch, message):
    step = train.Step(classifier(), losses.cross_entropy(), optax.sgd(0.1))
    with pytest.raises(transmuter.InputError, match=message):
        step(step.init(), batch)


def test_a_batch_that_does_not_divide_is_named():
    step = train.Step(classifier(), losses.cross_entropy(), optax.sgd(0.1), accumulate=3)
    with pytest.raises(transmuter.InputError, match="8 rows, which do not divide into 3"):
        step(step.init(), BATCH)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (lambda logits: logits, r"shape \[8, 3\], but a loss is a scalar"),
        (lambda logits: logits.argmax(), "The loss is int32, which has no gradient"),
        (lambda logits: None, "The loss is NoneType, but a loss is a scalar"),
        (lambda logits: (logits.sum(), logits.sum(), {}), "The loss returns a tuple"),
        (lambda logits: (logits.sum(), {"parts": logits.sum(0)}), r"metric 'parts' has the shape \[3\]"),
        (lambda logits: (logits.sum(), {"kind": "mean"}), "metric 'kind' is str"),
        (lambda logits: (logits.sum(), {"loss": logits.sum()}), "a metric 'loss', which every step has itself"),
        (lambda logits: (logits.sum(), {"grad_norm": logits.sum()}), "a metric 'grad_norm'"),
        (lambda logits: (logits.sum(), {"finite": True}), "a metric 'finite'"),
    ],
)
def test_a_bad_loss_is_named(found, message):
    loss = lambda outputs, batch: found(outputs["logits"])
    step = train.Step(classifier(), loss, optax.sgd(0.1))
    with pytest.raises(transmuter.InputError, match=message):
        step(step.init(), BATCH)
    with pytest.raises(transmuter.InputError, match=message):
        train.Evaluator(step.model, loss)(step.model.params, [BATCH])


def doubles() -> transmuter.Model:
    """A float64 weight, and a constant of that type."""
    weights = [numpy_helper.from_array(np.full((6, 3), 0.1), "w"), numpy_helper.from_array(np.array(1.0), "one")]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Mul", ["a", "one"], ["logits"])]
    shapes = [info(name, ("n", size), TensorProto.DOUBLE) for name, size in (("x", 6), ("logits", 3))]
    return transmuter.load(model_of(nodes, shapes[:1], shapes[1:], weights), trainable=True)


def test_float64_params_are_trained_as_such_or_refused():
    model, optimizer = doubles(), optax.sgd(0.1)
    with pytest.raises(transmuter.InputError, match="param 'w' is float64, which JAX only trains with jax_enable_x64"):
        train.Step(model, losses.cross_entropy(), optimizer)
    with jax.enable_x64(True):
        step = train.Step(model, losses.cross_entropy(), optimizer)
        state, _ = step(step.init(), {"x": X.astype(np.float64), "labels": LABELS})
        assert state.params["w"].dtype == np.float64
        expected = jax.grad(
            lambda w: optax.softmax_cross_entropy_with_integer_labels(X.astype(np.float64) @ w, LABELS).mean()
        )(jnp.full((6, 3), 0.1))
        np.testing.assert_allclose(state.params["w"], 0.1 - 0.1 * expected, rtol=1e-12)


def test_a_model_that_takes_strings_is_trained():
    """What comes of them: a break. A loss does not see them."""
    attributes = {"ngram_counts": [0], "ngram_indexes": [0, 1, 2], "pool_strings": ["a", "b", "c"], "mode": "TF"}
    counts = helper.make_node(
        "TfIdfVectorizer", ["x"], ["t"], min_gram_length=1, max_gram_length=1, max_skip_count=0, **attributes
    )
    proto = model_of(
        [counts, helper.make_node("MatMul", ["t", "w"], ["logits"])],
        [info("x", ("n", "words"), TensorProto.STRING)],
        [info("logits", ("n", 3))],
        [numpy_helper.from_array(np.ones((3, 3), np.float32), "w")],
    )
    texts = [["a", "b"], ["b", "b"], ["c", "a"], ["c", "c"]]
    found = np.array([[text.count(word) for word in "abc"] for text in texts], np.float32)
    batch = {"x": np.array(texts), "labels": np.array([0, 1, 2, 0])}
    step = train.Step(transmuter.load(proto, trainable=True), losses.cross_entropy(), optax.sgd(1.0), accumulate=2)
    state, metrics = step(step.init(), batch)
    assert float(metrics["loss"]) == pytest.approx(np.log(3), rel=1e-6)
    expected = found.T @ (np.full((4, 3), 1 / 3) - np.eye(3)[batch["labels"]]) / 4
    np.testing.assert_allclose(state.params["w"], 1 - expected, atol=1e-6)
    assert train.Evaluator(step.model, step.loss)(step.params(state), [batch])["loss"] < np.log(3)


if __name__ == "__main__":
    check_several_devices()

"""Dropout and batch statistics in graphs that were exported without them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from building import info, model_of
from onnx import helper, numpy_helper

import transmuter
from transmuter import train
from transmuter.train import losses

RANDOM = np.random.default_rng(0)


def weight(name: str, *shape: int) -> object:
    return numpy_helper.from_array(RANDOM.normal(size=shape).astype(np.float32) / 4, name)


def encoder(opset: int = 11) -> transmuter.Model:
    """One layer of self-attention, with a residual around it and around a dense layer."""
    nodes = [
        *(helper.make_node("MatMul", ["x", f"w{r}"], [r]) for r in "qkv"),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=2),
        helper.make_node("MatMul", ["weights", "v"], ["mixed"]),
        helper.make_node("Add", ["mixed", "x"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["hw"]),
        helper.make_node("Add", ["b", "hw"], ["dense"]),
        helper.make_node("Add", ["h", "dense"], ["y"]),
    ]
    weights = [weight(n, 8, 8) for n in ("wq", "wk", "wv", "w")] + [weight("b", 8)]
    proto = model_of(nodes, [info("x", ("n", "s", 8))], [info("y", ("n", "s", 8))], weights, opset=opset)
    return transmuter.load(proto, trainable=True)


X = RANDOM.normal(size=(64, 4, 8)).astype(np.float32)


def test_dropout_is_inserted_and_drawn_anew():
    model = encoder()
    dropped = train.with_dropout(model, attention=0.1, dense=0.2)
    assert dropped.operators["transmuter.train::Dropout"] == 2
    assert dropped.params.keys() == model.params.keys()
    assert "transmuter.train::Dropout" not in model.operators
    run = jax.jit(
        lambda key: dropped.apply(dropped.params, {"x": X}, key=key, outputs=["weights", "y", "weights/dropped"])
    )
    first, again, other = run(jax.random.key(0)), run(jax.random.key(0)), run(jax.random.key(1))
    np.testing.assert_array_equal(first["y"], again["y"])
    assert np.abs(first["y"] - other["y"]).max() > 0.1
    kept = np.asarray(first["weights/dropped"]) != 0
    np.testing.assert_allclose(kept.mean(), 0.9, atol=0.02)
    np.testing.assert_allclose(first["weights/dropped"][kept], first["weights"][kept] / 0.9, rtol=1e-5)


def test_the_mean_stays():
    model = encoder()
    dropped = train.with_dropout(model, dense=0.5)
    run = jax.vmap(lambda key: dropped.apply(dropped.params, {"x": X[:2]}, key=key)["y"])
    mean = np.mean(run(jax.random.split(jax.random.key(0), 1000)), 0)
    np.testing.assert_allclose(mean, model.apply(model.params, {"x": X[:2]})["y"], atol=0.15)


def test_places_and_shares_are_checked():
    model = encoder()
    with pytest.raises(transmuter.InputError, match="dense=1"):
        train.with_dropout(model, dense=1)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    plain = transmuter.load(model_of(nodes, [info("x", ("n", 8))], [info("y", ("n", 8))], [weight("w", 8, 8)]))
    for place in ("attention", "dense"):
        with pytest.raises(transmuter.InputError, match=f"no place for {place} dropout"):
            train.with_dropout(plain, **{place: 0.1})


def normalised(opset: int, results: list[str] | None = None, **attributes: int) -> transmuter.Model:
    """A convolution, and BatchNormalization with these `results`, of which the further ones are outputs."""
    results = results or ["n"]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node(
            "BatchNormalization",
            ["c", "scale", "bias", "mean", "var"],
            results,
            epsilon=1e-3,
            momentum=0.8,
            **attributes,
        ),
        helper.make_node("GlobalAveragePool", ["n"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    weights = [weight("w", 3, 2, 1, 1), weight("scale", 3), weight("bias", 3), weight("mean", 3)]
    weights.append(numpy_helper.from_array(np.array([0.5, 1, 2], np.float32), "var"))
    outputs = [info("y", ("n", 3)), *(info(name, (3,)) for name in results[1:] if name)]
    proto = model_of(nodes, [info("x", ("n", 2, 4, 4))], outputs, weights, opset=opset)
    return transmuter.load(proto, trainable=True)


IMAGES = RANDOM.normal(size=(5, 2, 4, 4)).astype(np.float32) * 2 + 1


@pytest.mark.parametrize("opset", [9, 17])
def test_batch_statistics_are_those_of_the_batch(opset):
    model = normalised(opset)
    training, statistics = train.with_batch_statistics(model)
    assert statistics.keys() == {"mean", "var"}
    found = training.apply(model.params, {"x": IMAGES}, outputs=["c", "n", *statistics.values()])
    c = np.asarray(found["c"])
    mean, var = c.mean((0, 2, 3)), c.var((0, 2, 3))
    p = {k: np.asarray(v) for k, v in model.params.items()}
    np.testing.assert_allclose(found[statistics["mean"]], 0.8 * p["mean"] + 0.2 * mean, rtol=1e-4)
    np.testing.assert_allclose(found[statistics["var"]], 0.8 * p["var"] + 0.2 * var, rtol=1e-4)
    per = lambda v: v[:, None, None]
    expected = (c - per(mean)) / np.sqrt(per(var) + 1e-3) * per(p["scale"]) + per(p["bias"])
    np.testing.assert_allclose(found["n"], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("opset", "results", "attributes"),
    [
        (17, ["n", "new_mean", "new_var"], {"training_mode": 1}),
        (17, ["n", "", "new_var"], {"training_mode": 1}),
        (9, ["n", "new_mean", "new_var"], {}),
    ],
)
def test_nodes_that_train_already_keep_their_outputs(opset, results, attributes):
    model = normalised(opset, results, **attributes)
    training, statistics = train.with_batch_statistics(model)
    expected = model.apply(model.params, {"x": IMAGES})
    found = training.apply(model.params, {"x": IMAGES}, outputs=[*model.outputs, *statistics.values()])
    assert statistics["var"] == "new_var"
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    other, _ = train.with_batch_statistics(normalised(opset))
    np.testing.assert_array_equal(found["y"], other.apply(model.params, {"x": IMAGES})["y"])


def test_saved_statistics_that_are_used_are_named():
    model = normalised(9, ["n", "new_mean", "new_var", "saved_mean", "saved_var"])
    with pytest.raises(transmuter.InputError, match="'saved_mean', a saved statistic"):
        train.with_batch_statistics(model)


def test_steps_move_running_statistics_and_train_nothing_of_them(tmp_path):
    model = normalised(17)
    training, statistics = train.with_batch_statistics(model)
    labels = np.array([0, 1, 2, 0, 1])
    step = train.Step(training, losses.cross_entropy(), optax.sgd(0.05), statistics=statistics)
    state = step.init()
    assert state.params.keys() == {"w", "scale", "bias"}
    for _ in range(60):
        state, metrics = step(state, {"x": IMAGES, "labels": labels})
    params = step.params(state)
    c = np.asarray(model.apply(params, {"x": IMAGES}, outputs=["c"])["c"])
    np.testing.assert_allclose(params["mean"], c.mean((0, 2, 3)), atol=0.05)
    np.testing.assert_allclose(params["var"], c.var((0, 2, 3)), rtol=0.1)
    loss, _ = losses.cross_entropy()(model.apply(params, {"x": IMAGES}), {"labels": labels})
    np.testing.assert_allclose(loss, metrics["loss"], atol=0.05)  # by running statistics, as by those of the batch
    model.save(tmp_path / "tuned.onnx", params=params)
    again = transmuter.load(tmp_path / "tuned.onnx", trainable=True).params
    jax.tree.map(np.testing.assert_array_equal, dict(again), {k: jnp.asarray(v) for k, v in params.items()})


def test_statistics_need_nodes_and_params():
    with pytest.raises(transmuter.InputError, match="has no BatchNormalization"):
        train.with_batch_statistics(encoder())
    model = transmuter.load(model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x")], [info("y")]))
    with pytest.raises(transmuter.InputError, match="trainable=True"):
        train.with_batch_statistics(model)

"""A graph as a layer of a Flax NNX network."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from building import info, model_of
from flax import nnx
from onnx import helper, numpy_helper

import transmuter
from transmuter import train

X = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)


def model() -> transmuter.Model:
    """tanh(x @ w) + x, with a weight whose name is no Python name."""
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_1"], ["h"]),
        helper.make_node("Mul", ["h", "/scale"], ["s"]),
        helper.make_node("Tanh", ["s"], ["t"]),
        helper.make_node("Add", ["x", "t"], ["y"]),
    ]
    arrays = {"onnx::MatMul_1": np.random.default_rng(1).normal(size=(6, 6)), "/scale": np.ones(6)}
    weights = [numpy_helper.from_array(a.astype(np.float32), n) for n, a in arrays.items()]
    return transmuter.load(model_of(nodes, [info("x", ("n", 6))], [info("y", ("n", 6))], weights), trainable=True)


class Network(nnx.Module):
    def __init__(self, body: nnx.Module, rngs: nnx.Rngs):
        self.body, self.head = body, nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x)["y"])


@nnx.jit
def step(network, optimizer, x, labels):
    def loss(network):
        return optax.softmax_cross_entropy_with_integer_labels(network(x), labels).mean()

    value, grads = nnx.value_and_grad(loss)(network)
    optimizer.update(network, grads)
    return value


def test_a_graph_is_a_layer_that_trains(tmp_path):
    original = model()
    network = Network(train.as_nnx(original, trainable="onnx*"), nnx.Rngs(0))
    np.testing.assert_allclose(network.body(X)["y"], original.apply(original.params, {"x": X})["y"], rtol=1e-6)
    optimizer = nnx.Optimizer(network, optax.adam(0.05), wrt=nnx.Param)
    values = [float(step(network, optimizer, X, np.arange(5) % 3)) for _ in range(30)]
    assert values[-1] < values[0] / 3
    params = train.nnx.params_of(network.body)
    assert params.keys() == original.params.keys()
    assert np.abs(params["onnx::MatMul_1"] - original.params["onnx::MatMul_1"]).max() > 0.01
    np.testing.assert_array_equal(params["/scale"], 1)
    original.save(tmp_path / "tuned.onnx", params=params)
    tuned = transmuter.load(tmp_path / "tuned.onnx")
    np.testing.assert_allclose(transmuter.run(tuned, {"x": X})["y"], network.body(x=X)["y"], rtol=1e-5)


def test_inputs_by_name_and_inner_values():
    body = train.as_nnx(model(), outputs=["t"])
    given = [body(X), body({"x": X}), body(x=X)]
    assert [list(found) for found in given] == [["t"]] * 3
    with pytest.raises(transmuter.InputError, match="no value"):
        train.as_nnx(model(), outputs=["z"])(X)


def test_dropout_draws_from_the_modules_keys():
    dropped = train.with_dropout(model_with_residual(), dense=0.5)
    body = train.as_nnx(dropped, rngs=nnx.Rngs(dropout=0))
    first, second = body(X)["y"], body(X)["y"]
    assert np.abs(first - second).max() > 0.1


def model_with_residual() -> transmuter.Model:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["x", "h"], ["y"])]
    weights = [numpy_helper.from_array(np.eye(6, dtype=np.float32), "w")]
    return transmuter.load(model_of(nodes, [info("x", ("n", 6))], [info("y", ("n", 6))], weights), trainable=True)


def test_a_module_splits_and_merges():
    body = train.as_nnx(model(), trainable="onnx*")
    graph, params, rest = nnx.split(body, nnx.Param, ...)
    assert len(jax.tree.leaves(params)) == 1
    again = nnx.merge(graph, params, rest)
    np.testing.assert_array_equal(again(X)["y"], body(X)["y"])

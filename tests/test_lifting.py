"""Constants of local functions that keep an opset of their own: params, in the file too."""

from __future__ import annotations

import jax
import numpy as np
import onnx
import onnxruntime
from building import info, model_of
from onnx import TensorProto, helper, numpy_helper

import transmuter

RANDOM = np.random.default_rng(0)
ARRAYS = {name: RANDOM.normal(size=(5, 5)).astype(np.float32) / 2 for name in "wvu"}
X = RANDOM.normal(size=(3, 5)).astype(np.float32)
LOCAL = helper.make_opsetid("local", 1)


def constant(name: str) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(ARRAYS[name], name))


def function(name: str, nodes: list, inputs: list[str], *imports: onnx.OperatorSetIdProto) -> onnx.FunctionProto:
    return helper.make_function("local", name, inputs, ["b"], nodes, [helper.make_opsetid("", 11), *imports])


def branch(op: str) -> onnx.GraphProto:
    nodes = [constant("u"), helper.make_node("MatMul", ["h", "u"], ["r"]), helper.make_node(op, ["r"], ["s"])]
    return helper.make_graph(nodes, op, [], [info("s", None)])


def nested() -> onnx.ModelProto:
    """F calls G twice and has a branch; the graph calls both. G has an input that no call gives."""
    call = lambda source, result: helper.make_node("G", [source], [result], domain="local")
    g = function("G", [constant("w"), helper.make_node("MatMul", ["a", "w"], ["b"])], ["a", "absent"])
    body = [
        constant("v"),
        call("a", "g"),
        call("g", "gg"),
        helper.make_node("MatMul", ["gg", "v"], ["h"]),
        helper.make_node("ReduceSum", ["h"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["condition"], to=TensorProto.BOOL),
        helper.make_node("If", ["condition"], ["i"], then_branch=branch("Tanh"), else_branch=branch("Neg")),
        helper.make_node("Add", ["h", "i"], ["b"]),
    ]
    nodes = [helper.make_node("F", ["x"], ["f"], domain="local"), call("f", "y")]
    opsets = [helper.make_opsetid("", 18), LOCAL]
    functions = [function("F", body, ["a"], LOCAL), g]
    return model_of(nodes, [info("x", ("n", 5))], [info("y", ("n", 5))], opset_imports=opsets, functions=functions)


def in_onnx_runtime(source: str | bytes) -> np.ndarray:
    return onnxruntime.InferenceSession(source).run(None, {"x": X})[0]


def test_they_are_params_with_gradients_and_come_back(tmp_path):
    proto = nested()
    model = transmuter.load(proto, trainable=True)
    w, v, _, u = names = ["local/G/w", "local/F/v", "local/F/u", "local/F/u_"]  # of the branches, "else" is the first
    assert set(model.params) == set(names)
    for run in (transmuter.compile(model), lambda x: transmuter.run(model, x)):
        np.testing.assert_allclose(run({"x": X})["y"], in_onnx_runtime(proto.SerializeToString()), rtol=1e-5, atol=1e-6)

    def by_hand(p):
        h = X @ p[w] @ p[w] @ p[v]
        return (((h + jax.numpy.tanh(h @ p[u])) @ p[w]) ** 2).mean()

    found = jax.grad(lambda p: (model.apply(p, {"x": X})["y"] ** 2).mean())(model.params)
    expected = jax.grad(by_hand)({name: model.params[name] for name in (w, v, u)})
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-5)

    changed = {name: array * 0.5 for name, array in model.params.items()}
    model.save(tmp_path / "tuned.onnx", params=changed)
    expected = model.apply(changed, {"x": X})["y"]
    np.testing.assert_allclose(in_onnx_runtime(str(tmp_path / "tuned.onnx")), expected, rtol=1e-5, atol=1e-6)
    again = transmuter.load(tmp_path / "tuned.onnx", trainable=True)
    assert set(again.params) == set(names)
    np.testing.assert_allclose(transmuter.run(again, {"x": X})["y"], expected, rtol=1e-6)

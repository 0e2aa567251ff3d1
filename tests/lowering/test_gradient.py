"""Gradient of ai.onnx.preview.training: what the specification's page describes, against derivatives by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from building import info, model_of
from onnx import TensorProto, helper, numpy_helper

import transmuter

TRAINING = "ai.onnx.preview.training"
W, X = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32), np.array([[2.0, 1.0]], np.float32)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, domain=TRAINING if op == "Gradient" else "", **attributes)


def loaded(
    nodes: list[onnx.NodeProto], outputs: Sequence[str], inputs: Sequence[str] = ("x",), **kwargs: Any
) -> transmuter.Model:
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(TRAINING, 1)]
    return transmuter.load(
        model_of(
            nodes,
            [info(name, None) for name in inputs],
            [info(name, None) for name in outputs],
            opset_imports=imports,
            **kwargs,
        )
    )


def results(model: transmuter.Model, **inputs: np.ndarray) -> list[list[np.ndarray]]:
    """The outputs from `run` and from `compile`."""
    both = transmuter.run(model, inputs), transmuter.compile(model)(inputs)
    return [[np.asarray(y) for y in outputs.values()] for outputs in both]


SQUARES = [
    node("MatMul", ["x", "w"], ["h"]),
    node("Mul", ["h", "h"], ["squares"]),
    node("ReduceSum", ["squares"], ["y"], keepdims=0),
]


def test_derivatives_with_respect_to_a_weight_and_an_input() -> None:
    model = loaded(
        [*SQUARES, node("Gradient", ["w", "x"], ["dw", "dx"], xs=["w", "x"], y="y")],
        ["y", "dw", "dx"],
        initializers=[numpy_helper.from_array(W, "w")],
    )
    for y, dw, dx in results(model, x=X):
        np.testing.assert_allclose(y, np.sum((X @ W) ** 2))
        np.testing.assert_allclose(dw, X.T @ (2 * X @ W))
        np.testing.assert_allclose(dx, 2 * (X @ W) @ W.T)


def test_a_weight_that_is_not_named_is_captured() -> None:
    model = loaded(
        [*SQUARES, node("Gradient", ["x"], ["dx"], xs=["x"], y="y")],
        ["dx"],
        initializers=[numpy_helper.from_array(W, "w")],
    )
    for (dx,) in results(model, x=X):
        np.testing.assert_allclose(dx, 2 * (X @ W) @ W.T)


def test_an_intermediate_value_at_another_place_and_an_output_that_nobody_wants() -> None:
    """Y = H * Z, at another H and Z than the graph's own."""
    nodes = [
        node("Add", ["x", "x"], ["h"]),
        node("Mul", ["h", "z"], ["y"]),
        node("Gradient", ["h1", "z1"], ["", "dz"], xs=["h", "z"], y="y"),
        node("Gradient", ["h1", "z1"], ["dh"], xs=["h"], zs=["z"], y="y"),
    ]
    model = loaded(nodes, ["dz", "dh"], inputs=["x", "z", "h1", "z1"])
    one = np.ones(3, np.float32)
    for dz, dh in results(model, x=one, z=one, h1=5 * one, z1=7 * one):
        np.testing.assert_array_equal(dz, 5 * one)
        np.testing.assert_array_equal(dh, 7 * one)


def test_second_derivatives_and_values_that_do_not_matter() -> None:
    nodes = [
        node("Mul", ["x", "x"], ["xx"]),
        node("Mul", ["xx", "x"], ["y"]),
        node("Gradient", ["x", "u"], ["dx", "du"], xs=["x", "u"], y="y"),
        node("Gradient", ["x"], ["ddx"], xs=["x"], y="dx"),
    ]
    x = np.array([2.0, -3.0], np.float32)
    for dx, du, ddx in results(loaded(nodes, ["dx", "du", "ddx"], inputs=["x", "u"]), x=x, u=x):
        np.testing.assert_allclose(dx, 3 * x**2)
        np.testing.assert_array_equal(du, 0 * x)
        np.testing.assert_allclose(ddx, 6 * x)


def test_it_stands_in_a_branch_behind_a_break_and_under_transforms() -> None:
    nodes = [
        node("NonZero", ["x"], ["at"]),
        node("Transpose", ["at"], ["places"]),
        node("GatherND", ["x", "places"], ["found"]),
        node("Mul", ["found", "found"], ["squares"]),
        node("ReduceSum", ["squares"], ["y"], keepdims=0),
        node("Gradient", ["x"], ["dx"], xs=["x"], y="y"),
    ]
    x = np.array([2.0, 0.0, -3.0], np.float32)
    for (dx,) in results(loaded(nodes, ["dx"]), x=x):
        np.testing.assert_allclose(dx, 2 * x)

    inner = [node("Mul", ["x", "x"], ["xx"]), node("Gradient", ["x"], ["inner_dx"], xs=["x"], y="xx")]
    branches = [
        helper.make_graph(nodes, name, [], [info(output, None)])
        for name, nodes, output in (
            ("then", inner, "inner_dx"),
            ("else", [node("Identity", ["x"], ["same"])], "same"),
        )
    ]
    choice = helper.make_node("If", ["c"], ["dx"], then_branch=branches[0], else_branch=branches[1])
    source = model_of(
        [choice],
        [info("x", (3,)), info("c", (), TensorProto.BOOL)],
        [info("dx", (3,))],
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(TRAINING, 1)],
    )
    model = transmuter.load(source)
    for condition, wanted in ((True, 2 * x), (False, x)):
        for (dx,) in results(model, x=x, c=np.array(condition)):
            np.testing.assert_allclose(dx, wanted)

    def slope(x: jax.Array, c: Any) -> jax.Array:
        return jnp.sum(model.apply({}, {"x": x, "c": c})["dx"])

    np.testing.assert_allclose(jax.jit(jax.grad(slope))(x, np.array(True)), [2, 2, 2])
    np.testing.assert_allclose(jax.vmap(lambda x: slope(x, np.array(True)))(np.stack([x, 2 * x])), [-2, -4])


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"xs": ["x"], "y": "nothing"}, "'nothing'"),
        ({"xs": ["x", "x2"], "y": "y"}, "names 2 for 1"),
        ({"xs": ["x"], "y": "dx"}, "own result"),
        ({"xs": ["x"]}, "lacks the attribute 'y'"),
    ],
)
def test_names_that_the_graph_does_not_have(attributes: dict[str, Any], message: str) -> None:
    model = loaded([node("Mul", ["x", "x"], ["y"]), node("Gradient", ["x"], ["dx"], **attributes)], ["dx"])
    with pytest.raises(transmuter.ModelError, match=message):
        transmuter.run(model, {"x": X})

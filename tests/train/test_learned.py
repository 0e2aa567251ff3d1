"""What is trained where nobody chooses: not the constants that exporters make initializers of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import optax
import pytest
from building import info, model_of
from onnx import helper, numpy_helper

import transmuter
from transmuter import train
from transmuter.train import losses
from transmuter.train.learned import learned

PARITY = Path(__file__).with_name("parity")
NOTES = """
# inputs
p_dense_weight: PARAMETER target='dense.weight'
p_temperature: PARAMETER target='temperature'
b_table: BUFFER target='table' persistent=False
c_lifted: CONSTANT_TENSOR target='lifted_tensor_0'
x: USER_INPUT
"""
LAYERS = {"folded_weight": (4, 1), "bias": (1,), "slope": (1,)}
NUMBERS = {"epsilon": (), "half": (1, 1), "temperature": ()}
TABLES = {"table": (3,), "lifted_tensor_0": (3,), "folded_table": (3,)}
SHAPES = LAYERS | NUMBERS | TABLES


def graph(*, noted: bool) -> onnx.ModelProto:
    """prelu(x @ weight + bias), normed, times a temperature, plus tables; with the notes of PyTorch's exporter."""
    nodes = [
        helper.make_node("MatMul", ["x", "folded_weight"], ["xw"]),
        helper.make_node("Add", ["bias", "xw"], ["dense"]),
        helper.make_node("PRelu", ["dense", "slope"], ["active"]),
        helper.make_node("Mul", ["active", "active"], ["square"]),
        helper.make_node("Add", ["square", "epsilon"], ["shifted"]),
        helper.make_node("Pow", ["shifted", "half"], ["size"]),
        helper.make_node("Div", ["active", "size"], ["normed"]),
        helper.make_node("Mul", ["normed", "temperature"], ["scaled"]),
        *(
            helper.make_node("Add", [a, b], [c])
            for a, b, c in (("scaled", "table", "s"), ("s", "lifted_tensor_0", "t"))
        ),
        helper.make_node("Add", ["t", "folded_table"], ["logits"]),
    ]
    random = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random.uniform(1, 2, s).astype(np.float32), name) for name, s in SHAPES.items()]
    proto = model_of(nodes, [info("x", ("n", 4))], [info("logits", ("n", 3))], weights)
    if noted:
        proto.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value=NOTES)
        for name, origin in (("folded_weight", "dense.weight"), ("folded_table", "table")):
            value = proto.graph.value_info.add()
            value.CopyFrom(info(name, SHAPES[name]))
            value.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=f"['val_1', '{origin}']")
    return proto


@pytest.mark.parametrize(("noted", "expected"), [(True, {*LAYERS, "temperature"}), (False, {*LAYERS, *TABLES})])
def test_constants_are_left(noted, expected):
    model = transmuter.load(graph(noted=noted), trainable=True)
    assert model.params.keys() == SHAPES.keys()
    assert learned(model) == expected
    assert train.Step(model, losses.regression(), optax.sgd(1)).init().params.keys() == expected
    assert train.as_nnx(model).params.keys() == expected
    assert train.Step(model, losses.regression(), optax.sgd(1), trainable="*").init().params.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", ["cross_encoder", "resnet", "language_model"])
@pytest.mark.parametrize("noted", [True, False])
def test_of_pytorchs_exports_its_parameters(name, noted):
    proto = onnx.load(PARITY / f"{name}.onnx")
    if not noted:
        del proto.graph.metadata_props[:]
    model = transmuter.load(proto, trainable=True)
    homes = set(np.load(PARITY / f"{name}.npz")["homes"][:, 1].tolist())
    assert learned(model) == homes & model.params.keys()
    assert model.params.keys() - homes


def test_where_all_may_be_constants_one_has_to_choose():
    nodes = [helper.make_node("Mul", ["x", "scale"], ["y"])]
    proto = model_of(nodes, [info("x", ("n",))], [info("y", ("n",))], [numpy_helper.from_array(np.float32(2), "scale")])
    model = transmuter.load(proto, trainable=True)
    with pytest.raises(transmuter.InputError, match="Name what is to be trained"):
        train.Step(model, losses.regression(), optax.sgd(1))
    with pytest.raises(transmuter.InputError, match="No param matches"):
        train.Step(model, losses.regression(), optax.sgd(1), trainable=[])
    assert train.Step(model, losses.regression(), optax.sgd(1), trainable="scale").init().params.keys() == {"scale"}

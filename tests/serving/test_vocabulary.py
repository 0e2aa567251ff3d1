"""How many embeddings a graph has, and which tokens it looks for."""

from __future__ import annotations

import numpy as np
import pytest
from building import info, model_of
from onnx import NodeProto, TensorProto, helper, numpy_helper
from tiny_repositories import encoder

import transmuter
from transmuter.serving.vocabulary import embedding_rows, gathered_tokens

TABLE = np.ones((7, 4), np.float32)


def _rows(nodes: list[NodeProto], table: np.ndarray = TABLE) -> int | None:
    inputs = [info("input_ids", ("batch", "sequence"), TensorProto.INT64)]
    initializers = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.float32(0.5), "scale")]
    return embedding_rows(transmuter.load(model_of(nodes, inputs, [info("y", None)], initializers)))


def _node(operator: str, inputs: str, output: str, **attributes: object) -> NodeProto:
    return helper.make_node(operator, inputs.split(), [output], **attributes)


@pytest.mark.parametrize(
    ("nodes", "table"),
    [
        ([_node("Gather", "table input_ids", "y")], TABLE),
        ([_node("Cast", "input_ids", "i", to=TensorProto.INT32), _node("Gather", "table i", "y")], TABLE),
        ([_node("Transpose", "table", "t", perm=[1, 0]), _node("Gather", "t input_ids", "y")], TABLE.T.copy()),
        ([_node("DequantizeLinear", "table scale", "t"), _node("Gather", "t input_ids", "y")], TABLE.astype(np.uint8)),
    ],
)
def test_rows(nodes: list[NodeProto], table: np.ndarray) -> None:
    assert _rows(nodes, table) == 7


@pytest.mark.parametrize(
    "nodes",
    [
        [_node("Gather", "table input_ids", "y", axis=1)],
        [_node("Identity", "input_ids", "y")],
        [_node("Shape", "input_ids", "s"), _node("ConstantOfShape", "s", "t"), _node("Gather", "t input_ids", "y")],
    ],
)
def test_what_is_no_table(nodes: list[NodeProto]) -> None:
    assert _rows(nodes) is None


def test_an_encoder() -> None:
    model = transmuter.load(encoder(33))
    assert embedding_rows(model) == 33
    assert embedding_rows(model, "token_type_ids") == 2
    assert embedding_rows(model, "none") is None


def _gathered(nodes: list[NodeProto]) -> tuple[int, ...]:
    inputs = [info("input_ids", ("batch", "sequence"), TensorProto.INT64)]
    return gathered_tokens(transmuter.load(model_of(nodes, inputs, [info("y", None)], [])))


def test_tokens_that_are_gathered() -> None:
    nodes = [_node("Constant", "", "end", value_int=2), _node("Equal", "input_ids end", "is_end")]
    assert _gathered([*nodes, _node("Cast", "is_end", "c", to=TensorProto.INT64), _node("NonZero", "c", "y")]) == (2,)
    assert _gathered([*nodes, _node("Identity", "is_end", "y")]) == ()
    assert _gathered([_node("NonZero", "input_ids", "y")]) == ()

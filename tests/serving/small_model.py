"""A model with one layer of attention, and a task on lists of tokens: what the runtime's tests serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from transmuter.errors import InputError
from transmuter.serving.batching import Outputs, Row

VOCABULARY, HIDDEN, POSITIONS = 50, 16, 64
_RANDOM = np.random.RandomState(0)
_WEIGHTS = {
    "tokens": _RANDOM.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32),
    "places": _RANDOM.standard_normal((POSITIONS, HIDDEN)).astype(np.float32),
    "types": _RANDOM.standard_normal((2, HIDDEN)).astype(np.float32),
    "query": (_RANDOM.standard_normal((HIDDEN, HIDDEN)) / HIDDEN**0.5).astype(np.float32),
}


def attention(
    *,
    inputs: Sequence[str] = ("input_ids", "attention_mask", "token_type_ids"),
    dims: tuple[Any, Any] = ("batch", "sequence"),
    output_dims: tuple[Any, ...] = ("batch", "sequence", HIDDEN),
) -> ModelProto:
    """`last_hidden_state`, of tokens that attend to those whose mask is 1, and `pooled`, of the first token."""
    weights = {**_WEIGHTS, "lowest": np.float32(-1e9), "one": np.float32(1)}
    arrays = [numpy_helper.from_array(np.asarray(w), name) for name, w in weights.items()]
    arrays += [
        numpy_helper.from_array(np.asarray(w, np.int64), name)
        for name, w in {"zero": 0, "step": 1, "axis": [1], "seconds": 1}.items()
    ]
    node = helper.make_node
    nodes = [
        node("Gather", ["tokens", "input_ids"], ["embedded"]),
        node("Shape", ["input_ids"], ["shape"]),
        node("Gather", ["shape", "seconds"], ["length"]),
        node("Range", ["zero", "length", "step"], ["counted"]),
        node("Gather", ["places", "position_ids" if "position_ids" in inputs else "counted"], ["placed"]),
        node("Add", ["embedded", "placed"], ["summed"]),
    ]
    x = "summed"
    if "token_type_ids" in inputs:
        nodes += [node("Gather", ["types", "token_type_ids"], ["typed"]), node("Add", [x, "typed"], ["x"])]
        x = "x"
    nodes += [
        node("MatMul", [x, "query"], ["queries"]),
        node("Transpose", [x], ["keys"], perm=[0, 2, 1]),
        node("MatMul", ["queries", "keys"], ["scores"]),
    ]
    scores = "scores"
    if "attention_mask" in inputs:
        nodes += [
            node("Cast", ["attention_mask"], ["attended"], to=TensorProto.FLOAT),
            node("Sub", ["one", "attended"], ["hidden_ones"]),
            node("Mul", ["hidden_ones", "lowest"], ["lowered"]),
            node("Unsqueeze", ["lowered", "axis"], ["mask"]),
            node("Add", ["scores", "mask"], ["masked"]),
        ]
        scores = "masked"
    nodes += [
        node("Softmax", [scores], ["shares"], axis=-1),
        node("MatMul", ["shares", x], ["mixed"]),
        node("Tanh", ["mixed"], ["last_hidden_state"]),
        node("Gather", ["last_hidden_state", "zero"], ["pooled"], axis=1),
    ]
    kinds = [helper.make_tensor_value_info(name, TensorProto.INT64, dims) for name in inputs]
    outputs = [
        helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, output_dims),
        helper.make_tensor_value_info("pooled", TensorProto.FLOAT, (dims[0], HIDDEN)),
    ]
    graph = helper.make_graph(nodes, "attention", kinds, outputs, arrays)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def row(ids: Sequence[int], **others: Any) -> Row:
    """A row of these tokens."""
    return Row({"input_ids": np.asarray(ids, np.int64), **{name: np.asarray(x) for name, x in others.items()}})


def alone(ids: Sequence[int], types: Sequence[int] | None = ()) -> Outputs:
    """The outputs for these tokens by themselves, in NumPy; without token types where those are None."""
    x = _WEIGHTS["tokens"][list(ids)] + _WEIGHTS["places"][: len(ids)]
    if types is not None:
        x = x + _WEIGHTS["types"][list(types) or [0] * len(ids)]
    scores = x @ _WEIGHTS["query"] @ x.T
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    states = np.tanh(shares / shares.sum(-1, keepdims=True) @ x)
    return {"last_hidden_state": states, "pooled": states[0]}


class Tokens:
    """A task on tuples of tokens: the mean of what the model says of them; with `parts`, a row for each so many."""

    def rows(self, item: tuple[int, ...], *, parts: int = 10**6, scale: float = 1.0) -> tuple[list[Row], float]:
        if not isinstance(item, tuple):
            raise InputError(f"The input is a {type(item).__name__}. Give a tuple.")
        return [row(item[i : i + parts]) for i in range(0, len(item), parts)], scale

    def result(self, context: float, outputs: list[Outputs]) -> np.ndarray:
        if not outputs:
            return np.zeros(HIDDEN, np.float32)
        return context * np.concatenate([found["last_hidden_state"] for found in outputs]).mean(0)

"""Short forms for building ONNX models in tests."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper


def info(name: str, shape: object = (None, 64), element: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, shape)


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
    opset: int = 18,
    **kwargs: object,
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, initializers)
    kwargs.setdefault("opset_imports", [helper.make_opsetid("", opset)])
    return helper.make_model(graph, ir_version=kwargs.pop("ir_version", 9), **kwargs)

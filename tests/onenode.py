"""One-node models: an operator alone, through Transmuter, ONNX Runtime and the reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import transmuter


def one_node(
    op: str,
    inputs: Sequence[Any],
    attributes: Mapping[str, Any] | None = None,
    *,
    outputs: int = 1,
    opset: int = 23,
    domain: str = "",
    known: Sequence[int] = (),
    output_types: Sequence[int] | None = None,
) -> onnx.ModelProto:
    """A model of one node. `inputs` are arrays (None for an absent operand); those at the positions `known` become
    initializers. `output_types` are the outputs' element types, by default that of the first input."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    node = helper.make_node(op, names, [f"y{i}" for i in range(outputs)], domain=domain, **(attributes or {}))
    first = next((helper.np_dtype_to_tensor_dtype(x.dtype) for x in inputs if x is not None), onnx.TensorProto.FLOAT)
    types = output_types or [first] * outputs
    graph = helper.make_graph(
        [node],
        "one_node",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for i, (n, x) in enumerate(zip(names, inputs, strict=True))
            if x is not None and i not in known
        ],
        [helper.make_tensor_value_info(f"y{i}", t, None) for i, t in enumerate(types)],
        [numpy_helper.from_array(inputs[i], names[i]) for i in known],
    )
    imports = [helper.make_opsetid("", opset)]
    if domain:
        imports.append(helper.make_opsetid(domain, 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run_node(
    op: str,
    inputs: Sequence[Any],
    attributes: Mapping[str, Any] | None = None,
    *,
    compiled: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """The node's outputs from `transmuter.run` (or `compile`), as NumPy arrays."""
    model = transmuter.load(one_node(op, inputs, attributes, **kwargs), compute_type=None)
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in kwargs.get("known", ())}
    outputs = transmuter.compile(model, feeds)(feeds) if compiled else transmuter.run(model, feeds)
    return [np.asarray(y) for y in outputs.values()]


def ort_node(op: str, inputs: Sequence[Any], attributes: Mapping[str, Any] | None = None, **kwargs: Any) -> list[Any]:
    """The node's outputs from ONNX Runtime on the CPU, without graph optimisations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    model = one_node(op, inputs, attributes, **kwargs)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(
        None, {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in kwargs.get("known", ())}
    )


def reference_node(op: str, inputs: Sequence[Any], attributes: Mapping[str, Any] | None = None, **kwargs: Any) -> list:
    """The node's outputs from the reference evaluator of `onnx`, for what ONNX Runtime has no kernel for."""
    from onnx.reference import ReferenceEvaluator

    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in kwargs.get("known", ())}
    return ReferenceEvaluator(one_node(op, inputs, attributes, **kwargs)).run(None, feeds)

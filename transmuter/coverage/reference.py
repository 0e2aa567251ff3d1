"""ONNX Runtime as the reference: optimisations off, and products of packed weights as they are defined.

At accuracy level 4 ONNX Runtime rounds the activations of MatMulNBits to int8, which approximates what the operator
computes; the reference is level 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from transmuter.errors import CoverageError

_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def onnxruntime_outputs(
    model: Path | bytes,
    inputs: Mapping[str, Any],
    names: Sequence[str] | None = None,
    *,
    optimised: bool = False,
    threads: int = 1,
) -> dict[str, Any]:
    """ONNX Runtime's outputs on the CPU, by name.

    Raises:
        CoverageError: onnxruntime is missing, or refuses the model or the inputs.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise CoverageError("onnxruntime is not installed. Install the extra `coverage`.") from error
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        wanted = [output.name for output in session.get_outputs()] if names is None else list(names)
        return dict(zip(wanted, session.run(wanted, dict(inputs)), strict=True))
    except Exception as error:  # its errors have no common base but this
        message = " ".join(str(error).split())
        raise CoverageError(f"ONNX Runtime fails on the model: {message:.400}. Check its inputs.") from error


def at_exact_level(path: Path) -> Path | bytes:
    """The file with its MatMulNBits nodes at accuracy level 0, where they are at another."""
    model = onnx.load(path, load_external_data=False)
    before = model.SerializeToString()
    set_exact_level(node for graph in graphs(model.graph) for node in graph.node)
    set_exact_level(node for function in model.functions for node in function.node)
    if model.SerializeToString() == before:
        return path
    onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
    return model.SerializeToString()


def set_exact_level(nodes: Iterable[onnx.NodeProto]) -> None:
    """Sets MatMulNBits nodes to accuracy level 0: at level 4 ONNX Runtime rounds activations to int8."""
    for attribute in (a for node in nodes if node.op_type == "MatMulNBits" for a in node.attribute):
        if attribute.name == "accuracy_level":
            attribute.i = 0


def graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and those of its nodes, at any depth."""
    yield graph
    for node in graph.node:
        yield from inner_graphs(node)


def inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node, at any depth."""
    for attribute in node.attribute:
        for inner in (attribute.g, *attribute.graphs) if attribute.type in _GRAPHS else ():
            yield from graphs(inner)

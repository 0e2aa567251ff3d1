"""The ONNX backend test suite of the installed `onnx` package as one list of cases."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

FOLDERS = ("simple", "pytorch-converted", "pytorch-operator", "light")
_DRAWS = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    model: onnx.ModelProto
    rtol: float
    atol: float
    data: list[tuple[list[Any], list[Any]]]
    """Inputs, in the order of the graph's own (those with an initializer left out), and expected outputs."""

    @property
    def is_random(self) -> bool:
        return any(
            _draws(node, dict(zip(input_names(self.model), self.data[0][0]))) for node in _nodes(self.model.graph)
        )


@functools.cache
def cases() -> dict[str, Case]:
    """Every case by name."""
    found = [*_node_cases(), *(case for folder in FOLDERS for case in _folder_cases(folder))]
    return {case.name: case for case in found}


def input_names(model: onnx.ModelProto) -> list[str]:
    given = {t.name for t in model.graph.initializer} | {t.values.name for t in model.graph.sparse_initializer}
    return [i.name for i in model.graph.input if i.name not in given]


def _node_cases() -> list[Case]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        collected = collect_testcases(None)
    return [
        Case(
            c.name,
            "node",
            c.model,
            c.rtol,
            c.atol,
            [([_array(v) for v in i], [_array(v) for v in o]) for i, o in c.data_sets],
        )
        for c in collected
    ]


def _folder_cases(kind: str) -> list[Case]:
    from onnx.backend.test.loader import load_model_tests

    found = []
    for test in load_model_tests(kind="real" if kind == "light" else kind):
        if kind == "light":
            path = Path(onnx.__file__).parent.joinpath(*test.url.split("/")[1:])
            model = onnx.load(path)
            outputs = [
                numpy_helper.to_array(onnx.load_tensor(path.with_name(f"{path.stem}_output_{i}.pb")))
                for i in range(len(model.graph.output))
            ]
            data = [([_ramp(model, name) for name in input_names(model)], outputs)]
        else:
            folder = Path(test.model_dir)
            model = onnx.load(folder / "model.onnx")
            types = {i.name: i.type for i in model.graph.input}
            data = [
                (
                    [_load(d / f"input_{i}.pb", types[name]) for i, name in enumerate(input_names(model))],
                    [_load(d / f"output_{i}.pb", o.type) for i, o in enumerate(model.graph.output)],
                )
                for d in sorted(folder.glob("test_data_set_*"))
            ]
        found.append(Case(test.name, kind, model, test.rtol, test.atol, data))
    return found


def _ramp(model: onnx.ModelProto, name: str) -> np.ndarray:
    """The input that the recorded outputs of the whole models belong to: 0 to 1 in equal steps."""
    shape = next(i for i in model.graph.input if i.name == name).type.tensor_type.shape
    dims = [d.dim_value or 1 for d in shape.dim]
    return (np.arange(np.prod(dims)).reshape(dims) / np.prod(dims)).astype(np.float32)


def _load(path: Path, kind: onnx.TypeProto) -> Any:
    data = path.read_bytes()
    match kind.WhichOneof("value"):
        case "sequence_type":
            return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
        case "optional_type":
            return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
        case _:
            return numpy_helper.to_array(onnx.TensorProto.FromString(data))


def _array(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_array(item) for item in value]
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def _nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    inner = [a.g for node in graph.node for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return [*graph.node, *(node for g in inner for node in _nodes(g))]


def _draws(node: onnx.NodeProto, given: dict[str, Any]) -> bool:
    if node.op_type != "Dropout":
        return node.op_type in _DRAWS
    ratio = given.get(node.input[1], 0.5) if len(node.input) > 1 and node.input[1] else 0.5
    training = given.get(node.input[2], False) if len(node.input) > 2 and node.input[2] else False
    return bool(training) and float(ratio) != 0

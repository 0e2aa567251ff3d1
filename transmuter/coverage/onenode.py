"""A node by itself: a model of one node, the inputs it had in a graph, and what ONNX Runtime makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter.coverage.catalogue import ABSOLUTE, RELATIVE
from transmuter.coverage.deviation import Deviation, deviation, rounds_floats
from transmuter.coverage.reference import onnxruntime_outputs
from transmuter.coverage.verdicts import difference

_STEP, _AMPLIFIED = 1e-6, 2
"""By so much of themselves the float inputs of a node are moved, halves by their own precision, and so many times what
ONNX Runtime makes of that its outputs may differ."""
_INLINE_LIMIT = 1_900_000_000
"""Bytes of values above which they go beside a file: protobuf has none of 2 GiB."""


@dataclass(frozen=True)
class OneNode:
    """A model of one node, with the inputs it had and the reference's outputs."""

    model: onnx.ModelProto
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]

    def amplifies(self, found: Sequence[Deviation]) -> bool:
        """Whether ONNX Runtime is about as far from its own outputs when the float inputs move by 1e-6 of themselves,
        or by what their dtype can tell apart: by sums that cancel, or by noise that decides a step of a quantised
        value. (It does not round halves between all nodes of a graph, and rounds them inside of some.)"""
        if not found or any(d.absolute is None for d in found) or self.model.ByteSize() > _INLINE_LIMIT:
            return False
        model, noise = self.model.SerializeToString(), dict.fromkeys(self.outputs, (0.0, 0.0))
        for seed in range(3):
            signs = np.random.default_rng(seed)
            moved = {name: _moved(x, signs) for name, x in self.inputs.items()}
            for name, x in onnxruntime_outputs(model, moved).items():
                if isinstance(x, np.ndarray):
                    told = difference(name, x, self.outputs[name], 0.0, 0.0)
                    if np.isfinite(told.rms):
                        noise[name] = tuple(map(max, noise[name], (told.absolute, told.rms)))
        return all(
            d.absolute.difference <= _AMPLIFIED * noise[d.name][0] and d.rms <= _AMPLIFIED * noise[d.name][1]
            for d in found
        )

    def write(self, folder: Path) -> None:
        """Writes it in the layout of the ONNX backend suite: `model.onnx`, and `input_N.pb` and `output_N.pb` in
        `test_data_set_0`. `reproduce` runs it."""
        data = folder / "test_data_set_0"
        data.mkdir(parents=True, exist_ok=True)
        external = self.model.ByteSize() > _INLINE_LIMIT
        onnx.save(self.model, folder / "model.onnx", save_as_external_data=external, location="model.onnx.data")
        for kind, infos, values in (
            ("input", self.model.graph.input, self.inputs),
            ("output", self.model.graph.output, self.outputs),
        ):
            for i, info in enumerate(infos):
                proto = _value_proto(info, values[info.name])
                (data / f"{kind}_{i}.pb").write_bytes(proto.SerializeToString())


def reproduce(
    folder: Path, *, compute_type: str | None = "float32", absolute: float = ABSOLUTE, relative: float = RELATIVE
) -> list[Deviation]:
    """Runs what `OneNode.write` has written, and tells which outputs differ from the recorded ones.

    Raises:
        TransmuterError: The node fails, if that is what was found.
    """
    model = transmuter.load(folder / "model.onnx", compute_type=compute_type)
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    inputs, expected = (
        {info.name: _read_value(info, folder / "test_data_set_0" / f"{kind}_{i}.pb") for i, info in enumerate(infos)}
        for kind, infos in (("input", graph.input), ("output", graph.output))
    )
    outputs = transmuter.run(model, inputs)
    rounds = rounds_floats([*inputs.values(), *map(numpy_helper.to_array, graph.initializer)])
    found = [deviation(name, outputs[name], x, absolute, relative, rounds)[0] for name, x in expected.items()]
    return [output for output in found if output is not None]


def _moved(value: Any, signs: np.random.Generator) -> Any:
    """A float array with its elements a little larger or smaller."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return value
    step = max(_STEP, float(np.finfo(value.dtype).eps))
    with np.errstate(over="ignore"):
        moved = (value * (1 + step * signs.choice([-1, 1], value.shape))).astype(value.dtype)
    return np.where(np.isfinite(moved), moved, value)


# ---- protobuf ------------------------------------------------------------------------------------------------------


def type_proto(text: str) -> onnx.TypeProto:
    """A type as ONNX Runtime spells it: `seq(map(int64,tensor(float)))`."""
    outer, inner = text.removesuffix(")").split("(", 1)
    if outer == "seq":
        return helper.make_sequence_type_proto(type_proto(inner))
    if outer == "optional":
        return helper.make_optional_type_proto(type_proto(inner))
    if outer == "map":
        key, value = inner.split(",", 1)
        return helper.make_map_type_proto(TensorProto.DataType.Value(key.upper()), type_proto(value))
    return helper.make_tensor_type_proto(TensorProto.DataType.Value(inner.upper()), None)


def _value_proto(info: onnx.ValueInfoProto, value: Any) -> Any:
    """A value as the message that its type has in a test data set."""
    match info.type.WhichOneof("value"):
        case "sequence_type":
            return numpy_helper.from_list(_arrays(value), info.name)
        case "optional_type":
            return numpy_helper.from_optional(value, info.name)
        case "map_type":
            return numpy_helper.from_dict(_arrays(value), info.name)
        case _:
            return numpy_helper.from_array(np.asarray(value), info.name)


def _arrays(value: Any) -> Any:
    """A sequence or map with arrays in place of plain numbers."""
    if isinstance(value, list):
        return [_arrays(item) for item in value]
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    return np.float32(value) if isinstance(value, float) else np.asarray(value)


def _read_value(info: onnx.ValueInfoProto, path: Path) -> Any:
    """What `_value_proto` has made, from its file."""
    data = path.read_bytes()
    match info.type.WhichOneof("value"):
        case "sequence_type":
            return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
        case "optional_type":
            return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
        case "map_type":
            return numpy_helper.to_dict(onnx.MapProto.FromString(data))
        case _:
            return numpy_helper.to_array(onnx.TensorProto.FromString(data))

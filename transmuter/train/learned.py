"""Which weights of a graph are learned, where nobody chooses: constants of the graph are initializers too.

PyTorch's exporter notes what was a parameter and what a buffer. Other tools drop these notes, or make none; then
single numbers count as constants (a norm's epsilon, a mask's 1, attention's scale) but for those that a layer takes.
"""

from __future__ import annotations

import re

import onnx_ir as ir

from transmuter.errors import InputError
from transmuter.model import Model

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"
_NOTE = re.compile(r": (\w+) target='([^']+)'")
_LAYERS = {"MatMul", "Gemm", "Conv", "ConvTranspose", "PRelu", "LSTM", "GRU", "RNN"}
_NORMS = {"BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization"}
_STATISTICS = (3, 4)
"""Which inputs of BatchNormalization are its running mean and variance."""


def learned(model: Model) -> set[str]:
    """The params that are trained where none are chosen.

    All but running statistics, what PyTorch's exporter notes as buffers or constants, and single numbers that no layer
    takes as its weight, slope or bias.

    Raises:
        InputError: There is none.
    """
    kinds = {target: kind for kind, target in _NOTE.findall(model.graph.metadata_props.get(_SIGNATURE, ""))}
    shapes = model.shapes["param"]
    weights = [(name, value) for value, (kind, name) in model.weight_values.items() if kind == "param"]
    found = {name for name, value in weights if _is_learned(value, shapes[name].size, kinds)}
    if not found:
        raise InputError(
            f"None of the {len(weights)} params of {model.name} looks learned: single numbers may be constants of the "
            "graph. Name what is to be trained, as in trainable=['scale'], and load the model with trainable=True: "
            "otherwise short weights are no params."
        )
    return found


def _is_learned(value: ir.Value, size: int, kinds: dict[str, str]) -> bool:
    if any(use.node.op_type == "BatchNormalization" and use.idx in _STATISTICS for use in value.uses()):
        return False
    origins = {value.name, *re.findall(r"'([^']+)'", value.metadata_props.get(_FOLDED_FROM, ""))}
    if noted := {kinds[name] for name in origins if name in kinds}:
        return "PARAMETER" in noted
    return size > 1 or any(_is_of_layer(use.node, value) for use in value.uses())


def _is_of_layer(node: ir.Node, value: ir.Value) -> bool:
    """Whether the node is a layer, or adds the value to what one has computed."""
    if node.op_type != "Add":
        return node.op_type in _LAYERS | _NORMS
    return any(v is not value and v.producer() is not None and v.producer().op_type in _LAYERS for v in node.inputs)

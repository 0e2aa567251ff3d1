"""What a graph tells of its tokens: how many it has embeddings for, and which it looks for."""

from __future__ import annotations

import onnx_ir as ir

from transmuter.model import Model

_MOVES = {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators whose result holds the ids that they are given."""
_KEEPS_ROWS = {"Cast", "DequantizeLinear", "Identity"}
"""Operators whose result has as many rows as their operand."""
_TABLES = {
    "Gather": (0, 1),
    "GatherBlockQuantized": (0, 1),
    "EmbedLayerNormalization": (2, 0),
    "QEmbedLayerNormalization": (2, 0),
}
"""Operators that read embeddings: which operand is the table, which the ids."""


def embedding_rows(model: Model, name: str = "input_ids") -> int | None:
    """The number of rows of the table, or of the smallest one, that a graph input indexes.

    Args:
        model: A model.
        name: The input with token ids.

    Returns:
        The number of rows; None where the input is missing or is not looked up in a table that the file has.
    """
    value = next((v for v in model.graph.inputs if v.name == name), None)
    if value is None:
        return None
    found: list[int] = []
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        for node, index in value.uses():
            if node.op_type in _MOVES and index == 0:
                pending += node.outputs
            elif node.op_type in _TABLES:
                table, ids = _TABLES[node.op_type]
                if index == ids and not (node.op_type.startswith("Gather") and _axis(node)):
                    rows = _rows(node.inputs[table])
                    found += [] if rows is None else [rows]
    return min(found, default=None)


def gathered_tokens(model: Model, name: str = "input_ids") -> tuple[int, ...]:
    """The tokens whose places the graph gathers from all rows of a batch at once, as BART's classifiers do with the end
    of a text. It then takes them for equally many in each row, and mixes rows up where they are not.

    Args:
        model: A model.
        name: The input with token ids.

    Returns:
        Their ids, in ascending order.
    """
    found: set[int] = set()
    pending = [(value, None) for value in model.graph.inputs if value.name == name]
    seen = set()
    while pending:
        value, tokens = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        for node, index in value.uses():
            if node.op_type == "NonZero" and tokens is not None:
                found.update(tokens)
            elif node.op_type in _MOVES and index == 0:
                pending += [(output, tokens) for output in node.outputs]
            elif node.op_type == "Equal" and tokens is None:
                constant = ir.convenience.get_const_tensor(node.inputs[1 - index])
                if constant is not None and constant.size == 1:
                    pending.append((node.outputs[0], (int(constant.numpy().reshape(())),)))
    return tuple(sorted(found))


def _axis(node: ir.Node) -> int:
    attribute = node.attributes.get("axis") or node.attributes.get("gather_axis")
    return attribute.as_int() if attribute is not None else 0


def _rows(table: ir.Value | None) -> int | None:
    axis = 0
    while table is not None and table.const_value is None:
        node = table.producer()
        if node is None or not (node.op_type in _KEEPS_ROWS or node.op_type == "Transpose"):
            return None
        if node.op_type == "Transpose":  # a tied embedding, kept as the last layer has it
            axis = 1 - axis
        table = node.inputs[0]
    shape = None if table is None else table.const_value.shape
    return int(shape[axis]) if shape is not None and len(shape) == 2 and isinstance(shape[axis], int) else None

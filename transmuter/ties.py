"""Weights that an exporter wrote twice, as they are or transposed, become one weight again.

A tied embedding is a table for Gather and, transposed, the weight of the last MatMul; exporters that fold constants
make two initializers of it. Trained as two, they would drift apart.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable

import numpy as np
import onnx_ir as ir

_SMALLEST = 64
"""Elements from which equal weights are one weight: smaller ones may be equal by chance."""
_FLOATS = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE}


def tie(model: ir.Model, arrays: dict[ir.Value, np.ndarray]) -> None:
    """Makes copies of a float weight of the main graph values computed from the first one; they leave `arrays`.

    Equal ones are replaced by it, transposed ones by a Transpose node. Weights of one constant (the ones and zeros of a
    norm) are not tied.
    """
    graph = model.graph
    if not len(graph):
        return
    values = [v for v in graph.initializers.values() if v in arrays and _may_be_tied(v, arrays[v])]
    alike = Counter(_kind(arrays[v]) for v in values)
    first: dict[bytes, ir.Value] = {}
    for value in values:
        array = arrays[value]
        if alike[_kind(array)] == 1:
            continue
        source = first.setdefault(_digest(array), value)
        if source is value and array.ndim == 2:
            source = first.get(_digest(array.T), value)
            if source is not value:
                first.pop(_digest(array))
                source = _transposed(graph, source, value)
        if source is not value:
            del graph.initializers[value.name]
            ir.convenience.replace_all_uses_with(value, source)
            del arrays[value]


def _may_be_tied(value: ir.Value, array: np.ndarray) -> bool:
    is_inner = not (value.is_graph_input() or value.is_graph_output())
    is_float = value.const_value is not None and value.const_value.dtype in _FLOATS
    return is_inner and is_float and array.size >= _SMALLEST and bool((array != array.flat[0]).any())


def _kind(array: np.ndarray) -> Hashable:
    """What weights that may be tied have in common."""
    return array.dtype, tuple(sorted(array.shape)) if array.ndim == 2 else array.shape


def _digest(array: np.ndarray) -> bytes:
    found = hashlib.blake2b(repr(array.shape).encode(), digest_size=16)
    rows = max(1, (1 << 20) // array[0].nbytes)  # a transposed array is not copied as a whole
    for start in range(0, len(array), rows):
        found.update(np.ascontiguousarray(array[start : start + rows]).view(np.uint8))
    return found.digest()


def _transposed(graph: ir.Graph, source: ir.Value, copy: ir.Value) -> ir.Value:
    """The value of a new node at the start of the graph, under the name of the copy that it stands for."""
    node = ir.node("Transpose", [source], {"perm": [1, 0]}, name=f"{copy.name}/Transpose")
    graph.insert_before(graph[0], node)
    (value,) = node.outputs
    value.name, value.type, value.shape = copy.name, copy.type, copy.shape
    return value

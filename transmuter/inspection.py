"""What a model file holds, as text: `repr(model)` and `transmuter inspect`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from transmuter.model import Model


def summary(model: Model) -> str:
    """Inputs, outputs, opsets, operators with counts, weights with bytes, and operators without a lowering."""
    shapes = model.shapes
    lines = [
        "Model",
        "  inputs:",
        *(f"    {spec}" for spec in model.inputs.values()),
        *(
            f"    {spec} (has a default)"
            for spec in model.overridable_inputs.values()
            if not model.lists_weights_as_inputs
        ),
        "  outputs:",
        *(f"    {spec}" for spec in model.outputs.values()),
        "  opsets: " + ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in model.opsets.items()),
        f"  operators ({model.operators.total()} nodes): "
        + ", ".join(f"{name} {count}" for name, count in sorted(model.operators.items())),
        f"  params: {_weights(shapes['param'])}",
        f"  buffers: {_weights(shapes['buffer'])}",
    ]
    if model.unsupported_operators:
        lines.append("  without a lowering: " + ", ".join(model.unsupported_operators))
    return "\n".join(lines)


def _weights(shapes: Mapping[str, jax.ShapeDtypeStruct]) -> str:
    count = sum(math.prod(s.shape) for s in shapes.values())
    size = sum(math.prod(s.shape) * s.dtype.itemsize for s in shapes.values())
    return f"{len(shapes)} arrays, {count:,} elements, {_bytes(size)}"


def _bytes(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"

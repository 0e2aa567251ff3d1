"""Transmuter runs ONNX models as JAX functions."""

from transmuter import lowering
from transmuter.errors import (
    GraphBreakError,
    HubError,
    InputError,
    LoweringError,
    ModelError,
    TransmuterError,
    UnsupportedOperatorError,
)
from transmuter.model import Model, TensorSpec, load
from transmuter.segments import CompiledModel, compile, run

__version__ = "0.1.0"

__all__ = [
    "CompiledModel",
    "GraphBreakError",
    "HubError",
    "InputError",
    "LoweringError",
    "Model",
    "ModelError",
    "TensorSpec",
    "TransmuterError",
    "UnsupportedOperatorError",
    "compile",
    "load",
    "lowering",
    "run",
]

"""Transmuter runs ONNX models as JAX functions."""

from transmuter import lowering, telemetry
from transmuter.errors import (
    ExecutionError,
    GraphBreakError,
    HubError,
    InputError,
    LoweringError,
    ModelError,
    RecompileWarning,
    TransmuterError,
    UnsupportedOperatorError,
)
from transmuter.model import Model, TensorSpec, load
from transmuter.segments import Buckets, CompiledModel, compile, run

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "CompiledModel",
    "ExecutionError",
    "GraphBreakError",
    "HubError",
    "InputError",
    "LoweringError",
    "Model",
    "ModelError",
    "RecompileWarning",
    "TensorSpec",
    "TransmuterError",
    "UnsupportedOperatorError",
    "compile",
    "load",
    "lowering",
    "run",
    "telemetry",
]

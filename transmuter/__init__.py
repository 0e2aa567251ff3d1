"""Transmuter runs ONNX models as JAX functions.

Importing it is quick: the modules behind its names are imported when a name is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from transmuter.deferral import deferring

# What others import and few models need: it takes 0.35 s, more than half of what importing JAX does.
with deferring(
    "google.protobuf.json_format",
    "google.protobuf.text_format",
    "jax.extend.pallas",
    "onnx_ir._symbolic_shapes",
    "sympy",
):
    import jax.extend.core  # noqa: F401
    import onnx_ir  # noqa: F401

if TYPE_CHECKING:
    from transmuter import lowering, telemetry
    from transmuter.errors import (
        CoverageError,
        ExecutionError,
        GradientError,
        GraphBreakError,
        HubError,
        InputError,
        LoweringError,
        ModelError,
        RecompileWarning,
        ServingError,
        TrainingError,
        TransmuterError,
        UnsupportedOperatorError,
    )
    from transmuter.model import Model, TensorSpec, load
    from transmuter.segments import Buckets, CompiledModel, compile, run

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "CompiledModel",
    "CoverageError",
    "ExecutionError",
    "GradientError",
    "GraphBreakError",
    "HubError",
    "InputError",
    "LoweringError",
    "Model",
    "ModelError",
    "RecompileWarning",
    "ServingError",
    "TensorSpec",
    "TrainingError",
    "TransmuterError",
    "UnsupportedOperatorError",
    "compile",
    "load",
    "lowering",
    "run",
    "telemetry",
]

_MODULES = ("lowering", "serving", "telemetry", "train")
_HOMES = ("errors", "model", "segments")
"""The modules that have the other public names; each imports those before it."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (importlib.import_module(f"{__name__}.{home}") for home in _HOMES)
    globals()[name] = next(getattr(home, name) for home in homes if hasattr(home, name))
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

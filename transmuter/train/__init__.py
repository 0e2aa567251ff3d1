"""Fine-tuning with optax: what training needs beyond `jax.value_and_grad` through a model."""

import importlib
from typing import TYPE_CHECKING, Any

try:
    import optax  # noqa: F401
except ImportError as error:
    raise ImportError("transmuter.train needs optax. Install the extra: pip install 'transmuter[train]'.") from error

from transmuter.train import lora, losses
from transmuter.train.fit import Fit, fit
from transmuter.train.lora import with_lora
from transmuter.train.params import load_params, save_params
from transmuter.train.regularization import with_batch_statistics, with_dropout
from transmuter.train.step import Evaluator, Step, TrainState

if TYPE_CHECKING:
    from transmuter.train import nnx
    from transmuter.train.nnx import as_nnx

__all__ = [
    "Evaluator",
    "Fit",
    "Step",
    "TrainState",
    "as_nnx",
    "fit",
    "load_params",
    "lora",
    "losses",
    "nnx",
    "save_params",
    "with_batch_statistics",
    "with_dropout",
    "with_lora",
]


def __getattr__(name: str) -> Any:
    """What needs Flax, which nothing else here does."""
    if name not in ("as_nnx", "nnx"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.nnx")
    return module if name == "nnx" else module.as_nnx

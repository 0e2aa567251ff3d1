"""Fine-tuning with optax: what training needs beyond `jax.value_and_grad` through a model."""

from transmuter.train import lora, losses
from transmuter.train.fit import Fit, fit
from transmuter.train.lora import with_lora
from transmuter.train.regularization import with_batch_statistics, with_dropout
from transmuter.train.step import Evaluator, Step, TrainState

__all__ = [
    "Evaluator",
    "Fit",
    "Step",
    "TrainState",
    "fit",
    "lora",
    "losses",
    "with_batch_statistics",
    "with_dropout",
    "with_lora",
]

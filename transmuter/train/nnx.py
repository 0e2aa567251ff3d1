"""A model as a Flax NNX module: a layer of a larger network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from transmuter.model import Model
from transmuter.partition import Choice
from transmuter.train.learned import learned


class Frozen(nnx.Variable[jax.Array]):
    """A weight that is not trained."""


class Module(nnx.Module):
    """A model as a module: call it with the model's inputs, by name or in their order.

        backbone = train.as_nnx(model, outputs=["last_hidden_state"])
        hidden = backbone(input_ids=ids, attention_mask=mask)["last_hidden_state"]

    Attributes:
        params: Trained params by name, as `nnx.Param`.
        frozen: The others, as `Frozen`.
        buffers: The model's buffers, as `Frozen`.
    """

    def __init__(
        self,
        model: Model,
        *,
        trainable: Choice | None = None,
        outputs: Sequence[str] | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        split = model.trainable(learned(model) if trainable is None else trainable)
        self.model, self.outputs = nnx.static(model), nnx.static(tuple(outputs or model.outputs))
        self.params = nnx.Dict({name: nnx.Param(array) for name, array in split.trainable.items()})
        self.frozen = nnx.Dict({name: Frozen(array) for name, array in split.frozen.items()})
        self.buffers = nnx.Dict({name: Frozen(array) for name, array in model.buffers.items()})
        self.rngs = rngs

    def __call__(self, *inputs: Any, **named: Any) -> dict[str, jax.Array]:
        """The outputs by name.

        Args:
            inputs: Arrays in the order of `model.inputs`, or one dict of them.
            named: Arrays by name, where names are Python's.

        Raises:
            InputError, GraphBreakError: As `Model.apply`.
        """
        given = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], Mapping) else inputs or named
        params = {name: variable[...] for group in (self.params, self.frozen) for name, variable in group.items()}
        buffers = {name: variable[...] for name, variable in self.buffers.items()}
        key = self.rngs.dropout() if self.rngs is not None and self.model.is_random else None
        return self.model.apply(params, given, buffers=buffers, key=key, outputs=self.outputs)


def as_nnx(
    model: Model,
    *,
    trainable: Choice | None = None,
    outputs: Sequence[str] | None = None,
    rngs: nnx.Rngs | None = None,
) -> Module:
    """A model as a Flax NNX module.

    Args:
        model: From `transmuter.load(..., trainable=True)`, or a training form of it (`train.with_dropout`).
        trainable: Which params are `nnx.Param`, as in `train.Step`.
        outputs: Names of graph outputs or of internal values; None is all outputs.
        rngs: Where a model that draws random numbers gets its keys: the stream `dropout`.

    Returns:
        The module, which starts from the model's params. `params_of` gives them back.
    """
    return Module(model, trainable=trainable, outputs=outputs, rngs=rngs)


def params_of(module: Module) -> dict[str, jax.Array]:
    """All params of a module's model, in the order of `model.params`: what `model.save` takes."""
    found = {name: variable[...] for group in (module.params, module.frozen) for name, variable in group.items()}
    return {name: found[name] for name in module.model.shapes["param"]}

"""Which output of a graph is the one that a task needs."""

from __future__ import annotations

from collections.abc import Sequence

from transmuter.errors import ModelError
from transmuter.model import Model


def find_output(model: Model, names: Sequence[str], task: str) -> str:
    """The first output of these names, or the only one that there is.

    Raises:
        ModelError: There are several outputs of other names.
    """
    found = next((name for name in names if name in model.outputs), None)
    if found is not None:
        return found
    if len(model.outputs) == 1:
        return next(iter(model.outputs))
    raise ModelError(
        f"The model has the outputs {', '.join(model.outputs)}, and none is named {' or '.join(names)}. "
        f"Use a model that is exported for {task}."
    )

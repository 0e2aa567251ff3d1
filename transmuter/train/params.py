"""Params as safetensors files, by the names that the model has for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transmuter.errors import ModelError
from transmuter.model import Model


def save_params(path: str | os.PathLike[str], params: Mapping[str, Any]) -> None:
    """Writes params as a safetensors file.

    Args:
        path: The file.
        params: Arrays by name, all or some (those that were trained).
    """
    from safetensors.flax import save_file

    save_file({name: jnp.asarray(array) for name, array in params.items()}, path, {"format": "transmuter"})


def load_params(path: str | os.PathLike[str], model: Model) -> dict[str, jax.Array]:
    """All params of a model, with those of a file in place of its own.

    Args:
        path: A file of `save_params`.
        model: The model that they belong to.

    Raises:
        ModelError: The file is no safetensors file.
        InputError: It has a name that the model has not, or another shape.
    """
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    try:
        found = load_file(path)
    except SafetensorError as error:
        raise ModelError(
            f"{os.fspath(path)} is no safetensors file ({error}). Write it with train.save_params."
        ) from error
    params = {**model.params, **found}
    model.check_weights("param", params)
    return params

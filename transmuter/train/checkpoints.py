"""Checkpoints of training, by orbax: a run that was stopped goes on exactly where it was."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from transmuter.errors import InputError
from transmuter.train.step import TrainState


class Checkpoints:
    """The checkpoints in a folder, which is made if it is not there. Use it as a context.

    Args:
        folder: The folder.
        keep: How many to keep; the oldest go first.

    Attributes:
        folder: The folder.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2):
        self.folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._manager.close()

    def save(
        self, step: int, state: TrainState, best: Mapping[str, jax.Array] | None, progress: dict[str, Any]
    ) -> None:
        """Writes a checkpoint, in place of one of the same step.

        Args:
            step: The number of steps done.
            state: The state after them.
            best: All params of the model when its evaluation was best, if there was one.
            progress: What JSON holds of where the run is.
        """
        if step in self._manager.all_steps():
            self._manager.delete(step)
        arrays = _numbered((state, best))
        progress = {**progress, "arrays": _shapes(arrays), "has_best": best is not None}
        items = {"arrays": ocp.args.StandardSave(arrays), "progress": ocp.args.JsonSave(progress)}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(
        self, state: TrainState, params: Mapping[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array] | None, dict[str, Any]] | None:
        """What the newest checkpoint holds, or None where there is none.

        Args:
            state: One like it, from `Step.init`: the restored one has its structure, dtypes and devices.
            params: Params like the best ones.

        Raises:
            InputError: The checkpoint is of another model, optimizer or choice of trained params.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        progress = self._manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))["progress"]
        like = state, params if progress.pop("has_best") else None
        wanted = _numbered(like)
        if progress.pop("arrays") != _shapes(wanted):
            raise InputError(
                f"The checkpoint in {self.folder} is of another model, optimizer or choice of trained params. Train "
                "with what made it, or give another folder."
            )
        args = ocp.args.Composite(arrays=ocp.args.StandardRestore(wanted))
        state, best = _like(like, self._manager.restore(step, args=args)["arrays"])
        return state, best, progress


State = tuple[TrainState, Mapping[str, jax.Array] | None]
"""The state, and the best params if there are any."""


def _numbered(tree: State) -> dict[str, jax.Array]:
    """The leaves by number: names of params may hold what paths must not. The random key is written as integers."""
    state, best = tree
    leaves = jax.tree.leaves((replace(state, key=jax.random.key_data(state.key)), best))
    return {f"{i:06d}": leaf for i, leaf in enumerate(leaves)}


def _like(tree: State, leaves: dict[str, jax.Array]) -> State:
    """The opposite, given something of the same structure."""
    state, best = jax.tree.unflatten(jax.tree.structure(tree), [leaves[name] for name in sorted(leaves)])
    key = jax.random.wrap_key_data(state.key, impl=jax.random.key_impl(tree[0].key))
    return replace(state, key=key), best


def _shapes(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    return {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}

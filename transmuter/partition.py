"""Which params are trained: `Model.trainable`."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import jax

from transmuter.errors import InputError

if TYPE_CHECKING:
    from transmuter.model import Model

Patterns = str | re.Pattern[str] | Iterable[str | re.Pattern[str]]
"""One or several names or patterns of names: of `fnmatch`, or compiled regular expressions, which are searched."""
Choice = Patterns | Callable[[str, jax.ShapeDtypeStruct], bool]
"""Which params: by patterns, or by a predicate."""


class Partition(NamedTuple):
    """A model's params in two: differentiate with respect to the first, and give both to the model.

    Attributes:
        trainable: Those that are trained, by name.
        frozen: The others.
    """

    trainable: dict[str, jax.Array]
    frozen: dict[str, jax.Array]

    @property
    def params(self) -> dict[str, jax.Array]:
        """Both, as a call takes them."""
        return {**self.trainable, **self.frozen}

    @property
    def mask(self) -> dict[str, bool]:
        """Whether each param is trained: a mask for `optax.masked`."""
        return {name: name in self.trainable for name in self.params}

    @property
    def labels(self) -> dict[str, str]:
        """`"trainable"` or `"frozen"` for each param: labels for `optax.multi_transform`."""
        return {name: "trainable" if trained else "frozen" for name, trained in self.mask.items()}


def partition(model: Model, choice: Choice) -> Partition:
    """`model.trainable(choice)`."""
    shapes = model.shapes["param"]
    chosen = _chosen(choice, shapes)
    if not chosen:
        raise InputError(f"No param matches {choice!r}. {_advice(model, choice)}")
    params = model.params
    return Partition(
        {name: array for name, array in params.items() if name in chosen},
        {name: array for name, array in params.items() if name not in chosen},
    )


def _chosen(choice: Choice, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> set[str]:
    if callable(choice):
        return {name for name, shape in shapes.items() if choice(name, shape)}
    return matching(choice, shapes)


def matching(patterns: Patterns, names: Iterable[str]) -> set[str]:
    """Those of the names that are given, or fit an `fnmatch` pattern or a regular expression."""
    several = [patterns] if isinstance(patterns, (str, re.Pattern)) else list(patterns)
    return {name for name in names if any(_matches(pattern, name) for pattern in several)}


def _matches(pattern: str | re.Pattern[str], name: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _advice(model: Model, choice: Choice) -> str:
    if _chosen(choice, model.shapes["buffer"]):
        return (
            "What matches are quantised weights, integers or tables, which have no gradient. Train low-rank adapters "
            "beside them, or a float export of the model."
        )
    if isinstance(choice, str) and (near := difflib.get_close_matches(choice, model.shapes["param"], 3, 0.4)):
        return f"The nearest names are {', '.join(near)}."
    return f"model.params has names such as {', '.join(list(model.shapes['param'])[:3]) or 'none at all'}."

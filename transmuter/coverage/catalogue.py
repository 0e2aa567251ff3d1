"""The list of models that the matrix covers: `coverage/models.toml`."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transmuter.errors import CoverageError

ABSOLUTE, RELATIVE = 1e-4, 1e-3
"""How far a float32 result may be from the reference: ABSOLUTE + RELATIVE times its magnitude."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Entry:
    """One model of the matrix.

    Attributes:
        name: Its name in the matrix: letters, digits, dots, dashes; no other entry has it.
        source: Where its file is: `hf://org/repo@revision/path.onnx`, `pypi://name==version/path/in/package.onnx`,
            `local://path/below/a/given/folder.onnx`, or `backend://test_name` for a case of the ONNX backend suite.
        task: The Hugging Face task, or what the model is for in two words.
        architecture: The family of models, as `BertModel`.
        license: As its publisher states it.
        reason: Why it is in the matrix, and what is odd about it.
        inputs: By input name, what replaces the rules by which inputs are made (see `inputs`).
        sizes: Values of the symbolic dimensions, a dict for each shape that is recorded; none for the rules' own two.
        absolute, relative: The tolerance.
    """

    name: str
    source: str
    task: str = ""
    architecture: str = ""
    license: str = ""
    reason: str = ""
    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sizes: Sequence[Mapping[str, int]] = ()
    absolute: float = ABSOLUTE
    relative: float = RELATIVE


def read(path: Path) -> list[Entry]:
    """The entries of a list of models.

    Raises:
        CoverageError: There is no such file, it is no TOML, or an entry of it is malformed.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise CoverageError(
            f"{path} cannot be read: {error.strerror}. Give the list of models with --models."
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise CoverageError(f"{path} is no TOML: {error}. Correct it there.") from error
    entries = [_entry(found, path) for found in document.get("model", [])]
    names = [entry.name for entry in entries]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise CoverageError(f"{path} has two models called {repeated[0]!r}. Rename one.")
    return entries


def _entry(found: Mapping[str, Any], path: Path) -> Entry:
    known = {f.name for f in dataclasses.fields(Entry)}
    named = found.get("name", "a model without a name")
    if odd := sorted(found.keys() - known):
        raise CoverageError(f"{path}: {named} has the key {odd[0]!r}. Known keys are {', '.join(sorted(known))}.")
    if missing := sorted({"name", "source"} - found.keys()):
        raise CoverageError(f"{path}: {named} lacks {missing[0]!r}. Add it.")
    if not isinstance(named, str) or not _NAME.fullmatch(named):
        raise CoverageError(f"{path}: {named!r} is no name. Use letters, digits, dots and dashes.")
    return Entry(**found)


def write(entries: Iterable[Entry], path: Path) -> None:
    """Writes a list of models, one table for each, leaving out what is at its default."""
    defaults = {f.name: f.default for f in dataclasses.fields(Entry)}
    tables = []
    for entry in entries:
        values = {f.name: getattr(entry, f.name) for f in dataclasses.fields(Entry)}
        lines = [f"{k} = {_toml(v)}" for k, v in values.items() if v not in (defaults[k], {}, ())]
        tables.append("\n".join(["[[model]]", *lines]))
    path.write_text("\n\n".join(tables) + "\n")


def _toml(value: Any) -> str:
    """A value as TOML; lists and dicts inline."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
        case Mapping():
            return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + "}"
        case _:
            return "[" + ", ".join(map(_toml, value)) + "]"

"""Inputs that a model could meet, made from a seed by rules for names and dtypes.

A rule gives the sizes of a symbolic dimension, or the values of an input. The first that fits counts; an entry's own
`sizes` and `inputs` go before all.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from transmuter.coverage.catalogue import Entry
from transmuter.errors import CoverageError

CASES = 2
"""At so many shapes a model runs, where it has symbolic dimensions."""
_VOCABULARY = 100
"""Token ids stay below this, where the graph does not tell how many there are."""
_RATE = 16_000
"""Samples of a second of sound."""
_SOUND = r"audio|wave|sound|speech|input_values"
"""What the names of inputs that are sound contain."""

_SIZES: tuple[tuple[str, tuple[int, int]], ...] = (
    (r"past|cache", (4, 6)),
    (r"batch|^n$|^b$|num_images|beam", (2, 1)),
    (r"channel", (3, 3)),
    (r"height|width|^h$|^w$", (64, 96)),
    (r"sample|audio|wave", (_RATE, _RATE + 320)),
    (r"seq|len|token|text|words?$", (7, 12)),
    (r"frame|time", (40, 64)),
    (r"", (3, 5)),
)
"""Of symbolic dimensions, by what their names contain: for the first case and the second."""
_SHAPED: Mapping[int, Sequence[str]] = {4: ("batch", "channel", "height", "width"), 3: ("batch", "seq", "feature")}
"""What dimensions without a name are, by rank."""

Fill = Callable[["_Input"], Any]


@dataclass(frozen=True)
class Declared:
    """An input as the graph declares it: dimensions are numbers, names, or None."""

    name: str
    dtype: np.dtype
    shape: tuple[int | str | None, ...]
    vocabulary: int | None = None
    """How many rows the table has that it indexes, if that can be seen."""


@dataclass(frozen=True)
class _Input:
    """An input whose shape is decided."""

    declared: Declared
    shape: tuple[int, ...]
    case: int
    sizes: Mapping[str, int]
    random: np.random.Generator


def declared_inputs(model: onnx.ModelProto) -> list[Declared]:
    """A model's inputs, without those that an initializer gives.

    Raises:
        CoverageError: One is no tensor.
    """
    given = {tensor.name for tensor in model.graph.initializer}
    found = []
    for value in model.graph.input:
        if value.name in given:
            continue
        if not value.type.HasField("tensor_type"):
            raise CoverageError(f"The input {value.name!r} is no tensor. Give it in the entry's `inputs`.")
        kind = value.type.tensor_type
        shape = tuple(_dimension(d) for d in kind.shape.dim)
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        found.append(Declared(value.name, dtype, shape, _vocabulary(model.graph, value.name)))
    return found


def _dimension(dimension: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dimension.HasField("dim_value") and dimension.dim_value >= 0:
        return dimension.dim_value
    return dimension.dim_param or None


def _vocabulary(graph: onnx.GraphProto, name: str) -> int | None:
    """The rows of the smallest table that a Gather takes by this value, or by a cast of it."""
    tables = {tensor.name: tensor.dims[0] for tensor in graph.initializer if len(tensor.dims) == 2}
    same, rows = {name}, []
    for node in graph.node:
        if node.op_type in ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze") and node.input[0] in same:
            same.update(node.output)
        if node.op_type in ("Gather", "GatherBlockQuantized") and node.input[1] in same and node.input[0] in tables:
            rows.append(tables[node.input[0]])
    return min(rows, default=None)


def case_count(inputs: Sequence[Declared], entry: Entry) -> int:
    """At how many shapes the model runs: one, if all is fixed."""
    if entry.sizes:
        return len(entry.sizes)
    return CASES if any(not isinstance(d, int) for i in inputs for d in i.shape) else 1


def made(inputs: Sequence[Declared], entry: Entry, case: int) -> dict[str, np.ndarray]:
    """The inputs of one case; the same whenever it is asked for.

    Raises:
        CoverageError: The entry's rule for an input makes no sense.
    """
    unknown = sorted(entry.inputs.keys() - {declared.name for declared in inputs})
    if unknown:
        raise CoverageError(f"{entry.name} has a rule for {unknown[0]!r}, which is no input of the model. Remove it.")
    sizes = dict(entry.sizes[case]) if entry.sizes else {}
    values = {}
    for position, declared in enumerate(inputs):
        rule = entry.inputs.get(declared.name, {})
        dimensions = rule.get("shape") or _named(declared)
        shape = tuple(_size(d, sizes, case) for d in dimensions)
        random = np.random.default_rng([case, position])
        values[declared.name] = _values(_Input(declared, shape, case, sizes, random), rule, entry)
    return values


def of_case(path: Path, entry: Entry, case: int) -> dict[str, np.ndarray]:
    """The inputs of one case of an ONNX file.

    Raises:
        CoverageError: There is no such case, or a rule does not fit.
    """
    declared = declared_inputs(onnx.load(path, load_external_data=False))
    if not 0 <= case < (count := case_count(declared, entry)):
        raise CoverageError(f"{entry.name} has {count} cases, numbered from 0; there is no case {case}.")
    return made(declared, entry, case)


def _named(declared: Declared) -> tuple[int | str, ...]:
    """The dimensions of an input, with names for those that have none or say too little."""
    names = _SHAPED.get(len(declared.shape), ("batch", "seq"))
    names = [*names, *["other"] * len(declared.shape)]
    shape = [name if d is None else d for name, d in zip(names, declared.shape)]
    if declared.dtype.kind == "f" and re.search(_SOUND, declared.name.lower()):
        shape = ["samples" if isinstance(d, str) and re.search(r"seq|len", d) else d for d in shape]
    return tuple(shape)


def _size(dimension: int | str, sizes: dict[str, int], case: int) -> int:
    """The size of a dimension. A name keeps its size within a case; a sum of names is the sum of theirs."""
    if isinstance(dimension, int):
        return dimension
    if dimension in sizes:
        return sizes[dimension]
    terms = [term.strip() for term in dimension.split("+")]
    if len(terms) > 1:
        return sum(int(t) if t.isdigit() else _size(t, sizes, case) for t in terms)
    if "total" in dimension:
        return _size("past_sequence_length", sizes, case) + _size("sequence_length", sizes, case)
    sizes[dimension] = next(size[case % 2] for name, size in _SIZES if re.search(name, dimension.lower()))
    return sizes[dimension]


# ---- values --------------------------------------------------------------------------------------------------------


def _values(made_for: _Input, rule: Mapping[str, Any], entry: Entry) -> np.ndarray:
    declared = made_for.declared
    if "value" in rule:
        value = np.asarray(rule["value"], declared.dtype)
        return np.broadcast_to(value, made_for.shape).copy() if value.ndim <= len(made_for.shape) else value
    if rule.keys() - {"shape", "kind", "low", "high"}:
        odd = sorted(rule.keys() - {"shape", "kind", "low", "high", "value"})[0]
        raise CoverageError(
            f"{entry.name}: the rule for {declared.name!r} has the key {odd!r}. Use shape, kind, low, high or value."
        )
    if "low" in rule or "high" in rule:
        return _between(made_for, rule.get("low", 0), rule.get("high", 1))
    if "kind" in rule:
        if rule["kind"] not in _KINDS:
            raise CoverageError(f"{entry.name}: {rule['kind']!r} is no kind. Use one of {', '.join(_KINDS)}.")
        fill = _KINDS[rule["kind"]]
    else:
        kind = "f" if declared.dtype.kind == "V" else declared.dtype.kind  # bfloat16 and smaller are of kind V
        fill = next(f for name, kinds, f in _RULES if kind in kinds and re.search(name, declared.name.lower()))
    return np.asarray(fill(made_for)).astype(declared.dtype)


def _between(made_for: _Input, low: float, high: float) -> np.ndarray:
    """Floats from `low` to `high`, or integers below `high`."""
    dtype = made_for.declared.dtype
    draw = made_for.random.integers if dtype.kind in "iu" else made_for.random.uniform
    return np.asarray(draw(low, high, made_for.shape)).astype(dtype)


def _ids(made_for: _Input) -> Any:
    return made_for.random.integers(0, made_for.declared.vocabulary or _VOCABULARY, made_for.shape)


def _mask(made_for: _Input) -> Any:
    """Ones, and two zeros at the end of the last row where there are further rows: padding."""
    mask = np.ones(made_for.shape)
    if mask.ndim == 2 and mask.shape[0] > 1 and mask.shape[1] > 4:
        mask[-1, -2:] = 0
    return mask


def _positions(made_for: _Input) -> Any:
    return np.broadcast_to(np.arange(made_for.shape[-1] if made_for.shape else 1).reshape(-1), made_for.shape)


def _normal(made_for: _Input) -> Any:
    return made_for.random.normal(size=made_for.shape)


def _state(made_for: _Input) -> Any:
    """A state at the start, and one on the way."""
    return np.zeros(made_for.shape) if made_for.case == 0 else 0.3 * made_for.random.normal(size=made_for.shape)


def _image(made_for: _Input) -> Any:
    """Waves of light over the two last axes, from -1 to 1; 0 to 255 in integers."""
    axes = np.meshgrid(*(np.linspace(0, 6, n) for n in made_for.shape[-2:]), indexing="ij")
    waves = np.sin(sum(axes)) if axes else np.zeros(())
    picture = np.clip(np.broadcast_to(waves, made_for.shape) + 0.2 * made_for.random.normal(size=made_for.shape), -1, 1)
    return picture if made_for.declared.dtype.kind == "f" else np.rint(127.5 * (picture + 1))


def _audio(made_for: _Input) -> Any:
    """A tone with an overtone, and some noise, at 16 kHz."""
    t = np.arange(made_for.shape[-1] if made_for.shape else 1) / _RATE
    tone = 0.4 * np.sin(2 * np.pi * 220 * t) + 0.2 * np.sin(2 * np.pi * 440 * t)
    return np.broadcast_to(tone, made_for.shape) + 0.01 * made_for.random.normal(size=made_for.shape)


def _strings(made_for: _Input) -> Any:
    words = itertools.cycle(["a", "small", "model", "of", "words"])
    return np.array([next(words) for _ in range(int(np.prod(made_for.shape)))], object).reshape(made_for.shape)


def _total(made_for: _Input) -> Any:
    """The length of the keys after this step: those cached and the new ones."""
    sizes = made_for.sizes
    return sum(size for name, size in sizes.items() if re.search(r"past", name)) + sizes.get("sequence_length", 1)


def _constant(value: float) -> Fill:
    return lambda made_for: np.full(made_for.shape, value)


_KINDS: dict[str, Fill] = {
    "ids": _ids,
    "mask": _mask,
    "zeros": _constant(0),
    "ones": _constant(1),
    "normal": _normal,
    "uniform": lambda made_for: made_for.random.uniform(size=made_for.shape),
    "integers": lambda made_for: made_for.random.integers(0, 10, made_for.shape),
    "image": _image,
    "audio": _audio,
    "strings": _strings,
}
"""What an entry's rule may name."""

_RULES: tuple[tuple[str, str, Fill], ...] = (
    (r"use_cache_branch", "b", lambda made_for: np.full(made_for.shape, made_for.case == 1)),
    (r"mask", "iufb", _mask),
    (r"token_type|segment", "iu", _constant(0)),
    (r"position", "iu", _positions),
    (r"total_sequence_length", "iu", lambda made_for: np.full(made_for.shape, _total(made_for))),
    (r"seqlens_k", "iu", lambda made_for: np.full(made_for.shape, _total(made_for) - 1)),
    (r"^sr$|sampl.*rate", "iu", _constant(_RATE)),
    (r"length", "iu", lambda made_for: np.full(made_for.shape, max(made_for.sizes.values(), default=1))),
    (r"ids|token|input|text|label|char", "iu", _ids),
    (r"image|pixel", "iuf", _image),
    (r"", "iu", _constant(1)),
    (r"", "b", _constant(1)),
    (_SOUND, "f", _audio),
    (r"encoder_hidden|embed", "f", _normal),
    (r"past|cache|state|hidden|^h|^c\d?$|memory", "f", _state),
    (r"", "f", _normal),
    (r"", "OUST", _strings),
)
"""Values by what the name contains and the dtype's kind."""

"""Recording references: ONNX Runtime's outputs for made-up inputs, and how far it is from itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from transmuter.coverage import inputs as made_inputs
from transmuter.coverage.catalogue import Entry
from transmuter.coverage.reference import at_exact_level, onnxruntime_outputs
from transmuter.coverage.sources import given_inputs
from transmuter.coverage.verdicts import HALF, difference
from transmuter.errors import CoverageError

_STEP = 1e-7
"""By so much of themselves, up or down, float inputs and weights are changed for the noise."""
_LARGE = 1 << 30
"""Bytes from which on a model is not changed in memory."""
_FEW = 8
"""Weights of so few elements may be sizes, of which a graph has one for each dimension."""
_DRAWS = 6
"""So often they are changed, as one draw may happen to cross no step of a quantised graph."""


@dataclass(frozen=True)
class Reference:
    """One case of a model: inputs, the reference's outputs, and each output's rms-relative noise, the most of all
    cases."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, Any]
    noise: dict[str, float]


def record(entry: Entry, path: Path, folder: Path) -> list[Reference]:
    """Makes a model's inputs, runs ONNX Runtime, and writes both to `folder`.

    Raises:
        CoverageError: A rule for inputs does not fit, or ONNX Runtime fails.
    """
    model = onnx.load(path, load_external_data=False)
    source, references = at_exact_level(path), []
    for inputs in _inputs(entry, path, model):
        outputs = onnxruntime_outputs(source, inputs)
        references.append(Reference(inputs, outputs, _noise(source, inputs, outputs, is_half(model))))
    # Whether a draw crosses a step of a quantised graph is chance: what one case shows holds for all.
    names = {name for found in references for name in found.noise}
    noise = {name: max(found.noise[name] for found in references) for name in names}
    references = [replace(reference, noise=noise) for reference in references]
    _write(references, entry, folder)
    return references


def _inputs(entry: Entry, path: Path, model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """The inputs of all cases: those of the backend suite, or made-up ones."""
    if not entry.source.startswith("backend://"):
        declared = made_inputs.declared_inputs(model)
        return [made_inputs.made(declared, entry, case) for case in range(made_inputs.case_count(declared, entry))]
    given = given_inputs(path)
    odd = next((name for case in given for name, x in case.items() if not isinstance(x, np.ndarray)), None)
    if odd is not None:
        raise CoverageError(
            f"The input {odd!r} of {entry.name} is no tensor, of which references are made. Leave it out."
        )
    return given


def is_half(model: onnx.ModelProto) -> bool:
    """Whether a weight is in half precision."""
    halves = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    return any(tensor.data_type in halves for tensor in model.graph.initializer)


def _noise(
    source: Path | bytes, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, Any], half: bool
) -> dict[str, float]:
    """How far ONNX Runtime is from itself: optimised, on two threads, and with float inputs or weights changed."""
    draws, names = np.random.default_rng(0), list(outputs)
    runs = [
        onnxruntime_outputs(source, inputs, names, optimised=True),
        onnxruntime_outputs(source, inputs, names, threads=2),
        *(onnxruntime_outputs(moved, inputs, names) for moved in _with_moved_weights(source, draws)),
    ]
    for _ in range(_DRAWS if any(x.dtype.kind == "f" for x in inputs.values()) else 0):
        moved = {name: _moved(x, draws) for name, x in inputs.items()}
        runs.append(onnxruntime_outputs(source, moved, names))
    found = dict.fromkeys(outputs, HALF if half else 0.0)
    for others in runs:
        for name, expected in outputs.items():
            found[name] = max(found[name], difference(name, others[name], expected, 0.0, 0.0).rms)
    return {name: rms if np.isfinite(rms) else 0.0 for name, rms in found.items()}


def _moved(array: np.ndarray, draws: np.random.Generator) -> np.ndarray:
    """Floats a little larger or smaller; all else as it is."""
    if array.dtype.kind != "f":
        return array
    return np.asarray(array * (1 + _STEP * draws.choice([-1, 1], array.shape)), array.dtype)


def _with_moved_weights(source: Path | bytes, draws: np.random.Generator) -> Iterator[bytes]:
    """The model with its float32 weights changed, some times; not at all where it is too large to hold again.

    The smallest ones stay, as scales of Resize or limits of Range, which decide shapes.
    """
    model = onnx.load_model_from_string(source) if isinstance(source, bytes) else onnx.load(source)
    floats = (t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)
    weights = [(t, numpy_helper.to_array(t)) for t in floats if math.prod(t.dims) > _FEW]
    for _ in range(_DRAWS if model.ByteSize() < _LARGE else 0):
        for tensor, array in weights:
            tensor.CopyFrom(numpy_helper.from_array(_moved(array, draws), tensor.name))
        yield model.SerializeToString()


# ---- files ---------------------------------------------------------------------------------------------------------


def _write(references: Sequence[Reference], entry: Entry, folder: Path) -> None:
    """One `.npz` for each case, and `record.json`, which comes last: what is there is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"source": entry.source, "fingerprint": fingerprint(entry), "cases": []}
    for case, reference in enumerate(references):
        arrays = {f"in:{name}": _stored(x) for name, x in reference.inputs.items()}
        plain = {}
        for name, value in reference.outputs.items():
            if isinstance(value, np.ndarray):
                arrays[f"out:{name}"] = _stored(value)
            else:
                plain[name] = _plain(value)
        np.savez_compressed(folder / f"case{case}.npz", **arrays)
        both = (reference.inputs, "in"), (reference.outputs, "out")
        dtypes = {
            f"{kind}:{n}": x.dtype.name for values, kind in both for n, x in values.items() if hasattr(x, "dtype")
        }
        about["cases"].append({"noise": reference.noise, "others": plain, "dtypes": dtypes})
    unfinished = folder / "record.json.part"
    unfinished.write_text(json.dumps(about))
    unfinished.replace(folder / "record.json")


def references(entry: Entry, folder: Path) -> list[Reference]:
    """What `record` has written for a model.

    Raises:
        CoverageError: It is not there, or was recorded with other inputs.
    """
    try:
        about = json.loads((folder / "record.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CoverageError(f"There is no reference of {entry.name} in {folder}. Run `record` first.") from error
    if about["fingerprint"] != fingerprint(entry):
        raise CoverageError(f"The reference of {entry.name} is for another file or other inputs. Run `record` again.")
    found = []
    for case, told in enumerate(about["cases"]):
        with np.load(folder / f"case{case}.npz", allow_pickle=False) as arrays:
            restored = {key: _restored(arrays[key], told["dtypes"][key]) for key in arrays}
        inputs = {key[3:]: x for key, x in restored.items() if key.startswith("in:")}
        outputs = {key[4:]: x for key, x in restored.items() if key.startswith("out:")}
        found.append(Reference(inputs, {**outputs, **told["others"]}, told["noise"]))
    return found


def fingerprint(entry: Entry) -> str:
    """What an entry's reference depends on, as text."""
    return json.dumps([entry.source, entry.inputs, entry.sizes], sort_keys=True, default=str)


def _stored(array: np.ndarray) -> np.ndarray:
    """An array of a dtype that `.npy` files have: texts as such, small floats as their bits."""
    if array.dtype.kind == "O":
        return array.astype(str)
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _restored(array: np.ndarray, dtype: str) -> np.ndarray:
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.name == dtype:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, dtype))


def _plain(value: Any) -> Any:
    """A sequence or a map of ONNX Runtime's as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value

"""Every recorded model, eager and compiled, against the outputs that ONNX Runtime gave for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from comparison import assert_equal
from conftest import MATERIAL

import transmuter


@dataclass(frozen=True)
class Recorded:
    """One file with its cases: inputs and outputs at two or more shapes."""

    path: Path
    cases: list[tuple[dict[str, np.ndarray], dict[str, Any]]]
    noise: float
    """The largest rms-relative difference of ONNX Runtime from itself, for what amplifies rounding."""


def _names() -> list[str]:
    if not (MATERIAL / "zoo" / "zoo.json").exists():
        return []
    zoo = json.loads((MATERIAL / "zoo" / "zoo.json").read_text())
    models = json.loads((MATERIAL / "models" / "index.json").read_text())
    return [f"zoo/{r}/{f}" for r, entry in zoo.items() for f in entry["files"]] + [
        f"models/{m['name']}" for m in models
    ]


def load_recorded(name: str) -> Recorded:
    where = MATERIAL / name
    if name.startswith("models/"):
        entry = next(m for m in json.loads((MATERIAL / "models" / "index.json").read_text()) if m["name"] == where.name)
        noise = max(n["rms_rel"] for c in entry["cases"] for n in c["onnxruntime_self_noise"].values())
        cases = []
        for case in entry["cases"]:
            with np.load(where / case["case"], allow_pickle=False) as arrays:
                inputs = {k[3:]: arrays[k] for k in arrays if k.startswith("in:")}
                outputs = {k[4:]: arrays[k] for k in arrays if k.startswith("out:")}
            cases.append((inputs, outputs))
        return Recorded(where / "model.onnx", cases, noise)
    _, repository, file = name.split("/", 2)
    found: dict[str, tuple[dict, dict]] = {}
    with np.load(MATERIAL / "zoo" / repository / "reference.npz", allow_pickle=False) as arrays:
        for key in arrays:
            if key.startswith(f"{file}::"):
                _, case, kind, value = key.split("::", 3)
                found.setdefault(case, ({}, {}))[kind == "out"][value] = arrays[key]
    return Recorded(where, [found[c] for c in sorted(found)], 0.0)


@pytest.mark.parametrize("mode", ["run", "compile"])
@pytest.mark.parametrize("name", _names())
def test_matches_onnxruntime(name: str, mode: str) -> None:
    recorded = load_recorded(name)
    assert len(recorded.cases) >= 2
    model = transmuter.load(recorded.path)
    compiled = transmuter.compile(model)
    for inputs, expected in recorded.cases:
        outputs = transmuter.run(model, inputs) if mode == "run" else compiled(inputs)
        for output, wanted in expected.items():
            actual = np.asarray(outputs[output]) if isinstance(outputs[output], jax.Array) else outputs[output]
            assert_equal(actual, wanted, rtol=1e-3, atol=1e-4, where=output)

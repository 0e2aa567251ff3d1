"""Every recorded model, eager and compiled, against the outputs that ONNX Runtime gave for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_equal
from conftest import MATERIAL

import transmuter
from transmuter.lowering.evaluation import Evaluation, Scope
from transmuter.staging import exact_dtypes


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
            others = {k: v for k, v in case["outputs"].items() if isinstance(v, list) and v and isinstance(v[0], dict)}
            with np.load(where / case["case"], allow_pickle=False) as arrays:
                inputs = {k[3:]: arrays[k] for k in arrays if k.startswith("in:")}
                outputs = {k[4:]: arrays[k] for k in arrays if k.startswith("out:")}
            outputs |= {k: [{int(key): x for key, x in m.items()} for m in v] for k, v in others.items()}
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


def rms(actual: Any, expected: np.ndarray) -> float:
    """Root of the mean square difference, relative to that of `expected`."""
    actual, expected = np.asarray(actual, np.float64), expected.astype(np.float64)
    return float(np.sqrt(np.mean((actual - expected) ** 2)) / max(np.sqrt(np.mean(expected**2)), 1e-30))


def is_half(model: transmuter.Model) -> bool:
    return any(s.dtype.itemsize == 2 for s in model.shapes["param"].values())


def quantises_activations(model: transmuter.Model) -> bool:
    """Whether rounding noise becomes whole quantisation steps while the graph runs."""
    return any(
        name.split("::")[-1] in ("DynamicQuantizeLinear", "QuantizeLinear", "DynamicQuantizeLSTM", "MatMulInteger")
        for name in model.operators
    )


def onnxruntime_noise(path: Path, inputs: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """How far ONNX Runtime is from itself, per output: optimised, and with float inputs moved by 1e-6 relative."""
    import onnxruntime

    found: dict[str, list[float]] = {name: [] for name in expected}
    levels = onnxruntime.GraphOptimizationLevel
    rng = np.random.default_rng(0)
    moved = {
        k: (v * (1 + 1e-6 * rng.choice([-1, 1], v.shape))).astype(v.dtype) if v.dtype.kind == "f" else v
        for k, v in inputs.items()
    }
    for level, feeds, threads in (
        (levels.ORT_ENABLE_ALL, inputs, 1),
        (levels.ORT_ENABLE_BASIC, inputs, 1),
        (levels.ORT_DISABLE_ALL, inputs, 2),
        (levels.ORT_DISABLE_ALL, moved, 1),
    ):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for name, value in zip(expected, session.run(list(expected), feeds), strict=True):
            found[name].append(rms(value, expected[name]))
    return {name: max(values) for name, values in found.items()}


def assert_nodes_equal(model: transmuter.Model, path: Path, inputs: dict[str, np.ndarray]) -> None:
    """Each node of the graph, fed with ONNX Runtime's values, gives ONNX Runtime's result: floats as for a whole graph,
    a quantised integer at most one step off, in at most 1% of the elements (a tie that rounding noise decides)."""
    import onnx
    import onnxruntime

    proto = onnx.load(path)
    proto.graph.ClearField("output")
    values = [v for node in model.graph for v in node.outputs if v.name]
    proto.graph.output.extend(onnx.ValueInfoProto(name=v.name) for v in values)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    reference = dict(zip(values, session.run(None, inputs), strict=True))
    with exact_dtypes(), model.lowering_dtypes():
        weights = {value: model.weight(name) for value, (_, name) in model.weight_values.items()}
        given = {v: jnp.asarray(x) for v, x in model.bind_inputs(inputs).items()}
        fixed = model.scope({**given, **{v: jnp.asarray(x) for v, x in reference.items()}}, weights, None)
        for node in model.graph:
            scope = Scope(dict.fromkeys(node.outputs), model.opsets, parent=fixed)
            Evaluation(model.program).node(node, scope)
            for value in node.outputs:
                if not value.name:
                    continue
                actual, wanted = np.asarray(scope.values[value]), reference[value]
                if wanted.dtype in (np.int8, np.uint8):
                    steps = np.abs(actual.astype(int) - wanted.astype(int))
                    assert steps.max(initial=0) <= 1, f"{node.op_type} {value.name}: {steps.max()} steps"
                    assert np.mean(steps) <= 0.01, f"{node.op_type} {value.name}"
                else:
                    assert_equal(actual, wanted, where=f"{node.op_type} {value.name}")


@pytest.mark.parametrize("mode", ["run", "compile"])
@pytest.mark.parametrize("name", _names())
def test_matches_onnxruntime(name: str, mode: str) -> None:
    """|difference| <= 1e-4 + 1e-3 |reference|; half precision: 2e-3 of rms; what quantises activations while it runs:
    twice ONNX Runtime's distance from itself, or node by node, since one rounding may become a whole step."""
    recorded = load_recorded(name)
    assert len(recorded.cases) >= 2
    model = transmuter.load(recorded.path)
    compiled = transmuter.compile(model)
    for inputs, expected in recorded.cases:
        outputs = transmuter.run(model, inputs) if mode == "run" else compiled(inputs)
        noise = dict.fromkeys(expected, recorded.noise)
        if quantises_activations(model):
            measured = onnxruntime_noise(recorded.path, inputs, expected)
            noise = {name: max(recorded.noise, measured[name]) for name in expected}
        for output, wanted in expected.items():
            actual = np.asarray(outputs[output]) if isinstance(outputs[output], jax.Array) else outputs[output]
            bound = max(2e-3 if is_half(model) else 0.0, 2 * noise[output])
            try:
                assert_equal(actual, wanted, rtol=1e-3, atol=1e-4, where=output)
            except AssertionError:
                assert isinstance(actual, np.ndarray)
                assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
                assert actual.dtype.kind == "f"
                difference = rms(actual, wanted)
                if difference > bound:
                    if not quantises_activations(model):
                        raise
                    assert_nodes_equal(model, recorded.path, inputs)
    if mode == "compile":
        assert compiled.cache_info().misses == compiled.cache_info().evictions + len(compiled.segments)
        calls = compiled.cache_info().misses
        compiled(recorded.cases[-1][0])
        assert compiled.cache_info().misses == calls, "a known signature compiles again"

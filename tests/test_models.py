"""Every recorded model, eager and compiled, against the outputs that ONNX Runtime gave for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from comparison import assert_equal
from conftest import MATERIAL
from onnx import TensorProto, numpy_helper
from onnxruntime import GraphOptimizationLevel

import transmuter
from transmuter.coverage.divergence import diverge

BREAKS: dict[str, tuple[list[str], int, str]] = {
    "zoo/gliner/": (
        ["Range", "ConstantOfShape", "ConstantOfShape", "Range", "Add"],
        3,
        "the numbers of entity types and of words that are found in the input are dimensions of its output; then two "
        "selections by different masks are added, of which nothing in the graph tells that they are equally long",
    ),
    "zoo/vits/": (["Range"], 2, "the length of the speech is a dimension of its output"),
    "models/onnxruntime--logreg_iris": (["ai.onnx.ml::ZipMap"], 1, "maps are made on the host, at the end"),
}
"""The recorded models that break, by the start of their names: operators, how many segments run one after another, and
why no rewrite removes the breaks."""


@dataclass(frozen=True)
class Recorded:
    """One file with its cases: inputs and outputs at two or more shapes."""

    path: Path
    cases: list[tuple[dict[str, np.ndarray], dict[str, Any]]]
    noise: float
    """The largest rms-relative difference of ONNX Runtime from itself, for what amplifies rounding."""


def _names() -> list[Any]:
    if not (MATERIAL / "zoo" / "zoo.json").exists():
        reason = f"no recorded models at {MATERIAL}; TRANSMUTER_MATERIAL names their folder"
        return [pytest.param("", marks=pytest.mark.skip(reason=reason))]
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
    if not expected.size:  # such as the cache of an encoder before the first step
        return 0.0
    return float(np.sqrt(np.mean((actual - expected) ** 2)) / max(np.sqrt(np.mean(expected**2)), 1e-30))


def is_half(model: transmuter.Model) -> bool:
    return any(s.dtype.itemsize == 2 for s in model.shapes["param"].values())


def quantises_activations(model: transmuter.Model) -> bool:
    """Whether rounding noise becomes whole quantisation steps while the graph runs."""
    return any(
        name.split("::")[-1] in ("DynamicQuantizeLinear", "QuantizeLinear", "DynamicQuantizeLSTM", "MatMulInteger")
        for name in model.operators
    )


def at_exact_level(path: Path) -> Path | bytes:
    """The file with its MatMulNBits nodes at accuracy_level 0, if they are at another: at level 4 ONNX Runtime
    quantises the activations to int8, which is an approximation of what the operator is defined to compute."""
    proto = onnx.load(path)
    levels = [
        attribute
        for node in proto.graph.node
        for attribute in node.attribute
        if node.op_type == "MatMulNBits" and attribute.name == "accuracy_level" and attribute.i
    ]
    for attribute in levels:
        attribute.i = 0
    return proto.SerializeToString() if levels else path


def in_float32(source: Path | bytes) -> bytes:
    """A float16 graph with the same weights in float32: what it would give if ONNX Runtime did not round in between."""
    proto = onnx.load_model_from_string(source) if isinstance(source, bytes) else onnx.load(source)
    half, single = TensorProto.FLOAT16, TensorProto.FLOAT
    for tensor in proto.graph.initializer:
        if tensor.data_type == half:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for node in proto.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == half:
                attribute.i = single
            if attribute.HasField("t") and attribute.t.data_type == half:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float32)))
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.tensor_type.elem_type == half:
            value.type.tensor_type.elem_type = single
    proto.graph.ClearField("value_info")
    return proto.SerializeToString()


def onnxruntime_outputs(
    source: Path | bytes,
    names: list[str] | None,
    inputs: dict[str, np.ndarray],
    level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_DISABLE_ALL,
    threads: int = 1,
) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return session.run(names, inputs)


def onnxruntime_noise(
    source: Path | bytes, inputs: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> dict[str, float]:
    """How far ONNX Runtime is from itself, rms-relative: optimised, on two threads, and with float inputs moved by
    1e-6."""
    signs = np.random.default_rng(0)
    moved = {
        name: (x * (1 + 1e-6 * signs.choice([-1, 1], x.shape))).astype(x.dtype) if x.dtype.kind == "f" else x
        for name, x in inputs.items()
    }
    others = [
        onnxruntime_outputs(source, list(expected), inputs, GraphOptimizationLevel.ORT_ENABLE_ALL),
        onnxruntime_outputs(source, list(expected), inputs, GraphOptimizationLevel.ORT_ENABLE_BASIC),
        onnxruntime_outputs(source, list(expected), inputs, threads=2),
        onnxruntime_outputs(source, list(expected), moved),
    ]
    return {name: max(rms(other[i], wanted) for other in others) for i, (name, wanted) in enumerate(expected.items())}


def assert_nodes_equal(path: Path, inputs: dict[str, np.ndarray]) -> None:
    """Each node of the graph, fed with ONNX Runtime's values, gives ONNX Runtime's result: floats as for a whole graph,
    a quantised integer at most one step off, in at most 1% of the elements (a tie that rounding noise decides)."""
    found = diverge(path, inputs)
    assert found.node is None, str(found)
    assert not found.amplified, str(found)
    assert found.compared == found.nodes


@pytest.mark.parametrize("mode", ["run", "compile"])
@pytest.mark.parametrize("name", _names())
def test_matches_onnxruntime(name: str, mode: str) -> None:
    """|difference| <= 1e-4 + 1e-3 |reference|; half precision: 2e-3 of rms, or 1e-3 of what ONNX Runtime gives for the
    same weights in float32; what quantises activations while it runs: twice ONNX Runtime's distance from itself, or
    node by node, since one rounding may become a whole step."""
    recorded = load_recorded(name)
    assert len(recorded.cases) >= 2
    model = transmuter.load(recorded.path)
    compiled = transmuter.compile(model)
    source = at_exact_level(recorded.path)
    for inputs, expected in recorded.cases:
        outputs = transmuter.run(model, inputs) if mode == "run" else compiled(inputs)
        outputs = {k: np.asarray(x) if isinstance(x, jax.Array) else x for k, x in outputs.items()}
        if source != recorded.path:
            exact = dict(zip(expected, onnxruntime_outputs(source, list(expected), inputs), strict=True))
            for output, wanted in exact.items():  # as far from the approximation as what it approximates
                assert rms(outputs[output], expected[output]) <= 1.1 * rms(wanted, expected[output]) + 1e-4
            expected = exact
        noise = dict.fromkeys(expected, recorded.noise)
        if quantises_activations(model) or is_half(model):
            measured = onnxruntime_noise(source, inputs, expected)
            noise = {name: max(recorded.noise, measured[name]) for name in expected}
        for output, wanted in expected.items():
            actual = outputs[output]
            bound = max(2e-3 if is_half(model) else 0.0, 2 * noise[output])
            try:
                assert_equal(actual, wanted, rtol=1e-3, atol=1e-4, where=output)
            except AssertionError:
                assert isinstance(actual, np.ndarray)
                assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
                assert actual.dtype.kind == "f"
                if rms(actual, wanted) <= bound:
                    continue
                if is_half(model):  # ONNX Runtime's own rounding: compare with what it gives without that
                    widened = {k: x.astype(np.float32) if x.dtype == np.float16 else x for k, x in inputs.items()}
                    [wanted] = onnxruntime_outputs(in_float32(source), [output], widened)
                    assert rms(actual, wanted) <= 1e-3
                elif quantises_activations(model):
                    assert_nodes_equal(recorded.path, inputs)
                else:
                    raise
    if mode == "compile":
        found = compiled.explain()
        operators, depths, why = next((b for start, b in BREAKS.items() if name.startswith(start)), ([], 1, ""))
        assert [b.operator for b in found.breaks] == operators, why
        assert found.totals["depths"] == depths, why
        assert compiled.cache_info().misses == compiled.cache_info().evictions + len(compiled.segments)
        calls = compiled.cache_info().misses
        compiled(recorded.cases[-1][0])
        assert compiled.cache_info().misses == calls, "a known signature compiles again"


@pytest.mark.parametrize("name", [name for name in _names() if isinstance(name, str) and name.startswith("models/")])
def test_saved_model_gives_the_same(name: str, tmp_path: Path) -> None:
    """ONNX Runtime's results for `Model.save`'s file are those for the original, bit by bit."""
    recorded = load_recorded(name)
    inputs, expected = recorded.cases[0]
    transmuter.load(recorded.path).save(tmp_path / "saved.onnx")
    wanted = onnxruntime_outputs(recorded.path, list(expected), inputs)
    for actual, value in zip(onnxruntime_outputs(tmp_path / "saved.onnx", list(expected), inputs), wanted, strict=True):
        if isinstance(value, list):
            assert actual == value
        else:
            np.testing.assert_array_equal(actual, value)

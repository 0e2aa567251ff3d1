"""Recording and running in worker processes: limits, crashes, resuming, and what a row says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter.coverage import __main__ as command
from transmuter.coverage import catalogue, page, printing, recording, running
from transmuter.coverage.catalogue import Entry
from transmuter.coverage.running import Limits, Results
from transmuter.coverage.verdicts import Verdict


def model_of(*nodes: onnx.NodeProto, **weights: np.ndarray) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    tensors = [numpy_helper.from_array(w, name) for name, w in weights.items()]
    graph = helper.make_graph(list(nodes), "g", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("odd", 1)])


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Two good models, one whose weights are far too large for what it subtracts, and one with an unknown operator."""
    random = np.random.default_rng(0)
    w = random.normal(size=(4, 8)).astype(np.float32)
    product = helper.make_node("MatMul", ["x", "w"], ["h"])
    models = {
        "good": model_of(product, helper.make_node("Tanh", ["h"], ["y"]), w=w),
        "breaks": model_of(
            helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
            helper.make_node("Cast", ["s"], ["n"], to=TensorProto.INT64),
            helper.make_node("Mul", ["n", "zero"], ["z"]),
            helper.make_node("Add", ["z", "three"], ["k"]),
            helper.make_node("Expand", ["one", "k"], ["y"]),
            zero=np.array([0]),
            three=np.array([3]),
            one=np.ones(1, np.float32),
        ),
        "unknown": model_of(helper.make_node("Nothing", ["x"], ["y"], domain="odd")),
    }
    for name, model in models.items():
        onnx.save_model(model, tmp_path / f"{name}.onnx")
    return {name: tmp_path / f"{name}.onnx" for name in models}


def entries(files: dict[str, Path]) -> list[Entry]:
    return [Entry(name, f"local://{path.name}", task="testing") for name, path in files.items()]


def test_from_recording_to_pages(files, tmp_path):
    found, folder = entries(files), tmp_path / "references"

    def locate(entry: Entry) -> Path:
        return files[entry.name]

    failures = running.record(found, locate, folder, limits=Limits(), jobs=2, progress=False)
    assert list(failures) == ["unknown"]  # ONNX Runtime does not know it either
    assert "ONNX Runtime fails" in failures["unknown"]

    results = Results.at(tmp_path / "results.json")
    running.run(found, locate, folder, results, limits=Limits(), jobs=2, progress=False)
    good, breaks, unknown = (results.rows[name] for name in files)
    assert good["verdict"] == breaks["verdict"] == Verdict.MATCH
    assert [len(good[mode]) for mode in ("eager", "compiled")] == [2, 2]
    assert good["gradient"] == "yes"
    assert good["operators"] == {"MatMul": 1, "Tanh": 1}
    assert good["peak_bytes"] > 0
    assert all(case["seconds"] > 0 for case in good["compiled"])
    assert [b["operator"] for b in breaks["breaks"]] == ["Expand"]
    assert unknown["verdict"] == Verdict.ERROR
    assert "Run `record` first" in unknown["why"]

    before = (tmp_path / "results.json").stat().st_mtime_ns
    again = Results.at(tmp_path / "results.json")
    running.run(found, lambda entry: pytest.fail("it is done"), folder, again, limits=Limits(), progress=False)
    assert (tmp_path / "results.json").stat().st_mtime_ns == before

    for text in (printing.table(again), printing.markdown(again), page.page(again)):
        assert "2 of 3 models work: 2 match, 1 error" in text
    again.rows["good"]["why"] = again.rows["good"]["name"] = "<b>odd</b>"
    assert "<b>odd</b>" not in page.page(again)


@pytest.mark.parametrize(
    ("worker", "limits", "verdict", "told"),
    [
        (
            "import os, signal; print('last words', flush=True); os.kill(os.getpid(), 11)",
            Limits(),
            "error",
            "signal 11: last",
        ),
        ("raise SystemExit(3)", Limits(), "error", "status 3"),
        ("import time; time.sleep(60)", Limits(seconds=0.5), "timeout", "more than 0.5 s"),
        ("x = b'1' * (400 << 20); import time; time.sleep(60)", Limits(bytes=200 << 20), "error", "0.2 GiB of memory"),
    ],
    ids=["crash", "exit", "hang", "memory"],
)
def test_a_worker_that_dies_is_a_row(worker, limits, verdict, told, monkeypatch, tmp_path):
    monkeypatch.setattr(running, "_WORKER", (sys.executable, "-c", worker))
    results = Results.at(tmp_path / "results.json")
    found = [Entry("one", "local://one.onnx"), Entry("two", "local://two.onnx")]
    running.run(found, lambda entry: tmp_path, tmp_path, results, limits=limits, jobs=2, progress=False)
    for row in running.read(tmp_path / "results.json").rows.values():
        assert row["verdict"] == verdict
        assert told in row["why"]


def test_results_of_other_versions_are_not_gone_on_with(tmp_path):
    results = Results.at(tmp_path / "results.json")
    results.about["jax"] = "0.0.1"
    results.save()
    with pytest.raises(transmuter.CoverageError, match=r"made with jax 0\.0\.1"):
        Results.at(tmp_path / "results.json")
    assert Results.at(tmp_path / "results.json", is_new=True).rows == {}
    (tmp_path / "results.json").write_text("[1")
    with pytest.raises(transmuter.CoverageError, match="no results of `run`"):
        running.read(tmp_path / "results.json")


def test_weights_that_decide_shapes_are_not_changed(tmp_path):
    """Scales of Resize a little less than 3 would make images of 11 columns, not of 12."""
    path = tmp_path / "resized.onnx"
    resize = helper.make_node("Resize", ["h", "", "scales"], ["y"], mode="nearest")
    w, scales = np.eye(4, dtype=np.float32), np.array([1, 3], np.float32)
    onnx.save_model(model_of(helper.make_node("MatMul", ["x", "w"], ["h"]), resize, w=w, scales=scales), path)
    entry = Entry("resized", f"local://{path.name}", task="testing")
    recording.record(entry, path, tmp_path / "reference")
    for reference in recording.references(entry, tmp_path / "reference"):
        assert reference.outputs["y"].shape[1] == 12
        assert 0 < reference.noise["y"] < 1e-6


def test_a_reference_is_for_one_rule_of_inputs(files, tmp_path):
    entry = Entry("good", "local://good.onnx")
    recording.record(entry, files["good"], tmp_path / "good")
    [first, _] = recording.references(entry, tmp_path / "good")
    np.testing.assert_array_equal(first.inputs["x"].shape, (2, 4))
    assert 0 < first.noise["y"] < 1e-6
    with pytest.raises(transmuter.CoverageError, match="other inputs"):
        recording.references(Entry("good", "local://good.onnx", sizes=[{"batch": 9}]), tmp_path / "good")
    with pytest.raises(transmuter.CoverageError, match="Run `record` first"):
        recording.references(entry, tmp_path / "other")


def results_of(tmp_path: Path, **verdicts: tuple[Verdict, int]) -> Results:
    rows = {
        name: {"name": name, "verdict": str(v), "why": "", "breaks": [{}] * breaks, "peak_bytes": 3e8}
        for name, (v, breaks) in verdicts.items()
    }
    return Results(tmp_path, {}, rows)


def test_two_runs(tmp_path):
    match, differ, timeout = (Verdict.MATCH, 0), (Verdict.DIFFER, 0), (Verdict.TIMEOUT, 0)
    old = results_of(tmp_path, a=match, b=differ, c=match, d=timeout, e=(Verdict.MATCH, 1))
    new = results_of(tmp_path, a=differ, b=match, c=match, e=(Verdict.MATCH, 2), f=match)
    new.rows["c"]["peak_bytes"] = 9e8
    report, is_good = printing.compared(old, new)
    assert not is_good
    lines = [line.strip() for line in report.splitlines()]
    assert lines[:3] == ["broke:", "a: match → differ ()", "e: 1 → 2 breaks"]
    assert "b: differ → match ()" in lines
    assert "c: peak memory 3e+08 → 9e+08 bytes" in lines
    assert {"f: match", "d: timeout"} <= set(lines)
    assert printing.compared(old, old)[1]


def test_the_command_line(files, tmp_path, capsys):
    listed = tmp_path / "models.toml"
    catalogue.write([entry for entry in entries(files) if entry.name != "unknown"], listed)
    common = ["--models", str(listed), "--cache", str(tmp_path / "cache"), "--local", str(tmp_path), "--no-progress"]
    assert command.main(["record", *common]) == 0
    assert "2 of 2 models are recorded" in capsys.readouterr().out
    kept = ["--results", str(tmp_path / "results.json")]
    assert command.main(["run", "go*", *common, *kept, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in told["models"]] == ["good"]
    html, markdown = tmp_path / "matrix.html", tmp_path / "matrix.md"
    assert command.main(["print", kept[1], "--html", str(html), "--markdown", str(markdown)]) == 0
    assert "1 of 1 models work" in html.read_text()
    assert "| good | testing |" in markdown.read_text()
    capsys.readouterr()
    assert command.main(["run", "nothing", *common, *kept]) == 2
    assert "has no model 'nothing'" in capsys.readouterr().err
    assert command.main(["print", str(tmp_path / "none.json")]) == 2

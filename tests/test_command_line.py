"""`transmuter inspect`, `python -m transmuter`, and the example of the README."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import onnx
import pytest
from building import info, model_of
from onnx import helper, numpy_helper
from test_loading import WEIGHT

from transmuter.__main__ import main

ROOT = Path(__file__).parents[1]


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Frobnicate", ["h"], ["y"])]
    proto = model_of(nodes, [info("x", ("batch", 64))], [info("y", None)], [numpy_helper.from_array(WEIGHT, "w")])
    onnx.save(proto, tmp_path / "model.onnx")
    assert main(["inspect", str(tmp_path / "model.onnx")]) == 0
    printed = capsys.readouterr().out
    for part in (
        "x: float32[batch, 64]",
        "y: float32[?]",
        "ai.onnx 18",
        "(2 nodes)",
        "MatMul 1",
        "1 arrays, 2,048 elements, 8.0 KiB",
        "without a lowering: Frobnicate",
    ):
        assert part in printed


def test_inspect_of_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "none.onnx")]) == 2
    assert "none.onnx cannot be read" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("swift_f0") is None, reason="needs the example's model: swift-f0")
def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    printed = capsys.readouterr().out
    [pitch] = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("pitch of A4")]
    assert abs(pitch - 440) < 2
    [slope] = [float(line.split("=")[1].split()[0]) for line in printed.splitlines() if line.startswith("gradient")]
    assert abs(slope - 1) < 0.2

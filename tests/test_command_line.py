"""`transmuter inspect` and `explain`, and `python -m transmuter`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from building import info, model_of
from onnx import TensorProto, helper, numpy_helper
from test_loading import WEIGHT

from transmuter.__main__ import main


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


# ---- explain -------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A model of which the second input decides a shape, after a product with a symbolic dimension."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Cast", ["n"], ["shape"], to=TensorProto.INT64),
        helper.make_node("ConstantOfShape", ["shape"], ["zeros"], name="blank"),
        helper.make_node("Concat", ["h", "zeros"], ["y"], axis=0),
    ]
    inputs = [info("x", ("batch", 64)), info("n", (2,))]
    weight = numpy_helper.from_array(WEIGHT, "w")
    onnx.save(model_of(nodes, inputs, [info("y", None)], [weight]), tmp_path / "model.onnx")
    np.savez(tmp_path / "inputs.npz", n=np.array([2, WEIGHT.shape[1]], np.float32))
    np.save(tmp_path / "one.npy", WEIGHT)
    return tmp_path / "model.onnx"


def test_a_reader_that_has_had_enough(tmp_path: Path) -> None:
    """As `head`: what is written after it has ended is no error."""
    path = tmp_path / "model.onnx"
    onnx.save(model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x")], [info("y")]), path)
    command = [sys.executable, "-m", "transmuter", "inspect", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_explain(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--inputs", str(file.parent / "inputs.npz"), "batch=3"]
    assert main(["explain", str(file), *given, "--calls", "2", "--html", str(file.parent / "out.html")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("model.onnx: 2 segments (2 signatures), 1 break\n")
    assert "x float32[3, 64], n float32[2]" in printed
    assert "break at blank (ConstantOfShape): needs the contents of its operand" in printed
    assert "<- input 'n'" in printed
    assert "2 calls" in printed
    assert "blank" in (file.parent / "out.html").read_text(encoding="utf-8")
    assert main(["explain", str(file), *given, "x=5x64", "--json", "--static", "n"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["totals"]["breaks"] == 0
    assert held["segments"][0]["signature"].startswith("x float32[5, 64], n = [")
    assert held["segments"][0]["calls"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--inputs", "m=3"], "There is no input and no symbolic dimension 'm'. The model takes x: float32[batch, 64]"),
        (["--inputs", "x=axb"], "'x=axb' gives no shape. Write x=1x32"),
        (["--inputs", "x=3x65"], "has the shape [3, 65]"),
        (["--inputs", "none.npz"], "'none.npz' cannot be read as .npz"),
        (["--inputs", "one.npy"], "it holds one array without a name"),
        (["--inputs", "model.onnx"], "'model.onnx' cannot be read as .npz"),
        (["--static", "m"], "There is no input 'm' to be static"),
        (["--html", "no/folder/out.html", "--inputs", "inputs.npz"], "No such file"),
        (["--calls"], "expected one argument"),
        ([], "failed on"),
    ],
)
def test_errors_are_one_line(
    file: Path,
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(file.parent)
    try:
        status = main(["explain", "model.onnx", *arguments])
    except SystemExit as end:  # argparse's own
        status = end.code
    assert status == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert printed.err.startswith("transmuter: ")
    assert printed.err.count("\n") == 1


def test_inputs_are_made_up_by_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        helper.make_node("Where", ["b", "i", "i"], ["j"]),
        helper.make_node("StringConcat", ["s", "s"], ["t"]),
        helper.make_node("Relu", ["f"], ["g"]),
    ]
    kinds = {"b": TensorProto.BOOL, "i": TensorProto.INT64, "s": TensorProto.STRING, "f": TensorProto.FLOAT16}
    inputs = [info(name, ("n",) if name != "s" else (), kind) for name, kind in kinds.items()]
    outputs = [info(name, None, kinds[kind]) for name, kind in {"j": "i", "t": "s", "g": "f"}.items()]
    onnx.save(model_of(nodes, inputs, outputs, opset=20), tmp_path / "model.onnx")
    assert main(["explain", str(tmp_path / "model.onnx"), "--size", "4", "--inputs", "s="]) == 0
    assert "segment 0 for b bool[4], i int64[4], f float16[4]" in capsys.readouterr().out
    sequence = helper.make_tensor_sequence_value_info("q", TensorProto.FLOAT, None)
    proto = model_of([helper.make_node("SequenceLength", ["q"], ["l"])], [sequence], [info("l", (), TensorProto.INT64)])
    onnx.save(proto, tmp_path / "sequence.onnx")
    assert main(["explain", str(tmp_path / "sequence.onnx")]) == 2
    assert "is no tensor" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["inspect"], ["explain"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {' '.join(['transmuter', *command])}")

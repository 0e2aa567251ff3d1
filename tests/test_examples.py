"""The examples run, and what they print holds: those of training with few steps."""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs the extra 'examples': no {', '.join(missing)}")


@needs("swift_f0")
def test_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "quickstart.py"), run_name="__main__")
    printed = capsys.readouterr().out
    [pitch] = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("pitch of A4")]
    assert abs(pitch - 440) < 2
    [slope] = [float(line.split("=")[1].split()[0]) for line in printed.splitlines() if line.startswith("gradient")]
    assert abs(slope - 1) < 0.2


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, str]]:
    """Runs an example of training and checks what all have in common. Returns its printed lines by their headings."""

    def of(name: str, *options: str) -> dict[str, str]:
        monkeypatch.syspath_prepend(EXAMPLES)
        importlib.import_module(name).main([*options, "--out", str(tmp_path)])
        lines = capsys.readouterr().out.splitlines()
        tuning = lines[next(i for i, line in enumerate(lines) if line.startswith("before")) :]
        losses = [float(line.split()[-1]) for line in tuning if line.startswith("step ")]
        assert losses[-1] < losses[0]
        assert (tmp_path / "tuned.onnx").stat().st_size > 100_000
        with Image.open(tmp_path / "loss.png") as picture:
            picture.load()
            assert picture.format == "PNG"
            assert picture.size == (840, 480)
        return {line[:15].strip(): line[15:] for line in tuning}

    return of


def figures(line: str, metric: str) -> list[float]:
    """The numbers after the name of a metric."""
    return [float(number) for number in re.findall(rf"{metric} ([\d.]+)", line)]


@needs("magika", "matplotlib")
def test_finetune_classifier(run: Callable[..., dict[str, str]]) -> None:
    lines = run("finetune_classifier", "--steps", "3", "--held-out", "2")
    assert figures(lines["before"], "accuracy") < [90]
    assert figures(lines["ONNX Runtime"], "accuracy") == figures(lines["after"], "accuracy")


@needs("arabic_name_romanizer", "matplotlib")
def test_finetune_embeddings(run: Callable[..., dict[str, str]]) -> None:
    lines = run("finetune_embeddings", "--steps", "10", "--pairs", "32")
    [before], [after], [again] = (figures(lines[at], "recall@1") for at in ("before", "after", "ONNX Runtime"))
    assert before < after
    assert again == pytest.approx(after, abs=0.21)  # one name of 500


@needs("arabic_name_romanizer", "matplotlib")
@pytest.mark.parametrize("options", [[], ["--qlora"]], ids=["lora", "qlora"])
def test_lora_lm(run: Callable[..., dict[str, str]], options: list[str], tmp_path: Path) -> None:
    lines = run("lora_lm", "--steps", "4", "--pretraining", "2", *options)
    [before], [after] = (figures(lines[at], "perplexity") for at in ("before", "after"))
    assert after < before
    for reloaded in ("reloaded", "ONNX Runtime"):
        assert figures(lines[reloaded], "perplexity") == pytest.approx([after], abs=0.011)
    assert (tmp_path / "adapters.safetensors").exists()

"""Measures the memory that it takes to load a model and call it once, ours beside ONNX Runtime's.

    python benchmarks/memory.py --only gpt2       # exits with 1 if a bar is missed
    python benchmarks/memory.py --check           # exits with 1 if a loaded model still depends on its file

Each measurement is a process of its own. What counts is its peak of resident memory beyond what it holds after its
imports and a first trivial call, in multiples of the weights' bytes. Needs Linux.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx
from bars import Row, report

Call = Callable[[graphs.Inputs], Any]


@dataclass(frozen=True)
class Case:
    """A model and an input of it, with the bars for our peak. The options are `load`'s."""

    name: str
    model: Callable[[], onnx.ModelProto]
    inputs: graphs.Inputs
    must: float | None = 1.25
    storages: tuple[str, ...] = ("inline", "external")
    options: tuple[tuple[str, Any], ...] = ()


def cases() -> list[Case]:
    mlp = functools.partial(graphs.mlp, 500_000_000)
    bert = functools.partial(graphs.bert, layers=8, hidden=1024, heads=16, ffn=4096)
    wide_resnet = functools.partial(graphs.resnet, blocks=(3, 4, 23, 3), width=108, size=64)
    halves = lambda: graphs.halved(graphs.mlp(500_000_000))
    rows, half_rows = (graphs.normal_inputs("input", (4, 2048), dtype=d) for d in (np.float32, np.float16))
    own_dtypes = (("compute_type", None),)
    decoder = lambda vocab: (functools.partial(graphs.qwen3, vocab=vocab), graphs.decoder_inputs(256, vocab=vocab))
    return [
        Case("mlp", mlp, rows),
        Case("bert", bert, graphs.bert_inputs(1, 32)),
        Case("gpt2", graphs.gpt2, graphs.gpt2_inputs(1, 16)),
        Case("resnet", wide_resnet, graphs.image_inputs(1, size=64)),
        Case("float16 as float16", halves, half_rows, storages=("inline",), options=own_dtypes),
        Case("float16 as float32", halves, half_rows, must=None, storages=("inline",)),
        Case("4-bit decoder", *decoder(151_936), must=1.4, storages=("inline",)),
        Case("4-bit decoder, few tokens", *decoder(32_768), must=1.4, storages=("inline",)),
    ]


def load_ours(path: Path, **options: Any) -> Call:
    import jax

    import transmuter

    compiled = transmuter.compile(transmuter.load(path, **options))
    return lambda inputs: jax.tree.map(np.asarray, compiled(inputs))


def load_onnxruntime(path: Path, **_: Any) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)


RUNTIMES: dict[str, Callable[..., Call]] = {"ours": load_ours, "onnxruntime": load_onnxruntime}


def write(model: onnx.ModelProto, folder: Path, storage: str) -> Path:
    """Writes the model with its weights inside, or in a file beside it."""
    path = folder / storage / "model.onnx"
    path.parent.mkdir(parents=True)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # saving changes where the weights lie
    onnx.save_model(copy, path, save_as_external_data=storage == "external", location="model.onnx.data")
    return path


def weight_bytes(model: onnx.ModelProto) -> int:
    return sum(len(t.raw_data) for t in model.graph.initializer)


# ---- what a process of its own does --------------------------------------------------------------------------------


def status() -> dict[str, int]:
    """This process's memory in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if line[-1] == "kB"}


def peak(runtime: str, case: Case, path: Path) -> int:
    """The bytes by which resident memory rises at most as the model is loaded and called."""
    load = functools.partial(RUNTIMES[runtime], **dict(case.options))
    with tempfile.TemporaryDirectory() as folder:  # after this, imports and thread pools are there
        small = write(graphs.mlp(1, width=64), Path(folder), "inline")
        load(small)(graphs.normal_inputs("input", (1, 64)))
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's own maximum starts anew
    before = status()["VmRSS"]
    load(path)(case.inputs)
    return status()["VmHWM"] - before


def survives(how: str, case: Case, path: Path) -> bool:
    """Whether a model gives the same results if its files are spoilt between loading and the first call."""
    expected = load_ours(path)(case.inputs)
    call = load_ours(path)
    for file in path.parent.iterdir():
        _SPOILERS[how](file)
    actual = call(case.inputs)
    return all(np.array_equal(actual[name], expected[name]) for name in expected)


def _overwrite(file: Path) -> None:
    with open(file, "r+b") as stream:  # in place: whatever maps the file sees it
        for _ in range(0, file.stat().st_size, 1 << 20):
            stream.write(b"\xff" * (1 << 20))


def _truncate(file: Path) -> None:
    file.write_bytes(b"")


_SPOILERS: dict[str, Callable[[Path], None]] = {"overwritten": _overwrite, "truncated": _truncate}


# ---- the process that starts them ----------------------------------------------------------------------------------


def in_own_process(task: str, what: str, case: Case, path: Path) -> Any:
    """What `peak` or `survives` returns there."""
    command = [sys.executable, __file__, "--task", task, what, case.name, str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def rows(only: str = "") -> Iterator[Row]:
    """A row for each case and storage whose name contains `only`."""
    for case in cases():
        wanted = [storage for storage in case.storages if only in f"{case.name}, {storage}"]
        model = case.model() if wanted else None
        for storage in wanted:
            with tempfile.TemporaryDirectory() as folder:
                path, size = write(model, Path(folder), storage), weight_bytes(model)
                ours, theirs = (in_own_process("peak", runtime, case, path) / size for runtime in RUNTIMES)
            name = f"{case.name}, {storage}, {size / 1e6:.0f} MB"
            yield Row(name, ours, theirs, "x", ours, case.must, 1.05)


def check() -> bool:
    """Whether a loaded model gives the same results after its files were overwritten or truncated; prints which."""
    case = cases()[0]
    model, good = case.model(), True
    for storage in case.storages:
        for how in _SPOILERS:
            with tempfile.TemporaryDirectory() as folder:
                same = in_own_process("survives", how, case, write(model, Path(folder), storage))
            print(f"{storage}, {how}: {'the same' if same else 'DIFFERENT'} results", flush=True)
            good &= same
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--check", action="store_true", help="only test that loaded models do not need their files")
    parser.add_argument("--task", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task, what, name, path = arguments.task
        case = next(case for case in cases() if case.name == name)
        print(json.dumps({"peak": peak, "survives": survives}[task](what, case, Path(path))))
        return
    sys.exit(not check() if arguments.check else report(rows(arguments.only), arguments.json) > 0)


if __name__ == "__main__":
    main()

"""Compares the memory that Transmuter and ONNX Runtime take to load a model and call it once.

    python benchmarks/memory.py             # exits with 1 if ours takes more
    python benchmarks/memory.py --check     # exits with 1 if a loaded model still depends on its file

Each measurement is a process of its own. What it takes after its imports and a first trivial call counts, in multiples
of the weights' bytes: the peak of resident memory, and of the anonymous part of it (without what is mapped from files).
Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx

Call = Callable[[graphs.Inputs], np.ndarray]
BATCH, WIDTH = 4, 2048


def load_ours(path: Path) -> Call:
    import transmuter

    compiled = transmuter.compile(transmuter.load(path))
    return lambda inputs: np.asarray(compiled(inputs)["output"])


def load_onnxruntime(path: Path) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


RUNTIMES: dict[str, Callable[[Path], Call]] = {"ours": load_ours, "onnxruntime": load_onnxruntime}
STORAGES = ("inline", "external")
SLACK = {"resident": 0.0, "anonymous": 0.01}
"""By how much of the weights ours may exceed: sampling misses moments, and compiling takes a little of its own."""


def write(model: onnx.ModelProto, folder: Path, storage: str) -> Path:
    """Writes the model with its weights inside, or in a file beside it."""
    path = folder / storage / "model.onnx"
    path.parent.mkdir(parents=True)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # saving changes where the weights lie
    onnx.save_model(copy, path, save_as_external_data=storage == "external", location="model.onnx.data")
    return path


# ---- what a process of its own does --------------------------------------------------------------------------------


class Peak:
    """The largest resident and anonymous memory within a `with` block, above what there was before it."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's own maximum starts anew
        self._before = _status()
        self._anonymous = self._before["RssAnon"]
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample)  # of anonymous memory the kernel keeps no maximum
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._sampler.join()
        self.resident = _status()["VmHWM"] - self._before["VmRSS"]
        self.anonymous = self._anonymous - self._before["RssAnon"]

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self._anonymous = max(self._anonymous, _status()["RssAnon"])


def _status() -> dict[str, int]:
    """This process's memory in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines if line[-1] == "kB"}


def _warm_up(load: Callable[[Path], Call], folder: Path) -> None:
    """Loads and calls a small model, after which imports and thread pools are there."""
    path = write(graphs.mlp(1, width=64), folder, "warm-up")
    load(path)(graphs.normal_inputs("input", (1, 64)))


def measure(runtime: str, path: Path) -> dict[str, Any]:
    load = RUNTIMES[runtime]
    inputs = graphs.normal_inputs("input", (BATCH, WIDTH))
    with tempfile.TemporaryDirectory() as folder:
        _warm_up(load, Path(folder))
    with Peak() as peak:
        start = time.perf_counter()
        result = load(path)(inputs)
        seconds = time.perf_counter() - start
    return {
        "resident": peak.resident,
        "anonymous": peak.anonymous,
        "seconds": seconds,
        "result": float(np.abs(result).sum()),
    }


def overwrite(file: Path) -> None:
    with open(file, "r+b") as stream:  # in place: whatever maps the file sees it
        for _ in range(0, file.stat().st_size, 1 << 20):
            stream.write(b"\xff" * (1 << 20))


def truncate(file: Path) -> None:
    os.truncate(file, 0)


SPOILERS: dict[str, Callable[[Path], None]] = {"overwritten": overwrite, "truncated": truncate}


def check(how: str, path: Path) -> dict[str, Any]:
    """Whether a model gives the same result if its files are spoilt between loading and the first call."""
    inputs = graphs.normal_inputs("input", (BATCH, WIDTH))
    expected = load_ours(path)(inputs)
    call = load_ours(path)
    for file in path.parent.iterdir():
        SPOILERS[how](file)
    return {"same": bool(np.array_equal(call(inputs), expected))}


# ---- the process that starts them ----------------------------------------------------------------------------------


def in_own_process(task: str, what: str, path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--task", task, what, str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return {"failed": f"exit status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def compare(model: onnx.ModelProto, folder: Path) -> bool:
    """Whether ours takes no more memory than ONNX Runtime, however the weights are stored."""
    weights = sum(len(t.raw_data) for t in model.graph.initializer)
    print(f"{weights / 1e6:.0f} MB of weights")
    print(f"{'weights':<10}{'runtime':<13}{'resident':>10}{'anonymous':>11}{'seconds':>9}")
    good = True
    for storage in STORAGES:
        path = write(model, folder, storage)
        found = {runtime: in_own_process("measure", runtime, path) for runtime in RUNTIMES}
        for runtime, peak in found.items():
            if "failed" in peak:
                sys.exit(f"{runtime} failed: {peak['failed']}")
            print(
                f"{storage:<10}{runtime:<13}{peak['resident'] / weights:>9.3f}x{peak['anonymous'] / weights:>10.3f}x"
                f"{peak['seconds']:>9.2f}"
            )
        good &= np.isclose(found["ours"]["result"], found["onnxruntime"]["result"], rtol=1e-3)
        good &= all(found["ours"][kind] <= found["onnxruntime"][kind] + s * weights for kind, s in SLACK.items())
    return good


def compare_with_spoilt(model: onnx.ModelProto, folder: Path) -> bool:
    """Whether loaded models give the same results after their files were overwritten or truncated."""
    good = True
    for storage in STORAGES:
        for how in SPOILERS:
            found = in_own_process("check", how, write(model, folder / how, storage))
            print(f"{storage:<10}{how:<13}{found}")
            good &= found.get("same", False)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=float, default=4e8, help="size of the weights")
    parser.add_argument("--check", action="store_true", help="only test that loaded models do not need their files")
    parser.add_argument("--task", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task, what, path = arguments.task
        print(json.dumps({"measure": measure, "check": check}[task](what, Path(path))))
        return
    model = graphs.mlp(int(arguments.bytes), width=WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        good = (compare_with_spoilt if arguments.check else compare)(model, Path(folder))
    print("good" if good else "NOT GOOD")
    sys.exit(not good)


if __name__ == "__main__":
    main()

"""Compares a step of training with PyTorch's, on the same threads and in turns.

    python benchmarks/training.py --only resnet18 --repeats 10 --json results.json

A step is the loss of a batch, its gradients, and AdamW. Each runtime has a process of its own, which waits while
another makes its step: so a disturbance hits all, and the peak of each one's memory can be told. Needs PyTorch, and
Linux for the peaks.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import graphs
import inference
import memory
import numpy as np
import onnx
import turns
from bars import Row, report

_RATE = 1e-5
_WARMUP = 3
"""Rounds that are not measured; their losses are compared."""
_COMPILER = "torch.compile"
_CXX = ("g++", "clang++")


@dataclass(frozen=True)
class Case:
    """A model, a batch of it, and the bars for the ratio to PyTorch's eager mode."""

    name: str
    model: Callable[[], onnx.ModelProto]
    peer: str
    """The class in `torch_models`."""
    inputs: Callable[[], graphs.Inputs]
    classes: int
    must: float
    aim: float

    def batch(self) -> tuple[graphs.Inputs, np.ndarray]:
        """The inputs, and the labels."""
        inputs = self.inputs()
        rows = len(next(iter(inputs.values())))
        return inputs, np.random.RandomState(1).randint(0, self.classes, rows).astype(np.int64)


def cases() -> list[Case]:
    minilm, images = lambda: graphs.bert_inputs(16, 128), lambda: graphs.image_inputs(8)
    return [
        Case("minilm 16x128", lambda: graphs.bert(classes=2), "Bert", minilm, 2, must=0.9, aim=0.8),
        Case("resnet18 8", graphs.basic_resnet, "BasicResNet", images, 1000, must=1.0, aim=0.9),
    ]


# ---- what a process of its own does --------------------------------------------------------------------------------


def ours(case: Case, folder: Path, threads: int) -> Callable[[], float]:
    """A function that makes a step and returns the loss."""
    import jax
    import optax

    import transmuter
    from transmuter import train

    inputs, labels = case.batch()
    model, statistics = transmuter.load(folder / "model.onnx", trainable=True), {}
    if any(op == "BatchNormalization" for op in model.operators):
        model, statistics = train.with_batch_statistics(model)
    step = train.Step(model, train.losses.cross_entropy(), optax.adamw(_RATE, weight_decay=0.01), statistics=statistics)
    batch, state = {**inputs, "labels": labels}, step.init()

    def make_step() -> float:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready(state)
        return float(metrics["loss"])

    return make_step


def pytorch(case: Case, folder: Path, threads: int, *, compiled: bool = False) -> Callable[[], float]:
    """The same in PyTorch, with its defaults."""
    import torch
    import torch_models

    torch.set_num_threads(threads)
    inputs, labels = ([torch.from_numpy(x) for x in arrays] for arrays in (case.batch()[0].values(), case.batch()[1:]))
    module = getattr(torch_models, case.peer)()
    with np.load(folder / "weights.npz") as arrays:
        torch_models.load(module, arrays)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), _RATE, weight_decay=0.01)
    forward = torch.compile(module) if compiled else module

    def make_step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(forward(*inputs), labels[0])
        loss.backward()
        optimizer.step()
        return loss.item()

    return make_step


RUNTIMES: dict[str, Callable[..., Callable[[], float]]] = {
    "ours": ours,
    "eager": pytorch,
    _COMPILER: lambda *arguments: pytorch(*arguments, compiled=True),
}


def work(runtime: str, name: str, folder: str, threads: str) -> None:
    """Makes a step for each line that it reads, and writes the milliseconds, the loss, and the peak of memory so far,
    in bytes beyond what the process held after its imports."""
    inference.use_cpus(int(threads))
    for module in ("transmuter.train",) if runtime == "ours" else ("torch_models", "torch._dynamo"):
        importlib.import_module(module)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's own maximum starts anew
    before = memory.status()["VmRSS"]
    make_step = RUNTIMES[runtime](next(case for case in cases() if case.name == name), Path(folder), int(threads))
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = make_step()
        ms = 1e3 * (time.perf_counter() - start)
        print(json.dumps({"ms": ms, "loss": loss, "peak": memory.status()["VmHWM"] - before}), flush=True)


# ---- the process that starts them ----------------------------------------------------------------------------------


class Worker(turns.Process):
    """A process that makes steps."""

    def __init__(self, runtime: str, case: Case, folder: str, threads: int):
        super().__init__([__file__, "--worker", runtime, case.name, folder, str(threads)])

    @property
    def ms(self) -> float:
        """The median of the steps after the first ones."""
        return statistics.median(step["ms"] for step in self.rounds[_WARMUP:])

    @property
    def peak(self) -> float:
        """In MB."""
        return self.rounds[-1]["peak"] / 1e6


def measure(case: Case, runtimes: list[str], repeats: int, threads: int) -> dict[str, Worker]:
    """Steps in turns, of each runtime."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        _write(case, Path(folder))
        workers = {name: stack.enter_context(Worker(name, case, folder, threads)) for name in runtimes}
        for _ in range(_WARMUP + repeats):
            for worker in workers.values():
                worker.work()
    return workers


def _write(case: Case, folder: Path) -> None:
    import torch_models

    model = case.model()
    onnx.save_model(model, folder / "model.onnx")
    np.savez(folder / "weights.npz", **torch_models.weights(model))


def rows(only: str, repeats: int, threads: int) -> Iterator[Row]:
    """For each case whose name contains `only`, a row for each of PyTorch's modes, and one for its peak of memory."""
    has_compiler = "CXX" in os.environ or any(map(shutil.which, _CXX))
    runtimes = ["ours", "eager", *([_COMPILER] if has_compiler else [])]
    for case in cases():
        if only not in case.name:
            continue
        workers = measure(case, runtimes, repeats, threads)
        mine = workers.pop("ours")
        for mode, theirs in workers.items():
            bars = (case.must, case.aim) if mode == "eager" else (None, None)
            losses = [[step["loss"] for step in worker.rounds[:_WARMUP]] for worker in (mine, theirs)]
            error = float(np.abs(np.subtract(*losses)).max())
            yield Row(_label(case, mode), mine.ms, theirs.ms, "ms", mine.ms / theirs.ms, *bars, error)
            yield Row(f"{_label(case, mode)}, peak", mine.peak, theirs.peak, "MB", mine.peak / theirs.peak)
        if not has_compiler:
            print(f"{_label(case, _COMPILER)}: not measured, since there is no C++ compiler (none of {_CXX}, no CXX)")


def _label(case: Case, mode: str) -> str:
    return case.name if mode == "eager" else f"{case.name}, {mode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=10, help="measured rounds of each case")
    parser.add_argument("--threads", type=int, default=2, help="CPUs that all may use")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        sys.exit("There is no PyTorch to compare with. Install it: pip install 'transmuter[bench-train]'.")
    if arguments.worker:
        work(*arguments.worker)
        return
    sys.exit(report(rows(arguments.only, arguments.repeats, arguments.threads), arguments.json) > 0)


if __name__ == "__main__":
    main()

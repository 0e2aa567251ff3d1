"""Measures what a process does before its first result: importing, loading, tracing, compiling.

    python benchmarks/start.py --only minilm      # exits with 1 if a bar is missed

Each measurement is a process of its own. Python's bytecode is there already, as it is in an installed package.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import graphs
import numpy as np
import onnx
from bars import Row, report

Seconds = dict[str, float]
SIZES = (500, 2000, 8000)
"""Nodes of the graphs that show how the time grows."""
WIDTH = 16


def encoder(nodes: int) -> onnx.ModelProto:
    """A deep and narrow BERT: every layer has the same operators and shapes."""
    return graphs.bert(layers=nodes // 87, hidden=64, heads=4, ffn=128, vocab=100)


def mixture(nodes: int) -> onnx.ModelProto:
    """Products, slices, means, computed shapes and elementwise operators in a random order, which repeats nothing."""
    g, random = graphs.Graph("mixture", opset=17, seed=0), np.random.RandomState(0)
    x = g.input("x", onnx.TensorProto.FLOAT, ("batch", WIDTH))
    for i in range(nodes // 17):
        first, second = (random.choice(["Sin", "Tanh", "Abs", "Sigmoid", "Softplus", "Erf", "Floor"]) for _ in "ab")
        turned = g.op(first, g.reshape(x, (g.dim(x, 1), g.dim(x, 0))))
        y = g.reshape(turned, (g.dim(x, 0), g.dim(x, 1)))
        if random.rand() < 0.5:
            y = g.op("MatMul", y, g.normal(f"{i}.weight", (WIDTH, WIDTH), WIDTH**-0.5))
        else:
            start, axis = int(random.randint(8)), g.constant([1], np.int64)
            bounds = g.constant([start], np.int64), g.constant([start + 8], np.int64)
            y = g.op("Concat", g.op("Slice", y, *bounds, axis), g.op("Slice", x, *bounds, axis), axis=1)
        x = g.op("Add", g.op(second, y), g.op("Mul", x, g.op("ReduceMean", y, axes=[1])))
    return g.model({"output": (x, ("batch", WIDTH))})


def inputs_of(name: str) -> graphs.Inputs:
    return graphs.normal_inputs("x", (4, WIDTH)) if name == "mixture" else graphs.bert_inputs(1, 32, vocab=100)


MODELS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "minilm": lambda nodes: graphs.bert(),
    "encoder": encoder,
    "mixture": mixture,
}


# ---- what a process of its own does --------------------------------------------------------------------------------


def importing(module: str) -> Seconds:
    """Importing a module, where JAX is imported already."""
    import jax  # noqa: F401 - its own time is no part of it

    started = time.perf_counter()
    __import__(module)
    return {"import": time.perf_counter() - started}


def starting(name: str, path: Path) -> Seconds:
    """From importing Transmuter to a first result, in parts."""
    import jax  # noqa: F401 - its own time is no part of it

    started = time.perf_counter()
    import transmuter

    compile_ = transmuter.compile  # the modules behind the names are there after this
    imported = time.perf_counter()
    model = transmuter.load(path)
    loaded = time.perf_counter()
    compiled = compile_(model)
    for result in compiled(inputs_of(name)).values():
        np.asarray(result)
    called = time.perf_counter()
    info = compiled.cache_info()
    return {
        "import": imported - started,
        "load": loaded - imported,
        "trace": info.trace_seconds,
        "compile": info.compile_seconds,
        "first call": called - loaded,
    }


def starting_onnxruntime(name: str, path: Path) -> Seconds:
    """Making a session, which does all that compiling does for us, and its first run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    started = time.perf_counter()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    made = time.perf_counter()
    session.run(None, inputs_of(name))
    return {"load": made - started, "first call": time.perf_counter() - made}


# ---- the process that starts them ----------------------------------------------------------------------------------


class Processes:
    """Runs tasks in processes that share a folder of bytecode, made by a first one.

    Args:
        folder: For the bytecode.
    """

    def __init__(self, folder: Path):
        ours = {"PYTHONDONTWRITEBYTECODE", "TRANSMUTER_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR"}
        self._environment = {name: text for name, text in os.environ.items() if name not in ours}
        self._environment["PYTHONPYCACHEPREFIX"] = str(folder)
        for module in ("transmuter.segments", "onnxruntime"):
            self.run("importing", module)

    def run(self, task: str, *arguments: str | Path, variables: Mapping[str, str] | None = None) -> Seconds:
        command = [sys.executable, __file__, "--task", task, *map(str, arguments)]
        environment = {**self._environment, **(variables or {})}
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    def median(self, *task: str | Path, repeats: int) -> Seconds:
        runs = [self.run(*task) for _ in range(repeats)]
        return {part: statistics.median(run[part] for run in runs) for part in runs[0]}


def import_rows(processes: Processes) -> Iterator[Row]:
    ours, theirs = (processes.median("importing", m, repeats=5)["import"] for m in ("transmuter", "onnxruntime"))
    yield Row("import, beyond JAX", ours, theirs, "s", ours, 0.15, 0.05)


def first_call_rows(
    processes: Processes, folder: Path, name: str, nodes: int, must: float, aim: float
) -> Iterator[Row]:
    """What compiling takes (ours) and making a session (theirs), and a second process with a persistent cache (ours)
    beside a first one (theirs)."""
    path = folder / f"{name} {nodes}.onnx"
    model = MODELS[name](nodes)
    onnx.save_model(model, path)
    title = f"{name} {len(model.graph.node)}"
    found = processes.median("starting", name, path, repeats=3)
    theirs = processes.median("starting_onnxruntime", name, path, repeats=3)
    ours = found["trace"] + found["compile"]
    yield Row(f"{title}: trace + compile", ours, theirs["load"], "s", ours, must, aim)
    whole = found["import"] + found["load"] + found["first call"]
    yield Row(f"{title}: import to result", whole, None, "s", whole)
    cached = {"TRANSMUTER_CACHE_DIR": str(folder / f"{name} {nodes} cache")}
    cold, *warm = (processes.run("starting", name, path, variables=cached)["first call"] for _ in range(4))
    again = statistics.median(warm)
    yield Row(f"{title}: first call, cache warm", again, cold, "s", again / cold, 0.4, 0.25)


def growth_rows(processes: Processes, folder: Path, name: str) -> Iterator[Row]:
    """Seconds for 1000 nodes at each size, and how they grow from the middle size to the largest."""
    sums = []
    for nodes in SIZES:
        path = folder / f"{name} {nodes}.onnx"
        model = MODELS[name](nodes)
        onnx.save_model(model, path)
        count = len(model.graph.node)
        found = processes.run("starting", name, path)
        parts = {part: 1000 * found[part] / count for part in ("load", "trace", "compile")}
        for part, seconds in parts.items():
            yield Row(f"{name} {count}: {part} of 1000 nodes", seconds, None, "s", seconds)
        sums.append(sum(parts.values()))
    growth = sums[-1] / sums[-2]
    yield Row(f"{name}: of 1000, {SIZES[-1]} by {SIZES[-2]}", sums[-1], sums[-2], "s", growth, 1.5, 1.0)


def rows(only: str = "") -> Iterator[Row]:
    """A row for each figure whose group (import, minilm, encoder, mixture, growth) contains `only`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = Processes(folder / "bytecode")
        groups: dict[str, Callable[[], Iterator[Row]]] = {
            "import": functools.partial(import_rows, processes),
            "minilm": functools.partial(first_call_rows, processes, folder, "minilm", 0, 1.5, 0.75),
            "encoder": functools.partial(first_call_rows, processes, folder, "encoder", 3000, 6.0, 3.0),
            "mixture": functools.partial(first_call_rows, processes, folder, "mixture", 3000, 6.0, 3.0),
            "growth of encoder": functools.partial(growth_rows, processes, folder, "encoder"),
            "growth of mixture": functools.partial(growth_rows, processes, folder, "mixture"),
        }
        for group, made in groups.items():
            if only in group:
                yield from made()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="import, minilm, encoder, mixture or growth")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--task", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task, *rest = arguments.task
        tasks = {f.__name__: f for f in (importing, starting, starting_onnxruntime)}
        print(json.dumps(tasks[task](*rest)))
        return
    sys.exit(report(rows(arguments.only), arguments.json) > 0)


if __name__ == "__main__":
    main()

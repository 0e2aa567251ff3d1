"""What a call of a compiled model costs beyond XLA's own work, and what the first call of a process costs.

    python benchmarks/calls.py              # exits with 1 if a call adds more than 60 microseconds
    python benchmarks/calls.py --start      # first calls in fresh processes: no cache, cold and warm

The model of the first has 300 small params and no graph break, so that Python's part is nearly all. The same function
under a bare `jax.jit`, with the same arguments, is what it is compared with; calls alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx

LIMIT = 60.0
"""Microseconds of Python that a call may add."""
PARAMS, WIDTH = 300, 8


def deep() -> onnx.ModelProto:
    """Small products and sums: 300 params, two inputs."""
    g = graphs.Graph("deep", opset=17, seed=0)
    x = g.input("x", onnx.TensorProto.FLOAT, ("batch", WIDTH))
    y = g.input("y", onnx.TensorProto.FLOAT, ("batch", WIDTH))
    x = g.op("Add", x, y)
    for i in range(PARAMS // 2):
        product = g.op("MatMul", x, g.normal(f"{i}.weight", (WIDTH, WIDTH), WIDTH**-0.5))
        x = g.op("Tanh", g.op("Add", product, g.normal(f"{i}.bias", (4, WIDTH), 0.1)))
    return g.model({"output": (x, ("batch", WIDTH))})


def microseconds(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median time of each, measured in turns: CPU time of this thread, which is not Python's alone (XLA starts its
    work here too), but which other processes disturb little."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 50):
        for name, call in calls.items():
            started = time.thread_time_ns()
            jax.block_until_ready(call())
            if round_ >= 50:
                times[name].append(time.thread_time_ns() - started)
    return {name: 1e-3 * float(np.median(found)) for name, found in times.items()}


def overhead(rounds: int) -> bool:
    """Whether calls add no more than the limit."""
    import jax

    import transmuter

    model = transmuter.load(deep())
    inputs = {name: np.full((4, WIDTH), 0.5, np.float32) for name in ("x", "y")}
    compiled = transmuter.compile(model, inputs)
    [segment] = compiled.segments
    executable = segment.executable(own_params=True)
    weights, arguments = executable.values, list(inputs.values())
    assert len(weights) == PARAMS
    bare = jax.jit(lambda params, inputs: model.apply(params, inputs))
    params = model.params
    calls = {
        "bare jit": lambda: executable.function(weights, arguments),
        "bare jit of model.apply": lambda: bare(params, inputs),
        "compiled": lambda: compiled(inputs),
        "compiled, params given": lambda: compiled(inputs, params=params),
    }
    found = microseconds(calls, rounds)
    with transmuter.telemetry.subscribe(lambda event: None, transmuter.telemetry.SegmentRun):
        listened = microseconds({"bare jit": calls["bare jit"], "compiled": calls["compiled"]}, rounds)
    added = found["compiled"] - found["bare jit"]
    print(f"{PARAMS} params, {len(inputs)} inputs, median of {rounds} calls in turns, microseconds")
    for name, value in found.items():
        print(f"  {name:<32}{value:>8.1f}{value - found['bare jit']:>+8.1f}")
    more = listened["compiled"] - listened["bare jit"]
    print(f"  {'compiled, with a subscriber':<32}{listened['compiled']:>8.1f}{more:>+8.1f}")
    print(f"  {'telemetry where nobody listens':<32}{silence():>8.2f}")
    print(f"a call adds {added:.1f} microseconds; {LIMIT:.0f} are allowed")
    return added <= LIMIT


def silence() -> float:
    """Microseconds that a run's event costs where nobody has subscribed."""
    from transmuter import telemetry

    labels = {"model": "m", "depth": 0, "signature": "s"}
    count = 100_000
    started = time.perf_counter()
    for _ in range(count):
        if telemetry.is_wanted(telemetry.SegmentRun):
            raise AssertionError
        telemetry.record(telemetry.SegmentRun, 0.0, **labels)
    return 1e6 * (time.perf_counter() - started) / count


# ---- the first call of a process -----------------------------------------------------------------------------------


def first_call(path: Path) -> dict[str, float]:
    import jax  # noqa: F401 - importing is no part of it

    import transmuter

    started = time.perf_counter()
    compiled = transmuter.compile(transmuter.load(path))
    loaded = time.perf_counter()
    result = compiled(graphs.bert_inputs(1, 32))
    np.asarray(next(iter(result.values())))
    return {"load": loaded - started, "first call": time.perf_counter() - loaded}


def start() -> bool:
    """Whether the persistent cache makes a process's first call faster."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save_model(graphs.bert(), path)
        cached = {"TRANSMUTER_CACHE_DIR": str(Path(folder) / "cache")}
        print("MiniLM's architecture, 1x32 tokens, fresh processes, seconds")
        found = {}
        for name, variables in {"no persistent cache": {}, "cold": cached, "warm": cached}.items():
            command = [sys.executable, __file__, "--task", str(path)]
            environment = {k: v for k, v in os.environ.items() if k != "TRANSMUTER_CACHE_DIR"} | variables
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"  {name:<22}" + "".join(f"{what} {value:6.2f}   " for what, value in found[name].items()))
    return found["warm"]["first call"] < found["cold"]["first call"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000, help="measured calls of each kind")
    parser.add_argument("--start", action="store_true", help="measure first calls instead")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        print(json.dumps(first_call(Path(arguments.task))))
        return
    good = start() if arguments.start else overhead(arguments.rounds)
    print("good" if good else "NOT GOOD")
    sys.exit(not good)


if __name__ == "__main__":
    main()

"""What a call of a compiled model costs beyond XLA's own work.

    python benchmarks/calls.py              # exits with 1 if a call adds more than 60 microseconds

The model has 300 small params and no graph break, so that Python's part is nearly all. The same function
under a bare `jax.jit`, with the same arguments, is what it is compared with; calls alternate.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import graphs
import numpy as np
import onnx
from bars import Row, report

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


def rows(rounds: int = 2000) -> Iterator[Row]:
    """Microseconds of each kind of call, beside those of a bare `jax.jit`; the figure is what it adds."""
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
    for name in list(calls)[1:]:
        must = LIMIT if name == "compiled" else None
        yield Row(name, found[name], found["bare jit"], "us", found[name] - found["bare jit"], must, LIMIT / 2)
    more = listened["compiled"] - listened["bare jit"]
    yield Row("compiled, with a subscriber", listened["compiled"], listened["bare jit"], "us", more)
    spent = silence()
    yield Row("telemetry where nobody listens", spent, None, "us", spent)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000, help="measured calls of each kind")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    arguments = parser.parse_args()
    sys.exit(report(rows(arguments.rounds), arguments.json) > 0)


if __name__ == "__main__":
    main()

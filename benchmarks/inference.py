"""Compares Transmuter's compiled models with ONNX Runtime, on the same threads and in the same minute.

    python benchmarks/inference.py --only minilm --repeats 50 --threads 2 --json results.json

Calls alternate, ours and theirs, so that whatever else the machine does disturbs both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import graphs
import numpy as np
import onnx


@dataclass(frozen=True)
class Case:
    name: str
    architecture: str
    inputs: graphs.Inputs


@dataclass(frozen=True)
class Result:
    """Milliseconds of a call, seconds of what precedes the first one, and the largest absolute difference."""

    case: str
    ours_ms: float
    onnxruntime_ms: float
    ratio: float
    trace_s: float
    compile_s: float
    max_abs_error: float


ARCHITECTURES: dict[str, Callable[[], onnx.ModelProto]] = {
    "minilm": graphs.bert,
    "vit-s": graphs.vit,
    "resnet50": graphs.resnet,
    "mobilenetv2": graphs.mobilenet,
    "lstm": graphs.lstm,
}


def cases() -> list[Case]:
    texts = [Case(f"minilm {b}x{s}", "minilm", graphs.bert_inputs(b, s)) for b, s in ((1, 8), (1, 128), (8, 128))]
    patches = [Case(f"vit-s {b}", "vit-s", graphs.image_inputs(b, name="pixel_values")) for b in (1, 4)]
    images = [Case(f"{a} {b}", a, graphs.image_inputs(b)) for a in ("resnet50", "mobilenetv2") for b in (1, 4)]
    series = [Case("lstm 1x100", "lstm", graphs.normal_inputs("input", (1, 100, 64)))]
    return [*texts, *patches, *images, *series]


def run_in_onnxruntime(model: onnx.ModelProto, inputs: graphs.Inputs, threads: int) -> Callable[[], dict[str, Any]]:
    """A call of ONNX Runtime with its default optimisations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its threads otherwise spin for a while after a call and slow the call of ours that comes next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda: dict(zip(names, session.run(names, inputs), strict=True))


def seconds_before_first_run(compiled: Any) -> tuple[float, float]:
    """Seconds that the compiled model has spent on tracing and on compiling its segments."""
    segments = compiled.cache_info().segments
    return sum(s.trace_seconds for s in segments), sum(s.compile_seconds for s in segments)


def alternate(calls: list[Callable[[], Any]], repeats: int, warmup: int = 3) -> list[float]:
    """Each call's median milliseconds."""
    times: list[list[float]] = [[] for _ in calls]
    for round_ in range(warmup + repeats):
        for call, spent in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if round_ >= warmup:
                spent.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(spent) for spent in times]


def measure(case: Case, model: onnx.ModelProto, repeats: int, threads: int) -> Result:
    import jax

    import transmuter

    compiled = transmuter.compile(transmuter.load(model), case.inputs)

    def ours() -> dict[str, Any]:
        return jax.block_until_ready(compiled(case.inputs))

    theirs = run_in_onnxruntime(model, case.inputs, threads)
    actual, expected = ours(), theirs()
    error = max(float(np.abs(np.asarray(actual[name]) - expected[name]).max()) for name in expected)
    mine, other = alternate([ours, theirs], repeats)
    return Result(case.name, mine, other, mine / other, *seconds_before_first_run(compiled), error)


def results(only: str, repeats: int, threads: int) -> Iterator[Result]:
    wanted = [case for case in cases() if only in case.name]
    for architecture, build in ARCHITECTURES.items():
        of_architecture = [case for case in wanted if case.architecture == architecture]
        model = build() if of_architecture else None
        yield from map(partial(measure, model=model, repeats=repeats, threads=threads), of_architecture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=30, help="measured rounds of each case")
    parser.add_argument("--threads", type=int, default=2, help="CPUs that both may use")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    arguments = parser.parse_args()
    # XLA takes as many threads as the process may use CPUs, when JAX starts.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])

    print(f"{arguments.threads} CPUs; load average at the start {os.getloadavg()[0]:.1f}, which should be near 0")
    print(f"{'case':<16}{'ours ms':>10}{'ORT ms':>10}{'ratio':>8}{'trace s':>10}{'compile s':>11}{'max error':>12}")
    found = []
    for r in results(arguments.only, arguments.repeats, arguments.threads):
        print(
            f"{r.case:<16}{r.ours_ms:>10.2f}{r.onnxruntime_ms:>10.2f}{r.ratio:>8.2f}"
            f"{r.trace_s:>10.2f}{r.compile_s:>11.2f}{r.max_abs_error:>12.1e}",
            flush=True,
        )
        found.append(r)
    if arguments.json:
        with open(arguments.json, "w") as stream:
            json.dump([asdict(r) for r in found], stream, indent=2)
            stream.write("\n")


if __name__ == "__main__":
    main()

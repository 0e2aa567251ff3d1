"""Compares Transmuter's compiled models with ONNX Runtime, on the same threads and in the same minute.

    python benchmarks/inference.py --only minilm --repeats 50 --threads 2 --json results.json

Calls alternate, ours and theirs, so that whatever else the machine does disturbs both alike.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import graphs
import numpy as np
import onnx
from bars import Row, geometric_mean, report


@dataclass(frozen=True)
class Case:
    """A model and an input of it, with the bars for its ratio."""

    name: str
    architecture: str
    inputs: graphs.Inputs
    must: float | None
    aim: float = 1.0


ARCHITECTURES: dict[str, Callable[[], onnx.ModelProto]] = {
    "minilm": graphs.bert,
    "gpt2": graphs.gpt2,
    "vit-s": graphs.vit,
    "resnet50": graphs.resnet,
    "mobilenetv2": graphs.mobilenet,
    "lstm": graphs.lstm,
    "minilm int8": lambda: graphs.quantized_dynamically(graphs.bert()),
    "qwen3 4-bit": graphs.qwen3,
}


def cases() -> list[Case]:
    """Every case, those of one model together."""
    images = functools.partial(graphs.image_inputs, name="pixel_values")
    return [
        Case("minilm 1x8", "minilm", graphs.bert_inputs(1, 8), 1.5),
        Case("minilm 1x128", "minilm", graphs.bert_inputs(1, 128), 1.35),
        Case("minilm 8x128", "minilm", graphs.bert_inputs(8, 128), 1.2),
        Case("gpt2 1x1+256", "gpt2", graphs.gpt2_inputs(1, 256), 1.3),
        Case("vit-s 1", "vit-s", images(1), 1.35),
        Case("vit-s 4", "vit-s", images(4), 1.2),
        Case("resnet50 1", "resnet50", graphs.image_inputs(1), 1.5),
        Case("resnet50 4", "resnet50", graphs.image_inputs(4), 1.4),
        Case("mobilenetv2 1", "mobilenetv2", graphs.image_inputs(1), 2.0),
        Case("mobilenetv2 4", "mobilenetv2", graphs.image_inputs(4), 2.0),
        Case("lstm 1x200", "lstm", graphs.normal_inputs("input", (1, 200, 256)), 2.0),
        Case("minilm int8 1x128", "minilm int8", graphs.bert_inputs(1, 128), 2.5),
        Case("qwen3 4-bit decode", "qwen3 4-bit", graphs.decoder_inputs(256), 2.0),
    ]


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


def measure(case: Case, model: onnx.ModelProto, repeats: int, threads: int) -> Row:
    """The median milliseconds of a call, ours and ONNX Runtime's."""
    import jax

    import transmuter

    compiled = transmuter.compile(transmuter.load(model), case.inputs)

    def ours() -> dict[str, Any]:
        return jax.block_until_ready(compiled(case.inputs))

    theirs = run_in_onnxruntime(model, case.inputs, threads)
    actual, expected = ours(), theirs()
    error = max(float(np.abs(np.asarray(actual[name]) - expected[name]).max()) for name in expected)
    mine, other = alternate([ours, theirs], repeats)
    return Row(case.name, mine, other, "ms", mine / other, case.must, case.aim, error)


def rows(only: str, repeats: int, threads: int) -> Iterator[Row]:
    """A row for each case whose name contains `only`, and the geometric mean of those that have a bar."""
    found = []
    wanted = [case for case in cases() if only in case.name]
    for architecture, of_architecture in itertools.groupby(wanted, lambda case: case.architecture):
        model = ARCHITECTURES[architecture]()
        for case in of_architecture:
            found.append(measure(case, model, repeats, threads))
            yield found[-1]
    barred = [row for row in found if row.must is not None]
    if len(barred) > 1:
        yield geometric_mean(barred, must=1.4, aim=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=30, help="measured rounds of each case")
    parser.add_argument("--threads", type=int, default=2, help="CPUs that both may use")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    arguments = parser.parse_args()
    use_cpus(arguments.threads)
    sys.exit(report(rows(arguments.only, arguments.repeats, arguments.threads), arguments.json) > 0)


def use_cpus(threads: int) -> None:
    """Restricts the process to so many CPUs. XLA takes as many threads, when JAX starts."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


if __name__ == "__main__":
    main()

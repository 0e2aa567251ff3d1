"""What a process of its own does for the matrix: a job comes as JSON on standard input, a row goes to a file.

A model that crashes XLA, or takes all memory, takes this process along and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

import transmuter
from transmuter.coverage import recording
from transmuter.coverage.catalogue import Entry
from transmuter.coverage.verdicts import Judged, Verdict, judged
from transmuter.errors import TransmuterError, UnsupportedOperatorError

_REPEATS = 5
"""Calls of which the median is the time of one."""


def measured(entry: Entry, path: Path, folder: Path, compute_type: str | None) -> dict[str, Any]:
    """The row of one model: loads it, runs it eagerly and compiled on each recorded case, and judges the results."""
    row: dict[str, Any] = {}
    references = recording.references(entry, folder)
    started = time.perf_counter()
    model = transmuter.load(path, compute_type=compute_type)
    row["load_seconds"] = time.perf_counter() - started
    row["operators"] = dict(model.operators.most_common())
    row["weight_bytes"] = model.nbytes
    compiled = transmuter.compile(model)
    runs = {"eager": lambda inputs: transmuter.run(model, inputs), "compiled": compiled}
    for mode, call in runs.items():
        row[mode] = [_case(call, reference, entry, repeats=_REPEATS * (mode == "compiled")) for reference in references]
    found = compiled.explain()
    totals = found.totals
    row |= {"segments": totals["depths"]} | {key: totals[key] for key in ("trace_seconds", "compile_seconds")}
    row["breaks"] = [{"node": b.node, "operator": b.operator, "what": b.what, "advice": b.advice} for b in found.breaks]
    row["gradient"] = _gradient(model, compiled, references[0].inputs)
    judgements = [case for mode in runs for case in row[mode]]
    worst = max(judgements, key=lambda case: list(Verdict).index(Verdict(case["verdict"])))
    return row | {"verdict": worst["verdict"], "why": worst["why"]}


def _case(call: Any, reference: recording.Reference, entry: Entry, repeats: int) -> dict[str, Any]:
    """Runs one case, judges it, and times it."""
    outputs = {name: _on_host(value) for name, value in call(reference.inputs).items()}
    result = judged(outputs, reference.outputs, reference.noise, entry.absolute, entry.relative)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready([x for x in call(reference.inputs).values() if isinstance(x, jax.Array)])
        seconds.append(time.perf_counter() - started)
    return {**_told(result), "seconds": statistics.median(seconds) if seconds else None}


def _on_host(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, jax.Array) else value


def _told(result: Judged) -> dict[str, Any]:
    numbers = {f.name: getattr(result, f.name) for f in dataclasses.fields(result) if f.name != "outputs"}
    return numbers | {"verdict": str(result.verdict)}


def _gradient(model: transmuter.Model, compiled: transmuter.CompiledModel, inputs: Mapping[str, Any]) -> str:
    """Whether the sum of the float outputs has a finite gradient by the params: `yes`, or why not."""
    if not model.params:
        return "no params"

    def total(params: dict[str, jax.Array]) -> jax.Array:
        outputs = compiled(inputs, params=params)
        floats = [
            x for x in jax.tree.leaves(outputs) if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        return sum((jnp.sum(jnp.where(jnp.isfinite(x), x, 0).astype(np.float32)) for x in floats), jnp.float32(0))

    try:
        grads = jax.grad(total)(model.params)
    except (TransmuterError, NotImplementedError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
    is_finite = all(bool(jnp.isfinite(g).all()) for g in grads.values())
    return "yes" if is_finite else "not finite"


def main(arguments: Sequence[str]) -> None:
    """Reads a job from standard input, and writes its row to the file that is named."""
    job = json.load(sys.stdin)
    entry = Entry(**job["entry"])
    before = psutil.Process().memory_info().rss
    row: dict[str, Any]
    try:
        if job["task"] == "record":
            found = recording.record(entry, Path(job["path"]), Path(job["folder"]))
            row = {"cases": len(found), "noise": max((n for r in found for n in r.noise.values()), default=0.0)}
        else:
            row = measured(entry, Path(job["path"]), Path(job["folder"]), job["compute_type"])
    except UnsupportedOperatorError as error:
        row = {"verdict": Verdict.UNSUPPORTED, "why": ", ".join(error.operators)}
    except (TransmuterError, MemoryError) as error:
        row = {"verdict": Verdict.ERROR, "why": f"{type(error).__name__}: {' '.join(str(error).split()):.500}"}
    row["memory_before"] = before
    Path(arguments[0]).write_text(json.dumps(row))


if __name__ == "__main__":
    main(sys.argv[1:])

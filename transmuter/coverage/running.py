"""`record` and `run`: each model in a worker process of its own, within limits of time and memory.

Rows are kept in one JSON file, which is written anew after each: an interrupted run goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from transmuter.coverage import recording
from transmuter.coverage.catalogue import Entry
from transmuter.coverage.verdicts import Verdict
from transmuter.errors import CoverageError, TransmuterError
from transmuter.progress import bar_class

Row = dict[str, Any]
_WORKER = (sys.executable, "-m", "transmuter.coverage.worker")
"""What is started for each model."""
_LOOK = 0.1
"""Seconds between two looks at a worker's memory."""
_TOLD = 400
"""So much of what a dying worker printed last is kept."""


@dataclass(frozen=True)
class Limits:
    """What one model may take.

    Attributes:
        seconds: Time for all of it.
        bytes: Resident memory of its process.
    """

    seconds: float = 600.0
    bytes: int = 8 << 30


@dataclass
class Results:
    """Rows by model, and what they were measured with; `save` keeps them in a file."""

    path: Path
    about: dict[str, str]
    rows: dict[str, Row]

    @classmethod
    def at(cls, path: Path, *, compute_type: str | None = "float32", is_new: bool = False) -> Results:
        """The results in a file, to go on with; none yet, if it is not there.

        Raises:
            CoverageError: The file is no results, or was measured with other versions or another compute type.
        """
        about = {name: metadata.version(name) for name in ("jax", "jaxlib", "onnxruntime", "transmuter")}
        about |= {"compute type": compute_type or "own", "machine": platform.machine(), "system": platform.system()}
        if is_new or not path.exists():
            return cls(path, about, {})
        found = read(path)
        if found.about != about:
            odd = next(key for key in {**about, **found.about} if about.get(key) != found.about.get(key))
            was, now = found.about.get(odd), about.get(odd)
            raise CoverageError(
                f"{path} was made with {odd} {was}, not {now}. Begin anew with --again, or name another."
            )
        return found

    def save(self) -> None:
        """Writes the file; what is there is whole at any time."""
        document = {"about": self.about, "models": [self.rows[name] for name in sorted(self.rows)]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_name(f"{self.path.name}.part")
        unfinished.write_text(json.dumps(document, indent=1, default=str) + "\n")
        unfinished.replace(self.path)


def read(path: Path) -> Results:
    """The results in a file.

    Raises:
        CoverageError: It is not there, or is no results.
    """
    try:
        document = json.loads(path.read_text())
        return Results(path, document["about"], {row["name"]: row for row in document["models"]})
    except OSError as error:
        raise CoverageError(f"{path} cannot be read: {error.strerror}. Make it with `run`.") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CoverageError(f"{path} holds no results of `run`. Name another file.") from error


Locate = Callable[[Entry], Path]
"""Gives an entry's ONNX file."""


def record(
    entries: Sequence[Entry],
    locate: Locate,
    folder: Path,
    *,
    limits: Limits,
    jobs: int = 1,
    again: bool = False,
    progress: bool | None = None,
) -> dict[str, str]:
    """Records references of models that have none yet.

    Args:
        entries, locate: The models, and what gives their files.
        folder: Each reference is a folder in it, of the model's name.
        limits: For each model.
        jobs: How many at a time.
        again: Record those anew that are there.
        progress: Show a bar; None shows it on a terminal.

    Returns:
        By model, why it could not be recorded.
    """
    failures: dict[str, str] = {}

    def one(entry: Entry) -> None:
        if not again and _is_recorded(entry, folder):
            return
        row = _in_worker("record", entry, locate, folder, limits, None)
        if "verdict" in row:
            failures[entry.name] = row["why"]

    for _ in _each(one, entries, jobs, "record", progress):
        pass
    return failures


def _is_recorded(entry: Entry, folder: Path) -> bool:
    try:
        recording.references(entry, folder / entry.name)
    except CoverageError:
        return False
    return True


def run(
    entries: Sequence[Entry],
    locate: Locate,
    folder: Path,
    results: Results,
    *,
    limits: Limits,
    compute_type: str | None = "float32",
    jobs: int = 1,
    progress: bool | None = None,
) -> Results:
    """Measures models that have no row in `results` yet, and saves each row as it is done.

    Args:
        entries, locate, folder, limits, jobs, progress: As in `record`.
        results: What is there already.
        compute_type: As `transmuter.load` takes it.
    """
    lock = threading.Lock()

    def one(entry: Entry) -> None:
        row = _in_worker("run", entry, locate, folder, limits, compute_type)
        about = {key: getattr(entry, key) for key in ("name", "source", "task", "architecture", "license", "reason")}
        with lock:
            results.rows[entry.name] = about | row
            results.save()

    left = [entry for entry in entries if entry.name not in results.rows]
    for _ in _each(one, left, jobs, "run", progress):
        pass
    return results


def _each(
    do: Callable[[Entry], None], entries: Sequence[Entry], jobs: int, what: str, progress: bool | None
) -> Iterable[None]:
    """Does something for all entries, some at a time, with a bar."""
    tqdm = bar_class(progress)
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(do, entry) for entry in entries]
        done = as_completed(futures)
        try:
            for future in done if tqdm is None else tqdm(done, total=len(futures), desc=what, unit="model"):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


# ---- a worker ------------------------------------------------------------------------------------------------------


def _in_worker(task: str, entry: Entry, locate: Locate, folder: Path, limits: Limits, compute_type: str | None) -> Row:
    """The row that a worker makes of a model; if it dies or is stopped, one that says so."""
    try:
        path = locate(entry)
    except TransmuterError as error:
        return {"verdict": Verdict.ERROR, "why": f"{type(error).__name__}: {error}"}
    job = {
        "task": task,
        "entry": dataclasses.asdict(entry),
        "path": str(path),
        "folder": str(folder / entry.name),
        "compute_type": compute_type,
    }
    with tempfile.TemporaryDirectory() as scratch:
        out, printed = Path(scratch) / "row.json", Path(scratch) / "printed"
        with printed.open("wb") as stream:
            process = subprocess.Popen(
                [*_WORKER, str(out)],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
            process.stdin.write(json.dumps(job).encode())
            process.stdin.close()
            peak, stopped = _watched(process, limits)
        if stopped is not None:
            return {"verdict": stopped[0], "why": stopped[1], "peak_bytes": peak}
        if process.returncode == 0 and out.exists():
            row = json.loads(out.read_text())
            row["peak_bytes"] = max(0, peak - row.pop("memory_before"))
            return row
        last = " ".join(printed.read_text(errors="replace").split())[-_TOLD:]
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
        return {"verdict": Verdict.ERROR, "why": f"the process ended with {how}: {last}", "peak_bytes": peak}


def _watched(process: subprocess.Popen[bytes], limits: Limits) -> tuple[int, tuple[Verdict, str] | None]:
    """Waits for a process, and kills it at a limit. Returns its peak of resident memory, and why it was killed."""
    started, peak = time.monotonic(), 0
    watched = psutil.Process(process.pid)
    while True:
        try:
            process.wait(_LOOK)
            return peak, None
        except subprocess.TimeoutExpired:
            pass
        try:
            peak = max(peak, watched.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
        reason = None
        if time.monotonic() - started > limits.seconds:
            reason = Verdict.TIMEOUT, f"more than {limits.seconds:g} s"
        elif peak > limits.bytes:
            reason = Verdict.ERROR, f"more than {limits.bytes / (1 << 30):.1f} GiB of memory"
        if reason is not None:
            process.kill()
            process.wait()
            return peak, reason

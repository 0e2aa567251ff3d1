"""What a serving has done: counts, and the times of its last requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_REMEMBERED = 10_000
"""So many of the last requests are in the percentiles."""


@dataclass(frozen=True)
class Statistics:
    """What a serving has done since it was made or `reset_stats` was called. Times are in seconds.

    Attributes:
        requests: Inputs that were answered; each item of a list is one.
        failed: Inputs that ended in an error.
        cancelled: Inputs that were cancelled, or given up after their `timeout`.
        rows: Rows that the model has run: some inputs take several.
        batches: Batches that they were in.
        batch_fill: The share of the places in batches that held rows of inputs, rather than padding.
        throughput: Answered inputs per second, from the first input to the last answer.
        queued: Rows that wait for a batch now.
        queue_time_mean: How long rows waited for their batch; this and the percentiles are of the last inputs.
        queue_time_p50: Half of them waited no longer.
        queue_time_p99: Only one in a hundred waited longer.
        latency_p50: Half of the inputs were answered within so long, from their arrival with a started serving, from
            the beginning of the call else.
        latency_p99: Only one in a hundred took longer.
        restarts: How often the worker died and another took its place.
    """

    requests: int
    failed: int
    cancelled: int
    rows: int
    batches: int
    batch_fill: float
    throughput: float
    queued: int
    queue_time_mean: float
    queue_time_p50: float
    queue_time_p99: float
    latency_p50: float
    latency_p99: float
    restarts: int


class Recorder:
    """Collects the statistics of one serving, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._requests = self._failed = self._cancelled = self._restarts = 0
            self._rows = self._batches = self._places = 0
            self._began: float | None = None
            self._ended = 0.0
            self._waits: deque[float] = deque(maxlen=_REMEMBERED)
            self._latencies: deque[float] = deque(maxlen=_REMEMBERED)

    def arrived(self, at: float) -> None:
        """An input came at that `time.perf_counter()`."""
        with self._lock:
            self._began = at if self._began is None else min(at, self._began)

    def ran(self, rows: int, places: int, waits: Sequence[float]) -> None:
        """A batch of `rows` in so many `places` starts, for which they have waited."""
        with self._lock:
            self._rows += rows
            self._places += places
            self._batches += 1
            self._waits.extend(waits)

    def answered(self, since: float) -> None:
        """An input that arrived at `since` has its result."""
        with self._lock:
            self._ended = time.perf_counter()
            self._requests += 1
            self._latencies.append(self._ended - since)

    def failed(self) -> None:
        """An input ended in an error."""
        with self._lock:
            self._failed += 1

    def cancelled(self) -> None:
        """An input was given up by its caller."""
        with self._lock:
            self._cancelled += 1

    def restarted(self) -> None:
        """A worker died and is replaced."""
        with self._lock:
            self._restarts += 1

    def statistics(self, queued: int) -> Statistics:
        """All of it now."""
        with self._lock:
            waits, latencies = sorted(self._waits), sorted(self._latencies)
            span = 0.0 if self._began is None else self._ended - self._began
            return Statistics(
                requests=self._requests,
                failed=self._failed,
                cancelled=self._cancelled,
                rows=self._rows,
                batches=self._batches,
                batch_fill=self._rows / self._places if self._places else 0.0,
                throughput=self._requests / span if span > 0 else 0.0,
                queued=queued,
                queue_time_mean=sum(waits) / len(waits) if waits else 0.0,
                queue_time_p50=_percentile(waits, 0.5),
                queue_time_p99=_percentile(waits, 0.99),
                latency_p50=_percentile(latencies, 0.5),
                latency_p99=_percentile(latencies, 0.99),
                restarts=self._restarts,
            )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

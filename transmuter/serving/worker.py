"""The worker of a started serving: a bounded queue of rows, and the thread that runs them in batches."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Protocol

from transmuter.errors import ServingError
from transmuter.serving.batching import Outputs, Row
from transmuter.serving.statistics import Recorder

_LOGGER = logging.getLogger("transmuter.serving")
_RUNNING, _DRAINING, _STOPPED = "running", "draining", "stopped"


class Batches(Protocol):
    """What runs rows in batches: `batching.TokenBatches`, or another that pads in its own way."""

    batch_size: int
    """How many rows a batch has at most."""

    in_flight: int
    """How many batches are best launched before the results of the first are waited for; at least 1."""

    def key(self, row: Row) -> Hashable:
        """Rows of equal keys may share a batch. Raises InputError or ModelError for a row that cannot be run."""

    def length(self, row: Row) -> int:
        """What rows are sorted by, so that a batch has rows of similar lengths."""

    def width(self, row: Row) -> int:
        """The length that a row is padded to."""

    def room(self, row: Row) -> int:
        """How many rows a batch has at most whose longest row is this one."""

    def places(self, count: int) -> int:
        """How many places a batch of so many rows has."""

    def __call__(self, rows: Sequence[Row]) -> list[Outputs]:
        """Runs any number of rows."""

    def launch(self, rows: Sequence[Row]) -> Callable[[], list[Outputs]]:
        """Starts one batch, of rows of one key. Returns what waits for its results."""

    def warm_up(self, *, progress: bool | None = None) -> None:
        """Compiles ahead."""


@dataclass(eq=False, slots=True)
class Request:
    """Rows that have one answer, and the future that gets it.

    Attributes:
        rows: What the model has to run for it; mostly one.
        finish: Makes the answer of the rows' outputs.
        future: Gets it, or an error.
        arrived: When, by `time.perf_counter()`.
        place: Of its input in a list.
        admitted: Done once the request has left the line outside of a full queue; None if it never stood there.
    """

    rows: Sequence[Row]
    finish: Callable[[list[Outputs]], Any]
    future: Future[Any] = field(default_factory=Future)
    arrived: float = field(default_factory=time.perf_counter)
    admitted: Future[None] | None = None
    place: int = 0
    entries: list[_Entry] = field(default_factory=list)
    outputs: list[Outputs] = field(default_factory=list)
    left: int = 0
    is_given_up: bool = False


@dataclass(eq=False, slots=True)
class _Entry:
    """A row in the queue."""

    request: Request
    index: int
    row: Row
    key: Hashable
    width: int
    length: int


class Worker:
    """Runs requests in batches, in a thread of its own, until it is closed.

    A batch has the row that has waited longest, those of its key and width behind it, and in places that would be
    empty shorter rows. A batch that is not full waits for more rows until its first has waited for `batch_timeout`.
    """

    def __init__(self, batches: Batches, recorder: Recorder, *, batch_timeout: float, max_queue: int, name: str):
        self._batches, self._recorder, self._name = batches, recorder, name
        self._timeout, self._limit = batch_timeout, max_queue
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._queue: OrderedDict[_Entry, None] = OrderedDict()
        self._outside: deque[Request] = deque()
        """Requests for which the queue has no room, in the order in which they get it."""
        self._in_hand: list[_Entry] = []
        """Rows of batches that have started: whose requests fail if the thread dies."""
        self._state = _RUNNING
        self._thread = self._started_thread()

    def _started_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._live, name=f"{self._name}-worker", daemon=True)
        thread.start()
        return thread

    # -- for callers

    @property
    def is_running(self) -> bool:
        """Whether it takes requests."""
        return self._state == _RUNNING

    @property
    def is_current(self) -> bool:
        """Whether this is the worker's own thread, as in a callback of a future, which must not wait for it."""
        return threading.current_thread() is self._thread

    @property
    def queued(self) -> int:
        """How many rows wait in the queue."""
        return len(self._queue)

    def put(self, request: Request, *, wait: bool = True) -> None:
        """Puts a request into the queue, or into the line outside while that is full. Does not block.

        A request of more rows than the queue holds enters once it is empty.

        Raises:
            InputError, ModelError: A row cannot be run.
            ServingError: The serving has been stopped, or its queue is full and `wait` is false.
        """
        batches = self._batches
        request.entries = [
            _Entry(request, i, row, batches.key(row), batches.width(row), batches.length(row))
            for i, row in enumerate(request.rows)
        ]
        request.outputs, request.left = [{}] * len(request.rows), len(request.rows)
        request.future.add_done_callback(lambda future: self.give_up(request) if future.cancelled() else None)
        if not request.rows:
            request.future.set_running_or_notify_cancel()
            self._answer(request)
            return
        with self._lock:
            if self._state != _RUNNING:
                raise ServingError(f"The serving {self._name!r} has been stopped. Start it again for further requests.")
            if not self._thread.is_alive():  # it does not live on in a forked process
                self._thread = self._started_thread()
            if not self._outside and self._has_room(request):
                self._admit(request)
                return
            if not wait or self.is_current:
                raise ServingError(
                    f"The queue of the serving {self._name!r} is full: {len(self._queue)} rows wait. Try again later, "
                    "wait for a place, or raise max_queue."
                )
            request.admitted = Future()
            self._outside.append(request)

    def give_up(self, request: Request) -> None:
        """Takes what is left of a request out of the queue, and drops its result."""
        with self._lock:
            is_over = request.future.done() and not request.future.cancelled()
            if request.is_given_up or request.left == 0 or is_over:
                return
            request.is_given_up = True
            self._remove(request)
            admitted = self._admit_waiting()
        request.future.cancel()
        self._recorder.cancelled()
        _open(admitted)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Takes no further requests, and ends the thread. Returns whether it has ended.

        Args:
            drain: First answer all that have been put. Without it, those that wait fail with a ServingError.
            timeout: Seconds to wait for that; what then still waits in the queue fails.
        """
        with self._lock:
            self._state = _DRAINING if self._state == _RUNNING else self._state
            self._work.notify_all()
        if not drain:
            self._fail_waiting()
        if self.is_current:
            return False
        deadline = None if timeout is None else time.perf_counter() + timeout
        thread = None
        while thread is not self._thread:  # another may have taken the place of one that died
            thread = self._thread
            thread.join(None if deadline is None else bounded(max(0.0, deadline - time.perf_counter())))
        self._fail_waiting()
        return not thread.is_alive()

    def abandon(self, timeout: float) -> None:
        """Closes it for nobody who could still ask: called wherever the garbage collector happens to run."""
        close = functools.partial(self.close, drain=False, timeout=timeout)
        if self.is_current:  # perhaps in the middle of its queue
            threading.Thread(target=close, name=f"{self._name}-end", daemon=True).start()
        else:
            close()

    def _fail_waiting(self) -> None:
        with self._lock:
            requests = [*dict.fromkeys(entry.request for entry in self._queue), *self._outside]
            self._queue.clear()
            outside = [request.admitted for request in self._outside]
            self._outside.clear()
            self._work.notify_all()
        for request in requests:
            self._fail(request, ServingError(f"The serving {self._name!r} was stopped before it answered."))
        _open(outside)

    # -- the queue; all of it under the lock

    def _has_room(self, request: Request) -> bool:
        return not self._queue or len(self._queue) + len(request.entries) <= self._limit

    def _admit(self, request: Request) -> None:
        before = len(self._queue)
        for entry in request.entries:
            self._queue[entry] = None
        # While it waits for a batch to fill, fewer rows than a batch has need not wake it: it looks again in time.
        if not before or len(self._queue) >= self._batches.room(request.rows[0]):
            self._work.notify()

    def _admit_waiting(self) -> list[Future[None] | None]:
        """Lets in from outside whom there is room for. Returns what is to be set outside of the lock."""
        admitted = []
        while self._outside and self._has_room(self._outside[0]):
            request = self._outside.popleft()
            self._admit(request)
            admitted.append(request.admitted)
        return admitted

    def _remove(self, request: Request) -> None:
        if request in self._outside:
            self._outside.remove(request)
        for entry in request.entries:
            self._queue.pop(entry, None)

    def _chosen(self) -> tuple[list[_Entry], bool]:
        """The rows of the next batch, and whether it is full."""
        entries = iter(self._queue)
        first = next(entries)
        size = self._batches.room(first.row)
        chosen, shorter = [first], []
        for entry in entries:
            if len(chosen) == size:
                break
            if entry.key == first.key and entry.width <= first.width:
                (chosen if entry.width == first.width else shorter).append(entry)
        is_full = len(chosen) == size
        room = min(size, self._batches.places(len(chosen))) - len(chosen)
        if room and shorter:
            chosen += sorted(shorter, key=lambda entry: -entry.length)[:room]
        return chosen, is_full

    def _take(self, *, block: bool) -> list[_Entry]:
        """The rows of a batch, out of the queue.

        Empty when there will be none any more, or, unless it may `block`, when there is none now.
        """
        with self._lock:
            while True:
                if not self._queue:
                    if self._state != _RUNNING and not self._outside:
                        self._state = _STOPPED
                        return []
                    if not block:
                        return []
                    self._work.wait()
                    continue
                chosen, is_full = self._chosen()
                left = chosen[0].request.arrived + self._timeout - time.perf_counter()
                if is_full or left <= 0 or self._state != _RUNNING:
                    break
                if not block:
                    return []
                self._work.wait(bounded(left))
            for entry in chosen:
                del self._queue[entry]
            # One whose request was cancelled just now has not been removed yet.
            chosen = [entry for entry in chosen if _runs(entry.request.future)]
            self._in_hand += chosen
            admitted = self._admit_waiting()
        _open(admitted)
        return chosen

    # -- the thread

    def _live(self) -> None:
        flying: deque[tuple[list[_Entry], Callable[[], list[Outputs]]]] = deque()
        try:
            while True:
                entries = self._take(block=not flying)
                if entries:
                    flying.append((entries, self._launched(entries)))
                    if len(flying) < self._batches.in_flight:
                        continue
                if flying:
                    self._finish(*flying.popleft())
                elif self._state == _STOPPED:
                    return
        except BaseException as error:
            self._succeed(error)

    def _succeed(self, error: BaseException) -> None:
        """Starts another thread in the place of this one, which died; what it had in hand fails."""
        _LOGGER.warning("The worker of the serving %r died and is replaced: %r", self._name, error)
        self._recorder.restarted()
        with self._lock:
            if not self._in_hand:  # then it died of the queue itself, and would again
                self._in_hand = list(self._queue)
            requests = list(dict.fromkeys(entry.request for entry in self._in_hand))
            self._in_hand = []
            for request in requests:
                self._remove(request)
            admitted = self._admit_waiting()
            self._thread = self._started_thread()
        for request in requests:
            failure = ServingError(
                f"The worker of the serving {self._name!r} died while it ran this request: {error!r}. Another has "
                "taken its place; send the request again."
            )
            failure.__cause__ = error
            self._fail(request, failure)
        _open(admitted)

    def _launched(self, entries: Sequence[_Entry]) -> Callable[[], list[Outputs]]:
        now = time.perf_counter()
        waits = [now - entry.request.arrived for entry in entries]
        self._recorder.ran(len(entries), self._batches.places(len(entries)), waits)
        try:
            return self._batches.launch([entry.row for entry in entries])
        except Exception as error:
            failure = error

            def fail() -> list[Outputs]:
                raise failure

            return fail

    def _finish(self, entries: Sequence[_Entry], wait: Callable[[], list[Outputs]]) -> None:
        try:
            results: Iterable[Outputs | Exception] = wait()
        except Exception as error:
            results = [error] if len(entries) == 1 else [self._alone(entry) for entry in entries]
        for entry, result in zip(entries, results, strict=True):
            request = entry.request
            if isinstance(result, Exception):
                with self._lock:
                    self._remove(request)
                self._fail(request, result)
            elif not request.is_given_up:
                request.outputs[entry.index] = result
                request.left -= 1
                if request.left == 0:
                    self._answer(request)
        del self._in_hand[: len(entries)]

    def _alone(self, entry: _Entry) -> Outputs | Exception:
        """A row of a batch that failed, run by itself, so that only the one at fault fails."""
        try:
            return self._batches([entry.row])[0]
        except Exception as error:
            return error

    def _answer(self, request: Request) -> None:
        try:
            result = request.finish(request.outputs)
        except Exception as error:
            self._fail(request, error)
            return
        request.outputs = []
        self._recorder.answered(request.arrived)
        request.future.set_result(result)

    def _fail(self, request: Request, error: Exception) -> None:
        if request.is_given_up or request.future.done():
            return
        self._recorder.failed()
        try:
            request.future.set_exception(error)
        except InvalidStateError:  # it was cancelled just now
            return


def bounded(seconds: float | None) -> float | None:
    """No more seconds than a lock takes, which cannot wait for infinitely many."""
    return None if seconds is None else min(seconds, threading.TIMEOUT_MAX)


def _runs(future: Future[Any]) -> bool:
    """Marks a future as running. False if it has been cancelled."""
    return future.running() or future.set_running_or_notify_cancel()


def _open(admitted: Iterable[Future[None] | None]) -> None:
    """Tells those outside that they are in."""
    for future in admitted:
        if future is not None and not future.done():
            future.set_result(None)

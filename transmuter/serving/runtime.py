"""`Serving`: preprocessing, batches, a compiled model and postprocessing as one callable, alone or for many callers."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from transmuter.errors import ServingError
from transmuter.serving.batching import Outputs, Row, plan, run
from transmuter.serving.statistics import Recorder, Statistics
from transmuter.serving.worker import Batches, Request, Worker, bounded

_LAST_SECONDS = 5.0
"""How long the end of the process waits for a batch that runs."""


class Task(Protocol):
    """What a task does before and after the model. It holds no state of a call, since calls come from many threads."""

    def rows(self, item: Any, **overrides: Any) -> tuple[list[Row], Any]:
        """Preprocessing, in the caller's thread.

        Args:
            item: One input.
            overrides: Options for this call alone.

        Returns:
            The rows that it takes, at least one, and whatever `result` needs besides their outputs.

        Raises:
            InputError: It is no input of this task.
        """

    def result(self, context: Any, outputs: list[Outputs]) -> Any:
        """Postprocessing: the result, from the outputs of the rows in their order."""


@runtime_checkable
class ListTask(Protocol):
    """A task that prepares a list at once, in fewer calls of the tokenizer."""

    def rows_of(self, items: Sequence[Any], **overrides: Any) -> list[tuple[list[Row], Any]]:
        """What `rows` returns, of each item."""


class Serving:
    """Turns inputs into results. The functions of `transmuter.serving` make one for each task.

    By itself it computes in the caller's thread; a list is run in batches of rows of similar lengths:

        serving = transmuter.serving.text_embedding("org/repo", batch_size=8)
        serving("a text")
        serving(["a text", "another"])

    Once started, it has a worker that batches what comes from many threads and asyncio tasks at once:

        with serving:
            future = serving.submit("a text")
            result = serving("a text")
            result = await serving.acall("a text")

    Attributes:
        task: What comes before and after the model.
        batches: What runs the model.
        name: Of the serving, in messages and of its thread.
    """

    def __init__(
        self,
        task: Task,
        batches: Batches,
        *,
        batch_timeout: float = 0.002,
        max_queue: int = 1024,
        name: str = "serving",
    ):
        """
        Args:
            task: Pre- and postprocessing.
            batches: Runs the rows of the task.
            batch_timeout: How many seconds a batch that is not full waits for further rows, once it is started.
            max_queue: How many rows may wait; who comes then waits for a place.
            name: For messages.

        Raises:
            ValueError: `batch_timeout` is negative, or `max_queue` not positive.
        """
        if not batch_timeout >= 0:
            raise ValueError(f"batch_timeout is {batch_timeout}, but must be 0 or more seconds.")
        if max_queue < 1:
            raise ValueError(f"max_queue is {max_queue}, but must be at least 1.")
        self.task, self.batches, self.name = task, batches, name
        self._timeout, self._limit = batch_timeout, max_queue
        self._recorder = Recorder()
        self._worker: Worker | None = None
        self._starting = threading.Lock()
        self._end: weakref.finalize | None = None

    # -- calls

    def __call__(self, input: Any, *, wait: bool = True, timeout: float | None = None, **overrides: Any) -> Any:
        """The result of one input, or a list of results of a list.

        Args:
            input: What the task takes, or a list of such.
            wait: Whether to wait for a place in a full queue of a started serving; else that is an error.
            timeout: How many seconds to wait for the result of a started serving.
            overrides: Options of the task for this call alone.

        Raises:
            InputError: An input is none of this task.
            ServingError: The queue is full, the time is over, the serving was stopped meanwhile, or its worker died.
        """
        worker = self._worker
        if worker is None or worker.is_current:
            return self._direct(input, overrides)
        deadline = None if timeout is None else time.perf_counter() + timeout
        requests: list[Request] = []
        try:
            for request in self._requests(input, overrides):
                requests.append(request)
                worker.put(request, wait=wait)
                if request.admitted is not None:
                    request.admitted.result(_until(deadline))
            results = _in_order(requests, input, [r.future.result(_until(deadline)) for r in requests])
        except BaseException as error:
            for request in requests:
                worker.give_up(request)
            if isinstance(error, TimeoutError) and deadline is not None and time.perf_counter() >= deadline:
                raise self._late(timeout) from None
            raise
        return results

    def submit(self, input: Any, *, wait: bool = True, timeout: float | None = None, **overrides: Any) -> Future[Any]:
        """Hands an input to the worker, and returns the future of its result.

        `cancel` of the future takes it out of the queue, unless it runs already. A list is one request here, which gets
        a list of results, or the first error.

        Args:
            input: What the task takes, or a list of such.
            wait: Whether to wait for a place where the queue is full; else that is an error.
            timeout: How many seconds to wait for the place.
            overrides: Options of the task for this call alone.

        Raises:
            InputError: It is no input of this task.
            ServingError: The serving is not started, or there was no place in the queue.
        """
        worker = self._started()
        if isinstance(input, list):
            prepared = self._prepared(input, overrides)
            request = Request([row for rows, _ in prepared for row in rows], _list_result(self.task, prepared))
            if not prepared:
                request.future.set_result([])
                return request.future
        else:
            request = next(self._requests(input, overrides))
        self._recorder.arrived(request.arrived)
        worker.put(request, wait=wait)
        if request.admitted is not None:
            try:
                request.admitted.result(bounded(timeout))
            except BaseException as error:
                worker.give_up(request)
                if isinstance(error, TimeoutError):
                    raise self._late(timeout) from None
                raise
        return request.future

    async def acall(self, input: Any, *, wait: bool = True, timeout: float | None = None, **overrides: Any) -> Any:
        """`__call__` for asyncio: nothing blocks the event loop, and a task that is cancelled gives up its input."""
        worker = self._worker
        if worker is None:
            return await asyncio.to_thread(self._direct, input, overrides)
        requests: list[Request] = []

        async def answer() -> Any:
            for request in await asyncio.to_thread(lambda: list(self._requests(input, overrides))):
                requests.append(request)
                worker.put(request, wait=wait)
                if request.admitted is not None:
                    await asyncio.wrap_future(request.admitted)
            return _in_order(requests, input, [await asyncio.wrap_future(request.future) for request in requests])

        try:
            async with asyncio.timeout(timeout) as limit:
                return await answer()
        except BaseException as error:
            for request in requests:
                worker.give_up(request)
            if isinstance(error, TimeoutError) and limit.expired():
                raise self._late(timeout) from None
            raise

    def _late(self, timeout: float | None) -> ServingError:
        return ServingError(
            f"The serving {self.name!r} did not get to this within {timeout} s. Give it more time, or less at once."
        )

    # -- its life

    def start(self, *, warm_up: bool = False) -> Serving:
        """Starts the worker, if there is none. `warm_up` compiles everything first. Returns the serving."""
        if warm_up:
            self.warm_up()
        with self._starting:
            if not self.is_started:  # one whose `stop` was interrupted ends by itself
                if self._end is not None:
                    self._end.detach()
                self._worker = Worker(
                    self.batches, self._recorder, batch_timeout=self._timeout, max_queue=self._limit, name=self.name
                )
                # The worker holds nothing of the serving: one that is forgotten, or a process that ends, ends it too.
                self._end = weakref.finalize(self, self._worker.abandon, _LAST_SECONDS)
        return self

    def stop(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Stops the worker. Calls then compute in their own thread again, until the next `start`.

        Args:
            drain: Answer first what has been asked. Without it, what waits in the queue fails with a ServingError; the
                batch that runs is still answered.
            timeout: Seconds for that; afterwards what still waits fails.

        Raises:
            ServingError: The time is over and a batch still runs; it ends by itself.
        """
        worker = self._worker
        if worker is None:
            return
        is_over = worker.close(drain=drain, timeout=timeout)
        with self._starting:
            if self._worker is worker:
                self._worker = None
                self._end.detach()
        if not is_over and not worker.is_current:
            raise ServingError(f"The serving {self.name!r} runs a batch after {timeout} s still. Wait for it to end.")

    def __enter__(self) -> Serving:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def is_started(self) -> bool:
        """Whether a worker takes requests."""
        return self._worker is not None and self._worker.is_running

    def _started(self) -> Worker:
        if self._worker is None:
            raise ServingError(
                f"The serving {self.name!r} is not started. Call start(), or use it in a `with` statement."
            )
        return self._worker

    def warm_up(self, *, progress: bool | None = None) -> Serving:
        """Compiles the model for all shapes of batches.

        Args:
            progress: Show a bar; that needs tqdm. None shows it on a terminal, if tqdm is there.

        Returns:
            The serving itself.
        """
        self.batches.warm_up(progress=progress)
        return self

    def stats(self) -> Statistics:
        """What it has done since it was made, or since `reset_stats`."""
        return self._recorder.statistics(self._worker.queued if self._worker is not None else 0)

    def reset_stats(self) -> None:
        """Forgets what it has done."""
        self._recorder.reset()

    def __repr__(self) -> str:
        return f"Serving({self.name!r}, {'started' if self.is_started else 'not started'})"

    # -- how

    def _prepared(self, items: Sequence[Any], overrides: dict[str, Any]) -> list[tuple[list[Row], Any]]:
        if isinstance(self.task, ListTask):
            return self.task.rows_of(items, **overrides)
        return [self.task.rows(item, **overrides) for item in items]

    def _requests(self, input: Any, overrides: dict[str, Any]) -> Iterator[Request]:
        """A request for each item of a list, those of similar lengths together; or the one of an input."""
        arrived = time.perf_counter()
        self._recorder.arrived(arrived)
        if not isinstance(input, list):
            rows, context = self.task.rows(input, **overrides)
            yield Request(rows, functools.partial(self.task.result, context), arrived=arrived)
            return
        prepared = self._prepared(input, overrides)
        order = sorted(range(len(prepared)), key=lambda i: -max(map(self.batches.length, prepared[i][0]), default=0))
        for i in order:
            rows, context = prepared[i]
            yield Request(rows, functools.partial(self.task.result, context), place=i)

    def _direct(self, input: Any, overrides: dict[str, Any]) -> Any:
        """Runs an input or a list for this thread."""
        started = time.perf_counter()
        is_list = isinstance(input, list)
        self._recorder.arrived(started)
        prepared = self._prepared(input, overrides) if is_list else [self.task.rows(input, **overrides)]
        owners = [(i, j) for i, (rows, _) in enumerate(prepared) for j in range(len(rows))]
        rows = [row for rows, _ in prepared for row in rows]
        outputs: list[list[Outputs]] = [[{}] * len(rows) for rows, _ in prepared]
        left = [len(rows) for rows, _ in prepared]
        results = [None if rows else self.task.result(context, []) for rows, context in prepared]

        for indexes, found in run(self.batches, rows, plan(self.batches, rows)):
            self._recorder.ran(len(indexes), self.batches.places(len(indexes)), ())
            for index, output in zip(indexes, found, strict=True):
                i, j = owners[index]
                outputs[i][j] = output
                left[i] -= 1
                if left[i] == 0:
                    results[i] = self.task.result(prepared[i][1], outputs[i])
                    outputs[i] = []  # what is large is not kept until the end of the list
                    self._recorder.answered(started)
        return results if is_list else results[0]


def _in_order(requests: Sequence[Request], input: Any, results: list[Any]) -> Any:
    """Results of requests in the order of the items that they are for; of a single input, the result."""
    if not isinstance(input, list):
        return results[0]
    ordered: list[Any] = [None] * len(results)
    for request, result in zip(requests, results, strict=True):
        ordered[request.place] = result
    return ordered


def _list_result(task: Task, prepared: Sequence[tuple[list[Row], Any]]) -> Callable[[list[Outputs]], list[Any]]:
    """What makes the results of a list, from the outputs of all its rows."""

    def finish(outputs: list[Outputs]) -> list[Any]:
        results, start = [], 0
        for rows, context in prepared:
            results.append(task.result(context, outputs[start : start + len(rows)]))
            start += len(rows)
        return results

    return finish


def _until(deadline: float | None) -> float | None:
    """The seconds that are left."""
    return None if deadline is None else bounded(max(0.0, deadline - time.perf_counter()))

"""A serving: alone, started, full, late, cancelled, stopped, and with errors in it."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, wait
from pathlib import Path

import numpy as np
import pytest
import small_model
from onnx import ModelProto

import transmuter
from transmuter.errors import InputError, ModelError, ServingError
from transmuter.serving.batching import TokenBatches
from transmuter.serving.runtime import Serving

LONG = 30.0
"""Seconds after which something that should have happened has not."""


@pytest.fixture(scope="module")
def model():
    graph: ModelProto = small_model.attention()
    return transmuter.load(graph)


@pytest.fixture(scope="module")
def batches(model):
    made = TokenBatches(model, batch_size=4, sequence_lengths=(8, 16))
    made.warm_up(progress=False)
    return made


class Gate:
    """Batches that wait until they are let through, and fail or die of certain tokens."""

    def __init__(self, batches, *, is_open=True):
        self.inner, self.ran, self.entered = batches, [], threading.Event()
        self.open = threading.Event()
        if is_open:
            self.open.set()
        self.batch_size, self.in_flight = batches.batch_size, 2
        self.key, self.length, self.width = batches.key, batches.length, batches.width
        self.places, self.room, self.warm_up = batches.places, batches.room, batches.warm_up
        self.fails, self.dies, self.fails_at_once = None, None, True

    def __call__(self, rows):
        return self.launch(rows)()

    def launch(self, rows):
        texts = [tuple(row.arrays["input_ids"].tolist()) for row in rows]
        self.ran.append(texts)
        self.entered.set()
        if not self.open.wait(LONG):
            raise RuntimeError("nobody opened the gate")

        def check():
            if self.dies in texts:
                self.dies = None
                raise SystemExit("dies of this")
            if self.fails in texts:
                raise RuntimeError(f"fails of {self.fails}")

        if self.fails_at_once:
            check()
        found = self.inner.launch(rows)

        def finish():
            check()
            return found()

        return finish


@pytest.fixture
def serving(batches):
    made = Serving(small_model.Tokens(), batches, batch_timeout=0.001, name="tokens")
    yield made
    made.stop(timeout=LONG)


def gated(batches, *, is_open=False, **options):
    gate = Gate(batches, is_open=is_open)
    return gate, Serving(small_model.Tokens(), gate, name="gated", **{"batch_timeout": 0.0, **options})


def expected(text):
    return small_model.alone(text)["last_hidden_state"].mean(0)


def texts(count, longest=16, seed=0):
    random = np.random.RandomState(seed)
    return [tuple(random.randint(0, 50, random.randint(1, longest + 1)).tolist()) for _ in range(count)]


def agree(given, results):
    assert len(given) == len(results)
    for text, found in zip(given, results, strict=True):
        np.testing.assert_allclose(found, expected(text), atol=1e-5, rtol=0)


# ---- alone


def test_one_input_and_a_list(serving):
    given = texts(30)
    agree(given[:1], [serving(given[0])])
    agree(given, serving(given))
    assert serving([]) == []


def test_several_rows_of_an_input(serving):
    text = tuple(range(16))
    parts = [small_model.alone(text[i : i + 5])["last_hidden_state"] for i in (0, 5, 10, 15)]
    np.testing.assert_allclose(serving(text, parts=5), np.concatenate(parts).mean(0), atol=1e-5, rtol=0)
    np.testing.assert_allclose(serving([text, text], parts=5)[1], np.concatenate(parts).mean(0), atol=1e-5, rtol=0)
    np.testing.assert_allclose(serving(text, scale=2.0), 2 * expected(text), atol=1e-5, rtol=0)


def test_no_rows_of_an_input(serving):
    assert not serving(()).any()
    found = serving([(), (1, 2), ()])
    agree([(1, 2)], [found[1]])
    with serving:
        assert not serving(()).any()
        assert not serving.submit(()).result(LONG).any()
        agree([(1, 2)], [serving([(), (1, 2), ()])[1]])


def test_what_is_no_input(serving):
    with pytest.raises(InputError, match="is a str"):
        serving("text")
    with pytest.raises(InputError, match="has 17 tokens"):
        serving(tuple(range(17)))
    with pytest.raises(ModelError, match="table has 50 entries"):
        serving([(1, 2), (50,)])
    with pytest.raises(TypeError, match="nonsense"):
        serving((1, 2), nonsense=1)


def test_lists_are_prepared_at_once(batches):
    class AtOnce(small_model.Tokens):
        calls = 0

        def rows_of(self, items, **overrides):
            self.calls += 1
            return [self.rows(item, **overrides) for item in items]

    made = Serving(AtOnce(), batches)
    given = texts(9)
    agree(given, made(given))
    agree(given[:1], [made(given[0])])
    assert made.task.calls == 1
    with made:
        agree(given, made(given))
    assert made.task.calls == 2


def test_outputs_of_a_list_are_not_kept(batches):
    """Each input's outputs go with its result: a long list takes no more memory than its results."""
    held, most = {}, 0

    class Watching(small_model.Tokens):
        def result(self, context, outputs):
            nonlocal most
            for array in (found["last_hidden_state"].base for found in outputs):
                held[id(array)] = weakref.ref(array)
            most = max(most, sum(array() is not None for array in held.values()))
            return len(outputs)

    assert Serving(Watching(), batches)([(1, 2, 3)] * 100) == [1] * 100
    assert most <= batches.in_flight + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_timeout": -1.0}, "batch_timeout"),
        ({"batch_timeout": float("nan")}, "batch_timeout"),
        ({"max_queue": 0}, "max_queue"),
    ],
)
def test_options_out_of_range(batches, options, message):
    with pytest.raises(ValueError, match=message):
        Serving(small_model.Tokens(), batches, **options)


# ---- started


def test_all_ways_of_calling(serving):
    given = texts(20)

    async def gathered():
        return await asyncio.gather(*(serving.acall(text) for text in given))

    with serving as entered:
        assert entered is serving
        assert serving.is_started
        agree(given, [serving(text) for text in given])
        agree(given, serving(given))
        agree(given, [future.result(LONG) for future in map(serving.submit, given)])
        agree(given, serving.submit(given).result(LONG))
        agree(given, asyncio.run(gathered()))
        agree(given, asyncio.run(serving.acall(given)))
        assert serving.submit([]).result(LONG) == []
    assert not serving.is_started
    agree(given, [serving(text) for text in given])
    agree(given, asyncio.run(serving.acall(given)))


def test_a_started_serving_starts_once(serving):
    with serving.start(), serving.start(warm_up=True):
        assert sum("tokens-worker" in thread.name for thread in threading.enumerate()) == 1
    assert not any("tokens-worker" in thread.name for thread in threading.enumerate())
    serving.stop()
    with serving:
        agree([(1, 2)], [serving((1, 2))])


def test_requests_share_batches(batches):
    gate, serving = gated(batches)
    given = [(i,) for i in range(9)]
    with serving:
        futures = [serving.submit(given[0])]
        assert gate.entered.wait(LONG)
        futures += [serving.submit(text) for text in given[1:]]
        gate.open.set()
        agree(given, [future.result(LONG) for future in futures])
    assert [len(batch) for batch in gate.ran] == [1, 4, 4]
    stats = serving.stats()
    assert (stats.requests, stats.rows, stats.batches, stats.batch_fill) == (9, 9, 3, 1.0)


def test_a_batch_waits_for_others(batches):
    gate, serving = gated(batches, is_open=True, batch_timeout=LONG)
    with serving:
        futures = [serving.submit((i,)) for i in range(4)]
        wait(futures, LONG)
    assert len(gate.ran) == 1
    gate, serving = gated(batches, is_open=True, batch_timeout=0.05)
    with serving:
        started = time.perf_counter()
        serving((1,))
        assert time.perf_counter() - started >= 0.05


def test_rows_of_one_width_run_together_and_shorter_ones_fill_up(batches):
    gate, serving = gated(batches)
    long, short = [(i,) * 16 for i in range(3)], [(i,) * 2 for i in range(10, 14)]
    with serving:
        first = serving.submit((0,))
        assert gate.entered.wait(LONG)
        futures = [serving.submit(text) for pair in zip(long, short) for text in pair] + [serving.submit(short[3])]
        gate.open.set()
        wait([first, *futures], LONG)
    assert gate.ran[1] == [*long, short[0]]  # four places are computed whether three or four rows are in them
    assert gate.ran[2] == short[1:]


def test_an_error_in_preprocessing_is_the_callers(serving):
    with serving:
        with pytest.raises(InputError, match="is a str"):
            serving.submit("text")
        with pytest.raises(InputError, match="has 17 tokens"):
            serving(tuple(range(17)))
        with pytest.raises(ModelError, match="table has 50 entries"):
            asyncio.run(serving.acall((50,)))
        with pytest.raises(InputError, match="is a str"):
            serving([(1,), "text"])
        agree([(1, 2)], [serving((1, 2))])


@pytest.mark.parametrize("fails_at_once", [True, False])
def test_an_error_in_a_batch_is_that_of_its_row(batches, fails_at_once):
    gate, serving = gated(batches)
    gate.fails, gate.fails_at_once = (2,), fails_at_once
    with serving:
        futures = [serving.submit((0,))]
        assert gate.entered.wait(LONG)
        futures += [serving.submit((i,)) for i in range(1, 5)]
        gate.open.set()
        wait(futures, LONG)
        agree([(i,) for i in (0, 1, 3, 4)], [futures[i].result() for i in (0, 1, 3, 4)])
        with pytest.raises(RuntimeError, match=r"fails of \(2,\)"):
            futures[2].result()
        with pytest.raises(RuntimeError, match=r"fails of \(2,\)"):
            serving([(1,), (2,), (3,)])
        assert serving.stats().queued == 0
    assert serving.stats().failed >= 2


def test_an_error_in_one_row_of_several(batches):
    """What else an input has in the queue goes with it."""
    gate, serving = gated(batches)
    gate.fails = (3, 4)
    with serving:
        first = serving.submit((0,))
        assert gate.entered.wait(LONG)
        failing = serving.submit((1, 2, 3, 4, *range(10, 40)), parts=2)
        other = serving.submit((7,))
        gate.open.set()
        with pytest.raises(RuntimeError, match=r"fails of \(3, 4\)"):
            failing.result(LONG)
        agree([(0,), (7,)], [first.result(LONG), other.result(LONG)])
    assert sum(map(len, gate.ran)) < 20


def test_an_error_in_postprocessing(batches):
    class Failing(small_model.Tokens):
        def result(self, context, outputs):
            if context < 0:
                raise ValueError("no result of this")
            return super().result(context, outputs)

    with Serving(Failing(), batches) as serving:
        futures = [serving.submit((1,), scale=scale) for scale in (1.0, -1.0, 1.0)]
        with pytest.raises(ValueError, match="no result"):
            futures[1].result(LONG)
        agree([(1,), (1,)], [futures[0].result(LONG), futures[2].result(LONG)])


# ---- a full queue, and time


def test_a_full_queue_makes_callers_wait(batches):
    gate, serving = gated(batches, max_queue=3)
    with serving:
        futures = [serving.submit((0,))]
        assert gate.entered.wait(LONG)
        futures += [serving.submit((i,)) for i in (1, 2, 3)]
        assert serving.stats().queued == 3
        with pytest.raises(ServingError, match=r"queue of the serving 'gated' is full: 3 rows"):
            serving.submit((4,), wait=False)
        with pytest.raises(ServingError, match="full"):
            serving((4,), wait=False)
        with pytest.raises(ServingError, match="full"):
            asyncio.run(serving.acall((4,), wait=False))
        with pytest.raises(ServingError, match=r"within 0\.05 s"):
            serving.submit((4,), timeout=0.05)
        with pytest.raises(ServingError, match=r"within 0\.05 s"):
            serving((4,), timeout=0.05)
        with pytest.raises(ServingError, match=r"within 0\.05 s"):
            asyncio.run(serving.acall((4,), timeout=0.05))
        waiting = threading.Thread(target=lambda: futures.append(serving.submit((4,))))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        assert serving.stats().queued == 3
        gate.open.set()
        waiting.join(LONG)
        agree([(i,) for i in range(5)], [future.result(LONG) for future in futures])
    ran = [text for batch in gate.ran for text in batch]
    assert sorted(ran) == [(i,) for i in range(5)]


def test_a_list_longer_than_the_queue(batches):
    with Serving(small_model.Tokens(), batches, max_queue=3) as serving:
        given = texts(40)
        agree(given, serving(given))
        agree(given, serving.submit(given).result(LONG))
        agree(given, asyncio.run(serving.acall(given)))


def test_an_answer_that_comes_too_late(batches):
    gate, serving = gated(batches)
    with serving:
        with pytest.raises(ServingError, match=r"within 0\.05 s"):
            serving((1,), timeout=0.05)
        with pytest.raises(ServingError, match=r"within 0\.05 s"):
            asyncio.run(serving.acall([(1,), (2,), (3,)], timeout=0.05))
        assert serving.stats().queued == 0
        gate.open.set()
        agree([(1, 2)], [serving((1, 2), timeout=LONG)])
    assert serving.stats().cancelled == 4


def test_infinite_times(batches):
    forever = float("inf")
    serving = Serving(small_model.Tokens(), batches, batch_timeout=forever, max_queue=4).start()
    futures = [serving.submit((i,), timeout=forever) for i in range(4)]
    agree([(i,) for i in range(4)], [future.result(LONG) for future in futures])
    late = serving.submit((4,))
    serving.stop(timeout=forever)
    agree([(4,)], [late.result(0)])
    with Serving(small_model.Tokens(), batches) as serving:
        agree([(5,)], [serving((5,), timeout=forever)])
        agree([(6,)], [asyncio.run(serving.acall((6,), timeout=forever))])


# ---- cancellation


def test_a_cancelled_future_is_not_run(batches):
    gate, serving = gated(batches, max_queue=2)
    with serving:
        first = serving.submit((0,))
        assert gate.entered.wait(LONG)
        assert not first.cancel()
        second, third = serving.submit((1,)), serving.submit((2,))
        assert second.cancel()
        fourth = serving.submit((3,), timeout=LONG)  # the place is free at once
        gate.open.set()
        agree([(0,), (2,), (3,)], [future.result(LONG) for future in (first, third, fourth)])
        with pytest.raises(CancelledError):
            second.result(LONG)
    assert (1,) not in [text for batch in gate.ran for text in batch]
    assert serving.stats().cancelled == 1


def test_a_cancelled_task_of_asyncio(batches):
    gate, serving = gated(batches)

    async def run():
        first = asyncio.create_task(serving.acall((0,)))
        await asyncio.to_thread(gate.entered.wait, LONG)
        tasks = [asyncio.create_task(serving.acall((i,))) for i in (1, 2)]
        while serving.stats().queued < 2:
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert serving.stats().queued == 1
        gate.open.set()
        return await first, await tasks[1]

    with serving:
        agree([(0,), (2,)], asyncio.run(run()))
    assert (1,) not in [text for batch in gate.ran for text in batch]


def test_the_event_loop_goes_on(batches):
    """Neither a full queue nor a batch that runs stops it."""
    gate, serving = gated(batches, max_queue=1)

    async def run():
        tasks = [asyncio.create_task(serving.acall((i,))) for i in range(50)]
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not any(task.done() for task in tasks)
        gate.open.set()
        return await asyncio.wait_for(asyncio.gather(*tasks), LONG)

    with serving:
        assert len(asyncio.run(run())) == 50


# ---- its end


def test_stopping_answers_what_was_asked(batches):
    gate, serving = gated(batches, max_queue=4)
    serving.start()
    futures = [serving.submit((0,))]
    assert gate.entered.wait(LONG)
    futures += [serving.submit((i,)) for i in range(1, 5)]
    late = []
    outside = threading.Thread(target=lambda: late.append(serving((5,))))
    outside.start()
    while not serving._worker._outside:
        time.sleep(0.001)
    stopping = threading.Thread(target=serving.stop)
    stopping.start()
    while serving.is_started:
        time.sleep(0.001)
    with pytest.raises(ServingError, match="has been stopped"):
        serving.submit((6,))
    gate.open.set()
    for thread in (stopping, outside):
        thread.join(LONG)
        assert not thread.is_alive()
    agree([(i,) for i in range(6)], [*(future.result(0) for future in futures), *late])
    with pytest.raises(ServingError, match="is not started"):
        serving.submit((6,))


def test_stopping_at_once(batches):
    gate, serving = gated(batches)
    serving.start()
    running = serving.submit((0,))
    assert gate.entered.wait(LONG)
    waiting = serving.submit((1,))
    threading.Timer(0.05, gate.open.set).start()
    serving.stop(drain=False)
    agree([(0,)], [running.result(0)])
    with pytest.raises(ServingError, match="stopped before it answered"):
        waiting.result(0)


def test_stopping_takes_too_long(batches):
    gate, serving = gated(batches)
    serving.start()
    running = serving.submit((0,))
    assert gate.entered.wait(LONG)
    waiting = serving.submit((1,))
    with pytest.raises(ServingError, match="runs a batch"):
        serving.stop(timeout=0.05)
    with pytest.raises(ServingError, match="stopped before it answered"):
        waiting.result(LONG)
    gate.open.set()
    running.result(LONG)


def test_an_interrupted_stop_leaves_a_serving_that_starts(batches, monkeypatch):
    gate, serving = gated(batches)
    serving.start()
    running = serving.submit((0,))
    assert gate.entered.wait(LONG)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(serving._worker._thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            serving.stop()
    assert not serving.is_started
    assert serving.start().is_started
    gate.open.set()
    agree([(0,), (1,)], [running.result(LONG), serving((1,))])
    serving.stop(timeout=LONG)


def test_a_callback_of_the_worker_may_ask_again(batches):
    """It runs in the worker's thread, which cannot wait for itself."""
    serving = Serving(small_model.Tokens(), batches, max_queue=1)
    found, done = [], threading.Event()

    def again(future):
        found.append(serving((1, 2)))
        serving.stop()
        done.set()

    serving.start()
    serving.submit((0,)).add_done_callback(again)
    assert done.wait(LONG)
    agree([(1, 2)], found)


@pytest.mark.parametrize("fails_at_once", [True, False])
def test_a_worker_that_dies_is_replaced(batches, fails_at_once, caplog):
    gate, serving = gated(batches)
    gate.dies, gate.fails_at_once = (2,), fails_at_once
    with serving:
        first = serving.submit((0,))
        assert gate.entered.wait(LONG)
        second = [serving.submit((i,)) for i in range(1, 5)]
        third = [serving.submit((i,)) for i in range(5, 8)]
        gate.open.set()
        wait([first, *second, *third], LONG)
        for future in second:
            with pytest.raises(ServingError, match="died while it ran this request"):
                future.result(0)
        survivors = [future for future in (first, *third) if future.exception() is None]
        assert len(survivors) >= 2 if fails_at_once else len(survivors) >= 0
        agree([(1, 2)], [serving((1, 2), timeout=LONG)])
        assert serving.stats().restarts == 1
    assert "died and is replaced" in caplog.text


def test_a_worker_dies_while_it_drains(batches):
    gate, serving = gated(batches)
    gate.dies = (0,)
    serving.start()
    futures = [serving.submit((0,))]
    assert gate.entered.wait(LONG)
    futures += [serving.submit((i,)) for i in range(1, 9)]
    threading.Timer(0.05, gate.open.set).start()
    serving.stop()
    assert all(future.done() for future in futures)
    assert sum(future.exception() is None for future in futures) >= 4


def test_a_forgotten_serving_ends_its_worker(batches):
    serving = Serving(small_model.Tokens(), batches, name="forgotten").start()
    serving((1, 2))
    thread = serving._worker._thread
    del serving
    gc.collect()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_process_may_end_without_stopping(tmp_path):
    program = """
import small_model, transmuter
from transmuter.serving import batching
from transmuter.serving.runtime import Serving

batching._cores = lambda: 2
model = transmuter.load(small_model.attention())
serving = Serving(small_model.Tokens(), batching.TokenBatches(model, sequence_lengths=(8,))).start()
serving((1, 2))
futures = [serving.submit((i,)) for i in range(50)]
print("end")
"""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_many_threads_start_and_stop_it(serving):
    def both():
        for _ in range(20):
            serving.start()
            serving.stop()

    threads = [threading.Thread(target=both) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not serving.is_started
    assert not any("tokens-worker" in thread.name for thread in threading.enumerate())


# ---- what it tells


def test_statistics(batches):
    serving = Serving(small_model.Tokens(), batches)
    empty = serving.stats()
    assert (empty.requests, empty.batch_fill, empty.throughput, empty.latency_p99) == (0, 0.0, 0.0, 0.0)
    serving([(1,)] * 6)
    direct = serving.stats()
    assert (direct.requests, direct.rows, direct.batches, direct.batch_fill) == (6, 6, 2, 0.75)
    with serving:
        for _ in range(5):
            serving((1,))
        stats = serving.stats()
    assert stats.requests == 11
    assert stats.throughput > 0
    assert 0 < stats.queue_time_p50 <= stats.queue_time_p99
    assert 0 < stats.latency_p50 <= stats.latency_p99
    assert stats.queue_time_mean > 0
    serving.reset_stats()
    assert serving.stats() == empty
    assert repr(serving) == "Serving('serving', not started)"

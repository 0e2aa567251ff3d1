"""Many threads at once: all answers are right, the queue stays bounded, and all comes to an end."""

from __future__ import annotations

import asyncio
import faulthandler
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
import pytest
import small_model

import transmuter
from transmuter.errors import ServingError
from transmuter.serving.batching import TokenBatches
from transmuter.serving.runtime import Serving

THREADS, REQUESTS, LONG = 64, 200, 120.0


@pytest.fixture(autouse=True)
def _no_hang():
    """A deadlock shows all stacks rather than nothing."""
    faulthandler.dump_traceback_later(LONG, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def batches():
    """With several batches at a time, as with several cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transmuter.serving.batching._cores", lambda: 2)
        made = _batches()
    assert made.in_flight == 3
    return made


def _batches() -> TokenBatches:
    made = TokenBatches(transmuter.load(small_model.attention()), batch_size=8, sequence_lengths=(8, 16, 32))
    made.warm_up(progress=False)
    return made


@pytest.fixture(scope="module")
def answers():
    """Texts of all lengths, and what the model says of each by itself, without padding."""
    random = np.random.RandomState(0)
    texts = [tuple(random.randint(0, 50, length).tolist()) for length in range(1, 33) for _ in range(8)]
    return [(text, small_model.alone(text)["last_hidden_state"].mean(0)) for text in texts]


def test_unbatched_calls_say_the_same(batches, answers):
    unbatched = Serving(small_model.Tokens(), batches)
    for text, expected in answers[::7]:
        np.testing.assert_allclose(unbatched(text), expected, atol=1e-5, rtol=0)


def _draws(seed: int, answers, count: int):
    random = np.random.RandomState(seed)
    return [answers[i] for i in random.randint(0, len(answers), count)]


@pytest.mark.parametrize("cores", [1, 2])
def test_every_answer_is_the_unbatched_one(answers, cores, monkeypatch):
    monkeypatch.setattr("transmuter.serving.batching._cores", lambda: cores)
    batches = _batches()
    limit, longest = 48, 0
    serving = Serving(small_model.Tokens(), batches, max_queue=limit, batch_timeout=0.002)

    def ask(seed: int) -> int:
        nonlocal longest
        for text, expected in _draws(seed, answers, REQUESTS):
            found = serving(text)
            longest = max(longest, serving._worker.queued)
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
        return REQUESTS

    with serving, ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(ask, range(THREADS), timeout=LONG)) == THREADS * REQUESTS
    stats = serving.stats()
    assert stats.requests == stats.rows == THREADS * REQUESTS
    assert (stats.failed, stats.cancelled, stats.restarts, stats.queued) == (0, 0, 0, 0)
    assert 8 <= longest <= limit
    assert stats.batch_fill > 0.7


def test_all_kinds_of_callers_at_once(batches, answers):
    """Threads, futures, lists and asyncio, some of whom give up: nobody gets another's answer."""
    serving = Serving(small_model.Tokens(), batches, max_queue=16)
    check = lambda found, expected: np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)

    def threads(seed: int) -> None:
        for text, expected in _draws(seed, answers, 50):
            check(serving(text), expected)

    def futures(seed: int) -> None:
        asked = [(serving.submit(text), expected) for text, expected in _draws(seed, answers, 50)]
        for i, (future, expected) in enumerate(asked):
            if i % 3 or not future.cancel():
                check(future.result(LONG), expected)

    def lists(seed: int) -> None:
        drawn = _draws(seed, answers, 50)
        for found, (_, expected) in zip(serving([text for text, _ in drawn]), drawn, strict=True):
            check(found, expected)

    def late(seed: int) -> None:
        for text, expected in _draws(seed, answers, 50):
            try:
                check(serving(text, timeout=0.003), expected)
            except ServingError as error:
                assert "within" in str(error)  # noqa: PT017

    def loop(seed: int) -> None:
        async def ask(text, expected, gives_up: bool) -> None:
            task = asyncio.create_task(serving.acall(text))
            if gives_up:
                await asyncio.sleep(0.002)
                task.cancel()
            try:
                check(await task, expected)
            except asyncio.CancelledError:
                assert gives_up

        async def all_of_them() -> None:
            drawn = _draws(seed, answers, 50)
            await asyncio.gather(*(ask(*pair, i % 3 == 0) for i, pair in enumerate(drawn)))

        asyncio.run(all_of_them())

    kinds = (threads, futures, lists, late, loop)
    with serving, ThreadPoolExecutor(4 * len(kinds)) as pool:
        for done in as_completed([pool.submit(kind, 10 * i) for i in range(4) for kind in kinds], LONG):
            done.result()
    assert serving.stats().queued == 0


def test_a_worker_that_dies_again_and_again(batches, answers):
    """Its requests fail, all others are answered, and callers that ask again get their answers."""

    class Dying(TokenBatches):
        count = 0

        def launch(self, rows):
            self.count += 1
            if self.count % 20 == 0:
                raise SystemExit("a worker's death")
            return batches.launch(rows)

    made = Dying(batches.model, batch_size=8, sequence_lengths=(8, 16, 32))
    serving = Serving(small_model.Tokens(), made, max_queue=32)

    def ask(seed: int) -> int:
        failures = 0
        for text, expected in _draws(seed, answers, 50):
            while True:
                try:
                    found = serving(text)
                    break
                except ServingError as error:
                    assert "died" in str(error)  # noqa: PT017
                    failures += 1
            np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
        return failures

    with serving, ThreadPoolExecutor(16) as pool:
        failures = sum(pool.map(ask, range(16), timeout=LONG))
    stats = serving.stats()
    assert stats.requests == 16 * 50
    assert stats.restarts == made.count // 20 > 0
    assert stats.failed == failures > 0


def test_stopping_under_load(batches, answers):
    """Every request has an answer or an error, whenever the serving is stopped and started again."""
    serving = Serving(small_model.Tokens(), batches, max_queue=16)
    asked = answered = refused = 0
    lock, is_over = threading.Lock(), threading.Event()

    def ask(seed: int) -> None:
        nonlocal asked, answered, refused
        while not is_over.is_set():
            for text, expected in _draws(seed, answers, 20):
                with lock:
                    asked += 1
                try:
                    found = serving.submit(text).result(LONG)
                except ServingError as error:
                    assert "stopped" in str(error) or "not started" in str(error)  # noqa: PT017
                    with lock:
                        refused += 1
                    is_over.wait(0.001)
                    continue
                np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
                with lock:
                    answered += 1

    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(ask, seed) for seed in range(16)]
        for i in range(10):
            serving.start()
            is_over.wait(0.05)
            serving.stop(drain=i % 2 == 0)
        is_over.set()
        for future in running:
            future.result(LONG)
    assert answered + refused == asked
    assert answered > 100

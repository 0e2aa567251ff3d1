"""Compiled models under many threads, interruptions and failures of XLA."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from building import info
from compiled_models import W, X, breaking, broken_result, hooks, load, node, plain
from onnx import numpy_helper

import transmuter
from transmuter import telemetry

THREADS = 16


def together(work: Callable[[int], object], count: int = THREADS) -> None:
    """Runs `work` in threads that start at the same moment."""
    barrier = threading.Barrier(count)

    def start(number: int) -> None:
        barrier.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(start, range(count)))


# ---- many threads --------------------------------------------------------------------------------------------------


def test_one_compile_however_many_threads_ask() -> None:
    compiled = transmuter.compile(breaking())
    events: list[telemetry.Event] = []
    with telemetry.subscribe(events.append, telemetry.Trace, telemetry.Compile):
        together(lambda _: compiled({"x": X}))
    assert Counter(type(e).__name__ for e in events) == {"Trace": 2, "Compile": 2}
    cache = compiled.cache_info()
    assert (cache.hits, cache.misses) == (2 * THREADS - 2, 2)
    assert [s.calls for s in cache.segments] == [THREADS, THREADS]
    assert compiled.explain().breaks[0].runs == THREADS


@pytest.mark.parametrize(
    ("model", "expected", "largest"), [(plain, lambda x: np.tanh(x @ W), 25), (breaking, broken_result, 7)]
)
def test_sixteen_threads_and_two_hundred_random_shapes(
    model: Callable[[], transmuter.Model], expected: Callable[[np.ndarray], object], largest: int
) -> None:
    compiled = transmuter.compile(model(), cache_size=64)
    drawn = np.random.default_rng(0)
    arrays = [drawn.standard_normal((rows, 8)).astype(np.float32) for rows in drawn.integers(1, largest, 200)]
    events: list[telemetry.Compile] = []

    def work(number: int) -> None:
        for x in arrays[number::THREADS]:
            np.testing.assert_allclose(compiled({"x": x})["y"], expected(x), rtol=1e-3, atol=1e-6)

    with telemetry.subscribe(events.append, telemetry.Compile):
        together(work)
    cache = compiled.cache_info()
    assert cache.evictions == 0
    compiles = Counter((e.depth, e.signature) for e in events if e.depth == 0)
    assert compiles == dict.fromkeys(((0, f"x float32[{x.shape[0]}, 8]") for x in arrays), 1)
    assert len(events) == cache.misses == len(cache.segments)
    assert sum(s.calls for s in cache.segments if s.depth == 0) == len(arrays)
    assert cache.hits + cache.misses == len(arrays) * len(cache.depths)


def test_threads_that_evict_each_others_segments() -> None:
    compiled = transmuter.compile(plain(), cache_size=2)

    def work(number: int) -> None:
        for rows in np.random.default_rng(number).integers(1, 5, 4):
            np.testing.assert_allclose(compiled({"x": X[:rows]})["y"], np.tanh(X[:rows] @ W), rtol=1e-5)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", transmuter.RecompileWarning)
        together(work, 4)
    cache = compiled.cache_info()
    assert cache.misses == cache.evictions + len(cache.segments)
    assert cache.hits + cache.misses == 16


def test_threads_share_weights_that_others_ask_for() -> None:
    model = plain()
    compiled = transmuter.compile(model)

    def work(number: int) -> None:
        if number % 2:
            np.testing.assert_array_equal(model.params["w"], W)
        np.testing.assert_allclose(compiled({"x": X})["y"], np.tanh(X @ W), rtol=1e-5)

    together(work)


# ---- failures and interruptions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit()])
def test_a_lowering_that_is_interrupted_leaves_the_cache_usable(error: BaseException) -> None:
    compiled = transmuter.compile(plain("raises"))
    failures = [error]

    def raises(_: object) -> None:
        if failures:
            raise failures.pop()

    hooks["raises"] = raises
    with pytest.raises(transmuter.LoweringError if isinstance(error, Exception) else type(error)):
        compiled({"x": X})
    assert compiled.cache_info().segments == ()
    for _ in range(2):
        np.testing.assert_allclose(compiled({"x": X})["y"], np.tanh(X @ W), rtol=1e-5)
    assert (compiled.cache_info().hits, compiled.cache_info().misses) == (1, 1)


def test_an_error_in_a_waiting_threads_place_is_not_its_own() -> None:
    """One of the threads fails while it traces; the next one traces again."""
    compiled = transmuter.compile(plain("fails_once"))
    failures = [ValueError("no")]

    def fails_once(_: object) -> None:
        if failures:
            raise failures.pop()

    hooks["fails_once"] = fails_once
    outcomes: list[str] = []

    def work(_: int) -> None:
        try:
            np.testing.assert_allclose(compiled({"x": X})["y"], np.tanh(X @ W), rtol=1e-5)
            outcomes.append("right")
        except transmuter.LoweringError:
            outcomes.append("failed")

    together(work)
    assert Counter(outcomes) == {"right": THREADS - 1, "failed": 1}
    assert compiled.cache_info().misses == 1


@pytest.mark.parametrize(
    "kind", [telemetry.Trace, telemetry.Compile, telemetry.SegmentRun, telemetry.Break, telemetry.Eviction]
)
def test_an_interrupt_in_the_middle_of_a_call_leaves_the_cache_usable(kind: type[telemetry.Event]) -> None:
    compiled = transmuter.compile(breaking(), {"x": X[:2]}, cache_size=1)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with telemetry.subscribe(interrupt, kind), pytest.raises(KeyboardInterrupt):
        compiled({"x": X})
    for x in (X, X[:2], X):
        np.testing.assert_allclose(compiled({"x": x})["y"], broken_result(x), rtol=1e-4)
    cache = compiled.cache_info()
    assert cache.misses == cache.evictions + len(cache.segments)
    with ThreadPoolExecutor(1) as pool:  # no lock is held any more
        np.testing.assert_allclose(pool.submit(compiled, {"x": X}).result(30)["y"], broken_result(X), rtol=1e-4)


def test_a_call_of_the_model_from_a_subscriber() -> None:
    compiled = transmuter.compile(plain())
    depth: list[int] = []

    def call(_: object) -> None:
        if not depth:
            depth.append(1)
            compiled({"x": X[:1]})

    with telemetry.subscribe(call, telemetry.Compile):
        assert compiled({"x": X})["y"].shape == (4, 8)
    assert len(compiled.cache_info().segments) == 2


def test_failures_of_xla_name_the_segment_and_its_nodes() -> None:
    shape = numpy_helper.from_array(np.array([1 << 21, 1 << 21]), "shape")
    nodes = [node("Tanh", ["x"], ["t"], name="before"), node("Expand", ["t", "shape"], ["y"], name="huge")]
    compiled = transmuter.compile(load(nodes, [info("x", (None, 1))], [info("y", None)], [shape]))
    for _ in range(2):
        with pytest.raises(transmuter.ExecutionError, match="RESOURCE_EXHAUSTED") as caught:
            jax.block_until_ready(compiled({"x": np.ones((1, 1), np.float32)}))
        assert caught.value.segment == "Segment 0 of graph for x float32[1, 1]"
        assert caught.value.nodes == ("node 'before' (Tanh)", "node 'huge' (Expand)")
        assert "largest results are those of node 'huge' (Expand) with 17592186044416 bytes" in str(caught.value)
        assert isinstance(caught.value, RuntimeError)
        assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    assert compiled.cache_info().misses == 1


def test_failures_of_xla_at_a_break_name_the_node() -> None:
    def fails(x: jax.Array) -> None:
        if not isinstance(x, jax.core.Tracer):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    hooks["fails"] = fails
    nodes = [node("Tanh", ["x"], ["t"]), node("Watched", ["t"], ["y"], hook="fails", name="reader")]
    compiled = transmuter.compile(load(nodes, [info("x", ("n", 8))], [info("y", None)]))
    with pytest.raises(transmuter.LoweringError, match=r"'reader'.*RESOURCE_EXHAUSTED"):
        compiled({"x": X})

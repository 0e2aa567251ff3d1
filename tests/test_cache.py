"""The cache of compiled segments: counts, evictions, storms, warm-up, executables on disk; values between segments."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from building import info, model_of
from compiled_models import W, X, breaking, broken_result, hooks, load, node, plain, reshaping
from jax.experimental.compilation_cache import compilation_cache
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter import telemetry
from transmuter.segments.cache import THRASHING, VARYING


def executables() -> int:
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


# ---- counts --------------------------------------------------------------------------------------------------------


def test_hits_and_misses_are_counted_by_depth_and_by_segment() -> None:
    compiled = transmuter.compile(breaking())
    for x in (X, X[:2], X, X):
        np.testing.assert_allclose(compiled(x)["y"], broken_result(x), rtol=1e-4)
    cache = compiled.cache_info()
    assert [(d.hits, d.misses, d.evictions) for d in cache.depths] == [(2, 2, 0), (2, 2, 0)]
    assert (cache.hits, cache.misses, cache.evictions) == (4, 4, 0)
    assert {s.signature: (s.depth, s.hits, s.calls) for s in cache.segments} == {
        "x float32[4, 8]": (0, 2, 3),
        "x float32[2, 8]": (0, 0, 1),
        "rows float32[3, 8]": (1, 2, 3),
        "rows float32[1, 8]": (1, 0, 1),
    }
    assert all(s.compile_seconds > 0 and s.trace_seconds > 0 and s.seconds > 0 for s in cache.segments)
    assert cache.compile_seconds == pytest.approx(sum(s.compile_seconds for s in cache.segments))


def test_calls_with_a_plan_are_counted_too() -> None:
    compiled = transmuter.compile(plain(), cache_size=2)
    for rows in (1, 2, 1, 1, 1, 3, 1, 2):  # 2 goes for 3 and 3 for 2, as 1 was always used later
        np.testing.assert_allclose(compiled({"x": X[:rows]})["y"], np.tanh(X[:rows] @ W), rtol=1e-5)
    cache = compiled.cache_info()
    assert (cache.hits, cache.misses, cache.evictions) == (4, 4, 2)
    assert {s.signature: s.calls for s in cache.segments} == {"x float32[1, 8]": 5, "x float32[2, 8]": 1}


def test_calls_alike_are_planned_only_where_nothing_is_to_be_converted() -> None:
    inputs = [info("a", ("n",), TensorProto.INT64), info("b", ("n",), TensorProto.INT64)]
    compiled = transmuter.compile(load([node("Sub", ["a", "b"], ["y"])], inputs, [info("y", None, TensorProto.INT64)]))
    a, b = np.array([1 << 40, 2]), np.array([1, 1])
    narrow = {"a": jax.numpy.asarray(np.int32([7, 8])), "b": jax.numpy.asarray(np.int32([1, 1]))}
    for _ in range(3):
        np.testing.assert_array_equal(compiled({"a": a, "b": b})["y"], a - b)
        np.testing.assert_array_equal(compiled({"b": b, "a": a})["y"], a - b)
        np.testing.assert_array_equal(compiled({"a": a, "b": narrow["b"]})["y"], a - 1)
        np.testing.assert_array_equal(compiled(narrow)["y"], [6, 7])
        assert compiled(narrow)["y"].dtype == np.int64
    assert (compiled.cache_info().misses, compiled.cache_info().hits) == (1, 14)
    for wrong in ({"a": a, "b": b.astype(np.int32)}, {"a": a}, {"a": a, "c": b}):
        with pytest.raises(transmuter.InputError):
            compiled(wrong)
    with pytest.raises(transmuter.LoweringError):
        compiled({"a": a, "b": np.arange(3)})
    assert jax.jit(lambda: compiled({"a": a % 7, "b": b})["y"])().dtype == np.int32, "as the jit around it wants it"


def test_clearing_keeps_the_counts_and_loses_the_segments() -> None:
    compiled = transmuter.compile(plain(), {"x": X})
    before = compiled.cache_info()
    compiled.cache_clear()
    after = compiled.cache_info()
    assert after.segments == ()
    assert (after.misses, after.compile_seconds) == (before.misses, before.compile_seconds)
    compiled({"x": X})
    assert compiled.cache_info().misses == 2


# ---- evictions -----------------------------------------------------------------------------------------------------


def test_an_eviction_frees_the_executable() -> None:
    compiled = transmuter.compile(plain(), {"x": X[:1]}, cache_size=1)
    compiled({"x": X[:1]})
    function = weakref.ref(compiled.segments[0].executable(own_params=True).function)
    count = executables()
    for rows in (2, 3, 4):
        for _ in range(2):
            compiled({"x": X[:rows]})
        assert executables() == count
    assert function() is None
    compiled.cache_clear()
    assert executables() == count - 1


def test_what_only_follows_on_an_evicted_segment_goes_with_it() -> None:
    compiled = transmuter.compile(breaking(), cache_size=1)
    for rows in (4, 3, 4):
        np.testing.assert_allclose(compiled({"x": X[:rows]})["y"], broken_result(X[:rows]), rtol=1e-4)
        assert [s.depth for s in compiled.cache_info().segments] == [0, 1]
    compiled({"x": X[:2]})
    assert [d.evictions for d in compiled.cache_info().depths] == [3, 3]


def test_constants_that_only_evicted_segments_took_are_freed() -> None:
    nodes = [
        node("Shape", ["x"], ["n"]),
        node("Squeeze", ["n"], ["length"]),
        node("Range", ["zero", "length", "one"], ["places"]),
        node("Cast", ["places"], ["floats"], to=TensorProto.FLOAT),
        node("Mul", ["x", "floats"], ["y"]),
    ]
    scalars = [numpy_helper.from_array(np.int64(i), name) for i, name in enumerate(("zero", "one"))]
    compiled = transmuter.compile(load(nodes, [info("x", ("n",))], [info("y", None)], scalars), cache_size=2)
    for length in range(3001, 3007):
        x = np.ones(length, np.float32)
        np.testing.assert_array_equal(compiled({"x": x})["y"], np.arange(length))
    del x
    gc.collect()
    assert {a.size for a in jax.live_arrays() if 3000 < a.size < 3010} <= {3005, 3006}


# ---- storms --------------------------------------------------------------------------------------------------------


def test_thrashing_is_told_once() -> None:
    compiled = transmuter.compile(plain(), cache_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in range(1, THRASHING + 1):
            compiled({"x": np.ones((rows, 8), np.float32)})
    with pytest.warns(transmuter.RecompileWarning, match=r"17 signatures.*buckets.*static_inputs.*cache_size") as told:
        compiled({"x": np.ones((THRASHING + 1, 8), np.float32)})
    assert len(told) == 1
    assert told[0].filename == __file__
    assert compiled({"x": X})["y"].shape == (4, 8)


@pytest.mark.parametrize(("declared", "why"), [((), "decide a shape"), (("shape",), "in static_inputs")])
def test_contents_that_vary_endlessly_are_told_once(declared: tuple[str, ...], why: str) -> None:
    model = load(
        [node("Expand", ["x", "shape"], ["y"])],
        [info("x", (1,)), info("shape", (None,), TensorProto.INT64)],
        [info("y", None)],
    )
    compiled = transmuter.compile(model, static_inputs=declared, cache_size=VARYING + 5)
    x = np.ones(1, np.float32)
    for length in range(1, VARYING + 1):
        compiled({"x": x, "shape": np.array([length])})
    with pytest.warns(transmuter.RecompileWarning, match=f"12 different contents of 'shape': .*{why}"):
        compiled({"x": x, "shape": np.array([VARYING + 1])})
    assert compiled({"x": x, "shape": np.array([VARYING + 2])})["y"].shape == (VARYING + 2,)


# ---- ahead of calls ------------------------------------------------------------------------------------------------


def test_warm_up_compiles_ahead_and_counts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = transmuter.compile(plain())
    kinds = (telemetry.Trace, telemetry.Compile)
    seen: list[telemetry.Event] = []
    with telemetry.subscribe(seen.append, *kinds):
        assert compiled.warm_up([{"x": (rows, 8)} for rows in (1, 2, 3)], progress=True) is compiled
        assert sorted(type(e).__name__ for e in seen) == ["Compile"] * 3 + ["Trace"] * 3
        assert "3/3" in capsys.readouterr().err
        for rows in (1, 2, 3):
            np.testing.assert_allclose(compiled({"x": X[:rows]})["y"], np.tanh(X[:rows] @ W), rtol=1e-5)
        compiled.warm_up({"x": (1, 8)})
        assert len(seen) == 6
    cache = compiled.cache_info()
    assert (cache.hits, cache.misses) == (3, 0)
    assert [s.calls for s in cache.segments] == [1, 1, 1]
    assert capsys.readouterr().err == "", "no bar where there is no terminal"


def test_warm_up_with_inputs_goes_past_breaks() -> None:
    compiled = transmuter.compile(breaking())
    compiled.warm_up([{"x": (2, 8)}, {"x": X}])
    assert [s.depth for s in compiled.cache_info().segments] == [0, 0, 1]
    compiled({"x": X})
    cache = compiled.cache_info()
    assert (cache.hits, cache.misses, sum(s.calls for s in cache.segments)) == (2, 0, 2)


def test_warm_up_needs_contents_that_decide_a_shape() -> None:
    compiled = transmuter.compile(reshaping())
    with pytest.raises(transmuter.InputError, match="contents of 'shape' decide"):
        compiled.warm_up({"x": (4, 8), "shape": (2,)})
    compiled.warm_up({"x": (4, 8), "shape": np.array([8, 4])})
    assert compiled({"x": X, "shape": np.array([8, 4])})["y"].shape == (8, 4)
    assert compiled.cache_info().misses == 0
    with pytest.raises(transmuter.InputError, match="'x' has the shape"):
        compiled.warm_up({"x": (4, 9), "shape": np.array([8, 4])})
    with pytest.raises(ValueError, match="9 examples, but cache_size is 8"):
        compiled.warm_up([{"x": (4, 8)}] * 9)


def test_warm_up_leaves_random_draws_alone() -> None:
    proto = model_of([helper.make_node("RandomUniformLike", ["x"], ["y"])], [info("x", ("n", 8))], [info("y", None)])
    compiled, other = transmuter.compile(transmuter.load(proto)), transmuter.compile(transmuter.load(proto))
    compiled.warm_up([{"x": X}])
    np.testing.assert_array_equal(compiled({"x": X})["y"], other({"x": X})["y"])
    assert compiled.cache_info().misses == 0


# ---- executables on disk -------------------------------------------------------------------------------------------


@pytest.fixture
def _jax_cache() -> Iterator[None]:
    """Leaves JAX's compilation cache as it is where nobody has asked for it."""
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("_jax_cache")
def test_the_persistent_cache_is_off_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSMUTER_CACHE_DIR", raising=False)
    transmuter.compile(plain())
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.setenv("TRANSMUTER_CACHE_DIR", str(tmp_path))
    transmuter.compile(plain(), {"x": X})
    assert [file.name.rsplit("-", 1)[0] for file in tmp_path.iterdir()] == ["transmuter-segment"], "the segment alone"
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1
    transmuter.compile(plain(), persistent_cache=tmp_path)
    with pytest.raises(ValueError, match="one such folder"):
        transmuter.compile(plain(), persistent_cache=tmp_path / "other")


@pytest.mark.usefixtures("_jax_cache")
def test_segments_of_a_graph_with_breaks_are_in_jaxs_cache(tmp_path: Path) -> None:
    found: list[str] = []
    listener = lambda event, **_: found.append(event)
    jax.monitoring.register_event_listener(listener)
    try:
        for hits in (0, 2):
            before = found.count("/jax/compilation_cache/cache_hits")
            compiled = transmuter.compile(breaking(), persistent_cache=tmp_path)
            np.testing.assert_allclose(compiled(X)["y"], broken_result(X), rtol=1e-4)
            assert found.count("/jax/compilation_cache/cache_hits") - before >= hits
            jax.clear_caches()
    finally:
        jax.monitoring.unregister_event_listener(listener)
    assert len(list(tmp_path.glob("jit_segment*-cache"))) == 2


# ---- values between segments ---------------------------------------------------------------------------------------


def test_values_are_handed_on_as_they_are_and_freed_when_no_segment_needs_them() -> None:
    """`h` (13 rows) is needed at the first break and by the second segment. At the second break it is gone."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Watched", ["h"], ["a"], hook="first"),
        node("ReduceSum", ["a", "rows"], ["b"], keepdims=0),
        node("Concat", ["b", "b"], ["c"], axis=0),
        node("Watched", ["c"], ["d"], hook="second"),
        node("Watched", ["d"], ["e"], hook="third"),
        node("Tanh", ["e"], ["y"]),
    ]
    weights = [numpy_helper.from_array(W, "w"), numpy_helper.from_array(np.array([0]), "rows")]
    compiled = transmuter.compile(load(nodes, [info("x", ("n", 8))], [info("y", None)], weights))
    shapes: dict[str, list[tuple[int, ...]]] = {}
    places: dict[str, int] = {}

    def watch(name: str):
        def hook(x: jax.Array) -> None:
            if not isinstance(x, jax.core.Tracer):
                places[name] = x.unsafe_buffer_pointer()
                shapes[name] = [a.shape for a in jax.live_arrays()]

        return hook

    for name in ("first", "second", "third"):
        hooks[name] = watch(name)
    x = np.ones((13, 8), np.float32)
    for _ in range(2):
        shapes.clear()
        gc.collect()
        np.testing.assert_allclose(compiled({"x": x})["y"], np.tanh(np.tile((x @ W).sum(0), 2)), rtol=1e-4)
        assert (13, 8) in shapes["first"]
        assert (13, 8) not in shapes["second"]
        assert places["second"] == places["third"], "the same buffer"
    assert [s.depth for s in compiled.cache_info().segments] == [0, 1, 2, 3]
    assert compiled.cache_info().segments[2].compile_seconds == 0, "nothing happens between the last two breaks"

"""Random graphs: compiled equals eager equals ONNX Runtime, for several contents; jitted too, where nothing breaks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
from comparison import assert_equal
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_graphs import RandomGraph, graphs

import transmuter


def reference(graph: RandomGraph) -> Any:
    """ONNX Runtime's outputs for an input, by name."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(graph.proto.SerializeToString(), options)
    names = [o.name for o in graph.proto.graph.output]
    return lambda feed: dict(zip(names, session.run(names, feed), strict=True))


def is_stable(outputs: Any, feed: dict[str, np.ndarray]) -> bool:
    """Whether ONNX Runtime's results are the same for floats that differ by rounding: no comparison is at a tie."""
    rng, expected = np.random.default_rng(0), outputs(feed)
    for _ in range(6):
        moved = {
            n: x + (rng.uniform(-1e-5, 1e-5, x.shape).astype(x.dtype) if x.dtype.kind == "f" else 0)
            if x.dtype.kind != "b"
            else x
            for n, x in feed.items()
        }
        try:
            assert_equal(outputs({n: np.asarray(x, feed[n].dtype) for n, x in moved.items()}), expected)
        except AssertionError:
            return False
    return True


def host(outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in outputs.items()}


def same(actual: dict[str, Any], expected: dict[str, Any], where: str, outputs: Any, feed: Any) -> None:
    try:
        assert_equal(host(actual), expected, where=where)
    except AssertionError:
        assume(is_stable(outputs, feed))
        raise


def narrowed(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x.astype(np.int32) if x.dtype == np.int64 else x for name, x in outputs.items()}


def check(graph: RandomGraph, *, jitted: bool, graded: bool) -> None:
    outputs = reference(graph)
    model = transmuter.load(graph.proto)
    compiled = transmuter.compile(model)
    for feed in graph.feeds:
        expected = outputs(feed)
        same(transmuter.run(model, feed), expected, "run", outputs, feed)
        same(compiled(feed), expected, "compiled", outputs, feed)
    if jitted:
        call = jax.jit(lambda feed: model.apply(model.params, feed))
        try:
            found = [call(feed) for feed in graph.feeds]
        except transmuter.GraphBreakError:
            found = []
        for feed, results in zip(graph.feeds, found):
            same(results, narrowed(outputs(feed)), "jit", outputs, feed)
    if graded:
        feed = graph.feeds[0]
        assume(is_stable(outputs, feed))
        floats = {name: x for name, x in feed.items() if x.dtype == np.float32}

        def total(call: Any) -> Any:
            def loss(floats: dict[str, Any]) -> Any:
                results = call({**feed, **floats}).values()
                return sum((jnp.sum(y) for y in results if y.dtype == np.float32), jnp.float32(0))

            return loss

        wanted = jax.grad(total(lambda feed: transmuter.run(model, feed)))(floats)
        try:
            slope = jax.grad(total(compiled))(floats)
        except ValueError as error:  # JAX cannot go back through a loop of which only the run knows the length
            if "while_loop" not in str(error):
                raise
            return
        assert_equal(host(slope), host(wanted), where="gradient")


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(), st.booleans(), st.booleans())
def test_compiled_equals_eager_equals_onnxruntime(graph: RandomGraph, jitted: bool, graded: bool) -> None:
    check(graph, jitted=jitted, graded=graded)

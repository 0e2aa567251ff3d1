"""Random graphs: compiled equals eager equals ONNX Runtime, for several contents; jitted too, where nothing breaks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
from comparison import assert_equal
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import helper
from random_graphs import RandomGraph, graphs

import transmuter


def reference(proto: onnx.ModelProto) -> Any:
    """ONNX Runtime's outputs for an input, by name."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    names = [o.name for o in proto.graph.output]
    return lambda feed: dict(zip(names, session.run(names, feed), strict=True))


ROUNDED = {"Tanh", "Sigmoid", "Sin", "Sqrt", "Exp", "MatMul", "Softmax", "LogSoftmax"}
"""Operators on floats alone, of which results differ by rounding."""


def shaken(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes, with noise of the size of rounding on what those of `ROUNDED` give."""
    new = []
    for node in nodes:
        node = onnx.NodeProto.FromString(node.SerializeToString())
        for attribute in node.attribute:
            if attribute.HasField("g"):
                inner = shaken(attribute.g.node)
                attribute.g.ClearField("node")
                attribute.g.node.extend(inner)
        new.append(node)
        if node.op_type in ROUNDED:
            name = node.output[0]
            exact, noise = f"{name}_exact", f"{name}_noise"
            node.output[0] = exact
            new.append(helper.make_node("RandomUniformLike", [exact], [noise], low=1 - 1e-6, high=1 + 1e-6))
            new.append(helper.make_node("Mul", [exact, noise], [name]))
    return new


def is_stable(graph: RandomGraph, feed: dict[str, np.ndarray]) -> bool:
    """Whether ONNX Runtime's results are the same for floats that differ by rounding: no comparison is at a tie."""
    proto = onnx.ModelProto.FromString(graph.proto.SerializeToString())
    for part in (proto.graph, *proto.functions):
        nodes = shaken(part.node)
        part.ClearField("node")
        part.node.extend(nodes)
    rng, outputs, expected = np.random.default_rng(0), reference(proto), reference(graph.proto)(feed)
    for _ in range(6):
        moved = {
            name: (x + rng.uniform(-1e-5, 1e-5, x.shape)).astype(x.dtype) if x.dtype == np.float32 else x
            for name, x in feed.items()
        }
        try:
            assert_equal(outputs({name: np.asarray(x) for name, x in moved.items()}), expected)
        except AssertionError:
            return False
    return True


def host(outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in outputs.items()}


def same(actual: dict[str, Any], expected: dict[str, Any], where: str, graph: RandomGraph, feed: Any) -> None:
    try:
        assert_equal(host(actual), expected, where=where)
    except AssertionError:
        assume(is_stable(graph, feed))
        raise


def narrowed(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: x.astype(np.int32) if x.dtype == np.int64 else x for name, x in outputs.items()}


def check(graph: RandomGraph, *, jitted: bool, graded: bool) -> None:
    outputs = reference(graph.proto)
    model = transmuter.load(graph.proto)
    compiled = transmuter.compile(model)
    for feed in graph.feeds:
        expected = outputs(feed)
        same(transmuter.run(model, feed), expected, "run", graph, feed)
        same(compiled(feed), expected, "compiled", graph, feed)
    if jitted:
        call = jax.jit(lambda feed: model.apply(model.params, feed))
        try:
            found = [call(feed) for feed in graph.feeds]
        except transmuter.GraphBreakError:
            found = []
        for feed, results in zip(graph.feeds, found):
            same(results, narrowed(outputs(feed)), "jit", graph, feed)
    if graded:
        feed = graph.feeds[0]
        assume(is_stable(graph, feed))
        floats = {name: x for name, x in feed.items() if x.dtype == np.float32}

        def total(call: Any) -> Any:
            def loss(floats: dict[str, Any]) -> Any:
                results = call({**feed, **floats}).values()
                return sum((jnp.sum(y) for y in results if y.dtype == np.float32), jnp.float32(0))

            return loss

        wanted = jax.grad(total(lambda feed: transmuter.run(model, feed)))(floats)
        try:
            slope = jax.grad(total(compiled))(floats)
        except transmuter.GradientError:  # through a loop of which only the run knows the length
            return
        assert_equal(host(slope), host(wanted), where="gradient")


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(graphs(), st.booleans(), st.booleans())
def test_compiled_equals_eager_equals_onnxruntime(graph: RandomGraph, jitted: bool, graded: bool) -> None:
    check(graph, jitted=jitted, graded=graded)

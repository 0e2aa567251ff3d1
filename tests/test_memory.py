"""The process's memory, which compiling takes for a while."""

from __future__ import annotations

import sys

import jax
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import transmuter
from transmuter.segments import memory


def resident() -> int:
    """The kilobytes that the process holds."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.skipif(
    sys.platform != "linux" or memory._of_c("malloc_trim") is None, reason="needs Linux and GNU's C library"
)
def test_freed_memory_goes_back():
    blocks = [bytearray(64 << 10) for _ in range(2000)]  # below the size that is mapped by itself
    del blocks[:-1]  # what is above the last block stays with the allocator
    before = resident()
    memory.give_back()
    assert before - resident() > 100_000


def test_a_library_that_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(memory, "_of_c", lambda name: None)
    memory.give_back()


@pytest.mark.parametrize("device", [False, True])
def test_weights_are_prepared_while_xla_compiles(device, monkeypatch):
    """One executable serves all calls: what it was compiled for is what the prepared weights are."""
    rng = np.random.default_rng(0)
    w, b = rng.normal(size=(8, 4)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Transpose", ["w"], ["wt"]),
        helper.make_node("Tanh", ["b"], ["c"]),  # computed, not only moved
        helper.make_node("MatMul", ["c", "wt"], ["k"]),
        helper.make_node("Add", ["x", "k"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 8])],
        [onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(b, "b")],
    )
    model = transmuter.load(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]),
        device=jax.local_devices()[0] if device else None,
    )
    compiled, x = transmuter.compile(model), rng.normal(size=(3, 8)).astype(np.float32)
    compiled({"x": x})
    [segment] = compiled.segments
    sizes = []
    for _ in range(2):
        np.testing.assert_allclose(compiled({"x": x})["y"], x + np.tanh(b) @ w.T, rtol=1e-5, atol=1e-5)
        sizes.append(segment.executables[0].main._cache_size())
    assert sizes == [1, 1]

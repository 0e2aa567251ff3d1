"""Small models for tests of the compiler, and the operators of their own domain."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from building import info, model_of
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter.lowering import operator

DOMAIN = "transmuter.tests"
IMPORTS = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)


@operator(domain=DOMAIN, known=("count",))
def Head(x, count):
    """The first rows: a graph break where `count` is computed."""
    return x[: int(count.reshape(()))]


hooks: dict[str, Callable[[jax.Array], object]] = {}


@operator(domain=DOMAIN)
def Hooked(x, *, hook):
    """Identity, which calls a function of the test's while it is traced."""
    hooks[hook](x)
    return x


@operator(domain=DOMAIN, reads=("x",))
def Watched(x, *, hook):
    """Identity of an array that is read: a graph break, which calls a function of the test's."""
    hooks[hook](x)
    return x


def load(nodes, inputs, outputs, weights=(), **options) -> transmuter.Model:
    return transmuter.load(model_of(nodes, inputs, outputs, list(weights), opset_imports=IMPORTS), **options)


def node(op: str, inputs: list[str], outputs: list[str], **attributes):
    domain = DOMAIN if op in ("Head", "Hooked", "Watched") else ""
    return helper.make_node(op, inputs, outputs, domain=domain, **attributes)


def plain(*hooked: str) -> transmuter.Model:
    """tanh(x @ w): no break. `hooked` names a hook that tracing calls."""
    nodes = [node("MatMul", ["x", "w"], ["h"], name="product")]
    nodes += [node("Hooked", ["h"], ["g"], hook=hooked[0], name="hooked")] if hooked else []
    nodes += [node("Tanh", [nodes[-1].output[0]], ["y"], name="tanh")]
    return load(nodes, [info("x", ("n", 8))], [info("y", None)], [numpy_helper.from_array(W, "w")])


def breaking() -> transmuter.Model:
    """The sum of the first rows of x @ w, as many as have a positive sum: one break, where 8 bytes are read."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"], name="product"),
        node("ReduceSum", ["h", "last"], ["sums"], keepdims=0),
        node("Greater", ["sums", "zero"], ["positive"]),
        node("Cast", ["positive"], ["ones"], to=TensorProto.INT64),
        node("ReduceSum", ["ones"], ["count"], keepdims=0),
        node("Head", ["h", "count"], ["rows"], name="head"),
        node("Mul", ["rows", "rows"], ["squares"]),
        node("ReduceSum", ["squares"], ["y"], keepdims=0),
    ]
    weights = [
        numpy_helper.from_array(W, "w"),
        numpy_helper.from_array(np.float32(0), "zero"),
        numpy_helper.from_array(np.array([1]), "last"),
    ]
    return load(nodes, [info("x", ("n", 8))], [info("y", None)], weights)


def broken_result(x: np.ndarray) -> float:
    h = x @ W
    return float((h[: (h.sum(1) > 0).sum()] ** 2).sum())


def reshaping() -> transmuter.Model:
    """A Reshape whose target is an input: its contents enter the signature."""
    inputs = [info("x", (4, 8)), info("shape", (None,), TensorProto.INT64)]
    return load([node("Reshape", ["x", "shape"], ["y"])], inputs, [info("y", None)])

"""Sequences and optionals, with known and with traced items."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import transmuter

X = np.arange(12, dtype=np.float32).reshape(6, 2)


def graph(text: str, opset: int = 18) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> main {text}')


def everywhere(text: str, inputs: dict[str, Any], opset: int = 18) -> None:
    """Eager, compiled and known results are those of ONNX Runtime."""
    model = transmuter.load(graph(text, opset))
    expected = onnxruntime.InferenceSession(graph(text, opset).SerializeToString()).run(None, inputs)
    known = transmuter.compile(model, static_inputs=list(inputs))(inputs)
    for found in (transmuter.run(model, inputs), transmuter.compile(model)(inputs), known):
        for name, wanted in zip(model.outputs, expected, strict=True):
            actual = np.asarray(found[name])
            np.testing.assert_array_equal(actual, wanted)
            assert actual.dtype == wanted.dtype


def test_a_sequence_is_built_and_taken_apart() -> None:
    text = """(float[n, 2] x, int64 at) => (float[m, 2] joined, float[k, n, 2] stacked, float[n, 2] one, int64 length) {
      empty = SequenceEmpty ()
      a = SequenceInsert (empty, x)
      double = Add (x, x)
      b = SequenceInsert (a, double, at)
      zero = Sub (x, x)
      c = SequenceInsert (b, zero)
      joined = ConcatFromSequence <axis = 0> (c)
      d = SequenceErase (c, at)
      stacked = ConcatFromSequence <axis = 0, new_axis = 1> (d)
      one = SequenceAt (c, at)
      e = SequenceErase (d)
      length = SequenceLength (e)
    }"""
    for at in (0, -1):
        everywhere(text, {"x": X, "at": np.array(at)})


SPLITS = {
    "into ones": ("SplitToSequence <axis = 0> (x)", 6),
    "without the dimension": ("SplitToSequence <axis = 1, keepdims = 0> (x)", 2),
    "into parts of a size": ("SplitToSequence <axis = -2> (x, four)", 2),
    "into parts of sizes": ("SplitToSequence <axis = 0, keepdims = 0> (x, sizes)", 3),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split(name: str) -> None:
    call, parts = SPLITS[name]
    text = f"""(float[n, m] x) => (int64 n, float[..] last)
        <int64 four = {{4}}, int64[3] sizes = {{1, 3, 2}}, int64 e = {{-1}}> {{
      s = {call}
      n = SequenceLength (s)
      last = SequenceAt (s, e)
    }}""".replace("[..]", "[p, q]" if "keepdims = 0> (x)" not in call else "[p]")
    everywhere(text, {"x": X})
    assert int(transmuter.run(transmuter.load(graph(text)), {"x": X})["n"]) == parts


def test_split_of_what_does_not_add_up() -> None:
    text = """(float[n, m] x) => (int64 n) <int64[2] sizes = {1, 3}> {
      s = SplitToSequence (x, sizes)
      n = SequenceLength (s)
    }"""
    with pytest.raises(transmuter.LoweringError, match="sum up"):
        transmuter.run(transmuter.load(graph(text)), {"x": X})


@pytest.mark.parametrize("position", [3, -3])
def test_positions_outside_of_the_sequence(position: int) -> None:
    text = f"""(float[n] x) => (float[n] y) <int64 at = {{{position}}}> {{
      s = SequenceConstruct (x, x)
      y = SequenceAt (s, at)
    }}"""
    with pytest.raises(transmuter.LoweringError, match="outside of a sequence of 2"):
        transmuter.run(transmuter.load(graph(text)), {"x": X[:, 0]})


def test_map() -> None:
    text = """(float[n, 2] x, float[1, 2] w) => (float[m, 2] y, float[k, 2] z) {
      s = SplitToSequence <axis = 0> (x)
      a, b = SequenceMap (s, w, s) <body = f (float[1, 2] u, float[1, 2] v, float[1, 2] t)
          => (float[1, 2] p, float[1, 2] q) { p = Mul (u, v) q = Sub (t, v) }>
      y = ConcatFromSequence <axis = 0> (a)
      z = ConcatFromSequence <axis = 0> (b)
    }"""
    model = transmuter.load(graph(text))
    w = np.array([[2, 3]], np.float32)

    def f(x: Any, w: Any) -> Any:
        return model.apply({}, {"x": x, "w": w})

    for call in (f, jax.jit(f)):
        found = call(X, w)
        np.testing.assert_array_equal(found["y"], X * w)
        np.testing.assert_array_equal(found["z"], X - w)
    gradient = jax.grad(lambda w: f(X, w)["y"].sum())(w)
    np.testing.assert_array_equal(gradient, X.sum(0, keepdims=True))


def test_optionals() -> None:
    text = """(float[n, 2] x) => (float[n, 2] y, bool full, bool empty) {
      o = Optional (x)
      full = OptionalHasElement (o)
      y = OptionalGetElement (o)
      none = Optional <type = float[n, 2]> ()
      empty = OptionalHasElement (none)
    }"""
    text = text.replace("<type = float[n, 2]>", "")
    model = transmuter.load(graph(text))
    found = transmuter.run(model, {"x": X})
    np.testing.assert_array_equal(found["y"], X)
    assert (bool(found["full"]), bool(found["empty"])) == (True, False)
    text = "(float[n, 2] x) => (float[n, 2] y) { o = Optional () y = OptionalGetElement (o) }"
    with pytest.raises(transmuter.LoweringError, match="no element"):
        transmuter.run(transmuter.load(graph(text)), {"x": X})

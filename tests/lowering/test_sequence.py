"""Sequences and optionals, with known and with traced items."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
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


def test_the_dimension_is_kept_if_sizes_are_given() -> None:
    text = """(float[n, m] x) => (seq(float) s) <int64 one = {1}> { s = SplitToSequence <keepdims = 0> (x, one) }"""
    found = transmuter.run(transmuter.load(graph(text)), {"x": X})
    assert [part.shape for part in found["s"]] == [(1, 2)] * 6


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


# ---- drawn ----------------------------------------------------------------------------------------------------------


def same(text: str, inputs: dict[str, Any], *, compiled: bool = False) -> None:
    """Eager or compiled results, sequences among them, are those of ONNX Runtime."""
    model = transmuter.load(graph(text))
    expected = onnxruntime.InferenceSession(graph(text).SerializeToString()).run(None, inputs)
    found = transmuter.compile(model)(inputs) if compiled else transmuter.run(model, inputs)
    for name, wanted in zip(model.outputs, expected, strict=True):
        actual = found[name]
        actual = [np.asarray(item) for item in actual] if isinstance(actual, list) else np.asarray(actual)
        assert_equal(actual, wanted, where=name)


KINDS = {"float": np.float32, "int64": np.int64, "string": object}


def filled(shape: tuple[int, ...], kind: str) -> np.ndarray:
    x = np.arange(np.prod(shape)).reshape(shape)
    return x.astype(str).astype(object) if kind == "string" else x.astype(KINDS[kind])


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(2, 3), (4, 1), (0, 3)]),
    axis=st.integers(-2, 1),
    keepdims=st.sampled_from([None, 0, 1]),
    split=st.sampled_from([None, 1, 2, 5, "ones", "rest"]),
    kind=st.sampled_from(list(KINDS)),
    compiled=st.sampled_from([False, False, False, True]),
)
def test_drawn_splits(shape: Any, axis: int, keepdims: Any, split: Any, kind: str, compiled: bool) -> None:
    size = shape[axis]
    sizes = {"ones": [1] * size, "rest": [0, size, 0]}.get(split, split)
    if size == 0 and split != "rest":  # ONNX Runtime makes no sequence of nothing
        return
    if isinstance(sizes, int):  # nor does it ignore keepdims there, as the specification has it
        keepdims = None
    given = "" if sizes is None else ", sizes"
    rank, values = (f"[{len(sizes)}]", sizes) if isinstance(sizes, list) else ("", [sizes])
    values = f"<int64{rank} sizes = {{{', '.join(map(str, values))}}}>" if given else ""
    attributes = f"axis = {axis}" + ("" if keepdims is None else f", keepdims = {keepdims}")
    text = f"""({kind}[n, m] x) => (seq({kind}) s) {values} {{
      s = SplitToSequence <{attributes}> (x{given})
    }}"""
    same(text, {"x": filled(shape, kind)}, compiled=compiled)


@settings(max_examples=20, deadline=None)
@given(
    axis=st.integers(-3, 2),
    new_axis=st.sampled_from([0, 1]),
    lengths=st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=3),
    kind=st.sampled_from(["float", "int64", "string"]),
    compiled=st.sampled_from([False, False, False, True]),
)
def test_drawn_joins(axis: int, new_axis: int, lengths: list[int], kind: str, compiled: bool) -> None:
    rank = 3 if new_axis else 2
    if not -rank <= axis < rank:
        return
    along = axis % 2 if not new_axis else None
    shapes = [(2, 2) if along is None else tuple(n if i == along else 2 for i in range(2)) for n in lengths]
    text = f"""(seq({kind}[n, m]) s) => ({kind}[{", ".join("abc"[:rank])}] y) {{
      y = ConcatFromSequence <axis = {axis}, new_axis = {new_axis}> (s)
    }}"""
    same(text, {"s": [filled(shape, kind) for shape in shapes]}, compiled=compiled)


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(1, 3),
    at=st.integers(-4, 3),
    kind=st.sampled_from(list(KINDS)),
    compiled=st.sampled_from([False, False, False, True]),
)
def test_drawn_positions(count: int, at: int, kind: str, compiled: bool) -> None:
    """Sequences go in and come out."""
    text = f"""(seq({kind}[n]) s, {kind}[n] x)
        => (seq({kind}) inserted, seq({kind}) erased, {kind}[n] one, int64 length)
        <int64 at = {{{at}}}> {{
      inserted = SequenceInsert (s, x, at)
      erased = SequenceErase (s, at)
      one = SequenceAt (s, at)
      length = SequenceLength (erased)
    }}"""
    inputs = {"s": [filled((i,), kind) for i in range(1, count + 1)], "x": filled((2,), kind)}
    if -count <= at < count:
        same(text, inputs, compiled=compiled)
    else:
        with pytest.raises(transmuter.TransmuterError, match="outside of a sequence"):
            transmuter.run(transmuter.load(graph(text)), inputs)


@pytest.mark.parametrize("compiled", [False, True])
def test_maps_over_sequences_of_every_kind(compiled: bool) -> None:
    """Of strings, of other shapes at each step, together with a tensor and a second sequence; and of nothing."""
    text = """(seq(float[n]) s, seq(float[n]) t, float[1] w) => (seq(float[n]) a, seq(int64[n]) b) {
      a, b = SequenceMap (s, w, t) <body = f (float[n] u, float[1] v, float[n] r) => (float[n] p, int64[k] q) {
        scaled = Mul (u, v)
        p = Concat <axis = 0> (scaled, r)
        q = Shape (p)
      }>
    }"""
    w = np.array([2], np.float32)
    for lengths in ([1, 3], [2], []):
        items = [filled((n,), "float") for n in lengths]
        model, inputs = transmuter.load(graph(text)), {"s": items, "t": items, "w": w}
        found = transmuter.compile(model)(inputs) if compiled else transmuter.run(model, inputs)
        for a, b, x in zip(found["a"], found["b"], items, strict=True):
            np.testing.assert_array_equal(a, np.concatenate([x * 2, x]))
            np.testing.assert_array_equal(b, [2 * len(x)])
    text = """(seq(string[n]) s) => (seq(string[n]) y) {
      y = SequenceMap (s) <body = f (string[n] u) => (string[n] v) { v = StringConcat (u, u) }>
    }"""
    model = transmuter.load(graph(text, 20))
    inputs = {"s": [np.array(["a", "é"], object), np.array([], object)]}
    found = transmuter.compile(model)(inputs) if compiled else transmuter.run(model, inputs)
    assert [item.tolist() for item in found["y"]] == [["aa", "éé"], []]


def test_maps_of_sequences_of_other_lengths() -> None:
    text = """(float[n] x) => (int64 n) {
      s = SequenceConstruct (x, x)
      t = SequenceConstruct (x)
      y = SequenceMap (s, t) <body = f (float[n] u, float[n] v) => (float[n] w) { w = Add (u, v) }>
      n = SequenceLength (y)
    }"""
    with pytest.raises(transmuter.TransmuterError, match="different lengths"):
        transmuter.run(transmuter.load(graph(text)), {"x": X[:, 0]})


OPTIONALS = """(optional({kind}) o) => (bool full, {kind} y) {{
  full = OptionalHasElement (o)
  y = OptionalGetElement (o)
}}"""


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["float[n]", "seq(float[n])", "string[n]"])
def test_optional_inputs(kind: str, compiled: bool) -> None:
    element = {"float[n]": X[:, 0], "seq(float[n])": [X[:, 0], X[0]], "string[n]": np.array(["a", ""], object)}[kind]
    model = transmuter.load(graph(OPTIONALS.format(kind=kind)))
    found = transmuter.compile(model)({"o": element}) if compiled else transmuter.run(model, {"o": element})
    assert bool(found["full"])
    items = [np.asarray(y) for y in found["y"]] if isinstance(element, list) else np.asarray(found["y"])
    assert_equal(items, element)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_empty_optional_input(compiled: bool) -> None:
    model = transmuter.load(graph("(optional(float[n]) o) => (bool full) { full = OptionalHasElement (o) }"))
    found = transmuter.compile(model)({"o": None}) if compiled else transmuter.run(model, {"o": None})
    assert not bool(found["full"])

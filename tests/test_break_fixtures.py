"""Graphs of the kinds that break elsewhere, each with its segments and breaks, and why there are no fewer.

Each is compared with ONNX Runtime, eager and compiled, for contents that differ: that is compiled once per shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from comparison import assert_equal
from onnx import parser

import transmuter

RNG = np.random.default_rng(0)


def proto(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18, "local" : 1]> main {text}')


def onnxruntime_outputs(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> dict[str, Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    names = [o.name for o in model.graph.output]
    return dict(zip(names, session.run(names, feed), strict=True))


def host(outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in outputs.items()}


@dataclass(frozen=True)
class Fixture:
    """A graph and its inputs, how many segments run one after another, the operators of the breaks, and the reason."""

    text: str
    feeds: list[dict[str, np.ndarray]]
    segments: int
    breaks: list[str]
    why: str


def x(*shape: int, count: int = 3) -> list[dict[str, np.ndarray]]:
    return [{"x": RNG.normal(0.3 * (i - 1), 1, shape).astype(np.float32)} for i in range(count)]


def boxes(number: int) -> list[dict[str, np.ndarray]]:
    draws = [(RNG.uniform(0, 1, (1, number, 4)), RNG.uniform(0, 1, (1, 2, number))) for _ in range(2)]
    return [{"boxes": b.astype(np.float32), "scores": s.astype(np.float32)} for b, s in draws]


DETECTOR = """(float[1, n, 4] boxes, float[1, 2, n] scores) => (float[m, 4] found, float best)
    <int64[1] most = {5}, float[1] overlap = {0.4}, float[1] least = {0.6}, int64 two = {2}, int64[1] first = {0}> {
  chosen = NonMaxSuppression (boxes, scores, most, overlap, least)
  number = Gather <axis = 1> (chosen, two)
  flat = Squeeze (boxes, first)
  found = Gather (flat, number)
  best = ReduceMax <keepdims = 0> (found)
}"""
COUNTED = """(float[12] x) => (float[12] y, float[m, 12] rows)
    <float zero = {0}, bool true = {1}, int64[1] first = {0}, float s = {0.9}> {
  positive = Greater (x, zero)
  COUNT
  y, rows = Loop (count, true, x) <body = b (int64 i, bool c, float[12] v) => (bool d, float[12] u, float[12] row) {
    d = Identity (c)
    u = Mul (v, s)
    row = Tanh (u)
  }>
}"""
BY_LENGTH = "chosen = Compress (x, positive) count = Size (chosen)"
BY_SUM = "ones = Cast <to = 7> (positive) count = ReduceSum <keepdims = 0> (ones)"
BY_INPUT = (
    "ones = Cast <to = 7> (positive) sum = ReduceSum <keepdims = 0> (ones) twenty = Constant <value_int = 20> () "
)
BY_INPUT += "count = Min (sum, twenty)"
EARLY_EXIT = """(float[4] x) => (float[4] y, float[m] sums) <int64 most = {30}, bool true = {1}, float limit = {20}> {
  y, sums = Loop (most, true, x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] u, float sum)
      <float one = {1}, float half = {0.5}> {
    largest = ReduceMax <keepdims = 0> (v)
    large = Greater (largest, one)
    u = If (large) <then_branch = t () => (float[4] a) { grown = Add (v, x) a = Add (grown, half) },
                    else_branch = e () => (float[4] b) { b = Add (v, one) }>
    a_sum = ReduceSum <keepdims = 0> (u)
    sum = Abs (a_sum)
    d = Less (sum, limit)
  }>
}"""
SEQUENCE = """(float[12] x) => (float[m, 12] y) <float zero = {0}, bool true = {1}, int64 four = {4}, float s = {0.5}> {
  positive = Greater (x, zero)
  COUNT
  empty = SequenceEmpty ()
  all = Loop (count, true, empty) <body = b (int64 i, bool c, seq(float[12]) v) => (bool d, seq(float[12]) u) {
    d = Identity (c)
    f = Cast <to = 1> (i)
    row = Add (x, f)
    u = SequenceInsert (v, row)
  }>
  y = ConcatFromSequence <axis = 0, new_axis = 1> (all)
}"""
AT_LEAST_ONE = (
    "ones = Cast <to = 7> (positive) sum = ReduceSum <keepdims = 0> (ones) one = Constant <value_int = 1> () "
    "count = Max (sum, one)"
)
FUNCTION = """(float[12] x) => (float[n] y, float[12] t) <float zero = {0}, int64 first = {0}> {
  t = Tanh (x)
  y = local.sums_of_positive (x, zero, first)
}
<domain: "local", opset_import: ["" : OPSET]> sums_of_positive (a, zero, first) => (b) {
  mask = Greater (a, zero)
  chosen = Compress (a, mask)
  b = CumSum (chosen, first)
}"""
CAPTURES = """(float[3, 4] x, float[4] w) => (float[3, 4] y) <bool true = {1}, float limit = {2}> {
  scale = Sigmoid (w)
  state, y = Scan <num_scan_inputs = 1, body = s (float[4] carried, float[4] row) => (float[4] next, float[4] out) {
    total = ReduceSum <keepdims = 0> (row)
    small = Less (total, limit)
    inner = If (small) <
      then_branch = t () => (float[4] a) {
        steps = Constant <value_int = 3> ()
        a = Loop (steps, true, carried) <body = l (int64 i, bool c, float[4] v) => (bool d, float[4] u) {
          d = Identity (c)
          p = Mul (v, scale)
          q = Add (p, row)
          u = Mul (q, w)
        }>
      },
      else_branch = e () => (float[4] b) { b = Mul (row, scale) }>
    next = Tanh (inner)
    out = Add (next, w)
  }> (w, x)
}"""
BRANCHES = """(float[3, 4] x) => (float[m, 4] y, float[3, 4] t) <float zero = {0}> {
  total = ReduceSum <keepdims = 0> (x)
  positive = Greater (total, zero)
  t = Exp (x)
  y = If (positive) <then_branch = t1 () => (float[3, 4] a) { a = Relu (t) },
                     else_branch = e1 () => (float[6, 4] b) { b = Concat <axis = 0> (t, x) }>
}"""

FIXTURES = {
    "a detector": Fixture(DETECTOR, boxes(20), 1, [], "computed padded; the result is cut as it leaves the segment"),
    "a detector of many boxes": Fixture(
        DETECTOR,
        boxes(1100),
        2,
        ["NonMaxSuppression"],
        "above padding.LIMIT elements, all pairs of boxes cost more than a break",
    ),
    "a loop as long as a part of its input": Fixture(
        COUNTED.replace("COUNT", BY_LENGTH), x(12), 1, [], "the input's size bounds its rows"
    ),
    "a loop as long as a sum": Fixture(
        COUNTED.replace("COUNT", BY_SUM), x(12), 1, ["Loop"], "nothing tells how many rows there could be"
    ),
    "a loop that a minimum bounds": Fixture(
        COUNTED.replace("COUNT", BY_INPUT), x(12), 1, ["Loop"], "the bound of a minimum of numbers is not followed"
    ),
    "an early exit, with an If inside": Fixture(
        EARLY_EXIT, x(4), 1, [], "rows for the known largest number of iterations, cut as they leave the segment"
    ),
    "a sequence of a known length": Fixture(
        SEQUENCE.replace("COUNT", "count = Identity (four)"), x(12), 1, [], "the loop is unrolled"
    ),
    "a sequence as long as data say": Fixture(
        SEQUENCE.replace("COUNT", AT_LEAST_ONE), x(12), 2, ["Loop"], "how many arrays there are is a matter of contents"
    ),
    "a function with a break inside": Fixture(
        FUNCTION.replace("OPSET", "18"), x(12), 2, ["CumSum"], "inlined: a sum up to each element of a padded array"
    ),
    "a function of another opset": Fixture(
        FUNCTION.replace("OPSET", "17"),
        x(12),
        1,
        ["local::sums_of_positive"],
        "not inlined: the call breaks as a whole, and runs eagerly",
    ),
    "captures in nests": Fixture(CAPTURES, [{**f, "w": f["x"][0] + 1} for f in x(3, 4)], 1, [], "cond in scans"),
    "branches of different shapes": Fixture(
        BRANCHES, x(3, 4, count=4), 2, ["If"], "what follows has another shape for each branch"
    ),
}


@pytest.mark.parametrize("name", FIXTURES)
def test_segments_and_breaks(name: str) -> None:
    fixture = FIXTURES[name]
    source = proto(fixture.text)
    model = transmuter.load(source)
    compiled = transmuter.compile(model)
    for feed in fixture.feeds:
        expected = host(transmuter.run(model, feed))
        assert_equal(host(compiled(feed)), expected, rtol=1e-5, atol=1e-6)
        assert_equal(expected, onnxruntime_outputs(source, feed), rtol=1e-5, atol=1e-6)
    explained = compiled.explain()
    assert [b.operator for b in explained.breaks] == fixture.breaks, fixture.why
    assert explained.totals["depths"] == fixture.segments, fixture.why


@pytest.mark.parametrize("count", [1, 5, 12])
def test_as_many_elements_at_other_places_do_not_recompile(count: int) -> None:
    """Of two segments: the second takes what the NonZero found as an argument."""
    text = """(float[12] x) => (float[n] y) <float zero = {0}, int64[1] first = {0}, int64 start = {0}> {
      positive = Greater (x, zero)
      places = NonZero (positive)
      flat = Squeeze (places, first)
      found = Gather (x, flat)
      y = CumSum (found, start)
    }"""
    compiled = transmuter.compile(transmuter.load(proto(text)))
    for draw in range(4):
        x = -np.ones(12, np.float32)
        x[RNG.permutation(12)[:count]] = RNG.uniform(1, 2, count)
        np.testing.assert_allclose(compiled({"x": x})["y"], np.cumsum(x[x > 0]), rtol=1e-5)
        assert compiled.cache_info().misses == 2, f"draw {draw}"


CHOICES = """OUTSIDE (float[12] x, float[12] w) => (float y) <float zero = {0}, int64 start = {0}> {
  t = Mul (x, w)
  positive = Greater (t, zero)
  CHOICE
  z = Tanh (chosen)
  up_to = CumSum (z, start)
  squares = Mul (up_to, up_to)
  sum = ReduceSum <keepdims = 0> (squares)
  y = Mul (sum, sum)
}"""
CHOSEN = {
    "NonZero": ("places = NonZero (positive) all = Transpose (places)", "chosen = GatherND (t, all)"),
    "Unique": ("u, all, i, c = Unique (t)", "chosen = Gather (t, all)"),
    "Compress": ("all = Identity (positive)", "chosen = Compress (t, all)"),
}


@pytest.mark.parametrize("way", CHOSEN)
def test_gradients_are_those_of_the_breaks_result_as_a_constant(way: str) -> None:
    find, take = CHOSEN[way]
    text = CHOICES.replace("OUTSIDE ", "")
    compiled = transmuter.compile(transmuter.load(proto(text.replace("CHOICE", f"{find}\n  {take}"))))
    x, w = (RNG.normal(0.2, 1, 12).astype(np.float32) for _ in range(2))
    finder = transmuter.load(proto(text.replace("CHOICE", f"{find}\n  {take}")))
    found = np.asarray(transmuter.run(finder, {"x": x, "w": w}, outputs=["all"])["all"])
    constant = proto(text.replace("CHOICE", take))
    constant.graph.initializer.append(onnx.numpy_helper.from_array(found, "all"))
    fixed = transmuter.compile(transmuter.load(constant))
    slopes = [
        jax.grad(lambda x, w, call=call: jnp.sum(call({"x": x, "w": w})["y"]), (0, 1))(x, w)
        for call in (compiled, fixed)
    ]
    assert len(compiled.explain().breaks) == 1
    assert not fixed.explain().breaks
    for slope, wanted in zip(*slopes):
        assert np.abs(wanted).max() > 0
        np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-6)


def test_what_does_not_depend_on_a_break_runs_before_it() -> None:
    """Wherever it stands in the file, in an inlined branch too; it is handed on, and only what is left comes after."""
    text = """(float[3, 4] x, bool flag) => (float[n] y, float z, float[3, 4] late)
        <float zero = {0}, int64 start = {0}> {
      positive = Greater (x, zero)
      places = NonZero (positive)
      all = Transpose (places)
      found = GatherND (x, all)
      up_to = CumSum (found, start)
      a = Exp (x)
      b = Sin (a)
      scale = ReduceSum <keepdims = 0> (b)
      y = Mul (up_to, scale)
      z = ReduceMax <keepdims = 0> (y)
      late = If (flag) <then_branch = t () => (float[3, 4] c) { s = Sigmoid (x) c = Mul (s, b) },
                        else_branch = e () => (float[3, 4] d) { d = Mul (a, scale) }>
    }"""
    model = transmuter.load(proto(text))
    compiled = transmuter.compile(model)
    feed = {**x(3, 4)[0], "flag": np.array(True)}
    assert_equal(host(compiled(feed)), host(transmuter.run(model, feed)), rtol=1e-5, atol=1e-6)
    first, second = compiled.explain().segments
    before = {"Greater", "NonZero", "Transpose", "GatherND", "Exp", "Sin", "ReduceSum", "If"}
    assert {*first.operators} == before
    assert first.nodes == 9  # two of them in the branch
    assert {*second.operators} == {"CumSum", "Mul", "ReduceMax"}
    assert first.results == ("late",)
    assert first.handed_on == 2  # found and scale
    [needed] = first.breaks
    assert needed.host_bytes == 8


def test_an_output_of_a_branch_that_is_there_serves_a_break_before_the_others_are() -> None:
    """The branch's first output waits for a CumSum; the second one is there, and a Loop that breaks takes it."""
    text = """(float[12] x, bool flag) => (float[n] y, float z) <float zero = {0}, int64 start = {0}, bool true = {1}> {
      positive = Greater (x, zero)
      found = Compress (x, positive)
      a, b = If (flag) <then_branch = t () => (float[n] c, float d) { c = CumSum (found, start)
                                                                     d = ReduceMax <keepdims = 0> (x) },
                        else_branch = e () => (float[n] f, float g) { f = Exp (found)
                                                                     g = ReduceMin <keepdims = 0> (x) }>
      y = Tanh (a)
      ones = Cast <to = 7> (positive)
      count = ReduceSum <keepdims = 0> (ones)
      z, rows = Loop (count, true, b) <body = l (int64 i, bool p, float v) => (bool q, float u, float row) {
        q = Identity (p)
        u = Mul (v, v)
        row = Add (v, u)
      }>
      sum = ReduceSum <keepdims = 0> (rows)
    }"""
    text = text.replace("float z)", "float z, float sum)")
    model = transmuter.load(proto(text))
    compiled = transmuter.compile(model)
    for flag in (True, False):
        feed = {"x": np.linspace(-1, 1, 12, dtype=np.float32), "flag": np.array(flag)}
        assert_equal(host(compiled(feed)), host(transmuter.run(model, feed)), rtol=1e-5, atol=1e-6)

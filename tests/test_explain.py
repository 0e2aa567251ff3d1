"""What `explain()` and `GraphBreakError` say of a break: where contents come from, what it cost, what would help."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import jax
import numpy as np
import onnx
import pytest
from building import info, model_of
from compiled_models import X, breaking
from onnx import TensorProto, helper, numpy_helper

import transmuter
from transmuter import GraphBreakError
from transmuter.lowering.reasons import shortened

INT, BOOL, STRING = TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING
node = helper.make_node
HOSTILE = "</code><script>alert('1')</script>\u202e&amp;"


def constant(name: str, value: object, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(value, dtype), name)


def explained(proto: onnx.ModelProto, *feeds: dict[str, object], **options: object) -> transmuter.CompiledModel:
    compiled = transmuter.compile(transmuter.load(proto), **options)
    for feed in feeds:
        compiled(feed)
    return compiled


def error_under_jit(compiled: transmuter.CompiledModel, feed: dict[str, object]) -> GraphBreakError:
    with pytest.raises(GraphBreakError) as caught:
        jax.jit(lambda feed: compiled(feed))(feed)
    return caught.value


def agree(compiled: transmuter.CompiledModel, feed: dict[str, object]) -> transmuter.BreakReport:
    """The only break, of which the error inside of a jit says the same."""
    [told] = compiled.explain().breaks
    error = error_under_jit(compiled, feed)
    assert error.origin == told.origin
    assert told.advice in str(error)
    assert told.what in str(error)
    assert " <- ".join(shortened(told.origin)) in str(error)
    return told


# ---- breaks --------------------------------------------------------------------------------------------------------


def test_the_report_on_a_model_with_one_break() -> None:
    compiled = transmuter.compile(breaking())
    assert str(compiled.explain()) == "Nothing is compiled yet: call the compiled model first."
    for x in (X, X[:2], X):
        compiled({"x": x})
    told = agree(compiled, {"x": X})
    assert (told.node, told.operator, told.operand, told.within) == ("head", "transmuter.tests::Head", "count", "")
    assert told.origin == (
        "'count' of ReduceSum",
        "'ones' of Cast",
        "'positive' of Greater",
        "'sums' of ReduceSum",
        "'h' of MatMul",
        "input 'x'",
    )
    assert told.inputs == ("x",)
    text = re.sub(r"[\d.]+ (s|ms|µs)\b", "T", str(compiled.explain()))
    for line in (
        "graph: 2 segments (4 signatures), 1 break",
        "segment 0 for x float32[2, 8]: 5 nodes, 1 call in T, traced in T, compiled in T",
        "  break at head (transmuter.tests::Head): needs the contents of its operand 'count'",
        "    <- input 'x'",
        "    ran 1 time in T, 8 bytes read to the host",
        "segment 0 for x float32[4, 8]: 5 nodes, 2 calls in T, traced in T, compiled in T",
        "    ran 2 times in T (T each), 16 bytes read to the host",
        "segment 1 for rows float32[3, 8]: 2 nodes, 2 calls in T, traced in T, compiled in T",
    ):
        assert line in text.splitlines()
    assert text.count("to remove it: 'count' has to be known") == 1, "each break is told in full once"
    first, last = compiled.explain().segments[0], compiled.explain().segments[-1]
    assert first.operators["MatMul"] == ("product",)
    assert sum(map(len, first.operators.values())) == first.nodes
    assert (first.handed_on, first.results, last.results) == (2, (), ("y",))


def test_the_chain_follows_what_is_hidden() -> None:
    """Neither weights, nor shapes, nor inputs of which the contents are known decide the shape."""
    nodes = [
        node("Shape", ["x"], ["size"]),
        node("Mul", ["size", "factors"], ["scaled"]),
        node("ReduceMax", ["table"], ["top"], keepdims=1),
        node("Add", ["top", "n"], ["sum"]),
        node("Cast", ["sum"], ["extra"], to=INT),
        node("Add", ["scaled", "extra"], ["shape"]),
        node("ConstantOfShape", ["shape"], ["y"]),
    ]
    weights = [constant("factors", [1], np.int64), constant("table", np.arange(10))]
    proto = model_of(nodes, [info("x", ("k",)), info("n", (1,))], [info("y", None)], weights)
    feed = {"x": X[0], "n": np.array([2], np.float32)}
    compiled = explained(proto, feed)
    told = agree(compiled, feed)
    assert told.origin == ("'shape' of Add", "'extra' of Cast", "'sum' of Add", "input 'n'")
    assert told.advice.startswith("The small input 'n' (float32[1]) alone decides it")
    assert explained(proto, feed, static_inputs=["n"]).explain().breaks == ()
    y = jax.jit(lambda x: compiled({"x": x, "n": feed["n"]})["y"])(X[0])
    assert y.shape == (8 + 9 + 2,), "as the message says: a constant in NumPy"


def test_long_chains_are_shortened_in_the_middle() -> None:
    nodes = [node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(40)]
    nodes += [node("Cast", ["v40"], ["shape"], to=INT), node("ConstantOfShape", ["shape"], ["y"])]
    proto = model_of(nodes, [info("v0", (1,)), info("other", (1,))], [info("y", None)])
    feed = {"v0": np.ones(1, np.float32), "other": np.ones(1, np.float32)}
    compiled = explained(proto, feed)
    told = agree(compiled, feed)
    assert len(told.origin) == 42
    assert told.origin[-1] == "input 'v0'"
    assert "<- ... 33 more ..." in str(compiled.explain())
    assert "'v20'" not in str(compiled.explain())
    assert "&#x27;v20&#x27;" in compiled.explain().html()


def test_chains_go_back_through_earlier_segments() -> None:
    nodes = [
        node("Cast", ["x"], ["first"], to=INT),
        node("Expand", ["z", "first"], ["row"]),
        node("ReduceSum", ["row"], ["total"]),
        node("Cast", ["total"], ["second"], to=INT),
        node("ConstantOfShape", ["second"], ["y"], name="last"),
    ]
    feed = {"x": np.array([3], np.float32), "z": np.ones(1, np.float32)}
    breaks = explained(model_of(nodes, [info("x", (1,)), info("z", (1,))], [info("y", None)]), feed).explain().breaks
    assert [b.node for b in breaks] == ["row", "last"]
    assert breaks[0].origin == ("'first' of Cast", "input 'x'")
    assert breaks[1].origin == ("'second' of Cast", "'total' of ReduceSum", "'row' of Expand", "input 'z'")
    assert set(breaks[1].inputs) == {"x", "z"}


def loop(*body: onnx.NodeProto, trips: str, carried: object = (4, 8), collects: bool = False) -> onnx.NodeProto:
    outputs = [info("going", (), BOOL), info("new", carried), *([info("row", None)] if collects else [])]
    graph = helper.make_graph(
        [*body, node("Identity", ["on"], ["going"])],
        "body",
        [info("i", (), INT), info("on", (), BOOL), info("old", carried)],
        outputs,
    )
    return node("Loop", [trips, "", "x"], ["y", *(["rows"] if collects else [])], body=graph, name="looping")


COUNTED = [node("ReduceMax", ["x"], ["most"], keepdims=0), node("Cast", ["most"], ["trips"], to=INT)]


def test_a_break_in_a_loop_names_the_node_in_its_body() -> None:
    body = [
        node("Add", ["old", "weight"], ["sum"]),
        node("Cast", ["sum"], ["target"], to=INT),
        node("ReduceMax", ["target", "both"], ["shape"], keepdims=0),
        node("Expand", ["old", "shape"], ["wide"], name="inner"),
        node("ReduceSum", ["wide"], ["s"], keepdims=0),
        node("Add", ["old", "s"], ["new"]),
    ]
    weights = [constant("weight", np.ones((2, 4))), constant("both", [1], np.int64)]
    proto = model_of([*COUNTED, loop(*body, trips="trips", carried=(2, 4))], [info("x", (2, 4))], [info("y", None)])
    proto.graph.initializer.extend(weights)
    x = np.stack([np.full(4, 1, np.float32), np.full(4, 3, np.float32)])
    error = error_under_jit(transmuter.compile(transmuter.load(proto)), {"x": x})
    assert (error.node, error.operator, error.operand) == ("inner", "Expand", "shape")
    assert "node 'inner' (Expand), inside of node 'looping' (Loop) needs the contents of its operand 'shape'" in str(
        error
    )
    assert error.origin == (
        "'shape' of ReduceMax",
        "'target' of Cast",
        "'sum' of Add",
        "'old', which node 'looping' (Loop) carries",
        "input 'x'",
    )
    assert "All of node 'looping' (Loop) runs eagerly because of it" in str(error)


@pytest.mark.parametrize(
    ("body", "collects", "advice"),
    [
        ([node("Concat", ["old", "old"], ["new"], axis=0)], False, "changes its shape from one iteration"),
        ([node("Neg", ["old"], ["new"]), node("Identity", ["old"], ["row"])], True, "A constant M of at most 4096"),
    ],
)
def test_advice_on_a_loop(body: list[onnx.NodeProto], collects: bool, advice: str) -> None:
    outputs = [info("y", None), *([info("rows", None)] if collects else [])]
    nodes = [*COUNTED, loop(*body, trips="trips", collects=collects, carried=None)]
    feed = {"x": np.abs(X) + 2}
    told = agree(explained(model_of(nodes, [info("x", (4, 8))], outputs), feed), feed)
    assert (told.node, told.operator, told.operand) == ("looping", "Loop", "M")
    assert told.origin == ("'trips' of Cast", "'most' of ReduceMax", "input 'x'")
    assert advice in told.advice


def test_advice_on_an_if() -> None:
    branches = {
        f"{name}_branch": helper.make_graph([step], name, [], [info("r", None)])
        for name, step in {
            "then": node("Relu", ["x"], ["r"]),
            "else": node("Concat", ["x", "x"], ["r"], axis=0),
        }.items()
    }
    nodes = [node("ReduceMax", ["x"], ["m"], keepdims=0), node("Greater", ["m", "zero"], ["flag"])]
    proto = model_of(
        [*nodes, node("If", ["flag"], ["y"], name="choice", **branches)],
        [info("x", (4, 8))],
        [info("y", None)],
        [constant("zero", 0)],
    )
    compiled = explained(proto, {"x": X}, {"x": -np.abs(X)})
    told = agree(compiled, {"x": X})
    assert told.origin == ("'flag' of Greater", "'m' of ReduceMax", "input 'x'")
    assert "Its branches differ in the shapes" in told.advice
    assert (told.runs, told.host_bytes) == (2, 2)


def test_strings_and_large_selections() -> None:
    nodes = [
        node("StringConcat", ["s", "s"], ["t"], name="twice"),
        node("Greater", ["x", "zero"], ["g"]),
        node("NonZero", ["g"], ["places"], name="places"),
        node("Gather", ["x", "places"], ["y"]),
    ]
    outputs = [info("t", None, STRING), info("y", None)]
    proto = model_of(nodes, [info("s", (None,), STRING), info("x", (5000,))], outputs, [constant("zero", 0)], opset=20)
    strings, places = (
        explained(proto, {"s": np.array(["a"]), "x": np.linspace(-1, 1, 5000, dtype=np.float32)}).explain().breaks
    )
    assert (strings.node, strings.origin) == ("twice", ("input 's'",))
    assert "reads 's', a string or map" in strings.title
    assert "run StringConcat outside of the model" in strings.advice
    assert (places.node, places.origin) == ("places", ("'g' of Greater", "input 'x'"))
    assert "Up to 4096 elements" in places.advice
    assert "here there are 5000" in places.advice


def test_what_is_cut_after_a_segment_is_told() -> None:
    nodes = [
        node("NonZero", ["x"], ["places"]),
        node("Transpose", ["places"], ["at"]),
        node("GatherND", ["x", "at"], ["found"]),
        node("Softmax", ["found"], ["y"], axis=0, name="softmax"),
    ]
    proto = model_of(nodes, [info("x", (4, 8))], [info("at", None, INT), info("y", None)])
    feed = {"x": np.maximum(X, 0)}
    compiled = explained(proto, feed, feed)
    told = agree(compiled, feed)
    assert told.what == f"needs to know how long its operand {told.operand!r} is"
    length = ("'found' of GatherND", "'at' of Transpose", "'places' of NonZero", "input 'x'")
    assert told.origin == length, "along what has that length"
    assert (told.runs, told.host_bytes) == (2, 16)
    [cut] = compiled.explain().segments[0].cuts
    assert (cut.value, cut.bound, cut.origin) == ("at", 32, length[1:])
    assert "cut after the segment: 1 value: at (at most 32)" in str(compiled.explain())
    assert compiled.explain().segments[0].cut_bytes == 16
    [only] = transmuter.compile(transmuter.load(proto), feed, outputs=["at"]).explain().segments
    assert only.cuts == (cut,)
    alone = transmuter.compile(transmuter.load(proto), outputs=["at"])
    error = error_under_jit(alone, feed)
    assert "How long the output 'at' is depends on contents" in str(error)
    assert error.origin == length[1:]
    assert cut.advice in str(error)


# ---- forms ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects tags and text, and checks that tags are closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attributes if name in ("href", "src")]
        if tag not in ("meta", "rect", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "path"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def test_the_page_tells_all_and_loads_nothing() -> None:
    compiled = transmuter.compile(breaking(), {"x": X})
    compiled({"x": X[:2]})
    page = Page()
    html = compiled.explain().html()
    page.feed(html)
    assert page.open == []
    assert page.links == ["#segment-0", "#breaks-0", "#segment-1"]
    assert "url(" not in html
    assert "http" not in html.replace("http-equiv", "")
    text = " ".join(page.text)
    for part in (
        "Segment 0",
        "Segment 1",
        "Head",
        "product",
        "'positive' of Greater",
        "x float32[4, 8]",
        "To remove it",
    ):
        assert part in text
    assert "prefers-color-scheme: dark" in html


def test_hostile_names_stay_text() -> None:
    nodes = [
        node("Cast", [HOSTILE], ["a" + HOSTILE], to=INT),
        node("ConstantOfShape", ["a" + HOSTILE], ["y" + HOSTILE], name="n" + HOSTILE),
        node("Relu", ["y" + HOSTILE], ["z" + HOSTILE]),
    ]
    proto = model_of(nodes, [info(HOSTILE, (1,))], [info("z" + HOSTILE, None)])
    proto.graph.name = "g" + HOSTILE
    explanation = explained(proto, {HOSTILE: np.array([2], np.float32)}).explain()
    assert "\u202e" not in str(explanation)
    html = explanation.html()
    page = Page()
    page.feed(html)
    assert "script" not in page.tags
    assert "\u202e" not in html, "the direction of writing stays"
    assert "n</code><script>alert('1')</script>\\u202e&amp;" in page.text
    assert Page().feed(transmuter.compile(transmuter.load(proto)).explain().html()) is None


def test_the_report_as_json() -> None:
    compiled = transmuter.compile(breaking(), {"x": X})
    held = json.loads(json.dumps(compiled.explain().as_dict()))
    assert held["totals"]["breaks"] == 1
    assert held["totals"]["host_bytes"] == 8
    assert held["breaks"][0]["origin"][-1] == "input 'x'"
    assert [s["depth"] for s in held["segments"]] == [0, 1]

"""Results as long as contents say, computed padded inside of a segment: against `run`, which knows all contents."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from building import info, model_of
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import transmuter

INT, FLOAT, BOOL = TensorProto.INT64, TensorProto.FLOAT, TensorProto.BOOL


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def loaded(nodes: list[onnx.NodeProto], outputs: dict[str, int], inputs: list[Any], **weights: Any) -> Any:
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    return transmuter.load(model_of(nodes, inputs, [info(n, None, e) for n, e in outputs.items()], constants, opset=18))


def host(outputs: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in outputs.items()}


def check(model: Any, breaks: int, *feeds: dict[str, np.ndarray]) -> Any:
    """Compiled equals eager for all `feeds`, with so many graph breaks."""
    compiled = transmuter.compile(model)
    for feed in feeds:
        assert_equal(host(compiled(feed)), host(transmuter.run(model, feed)), rtol=1e-5, atol=1e-6)
    assert len(compiled.explain().breaks) == breaks
    return compiled


# what follows the elements of x that are positive, which are `found`, at `places` (n, 2), coordinates in `at` (2, n)
FOUND = [
    node("Greater", "x zero", "mask"),
    node("NonZero", "mask", "at"),
    node("Transpose", "at", "places"),
    node("GatherND", "x places", "found"),
]
CONSTANTS = {
    "zero": np.float32(0),
    "row": np.array([[1, 2, 3]], np.float32),
    "zeros": np.zeros((3, 4), np.float32),
    "first": np.array([0], np.int64),
    "last": np.array(-1, np.int64),
    "axis1": np.array([1], np.int64),
    "flat": np.array([-1], np.int64),
    "minus": np.array([-1], np.int64),
    "column": np.array([-1, 1], np.int64),
    "threes": np.array([-1, 3], np.int64),
    "weight": np.arange(6, dtype=np.float32).reshape(3, 2),
    "start": np.array(0, np.int64),
    "one": np.array(1, np.int64),
}
# each makes `y` without a break
INSENSITIVE: dict[str, tuple[list[onnx.NodeProto], int]] = {
    "sum": ([node("ReduceSum", "found", "y", keepdims=0)], FLOAT),
    "mean": ([node("ReduceMean", "found", "y")], FLOAT),
    "largest": ([node("ReduceMax", "found", "y")], FLOAT),
    "smallest": ([node("ReduceMin", "found", "y")], FLOAT),
    "product": ([node("ReduceProd", "found", "y")], FLOAT),
    "logarithm of the sum": ([node("ReduceLogSumExp", "found", "y")], FLOAT),
    "norm": ([node("ReduceL2", "found", "y")], FLOAT),
    "count": ([node("Shape", "found", "y")], INT),
    "share": (
        [
            node("Shape", "found", "n"),
            node("Cast", "n", "nf", to=FLOAT),
            node("ReduceSum", "found", "s"),
            node("Div", "s nf", "y"),
        ],
        FLOAT,
    ),
    "scattered back": ([node("Exp", "found", "e"), node("ScatterND", "zeros places e", "y")], FLOAT),
    "added back": ([node("Exp", "found", "e"), node("ScatterND", "x places e", "y", reduction="add")], FLOAT),
    "rows and columns": (
        [
            node("Unsqueeze", "found axis1", "c"),
            node("Mul", "c row", "rows"),
            node("MatMul", "rows weight", "p"),
            node("Softmax", "p", "s", axis=-1),
            node("ReduceSum", "s first", "y"),
        ],
        FLOAT,
    ),
    "filled as long": (
        [
            node("Shape", "found", "n"),
            node("ConstantOfShape", "n", "filled", value=numpy_helper.from_array(np.array([2.0], np.float32))),
            node("Add", "filled found", "a"),
            node("ReduceSum", "a", "y"),
        ],
        FLOAT,
    ),
    "numbered": (
        [
            node("Size", "found", "n"),
            node("Range", "start n one", "numbers"),
            node("Cast", "numbers", "nf", to=FLOAT),
            node("Mul", "nf found", "m"),
            node("ReduceSum", "m", "y"),
        ],
        FLOAT,
    ),
    "expanded by an exporter": (
        [
            node("Shape", "found", "n"),
            node("Shape", "n", "rank"),
            node("ConstantOfShape", "rank", "ones", value=numpy_helper.from_array(np.array([1]))),
            node("Mul", "ones minus", "minuses"),
            node("Equal", "n minuses", "free"),
            node("Where", "free ones n", "target"),
            node("Expand", "zero target", "wide"),
            node("Max", "wide found", "m"),
            node("ReduceSum", "m", "y"),
        ],
        FLOAT,
    ),
    "flattened and folded": (
        [
            node("Unsqueeze", "found axis1", "c"),
            node("Mul", "c row", "rows"),
            node("Reshape", "rows flat", "all"),
            node("Reshape", "all threes", "again"),
            node("ReduceMax", "again", "y"),
        ],
        FLOAT,
    ),
    "the last": ([node("Gather", "found last", "y", axis=0)], FLOAT),
    "whole slice": (
        [node("Shape", "found", "n"), node("Slice", "found first n", "s"), node("ReduceSum", "s", "y")],
        FLOAT,
    ),
    "nonzero of it": ([node("NonZero", "found", "again"), node("ReduceSum", "again", "y")], INT),
}
X = [
    np.array([[1, -2, 3, 0], [-1, 5, -6, 7], [0, 0, 2, -3]], np.float32),
    np.full((3, 4), 2, np.float32),
    -np.eye(3, 4, dtype=np.float32) + 0.5,
]


@pytest.mark.parametrize("name", INSENSITIVE)
def test_what_does_not_look_at_padding_needs_no_break(name: str) -> None:
    nodes, element = INSENSITIVE[name]
    model = loaded([*FOUND, *nodes], {"y": element}, [info("x", (3, 4))], **CONSTANTS)
    check(model, 0, *({"x": x} for x in X))  # at other places, in other numbers: compiled once
    for x in X:  # nor does a caller's jit stand in the way
        y = jax.jit(lambda x: model.apply({}, {"x": x})["y"])(x)
        np.testing.assert_allclose(y, transmuter.run(model, {"x": x})["y"], rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in INSENSITIVE if name != "the last"])
def test_no_element_at_all(name: str) -> None:
    nodes, element = INSENSITIVE[name]
    check(
        loaded([*FOUND, *nodes], {"y": element}, [info("x", (3, 4))], **CONSTANTS),
        0,
        {"x": -np.ones((3, 4), np.float32)},
    )


# each makes `y` after a break, or an output that is cut
SENSITIVE: dict[str, tuple[list[onnx.NodeProto], int, int]] = {
    "the elements themselves": ([node("Identity", "found", "y")], 0, FLOAT),
    "their places": ([node("Identity", "at", "y")], 0, INT),
    "their exponentials": ([node("Exp", "found", "y")], 0, FLOAT),
    "a softmax over them": ([node("Softmax", "found", "y", axis=0)], 1, FLOAT),
    "a sum up to each": ([node("CumSum", "found start", "y")], 1, FLOAT),
    "a reversal": ([node("Slice", "found minus_one far_first first minus_one", "y")], 1, FLOAT),
    "joined to others": ([node("Concat", "found two", "y", axis=0)], 1, FLOAT),
    "the largest first": ([node("TopK", "found one_first", "y places_y", axis=0)], 1, FLOAT),
    "in pairs": ([node("Concat", "found found", "f", axis=0), node("Reshape", "f pairs", "y")], 1, FLOAT),
}
MORE = {
    "minus_one": np.array([-1], np.int64),
    "far_first": np.array([-100], np.int64),
    "two": np.array([1, 2], np.float32),
    "one_first": np.array([1], np.int64),
    "pairs": np.array([-1, 2], np.int64),
}


@pytest.mark.parametrize("name", SENSITIVE)
def test_what_looks_at_padding_gets_it_cut(name: str) -> None:
    nodes, breaks, element = SENSITIVE[name]
    model = loaded([*FOUND, *nodes], {"y": element}, [info("x", (3, 4))], **CONSTANTS, **MORE)
    compiled = check(model, breaks, *({"x": x} for x in X))
    # as many elements at other places: nothing is compiled again
    misses = compiled.cache_info().misses
    compiled({"x": np.ascontiguousarray(X[0][::-1])})
    assert compiled.cache_info().misses == misses
    with pytest.raises(transmuter.GraphBreakError, match="outside of that transform"):
        jax.jit(lambda x: model.apply({}, {"x": x}))(X[0])


@pytest.mark.parametrize("name", ["their exponentials", "a softmax over them", "in pairs"])
def test_gradients_are_those_of_the_elements_as_a_constant_choice(name: str) -> None:
    nodes, _, element = SENSITIVE[name]
    weights = {**CONSTANTS, **MORE}
    compiled = transmuter.compile(loaded([*FOUND, *nodes], {"y": element}, [info("x", (3, 4))], **weights))
    inputs = [info("x", (3, 4)), info("places", (None, 2), INT)]
    chosen = transmuter.compile(loaded([FOUND[3], *nodes], {"y": element}, inputs, **weights))
    places = np.argwhere(X[0] > 0)
    slope = jax.grad(lambda x: jnp.sum(compiled({"x": x})["y"] ** 2))(X[0])
    wanted = jax.grad(lambda x: jnp.sum(chosen({"x": x, "places": places})["y"] ** 2))(X[0])
    np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-6)


def test_above_the_limit_a_break_is_cheaper() -> None:
    nodes = [*FOUND, node("ReduceSum", "found", "y")]
    model = loaded(nodes, {"y": FLOAT}, [info("x", (5, 1000))], zero=np.float32(0))
    check(model, 1, {"x": np.sin(np.arange(5000, dtype=np.float32)).reshape(5, 1000)})


@pytest.mark.parametrize("axis", [None, 0, -1])
def test_compress(axis: int | None) -> None:
    attributes = {} if axis is None else {"axis": axis}
    nodes = [node("Compress", "x c", "k", **attributes), node("Tanh", "k", "y"), node("ReduceMax", "k", "z")]
    model = loaded(nodes, {"y": FLOAT, "z": FLOAT}, [info("x", (3, 4)), info("c", (3,), BOOL)])
    feeds = [{"x": X[0], "c": np.array(c)} for c in ([True, False, True], [False, True, False], [True, True, True])]
    check(model, 0, *feeds)


@pytest.mark.parametrize("attributes", [{}, {"sorted": 0}, {"axis": 0}, {"axis": 1, "sorted": 0}])
def test_unique(attributes: dict[str, int]) -> None:
    nodes = [node("Unique", "x", "y first inverse counts", **attributes), node("ReduceSum", "counts", "z")]
    outputs = {"y": FLOAT, "first": INT, "inverse": INT, "counts": INT, "z": INT}
    model = loaded(nodes, outputs, [info("x", (4, 3))])
    rows = np.array([[2, 2, 1], [0, 5, 1], [2, 2, 1], [7, -1, 7]], np.float32)
    check(model, 0, {"x": rows}, {"x": np.zeros((4, 3), np.float32)}, {"x": rows.T.reshape(4, 3)})


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([None, 0, 1, 3, 10]),
    st.sampled_from([None, 0.0, 0.3, 0.7]),
    st.sampled_from([None, 0.0, 0.5]),
    st.integers(0, 1),
)
def test_nonmaxsuppression(seed: int, most: Any, overlap: Any, threshold: Any, center: int) -> None:
    rng = np.random.default_rng(seed)
    boxes = rng.uniform(0, 1, (2, 6, 4)).astype(np.float32)
    scores = np.round(rng.uniform(0, 1, (2, 3, 6)), 1).astype(np.float32)  # some are equal
    limits = {"most": most, "overlap": overlap, "threshold": threshold}
    chosen = {n: np.array([v], np.int64 if n == "most" else np.float32) for n, v in limits.items() if v is not None}
    operands = ["boxes", "scores", *(name if name in chosen else "" for name in limits)]
    detect = helper.make_node("NonMaxSuppression", operands, ["y"], center_point_box=center)
    inputs = [info("boxes", (2, 6, 4)), info("scores", (2, 3, 6))]
    check(loaded([detect], {"y": INT}, inputs, **chosen), 0, {"boxes": boxes, "scores": scores})


def test_a_detector_is_one_segment() -> None:
    """The boxes of what it detects, as exporters write it, at most as many as an input says."""
    nodes = [
        node("NonMaxSuppression", "boxes scores most overlap", "chosen"),
        node("Gather", "chosen two", "number", axis=1),
        node("Squeeze", "boxes first", "flat"),
        node("Gather", "flat number", "y", axis=0),
        node("ReduceMax", "y", "z"),
    ]
    rng = np.random.default_rng(0)

    def feed(most: int) -> dict[str, np.ndarray]:
        boxes, scores = rng.uniform(0, 1, (1, 20, 4)), rng.uniform(0, 1, (1, 2, 20))
        return {"boxes": boxes.astype("f"), "scores": scores.astype("f"), "most": np.array([most], np.int64)}

    inputs = [info("boxes", (1, 20, 4)), info("scores", (1, 2, 20)), info("most", (1,), INT)]
    weights = {"two": np.array(2), "first": np.array([0]), "overlap": np.array([0.4], np.float32)}
    check(loaded(nodes, {"y": FLOAT, "z": FLOAT}, inputs, **weights), 0, feed(3), feed(3), feed(5))


# ---- dimensions that are partly known -------------------------------------------------------------------------------

# `n` is a number that only the run knows, and no small input decides: 4, the columns of x
COUNTED = [
    node("Greater", "big zero", "positive"),
    node("Cast", "positive", "ones", to=INT),
    node("ReduceSum", "ones", "counted", keepdims=0),
    node("Unsqueeze", "counted first", "n"),
]
DETERMINED: dict[str, tuple[list[onnx.NodeProto], int]] = {
    "reshape": ([node("Concat", "three n", "shape", axis=0), node("Reshape", "x shape", "y")], 0),
    "reshape to the number first": ([node("Concat", "n three", "shape", axis=0), node("Reshape", "x shape", "y")], 0),
    "expand what has the size": ([node("Concat", "two three n", "shape", axis=0), node("Expand", "x shape", "y")], 0),
    "a number again": (
        [
            node("Concat", "three n", "shape", axis=0),
            node("Gather", "shape last", "m", axis=0),
            node("Cast", "m", "mf", to=FLOAT),
            node("Mul", "x mf", "y"),
        ],
        0,
    ),
    "half of it": (
        [
            node("Concat", "three n", "shape", axis=0),
            node("Div", "shape two", "halves"),
            node("Cast", "halves", "hf", to=FLOAT),
            node("ReduceSum", "hf", "s"),
            node("Mul", "x s", "y"),
        ],
        0,
    ),
    "slice and sum": ([node("Slice", "x first n axis1", "s"), node("ReduceSum", "s", "y")], 0),
    "slice": ([node("Slice", "x first n axis1", "y")], 0),
    "expand to a size of its own": ([node("Expand", "zero n", "y")], 1),
    "tile": ([node("Concat", "one_first n", "r", axis=0), node("Tile", "x r", "y")], 1),
}


@pytest.mark.parametrize("name", DETERMINED)
def test_a_dimension_that_the_others_determine_need_not_be_known(name: str) -> None:
    nodes, breaks = DETERMINED[name]
    weights = {**CONSTANTS, **MORE, "three": np.array([3]), "two": np.array([2]), "zero": np.zeros(1, np.float32)}
    model = loaded([*COUNTED, *nodes], {"y": FLOAT}, [info("x", (3, 4)), info("big", (40,))], **weights)
    big = np.sign(np.arange(40, dtype=np.float32) - 35.5)
    check(model, breaks, {"x": X[0], "big": big}, {"x": X[0], "big": big[::-1].copy()})


# ---- what padding must not do ---------------------------------------------------------------------------------------

WAYS = {
    "gathered": FOUND,
    "compressed": [node("Greater", "x zero", "mask"), node("Compress", "x mask", "found", axis=0)],
    "sliced": [
        node("Greater", "x zero", "mask"),
        node("Cast", "mask", "ones", to=INT),
        node("ReduceSum", "ones", "end", keepdims=0),
        node("Unsqueeze", "end first", "n"),
        node("Slice", "x first n first", "found"),
    ],
}


@pytest.mark.parametrize("after", ["Sqrt", "Log"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_not_nan_for_what_is_not_chosen(way: str, after: str) -> None:
    """The slope of a square root is infinite at the zeros that are left out; so it is where nothing is chosen."""
    nodes = [*WAYS[way], node("Mul", "found w", "p"), node(after, "p", "r"), node("ReduceSum", "r", "y")]
    model = loaded(nodes, {"y": FLOAT}, [info("x", (5,)), info("w", (1,))], **CONSTANTS)
    compiled = transmuter.compile(model)
    w = np.ones(1, np.float32)
    for x in np.array([[4, 9, 0, 0, 0], [0, 0, 0, 0, 0], *([[0, 4, 9, 0, 1]] if way != "sliced" else [])], np.float32):
        slopes = [
            jax.grad(lambda x, w, call=call: jnp.sum(call({"x": x, "w": w})["y"]), (0, 1))(x, w)
            for call in (compiled, lambda feed: transmuter.run(model, feed))
        ]
        for slope, wanted in zip(*slopes):
            np.testing.assert_allclose(slope, wanted, rtol=1e-5)
    assert not compiled.explain().breaks


LENGTHS: dict[str, list[onnx.NodeProto]] = {
    "at least one": [
        node("Size", "found", "n"),
        node("Max", "n one", "most"),
        node("Range", "start most one", "r"),
        node("ReduceSum", "r", "y"),
    ],
    "at most five": [
        node("Size", "found", "n"),
        node("Min", "n five", "least"),
        node("Range", "start least one", "r"),
        node("ReduceSum", "r", "y"),
    ],
    "transposed": [node("Shape", "found", "n"), node("Transpose", "n", "y")],
    "flattened": [node("Shape", "found", "n"), node("Flatten", "n", "y", axis=0)],
    "which of them are not zero": [node("Shape", "at", "n"), node("NonZero", "n", "y")],
    "the larger one": [node("Shape", "at", "n"), node("ArgMax", "n", "y", axis=0)],
    "at places": [node("Shape", "at", "n"), node("GatherND", "n column", "y")],
    "at places that only the run knows": [
        node("Shape", "at", "n"),
        node("Gather", "at start", "rows", axis=0),
        node("Mod", "rows two", "picks"),
        node("Gather", "n picks", "y"),
    ],
}


@pytest.mark.parametrize("name", LENGTHS)
def test_arithmetic_of_lengths(name: str) -> None:
    weights = {**CONSTANTS, "five": np.array(5), "two": np.array(2), "column": np.array([[1], [0]])}
    model = loaded([*FOUND, *LENGTHS[name]], {"y": INT}, [info("x", (3, 4))], **weights)
    compiled = transmuter.compile(model)
    for x in (*X, -np.ones((3, 4), np.float32)):
        assert_equal(host(compiled({"x": x})), host(transmuter.run(model, {"x": x})))


# results of 4 columns, one row for each element that is found
ROWS = [*FOUND, node("Unsqueeze", "found axis1", "column_"), node("Mul", "column_ four", "rows")]
MIXED: dict[str, tuple[list[onnx.NodeProto], dict[str, Any], int]] = {
    "flattened from the end": ([node("Flatten", "rows", "f", axis=-1), node("ReduceSum", "f", "y")], {}, 0),
    "statistics of a batch": (
        [
            node("BatchNormalization", "rows ones noughts noughts ones", "z rm rv", training_mode=1),
            node("ReduceSumSquare", "z first", "y"),
        ],
        {"ones": np.ones(4, np.float32), "noughts": np.zeros(4, np.float32)},
        1,
    ),
    "resized by scales": (
        [helper.make_node("Resize", ["rows", "", "scales"], ["z"]), node("ReduceSum", "z", "y")],
        {"scales": np.array([2, 1], np.float32)},
        1,
    ),
    "resized to sizes": (
        [helper.make_node("Resize", ["rows", "", "", "sizes"], ["z"]), node("ReduceSum", "z", "y")],
        {"sizes": np.array([5, 4], np.int64)},
        1,
    ),
    "resized along others": (
        [helper.make_node("Resize", ["rows", "", "scales"], ["z"]), node("ReduceSum", "z", "y")],
        {"scales": np.array([1, 2], np.float32)},
        0,
    ),
    "only a dtype": ([node("CastLike", "seven found", "y")], {"seven": np.array([7], np.int64)}, 0),
    "read beside fewer rows": (
        [
            node("Sub", "places places", "z"),
            node("GatherElements", "table z", "g", axis=1),
            node("ReduceSum", "g", "y"),
        ],
        {"table": np.arange(16, dtype=np.float32).reshape(8, 2)},
        1,
    ),
    "scattered from the end": (
        [
            node("Sub", "places places", "z"),
            node("ReduceSum", "z axis1", "z1"),
            node("Sub", "z1 one", "ends"),
            node("Exp", "rows", "e"),
            node("ScatterND", "rows ends e", "s"),
            node("ReduceSum", "s", "y"),
        ],
        {},
        0,
    ),
}


@pytest.mark.parametrize("case", MIXED)
def test_what_mixes_padding_in(case):
    nodes, weights, breaks = MIXED[case]
    weights = {**CONSTANTS, "four": np.array([[1, 2, 3, 4]], np.float32), **weights}
    model = loaded([*ROWS, *nodes], {"y": FLOAT}, [info("x", (3, 4))], **weights)
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    check(model, breaks, {"x": x})


def test_lengths_in_other_integers():
    nodes = [node("NonZero", "x", "at"), node("Shape", "at", "shape"), node("Cast", "shape", "y", to=TensorProto.INT32)]
    check(loaded(nodes, {"y": TensorProto.INT32}, [info("x", (3, 4))]), 0, {"x": np.eye(3, 4, dtype=np.float32)})


@pytest.mark.parametrize("op", ["Abs", "BitwiseAnd", "BitShift", "Cast"])
def test_partly_known_numbers_are_numbers(op):
    """A vector put together of a known number and a traced one, in what is no arithmetic of dimensions."""
    element = {"BitShift": TensorProto.UINT64, "Cast": TensorProto.INT32}.get(op, INT)
    last = {
        "Abs": [node("Abs", "v", "y")],
        "BitwiseAnd": [node("BitwiseAnd", "v three", "y")],
        "BitShift": [node("Cast", "v", "u", to=element), node("BitShift", "u bits", "y", direction="LEFT")],
        "Cast": [node("Cast", "v", "y", to=element)],
    }[op]
    constants = {"known": np.array([6], np.int64), "three": np.array([3], np.int64), "bits": np.array([1], np.uint64)}
    model = loaded([node("Concat", "known a", "v", axis=0), *last], {"y": element}, [info("a", (1,), INT)], **constants)
    y = np.asarray(transmuter.run(model, {"a": np.array([5])})["y"])
    np.testing.assert_array_equal(y, {"BitwiseAnd": [2, 1], "BitShift": [12, 10]}.get(op, [6, 5]))
    assert y.dtype == helper.tensor_dtype_to_np_dtype(element)
    check(model, 0, {"a": np.array([5])})


def test_mean_of_halves_with_a_large_bound():
    nodes = [node("NonZero", "x", "at"), node("Transpose", "at", "p"), node("GatherND", "x p", "f")]
    nodes.append(node("ReduceMean", "f", "y"))
    proto = model_of(nodes, [info("x", (70000,), TensorProto.FLOAT16)], [info("y", None, TensorProto.FLOAT16)])
    model = transmuter.load(proto, compute_type=None)
    x = np.zeros(70000, np.float16)
    x[[3, 60000]] = 1, 2
    y = jax.jit(lambda x: model.apply(model.params, {"x": x}))(x)["y"]
    np.testing.assert_array_equal(np.asarray(y), np.array([1.5], np.float16))

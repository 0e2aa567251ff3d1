"""Operators of indexing.py: both paths, ONNX Runtime, old versions, gradients, symbolic dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import ort_node, run_node
from onnx import numpy_helper, parser

import transmuter
from lowering import drawn
from transmuter.lowering import arrays, indexing

X = np.random.default_rng(0).permutation(24).astype(np.float32).reshape(2, 3, 4)
TEXT = np.array([["b", "a", "b"], ["c", "a", "ä"]], object)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


CASES = {
    "gather": ("Gather", [X, np.array([[0, -1], [2, 0]])], {"axis": 1}, {}),
    "gather by scalar": ("Gather", [X, np.array(-1)], {"axis": -1}, {}),
    "gather nothing": ("Gather", [X, np.zeros((0, 2), np.int32)], {}, {}),
    "gather elements": ("GatherElements", [X, np.array([[[0, -1], [3, 1]]])], {"axis": 2}, {}),
    "gather nd": ("GatherND", [X, np.array([[[0, -1]], [[1, 0]]])], {}, {}),
    "gather nd in batches": ("GatherND", [X, np.array([[[-1]], [[2]]])], {"batch_dims": 1}, {}),
    "gather nd scalars": ("GatherND", [X, np.array([[[1, 2, 3]]])], {}, {}),
    "scatter": ("Scatter", [X, np.array([[[0, -1, 1]]]), X[:1, :1, 1:]], {"axis": 1}, {"opset": 10}),
    "scatter elements": ("ScatterElements", [X, np.array([[[0, -1]], [[2, 1]]]), X[:, :1, :2]], {"axis": 2}, {}),
    "scatter nd": ("ScatterND", [X, np.array([[[-1]], [[0]]]), X[:, None, ::-1]], {}, {}),
    "scatter nd elements": ("ScatterND", [X, np.array([[1, 2, 0], [0, -1, 3]]), ints(7, 8).astype(np.float32)], {}, {}),
    "tensor scatter": ("TensorScatter", [X, X[:, :2] + 9, ints(1, 0)], {}, {"opset": 24}),
    "compress": ("Compress", [X, np.array([False, True])], {"axis": -2}, {}),
    "compress elements": ("Compress", [X, np.array([True, False, True])], {}, {}),
    "non-zero": ("NonZero", [X > 11], {}, {"output_types": [7]}),
    "unique": ("Unique", [X // 7], {"sorted": 0}, {"outputs": 4, "output_types": [1, 7, 7, 7]}),
    "unique rows": ("Unique", [X[:, [0, 1, 0]] // 12], {"axis": 1}, {"outputs": 4, "output_types": [1, 7, 7, 7]}),
    "top": ("TopK", [X // 3, ints(3)], {"axis": -1}, {"outputs": 2, "output_types": [1, 7]}),
    "bottom": ("TopK", [X // 3, ints(2)], {"axis": 1, "largest": 0}, {"outputs": 2, "output_types": [1, 7]}),
    "top of zeros": ("TopK", [np.float32([-0.0, 0, -0.0, 0]), ints(3)], {}, {"outputs": 2, "output_types": [1, 7]}),
    "top 10": ("TopK", [X, ints(0)], {"axis": 0}, {"outputs": 2, "output_types": [1, 7], "opset": 10}),
    "top 9": ("TopK", [X], {"axis": 1, "k": 2}, {"outputs": 2, "output_types": [1, 7], "opset": 9}),
}
IN_ONNX_RUNTIME = CASES.keys() - {"tensor scatter", "scatter"}


@pytest.mark.parametrize("name", CASES)
def test_known_traced_and_onnx_runtime_agree(name: str) -> None:
    op, inputs, attributes, more = CASES[name]
    everything = range(len(inputs))
    expected = run_node(op, inputs, attributes, known=everything, **more)
    if name in IN_ONNX_RUNTIME:
        for actual, wanted in zip(expected, ort_node(op, inputs, attributes, **more), strict=True):
            assert_equal(actual, wanted)
    for known in ((), everything[1:]):
        for actual, wanted in zip(run_node(op, inputs, attributes, known=known, **more), expected, strict=True):
            assert_equal(actual, wanted, where=f"known={known}")


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"tensor scatter"}))
def test_known_operands_give_known_results(name: str) -> None:
    op, inputs, attributes, more = CASES[name]
    version = more.get("opset", 23)
    lowering = transmuter.lowering.registry.find("", op, version)
    defaults = dict.fromkeys(lowering.attributes) | lowering.defaults(version)
    assert arrays.is_known(lowering.function(*inputs, **{**defaults, **attributes}))


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min", "max"])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.float16])
def test_scatter_reductions(reduction: str, dtype: np.dtype) -> None:
    data, updates = X.astype(dtype), (X[:, :, :2] - 7).astype(dtype)
    once = np.argsort(X[:, :, :3], 2)[:, :, :2]
    index = once if reduction == "none" else np.random.default_rng(1).integers(-4, 4, updates.shape)
    for op, where, values, attributes in (
        ("ScatterElements", index, updates, {"axis": 2}),
        ("ScatterND", index[:, 0, :1] % 2 if reduction != "none" else ints(1, 0)[:, None], data[::-1], {}),
    ):
        attributes = {**attributes, "reduction": reduction}
        operands = [data, where, values]
        expected = ort_node(op, operands, attributes, opset=18) if dtype != np.float16 else None
        results = [run_node(op, operands, attributes, known=known)[0] for known in ((), (0, 1, 2))]
        for result in results:
            assert_equal(result, results[0] if expected is None else expected[0])


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("axis", [1, -2])
def test_tensor_scatter(mode: str, axis: int) -> None:
    cache, update = np.zeros((2, 3, 4, 5), np.float32), np.random.default_rng(0).random((2, 3, 4, 5), np.float32)
    update = update[:, :2] if axis == 1 else update[:, :, :2]
    start = ints(1, cache.shape[axis] - (1 if mode == "circular" else 2))
    expected = cache.copy()
    for batch in range(2):
        for i in range(2):
            place = (start[batch] + i) % cache.shape[axis]
            if axis == 1:
                expected[batch, place] = update[batch, i]
            else:
                expected[batch, :, place] = update[batch, :, i]
    result = run_node("TensorScatter", [cache, update, start], {"mode": mode, "axis": axis}, opset=24)
    assert_equal(result[0], expected)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_gathers_are_those_of_onnx_runtime(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(["Gather", "GatherElements", "GatherND"]))
    axis = data.draw(st.integers(-3, 2))
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    if op == "GatherND":
        batch = data.draw(st.integers(0, 2))
        count = data.draw(st.integers(1, 3 - batch))
        shape = (*X.shape[:batch], *data.draw(st.lists(st.integers(1, 3), max_size=2)))
        sizes = X.shape[batch : batch + count]
        indices = np.stack([random.integers(-n, n, shape) for n in sizes], -1)
        attributes = {"batch_dims": batch}
    else:
        fixed = tuple(data.draw(st.integers(1, d)) for d in X.shape)
        shape = fixed if op == "GatherElements" else data.draw(st.lists(st.integers(0, 3), max_size=3))
        indices, attributes = random.integers(-X.shape[axis], X.shape[axis], shape), {"axis": axis}
    expected = ort_node(op, [X, indices], attributes)
    for known in ((), (0, 1)):
        assert_equal(run_node(op, [X, indices], attributes, known=known), expected)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_top_k_is_that_of_onnx_runtime(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([np.float32, np.int64, np.int32]))
    shape = data.draw(st.tuples(*[st.integers(1, 5)] * 2))
    x = np.random.default_rng(data.draw(st.integers(0, 999))).integers(-3, 3, shape).astype(dtype)
    axis = data.draw(st.integers(-2, 1))
    operands = [x, ints(data.draw(st.integers(1, shape[axis])))]
    attributes = {"axis": axis, "largest": data.draw(st.integers(0, 1))}
    more = {"outputs": 2, "output_types": [numpy_helper.from_array(x).data_type, 7]}
    expected = ort_node("TopK", operands, attributes, **more)
    for known in ((), (0, 1)):
        for actual, wanted in zip(run_node("TopK", operands, attributes, known=known, **more), expected, strict=True):
            assert_equal(actual, wanted)


@pytest.mark.parametrize("known", [(), (0, 1)])
def test_top_k_takes_nan_for_the_largest(known: tuple) -> None:
    x = np.float32([1, np.nan, -np.inf, np.inf])
    for largest, order in ((1, [1, 3, 0]), (0, [2, 0, 3])):
        attributes = {"largest": largest}
        values, indices = run_node("TopK", [x, ints(3)], attributes, known=known, outputs=2, output_types=[1, 7])
        assert_equal(indices, ints(*order))
        assert_equal(values, x[order])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.uint8, np.int8])
@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_of_other_dtypes(dtype: np.dtype, largest: int) -> None:
    x = np.array([3, 1, 0, 2, 1], dtype)
    types = [numpy_helper.from_array(x).data_type, 7]
    values, indices = run_node("TopK", [x, ints(4)], {"largest": largest}, outputs=2, output_types=types)
    assert_equal(indices, ints(0, 3, 1, 4) if largest else ints(2, 1, 4, 3))
    assert values.dtype == dtype


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_unique_is_that_of_onnx_runtime(data: st.DataObject) -> None:
    x = data.draw(st.sampled_from([X // 5, (X // 9).astype(np.int64), np.tile(X[:1] // 9, (3, 1, 2))]))
    axis = data.draw(st.sampled_from([None, 0, 1, -1]))
    attributes = {"sorted": data.draw(st.integers(0, 1)), **({} if axis is None else {"axis": axis})}
    types = [numpy_helper.from_array(x).data_type, 7, 7, 7]
    expected = ort_node("Unique", [x], attributes, outputs=4, output_types=types)
    for known in ((), (0,)):
        results = run_node("Unique", [x], attributes, outputs=4, output_types=types, known=known)
        for actual, wanted in zip(results, expected, strict=True):
            assert_equal(actual, wanted)


def test_unique_strings() -> None:
    results = run_node("Unique", [TEXT], outputs=4, output_types=[8, 7, 7, 7])
    for actual, wanted in zip(
        results, [np.array(["a", "b", "c", "ä"], object), ints(1, 0, 3, 5), ints(1, 0, 1, 2, 0, 3)]
    ):
        assert_equal(actual, wanted)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_non_maximum_suppression_is_that_of_onnx_runtime(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    batches, classes, count = (data.draw(st.integers(1, n)) for n in (2, 3, 30))
    boxes = random.integers(0, 8, (batches, count, 4)).astype(np.float32)
    scores = random.integers(0, 9, (batches, classes, count)).astype(np.float32) / 8
    most = ints(data.draw(st.integers(0, 20)))
    overlap = np.float32([data.draw(st.sampled_from([0, 0.3, 0.5, 1]))])
    lowest = data.draw(st.sampled_from([None, np.float32([0.25])]))
    operands = [boxes, scores, most, overlap, *([] if lowest is None else [lowest])]
    attributes = {"center_point_box": data.draw(st.integers(0, 1))}
    more = {"output_types": [7]}
    expected = ort_node("NonMaxSuppression", operands, attributes, **more)
    assert_equal(run_node("NonMaxSuppression", operands, attributes, **more), expected)


def test_non_maximum_suppression_keeps_nothing_by_default() -> None:
    boxes, scores = np.zeros((1, 3, 4), np.float32), np.ones((1, 1, 3), np.float32)
    assert_equal(run_node("NonMaxSuppression", [boxes, scores], output_types=[7])[0], np.zeros((0, 3), np.int64))


@pytest.mark.parametrize(("op", "attributes"), [("Gather", {"axis": 0}), ("GatherElements", {"axis": 1})])
def test_strings(op: str, attributes: dict) -> None:
    indices = np.array([[0, -1, 1]])
    for known in ((), (1,)):
        expected = TEXT[indices] if op == "Gather" else TEXT[[[0]], indices]
        assert_equal(run_node(op, [TEXT, indices], attributes, known=known)[0], expected)


@pytest.mark.parametrize("op", ["Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"])
def test_known_indices_are_checked(op: str) -> None:
    operands = [X, np.array([[[5]]]), *([X[:1, :1, :1]] if op == "ScatterElements" else [])]
    operands += [X[None, :1]] if op == "ScatterND" else []
    with pytest.raises(transmuter.LoweringError, match="outside of an axis of 2 elements"):
        run_node(op, operands, known=(1,))


def test_other_operands_that_do_not_fit() -> None:
    with pytest.raises(transmuter.LoweringError, match="k is 5, but the axis has 4"):
        run_node("TopK", [X, ints(5)], outputs=2, output_types=[1, 7])
    with pytest.raises(transmuter.LoweringError, match="outside of an axis of 2 elements"):
        run_node("Compress", [X, np.array([False, False, True])], {"axis": 0})


def test_gradients() -> None:
    x = jnp.asarray(X / 9)
    index = jnp.array([[1, -1], [0, 1]])
    for f in (
        lambda x: indexing.Gather(x, index, axis=1),
        lambda x: indexing.Gather(x, np.array(-1), axis=1),
        lambda x: indexing.GatherElements(x, index[:, :, None], axis=1),
        lambda x: indexing.GatherND(x, index),
        lambda x: indexing.GatherND(x, index[..., None], batch_dims=1),
        lambda x: indexing.Compress(x, np.array([True, False, True]), axis=1),
        lambda x: indexing.TopK_10(x, ints(2), axis=1)[0],
        lambda x: indexing.TopK_10(x, ints(2), axis=1, largest=0)[0],
        lambda x: indexing.TensorScatter(x, 2 * x[:, :2], ints(1, 0), mode="linear", axis=1),
    ):
        check_grads(f, (x,), 1, ["rev"])


def test_gradient_of_unique_goes_to_first_occurrences() -> None:
    x = jnp.array([3.0, 1.0, 3.0, 2.0])
    gradient = jax.grad(lambda x: (indexing.Unique(x, axis=None, sorted=1)[0] * jnp.array([1.0, 2.0, 4.0])).sum())(x)
    np.testing.assert_array_equal(gradient, [4, 1, 0, 2])


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min", "max"])
def test_gradients_of_scatter(reduction: str) -> None:
    data = jnp.array([[1.5, 0.0, -2.0, 3.0], [0.5, 4.0, 1.0, 0.0]])
    updates = jnp.array([[2.0, -3.0, 0.25], [1.25, 0.0, 5.0]])
    index = np.array([[0, 1, 2], [1, -1, 0]] if reduction == "none" else [[1, 1, -1], [0, 3, 3]])

    def f(data: jax.Array, updates: jax.Array) -> jax.Array:
        return indexing.ScatterElements(data, index, updates, axis=1, reduction=reduction)

    check_grads(f, (data, updates), 1, ["rev"])


def test_gradient_of_a_product_with_zeros() -> None:
    """The derivative of a zero is the product of its companions; of anything beside two zeros it is zero."""
    data, index = jnp.array([2.0, 0.0, 0.0]), np.array([[0], [0], [1], [2], [2]])
    updates = jnp.array([3.0, 0.0, 5.0, 0.0, 7.0])
    f = lambda data, updates: indexing.ScatterND(data, index, updates, reduction="mul").sum()
    by_data, by_updates = jax.jit(jax.grad(f, (0, 1)))(data, updates)
    np.testing.assert_array_equal(by_data, [0, 5, 0])
    np.testing.assert_array_equal(by_updates, [0, 6, 0, 0, 0])


def test_selection_breaks_the_graph_once() -> None:
    for op, operands, more in (
        ("NonZero", [X > 11], {"output_types": [7]}),
        ("Unique", [X // 7], {"outputs": 4, "output_types": [1, 7, 7, 7]}),
        ("Compress", [X, np.array([False, True])], {}),
    ):
        eager, compiled = (run_node(op, operands, compiled=compiled, **more) for compiled in (False, True))
        for actual, wanted in zip(compiled, eager, strict=True):
            assert_equal(actual, wanted)


SYMBOLIC = {
    "gather first": "y = Gather(x, zero)",
    "gather last": "y = Gather(x, minus)",
    "gather some": "y = Gather(x, some)",
    "gather traced": "a = ArgMax<axis=1>(x) b = Squeeze(a) y = Gather(table, b)",
    "gather by traced": "a = ArgMax<axis=0, keepdims=0>(x) y = Gather(x, a)",
    "gather elements": "a = ArgMax<axis=1>(x) y = GatherElements<axis=1>(x, a)",
    "gather nd": "a = ArgMax<axis=1>(x) y = GatherND<batch_dims=1>(x, a)",
    "gather nd known": "y = GatherND(x, pair)",
    "top": "y, i = TopK(x, two)",
    "bottom": "y, i = TopK<largest=0>(x, two)",
    "scatter elements": "a = ArgMax<axis=1>(x) b = Cast<to=1>(a) y = ScatterElements<axis=1, reduction='add'>(x, a, b)",
    "scatter nd": "a = Gather(x, zero) b = Unsqueeze(a, first) y = ScatterND(x, last, b)",
    "scatter into the shape": "s = Shape(x) t = ScatterND(s, last, two) y = Slice(x, both, t)",
    "tensor scatter": "u = Slice(x, first, two, second) y = TensorScatter<axis=1>(x, u)",
}
GIVEN = {
    "zero": np.array(0),
    "minus": np.array(-1),
    "some": ints(1, -1),
    "pair": np.array([[0, -1]]),
    "last": np.array([[-1]]),
    "two": ints(2),
    "first": ints(0),
    "second": ints(1),
    "both": ints(0, 0),
    "table": np.arange(12, dtype=np.float32).reshape(4, 3),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_export_with_a_symbolic_batch(name: str) -> None:
    text = f'<ir_version: 10, opset_import: ["" : 24]> g (float[b, 4] x) => (float y) {{ {SYMBOLIC[name]} }}'
    proto = parser.parse_model(text.replace("'", '"'))
    read = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in GIVEN.items() if k in read)
    model = transmuter.load(proto)
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), np.float32)
    exported = jax.export.export(jax.jit(lambda x: model.apply(model.params, {"x": x})))(symbolic)
    x = X.reshape(6, 4)[:, ::-1]
    assert_equal(np.asarray(exported.call(x)["y"]), np.asarray(transmuter.run(model, {"x": x})["y"]))


# ---- drawn operands, against ONNX Runtime --------------------------------------------------------------------------

DRAWN = settings(max_examples=20, deadline=None)
KINDS = st.sampled_from([np.float32, np.int64, np.uint8, np.bool_])


def places(size: int, shape: tuple, index: np.dtype = np.int64) -> st.SearchStrategy:
    """Indices into an axis, from the front or from the back."""
    return drawn.arrays(index, shape, st.integers(-size, size - 1) if size else st.just(0))


@DRAWN
@given(draw=st.data(), dtype=KINDS, axis=st.integers(-2, 1), index=st.sampled_from([np.int32, np.int64]))
def test_gathers_of_empty_and_single_elements(draw: st.DataObject, dtype: np.dtype, axis: int, index: np.dtype) -> None:
    shape = draw.draw(st.sampled_from([(2, 3), (1, 3), (3, 1), (2, 0) if axis % 2 == 0 else (0, 2)]))
    x = draw.draw(drawn.arrays(dtype, shape))
    indices = draw.draw(places(shape[axis], draw.draw(st.sampled_from([(), (2,), (0, 2), (1, 1)])), index))
    drawn.check("Gather", [x, indices], {"axis": axis})
    each = [1 if d else 0 for d in shape]
    each[axis] = draw.draw(st.sampled_from([0, 1, 4]))
    drawn.check("GatherElements", [x, draw.draw(places(shape[axis], tuple(each), index))], {"axis": axis})


@DRAWN
@given(draw=st.data(), dtype=KINDS, shape=st.sampled_from([(2, 3), (1, 3), (2, 3, 2)]), count=st.integers(0, 3))
def test_gathers_by_coordinates(draw: st.DataObject, dtype: np.dtype, shape: tuple, count: int) -> None:
    x = draw.draw(drawn.arrays(dtype, shape))
    length = draw.draw(st.integers(1, len(shape)))
    columns = [draw.draw(places(d, (count,))) for d in shape[:length]]
    drawn.check("GatherND", [x, np.stack(columns, -1)])


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min", "max"])
@DRAWN
@given(draw=st.data(), axis=st.integers(-2, 1))
def test_scatters_with_repeated_places(reduction: str, draw: st.DataObject, axis: int) -> None:
    dtype = draw.draw(st.sampled_from([np.float32, np.int32, np.int64, np.uint8]))
    shape = draw.draw(st.sampled_from([(3, 4), (1, 4), (3, 1)]))
    few = st.integers(0, 5)
    x = draw.draw(drawn.arrays(dtype, shape, few))
    each = draw.draw(st.sampled_from([shape, (1, 1), (0, 1)]))
    if reduction == "none":  # the order is not defined
        each = tuple(1 if i == axis % 2 else d for i, d in enumerate(each))
    indices, updates = draw.draw(places(shape[axis], each)), draw.draw(drawn.arrays(dtype, each, few))
    drawn.check("ScatterElements", [x, indices, updates], {"axis": axis, "reduction": reduction}, opset=18)
    count = draw.draw(st.integers(0, 1 if reduction == "none" else 3))
    rows, updates = draw.draw(places(shape[0], (count, 1))), draw.draw(drawn.arrays(dtype, (count, shape[1]), few))
    drawn.check("ScatterND", [x, rows, updates], {"reduction": reduction}, opset=18)


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min", "max"])
def test_scatters_of_truth_values(op: str, reduction: str) -> None:
    x, indices = np.array([True, True, False, False]), np.array([0, 1, 2, 3])
    operands = [x, indices if op == "ScatterElements" else indices[:, None], np.array([True, False, True, False])]
    combine = {"add": np.logical_or, "max": np.logical_or, "mul": np.logical_and, "min": np.logical_and}
    wanted = combine[reduction](x, operands[2]) if reduction != "none" else operands[2]
    drawn.check(op, operands, {"reduction": reduction}, opset=18, results=[wanted])


@pytest.mark.parametrize("reduction", ["min", "max"])
def test_nan_wins_in_scattered_extremes(reduction: str) -> None:
    x, updates = np.float32([np.nan, 1, 2]), np.float32([1, np.nan, 2])
    operands = [x, ints(0, 1, 2), updates]
    drawn.check("ScatterElements", operands, {"reduction": reduction}, results=[np.float32([np.nan, np.nan, 2])])


def test_hidden_indices_out_of_range_read_the_nearest_and_write_nothing() -> None:
    x = np.float32([[1, 2], [3, 4], [5, 6]])
    far = np.array([3, -4, 2**31 - 1, -(2**31)])
    assert_equal(run_node("Gather", [x, far])[0], x[[2, 0, 2, 0]])
    assert_equal(run_node("GatherElements", [x, far[:, None]])[0], x[[2, 0, 2, 0], :1])
    assert_equal(run_node("GatherND", [x, far[:, None]])[0], x[[2, 0, 2, 0]])
    for reduction in ("none", "add", "mul", "min", "max"):
        attributes = {"reduction": reduction}
        assert_equal(run_node("ScatterElements", [x, far[:2, None], x[:2, :1] + 9], attributes)[0], x)
        assert_equal(run_node("ScatterND", [x, far[:2, None], x[:2] + 9], attributes)[0], x)
    f = lambda x, u: indexing.ScatterND(x, jnp.asarray(far[:2, None]), u, reduction="mul").sum()
    by_data, by_updates = jax.grad(f, (0, 1))(jnp.asarray(x), jnp.asarray(x[:2]))
    assert_equal(np.asarray(by_data), np.ones_like(x))
    assert_equal(np.asarray(by_updates), np.zeros_like(x[:2]))


@pytest.mark.parametrize("known", [(), (1,)])
def test_an_index_without_coordinates(known: tuple) -> None:
    for op, more in (("GatherND", []), ("ScatterND", [X[None]])):
        with pytest.raises(transmuter.LoweringError, match="no coordinates"):
            run_node(op, [X, np.zeros((1, 0), np.int64), *more], known=known)


@DRAWN
@given(draw=st.data(), axis=st.integers(-2, 1), largest=st.integers(0, 1))
def test_the_largest_of_equal_and_extreme_elements(draw: st.DataObject, axis: int, largest: int) -> None:
    dtype = draw.draw(st.sampled_from([np.float32, np.float64, np.int8, np.uint8, np.int64]))
    x = draw.draw(drawn.arrays(dtype, draw.draw(st.sampled_from([(3, 4), (1, 4), (0, 4), (3, 1)]))))
    x = np.nan_to_num(x, nan=1) if x.dtype.kind == "f" else x
    operands = [x, ints(draw.draw(st.integers(0, x.shape[axis])))]
    types = [drawn.element_type(dtype), 7]
    attributes = {"axis": axis, "largest": largest}
    drawn.check("TopK", operands, attributes, opset=24, outputs=2, output_types=types, known=(1,))


@DRAWN
@given(draw=st.data(), dtype=st.sampled_from([np.float32, np.int32, np.uint8, np.bool_]))
def test_places_of_non_zeros(draw: st.DataObject, dtype: np.dtype) -> None:
    x = draw.draw(drawn.arrays(dtype, draw.draw(st.sampled_from([(2, 3), (0, 3), (4,), (2, 1, 2)]))))
    drawn.check("NonZero", [x], output_types=[7])


def test_the_place_of_a_scalar_has_no_coordinates() -> None:
    """ONNX Runtime gives it one."""
    for value, count in ((3, 1), (0, 0)):
        drawn.check(
            "NonZero", [np.array(value, np.float32)], results=[np.zeros((0, count), np.int64)], output_types=[7]
        )


@DRAWN
@given(draw=st.data(), dtype=KINDS, axis=st.none() | st.integers(-2, 1))
def test_compressions(draw: st.DataObject, dtype: np.dtype, axis: int | None) -> None:
    x = draw.draw(drawn.arrays(dtype, draw.draw(st.sampled_from([(2, 3), (0, 3), (1, 3)]))))
    length = draw.draw(st.integers(0, x.size if axis is None else x.shape[axis]))
    condition = draw.draw(drawn.arrays(np.bool_, (length,)))
    drawn.check("Compress", [x, condition], {} if axis is None else {"axis": axis}, known=(1,))


@DRAWN
@given(draw=st.data(), sorted=st.integers(0, 1), axis=st.none() | st.integers(-2, 1))
def test_unique_of_special_values(draw: st.DataObject, sorted: int, axis: int | None) -> None:
    dtype = draw.draw(st.sampled_from([np.float32, np.float64, np.int8, np.int64]))
    few = (
        [0.0, -0.0, 1.0, np.inf, -np.inf]
        if np.dtype(dtype).kind == "f"
        else [0, np.iinfo(dtype).min, np.iinfo(dtype).max]
    )
    x = draw.draw(drawn.arrays(dtype, draw.draw(st.sampled_from([(2, 3), (1, 3), (3, 1)])), st.sampled_from(few)))
    attributes = {"sorted": sorted} | ({} if axis is None else {"axis": axis})
    drawn.check("Unique", [x], attributes, outputs=4, output_types=[drawn.element_type(dtype), 7, 7, 7])


def test_unique_of_nan_and_of_nothing() -> None:
    """In ONNX Runtime NaN is equal to all."""
    x, more = np.float32([np.nan, 1, np.nan]), {"outputs": 4, "output_types": [1, 7, 7, 7]}
    drawn.check("Unique", [x], results=[np.float32([1, np.nan]), ints(1, 0), ints(1, 0, 1), ints(1, 2)], **more)
    drawn.check("Unique", [x[:0]], **more)


@DRAWN
@given(draw=st.data(), mode=st.sampled_from(["linear", "circular"]), dtype=KINDS)
def test_tensor_scatters_are_those_of_onnx_runtime(draw: st.DataObject, mode: str, dtype: np.dtype) -> None:
    cache = draw.draw(drawn.arrays(dtype, (2, 4, 3)))
    update = draw.draw(drawn.arrays(dtype, (2, draw.draw(st.integers(1, 3)), 3)))
    last = 3 if mode == "circular" else 4 - update.shape[1]
    start = draw.draw(st.none() | drawn.arrays(np.int64, (2,), st.integers(0, last)))
    drawn.check("TensorScatter", [cache, update, *([] if start is None else [start])], {"mode": mode}, opset=24)


def test_the_old_scatter() -> None:
    operands = [X, np.array([[[0, -1, 1]]]), X[:1, :1, 1:]]
    drawn.check("Scatter", operands, {"axis": 1}, opset=10)


def test_the_gradient_of_scattered_ties_is_finite() -> None:
    x, index = jnp.array([1.0, 1.0, 3.0]), np.array([0, 0, 1])
    for reduction in ("add", "mul", "min", "max"):
        f = lambda x, u, reduction=reduction: indexing.ScatterElements(x, index, u, axis=0, reduction=reduction).sum()
        for gradient in jax.grad(f, (0, 1))(x, jnp.ones(3)):
            assert np.isfinite(gradient).all()

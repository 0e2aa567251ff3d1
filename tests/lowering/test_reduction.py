"""Reductions, extremes' indices, cumulative sums and softmax: what the ONNX backend suite leaves open."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, ort_node, run_node
from onnx import TensorProto

import transmuter
from lowering.drawn import arrays, check, subsets
from lowering.paths import both_paths, lower
from transmuter.lowering import registry

REDUCTIONS = [
    f"Reduce{kind}" for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
]


def gradient_of(op, x, attributes=None, *, others=(), opset=23):
    model = transmuter.load(one_node(op, [x, *others], attributes, opset=opset, known=range(1, 1 + len(others))))
    return lambda x: next(iter(model.apply({}, {"x0": x}).values()))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_known_reductions_equal_traced_ones(op, dtype):
    x = np.array([[3, -4, 5], [-2, 2, 9]], dtype) if "Log" not in op else np.array([[3, 4, 5], [2, 2, 9]], dtype)
    for axes, keepdims in [([0], 1), ([-1], 0), ([], 0)]:
        both_paths(op, x, np.array(axes, np.int64), known=(1,), keepdims=keepdims)


@settings(max_examples=25, deadline=None)
@given(
    op=st.sampled_from(REDUCTIONS),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    draw=st.data(),
    keepdims=st.integers(0, 1),
    noop=st.integers(0, 1),
    old=st.booleans(),
)
def test_reductions_equal_those_of_onnx_runtime(op, shape, draw, keepdims, noop, old):
    x = np.random.default_rng(0).uniform(0.1, 2, shape).astype(np.float32)
    axes = draw.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, max_size=len(shape)))
    axes = [axis - len(shape) if axis % 2 else axis for axis in axes]
    if old:
        inputs, attributes, opset = [x], {"keepdims": keepdims} | ({"axes": axes} if axes else {}), 11
    else:
        inputs, opset = [x, np.array(axes, np.int64)], 18
        attributes = {"keepdims": keepdims, "noop_with_empty_axes": noop}
        if noop and not axes and op not in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
            return  # ONNX Runtime returns x, where the specification applies the other steps
    expected = ort_node(op, inputs, attributes, opset=opset)[0]
    actual = run_node(op, inputs, attributes, opset=opset)[0]
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"])
def test_a_reduction_over_no_axes_still_applies_its_other_steps(op):
    x = np.array([-2.0, 0.5], np.float32)
    steps = {"L1": np.abs, "L2": np.abs, "LogSum": np.log, "LogSumExp": np.array, "SumSquare": np.square}
    with np.errstate(invalid="ignore"):
        expected = steps[op.removeprefix("Reduce")](x)
    actual = run_node(op, [x], {"noop_with_empty_axes": 1}, opset=18)[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.uint64, np.bool_])
def test_extremes_of_nothing_are_those_of_the_type(dtype):
    x, axes = np.zeros((2, 0), dtype), np.array([1])
    low, high = (0, 1) if dtype == np.bool_ else (-np.inf, np.inf)
    if np.dtype(dtype).kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    assert both_paths("ReduceMax", x, axes, known=(1,), keepdims=0).tolist() == [low, low]
    assert both_paths("ReduceMin", x, axes, known=(1,), keepdims=0).tolist() == [high, high]


def test_sums_of_nothing():
    x, axes = np.zeros((2, 0), np.float32), np.array([1])
    for op, expected in {"Sum": 0, "Prod": 1, "Mean": 0, "L2": 0, "LogSumExp": -np.inf, "LogSum": -np.inf}.items():
        result = both_paths(f"Reduce{op}", x, axes, known=(1,), keepdims=0)
        np.testing.assert_array_equal(result, np.full(2, expected, np.float32))


def test_a_mean_of_integers_truncates_as_onnx_runtime_does():
    x = np.array([[-3, -4], [1, 2]], np.int32)
    expected = ort_node("ReduceMean", [x], {"axes": [1]}, opset=13)[0]
    assert run_node("ReduceMean", [x], {"axes": [1]}, opset=13)[0].tolist() == expected.tolist() == [[-3], [1]]


def test_axes_out_of_range_are_an_error():
    with pytest.raises(transmuter.TransmuterError, match="out of bounds"):
        run_node("ReduceSum", [np.zeros((2, 3), np.float32), np.array([2])])


@pytest.mark.parametrize("op", REDUCTIONS)
def test_gradients_of_reductions(op):
    with jax.enable_x64(True):
        x = np.array([[0.3, 0.7, 1.9], [1.2, 0.4, 2.5]])
        check_grads(gradient_of(op, x, {"keepdims": 0}, others=[np.array([1])]), (x,), 1, ("rev",))


@pytest.mark.parametrize(
    ("op", "x"),
    [("ReduceL2", np.zeros((2, 2))), ("ReduceLogSumExp", np.full((2, 2), -np.inf)), ("ReduceProd", np.zeros((2, 2)))],
)
def test_no_nan_gradient(op, x):
    gradient = jax.grad(lambda x: gradient_of(op, x)(x).sum())(x.astype(np.float32))
    assert np.array_equal(gradient, np.zeros_like(x))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types_are_summed_in_float32(dtype):
    x = np.full((4, 3000), 1.0, dtype)
    assert run_node("ReduceSum", [x, np.array([1])])[0].tolist() == [[float(dtype(3000))]] * 4
    assert run_node("ReduceMean", [x, np.array([1])], opset=18)[0].tolist() == [[1]] * 4
    assert float(run_node("CumSum", [x, np.array(1)])[0][0, -1]) == float(dtype(3000))
    assert run_node("ReduceSum", [x, np.array([1])])[0].dtype == dtype


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize("select_last_index", [0, 1])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_indices_of_extremes(op, select_last_index, shape):
    x = np.random.default_rng(1).integers(0, 3, shape).astype(np.float32)
    for axis, keepdims in itertools.product(range(-len(shape), len(shape)), (0, 1)):
        attributes = {"axis": axis, "keepdims": keepdims, "select_last_index": select_last_index}
        result = both_paths(op, x, **attributes)
        expected = ort_node(op, [x], attributes, opset=13, output_types=[TensorProto.INT64])[0]
        assert result.dtype == np.int64
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_the_index_of_nan_is_that_of_the_first(axis):
    x = np.array([[1, np.nan, 3], [np.nan, np.nan, 0]], np.float32)
    both_paths("ArgMax", x, axis=axis)
    both_paths("ArgMin", x, axis=axis)


@pytest.mark.parametrize(("exclusive", "reverse"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
def test_cumulative_sums(op, exclusive, reverse):
    attributes = {"exclusive": exclusive, "reverse": reverse, "opset": 26}
    for axis in (0, 1, -1):
        x = np.array([[3, -1, 2], [2, 5, 4]], np.int32)
        result = both_paths(op, x, np.array(axis), known=(1,), **attributes)
        if op == "CumSum":
            expected = ort_node(op, [x, np.array(axis)], {"exclusive": exclusive, "reverse": reverse}, opset=14)[0]
            np.testing.assert_array_equal(result, expected)
    assert both_paths(op, np.zeros((2, 0), np.float32), np.array(1), known=(1,), **attributes).shape == (2, 0)
    with jax.enable_x64(True):
        x = np.array([0.5, 2.0, -1.5])
        check_grads(lambda x: lower(op, x, np.array([0]), **attributes), (jnp.asarray(x),), 1, ("rev",))


@settings(max_examples=25, deadline=None)
@given(
    op=st.sampled_from(["Softmax", "LogSoftmax", "Hardmax"]),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    draw=st.data(),
    opset=st.sampled_from([9, 11, 13]),
)
def test_softmax_of_each_version_equals_that_of_onnx_runtime(op, shape, draw, opset):
    axis = draw.draw(st.integers(-len(shape) if opset > 9 else 0, len(shape) - 1))
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    expected = ort_node(op, [x], {"axis": axis}, opset=opset)[0]
    np.testing.assert_allclose(run_node(op, [x], {"axis": axis}, opset=opset)[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(("opset", "axis"), [(11, 1), (13, 1), (13, -1)])
def test_gradients_of_softmax(op, opset, axis):
    with jax.enable_x64(True):
        x = np.random.default_rng(3).standard_normal((2, 3, 2))
        check_grads(gradient_of(op, x, {"axis": axis}, opset=opset), (x,), 2, ("fwd", "rev"))


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_a_fully_masked_row_is_nan_but_leaves_no_nan_in_the_gradient(op):
    x = np.array([[-np.inf, -np.inf], [1, -np.inf], [1, 2]], np.float32)
    assert np.isnan(run_node(op, [x])[0]).tolist() == [[True, True], [False, False], [False, False]]
    f = gradient_of(op, x)
    gradient = jax.grad(lambda x: jnp.where(jnp.isfinite(f(x)), f(x), 0).sum())(x)
    assert np.isfinite(gradient).all()
    assert not gradient[0].any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_long_softmax_of_half_types(dtype):
    x = np.random.default_rng(4).standard_normal((3, 2000)).astype(dtype)
    with jax.enable_x64(True):
        expected = np.asarray(jax.nn.softmax(x.astype(np.float64))).astype(dtype)
    result = run_node("Softmax", [x])[0]
    assert result.dtype == dtype
    rtol = 4 * float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(result.astype(np.float32), expected.astype(np.float32), rtol=rtol, atol=1e-7)


def test_integers_are_32_bits_inside_of_a_jit_without_x64():
    x = np.array([[1, 5, 5]], np.float32)
    attributes = {"axis": 1, "select_last_index": 1}
    model = transmuter.load(one_node("ArgMax", [x], attributes, output_types=[TensorProto.INT64]))
    (index,) = jax.jit(lambda x: model.apply({}, {"x0": x}))(x).values()
    assert index.dtype == jnp.int32
    assert index.tolist() == [[2]]


# ---- drawn operands, against ONNX Runtime --------------------------------------------------------------------------

DRAWN = settings(max_examples=15, deadline=None)
SHAPES = [(2, 3), (1, 3), (0, 3), (2, 0), ()]
SIGNS = st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 2.0, np.inf, -np.inf])
NUMBERS = SIGNS | st.sampled_from([np.nan, 1e30, -1e30, 300.0, -300.0])


@pytest.mark.parametrize("op", REDUCTIONS)
@DRAWN
@given(draw=st.data(), shape=st.sampled_from(SHAPES), keepdims=st.integers(0, 1), noop=st.integers(0, 1))
def test_reductions_of_special_values(op, draw, shape, keepdims, noop):
    dtype = draw.draw(st.sampled_from([np.float32, np.float64, np.int32, np.int64]))
    if np.dtype(dtype).kind == "i":
        low = 1 if "Log" in op else -5
        x = draw.draw(arrays(dtype, shape, st.integers(low, 5)))
    else:  # ONNX Runtime passes over some NaNs
        x = draw.draw(arrays(dtype, shape, SIGNS if op in ("ReduceMax", "ReduceMin") else NUMBERS))
    axes = draw.draw(subsets(len(shape)))
    if "Log" in op and x.dtype.kind == "i" and 0 in x.shape:
        return  # minus infinity, as an integer
    if not axes and noop and op not in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
        return  # ONNX Runtime returns x, where the specification applies the other steps
    attributes = {"keepdims": keepdims, "noop_with_empty_axes": noop}
    check(op, [x, np.array(axes, np.int64)], attributes, opset=20, known=(1,))


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_nan_is_the_extreme(op, dtype):
    x = np.array([[1, np.nan, 3], [np.nan, 1, 3], [1, 3, np.nan]], dtype)
    check(op, [x, np.array([1])], {"keepdims": 0}, results=[np.full(3, np.nan, dtype)], opset=20, known=(1,))


@pytest.mark.parametrize("op", ["ReduceMax", "ReduceMin"])
@DRAWN
@given(draw=st.data(), dtype=st.sampled_from([np.int8, np.uint8, np.bool_]), keepdims=st.integers(0, 1))
def test_extremes_of_other_dtypes(op, draw, dtype, keepdims):
    check(op, [draw.draw(arrays(dtype, (2, 3))), np.array([-1])], {"keepdims": keepdims}, opset=20, known=(1,))


def test_roots_and_logarithms_of_large_integers():
    """The sum on the way there does not fit."""
    x, axes = np.array([[60000, 80000], [2**31 - 1, 0]], np.int32), np.array([1])
    check("ReduceL2", [x, axes], opset=18, known=(1,))
    check("ReduceLogSum", [np.full((1, 4), 2**31 - 1, np.int32), axes], opset=18, known=(1,))
    check("ReduceLogSum", [np.zeros((2, 2), np.int32), axes], opset=18, known=(1,))


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@DRAWN
@given(draw=st.data(), last=st.integers(0, 1), keepdims=st.integers(0, 1), axis=st.integers(-2, 1))
def test_indices_of_the_first_or_last_of_equals(op, draw, last, keepdims, axis):
    dtype = draw.draw(st.sampled_from([np.float32, np.float64, np.int8, np.uint8, np.int64]))
    few = st.sampled_from([0, 1, np.iinfo(dtype).min, np.iinfo(dtype).max]) if np.dtype(dtype).kind in "iu" else SIGNS
    x = draw.draw(arrays(dtype, draw.draw(st.sampled_from([(3, 4), (1, 4), (3, 1)])), few))
    attributes = {"axis": axis, "select_last_index": last, "keepdims": keepdims}
    check(op, [x], attributes, opset=13, output_types=[TensorProto.INT64])


def test_indices_of_extremes_of_nothing_and_of_nan():
    attributes, more = {"axis": 1, "keepdims": 0}, {"opset": 13, "output_types": [TensorProto.INT64]}
    check("ArgMax", [np.zeros((0, 3), np.float32)], attributes, **more)
    with pytest.raises(transmuter.LoweringError, match="no identity"):
        run_node("ArgMax", [np.zeros((3, 0), np.float32)], attributes, **more)
    x = np.array([[1, np.nan, 3, np.nan]], np.float32)
    for op in ("ArgMax", "ArgMin"):
        check(op, [x], attributes, results=[np.array([1])], **more)
        check(op, [x], attributes | {"select_last_index": 1}, results=[np.array([3])], **more)


@pytest.mark.parametrize(("op", "opset"), [("CumSum", 14), ("CumProd", 26)])
@DRAWN
@given(draw=st.data(), exclusive=st.integers(0, 1), reverse=st.integers(0, 1), axis=st.integers(-2, 1))
def test_cumulative_sums_of_special_values(op, opset, draw, exclusive, reverse, axis):
    dtype = draw.draw(st.sampled_from([np.float32, np.int32, np.int64]))
    x = draw.draw(arrays(dtype, draw.draw(st.sampled_from([(2, 3), (1, 3), (0, 3), (2, 0)]))))
    operands = [x, np.array(axis, draw.draw(st.sampled_from([np.int32, np.int64])))]
    check(op, operands, {"exclusive": exclusive, "reverse": reverse}, opset=opset, known=(1,))


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@DRAWN
@given(draw=st.data(), opset=st.sampled_from([9, 11, 13]), axis=st.integers(0, 1))
def test_softmax_of_special_values(op, draw, opset, axis):
    values = st.sampled_from([-np.inf, -300.0, -1.0, 0.0, 1.0, 88.0, 300.0, 3e38, np.nan])
    x = draw.draw(arrays(np.float32, draw.draw(st.sampled_from([(2, 3), (3, 1), (0, 3), (2, 0)])), values))
    if op == "Hardmax":
        x = np.nan_to_num(x, nan=2)  # ONNX Runtime passes over NaN
    check(op, [x], {"axis": axis}, opset=opset)


# ---- gradients -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", REDUCTIONS)
@pytest.mark.parametrize("known_axes", [[0, 1], [-1]])
def test_gradients_of_reductions_are_finite_at_zeros_and_ties(op, known_axes):
    for values in (np.zeros((2, 2)), np.ones((2, 2)), np.array([[0.0, 2.0], [2.0, 0.0]])):
        x = (values + (op == "ReduceLogSum")).astype(np.float32)
        gradient = jax.grad(lambda x: gradient_of(op, x, others=[np.array(known_axes)])(x).sum())(x)
        assert np.isfinite(gradient).all()


def test_the_gradient_of_a_tie_is_shared():
    for op in ("ReduceMax", "ReduceMin"):
        x = np.array([1.0, 1.0], np.float32)
        assert jax.grad(lambda x, op=op: gradient_of(op, x, others=[np.array([0])])(x).sum())(x).tolist() == [0.5, 0.5]


def test_the_gradient_of_logsumexp_with_infinite_elements():
    x = np.array([[-np.inf, 0, 0], [-np.inf] * 3, [1e30, 0, 0], [-1e30] * 3], np.float32)
    gradient = jax.grad(lambda x: gradient_of("ReduceLogSumExp", x, others=[np.array([1])])(x)[0::2].sum())(x)
    np.testing.assert_allclose(gradient, [[0, 0.5, 0.5], [0, 0, 0], [1, 0, 0], [0, 0, 0]])


def test_the_gradient_of_log_softmax_at_extremes():
    x = np.array([[3e38, 0, -3e38], [-np.inf, 300, -300]], np.float32)
    gradient = jax.grad(lambda x: gradient_of("LogSoftmax", x)(x)[:, 1].sum())(x)
    np.testing.assert_allclose(gradient, [[-1, 1, 0], [0, 0, 0]], atol=1e-6)


def test_the_gradient_of_a_product_with_a_zero():
    x = np.array([2.0, 0.0, 3.0], np.float32)
    for op, known, expected in (("ReduceProd", [0], [0, 6, 0]), ("CumProd", 0, [1, 2 + 6, 0])):
        f = gradient_of(op, x, others=[np.array(known)], opset=26)
        np.testing.assert_allclose(jax.grad(lambda x, f=f: f(x).sum())(x), expected)


def test_hardmax_says_that_it_has_no_gradient():
    assert not registry.find("", "Hardmax", 13).differentiable

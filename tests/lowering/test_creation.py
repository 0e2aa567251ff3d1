"""Operators of creation.py over drawn operands, against ONNX Runtime; see test_shape.py for both paths and export."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import run_node
from onnx import TensorProto, numpy_helper

import transmuter
from lowering.drawn import arrays, check, element_type
from transmuter.lowering import creation, registry

DRAWN = settings(max_examples=20, deadline=None)
TYPES = st.sampled_from([np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8, np.bool_])


@DRAWN
@given(draw=st.data(), dtype=TYPES, shape=st.sampled_from([(), (2, 3), (0, 3), (1,)]))
def test_constant_of_shape(draw, dtype, shape):
    value = draw.draw(arrays(dtype, (1,)))
    attributes = draw.draw(st.sampled_from([{}, {"value": numpy_helper.from_array(value)}]))
    kind = element_type(dtype) if attributes else TensorProto.FLOAT
    check("ConstantOfShape", [np.array(shape, np.int64)], attributes, output_types=[kind], known=(0,))


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("value_int", -(2**63), np.array(-(2**63))),
        ("value_ints", [1, 2**63 - 1], np.array([1, 2**63 - 1])),
        ("value_float", float("inf"), np.array(np.inf, np.float32)),
        ("value_floats", [0.5, -0.0], np.array([0.5, -0.0], np.float32)),
        ("value_string", "a", np.array("a", object)),
        ("value_strings", ["a", "ä"], np.array(["a", "ä"], object)),
        ("value", numpy_helper.from_array(np.zeros((0, 2), np.float16)), np.zeros((0, 2), np.float16)),
    ],
)
def test_constants(attribute, value, expected):
    kind = TensorProto.STRING if expected.dtype == object else element_type(expected.dtype)
    check("Constant", [], {attribute: value}, results=[expected], opset=13, output_types=[kind])


@DRAWN
@given(
    dtype=st.sampled_from([np.int16, np.int32, np.int64, np.float32, np.float64]),
    start=st.integers(-9, 9),
    limit=st.integers(-9, 9),
    delta=st.sampled_from([1, -1, 2, -3, 7]),
)
def test_ranges(dtype, start, limit, delta):
    check("Range", [np.array(v, dtype) for v in (start, limit, delta)], known=(0, 1, 2))


@DRAWN
@given(
    dtype=st.sampled_from([np.float32, np.float64]),
    start=st.sampled_from([0.0, 1.0, -0.3]),
    limit=st.sampled_from([0.3, 1.0, 2.05, -1.0]),
    delta=st.sampled_from([0.1, 0.25, 1 / 3, -0.1, -0.7]),
)
def test_ranges_of_fractional_steps(dtype, start, limit, delta):
    check("Range", [np.array(v, dtype) for v in (start, limit, delta)], known=(0, 1, 2))


def test_a_range_of_extreme_integers():
    top = 2**63 - 1
    check("Range", [np.array(v) for v in (top - 3, top, 2)], results=[np.array([top - 3, top - 1])], known=(0, 1, 2))


@DRAWN
@given(
    shape=st.sampled_from([(2, 3), (3, 2), (0, 3), (1, 1)]),
    k=st.sampled_from([-4, -1, 0, 1, 2, 5]),
    dtype=st.sampled_from([None, np.float32, np.float64, np.int64]),
)
def test_eye_like(shape, k, dtype):
    attributes = {"k": k} | ({} if dtype is None else {"dtype": element_type(dtype)})
    check("EyeLike", [np.ones(shape, np.int32)], attributes, opset=22, output_types=[element_type(dtype or np.int32)])


@DRAWN
@given(
    draw=st.data(),
    axis=st.integers(-3, 2),
    dtype=st.sampled_from([np.int32, np.int64, np.float32]),
    opset=st.sampled_from([9, 11, 21]),
)
def test_one_hot(draw, axis, dtype, opset):
    """Up to opset 10, ONNX Runtime counts negative indices from the back, against the specification."""
    lowest = 0 if opset < 11 else -5
    indices = draw.draw(arrays(dtype, draw.draw(st.sampled_from([(2, 3), (0, 3)])), st.integers(lowest, 5)))
    depth = draw.draw(arrays(dtype, (), st.integers(1, 3)))
    values = draw.draw(arrays(dtype, (2,)))
    kind = [element_type(dtype)]
    check("OneHot", [indices, depth, values], {"axis": axis}, opset=opset, output_types=kind, known=(1,))


def test_one_hot_of_indices_far_out_and_of_fractions():
    values = np.array([5, 7], np.float32)
    for opset, row in ((9, [5, 5]), (11, [5, 7])):
        wanted = np.array([[5, 5], [5, 5], [7, 5], row], np.float32)
        operands = [np.array([2**62, -(2**63), 0, -1]), np.array(2), values]
        check("OneHot", operands, results=[wanted], opset=opset, output_types=[1], known=(1,))
    operands = [np.array([0.9, 1.9, -0.9], np.float32), np.array(2), values]  # integers are made of them first
    check("OneHot", operands, results=[np.array([[7, 5], [5, 7], [7, 5]], np.float32)], output_types=[1], known=(1,))


@pytest.mark.parametrize("op", ["HannWindow", "HammingWindow", "BlackmanWindow"])
@DRAWN
@given(
    size=st.sampled_from([0, 2, 3, 8, 17]),
    periodic=st.integers(0, 1),
    dtype=st.sampled_from([np.float32, np.float64, np.int32]),
)
def test_windows(op, size, periodic, dtype):
    kind = element_type(dtype)
    attributes = {"periodic": periodic, "output_datatype": kind}
    check(op, [np.array(size)], attributes, output_types=[kind], known=(0,), tolerance=1e-6)


@pytest.mark.parametrize("op", ["HannWindow", "HammingWindow", "BlackmanWindow"])
def test_a_symmetric_window_of_one_sample(op):
    (window,) = run_node(op, [np.array(1)], {"periodic": 0}, output_types=[1], known=(0,))
    assert window.tolist() == [1]


def test_the_gradient_of_one_hot_values():
    values = jnp.array([0.5, 2.0])
    f = lambda values: creation.OneHot_11(np.array([0, -1, 7]), np.array(3), values, axis=0)
    check_grads(f, (values,), 1, ["rev"])


@pytest.mark.parametrize(
    "op", ["Constant", "ConstantOfShape", "Range", "EyeLike", "HannWindow", "HammingWindow", "BlackmanWindow"]
)
def test_what_is_made_of_no_float_says_that_it_has_no_gradient(op):
    assert not registry.find("", op, 22).differentiable


def test_operands_that_do_not_fit():
    with pytest.raises(transmuter.LoweringError, match="delta is 0"):
        run_node("Range", [np.array(v, np.float32) for v in (0, 1, 0)], known=(0, 1, 2))
    with pytest.raises(transmuter.LoweringError, match="negative"):
        run_node("ConstantOfShape", [np.array([2, -1])], output_types=[1], known=(0,))

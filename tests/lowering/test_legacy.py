"""Experimental operators of early opsets: against ONNX Runtime, or plain NumPy where it has none; gradients."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import ort_node, run_node

import transmuter
from transmuter.lowering import legacy

F32 = np.float32
FLOATS = st.sampled_from([0.0, -0.0, 1.5, -2.0, 100.0, -100.0, np.inf, -np.inf, np.nan])
FACTORS = st.sampled_from([0.5, -2.0, 1.0])
few = settings(max_examples=15, deadline=None)


def assert_same(op: str, inputs: list[Any], attributes: dict[str, Any] | None = None, **options: Any) -> None:
    expected = ort_node(op, inputs, attributes, opset=7, **options)
    for result, wanted in zip(run_node(op, inputs, attributes, opset=7, **options), expected, strict=True):
        assert_equal(result, wanted, rtol=1e-5, atol=1e-6)


ELEMENTWISE = {
    "Affine": ("alpha", "beta"),
    "ParametricSoftplus": ("alpha", "beta"),
    "Scale": ("scale",),
    "ScaledTanh": ("alpha", "beta"),
}


@pytest.mark.parametrize("op", ELEMENTWISE)
@few
@given(values=st.lists(FLOATS, min_size=6, max_size=6), factors=st.lists(FACTORS, min_size=2, max_size=2))
def test_elementwise(op: str, values: list[float], factors: list[float]) -> None:
    attributes = dict(zip(ELEMENTWISE[op], factors, strict=False))
    x = np.array(values, F32).reshape(2, 3)
    if op == "ParametricSoftplus":  # of infinity and NaN, ONNX Runtime makes what it likes
        x = np.nan_to_num(x, nan=3, posinf=200, neginf=-200)
    assert_same(op, [x], attributes)
    if op in ("Affine", "Scale"):
        assert_same(op, [x[:0]])


@few
@given(shape=st.sampled_from([(2, 3, 2, 2), (1, 3, 1, 1), (0, 3, 2, 2)]), scale=FACTORS, has_scale=st.booleans())
def test_scaled_images(shape: tuple[int, ...], scale: float, has_scale: bool) -> None:
    x = np.arange(math.prod(shape), dtype=F32).reshape(shape)
    assert_same("ImageScaler", [x], {"bias": [0.5, -1.0, 2.0]} | ({"scale": scale} if has_scale else {}))


@few
@given(
    border=st.lists(st.integers(0, 2), min_size=4, max_size=4),
    scale=st.sampled_from([None, (1, 1), (2, 3)]),
)
def test_cropped_images(border: list[int], scale: tuple[int, int] | None) -> None:
    x = np.arange(50, dtype=F32).reshape(1, 2, 5, 5)
    assert_same("Crop", [x], {"border": border} | ({"scale": scale} if scale else {}))


def test_a_crop_beyond_the_image_is_an_error() -> None:
    with pytest.raises(transmuter.TransmuterError, match="does not fit the image"):
        run_node("Crop", [np.zeros((1, 1, 3, 3), F32)], {"border": [1, 1, 0, 0], "scale": [3, 3]}, opset=7)


BOUNDS = st.sampled_from([0, 1, 2, -1, -5, 5, 2**31 - 1, -(2**31)])


@few
@given(
    starts=st.tuples(BOUNDS, BOUNDS),
    ends=st.tuples(BOUNDS, BOUNDS),
    axes=st.sampled_from([None, (0, 1), (1, 0), (-1, 0)]),
    kind=st.sampled_from([np.int32, np.int64]),
)
def test_slices(starts: tuple[int, int], ends: tuple[int, int], axes: Any, kind: Any) -> None:
    inputs = [np.arange(6, dtype=F32).reshape(2, 3), *(np.array(v, kind) for v in (starts, ends, axes) if v)]
    assert_same("DynamicSlice", inputs, known=range(1, len(inputs)))


def test_given_tensors() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    for inputs, attributes in (
        ([], {"shape": [2, 2]}),
        ([np.array([2.0, 2.0], F32)], {"input_as_shape": 1}),
        ([np.array([2.0], F32)], {"input_as_shape": 1, "extra_shape": [2]}),
        ([np.zeros((2,), F32)], {"extra_shape": [2]}),
    ):
        (y,) = run_node("GivenTensorFill", inputs, {"values": values, **attributes}, opset=7)
        assert_equal(y, np.array(values, F32).reshape(2, 2))
    with pytest.raises(transmuter.TransmuterError, match="either the operand or the attribute"):
        run_node("GivenTensorFill", [], {"values": values}, opset=7)


@pytest.mark.parametrize("drop_states", [None, 0, 1])
@pytest.mark.parametrize("kind", [F32, np.float64])
def test_a_step_of_gru(drop_states: int | None, kind: Any) -> None:
    rng = np.random.default_rng(0)
    hidden, gates, lengths = rng.normal(size=(3, 2)).astype(kind), rng.normal(size=(3, 6)).astype(kind), [0, 2, 3]
    wanted = np.zeros_like(hidden)
    for row, length in enumerate(lengths):
        for i in range(2):
            kept = 1 / (1 + math.exp(-gates[row, 2 + i]))
            new = kept * hidden[row, i] + (1 - kept) * math.tanh(gates[row, 4 + i])
            wanted[row, i] = new if length > 2 else 0 if drop_states else hidden[row, i]
    inputs = [hidden, gates, np.array(lengths, kind), np.array([2], kind)]
    (y,) = run_node("GRUUnit", inputs, {} if drop_states is None else {"drop_states": drop_states}, opset=7)
    assert_equal(y, wanted, rtol=1e-5, atol=1e-6)


def test_gradients() -> None:
    rng = np.random.default_rng(0)
    functions = {
        (2, 3): lambda x: legacy.ScaledTanh(x, alpha=0.5, beta=2.0) * legacy.ParametricSoftplus(x, alpha=2.0, beta=3.0),
        (1, 2, 3, 3): lambda x: legacy.Crop(
            legacy.ImageScaler(legacy.Affine(x, alpha=2.0), bias=[1.0, 2.0]), border=(1, 0, 0, 1)
        ),
        (2, 8): lambda x: legacy.GRUUnit(x[:, :2], x[:, 2:], np.array([1.0, 5.0]), np.array(2.0)),
    }
    with jax.enable_x64(True):
        for shape, function in functions.items():
            check_grads(function, (jnp.asarray(rng.normal(size=shape)),), 1, ["rev"])

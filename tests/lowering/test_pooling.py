"""Pooling beyond the conformance suite: drawn windows beside ONNX Runtime, gradients, symbolic batch, regions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import ort_node, run_node

from transmuter.lowering import pooling

RANDOM = np.random.default_rng(0)
NOTHING = {"auto_pad": None, "ceil_mode": None, "dilations": None, "pads": None, "strides": None}


def draw(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def assert_as_onnxruntime(op: str, inputs: list, attributes: dict | None = None, **kwargs: object) -> None:
    for ours, theirs in zip(run_node(op, inputs, attributes, **kwargs), ort_node(op, inputs, attributes, **kwargs)):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, dict]:
    rank = draw(st.integers(1, 3))
    each = lambda low, high: draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))
    attributes = {"kernel_shape": each(1, 3), "strides": each(1, 3)}
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if auto_pad == "NOTSET":
        attributes["pads"] = [draw(st.integers(0, k - 1)) for k in attributes["kernel_shape"] * 2]
        attributes["ceil_mode"] = draw(st.integers(0, 1))
    return rank, {**attributes, "auto_pad": auto_pad}


@settings(max_examples=12, deadline=None)
@given(window=windows(), dilation=st.integers(1, 2), order=st.integers(0, 1), integers=st.booleans())
def test_max_pool_is_that_of_onnxruntime(window, dilation, order, integers):
    rank, attributes = window
    attributes = {**attributes, "storage_order": order}
    if attributes["auto_pad"] == "NOTSET":
        attributes["dilations"] = [dilation] * rank
    x = RANDOM.integers(-9, 9, (2, 3, *(8, 7, 6)[:rank])).astype(np.int8 if integers else np.float32)  # with ties
    types = [3 if integers else 1, 7]
    assert_as_onnxruntime("MaxPool", [x], attributes, outputs=2, output_types=types, opset=12)


@settings(max_examples=12, deadline=None)
@given(window=windows(), include=st.integers(0, 1), op=st.sampled_from(["AveragePool", "LpPool"]))
def test_sums_over_windows_are_those_of_onnxruntime(window, include, op):
    rank, attributes = window
    extra = {"count_include_pad": include} if op == "AveragePool" else {"p": 2 + include}
    assert_as_onnxruntime(op, [draw(2, 3, *(8, 7, 6)[:rank])], {**attributes, **extra}, opset=21)


@pytest.mark.parametrize(("size", "dilation"), [(3, 2), (11, 1)])
def test_windows_have_gradients_and_a_symbolic_batch(size, dilation):
    x = np.random.default_rng(1).permutation(2 * 2 * 25 * 4).reshape(2, 2, 25, 4).astype(np.float32) / 100
    kernel = {**NOTHING, "kernel_shape": (size, 2), "strides": (2, 1), "dilations": (dilation, 1), "pads": (1, 0, 1, 1)}
    lowerings = [
        lambda x: pooling.MaxPool(x, storage_order=0, output_count=1, **kernel),
        lambda x: pooling.MaxPool(x, storage_order=0, output_count=2, **kernel)[0],
        lambda x: pooling.AveragePool(x, count_include_pad=1, **kernel),
        lambda x: pooling.LpPool(x, p=2, **kernel),
        lambda x: pooling.GlobalLpPool(x, p=3),
        pooling.GlobalAveragePool,
        pooling.GlobalMaxPool,
    ]
    symbolic = jax.ShapeDtypeStruct((jax.export.symbolic_shape("n")[0], *x.shape[1:]), np.float32)
    for lower in lowerings:
        check_grads(lower, (jnp.asarray(x),), 1, ["rev"], eps=1e-3, atol=3e-2, rtol=3e-2)
        np.testing.assert_allclose(jax.vmap(lower)(x[:, None])[:, 0], lower(x), rtol=1e-5)
        np.testing.assert_allclose(jax.export.export(jax.jit(lower))(symbolic).call(x), lower(x), rtol=1e-5)


def test_the_places_of_maxima_with_a_symbolic_batch():
    x = draw(2, 3, 6, 6)
    lower = lambda x: pooling.MaxPool(x, storage_order=1, output_count=2, **NOTHING, kernel_shape=(2, 3))
    symbolic = jax.ShapeDtypeStruct((jax.export.symbolic_shape("n")[0], 3, 6, 6), np.float32)
    for exported, eager in zip(jax.export.export(jax.jit(lower))(symbolic).call(x), lower(x), strict=True):
        np.testing.assert_array_equal(exported, eager)


@pytest.mark.parametrize("p", [2, 3])
def test_the_norm_of_zeros_has_gradient_zero(p):
    pool = lambda x: jnp.sum(pooling.LpPool(x, p=p, **NOTHING, kernel_shape=(2, 2)))
    pool_all = lambda x: jnp.sum(pooling.GlobalLpPool(x, p=p))
    for gradient in (jax.grad(pool), jax.grad(pool_all)):
        np.testing.assert_array_equal(gradient(jnp.zeros((1, 1, 4, 4))), 0)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_halves_accumulate_in_float32(dtype):
    x = np.ones((1, 1, 64, 64), dtype)
    cases = [
        ("AveragePool", {"kernel_shape": [64, 64]}, 1),
        ("GlobalAveragePool", {}, 1),
        ("GlobalLpPool", {"p": 1}, 4096),
    ]
    for op, attributes, expected in cases:
        (y,) = run_node(op, [x], attributes, opset=22)
        assert y.dtype == dtype
        assert y.item() == expected


@pytest.mark.parametrize(("opset", "p"), [(1, 3.0), (2, 3), (11, 1), (18, 2)])
def test_lp_pool_of_every_version(opset, p):
    x = draw(1, 2, 6)
    (y,) = run_node("LpPool", [x], {"kernel_shape": [2], "strides": [2], "p": p}, opset=opset)
    np.testing.assert_allclose(y, (np.abs(x.reshape(1, 2, 3, 2)) ** p).sum(-1) ** (1 / p), rtol=1e-5)
    (y,) = run_node("GlobalLpPool", [x], {"p": p}, opset=opset)
    np.testing.assert_allclose(y, (np.abs(x) ** p).sum(-1, keepdims=True) ** (1 / p), rtol=1e-5)


def test_unpooling_undoes_pooling():
    x = draw(2, 3, 6, 8)
    window = {"kernel_shape": [2, 2], "strides": [2, 2]}
    pooled, places = run_node("MaxPool", [x], window, outputs=2, output_types=[1, 7], opset=12)
    (y,) = run_node("MaxUnpool", [pooled, places], window)
    assert y.shape == x.shape
    np.testing.assert_array_equal(y[y != 0], x[y != 0])
    np.testing.assert_array_equal(run_node("MaxPool", [np.where(y == 0, -9, y)], window)[0], pooled)
    unpool = lambda x: pooling.MaxUnpool(x, places, kernel_shape=(2, 2), strides=(2, 2), pads=None)
    check_grads(unpool, (jnp.asarray(pooled),), 1, ["rev"], atol=1e-2, rtol=1e-2)


def test_channels_last():
    x = RANDOM.integers(-128, 128, (2, 6, 7, 4)).astype(np.int8)
    attributes = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}
    assert_as_onnxruntime("NhwcMaxPool", [x], attributes, domain="com.microsoft")


ROIS = np.array([[1, 1, 9, 9], [-30, 2, 5, 20], [4.4, 6.6, 4.5, 6.7], [11, 11, 18, 38], [-99, -60, 99, 70]], np.float32)
IMAGES = np.array([0, 1, 1, 0, 1], np.int64)


@pytest.mark.parametrize("pooled_shape", [[3, 2], [5, 5]])
def test_max_roi_pool_is_that_of_onnxruntime(pooled_shape):
    rois = np.concatenate([IMAGES[:, None].astype(np.float32), ROIS], 1)
    attributes = {"pooled_shape": pooled_shape, "spatial_scale": 0.7}
    assert_as_onnxruntime("MaxRoiPool", [draw(2, 3, 12, 14), rois], attributes, opset=21)


@pytest.mark.parametrize("transformation", ["half_pixel", "output_half_pixel", None])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_roi_align_is_that_of_onnxruntime(transformation, mode, ratio):
    attributes = {"mode": mode, "sampling_ratio": ratio, "output_height": 3, "output_width": 4, "spatial_scale": 0.8}
    if transformation:
        attributes["coordinate_transformation_mode"] = transformation
    opset = 16 if transformation else 10
    assert_as_onnxruntime("RoiAlign", [draw(2, 3, 12, 14), ROIS, IMAGES], attributes, opset=opset)


@pytest.mark.parametrize("transformation", ["half_pixel", "output_half_pixel"])
def test_roi_align_of_hidden_regions(transformation):
    """How many samples a bin has is not known then; all of them count nevertheless."""
    options = {"mode": "avg", "sampling_ratio": 0, "output_height": 3, "output_width": 4, "spatial_scale": 0.8}
    options["coordinate_transformation_mode"] = transformation
    align = lambda x, rois: pooling.RoiAlign_16(x, rois, IMAGES, **options)
    x, rois = jnp.asarray(draw(2, 3, 12, 14)), jnp.asarray(ROIS)
    np.testing.assert_allclose(jax.jit(align)(x, rois), align(x, rois), rtol=1e-4, atol=1e-5)
    with jax.enable_x64(True):
        operands = (jnp.asarray(x, jnp.float64), jnp.asarray(ROIS[:4] + 0.013, jnp.float64))
        align = lambda x, rois: pooling.RoiAlign_16(x, rois, IMAGES[:4], **options)
        check_grads(jax.jit(align), operands, 1, ["rev"], eps=1e-7)
    with pytest.raises(ValueError, match="sampling_ratio"):
        jax.jit(lambda x, rois: pooling.RoiAlign_16(x, rois, IMAGES, **{**options, "mode": "max"}))(x, rois)


def test_roi_align_without_regions():
    attributes = {"output_height": 3, "output_width": 4}
    (y,) = run_node("RoiAlign", [draw(1, 2, 5, 5), ROIS[:0], IMAGES[:0]], attributes, opset=16)
    assert y.shape == (0, 2, 3, 4)

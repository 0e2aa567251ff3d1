"""Pooling beyond the conformance suite: drawn windows beside ONNX Runtime, gradients, symbolic batch, regions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, ort_node, run_node
from onnx import helper

import transmuter
from transmuter.lowering import pooling
from transmuter.lowering.arrays import NeedsContents

RANDOM = np.random.default_rng(0)
NOTHING = {"auto_pad": None, "ceil_mode": None, "dilations": None, "pads": None, "strides": None}


def draw(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def assert_as_onnxruntime(
    op: str, inputs: list, attributes: dict | None = None, *, compiled: bool = True, **kwargs: object
) -> None:
    """Compiled where windows differ from one example to the next, and so would each operation compiled on its own."""
    expected = ort_node(op, inputs, attributes, **kwargs)
    assert_equal(run_node(op, inputs, attributes, compiled=compiled, **kwargs), expected, rtol=1e-4, atol=1e-5)


@st.composite
def windows(draw: st.DrawFn) -> tuple[tuple[int, ...], dict]:
    """A spatial shape and attributes of a window that fits into it, and which ONNX Runtime takes as specified."""
    spatial = draw(st.sampled_from([(8,), (8, 7), (1, 5), (4, 1), (5, 4, 3)]))
    rank = len(spatial)
    each = lambda *choices: draw(st.lists(st.sampled_from(choices), min_size=rank, max_size=rank))
    attributes = {"kernel_shape": each(1, 2, 3), "strides": each(1, 2, 3), "dilations": each(1, 1, 2)}
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    pads = [draw(st.integers(0, k - 1)) for k in attributes["kernel_shape"] * 2]
    if auto_pad == "NOTSET":
        attributes |= {"pads": pads, "ceil_mode": draw(st.integers(0, 1))}
    elif auto_pad == "VALID":
        pads = [0] * 2 * rank
    else:
        del attributes["dilations"]
        sizes = zip(attributes["strides"], attributes["kernel_shape"], strict=True)
        attributes |= {"strides": [min(s, k) for s, k in sizes], "ceil_mode": draw(st.integers(0, 1))}
    if "dilations" in attributes:
        sizes = zip(spatial, attributes["kernel_shape"], attributes["dilations"], pads, pads[rank:])
        assume(all(n + lo + hi > (k - 1) * d for n, k, d, lo, hi in sizes))
    return spatial, {**attributes, "auto_pad": auto_pad}


BATCHES = st.sampled_from([2, 1, 0])
CHANNELS = st.sampled_from([3, 3, pooling._MANY_CHANNELS])


@settings(max_examples=15, deadline=None)
@given(
    window=windows(),
    batch=BATCHES,
    channels=CHANNELS,
    order=st.integers(0, 1),
    kind=st.sampled_from([np.float32, np.float64, np.int8, np.uint8]),
    opset=st.sampled_from([12, 22]),
)
def test_max_pool_is_that_of_onnxruntime(window, batch, channels, order, kind, opset):
    spatial, attributes = window
    x = RANDOM.integers(0, 9, (batch, channels, *spatial)).astype(kind)  # with ties
    types = [helper.np_dtype_to_tensor_dtype(x.dtype), 7]
    attributes["storage_order"] = order
    expected = ort_node("MaxPool", [x], attributes, outputs=2, output_types=types, opset=opset)
    actual = run_node("MaxPool", [x], attributes, outputs=2, output_types=types, opset=opset, compiled=True)
    if x.dtype.kind == "f":  # what has seen nothing but padding is -inf
        actual[0] = np.maximum(actual[0], np.finfo(kind).min)
    assert_equal(actual, expected)


@settings(max_examples=20, deadline=None)
@given(
    window=windows(),
    batch=BATCHES,
    channels=CHANNELS,
    op=st.sampled_from(["AveragePool", "LpPool"]),
    include=st.integers(0, 1),
    p=st.integers(1, 4),
    opset=st.sampled_from([19, 21, 22]),
)
def test_sums_over_windows_are_those_of_onnxruntime(window, batch, channels, op, include, p, opset):
    spatial, attributes = window
    extra = {"count_include_pad": include} if op == "AveragePool" else {"p": p}
    assert_as_onnxruntime(op, [draw(batch, channels, *spatial)], {**attributes, **extra}, opset=opset)


@settings(max_examples=10, deadline=None)
@given(
    op=st.sampled_from(["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"]),
    shape=st.sampled_from([(2, 3, 4, 5), (1, 1, 1), (0, 3, 4), (2, 3, 4, 1, 2)]),
    p=st.integers(1, 4),
    special=st.sampled_from([0.0, np.inf, -np.inf]),
)
def test_global_poolings_are_those_of_onnxruntime(op, shape, p, special):
    x = draw(*shape)
    x[RANDOM.random(shape) < 0.1] = special
    assert_as_onnxruntime(op, [x], {"p": p} if op == "GlobalLpPool" else {}, opset=21)


def test_padding_alone():
    """Both elements of the window are beside the only one of the array."""
    window = {"kernel_shape": [2], "dilations": [2], "pads": [1, 1]}
    x = np.ones((1, 1, 1), np.float32)
    for op, expected in (("MaxPool", -np.inf), ("AveragePool", 0), ("LpPool", 0)):
        (y,) = run_node(op, [x], window, opset=22)
        assert y.item() == expected
        model = transmuter.load(one_node(op, [x], window, opset=22))
        assert jax.grad(lambda x: model.apply({}, {"x0": x})["y0"].sum())(x).item() == 0  # noqa: B023


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(("length", "expected"), [(8, 3), (7, 3), (2, 0)])
def test_valid_windows_lie_within_the_array(op, length, expected):
    x = draw(1, 1, length)
    for ceil_mode in (0, 1):
        attributes = {"kernel_shape": [3], "strides": [2], "auto_pad": "VALID", "ceil_mode": ceil_mode}
        (y,) = run_node(op, [x], attributes, opset=22)
        assert y.shape == (1, 1, expected)
        if expected:
            del attributes["auto_pad"], attributes["ceil_mode"]
            np.testing.assert_allclose(y, ort_node(op, [x], attributes, opset=22)[0], rtol=1e-5)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
def test_same_windows_cut_nothing_off(op):
    """A stride beyond the kernel needs no padding."""
    (y,) = run_node(op, [np.arange(6, dtype=np.float32).reshape(1, 1, 6)],
                    {"kernel_shape": [1], "strides": [3], "auto_pad": "SAME_UPPER"}, opset=22)  # fmt: skip
    np.testing.assert_array_equal(y, [[[0, 3]]])


def test_a_window_that_does_not_fit():
    for op in ("MaxPool", "AveragePool", "LpPool"):
        with pytest.raises(transmuter.TransmuterError, match=r"spans \(5,\) elements does not fit into \(3,\)"):
            run_node(op, [draw(1, 1, 3)], {"kernel_shape": [5]}, opset=22)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("size", "dilation"), [(3, 2), (11, 1)])
def test_windows_have_gradients_and_a_symbolic_batch(size, dilation, channels_last, monkeypatch):
    monkeypatch.setattr(pooling, "_MANY_CHANNELS", 1 if channels_last else 99)
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


@settings(max_examples=12, deadline=None)
@given(
    batch=st.sampled_from([2, 1]),
    case=st.sampled_from(
        [
            ((6, 8), {"kernel_shape": [2, 2], "strides": [2, 2]}),
            ((7, 5), {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0]}),
            ((8,), {"kernel_shape": [2], "strides": [2]}),
            ((9,), {"kernel_shape": [3], "strides": [3]}),
            ((4, 2, 6), {"kernel_shape": [2, 1, 3], "strides": [2, 1, 3]}),
        ]
    ),
    shaped=st.booleans(),
)
def test_max_unpool_is_that_of_onnxruntime(batch, case, shaped):
    spatial, attributes = case
    x = RANDOM.permutation(batch * 2 * int(np.prod(spatial))).reshape(batch, 2, *spatial).astype(np.float32)
    pooled, places = ort_node("MaxPool", [x], attributes, outputs=2, output_types=[1, 7], opset=12)
    inputs = [pooled, places, np.array(x.shape)] if shaped else [pooled, places]
    assert_as_onnxruntime("MaxUnpool", inputs, attributes, known=[2] if shaped else [])


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


@st.composite
def regions(draw: st.DrawFn) -> np.ndarray:
    """Three regions of an image of 12 times 14 elements, which may be empty, upside down or outside."""
    corner = st.sampled_from([-30.3, -1.1, 0.0, 0.4, 2.6, 6.7, 9.2, 11.9, 14.3, 40.1])
    return np.array(draw(st.lists(st.tuples(*[corner] * 4), min_size=3, max_size=3)), np.float32)


@settings(max_examples=12, deadline=None)
@given(
    rois=regions(),
    images=st.lists(st.integers(0, 1), min_size=3, max_size=3),
    pooled_shape=st.sampled_from([[3, 2], [5, 5], [1, 1]]),
    scale=st.sampled_from([0.7, 1.0]),
)
def test_max_roi_pool_is_that_of_onnxruntime(rois, images, pooled_shape, scale):
    rois = np.concatenate([np.float32(images)[:, None], rois], 1)
    attributes = {"pooled_shape": pooled_shape, "spatial_scale": scale}
    assert_as_onnxruntime("MaxRoiPool", [draw(2, 3, 12, 14), rois], attributes, opset=21, compiled=False)


@pytest.mark.parametrize("mode", ["avg", "max"])
@settings(max_examples=15, deadline=None)
@given(
    rois=regions(),
    images=st.lists(st.integers(0, 1), min_size=3, max_size=3),
    transformation=st.sampled_from(["half_pixel", "output_half_pixel", None]),
    ratio=st.sampled_from([0, 1, 2]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_roi_align_is_that_of_onnxruntime(mode, rois, images, transformation, ratio, dtype):
    attributes = {"mode": mode, "sampling_ratio": ratio, "output_height": 3, "output_width": 4, "spatial_scale": 0.8}
    if transformation:
        attributes["coordinate_transformation_mode"] = transformation
    if transformation == "half_pixel":  # in which ONNX Runtime fails at regions that are upside down
        rois = np.concatenate([np.minimum(rois[:, :2], rois[:, 2:]), np.maximum(rois[:, :2], rois[:, 2:])], 1)
    operands = [draw(2, 3, 12, 14).astype(dtype), rois.astype(dtype), np.array(images)]
    assert_as_onnxruntime("RoiAlign", operands, attributes, opset=16 if transformation else 10, compiled=False)


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
    with pytest.raises(NeedsContents, match="rois"):
        jax.jit(lambda x, rois: pooling.RoiAlign_16(x, rois, IMAGES, **{**options, "mode": "max"}))(x, rois)


def test_maxima_of_regions_have_gradients():
    x = RANDOM.permutation(2 * 2 * 6 * 7).reshape(2, 2, 6, 7) / 10
    rois = np.array([[0, 1, 1, 5.2, 4.1], [1, -3.1, 0.3, 2.2, 9.3], [1, 20, 20, 30, 30]])
    pool = lambda x: pooling.MaxRoiPool(x, rois, pooled_shape=(2, 2), spatial_scale=1.0)
    options = {"mode": "max", "output_height": 2, "output_width": 2, "sampling_ratio": 2, "spatial_scale": 1.0}
    images, corners = rois[:, 0].astype(int), rois[:, 1:]
    align = lambda x: pooling.RoiAlign_16(x, corners, images, coordinate_transformation_mode="half_pixel", **options)
    with jax.enable_x64(True):
        for function in (pool, align):
            check_grads(jax.jit(function), (jnp.asarray(x),), 1, ["rev"])


def test_ties_have_finite_gradients():
    """Those of equal elements add up to that of one maximum."""
    kernel = {**NOTHING, "kernel_shape": (2, 2), "pads": (1, 1, 1, 1)}
    for pool in (
        lambda x: pooling.MaxPool(x, storage_order=0, output_count=1, **kernel),
        lambda x: pooling.AveragePool(x, count_include_pad=0, **kernel),
        lambda x: 4 * 4 * pooling.GlobalMaxPool(x),
    ):
        gradient = jax.grad(lambda x: jnp.sum(pool(x)))(jnp.zeros((1, 1, 3, 3)))  # noqa: B023
        np.testing.assert_allclose(jnp.sum(gradient), 16, rtol=1e-5)


def test_roi_align_without_regions():
    attributes = {"output_height": 3, "output_width": 4}
    (y,) = run_node("RoiAlign", [draw(1, 2, 5, 5), ROIS[:0], IMAGES[:0]], attributes, opset=16)
    assert y.shape == (0, 2, 3, 4)

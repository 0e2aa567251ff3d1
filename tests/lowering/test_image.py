"""Operators of image.py: ONNX Runtime over drawn attributes, old versions, symbolic batches, gradients, decoding."""

from __future__ import annotations

import io
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, ort_node, reference_node, run_node

import transmuter
from transmuter.lowering import image

RNG = np.random.default_rng(0)
FACTORS = st.sampled_from([0.3, 0.5, 0.6, 0.7, 1, 1.3, 4 / 3, 1.5, 2, 2.5, 3])
SIDES = st.integers(1, 8)


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def resize(x, scales=None, sizes=None, roi=None, *, run=run_node, opset=19, **attributes):
    given_inputs = [x, roi, scales, sizes]
    known = [i for i, v in enumerate(given_inputs) if i and v is not None]
    return run("Resize", given_inputs, attributes, opset=opset, known=known)[0]


# ---- Resize --------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True)  # halves round as they please
@given(st.data())
def test_resize_as_onnx_runtime(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["nearest", "linear", "cubic"]))
    transformation = data.draw(
        st.sampled_from(["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"])
    )
    attributes = {
        "mode": mode,
        "coordinate_transformation_mode": transformation,
        "nearest_mode": data.draw(st.sampled_from(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])),
        "cubic_coeff_a": data.draw(st.sampled_from([-0.5, -0.75])),
        "exclude_outside": data.draw(st.integers(0, 1)) if mode == "cubic" else 0,
        "antialias": data.draw(st.integers(0, 1)) if mode != "nearest" and "half" in transformation else 0,
    }
    x = draw(1, 2, data.draw(SIDES), data.draw(SIDES))
    if data.draw(st.booleans()):
        scales = np.array([1, 1, data.draw(FACTORS), data.draw(FACTORS)], np.float32)
        lengths = scales * np.array(x.shape, np.float32)
        assume(lengths.min() >= 1)
        assume(lengths.astype(int).tolist() != list(x.shape))  # which ONNX Runtime copies, whatever the scales
        assume(transformation != "align_corners" or (lengths == lengths.round()).all())
        target = {"scales": scales}
    else:
        target = {"sizes": np.array([1, 2, data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))])}
    expected = resize(x, **target, **attributes, run=ort_node)
    assert_equal(resize(x, **target, **attributes), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.data())
def test_crop_and_resize_as_onnx_runtime(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["nearest", "linear", "cubic"]))
    height, width = data.draw(SIDES), data.draw(SIDES)
    out = [data.draw(st.integers(1, 9).filter(lambda size, n=n: size != n)) for n in (height, width)]
    edges = [data.draw(st.sampled_from(choice)) for choice in ([-0.2, 0, 0.3], [0, 0.1], [0.6, 1.2], [0.5, 1])]
    roi = np.array([0, 0, *edges[:2], 1, 1, *edges[2:]], np.float32)
    attributes = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 9.0}
    target = {"sizes": np.array([1, 1, *out]), "roi": roi}
    x = draw(1, 1, height, width)
    expected = resize(x, **target, **attributes, run=ort_node)
    assert_equal(resize(x, **target, **attributes), expected, rtol=1e-4, atol=1e-4)


def test_a_region_counts_on_axes_that_keep_their_length() -> None:
    x = np.arange(5, dtype=np.float32)[None]
    y = resize(x, sizes=np.array([1, 5]), roi=np.array([0, 0.25, 1, 0.75], np.float32),
               mode="linear", coordinate_transformation_mode="tf_crop_and_resize")  # fmt: skip
    np.testing.assert_allclose(y, [[1, 1.5, 2, 2.5, 3]])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    axes=st.sampled_from([None, [2, 3], [3, 2], [3]]),
    policy=st.sampled_from(["stretch", "not_larger", "not_smaller"]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    mode=st.sampled_from(["nearest", "linear", "cubic"]),
    antialias=st.booleans(),
    coefficients=st.tuples(st.sampled_from([-0.5, -0.75]), st.integers(0, 1)),
)
def test_resize_of_some_axes_as_onnx_runtime(axes, policy, sizes, mode, antialias, coefficients) -> None:
    x = draw(1, 2, 3, 5)
    attributes = {"mode": mode, "keep_aspect_ratio_policy": policy if axes else "stretch"}
    attributes |= {"antialias": 1} if antialias and mode != "nearest" else {}
    if mode == "cubic":
        attributes["cubic_coeff_a"], attributes["exclude_outside"] = coefficients
    target = np.array([1, 2, *sizes] if axes is None else sizes[: len(axes)])
    expected = resize(x, sizes=target, run=ort_node, **attributes, **({"axes": axes} if axes else {}))
    assert_equal(resize(x, sizes=target, **attributes, **({"axes": axes} if axes else {})), expected, atol=1e-5)
    if axes:  # negative ones ONNX Runtime confuses
        negative = [axis - 4 for axis in axes]
        assert_equal(resize(x, sizes=target, **attributes, axes=negative), expected, atol=1e-5)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    opset=st.sampled_from([11, 13, 18]),
    mode=st.sampled_from(["nearest", "linear"]),
    sizes=st.tuples(st.sampled_from([3, 6, 2]), st.sampled_from([4, 2, 7]), st.sampled_from([5, 9, 1])),
    transformation=st.sampled_from(["half_pixel", "asymmetric", "align_corners", "tf_half_pixel_for_nn"]),
)
def test_resize_of_three_dimensions_as_onnx_runtime(opset, mode, sizes, transformation) -> None:
    """Version 11 cannot go without a region of interest."""
    transformation = "half_pixel" if transformation.startswith("tf") and opset > 11 else transformation
    x, target = draw(1, 1, 3, 4, 5), {"roi": np.zeros(0, np.float32), "sizes": np.array([1, 1, *sizes])}
    target |= {"scales": np.zeros(0, np.float32)} if opset == 11 else {}
    attributes = {"mode": mode, "coordinate_transformation_mode": transformation, "opset": opset}
    assert_equal(resize(x, **target, **attributes), resize(x, **target, **attributes, run=ort_node), atol=1e-5)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    version=st.sampled_from([("Upsample", 7), ("Upsample", 9), ("Resize", 10)]),
    mode=st.sampled_from(["nearest", "linear"]),
    shape=st.sampled_from([(1, 2, 4, 5), (2, 1, 1, 3), (4, 5)]),
    factors=st.sampled_from([(2, 3), (1.5, 2.3), (1, 2), (3, 1), (0.6, 0.4), (2, 0.5)]),
    dtype=st.sampled_from([np.float32, np.int32, np.uint8, np.int8]),
)
def test_before_version_11(version, mode, shape, factors, dtype) -> None:
    """Where an interpolated number is an integer but for rounding, truncation gives that or its neighbour."""
    (op, opset), factors = version, [max(f, 1) if version[0] == "Upsample" else f for f in factors]
    assume(all(int(f * n) for f, n in zip(factors, shape[-2:], strict=True)))
    x = (RNG.integers(0, 100, shape) if np.dtype(dtype).kind in "iu" else draw(*shape)).astype(dtype)
    scales = np.array([*[1] * (len(shape) - 2), *factors], np.float32)
    run = lambda run, x: (
        run(op, [x], {"mode": mode, "scales": scales.tolist()}, opset=opset)[0]
        if opset == 7
        else run(op, [x, scales], {"mode": mode}, opset=opset, known=[1])[0]
    )
    expected, actual = run(ort_node, x), run(run_node, x)
    if dtype == np.float32 or mode == "nearest":
        assert_equal(actual, expected, rtol=1e-4, atol=1e-5)
        return
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    exact = run(run_node, x.astype(np.float32))
    for y in (actual, expected):
        assert ((np.trunc(exact - 1e-3) <= y) & (y <= np.trunc(exact + 1e-3))).all()


def test_upsample_1() -> None:
    x = draw(1, 1, 2, 2)
    (y,) = run_node("Upsample", [x], {"height_scale": 2.0, "width_scale": 3.0}, opset=1)
    np.testing.assert_array_equal(y, x.repeat(2, 2).repeat(3, 3))
    (y,) = run_node("Upsample", [x], {"height_scale": 2.0, "width_scale": 1.0, "mode": "bilinear"}, opset=1)
    np.testing.assert_allclose(y[0, 0, :, 0], [x[0, 0, 0, 0], x[0, 0, :, 0].mean(), *[x[0, 0, 1, 0]] * 2], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int32, np.float16, np.float64])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_of_other_types(dtype: type, mode: str) -> None:
    x = (RNG.random((1, 1, 4, 4)) * 100).astype(dtype)
    sizes = np.array([1, 1, 6, 7])
    y = resize(x, sizes=sizes, mode=mode)
    assert y.dtype == dtype
    wanted = resize(x.astype(np.float32), sizes=sizes, mode=mode)
    np.testing.assert_allclose(y, np.trunc(wanted) if np.dtype(dtype).kind in "iu" else wanted, rtol=1e-3)


def test_gathers_agree_with_the_matrix() -> None:
    """A long last axis is gathered, a short one multiplied."""
    x = draw(2, 200)
    for mode in ("linear", "cubic"):
        alone = resize(x, sizes=np.array([2, 333]), mode=mode)
        tall = resize(np.ascontiguousarray(x.T), sizes=np.array([333, 2]), mode=mode).T
        np.testing.assert_allclose(alone, tall, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(alone[:, :100], resize(x, sizes=np.array([2, 333]), mode=mode, run=ort_node)[:, :100]
                                   if mode == "linear" else tall[:, :100], rtol=1e-4, atol=1e-4)  # fmt: skip


def test_export_with_a_symbolic_batch() -> None:
    x = draw(3, 2, 4, 5)
    scales = np.array([1, 1, 2, 1.5], np.float32)
    model = transmuter.load(one_node("Resize", [x, None, scales], {"mode": "linear"}, known=[2]))
    shape = jax.export.symbolic_shape("n, 2, 4, 5")
    call = jax.jit(lambda x: model.apply(model.params, {"x0": x})["y0"])
    exported = jax.export.export(call)(jax.ShapeDtypeStruct(shape, jnp.float32))
    np.testing.assert_allclose(exported.call(x), resize(x, scales, mode="linear"), rtol=1e-5, atol=1e-6)


def test_resize_refuses() -> None:
    x = draw(1, 1, 2, 2)
    with pytest.raises(transmuter.TransmuterError, match="exactly one of scales and sizes"):
        resize(x, scales=np.ones(4, np.float32), sizes=np.ones(4, np.int64))
    with pytest.raises(transmuter.TransmuterError, match="needs a region of interest"):
        resize(x, sizes=np.full(4, 2), coordinate_transformation_mode="tf_crop_and_resize")


# ---- GridSample, AffineGrid ----------------------------------------------------------------------------------------

SAMPLING = list(itertools.product(["nearest", "linear", "cubic"], ["zeros", "border", "reflection"], [0, 1]))


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@settings(max_examples=15, deadline=None)
@given(
    padding=st.sampled_from(["zeros", "border", "reflection"]),
    align=st.integers(0, 1),
    shape=st.sampled_from([(2, 3, 4, 5), (1, 1, 1, 3), (0, 2, 3, 3), (1, 2, 3, 4, 5), (1, 1, 2, 1, 2)]),
    far=st.sampled_from([1.0, 1.0, 20.0]),
    dtype=st.sampled_from([np.float32, np.float64]),
    opset=st.sampled_from([16, 20, 22]),
)
def test_grid_sample_as_onnx_runtime(mode, padding, align, shape, far, dtype, opset) -> None:
    if mode == "cubic" or opset == 16:
        shape = shape[:4]
    x, points = draw(*shape).astype(dtype), [3, 4, 2][: len(shape) - 2]
    grid = far * RNG.uniform(-1.6, 1.6, (shape[0], *points, len(points))).astype(dtype)
    if padding == "border" and mode == "cubic":  # ONNX Runtime clips both coordinates as soon as one is outside
        grid = grid.clip(-0.999, 0.999)
    if opset == 16:
        x, grid = x.astype(np.float32), grid.astype(np.float32)
        mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    expected = ort_node("GridSample", [x, grid], attributes, opset=opset)
    assert_equal(run_node("GridSample", [x, grid], attributes, opset=opset), expected, rtol=1e-4, atol=1e-4)


def test_grid_sample_far_outside_and_of_single_elements() -> None:
    grid = np.array([[[[1e30, -1e30], [np.inf, 0.0]]]], np.float32)
    for mode, padding, align in SAMPLING[:12]:
        attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
        (y,) = run_node("GridSample", [draw(1, 1, 1, 1), grid[:, :, :1]], attributes, opset=20)
        assert np.isfinite(y).all() or padding == "reflection"
        if mode == "nearest" and padding == "zeros":
            assert not run_node("GridSample", [draw(1, 1, 3, 3), grid], attributes, opset=20)[0].any()


def test_grid_sample_of_integers_keeps_them() -> None:
    x = np.array([[[[2**24 + 1, 5], [7, 9]]]], np.int32)
    grid = np.array([[[[-0.5, -0.5], [0.5, 0.5]]]], np.float32)
    (y,) = run_node("GridSample", [x, grid], {"mode": "nearest"}, opset=20)
    assert y.dtype == np.int32
    assert y.tolist() == [[[[2**24 + 1, 9]]]]


@settings(max_examples=15, deadline=None)
@given(
    align=st.integers(0, 1),
    lengths=st.sampled_from([(3, 4), (2, 2), (2, 3, 4), (1, 3), (2, 1, 1)]),
    batch=st.sampled_from([2, 1]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_affine_grid_as_onnx_runtime(align, lengths, batch, dtype) -> None:
    theta, size = draw(batch, len(lengths), len(lengths) + 1).astype(dtype), np.array([batch, 1, *lengths])
    args = "AffineGrid", [theta, size], {"align_corners": align}
    node = reference_node if align and 1 in lengths else ort_node
    with np.errstate(divide="ignore"):
        expected = node(*args, opset=20, known=[1])
    (grid,) = run_node(*args, opset=20, known=[1])
    assert_equal(grid, expected[0].astype(dtype), rtol=1e-5, atol=1e-5)


def test_gradients() -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        x = jnp.asarray(draw(1, 2, 3, 4, dtype=np.float64))
        for mode in ("nearest", "linear", "cubic"):
            resampled = image._Resampling(mode=mode, coordinate_transformation_mode="half_pixel", antialias=1)
            axes = [image._Axis(a, x.shape[a], n, n / x.shape[a], n, (0.0, 1.0)) for a, n in ((2, 5), (3, 2))]
            check_grads(lambda x, axes=axes, r=resampled: image._resize(x, axes, r), (x,), 1, ["rev"])
        theta, size = jnp.asarray(draw(1, 2, 3, dtype=np.float64)), np.array([1, 2, 3, 2])
        for mode, padding, align in (("linear", "zeros", 0), ("linear", "reflection", 1), ("cubic", "border", 0)):

            def sample(x, theta, mode=mode, padding=padding, align=align):
                grid = image.AffineGrid(theta, size, align_corners=align)
                return image.GridSample(x, grid, align_corners=align, mode=mode, padding_mode=padding)

            check_grads(sample, (x, theta), 1, ["rev"], eps=1e-7, rtol=1e-3, atol=1e-3)


# ---- ImageDecoder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pixel_format", ["RGB", "BGR", "Grayscale"])
@pytest.mark.parametrize("stored", ["RGB", "L", "P", "RGBA"])
def test_decoding(pixel_format: str, stored: str) -> None:
    Image = pytest.importorskip("PIL.Image")
    picture = Image.fromarray((RNG.random((5, 4, 3)) * 255).astype(np.uint8)).convert(stored)
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    encoded = np.frombuffer(stream.getvalue(), np.uint8)
    wanted = np.asarray(picture.convert("L" if pixel_format == "Grayscale" else "RGB")).reshape(5, 4, -1)
    wanted = wanted[..., ::-1] if pixel_format == "BGR" else wanted
    for compiled in (False, True):
        (y,) = run_node("ImageDecoder", [encoded], {"pixel_format": pixel_format}, opset=20, compiled=compiled)
        np.testing.assert_array_equal(y, wanted)


def test_what_cannot_be_decoded_is_empty() -> None:
    pytest.importorskip("PIL")
    assert run_node("ImageDecoder", [np.arange(9, dtype=np.uint8)], opset=20)[0].shape == (0, 0, 3)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_nothing_is_resized_to_nothing(mode):
    operands = [np.zeros((0, 4), np.float32), None, np.array([2, 2], np.float32)]
    (y,) = run_node("Resize", operands, {"mode": mode}, opset=18, known=(2,))
    assert y.shape == (0, 8)

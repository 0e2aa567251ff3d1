"""Convolutions beyond the conformance suite: drawn attributes beside ONNX Runtime, gradients, symbolic batch."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import ort_node, run_node

from transmuter.lowering import convolution

MICROSOFT = {"domain": "com.microsoft"}
RANDOM = np.random.default_rng(0)
NOTHING = {"auto_pad": None, "dilations": None, "group": 1, "kernel_shape": None, "pads": None, "strides": None}


def draw(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def assert_as_onnxruntime(op: str, inputs: list, attributes: dict | None = None, **kwargs: object) -> None:
    for ours, theirs in zip(run_node(op, inputs, attributes, **kwargs), ort_node(op, inputs, attributes, **kwargs)):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, dict]:
    rank = draw(st.integers(1, 3))
    each = lambda low, high: draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))
    attributes = {"kernel_shape": each(1, 3), "strides": each(1, 2), "dilations": each(1, 2)}
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"]))
    if auto_pad == "NOTSET":
        attributes["pads"] = each(0, 2) + each(0, 2)
    elif auto_pad != "VALID":  # ONNX Runtime refuses dilation with it
        attributes["dilations"] = [1] * rank
    return rank, {**attributes, "auto_pad": auto_pad}


GROUPS = st.sampled_from([(1, 3, 4), (2, 4, 6), (4, 4, 4), (3, 3, 6)])


@settings(max_examples=12, deadline=None)
@given(window=windows(), grouped=GROUPS, bias=st.booleans())
def test_conv_is_that_of_onnxruntime(window, grouped, bias):
    (rank, attributes), (group, inputs, outputs) = window, grouped
    operands = [draw(2, inputs, *(7, 6, 5)[:rank]), draw(outputs, inputs // group, *attributes["kernel_shape"])]
    assert_as_onnxruntime("Conv", operands + [draw(outputs)] * bias, {**attributes, "group": group})


@settings(max_examples=12, deadline=None)
@given(window=windows(), grouped=GROUPS, shaped=st.booleans(), extra=st.booleans())
def test_conv_transpose_is_that_of_onnxruntime(window, grouped, shaped, extra):
    (rank, attributes), (group, inputs, outputs) = window, grouped
    attributes = {**attributes, "group": group}
    if extra:
        attributes["output_padding"] = [s - 1 for s in attributes["strides"]]
    spatial = (4, 3, 3)[:rank]
    pads = [0] * 2 * rank if shaped else attributes.get("pads", [0] * 2 * rank)
    sizes = zip(spatial, attributes["strides"], attributes["kernel_shape"], attributes["dilations"], pads, pads[rank:])
    full = [(n - 1) * s + (k - 1) * d + 1 - lo - hi for n, s, k, d, lo, hi in sizes]
    assume(min(full) > 0)
    if shaped:
        attributes["output_shape"] = [max(n - 1, 1) for n in full]
    operands = [draw(2, inputs, *spatial), draw(inputs, outputs // group, *attributes["kernel_shape"]), draw(outputs)]
    assert_as_onnxruntime("ConvTranspose", operands, attributes)


KINDS = {
    "dense": ((2, 3, 5, 5), (4, 3, 3, 3), {"pads": [1] * 4, "strides": [2, 2]}),
    "pointwise": ((2, 3, 5, 5), (4, 3, 1, 1), {"strides": [2, 1]}),
    "depthwise": ((2, 3, 5, 5), (6, 1, 3, 3), {"pads": [1] * 4, "group": 3}),
    "grouped": ((2, 4, 5, 5), (4, 2, 3, 3), {"dilations": [2, 1], "group": 2}),
    "one-dimensional": ((2, 4, 9), (4, 2, 3), {"strides": [2], "group": 2}),
    "large depthwise": ((1, 2, 140), (2, 1, 130), {"group": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_transforms(kind):
    x, w, attributes = KINDS[kind]
    x, w, attributes = jnp.asarray(draw(*x)), jnp.asarray(draw(*w)), {**NOTHING, **attributes}
    conv = lambda x, w: convolution.Conv(x, w, **attributes)
    check_grads(conv, (x, w), 1, ["rev"], atol=3e-2, rtol=3e-2)
    y = conv(x, w)
    np.testing.assert_allclose(jax.vmap(conv, (0, None))(x[:, None], w)[:, 0], y, rtol=1e-4, atol=1e-4)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose(jax.jit(conv)(x, w), y, rtol=1e-4, atol=1e-4)


def lowered(kind: str, transposed: bool) -> tuple:
    """A convolution as a function, with its operands."""
    x, w, attributes = KINDS[kind]
    attributes = {**NOTHING, **attributes}
    if not transposed:
        return lambda x, w: convolution.Conv(x, w, **attributes), draw(*x), draw(*w)
    attributes = {**attributes, "output_padding": None, "output_shape": None}
    return lambda x, w: convolution.ConvTranspose(x, w, **attributes), draw(x[0], w[0], *x[2:]), draw(*w)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_the_batch_may_be_symbolic(kind, transposed):
    conv, x, w = lowered(kind, transposed)
    symbolic = jax.ShapeDtypeStruct((jax.export.symbolic_shape("n")[0], *x.shape[1:]), np.float32)
    exported = jax.export.export(jax.jit(conv))(symbolic, jax.ShapeDtypeStruct(w.shape, np.float32))
    np.testing.assert_allclose(exported.call(x, w), conv(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transposed", [False, True])
def test_other_platforms_compute_the_same(kind, transposed, monkeypatch):
    conv, x, w = lowered(kind, transposed)
    expected = conv(x, w)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_allclose(conv(x, w), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_halves_accumulate_in_float32(dtype, group):
    x, w = np.ones((1, 4, 33, 33), dtype), np.ones((4, 4 // group, 33, 33), dtype)
    (y,) = run_node("Conv", [x, w], {"group": group})
    assert y.dtype == dtype
    np.testing.assert_array_equal(
        y.astype(np.float32), np.float32(4 // group * 33 * 33).astype(dtype).astype(np.float32)
    )


def test_operands_that_do_not_fit():
    with pytest.raises(Exception, match=r"kernel of shape \(2, 2\)"):
        run_node("Conv", [draw(1, 2, 5, 5), draw(2, 2, 3, 3)], {"kernel_shape": [2, 2]})
    with pytest.raises(Exception, match="2 groups"):
        run_node("Conv", [draw(1, 2, 5, 5), draw(2, 2, 3, 3)], {"group": 2})


@settings(max_examples=10, deadline=None)
@given(
    kinds=st.tuples(st.sampled_from([np.int8, np.uint8]), st.sampled_from([np.int8, np.uint8])),
    shapes=st.sampled_from(
        [
            ((1, 80, 5, 5), (4, 80, 3, 3), 1),
            ((1, 600, 3), (2, 600, 1), 1),
            ((2, 4, 5, 5), (4, 2, 3, 3), 2),
            ((1, 4, 5), (8, 1, 3), 4),
            ((1, 1, 600), (1, 1, 590), 1),
        ]
    ),
    zero_points=st.booleans(),
)
def test_integer_convolutions_are_exact(kinds, shapes, zero_points):
    *shapes, group = shapes
    bounds = [np.iinfo(kind) for kind in kinds]
    x, w = (RANDOM.integers(b.min, b.max + 1, shape, b.dtype) for b, shape in zip(bounds, shapes))
    zeros = [np.array(7, kinds[0]), RANDOM.integers(0, 100, w.shape[0]).astype(kinds[1])] if zero_points else []
    (y,) = run_node("ConvInteger", [x, w, *zeros], {"group": group}, output_types=[6])
    x, w = x.astype(np.float64), w.astype(np.float64)
    if zeros:
        x, w = x - 7, w - zeros[1].reshape(-1, *[1] * (w.ndim - 1))
    (expected,) = run_node("Conv", [x, w], {"group": group})
    assert y.dtype == np.int32
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
def test_causal_conv_goes_on_where_it_stopped(length, activation):
    x, w, b = draw(2, 3, 10), draw(3, 1, 4), draw(3)
    attributes, options = {"activation": activation}, {"outputs": 2, "opset": 27}
    whole, _ = run_node("CausalConvWithState", [x, w, b], attributes, **options)
    state, parts = None, []
    for start, stop in pairwise([*range(0, 10, length), 10]):
        part, state = run_node("CausalConvWithState", [x[:, :, start:stop], w, b, state], attributes, **options)
        parts.append(part)
        assert state.shape == (2, 3, 3)
    np.testing.assert_allclose(np.concatenate(parts, 2), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "blocks"),
    [({}, (4, 5)), ({"strides": [2, 1], "pads": [0, 1, 1, 0]}, (3, 6)), ({"dilations": [2, 2]}, (3, 4))],
)
def test_col2im(attributes, blocks):
    x, image, block = draw(2, 3 * 4, np.prod(blocks)), np.array([5, 6]), np.array([2, 2])
    assert_as_onnxruntime("Col2Im", [x, image, block], attributes, opset=18, known=[1, 2])
    rest = {"dilations": None, "pads": None, "strides": None, **attributes}
    col2im = lambda x: convolution.Col2Im(x, image, block, **rest)
    check_grads(col2im, (jnp.asarray(x),), 1, ["rev"], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("group", "offset_group", "attributes", "counts"),
    [(1, 1, {"pads": [1] * 4}, (6, 5)), (2, 2, {"strides": [2, 2], "dilations": [1, 2]}, (2, 1))],
)
def test_deform_conv(group, offset_group, attributes, counts):
    x, w, b = draw(2, 4, 6, 5), draw(4, 4 // group, 3, 3), draw(4)
    offset, mask = 2 * draw(2, offset_group * 18, *counts), draw(2, offset_group * 9, *counts)
    attributes = {**attributes, "group": group, "offset_group": offset_group}
    assert_as_onnxruntime("DeformConv", [x, w, offset, b, mask], attributes, opset=19)
    assert_as_onnxruntime("DeformConv", [x, w, offset], attributes, opset=19)
    deform = lambda *xs: convolution.DeformConv(
        *xs, **{"kernel_shape": None, "dilations": None, "pads": None, "strides": None, **attributes}
    )
    with jax.enable_x64(True):
        operands = [jnp.asarray(v, jnp.float64) for v in (x, w, offset, b, mask)]
        check_grads(jax.jit(deform), operands, 1, ["rev"], eps=1e-7)


@pytest.mark.parametrize(
    ("activation", "params"),
    [
        ("Relu", []),
        ("Clip", [-0.2, 0.6]),
        ("LeakyRelu", [0.3]),
        ("HardSigmoid", [0.3, 0.4]),
        ("Sigmoid", []),
        ("HardSwish", [1 / 6, 0.5]),
    ],
)
def test_fused_conv_is_that_of_onnxruntime(activation, params):
    x, w, b = draw(2, 4, 6, 7), draw(5, 4, 3, 3), draw(5)
    attributes = {"activation": activation, "pads": [1] * 4} | ({"activation_params": params} if params else {})
    assert_as_onnxruntime("FusedConv", [x, w, b], attributes, **MICROSOFT)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_channels_last(group):
    x, w, b, z = draw(2, 4, 6, 7), draw(4, 4 // group, 3, 3), draw(4), draw(2, 4, 6, 7)
    last = lambda v: np.moveaxis(v, 1, -1).copy()
    attributes = {"pads": [1] * 4, "group": group}
    (expected,) = run_node("FusedConv", [x, w, b, z], {**attributes, "activation": "Relu"}, **MICROSOFT)
    (y,) = run_node("NhwcFusedConv", [last(x), w, b, last(z)], {**attributes, "activation": "Relu"}, **MICROSOFT)
    np.testing.assert_allclose(y, last(expected), rtol=1e-5, atol=1e-5)
    (y,) = run_node("NhwcConv", [last(x), w], attributes, **MICROSOFT)
    np.testing.assert_allclose(y, last(run_node("Conv", [x, w], attributes)[0]), rtol=1e-5, atol=1e-5)

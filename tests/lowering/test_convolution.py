"""Convolutions beyond the conformance suite: drawn attributes beside ONNX Runtime, gradients, symbolic batch."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import ort_node, reference_node, run_node

from transmuter.lowering import convolution
from transmuter.lowering.platform import training_options

MICROSOFT = {"domain": "com.microsoft"}
RANDOM = np.random.default_rng(0)
NOTHING = {"auto_pad": None, "dilations": None, "group": 1, "kernel_shape": None, "pads": None, "strides": None}


def draw(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def assert_as_onnxruntime(op: str, inputs: list, attributes: dict | None = None, **kwargs: object) -> None:
    """Compiled: the windows differ from one example to the next, and so would each operation compiled on its own."""
    expected = ort_node(op, inputs, attributes, **kwargs)
    assert_equal(run_node(op, inputs, attributes, compiled=True, **kwargs), expected, rtol=1e-4, atol=1e-4)


@st.composite
def windows(draw: st.DrawFn, auto_pads: tuple[str, ...] = ("SAME_UPPER", "SAME_LOWER")) -> tuple[int, dict]:
    """A rank and attributes with all that ONNX Runtime takes: no dilation where the padding depends on it."""
    rank = draw(st.sampled_from([1, 2, 2, 3]))
    each = lambda *choices: draw(st.lists(st.sampled_from(choices), min_size=rank, max_size=rank))
    attributes = {"kernel_shape": each(1, 2, 3), "strides": each(1, 2, 3), "dilations": each(1, 2)}
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "VALID", *auto_pads]))
    if auto_pad == "NOTSET":
        attributes["pads"] = each(0, 1, 2) + each(0, 1, 2)
    elif auto_pad != "VALID":
        attributes["dilations"] = [1] * rank
    return rank, {**attributes, "auto_pad": auto_pad}


GROUPS = st.sampled_from([(1, 3, 4), (2, 4, 6), (4, 4, 4), (3, 3, 6), (1, 1, 1)])
BATCHES = st.sampled_from([2, 1, 0])


@settings(max_examples=12, deadline=None)
@given(window=windows(), grouped=GROUPS, batch=BATCHES, thin=st.booleans(), bias=st.booleans())
def test_conv_is_that_of_onnxruntime(window, grouped, batch, thin, bias):
    (rank, attributes), (group, inputs, outputs) = window, grouped
    spatial = (7, 1, 5)[:rank] if thin and attributes["auto_pad"] != "VALID" else (7, 6, 5)[:rank]
    if attributes["auto_pad"] == "NOTSET":
        extents = [(k - 1) * d + 1 for k, d in zip(attributes["kernel_shape"], attributes["dilations"], strict=True)]
        pads = attributes["pads"]
        assume(all(n + lo + hi >= e for n, lo, hi, e in zip(spatial, pads, pads[rank:], extents)))
    operands = [draw(batch, inputs, *spatial), draw(outputs, inputs // group, *attributes["kernel_shape"])]
    assert_as_onnxruntime("Conv", operands + [draw(outputs)] * bias, {**attributes, "group": group})


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("stride", "pads"), [(1, (2, 2)), (2, (1, 2)), (7, (2, 2)), (8, (0, 0))])
def test_same_padding_of_a_dilated_kernel(auto_pad, stride, pads):
    """The padding makes up for what the dilated kernel lacks, and never cuts off."""
    x, w = draw(1, 1, 8), draw(1, 1, 3)
    attributes = {"strides": [stride], "dilations": [2]}
    (y,) = run_node("Conv", [x, w], {**attributes, "auto_pad": auto_pad})
    assert y.shape[2] == -(-8 // stride)
    pads = pads if auto_pad == "SAME_UPPER" else pads[::-1]
    wanted = ort_node("Conv", [x, w], {**attributes, "pads": pads})
    np.testing.assert_allclose(y, wanted[0], rtol=1e-4, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(window=windows(), grouped=GROUPS, batch=BATCHES, shaped=st.sampled_from([None, -1, 0, 1]), data=st.data())
def test_conv_transpose_is_that_of_onnxruntime(window, grouped, batch, shaped, data):
    (rank, attributes), (group, inputs, outputs) = window, grouped
    attributes = {**attributes, "group": group}
    strides, kernel = attributes["strides"], attributes["kernel_shape"]
    extra = [0] * rank
    if data.draw(st.booleans()):
        extra = attributes["output_padding"] = [data.draw(st.integers(0, s - 1)) for s in strides]
    spatial = (4, 3, 1)[:rank]
    pads = [0] * 2 * rank if shaped is not None else attributes.get("pads", [0] * 2 * rank)
    sizes = zip(spatial, strides, kernel, attributes["dilations"], pads, pads[rank:], extra)
    full = [(n - 1) * s + (k - 1) * d + 1 - lo - hi + e for n, s, k, d, lo, hi, e in sizes]
    assume(min(full) > 0)
    if shaped is not None:
        attributes["output_shape"] = [
            min(max(n + shaped, 1), n - e + s - 1) for n, s, e in zip(full, strides, extra, strict=True)
        ]
    elif attributes["auto_pad"].startswith("SAME"):  # which ONNX Runtime leaves short otherwise
        assume(all(k + e >= s for k, s, e in zip(kernel, strides, extra, strict=True)))
    operands = [draw(batch, inputs, *spatial), draw(inputs, outputs // group, *kernel), draw(outputs)]
    assert_as_onnxruntime("ConvTranspose", operands, attributes)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_a_transposed_convolution_beyond_its_kernel_gets_zeros(auto_pad):
    x, w, b = draw(1, 2, 3), draw(2, 2, 1), draw(2)
    (y,) = run_node("ConvTranspose", [x, w, b], {"strides": [3], "auto_pad": auto_pad})
    (short,) = ort_node("ConvTranspose", [x, w, b], {"strides": [3]})
    assert y.shape == (1, 2, 9)
    np.testing.assert_allclose(y[..., :7], short, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(y[..., 7:], np.broadcast_to(b[:, None], (1, 2, 2)))


KINDS = {
    "dense": ((2, 3, 5, 5), (4, 3, 3, 3), {"pads": [1] * 4, "strides": [2, 2]}),
    "strided": ((2, 8, 5, 5), (4, 8, 3, 3), {"pads": [1] * 4, "strides": [2, 2]}),
    "few channels": ((2, 3, 9, 8), (4, 3, 3, 3), {"pads": [1, 0, 0, 1], "strides": [2, 3]}),
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


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("spatial", "kernel", "pads", "strides"),
    [
        ((8,), (2,), (-1, 1), (1,)),
        ((8,), (3,), (-2, 2), (2,)),
        ((8,), (1,), (2, 3), (2,)),
        ((8, 7), (3, 3), (-2, 0, 1, -1), (1, 1)),
        ((9, 7), (3, 3), (-1, -2, 1, 0), (2, 2)),
        ((9, 9), (2, 1), (3, 1, 2, 2), (1, 2)),
    ],
)
def test_padding_below_none_or_beyond_the_kernel(spatial, kernel, pads, strides, group):
    """XLA's CPU convolutions read beside an operand that is cut at the start and padded at the end. What is padded by
    more than its kernel spans has such a one for a gradient."""
    x, w = draw(2, 16 * group, *spatial), draw(8 * group, 16, *kernel)
    attributes, rank = {**NOTHING, "group": group, "strides": strides}, len(kernel)
    borders = [(0, 0, 0), (0, 0, 0), *((lo, hi, 0) for lo, hi in zip(pads, pads[rank:]))]
    conv = lambda x, w: convolution.Conv(x, w, **{**attributes, "pads": pads})
    plain = lambda x, w: convolution.Conv(jax.lax.pad(x, np.float32(0), borders), w, **attributes)
    np.testing.assert_allclose(jax.jit(conv)(x, w), jax.jit(plain)(x, w), rtol=1e-4, atol=1e-4)
    gradients = lambda f: jax.jit(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)))(x, w)
    for gradient, wanted in zip(gradients(conv), gradients(plain), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-3)


def test_a_weight_in_groups_has_a_gradient_as_steps_of_training_compile_it():
    """XLA's YNNPACK crashed on the sum over what one group has of a joined weight; now there is none."""
    x, w = draw(2, 16, 10, 10), draw(64, 8, 3, 3)
    attributes = {**NOTHING, "group": 2, "pads": (1, 1, 1, 1)}
    gradient = jax.grad(lambda w: jnp.sum(jnp.sin(convolution.Conv(x, w, **attributes))))
    compiled = jax.jit(gradient, compiler_options=dict(training_options()))
    pairs = [(x[:, :8], w[:32]), (x[:, 8:], w[32:])]
    alone = {**attributes, "group": 1}
    parts = [jax.grad(lambda w, x=x: jnp.sum(jnp.sin(convolution.Conv(x, w, **alone))))(w) for x, w in pairs]
    assert_equal(np.asarray(compiled(w)), np.concatenate(parts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [1, 2])
def test_transposed_and_causal_convolutions_have_gradients(group):
    attributes = {**NOTHING, "group": group, "strides": (2, 1), "pads": (1, 0, 0, 1), "output_padding": (1, 0)}
    transposed = lambda *xs: convolution.ConvTranspose(*xs, **attributes, output_shape=None)
    causal = lambda *xs: convolution.CausalConvWithState(*xs, activation="silu" if group == 1 else "none")
    with jax.enable_x64(True):
        for function, shapes in (
            (transposed, [(2, 4, 3, 3), (4, 2, 2, 3), (2 * group,)]),
            (causal, [(2, 3, 5), (3, 1, 4), (3,), (2, 3, 3)]),
        ):
            operands = [jnp.asarray(draw(*shape), jnp.float64) for shape in shapes]
            check_grads(jax.jit(function), operands, 1, ["rev"])


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


@pytest.mark.parametrize(("block", "most"), [(1, 12), (4, 12), (8, 12), (32, 12), (1, 2), (4, 2)])
def test_groups_in_blocks(block, most, monkeypatch):
    """One by one, some joined, all joined; as operations of their own and in a loop."""
    x, w, attributes = draw(2, 12, 6, 5), draw(24, 2, 3, 2), {"group": 6, "strides": [2, 1], "pads": [1, 0, 1, 1]}
    monkeypatch.setattr(convolution, "_BLOCK", block)
    monkeypatch.setattr(convolution, "_MOST_BLOCKS", most)
    assert_as_onnxruntime("Conv", [x, w], attributes)


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
    window=windows(),
    grouped=GROUPS,
    batch=BATCHES,
    kinds=st.tuples(st.sampled_from([np.int8, np.uint8]), st.sampled_from([np.int8, np.uint8])),
    zero_points=st.sampled_from([0, 1, 2]),
    zero_shape=st.sampled_from([(), (1,)]),
)
def test_integer_convolutions_are_those_of_onnxruntime(window, grouped, batch, kinds, zero_points, zero_shape):
    (rank, attributes), (group, inputs, outputs) = window, grouped
    bounds = [np.iinfo(kind) for kind in kinds]
    shapes = (batch, inputs, *(7, 6, 5)[:rank]), (outputs, inputs // group, *attributes["kernel_shape"])
    x, w = (RANDOM.integers(b.min, b.max + 1, shape, b.dtype) for b, shape in zip(bounds, shapes, strict=True))
    zeros = [np.full(zero_shape, b.max - 9, b.dtype) for b in bounds][:zero_points]
    attributes = {**attributes, "group": group}
    assert_as_onnxruntime("ConvInteger", [x, w, *zeros], attributes, output_types=[6])


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
    (y,) = run_node("ConvInteger", [x, w, *zeros], {"group": group}, output_types=[6], compiled=True)
    x, w = x.astype(np.float64), w.astype(np.float64)
    if zeros:
        x, w = x - 7, w - zeros[1].reshape(-1, *[1] * (w.ndim - 1))
    (expected,) = run_node("Conv", [x, w], {"group": group}, compiled=True)
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


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.sampled_from([(2, 3, 10, 4), (1, 1, 1, 1), (2, 3, 1, 4), (1, 2, 2, 4), (2, 3, 0, 4), (0, 3, 5, 2)]),
    activation=st.sampled_from(["none", "silu", "swish"]),
    bias=st.booleans(),
    past=st.booleans(),
    half=st.booleans(),
)
def test_causal_conv_is_that_of_the_reference(sizes, activation, bias, past, half):
    batch, channels, length, taps = sizes
    operands = [draw(batch, channels, length), draw(channels, 1, taps), draw(channels) if bias else None]
    operands.append(draw(batch, channels, taps - 1) if past else None)
    operands = [x if x is None else x.astype(np.float16 if half else np.float32) for x in operands]
    while operands[-1] is None:
        operands.pop()
    options = {"outputs": 2, "opset": 27}
    y, state = run_node("CausalConvWithState", operands, {"activation": activation}, compiled=True, **options)
    if length:
        wanted = reference_node("CausalConvWithState", operands, {"activation": activation}, **options)
        assert_equal([y, state], wanted, rtol=2e-3 if half else 1e-5, atol=2e-3 if half else 1e-5)
    else:  # the reference refuses an empty array
        assert y.shape == (batch, channels, 0)
        np.testing.assert_array_equal(state, operands[3] if past else np.zeros((batch, channels, taps - 1)))


@st.composite
def unfolded(draw: st.DrawFn, rank: int) -> tuple[list[int], list[int], dict, int]:
    """An image, a block that slides over it, attributes, and how many positions it has."""
    each = lambda *choices: draw(st.lists(st.sampled_from(choices), min_size=rank, max_size=rank))
    image, block, strides, dilations = each(1, 4, 5), each(1, 2, 3), each(1, 2), each(1, 2)
    pads = each(0, 1) + each(0, 2)
    counts = [
        (n + lo + hi - (k - 1) * d - 1) // s + 1
        for n, k, s, d, lo, hi in zip(image, block, strides, dilations, pads, pads[rank:])
    ]
    assume(min(counts) > 0)
    return image, block, {"strides": strides, "dilations": dilations, "pads": pads}, int(np.prod(counts))


@settings(max_examples=15, deadline=None)
@given(case=st.sampled_from([1, 2, 2, 3]).flatmap(unfolded), batch=BATCHES, channels=st.sampled_from([1, 3]))
def test_col2im_is_that_of_onnxruntime(case, batch, channels):
    """As the reference evaluator but for images of two dimensions: ONNX Runtime misplaces others."""
    image, block, attributes, count = case
    operands = [draw(batch, channels * int(np.prod(block)), count), np.array(image), np.array(block)]
    node, kwargs = ort_node if len(image) == 2 else reference_node, {"opset": 18, "known": [1, 2]}
    assume(batch or node is ort_node)
    expected = node("Col2Im", operands, attributes, **kwargs)
    assert_equal(run_node("Col2Im", operands, attributes, compiled=True, **kwargs), expected, rtol=1e-4, atol=1e-4)


def test_col2im_has_gradients():
    x, image, block = draw(2, 3 * 4, 12), np.array([5, 6]), np.array([2, 2])
    col2im = lambda x: convolution.Col2Im(x, image, block, dilations=(2, 2), pads=None, strides=None)
    check_grads(col2im, (jnp.asarray(x),), 1, ["rev"], atol=1e-2, rtol=1e-2)


@settings(max_examples=10, deadline=None)
@given(
    groups=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 4)]),
    window=st.sampled_from(
        [
            ((3, 3), (1, 1), (1, 1), (1, 0, 1, 2)),
            ((1, 2), (2, 1), (1, 2), (0, 0, 0, 0)),
            ((1, 1), (1, 1), (1, 1), (0, 0, 0, 0)),
        ]
    ),
    batch=BATCHES,
    far=st.sampled_from([0.0, 2.0, 50.0]),
    optional=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_deform_conv_is_that_of_onnxruntime(groups, window, batch, far, optional, dtype):
    (group, offset_group), (kernel, strides, dilations, pads) = groups, window
    inputs, outputs = 4, 4
    sizes = zip((6, 5), kernel, strides, dilations, pads, pads[2:])
    counts = [(n + lo + hi - (k - 1) * d - 1) // s + 1 for n, k, s, d, lo, hi in sizes]
    taps = offset_group * kernel[0] * kernel[1]
    operands = [
        draw(batch, inputs, 6, 5),
        draw(outputs, inputs // group, *kernel),
        far * draw(batch, 2 * taps, *counts),
        draw(outputs) if optional[0] else None,
        draw(batch, taps, *counts) if optional[1] else None,
    ]
    while operands[-1] is None:
        operands.pop()
    operands = [x if x is None else x.astype(dtype) for x in operands]
    attributes = {"group": group, "offset_group": offset_group, "strides": strides, "dilations": dilations}
    assert_as_onnxruntime("DeformConv", operands, {**attributes, "pads": pads}, opset=19)


def test_deform_conv_of_three_dimensions_is_conv_where_nothing_is_deformed():
    x, w, offset = draw(1, 2, 4, 3, 5), draw(3, 2, 2, 1, 2), np.zeros((1, 12, 3, 3, 4), np.float32)
    np.testing.assert_allclose(
        run_node("DeformConv", [x, w, offset], opset=19)[0], run_node("Conv", [x, w])[0], rtol=1e-4, atol=1e-5
    )


def test_deform_conv_has_gradients():
    attributes = {"group": 2, "offset_group": 2, "strides": (2, 2), "dilations": (1, 2), "kernel_shape": None}
    x, w, b = draw(2, 4, 6, 5), draw(4, 2, 3, 3), draw(4)
    operands = [x, w, 2 * draw(2, 36, 2, 1), b, draw(2, 18, 2, 1)]
    deform = lambda *xs: convolution.DeformConv(*xs, **attributes, pads=None)
    with jax.enable_x64(True):
        check_grads(jax.jit(deform), [jnp.asarray(v, jnp.float64) for v in operands], 1, ["rev"], eps=1e-7)


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

"""Operators of contrib_tokens.py, and those of ONNX Runtime with a mask, dynamic pads or a sparse matrix."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, ort_node, run_node

import transmuter

RNG = np.random.default_rng(0)
CONTRIB = {"domain": "com.microsoft"}
INT32, INT64, FLOAT = 6, 7, 1
few = settings(max_examples=15, deadline=None)


def draw(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def check(op: str, operands: list, attributes: dict | None = None, types: tuple = (FLOAT,), **kwargs: Any) -> None:
    options = {"outputs": len(types), "output_types": types, **CONTRIB, **kwargs}
    assert_equal(run_node(op, operands, attributes, **options), ort_node(op, operands, attributes, **options))


# ---- tokens --------------------------------------------------------------------------------------------------------


@few
@given(st.sampled_from([1, 3]), st.sampled_from([(2, 5), (2, 2), (0, 3)]))
def test_ngram_repeat_block(size: int, shape: tuple) -> None:
    check("NGramRepeatBlock", [RNG.integers(0, 3, shape), draw(shape[0], 4)], {"ngram_size": size})


tokens = lambda least, most: st.lists(st.integers(0, 2), min_size=least, max_size=most)


@settings(max_examples=40, deadline=None)
@given(st.data(), tokens(0, 6), tokens(0, 4), st.sampled_from([(1, 3), (1, 1), (2, 4)]), st.booleans())
def test_bifurcation_detector(data: st.DataObject, source: list, current: list, sizes: tuple, predicts: bool) -> None:
    start = data.draw(st.integers(0, len(source)))
    operands = [np.int64(source), np.int64(current), np.int64([start])]
    if predicts:
        agreed = data.draw(st.integers(0, len(source) - start))
        rest = data.draw(tokens(len(source) + 1 - start - agreed, len(source) + 1 - start - agreed))
        operands.append(np.int64(source[start : start + agreed] + rest))
    attributes = {"min_ngram_size": sizes[0], "max_ngram_size": sizes[1]}
    check("BifurcationDetector", operands, attributes, (INT64, INT64))


@few
@given(st.sampled_from([(3, 4), (1, 3), (4, 1), (1, 1), (1, 3, 5)]), st.sampled_from(["drawn", "tied", "infinite"]))
def test_dynamic_time_warping(shape: tuple, costs: str) -> None:
    x = draw(*shape) if costs == "drawn" else RNG.integers(0, 2, shape).astype(np.float32)
    check("DynamicTimeWarping", [np.where(x > 0, np.inf, x) if costs == "infinite" else x], types=(INT32,))


@few
@given(st.sampled_from([1, 3]), st.booleans())
def test_word_conv_embedding(width: int, sized: bool) -> None:
    words = RNG.integers(0, 4, (4, 5)).astype(np.int32)
    words[:, 0] = np.maximum(words[:, 0], 1)  # of a word that begins with none, ONNX Runtime says nothing
    words[0, 1:] = 0
    attributes = {"char_embedding_size": 3, "conv_window_size": width, "embedding_size": 2} if sized else {}
    check("WordConvEmbedding", [words, draw(2, 1, width, 3), draw(2), draw(4, 3)], attributes)


def test_a_word_that_begins_with_no_character_is_zero() -> None:
    operands = [np.int32([[0, 1, 2], [1, 0, 0]]), draw(2, 1, 2, 3), draw(2), draw(4, 3)]
    (y,) = run_node("WordConvEmbedding", operands, output_types=[FLOAT], **CONTRIB)
    assert not y[0].any()
    assert y[1].all()


# ---- masks, pads, sparse matrices ----------------------------------------------------------------------------------


@few
@given(
    st.sampled_from(
        [
            ((2, 2, 6), [3], [2], [1, 1]),
            ((2, 1, 4, 5), [2, 3], [1, 2], [1, 0, 0, 1]),
            ((1, 1, 3, 3, 4), [2, 2, 2], [1, 1, 1], [0] * 6),
        ]
    ),
    st.sampled_from(["NOTSET", "SAME_UPPER"]),
    st.sampled_from([0.1, 0.5, 1.0]),
)
def test_max_pool_with_mask(shapes: tuple, auto_pad: str, share: float) -> None:
    shape, kernel, strides, pads = shapes
    mask = (RNG.random((1, 1, *shape[2:])) < share).astype(np.int32)
    attributes = {"kernel_shape": kernel, "strides": strides}
    attributes |= {"pads": pads} if auto_pad == "NOTSET" else {"auto_pad": auto_pad}
    check("MaxpoolWithMask", [draw(*shape), mask], attributes)


def test_max_pool_with_masks_of_channels() -> None:
    x, mask = draw(2, 2, 5), RNG.integers(0, 2, (1, 2, 5)).astype(np.int32)
    (actual,) = run_node("MaxpoolWithMask", [x, mask], {"kernel_shape": [2]}, **CONTRIB)
    for channel in range(2):
        one = [x[:, channel : channel + 1], mask[:, channel : channel + 1]]
        assert_equal(
            actual[:, channel : channel + 1], *ort_node("MaxpoolWithMask", one, {"kernel_shape": [2]}, **CONTRIB)
        )


@few
@given(
    st.sampled_from([[0, 0, 0, 0], [1, 0, 1, 2], None]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.booleans()
)
def test_conv_transpose_with_dynamic_pads(pads: list, stride: int, group: int, biased: bool) -> None:
    operands = [draw(2, 2, 3, 4), draw(2, 2, 3, 2), np.int64([0] * 4 if pads is None else pads)]
    operands += [draw(2 * group)] if biased else []
    attributes = {"strides": [stride] * 2, "group": group, "output_padding": [stride - 1] * 2}
    check("ConvTransposeWithDynamicPads", operands, attributes)
    if pads is None and not biased:
        options = {**CONTRIB, "compiled": True}
        absent = run_node("ConvTransposeWithDynamicPads", operands[:2], attributes, **options)
        assert_equal(absent, run_node("ConvTransposeWithDynamicPads", operands, attributes, **CONTRIB))


@few
@given(
    st.sampled_from([np.float32, np.float64, np.int32, np.int64]),
    st.sampled_from([0, 1]),
    st.sampled_from([0, 1]),
    st.sampled_from([1.0, 2.0]),
)
def test_sparse_to_dense_matmul(kind: type, transpose_a: int, transpose_b: int, alpha: float) -> None:
    a, b = RNG.integers(-3, 4, (2, 3, 3)).astype(kind)  # ONNX Runtime's shape inference knows no transpose
    a *= RNG.random(a.shape) < 0.5
    attributes = {"transA": transpose_a, "transB": transpose_b, "alpha": alpha}
    model = one_node("SparseToDenseMatMul", [a, b], attributes, **CONTRIB)
    element = model.graph.input[0].type.tensor_type.elem_type
    with jax.enable_x64(True):
        (actual,) = run_node("SparseToDenseMatMul", [a, b], attributes, **CONTRIB)
    sparse = onnx.helper.make_sparse_tensor_value_info("x0", element, a.shape)
    model.graph.input[0].CopyFrom(sparse)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    cpu = onnxruntime.OrtDevice.make("cpu", 0)
    places = np.argwhere(a)
    tensor = onnxruntime.SparseTensor.sparse_coo_from_numpy(
        np.array(a.shape, np.int64), a[tuple(places.T)], places.reshape(-1), cpu
    )
    feeds = {
        "x0": onnxruntime.OrtValue.ort_value_from_sparse_tensor(tensor),
        "x1": onnxruntime.OrtValue.ortvalue_from_numpy(b),
    }
    (expected,) = session.run_with_ort_values(None, feeds)
    expected = expected.numpy()  # in which ONNX Runtime forgets the factor unless it is float32
    assert_equal(actual, expected if kind is np.float32 else (expected * alpha).astype(kind))


def test_a_sparse_initializer_is_a_dense_operand() -> None:
    b = draw(3, 2)
    model = one_node("SparseToDenseMatMul", [np.zeros((2, 3), np.float32), b], **CONTRIB)
    values = onnx.helper.make_tensor("x0", FLOAT, [2], [2.0, -1.0])
    place = onnx.helper.make_tensor("", INT64, [2, 2], [0, 1, 1, 2])
    model.graph.input.pop(0)
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, place, [2, 3]))
    (y,) = transmuter.run(transmuter.load(model), {"x1": b}).values()
    assert_equal(y, np.float32([[0, 2, 0], [0, 0, -1]]) @ b)


# ---- gradients -----------------------------------------------------------------------------------------------------

GRADIENTS = {
    "NGramRepeatBlock": ([np.int64([[0, 1, 0]]), draw(1, 3)], {"ngram_size": 2}),
    "WordConvEmbedding": ([np.int32([[1, 2, 0], [0, 1, 1]]), draw(2, 1, 2, 3), draw(2), draw(4, 3)], {}),
    "MaxpoolWithMask": ([draw(1, 2, 5), np.int32([[[1, 1, 0, 0, 1]]])], {"kernel_shape": [2]}),
    "SparseToDenseMatMul": ([draw(2, 3), draw(3, 2)], {}),
}


@pytest.mark.parametrize("op", GRADIENTS)
def test_gradients(op: str) -> None:
    operands, attributes = GRADIENTS[op]
    wide = [x if x.dtype.kind == "i" else x.astype(np.float64) for x in operands]
    with jax.enable_x64(True):
        model = transmuter.load(one_node(op, wide, attributes, output_types=[11], **CONTRIB), compute_type=None)
        feeds = {f"x{i}": jnp.asarray(x) for i, x in enumerate(wide)}
        floats = {name: x for name, x in feeds.items() if x.dtype == np.float64}

        def call(floats: dict) -> jax.Array:
            y = model.apply({}, {**feeds, **floats})["y0"]
            return jnp.where(jnp.isneginf(y), 0, y)

        check_grads(jax.jit(call), (floats,), 1, ["rev"])

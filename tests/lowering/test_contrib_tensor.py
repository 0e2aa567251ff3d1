"""Small operators of com.microsoft: against ONNX Runtime, or plain NumPy where it has none on the CPU; gradients."""

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
from onnx import TensorProto as T

import transmuter
from transmuter.lowering import contrib_tensor

F32 = np.float32
INT_MAX = 2**63 - 1
CONTRIB = {"domain": "com.microsoft"}
EDGES = st.sampled_from([0.0, -0.0, 1.5, -2.0, 3.0, np.inf, -np.inf, np.nan])
few = settings(max_examples=12, deadline=None)


def assert_same(op: str, inputs: list[Any], attributes: dict[str, Any] | None = None, **options: Any) -> None:
    expected = ort_node(op, inputs, attributes, **CONTRIB, **options)
    actual = run_node(op, inputs, attributes, **CONTRIB, **options)
    for result, wanted in zip(actual, expected, strict=True):
        assert_equal(result, np.asarray(wanted), rtol=1e-5, atol=1e-5)


def filled(shape: tuple[int, ...], kind: Any = F32) -> np.ndarray:
    return np.arange(math.prod(shape)).reshape(shape).astype(kind)


COMPILED = {
    "CDist": ([filled((2, 3)), filled((1, 3))], {"metric": "euclidean"}),
    "CropAndResize": (
        [filled((1, 2, 3, 3)), np.array([[0, 0.1, 0.8, 1]], F32), np.zeros(1, np.int32), np.array([2, 3], np.int32)],
        {},
    ),
    "ExpandDims": ([filled((2, 3)), np.array(-1, np.int32)], {}),
    "GatherND": ([filled((2, 3)), np.array([[1], [-1]])], {}),
    "Inverse": ([np.eye(2, dtype=F32) * 2], {}),
    "Pad": ([filled((2, 3)), np.array([0, 1, 1, 0]), np.array(2, F32)], {}),
    "Range": ([np.array(v) for v in (1, 7, 2)], {}),
    "SampleOp": ([filled((2, 3))], {}),
    "Trilu": ([filled((2, 3)), np.array(1)], {}),
    "UnfoldTensor": ([filled((2, 3))], {"size": 2}),
    "Unique": ([np.array([2, 1, 2], F32)], {}),
}


@pytest.mark.parametrize("op", COMPILED)
def test_compiled_operators(op: str) -> None:
    """They break the graph where a shape depends on an input's contents."""
    inputs, attributes = COMPILED[op]
    options = {"outputs": 3, "output_types": [T.FLOAT, T.INT64, T.INT64]} if op == "Unique" else {}
    expected = ort_node(op, inputs, attributes, **CONTRIB, **options)
    actual = run_node(op, inputs, attributes, compiled=True, **CONTRIB, **options)
    for result, wanted in zip(actual, expected, strict=True):
        assert_equal(result, wanted, rtol=1e-5, atol=1e-5)


# ---- siblings of standard operators ---------------------------------------------------------------------------------


@few
@given(
    shape=st.sampled_from([(2, 3), (1, 3), (0, 3)]),
    pads=st.lists(st.integers(-1, 2), min_size=4, max_size=4),
    mode=st.sampled_from(["constant", "edge", "reflect"]),
    value=st.sampled_from([None, 1.5, [-0.0], [np.nan]]),
    as_row=st.booleans(),
)
def test_pad(shape: tuple[int, int], pads: list[int], mode: str, value: Any, as_row: bool) -> None:
    kept = [d + min(begin, 0) + min(end, 0) for d, begin, end in zip(shape, pads, pads[2:], strict=False)]
    if min(kept) < 0 or (mode != "constant" and min(kept) == 0):
        return
    if mode == "reflect" and any(max(pair) >= d for d, *pair in zip(kept, pads, pads[2:], strict=False)):
        return
    inputs = [filled(shape), np.array([pads] if as_row else pads)]
    inputs += [] if value is None else [np.array(value, F32)]
    assert_same("Pad", inputs, {"mode": mode}, known=[1])


@few
@given(
    start=st.integers(-5, 5),
    limit=st.integers(-5, 5),
    delta=st.sampled_from([None, 1, 2, -1, -3]),
    kind=st.sampled_from([np.int16, np.int32, np.int64, F32, np.float64]),
    shape=st.sampled_from([(), (1,)]),
)
def test_range(start: int, limit: int, delta: int | None, kind: Any, shape: tuple[int, ...]) -> None:
    inputs = [np.full(shape, v, kind) for v in (start, limit, delta) if v is not None]
    assert_same("Range", inputs, known=range(len(inputs)))


@few
@given(
    shape=st.sampled_from([(2, 3), (3, 2, 2), (0, 3)]),
    k=st.sampled_from([None, 0, 1, -1, 5, -5]),
    upper=st.sampled_from([None, 0, 1]),
    kind=st.sampled_from([F32, np.int64]),
)
def test_triangles(shape: tuple[int, ...], k: int | None, upper: int | None, kind: Any) -> None:
    inputs = [filled(shape, kind) + 1] + ([] if k is None else [np.array(k)])
    assert_same("Trilu", inputs, {} if upper is None else {"upper": upper})


@few
@given(axis=st.integers(-3, 2), kind=st.sampled_from([F32, np.int8, object]), shape=st.sampled_from([(2, 3), (0, 1)]))
def test_expanded_dimensions(axis: int, kind: Any, shape: tuple[int, int]) -> None:
    x = filled(shape, str).astype(object) if kind is object else filled(shape, kind)
    assert_same("ExpandDims", [x, np.array(axis, np.int32)], known=[1])


@few
@given(values=st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0, np.inf]), max_size=6))
def test_unique_in_order_of_occurrence(values: list[float]) -> None:
    assert_same("Unique", [np.array(values, F32)], outputs=3, output_types=[T.FLOAT, T.INT64, T.INT64])


@few
@given(
    indices=st.sampled_from([[[0], [-1]], [[1, 2], [-2, -3]], [[[0, 1]]], np.zeros((0, 1)), [1]]),
    kind=st.sampled_from([np.int32, np.int64]),
    of=st.sampled_from([F32, object]),
)
def test_gathered_slices(indices: Any, kind: Any, of: Any) -> None:
    x = filled((2, 3), F32) if of is F32 else filled((2, 3), str).astype(object)
    assert_same("GatherND", [x, np.array(indices).astype(kind)])


@few
@given(
    shape=st.sampled_from([(4, 3), (3,), (2, 4, 0)]),
    dim=st.integers(-3, 2),
    size=st.integers(1, 3),
    step=st.integers(1, 4),
    kind=st.sampled_from([F32, np.int64]),
)
def test_unfolded(shape: tuple[int, ...], dim: int, size: int, step: int, kind: Any) -> None:
    if not -len(shape) <= dim < len(shape) or size > shape[dim]:
        return
    assert_same("UnfoldTensor", [filled(shape, kind)], {"dim": dim, "size": size, "step": step})


def test_slices_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(transmuter.TransmuterError, match="do not fit a dimension of 3"):
        run_node("UnfoldTensor", [filled((2, 3))], {"size": 4}, **CONTRIB)


def test_echo() -> None:
    for x in (filled((2, 3)), filled((0, 3)), filled(())):
        assert_same("SampleOp", [x])


# ---- embedding ------------------------------------------------------------------------------------------------------


@few
@given(indices=st.sampled_from([[0, 2, 2], 2, []]), kind=st.sampled_from([F32, np.int8]))
def test_embedding(indices: Any, kind: Any) -> None:
    weight, indices = filled((4, 2), kind), np.array(indices, np.int64)
    for extra in ([], [np.array(2)], [np.array(-1), np.array(True)], [None, np.array(False)]):
        (y,) = run_node("TorchEmbedding", [weight, indices, *extra], **CONTRIB)
        assert_equal(y, weight[indices])


def test_gradients_of_an_embedding() -> None:
    """A padding row has none, and that of a row which occurs twice is halved on request."""
    indices = np.array([0, 2, 2, 1])

    def gradient(*options: Any) -> Any:
        return jax.grad(lambda w: contrib_tensor.TorchEmbedding(w, indices, *options).sum())(jnp.ones((3, 1)))[:, 0]

    np.testing.assert_array_equal(gradient(), [1, 1, 2])
    np.testing.assert_array_equal(gradient(np.array(2)), [1, 1, 0])
    np.testing.assert_array_equal(gradient(None, np.array(True)), [1, 1, 1])
    np.testing.assert_array_equal(gradient(np.array(0), np.array(True)), [0, 1, 1])


# ---- numbers --------------------------------------------------------------------------------------------------------


@few
@given(
    values=st.lists(st.lists(EDGES, max_size=2), min_size=1, max_size=3),
    only=st.sampled_from([None, "isinf_only", "isnan_only"]),
    kind=st.sampled_from([np.float16, F32, np.float64]),
)
def test_whether_all_is_finite(values: list[list[float]], only: str | None, kind: Any) -> None:
    wrong = {"isinf_only": math.isinf, "isnan_only": math.isnan, None: lambda v: not math.isfinite(v)}[only]
    inputs = [np.array(v, kind) for v in values]
    attributes = {only: 1} if only else {}
    (y,) = run_node("IsAllFinite", inputs, attributes, output_types=[T.BOOL], **CONTRIB)
    assert_equal(y, np.array(not any(wrong(v) for row in values for v in row)))


def test_what_is_checked_for_is_one_thing() -> None:
    with pytest.raises(transmuter.TransmuterError, match="exclude each other"):
        run_node("IsAllFinite", [filled((2,))], {"isinf_only": 1, "isnan_only": 1}, output_types=[T.BOOL], **CONTRIB)


@pytest.mark.parametrize("kind", [np.float16, F32, np.float64])
@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 1), (0, 2, 2)])
def test_inverse(kind: Any, shape: tuple[int, ...]) -> None:
    """In float16, ONNX Runtime rounds each step."""
    x = (np.random.default_rng(1).normal(size=shape) + 2 * np.eye(shape[-1])).astype(kind)
    (wanted,), (y,) = (f("Inverse", [x], **CONTRIB) for f in (ort_node, run_node))
    assert_equal(y, wanted, rtol=2e-2 if kind is np.float16 else 1e-5, atol=2e-2 if kind is np.float16 else 1e-6)


def test_gradients_of_the_inverse() -> None:
    x = np.random.default_rng(1).normal(size=(2, 3, 3)) + 3 * np.eye(3)
    with jax.enable_x64(True):
        check_grads(contrib_tensor.Inverse, (jnp.asarray(x),), 1, ["rev"])


@few
@given(
    rows=st.sampled_from([(2, 3), (1, 1), (0, 3)]),
    features=st.sampled_from([1, 4, 9]),
    kind=st.sampled_from([F32, np.float64]),
    metric=st.sampled_from([None, "euclidean", "sqeuclidean"]),
    seed=st.integers(0, 99),
)
def test_distances(rows: tuple[int, int], features: int, kind: Any, metric: str | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-3, 4, (n, features)).astype(kind) for n in rows)
    assert_same("CDist", [a, b], {"metric": metric} if metric else {})


@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
def test_gradients_of_distances_even_of_equal_points(metric: str) -> None:
    def distance(a: Any, b: Any) -> Any:
        return contrib_tensor.CDist(a, b, metric=metric)

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        a, b = (jnp.asarray(rng.normal(size=(n, 3))) for n in (2, 4))
        check_grads(distance, (a, b), 1, ["rev"])
        for gradient in jax.grad(lambda *x: distance(*x).sum(), (0, 1))(a, a):
            assert np.isfinite(gradient).all()


def test_other_distances_are_refused() -> None:
    with pytest.raises(transmuter.TransmuterError, match="'cosine' is not supported"):
        run_node("CDist", [filled((2, 3)), filled((2, 3))], {"metric": "cosine"}, **CONTRIB)


def softmax_of_rows(data: np.ndarray, bias: np.ndarray, axis: int, is_inner: int) -> np.ndarray:
    """Row by row, with the bias whose turn it is."""
    rows = data.astype(np.float64).reshape(math.prod(data.shape[:axis]), -1)
    biases = bias.astype(np.float64).reshape(-1, rows.shape[1])
    for i, row in enumerate(rows):
        row += biases[i * len(biases) // len(rows) if is_inner else i % len(biases)]
        row[:] = np.exp(row - row.max())
        row /= row.sum()
    return rows.reshape(data.shape).astype(data.dtype)


@few
@given(
    case=st.sampled_from(
        [
            ((2, 3, 4), (2, 1, 4), 2, 1),
            ((2, 3, 4), (2, 1, 4), -1, 1),
            ((2, 3, 4), (3, 4), 2, 0),
            ((2, 3, 4), (1, 3, 4), 1, 0),
            ((2, 3, 4), (2, 3, 4), 2, 1),
            ((2, 3, 4), (4,), 2, 0),
            ((2, 2, 3, 4), (2, 1, 1, 4), 3, 1),
        ]
    ),
    kind=st.sampled_from([np.float16, F32, np.float64]),
    seed=st.integers(0, 99),
)
def test_softmax_of_a_biased_batch(case: tuple[Any, ...], kind: Any, seed: int) -> None:
    shape, bias_shape, axis, is_inner = case
    rng = np.random.default_rng(seed)
    data, bias = rng.normal(size=shape).astype(kind), rng.normal(size=bias_shape).astype(kind)
    bias[..., 0] = -np.inf
    (y,) = run_node("BiasSoftmax", [data, bias], {"axis": axis, "is_inner_broadcast": is_inner}, **CONTRIB)
    tolerance = 2e-3 if kind is np.float16 else 1e-6
    wanted = softmax_of_rows(data, bias, axis % len(shape), is_inner)
    assert_equal(y, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("axis", "is_inner"), [(2, 1), (2, 0), (1, 0)])
def test_gradients_of_the_softmax_even_of_masked_rows(axis: int, is_inner: int) -> None:
    def softmax(x: Any, bias: Any) -> Any:
        return contrib_tensor.BiasSoftmax(x, bias, axis=axis, is_inner_broadcast=is_inner)

    rng = np.random.default_rng(0)
    bias_shape = {(2, 1): (2, 1, 4), (2, 0): (3, 4), (1, 0): (1, 3, 4)}[axis, is_inner]
    with jax.enable_x64(True):
        data, bias = (jnp.asarray(rng.normal(size=s)) for s in ((2, 3, 4), bias_shape))
        check_grads(softmax, (data, bias), 1, ["rev"])
        gradient = jax.grad(lambda x: softmax(x, bias - np.inf)[0, 0, 0])(data)
    assert np.isfinite(gradient).all()


# ---- images ---------------------------------------------------------------------------------------------------------


@few
@given(
    shape=st.sampled_from([(2, 2, 3, 4), (1, 1, 1, 1)]),
    rois=st.lists(
        st.lists(st.sampled_from([-0.25, 0.0, 0.3, 0.5, 1.0, 1.2]), min_size=4, max_size=4), min_size=2, max_size=2
    ),
    size=st.sampled_from([(2, 3), (1, 3)]),
    mode=st.sampled_from([None, "nearest", "bilinear"]),
    outside=st.sampled_from([None, -7.5]),
    seed=st.integers(0, 99),
)
def test_crops(shape: tuple[int, ...], rois: Any, size: tuple[int, int], mode: Any, outside: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, rois = rng.normal(size=shape).astype(F32), np.array(rois, F32)
    images = rng.integers(0, shape[0], len(rois)).astype(np.int32)
    given = {"mode": mode, "extrapolation_value": outside}
    inputs = [x, rois, images, np.array(size, np.int32)]
    assert_same("CropAndResize", inputs, {k: v for k, v in given.items() if v is not None}, known=[3])


def test_gradients_of_crops() -> None:
    def crop(x: Any, rois: Any) -> Any:
        return contrib_tensor.CropAndResize(x, rois, np.array([1, 0], np.int32), np.array([2, 3]))

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, rois = jnp.asarray(rng.normal(size=(2, 2, 4, 5))), jnp.asarray([[0.1, 0.2, 0.9, 0.7], [0.4, 0.3, 0.6, 1.3]])
        check_grads(crop, (x, rois), 1, ["rev"])


def test_another_mode_of_crops_is_refused() -> None:
    inputs = [filled((1, 1, 2, 2)), filled((1, 4)), np.zeros(1, np.int32), np.array([1, 1], np.int32)]
    with pytest.raises(transmuter.TransmuterError, match="not bilinear or nearest"):
        run_node("CropAndResize", inputs, {"mode": "cubic"}, known=[3], **CONTRIB)


# ---- dropout --------------------------------------------------------------------------------------------------------

KINDS = {"BiasDropout": False, "BitmaskBiasDropout": True, "BitmaskDropout": True}


def bits(mask: np.ndarray, count: int) -> np.ndarray:
    """The first `count` bits of 32-bit words, lowest first."""
    return np.array([bool(mask[i // 32] >> (i % 32) & 1) for i in range(count)])


@few
@given(
    op=st.sampled_from(list(KINDS)),
    shape=st.sampled_from([(7, 9), (2, 16), (0, 3)]),
    ratio=st.sampled_from([None, 0.0, 0.25]),
    training=st.sampled_from([None, False, True]),
    has_residual=st.booleans(),
    kind=st.sampled_from([np.float16, F32]),
)
def test_dropout(op: str, shape: Any, ratio: float | None, training: Any, has_residual: bool, kind: Any) -> None:
    """What the mask keeps is scaled, and what it does not is 0, before the residual comes in."""
    rng = np.random.default_rng(0)
    x, bias, residual = (rng.normal(size=s).astype(kind) for s in (shape, shape[-1:], shape))
    settings = [None if ratio is None else np.array(ratio, kind), None if training is None else np.array(training)]
    operands = [x] if op == "BitmaskDropout" else [x, bias, residual if has_residual else None]
    mask_type = T.UINT32 if KINDS[op] else T.BOOL
    y, mask = run_node(
        op,
        [*operands, *settings],
        {"seed": 3},
        outputs=2,
        output_types=[T.FLOAT16 if kind is np.float16 else T.FLOAT, mask_type],
        **CONTRIB,
    )
    kept = bits(mask, x.size).reshape(shape) if KINDS[op] else mask
    assert mask.shape == ((-(-x.size // 32),) if KINDS[op] else shape)
    assert kept.all() or (training and ratio != 0)
    rate = (0.5 if ratio is None else ratio) if training else 0.0
    total = x if op == "BitmaskDropout" else x + bias
    wanted = np.where(kept, total / kind(1 - rate), kind(0))
    wanted = wanted + residual if op != "BitmaskDropout" and has_residual else wanted
    assert_equal(y, wanted.astype(kind), rtol=2e-3, atol=2e-3)


def test_a_bitmask_holds_the_bits_of_the_mask() -> None:
    x, ratio, training = np.ones((5, 13), F32), np.array(0.5, F32), np.array(True)
    types = {"outputs": 2, "output_types": [T.FLOAT, T.UINT32]}
    y, mask = run_node("BitmaskDropout", [x, ratio, training], {"seed": 1}, **types, **CONTRIB)
    np.testing.assert_array_equal(bits(mask, x.size), (y != 0).reshape(-1))
    assert 10 < (y != 0).sum() < 55


def test_gradients_of_dropout() -> None:
    def dropped(x: Any, bias: Any, residual: Any) -> Any:
        key = jax.random.key(0)
        return contrib_tensor.BiasDropout(x, bias, residual, np.array(0.5), np.array(True), seed=3, key=key)[0]

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        check_grads(dropped, tuple(jnp.asarray(rng.normal(size=s)) for s in ((3, 4), (4,), (3, 4))), 1, ["rev"])

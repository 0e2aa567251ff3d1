"""Operators of com.microsoft that fuse a few standard ones: against ONNX Runtime, or plain NumPy where it has none."""

from __future__ import annotations

import functools
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

from transmuter.lowering import elementwise, linear, normalization, signal

F32 = np.float32
CONTRIB = {"domain": "com.microsoft"}
few = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 99)
EDGES = st.sampled_from([0.0, -0.0, 1.0, -1.5, 0.7, 20.0, -20.0, 1e30, -1e30, np.inf, np.nan])


def assert_same(op: str, inputs: list[Any], attributes: dict[str, Any] | None = None, tolerance: float = 1e-5) -> None:
    (wanted,), (actual,) = (f(op, inputs, attributes, **CONTRIB) for f in (ort_node, run_node))
    assert_equal(actual, wanted, rtol=tolerance, atol=tolerance)


def drawn(seed: int, *shapes: tuple[int, ...], kind: Any = F32) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(kind) for shape in shapes]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))) / 2


def fast_gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))) / 2


# ---- activations ----------------------------------------------------------------------------------------------------


@few
@given(
    op=st.sampled_from(["Gelu", "QuickGelu", "FastGelu", "BiasGelu"]),
    values=st.lists(EDGES, min_size=6, max_size=6),
    is_empty=st.booleans(),
    bias=st.booleans(),
    alpha=st.sampled_from([None, 1.0, -0.5]),
)
def test_activations_at_their_edges(op: str, values: list[float], is_empty: bool, bias: bool, alpha: Any) -> None:
    x = np.array(values, F32).reshape(2, 3)[: 0 if is_empty else 2]
    inputs = [x, np.array([0.5, -1, 0], F32)] if op == "BiasGelu" or (op == "FastGelu" and bias) else [x]
    assert_same(op, inputs, {"alpha": alpha} if op == "QuickGelu" and alpha else {})


@few
@given(op=st.sampled_from(["BiasAdd", "BiasSplitGelu"]), kind=st.sampled_from([np.float16, F32]), seed=seeds)
def test_biases_of_images(op: str, kind: Any, seed: int) -> None:
    x, bias, skip = drawn(seed, (2, 3, 4), (4,), (2, 3, 4), kind=kind)
    (y,) = run_node(op, [x, bias, skip] if op == "BiasAdd" else [x, bias], **CONTRIB)
    total = x.astype(np.float64) + bias
    wanted = total + skip if op == "BiasAdd" else total[..., :2] * gelu(total[..., 2:])
    tolerance = 4e-3 if kind is np.float16 else 1e-5
    assert_equal(y, wanted.astype(kind), rtol=tolerance, atol=tolerance)


# ---- matrices -------------------------------------------------------------------------------------------------------


@few
@given(a=st.booleans(), b=st.booleans(), alpha=st.sampled_from([None, 0.5, -2.0]), seed=seeds)
def test_transposed_products(a: bool, b: bool, alpha: float | None, seed: int) -> None:
    x, y = drawn(seed, (2, 4, 3) if a else (2, 3, 4), (2, 5, 4) if b else (2, 4, 5))
    attributes = {"transA": int(a), "transB": int(b)} | ({"alpha": alpha} if alpha else {})
    assert_same("TransposeMatMul", [x, y], attributes)


ACTIVATIONS = {
    "Relu": lambda y: np.maximum(y, 0),
    "Tanh": np.tanh,
    "LeakyRelu": lambda y: np.where(y < 0, 0.5 * y, y),
    "HardSigmoid": lambda y: np.clip(0.5 * y + 0.25, 0, 1),
    "Softmax": lambda y: np.exp(y) / np.exp(y).sum(-1, keepdims=True),
}


@few
@given(
    activation=st.sampled_from(list(ACTIVATIONS)), batch=st.booleans(), alpha=st.sampled_from([1.0, 0.5]), seed=seeds
)
def test_activated_products(activation: str, batch: bool, alpha: float, seed: int) -> None:
    """`transBatchA` takes the rows from the first axis."""
    a, b = drawn(seed, (3, 2, 4) if batch else (2, 3, 4), (2, 4, 5))
    attributes = {"activation": activation, "alpha": alpha, "transBatchA": int(batch)}
    if activation in ("LeakyRelu", "HardSigmoid"):
        attributes |= {"activation_alpha": 0.5, "activation_beta": 0.25}
    if activation == "Softmax":
        attributes["activation_axis"] = -1
    (y,) = run_node("FusedMatMulActivation", [a, b], attributes, **CONTRIB)
    product = alpha * np.matmul(a.swapaxes(0, 1) if batch else a, b, dtype=np.float64)
    assert_equal(y, ACTIVATIONS[activation](product).astype(F32), rtol=1e-5, atol=1e-5)


@few
@given(
    shape=st.sampled_from([(2, 3), (2, 1, 3), (0, 3)]),
    bias=st.booleans(),
    kind=st.sampled_from([F32, np.float16]),
    seed=seeds,
)
def test_a_product_with_fast_gelu(shape: Any, bias: bool, kind: Any, seed: int) -> None:
    x, w, b = drawn(seed, shape, (3, 4), (4,), kind=kind)
    (y,) = run_node("GemmFastGelu", [x, w, b] if bias else [x, w], **CONTRIB)
    wanted = fast_gelu(np.matmul(x, w, dtype=np.float64) + (b if bias else 0))
    tolerance = 4e-3 if kind is np.float16 else 1e-5
    assert_equal(y, wanted.astype(kind), rtol=tolerance, atol=tolerance)


# ---- signals and grids ----------------------------------------------------------------------------------------------


def transform(x: np.ndarray, sign: int) -> np.ndarray:
    """The discrete Fourier transform along the last axis, by its definition."""
    size = x.shape[-1]
    return x @ np.exp(sign * 2j * np.pi * np.outer(np.arange(size), np.arange(size)) / size)


@few
@given(
    shape=st.sampled_from([(2, 6), (4, 2), (1, 8)]),
    count=st.sampled_from([1, 2]),
    kind=st.sampled_from([F32, np.float64]),
    seed=seeds,
)
def test_transforms_of_real_signals(shape: tuple[int, int], count: int, kind: Any, seed: int) -> None:
    (x,) = drawn(seed, shape, kind=kind)
    full = transform(x.astype(np.complex128), -1)
    full = transform(full.T, -1).T if count == 2 else full
    half = full[:, : shape[1] // 2 + 1]
    (y,) = run_node("Rfft", [x], {"signal_ndim": count}, **CONTRIB)
    assert_equal(y, np.stack([half.real, half.imag], -1).astype(kind), rtol=1e-4, atol=1e-4)
    (back,) = run_node("Irfft", [y], {"signal_ndim": count}, **CONTRIB)
    assert_equal(back, x, rtol=1e-4, atol=1e-4)


@few
@given(
    op=st.sampled_from(["ComplexMul", "ComplexMulConj"]), shape=st.sampled_from([(3, 2), (1, 3, 2), (0, 2)]), seed=seeds
)
def test_products_of_pairs(op: str, shape: tuple[int, ...], seed: int) -> None:
    a, b = drawn(seed, shape, shape)
    (y,) = run_node(op, [a, b], **CONTRIB)
    wanted = np.zeros_like(a)
    for at in np.ndindex(shape[:-1]):
        z = complex(*a[at]) * (complex(*b[at]).conjugate() if op == "ComplexMulConj" else complex(*b[at]))
        wanted[at] = z.real, z.imag
    assert_equal(y, wanted, rtol=1e-5, atol=1e-6)


@settings(max_examples=6, deadline=None)
@given(
    mode=st.sampled_from([None, "bilinear", "nearest", "bicubic"]),
    padding=st.sampled_from([None, "zeros", "border", "reflection"]),
    align=st.sampled_from([None, 0, 1]),
    seed=seeds,
)
def test_sampled_grids(mode: str | None, padding: str | None, align: int | None, seed: int) -> None:
    (x,) = drawn(seed, (2, 2, 3, 4))
    grid = np.random.default_rng(seed).uniform(-1.5, 1.5, (2, 2, 5, 2)).astype(F32)
    if padding == "border" and mode == "bicubic":  # ONNX Runtime clips both coordinates as soon as one is outside
        grid = grid.clip(-0.999, 0.999)
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    assert_same("GridSample", [x, grid], {k: v for k, v in attributes.items() if v is not None}, 1e-4)


# ---- groups ---------------------------------------------------------------------------------------------------------


def grouped(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, groups: int, activation: int, epsilon: float) -> Any:
    """Group by group of the channels, which are on the last axis."""
    y, size = np.zeros(x.shape), x.shape[-1] // groups
    for image_, group in np.ndindex(x.shape[0], groups):
        channels = slice(group * size, (group + 1) * size)
        part = x[image_, ..., channels].astype(np.float64)
        scaled = (part - part.mean()) / math.sqrt(part.var() + epsilon)
        y[image_, ..., channels] = scaled * gamma[channels] + beta[channels]
    return y / (1 + np.exp(-y)) if activation else y


@few
@given(
    groups=st.sampled_from([1, 2, 4]),
    activation=st.sampled_from([0, 1]),
    last=st.sampled_from([None, 0, 1]),
    skip=st.sampled_from([None, (2, 3, 2, 4), (2, 1, 1, 4), (2, 4)]),
    has_bias=st.booleans(),
    epsilon=st.sampled_from([1e-5, 0.1]),
    kind=st.sampled_from([F32, np.float16]),
    seed=seeds,
)
def test_group_norms(
    groups: int, activation: int, last: Any, skip: Any, has_bias: bool, epsilon: float, kind: Any, seed: int
) -> None:
    """With channels first, a skip has the shape of the images."""
    skip = (2, 3, 2, 4) if skip and last == 0 else skip
    x, gamma, beta, bias = drawn(seed, (2, 3, 2, 4), (4,), (4,), (4,), kind=kind)
    (added,) = drawn(seed + 1, skip or (2, 4), kind=kind)
    total = x.astype(np.float64)
    if skip:
        total = total + added.reshape(2, 1, 1, 4) if len(skip) == 2 else total + added
        total = total + bias if has_bias else total
    wanted = [grouped(total, gamma, beta, groups, activation, epsilon), total]

    def order(v: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(v, -1, 1)) if last == 0 and v.ndim == 4 else v

    attributes = {"groups": groups, "activation": activation, "epsilon": epsilon}
    attributes |= {} if last is None else {"channels_last": last}
    if skip:
        inputs = [order(x), gamma, beta, order(added), *([bias] if has_bias else [])]
        outputs = run_node("SkipGroupNorm", inputs, attributes, outputs=2, **CONTRIB)
    else:
        outputs = run_node("GroupNorm", [order(x), gamma, beta], attributes, **CONTRIB)
    tolerance = 8e-3 if kind is np.float16 else 1e-4
    for actual, expected in zip(outputs, wanted, strict=False):
        assert_equal(actual, order(expected).astype(kind), rtol=tolerance, atol=tolerance)


# ---- gradients ------------------------------------------------------------------------------------------------------

GRADIENTS = {
    "BiasGelu": (elementwise.BiasGelu, [(2, 3), (3,)]),
    "FastGelu": (elementwise.FastGelu, [(2, 3), (3,)]),
    "QuickGelu": (functools.partial(elementwise.QuickGelu, alpha=1.702), [(2, 3)]),
    "BiasSplitGelu": (normalization.BiasSplitGelu, [(1, 2, 4), (4,)]),
    "ComplexMulConj": (signal.ComplexMulConj, [(3, 2), (3, 2)]),
    "Rfft": (signal.Rfft, [(2, 4)]),
    "Irfft": (lambda x: signal.Irfft(x, signal_ndim=1), [(2, 3, 2)]),
    "GemmFastGelu": (linear.GemmFastGelu, [(2, 3), (3, 2), (2,)]),
    "FusedGemm": (
        functools.partial(linear.FusedGemm, alpha=0.5, beta=2.0, transB=1, activation="Tanh"),
        [(2, 3), (2, 3), (2,)],
    ),
    "FusedMatMulActivation": (
        functools.partial(linear.FusedMatMulActivation, activation="Tanh", transBatchA=1, alpha=0.5),
        [(2, 1, 3), (1, 3, 2)],
    ),
    "SkipGroupNorm": (
        lambda *x: normalization.SkipGroupNorm(*x, groups=2, activation=1),
        [(1, 2, 1, 4), (4,), (4,), (1, 2, 1, 4), (4,)],
    ),
}


@pytest.mark.parametrize("op", GRADIENTS)
def test_gradients(op: str) -> None:
    function, shapes = GRADIENTS[op]
    with jax.enable_x64(True):
        check_grads(function, [jnp.asarray(x) for x in drawn(0, *shapes, kind=np.float64)], 1, ["rev"])


def test_a_constant_group_has_gradients() -> None:
    norm = functools.partial(normalization.GroupNorm, groups=2, activation=1)
    ones = jnp.ones((4,))
    gradient = jax.grad(lambda x: norm(x, ones, ones).sum())(jnp.ones((1, 2, 2, 4)))
    assert np.isfinite(gradient).all()

"""Operators of signal.py: NumPy's transforms and ONNX Runtime, gradients, x64 off."""

from __future__ import annotations

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
from transmuter.lowering import signal

RNG = np.random.default_rng(0)
CONTRIB = {"domain": "com.microsoft"}


def pairs(x: np.ndarray) -> np.ndarray:
    return np.stack([x.real, x.imag], -1)


@settings(max_examples=15, deadline=None)
@given(
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 1, -2, -3]),
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from([17, 20]),
)
def test_dft(real: bool, inverse: bool, onesided: bool, axis: int, length: int | None, opset: int) -> None:
    real = real if not onesided else not inverse
    x = RNG.standard_normal((4, 5, 3, 1 if real else 2))
    inputs = [x, None if length is None else np.array(length)]
    attributes = {"inverse": int(inverse), "onesided": int(onesided)}
    if opset == 17:
        attributes["axis"] = axis
    else:
        inputs.append(np.array(axis))
    known = [i for i, v in enumerate(inputs) if i and v is not None]
    (y,) = run_node("DFT", inputs, attributes, opset=opset, known=known)
    number, along = (x[..., 0] if real else x[..., 0] + 1j * x[..., 1]), axis % 4
    transform = {(0, 0): "fft", (1, 0): "ifft", (0, 1): "rfft", (1, 1): "irfft"}[inverse, onesided]
    if onesided and inverse and (length or 2 * (x.shape[axis] - 1)) < 1:
        return
    wanted = getattr(np.fft, transform)(number, length, along)
    np.testing.assert_allclose(y, wanted[..., None] if transform == "irfft" else pairs(wanted), atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([(2, 5, 3), (1, 1, 1), (2, 4), (0, 4)]),
    kind=st.sampled_from(["of reals", "of complex numbers", "inverse", "one-sided", "one-sided inverse"]),
    from_axis=st.integers(-2, 1),
    length=st.sampled_from([None, 1, 3, 8]),
    opset=st.sampled_from([17, 20]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_dft_as_onnx_runtime(shape, kind, from_axis, length, opset, dtype) -> None:
    """As the reference evaluator for one-sided inverses of a given length, which ONNX Runtime gets wrong."""
    parts = 1 if kind in ("of reals", "one-sided") else 2
    x, axis = RNG.standard_normal((*shape, parts)).astype(dtype), len(shape) - 1 if from_axis < 0 else from_axis
    axis = axis if axis < len(shape) else -2
    inputs = [x, None if length is None else np.array(length)]
    attributes = {"inverse": int("inverse" in kind), "onesided": int("one-sided" in kind)}
    if opset == 17:
        attributes["axis"] = axis
    else:
        inputs.append(np.array(axis))
    kwargs = {"opset": opset, "known": [i for i, v in enumerate(inputs) if i and v is not None]}
    assume(x.size and (kind != "one-sided inverse" or length or x.shape[axis] > 1))
    node = reference_node if kind == "one-sided inverse" and length else ort_node
    expected = node("DFT", inputs, attributes, **kwargs)
    assert_equal(run_node("DFT", inputs, attributes, **kwargs)[0], expected[0].astype(dtype), rtol=1e-4, atol=1e-5)


def test_dft_defaults() -> None:
    """Along axis 1 in version 17, along the last but one from 20 on."""
    x = RNG.standard_normal((2, 3, 4, 1)).astype(np.float32)
    for opset, axis in ((17, 1), (20, 2)):
        (y,) = run_node("DFT", [x], opset=opset)
        np.testing.assert_allclose(y, pairs(np.fft.fft(x[..., 0].astype(np.float64), axis=axis)), atol=1e-6)


def test_dft_refuses() -> None:
    x = RNG.standard_normal((2, 4, 2)).astype(np.float32)
    with pytest.raises(transmuter.TransmuterError, match="this one is complex"):
        run_node("DFT", [x], {"onesided": 1})
    with pytest.raises(transmuter.TransmuterError, match="no transform along it"):
        run_node("DFT", [x], {"axis": -1}, opset=17)


@settings(max_examples=15, deadline=None)
@given(
    samples=st.sampled_from([(2, 21), (1, 6), (1, 8)]),
    parts=st.sampled_from([1, 2]),
    onesided=st.integers(0, 1),
    step=st.sampled_from([1, 3, 10]),
    given_as=st.sampled_from(["a window", "a length", "both"]),
    length=st.sampled_from([1, 5, 6]),
    dtype=st.sampled_from([np.float32, np.float64]),
    compiled=st.booleans(),
)
def test_stft_as_onnx_runtime(samples, parts, onesided, step, given_as, length, dtype, compiled) -> None:
    x = RNG.standard_normal((*samples, 1 if onesided else parts)).astype(dtype)
    window = None if given_as == "a length" else RNG.random(length).astype(dtype)
    inputs = [x, np.array(step), window] + ([] if given_as == "a window" else [np.array(length)])
    kwargs = {"known": [1, 3][: len(inputs) - 2]}
    expected = ort_node("STFT", inputs, {"onesided": onesided}, **kwargs)
    actual = run_node("STFT", inputs, {"onesided": onesided}, **kwargs, compiled=compiled)
    assert_equal(actual, expected, rtol=1e-4, atol=1e-5)


def test_stft_of_a_complex_signal() -> None:
    x = RNG.standard_normal((1, 10, 2)).astype(np.float32)
    (y,) = run_node("STFT", [x, np.array(2), None, np.array(4)], {"onesided": 0}, known=[1, 3])
    number = x[0, :, 0] + 1j * x[0, :, 1]
    np.testing.assert_allclose(y[0, 3], pairs(np.fft.fft(number[6:])), atol=1e-5)
    with pytest.raises(transmuter.TransmuterError, match="does not fit frames of 5 samples"):
        run_node("STFT", [x, np.array(2), np.ones(4, np.float32), np.array(5)], known=[1, 3])


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.sampled_from([16, 64, 400]), st.sampled_from([8000, 16000]), st.sampled_from([1, 11]))
def test_mel_weights_as_onnx_runtime(count: int, length: int, rate: int, output: int) -> None:
    inputs = [
        np.array(count),
        np.array(length),
        np.array(rate),
        np.array(20, np.float32),
        np.array(rate / 2, np.float32),
    ]
    kwargs = {"known": range(5), "output_types": [output]}
    expected = ort_node("MelWeightMatrix", inputs, {"output_datatype": output}, **kwargs)[0]
    (y,) = run_node("MelWeightMatrix", inputs, {"output_datatype": output}, **kwargs)
    assert y.dtype == expected.dtype
    np.testing.assert_allclose(y, expected, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_contrib_transforms(count: int) -> None:
    x = RNG.standard_normal((2, 6, 8)).astype(np.float32)
    (y,) = run_node("Rfft", [x], {"signal_ndim": count}, **CONTRIB)
    np.testing.assert_allclose(y, pairs(np.fft.rfftn(x, axes=range(-count, 0))), atol=1e-5)
    (back,) = run_node("Irfft", [y], {"signal_ndim": count}, **CONTRIB)
    np.testing.assert_allclose(back, x, atol=1e-5)


def test_complex_products() -> None:
    a, b = (RNG.standard_normal((3, 2)).astype(np.float32) for _ in range(2))
    p, q = (x[:, 0] + 1j * x[:, 1] for x in (a, b))
    np.testing.assert_allclose(run_node("ComplexMul", [a, b], **CONTRIB)[0], pairs(p * q), rtol=1e-5)
    np.testing.assert_allclose(run_node("ComplexMulConj", [a, b], **CONTRIB)[0], pairs(p * q.conj()), rtol=1e-5)


def test_gradients() -> None:
    with jax.enable_x64(True):
        x, window = jnp.asarray(RNG.standard_normal((2, 12, 1))), jnp.asarray(RNG.random(4))
        check_grads(lambda x: signal.DFT_20(x, inverse=0, onesided=1), (x,), 1, ["rev"])
        check_grads(lambda x: signal.DFT_20(x.reshape(2, 6, 2), inverse=1, onesided=1), (x,), 1, ["rev"])
        check_grads(lambda x, w: signal.STFT(x, np.array(3), w, onesided=1), (x, window), 1, ["rev"])


@pytest.mark.parametrize("x64", [False, True])
def test_apply_under_jit(x64: bool) -> None:
    """Without x64 the transform is float32's."""
    x = RNG.standard_normal((1, 8, 1)).astype(np.float32)
    model = transmuter.load(one_node("DFT", [x], opset=20))
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        (y,) = jax.jit(lambda x: model.apply(model.params, {"x0": x}))(x).values()
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, pairs(np.fft.fft(x[..., 0])), atol=1e-5)

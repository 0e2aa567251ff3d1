"""Fourier transforms and what is built on them. A complex number is a pair along the last axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, dtype
from transmuter.lowering.platform import has_float64
from transmuter.lowering.registry import operator


def _real(samples: Array) -> Array:
    """Real samples as they are transformed: in float64 where there is one, for float32 leaves 1e-7 in a bin of zero."""
    return cast(samples, np.float64 if has_float64() else np.float32)


def _complex(pairs: Array) -> jax.Array:
    """Pairs as complex numbers. A complex signal is transformed as precisely as it comes, float32 at least."""
    pairs = pairs if pairs.dtype == np.float64 else cast(pairs, np.float32)
    return lax.complex(pairs[..., 0], pairs[..., 1])


def _pairs(x: jax.Array, out: np.dtype) -> Array:
    return cast(jnp.stack([x.real, x.imag], axis=-1), out)


def _int(known: Array | None) -> int | None:
    return None if known is None else int(known.reshape(()))


def _transform(x: Array, length: int | None, axis: int, inverse: int, onesided: int) -> Array:
    if x.shape[-1] not in (1, 2):
        raise ValueError(f"the last axis holds real and imaginary parts, but has {x.shape[-1]} elements")
    if axis in (-1, x.ndim - 1):
        raise ValueError("the last axis holds real and imaginary parts: there is no transform along it")
    axis %= x.ndim
    signal = _complex(x) if x.shape[-1] == 2 else _real(x[..., 0])
    if onesided and inverse:
        return cast(jnp.fft.irfft(signal, length, axis)[..., None], x.dtype)
    if onesided and x.shape[-1] == 2:
        raise ValueError("a one-sided transform is that of a real signal, but this one is complex")
    transform = jnp.fft.ifft if inverse else jnp.fft.rfft if onesided else jnp.fft.fft
    return _pairs(transform(signal, length, axis), x.dtype)


@operator(known=("dft_length",))
def DFT(input, dft_length=None, *, axis, inverse, onesided):
    return _transform(input, _int(dft_length), axis, inverse, onesided)


@operator(known=("dft_length", "axis"))
def DFT_20(input, dft_length=None, axis=None, *, inverse, onesided):
    """ONNX Runtime gets one-sided inverses wrong whose length is odd or needs more bins than there are."""
    return _transform(input, _int(dft_length), -2 if axis is None else _int(axis), inverse, onesided)


@operator(known=("frame_step", "frame_length"))
def STFT(signal, frame_step, window=None, frame_length=None, *, onesided):
    length = _int(frame_length) or (signal.shape[1] if window is None else window.shape[0])
    if window is not None and window.shape != (length,):
        raise ValueError(f"a window of shape {window.shape} does not fit frames of {length} samples")
    starts = np.arange(0, signal.shape[1] - length + 1, _int(frame_step))
    frames = jnp.take(signal, starts[:, None] + np.arange(length), axis=1, mode="clip")
    if window is not None:
        frames = frames * window[:, None]
    return _transform(frames, None, 2, 0, onesided)


@operator(
    known=("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz"), differentiable=False
)
def MelWeightMatrix(num_mel_bins, dft_length, sample_rate, lower_edge_hertz, upper_edge_hertz, *, output_datatype):
    """Triangles over the bins of a spectrum, whose edges are equally far apart in mel and rounded down to a bin."""
    count, length = _int(num_mel_bins), _int(dft_length)
    low, high = (2595 * np.log10(1 + float(edge.reshape(())) / 700) for edge in (lower_edge_hertz, upper_edge_hertz))
    mel = low + np.arange(count + 2) * (high - low) / (count + 2)
    edges = np.floor((length + 1) * 700 * (10 ** (mel / 2595) - 1) / _int(sample_rate))
    if edges[-1] > length // 2 + 1:
        raise ValueError(f"the filters reach bin {edges[-1]:g}, but the spectrum has {length // 2 + 1} bins")
    left, center, right = edges[:-2], edges[1:-1], edges[2:]
    bins = np.arange(length // 2 + 1)[:, None]
    rising = np.where(bins <= center, (bins - left) / np.maximum(center - left, 1), 0)
    falling = np.where(bins > center, (right - bins) / np.maximum(right - center, 1), 0)
    return cast(np.where(bins == center, 1, np.maximum(rising + falling, 0)), dtype(output_datatype))


# ---- contrib -------------------------------------------------------------------------------------------------------


def _signal_axes(x: Array, count: int, normalized: int, onesided: int) -> tuple[int, ...]:
    if normalized or not onesided:
        raise ValueError("only one-sided transforms without normalization are defined")
    return tuple(range(-count, 0))


@operator(domain="com.microsoft")
def Rfft(X, *, signal_ndim=1, normalized=0, onesided=1):
    return _pairs(jnp.fft.rfftn(_real(X), axes=_signal_axes(X, signal_ndim, normalized, onesided)), X.dtype)


@operator(domain="com.microsoft")
def Irfft(X, *, signal_ndim=1, normalized=0, onesided=1):
    return cast(jnp.fft.irfftn(_complex(X), axes=_signal_axes(X, signal_ndim, normalized, onesided)), X.dtype)


@operator(domain="com.microsoft")
def ComplexMul(A, B):
    return _pairs(_complex(A) * _complex(B), A.dtype)


@operator(domain="com.microsoft")
def ComplexMulConj(A, B):
    return _pairs(_complex(A) * _complex(B).conj(), A.dtype)

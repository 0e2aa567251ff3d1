"""com.microsoft: weights whose rows are packed in the formats of GGUF files, in blocks that have a scale each."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, dtype
from transmuter.lowering.few_bits import times_rows
from transmuter.lowering.registry import operator

# ---- bytes ---------------------------------------------------------------------------------------------------------


def _as(data: jax.Array, kind: type) -> jax.Array:
    """Bytes [..., n * size] as little-endian numbers [..., n] of a kind, in float32."""
    size = np.dtype(kind).itemsize
    grouped = data if size == 1 else data.reshape(*data.shape[:-1], -1, size)
    return cast(lax.bitcast_convert_type(grouped, kind), np.float32)


def _bits(data: jax.Array, first: int | np.ndarray, count: int) -> jax.Array:
    """`count` bits of each byte from bit `first` on, as int32."""
    return (cast(data, np.int32) >> first) & (2**count - 1)


def _nibbles(data: jax.Array) -> jax.Array:
    """The lower halves of the bytes [..., n], then the upper ones: [..., 2 n]."""
    return jnp.concatenate([_bits(data, 0, 4), _bits(data, 4, 4)], axis=-1)


def _scaled(scale: jax.Array, codes: jax.Array) -> jax.Array:
    return scale * cast(codes, np.float32)


# ---- blocks of 32 or 64 --------------------------------------------------------------------------------------------

_CURVE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int32)
"""What the 16 codes of the formats IQ4 stand for."""


def _q4_0(b: jax.Array) -> jax.Array:
    return _scaled(_as(b[..., :2], np.float16), _nibbles(b[..., 2:]) - 8)


def _q5_0(b: jax.Array) -> jax.Array:
    fifth = _bits(b[..., 2:6, None], np.arange(8), 1).reshape(*b.shape[:-1], 32)
    return _scaled(_as(b[..., :2], np.float16), (_nibbles(b[..., 6:]) | fifth << 4) - 16)


def _q8_0(b: jax.Array) -> jax.Array:
    return _as(b[..., :2], np.float16) * _as(b[..., 2:], np.int8)


def _iq4_nl(b: jax.Array) -> jax.Array:
    return _scaled(_as(b[..., :2], np.float16), jnp.take(_CURVE, _nibbles(b[..., 2:])))


def _q2_0(b: jax.Array) -> jax.Array:
    codes = _bits(b[..., 2:, None], np.arange(0, 8, 2), 2).reshape(*b.shape[:-1], 64)
    return _scaled(_as(b[..., :2], np.float16), codes - 1)


# ---- blocks of 256, in parts that have scales of their own ---------------------------------------------------------


def _whole(parts: jax.Array) -> jax.Array:
    return parts.reshape(*parts.shape[:-2], -1)


def _q5_k(b: jax.Array) -> jax.Array:
    """Eight parts, whose six-bit scales and minima lie in twelve bytes: the upper bits of the last four of each are the
    uppermost bits of the first four."""
    scale, minimum = _as(b[..., :2], np.float16), _as(b[..., 2:4], np.float16)
    first, second, third = jnp.split(b[..., 4:16], 3, axis=-1)
    scales = jnp.concatenate([_bits(first, 0, 6), _bits(third, 0, 4) | _bits(first, 6, 2) << 4], axis=-1)
    minima = jnp.concatenate([_bits(second, 0, 6), _bits(third, 4, 4) | _bits(second, 6, 2) << 4], axis=-1)
    codes = _nibbles(b[..., 48:].reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32)
    codes = codes | _bits(b[..., None, 16:48], np.arange(8)[:, None], 1) << 4
    return _whole(
        _scaled(_scaled(scale, scales)[..., None], codes) - _scaled(minimum, minima)[..., None],
    )


def _q6_k(b: jax.Array) -> jax.Array:
    """Two halves of four quarters of 32; sixteen neighbours share a scale."""
    low = _nibbles(b[..., :128].reshape(*b.shape[:-1], 2, 64)).reshape(*b.shape[:-1], 2, 4, 32)
    high = _bits(b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32), np.arange(0, 8, 2)[:, None], 2)
    scales = _as(b[..., 208:], np.float16) * _as(b[..., 192:208], np.int8)
    codes = ((low | high << 4) - 32).reshape(*b.shape[:-1], 16, 16)
    return _whole(_scaled(scales[..., None], codes))


def _iq4_xs(b: jax.Array) -> jax.Array:
    """Eight parts with six-bit scales, whose upper two bits come first."""
    upper = _bits(b[..., 2:4, None], np.arange(0, 8, 2), 2).reshape(*b.shape[:-1], 8)
    lower = _bits(b[..., 4:8, None], np.array([0, 4]), 4).reshape(*b.shape[:-1], 8)
    scales = _scaled(_as(b[..., :2], np.float16), (lower | upper << 4) - 32)
    codes = jnp.take(_CURVE, _nibbles(b[..., 8:].reshape(*b.shape[:-1], 8, 16)))
    return _whole(_scaled(scales[..., None], codes))


# ---- tables --------------------------------------------------------------------------------------------------------

_FORMATS: dict[int, tuple[int, int, Callable[[jax.Array], jax.Array]]] = {
    0: (1, 4, lambda b: _as(b, np.float32)),
    1: (1, 2, lambda b: _as(b, np.float16)),
    2: (32, 18, _q4_0),
    6: (32, 22, _q5_0),
    8: (32, 34, _q8_0),
    13: (256, 176, _q5_k),
    14: (256, 210, _q6_k),
    20: (32, 18, _iq4_nl),
    23: (256, 136, _iq4_xs),
    30: (1, 2, lambda b: _as(b, ml_dtypes.bfloat16)),
    42: (64, 18, _q2_0),
}
"""By the number of a format: the elements and the bytes of a block, and what unpacks blocks."""


def unpacked(data: Array, packed_type: int, width: int) -> jax.Array:
    """Packed rows [n, bytes] as rows [n, width] of float32."""
    if packed_type not in _FORMATS:
        raise ValueError(f"the packed format {packed_type} is not supported, only {', '.join(map(str, _FORMATS))}")
    elements, size, unpack = _FORMATS[packed_type]
    if width <= 0 or width % elements:
        raise ValueError(f"rows of {width} elements do not consist of blocks of {elements}")
    if data.shape[1] != width // elements * size:
        raise ValueError(f"rows of {data.shape[1]} bytes, not {width // elements * size}")
    blocks = jnp.reshape(data, (data.shape[0], width // elements, size))
    return unpack(blocks).reshape(data.shape[0], width)


@operator(domain="com.microsoft", differentiable=False)
def GatherPacked(data, indices, *, packed_type, K, output_dtype=16):
    """An index outside of the table reads row 0. Formats whose codes stand for points of a lattice (IQ2, IQ3) are not
    supported."""
    row = jnp.where((indices >= 0) & (indices < data.shape[0]), indices, 0)
    rows = unpacked(jnp.take(data, row.reshape(-1), axis=0, mode="clip"), packed_type, K)
    return cast(rows, dtype(output_dtype)).reshape(*indices.shape, K)


@operator(domain="com.microsoft")
def MatMulPacked(A, B, global_scale=None, *, packed_type, N, K, activation_type="none"):
    """Weights are rounded to the dtype of A first. There is no NVFP4 (40) among the formats."""
    if activation_type not in _ACTIVATIONS:
        raise ValueError(f"the activation is {activation_type!r}, not one of {', '.join(_ACTIVATIONS)}")
    if B.shape[0] != N:
        raise ValueError(f"{B.shape[0]} rows, not N = {N}")
    y = times_rows(A, B, lambda rows: cast(unpacked(rows, packed_type, K), A.dtype))
    y = cast(y if global_scale is None else y * cast(global_scale, y.dtype).reshape(()), A.dtype)
    return _ACTIVATIONS[activation_type](y)


def _squared_relu(x: jax.Array) -> jax.Array:
    positive = jax.nn.relu(x)
    return positive * positive


_ACTIVATIONS = {"none": lambda x: x, "silu": jax.nn.silu, "relu2": _squared_relu, "relu_squared": _squared_relu}

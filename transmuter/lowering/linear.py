"""Matrix products: MatMul, Gemm, Einsum, Det, their integer kinds, and the fused ones of ONNX Runtime."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, is_float, is_known
from transmuter.lowering.platform import on_cpu
from transmuter.lowering.registry import find, operator


def accumulator(x: Array) -> np.dtype:
    """The dtype in which a sum of products of `x` is accumulated: float32 for float16 and bfloat16."""
    return np.dtype(np.float32) if is_float(x) and x.dtype.itemsize < 4 else x.dtype


def matmul(a: Array, b: Array) -> jax.Array:
    """The matrix product as NumPy defines it, accumulated in float32 for halves.

    On the CPU a stack times one matrix is one product: the gradient of that matrix then is, too, and takes 0.6 of the
    time of one that sums over two axes, which XLA transposes for.
    """
    if a.ndim > 2 and b.ndim == 2 and on_cpu():
        rows = jnp.reshape(a, (math.prod(a.shape[:-1]), a.shape[-1]))
        return jnp.reshape(matmul(rows, b), (*a.shape[:-1], b.shape[-1]))
    wide, stack = accumulator(a), tuple(range(a.ndim - 2))
    if stack and a.ndim == b.ndim and a.shape[:-2] == b.shape[:-2]:  # jnp.matmul would squeeze stacks of one matrix
        numbers = (((a.ndim - 1,), (a.ndim - 2,)), (stack, stack))
        return cast(lax.dot_general(a, b, numbers, preferred_element_type=wide), a.dtype)
    return cast(jnp.matmul(a, b, preferred_element_type=wide), a.dtype)


@operator()
def MatMul(a, b):
    return matmul(a, b)


@operator()
def Einsum(*xs, equation):
    with jax.numpy_dtype_promotion("standard"):  # sums within one half operand are float32 when they meet another
        y = jnp.einsum(equation, *xs, preferred_element_type=accumulator(xs[0]))
    return cast(y, xs[0].dtype)


@operator()
def Det(x):
    return cast(jnp.linalg.det(cast(x, accumulator(x))), x.dtype)


# ---- Gemm ----------------------------------------------------------------------------------------------------------


@operator()
def Gemm(a, b, c, *, alpha, beta, transA, transB, broadcast):
    return Gemm_7(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)


@operator()
def Gemm_7(a, b, c=None, *, alpha, beta, transA, transB):
    b = jnp.swapaxes(b, 0, 1) if transB else b  # a weight once, beforehand: products of up to 500 rows take 0.7 so
    contracted = ((0 if transA else 1,), (0,))
    y = lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=accumulator(a))
    y = _scaled(y, alpha)
    if c is not None:
        y = y + _scaled(cast(c, y.dtype), beta)
    return cast(y, a.dtype)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    if factor == 1:
        return x
    if not is_float(x) and factor != int(factor):
        raise ValueError(f"a product of integers cannot be scaled by {factor}")
    return x * cast(np.asarray(factor if is_float(x) else int(factor)), x.dtype)


# ---- integers ------------------------------------------------------------------------------------------------------


def in_int8(x: Array, zero_point: Array | None) -> tuple[Array, Array]:
    """An 8-bit tensor as int8, and its zero point as int32; of uint8, both less 128."""
    shift = 128 if x.dtype == np.uint8 else 0
    zero = np.int32(-shift) if zero_point is None else cast(zero_point, np.int32) - np.int32(shift)
    return cast(cast(x, np.int16) - np.int16(shift), np.int8) if shift else x, zero


def integer_matmul(a: Array, b: Array, a_zero: Array, b_zero: Array) -> jax.Array:
    """The int32 product of int8 matrices less their zero points, each of which broadcasts with its matrix.

    Zero points multiply sums of rows and columns, so that the product itself is one of int8. On a CPU of two cores that
    takes 0.2 ms for 128x384x1536, one of float32 1.1 ms; but for a single row five times as long as for four.
    """
    if b.ndim == 1:
        return integer_matmul(a, b[:, None], a_zero, b_zero)[..., 0]
    rows = a.shape[:-1] if b.ndim == 2 else a.shape[-2:-1]
    if rows and set(rows) == {1}:
        a = lax.pad(a, np.zeros((), a.dtype), [*[(0, 0, 0)] * (a.ndim - 2), (0, 3, 0), (0, 0, 0)])
        return integer_matmul(a, b, a_zero, b_zero)[..., :1, :]
    total = jnp.matmul(a, b, preferred_element_type=np.int32)
    if not _is_zero(a_zero):
        total -= a_zero * jnp.sum(b, axis=-2, dtype=np.int32, keepdims=a.ndim > 1)
    if not _is_zero(b_zero):
        total -= b_zero * jnp.sum(cast(a, np.int32) - a_zero, axis=-1, dtype=np.int32, keepdims=True)
    return total


def _is_zero(zero_point: Array) -> bool:
    return is_known(zero_point) and not np.any(zero_point)


@operator()
def MatMulInteger(a, b, a_zero_point=None, b_zero_point=None):
    if a_zero_point is not None and a_zero_point.ndim == 1:  # one per row
        a_zero_point = a_zero_point[:, None] if a.ndim > 1 else a_zero_point
    (a, a_zero), (b, b_zero) = in_int8(a, a_zero_point), in_int8(b, b_zero_point)
    return integer_matmul(a, b, a_zero, b_zero)


@operator(domain="com.microsoft")
def MatMulInteger16(a, b):
    return jnp.matmul(cast(a, np.int32), cast(b, np.int32))


# ---- fused ---------------------------------------------------------------------------------------------------------


def activated(x: Array, name: str | None, **attributes: Any) -> jax.Array:
    """`x` through the activation operator that an attribute of a fused operator names; None leaves it as it is."""
    if not name:
        return x
    version = 10 if find("", name, 10) else 14  # in opset 10 the bounds of Clip are attributes still
    lowering = find("", name, version)
    if lowering is None:
        raise ValueError(f"{name!r} is no activation operator")
    given = {k: v for k, v in attributes.items() if v is not None and k in lowering.attributes}
    return lowering.function(x, **{**dict.fromkeys(lowering.attributes), **lowering.defaults(version), **given})


def _matrices(x: Array, transpose: int, transpose_batch: int) -> Array:
    """An operand of FusedMatMul as a stack of matrices."""
    if transpose_batch:
        x = jnp.moveaxis(x, 0, -2)
    return jnp.swapaxes(x, -1, -2) if transpose and x.ndim > 1 else x


@operator("FusedMatMul", "TransposeMatMul", "SparseToDenseMatMul", domain="com.microsoft")
def _fused_matmul(a, b, *, transA=0, transB=0, transBatchA=0, transBatchB=0, alpha=1.0):
    """A sparse operand is given as a dense array. ONNX Runtime scales the product of a sparse one in float32 only."""
    a, b = _matrices(a, transA, transBatchA), _matrices(b, transB, transBatchB)
    y = jnp.matmul(a, b, preferred_element_type=accumulator(a))
    return cast(_scaled(y, alpha), a.dtype)


@operator(domain="com.microsoft")
def FusedMatMulActivation(
    a,
    b,
    *,
    activation,
    transA=0,
    transB=0,
    transBatchA=0,
    transBatchB=0,
    alpha=1.0,
    activation_alpha=None,
    activation_beta=None,
    activation_gamma=None,
    activation_axis=None,
):
    y = _fused_matmul(a, b, transA=transA, transB=transB, transBatchA=transBatchA, transBatchB=transBatchB, alpha=alpha)
    return activated(
        y, activation, alpha=activation_alpha, beta=activation_beta, gamma=activation_gamma, axis=activation_axis
    )


@operator(domain="com.microsoft")
def FusedGemm(
    a,
    b,
    c=None,
    *,
    alpha=1.0,
    beta=1.0,
    transA=0,
    transB=0,
    activation=None,
    activation_alpha=None,
    activation_beta=None,
    activation_gamma=None,
):
    y = Gemm_7(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activated(y, activation, alpha=activation_alpha, beta=activation_beta, gamma=activation_gamma)


@operator(domain="com.microsoft")
def GemmFastGelu(x, w, bias=None):
    y = jnp.matmul(x, w, preferred_element_type=accumulator(x))
    if bias is not None:
        y = y + cast(bias, y.dtype)
    return cast(jax.nn.gelu(y, approximate=True), x.dtype)

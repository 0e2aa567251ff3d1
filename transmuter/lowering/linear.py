"""Matrix products: MatMul, Gemm, Einsum, Det, their integer kinds, and the fused ones of ONNX Runtime."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import Array, cast, is_float, is_known
from transmuter.lowering.registry import find, operator


def accumulator(x: Array) -> np.dtype:
    """The dtype in which a sum of products of `x` is accumulated: float32 for float16 and bfloat16."""
    return np.dtype(np.float32) if is_float(x) and x.dtype.itemsize < 4 else x.dtype


def matmul(a: Array, b: Array) -> jax.Array:
    """The matrix product as NumPy defines it, accumulated in float32 for halves."""
    return cast(jnp.matmul(a, b, preferred_element_type=accumulator(a)), a.dtype)


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
    contracted = ((0 if transA else 1,), (1 if transB else 0,))
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


def centred(x: Array, zero_point: Array | None) -> Array:
    """An 8-bit tensor less its zero point: int16, or as it is where the zero point is known to be zero."""
    if zero_point is None or (is_known(zero_point) and not np.any(zero_point)):
        return x
    return jnp.subtract(cast(x, np.int16), cast(zero_point, np.int16))


def exact_terms(a: Array, b: Array) -> int:
    """How many products of elements of `a` and `b`, 8-bit tensors or `centred` ones, float32 adds up without rounding.

    The CPU has no fast integer product, but exact float ones: 5 times as fast for matrices, 60 times for convolutions.
    """
    largest = [128 if x.dtype == np.int8 else 255 for x in (a, b)]
    return 2**24 // (largest[0] * largest[1])


def integer_matmul(a: Array, b: Array) -> jax.Array:
    """The int32 matrix product of 8-bit tensors or `centred` ones."""
    if b.ndim == 1:
        return integer_matmul(a, b[:, None])[..., 0]
    step = exact_terms(a, b)
    a, b = cast(a, np.float32), cast(b, np.float32)
    pieces = [slice(i, i + step) for i in range(0, max(a.shape[-1], 1), step)]
    return sum(cast(jnp.matmul(a[..., p], b[..., p, :]), np.int32) for p in pieces)


@operator()
def MatMulInteger(a, b, a_zero_point=None, b_zero_point=None):
    if a_zero_point is not None and a_zero_point.ndim == 1:  # one per row
        a_zero_point = a_zero_point[:, None]
    return integer_matmul(centred(a, a_zero_point), centred(b, b_zero_point))


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

"""Products of int8 matrices with packed weights, and dynamic quantization: exact, whatever form computes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax
from jax.interpreters import mlir

from transmuter.native.library import run_eagerly, variant
from transmuter.native.products import PANEL

WORD = 4
"""Rows of a packed matrix of int8 whose elements lie side by side."""
SHIFT = 128
"""Between int8, and the bytes without sign that the kernel multiplies by."""


def multiplies_integers() -> bool:
    """Whether this machine has instructions for the products of int8 that the kernel is made of."""
    return variant() == "avx512vnni"


def packed_integers(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An int8 matrix [depth, columns] as the kernel reads it: [panels, words, `PANEL`, `WORD`], zero behind its last
    row and column; and -128 times the sums of its columns, which make up for the shift of what it multiplies."""
    depth, columns = matrix.shape
    words, panels = -(-depth // WORD), -(-columns // PANEL)
    sums = lax.reduce_sum(lax.convert_element_type(matrix, np.int32), axes=(0,))
    padded = lax.pad(matrix, np.int8(0), [(0, words * WORD - depth, 0), (0, panels * PANEL - columns, 0)])
    return lax.transpose(lax.reshape(padded, (words, WORD, panels, PANEL)), (2, 0, 3, 1)), sums * np.int32(-SHIFT)


def unpacked_integers(panels: jax.Array, depth: int, columns: int) -> jax.Array:
    """The matrix that `packed_integers` was given."""
    count, words, width, word = panels.shape
    return lax.reshape(lax.transpose(panels, (1, 3, 0, 2)), (words * word, count * width))[:depth, :columns]


def integer_product(left: jax.Array, right: jax.Array, shift: jax.Array) -> jax.Array:
    """The int32 product of a stack of rows with a matrix that `packed_integers` has made `right` and `shift` of.

    The rows are int8, or uint8 that stand for what is 128 less.
    """
    return integer_product_p.bind(left, right, shift)


def dynamic_quantization(x: jax.Array) -> list[jax.Array]:
    """What DynamicQuantizeLinear makes of a float32 tensor: its elements as uint8, their scale and their zero point."""
    return dynamic_quantization_p.bind(x)


# ---- the primitives ------------------------------------------------------------------------------------------------

integer_product_p = jex.Primitive("cpu_integer_product")


@integer_product_p.def_abstract_eval
def _(left: Any, right: Any, shift: Any) -> Any:
    return jax.core.ShapedArray((*left.shape[:-1], *shift.shape), np.dtype(np.int32))


def pure_integer_product(left: jax.Array, right: jax.Array, shift: jax.Array) -> jax.Array:
    """`integer_product` by JAX's own operations."""
    matrix = unpacked_integers(right, left.shape[-1], shift.shape[0])
    if left.dtype == np.uint8:
        left = lax.bitcast_convert_type(left ^ np.uint8(SHIFT), np.int8)
    numbers = (((left.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(left, matrix, numbers, preferred_element_type=np.int32)


mlir.register_lowering(integer_product_p, jax.ffi.ffi_lowering("transmuter_integer_product"), platform="cpu")
mlir.register_lowering(integer_product_p, mlir.lower_fun(pure_integer_product, multiple_results=False))
run_eagerly(integer_product_p)


dynamic_quantization_p = jex.Primitive("cpu_dynamic_quantization")
dynamic_quantization_p.multiple_results = True


@dynamic_quantization_p.def_abstract_eval
def _(x: Any) -> Any:
    kinds = ((x.shape, np.uint8), ((), np.float32), ((), np.uint8))
    return [jax.core.ShapedArray(shape, np.dtype(kind)) for shape, kind in kinds]


mlir.register_lowering(dynamic_quantization_p, jax.ffi.ffi_lowering("transmuter_quantization"), platform="cpu")
run_eagerly(dynamic_quantization_p)

"""Products of float32 rows with weights of few bits, in blocks that share a scale."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax
from jax.interpreters import mlir

from transmuter.native.library import run_eagerly
from transmuter.native.products import PANEL

BITS = (2, 4, 8)
"""Of the fields in words that the kernel unpacks."""
_WORD = 32
_PANELS_AT_ONCE = 16
"""Whose weights the pure form has as floats."""


def product_of_few_bits(
    left: jax.Array, words: jax.Array, scales: jax.Array, *zeros: jax.Array, bits: int, columns: int
) -> jax.Array:
    """The product of rows (rows, depth) with a weight of so many columns, in float32.

    Its words are (depth * bits / 32, columns), and hold in int32 what follows one another in a column; scales and zero
    points, which are uint8 or float32, are (blocks, columns). All three are packed, as `products.packed` has them.
    Without zero points half of the range is the zero. A block fills words.
    """
    return few_bits_p.bind(left, words, scales, *zeros, bits=bits, columns=columns)


# ---- the primitive -------------------------------------------------------------------------------------------------

few_bits_p = jex.Primitive("cpu_few_bits")


@few_bits_p.def_abstract_eval
def _(left: Any, words: Any, scales: Any, *zeros: Any, bits: int, columns: int) -> Any:
    return jax.core.ShapedArray((left.shape[0], columns), np.dtype(np.float32))


def pure_few_bits(
    left: jax.Array, words: jax.Array, scales: jax.Array, *zeros: jax.Array, bits: int, columns: int
) -> jax.Array:
    """`product_of_few_bits` by JAX's own operations, some panels at a time. Gradients unpack again."""

    rows, depth = left.shape
    shape = scales.shape[1], depth // max(scales.shape[1], 1), PANEL
    shifts = np.arange(0, _WORD, bits, dtype=np.uint32)[:, None]

    @jax.checkpoint
    def by_panel(panel: tuple[jax.Array, ...]) -> jax.Array:
        words, scales, *zeros = panel
        codes = lax.bitcast_convert_type(words, np.uint32)[:, None] >> shifts & np.uint32(2**bits - 1)
        codes = lax.convert_element_type(codes.reshape(shape), np.float32)
        zero = lax.convert_element_type(zeros[0], np.float32)[:, None] if zeros else np.float32(2 ** (bits - 1))
        return left @ ((codes - zero) * scales[:, None]).reshape(depth, PANEL)

    y = lax.map(by_panel, (words, scales, *zeros), batch_size=_PANELS_AT_ONCE)
    return lax.transpose(y, (1, 0, 2)).reshape(rows, words.shape[0] * PANEL)[:, :columns]


def _lowering(ctx: mlir.LoweringRuleContext, *operands: Any, bits: int, columns: int) -> Any:
    return jax.ffi.ffi_lowering("transmuter_few_bits")(ctx, *operands, bits=np.int64(bits))


mlir.register_lowering(few_bits_p, _lowering, platform="cpu")
mlir.register_lowering(few_bits_p, mlir.lower_fun(pure_few_bits, multiple_results=False))
run_eagerly(few_bits_p)

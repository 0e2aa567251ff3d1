"""Products with weights of few bits by the CPU's kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import numpy as np
from jax import lax

from transmuter import native
from transmuter.lowering.few_bits import PRODUCT
from transmuter.lowering.named import has_name
from transmuter.lowering.platform import has_kernels
from transmuter.segments.rewriting import Replacement, View, opened


def products_of_few_bits(view: View) -> Iterator[Replacement]:
    """A rule: the kernel unpacks weights of few bits in registers, from words that are packed in panels once.

    A product of one row takes 0.6 of the time of XLA's, one of 2 to 128 a tenth to a half. XLA would also compile a
    kernel for each, in 0.1 s and 4 MB.
    """
    if not has_kernels():
        return
    for op in view.trace.operations:
        if not has_name(op.equation, PRODUCT):
            continue
        rows, *weight = op.operands
        is_prepared = view.weights.issuperset(weight) and rows not in view.weights
        words, blocks = (view.aval(x).shape[0] for x in weight[:2])
        if is_prepared and words % max(blocks, 1) == 0 and all(isinstance(n, int) for n in view.aval(rows).shape):
            yield Replacement(op.results, functools.partial(_product, op.equation.params["bits"]), op.operands)


def _product(
    bits: int, rows: jax.Array, words: jax.Array, scales: jax.Array, zeros: jax.Array | None = None
) -> list[jax.Array]:
    scales = lax.convert_element_type(scales, np.float32)
    if zeros is not None and zeros.dtype != np.uint8:
        zeros = lax.convert_element_type(zeros, np.float32)
    panels = [native.packed(x) for x in (words, scales, zeros) if x is not None]
    rows = lax.convert_element_type(rows, np.float32)
    return [native.product_of_few_bits(rows, *panels, bits=bits, columns=words.shape[1])]


def products_by_xla(view: View) -> Iterator[Replacement]:
    """A rule: what the products that are left are traced as, for the rules behind it and for the choice of options."""
    for op in view.trace.operations:
        if has_name(op.equation, PRODUCT):
            yield opened(op)

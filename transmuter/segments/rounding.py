"""Products in float16, rounded where a processor would rather not."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.segments.rewriting import Replacement, View

_SMALLEST = np.finfo(np.float16).smallest_normal


def rounded_products(view: View) -> Iterator[Replacement]:
    """A rule: for processors that compute in float16 (AVX512-FP16), LLVM makes one operation of a product and a sum,
    which rounds once. So each product is rounded by itself here, as it is eagerly, so that LLVM does not see it.
    """
    for op in view.trace.operations:
        if op.equation.primitive.name == "mul" and view.aval(op.results[0]).dtype == np.float16:
            yield Replacement(op.results, _product, op.operands)


def _product(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    exact = lax.convert_element_type(a, np.float32) * lax.convert_element_type(b, np.float32)
    rounded = lax.reduce_precision(exact, exponent_bits=5, mantissa_bits=10)  # which makes subnormal numbers zero
    is_small = lax.stop_gradient(jnp.abs(exact) < np.float32(_SMALLEST))
    return [lax.convert_element_type(jnp.where(is_small, exact, rounded), np.float16)]

"""The pure form of each primitive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.extend.core as jex

from transmuter.native.attention import (
    attention_gradients_p,
    attention_p,
    attention_tangent_p,
    pure_attention,
    pure_gradients,
    pure_tangent,
)
from transmuter.native.convolutions import convolution_p, pure_convolution
from transmuter.native.few_bits import few_bits_p, pure_few_bits
from transmuter.native.integers import integer_product_p, pure_integer_product
from transmuter.native.products import product_p, pure_product

_PURE: dict[jex.Primitive, Callable[..., Any]] = {
    attention_p: pure_attention,
    attention_gradients_p: pure_gradients,
    attention_tangent_p: pure_tangent,
    convolution_p: pure_convolution,
    few_bits_p: pure_few_bits,
    integer_product_p: pure_integer_product,
    product_p: pure_product,
}


def pure(primitive: jex.Primitive) -> Callable[..., Any] | None:
    """What computes the same as a primitive of the library by JAX's own operations; None for any other primitive."""
    return _PURE.get(primitive)

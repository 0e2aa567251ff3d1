"""Kernels of our own for the CPU: what XLA computes slower there than the processor can, in C++, called by `jax.ffi`.

Each is a JAX primitive with two forms: a call of the library, and a *pure* one of `jax.lax` operations, which equals it
up to rounding. Only what Transmuter compiles itself takes the first; where a user's transform or export traces through,
and where the library is not there, the pure one is.
"""

from transmuter.native.attention import Heads, attention
from transmuter.native.convolutions import Convolution, convolution, packed_kernel
from transmuter.native.few_bits import product_of_few_bits
from transmuter.native.library import available, variant
from transmuter.native.products import Form, fits, packed, packed_shape, product, steps_of, unpacked
from transmuter.native.pure import pure

__all__ = [
    "Convolution",
    "Form",
    "Heads",
    "attention",
    "available",
    "convolution",
    "fits",
    "packed",
    "packed_kernel",
    "packed_shape",
    "product",
    "product_of_few_bits",
    "pure",
    "steps_of",
    "unpacked",
    "variant",
]

"""The variants of the kernels that this processor can run, for tests of what each computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

from transmuter.native import library

needs_kernels = pytest.mark.skipif(
    not library.available(), reason="the package was installed without kernels, or this processor can run none of them"
)


def _runs(name: str) -> bool:
    before = library.variant()
    return library.choose(name) and library.choose(before)


VARIANTS = [name for name in ("avx512vnni", "avx512", "avx2") if _runs(name)]


def by_each_variant(function: Callable[..., jax.Array], *operands: Any) -> Iterator[np.ndarray]:
    """What a function is with the kernels of one instruction set after another."""
    compiled = jax.jit(function)
    for name in VARIANTS:
        with library.chosen(name):
            yield np.asarray(compiled(*operands))

"""Values through which no gradient flows backwards, with an error that says where."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.extend.core as jex
from jax.interpreters import ad, batching, mlir

from transmuter.errors import GradientError

_irreversible = jex.Primitive("irreversible")
_irreversible.def_impl(lambda x, *, message: x)
_irreversible.def_abstract_eval(lambda x, *, message: x)
batching.defvectorized(_irreversible)
mlir.register_lowering(_irreversible, lambda context, x, *, message: [x])


def _refuse(cotangent: Any, x: Any, *, message: str) -> NoReturn:
    raise GradientError(message)


ad.deflinear2(_irreversible, _refuse)


def irreversible(x: jax.Array, message: str) -> jax.Array:
    """`x` itself. A reverse-mode derivative that reaches it raises `GradientError` with this message; forward mode, and
    whatever does not depend on `x`, is as ever."""
    return _irreversible.bind(x, message=message)

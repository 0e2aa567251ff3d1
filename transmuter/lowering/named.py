"""Computations with a name: one operation of a trace, which a rule finds whatever they are traced as."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import ad, batching, mlir

named_p = jex.Primitive("named")
"""Its params are `name`, `call_jaxpr`, which is what it computes, and those that `named` was given."""
named_p.multiple_results = True


def named(name: str, function: Callable[..., Any], *operands: jax.Array, **params: Any) -> Any:
    """`function(*operands, **params)`, which a trace has as one operation of this name, with these params.

    Rules look for it, to put a better form in its place; what is left is compiled as what `function` is traced as. So
    is what a transform makes of it: a gradient or a batch has no name. It is traced once for operands and params that
    are alike.
    """
    traced = _jitted(function, *params).trace(*operands, **params)
    values = named_p.bind(*operands, name=name, call_jaxpr=traced.jaxpr, **params)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), values)


def has_name(equation: jex.JaxprEqn, name: str) -> bool:
    """Whether an operation is a computation of this name."""
    return equation.primitive is named_p and equation.params["name"] == name


@functools.cache
def _jitted(function: Callable[..., Any], *params: str) -> Any:
    return jax.jit(function, static_argnames=params)


def _computed(*operands: jax.Array, call_jaxpr: jex.ClosedJaxpr, **_: Any) -> list[jax.Array]:
    return jex.jaxpr_as_fun(call_jaxpr)(*operands)


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]

    def of_moving(*some: Any) -> list[jax.Array]:
        given = dict(zip(moving, some, strict=True))
        return _computed(*(given.get(i, primal) for i, primal in enumerate(primals)), **params)

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _batched(operands: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[list[jax.Array], list[int]]:
    results = jax.vmap(functools.partial(_computed, **params), tuple(axes))(*operands)
    return results, [0] * len(results)


named_p.def_impl(_computed)
named_p.def_abstract_eval(lambda *_, call_jaxpr, **__: call_jaxpr.out_avals)
ad.primitive_jvps[named_p] = _differentiated
batching.primitive_batchers[named_p] = _batched
mlir.register_lowering(named_p, mlir.lower_fun(_computed, multiple_results=True))

"""Activations that gradients compute again, in steps of training: that takes less time than to keep them in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.extend.core as jex

from transmuter.lowering.platform import on_cpu
from transmuter.segments.preparation import Operation, Ref, evaluate
from transmuter.segments.rewriting import Operand, Replacement, View

_CORES = {"erf", "erfc", "tanh", "logistic"}
_ELEMENTWISE = {*_CORES, "add", "sub", "mul", "div", "neg", "integer_pow", "square"}
_MOST = 12
"""Operations that an activation has at most."""


@dataclass(frozen=True)
class _Activation:
    """Elementwise operations that make `result` of one array of its shape, and of numbers."""

    source: Ref
    operations: list[Operation]
    result: Ref


def recomputed_activations(view: View) -> Iterator[Replacement]:
    """A rule for what will be differentiated, on the CPU: GELU, SiLU and the like keep their operand alone.

    Their gradients would read both the operand and a function of it that the forward pass has written. A step of MiniLM
    takes 0.975 of the time. What is a function of one kind alone (tanh) has its gradient of its result, and stays.
    """
    if not on_cpu():
        return
    taken: set[Ref] = set()
    for op in view.trace.operations:
        found = _activation(view, op) if op.equation.primitive.name in _CORES else None
        made = set() if found is None else {ref for each in found.operations for ref in each.results}
        if found is None or not taken.isdisjoint(made):
            continue
        taken |= made
        read = {operand for each in found.operations for operand in each.operands if isinstance(operand, Ref)}
        operands = sorted(read - made)
        yield Replacement([found.result], jax.checkpoint(partial(_computed, found, operands)), operands)


def _activation(view: View, core: Operation) -> _Activation | None:
    """The whole of which one operation is the core, if it multiplies that by a function of the same operand."""
    source, before = _source(view, core)
    inside = {source, *(ref for op in before for ref in op.results)}
    operations, end, is_product = [*before, core], core.results[0], False
    while len(operations) < _MOST:
        op = view.sole_user(end)
        if op is None or op.equation.primitive.name not in _ELEMENTWISE:
            break
        others = [operand for operand in op.operands if operand != end and not _is_number(view, operand)]
        beside = [view.producers.get(operand) for operand in others if operand not in inside]
        if not all(_is_of(view, each, inside) for each in beside):
            break
        is_product |= bool(others)
        operations += [*beside, op]
        inside.update((end, *(ref for each in beside for ref in each.results)))
        end = op.results[0]
    return _Activation(source, operations, end) if is_product else None


def _source(view: View, core: Operation) -> tuple[Ref, list[Operation]]:
    """The array that an operation's operand is made of by elementwise operations alone, and these in order."""
    [operand] = core.operands
    source, found = operand, []
    pending, before = [operand], []
    while len(before) < _MOST:
        if len(pending) == 1:
            source, found = pending[0], before
        last = max(pending)  # values are numbered in the order of the trace
        op = view.producers.get(last)
        if op is None or op.equation.primitive.name not in _ELEMENTWISE:
            break
        arrays = {x for x in op.operands if not _is_number(view, x)}
        if any(view.aval(x).shape != view.aval(last).shape for x in arrays):
            break
        before = [op, *before]
        pending = sorted({*pending, *arrays} - {last})
    return source, found


def _is_of(view: View, op: Operation | None, arrays: set[Ref]) -> bool:
    """Whether an operation is elementwise, of some of these arrays and of numbers."""
    if op is None or op.equation.primitive.name not in _ELEMENTWISE:
        return False
    return arrays.issuperset(operand for operand in op.operands if not _is_number(view, operand))


def _is_number(view: View, operand: Operand) -> bool:
    return isinstance(operand, jex.Literal) or view.aval(operand).shape == ()


def _computed(activation: _Activation, refs: list[Ref], *operands: jax.Array) -> jax.Array:
    return evaluate(activation.operations, dict(zip(refs, operands, strict=True)), [activation.result])

"""Rewriting: what a traced segment computes with the model's own params, in an equal form that runs faster.

XLA takes weights for unknown arguments, so that it cannot join or scale them; here it is known which values depend on
weights alone, and what a rewriting computes of these is prepared once. Only inference is rewritten: with params that a
caller gives, a segment computes what its lowerings say (with its roundings, see `rounding`).

A rule looks for its pattern in a `View` of the trace, and yields what to put in the place of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex

from transmuter.segments.preparation import Operation, Ref, Trace, evaluate, flatten, inline, live

Operand = Ref | jex.Literal


class View:
    """A trace by its values.

    Attributes:
        trace: The trace itself.
        producers: The operation that computes a value; none for the trace's inputs and constants.
        users: The operations that read a value.
        weights: The values that depend on weights alone.
        outputs: The values that the trace returns.
    """

    def __init__(self, trace: Trace, weights: Iterable[Ref]):
        self.trace = trace
        self.producers: dict[Ref, Operation] = {}
        self.users: dict[Ref, list[Operation]] = {}
        self.weights = {*weights, *trace.constants}
        self.outputs = {ref for ref in trace.outputs if isinstance(ref, Ref)}
        for op in trace.operations:
            refs = dict.fromkeys(operand for operand in op.operands if isinstance(operand, Ref))
            self.producers.update(dict.fromkeys(op.results, op))
            for ref in refs:
                self.users.setdefault(ref, []).append(op)
            if refs and self.weights.issuperset(refs) and not op.equation.effects:
                self.weights.update(op.results)

    def aval(self, operand: Operand) -> jax.ShapeDtypeStruct:
        """Shape and dtype of a value."""
        return _aval(self.trace, operand)

    def producer(self, operand: Operand, primitive: str) -> Operation | None:
        """The operation that computes a value, if it is of this primitive."""
        op = self.producers.get(operand) if isinstance(operand, Ref) else None
        return op if op is not None and op.equation.primitive.name == primitive else None

    def sole_user(self, ref: Ref) -> Operation | None:
        """The one operation that reads a value, if there is no other and the trace does not return it."""
        users = self.users.get(ref, ())
        return users[0] if len(users) == 1 and ref not in self.outputs else None

    def source(self, operand: Operand) -> tuple[Operand, Sequence[int]]:
        """What an operand is a transpose of, if it is one, and the order of its dimensions in that."""
        transpose = self.producer(operand, "transpose")
        if transpose is None:
            return operand, range(len(self.aval(operand).shape))
        return transpose.operands[0], transpose.equation.params["permutation"]

    def end(self, result: Ref) -> tuple[Ref, Sequence[int]]:
        """What a result is transposed to, if it is for nothing else, and the order of its dimensions there."""
        after = self.sole_user(result)
        if after is None or after.equation.primitive.name != "transpose":
            return result, range(len(self.aval(result).shape))
        return after.results[0], after.equation.params["permutation"]


@dataclass(frozen=True)
class Replacement:
    """`function(*operands)` is to be computed, in the place of the operations that compute `results`, in this order."""

    results: Sequence[Ref]
    function: Callable[..., Sequence[jax.Array]]
    operands: Sequence[Operand]


Rule = Callable[[View], Iterator[Replacement]]


def rewritten(trace: Trace, weights: Iterable[Ref], rules: Sequence[Rule]) -> Trace:
    """A trace that computes the same as `trace`, after each rule in turn; `weights` are its inputs that are weights.

    What a rule replaces is gone for the rules after it, but not for the rule itself: its patterns must not overlap.
    """
    weights = frozenset(weights)
    view = View(trace, weights)
    for rule in rules:
        if replacements := list(rule(view)):
            view = View(_applied(view.trace, replacements), weights)
    return view.trace


def rewriting(function: Callable[..., Any], *rules: Rule) -> Callable[..., Any]:
    """A function that computes the same as `function`, after each rule in turn."""

    def computed(*arguments: Any) -> Any:
        trace, structure = traced(function, arguments)
        trace = rewritten(trace, (), rules)
        return jax.tree.unflatten(structure, evaluate(trace.operations, environment(trace, arguments), trace.outputs))

    return computed


def within(op: Operation, *rules: Rule) -> Replacement:
    """A loop, a condition or a `jax.checkpoint` with the rules applied to the bodies in it."""
    primitive = op.equation.primitive
    params = {key: _body(value, rules) for key, value in op.equation.params.items()}
    function = lambda *operands: primitive.bind(*operands, **primitive.get_bind_params(params))
    return Replacement(op.results, function, op.operands)


def opened(op: Operation) -> Replacement:
    """The operations of a function that has a derivative of its own, or of a computation with a name."""
    return Replacement(op.results, jex.jaxpr_as_fun(op.equation.params["call_jaxpr"]), op.operands)


def traced(function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Trace, Any]:
    """A function's operations on such arguments, and the structure of its results."""
    closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return flatten(closed), jax.tree.structure(results)


def environment(trace: Trace, arguments: Any) -> dict[Ref, Any]:
    """The values that a function's trace starts from."""
    return {**trace.constants, **dict(zip(trace.inputs, jax.tree.leaves(arguments), strict=True))}


def _body(value: Any, rules: Sequence[Rule]) -> Any:
    match value:
        case tuple():
            return tuple(_body(item, rules) for item in value) if type(value) is tuple else value
        case jex.Jaxpr():
            return _body(jex.ClosedJaxpr(value, ()), rules).jaxpr
        case jex.ClosedJaxpr():
            function = rewriting(jex.jaxpr_as_fun(value), *rules)
            return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in value.in_avals))
    return value


def _applied(trace: Trace, replacements: Iterable[Replacement]) -> Trace:
    new = replace(trace, constants=dict(trace.constants), operations=list(trace.operations), avals=list(trace.avals))
    instead: dict[Ref, Operand] = {}
    for it in replacements:
        closed = jax.make_jaxpr(it.function)(*(_aval(trace, operand) for operand in it.operands))
        for old, value in zip(it.results, inline(new, closed, it.operands), strict=True):
            if _aval(new, value) != _aval(new, old):
                raise TypeError(f"a rule replaces {_aval(new, old)} by {_aval(new, value)}")
            instead[old] = value

    def current(operand: Operand) -> Operand:
        while isinstance(operand, Ref) and operand in instead:
            operand = instead[operand]
        return operand

    new.outputs = [current(operand) for operand in trace.outputs]
    operations = [replace(op, operands=tuple(map(current, op.operands))) for op in new.operations]
    new.operations = live(_sorted(operations), new.outputs)
    return new


def _sorted(operations: Sequence[Operation]) -> list[Operation]:
    """The operations, each behind those whose results it takes; otherwise in the order given."""
    producers = {ref: op for op in operations for ref in op.results}
    ordered: dict[int, Operation] = {}
    stack = [(op, False) for op in reversed(operations)]
    while stack:
        op, is_ready = stack.pop()
        if id(op) in ordered:
            continue
        if is_ready:
            ordered[id(op)] = op
            continue
        stack.append((op, True))
        before = [producers[ref] for ref in op.operands if isinstance(ref, Ref) and ref in producers]
        stack += [(needed, False) for needed in reversed(before) if id(needed) not in ordered]
    return list(ordered.values())


def _aval(trace: Trace, operand: Operand) -> jax.ShapeDtypeStruct:
    aval = trace.avals[operand] if isinstance(operand, Ref) else operand.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

"""Prepared weights: the part of a traced segment that depends on weights alone is computed once, not in every call.

A lowering says `jnp.transpose(w, ...)` and knows nothing of this. The traced segment is a list of primitive operations;
those whose operands are all weights are run eagerly, once, and their results become arguments of the compiled rest.
What only makes a weight larger (a broadcast) stays in the rest.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax

from transmuter import native

Ref = int
"""The number of a value in a `Trace`."""

_CALLS = {"jit", "pjit", "closed_call", "core_call"}
_ENLARGING = {"broadcast_in_dim", "iota"}
_BARRIER = "optimization_barrier"
"""What a lowering computes of a weight behind one (packed weights, unpacked) stays in the rest."""


@dataclass(frozen=True, eq=False)
class Operation:
    """One primitive application; an operand is a `Ref`, or a literal."""

    equation: jex.JaxprEqn
    operands: tuple[Ref | jex.Literal, ...]
    results: tuple[Ref, ...]


@dataclass
class Trace:
    """A jaxpr without nested calls: operations on numbered values."""

    inputs: list[Ref]
    constants: dict[Ref, Any]
    outputs: list[Ref | jex.Literal]
    operations: list[Operation] = field(default_factory=list)
    avals: list[Any] = field(default_factory=list)

    def new(self, aval: Any) -> Ref:
        self.avals.append(aval)
        return len(self.avals) - 1


def flatten(closed: jex.ClosedJaxpr) -> Trace:
    """The operations of `closed`, with those of the functions that it calls put in their place."""
    trace = Trace([], {}, [])
    inputs = [trace.new(v.aval) for v in closed.jaxpr.invars]
    trace.inputs = inputs
    trace.outputs = inline(trace, closed, inputs)
    return trace


def inline(trace: Trace, closed: jex.ClosedJaxpr, arguments: Sequence[Ref | jex.Literal]) -> list[Ref | jex.Literal]:
    """Appends the operations of `closed` on some values of the trace. Returns their results."""
    names: dict[jex.Var, Ref | jex.Literal] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
    for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        names[variable] = trace.new(variable.aval)
        trace.constants[names[variable]] = value

    def read(atom: Any) -> Ref | jex.Literal:
        return atom if isinstance(atom, jex.Literal) else names[atom]

    for equation in closed.jaxpr.eqns:
        operands = tuple(read(atom) for atom in equation.invars)
        if equation.primitive.name in _CALLS:
            body = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
            results = inline(trace, body, operands)
        else:
            results = tuple(trace.new(v.aval) for v in equation.outvars)
            trace.operations.append(Operation(equation, operands, results))
        names.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def evaluate(
    operations: Sequence[Operation],
    environment: dict[Ref, Any],
    outputs: Sequence[Ref | jex.Literal],
    *,
    is_pure: bool = False,
) -> list[Any]:
    """Runs operations on the values in `environment`, eagerly or under a JAX transform; frees what is not needed.

    `is_pure` computes what kernels of our own would by JAX's operations.
    """
    kept = {ref for ref in outputs if isinstance(ref, Ref)}
    last = {ref: i for i, op in enumerate(operations) for ref in op.operands if isinstance(ref, Ref)}

    def read(ref: Ref | jex.Literal) -> Any:
        return environment[ref] if isinstance(ref, Ref) else ref.val

    for i, op in enumerate(operations):
        primitive = op.equation.primitive
        instead = native.pure(primitive) if is_pure else None
        with op.equation.ctx.manager:
            if instead is None:
                values = primitive.bind(*map(read, op.operands), **primitive.get_bind_params(op.equation.params))
            else:
                values = instead(*map(read, op.operands), **op.equation.params)
        environment.update(zip(op.results, values if primitive.multiple_results else [values], strict=True))
        for ref in op.operands:
            if isinstance(ref, Ref) and last[ref] == i and ref not in kept:
                environment.pop(ref, None)
    return [read(ref) for ref in outputs]


@dataclass(frozen=True)
class Weight:
    """A weight that the compiled rest takes as an argument: an original one, or one computed by `operations`."""

    key: str
    """Says what is computed of which weights, so that segments share it."""
    ref: Ref
    operations: tuple[Operation, ...] = ()
    sources: tuple[tuple[Ref, str], ...] = ()
    """What they start from: the names of weights, `""` for constants of the trace."""


@dataclass(frozen=True)
class Split:
    """A trace, cut in what depends on weights alone (`weights`) and the rest, which takes them as arguments."""

    weights: list[Weight]
    arguments: list[Ref]
    operations: list[Operation]
    outputs: list[Ref | jex.Literal]

    def rest(self, avals: list[Any]) -> Trace:
        """The rest as a trace of its own; `avals` are those of the whole one."""
        return Trace([*(w.ref for w in self.weights), *self.arguments], {}, self.outputs, self.operations, avals)

    def function(self, rest: Trace | None = None) -> Callable[[list[Any], list[Any]], list[Any]]:
        """The rest as a new function of the weights' values and the arguments.

        Args:
            rest: What to compute, in the same values; None is the rest as it is, without kernels of our own.
        """
        is_pure = rest is None
        rest = self.rest([]) if rest is None else rest

        def segment(weights: list[Any], arguments: list[Any]) -> list[Any]:
            environment = {**rest.constants, **dict(zip((w.ref for w in self.weights), weights, strict=True))}
            environment.update(zip(self.arguments, arguments, strict=True))
            return evaluate(rest.operations, environment, rest.outputs, is_pure=is_pure)

        return segment


def split(trace: Trace, names: dict[Ref, str], arguments: list[Ref], *, prepare: bool) -> Split:
    """Cuts `trace`.

    Args:
        trace: The traced segment.
        names: Its inputs that are weights, with their names.
        arguments: Its other inputs.
        prepare: Compute what depends on weights alone beforehand. Without it only constants are hoisted, so that the
            rest remains a function of the weights themselves.
    """
    operations = live(trace.operations, trace.outputs)
    keys = {ref: fingerprint(value) for ref, value in trace.constants.items()}
    hoistable = set(keys)
    if prepare:
        keys.update(names)
        hoistable.update(names)
    producer: dict[Ref, Operation] = {}
    dynamic: list[Operation] = []
    for op in operations:
        refs = [ref for ref in op.operands if isinstance(ref, Ref)]
        pure = not op.equation.effects and op.equation.primitive.name != _BARRIER and refs
        if pure and hoistable.issuperset(refs):
            hoistable.update(op.results)
            producer.update(dict.fromkeys(op.results, op))
            content = [op.equation.primitive.name, sorted((k, str(v)) for k, v in op.equation.params.items())]
            content += [keys[r] if isinstance(r, Ref) else repr(r.val) for r in op.operands]
            base = hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()
            keys.update({ref: f"{base}:{i}" for i, ref in enumerate(op.results)})
        else:
            dynamic.append(op)
    read = {ref for op in dynamic for ref in op.operands if isinstance(ref, Ref)}
    read.update(ref for ref in trace.outputs if isinstance(ref, Ref))
    frontier = _without_enlarging(sorted(read & hoistable), producer, trace, dynamic)
    originals = {**names, **dict.fromkeys(trace.constants, "")}
    weights = []
    for ref in frontier:
        needed = live(_ancestors(ref, producer), [ref])
        sources = (
            {r for op in needed for r in op.operands if isinstance(r, Ref) and r in originals} if needed else {ref}
        )
        weights.append(Weight(keys[ref], ref, tuple(needed), tuple((r, originals[r]) for r in sorted(sources))))
    if not prepare:
        used = read & set(names)
        weights += [Weight(names[ref], ref, (), ((ref, names[ref]),)) for ref in sorted(used)]
    order = {id(op): i for i, op in enumerate(operations)}
    dynamic.sort(key=lambda op: order[id(op)])
    return Split(weights, arguments, dynamic, trace.outputs)


def _without_enlarging(
    frontier: list[Ref], producer: dict[Ref, Operation], trace: Trace, dynamic: list[Operation]
) -> list[Ref]:
    """The frontier with results of broadcasts replaced by what is broadcast; the broadcasts move to `dynamic`."""
    found: dict[Ref, None] = {}
    moved: set[int] = set()
    pending = list(reversed(frontier))
    while pending:
        ref = pending.pop()
        op = producer.get(ref)
        if op is None or op.equation.primitive.name not in _ENLARGING or not _enlarges(op, trace):
            found[ref] = None
            continue
        if id(op) not in moved:
            moved.add(id(op))
            dynamic.append(op)
            pending += [operand for operand in op.operands if isinstance(operand, Ref)]
    return list(found)


def _enlarges(op: Operation, trace: Trace) -> bool:
    before = sum(math.prod(trace.avals[r].shape) for r in op.operands if isinstance(r, Ref))
    return math.prod(trace.avals[op.results[0]].shape) > before


def live(operations: list[Operation], outputs: Sequence[Ref | jex.Literal]) -> list[Operation]:
    """The operations that `outputs` need, or that have effects, in order."""
    needed = {ref for ref in outputs if isinstance(ref, Ref)}
    kept = []
    for op in reversed(operations):
        if op.equation.effects or not needed.isdisjoint(op.results):
            kept.append(op)
            needed.update(ref for ref in op.operands if isinstance(ref, Ref))
    return kept[::-1]


def _ancestors(ref: Ref, producer: dict[Ref, Operation]) -> list[Operation]:
    """The operations that lead to `ref`, each after those that it needs."""
    ordered: dict[int, Operation] = {}
    stack = [(ref, False)]
    while stack:
        current, done = stack.pop()
        op = producer.get(current)
        if op is None or id(op) in ordered:
            continue
        if done:
            ordered[id(op)] = op
        else:
            stack.append((current, True))
            stack += [(r, False) for r in op.operands if isinstance(r, Ref)]
    return list(ordered.values())


def fingerprint(value: Any) -> str:
    """A name for an array, by dtype, shape and contents."""
    array = np.asarray(value)
    content = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()
    return f"constant {array.dtype.name}{list(array.shape)} {content}"


def inverses(weight: Weight) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """What gives original weights back from the prepared one, for those whose elements were only moved or widened."""
    restores: dict[Ref, Callable[[jax.Array], jax.Array]] = {weight.ref: lambda value: value}
    for op in reversed(weight.operations):
        restore = restores.get(op.results[0])
        if restore is None:
            continue
        for i, operand in enumerate(op.operands):
            undo = _undo(op, i)
            if undo is not None and isinstance(operand, Ref):
                restores[operand] = functools.partial(_in_turn, restore, undo)
    return {name: restores[ref] for ref, name in weight.sources if name and ref in restores}


def _in_turn(first: Callable[[Any], Any], second: Callable[[Any], Any], value: Any) -> Any:
    return second(first(value))


def only_appends(op: Operation) -> bool:
    """Whether a `pad` puts something behind the last elements, and nowhere else."""
    return all(low == inner == 0 <= high for low, high, inner in op.equation.params["padding_config"])


def _undo(op: Operation, position: int) -> Callable[[jax.Array], jax.Array] | None:
    """What gives one operand of an operation back from its result, or None."""
    before, params = op.equation.invars[position].aval, op.equation.params
    match op.equation.primitive.name:
        case "transpose":
            order = tuple(int(i) for i in np.argsort(params["permutation"]))
            return lambda x: lax.transpose(x, order)
        case "reshape" | "squeeze" | "expand_dims":
            return lambda x: lax.reshape(x, before.shape)
        case "broadcast_in_dim" if math.prod(before.shape) == math.prod(params["shape"]):
            return lambda x: lax.reshape(x, before.shape)
        case "pad" if only_appends(op):
            return lambda x: lax.slice(x, (0,) * x.ndim, before.shape)
        case "concatenate":
            axis = params["dimension"]
            start = sum(operand.aval.shape[axis] for operand in op.equation.invars[:position])
            return lambda x: lax.slice_in_dim(x, start, start + before.shape[axis], axis=axis)
        case "bitcast_convert_type":
            return lambda x: lax.bitcast_convert_type(x, before.dtype)
        case "convert_element_type" if before.dtype.itemsize == 2 and params["new_dtype"] == np.float32:
            return lambda x: lax.convert_element_type(x, before.dtype)
    return None

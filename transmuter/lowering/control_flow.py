"""Control flow: If, Loop, Scan.

Where nothing around the call records operations, a Loop is a loop in Python. While JAX traces it is a `lax.scan` if
known values alone decide how often it runs, a `lax.while_loop` if not, and unrolled if it is short or if what it
carries changes its shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from transmuter.lowering.arrays import (
    NeedsContents,
    canonical,
    cast,
    contents,
    dims,
    is_known,
    is_string,
    traced,
    xp,
)
from transmuter.lowering.evaluation import Break, Subgraph
from transmuter.lowering.registry import operator
from transmuter.staging import staged

_SHORT = 8
"""Iterations up to which a traced Loop is unrolled: what it carries may stay known, and XLA sees all of it."""
_UNROLLED = 100
"""The same for a loop that cannot be a `lax.scan`."""
_BOUND = 10_000
"""Iterations up to which known values are followed to find a trip count, and a `lax.while_loop` is differentiable."""

Step: TypeAlias = Callable[[Any, Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]
"""One iteration: its number, what is carried and what is scanned over, to what is carried on and what is collected."""


class _Varies(Exception):
    """A value does not keep its structure, shape and dtype, or is none that JAX can hold."""


def folded(key: jax.Array | None, number: Any) -> jax.Array | None:
    """The key of one iteration of a body that draws random numbers; None for a body that does not."""
    return None if key is None else jax.random.fold_in(key, number)


# ---- If ------------------------------------------------------------------------------------------------------------


@operator()
def If(cond, *, then_branch, else_branch):
    if (held := contents(cond)) is not None:
        return then_branch() if held.reshape(()) else else_branch()
    axes = varying_axes([then_branch.captured(), else_branch.captured()])
    kinds = []

    def arrays_of(branch: Subgraph) -> Any:
        outputs = _arrays(branch(), axes)
        kinds.append(_kinds(outputs))
        if kinds[0] != kinds[-1]:
            raise _Varies
        return outputs

    try:
        return lax.cond(
            jnp.reshape(cond, ()),
            functools.partial(arrays_of, then_branch),
            functools.partial(arrays_of, else_branch),
        )
    except _Varies:
        raise NeedsContents("cond") from None


# ---- Loop ----------------------------------------------------------------------------------------------------------


@operator()
def Loop(M=None, cond=None, *v_initial, body, key):
    """The body's condition counts only where `cond` is given (ONNX Runtime always heeds it), or where it alone could
    end the loop."""
    condition = cond if cond is not None or M is not None else np.array(True)
    state = [condition, *v_initial, *[None] * (len(body.graph.inputs) - 2 - len(v_initial))]
    moving = [j for j in range(len(state)) if not _passes(body, j)]
    collected = range(len(state), len(body.graph.outputs))
    limit = math.inf if M is None else None if (held := contents(M)) is None else dims(held)[0]

    def bind(body: Subgraph, state: Sequence[Any]) -> Step:
        """An iteration of those values that the body does not just pass on."""

        def step(i: Any, values: Sequence[Any], _: Sequence[Any] = ()) -> tuple[Sequence[Any], Sequence[Any]]:
            given = _placed(state, moving, values)
            given[0] = np.array(True) if given[0] is None else given[0]
            results = body(i, *given, key=folded(key, i), outputs=[*moving, *collected])
            return results[: len(moving)], results[len(moving) :]

        return step

    def going(i: int, values: Sequence[Any]) -> bool:
        if condition is None:
            return i < limit
        present = contents(_placed(state, moving, values)[0])
        if present is None:
            raise NeedsContents("cond")
        return i < limit and bool(present.reshape(()))

    def outputs(values: Sequence[Any], scanned: Sequence[Any]) -> tuple[Any, ...]:
        return (*_placed(state, moving, values)[1:], *scanned)

    step, values = bind(body, state), [state[j] for j in moving]
    if limit is not None and not staged():
        try:
            return outputs(*_in_python(step, values, going, body.graph.outputs[len(state) :]))
        except NeedsContents:  # under vmap: what follows needs no contents
            pass
    trips = limit if condition is None else _trips(body, state, limit)
    try:
        if isinstance(trips, int) and trips <= _SHORT:
            return outputs(*_unroll(step, values, trips, (), body.graph.outputs[len(state) :]))
        if trips not in (None, math.inf):
            return outputs(*_iterate(step, values, trips, (), body.graph.outputs[len(state) :]))
        if collected:
            raise NeedsContents("M" if limit is None else "cond")
        return outputs(_while(bind, body, state, moving, M, limit), ())
    except _Varies:
        raise NeedsContents("M" if limit is None else "cond" if trips is None else "v_initial") from None


def _placed(state: Sequence[Any], moving: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """`state` with `values` at the positions `moving`."""
    new = dict(zip(moving, values, strict=True))
    return [new.get(j, value) if j in new else value for j, value in enumerate(state)]


def _passes(body: Subgraph, position: int) -> bool:
    """Whether the body passes the carried value on unchanged, as exporters do with weights."""
    value, source = body.graph.outputs[position], body.graph.inputs[position + 1]
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.graph is body.graph:
        value = node.inputs[0]
    return value is source


def _trips(body: Subgraph, state: Sequence[Any], limit: Any) -> Any:
    """How often the loop runs, where known values decide it, as in `while i < n: i += 1`; else None."""
    needed, found = set(), {0}
    while found:
        needed |= found
        found = {position - 1 for position in body.reads(sorted(needed)) if position > 0} - needed
    order = sorted(needed)
    values = [state[j] for j in order]
    steady = not body.reads([0]) - {1}  # the condition is the same after each iteration
    if limit is None or not is_known(values) or not (steady or isinstance(limit, int | float)):
        return None
    trips = 0
    while bool(np.reshape(values[0], ())) and (steady or trips < limit):
        if trips == _BOUND:
            return None
        given = _placed([None] * len(state), order, values)
        values = body(np.array(trips, np.int64), *given, outputs=order)
        if not is_known(values):
            return None
        trips += 1
        if steady and np.reshape(values[0], ()):
            return limit
    return trips if not steady or trips == 0 else min(limit, trips)


def _while(
    bind: Callable[[Subgraph, Sequence[Any]], Step],
    body: Subgraph,
    state: Sequence[Any],
    moving: Sequence[int],
    M: Any,
    limit: Any,
) -> Sequence[Any]:
    """The loop as a `lax.while_loop`. If its trip count has a usable bound, its derivative is that of a scan of so many
    iterations, of which those past the end do nothing."""
    outer, structure = jax.tree.flatten((body.captured(), [None if j in moving else v for j, v in enumerate(state)]))
    is_explicit = [isinstance(leaf, jax.Array) for leaf in outer]
    axes = varying_axes([outer, state])
    initial = _arrays([state[j] for j in moving], axes)
    kinds = _kinds(initial)
    most = None if limit == math.inf else jnp.reshape(cast(traced(M), np.int64), ())

    def parts(explicit: Sequence[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Whether to go on, and the iteration, with what they read from outside given explicitly."""
        given = iter(explicit)
        leaves = [next(given) if is_here else leaf for leaf, is_here in zip(outer, is_explicit, strict=True)]
        captured, fixed = jax.tree.unflatten(structure, leaves)
        step = bind(body.with_captures(captured), fixed)

        def going(i: Any, values: Sequence[Any]) -> Any:
            condition = _placed(fixed, moving, values)[0]
            more = True if condition is None else jnp.reshape(traced(condition), ())
            return jnp.asarray(more) if most is None else (i < most) & more

        def checked(i: Any, values: Sequence[Any]) -> Any:
            values = _arrays(step(i, values, ())[0], axes)
            if _kinds(values) != kinds:
                raise _Varies
            return values

        return going, checked

    def run(explicit: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
        going, step = parts(explicit)
        start = jnp.zeros((), canonical(np.int64))
        return lax.while_loop(lambda c: going(*c), lambda c: (c[0] + 1, step(*c)), (start, values))[1]

    def run_bounded(explicit: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
        going, step = parts(explicit)

        def masked(values: Sequence[Any], i: Any) -> tuple[Sequence[Any], None]:
            return lax.cond(going(i, values), step, lambda i, values: values, i, values), None

        return lax.scan(masked, values, jnp.arange(limit, dtype=canonical(np.int64)))[0]

    if isinstance(limit, int) and limit <= _BOUND:
        run = jax.custom_jvp(run)
        run.defjvp(lambda primals, tangents: jax.jvp(run_bounded, primals, tangents))
    return run([leaf for leaf, is_here in zip(outer, is_explicit, strict=True) if is_here], initial)


# ---- Scan ----------------------------------------------------------------------------------------------------------


@operator()
def Scan(sequence_lens=None, *initial_state_and_scan_inputs, num_scan_inputs, body, directions, key):
    """Version 8: a batch of sequences of their own lengths; outputs past the end of a sequence are zero."""
    count = len(initial_state_and_scan_inputs) - num_scan_inputs
    operands = _arrays(initial_state_and_scan_inputs)
    batch, length = operands[-1].shape[:2]
    lengths = traced(np.full(batch, length) if sequence_lens is None else sequence_lens)
    number = jnp.arange(length, dtype=lengths.dtype)

    def one(index: Any, end: Any, state: Sequence[Any], inputs: Sequence[Any]) -> Any:
        backwards = jnp.where(number < end, end - 1 - number, number)
        flags = directions or [0] * num_scan_inputs
        elements = [x[backwards] if flag else x for x, flag in zip(inputs, flags, strict=True)]

        def step(i: Any, state: Sequence[Any], elements: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            results = _arrays(body(*state, *elements, key=folded(folded(key, index), i)))
            going = cast(i, end.dtype) < end
            new = [jnp.where(going, n, o) for n, o in zip(results[:count], state, strict=True)]
            return new, [jnp.where(going, y, jnp.zeros_like(y)) for y in results[count:]]

        state, outputs = _scan(step, state, length, elements)
        return (*state, *outputs)

    try:
        return jax.vmap(one)(jnp.arange(batch), lengths, operands[:count], operands[count:])
    except _Varies:
        raise ValueError("a state variable changes its shape or dtype") from None


@operator()
def Scan_9(
    *initial_state_and_scan_inputs,
    num_scan_inputs,
    body,
    scan_input_axes,
    scan_input_directions,
    scan_output_axes,
    scan_output_directions,
    key,
):
    count = len(initial_state_and_scan_inputs) - num_scan_inputs
    state, inputs = initial_state_and_scan_inputs[:count], _arrays(initial_state_and_scan_inputs[count:])
    elements = [
        jnp.flip(x, 0) if backwards else x
        for x, backwards in zip(
            map(jnp.moveaxis, inputs, scan_input_axes or [0] * len(inputs), [0] * len(inputs)),
            scan_input_directions or [0] * len(inputs),
            strict=True,
        )
    ]
    if len({x.shape[0] for x in elements}) > 1:
        raise ValueError(f"the scan inputs have different lengths {[x.shape[0] for x in elements]}")

    def step(i: Any, state: Sequence[Any], elements: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        results = body(*state, *elements, key=folded(key, i))
        return results[:count], results[count:]

    try:
        state, outputs = _iterate(step, state, elements[0].shape[0], elements, body.graph.outputs[count:])
    except _Varies:
        raise ValueError("a state variable changes its shape or dtype") from None
    backwards = scan_output_directions or [0] * len(outputs)
    axes = scan_output_axes or [0] * len(outputs)
    outputs = [jnp.flip(y, 0) if b else y for y, b in zip(outputs, backwards, strict=True)]
    return (*state, *(jnp.moveaxis(y, 0, axis) for y, axis in zip(outputs, axes, strict=True)))


# ---- how to iterate ------------------------------------------------------------------------------------------------


def _iterate(
    step: Step, state: Sequence[Any], length: Any, elements: Sequence[Any], declared: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """`length` iterations as a `lax.scan`; unrolled if something in it needs contents or changes its shape."""
    try:
        return _scan(step, state, length, elements)
    except (_Varies, Break):
        if not isinstance(length, int) or (staged() and length > _UNROLLED):
            raise
        return _unroll(step, state, length, elements, declared)


def _scan(
    step: Step, state: Sequence[Any], length: Any, elements: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    number = jnp.arange(length, dtype=canonical(np.int64))
    axes = varying_axes([state, elements])
    state = _arrays(state, axes)
    kinds = _kinds(state)

    def checked(state: Sequence[Any], scanned: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        state, outputs = step(scanned[0], state, scanned[1])
        state = _arrays(state, axes)
        if _kinds(state) != kinds:
            raise _Varies
        return state, _arrays(outputs)

    return lax.scan(checked, state, (number, list(elements)), length)


def _unroll(
    step: Step, state: Sequence[Any], length: int, elements: Sequence[Any], declared: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    def at(i: Any, state: Sequence[Any], _: Sequence[Any] = ()) -> tuple[Sequence[Any], Sequence[Any]]:
        return step(i, state, [x[i] for x in elements])

    return _in_python(at, state, lambda i, _: i < length, declared)


def _in_python(
    step: Step, state: Sequence[Any], going: Callable[[int, Sequence[Any]], bool], declared: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Iterations one by one; `declared` are the graph's values that are collected."""
    collected: list[Sequence[Any]] = []
    while going(len(collected), state):
        state, outputs = step(np.array(len(collected), np.int64), state, ())
        collected.append(outputs)
    if not collected and declared:
        return state, _nothing(step, state, declared)
    return state, [_stacked(values) for values in zip(*collected, strict=True)]


def _stacked(values: Sequence[Any]) -> Any:
    if not is_known(values):
        values = [traced(value) for value in values]
    return xp.stack(values)


def _nothing(step: Step, state: Sequence[Any], declared: Sequence[Any]) -> Sequence[Any]:
    """What a loop of no iterations collects: arrays of length 0."""
    try:
        kinds = jax.eval_shape(lambda: _arrays(step(np.array(0, np.int64), state, ())[1]))
        return [jnp.zeros((0, *kind.shape), kind.dtype) for kind in kinds]
    except (_Varies, Break):
        shapes = [[d if isinstance(d, int) else 0 for d in value.shape or ()] for value in declared]
        return [np.zeros((0, *shape), value.dtype.numpy()) for shape, value in zip(shapes, declared, strict=True)]


def _kinds(values: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), values)


def _arrays(values: Any, axes: frozenset[Any] = frozenset()) -> Any:
    """`values` (a list; with lists and None in it) as JAX arrays of strict types, which vary over the mesh `axes`."""
    return jax.tree.map(functools.partial(_array, axes=axes), list(values))


def _array(value: Any, axes: frozenset[Any]) -> jax.Array:
    if is_string(value) or isinstance(value, str):
        raise _Varies
    array = traced(value)
    return varying(lax.convert_element_type(array, array.dtype), axes)


def varying_axes(values: Any) -> frozenset[Any]:
    """The axes of a mesh over which any of `values` differs, inside of `jax.shard_map`."""
    leaves = [leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array)]
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in leaves))


def varying(array: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """`array` as one that may differ over `axes`: a loop has to carry the same type on."""
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return lax.pcast(array, tuple(missing), to="varying") if missing else array

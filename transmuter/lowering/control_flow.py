"""Control flow: If, Loop, Scan.

Where nothing around the call records operations, a Loop is a loop in Python. While JAX traces it is a `lax.scan` if
known values alone decide how often it runs, a `lax.while_loop` if not, and unrolled if it is short or if what it
carries changes its shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx_ir as ir
from jax import lax

from transmuter.errors import LoweringError
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
from transmuter.lowering.evaluation import Break, Subgraph, describe
from transmuter.lowering.irreversible import irreversible
from transmuter.lowering.padding import LIMIT, Length, Padded, has_length
from transmuter.lowering.registry import operator
from transmuter.staging import staged

_SHORT = 8
"""Iterations up to which a traced Loop is unrolled: what it carries may stay known, and XLA sees all of it."""
_UNROLLED = 100
"""The same for a loop that cannot be a `lax.scan`."""
_BOUND = 10_000
"""Iterations up to which known values are followed to find a trip count, and a `lax.while_loop` is differentiable."""


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
        branches = functools.partial(arrays_of, then_branch), functools.partial(arrays_of, else_branch)
        return tuple(lax.cond(jnp.reshape(cond, ()), *branches))
    except _Varies:
        raise NeedsContents("cond") from None


# ---- Loop ----------------------------------------------------------------------------------------------------------


@operator(bounds=("M",))
def Loop(M=None, cond=None, *v_initial, body, key):
    """The body's condition counts only where `cond` is given (ONNX Runtime always heeds it), or where it alone could
    end the loop."""
    condition = cond if cond is not None or M is not None else np.array(True)
    state = [condition, *v_initial, *[None] * (len(body.graph.inputs) - 2 - len(v_initial))]
    moving = [j for j in range(condition is None, len(state)) if not _passes(body, j)]
    loop = _Loop(body, state, moving, key)
    limit = math.inf if M is None else None if (held := contents(M)) is None else dims(held)[0]
    is_bound = isinstance(limit, Length)
    if is_bound:
        limit = limit.bound
    if limit is not None and not is_bound and not staged():
        try:
            return loop.results(*_in_python(loop, loop.values, lambda i, values: i < limit and loop.goes_on(values)))
        except NeedsContents:  # under vmap: what follows needs no contents
            pass
    trips = None if is_bound else limit if condition is None else _trips(body, state, limit)
    try:
        if trips is not None and trips is not math.inf:
            counted = replace(loop, state=[None, *state[1:]], moving=[j for j in moving if j > 0])
            iterate = _unroll if isinstance(trips, int) and trips <= _SHORT else _iterate
            return counted.results(*iterate(counted, counted.values, trips))
        if loop.collected and not (isinstance(limit, int) and limit <= LIMIT):
            raise NeedsContents("M" if limit is None else "cond")
        values, rows, trips = _while(loop, M, limit)
        source = object()  # all have the length of the loop
        return loop.results(values, [Padded(column, trips, 0, source).benign() for column in rows])
    except _Varies:
        raise NeedsContents("M" if limit is None else "cond" if trips is None else "v_initial") from None


@dataclass(frozen=True)
class _Loop:
    """A Loop's iteration. Its state is the condition (None if it does not count) and what is carried; it changes at the
    positions `moving` alone."""

    body: Subgraph
    state: Sequence[Any]
    moving: Sequence[int]
    key: jax.Array | None

    @property
    def values(self) -> list[Any]:
        """The part of the state that moves, at the start."""
        return [self.state[j] for j in self.moving]

    @property
    def fixed(self) -> list[Any]:
        """The state without the part that moves."""
        return [None if j in self.moving else value for j, value in enumerate(self.state)]

    @property
    def collected(self) -> Sequence[ir.Value]:
        return self.body.graph.outputs[len(self.state) :]

    def placed(self, values: Sequence[Any]) -> list[Any]:
        """The whole state, with these values of the part that moves."""
        new = dict(zip(self.moving, values, strict=True))
        return [new.get(j, value) for j, value in enumerate(self.state)]

    def results(self, values: Sequence[Any], outputs: Sequence[Any] = ()) -> tuple[Any, ...]:
        return (*self.placed(values)[1:], *outputs)

    def goes_on(self, values: Sequence[Any]) -> bool:
        condition = self.placed(values)[0]
        if condition is not None and (held := contents(condition)) is None:
            raise NeedsContents("cond")
        return condition is None or bool(held.reshape(()))

    def __call__(self, i: Any, values: Sequence[Any], _: Sequence[Any] = ()) -> tuple[Sequence[Any], Sequence[Any]]:
        condition, *carried = self.placed(values)
        wanted = [*self.moving, *range(len(self.state), len(self.body.graph.outputs))]
        condition = np.array(True) if condition is None else condition
        results = self.body(i, condition, *carried, key=folded(self.key, i), outputs=wanted)
        return results[: len(self.moving)], results[len(self.moving) :]


def _passes(body: Subgraph, position: int) -> bool:
    """Whether the body passes the carried value on unchanged, as exporters do with weights."""
    value = body.graph.outputs[position]
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.graph is body.graph:
        value = node.inputs[0]
    return value is body.graph.inputs[position + 1]


def _trips(body: Subgraph, state: Sequence[Any], limit: Any) -> Any:
    """How often the loop runs, where known values decide it, as in `while i < n: i += 1`; else None."""
    if isinstance(limit, int) and limit <= 0:
        return 0
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
        given = dict(zip(order, values, strict=True))
        values = body(np.array(trips, np.int64), *map(given.get, range(len(state))), outputs=order)
        if not is_known(values):
            return None
        trips += 1
        if steady and np.reshape(values[0], ()):
            return limit
    return trips if not steady or trips == 0 else min(limit, trips)


def _while(loop: _Loop, M: Any, limit: Any) -> tuple[Sequence[Any], Sequence[Any], Any]:
    """The loop as a `lax.while_loop`: what it carries at the end, what it collects (with rows for all iterations that
    there could be), and how many there were. If its trip count has a usable bound, its derivative is that of a scan of
    so many iterations, of which those past the end do nothing."""
    most = None if M is None else traced(M).reshape(())
    outside, structure = jax.tree.flatten((loop.body.captured(), loop.fixed, loop.key, most))
    outside = [traced(leaf) if has_length(leaf) else leaf for leaf in outside]
    is_explicit = [isinstance(leaf, jax.Array) for leaf in outside]
    explicit = [leaf for leaf in outside if isinstance(leaf, jax.Array)]
    axes = varying_axes([outside, loop.values])
    initial = _arrays(loop.values, axes)
    kinds = _kinds(initial)
    number = canonical(np.int64)

    def bind(explicit: Sequence[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Whether to go on, and the iteration. A derivative may only depend on values that it is given: `explicit` are
        all those from outside that are not known."""
        given = iter(explicit)
        leaves = [next(given) if is_here else leaf for leaf, is_here in zip(outside, is_explicit, strict=True)]
        captured, fixed, key, most = jax.tree.unflatten(structure, leaves)
        inner = replace(loop, body=loop.body.with_captures(captured), state=fixed, key=key)

        def going(i: Any, values: Sequence[Any]) -> Any:
            condition = inner.placed(values)[0]
            more = jnp.asarray(True) if condition is None else traced(condition).reshape(())
            return more if most is None else more & (i < cast(most, number))

        def step(i: Any, values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            values, row = (_arrays(part, axes) for part in inner(i, values))
            if _kinds(values) != kinds:
                raise _Varies
            return values, row

        return going, step

    def run(explicit: Sequence[Any], initial: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Any]:
        going, step = bind(explicit)
        start = varying(jnp.zeros((), number), axes)
        row = jax.eval_shape(step, start, initial)[1] if loop.collected else []
        rows = [varying(jnp.zeros((max(limit, 0), *y.shape), y.dtype), axes) for y in row]

        def body(state: Any) -> Any:
            i, values, rows = state
            values, row = step(i, values)
            return i + 1, values, [column.at[i].set(y) for column, y in zip(rows, row, strict=True)]

        trips, values, rows = lax.while_loop(lambda state: going(*state[:2]), body, (start, initial, rows))
        return values, rows, trips

    def run_bounded(explicit: Sequence[Any], initial: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Any]:
        going, step = bind(explicit)

        def masked(values: Sequence[Any], i: Any) -> tuple[Sequence[Any], Any]:
            here = going(i, values)  # past the end the step starts from initial values, where it has a derivative
            new, row = step(i, jax.tree.map(functools.partial(jnp.where, here), values, initial))
            return jax.tree.map(functools.partial(jnp.where, here), new, values), (row, here)

        values, (rows, here) = lax.scan(masked, initial, varying(jnp.arange(limit, dtype=number), axes))
        return values, rows, jnp.sum(here, dtype=number)

    if isinstance(limit, int) and limit <= _BOUND:
        run = jax.custom_jvp(run)
        run.defjvp(lambda primals, tangents: jax.jvp(run_bounded, primals, tangents))
        return run(explicit, initial)
    values, rows, trips = run(explicit, initial)
    message = (
        f"No gradient flows backwards through {describe(loop.body.node)}: how often it runs is only known while it "
        f"runs. Export it with a maximum trip count (the operand M) that is known and at most {_BOUND}, or keep the "
        "gradient off it with frozen params or jax.lax.stop_gradient. Forward mode (jax.jvp) works."
    )
    return [irreversible(x, message) for x in values], rows, trips


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
        elements = [x[backwards] if flag else x for x, flag in _with(inputs, directions)]

        def step(i: Any, state: Sequence[Any], elements: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
            results = _arrays(body(*state, *elements, key=folded(folded(key, index), i)))
            going = cast(i, end.dtype) < end
            new = [jnp.where(going, n, o) for n, o in zip(results[:count], state, strict=True)]
            return new, [jnp.where(going, y, jnp.zeros_like(y)) for y in results[count:]]

        state, outputs = _scan(_Iteration(body, step, body.graph.outputs[count:]), state, length, elements)
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
    elements = [jnp.moveaxis(x, axis, 0) for x, axis in _with(inputs, scan_input_axes)]
    elements = [jnp.flip(x, 0) if backwards else x for x, backwards in _with(elements, scan_input_directions)]
    if len({x.shape[0] for x in elements}) > 1:
        raise ValueError(f"the scan inputs have different lengths {[x.shape[0] for x in elements]}")

    def step(i: Any, state: Sequence[Any], elements: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        results = body(*state, *elements, key=folded(key, i))
        return results[:count], results[count:]

    iteration = _Iteration(body, step, body.graph.outputs[count:])
    try:
        state, outputs = _iterate(iteration, state, elements[0].shape[0], elements)
    except _Varies:
        raise ValueError("a state variable changes its shape or dtype") from None
    outputs = [jnp.flip(y, 0) if backwards else y for y, backwards in _with(outputs, scan_output_directions)]
    return (*state, *(jnp.moveaxis(y, 0, axis) for y, axis in _with(outputs, scan_output_axes)))


def _with(values: Sequence[Any], flags: Sequence[int] | None) -> Iterable[tuple[Any, int]]:
    """Each value with its flag, which is 0 where none are given."""
    return zip(values, flags or [0] * len(values), strict=True)


# ---- how to iterate ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Iteration:
    """One iteration of a `body`: `step` takes its number, what is carried, and an element of each array that is
    scanned, and returns what is carried on and what is collected (the graph's outputs `collected`)."""

    body: Subgraph
    step: Callable[[Any, Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]
    collected: Sequence[ir.Value]

    def __call__(self, i: Any, values: Sequence[Any], elements: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return self.step(i, values, elements)


def _iterate(
    iteration: _Loop | _Iteration, values: Sequence[Any], length: Any, elements: Sequence[Any] = ()
) -> tuple[Sequence[Any], Sequence[Any]]:
    """`length` iterations as a `lax.scan`; unrolled if something in it needs contents or changes its shape."""
    try:
        return _scan(iteration, values, length, elements)
    except (_Varies, Break):
        if not isinstance(length, int) or (staged() and length > _UNROLLED):
            raise
        return _unroll(iteration, values, length, elements)


def _scan(
    iteration: _Loop | _Iteration, values: Sequence[Any], length: Any, elements: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any]]:
    axes = varying_axes([values, elements, iteration.body.captured()])
    values = _arrays(values, axes)
    kinds = _kinds(values)

    def checked(values: Sequence[Any], scanned: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        values, outputs = iteration(scanned[0], values, scanned[1])
        values = _arrays(values, axes)
        if _kinds(values) != kinds:
            raise _Varies
        return values, _arrays(outputs)

    number = jnp.arange(length, dtype=canonical(np.int64))
    return lax.scan(checked, values, (number, list(elements)))


def _unroll(
    iteration: _Loop | _Iteration, values: Sequence[Any], length: int, elements: Sequence[Any] = ()
) -> tuple[Sequence[Any], Sequence[Any]]:
    return _in_python(iteration, values, lambda i, _: i < length, elements)


def _in_python(
    iteration: _Loop | _Iteration,
    values: Sequence[Any],
    going: Callable[[int, Sequence[Any]], bool],
    elements: Sequence[Any] = (),
) -> tuple[Sequence[Any], Sequence[Any]]:
    rows: list[Sequence[Any]] = []
    while going(i := len(rows), values):
        values, outputs = iteration(np.array(i, np.int64), values, [x[i] for x in elements])
        rows.append(outputs)
    if not rows and iteration.collected:
        return values, _nothing(iteration, values, elements)
    return values, [_stacked(column) for column in zip(*rows, strict=True)]


def _stacked(values: Sequence[Any]) -> Any:
    return xp.stack(values if is_known(values) else [traced(value) for value in values])


def _nothing(iteration: _Loop | _Iteration, values: Sequence[Any], elements: Sequence[Any]) -> Sequence[Any]:
    """What a loop of no iterations collects: arrays of length 0."""

    def first() -> Sequence[Any]:
        return _arrays(iteration(np.array(0, np.int64), values, [jnp.zeros(x.shape[1:], x.dtype) for x in elements])[1])

    try:
        return [jnp.zeros((0, *kind.shape), kind.dtype) for kind in jax.eval_shape(first)]
    except (_Varies, Break, LoweringError):  # the body does not work on what there is no element of
        shapes = [[d if isinstance(d, int) else 0 for d in value.shape or ()] for value in iteration.collected]
        return [np.zeros((0, *s), v.dtype.numpy()) for s, v in zip(shapes, iteration.collected, strict=True)]


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

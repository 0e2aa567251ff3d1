"""What a step does to the model before it differentiates it: products in bfloat16, values computed again, not kept.

Both transforms trace a function and evaluate its primitive operations in another way, so that they hold for any graph.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import remat_p

from transmuter.errors import InputError
from transmuter.lowering.platform import on_cpu, training_options
from transmuter.segments.preparation import Operation, Ref, Trace, evaluate, live
from transmuter.segments.rewriting import Replacement, View, environment, rewriting, traced, within

Policy = Callable[..., Any]
"""What `jax.checkpoint` takes as `policy`: which values of a block are kept."""
Transform = Callable[[Callable[..., Any]], Callable[..., Any]]

_LOOPS = {"scan", "while", "cond"}
_POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")


def transform(compute_type: str | None, remat: str | Policy | None) -> Transform | None:
    """What `compute_type` and `remat` of a step ask for; None where they ask for nothing.

    Raises:
        InputError: There is no such type or policy.
    """
    if compute_type not in ("bfloat16", None):
        raise InputError(
            f"compute_type is {compute_type!r}, but must be 'bfloat16', or None for that of the model (float16 would "
            "need its loss scaled)."
        )
    if remat is not None and not callable(remat) and remat not in _POLICIES:
        raise InputError(
            f"remat is {remat!r}. Give one of {', '.join(map(repr, _POLICIES))}, or a policy of "
            "jax.checkpoint_policies; None keeps all values."
        )
    policy = getattr(jax.checkpoint_policies, remat) if isinstance(remat, str) else remat
    if compute_type is None and policy is None:
        return None

    def transformed(function: Callable[..., Any]) -> Callable[..., Any]:
        function = function if compute_type is None else products_in_bfloat16(function)
        return function if policy is None else rematerialized(function, policy)

    return transformed


def _refs(op: Operation) -> list[Ref]:
    """The operands of an operation that are no literals."""
    return [operand for operand in op.operands if isinstance(operand, Ref)]


# ---- products in bfloat16 ------------------------------------------------------------------------------------------

_BFLOAT16 = np.dtype(jnp.bfloat16)
_PRODUCTS = {"dot_general", "conv_general_dilated"}


def products_in_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose float32 matrix products and convolutions take bfloat16 operands and have bfloat16 results.

    torch.autocast chooses the same operations, but also lets some others go on in the dtype of their operands; here all
    others stay in float32, sums and softmax included. So do products whose operands have to be exact: those with a
    constant (interpolation) and those that sum nothing (positions times frequencies). Products in the body of a Loop
    of unknown length stay as they are, too.

    The gradients of these products are products of bfloat16.
    """

    return rewriting(function, _halved)


def _halved(view: View) -> Iterator[Replacement]:
    """A rule that puts products of bfloat16 in the place of those of float32."""
    for op in view.trace.operations:
        name, params = op.equation.primitive.name, op.equation.params
        if name in _PRODUCTS and _may_be_rounded(view, op):
            params = {**params, "precision": None, "preferred_element_type": _BFLOAT16}
            function = functools.partial(_in_bfloat16, op.equation.primitive, params)
            yield Replacement(op.results, function, op.operands)
        elif name in _LOOPS:
            yield within(op, _halved)


def _may_be_rounded(view: View, op: Operation) -> bool:
    """Whether a product is one of float32, with a sum in it, and of no constant."""
    a, b = map(view.aval, op.operands)
    if {a.dtype, b.dtype} != {np.dtype(np.float32)} or not view.weights.isdisjoint(_refs(op)):
        return False
    numbers = op.equation.params["dimension_numbers"]
    if op.equation.primitive.name == "dot_general":
        (contracted, _), _ = numbers
        return math.prod(a.shape[i] for i in contracted) != 1
    return math.prod(b.shape) != b.shape[numbers.rhs_spec[0]]


def _in_bfloat16(primitive: jex.Primitive, params: Mapping[str, Any], *operands: jax.Array) -> list[jax.Array]:
    halves = [lax.convert_element_type(x, _BFLOAT16) for x in operands]
    return [lax.convert_element_type(primitive.bind(*halves, **params), np.float32)]


# ---- values computed again -----------------------------------------------------------------------------------------

_MOST_CUTS = 200
"""So many of the narrowest places are looked at."""
_LIMITS = 64
"""So many sizes of the largest block are tried."""


def rematerialized(function: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """A function in blocks, each under `jax.checkpoint` with this policy.

    Blocks end where few bytes pass on to later ones, and are chosen so that these bytes and the largest block together
    take the least memory. In a network of layers they are its layers, or their halves; no names are looked at.
    """

    def computed(*arguments: Any) -> Any:
        trace, structure = traced(function, arguments)
        values = environment(trace, arguments)
        blocks = _blocks(trace)
        for block in blocks:
            run = functools.partial(block.run, trace.constants)
            run = jax.checkpoint(run, policy=policy) if len(blocks) > 1 else run
            values.update(zip(block.results, run([values[ref] for ref in block.operands]), strict=True))
        results = [values[output] if isinstance(output, Ref) else output.val for output in trace.outputs]
        return jax.tree.unflatten(structure, results)

    return computed


def jit_in_turn(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` of a function with the backward pass of rematerialized blocks in it, one after the other.

    On a CPU XLA takes the barriers of `jax.checkpoint` out before it chooses an order: it would compute blocks too
    early, or leave the gradients of weights for last, and keep what these need until then.
    """
    if not on_cpu():
        return jax.jit(function, **options)
    return jax.jit(rewriting(function, _in_turn), compiler_options=training_options(in_order=True), **options)


def _in_turn(view: View) -> Iterator[Replacement]:
    """A rule: what a block's backward pass takes depends on what the one ahead of it gave, by a sum with zero."""
    given: set[Ref] = {*view.trace.inputs, *view.trace.constants}
    before: tuple[Ref, ...] = ()
    for op in view.trace.operations:
        primitive, params = op.equation.primitive, op.equation.params
        if primitive is remat_p and params["differentiated"]:
            waits = [isinstance(x, Ref) and x not in given and _is_float(view.aval(x)) for x in op.operands]
            function = functools.partial(_after, primitive, params, waits)
            yield Replacement(op.results, function, (*op.operands, *before))
            before = tuple(ref for ref in op.results if _is_float(view.aval(ref)))
        elif primitive.name in _LOOPS:
            yield within(op, _in_turn)


def _after(primitive: jex.Primitive, params: Mapping[str, Any], waits: Sequence[bool], *operands: Any) -> list[Any]:
    own, before = operands[: len(waits)], operands[len(waits) :]
    ahead = [x.ravel()[0].astype(np.int32) for x in (*before, *itertools.compress(own, waits))]
    nothing = sum(((x | 1) == 0).astype(np.float32) for x in ahead)  # which XLA does not know to be 0
    tied = [x + nothing.astype(x.dtype) if wait else x for x, wait in zip(own, waits, strict=True)]
    return primitive.bind(*tied, **primitive.get_bind_params(params))


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating) and math.prod(aval.shape) > 0


@dataclass(frozen=True)
class _Block:
    """Operations, the values that they take from before, and those that they give to later ones."""

    operations: Sequence[Operation]
    operands: Sequence[Ref]
    results: Sequence[Ref]

    def run(self, constants: Mapping[Ref, Any], operands: Sequence[Any]) -> list[Any]:
        return evaluate(self.operations, {**constants, **dict(zip(self.operands, operands, strict=True))}, self.results)


def _blocks(trace: Trace) -> list[_Block]:
    operations = live(trace.operations, trace.outputs)
    ends = _ends(operations, trace)
    needed = {output for output in trace.outputs if isinstance(output, Ref)}
    blocks = []
    for start, end in reversed(list(zip([0, *ends], ends))):
        part = operations[start:end]
        made = {ref for op in part for ref in op.results}
        read = {ref for op in part for ref in _refs(op)} - made - trace.constants.keys()
        blocks.append(_Block(part, sorted(read), sorted(made & needed)))
        needed |= read
    return blocks[::-1]


def _ends(operations: Sequence[Operation], trace: Trace) -> list[int]:
    """The places at which blocks end, the last of which is the end of all.

    What is kept is, for each end, the bytes that were computed since the end before it and are read after it; and for
    the block that is computed again, all bytes that it computes. Their sum is the smallest for one size of the largest
    block; for each size, the ends that keep the least are a shortest path.
    """
    count = len(operations)
    made = {ref: i for i, op in enumerate(operations) for ref in op.results}
    last = {ref: i for i, op in enumerate(operations) for ref in _refs(op) if ref in made}
    last.update({ref: count for ref in trace.outputs if isinstance(ref, Ref) and ref in made})
    refs = [ref for ref, i in made.items() if last.get(ref, i) > i]
    starts, stops = np.array([made[ref] for ref in refs], int), np.array([last[ref] for ref in refs], int)
    sizes = np.array([_nbytes(trace.avals[ref]) for ref in refs], float)
    passing = np.cumsum(np.bincount(starts + 1, sizes, count + 2) - np.bincount(stops + 1, sizes, count + 2))
    places = _narrow(passing[: count + 1])
    # kept[i, j]: bytes made between the places i and j and read after j
    rows, steps = np.searchsorted(places, starts, "right") - 1, np.zeros((len(places), len(places) + 1))
    np.add.at(steps, (rows, rows + 1), sizes)
    np.add.at(steps, (rows, np.searchsorted(places, stops, "right")), -sizes)
    kept = np.cumsum(np.cumsum(steps, 1)[::-1], 0)[::-1, :-1]
    kept[:, -1] = 0
    computed = np.cumsum([0.0, *(sum(_nbytes(trace.avals[ref]) for ref in op.results) for op in operations)])[places]
    inside = computed[None, :] - computed[:, None]
    limits = np.unique(inside[inside > 0])
    found = (math.inf, [count])
    for limit in limits[np.unique(np.linspace(0, len(limits) - 1, _LIMITS).astype(int))] if len(limits) else ():
        total, ends = _shortest(kept, inside <= limit)
        found = min(found, (total + limit, [int(places[i]) for i in ends]))
    return found[1]


def _narrow(passing: np.ndarray) -> np.ndarray:
    """The start, the end, and places between at which fewer bytes pass than right after, and no more than before."""
    inner = np.arange(1, len(passing) - 1)
    inner = inner[(passing[inner] <= passing[inner - 1]) & (passing[inner] < passing[inner + 1])]
    inner = np.sort(inner[np.argsort(passing[inner], kind="stable")[:_MOST_CUTS]])
    return np.array([0, *inner, len(passing) - 1])


def _shortest(lengths: np.ndarray, allowed: np.ndarray) -> tuple[float, list[int]]:
    """The shortest path from the first place to the last, forwards by allowed steps: its length, and where it stops."""
    lengths = np.where(allowed, lengths, np.inf)
    totals, before = np.zeros(len(lengths)), np.zeros(len(lengths), int)
    for place in range(1, len(lengths)):
        ways = totals[:place] + lengths[:place, place]
        before[place] = np.argmin(ways)
        totals[place] = ways[before[place]]
    path = [len(lengths) - 1]
    while before[path[-1]]:
        path.append(int(before[path[-1]]))
    return float(totals[-1]), path[::-1]


def _nbytes(aval: Any) -> int:
    """The bytes of an array; random keys count for nothing."""
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)

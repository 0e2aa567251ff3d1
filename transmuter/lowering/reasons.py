"""Why a graph breaks at a node, and what would remove the break: the text of `explain()` and of `GraphBreakError`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from transmuter.lowering import padding, registry
from transmuter.lowering.arrays import is_float
from transmuter.lowering.evaluation import (
    HOST,
    LENGTH,
    Break,
    Program,
    Scope,
    describe,
    is_hidden,
    operator_name,
    subgraphs,
)

STATIC, STATIC_FLOATS = 1024, 16
"""Elements up to which a scalar or vector input, of integers or of floats, is worth naming in `static_inputs`."""
_CONTENTS_FREE = ("Shape", "Size")


@dataclass(frozen=True)
class Reason:
    """Why a node needs what is hidden.

    Attributes:
        node: How messages call the node that needs it, the innermost one: in a loop's body, say.
        within: How they call the node of the graph around, if that is another.
        operand: The operand that it needs.
        what: What it needs of it, as in "needs the contents of its operand 'shape'".
        origin: The chain of values that leads to the operand, itself first, back to an input.
        inputs: Every hidden input that has a part in it.
        advice: What would help, in sentences.
    """

    node: str
    within: str
    operand: str
    what: str
    origin: tuple[str, ...]
    inputs: tuple[str, ...]
    advice: str


def break_reason(needed: Break, program: Program, scope: Scope, past: Mapping[ir.Value, bool]) -> Reason:
    """The reason for a break, with the values of `scope`; `past` says of others whether they were hidden."""
    outer, feeds = needed.node, {}
    while needed.inside is not None:
        feeds.update(_feeds(needed.node, needed.inside.node))
        needed = needed.inside
    node = needed.node
    value = node.inputs[needed.position] if needed.position < len(node.inputs) else None
    host = next((v for v in program.operands(node) if _held(v, scope) is HOST), None)
    if host is not None:
        value, what = host, f"reads {host.name!r}, a string or map, which only exists outside of compiled segments"
    elif needed.is_length and needed.operand == LENGTH:
        value, what = node.outputs[0], f"gives {node.outputs[0].name!r} of a length that depends on contents"
    elif needed.is_length:
        what = f"needs to know how long its operand {needed.operand!r} is"
    else:
        what = f"needs the contents of its operand {needed.operand!r}"
    trail = _Trail(program, scope, past, feeds)
    origin, roots = trail.follow(list(program.operands(node)) if value is None else [value])
    advice = [*_advice_on_inputs(roots, scope), _advice(needed, program, value, scope, is_host=host is not None)]
    if outer is not node:
        advice.append(f"All of {describe(outer)} runs eagerly because of it: move it out of there if you can.")
    return Reason(
        describe(node),
        describe(outer) if outer is not node else "",
        needed.operand,
        what,
        tuple(origin),
        tuple(v.name or "" for v in roots if _is_input(v, program)),
        " ".join(advice),
    )


def length_reason(value: ir.Value, program: Program, scope: Scope, past: Mapping[ir.Value, bool]) -> Reason:
    """Why only the run knows how long a value is."""
    origin, roots = _Trail(program, scope, past, {}).follow([value])
    node = value.producer()
    mask = "Mask (Where) rather than select, and nothing has to be cut."
    return Reason(
        describe(node) if node is not None else "",
        "",
        "",
        f"gives {value.name!r} of a length that depends on contents",
        tuple(origin),
        tuple(v.name or "" for v in roots if _is_input(v, program)),
        " ".join([*_advice_on_inputs(roots, scope), mask]),
    )


def shortened(chain: Sequence[str], most: int = 10) -> list[str]:
    """A chain of which the middle is left out if it is long."""
    if len(chain) <= most:
        return list(chain)
    ends = most // 2
    return [*chain[:ends], f"... {len(chain) - 2 * ends + 1} more ...", *chain[1 - ends :]]


# ---- where contents come from --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trail:
    """Follows values to where they come from, along those that are hidden."""

    program: Program
    scope: Scope
    past: Mapping[ir.Value, bool]
    feeds: Mapping[ir.Value, tuple[str, tuple[ir.Value, ...]]]

    def follow(self, starts: Sequence[ir.Value]) -> tuple[list[str], list[ir.Value]]:
        """The shortest chain from one of `starts` to an input (or else a weight, or what no value decides), and all
        that the contents come from."""
        towards: dict[ir.Value, ir.Value | None] = {v: None for v in starts if self._is_hidden(v) is not False}
        pending, roots = list(towards), []
        for value in pending:  # which grows
            sources = [v for v in self._sources(value) if self._is_hidden(v) is not False]
            if self._is_open(value):  # a length comes from where there is one, if anywhere
                sources = [v for v in sources if self._is_open(v)] or sources
            if not sources and (self._is_hidden(value) or value in self.feeds):
                roots.append(value)
            for source in sources:
                if source not in towards:
                    towards[source] = value
                    pending.append(source)
        roots.sort(key=self._rank)
        end = roots[0] if roots else next(iter(starts), None)
        chain: list[str] = []
        while end is not None:
            chain.append(self._label(end))
            end = towards.get(end)
        return chain[::-1], roots

    def _is_hidden(self, value: ir.Value) -> bool | None:
        """None: nobody knows, as of the values of a loop's body once it is over."""
        held = _held(value, self.scope)
        if held is not None:
            return is_hidden(held)
        if value in self.past:
            return self.past[value]
        node = value.producer()
        is_free = node is not None and (node.op_type in _CONTENTS_FREE or not any(self.program.operands(node)))
        return False if is_free or value.is_initializer() else None

    def _is_open(self, value: ir.Value) -> bool:
        return padding.is_open(_held(value, self.scope))

    def _sources(self, value: ir.Value) -> Iterable[ir.Value]:
        node = value.producer()
        return self.feeds.get(value, ("", ()))[1] if node is None else self.program.operands(node)

    def _rank(self, value: ir.Value) -> int:
        return 0 if _is_input(value, self.program) else 1 if value.is_initializer() else 2

    def _label(self, value: ir.Value) -> str:
        if value in self.feeds:
            return f"{value.name!r}, {self.feeds[value][0]}"
        node = value.producer()
        if node is not None:
            return f"{value.name!r} of {operator_name(node)}"
        return f"{'weight' if value.is_initializer() else 'input'} {value.name!r}"


def _held(value: ir.Value, scope: Scope) -> Any:
    try:
        return scope[value]
    except KeyError:
        return None


def _is_input(value: ir.Value, program: Program) -> bool:
    return value.producer() is None and value in program.graph.inputs and not value.is_initializer()


def _feeds(outer: ir.Node, inner: ir.Node) -> dict[ir.Value, tuple[str, tuple[ir.Value, ...]]]:
    """The inputs of the graph that `inner` is in: what messages call them, and what `outer` gives them."""
    graph, found = inner.graph, {}
    shift = len(outer.inputs) - len(graph.inputs) if outer.op_type == "Scan" else 0
    for i, value in enumerate(graph.inputs):
        place = i + shift
        given = [outer.inputs[place]] if 0 <= place < len(outer.inputs) else []
        label = f"which {describe(outer)} gives to its graph"
        if outer.op_type == "Loop":
            label = f"which {describe(outer)} carries" if i else f"the iteration of {describe(outer)}"
            given += [graph.outputs[i - 1]] if i else []
        elif outer.op_type == "Scan" and i < len(graph.inputs) - outer.attributes["num_scan_inputs"].value:
            label = f"which {describe(outer)} carries"
            given.append(graph.outputs[i])
        found[value] = (label, tuple(v for v in given if v is not None))
    return found


# ---- what would help -----------------------------------------------------------------------------------------------


def _advice_on_inputs(roots: Sequence[ir.Value], scope: Scope) -> list[str]:
    """What to do with the inputs that decide the contents, if these are few and small."""
    if not roots:
        return []
    if all(v.is_initializer() for v in roots):
        return ["Weights alone decide it: store the result in the model instead."]
    if not all(v.producer() is None and v.is_graph_input() and _is_small(v, scope) for v in roots):
        return []
    names = " and ".join(f"{v.name!r} ({_kind(v, scope)})" for v in roots)
    one = len(roots) == 1
    return [
        f"The small {'input' if one else 'inputs'} {names} alone {'decides' if one else 'decide'} it: with "
        f"{'that' if one else 'those'} in static_inputs there is no break."
    ]


def _is_small(value: ir.Value, scope: Scope) -> bool:
    """Whether an input looks like a setting rather than like data."""
    shape, size = _shape(value, scope), _size(value, scope)
    if size is None or len(shape) > 1 or value.dtype is None:
        return False
    return size <= (STATIC_FLOATS if is_float(np.empty(0, value.dtype.numpy())) else STATIC)


def _size(value: ir.Value, scope: Scope) -> int | None:
    shape = _shape(value, scope)
    return None if shape is None or not all(isinstance(d, int) for d in shape) else math.prod(shape)


def _shape(value: ir.Value, scope: Scope) -> Sequence[Any] | None:
    held = _held(value, scope)
    return held.shape if hasattr(held, "shape") else value.shape


def _kind(value: ir.Value, scope: Scope) -> str:
    return f"{'array' if value.dtype is None else value.dtype.numpy().name}{list(_shape(value, scope) or ())}"


def _advice(needed: Break, program: Program, value: ir.Value | None, scope: Scope, *, is_host: bool) -> str:
    node = needed.node
    domain = "" if node.domain == "ai.onnx" else node.domain
    lowering = registry.find(domain, node.op_type, program.opsets.get(domain, 1))
    gives_strings = any(v.dtype is ir.DataType.STRING for v in node.outputs)
    if is_host or gives_strings:
        name = operator_name(node)
        return f"Strings and maps exist on the host alone: run {name} outside of the model, and give it the result."
    if needed.is_length:
        size = None if value is None else _size_of_padded(value, scope)
        bound = "" if size is None else f", {size} elements,"
        return (
            f"What it takes is computed at its largest size{bound} and cut before it, for which the host reads one "
            "number. Sums, scatters and operators that work on each element by itself need no cut; nor does a mask "
            "(Where) in place of a choice of elements."
        )
    if domain == "" and node.op_type == "If":
        return (
            "Its branches differ in the shapes or dtypes of what they give. If they agree, both become part of the "
            "segment: pad the smaller result, or decide the condition before the call."
        )
    if domain == "" and node.op_type == "Loop":
        return _advice_on_loop(needed, node)
    if (domain, node.op_type) in padding.BOUNDED and needed.operand not in ("starts", "ends"):
        first = node.inputs[0]
        size = None if first is None else _size(first, scope)
        here = f"; here there are {size}" if size is not None and size > padding.LIMIT else ""
        return (
            f"Its result is as long as the contents say. Up to {padding.LIMIT} elements it is computed at its largest "
            f"size, without a break{here}. Mask (Where) in place of choosing elements, or choose a fixed number of "
            "them (TopK)."
        )
    if lowering is not None and needed.operand in lowering.known:
        return (
            f"{needed.operand!r} has to be known before the node can be compiled. Compute it from shapes rather than "
            "contents, or make it an input of at most 16 integers: these enter the signature by themselves."
        )
    return "Compute what it reads before the call, and make that an input of the model."


def _advice_on_loop(needed: Break, node: ir.Node) -> str:
    body = next(iter(subgraphs(node)), None)
    collects = body is not None and len(body.outputs) > len(body.inputs) - 1
    if collects and needed.operand != "v_initial":
        return (
            "It collects a value from each iteration, and only the run knows how many there are. A constant M of at "
            f"most {padding.LIMIT}, of which the condition may use less, keeps it in the segment."
        )
    return (
        "What it carries changes its shape from one iteration to the next. Carry arrays of a fixed shape: write into "
        "one of the final length, instead of joining. A constant M of at most 100 without a condition is unrolled."
    )


def _size_of_padded(value: ir.Value, scope: Scope) -> int | None:
    held = _held(value, scope)
    return held.bound if isinstance(held, padding.Padded) else None

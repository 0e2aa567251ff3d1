"""Runs the nodes of a graph through their lowerings: eagerly, or while JAX traces.

One `Program` per model holds what never changes (which lowering each node has, its attributes, what it captures); one
`Evaluation` is one pass over some nodes. Values live in a `Scope`, keyed by the graph's own `onnx_ir.Value` objects.
A node that needs contents which are hidden raises `Break`; `segments` collects these, everybody else gets a
`GraphBreakError`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import onnx
import onnx_ir as ir

from transmuter.errors import GraphBreakError, LoweringError, ModelError, TransmuterError, UnsupportedOperatorError
from transmuter.lowering import padding, registry
from transmuter.lowering.arrays import (
    NeedsContents,
    cast,
    computed,
    contents,
    is_known,
    is_string,
    is_symbolic,
    narrow,
    settled,
    traced,
)


class _Pending:
    """Stands for a value that does not exist yet: it waits for a graph break."""

    def __repr__(self) -> str:
        return "pending"


class _Host:
    """Stands for a value that only exists between segments: a string, a map."""

    def __repr__(self) -> str:
        return "host value"


PENDING, HOST = _Pending(), _Host()

LENGTH = "length"
"""What a `Break` names as operand where a subgraph's own output has padding."""


def is_hidden(value: Any) -> bool:
    """Whether tracing cannot tell what a value is."""
    return value is HOST or value is PENDING or not is_known(value) or padding.is_open(value)


class Break(Exception):
    """A node needs the contents of an operand, or the `padding.Length` of one, and a JAX transform hides them."""

    def __init__(
        self, node: ir.Node, position: int, operand: str, inside: Break | None = None, *, is_length: bool = False
    ):
        super().__init__(node, position, operand)
        self.node, self.position, self.operand, self.inside = node, position, operand, inside
        self.is_length = is_length

    @property
    def only_reads(self) -> bool:
        """Whether it is enough to read something: the node itself then belongs to the next segment. So it is for an
        `If`, whose branch is inlined there."""
        return self.is_length or (self.node.op_type == "If" and _domain(self.node) == "")

    def values(self) -> list[ir.Value]:
        """The operands whose contents would do: all of them where the need arises inside of a subgraph."""
        operands = [v for v in self.node.inputs if v is not None]
        at = self.node.inputs[self.position] if self.position < len(self.node.inputs) else None
        return operands if self.inside is not None or at is None else [at]


class Promote(Exception):
    """Tracing needs the contents of these arguments, which are small: they become part of the signature."""

    def __init__(self, values: frozenset[ir.Value]):
        super().__init__(values)
        self.values = values


@dataclass(frozen=True)
class Bind:
    """Work that gives the outputs of an inlined `If` the values of its branch's outputs."""

    outputs: tuple[ir.Value, ...]
    sources: tuple[ir.Value, ...]


Work = ir.Node | Bind


class Scope:
    """The values of a graph's run; a subgraph's scope sees through to its `parent`."""

    __slots__ = ("attributes", "key", "opsets", "parent", "values")

    def __init__(
        self,
        values: dict[ir.Value, Any],
        opsets: Mapping[str, int],
        *,
        parent: Scope | None = None,
        attributes: Mapping[str, ir.Attr] | None = None,
        key: jax.Array | None = None,
    ):
        self.values, self.opsets, self.parent, self.key = values, opsets, parent, key
        self.attributes = attributes

    def __getitem__(self, value: ir.Value) -> Any:
        scope: Scope | None = self
        while scope is not None:
            if value in scope.values:
                return scope.values[value]
            scope = scope.parent
        raise KeyError(value)


@dataclass(frozen=True)
class Bound:
    """A node together with its lowering and its attributes as Python values."""

    lowering: registry.Lowering | None
    attributes: dict[str, Any]
    function: ir.Function | None = None


class Subgraph:
    """A graph attribute as a function: call it with the graph's inputs to get a tuple of its outputs.

    What the graph captures from outside, it takes from the scope of its node. `key` seeds its random nodes.
    """

    def __init__(self, graph: ir.Graph, evaluation: Evaluation, scope: Scope, node: ir.Node):
        self.graph, self._evaluation, self._scope, self.node = graph, evaluation, scope, node

    @property
    def is_random(self) -> bool:
        """Whether a node inside draws random numbers, so that each call needs a key of its own."""
        return self._evaluation.program.is_random(self.graph)

    def __call__(
        self, *args: Any, key: jax.Array | None = None, outputs: Sequence[int] | None = None
    ) -> tuple[Any, ...]:
        """The graph's outputs, or those at the positions `outputs`, which only need the args that `reads` tells."""
        outer = self._scope
        scope = Scope(
            dict(zip(self.graph.inputs, args, strict=True)),
            outer.opsets,
            parent=outer,
            attributes=outer.attributes,
            key=outer.key if key is None else key,
        )
        wanted = self._outputs(outputs)
        results = self._evaluation.body(self.graph, scope, wanted)
        for value, result in zip(wanted, results, strict=True):
            if isinstance(result, padding.Padded):  # branches and iterations have to agree in shape
                raise Break(value.producer() or self.graph[-1], 0, LENGTH, is_length=True)
        return tuple(traced(result) if padding.has_length(result) else result for result in results)

    def reads(self, outputs: Sequence[int]) -> set[int]:
        """Positions of the graph's inputs which the outputs at these positions are computed from."""
        wanted, program = self._outputs(outputs), self._evaluation.program
        read = {*wanted, *(v for node in program.work(self.graph, wanted) for v in program.operands(node))}
        return {i for i, value in enumerate(self.graph.inputs) if value in read}

    def _outputs(self, positions: Sequence[int] | None) -> tuple[ir.Value, ...]:
        outputs = tuple(self.graph.outputs)
        return outputs if positions is None else tuple(outputs[i] for i in positions)

    def captures(self) -> list[ir.Value]:
        """The outer values that the graph reads."""
        return self._evaluation.program.captures(self.graph)

    def with_captures(self, captured: Sequence[Any]) -> Subgraph:
        """The same graph, reading `captured` in place of its captures: what a transform needs to see passed
        explicitly."""
        outer = self._scope
        values = dict(zip(self.captures(), captured, strict=True))
        scope = Scope(values, outer.opsets, parent=outer, attributes=outer.attributes, key=outer.key)
        return Subgraph(self.graph, self._evaluation, scope, self.node)

    def captured(self) -> list[Any]:
        """The present values of `captures()`."""
        return [self._scope[value] for value in self.captures()]


@dataclass(frozen=True)
class Region:
    """The part of a graph that computes one of its values from others: what a Gradient node differentiates."""

    inputs: tuple[ir.Value | None, ...]
    """The values that the node's operands stand for; None for one that does not matter."""
    output: ir.Value
    work: tuple[ir.Node, ...]
    captures: tuple[ir.Value, ...]
    """What else it reads: the graph's own inputs and weights, and values of graphs around it."""


class Program:
    """What is fixed about a model's graph: bound nodes, captures, order of work."""

    def __init__(
        self, graph: ir.Graph, functions: Mapping[ir.OperatorIdentifier, ir.Function], opsets: Mapping[str, int]
    ):
        self.graph, self.functions, self.opsets = graph, functions, opsets
        self._bound: dict[ir.Node, Bound] = {}
        self._captures: dict[ir.Graph, tuple[ir.Value, ...]] = {}
        self._work: dict[Any, tuple[ir.Node, ...]] = {}
        self._bodies: dict[tuple[Any, ...], ir.Function] = {}
        self._random: dict[ir.Graph, bool] = {}
        self._regions: dict[ir.Node, Region] = {}
        self._numbering = threading.Lock()
        self._unsupported: tuple[int, dict[str, tuple[str, ...]]] = (-1, {})
        self._numbers = {node: number for number, node in enumerate(graph.all_nodes())}

    def number(self, node: ir.Node) -> int:
        """A number that is the node's own, for its random key."""
        with self._numbering:
            return self._numbers.setdefault(node, len(self._numbers))

    def work(self, graph: ir.Graph, outputs: Sequence[ir.Value]) -> tuple[ir.Node, ...]:
        """The nodes of `graph` that `outputs` need, in order."""
        key = (graph, tuple(outputs))
        if key not in self._work:
            needed, kept = set(outputs), []
            for node in reversed(graph):
                if not needed.isdisjoint(node.outputs):
                    kept.append(node)
                    needed.update(self.operands(node))
            self._work[key] = tuple(reversed(kept))
        return self._work[key]

    def captures(self, graph: ir.Graph) -> tuple[ir.Value, ...]:
        """The values that `graph`, or a graph inside it, reads from the scope around: those of enclosing graphs, and
        its own initializers."""
        if graph not in self._captures:
            own: set[ir.Value] = set(graph.inputs)
            read: dict[ir.Value, None] = {}
            for node in graph:
                own.update(node.outputs)
                read.update(dict.fromkeys(self.operands(node)))
            read.update(dict.fromkeys(graph.outputs))
            self._captures[graph] = tuple(v for v in read if v not in own)
        return self._captures[graph]

    def operands(self, node: ir.Node) -> Iterator[ir.Value]:
        """Every value that a node reads, those that its subgraphs capture included."""
        yield from self._operands(node)
        if _is_gradient(node):
            yield from self.region(node).captures

    def _operands(self, node: ir.Node) -> Iterator[ir.Value]:
        """`operands`, without those of what a Gradient node differentiates."""
        yield from (v for v in node.inputs if v is not None)
        for inner in subgraphs(node):
            yield from self.captures(inner)

    def region(self, node: ir.Node) -> Region:
        """What a Gradient node differentiates, found by the names that it gives.

        Raises:
            ModelError: The graph has no such value, or the value depends on the node itself.
        """
        if node not in self._regions:
            self._regions[node] = self._region(node, frozenset())
        return self._regions[node]

    def _region(self, node: ir.Node, around: frozenset[ir.Node]) -> Region:
        """`region`, for Gradient nodes `around` that differentiate this one."""
        around |= {node}
        if missing := {"xs", "y"} - node.attributes.keys():
            raise ModelError(f"{describe(node)} lacks the attribute {min(missing)!r}. Export the model again.")
        names = [*node.attributes["xs"].value, *(node.attributes["zs"].value if "zs" in node.attributes else ())]
        name = node.attributes["y"].value
        output = next((v for other in node.graph for v in other.outputs if v.name == name), None)
        if output is None or len(names) != len(node.inputs):
            what = f"no node computes {name!r}" if output is None else f"it names {len(names)} for {len(node.inputs)}"
            raise ModelError(f"{describe(node)} names values that it does not have: {what}. Export the model again.")
        inputs: dict[str | None, ir.Value] = {}
        captures: dict[ir.Value, None] = {}
        needed, pending = set(), [output]
        while pending:
            value = pending.pop()
            producer = value.producer()
            if value.name in names:
                inputs[value.name] = value
            elif producer is None or producer.graph is not node.graph:
                captures[value] = None
            elif producer in around:
                message = "differentiates what depends on its own result. Export the model again."
                raise ModelError(f"{describe(node)} {message}")
            elif producer not in needed:
                needed.add(producer)
                pending += self._operands(producer)
                pending += self._region(producer, around).captures if _is_gradient(producer) else ()
        work = tuple(other for other in node.graph if other in needed)
        return Region(tuple(map(inputs.get, names)), output, work, tuple(captures))

    def is_random(self, graph: ir.Graph) -> bool:
        """Whether a node of `graph`, or of a graph or function inside it, draws random numbers."""
        if graph not in self._random:
            self._random[graph] = any(self.draws(node) for node in graph)
        return self._random[graph]

    def draws(self, node: ir.Node) -> bool:
        """Whether a node draws random numbers; one with a training mode that is not given does not."""
        function = self.functions.get(node.op_identifier())
        if function is not None:
            return self.is_random(function.graph)
        inner = subgraphs(node)
        if inner:
            return any(self.is_random(graph) for graph in inner)
        domain = _domain(node)
        lowering = registry.find(domain, node.op_type, self.opsets.get(domain, 1))
        if lowering is None or "key" not in lowering.fills or "training_mode" not in lowering.operands:
            return lowering is not None and "key" in lowering.fills
        position = lowering.operands.index("training_mode")
        return position < len(node.inputs) and node.inputs[position] is not None

    def known_initializers(self) -> set[ir.Value]:
        """Initializers that some node needs the contents of: shapes, axes, pads."""
        found: set[ir.Value] = set()
        for node in self.graph.all_nodes():
            domain = _domain(node)
            lowering = registry.find(domain, node.op_type, self.opsets.get(domain, 1))
            if lowering is not None and lowering.known:
                found.update(
                    v for i, v in enumerate(node.inputs) if v is not None and lowering.operand(i) in lowering.known
                )
        return {v for v in found if v.is_initializer()}

    def unsupported(self) -> dict[str, tuple[str, ...]]:
        """Operators, anywhere in the graph and its functions, that cannot be lowered, with their nodes' names."""
        generation, cached = self._unsupported
        if generation == registry.generation():
            return cached
        found: dict[str, list[str]] = {}
        scopes = [(self.graph, self.opsets), *((f.graph, f.opset_imports) for f in self.functions.values())]
        for graph, opsets in scopes:
            for node in graph.all_nodes():
                if not self.is_supported(node, opsets):
                    found.setdefault(operator_name(node), []).append(label(node))
        result = {name: tuple(nodes) for name, nodes in sorted(found.items())}
        self._unsupported = registry.generation(), result
        return result

    def is_supported(self, node: ir.Node, opsets: Mapping[str, int]) -> bool:
        """Whether the node can be lowered: by a lowering, as a model's function, or as its schema's."""
        domain = _domain(node)
        version = opsets.get(domain, 1)
        if node.op_identifier() in self.functions or registry.find(domain, node.op_type, version) is not None:
            return True
        schema = registry.schema(domain, node.op_type, version)
        return schema is not None and (schema.has_function or schema.has_context_dependent_function)

    def bind(self, node: ir.Node, scope: Scope) -> Bound:
        """The lowering of `node` with its attributes, those that refer to the function call around it resolved."""
        bound = self._bound.get(node)
        if bound is None:
            bound = self._bind(node, scope)
            is_supported = bound.lowering is not None or bound.function is not None
            if is_supported and not any(a.is_ref() for a in node.attributes.values()):
                self._bound[node] = bound
        return bound

    def _bind(self, node: ir.Node, scope: Scope) -> Bound:
        function = self.functions.get(node.op_identifier())
        if function is not None:
            return Bound(None, {}, function)
        domain = _domain(node)
        version = scope.opsets.get(domain, 1)
        lowering = registry.find(domain, node.op_type, version)
        if lowering is None:
            return Bound(None, {}, self._body(domain, node.op_type, version))
        values = dict(lowering.defaults(version))
        for attribute in resolved(node, scope).values():
            if attribute.name not in lowering.attributes:
                raise ModelError(
                    f"{describe(node)} has the attribute {attribute.name!r}, which {node.op_type} lacks in version "
                    f"{version} of its domain. Check the opset that the model imports."
                )
            values[attribute.name] = _python(attribute)
        for name in lowering.attributes.keys() - values.keys():
            schema = registry.schema(domain, node.op_type, version)
            if schema is None or (name in schema.attributes and schema.attributes[name].required):
                raise ModelError(f"{describe(node)} lacks the attribute {name!r}. Export the model again.")
            values[name] = None
        return Bound(lowering, values)

    def _body(self, domain: str, name: str, version: int) -> ir.Function | None:
        """The function that the schema defines the operator by, where that does not depend on the operands' types."""
        schema = registry.schema(domain, name, version)
        if schema is None or not schema.has_function:
            return None
        key = (domain, name, version)
        if key not in self._bodies:
            body_version = max(v for v in schema.function_opset_versions if v <= version)
            self._bodies[key] = _function(schema.get_function_with_opset_version(body_version))
        return self._bodies[key]

    def body_for(self, node: ir.Node, operands: Sequence[Any], scope: Scope) -> ir.Function | None:
        """The function that the schema builds for operands of these types, if it does so."""
        domain = _domain(node)
        version = scope.opsets.get(domain, 1)
        schema = registry.schema(domain, node.op_type, version)
        if schema is None or not schema.has_context_dependent_function:
            return None
        proto = onnx.helper.make_node(
            node.op_type,
            ["" if v is None else f"i{i}" for i, v in enumerate(node.inputs)],
            [f"o{i}" if v.name else "" for i, v in enumerate(node.outputs)],
            domain=domain,
        )
        proto.attribute.extend(ir.to_proto(a) for a in resolved(node, scope).values())
        types = tuple(_type_proto(operand).SerializeToString() for operand in operands)
        key = (proto.SerializeToString(), types, version)
        if key not in self._bodies:
            body_version = max(v for v in schema.context_dependent_function_opset_versions if v <= version)
            body = schema.get_context_dependent_function_with_opset_version(body_version, key[0], list(types))
            self._bodies[key] = _function(body)
        return self._bodies[key]


class Evaluation:
    """One pass over some nodes of a program.

    With `breaks` (a list) a node that needs hidden contents is appended to it with the operand it needs, and what
    depends on it waits; without, it raises `GraphBreakError`. `unsupported` collects operators without a lowering in
    the same way. `promote` is asked about operands whose contents would avoid a break, and raises where it can make
    them known. `bodies` is offered each run of a subgraph, and may return its outputs.
    """

    def __init__(
        self,
        program: Program,
        *,
        breaks: list[Break] | None = None,
        unsupported: dict[str, list[str]] | None = None,
        promote: Callable[[Sequence[ir.Value]], None] | None = None,
        bodies: Callable[[ir.Graph, Scope, tuple[ir.Value, ...]], tuple[Any, ...] | None] | None = None,
    ):
        self.program, self.breaks, self.unsupported, self.promote = program, breaks, unsupported, promote
        self._bodies = bodies
        self.evaluated = 0
        self.past: dict[ir.Value, bool] = {}
        """Whether values that `run` has freed were hidden."""

    def run(self, work: Sequence[Work], scope: Scope, keep: frozenset[ir.Value] | None = None) -> list[Work]:
        """Evaluates `work` in `scope` and returns what waits for a break.

        With `keep`, values that no later work reads are freed as soon as they are not needed, but for those in it.
        """
        last_use = self._last_use(work, keep) if keep is not None else {}
        waiting: list[Work] = []
        for item in work:
            if isinstance(item, Bind):
                self._bind_outputs(item, scope, waiting)
                continue
            if self._is_decided(item, scope):
                waiting += self._inline_if(item, scope)
                continue
            states = [scope[v] for v in self.program.operands(item)]
            if any(state is PENDING for state in states):
                self._wait(item, scope, waiting)
                continue
            try:
                if any(state is HOST for state in states):
                    position = next((i for i, v in enumerate(item.inputs) if v is not None and scope[v] is HOST), 0)
                    lowering = self.program.bind(item, scope).lowering
                    name = f"operand {position}" if lowering is None else lowering.operand(position)
                    raise Break(item, position, name)
                self.node(item, scope)
                self.evaluated += 1
            except Break as needed:
                if self.breaks is None:
                    raise self._error(needed, scope) from None
                if self.promote is not None:
                    self.promote(needed.values())
                self.breaks.append(needed)
                self._wait(item, scope, waiting)
            except UnsupportedOperatorError as error:
                if self.unsupported is None:
                    raise
                for name, nodes in error.operators.items():
                    self.unsupported.setdefault(name, []).extend(nodes)
                self._wait(item, scope, waiting)
            for value in last_use.get(item, ()):
                freed = scope.values.pop(value, None)
                self.past[value] = is_hidden(freed)
        return waiting

    def refuse_unsupported(self, waiting: Sequence[Work], scope: Scope) -> None:
        """Raises if `run` met operators without a lowering, or if there are some among the nodes that wait.

        Raises:
            UnsupportedOperatorError: It lists them all.
        """
        found = {name: dict.fromkeys(nodes) for name, nodes in (self.unsupported or {}).items()}
        nodes = [item for item in waiting if isinstance(item, ir.Node)]
        while nodes:
            node = nodes.pop(0)
            nodes += [inner for graph in subgraphs(node) for inner in graph]
            if not self.program.is_supported(node, scope.opsets):
                found.setdefault(operator_name(node), {})[label(node)] = None
        if found:
            raise UnsupportedOperatorError({name: list(labels) for name, labels in found.items()})

    def _last_use(self, work: Sequence[Work], keep: frozenset[ir.Value]) -> dict[Work, list[ir.Value]]:
        last: dict[ir.Value, Work] = {}
        for item in work:
            if isinstance(item, ir.Node):
                last.update(dict.fromkeys(self.program.operands(item), item))
                last.update(dict.fromkeys(item.outputs, item))
        frees: dict[Work, list[ir.Value]] = {}
        for value, item in last.items():
            if value not in keep:
                frees.setdefault(item, []).append(value)
        return frees

    def _wait(self, item: Work, scope: Scope, waiting: list[Work]) -> None:
        scope.values.update(dict.fromkeys(item.outputs, PENDING))
        waiting.append(item)

    def _bind_outputs(self, bind: Bind, scope: Scope, waiting: list[Work]) -> None:
        scope.values.update({output: scope[source] for output, source in zip(bind.outputs, bind.sources, strict=True)})
        pending = [pair for pair in zip(bind.outputs, bind.sources, strict=True) if scope[pair[1]] is PENDING]
        if pending:  # the others are there already: what breaks before these do may take them
            waiting.append(Bind(*zip(*pending, strict=True)))

    def _is_decided(self, node: ir.Node, scope: Scope) -> bool:
        """Whether `node` is an `If` to inline: one whose condition is known, or can be made so."""
        if self.breaks is None or node.op_type != "If" or _domain(node) != "":
            return False
        condition = scope[node.inputs[0]]
        if condition is PENDING or condition is HOST or padding.is_open(condition):
            return False
        if contents(condition) is None and self.promote is not None:
            self.promote([node.inputs[0]])
        return contents(condition) is not None

    def _inline_if(self, node: ir.Node, scope: Scope) -> list[Work]:
        """Runs the branch of a known condition as part of the graph around it, so that a break inside, or a value that
        waits, holds up only what depends on it. Returns what waits."""
        taken = bool(contents(scope[node.inputs[0]]).reshape(()))
        branch = node.attributes["then_branch" if taken else "else_branch"].as_graph()
        waiting = self.run(self.program.work(branch, branch.outputs), scope)
        self._bind_outputs(Bind(tuple(node.outputs), tuple(branch.outputs)), scope, waiting)
        return waiting

    def body(self, graph: ir.Graph, scope: Scope, outputs: tuple[ir.Value, ...]) -> tuple[Any, ...]:
        """The outputs of a subgraph: from `bodies`, if that has another way to run it, as of a model's main graph."""
        is_plain = self._bodies is not None and scope.attributes is None and scope.opsets is self.program.opsets
        results = self._bodies(graph, scope, outputs) if is_plain else None
        return self.graph(graph, scope, outputs) if results is None else results

    def graph(self, graph: ir.Graph, scope: Scope, outputs: Sequence[ir.Value] | None = None) -> tuple[Any, ...]:
        """The outputs of `graph`, or these of its values; `scope` holds its inputs. A break anywhere inside is one of
        the node around it."""
        outputs = graph.outputs if outputs is None else outputs
        for item in self.program.work(graph, outputs):
            self.node(item, scope)
        return tuple(scope[value] for value in outputs)

    def function(self, function: ir.Function, node: ir.Node, operands: Sequence[Any], scope: Scope) -> tuple[Any, ...]:
        """The outputs of a call of `function`, which has a scope, an opset and attributes of its own."""
        attributes = {**{a.name: a for a in function.attributes.values()}, **resolved(node, scope)}
        padded = [*operands, *[None] * (len(function.inputs) - len(operands))]
        values = dict(zip(function.inputs, padded, strict=True))
        key = scope.key
        if key is not None and self.program.is_random(function.graph):
            key = jax.random.fold_in(key, self.program.number(node))
        return self.graph(function.graph, Scope(values, function.opset_imports, attributes=attributes, key=key))

    def node(self, node: ir.Node, scope: Scope) -> None:
        """Evaluates one node and puts its outputs into `scope`.

        Raises:
            Break: It needs the contents of an operand which are hidden.
            UnsupportedOperatorError: It has no lowering.
            LoweringError: Its lowering failed.
        """
        operands = [None if v is None else scope[v] for v in node.inputs]
        bound = self.program.bind(node, scope)
        function = bound.function
        if bound.lowering is None and function is None:
            function = self.program.body_for(node, operands, scope)
            if function is None:
                raise UnsupportedOperatorError({operator_name(node): [label(node)]})
        try:
            if function is not None:
                results = self.function(function, node, operands, scope)
            else:
                results = self._lower(node, bound, operands, scope)
        except Break as needed:  # of a node of a subgraph or function: it is this one that waits
            raise needed if needed.node is node else Break(node, needed.position, needed.operand, needed) from None
        except (TransmuterError, Promote):
            raise
        except Exception as error:
            raise LoweringError(_failure(node, bound, operands, scope, error)) from error
        for value, result in zip(node.outputs, results, strict=False):
            scope.values[value] = result
        for value in node.outputs[len(results) :]:
            if value.name:
                raise LoweringError(
                    f"{describe(node)} has {len(node.outputs)} outputs, but {len(results)} are defined."
                )

    def _lower(self, node: ir.Node, bound: Bound, operands: list[Any], scope: Scope) -> tuple[Any, ...]:
        lowering = bound.lowering
        while operands and operands[-1] is None:
            operands.pop()
        if len(operands) > len(lowering.operands) and not lowering.variadic:
            raise ValueError(f"{len(operands)} operands, but {lowering.name} takes {len(lowering.operands)}")
        if any(map(padding.is_open, operands)):
            try:
                closed = functools.partial(self._lower_closed, node, bound, scope)
                return padding.apply(lowering, operands, bound.attributes, closed)
            except padding.NeedsLength:
                for position, operand in enumerate(operands):
                    if isinstance(operand, padding.Padded):
                        raise Break(node, position, lowering.operand(position), is_length=True) from None
                operands = [traced(o) if padding.has_length(o) else o for o in operands]
        return self._lower_closed(node, bound, scope, operands)

    def _lower_closed(self, node: ir.Node, bound: Bound, scope: Scope, operands: list[Any]) -> tuple[Any, ...]:
        """The lowering's results for operands without padding."""
        lowering = bound.lowering
        for position, value in enumerate(operands):
            name = lowering.operand(position)
            if isinstance(value, jax.Array) and (name in lowering.known or name in lowering.reads):
                held = contents(value)
                if held is None:
                    if self.promote is not None and lowering.name in padding.RATHER_KNOWN:
                        self.promote([v for v in node.inputs[1:] if v is not None])
                    padded = self._padded(lowering, operands, bound.attributes)
                    if padded is None:
                        raise Break(node, position, name)
                    return padded
                operands[position] = held if name in lowering.known else value
        if lowering.exact_dtypes:
            operands = [_as_declared(v, o) for v, o in zip(node.inputs, operands, strict=False)]
        if not is_known(operands):
            operands = [
                _beside_traced(o) if isinstance(o, np.ndarray) and not _stays(lowering, i, o) else o
                for i, o in enumerate(operands)
            ]
        attributes = {
            name: Subgraph(value, self, scope, node) if isinstance(value, ir.Graph) else value
            for name, value in bound.attributes.items()
        }
        if "key" in lowering.fills:
            draws = self.program.draws(node)
            attributes["key"] = jax.random.fold_in(scope.key, self.program.number(node)) if draws else None
        if "output_count" in lowering.fills:
            attributes["output_count"] = len(node.outputs)
        if "region" in lowering.fills:
            attributes["region"] = functools.partial(self._region, self.program.region(node), scope)
        try:
            result = lowering.function(*operands, **attributes)
        except NeedsContents as needed:
            raise Break(node, lowering.operands.index(str(needed)), str(needed)) from None
        results = result if isinstance(result, tuple) else (result,)
        if is_known(operands) and not is_known(results):
            for operand in operands:  # JAX has narrowed the operands itself: raise where that lost something
                if isinstance(operand, np.ndarray):
                    narrow(operand)
        return tuple(r if isinstance(r, jax.Array) else settled(r) for r in results)

    def _padded(
        self, lowering: registry.Lowering, operands: list[Any], attributes: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """The results at their largest size, where the operator has such a form, and a break would not cost less."""
        function = padding.BOUNDED.get((lowering.domain, lowering.name))
        if function is None or (self.breaks is not None and np.size(operands[0]) > padding.LIMIT):
            return None
        try:
            result = function(*operands, **attributes)
        except padding.NeedsLength:
            return None
        return result if isinstance(result, tuple) else (result,)

    def _region(self, region: Region, outer: Scope, *operands: Any) -> Any:
        """The output of `region` for these values of its inputs."""
        values = {value: operand for value, operand in zip(region.inputs, operands, strict=True) if value is not None}
        scope = Scope(values, outer.opsets, parent=outer, attributes=outer.attributes, key=outer.key)
        for node in region.work:
            self.node(node, scope)
        return scope[region.output]

    def _error(self, needed: Break, scope: Scope) -> GraphBreakError:
        from transmuter.lowering.reasons import break_reason, shortened

        reason = break_reason(needed, self.program, scope, self.past)
        while needed.inside is not None:
            needed = needed.inside
        chain = f" ({' <- '.join(shortened(reason.origin))})" if reason.origin else ""
        inputs = " and ".join(map(repr, reason.inputs)) or "what decides it"
        return GraphBreakError(
            f"{reason.node}{', inside of ' if reason.within else ''}{reason.within} {reason.what}{chain}, but a JAX "
            "transform around the call (jit, vmap, checkpoint, scan, shard_map or export) hides that. Call "
            "transmuter.compile's result outside of that transform, which runs the node between two compiled segments, "
            f"or make a constant of {inputs} by giving a NumPy array. {reason.advice}",
            node=needed.node.name or "",
            operator=needed.node.op_type,
            operand=needed.operand,
            origin=reason.origin,
        )


def _stays(lowering: registry.Lowering, position: int, operand: np.ndarray) -> bool:
    """Whether the lowering takes a known operand as it is, whatever the others are."""
    name = lowering.operand(position)
    return name in lowering.known or (name in lowering.bounds and padding.has_length(operand))


def _beside_traced(value: np.ndarray) -> Any:
    """A known operand of a node that has traced ones too."""
    if is_string(value):
        return value
    return traced(value) if is_symbolic(value) else narrow(value)


def _as_declared(value: ir.Value | None, operand: Any) -> Any:
    """`operand` in the dtype that the model declares for `value`."""
    if value is None or value.dtype is None or operand is None or computed(value.dtype.numpy()) == value.dtype.numpy():
        return operand
    return cast(operand, value.dtype.numpy())


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs among a node's attributes."""
    return [a.as_graph() for a in node.attributes.values() if a.type is ir.AttributeType.GRAPH and not a.is_ref()]


def resolved(node: ir.Node, scope: Scope) -> dict[str, ir.Attr]:
    """A node's attributes, with references replaced by those of the function call around it; unset ones are left
    out."""
    found = {}
    for attribute in node.attributes.values():
        if not attribute.is_ref():
            found[attribute.name] = attribute
        elif scope.attributes is not None and attribute.ref_attr_name in scope.attributes:
            outer = scope.attributes[attribute.ref_attr_name]
            found[attribute.name] = ir.Attr(attribute.name, outer.type, outer.value)
    return found


def _is_gradient(node: ir.Node) -> bool:
    return node.op_type == "Gradient" and node.domain == "ai.onnx.preview.training"


def describe(node: ir.Node) -> str:
    """How messages call a node: its operator, and its name or else its first output's."""
    named = (
        f"node {node.name!r}" if node.name else f"the node of {node.outputs[0].name!r}" if node.outputs else "a node"
    )
    return f"{named} ({operator_name(node)})"


def label(node: ir.Node) -> str:
    """A node's name, or else its first output's."""
    return node.name or next((v.name for v in node.outputs if v.name), "?")


def operator_name(node: ir.Node) -> str:
    """`domain::Name`, or `Name` in ai.onnx."""
    domain = _domain(node)
    return f"{domain}::{node.op_type}" if domain else node.op_type


def _failure(node: ir.Node, bound: Bound, operands: Sequence[Any], scope: Scope, error: Exception) -> str:
    version = f" version {bound.lowering.since}" if bound.lowering else ""
    opset = scope.opsets.get(_domain(node), 1)
    given = ", ".join(
        f"{bound.lowering.operand(i) if bound.lowering else i}={_brief(operand)}" for i, operand in enumerate(operands)
    )
    reason = str(error).strip() or type(error).__name__
    return f"{describe(node)}, operator{version} at opset {opset}, failed on {given or 'no operands'}: {reason}"


def _brief(value: Any) -> str:
    if isinstance(value, (np.ndarray, jax.Array)):
        held = f" {value.tolist()}" if isinstance(value, np.ndarray) and value.size <= 8 else ""
        return f"{value.dtype.name}{list(value.shape)}{held}"
    if isinstance(value, (list, tuple)):
        return f"sequence of {len(value)}"
    return "absent" if value is None else type(value).__name__


def _python(attribute: ir.Attr) -> Any:
    """An attribute's value: numbers, strings, tuples of them, NumPy arrays, graphs, types."""
    if attribute.type is ir.AttributeType.TENSOR:
        return _array(attribute.value)
    if attribute.type is ir.AttributeType.TENSORS:
        return tuple(_array(tensor) for tensor in attribute.value)
    return attribute.value


def _array(tensor: ir.TensorProtocol) -> np.ndarray:
    array = array_of(tensor)
    return array.astype(computed(array.dtype))


def array_of(tensor: ir.TensorProtocol) -> np.ndarray:
    """A tensor's contents as a NumPy array; strings are an object array of `str`."""
    array = tensor.numpy()
    if tensor.dtype is ir.DataType.STRING:
        decoded = [v.decode() if isinstance(v, bytes) else str(v) for v in np.asarray(array).reshape(-1)]
        return np.array(decoded, object).reshape(tuple(tensor.shape))
    return array


def _domain(node: ir.Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _function(proto: bytes) -> ir.Function:
    return ir.from_proto(onnx.FunctionProto.FromString(proto))


def _type_proto(value: Any) -> onnx.TypeProto:
    if value is None:
        return onnx.TypeProto()
    if isinstance(value, list):
        return onnx.helper.make_sequence_type_proto(_type_proto(value[0])) if value else onnx.TypeProto()
    element = ir.DataType.STRING if is_string(value) else ir.DataType.from_numpy(np.dtype(value.dtype))
    return onnx.helper.make_tensor_type_proto(int(element), None)

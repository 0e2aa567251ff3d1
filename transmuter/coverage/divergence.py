"""The first node whose output differs from ONNX Runtime's, and a model of that node alone.

Two views are taken in one walk through the graph. Each node is fed with ONNX Runtime's values: a fault shows at the
node that has it. And the graph runs on its own values from end to end: where no node differs by itself but the end
does, rounding has accumulated.

Our values are made once, in order, and let go of after their last use. ONNX Runtime cannot pause, so it runs again for
each chunk of nodes, and returns the values of that chunk alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

import transmuter
from transmuter.coverage.catalogue import ABSOLUTE, RELATIVE
from transmuter.coverage.deviation import Deviation, Statistics, deviation, nbytes, rounds_floats
from transmuter.coverage.onenode import OneNode, type_proto
from transmuter.coverage.reference import graphs, inner_graphs, set_exact_level
from transmuter.errors import CoverageError, TransmuterError
from transmuter.lowering import registry
from transmuter.lowering.arrays import traced
from transmuter.lowering.evaluation import Evaluation, Scope, array_of, label, operator_name
from transmuter.lowering.padding import has_length
from transmuter.model import Model, returned
from transmuter.progress import bar_class
from transmuter.staging import exact_dtypes

_CHUNK = 128 << 20
"""Bytes of ONNX Runtime's values that are held at a time."""
_UNREADABLE = ("bfloat16", "float8", "float4", "int4", "int2")
"""Element types that ONNX Runtime does not hand to NumPy."""


@dataclass(frozen=True)
class NodeReport:
    """A node with what it was given and what it made of it.

    Attributes:
        name: The node's name, or its first output's.
        operator: `domain::Name`, or `Name` in ai.onnx.
        version, opset: Since which version of its domain the operator means what it does here (None where no schema
            says), and the version that the model imports.
        position: Which node of the graph it is, in topological order, from 0.
        attributes: By name, as text.
        inputs: What its operands are like, those that its subgraphs capture included.
        outputs: Its outputs that differ.
        error: What our evaluation of it raised, if it did.
    """

    name: str
    operator: str
    version: int | None
    opset: int
    position: int
    attributes: Mapping[str, str]
    inputs: tuple[Statistics, ...]
    outputs: tuple[Deviation, ...]
    error: str = ""

    @property
    def title(self) -> str:
        """Its name, operator and version in a line."""
        version = "" if self.version is None else f" version {self.version}"
        return f"{self.name} ({self.operator}{version}, opset {self.opset})"

    def __str__(self) -> str:
        lines = [f"{name} = {value}" for name, value in self.attributes.items()]
        lines += [f"input {given.name}  {given}" for given in self.inputs]
        lines += [f"fails: {self.error}"] if self.error else []
        return "\n".join([*lines, *map(str, self.outputs)])


@dataclass(frozen=True)
class Divergence:
    """What `diverge` has found.

    Attributes:
        model: The file's name.
        node: The first node that differs although it is fed with the reference's values, or that fails; None if none.
        accumulated: The first node that differs on the graph's own values, up to where the search went.
        outputs: The graph's outputs that differ on its own values, as far as the search went.
        growth: How the rms-relative error of the graph's own values grew: the nodes at which it first passed 1e-7, and
            then ten times what it was at the last of these.
        compared, nodes: How many nodes were compared, of how many that the outputs need.
        amplified: Nodes that differ by themselves, but no more than rounding explains; see `OneNode.amplifies`.
        skipped: Values and nodes that could not be compared, and why.
        passes: Bytes of values that ONNX Runtime was asked for in each of its runs.
        case: The node by itself, where `node` is one.
    """

    model: str
    node: NodeReport | None
    accumulated: NodeReport | None
    outputs: tuple[str, ...]
    growth: tuple[tuple[str, float], ...]
    compared: int
    nodes: int
    amplified: tuple[str, ...]
    skipped: tuple[str, ...]
    passes: tuple[int, ...]
    case: OneNode | None = field(repr=False)

    @property
    def found(self) -> NodeReport | None:
        """The node to look at: the one that differs by itself, or else where the error of a wrong end result first
        passes the tolerance."""
        return self.node or (self.accumulated if self.outputs else None)

    def write(self, folder: Path) -> None:
        """Writes the node that differs by itself as a model of its own; see `OneNode.write`.

        Raises:
            CoverageError: There is no such node, or ONNX Runtime does not return all of its operands.
        """
        if self.case is None:
            why = "no node differs by itself" if self.node is None else "ONNX Runtime does not return its operands"
            raise CoverageError(f"There is no one-node model of {self.model} to write: {why}. Read the report.")
        self.case.write(folder)

    def to_json(self) -> dict[str, Any]:
        """All of it but the case, of what JSON has: numbers that are not finite are texts."""
        told = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "case"}
        return {name: _plain(value) for name, value in told.items()}

    def __str__(self) -> str:
        place = "" if self.found is None else f"node {self.found.position + 1} of {self.nodes}, {self.found.title}"
        if self.node is not None:
            what = "fails" if self.node.error else "differs from ONNX Runtime"
            lines = [f"{self.model}: {place}, {what} on ONNX Runtime's own values."]
        elif self.outputs:
            which = ", ".join(self.outputs)
            lines = [
                f"{self.model}: no node differs by itself, but the whole graph does: {which}. "
                f"Its error first passes the tolerance at {place}."
            ]
        else:
            lines = [f"{self.model}: no node and no output differs from ONNX Runtime."]
            if self.accumulated is not None:
                lines[0] += f" Inside, the graph's own values first pass the tolerance at {self.accumulated.title}."
        if self.found is not None:
            lines += [f"  {line}" for line in str(self.found).splitlines()]
        if self.growth:
            lines.append(
                "  error of the graph's own values: " + ", ".join(f"{rms:.1e} at {n}" for n, rms in self.growth)
            )
        largest = max(self.passes, default=0) / (1 << 20)
        runs = f"{len(self.passes)} runs of ONNX Runtime with at most {largest:.1f} MiB of values"
        lines.append(f"  {self.compared} of {self.nodes} nodes compared, in {runs}")
        if self.amplified:
            which = ", ".join(self.amplified[:5]) + ", ..." * (len(self.amplified) > 5)
            lines.append(f"  {len(self.amplified)} of them differ no more than rounding explains: {which}")
        lines += [f"  not compared: {reason}" for reason in self.skipped]
        return "\n".join(lines)


def diverge(
    source: Path,
    inputs: Mapping[str, Any],
    *,
    compute_type: str | None = "float32",
    absolute: float = ABSOLUTE,
    relative: float = RELATIVE,
    chunk_bytes: int = _CHUNK,
    progress: bool | None = False,
) -> Divergence:
    """Finds the first node, in topological order, whose output differs from ONNX Runtime's.

    Nodes of subgraphs (branches, loop bodies) count as the node around them. Local functions are inlined for both.

    Args:
        source: An ONNX file.
        inputs: Arrays by input name.
        compute_type: As for `transmuter.load`.
        absolute, relative: A float may differ by absolute + relative * |reference|. Everything else is compared
            exactly, but for the int8 and uint8 results of float operands: 1% of these may be one step off.
        chunk_bytes: How many bytes of its values ONNX Runtime is asked for at a time. A node whose operands and
            results have more gets a run of its own.
        progress: Show a progress bar; None does so on a terminal.

    Raises:
        CoverageError: onnxruntime is missing, or fails on the model.
        ModelError, InputError: The file is no usable model, or an input does not fit.
    """
    source = Path(source)
    model = transmuter.load(source, compute_type=compute_type)
    with contextlib.ExitStack() as stack:
        if onnx.load(source, load_external_data=False).functions:  # written with the values that inlining names
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model.save(folder / source.name)
            source = folder / source.name
        stack.enter_context(exact_dtypes())
        stack.enter_context(model.lowering_dtypes())
        given = {v: np.asarray(x) if isinstance(x, jax.Array) else x for v, x in model.bind_inputs(inputs).items()}
        present = {v.name: x for v, x in given.items() if x is not None}
        reference = _Reference(source, present, is_random=model.is_random)
        return _Search(model, reference, given, absolute, relative, chunk_bytes).run(progress)


# ---- the reference -------------------------------------------------------------------------------------------------


class _Reference:
    """ONNX Runtime on a file, without optimisations, asked for a few values at a time.

    Attributes:
        proto: The file's model without external data, its MatMulNBits nodes at accuracy level 0.
        names: Values that its nodes make.
        types: Types of inputs, and of values that were asked for, as ONNX Runtime spells them.
    """

    def __init__(self, path: Path, inputs: Mapping[str, Any], *, is_random: bool):
        self._path, self._inputs, self._is_random = path, inputs, is_random
        self.proto = onnx.load(path, load_external_data=False)
        set_exact_level(node for graph in graphs(self.proto.graph) for node in graph.node)
        self.names = {name for node in self.proto.graph.node for name in node.output if name}
        self.types: dict[str, str] = {}

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """The values of these names, but for those that ONNX Runtime cannot return."""
        try:
            import onnxruntime
        except ImportError as error:
            raise CoverageError("onnxruntime is not installed. Install the extra `coverage`.") from error
        self.proto.graph.ClearField("output")
        self.proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # memory goes back to the system
        folder = str(self._path.parent.absolute())
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        if self._is_random:  # nodes draw the same in each run
            onnxruntime.set_seed(0)
        try:
            model = self.proto.SerializeToString()
            session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            declared = *session.get_inputs(), *session.get_overridable_initializers(), *session.get_outputs()
            self.types.update((x.name, x.type) for x in declared)
            wanted = [name for name in names if not any(kind in self.types[name] for kind in _UNREADABLE)]
            return dict(zip(wanted, session.run(wanted, self._inputs), strict=True)) if wanted else {}
        except Exception as error:  # its errors have no common base but this
            message = " ".join(str(error).split())
            raise CoverageError(
                f"ONNX Runtime fails on {self._path.name}, so there is no reference: {message:.400}. "
                "Check the model and its inputs with ONNX Runtime alone."
            ) from error

    def info(self, name: str, value: Any = None) -> onnx.ValueInfoProto:
        """The declaration of a value, with the shape of a tensor."""
        kind = type_proto(self.types[name])
        if isinstance(value, np.ndarray) and kind.HasField("tensor_type"):
            kind = helper.make_tensor_type_proto(kind.tensor_type.elem_type, value.shape)
        return helper.make_value_info(name, kind)


# ---- the search ----------------------------------------------------------------------------------------------------


class _Search:
    """One walk through a graph."""

    def __init__(
        self,
        model: Model,
        reference: _Reference,
        inputs: Mapping[ir.Value, Any],
        absolute: float,
        relative: float,
        chunk_bytes: int,
    ):
        self._model, self._reference, self._chunk_bytes = model, reference, chunk_bytes
        self._absolute, self._relative = absolute, relative
        self._work = model.program.work(model.graph, tuple(model.graph.outputs))
        self._position = {node: position for position, node in enumerate(self._work)}
        self._last_use = {v: node for node in self._work for v in (*model.program.operands(node), *node.outputs)}
        self._inputs = inputs
        self._given = {v: returned(v.name, x) for v, x in inputs.items()}
        self._known: set[ir.Value] = set()
        self._failure: TransmuterError | None = None
        self._accumulated: NodeReport | None = None
        self._outputs: list[str] = []
        self._growth: list[tuple[str, float]] = []
        self._skipped: dict[str, None] = {}
        self._passes: list[int] = []
        self._compared = 0
        self._amplified: list[str] = []

    def run(self, progress: bool | None) -> Divergence:
        """Walks through the graph, and stops at the first node that differs by itself."""
        weights = {value: self._model.weight(name) for value, (_, name) in self._model.weight_values.items()}
        outer = self._model.scope(self._given, weights, None)
        self._own = Scope({}, outer.opsets, parent=outer, key=outer.key)
        bar = bar_class(progress)
        for chunk, asked in self._chunks(bar(self._work, unit="node") if bar else self._work):
            found = self._compare(chunk, asked)
            if found is not None:
                return self._told(*found)
        return self._told(None, None)

    def _chunks(self, nodes: Iterable[ir.Node]) -> Iterator[tuple[list[ir.Node], list[ir.Value]]]:
        """Runs the graph on its own values, and yields the nodes that fit into a chunk, with the values to ask for."""
        chunk: list[ir.Node] = []
        asked: dict[ir.Value, int] = {}
        size = 0
        for node in nodes:
            if chunk and self._model.program.draws(chunk[-1]):  # the next nodes run on what ONNX Runtime drew
                yield chunk, list(asked)
                chunk, asked, size = [], {}, 0
            self._run_own(node)
            sizes = {v: self._size(v) for v in self._made(node)}
            if chunk and size + sum(n for v, n in sizes.items() if v not in asked) > self._chunk_bytes:
                yield chunk, list(asked)
                chunk, asked, size = [], {}, 0
            size += sum(n for v, n in sizes.items() if v not in asked)
            chunk.append(node)
            asked |= sizes
        if chunk:
            yield chunk, list(asked)

    def _made(self, node: ir.Node) -> list[ir.Value]:
        """The operands and outputs of a node that ONNX Runtime has to be asked for."""
        values = (*self._model.program.operands(node), *node.outputs)
        return [v for v in values if v.producer() is not None and v.name in self._reference.names]

    def _size(self, value: ir.Value) -> int:
        """The bytes of a value; those of a whole chunk where our own run did not get so far."""
        return nbytes(self._own.values[value]) if value in self._own.values else self._chunk_bytes

    def _run_own(self, node: ir.Node) -> None:
        """Runs a node on the graph's own values, unless an earlier one failed."""
        if self._failure is not None:
            return
        try:
            Evaluation(self._model.program).node(node, self._own)
        except TransmuterError as error:
            self._failure = error
            return
        made = {v: self._own.values[v] for v in node.outputs if v in self._own.values}
        self._known.update(v for v, x in made.items() if isinstance(x, np.ndarray) and not has_length(x))

    def _compare(self, chunk: Sequence[ir.Node], asked: Sequence[ir.Value]) -> tuple[NodeReport, OneNode | None] | None:
        """Compares the nodes of a chunk, up to one that differs by itself, and frees our own values that no later node
        reads."""
        values = self._reference.values([v.name for v in asked])
        self._passes.append(sum(map(nbytes, values.values())))
        read = {v: values[v.name] for v in asked if v.name in values}
        read = {v: x if v in self._known else returned(v.name, x) for v, x in read.items()}
        fed = self._model.scope({**self._given, **read}, {}, None)
        fed.parent = self._own  # for weights, and for values that ONNX Runtime does not return
        for node in chunk:
            name = label(node)
            if self._model.program.draws(node):
                self._skipped[f"{name} draws random numbers; the nodes behind it run on ONNX Runtime's"] = None
                self._own.values.update((v, fed[v]) for v in node.outputs if v in read)
                continue
            for missing in {v.name for v in self._made(node)} - values.keys():
                self._skipped[f"ONNX Runtime does not return {missing!r}, {self._reference.types[missing]}"] = None
            try:
                operands = {v: self._original(v, values) for v in self._model.program.operands(node)}
            except KeyError as absent:  # not returned, and our own run did not get so far
                self._skipped[f"{name} needs {absent.args[0].name!r}, which is not there"] = None
                continue
            report = self._alone(node, fed, operands, values)
            if report is not None:
                case = self._case(node, operands, values)
                if case is None or not case.amplifies(report.outputs):
                    return report, case
                self._amplified.append(name)
            self._together(node, operands, values)
        end = self._position[chunk[-1]]
        for value in [v for v in self._own.values if self._position[self._last_use[v]] <= end]:
            del self._own.values[value]
        return None

    def _alone(
        self, node: ir.Node, fed: Scope, operands: Mapping[ir.Value, Any], values: Mapping[str, Any]
    ) -> NodeReport | None:
        """Runs a node on the reference's values, and reports on it if its outputs differ."""
        scope = Scope({}, fed.opsets, parent=fed, key=fed.key)
        self._compared += 1
        try:
            Evaluation(self._model.program).node(node, scope)
        except TransmuterError as error:
            return self._report(node, operands, [], str(error))
        found = [d for d, _ in self._deviations(node, scope.values, operands, values) if d is not None]
        return self._report(node, operands, found) if found else None

    def _together(self, node: ir.Node, operands: Mapping[ir.Value, Any], values: Mapping[str, Any]) -> None:
        """Notes how far the graph's own values are from the reference at a node."""
        if any(v.name in values and v not in self._own.values for v in node.outputs):
            if self._accumulated is None:
                self._accumulated = self._report(node, operands, [], str(self._failure))
            self._outputs += [v.name for v in node.outputs if v.is_graph_output()]
            return
        deviations = list(self._deviations(node, self._own.values, operands, values))
        found = [d for d, _ in deviations if d is not None]
        if found and self._accumulated is None:
            inputs = {v: self._own[v] if v in self._own.values else x for v, x in operands.items()}
            self._accumulated = self._report(node, inputs, found)
        compared = [v for v in node.outputs if v.name in values]
        wrong = [v for v, (d, _) in zip(compared, deviations, strict=True) if d is not None]
        self._outputs += [v.name for v in wrong if v.is_graph_output()]
        rms = max((rms for _, rms in deviations), default=0.0)
        if rms > (10 * self._growth[-1][1] if self._growth else 1e-7):
            self._growth.append((label(node), rms))

    def _deviations(
        self, node: ir.Node, ours: Mapping[ir.Value, Any], operands: Mapping[ir.Value, Any], values: Mapping[str, Any]
    ) -> Iterator[tuple[Deviation | None, float]]:
        """For each output of a node how it differs from the reference, if it does, and its rms-relative error."""
        rounds = rounds_floats(operands.values())
        for v in node.outputs:
            if v.name in values:
                actual = traced(ours[v]) if has_length(ours[v]) else ours[v]  # a shape, in part of the run's contents
                yield deviation(v.name, actual, values[v.name], self._absolute, self._relative, rounds)

    def _report(
        self, node: ir.Node, operands: Mapping[ir.Value, Any], found: Sequence[Deviation], error: str = ""
    ) -> NodeReport:
        domain = "" if node.domain == "ai.onnx" else node.domain
        opset = self._model.opsets.get(domain, 1)
        schema, lowering = registry.schema(domain, node.op_type, opset), registry.find(domain, node.op_type, opset)
        version = schema.since_version if schema else lowering.since if lowering else None
        attributes = {name: _spelled(attribute) for name, attribute in node.attributes.items()}
        inputs = tuple(Statistics.of(v.name, x) for v, x in operands.items())
        place = self._position[node]
        return NodeReport(
            label(node), operator_name(node), version, opset, place, attributes, inputs, tuple(found), error
        )

    def _original(self, value: ir.Value, values: Mapping[str, Any]) -> Any:
        """An operand as the reference has it; our own where it does not return it."""
        if value in self._inputs:
            return self._inputs[value]
        if self._model.is_constant(value):
            return self._model.constant(value)
        if value in self._model.weight_values:
            return np.asarray(self._model.weight(self._model.weight_values[value][1]))
        return values[value.name] if value.name in values else self._own.values[value]

    def _case(self, node: ir.Node, operands: Mapping[ir.Value, Any], values: Mapping[str, Any]) -> OneNode | None:
        """The node by itself, if ONNX Runtime returns all of its operands. What is a weight or a known value in the
        graph is an initializer."""
        if any(v.name not in values for v in operands if v in self._own.values):
            return None
        whole, proto = self._reference.proto, ir.to_proto(node)
        inner = {v.name: x for v, x in operands.items() if v.is_initializer() and v.graph is not self._model.graph}
        set_exact_level([proto])
        for tensor in (tensor for graph in inner_graphs(proto) for tensor in graph.initializer):
            if tensor.external_data:
                tensor.CopyFrom(numpy_helper.from_array(inner[tensor.name], tensor.name))
        outer = {v: x for v, x in operands.items() if v.name not in inner}
        weights = {v for v in outer if v.producer() is None and v not in self._inputs}
        fixed = {v.name: x for v, x in outer.items() if v in weights or v in self._known}
        inputs = {v.name: x for v, x in outer.items() if v.name not in fixed}
        outputs = {v.name: values[v.name] for v in node.outputs if v.name in values}
        graph = helper.make_graph(
            [proto],
            label(node),
            [self._reference.info(name, x) for name, x in inputs.items()],
            [self._reference.info(name, x) for name, x in outputs.items()],
            [numpy_helper.from_array(x, name) for name, x in fixed.items()],
        )
        versions = {"opset_imports": whole.opset_import, "ir_version": max(whole.ir_version, 4)}
        return OneNode(helper.make_model(graph, functions=whole.functions, **versions), inputs, outputs)

    def _told(self, node: NodeReport | None, case: OneNode | None) -> Divergence:
        return Divergence(
            model=self._model.name,
            node=node,
            accumulated=self._accumulated,
            outputs=tuple(self._outputs),
            growth=tuple(self._growth),
            compared=self._compared,
            nodes=len(self._work),
            amplified=tuple(self._amplified),
            skipped=tuple(self._skipped),
            passes=tuple(self._passes),
            case=case,
        )


# ---- text ---------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """A report as JSON has it."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    is_odd = isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if is_odd else value


def _spelled(attribute: ir.Attr) -> str:
    """An attribute's value as text."""
    if attribute.type is ir.AttributeType.GRAPH:
        return f"a graph of {len(attribute.as_graph())} nodes"
    if attribute.type is ir.AttributeType.TENSOR:
        array = array_of(attribute.value)
        return f"{array.tolist()} ({array.dtype.name})" if array.size <= 8 else str(Statistics.of("", array))
    return f"{attribute.value!r:.200}"

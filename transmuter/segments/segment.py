"""A segment: a part of the graph, traced for one signature and compiled with `jax.jit`."""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import onnx_ir as ir

from transmuter.lowering.arrays import HALVES, in_jax, is_float, is_known, traced
from transmuter.lowering.evaluation import (
    HOST,
    PENDING,
    Bind,
    Break,
    Evaluation,
    Promote,
    Work,
    describe,
    is_hidden,
    label,
    operator_name,
)
from transmuter.lowering.few_bits import Packing, in_packing
from transmuter.lowering.padding import Padded
from transmuter.lowering.platform import compiler_options
from transmuter.lowering.reasons import break_reason, length_reason
from transmuter.model import Model
from transmuter.segments import fusion, preparation, records
from transmuter.segments.attention import attention
from transmuter.segments.convolutions import packed_kernels
from transmuter.segments.few_bits import products_by_xla, products_of_few_bits
from transmuter.segments.integers import integer_products
from transmuter.segments.kernels import called_on_weights, with_kernels
from transmuter.segments.records import Recipe, Record
from transmuter.segments.rewriting import Rule, rewritten
from transmuter.segments.rounding import rounded_products
from transmuter.segments.strided_products import packed_weights
from transmuter.segments.winograd import by_winograd

_WIDE = {np.dtype(t) for t in (np.int64, np.uint64, np.float64, np.complex128)}
_FIRST: tuple[Rule, ...] = (products_by_xla, rounded_products)
"""What any params run through."""
_RULES: tuple[Rule, ...] = (
    products_of_few_bits,
    *_FIRST,
    by_winograd,
    attention,
    fusion.scaled_operands,
    fusion.products_of_parts,
    fusion.late_normalization,
    fusion.tied_weights,
    packed_kernels,
    packed_weights,
    integer_products,
    called_on_weights,
)
"""How what runs on the model's own params is rewritten, in this order."""
SMALL = 16
"""Elements up to which an integer or boolean scalar or vector that decides a shape or a branch enters the signature by
itself."""


@dataclass(eq=False)
class Stage:
    """The state of a run between two segments: what is left to do, and what there is to do it with."""

    work: Sequence[Work]
    arrays: list[ir.Value]
    """Values that the next segment takes as arguments (arrays, or lists of them)."""
    known: dict[ir.Value, Any]
    """Values whose contents are fixed wherever this stage is reached."""
    host: list[ir.Value]
    """Values that never enter a segment: strings, maps."""
    pending_outputs: dict[str, ir.Value]
    """Requested outputs that do not exist yet."""
    static: set[ir.Value] = field(default_factory=set)
    """Those of `arrays` whose contents are part of the signature, since a shape or a branch depends on them."""
    depth: int = 0
    past: Mapping[ir.Value, bool] = field(default_factory=dict)
    """Whether values of earlier segments were hidden while these were traced."""
    is_body: bool = False
    """Whether the outputs are those of a loop's body, which stay in the dtypes that the graph computes in."""

    def returned(self, model: Model, value: ir.Value, result: Any) -> Any:
        """A requested output as it leaves the run."""
        return result if self.is_body else model.declared(value, result)


@dataclass(frozen=True)
class Signature:
    """What a segment was traced for: shapes and dtypes of its arguments, and the contents of its static ones."""

    arguments: tuple[Any, ...]
    contents: tuple[tuple[str, str, tuple[int, ...], bytes], ...] = ()
    params: tuple[Any, ...] | None = None
    """Dtypes of given params, where they differ from the model's."""


@dataclass
class Tally:
    """How often something ran, how long that took, and how many bytes the host read for it."""

    runs: int = 0
    seconds: float = 0.0
    host_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, seconds: float, host_bytes: int = 0) -> None:
        """Counts one more run; threads may do so at the same time."""
        with self._lock:
            self.runs += 1
            self.seconds += seconds
            self.host_bytes += host_bytes


class Segment:
    """One traced and compiled part of a model's graph, with what follows it.

    Attributes:
        stage: What it starts from.
        nodes: How many nodes it evaluates.
        breaks: The nodes to run after it on concrete values, in order.
        binds: Outputs of inlined branches that exist when those have run.
        after: The stages after those have run, by which values are arrays then.
        is_nested: Whether an argument is a sequence, or absent.
        trace_seconds, compile_seconds: What building it took.
        tally: How often it has run, and the time until JAX had taken that on.
        break_tallies: The same of its breaks, by node; these wait for the operands that they read.
        reasons: Why it has its breaks, by node.
        cuts: The values that are cut after it (those that a break cuts aside), with the size that they are padded to,
            and the reason for that.
        cut_tally: How often that was, how long it took, and how many bytes the host read.
        hits: How often the cache was asked for it and had it.
        record_key: What its record is to be kept under once it is compiled, if it is to be.
        returns_arrays: Whether each requested output is one array, not padded, nor a sequence.
    """

    def __init__(
        self,
        model: Model,
        stage: Stage,
        signature: Signature,
        static: Mapping[ir.Value, np.ndarray],
        avals: Sequence[Any],
        params: Mapping[str, Any],
        packing: Packing = "auto",
        transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        record: Record | None = None,
    ):
        static = {value: array.copy() for value, array in static.items()}  # the caller's own may change
        self.model, self.stage, self.signature, self.static = model, stage, signature, static
        self.tally, self.hits, self.compile_seconds = Tally(), 0, 0.0
        self.record_key: str | None = None
        self.breaks: list[Break] = []
        self.binds: list[Bind] = []
        self.after: dict[Any, Stage] = {}
        self.carried: list[ir.Value] = []
        self.emitted: list[str] = []
        self.known: dict[ir.Value, Any] = {}
        self.known_outputs: dict[str, Any] = {}
        self.is_nested = not all(isinstance(aval, jax.ShapeDtypeStruct) for aval in avals)
        self._arguments = [v for v in stage.arrays if v not in static]
        self._executables: dict[bool, Executable] = {}
        self._recorded: Executable | None = None
        self._flat: preparation.Trace | None = None
        self._lock = threading.RLock()
        self._traced_with = avals, params, packing, transform
        started = time.perf_counter()
        if record is None:
            self._trace(*self._traced_with)
        else:
            self._recall(record)
        for needed in self.breaks:
            _forget_frames(needed)
        self.break_tallies = {needed.node: Tally() for needed in self.breaks}
        self.cut_tally = Tally()
        self.trace_seconds = time.perf_counter() - started

    def _trace(
        self,
        avals: Sequence[Any],
        params: Mapping[str, Any],
        packing: Packing,
        transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None,
    ) -> None:
        model, stage, static = self.model, self.stage, self.static
        structure: list[Any] = []

        values = {name: value for value, (_, name) in model.weight_values.items()}
        shapes = {**params, **model.shapes["buffer"]}

        def run(weights: list[Any], arguments: list[Any], key: Any) -> list[Any]:
            held = {**stage.known, **dict.fromkeys(stage.host, HOST), **static}
            held.update(zip(self._arguments, arguments, strict=True))
            with model.lowering_dtypes(), model.naming_disagreements(held):
                scope = model.scope(held, {values[name]: w for name, w in zip(shapes, weights, strict=True)}, key)
                evaluating = Evaluation(model.program, breaks=self.breaks, unsupported={}, promote=self._promote(held))
                waiting = evaluating.run(stage.work, scope)
                evaluating.refuse_unsupported(waiting, scope)
                self.nodes = evaluating.evaluated
                known_of = model.program, scope, stage.past
                self.reasons = {needed.node: break_reason(needed, *known_of) for needed in self.breaks}
                self.past = {**stage.past, **{v: is_hidden(x) for v, x in scope.values.items()}} if self.breaks else {}
                return self._results(scope, waiting, structure)

        key = jax.eval_shape(lambda: jax.random.key(0)) if model.is_random else None
        weights = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in shapes.values()]
        computed = run if transform is None else transform(run)
        with in_packing(packing):
            flat = preparation.flatten(jax.make_jaxpr(computed)(weights, list(avals), key))
        self._structure = structure[0]
        self._flat, self._names, self._inputs = flat, dict(zip(flat.inputs, shapes)), flat.inputs[len(shapes) :]

    def _promote(self, held: Mapping[ir.Value, Any]) -> Callable[[Sequence[ir.Value]], None]:
        """Raises `Promote` if the contents of some values follow from small arguments alone."""

        def check(values: Sequence[ir.Value]) -> None:
            found: set[ir.Value] = set()
            pending, seen = list(values), set()
            while pending:
                value = pending.pop()
                if value in seen:
                    continue
                seen.add(value)
                if value in held:
                    array = held[value]
                    if is_known(array):
                        if array is HOST or array is PENDING:
                            return
                        continue
                    if not isinstance(array, jax.Array) or array.ndim > 1 or array.size > SMALL or is_float(array):
                        return  # contents of a float would hide it from a gradient
                    found.add(value)
                    continue
                if self.model.is_constant(value):
                    continue
                node = value.producer()
                if node is None:
                    return
                if node.op_type not in ("Shape", "Size"):
                    pending += self.model.program.operands(node)
            if found:
                raise Promote(frozenset(found))

        return check

    def _results(self, scope: Any, waiting: list[Work], structure: list[Any]) -> list[Any]:
        """Sorts what the segment has computed into what it hands on and what is a requested output."""
        stage = self.stage
        broken = {needed.node: needed for needed in self.breaks if not needed.only_reads}
        there = {v for node in broken for v in node.outputs}
        self.after_work: list[Work] = []
        for item in waiting:
            if isinstance(item, Bind) and all(v in there or scope[v] is not PENDING for v in item.sources):
                self.binds.append(item)
                there.update(item.outputs)
            elif item not in broken:
                self.after_work.append(item)
        needed: dict[ir.Value, None] = {}
        for item in waiting:
            values = item.sources if isinstance(item, Bind) else self.model.program.operands(item)
            needed.update(dict.fromkeys(values))
        produced = {v for item in waiting for v in item.outputs}
        self._work = [item for item in stage.work if isinstance(item, ir.Node) and produced.isdisjoint(item.outputs)]
        self._results_of = {
            node: [kind for v in node.outputs if v in scope.values for kind in _kinds(scope.values[v])]
            for node in self._work
        }
        weights = self.model.weight_values
        emitted: dict[str, Any] = {}
        for name, value in stage.pending_outputs.items():
            result = scope[value]
            if result is PENDING or result is HOST:
                continue
            if not is_hidden(result):
                self.known_outputs[name] = stage.returned(self.model, value, result)
            else:
                emitted[name] = stage.returned(self.model, value, _handed_on(result))
        self.emitted = list(emitted)
        carried: dict[ir.Value, Any] = {}
        self.passed: list[ir.Value] = []
        for value in needed:
            is_weight = value in weights and value not in self._arguments
            if value in produced or is_weight or self.model.is_constant(value):
                continue
            result = scope[value]
            if result is HOST or value in self._arguments:
                self.passed.append(value)
            elif not is_hidden(result):
                self.known[value] = result
            elif result is not PENDING:
                carried[value] = _handed_on(result)
        self.carried = list(carried)
        told = {v for b in self.breaks if b.is_length for v in b.values()}
        handed_on = dict.fromkeys([*carried, *(stage.pending_outputs[name] for name in emitted)])
        self.cuts = {
            v: (x.bound, length_reason(v, self.model.program, scope, stage.past))
            for v in handed_on
            if isinstance(x := scope[v], Padded) and v not in told
        }
        self.returns_arrays = all(isinstance(x, jax.Array) for x in emitted.values())
        flat, tree = jax.tree.flatten((list(carried.values()), list(emitted.values())))
        structure.append(tree)
        return flat

    # -- records

    def recipe(self) -> bytes | None:
        """What a later process needs, besides the executable, to do without a trace; None where it cannot: there are
        breaks, or it is not all of a run."""
        executable = self._executables[True]
        is_all = not (self.breaks or self.cuts or self.is_nested) and self.returns_arrays
        if not is_all or set(self.emitted) != set(self.stage.pending_outputs):
            return None
        sources = {ref for weight in executable.weights for ref, name in weight.sources if not name}
        constants = {ref: np.asarray(executable.constants[ref]) for ref in sources}
        return Recipe(self.nodes, self.emitted, self.is_wide, executable.weights, constants).pickled()

    def _recall(self, record: Record) -> None:
        """Takes from a record what tracing would tell, and the executable."""
        recipe = record.recipe
        self.nodes, self.emitted, self.is_wide = recipe.nodes, recipe.emitted, recipe.is_wide
        self.reasons, self.past, self.cuts, self.passed, self.after_work = {}, {}, {}, [], []
        self.returns_arrays = True
        self._structure = jax.tree.structure(([], [0] * len(recipe.emitted)))
        self._work = [item for item in self.stage.work if isinstance(item, ir.Node)]
        own = weakref.proxy(self)  # a segment that is evicted is to be gone at once

        def load() -> jax.stages.Compiled:
            started = time.perf_counter()
            compiled = record.load()
            own.compile_seconds += time.perf_counter() - started
            return compiled

        def traced(weights: list[Any]) -> tuple[Executable, list[Any]]:
            executable = own.executable(own_params=True, recorded=False)
            values = {weight.key: value for weight, value in zip(recipe.weights, weights, strict=True)}
            return executable, [values[weight.key] for weight in executable.weights]

        def function(weights: list[Any], arguments: list[Any]) -> list[Any]:
            executable, weights = traced(weights)
            return executable.function(weights, arguments)

        def elsewhere(weights: list[Any], arguments: list[Any]) -> list[Any]:
            executable, weights = traced(weights)
            return executable.main(weights, arguments)

        main, names = records.Loaded(load, elsewhere), [""] * len(recipe.weights)
        self._recorded = Executable(recipe.weights, names, [], recipe.constants, function, main, is_compiled=True)

    def _ensure_trace(self) -> preparation.Trace:
        """The trace, made now if the segment is from a record."""
        with self._lock:
            if self._flat is None:
                self._trace(*self._traced_with)
            return self._flat

    # -- running

    def executable(self, *, own_params: bool, recorded: bool = True) -> Executable:
        """The compiled function for the model's own params, which are prepared, or for given ones, which are not.

        Without `recorded`, it is one that runs under JAX's transforms, too.
        """
        if own_params and recorded and self._recorded is not None:
            return self._recorded
        found = self._executables.get(own_params)
        if found is not None:
            return found
        with self._lock:
            if own_params in self._executables:  # another thread has made it meanwhile
                return self._executables[own_params]
            trace = self._ensure_trace()
            flat = rewritten(trace, self._names, _RULES if own_params else _FIRST)
            cut = preparation.split(flat, self._names, self._inputs, prepare=own_params)
            fast = with_kernels(cut.rest(flat.avals))
            options: dict[str, Any] = dict(compiler_options(op.equation for op in fast.operations))
            if any(getattr(aval, "dtype", None) in HALVES for aval in trace.avals):
                options["xla_allow_excess_precision"] = False
            function = jax.jit(cut.function())
            main = jax.jit(cut.function(fast), compiler_options=options)
            names = ["" if own_params or w.operations else w.sources[0][1] for w in cut.weights]
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (flat.avals[w.ref] for w in cut.weights)]
            self._executables[own_params] = Executable(cut.weights, names, shapes, flat.constants, function, main)
            return self._executables[own_params]

    @property
    def executables(self) -> list[Executable]:
        """Those that there are: for the model's own params, and for given ones."""
        recorded = [] if self._recorded is None else [self._recorded]
        return [*recorded, *self._executables.values()]

    @property
    def calls(self) -> int:
        """How often it has run."""
        return self.tally.runs

    @functools.cached_property
    def labels(self) -> dict[str, Any]:
        """What events say of it: the model's name, the depth, and the signature as text."""
        arguments = zip(self._arguments, self.signature.arguments, strict=True)
        parts = [f"{value.name} {_spell(shape)}" for value, shape in arguments]
        parts += [f"{value.name} = {_spell_contents(array)}" for value, array in self.static.items()]
        signature = ", ".join(parts) or "no arguments"
        return {"model": self.model.name, "depth": self.stage.depth, "signature": signature}

    @functools.cached_property
    def largest(self) -> list[tuple[str, int]]:
        """The nodes with the largest results, and the bytes of these."""
        self._ensure_trace()
        sizes = [(sum(map(_nbytes, kinds)), describe(node)) for node, kinds in self._results_of.items()]
        return [(name, size) for size, name in sorted(sizes, key=lambda s: -s[0])[:3]]

    @functools.cached_property
    def operators(self) -> dict[str, tuple[str, ...]]:
        """The operators of the nodes that it evaluates, with the names of these."""
        found: dict[str, list[str]] = {}
        for node in self._work:
            found.setdefault(operator_name(node), []).append(label(node))
        return {name: tuple(nodes) for name, nodes in sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))}

    @property
    def node_names(self) -> list[str]:
        """How messages call the nodes that it evaluates."""
        return [describe(node) for node in self._work]

    @functools.cached_property
    def is_wide(self) -> bool:
        """Whether it computes anything in 64-bit types."""
        return any(getattr(aval, "dtype", None) in _WIDE for aval in self._ensure_trace().avals)

    def unpack(self, flat: Sequence[Any]) -> tuple[dict[ir.Value, Any], dict[str, Any]]:
        """The executable's results, as the values that the segment hands on and the requested outputs."""
        carried, emitted = jax.tree.unflatten(self._structure, flat)
        return dict(zip(self.carried, carried)), dict(zip(self.emitted, emitted))


@dataclass
class Executable:
    """A jitted function of the values of `weights` and a segment's arguments."""

    weights: list[preparation.Weight]
    names: list[str]
    """Of the weights that each call gives, the names; `""` for those in `values`."""
    shapes: list[jax.ShapeDtypeStruct]
    constants: Mapping[preparation.Ref, Any]
    """Known arrays that tracing captured: weights start from them too."""
    function: Callable[[list[Any], list[Any]], list[Any]]
    """What runs under a JAX transform, which takes no compiler options."""
    main: Callable[[list[Any], list[Any]], list[Any]]
    """What runs otherwise: compiled for the platform, and in half precision with every step rounded, as eagerly; XLA
    leaves roundings out if it may."""
    values: list[Any] | None = None
    """The prepared weights' values, once they are computed; None for those that each call gives."""
    is_compiled: bool = False
    """Whether XLA has compiled it; what JAX makes of it for a gradient is not meant."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while it compiles."""


def _forget_frames(needed: Break | None) -> None:
    """Lets go of the frames that raised a break, and of the arrays in them."""
    while needed is not None:
        needed.__traceback__ = needed.__context__ = needed.__cause__ = None
        needed = needed.inside


def _handed_on(result: Any) -> Any:
    """A value as arrays; the length of a padded one is counted in nothing that outlives the trace."""
    return replace(result, source=None) if isinstance(result, Padded) else jax.tree.map(traced, result)


def _spell(shape: Any) -> str:
    """What a signature records of an argument, as `dtype[shape]`."""
    if shape is None:
        return "absent"
    if shape and isinstance(shape[0], tuple) and len(shape) == 2 and not isinstance(shape[1], tuple):
        return f"{shape[1].name}{list(shape[0])}"
    return f"sequence of {len(shape)}"


def _spell_contents(array: np.ndarray) -> str:
    return str(array.tolist()) if array.size <= SMALL else f"{array.dtype.name}{list(array.shape)} of certain contents"


def _kinds(value: Any) -> list[Any]:
    """What has the shapes and dtypes of an array, or of a sequence's arrays, and holds on to none that is traced."""
    leaves = [value] if isinstance(value, (jax.Array, np.ndarray)) else jax.tree.leaves(value)
    return [
        x.aval if isinstance(x, jax.Array) else jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in leaves
        if hasattr(x, "dtype")
    ]


def _nbytes(kind: Any) -> int:
    """The bytes of an array of this shape and dtype; random keys count for nothing."""
    return math.prod(kind.shape) * getattr(kind.dtype, "itemsize", 0)


def is_host(value: Any) -> bool:
    """Whether a value of this kind stays outside of segments: strings, 6-bit floats, maps, and sequences of them."""
    if isinstance(value, (list, tuple)):
        return any(is_host(item) for item in value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind not in "biufc" and not in_jax(value.dtype)
    return isinstance(value, (str, dict))

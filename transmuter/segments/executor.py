"""`CompiledModel`: finds or builds the segments that a call needs, and runs them and the breaks between them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

import jax
import numpy as np
import onnx_ir as ir
from jax.core import Tracer

from transmuter import telemetry
from transmuter.errors import ExecutionError, GraphBreakError, InputError, RecompileWarning
from transmuter.lowering.arrays import contents, is_float
from transmuter.lowering.control_flow import varying_axes
from transmuter.lowering.evaluation import Bind, Break, Evaluation, Scope, operator_name
from transmuter.lowering.few_bits import Packing
from transmuter.lowering.padding import Padded, cut
from transmuter.lowering.platform import without_warnings
from transmuter.model import Model, checked_key, returned
from transmuter.progress import bar_class
from transmuter.segments import explanation, identity, records
from transmuter.segments.cache import (
    CacheInfo,
    SegmentCache,
    keeping_all,
    keeping_none,
    keeps_quick_ones,
    noting_hits,
    used_weights,
)
from transmuter.segments.memory import fits_unpacked, give_back
from transmuter.segments.moving import moved
from transmuter.segments.preparation import Weight, evaluate, inverses
from transmuter.segments.segment import SMALL, Executable, Promote, Segment, Signature, Stage, is_host
from transmuter.staging import differentiated, exact_dtypes, staged, transposed_exactly

_LONG = 0.2
"""Seconds from which compiling leaves memory behind that is worth some milliseconds to give back."""
_MANY = 16
"""More operations than these, which prepare a weight, are compiled together: each by itself takes XLA as long."""
_LARGE = 128 << 20
"""Bytes of weights from which on little memory counts for more than 50 ms."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What all segments of one call share."""

    keys: Sequence[jax.Array]
    x64: bool
    """The caller's setting."""
    params: Mapping[str, Any] | None = None
    buffers: Mapping[str, Any] | None = None
    weights: Mapping[str, Any] | None = None
    """Both of them, or None: the model's own."""
    counts: bool = True
    """Whether it is one of the user's, which `cache_info` counts."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is left to do for inputs like some that have passed all checks, where one segment is all there is."""

    segment: Segment
    function: Callable[[list[Any], list[Any]], list[Any]]
    weights: list[Any]
    arguments: list[str]
    """Names of the inputs in the segment's order."""
    outputs: list[tuple[str, int]]
    """Names of the outputs, and their places among the segment's results."""


class _Body:
    """The body of a loop that has to run eagerly, compiled once its iterations keep their shapes.

    One that changes them with each iteration, or needs the contents of something small, would be compiled each time.
    """

    def __init__(self, compiled: CompiledModel):
        self.compiled, self._shapes = compiled, None

    def is_steady(self, state: Mapping[ir.Value, Any]) -> bool:
        """Whether the iteration before had the same shapes."""
        before, self._shapes = self._shapes, [None if is_host(x) else _shape(x) for x in state.values()]
        is_static = any(stage.static for stage in self.compiled._roots.values())
        return before is not None and not is_static and before == self._shapes


class CompiledModel:
    """A model compiled for the shapes it is called with. Make one with `transmuter.compile`.

    Call it as `compiled(inputs, *, params=None, buffers=None, key=None)`, or with the inputs as positional arrays.
    Without `params` the model's own are used, prepared once; given params are arguments like the inputs, so that
    gradients with respect to them are exact. Inside a caller's `jit`, `checkpoint`, `scan` or `export` it behaves as
    `model.apply`.

    Attributes:
        model: The model that it was compiled from.
        cache_size: For how many signatures each segment stays compiled.
    """

    def __init__(
        self,
        model: Model,
        *,
        cache_size: int = 8,
        static_inputs: Sequence[str] = (),
        outputs: Sequence[str] | None = None,
        packed_weights: Packing = "auto",
        keeps_executables: bool = False,
        transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ):
        if cache_size < 1:
            raise ValueError(f"cache_size is {cache_size}, but must be at least 1.")
        if packed_weights not in get_args(Packing):
            raise ValueError(f"packed_weights is {packed_weights!r}, not one of {', '.join(get_args(Packing))}.")
        self.model, self.cache_size = model, cache_size
        self._transform = transform  # of what each segment computes, before it is compiled
        self._packing = "keep" if packed_weights == "auto" and not fits_unpacked(model) else packed_weights
        self._graph, self._wanted = model.graph, model.values(outputs)
        if isinstance(static_inputs, str):
            raise InputError(f"static_inputs is the string {static_inputs!r}. Give a list of names.")
        unknown = [name for name in static_inputs if name not in {**model.inputs, **model.overridable_inputs}]
        if unknown:
            raise InputError(
                f"There is no input {unknown[0]!r} to be static. The model's are {', '.join(model.inputs)}."
            )
        self._static = {value for value in model.graph.inputs if value.name in static_inputs}
        self._bodies: dict[tuple[ir.Graph, tuple[ir.Value, ...]], _Body] = {}
        self._roots: dict[tuple[tuple[ir.Value, bool], ...], Stage] = {}
        self._keeps_executables = keeps_executables
        self._keeping = keeping_all if keeps_executables else contextlib.nullcontext
        self._cache = SegmentCache(cache_size, self._static)
        self._plans: dict[Any, _Plan | None] = {}
        self._prepared: dict[str, jax.Array] = {}
        self._calls = itertools.count()
        self._building = threading.RLock()

    def __call__(
        self,
        *inputs: Any,
        params: Mapping[str, Any] | None = None,
        buffers: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
    ) -> dict[str, Any]:
        """Runs the model.

        Args:
            inputs: One dict of arrays by input name, or the arrays in the order of `model.inputs`, one by one or as a
                list. Any shapes that the graph accepts: new ones are compiled on their first call.
            params: Arrays shaped as `model.params`; None is the model's own.
            buffers: Arrays shaped as `model.buffers`; None is the model's own.
            key: A JAX random key. None draws anew with each call, from the model's seed.

        Returns:
            Arrays by output name, in the model's dtypes.

        Raises:
            InputError: An input or param has the wrong name, dtype or shape.
            UnsupportedOperatorError: The graph needs an operator without a lowering; nothing has run then.
            LoweringError: A node failed: its operands do not fit its operator.
            ExecutionError: XLA failed to compile or to run a segment.
            GraphBreakError: The graph breaks at a node whose operand a transform around the call hides: `jit`, `vmap`,
                `checkpoint`, `scan`, `shard_map`, `export`. `grad` alone hides nothing.
        """
        is_plain = params is None and buffers is None and key is None and len(inputs) == 1
        kinds = _kinds(inputs[0]) if is_plain else None
        plan = self._plans.get(kinds)
        if plan is not None and not staged():
            return self._run_plan(plan, inputs[0])
        key = checked_key(key)
        given = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], (Mapping, list, tuple)) else inputs
        model = self.model
        held = model.bind_inputs(given)
        tracers = [x for x in jax.tree.leaves((list(held.values()), params)) if isinstance(x, Tracer)]
        if staged() or varying_axes(tracers):
            if params is None:
                model.warn_of_baking(model.params)
            return model.apply_bound(held, params, buffers=buffers, key=key, outputs=list(self._wanted))
        x64 = jax.config.jax_enable_x64
        with exact_dtypes():
            keys = [self._key() if key is None else key] if model.is_random else []
            exact = {value: _widened(value, array) for value, array in held.items()}
            if params is None and buffers is None:
                results = self._run(exact, _Call(keys, x64))
                if kinds is not None and kinds not in self._plans:
                    self._plan(kinds, held)
                return results
            params = model.params if params is None else params
            buffers = model.buffers if buffers is None else buffers
            model.check_weights("param", params)
            model.check_weights("buffer", buffers)
            return self._run(exact, _Call(keys, x64, params, buffers, {**params, **buffers}))

    def warm_up(
        self, examples: Mapping[str, Any] | Iterable[Mapping[str, Any]], *, progress: bool | None = None
    ) -> CompiledModel:
        """Compiles ahead, for several shapes at once, with the model's own params.

        Args:
            examples: One dict for each set of shapes, by input name: a tuple is the shape of an array, anything else
                the input itself, as a call takes it. Shapes alone compile what comes before the first graph break;
                with all inputs given, the model is run through its breaks once.
            progress: Show a bar; that needs tqdm. None shows it on a terminal, if tqdm is there.

        Returns:
            The compiled model itself. `cache_info` counts none of this as a hit, a miss or a call.

        Raises:
            InputError: An example does not fit the model, or a shape is given where contents matter.
            UnsupportedOperatorError, LoweringError, ExecutionError: What a call raises.
            ValueError: There are more examples than the cache holds.
        """
        examples = [examples] if isinstance(examples, Mapping) else list(examples)
        if len(examples) > self.cache_size:
            raise ValueError(
                f"There are {len(examples)} examples, but cache_size is {self.cache_size}. Compile with a larger one."
            )
        x64 = jax.config.jax_enable_x64
        pool = ThreadPoolExecutor(min(len(examples), os.cpu_count() or 1) or 1)
        try:
            with exact_dtypes():
                keys = [jax.random.key(self.model.seed)] if self.model.is_random else []
                call = _Call(keys, x64, counts=False)
                states = [self._example(example) for example in examples]
                jobs = [pool.submit(job) for job in [self._compiling(state, call) for state in states]]
                for job in _with_progress(as_completed(jobs), len(jobs), progress):
                    job.result()
                for state in states:  # what follows a break takes shapes that only a run tells
                    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in state.values()):
                        self._run(state, call, stops_early=True)
        finally:
            pool.shutdown(cancel_futures=True)
        return self

    def __repr__(self) -> str:
        return f"CompiledModel({', '.join(map(str, self.model.inputs.values()))}; {len(self.segments)} segments)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A CompiledModel cannot be copied or pickled. Compile the model again.")

    # -- what it has done

    def cache_info(self) -> CacheInfo:
        """Hits, misses and evictions of segments, and each present segment's cost."""
        return self._cache.info()

    def cache_clear(self) -> None:
        """Forgets every segment, its executable, and the prepared weights."""
        with self._building:
            self._cache.clear()
            self._plans.clear()
            self._prepared.clear()
            self._roots.clear()
            self._bodies.clear()

    @property
    def segments(self) -> list[Segment]:
        """The present segments, in the order of a run."""
        return list(self._cache)

    def explain(self) -> explanation.Explanation:
        """What the graph was compiled to: its segments, and each break with the reason for it. Print it."""
        return explanation.explain(self.segments, self.model.name)

    # -- running

    def _run(self, held: Mapping[ir.Value, Any], call: _Call, *, stops_early: bool = False) -> dict[str, Any]:
        """Runs on checked inputs; `stops_early` leaves the last segment out, once it is compiled."""
        state = dict(held)
        stage = self._root(state)
        # Strings that are returned as they are given pass no segment.
        results: dict[str, Any] = {n: state[v] for n, v in self._wanted.items() if v in state and is_host(state[v])}
        while stage is not None:
            segment, arguments = self._segment(stage, state, call)
            if stops_early and not segment.breaks:
                self._compiling(state, call, stage)()
                return {}
            # Nothing but `state` and `results` holds on to arrays here, so that those that are done with are freed.
            state = {value: state[value] for value in segment.passed}
            self._execute(segment, arguments, call, state, results)
            stage, state = self._continued(segment, state, call, results) if segment.breaks else (None, {})
        return {name: returned(name, results[name]) for name in self._wanted}

    def _continued(
        self, segment: Segment, state: dict[ir.Value, Any], call: _Call, results: dict[str, Any]
    ) -> tuple[Stage | None, dict[ir.Value, Any]]:
        """Runs the segment's breaks. Returns the stage after them, or None at the end, and the values that it needs."""
        self._run_breaks(segment, state, call)
        after = self._after(segment, state)
        for name, value in segment.stage.pending_outputs.items():
            if name not in results and value in state and name not in after.pending_outputs:
                results[name] = segment.stage.returned(self.model, value, state[value])
        if not after.work:
            return None, {}
        return after, {value: state[value] for value in (*after.arrays, *after.host)}

    def _execute(
        self,
        segment: Segment,
        arguments: list[Any],
        call: _Call,
        state: dict[ir.Value, Any],
        results: dict[str, Any],
    ) -> None:
        """Runs a segment. What it hands on joins `state`, requested outputs join `results`; `arguments` is emptied."""
        results.update(segment.known_outputs)
        if not (segment.carried or segment.emitted):  # one break follows on another
            if call.counts:
                segment.tally.add(0.0)
            return
        executable = segment.executable(own_params=call.weights is None)
        given = [*(jax.tree.leaves(arguments) if segment.is_nested else arguments), *call.keys]
        arguments.clear()
        taken = [call.weights[name] for name in executable.names if name]
        is_traced = any(isinstance(x, Tracer) for x in (*given, *taken))
        function = executable.function if is_traced else executable.main
        try:
            if not (is_traced or executable.is_compiled):
                self._compile_beside(segment, executable, given, call)
            weights = self._weights(segment, executable, call)
            if is_traced and not call.x64 and segment.is_wide and (differentiated(given) or differentiated(weights)):
                function = functools.partial(transposed_exactly, function)
        except jax.errors.JaxRuntimeError as error:
            raise _failure(segment, error) from error
        carried, emitted = segment.unpack(_launch(segment, function, weights, given, counts=call.counts))
        if any(isinstance(x, Padded) for values in (carried, emitted) for x in values.values()):
            carried, emitted = self._cut(segment, carried, emitted, call)
        state.update(carried)
        results.update(emitted)

    def _cut(
        self, segment: Segment, carried: dict[ir.Value, Any], emitted: dict[str, Any], call: _Call
    ) -> tuple[dict[ir.Value, Any], dict[str, Any]]:
        """A segment's results without padding, for which the lengths are read: that is what some breaks are for."""
        started = time.perf_counter()
        values = cut({**carried, **emitted})
        breaks = [needed.node for needed in segment.breaks if needed.is_length]
        size, others = np.dtype(np.int64).itemsize, len(segment.cuts)
        share = (time.perf_counter() - started) / (len(breaks) + others or 1)
        for node in breaks:
            self._count_break(segment, node, share, size, call)
        if others and call.counts:
            segment.cut_tally.add(share * others, size * others)
        return {value: values[value] for value in carried}, {name: values[name] for name in emitted}

    def _plan(self, kinds: Any, held: Mapping[ir.Value, Any]) -> None:
        """Makes the plan for further inputs of these kinds, after a call with such; None if they need more."""
        stage = self._root(held)
        plan = None
        is_exact = all(_widened(value, array) is array for value, array in held.items())
        if is_exact and not (self.model.is_random or stage.static or stage.host):
            signature, _, _ = self._signature(stage, held, _Call([], x64=True))
            segment = self._cache.find(stage, signature, counts=False)
            if segment is None:  # another thread's call has needed its place
                return
            executable = segment.executable(own_params=True)
            is_alone = not segment.breaks and set(segment.emitted) == set(self._wanted)
            if is_alone and segment.returns_arrays and not segment.is_nested and executable.is_compiled:
                outputs = [(name, segment.emitted.index(name)) for name in self._wanted]
                names = [value.name for value in stage.arrays]
                plan = _Plan(segment, executable.main, executable.values, names, outputs)
        with self._building:
            if plan is None or plan.segment in self._cache:
                self._plans[kinds] = plan

    def _run_plan(self, plan: _Plan, given: Mapping[str, Any]) -> dict[str, Any]:
        self._cache.touch(plan.segment)
        arguments = [given[name] for name in plan.arguments]
        with jax.enable_x64(True):
            flat = _launch(plan.segment, plan.function, plan.weights, arguments)
        return {name: flat[place] for name, place in plan.outputs}

    def _compile_beside(self, segment: Segment, executable: Executable, given: list[Any], call: _Call) -> None:
        """Compiles an executable for these arguments, and prepares its weights meanwhile: unless they are given, or lie
        on a certain device, or are so large that what both take for a while should not add up."""
        is_large = self.model.nbytes > _LARGE
        if call.weights is not None or executable.values is not None or self.model.device is not None or is_large:
            weights = self._weights(segment, executable, call)
            if is_large:
                give_back()
            self._compile(segment, executable, lambda: executable.main.lower(weights, given))
            return
        lowered = executable.main.lower(executable.shapes, given)
        with ThreadPoolExecutor(1) as pool:
            compiling = pool.submit(self._compile, segment, executable, lambda: lowered)
            self._prepare(executable)
            compiling.result()

    def _compile(self, segment: Segment, executable: Executable, lower: Callable[[], jax.stages.Lowered]) -> None:
        """Compiles an executable, unless that is done, or another thread does it: then it waits."""
        with executable.lock:
            if executable.is_compiled:
                return
            started = time.perf_counter()
            is_recorded = segment.record_key is not None and executable is segment.executable(own_params=True)
            recipe = segment.recipe() if is_recorded else None
            with without_warnings(), self._keeping() if recipe is None else keeping_none(), noting_hits() as hits:
                compiled = lower().compile()  # JAX finds it again when the function is called
            if recipe is not None and not hits:
                records.write(segment.record_key, recipe, compiled)
            seconds = time.perf_counter() - started
            segment.compile_seconds += seconds
            executable.is_compiled = True
        if seconds > _LONG:
            give_back()
        telemetry.record(telemetry.Compile, seconds, **segment.labels)

    # -- ahead of calls

    def _example(self, example: Mapping[str, Any]) -> dict[ir.Value, Any]:
        """An example's checked inputs, with a `jax.ShapeDtypeStruct` where it only gives a shape."""
        if not isinstance(example, Mapping):
            raise InputError(f"An example is a {type(example).__name__}. Give a dict of shapes by input name.")
        specs = {**self.model.inputs, **self.model.overridable_inputs}
        shapes = {
            name: jax.ShapeDtypeStruct(shape, specs[name].dtype)
            for name, shape in example.items()
            if isinstance(shape, tuple) and name in specs and specs[name].kind == "tensor"
        }
        for name, shape in shapes.items():
            if is_host(np.empty(0, shape.dtype)):
                raise InputError(f"The input {name!r} holds no numbers. Give an example of it rather than its shape.")
        blank = {name: np.broadcast_to(np.zeros((), s.dtype), s.shape) for name, s in shapes.items()}
        held = self.model.bind_inputs({**example, **blank})
        return {value: shapes.get(value.name, _widened(value, array)) for value, array in held.items()}

    def _compiling(self, state: Mapping[ir.Value, Any], call: _Call, stage: Stage | None = None) -> Callable[[], None]:
        """Traces the segment that `state` needs. Returns what compiles it, which may be called in a thread."""
        segment, arguments = self._segment(self._root(state) if stage is None else stage, state, call)
        executable = segment.executable(own_params=True)
        if executable.is_compiled:
            return lambda: None
        given = [*(jax.tree.leaves(arguments) if segment.is_nested else arguments), *call.keys]
        function = executable.main
        try:
            lowered = function.lower(self._weights(segment, executable, call), given)
        except jax.errors.JaxRuntimeError as error:
            raise _failure(segment, error) from error

        def compile_() -> None:
            try:
                self._compile(segment, executable, lambda: lowered)
            except jax.errors.JaxRuntimeError as error:
                raise _failure(segment, error) from error

        return compile_

    # -- stages, segments and breaks

    def _key(self) -> jax.Array:
        """The model's own key for the next call: the first is the one that `run` takes."""
        number, key = next(self._calls), jax.random.key(self.model.seed)
        return jax.random.fold_in(key, number) if number else key

    def _root(self, state: Mapping[ir.Value, Any]) -> Stage:
        kinds = tuple((value, is_host(x)) for value, x in state.items())
        stage = self._roots.get(kinds)
        if stage is None:
            work = self.model.program.work(self._graph, tuple(self._wanted.values()))
            arrays = [value for value, host in kinds if not host]
            host = [value for value, host in kinds if host]
            is_body = self._graph is not self.model.graph
            stage = Stage(work, arrays, {}, host, dict(self._wanted), set(self._static), is_body=is_body)
            stage = self._roots.setdefault(kinds, stage)  # another thread may have made it meanwhile
        return stage

    def _segment(self, stage: Stage, state: Mapping[ir.Value, Any], call: _Call) -> tuple[Segment, list[Any]]:
        """The segment that continues from `stage` with values of these shapes, and its arguments."""
        while True:
            signature, static, arguments = self._signature(stage, state, call)
            segment = self._cache.find(stage, signature, counts=call.counts)
            if segment is None:
                segment = self._build(stage, signature, static, arguments, call)
            if segment is not None:
                return segment, arguments

    def _signature(
        self, stage: Stage, state: Mapping[ir.Value, Any], call: _Call
    ) -> tuple[Signature, dict[ir.Value, np.ndarray], list[Any]]:
        """What a segment is looked up by, the contents of its static arguments, and the other arguments."""
        static = {v: _readable(v, state[v]) for v in stage.arrays if self._is_static(v, state[v], stage)}
        arguments = [state[v] for v in stage.arrays if v not in static]
        signature = Signature(
            tuple(_shape(x) for x in arguments),
            tuple((v.name, x.dtype.str, x.shape, x.tobytes()) for v, x in static.items()),
            None if call.params is None else tuple(p.dtype for p in call.params.values()),
        )
        return signature, static, arguments

    def _build(
        self,
        stage: Stage,
        signature: Signature,
        static: Mapping[ir.Value, np.ndarray],
        arguments: Sequence[Any],
        call: _Call,
    ) -> Segment | None:
        """A new segment, in the cache; None if further inputs turn out to be static."""
        with self._building:
            segment = self._cache.find(stage, signature, counts=call.counts)
            if segment is not None:  # another thread has built it meanwhile
                return segment
            avals = [jax.tree.map(_aval, x) for x in arguments]
            given = self.model.shapes["param"] if call.params is None else call.params
            params = {name: _aval(x) for name, x in given.items()}
            key = self._record_key(stage, signature, call)
            record = None if key is None else records.read(key)
            if isinstance(record, list):
                stage.static |= {value for value in stage.arrays if value.name in record}
                return None
            try:
                segment = Segment(
                    self.model, stage, signature, static, avals, params, self._packing, self._transform, record
                )
            except Promote as needed:
                if key is not None:
                    records.write_static(key, [value.name for value in needed.values])
                stage.static |= needed.values
                return None
            segment.record_key = key if record is None else None
            gone, advice = self._cache.keep(segment, counts=call.counts)
            if gone:
                self._plans.clear()
                used = used_weights(self._cache)
                self._prepared = {key: value for key, value in self._prepared.items() if key in used}
        telemetry.record(telemetry.Trace, segment.trace_seconds, **segment.labels, nodes=segment.nodes)
        for evicted in gone:
            seconds = evicted.trace_seconds + evicted.compile_seconds
            telemetry.record(telemetry.Eviction, seconds, **evicted.labels)
        if advice:
            warnings.warn(advice, RecompileWarning, stacklevel=5)
        return segment

    def _record_key(self, stage: Stage, signature: Signature, call: _Call) -> str | None:
        """What a segment's record is kept under; None where none is kept. There are records of what runs first, on the
        model's own params."""
        is_first = stage.depth == 0 and not (stage.is_body or stage.host)
        is_plain = call.weights is None and self._transform is None and not self.model.is_random
        has_folder = jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir is not None
        keeps = self._keeps_executables and has_folder and keeps_quick_ones()
        if not (keeps and is_first and is_plain and _is_alone(self.model)) or self._identity is None:
            return None
        inputs = [value.name for value in stage.arrays]
        choices = list(self._wanted), sorted(value.name for value in stage.static), self._packing, call.x64
        return identity.digest(self._identity, identity.of_process(), inputs, signature, choices)

    @functools.cached_property
    def _identity(self) -> str | None:
        return identity.of_model(self.model)

    def _is_static(self, value: ir.Value, array: Any, stage: Stage) -> bool:
        """Whether the contents of `array` belong to the signature: as the caller wishes, or since they are small and
        have decided something."""
        if value not in stage.static or not hasattr(array, "dtype"):
            return False
        return value in self._static or (array.ndim <= 1 and array.size <= SMALL)

    def _run_breaks(self, segment: Segment, state: dict[ir.Value, Any], call: _Call) -> None:
        """Runs the segment's breaks eagerly; their results join `state`."""
        model = self.model
        for needed in segment.breaks:
            if needed.only_reads and not needed.is_length:
                self._run_break(segment, needed.node, needed.values(), state, call, lambda: None)
        nodes = [needed.node for needed in segment.breaks if not needed.only_reads]
        outputs = [value for node in nodes for value in node.outputs]
        held = {**segment.stage.known, **segment.known, **state}
        read = {v for node in nodes for v in model.program.operands(node)}
        for value in (read & model.weight_values.keys()) - held.keys():
            kind, name = model.weight_values[value]
            given = call.params if kind == "param" else call.buffers
            held[value] = model.weight(name) if given is None else given[name]
        scopes = []

        def run(arrays: dict[int, Any]) -> dict[int, Any]:
            """The breaks' results that are arrays, by position; the others are in the scope."""
            with model.lowering_dtypes():
                values = {**held, **{order[i]: x for i, x in arrays.items()}}
                scope = model.scope(values, {}, next(iter(call.keys), None))
                evaluation = Evaluation(model.program, bodies=functools.partial(self._run_body, call))
                for needed in segment.breaks:
                    if not needed.only_reads:
                        read = _operands_read(model, needed, scope)
                        evaluate = functools.partial(evaluation.run, [needed.node], scope)
                        self._run_break(segment, needed.node, read, scope.values, call, evaluate)
            scopes.append(scope)
            return {i: x for i, v in enumerate(outputs) if isinstance(x := scope.values[v], jax.Array)}

        if nodes:
            order = list(held)
            followed = {i: held[v] for i, v in enumerate(order) if not call.x64 and differentiated([held[v]])}
            arrays = transposed_exactly(run, followed) if followed else run({})
            state.update({v: arrays[i] if i in arrays else scopes[-1].values[v] for i, v in enumerate(outputs)})
        for bind in segment.binds:
            state.update({v: {**held, **state}[source] for v, source in zip(bind.outputs, bind.sources, strict=True)})

    def _run_body(
        self, call: _Call, graph: ir.Graph, scope: Scope, outputs: tuple[ir.Value, ...]
    ) -> tuple[Any, ...] | None:
        """The outputs of the body of a Loop or Scan that runs eagerly; None where that has to run eagerly too."""
        if staged():
            return None
        model = self.model
        body = self._bodies.get((graph, outputs))
        if body is None:
            options = {
                "cache_size": self.cache_size,
                "packed_weights": self._packing,
                "transform": self._transform,
            }
            body = self._bodies.setdefault((graph, outputs), _Body(CompiledModel(model, **options)))
            body.compiled._graph, body.compiled._wanted = graph, {str(i): v for i, v in enumerate(outputs)}
        own = () if call.weights is not None else model.weight_values.keys()  # given ones are operands as any other
        captured = [v for v in model.program.captures(graph) if v not in own and not model.is_constant(v)]
        state = {v: scope[v] for v in (*graph.inputs, *captured)}
        if not body.is_steady(state):
            return None
        inner = _Call([scope.key] if model.is_random else [], call.x64, counts=call.counts)
        return tuple(body.compiled._run(state, inner).values())

    def _run_break(
        self,
        segment: Segment,
        node: ir.Node,
        operands: Iterable[ir.Value],
        values: Mapping[ir.Value, Any],
        call: _Call,
        evaluate: Callable[[], object],
    ) -> None:
        """Waits for what a break reads, evaluates it, and counts that."""
        started = time.perf_counter()
        read = [x for v in dict.fromkeys(operands) if isinstance(x := values.get(v), jax.Array)]
        try:
            jax.block_until_ready([x for x in read if not isinstance(x, Tracer)])
        except jax.errors.JaxRuntimeError as error:  # the segment's own: it was still running
            raise _failure(segment, error) from error
        evaluate()
        size = sum(x.size * x.dtype.itemsize for x in read)
        self._count_break(segment, node, time.perf_counter() - started, size, call)

    def _count_break(self, segment: Segment, node: ir.Node, seconds: float, size: int, call: _Call) -> None:
        if call.counts:
            segment.break_tallies[node].add(seconds, size)
        name = node.name or node.outputs[0].name or ""
        operator = operator_name(node)
        telemetry.record(telemetry.Break, seconds, **segment.labels, node=name, operator=operator, host_bytes=size)

    def _after(self, segment: Segment, state: Mapping[ir.Value, Any]) -> Stage:
        """What is left after the segment and its breaks, given which of the values that there are now are arrays."""
        kinds = tuple((value, is_host(x)) for value, x in state.items())
        after = segment.after.get(kinds)
        if after is None:
            before, operands = segment.stage, self.model.program.operands
            done = {*segment.emitted, *segment.known_outputs}
            needed = {v for w in segment.after_work for v in (w.sources if isinstance(w, Bind) else operands(w))}
            after = Stage(
                segment.after_work,
                [value for value, host in kinds if not host and value in needed],
                {**before.known, **segment.known},
                [value for value, host in kinds if host and value in needed],
                {n: v for n, v in before.pending_outputs.items() if n not in done and v not in state},
                {needed.node.inputs[0] for needed in segment.breaks if needed.only_reads and not needed.is_length},
                before.depth + 1,
                segment.past,
                before.is_body,
            )
            after = segment.after.setdefault(kinds, after)  # another thread may have made it meanwhile
        return after

    # -- weights

    def _weights(self, segment: Segment, executable: Executable, call: _Call) -> list[Any]:
        """What the executable takes as weights: the prepared ones, or the call's."""
        if executable.values is None:
            self._prepare(executable)
        if call.weights is None:
            return executable.values
        named = zip(executable.names, executable.values, strict=True)
        return [call.weights[name] if name else value for name, value in named]

    def _prepare(self, executable: Executable) -> None:
        """Computes the prepared weights that the segment needs and no other has computed yet."""
        with self._building, self._keeping():
            as_they_are = {weight.key for weight in executable.weights} | self._prepared.keys()
            values = []
            for weight, name in zip(executable.weights, executable.names, strict=True):
                value = None if name else self._prepared.get(weight.key)
                if value is None and not name:
                    value = self._prepared[weight.key] = _compute(executable, weight, self.model.weight)
                    for source, restore in inverses(weight).items():
                        if source not in as_they_are:
                            self.model.replace_weight(source, value, restore)
                values.append(value)
            executable.values = values


def _compute(executable: Executable, weight: Weight, original: Callable[[str], Any]) -> Any:
    """A prepared weight's value, from the original ones."""
    environment = {
        ref: original(name) if name else jax.device_put(executable.constants[ref]) for ref, name in weight.sources
    }
    value = moved(weight, environment)
    if value is not None:
        return value
    if len(weight.operations) <= _MANY:
        return evaluate(weight.operations, environment, [weight.ref])[0]
    return jax.jit(lambda environment: evaluate(weight.operations, environment, [weight.ref])[0])(environment)


def _is_alone(model: Model) -> bool:
    """Whether a model's segments run where JAX puts things by itself: on its first device."""
    return model.device is None and jax.config.jax_default_device is None and jax.process_count() == 1


def _aval(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _kinds(given: Any) -> Any:
    """Names, shapes and dtypes of inputs, if all are concrete arrays; else None."""
    if type(given) is not dict:
        return None
    kinds = []
    for name, x in given.items():
        if type(x) is not np.ndarray and (not isinstance(x, jax.Array) or isinstance(x, Tracer)):
            return None
        kinds.append((name, x.shape, x.dtype))
    return tuple(kinds)


def _launch(
    segment: Segment,
    function: Callable[[list[Any], list[Any]], list[Any]],
    weights: list[Any],
    arguments: list[Any],
    *,
    counts: bool = True,
) -> list[Any]:
    """Calls a segment's executable, counts that, and tells of it."""
    started = time.perf_counter()
    try:
        flat = function(weights, arguments)
        if telemetry.is_wanted(telemetry.SegmentRun):
            jax.block_until_ready([x for x in flat if not isinstance(x, Tracer)])
    except jax.errors.JaxRuntimeError as error:
        raise _failure(segment, error) from error
    seconds = time.perf_counter() - started
    if counts:
        segment.tally.add(seconds)
    telemetry.record(telemetry.SegmentRun, seconds, **segment.labels)
    return flat


def _operands_read(model: Model, needed: Break, scope: Scope) -> list[ir.Value]:
    """The operands of a break whose contents its lowering takes."""
    lowering = model.program.bind(needed.node, scope).lowering
    if lowering is None:
        return needed.values()
    taken = {*lowering.known, *lowering.reads}
    operands = [v for i, v in enumerate(needed.node.inputs) if v is not None and lowering.operand(i) in taken]
    return operands or needed.values()


def _failure(segment: Segment, error: Exception) -> ExecutionError:
    """XLA's error, with what a user knows of the segment."""
    names, labels = segment.node_names, segment.labels
    place = f"Segment {labels['depth']} of {labels['model']} for {labels['signature']}"
    largest = ", ".join(f"{name} with {size} bytes" for name, size in segment.largest)
    return ExecutionError(
        f"{place}, {len(names)} nodes from {names[0]} to {names[-1]}, failed: {str(error)[:1000]}\n"
        f"Its largest results are those of {largest}. Call it with smaller inputs, or free memory of the device."
        if names
        else f"{place} failed: {error}",
        segment=place,
        nodes=names,
    )


def _with_progress(jobs: Iterator[Any], total: int, wanted: bool | None) -> Iterable[Any]:
    """`jobs`, with a bar that counts them."""
    tqdm = bar_class(wanted)
    return jobs if tqdm is None else tqdm(jobs, total=total, desc="compile", unit="shape")


def _readable(value: ir.Value, array: Any) -> np.ndarray:
    """The contents of a value that decides a shape or a branch."""
    if isinstance(array, jax.ShapeDtypeStruct):
        raise InputError(f"The contents of {value.name!r} decide a shape or a branch. Give the input, not its shape.")
    held = contents(array)
    if held is None:
        raise GraphBreakError(
            f"{value.name!r} decides a shape or a branch, but a JAX transform around the call (vmap) hides its "
            "contents. Give it as a NumPy array that the transform does not map over.",
            operand=value.name or "",
        )
    if isinstance(array, Tracer) and is_float(array):
        raise InputError(
            f"The input {value.name!r} is static and is being differentiated, but no gradient flows to contents. "
            "Take it out of static_inputs, or wrap it in jax.lax.stop_gradient."
        )
    return held


def _shape(value: Any) -> Any:
    """What a signature records of a value."""
    if isinstance(value, list):
        return tuple(_shape(item) for item in value)
    return None if value is None else (value.shape, value.dtype)


def _widened(value: ir.Value, array: Any) -> Any:
    """An input in its declared dtype: with x64 off, a caller's JAX arrays are 32-bit."""
    if isinstance(array, jax.Array) and value.dtype is not None and array.dtype != value.dtype.numpy():
        return jax.lax.convert_element_type(array, value.dtype.numpy())
    return array

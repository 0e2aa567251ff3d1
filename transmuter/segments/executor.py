"""`CompiledModel`: finds or builds the segments that a call needs, and runs them and the breaks between them."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
import onnx_ir as ir
from jax.core import Tracer

from transmuter.errors import GraphBreakError, InputError
from transmuter.lowering.arrays import contents, is_float
from transmuter.lowering.control_flow import varying_axes
from transmuter.lowering.evaluation import Evaluation
from transmuter.model import Model, checked_key, returned
from transmuter.segments import explanation
from transmuter.segments.preparation import Weight, evaluate, inverse
from transmuter.segments.segment import SMALL, Executable, Promote, Segment, Signature, Stage, _decides_branch, is_host
from transmuter.staging import differentiated, exact_dtypes, staged, transposed_exactly


@dataclass(frozen=True)
class SegmentInfo:
    """One compiled segment: where it stands in a run, what for, and what it cost."""

    depth: int
    signature: str
    nodes: int
    calls: int
    trace_seconds: float
    compile_seconds: float


@dataclass(frozen=True)
class CacheInfo:
    """Counts of a `CompiledModel`'s cache, and its present segments."""

    hits: int
    misses: int
    evictions: int
    segments: tuple[SegmentInfo, ...]


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
    ):
        if cache_size < 1:
            raise ValueError(f"cache_size is {cache_size}, but must be at least 1.")
        self.model, self.cache_size = model, cache_size
        self._wanted = model.values(outputs)
        if isinstance(static_inputs, str):
            raise InputError(f"static_inputs is the string {static_inputs!r}. Give a list of names.")
        unknown = [name for name in static_inputs if name not in {**model.inputs, **model.overridable_inputs}]
        if unknown:
            raise InputError(
                f"There is no input {unknown[0]!r} to be static. The model's are {', '.join(model.inputs)}."
            )
        self._static = {value for value in model.graph.inputs if value.name in static_inputs}
        self._roots: dict[tuple[tuple[ir.Value, bool], ...], Stage] = {}
        self._segments: dict[int, OrderedDict[tuple[Stage, Signature], Segment]] = {}
        self._prepared: dict[str, jax.Array] = {}
        self._hits = self._misses = self._evictions = 0
        self._calls = itertools.count()
        self._lock = threading.Lock()
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
            GraphBreakError: The graph breaks at a node whose operand a transform around the call hides: `jit`, `vmap`,
                `checkpoint`, `scan`, `shard_map`, `export`. `grad` alone hides nothing.
        """
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
            return self._run(held, params, buffers, key, x64=x64)

    def __repr__(self) -> str:
        return f"CompiledModel({', '.join(map(str, self.model.inputs.values()))}; {len(self.segments)} segments)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A CompiledModel cannot be copied or pickled. Compile the model again.")

    # -- what it has done

    def cache_info(self) -> CacheInfo:
        """Hits, misses and evictions of segments, and each present segment's cost."""
        with self._lock:
            infos = tuple(
                SegmentInfo(
                    depth,
                    explanation.spell(segment),
                    segment.nodes,
                    segment.calls,
                    segment.trace_seconds,
                    segment.compile_seconds,
                )
                for depth, cache in sorted(self._segments.items())
                for segment in cache.values()
            )
            return CacheInfo(self._hits, self._misses, self._evictions, infos)

    def cache_clear(self) -> None:
        """Forgets every segment, its executable, and the prepared weights."""
        with self._lock:
            self._segments.clear()
            self._prepared.clear()
            self._roots.clear()

    @property
    def segments(self) -> list[Segment]:
        """The present segments, in the order of a run."""
        return [segment for _, cache in sorted(self._segments.items()) for segment in cache.values()]

    def explain(self) -> explanation.Explanation:
        """What the graph was compiled to: its segments, and each break with the reason for it. Print it."""
        return explanation.explain(self.segments)

    # -- running

    def _run(
        self,
        held: dict[ir.Value, Any],
        params: Mapping[str, Any] | None,
        buffers: Mapping[str, Any] | None,
        key: jax.Array | None,
        *,
        x64: bool,
    ) -> dict[str, Any]:
        """Runs on checked inputs; `x64` is the caller's setting."""
        model = self.model
        own = params is None and buffers is None
        if not own:
            params = model.params if params is None else params
            buffers = model.buffers if buffers is None else buffers
            model.check_weights("param", params)
            model.check_weights("buffer", buffers)
            given = {**params, **buffers}
        keys = [self._key() if key is None else key] if model.is_random else []
        state: dict[ir.Value, Any] = {value: _widened(value, array) for value, array in held.items()}
        stage = self._root(state)
        # Strings that are returned as they are given pass no segment.
        results: dict[str, Any] = {n: state[v] for n, v in self._wanted.items() if v in state and is_host(state[v])}
        while True:
            segment, arguments = self._segment(stage, state, params, own)
            executable = segment.executable(own_params=own)
            if own:
                if executable.values is None:
                    self._prepare(segment, executable)
                weights = executable.values
            else:
                weights = [_compute(segment, weight, given.__getitem__) for weight in executable.weights]
            leaves = jax.tree.leaves(arguments) if segment.is_nested else arguments
            started = time.perf_counter()
            if not x64 and segment.is_wide and (differentiated(leaves) or differentiated(weights)):
                flat = transposed_exactly(executable.function, weights, [*leaves, *keys])
            else:
                followed = executable.rounding is None or any(isinstance(x, Tracer) for x in (*leaves, *weights))
                function = executable.function if followed else executable.rounding
                flat = function(weights, [*leaves, *keys])
            if segment.calls == 0:
                segment.compile_seconds = time.perf_counter() - started
            segment.calls += 1
            carried, emitted = segment.unpack(flat)
            results.update(emitted)
            results.update(segment.known_outputs)
            if not segment.breaks:
                break
            state = {**{value: state[value] for value in segment.passed}, **carried}
            self._run_breaks(segment, state, params, buffers, keys, x64=x64)
            after = self._after(segment, state)
            for name, value in stage.pending_outputs.items():
                if name not in results and value in state and name not in after.pending_outputs:
                    results[name] = model.declared(value, state[value])
            stage = after
            if not stage.work:
                break
        return {name: returned(name, results[name]) for name in self._wanted}

    def _key(self) -> jax.Array:
        """The model's own key for the next call: the first is the one that `run` takes."""
        number, key = next(self._calls), jax.random.key(self.model.seed)
        return jax.random.fold_in(key, number) if number else key

    def _root(self, state: Mapping[ir.Value, Any]) -> Stage:
        kinds = tuple((value, is_host(x)) for value, x in state.items())
        stage = self._roots.get(kinds)
        if stage is None:
            work = self.model.program.work(self.model.graph, tuple(self._wanted.values()))
            arrays = [value for value, host in kinds if not host]
            stage = Stage(work, arrays, {}, [v for v, host in kinds if host], dict(self._wanted), set(self._static))
            self._roots[kinds] = stage
        return stage

    def _segment(
        self, stage: Stage, state: Mapping[ir.Value, Any], params: Mapping[str, Any] | None, own: bool
    ) -> tuple[Segment, list[Any]]:
        """The segment that continues from `stage` with values of these shapes, and its arguments."""
        while True:
            static = {v: _readable(v, state[v]) for v in stage.arrays if self._is_static(v, state[v], stage)}
            arguments = [state[v] for v in stage.arrays if v not in static]
            signature = Signature(
                tuple(_shape(x) for x in arguments),
                tuple((v.name, x.dtype.str, x.shape, x.tobytes()) for v, x in static.items()),
                None if own else tuple(p.dtype for p in params.values()),
            )
            segment = self._find(stage, signature)
            if segment is not None:
                return segment, arguments
            with self._building:
                segment = self._find(stage, signature)  # another thread may have built it meanwhile
                if segment is not None:
                    return segment, arguments
                avals = [jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), x) for x in arguments]
                weights = self.model.shapes["param"] if own else params
                try:
                    segment = Segment(self.model, stage, signature, static, avals, weights)
                except Promote as needed:
                    stage.static |= needed.values
                    continue
                self._keep(segment)
                return segment, arguments

    def _is_static(self, value: ir.Value, array: Any, stage: Stage) -> bool:
        """Whether the contents of `array` belong to the signature: as the caller wishes, or since they are small and
        have decided something."""
        if value not in stage.static or not hasattr(array, "dtype"):
            return False
        return value in self._static or (array.ndim <= 1 and array.size <= SMALL)

    def _find(self, stage: Stage, signature: Signature) -> Segment | None:
        with self._lock:
            cache = self._segments.get(stage.depth)
            if cache is None or (stage, signature) not in cache:
                return None
            self._hits += 1
            cache.move_to_end((stage, signature))
            return cache[stage, signature]

    def _keep(self, segment: Segment) -> None:
        with self._lock:
            self._misses += 1
            cache = self._segments.setdefault(segment.stage.depth, OrderedDict())
            cache[segment.stage, segment.signature] = segment
            while len(cache) > self.cache_size:
                cache.popitem(last=False)
                self._evictions += 1

    def _run_breaks(
        self,
        segment: Segment,
        state: dict[ir.Value, Any],
        params: Mapping[str, Any] | None,
        buffers: Mapping[str, Any] | None,
        keys: Sequence[jax.Array],
        *,
        x64: bool,
    ) -> None:
        """Runs the segment's breaks eagerly; their results join `state`."""
        model = self.model
        nodes = [needed.node for needed in segment.breaks if not _decides_branch(needed.node)]
        outputs = [value for node in nodes for value in node.outputs]
        held = {**segment.stage.known, **segment.known, **state}
        for value in {v for node in nodes for v in model.program.operands(node)} & model.weight_values.keys():
            kind, name = model.weight_values[value]
            given = params if kind == "param" else buffers
            held[value] = model.weight(name) if given is None else given[name]
        scopes = []

        def run(arrays: dict[int, Any]) -> dict[int, Any]:
            """The breaks' results that are arrays, by position; the others are in the scope."""
            with model.lowering_dtypes():
                scope = model.scope({**held, **{order[i]: x for i, x in arrays.items()}}, {}, next(iter(keys), None))
                Evaluation(model.program).run(nodes, scope)
            scopes.append(scope)
            return {i: x for i, v in enumerate(outputs) if isinstance(x := scope.values[v], jax.Array)}

        order = list(held)
        followed = {i: held[v] for i, v in enumerate(order) if not x64 and differentiated([held[v]])}
        arrays = transposed_exactly(run, followed) if followed else run({})
        state.update({v: arrays[i] if i in arrays else scopes[-1].values[v] for i, v in enumerate(outputs)})
        for bind in segment.binds:
            state.update({v: {**held, **state}[source] for v, source in zip(bind.outputs, bind.sources, strict=True)})

    def _after(self, segment: Segment, state: Mapping[ir.Value, Any]) -> Stage:
        """What is left after the segment and its breaks, given which of the values that there are now are arrays."""
        kinds = tuple((value, is_host(x)) for value, x in state.items())
        if kinds not in segment.after:
            before = segment.stage
            done = {*segment.emitted, *segment.known_outputs}
            segment.after[kinds] = Stage(
                segment.after_work,
                [value for value, host in kinds if not host],
                {**before.known, **segment.known},
                [value for value, host in kinds if host],
                {n: v for n, v in before.pending_outputs.items() if n not in done and v not in state},
                {needed.node.inputs[0] for needed in segment.breaks if _decides_branch(needed.node)},
                before.depth + 1,
            )
        return segment.after[kinds]

    # -- weights

    def _prepare(self, segment: Segment, executable: Executable) -> None:
        """Computes the prepared weights that the segment needs and no other has computed yet."""
        with self._building:
            as_they_are = {weight.key for weight in executable.weights} | self._prepared.keys()
            for weight in executable.weights:
                if weight.key in self._prepared:
                    continue
                value = self._prepared[weight.key] = _compute(segment, weight, self.model.weight)
                restore = inverse(weight)
                if restore is not None and weight.sources[0][1] not in as_they_are:
                    self.model.replace_weight(weight.sources[0][1], value, restore)
            executable.values = [self._prepared[weight.key] for weight in executable.weights]


def _compute(segment: Segment, weight: Weight, original: Callable[[str], Any]) -> Any:
    """A prepared weight's value, from the original ones."""
    environment = {
        ref: original(name) if name else jax.numpy.asarray(segment.constant(ref)) for ref, name in weight.sources
    }
    return evaluate(weight.operations, environment, [weight.ref])[0]


def _readable(value: ir.Value, array: Any) -> np.ndarray:
    """The contents of a value that decides a shape or a branch."""
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

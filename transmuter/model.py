"""`Model`: an ONNX graph as a JAX function of its weights and inputs."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import ml_dtypes
import numpy as np
import onnx_ir as ir

from transmuter import reading, telemetry
from transmuter.errors import GraphBreakError, InputError, LoweringError
from transmuter.lowering import evaluation
from transmuter.lowering.arrays import canonical, cast, compute_dtypes, computed, in_jax, traced
from transmuter.lowering.padding import Padded, has_length
from transmuter.lowering.reasons import length_reason, shortened
from transmuter.partition import Choice, Partition, partition
from transmuter.staging import staged
from transmuter.ties import tie

_SMALL = 16
"""Up to so many elements, a float initializer is a known value and no param (unless the model is trainable)."""
_SMALL_INTEGERS = 1024
"""The same for integers and booleans, which hold shapes, axes and index tables."""
_BAKED_WARNING = 16 << 20
_INTEGERS = {np.dtype(t) for t in "?bhiqBHIQ"}
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = {_BFLOAT16, *(np.dtype(t) for t in (np.float16, np.float32, np.float64))}


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output: its name, dtype and shape, in which a free dimension is its symbol, or None.

    Values that are no tensors (sequences, optionals, maps) have their ONNX type in `kind`, and neither dtype nor shape.
    """

    name: str
    dtype: np.dtype | None
    shape: tuple[int | str | None, ...] | None
    kind: str = "tensor"

    def __str__(self) -> str:
        if self.kind != "tensor":
            return f"{self.name}: {self.kind}"
        shape = "?" if self.shape is None else ", ".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name}: {'string' if self.dtype == object else self.dtype.name}[{shape}]"


def load(
    source: reading.Source,
    *,
    trainable: bool = False,
    compute_type: str | None = "float32",
    device: jax.Device | None = None,
    seed: int = 0,
) -> Model:
    """Loads an ONNX model.

    Args:
        source: A path, the file's bytes, an `onnx.ModelProto`, an `onnx_ir.Model`, or
            `"hf://org/repo[@revision]/path/to/model.onnx"` for a file on the Hugging Face Hub.
        trainable: Make every float weight a param. Without it, those of a few elements are constants. Copies of a
            weight, as they are or transposed (a tied embedding), become that one weight.
        compute_type: `"float32"` computes float16 graphs, and those with bfloat16 weights, in float32, as ONNX Runtime
            does on a CPU; inputs, outputs and params keep their dtypes. None computes in the graph's own dtypes.
        device: Where the weights live; None is JAX's default device.
        seed: Seeds random operators where a call gives no key.

    Returns:
        The model. Nothing refers to the file afterwards.

    Raises:
        ModelError: The source is no usable ONNX model.
        HubError: A file of a Hub repository could not be had.
    """
    if compute_type not in ("float32", None):
        raise ValueError(f"compute_type is {compute_type!r}, but must be 'float32' or None.")
    started = time.perf_counter()
    if isinstance(source, str) and source.startswith("hf://"):
        from transmuter import hub

        source = hub.fetch_model(source)
    weights = reading.read(source)
    if trainable:
        tie(weights.model, weights.arrays)
    model = Model(weights, trainable=trainable, compute_type=compute_type, device=device, seed=seed)
    if isinstance(source, (str, os.PathLike)):
        model.name = os.path.basename(source)
    seconds = time.perf_counter() - started
    telemetry.record(telemetry.Load, seconds, model=model.name, nodes=len(model.graph), weight_bytes=model.nbytes)
    return model


class Model:
    """An ONNX graph with its weights. `transmuter.load` makes one.

    Attributes:
        name: The file's name, or the graph's where the model is not from a file.
        inputs: `TensorSpec` of each input that a call must give, by name, in graph order.
        overridable_inputs: `TensorSpec` of each input that has a default among the weights.
        lists_weights_as_inputs: Whether the format (IR version 3) forces every weight to be such an input.
        outputs: `TensorSpec` of each graph output, by name, in graph order.
        opsets: Version of each operator domain that the graph imports (`""` is ai.onnx).
        graph: The `onnx_ir.Graph`, sorted, with functions inlined where possible. Read it, do not change it.
        ir_model: The `onnx_ir.Model` around it.
        map_types: Types of graph inputs and outputs that `ir_model` cannot hold.
        is_trainable: Whether every float weight is a param.
    """

    def __init__(
        self,
        weights: reading.Weights,
        *,
        trainable: bool,
        compute_type: str | None,
        device: jax.Device | None,
        seed: int,
    ):
        self.ir_model, self.graph, self.map_types = weights.model, weights.model.graph, weights.map_types
        self.name = self.graph.name or "model"
        self.compute_type, self.device, self.seed = compute_type, device, seed
        self.is_trainable = trainable
        self._dtypes: dict[np.dtype, np.dtype] = {}
        if compute_type is not None:
            self._dtypes[np.dtype(np.float16)] = np.dtype(compute_type)
            # ONNX Runtime computes no bfloat16 on a CPU; without such weights the specification's types hold
            if any(array.dtype == _BFLOAT16 for array in weights.arrays.values()):
                self._dtypes[_BFLOAT16] = np.dtype(compute_type)
        self.opsets = {("" if d == "ai.onnx" else d): v for d, v in self.ir_model.opset_imports.items()}
        given = set(self.graph.initializers.values())
        specs = {v: _spec(v, weights.map_types) for v in (*self.graph.inputs, *self.graph.outputs)}
        self.inputs = {v.name: specs[v] for v in self.graph.inputs if v not in given}
        self.overridable_inputs = {v.name: specs[v] for v in self.graph.inputs if v in given}
        self.outputs = {v.name: specs[v] for v in self.graph.outputs}
        self.lists_weights_as_inputs = (self.ir_model.ir_version or 0) < 4
        self.program = evaluation.Program(self.graph, self.ir_model.functions, self.opsets)
        self._store = _Store(device)
        self._homes: dict[str, dict[str, ir.Value]] = {"param": {}, "buffer": {}}
        self._constants: dict[ir.Value, np.ndarray] = {}
        contents_needed = self.program.known_initializers()
        for value, array in weights.arrays.items():
            is_float = array.dtype in _FLOATS
            if is_float:
                large = trainable or array.size > _SMALL
            else:
                large = array.size > (_SMALL_INTEGERS if array.dtype in _INTEGERS else _SMALL)
            if not large or value in contents_needed or not in_jax(array.dtype):
                self._constants[value] = array
                continue
            name = value.name if value.name not in self._store else f"{value.name}#{len(self._store)}"
            self._homes["param" if is_float else "buffer"][name] = value
            self._store.add(name, array)
        self._warned = False

    # -- weights

    @property
    def params(self) -> dict[str, jax.Array]:
        """The float weights by initializer name, as arrays on the device: the pytree that gradients are taken of."""
        return {name: self._store.get(name) for name in self._homes["param"]}

    @property
    def buffers(self) -> dict[str, jax.Array]:
        """Large arrays that are no ordinary float (packed or int8 weights, tables, float8): never differentiated."""
        return {name: self._store.get(name) for name in self._homes["buffer"]}

    def trainable(self, choice: Choice) -> Partition:
        """Splits the params in those to train and those to leave as they are.

            trained, frozen = model.trainable(["encoder.layer.5.*", "classifier.*"])
            loss, grads = jax.value_and_grad(lambda p: loss_fn(compiled(batch, params={**p, **frozen})))(trained)

        Args:
            choice: Names of params, `fnmatch` patterns or compiled regular expressions (which are searched for), one or
                several; or a function of a name and a `jax.ShapeDtypeStruct` that returns whether to train it.

        Returns:
            Both dicts, by name; `.mask` and `.labels` say the same to `optax.masked` and `optax.multi_transform`.

        Raises:
            InputError: Nothing matches, or only quantised weights do, which have no gradient.
        """
        return partition(self, choice)

    @functools.cached_property
    def shapes(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """Shape and dtype of each weight by name, under `"param"` and `"buffer"`."""
        return {kind: {name: self._store.shape(name) for name in homes} for kind, homes in self._homes.items()}

    @functools.cached_property
    def weight_values(self) -> dict[ir.Value, tuple[str, str]]:
        """The graph's values that are weights, with their kind (`"param"`, `"buffer"`) and name."""
        return {value: (kind, name) for kind, homes in self._homes.items() for name, value in homes.items()}

    @property
    def nbytes(self) -> int:
        """How many bytes the params and buffers hold."""
        return sum(w.size * w.dtype.itemsize for kind in self.shapes.values() for w in kind.values())

    def is_constant(self, value: ir.Value) -> bool:
        """Whether `value` is an initializer that is a known value."""
        return value in self._constants

    def constant(self, value: ir.Value) -> np.ndarray:
        """The contents of an initializer that is a known value."""
        return self._constants[value]

    def weight(self, name: str) -> jax.Array:
        """One param or buffer, as an array on the device."""
        return self._store.get(name)

    def replace_weight(self, name: str, prepared: jax.Array, restore: Callable[[jax.Array], jax.Array]) -> None:
        """Frees a weight of which a `prepared` copy exists, from which `restore` gets it back when somebody asks."""
        self._store.replace(name, prepared, restore)

    def check_weights(self, kind: str, given: Mapping[str, Any]) -> None:
        """Raises `InputError` unless `given` has the names and shapes of the model's params or buffers."""
        shapes = self.shapes[kind]
        if not isinstance(given, Mapping):
            raise InputError(f"The {kind}s are a {type(given).__name__}. Give a dict with the keys of model.{kind}s.")
        if given.keys() != shapes.keys():
            odd = sorted(given.keys() ^ shapes.keys())[0]
            what = "is missing" if odd in shapes else "is unknown"
            raise InputError(f"The {kind} {odd!r} {what}. Give a dict with the keys of model.{kind}s.")
        for name, array in given.items():
            expected = shapes[name]
            if isinstance(array, jax.Array) and array.shape == expected.shape and array.dtype == expected.dtype:
                continue
            dtype = getattr(array, "dtype", None)
            if dtype is None or (kind == "param" and not jax.numpy.issubdtype(dtype, np.floating)):
                what = type(array).__name__ if dtype is None else dtype
                raise InputError(f"The {kind} {name!r} is {what}. Give an array like that in model.{kind}s.")
            if np.shape(array) != expected.shape:
                raise InputError(
                    f"The {kind} {name!r} has the shape {list(np.shape(array))}, not {list(expected.shape)}. "
                    f"Give arrays shaped as in model.{kind}s."
                )

    # -- the pure function

    def apply(
        self,
        params: Mapping[str, Any],
        inputs: Mapping[str, Any] | Sequence[Any],
        *,
        buffers: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
        outputs: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """The graph as a pure function: use it under `jit`, `grad`, `vmap`, `checkpoint`, `shard_map`, `export`.

        Args:
            params: Arrays shaped as `model.params`.
            inputs: Arrays by input name, or in the order of `model.inputs`. Under a transform that hides contents,
                inputs given as NumPy arrays are constants: one that decides a shape or a branch has to be given so.
            buffers: Arrays shaped as `model.buffers`. None is the model's own, which a `jit` around bakes in.
            key: A JAX random key for random operators. None is that of the model's seed.
            outputs: Names of graph outputs or of internal values; what they do not need is not run. None is all of
                the graph's outputs.

        Returns:
            Arrays by output name, in the order asked for. Sequences are lists; strings are NumPy object arrays; maps
            are dicts. With `jax_enable_x64` off, 64-bit results have JAX's 32-bit dtypes; `run` and `compile` keep the
            model's.

        Raises:
            InputError: An input, param or output name is missing or unknown, or an array has the wrong dtype or shape.
            GraphBreakError: A node needs contents that a transform hides.
            UnsupportedOperatorError: The graph needs an operator without a lowering.
            LoweringError: A node failed: its operands do not fit its operator.
        """
        return self.apply_bound(self.bind_inputs(inputs), params, buffers=buffers, key=key, outputs=outputs)

    def apply_bound(
        self,
        held: Mapping[ir.Value, Any],
        params: Mapping[str, Any] | None = None,
        *,
        buffers: Mapping[str, Any] | None = None,
        key: jax.Array | None = None,
        outputs: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """`apply` on inputs that `bind_inputs` has checked; the model's own params where none are given."""
        key = checked_key(key)
        wanted = self.values(outputs)
        known = staged()
        if params is None or buffers is None:
            params = self.params if params is None else params
            buffers = self.buffers if buffers is None else buffers
            self.warn_of_baking(buffers)
        values = {v: x if known and isinstance(x, np.ndarray) else _to_jax(v.name, x) for v, x in held.items()}
        if self.unsupported_operators:
            self._check_supported(values, wanted)
        return self.evaluate(values, params, buffers, key, wanted)

    def evaluate(
        self,
        held: Mapping[ir.Value, Any],
        params: Mapping[str, Any],
        buffers: Mapping[str, Any],
        key: jax.Array | None,
        wanted: Mapping[str, ir.Value],
    ) -> dict[str, Any]:
        """`apply` on checked inputs (`bind_inputs`) and outputs (`values`)."""
        self.check_weights("param", params)
        self.check_weights("buffer", buffers)
        weights = {
            value: (params if kind == "param" else buffers)[name] for value, (kind, name) in self.weight_values.items()
        }
        with self.lowering_dtypes(), self.naming_disagreements(held):
            scope = self.scope(held, weights, key)
            work = self.program.work(self.graph, tuple(wanted.values()))
            evaluating = evaluation.Evaluation(self.program)
            evaluating.run(work, scope, keep=frozenset(wanted.values()))
            for name, value in wanted.items():
                if isinstance(scope[value], Padded):
                    reason = length_reason(value, self.program, scope, evaluating.past)
                    raise GraphBreakError(
                        f"How long the output {name!r} is depends on contents "
                        f"({' <- '.join(shortened(reason.origin))}), which a JAX transform around the call hides. Call "
                        f"transmuter.compile's result outside of that transform. {reason.advice}",
                        origin=reason.origin,
                    )
                if has_length(scope[value]):
                    scope.values[value] = traced(scope[value])
            return {name: returned(name, self.declared(value, scope[value])) for name, value in wanted.items()}

    def scope(
        self, held: Mapping[ir.Value, Any], weights: Mapping[ir.Value, Any], key: jax.Array | None
    ) -> evaluation.Scope:
        """A scope for the graph, with the weights and inputs in the dtypes that it computes in."""
        if not jax.config.jax_enable_x64:
            weights = {value: _canonical(value.name, array) for value, array in weights.items()}
        given = {value: self._as_own(value, array) for value, array in {**weights, **held}.items()}
        values: dict[ir.Value, Any] = {**self._constants, **given}
        if self.compute_type is not None:
            values = {value: _computed(array) for value, array in values.items()}
        if key is None and self.is_random:
            key = jax.random.key(self.seed)
        return evaluation.Scope(values, self.opsets, key=key)

    def _as_own(self, value: ir.Value, array: Any) -> Any:
        """A param in the dtype that the graph computes the model's own in; a call may give another. Other values stay
        as they are."""
        kind, name = self.weight_values.get(value, ("", ""))
        if kind != "param":
            return array
        wanted = canonical(computed(self._store.shape(name).dtype))
        return array if array.dtype == wanted else cast(array, wanted)

    @contextlib.contextmanager
    def naming_disagreements(self, held: Mapping[ir.Value, Any]) -> Iterator[None]:
        """Adds to the error of a failing node which inputs disagree on a symbolic dimension, if some do: exporters'
        symbols can be wrong, so that alone is no error."""
        try:
            yield
        except LoweringError as error:
            found: dict[str, dict[int, str]] = {}
            for value, array in held.items():
                spec = self.inputs.get(value.name)
                if spec is None or spec.shape is None:
                    continue
                for symbol, size in zip(spec.shape, np.shape(array), strict=False):
                    if isinstance(symbol, str):
                        found.setdefault(symbol, {}).setdefault(size, value.name)
            clashes = [
                f"{symbol!r} is " + " and ".join(f"{size} in {name!r}" for size, name in sizes.items())
                for symbol, sizes in found.items()
                if len(sizes) > 1
            ]
            if not clashes:
                raise
            raise LoweringError(
                f"{error} The inputs disagree on a dimension: {'; '.join(clashes)}."
            ) from error.__cause__

    def lowering_dtypes(self) -> AbstractContextManager[None]:
        """A context in which lowerings compute in the model's compute type, at full precision."""
        return _lowering(self._dtypes)

    def declared(self, value: ir.Value, result: Any) -> Any:
        """A result in the half-precision dtype that the graph declares for it, where the graph computed in float32."""
        if self.compute_type is None or value.dtype is None:
            return result
        wanted = value.dtype.numpy()
        with self.lowering_dtypes():
            if computed(wanted) == wanted:
                return result
        return jax.tree.map(lambda x: cast(x, wanted), result)

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether the graph draws random numbers."""
        return self.program.is_random(self.graph)

    # -- inputs and outputs

    def bind_inputs(self, inputs: Mapping[str, Any] | Sequence[Any]) -> dict[ir.Value, Any]:
        """Checks a call's inputs and maps the graph's values to them."""
        if not isinstance(inputs, Mapping):
            if not isinstance(inputs, (list, tuple)):
                raise InputError(
                    f"The inputs are a {type(inputs).__name__}. "
                    "Give a dict by name, or a list in the order of model.inputs."
                )
            if len(inputs) != len(self.inputs):
                raise InputError(f"{len(inputs)} inputs are given. The model takes {self._signature()}.")
            inputs = dict(zip(self.inputs, inputs, strict=True))
        for name in inputs:
            if name not in self.inputs and name not in self.overridable_inputs:
                raise InputError(f"There is no input {name!r}. The model takes {self._signature()}.")
        for name, spec in self.inputs.items():
            if name not in inputs and not spec.kind.startswith("optional"):
                raise InputError(f"The input {name!r} is missing. The model takes {self._signature()}.")
        overridden = not inputs.keys() <= self.inputs.keys()
        return {
            value: accept(spec, inputs.get(value.name))
            for value, spec, is_required in (self._bindings if overridden else self._required_bindings)
            if is_required or value.name in inputs
        }

    @functools.cached_property
    def _bindings(self) -> list[tuple[ir.Value, TensorSpec, bool]]:
        """The graph's inputs with their specs, and whether a call binds them even if it does not give them."""
        specs = {**self.inputs, **self.overridable_inputs}
        return [(value, specs[value.name], value.name in self.inputs) for value in self.graph.inputs]

    @functools.cached_property
    def _required_bindings(self) -> list[tuple[ir.Value, TensorSpec, bool]]:
        return [binding for binding in self._bindings if binding[2]]

    def _signature(self) -> str:
        return ", ".join(map(str, self.inputs.values())) or "no inputs"

    def values(self, outputs: Sequence[str] | None) -> dict[str, ir.Value]:
        """The graph's values of those names; None is the graph's outputs."""
        if outputs is None:
            return {v.name: v for v in self.graph.outputs}
        if isinstance(outputs, str):
            raise InputError(f"outputs is the string {outputs!r}. Give a list of names.")
        found = {}
        for name in outputs:
            if name not in self._named:
                raise InputError(f"There is no value {name!r} in the graph. Its outputs are {', '.join(self.outputs)}.")
            found[name] = self._named[name]
        return found

    @functools.cached_property
    def _named(self) -> dict[str, ir.Value]:
        named = {v.name: v for v in (*self.graph.inputs, *self.graph.initializers.values())}
        for node in self.graph:
            named.update({v.name: v for v in node.outputs if v.name})
        return named

    # -- other models made of it

    def edited(self, edit: Callable[[ir.Model, dict[ir.Value, Any]], None]) -> Model:
        """A model with another graph, which shares the weights that the two have in common.

        Args:
            edit: Changes a copy of the `onnx_ir.Model`, and the contents of its initializers (NumPy or JAX arrays): it
                adds to these what initializers it adds to the graph.

        Returns:
            The new model; this one stays as it is.
        """
        copy, originals = self.copied()
        arrays = {
            value: self.weight(self.weight_values[original][1])
            if original in self.weight_values
            else self._constants[original]
            for value, original in originals.items()
        }
        edit(copy, arrays)
        options = {"compute_type": self.compute_type, "device": self.device, "seed": self.seed}
        model = Model(reading.Weights(copy, arrays, self.map_types), trainable=self.is_trainable, **options)
        model.name = self.name
        return model

    def copied(self) -> tuple[ir.Model, dict[ir.Value, ir.Value]]:
        """A copy of `ir_model`, and which initializers of it stand for which ones of the original."""
        copy = self.ir_model.clone()
        originals = {
            its_copy.initializers[name]: value
            for graph, its_copy in zip(self.ir_model.graphs(), copy.graphs(), strict=True)
            for name, value in graph.initializers.items()
        }
        return copy, originals

    # -- what it holds

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        params: Mapping[str, Any] | None = None,
        external_data: bool | None = None,
    ) -> None:
        """Writes the model as an ONNX file: the graph that was loaded, with other weights.

        Args:
            path: The file. One that is there is replaced, once the new one is whole.
            params: Arrays shaped as `model.params`, in any float dtype: they are written in the dtypes of the graph
                (float16 exports stay float16). None is the model's own.
            external_data: Write the weights to a second file beside it, named `path` with ".data" behind it. None does
                so above 1.9 GB, since an ONNX file holds at most 2 GiB.

        Raises:
            InputError: A param is missing, unknown, of another shape, or too large for the dtype of the graph.
            OSError: The file cannot be written.
        """
        from transmuter.writing import write

        write(self, path, params, external_data)

    @property
    def unsupported_operators(self) -> dict[str, tuple[str, ...]]:
        """Operators of the graph that have no lowering, with the names of their nodes."""
        return self.program.unsupported()

    @functools.cached_property
    def operators(self) -> Counter[str]:
        """How many nodes of each operator the model has, in subgraphs and functions too."""
        return Counter(evaluation.operator_name(node) for graph in self.ir_model.graphs() for node in graph)

    def __reduce__(self) -> NoReturn:
        raise TypeError("A Model cannot be copied or pickled. Load it again from its source.")

    def __repr__(self) -> str:
        from transmuter.inspection import summary

        return summary(self)

    def warn_of_baking(self, weights: Mapping[str, jax.Array]) -> None:
        """Warns once if a `jit` around the call makes constants of many bytes of the model's own weights."""
        size = sum(w.nbytes for w in weights.values())
        if size > _BAKED_WARNING and not self._warned and staged():
            self._warned = True
            warnings.warn(
                f"{size >> 20} MiB of the model's weights become constants of the surrounding jit. Pass model.params "
                "and model.buffers as arguments of the jitted function, and on as params= and buffers=.",
                stacklevel=4,
            )

    def _check_supported(self, held: Mapping[ir.Value, Any], wanted: Mapping[str, ir.Value]) -> None:
        """Raises before anything runs if the branches that known conditions pick need an unsupported operator."""
        hidden = [v for v, x in held.items() if isinstance(x, jax.Array) and (staged() or x.size > _SMALL)]
        weights = {value: self.weight(name) for value, (_, name) in self.weight_values.items()}

        def trace(arrays: list[Any]) -> None:
            with self.lowering_dtypes():
                scope = self.scope({**held, **dict(zip(hidden, arrays, strict=True))}, weights, None)
                evaluating = evaluation.Evaluation(self.program, breaks=[], unsupported={})
                waiting = evaluating.run(self.program.work(self.graph, tuple(wanted.values())), scope)
                evaluating.refuse_unsupported(waiting, scope)

        jax.eval_shape(trace, [held[v] for v in hidden])


@contextlib.contextmanager
def _lowering(dtypes: Mapping[np.dtype, np.dtype]) -> Iterator[None]:
    """Sets what lowerings compute in: `arrays.compute_dtypes`, and full float32 precision for matrix products and
    convolutions, unless the caller has chosen another with `jax.default_matmul_precision`."""
    chosen = jax.config.jax_default_matmul_precision is not None
    token = compute_dtypes.set(dtypes)
    try:
        with contextlib.nullcontext() if chosen else jax.default_matmul_precision("highest"):
            yield
    finally:
        compute_dtypes.reset(token)


@contextlib.contextmanager
def _concrete() -> Iterator[None]:
    """Arrays made in the block are concrete and keep 64-bit types, even while a caller traces. In an eager `shard_map`,
    `ensure_compile_time_eval` would leave them tracers."""
    with jax.core.eval_context(), jax.enable_x64(True):
        yield


class _Store:
    """Weights by name: host arrays, each put on the device when it is first asked for."""

    def __init__(self, device: jax.Device | None):
        self._device = device
        self._host: dict[str, np.ndarray] = {}
        self._on_device: dict[str, jax.Array] = {}
        self._shapes: dict[str, jax.ShapeDtypeStruct] = {}
        self._prepared: dict[str, tuple[jax.Array, Callable[[jax.Array], jax.Array]]] = {}
        self._lock = threading.RLock()

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __len__(self) -> int:
        return len(self._shapes)

    def add(self, name: str, array: np.ndarray) -> None:
        self._host[name] = array
        self._shapes[name] = jax.ShapeDtypeStruct(array.shape, array.dtype)

    def shape(self, name: str) -> jax.ShapeDtypeStruct:
        return self._shapes[name]

    def replace(self, name: str, prepared: jax.Array, restore: Callable[[jax.Array], jax.Array]) -> None:
        with self._lock:
            self._prepared[name] = prepared, restore
            self._on_device.pop(name, None)
            self._host.pop(name, None)

    def get(self, name: str) -> jax.Array:
        with self._lock:  # an original is let go of when its successor is there: a failure in between loses nothing
            if name not in self._on_device:
                with _concrete():
                    if name in self._prepared:
                        prepared, restore = self._prepared[name]
                        self._on_device[name] = restore(prepared)
                    else:
                        self._on_device[name] = jax.device_put(self._host[name], self._device, may_alias=True)
                self._prepared.pop(name, None)
                self._host.pop(name, None)
            return self._on_device[name]


def _computed(value: Any) -> Any:
    if isinstance(value, list):
        return [_computed(item) for item in value]
    if not isinstance(value, (np.ndarray, jax.Array)) or computed(value.dtype) == value.dtype:
        return value
    return cast(value, computed(value.dtype))


def _to_jax(name: str, value: Any) -> Any:
    """An input as JAX holds it."""
    if isinstance(value, list):
        return [_to_jax(name, item) for item in value]
    if not isinstance(value, np.ndarray) or not in_jax(value.dtype):
        return value
    return _narrowed(name, value)


def returned(name: str, value: Any) -> Any:
    """A result as a call returns it: known arrays as JAX ones."""
    if isinstance(value, list):
        return [returned(name, item) for item in value]
    is_array = isinstance(value, (np.ndarray, np.generic)) and in_jax(value.dtype)
    return _narrowed(name, np.asarray(value)) if is_array else value


def checked_key(key: Any) -> jax.Array | None:
    """A caller's random key as a typed one.

    Raises:
        InputError: It is no JAX random key.
    """
    if key is None or (isinstance(key, jax.Array) and jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)):
        return key
    if isinstance(key, (jax.Array, np.ndarray)) and key.dtype == np.uint32 and key.shape[-1:] == (2,):
        return jax.random.wrap_key_data(key)
    raise InputError(f"The key is {type(key).__name__}. Give a JAX random key, as jax.random.key(0) makes one.")


def _canonical(name: str, array: Any) -> Any:
    """A weight as JAX holds it where x64 is off."""
    wanted = canonical(array.dtype)
    if wanted == array.dtype:
        return array
    return cast(array, wanted) if isinstance(array, jax.core.Tracer) else _narrowed(name, np.asarray(array))


def _narrowed(name: str, array: np.ndarray) -> jax.Array:
    try:
        return traced(array)
    except OverflowError as error:
        raise InputError(f"In {name!r}, {error}. Set jax_enable_x64, or use transmuter.run or compile.") from error


def _spec(value: ir.Value, map_types: Mapping[str, Any]) -> TensorSpec:
    if value.name in map_types:
        return TensorSpec(value.name, None, None, reading.spell(map_types[value.name]))
    if value.type is None:
        return TensorSpec(value.name, None, None, "value")
    if not isinstance(value.type, ir.TensorType):
        kind = reading.spell(ir.to_proto(value).type)
        return TensorSpec(value.name, None, None, kind)
    shape = None
    if value.shape is not None:
        # Some exporters write -1 for a free dimension.
        shape = tuple((d if d >= 0 else None) if isinstance(d, int) else d.value for d in value.shape)
    return TensorSpec(value.name, value.dtype.numpy(), shape)


def accept(spec: TensorSpec, value: Any) -> Any:
    """A call's value for an input, checked against its spec: a NumPy or JAX array, a list for a sequence.

    Arrays must have the input's dtype; Python numbers and lists take it if that loses nothing. With `jax_enable_x64`
    off, a JAX array may have the 32-bit counterpart of a 64-bit dtype, since JAX then has no other.

    Raises:
        InputError: It is no array of the wanted dtype, rank and fixed dimensions.
    """
    if spec.kind != "tensor":
        return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else _plain(value)
    if isinstance(value, jax.Array):
        if value.dtype != spec.dtype and (jax.config.jax_enable_x64 or value.dtype != canonical(spec.dtype)):
            raise _wrong(spec, f"is {value.dtype.name}")
    else:
        value = _as_numpy(spec, value)
    if spec.shape is not None:
        given = value.shape
        fixed = all(
            not isinstance(w, int) or not isinstance(g, int) or w == g for w, g in zip(spec.shape, given, strict=False)
        )
        if len(given) != len(spec.shape) or not fixed:
            raise _wrong(spec, f"has the shape {list(given)}", "Give it in that shape.")
    return value


def _as_numpy(spec: TensorSpec, value: Any) -> np.ndarray:
    if value is None or isinstance(value, (dict, set)):
        raise _wrong(spec, f"is {type(value).__name__}")
    literal = isinstance(value, (bool, int, float, str, list, tuple))
    try:
        array = np.asarray(value)
    except Exception as error:
        raise _wrong(spec, f"is no array ({str(error).splitlines()[0]})") from error
    if spec.dtype == object:
        if array.dtype.kind in "UTO" and all(isinstance(s, str) for s in array.reshape(-1).tolist()):
            return array.astype(object)
        raise _wrong(spec, f"is {array.dtype.name}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype == spec.dtype:
        return array
    if literal and array.dtype.kind in "biufc":
        with np.errstate(all="ignore"):
            wanted = array.astype(spec.dtype)
        same_kind = (
            array.dtype.kind == spec.dtype.kind
            or spec.dtype.kind not in "iub"
            or (array.dtype.kind, spec.dtype.kind) == ("i", "u")
        )
        if array.size == 0 or (
            same_kind and (spec.dtype in _FLOATS or np.array_equal(wanted.astype(array.dtype), array))
        ):
            return wanted
    raise _wrong(spec, f"is {array.dtype.name}")


def _plain(value: Any) -> Any:
    """A part of a sequence, optional or map, with its strings as object arrays."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = np.asarray(value)
    return value.astype(object) if isinstance(value, np.ndarray) and value.dtype.kind in "UT" else value


def _wrong(spec: TensorSpec, what: str, advice: str = "Convert it first.") -> InputError:
    return InputError(f"The input {spec.name!r} {what}, but the model takes {spec}. {advice}")

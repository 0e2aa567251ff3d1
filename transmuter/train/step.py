"""One step of training: the loss of a batch, its gradients, and what an optimizer makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from transmuter import segments
from transmuter.errors import GraphBreakError, InputError
from transmuter.lowering.platform import on_cpu, training_options, without_warnings
from transmuter.model import Model
from transmuter.partition import Choice, Partition
from transmuter.segments.attention import attention
from transmuter.segments.cache import use_persistent_cache
from transmuter.segments.executor import CompiledModel
from transmuter.segments.kernels import calling_kernels
from transmuter.segments.memory import keep_freed
from transmuter.segments.recomputation import recomputed_activations
from transmuter.segments.rewriting import Rule, rewriting
from transmuter.train.learned import learned
from transmuter.train.losses import Loss
from transmuter.train.transforms import Policy, jit_in_turn, transform

Batch = Mapping[str, Any]
"""Arrays by name: the model's inputs, and what the loss reads. The first dimension of each is that of the batch."""

_OWN_METRICS = ("loss", "grad_norm", "finite")
_BEFORE_GRADIENTS: tuple[Rule, ...] = (recomputed_activations, attention)
"""How the forward pass is rewritten before it is differentiated: the gradients of a kernel are a kernel, too."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes: a pytree.

    Attributes:
        step: How many steps have been made, an int32 scalar.
        params: The trained params by name, in float32 where the model's own are float16 or bfloat16.
        statistics: Running statistics by name (`train.with_batch_statistics`), in the same dtypes.
        optimizer: The optimizer's state.
        key: The random key that dropout draws from, with the number of the step folded in.
    """

    step: jax.Array
    params: dict[str, jax.Array]
    statistics: dict[str, jax.Array]
    optimizer: optax.OptState
    key: jax.Array


class Step:
    """Makes steps of training: `state, metrics = step(state, batch)`, from `state = step.init()` on.

    Where the graph has no breaks, a step is one jitted function, with the state's memory reused: use the state that it
    returns, not the one that it was given. Where it has, its segments and the optimizer are jitted each for itself.

    A step whose loss or gradients are not finite changes nothing; its metric `finite` is 0.

    Args:
        model: From `transmuter.load(..., trainable=True)`, or a training form of it (`train.with_dropout`).
        loss: A function of the model's outputs and the batch: a scalar, or a pair of it and a dict of metrics.
        optimizer: An optax optimizer.
        trainable: Which params are trained, as in `Model.trainable`; None is all but constants of the graph and running
            statistics (`learned.learned` says what it takes for these).
        statistics: For each running statistic the name of the value that replaces it after a step.
        max_norm: Gradients whose global norm is larger are scaled down to it; None leaves them.
        accumulate: Splits each batch into so many parts, one after the other, and takes the mean of their gradients:
            less memory for the same step, as far as the loss is a mean over rows.
        devices: Devices that share each batch; the state is on all of them. None is the default device.
        compute_type: `"bfloat16"` computes matrix products and convolutions, forwards and backwards, in bfloat16, as
            `torch.autocast` does; all else, params, gradients and the optimizer stay in float32. No loss needs to be
            scaled: bfloat16 has the range of float32. None computes as the model does without training.
        remat: A policy of `jax.checkpoint`, for less memory and more time: values inside of blocks of the graph that it
            does not keep are computed again in the backward pass. `"nothing_saveable"` keeps the least,
            `"dots_saveable"` the results of matrix products; or such a function. None keeps all.

    Raises:
        InputError: No param is trained, a name is unknown, or a param is float64 where JAX has no such type.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        *,
        trainable: Choice | None = None,
        statistics: Mapping[str, str] | None = None,
        max_norm: float | None = None,
        accumulate: int = 1,
        devices: Sequence[jax.Device] | None = None,
        compute_type: str | None = None,
        remat: str | Policy | None = None,
    ):
        self._transform = transform(compute_type, remat)
        if accumulate < 1 or (max_norm is not None and max_norm <= 0) or (devices is not None and not len(devices)):
            raise InputError(
                f"accumulate={accumulate}, max_norm={max_norm}, devices={devices}: give one part and one device at "
                "least, and a norm above zero (None for none)."
            )
        self.model, self.loss, self.accumulate = model, loss, accumulate
        self.statistics = dict(statistics or {})
        chosen = model.trainable(learned(model) - self.statistics.keys() if trainable is None else trainable)
        if both := chosen.trainable.keys() & self.statistics.keys():
            raise InputError(f"{sorted(both)[0]!r} is a running statistic. Do not train it.")
        for name, array in chosen.trainable.items():
            if array.dtype == np.float64 and not jax.config.jax_enable_x64:
                raise InputError(
                    f"The param {name!r} is float64, which JAX only trains with jax_enable_x64. Set that, or choose "
                    "params without it (trainable=)."
                )
        self._partition = Partition(
            chosen.trainable, {k: v for k, v in chosen.frozen.items() if k not in self.statistics}
        )
        clip = optax.identity() if max_norm is None else optax.clip_by_global_norm(max_norm)
        self.optimizer = optax.chain(clip, optimizer)
        mesh = None if devices is None else jax.sharding.Mesh(np.asarray(devices), ("batch",))
        self._replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self._split = None if mesh is None else NamedSharding(mesh, PartitionSpec("batch"))
        self._frozen = self._placed({"params": self._partition.frozen, "buffers": model.buffers})
        self._wanted = [*model.outputs, *self.statistics.values()]
        jit = partial(jax.jit, compiler_options=training_options()) if remat is None else jit_in_turn
        # XLA does not split a kernel of ours among devices
        is_alone = mesh is None or mesh.size == 1
        update = calling_kernels(self._update) if is_alone else self._update
        self._is_rewritten = is_alone and compute_type is None and on_cpu()
        self._whole = jit(update, donate_argnums=0)
        self._signatures: set[Any] = set()
        self._apply_gradients = jax.jit(self._updated, donate_argnums=0)
        self._compiled: CompiledModel | None = None
        self._breaks: bool | None = True if any(_is_text(model, name) for name in model.inputs) else None

    def init(self, seed: int | jax.Array = 0) -> TrainState:
        """The state before the first step, with copies of the model's params.

        Args:
            seed: An integer or a JAX random key, from which dropout draws.
        """
        key = jax.random.key(seed) if isinstance(seed, (int, np.integer)) else seed
        params = {name: _master(array) for name, array in self._partition.trainable.items()}
        statistics = {name: _master(self.model.weight(name)) for name in self.statistics}
        state = TrainState(jnp.zeros((), jnp.int32), params, statistics, self.optimizer.init(params), jnp.copy(key))
        return self._placed(state)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Makes a step.

        Returns:
            The next state and metrics: `loss`, `grad_norm` (before clipping), `finite`, and those of the loss.

        Raises:
            InputError: The batch is empty, lacks an input or a label, or does not divide.
        """
        batch = self._checked(batch)
        if self._breaks is None:
            self._breaks = not self._is_one_piece(state, batch)
        if not self._breaks:
            try:
                return self._in_one_call(state, batch)
            except GraphBreakError:  # a batch of another shape may take another branch
                self._breaks = True
        return self._update_by_segments(state, batch)

    def params(self, state: TrainState) -> dict[str, jax.Array]:
        """All params of the model as a state has them: what `compiled(..., params=)` and `model.save` take."""
        trained = {**state.params, **state.statistics}
        return {name: trained.get(name, array) for name, array in self.model.params.items()}

    # -- parts

    def _placed(self, tree: Any) -> Any:
        return tree if self._replicated is None else jax.device_put(tree, self._replicated)

    def _checked(self, batch: Batch) -> dict[str, Any]:
        arrays = _arrays(self.model, batch)
        parts = self.accumulate * (1 if self._split is None else len(self._split.mesh.devices))
        for name, array in arrays.items():
            if np.ndim(array) and len(array) % parts:
                raise InputError(
                    f"{name!r} has {len(array)} rows, which do not divide into {parts} parts (accumulate times "
                    "devices). Drop the last batch, or fill it up."
                )
        return arrays if self._split is None else {name: self._shared(array) for name, array in arrays.items()}

    def _shared(self, array: Any) -> Any:
        """An entry of a batch on all devices, its rows split among them."""
        if array.dtype == object:
            return array
        return jax.device_put(array, self._split if np.ndim(array) else self._replicated)

    def _in_one_call(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        keep_freed()
        signature = tuple((name, np.shape(x), x.dtype) for name, x in sorted(batch.items()))
        with nullcontext() if signature in self._signatures else without_warnings():  # of compiling
            made = self._whole(state, self._frozen, batch)
        self._signatures.add(signature)
        return made

    def _is_one_piece(self, state: TrainState, batch: Batch) -> bool:
        try:
            jax.eval_shape(self._update, state, self._frozen, batch)
        except GraphBreakError:
            return False
        return True

    def _in_one_piece(self, params: Any, buffers: Any, batch: Batch, key: jax.Array) -> dict[str, Any]:
        def forward(params: Any, buffers: Any, inputs: Any, key: jax.Array | None) -> dict[str, Any]:
            return self.model.apply(params, inputs, buffers=buffers, key=key, outputs=self._wanted)

        key = key if self.model.is_random else None
        forward = rewriting(forward, *_BEFORE_GRADIENTS) if self._is_rewritten else forward
        forward = forward if self._transform is None else self._transform(forward)
        outputs = forward(params, buffers, inputs_of(self.model, batch), key)
        return {name: outputs[name] for name in self._wanted}  # JAX sorts names

    def _through_segments(self, params: Any, buffers: Any, batch: Batch, key: jax.Array) -> dict[str, Any]:
        if self._compiled is None:
            self._compiled = CompiledModel(
                self.model,
                outputs=self._wanted,
                keeps_executables=use_persistent_cache(None),
                transform=self._transform,
            )
        key = key if self.model.is_random else None
        return self._compiled(inputs_of(self.model, batch), params=params, buffers=buffers, key=key)

    def _gradients(
        self,
        state: TrainState,
        statistics: dict[str, jax.Array],
        frozen: Any,
        batch: Batch,
        key: jax.Array,
        forward: Callable[..., dict[str, Any]],
    ) -> tuple[Any, dict[str, jax.Array]]:
        """The loss, its metrics and the next statistics, and the gradients."""

        def loss_of(params: dict[str, jax.Array], statistics: Any, part: Batch, key: jax.Array) -> Any:
            outputs = forward({**frozen["params"], **statistics, **params}, frozen["buffers"], part, key)
            moved = {name: jax.lax.stop_gradient(outputs.pop(value)) for name, value in self.statistics.items()}
            loss, metrics = _with_metrics(self.loss(outputs, part))
            return loss, (metrics, moved)

        return jax.value_and_grad(loss_of, has_aux=True)(state.params, statistics, batch, key)

    def _update(self, state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """A step as one function."""
        key = jax.random.fold_in(state.key, state.step)

        def of_part(statistics: Any, part: Batch, key: jax.Array) -> Any:
            return self._gradients(state, statistics, frozen, part, key, self._in_one_piece)

        if self.accumulate == 1:
            (loss, (metrics, statistics)), grads = of_part(state.statistics, batch, key)
            return self._updated(state, grads, loss, metrics, statistics)

        def next_part(carry: Any, i: jax.Array) -> Any:
            statistics, sums = carry
            part = {name: _part(x, i, self.accumulate) for name, x in batch.items()}
            (loss, (metrics, statistics)), grads = of_part(statistics, part, jax.random.fold_in(key, i))
            return (statistics, jax.tree.map(jnp.add, sums, grads)), (loss, metrics)

        nothing = jax.tree.map(jnp.zeros_like, state.params)
        (statistics, sums), found = jax.lax.scan(
            next_part, (state.statistics, nothing), jnp.arange(self.accumulate, dtype=jnp.int32)
        )
        loss, metrics = jax.tree.map(lambda each: jnp.mean(each, 0), found)
        grads = jax.tree.map(lambda x: x / self.accumulate, sums)
        return self._updated(state, grads, loss, metrics, statistics)

    def _update_by_segments(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """The same where the graph breaks."""
        key, statistics, parts = jax.random.fold_in(state.key, state.step), state.statistics, []
        for i in range(self.accumulate):
            part = {name: _part(x, i, self.accumulate) for name, x in batch.items()}
            inner = key if self.accumulate == 1 else jax.random.fold_in(key, i)
            (loss, (metrics, statistics)), grads = self._gradients(
                state, statistics, self._frozen, part, inner, self._through_segments
            )
            parts.append((grads, loss, metrics))
        grads, loss, metrics = jax.tree.map(lambda *each: sum(each) / len(each), *parts)
        return self._apply_gradients(state, grads, loss, metrics, statistics)

    def _updated(
        self, state: TrainState, grads: Any, loss: jax.Array, metrics: dict[str, jax.Array], statistics: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        def changed(state: TrainState, grads: Any, statistics: Any) -> TrainState:
            updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
            params = optax.apply_updates(state.params, updates)
            return replace(state, step=state.step + 1, params=params, statistics=statistics, optimizer=optimizer)

        # one condition, not a choice for each element: that would copy the state first, and take four times as long
        new = jax.lax.cond(finite, changed, lambda state, *_: state, state, grads, statistics)
        return new, {"loss": loss, "grad_norm": norm, "finite": finite, **metrics}


class Evaluator:
    """The mean loss and metrics of a model over batches, weighted by rows.

    Args:
        model: From `transmuter.load`, as it is when it serves: without dropout, with running statistics.
        loss: As for `Step`.
    """

    def __init__(self, model: Model, loss: Loss):
        self.model, self.loss = model, loss
        self._compiled = segments.compile(model)
        self._of_outputs = jax.jit(self._metrics)

    def __call__(self, params: Mapping[str, Any], batches: Iterable[Batch]) -> dict[str, float]:
        """Evaluates.

        Args:
            params: All params of the model.
            batches: Dicts of the model's inputs and of what the loss reads.

        Returns:
            `loss`, and the metrics of the loss.

        Raises:
            InputError: There are no batches, or one does not fit.
        """
        sums, rows = {}, 0
        for batch in batches:
            arrays = _arrays(self.model, batch)
            outputs = self._compiled(inputs_of(self.model, arrays), params=params)
            found = self._of_outputs(outputs, {name: x for name, x in arrays.items() if x.dtype != object})
            count = max((len(x) for x in arrays.values() if np.ndim(x)), default=1)
            rows += count
            sums = {name: sums.get(name, 0.0) + count * float(x) for name, x in found.items()}
        if not rows:
            raise InputError("There are no batches to evaluate on.")
        return {name: total / rows for name, total in sums.items()}

    def _metrics(self, outputs: Mapping[str, jax.Array], batch: Batch) -> dict[str, jax.Array]:
        loss, metrics = _with_metrics(self.loss(outputs, batch))
        return {"loss": loss, **metrics}


def _arrays(model: Model, batch: Batch) -> dict[str, Any]:
    """A batch as arrays.

    Raises:
        InputError: It lacks an input of the model, has no rows, or holds what is no array of numbers.
    """
    if not batch:
        raise InputError("The batch is empty. Give a dict with the model's inputs and what the loss reads.")
    if missing := [name for name in model.inputs if name not in batch]:
        raise InputError(f"The batch has no {missing[0]!r}, which is an input of the model.")
    arrays = {name: _array(model, name, entry) for name, entry in batch.items()}
    for name, array in arrays.items():
        if np.ndim(array) and not len(array):
            raise InputError(f"The batch has no rows: {name!r} has the shape {list(array.shape)}.")
    return arrays


def _array(model: Model, name: str, entry: Any) -> Any:
    if isinstance(entry, jax.Array):
        return entry
    try:
        array = np.asarray(entry) if isinstance(entry, (np.ndarray, np.generic, int, float, list, tuple)) else None
    except ValueError:  # rows of different lengths
        array = None
    if array is None:
        kind = type(entry).__name__
        raise InputError(f"{name!r} in the batch is no array but a {kind}. Give a NumPy or JAX array of numbers.")
    if array.dtype.kind in "OUST" and _is_text(model, name):
        return array.astype(object)
    if array.dtype.kind in "OUSTMm":
        raise InputError(
            f"{name!r} in the batch is {array.dtype}, but a loss takes numbers. Leave it out, or give numbers (the ids "
            "of a text's tokens)."
        )
    return array


def _is_text(model: Model, name: str) -> bool:
    """Whether this is an input of the model which takes strings."""
    return name in model.inputs and model.inputs[name].dtype == object


def _with_metrics(found: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What a loss returned, with no metrics where it gave none.

    Raises:
        InputError: It is no real scalar, or a pair of one and a dict of scalars under names of their own.
    """
    pair = found if isinstance(found, tuple) else (found, {})
    if len(pair) != 2 or not isinstance(pair[1], Mapping):
        raise InputError("The loss returns a tuple. Return a scalar, or a pair of it and a dict of metrics.")
    loss, metrics = pair
    _check_scalar("The loss", "a loss", loss)
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise InputError(f"The loss is {jnp.result_type(loss)}, which has no gradient. Return a real number.")
    for name, value in metrics.items():
        if name in _OWN_METRICS:
            raise InputError(f"The loss returns a metric {name!r}, which every step has itself. Give it another name.")
        _check_scalar(f"The metric {name!r}", "a metric", value)
    return loss, dict(metrics)


def _check_scalar(what: str, kind: str, value: Any) -> None:
    if not isinstance(value, (jax.Array, np.ndarray, np.generic, int, float)):
        raise InputError(f"{what} is {type(value).__name__}, but {kind} is a scalar. Return a number.")
    if np.shape(value):
        raise InputError(f"{what} has the shape {list(np.shape(value))}, but {kind} is a scalar. Take its mean.")


def _master(array: jax.Array) -> jax.Array:
    """A copy in float32 at least: small updates are lost in half precision."""
    return jnp.array(array, jnp.promote_types(array.dtype, jnp.float32), copy=True)


def inputs_of(model: Model, batch: Batch) -> dict[str, Any]:
    """Those entries of a batch that are inputs of the model."""
    names = {**model.inputs, **model.overridable_inputs}
    return {name: batch[name] for name in names if name in batch}


def _part(array: Any, i: int | jax.Array, parts: int) -> Any:
    """The i-th part of an array's rows; what has no rows is in every part."""
    if not np.ndim(array):
        return array
    rows = array.shape[0] // parts
    if isinstance(i, jax.Array):
        return jax.lax.dynamic_slice_in_dim(array, i * rows, rows)
    return array[i * rows : (i + 1) * rows]

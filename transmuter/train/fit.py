"""`fit`: a loop of training steps with evaluation, early stopping, checkpoints and a progress bar."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import optax

from transmuter.errors import InputError, TrainingError, TransmuterError
from transmuter.model import Model
from transmuter.partition import Choice
from transmuter.progress import bar_class
from transmuter.train.losses import Loss
from transmuter.train.regularization import with_batch_statistics, with_dropout
from transmuter.train.step import Batch, Evaluator, Step, TrainState
from transmuter.train.transforms import Policy

if TYPE_CHECKING:
    from transmuter.train.checkpoints import Checkpoints

Batches = Iterable[Batch] | Callable[[int], Iterable[Batch]]
"""What can be iterated over once per epoch, or a function of the epoch's number that gives such a thing."""
Row = dict[str, float]

_WITHOUT_GRADIENT = 20
"""Steps from the first on whose gradients may all be zero, as where no label of a batch counts."""


@dataclass
class Fit:
    """What `fit` returns.

    Attributes:
        params: All params of the model: those with the lowest loss in an evaluation, without one the last.
        state: The last state.
        history: A dict for each step and evaluation, in order, with `step` (how many are done), `epoch` (from 0), and
            `loss`, `grad_norm` and the metrics of the loss; those of an evaluation start with `eval_`.
        best_step: The step after which the evaluation was best.
    """

    params: dict[str, jax.Array]
    state: TrainState
    history: list[Row]
    best_step: int | None

    def curve(self, metric: str = "loss") -> tuple[list[int], list[float]]:
        """The steps at which a metric was recorded, and its values."""
        rows = [row for row in self.history if metric in row]
        return [int(row["step"]) for row in rows], [row[metric] for row in rows]


def fit(
    model: Model,
    loss: Loss,
    batches: Batches,
    optimizer: optax.GradientTransformation,
    *,
    epochs: int = 1,
    steps: int | None = None,
    trainable: Choice | None = None,
    attention_dropout: float = 0.0,
    dense_dropout: float = 0.0,
    batch_statistics: bool = False,
    max_norm: float | None = 1.0,
    accumulate: int = 1,
    devices: Sequence[jax.Device] | None = None,
    compute_type: str | None = None,
    remat: str | Policy | None = None,
    seed: int = 0,
    evaluation: Batches | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
    callback: Callable[[Row], object] | None = None,
    progress: bool | None = None,
) -> Fit:
    """Trains a model.

        result = train.fit(model, losses.cross_entropy(), batches, optax.adamw(2e-5), epochs=3, evaluation=held_out)
        model.save("tuned.onnx", params=result.params)

    Args:
        model: From `transmuter.load(..., trainable=True)`.
        loss: From `train.losses`, or a function of the model's outputs and a batch.
        batches: Dicts of the model's inputs and of what the loss reads, of one epoch. To go on exactly after an
            interruption, they have to come in the same order again: give a list, or a function of the epoch's number
            that shuffles by it.
        optimizer: An optax optimizer.
        epochs: How often to go through the batches.
        steps: After how many steps to stop, if that comes first.
        trainable: Which params are trained, as in `train.Step`.
        attention_dropout, dense_dropout: As in `train.with_dropout`.
        batch_statistics: Train BatchNormalization on the statistics of the batch (`train.with_batch_statistics`).
        max_norm: The largest global norm of gradients; None leaves them.
        accumulate: Parts of a batch, as in `train.Step`.
        devices: Devices that share each batch, as in `train.Step`.
        compute_type: `"bfloat16"` for products in bfloat16, as in `train.Step`. Evaluations do without.
        remat: Which values are kept for the backward pass, as in `train.Step`.
        seed: Of dropout.
        evaluation: Batches to evaluate on, without dropout and with running statistics.
        evaluate_every: After how many steps to evaluate; None is after each epoch.
        patience: Stop after so many evaluations without a lower loss; None never does.
        checkpoints: A folder for checkpoints. If it holds one, the run goes on from there.
        checkpoint_every: After how many steps to write one; None is after each epoch. The last state is written anyhow.
        keep: How many checkpoints to keep.
        callback: Called with each new row of the history.
        progress: Show a bar; that needs tqdm. None shows it on a terminal, if tqdm is there.

    Returns:
        The params, the last state and the history.

    Raises:
        TrainingError: A loss or gradient is not finite, the loss does not depend on what is trained, or a batch after
            the first does not fit. The error has the last good state. The checkpoints have it too, also after any other
            exception: a run that was stopped, by hand or by its batches, goes on from there.
        InputError: The first batch does not fit, or there are none.
    """
    if patience is not None and evaluation is None:
        raise InputError("patience counts evaluations. Give evaluation batches.")
    counts = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every, "patience": patience}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"{name} is {count}, but must be at least 1, or None.")
    if (isinstance(batches, Iterator) or isinstance(evaluation, Iterator)) and epochs > 1:
        raise InputError("One epoch uses up an iterator. Give a list of batches, or a function of the epoch.")
    training, statistics = with_batch_statistics(model) if batch_statistics else (model, {})
    if attention_dropout or dense_dropout:
        training = with_dropout(training, attention=attention_dropout, dense=dense_dropout)
    options = {"max_norm": max_norm, "accumulate": accumulate, "devices": devices}
    options.update(compute_type=compute_type, remat=remat)
    step = Step(training, loss, optimizer, trainable=trainable, statistics=statistics, **options)
    with ExitStack() as stack:
        store = None
        if checkpoints is not None:
            from transmuter.train.checkpoints import Checkpoints

            store = stack.enter_context(Checkpoints(checkpoints, keep=keep))
        evaluator, state, every = Evaluator(model, loss), step.init(seed), (evaluate_every, checkpoint_every)
        run = _Run(step, evaluator, state, evaluation, store, callback, *every)
        run.resume()
        run.bar = stack.enter_context(_bar(progress, _total(batches, epochs, steps), run.done))
        with run.saving():
            run.go(batches, epochs, math.inf if steps is None else steps, math.inf if patience is None else patience)
    return Fit(run.best_params or step.params(run.state), run.state, run.history, run.best_step)


@dataclass
class _Run:
    """A loop under way."""

    step: Step
    evaluator: Evaluator
    state: TrainState
    evaluation: Batches | None
    store: Checkpoints | None
    callback: Callable[[Row], object] | None
    evaluate_every: int | None
    checkpoint_every: int | None
    bar: Any = None
    history: list[Row] = field(default_factory=list)
    epoch: int = 0
    batch: int = 0
    """How many batches of the epoch are done."""
    done: int = 0
    """How many steps are."""
    best_params: dict[str, jax.Array] | None = None
    best_step: int | None = None
    best_loss: float = math.inf
    without_gain: int = 0
    """How many evaluations have found no lower loss."""
    start: int = 0
    """How many steps an earlier run had done."""

    def go(self, batches: Batches, epochs: int, steps: float, patience: float) -> None:
        while self.epoch < epochs:
            for batch in itertools.islice(_of_epoch(batches, self.epoch), self.batch, None):
                if self.done >= steps or self.without_gain >= patience:
                    break
                self.make_step(batch)
                self.every(self.evaluate_every, self.evaluate)
                self.every(self.checkpoint_every, self.save)
            else:
                if not self.batch:
                    raise InputError(f"There are no batches in epoch {self.epoch}.")
                self.check_gradients(enough=1)
                if self.evaluate_every is None:
                    self.evaluate()
                self.epoch, self.batch = self.epoch + 1, 0
                if self.checkpoint_every is None:
                    self.save()
                continue
            break
        if not self.history or "eval_loss" not in self.history[-1]:
            self.evaluate()
        self.save()

    def every(self, count: int | None, action: Callable[[], None]) -> None:
        if count is not None and self.done % count == 0:
            action()

    def make_step(self, batch: Batch) -> None:
        try:
            state, metrics = self.step(self.state, batch)
        except TransmuterError as error:
            if self.done == self.start:  # the first one: the call is wrong
                raise
            self.fail(f"{error} That was batch {self.batch} of epoch {self.epoch}.", error)
        found = {name: float(x) for name, x in metrics.items()}
        self.state = state
        if not found.pop("finite"):
            self.fail(
                f"The loss of step {self.done} is {found['loss']:g}, and the norm of its gradients "
                f"{found['grad_norm']:g} (batch {self.batch} of epoch {self.epoch}). Look for bad values in that "
                "batch, or lower the learning rate."
            )
        self.done, self.batch = self.done + 1, self.batch + 1
        self.record(found)
        self.check_gradients(enough=_WITHOUT_GRADIENT)
        self.bar.update(1)
        self.bar.set_postfix_str(", ".join(f"{name} {x:.4g}" for name, x in found.items()))

    def check_gradients(self, enough: int) -> None:
        """Raises if all gradients so far are zero, and these are enough to tell."""
        norms = (row["grad_norm"] for row in self.history if "grad_norm" in row)
        if self.done >= enough and not any(norms):
            self.fail(
                f"The gradients of the first {self.done} batches are all zero: the loss does not depend on any trained "
                "param, or no label of these batches counts. Choose params on the way to the output that the loss is "
                "of, and a loss that is not constant."
            )

    def evaluate(self) -> None:
        if self.evaluation is None:
            return
        params = self.step.params(self.state)
        found = self.evaluator(params, _of_epoch(self.evaluation, self.epoch))
        if found["loss"] < self.best_loss:
            self.best_loss, self.best_step, self.without_gain = found["loss"], self.done, 0
            self.best_params = {name: jax.numpy.copy(array) for name, array in params.items()}
        else:
            self.without_gain += 1
        self.record({f"eval_{name}": x for name, x in found.items()})

    def record(self, row: Row) -> None:
        row = {"step": self.done, "epoch": self.epoch, **row}
        self.history.append(row)
        if self.callback is not None:
            self.callback(row)

    def fail(self, message: str, cause: Exception | None = None) -> NoReturn:
        kept = f" The last good state is in {self.store.folder}." if self.store and self.done > self.start else ""
        raise TrainingError(f"{message}{kept}", state=self.state, params=self.step.params(self.state)) from cause

    # -- checkpoints

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Saves the last state if anything ends the run."""
        try:
            yield
        except BaseException:
            is_taken = any(array.is_deleted() for array in jax.tree.leaves(self.state))  # by the step that was stopped
            if self.done > self.start and not is_taken:
                self.save()
            raise

    _SAVED = ("history", "epoch", "batch", "done", "best_step", "best_loss", "without_gain")

    def save(self) -> None:
        if self.store is not None:
            self.store.save(
                self.done, self.state, self.best_params, {name: getattr(self, name) for name in self._SAVED}
            )

    def resume(self) -> None:
        found = None if self.store is None else self.store.restore(self.state, self.step.params(self.state))
        if found is not None:
            self.state, self.best_params, progress = found
            for name in self._SAVED:
                setattr(self, name, progress[name])
            self.start = self.done


def _of_epoch(batches: Batches, epoch: int) -> Iterable[Batch]:
    return batches(epoch) if callable(batches) else batches


def _total(batches: Batches, epochs: int, steps: int | None) -> int | None:
    whole = epochs * len(batches) if hasattr(batches, "__len__") else None
    return whole if steps is None else steps if whole is None else min(steps, whole)


class _NoBar:
    def update(self, count: int) -> None: ...

    def set_postfix_str(self, text: str) -> None: ...


def _bar(progress: bool | None, total: int | None, done: int) -> AbstractContextManager[Any]:
    tqdm = bar_class(progress)
    return nullcontext(_NoBar()) if tqdm is None else tqdm(total=total, initial=done, desc="train", unit="step")

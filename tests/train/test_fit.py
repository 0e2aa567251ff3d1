"""The loop: what it trains, when it stops, what it keeps, and that an interrupted run ends as a whole one."""

from __future__ import annotations

import re

import jax
import numpy as np
import optax
import pytest
from building import info, model_of
from onnx import helper, numpy_helper

import transmuter
from transmuter import train
from transmuter.train import losses

RANDOM = np.random.default_rng(0)
W = RANDOM.normal(size=(6, 3)).astype(np.float32) / 4
TRUTH = RANDOM.normal(size=(6, 3)).astype(np.float32)


def model() -> transmuter.Model:
    """x @ w + x @ v, of which v may be left as it is."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["x", "v"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["logits"]),
    ]
    weights = [numpy_helper.from_array(W, "w"), numpy_helper.from_array(W[::-1].copy(), "v")]
    proto = model_of(nodes, [info("x", ("n", 6))], [info("logits", ("n", 3))], weights)
    return transmuter.load(proto, trainable=True)


def batches(epoch: int, count: int = 5) -> list[dict]:
    random = np.random.default_rng(epoch)
    xs = random.normal(size=(count, 16, 6)).astype(np.float32)
    return [{"x": x, "labels": (x @ TRUTH).argmax(-1)} for x in xs]


LOSS, OPTIMIZER = losses.cross_entropy(), optax.adamw(0.05)
HELD_OUT = batches(1000)


def test_it_learns():
    original = model()
    result = train.fit(original, LOSS, batches, OPTIMIZER, epochs=12, evaluation=HELD_OUT)
    evaluate = train.Evaluator(original, LOSS)
    before, after = evaluate(original.params, HELD_OUT), evaluate(result.params, HELD_OUT)
    assert after["accuracy"] > 0.85 > before["accuracy"] + 0.2
    steps, values = result.curve("eval_loss")
    assert steps == [5 * (i + 1) for i in range(12)]
    assert min(values) == pytest.approx(after["loss"], rel=1e-5)
    assert result.best_step in steps
    assert [row["epoch"] for row in result.history if "loss" in row] == [i // 5 for i in range(60)]
    assert {"step", "epoch", "loss", "grad_norm", "accuracy"} == result.history[0].keys()


def test_evaluation_is_the_mean_over_rows():
    original = model()
    whole = {name: np.concatenate([batch[name] for batch in HELD_OUT]) for name in ("x", "labels")}
    parts = [{name: x[part] for name, x in whole.items()} for part in (slice(0, 50), slice(50, None))]
    evaluate = train.Evaluator(original, LOSS)
    found, expected = evaluate(original.params, parts), evaluate(original.params, [whole])
    assert found == {name: pytest.approx(x, rel=1e-5) for name, x in expected.items()}
    with pytest.raises(transmuter.InputError, match="no batches to evaluate"):
        evaluate(original.params, [])


def test_a_loss_may_read_inputs_of_the_model():
    """As the contrastive loss reads the attention mask."""
    of_inputs = lambda outputs, batch: LOSS(outputs, batch)[0] + batch["x"].mean() ** 2
    original = model()
    found = train.Evaluator(original, of_inputs)(original.params, HELD_OUT[:1])
    _, metrics = train.Step(original, of_inputs, OPTIMIZER)(train.Step(original, LOSS, OPTIMIZER).init(), HELD_OUT[0])
    assert found["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-5)


def test_it_stops_early_with_the_best_params():
    bad = [{"x": b["x"], "labels": (b["labels"] + 1) % 3} for b in HELD_OUT]  # the better it learns, the worse
    result = train.fit(model(), LOSS, batches, OPTIMIZER, epochs=50, evaluation=bad, evaluate_every=2, patience=3)
    steps, values = result.curve("eval_loss")
    assert len(steps) == int(np.argmin(values)) + 1 + 3
    assert result.best_step == steps[int(np.argmin(values))]


def test_it_stops_after_steps_and_calls_back():
    rows = []
    result = train.fit(model(), LOSS, batches, OPTIMIZER, epochs=9, steps=7, callback=rows.append, trainable="w")
    assert rows == result.history
    assert [row["step"] for row in rows] == list(range(1, 8))
    np.testing.assert_array_equal(result.params["v"], W[::-1])


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_an_interrupted_run_ends_as_a_whole_one(tmp_path, stop):
    def run(folder, **limits) -> train.Fit:
        options = {"evaluation": HELD_OUT, "evaluate_every": 4, "checkpoints": tmp_path / folder, "epochs": 2}
        return train.fit(encoder(), LOSS, batches, OPTIMIZER, dense_dropout=0.2, seed=3, **options, **limits)

    whole = run("whole")
    run("parts", steps=stop)
    rest = run("parts")
    jax.tree.map(np.testing.assert_array_equal, whole.params, rest.params)
    jax.tree.map(np.testing.assert_array_equal, whole.state.optimizer, rest.state.optimizer)
    with_losses = lambda result: [row for row in result.history if "loss" in row]
    assert with_losses(whole) == with_losses(rest)
    again = run("parts")  # nothing is left to do
    jax.tree.map(np.testing.assert_array_equal, whole.params, again.params)


def encoder() -> transmuter.Model:
    """A dense layer with a residual around it, and a classifier."""
    nodes = [
        helper.make_node("MatMul", ["x", "u"], ["d"]),
        helper.make_node("Add", ["x", "d"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["logits"]),
    ]
    u = np.random.default_rng(5).normal(size=(6, 6)).astype(np.float32) / 3
    weights = [numpy_helper.from_array(W, "w"), numpy_helper.from_array(u, "u")]
    proto = model_of(nodes, [info("x", ("n", 6))], [info("logits", ("n", 3))], weights)
    return transmuter.load(proto, trainable=True)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    train.fit(model(), LOSS, batches, OPTIMIZER, checkpoints=tmp_path)
    with pytest.raises(transmuter.InputError, match="is of another model, optimizer"):
        train.fit(model(), LOSS, batches, optax.sgd(0.1, momentum=0.9), checkpoints=tmp_path, epochs=2)


def test_a_loss_that_is_no_number_stops_it_with_the_last_good_state(tmp_path):
    good = batches(0)
    spoilt = [*good[:3], {**good[3], "x": np.full_like(good[3]["x"], np.inf)}, good[4]]
    message = r"loss of step 3 is nan.*batch 3 of epoch 0.*The last good state is in"
    with pytest.raises(transmuter.TrainingError, match=message) as raised:
        train.fit(model(), LOSS, spoilt, OPTIMIZER, checkpoints=tmp_path)
    expected = train.fit(model(), LOSS, good, OPTIMIZER, steps=3)
    jax.tree.map(np.testing.assert_array_equal, raised.value.params, expected.params)
    resumed = train.fit(model(), LOSS, good, OPTIMIZER, checkpoints=tmp_path)
    whole = train.fit(model(), LOSS, good, OPTIMIZER)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, whole.params)


def test_exploding_gradients_stop_it(tmp_path):
    """The loss is a number, but its gradient is none: that of a root at zero."""
    explodes = lambda outputs, batch: ((outputs["logits"] - outputs["logits"] * batch["grows"]) ** 2).sum() ** 0.5
    several = [{**batch, "grows": np.float32(1 if i == 2 else 0)} for i, batch in enumerate(batches(0))]
    with pytest.raises(transmuter.TrainingError, match=r"loss of step 2 is 0, and the norm of its gradients nan"):
        train.fit(model(), explodes, several, OPTIMIZER, checkpoints=tmp_path)
    assert int(resumed(tmp_path, several[:2], explodes).state.step) == 2


def resumed(folder, given: list[dict], loss=LOSS) -> train.Fit:
    """What a run that goes on from the checkpoints in a folder ends with; all of its batches are done."""
    return train.fit(model(), loss, given, OPTIMIZER, checkpoints=folder)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"x": np.zeros((0, 6), np.float32), "labels": np.zeros(0, int)}, "The batch has no rows"),
        ({"x": np.zeros((16, 6), np.float32), "labels": np.zeros((16, 1), int)}, r"'labels' has the shape \[16, 1\]"),
        ({"x": np.zeros((16, 6), np.float32)}, "no 'labels' for the loss"),
        ({}, "The batch is empty"),
    ],
)
def test_a_batch_that_does_not_fit_stops_it_with_the_last_good_state(tmp_path, bad, message):
    good = batches(0, count=2)
    whole = f"{message}.*batch 2 of epoch 0.*The last good state is in"
    with pytest.raises(transmuter.TrainingError, match=whole) as raised:
        train.fit(model(), LOSS, [*good, bad], OPTIMIZER, checkpoints=tmp_path)
    expected = train.fit(model(), LOSS, good, OPTIMIZER)
    jax.tree.map(np.testing.assert_array_equal, raised.value.params, expected.params)
    jax.tree.map(np.testing.assert_array_equal, resumed(tmp_path, good).params, expected.params)
    with pytest.raises(transmuter.InputError, match=message):  # the first batch: the call is wrong
        train.fit(model(), LOSS, [bad, *good], OPTIMIZER, checkpoints=tmp_path / "other")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_a_run_that_anything_stops_goes_on_from_its_last_step(tmp_path, stop):
    good = batches(0)

    def failing(epoch):
        yield from good[:3]
        raise stop

    with pytest.raises(stop):
        train.fit(model(), LOSS, failing, OPTIMIZER, checkpoints=tmp_path)

    def interrupted(row):
        if row["step"] == 4:
            raise stop

    with pytest.raises(stop):
        train.fit(model(), LOSS, good, OPTIMIZER, checkpoints=tmp_path, callback=interrupted)
    result, whole = resumed(tmp_path, good), train.fit(model(), LOSS, good, OPTIMIZER)
    jax.tree.map(np.testing.assert_array_equal, result.params, whole.params)
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 5]


def test_a_loss_without_gradients_stops_it():
    constant = lambda outputs, batch: 0 * outputs["logits"].sum() + batch["labels"].mean()
    message = "first 5 batches are all zero: the loss does not depend on any trained param"
    with pytest.raises(transmuter.TrainingError, match=message):
        train.fit(model(), constant, batches, OPTIMIZER, epochs=2)
    with pytest.raises(transmuter.TrainingError, match="first 20 batches are all zero"):
        train.fit(model(), constant, batches(0, count=25), OPTIMIZER)


def test_batches_without_labels_do_not_stop_it():
    first, *others = batches(0)
    unlabelled = {**first, "labels": np.full_like(first["labels"], -100)}
    optimizer = optax.sgd(0.1)
    result = train.fit(model(), LOSS, [unlabelled, *others], optimizer)
    assert [row["grad_norm"] > 0 for row in result.history] == [False, True, True, True, True]
    jax.tree.map(np.testing.assert_array_equal, result.params, train.fit(model(), LOSS, others, optimizer).params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": []}, "There are no batches in epoch 0"),
        ({"batches": iter([])}, "There are no batches in epoch 0"),
        ({"batches": lambda epoch: []}, "There are no batches in epoch 0"),
        ({"evaluation": []}, "There are no batches to evaluate on"),
        ({"evaluation": [{"x": HELD_OUT[0]["x"][:0], "labels": HELD_OUT[0]["labels"][:0]}]}, "The batch has no rows"),
        ({"compute_type": "float16"}, "compute_type is 'float16'"),
        ({"remat": "all"}, "remat is 'all'"),
        ({"batches": iter(batches(0)), "epochs": 2}, "uses up an iterator"),
        ({"evaluation": iter(HELD_OUT), "epochs": 2}, "uses up an iterator"),
        ({"patience": 2}, "patience counts evaluations"),
        ({"evaluation": HELD_OUT, "patience": 0}, "patience is 0"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"max_norm": -1}, "max_norm=-1"),
        ({"devices": []}, r"devices=\[\]"),
        ({"trainable": "nothing"}, "No param matches"),
        ({"batch_statistics": True}, "no BatchNormalization"),
    ],
)
def test_what_cannot_be_trained_is_said(options, message):
    options = {"batches": batches, **options}
    with pytest.raises(transmuter.InputError, match=message):
        train.fit(model(), LOSS, options.pop("batches"), OPTIMIZER, **options)


def test_the_bar_counts_steps(capsys):
    train.fit(model(), LOSS, batches(0), OPTIMIZER, epochs=2, progress=True)
    assert re.search(r"train: 100%.*10/10.*loss", capsys.readouterr().err.replace("\r", "\n"))

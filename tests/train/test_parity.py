"""Training is PyTorch's: gradients, losses and trained weights of three small models, recorded by `parity/record.py`.

The models are what `torch.onnx.export` made of a cross-encoder shaped as MiniLM, a ResNet and a language model shaped
as GPT-2. AdamW's eps is 1e-6, with which BERT was trained, not 1e-8: the gradients of keys' biases are zero but for
rounding (a softmax does not see what is added to all of its logits), and Adam divides a gradient by its own size, so
that with a smaller eps these biases go where rounding sends them. With 1e-8, PyTorch in float32 is 3e-3 from itself in
float64 there, and with 1e-6 it is 3e-5; everything else is 1e-6 with both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import onnxruntime
import optax
import pytest

import transmuter
from transmuter import train
from transmuter.train import losses

FOLDER = Path(__file__).with_name("parity")
LOSSES = {"cross_encoder": losses.multi_label(), "resnet": losses.cross_entropy(), "language_model": losses.causal_lm()}

GRADIENT, LOSS, WEIGHT, OUTPUT = 1e-5, 1e-4, 1e-4, 1e-4
"""Largest distances: of gradients and weights relative to their norms, of losses and outputs as they are."""
ROUNDING = 1e-8
"""What a gradient may be off by beside that, relative to the norm of all of them: those of keys' biases are zero."""


@dataclass(frozen=True)
class Run:
    """A model trained as PyTorch trained it.

    Attributes:
        model: As loaded.
        gradients: Of the first step, by PyTorch's names and in its layout, as `trained`.
        losses: Of each step.
        trained: Weights after the last step.
        params: All params of the model then.
    """

    model: transmuter.Model
    gradients: dict[str, np.ndarray]
    losses: list[float]
    trained: dict[str, np.ndarray]
    params: dict[str, jax.Array]


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    """A recording; its keys are in `parity/record.py`."""
    return dict(np.load(FOLDER / f"{name}.npz"))


def recorded(name: str, kind: str) -> dict[str, np.ndarray]:
    """The entries of one kind."""
    found = {key.partition(":")[::2]: array for key, array in reference(name).items()}
    return {key: array for (of, key), array in found.items() if of == kind and key}


def in_pytorch(arrays: Mapping[str, jax.Array], homes: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays by PyTorch's names and in its layout: each is the home of one param, and each param has one home."""
    found = [(name, arrays[home], layout) for name, home, layout in homes if home in arrays]
    assert sorted(name for name, _, _ in found) == sorted(set(homes[:, 0]))
    assert len(found) == len(arrays)
    return {name: np.asarray(x.T if layout == "transposed" else x) for name, x, layout in found}


@functools.cache
def run(name: str) -> Run:
    homes, batches = reference(name)["homes"], recorded(name, "batch")
    model = transmuter.load(FOLDER / f"{name}.onnx", trainable=True)
    is_normalised = "BatchNormalization" in model.operators
    training, statistics = train.with_batch_statistics(model) if is_normalised else (model, None)
    options = {key: option.item() for key, option in recorded(name, "optimizer").items()}
    of_matrices = lambda params: {name: param.ndim > 1 for name, param in params.items()}
    # a trace that forgets is the gradient itself
    optimizer = optax.chain(optax.trace(decay=0), optax.adamw(**options, mask=of_matrices))
    step = train.Step(training, LOSSES[name], optimizer, statistics=statistics)
    state, gradients, curve = step.init(), {}, []
    for i in range(len(reference(name)["loss"])):
        state, metrics = step(state, {key: array[i % len(array)] for key, array in batches.items()})
        curve.append(float(metrics["loss"]))
        gradients = gradients or in_pytorch(optax.tree.get(state.optimizer, "trace"), homes)
    return Run(model, gradients, curve, in_pytorch(state.params, homes), step.params(state))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.linalg.norm(found.astype(np.float64) - expected))


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_the_first_step(name):
    found, expected = run(name).gradients, recorded(name, "gradient")
    assert found.keys() == expected.keys()
    total = np.sqrt(sum(np.linalg.norm(g) ** 2 for g in expected.values()))
    limits = {key: GRADIENT * np.linalg.norm(g) + ROUNDING * total for key, g in expected.items()}
    assert {key: far for key in found if not (far := distance(found[key], expected[key])) <= limits[key]} == {}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_every_step(name):
    expected = reference(name)["loss"]
    assert len(expected) == 30
    assert expected[-1] < 0.7 * expected[0]
    np.testing.assert_allclose(run(name).losses, expected, rtol=0, atol=LOSS)


@pytest.mark.parametrize("name", LOSSES)
def test_trained_weights(name):
    found, expected = run(name).trained, recorded(name, "trained")
    assert found.keys() == expected.keys()
    limits = {key: WEIGHT * np.linalg.norm(p) for key, p in expected.items()}
    assert {key: far for key in found if not (far := distance(found[key], expected[key])) <= limits[key]} == {}


def unbiased(start: np.ndarray, variance: np.ndarray, count: int, steps: int, momentum: float = 0.9) -> np.ndarray:
    """A running variance as PyTorch has it, from ONNX's: what `count` elements have added is n / (n - 1) as large."""
    kept = start * momentum**steps
    return kept + (variance - kept) * count / (count - 1)


def statistics_in_pytorch(name: str) -> dict[str, np.ndarray]:
    """The running statistics after training, with variances that are PyTorch's."""
    start, params, counts = run(name).model.params, run(name).params, recorded(name, "count")
    found = {}
    for key in recorded(name, "statistic"):
        layer, _, kind = key.rpartition(".")
        found[key] = np.asarray(params[key])
        if kind == "running_var":
            found[key] = unbiased(np.asarray(start[key]), found[key], int(counts[layer]), len(run(name).losses))
    return found


def test_running_statistics_but_that_variances_are_those_of_samples():
    expected, found = recorded("resnet", "statistic"), statistics_in_pytorch("resnet")
    assert len(expected) == 2 * 9
    for key, array in expected.items():
        assert distance(found[key], array) <= WEIGHT * np.linalg.norm(array), key


@pytest.mark.parametrize("name", LOSSES)
def test_the_saved_model_is_pytorchs_in_onnx_runtime(name, tmp_path):
    done = run(name)
    done.model.save(tmp_path / "tuned.onnx", params={**done.params, **statistics_in_pytorch(name)})
    inputs = {key: array[0] for key, array in recorded(name, "batch").items() if key in done.model.inputs}
    session = onnxruntime.InferenceSession(tmp_path / "tuned.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, inputs)[0], reference(name)["output"], rtol=0, atol=OUTPUT)


RECORDED = np.load(FOLDER / "losses.npz")
OF_LABELS = {
    "plain": losses.cross_entropy(),
    "smoothed": losses.cross_entropy(smoothing=0.1),
    "weighted": losses.cross_entropy(class_weights=RECORDED["class_weights"]),
    "weighted and smoothed": losses.cross_entropy(class_weights=RECORDED["class_weights"], smoothing=0.1),
    "causal_lm": losses.causal_lm(),
}


@pytest.mark.parametrize("name", OF_LABELS)
def test_losses_and_their_masks(name):
    assert (RECORDED["labels"] == losses.IGNORED).any()
    of_logits = lambda logits: OF_LABELS[name]({"logits": logits}, {"labels": RECORDED["labels"]})[0]
    value, gradient = jax.jit(jax.value_and_grad(of_logits))(RECORDED["logits"])
    np.testing.assert_allclose(value, RECORDED[f"loss:{name}"], rtol=1e-6)
    expected = RECORDED[f"gradient:{name}"]
    assert distance(np.asarray(gradient), expected) <= GRADIENT * np.linalg.norm(expected)

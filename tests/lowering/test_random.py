"""Operators that draw: keys, seeds, moments, dtypes; Dropout in all its versions."""

from __future__ import annotations

from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from onenode import one_node
from onnx import TensorProto

import transmuter

MANY = np.zeros((100, 200), np.float32)


def draw(
    op: str, inputs: list[Any], attributes: dict[str, Any] | None = None, *, key: int | None = None, **kwargs: Any
) -> list[np.ndarray]:
    model = transmuter.load(one_node(op, inputs, attributes, **kwargs), compute_type=None)
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in kwargs.get("known", ())}
    found = transmuter.run(model, feeds, key=None if key is None else jax.random.key(key))
    return [np.asarray(y) for y in found.values()]


CASES = {
    "normal": ("RandomNormal", [], {"shape": [100, 200], "mean": 2.0, "scale": 3.0}, 2, 3),
    "normal like": ("RandomNormalLike", [MANY], {"mean": -1.0, "scale": 0.5}, -1, 0.5),
    "uniform": ("RandomUniform", [], {"shape": [100, 200], "low": 1.0, "high": 3.0}, 2, 2 / 12**0.5),
    "uniform like": ("RandomUniformLike", [MANY], {"low": -1.0, "high": 0.0}, -0.5, 1 / 12**0.5),
    "bernoulli": ("Bernoulli", [MANY + np.float32(0.3)], {}, 0.3, (0.3 * 0.7) ** 0.5),
}


@pytest.mark.parametrize("name", CASES)
def test_distributions(name: str) -> None:
    op, inputs, attributes, mean, deviation = CASES[name]
    kwargs = {"opset": 15, "output_types": [TensorProto.FLOAT]}
    (y,) = draw(op, inputs, attributes, **kwargs)
    assert y.dtype == np.float32
    assert y.shape == (100, 200)
    assert abs(y.mean() - mean) < 0.05 * deviation
    assert abs(y.std() - deviation) < 0.03 * deviation
    np.testing.assert_array_equal(draw(op, inputs, attributes, **kwargs)[0], y)
    assert (draw(op, inputs, attributes, key=1, **kwargs)[0] != draw(op, inputs, attributes, key=2, **kwargs)[0]).any()
    seeded = [draw(op, inputs, attributes | {"seed": 1.5}, key=key, **kwargs)[0] for key in (1, 2)]
    np.testing.assert_array_equal(*seeded)
    assert (seeded[0] != draw(op, inputs, attributes | {"seed": 2.5}, **kwargs)[0]).any()


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_dtypes(dtype: Any) -> None:
    x = np.zeros((3, 4), dtype)
    element = {np.float64: TensorProto.DOUBLE, np.float16: TensorProto.FLOAT16}.get(dtype, TensorProto.BFLOAT16)
    for op in ("RandomNormalLike", "RandomUniformLike"):
        assert draw(op, [x], opset=22)[0].dtype == dtype
        assert draw(op, [MANY], {"dtype": element}, output_types=[element], opset=22)[0].dtype == dtype
    assert draw("Bernoulli", [x], {"dtype": TensorProto.BOOL}, output_types=[TensorProto.BOOL])[0].dtype == bool


def test_multinomial_draws_from_log_probabilities() -> None:
    probabilities = np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]], np.float32)
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities) + 3
    (y,) = draw("Multinomial", [logits], {"sample_size": 4000, "dtype": TensorProto.INT64}, output_types=[7])
    assert y.dtype == np.int64
    assert y.shape == (2, 4000)
    for row, wanted in zip(y, probabilities, strict=True):
        np.testing.assert_allclose(np.bincount(row, minlength=3) / 4000, wanted, atol=0.03)


def check_dropped(y: np.ndarray, mask: np.ndarray, ratio: float) -> None:
    assert abs(mask.mean() - (1 - ratio)) < 0.02
    np.testing.assert_allclose(y, np.where(mask.astype(bool), 2 / (1 - ratio), 0), rtol=1e-6)


def test_dropout_in_training() -> None:
    x = MANY + 2
    types = [TensorProto.FLOAT, TensorProto.BOOL]
    operands = [x, np.array(0.25, np.float32), np.array(True)]
    for known in ((), (1, 2)):
        y, mask = draw("Dropout", operands, outputs=2, output_types=types, known=known)
        assert mask.dtype == bool
        check_dropped(y, mask, 0.25)
    for op_version in (1, 6):
        y, mask = draw("Dropout", [x], {"ratio": 0.25}, outputs=2, opset=op_version)
        assert mask.dtype == np.float32
        check_dropped(y, mask, 0.25)


def test_dropout_with_a_hidden_mode() -> None:
    operands = [MANY + 2, np.array(0.25, np.float32), np.array(True)]
    model = transmuter.load(one_node("Dropout", operands, {"seed": 7}, outputs=2, output_types=[1, 9]))
    f = jax.jit(lambda x, ratio, training: model.apply({}, [x, ratio, training]))
    found = f(*operands)
    check_dropped(np.asarray(found["y0"]), np.asarray(found["y1"]), 0.25)
    found = f(*operands[:2], np.array(False))
    np.testing.assert_array_equal(found["y0"], operands[0])
    assert np.asarray(found["y1"]).all()


@pytest.mark.parametrize("opset", [1, 6, 7, 10, 12, 22])
def test_dropout_in_inference_needs_no_key(opset: int) -> None:
    attributes = {"is_test": 1} if opset < 7 else {}
    mask_type = TensorProto.BOOL if opset >= 10 else TensorProto.FLOAT
    model = one_node("Dropout", [MANY], attributes, outputs=2, opset=opset, output_types=[TensorProto.FLOAT, mask_type])
    model = transmuter.load(model)
    assert model.is_random == (opset < 7)
    found = transmuter.run(model, [MANY + 2])
    np.testing.assert_array_equal(found["y0"], MANY + 2)
    assert np.asarray(found["y1"]).all()
    assert np.asarray(found["y1"]).dtype == (bool if opset >= 10 else np.float32)

"""Operators that draw: keys, seeds, moments, dtypes; Dropout in all its versions."""

from __future__ import annotations

import math
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from onenode import one_node
from onnx import TensorProto, numpy_helper, parser

import transmuter
from transmuter.lowering import registry

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


# ---- distributions, by their distribution functions ----------------------------------------------------------------


def normal_cdf(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * (1 + math.erf(v / 2**0.5)) for v in x])


def distance(samples: np.ndarray, cdf: Any) -> float:
    """How far (Kolmogorov and Smirnov) the samples' distribution is from another one, times the root of their count:
    above 2.2 in one of 8,000 cases."""
    x = np.sort(samples.astype(np.float64).reshape(-1))
    steps = np.arange(x.size + 1) / x.size
    below = cdf(x)
    return max(np.abs(below - steps[1:]).max(), np.abs(below - steps[:-1]).max()) * x.size**0.5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", [0.0, -1.0, 3.5])
def test_distribution_functions(dtype: Any, seed: float) -> None:
    element = TensorProto.FLOAT if dtype == np.float32 else TensorProto.DOUBLE
    more = {"opset": 22, "output_types": [element]}
    attributes = {"dtype": element, "seed": seed}
    for op, inputs, shape in (("RandomNormal", [], {"shape": [40, 50]}), ("RandomNormalLike", [MANY[:40, :50]], {})):
        (y,) = draw(op, inputs, attributes | shape | {"mean": 2.0, "scale": 0.5}, **more)
        assert (y.dtype, y.shape) == (dtype, (40, 50))
        assert distance((y - 2) / 0.5, normal_cdf) < 2.2
    for op, inputs, shape in (("RandomUniform", [], {"shape": [40, 50]}), ("RandomUniformLike", [MANY[:40, :50]], {})):
        (y,) = draw(op, inputs, attributes | shape | {"low": -1.0, "high": 3.0}, **more)
        assert (y.dtype, y.shape) == (dtype, (40, 50))
        assert y.min() >= -1
        assert y.max() < 3
        assert distance((y + 1) / 4, lambda x: x) < 2.2


@pytest.mark.parametrize("shape", [(0, 3), (1,), ()])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = np.full(shape, 0.5, np.float32)
    for op in ("RandomNormalLike", "RandomUniformLike", "Bernoulli"):
        assert draw(op, [x], opset=22)[0].shape == shape
    y, mask = draw("Dropout", [x, np.array(0.5, np.float32), np.array(True)], outputs=2, output_types=[1, 9])
    assert y.shape == mask.shape == shape


def test_certain_events() -> None:
    x = np.tile(np.array([0, 1], np.float32), 500)
    np.testing.assert_array_equal(draw("Bernoulli", [x], opset=22)[0], x)
    for ratio, kept in ((0.0, 1.0), (1.0, 0.0)):
        operands = [x + 1, np.array(ratio, np.float32), np.array(True)]
        y, mask = draw("Dropout", operands, outputs=2, output_types=[1, 9])
        np.testing.assert_array_equal(y, (x + 1) * kept)
        assert (mask == bool(kept)).all()
    logits = np.array([[-np.inf, 0, -np.inf]], np.float32)
    (y,) = draw("Multinomial", [logits], {"sample_size": 50, "dtype": TensorProto.INT32}, output_types=[6])
    assert y.dtype == np.int32
    assert (y == 1).all()


def test_samples_of_a_multinomial_are_independent() -> None:
    logits = np.zeros((2, 4), np.float32)
    attributes = {"sample_size": 4000, "seed": 2.0, "dtype": TensorProto.INT64}
    (y,) = draw("Multinomial", [logits], attributes, output_types=[7])
    for one, other in ((y[0], y[1]), (y[0, :-1], y[0, 1:])):  # rows, and neighbours in a row
        pairs = np.bincount(4 * one + other, minlength=16) / one.size
        np.testing.assert_allclose(pairs, np.full(16, 1 / 16), atol=0.02)
    np.testing.assert_array_equal(draw("Multinomial", [logits], attributes, key=5, output_types=[7])[0], y)


TWO = """<ir_version: 10, opset_import: ["" : 22]> g (float[40, 50] x) => (float[40, 50] a, float[40, 50] b) {
  a = NODE b = NODE }"""
NODES = {
    "RandomNormal": "RandomNormal<shape=[40, 50]>()",
    "RandomNormalLike": "RandomNormalLike(x)",
    "RandomUniform": "RandomUniform<shape=[40, 50]>()",
    "RandomUniformLike": "RandomUniformLike(x)",
    "Bernoulli": "Bernoulli(x)",
    "Multinomial": "Multinomial<sample_size=50, dtype=6>(x)",
    "Dropout": "Dropout(x, half, yes)",
}


@pytest.mark.parametrize("op", NODES)
def test_nodes_draw_differently_and_calls_anew(op: str) -> None:
    text = TWO.replace("NODE", NODES[op])
    if op == "Multinomial":
        text = text.replace("float[40, 50] a, float[40, 50] b", "int32[40, 50] a, int32[40, 50] b")
    proto = parser.parse_model(text)
    if op == "Dropout":
        for name, value in (("half", np.array(0.5, np.float32)), ("yes", np.array(True))):
            proto.graph.initializer.append(numpy_helper.from_array(value, name))
    feeds = {"x": MANY[:40, :50] + np.float32(0.5)}
    compiled = transmuter.compile(transmuter.load(proto), feeds)
    first, again, other = (compiled(feeds, key=jax.random.key(k)) for k in (1, 1, 2))
    assert (np.asarray(first["a"]) != np.asarray(first["b"])).mean() > 0.2
    for name in "ab":
        np.testing.assert_array_equal(first[name], again[name])
        assert (np.asarray(first[name]) != np.asarray(other[name])).mean() > 0.2


@pytest.mark.parametrize("op", ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli"])
def test_draws_say_that_they_have_no_gradient(op: str) -> None:
    assert not registry.find("", op, 22).differentiable


def test_the_gradient_of_dropout_is_its_mask() -> None:
    operands = [np.ones(100, np.float32), np.array(0.25, np.float32), np.array(True)]
    model = transmuter.load(one_node("Dropout", operands, {"seed": 3}, outputs=2, output_types=[1, 9], known=(1, 2)))
    f = lambda x: transmuter.run(model, {"x0": x})
    gradient = jax.grad(lambda x: model.apply(model.params, {"x0": x})["y0"].sum())(operands[0])
    np.testing.assert_allclose(gradient, np.where(np.asarray(f(operands[0])["y1"]), 1 / 0.75, 0), rtol=1e-6)


def test_the_gradient_of_what_is_dropped_altogether_is_zero() -> None:
    operands = [np.ones(5, np.float32), np.array(1, np.float32), np.array(True)]
    model = transmuter.load(one_node("Dropout", operands, known=(1, 2)))
    assert not jax.grad(lambda x: model.apply(model.params, {"x0": x})["y0"].sum())(operands[0]).any()

"""Convolutions by Winograd's method: which ones, and that they stay what they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from building import info, model_of
from onnx import helper, numpy_helper

import transmuter

RANDOM = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def model(outputs: int = 64, channels: int = 64, group: int = 1, kernel: int = 3, **attributes: object):
    w = draw(outputs, channels // group, kernel, kernel) / np.float32(np.sqrt(9 * channels))
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=group, **attributes)
    return transmuter.load(
        model_of([node], [info("x", ("n", channels, "h", "w"))], [info("y", None)], [numpy_helper.from_array(w, "w")])
    )


def is_transformed(compiled: transmuter.CompiledModel) -> bool:
    (segment,) = compiled.segments
    prepared = [w for executable in segment.executables for w in executable.values if w is not None]
    return [w.shape[0] for w in prepared] == [16]


@pytest.mark.parametrize(
    ("shape", "pads"),
    [
        ((1, 64, 14, 14), [1, 1, 1, 1]),
        ((2, 64, 13, 12), [0, 0, 0, 0]),
        ((1, 64, 17, 9), [2, 0, 1, 3]),
        ((3, 64, 7, 8), [1, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("outputs", [64, 80])
def test_results_and_gradients_are_those_of_the_direct_form(shape, pads, outputs):
    convolution = model(outputs, pads=pads)
    compiled, x = transmuter.compile(convolution), draw(*shape)
    expected = transmuter.run(convolution, {"x": x})["y"]
    np.testing.assert_allclose(compiled({"x": x})["y"], expected, rtol=1e-5, atol=1e-5)
    assert is_transformed(compiled)
    weights = draw(*expected.shape)
    by_run, by_compiled = (
        jax.grad(lambda x, call=call: jnp.sum(call({"x": x})["y"] * weights))(jnp.asarray(x))
        for call in (lambda inputs: transmuter.run(convolution, inputs), compiled)
    )
    np.testing.assert_allclose(by_compiled, by_run, rtol=1e-4, atol=1e-5)


def test_params_of_a_call_are_convolved_as_they_are():
    convolution, x = model(pads=[1] * 4), draw(1, 64, 14, 14)
    compiled = transmuter.compile(convolution)
    doubled = {"w": 2 * convolution.params["w"]}
    expected = 2 * transmuter.run(convolution, {"x": x})["y"]
    np.testing.assert_allclose(compiled({"x": x}, params=doubled)["y"], expected, rtol=1e-5, atol=1e-5)
    assert not is_transformed(compiled)


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ((1, 32, 14, 14), {"channels": 32}),
        ((1, 64, 14, 14), {"strides": [2, 2]}),
        ((1, 64, 14, 14), {"dilations": [2, 2]}),
        ((1, 64, 14, 14), {"kernel": 5}),
        ((1, 128, 14, 14), {"channels": 128, "group": 2}),
        ((1, 64, 6, 6), {"outputs": 256}),
        ((1, 64, 161, 161), {}),
    ],
)
def test_where_it_is_not_faster(shape, attributes):
    convolution, x = model(**attributes), draw(*shape)
    compiled = transmuter.compile(convolution)
    np.testing.assert_allclose(
        compiled({"x": x})["y"], transmuter.run(convolution, {"x": x})["y"], rtol=1e-5, atol=1e-5
    )
    assert not is_transformed(compiled)


def test_not_on_other_platforms(monkeypatch):
    compiled, x = transmuter.compile(model()), draw(1, 64, 14, 14)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    compiled({"x": x})
    assert not is_transformed(compiled)

"""Adapters: as gradients by hand have them, merged, saved, beside quantised weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import optax
import pytest
from building import info, model_of
from onnx import helper, numpy_helper

import transmuter
from transmuter import train
from transmuter.train import lora, losses

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(6, 16)).astype(np.float32)
IMAGES = RANDOM.normal(size=(2, 16, 4, 4)).astype(np.float32)


def normal(name: str, *shape: int, dtype: type = np.float32) -> object:
    return numpy_helper.from_array((RANDOM.normal(size=shape) / 4).astype(dtype), name)


def model(nodes: list, weights: list, shape: tuple = ("n", 16), out: tuple = ("n", 8), **options) -> transmuter.Model:
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    proto = model_of(nodes, [info("x", shape)], [info("y", out)], weights, opset_imports=domains)
    return transmuter.load(proto, trainable=True, **options)


def node(op: str, inputs: list[str], outputs: list[str], **attributes) -> object:
    return helper.make_node(op, inputs, outputs, name=f"/layer/{op}", **attributes)


KINDS = {
    "MatMul": lambda: model([node("MatMul", ["x", "w"], ["y"])], [normal("w", 16, 8)]),
    "tied MatMul": lambda: model(
        [node("Transpose", ["w"], ["wt"], perm=[1, 0]), node("MatMul", ["x", "wt"], ["y"])], [normal("w", 8, 16)]
    ),
    "Gemm": lambda: model(
        [node("Gemm", ["x", "w", "b"], ["y"], transB=1, alpha=0.5)], [normal("w", 8, 16), normal("b", 8)]
    ),
    "Conv": lambda: model(
        [node("Conv", ["x", "w", "b"], ["y"], strides=[2, 2])],
        [normal("w", 8, 16, 1, 1), normal("b", 8)],
        ("n", 16, "h", "w"),
        ("n", 8, "h2", "w2"),
    ),
}


def data(kind: str) -> np.ndarray:
    return IMAGES if kind == "Conv" else X


def moved(adapted: transmuter.Model) -> dict[str, jax.Array]:
    """Params with second factors that are not zero."""
    keys = jax.random.split(jax.random.key(0), len(adapted.params))
    drawn = {n: 0.3 * jax.random.normal(k, p.shape) for k, (n, p) in zip(keys, adapted.params.items(), strict=True)}
    return {n: drawn[n] if n.endswith("lora_B") else p for n, p in adapted.params.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_merged_is_adapted(kind, tmp_path):
    original, x = KINDS[kind](), data(kind)
    adapted, adapters = train.with_lora(original, "/layer/*", rank=3, alpha=6)
    assert [a.node for a in adapters] == [f"/layer/{kind.split()[-1]}"]
    before = transmuter.run(original, {"x": x})["y"]
    np.testing.assert_array_equal(transmuter.run(adapted, {"x": x})["y"], before)  # the second factors are zero
    params = moved(adapted)
    expected = transmuter.compile(adapted)({"x": x}, params=params)["y"]
    assert np.abs(expected - before).max() > 0.1
    merged = lora.merge(original, params, adapters)
    assert merged.keys() == original.params.keys()
    np.testing.assert_allclose(transmuter.compile(original)({"x": x}, params=merged)["y"], expected, atol=1e-5)
    original.save(tmp_path / "merged.onnx", params=merged)
    adapted.save(tmp_path / "adapted.onnx", params=params)
    for path in ("merged.onnx", "adapted.onnx"):
        (actual,) = onnxruntime.InferenceSession(tmp_path / path).run(None, {"x": x})
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_the_adapter_is_what_it_says():
    original = KINDS["MatMul"]()
    adapted, (adapter,) = train.with_lora(original, "w", rank=4, alpha=2)
    params = moved(adapted)
    w, a, b = (np.asarray(params[name]) for name in ("w", adapter.a, adapter.b))
    assert (a.shape, b.shape, adapter.scale) == ((16, 4), (4, 8), 0.5)
    assert np.abs(adapted.params[adapter.a]).max() <= 1 / 4
    actual = adapted.apply(params, {"x": X})["y"]
    np.testing.assert_allclose(actual, X @ w + 0.5 * X @ a @ b, atol=1e-5)


def test_training_moves_adapters_alone():
    original = KINDS["MatMul"]()
    adapted, adapters = train.with_lora(original, "*")
    step = train.Step(adapted, losses.cross_entropy(), optax.adam(0.05), trainable=lora.ADAPTERS)
    state = step.init()
    assert sorted(state.params) == sorted((adapters[0].a, adapters[0].b))
    found = []
    for _ in range(20):
        state, metrics = step(state, {"x": X, "labels": np.arange(6)})
        found.append(float(metrics["loss"]))
    assert found[-1] < found[0] / 2
    np.testing.assert_array_equal(step.params(state)["w"], original.params["w"])


def test_files_of_adapters(tmp_path):
    original = KINDS["Gemm"]()
    adapted, adapters = train.with_lora(original, "*", rank=2, alpha=1)
    params = moved(adapted)
    lora.save(tmp_path / "a.safetensors", params, adapters)
    again, read = lora.load(tmp_path / "a.safetensors", original)
    assert read == adapters
    expected = adapted.apply(params, {"x": X})["y"]
    np.testing.assert_array_equal(again.apply(again.params, {"x": X})["y"], expected)
    with pytest.raises(transmuter.ModelError, match="no node '/layer/Gemm'"):
        lora.load(tmp_path / "a.safetensors", KINDS["MatMul"]())
    (tmp_path / "broken").write_bytes(b"no safetensors")
    with pytest.raises(transmuter.ModelError, match="holds no adapters"):
        lora.load(tmp_path / "broken", original)


def quantised(kind: str) -> transmuter.Model:
    if kind == "DequantizeLinear":
        weights = [numpy_helper.from_array(RANDOM.integers(-9, 9, (16, 8), np.int8), "q")]
        weights.append(numpy_helper.from_array(np.float32(0.05), "scale"))
        nodes = [node("DequantizeLinear", ["q", "scale"], ["w"]), node("MatMul", ["x", "w"], ["y"])]
        return model(nodes, weights)
    packed = RANDOM.integers(0, 256, (8, 1, 8), np.uint8)
    weights = [numpy_helper.from_array(packed, "q"), normal("scales", 8)]
    attributes = {"K": 16, "N": 8, "bits": 4, "block_size": 16, "domain": "com.microsoft"}
    return model([node("MatMulNBits", ["x", "q", "scales"], ["y"], **attributes)], weights)


@pytest.mark.parametrize("kind", ["DequantizeLinear", "MatMulNBits"])
def test_quantised_weights_have_adapters(kind, tmp_path):
    original = quantised(kind)
    adapted, adapters = train.with_lora(original, "/layer/*", rank=2)
    step = train.Step(adapted, losses.cross_entropy(), optax.adam(0.05), trainable=lora.ADAPTERS)
    state = step.init()
    first = None
    for _ in range(30):
        state, metrics = step(state, {"x": X, "labels": np.arange(6)})
        first = first or float(metrics["loss"])
    assert float(metrics["loss"]) < first / 2
    params = step.params(state)
    with pytest.raises(transmuter.InputError, match="quantised weight, so that it cannot be merged"):
        lora.merge(original, params, adapters)
    adapted.save(tmp_path / "adapted.onnx", params=params)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (actual,) = onnxruntime.InferenceSession(tmp_path / "adapted.onnx", options).run(None, {"x": X})
    np.testing.assert_allclose(actual, transmuter.compile(adapted)({"x": X}, params=params)["y"], atol=1e-4)


def test_half_precision_has_half_adapters():
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    weights = [normal("w", 16, 8, dtype=np.float16)]
    half = helper.np_dtype_to_tensor_dtype(np.dtype(np.float16))
    proto = model_of(nodes, [info("x", ("n", 16), half)], [info("y", ("n", 8), half)], weights)
    adapted, (adapter,) = train.with_lora(transmuter.load(proto, trainable=True), "w")
    assert adapted.params[adapter.a].dtype == jnp.float16
    assert transmuter.run(adapted, {"x": X.astype(np.float16)})["y"].dtype == np.float16


def test_shared_weights_are_not_merged():
    nodes = [node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"], name="second")]
    original = model(nodes, [normal("w", 16, 16)], out=("n", 16))
    adapted, adapters = train.with_lora(original, "w")
    assert len(adapters) == 2
    with pytest.raises(transmuter.InputError, match="shares 'w' with another"):
        lora.merge(original, adapted.params, adapters)


def test_a_weight_whose_product_counts_for_nothing_is_not_merged():
    original = model([node("Gemm", ["x", "w"], ["y"], alpha=0.0)], [normal("w", 16, 8)])
    adapted, adapters = train.with_lora(original, "w")
    params = moved(adapted)
    a, b = (np.asarray(params[name]) for name in (adapters[0].a, adapters[0].b))
    np.testing.assert_allclose(adapted.apply(params, {"x": X})["y"], X @ a @ b, rtol=1e-4, atol=1e-5)
    with pytest.raises(transmuter.InputError, match="multiplies by zero, so that it cannot be merged"):
        lora.merge(original, params, adapters)


def test_what_cannot_be_adapted_is_said():
    original = KINDS["MatMul"]()
    with pytest.raises(transmuter.InputError, match=r"matches 'v'. Those that can be are.* /layer/MatMul \(w\)"):
        train.with_lora(original, "v")
    with pytest.raises(transmuter.InputError, match="rank is 0"):
        train.with_lora(original, "w", rank=0)
    relu = transmuter.load(model_of([helper.make_node("Relu", ["x"], ["y"])], [info("x")], [info("y")]))
    with pytest.raises(transmuter.InputError, match="trainable=True"):
        train.with_lora(relu, "*")

"""Which weights are params, which of them are one, and how they are split for training."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import optax
import pytest
from building import info, model_of
from onnx import TensorProto, helper, numpy_helper

import transmuter

TABLE = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)


def language_model(*, copy: np.ndarray, square: bool = False):
    """ids -> table[ids] * scale -> logits by the `copy` of the table."""
    weights = [
        numpy_helper.from_array(TABLE, "embedding"),
        numpy_helper.from_array(copy, "head"),
        numpy_helper.from_array(np.float32(1.5), "scale"),
        numpy_helper.from_array(np.ones((12, 6), np.float32), "ones"),
        numpy_helper.from_array(np.ones((12, 6), np.float32), "ones_too"),
    ]
    product = ["h", "head"] if copy.shape == (6, 12) else ["h", "head_t"]
    nodes = [
        helper.make_node("Add", ["embedding", "ones"], ["plus_one"]),
        helper.make_node("Sub", ["plus_one", "ones_too"], ["table"]),
        helper.make_node("Gather", ["table", "ids"], ["e"]),
        helper.make_node("Mul", ["e", "scale"], ["h"]),
        *([] if copy.shape == (6, 12) else [helper.make_node("Transpose", ["head"], ["head_t"], perm=[1, 0])]),
        helper.make_node("MatMul", product, ["logits"]),
    ]
    return model_of(nodes, [info("ids", ("n",), TensorProto.INT64)], [info("logits", ("n", 12))], weights)


IDS = np.array([3, 0, 11])


@pytest.mark.parametrize("copy", [TABLE, np.ascontiguousarray(TABLE.T)], ids=["equal", "transposed"])
def test_copies_of_a_weight_are_one(copy, tmp_path):
    proto = language_model(copy=copy)
    model = transmuter.load(proto, trainable=True)
    assert sorted(model.params) == ["embedding", "ones", "ones_too", "scale"]
    separate = transmuter.load(proto)
    assert {"embedding", "head"} <= separate.params.keys()
    expected = transmuter.run(separate, {"ids": IDS})["logits"]
    compiled = transmuter.compile(model)
    np.testing.assert_allclose(compiled({"ids": IDS})["logits"], expected, rtol=1e-6)

    def loss(params):
        return jnp.sum(compiled({"ids": IDS}, params=params)["logits"] ** 2)

    grads = jax.grad(loss)(model.params)
    both = jax.grad(lambda e, h: jnp.sum((e[IDS] * 1.5 @ h.T) ** 2), (0, 1))(jnp.asarray(TABLE), jnp.asarray(TABLE))
    np.testing.assert_allclose(grads["embedding"], both[0] + both[1], rtol=1e-4)

    tuned = {name: array * 2 for name, array in model.params.items()}
    model.save(tmp_path / "tuned.onnx", params=tuned)
    (actual,) = onnxruntime.InferenceSession(tmp_path / "tuned.onnx").run(None, {"ids": IDS})
    np.testing.assert_allclose(actual, compiled({"ids": IDS}, params=tuned)["logits"], rtol=1e-5)


def test_unequal_weights_are_not_tied():
    other = TABLE.copy()
    other[3, 3] += 1
    assert "head" in transmuter.load(language_model(copy=other), trainable=True).params


def test_scalars_are_params_of_a_trainable_model():
    proto = language_model(copy=TABLE)
    assert "scale" not in transmuter.load(proto).params
    assert transmuter.load(proto, trainable=True).params["scale"].shape == ()


@pytest.fixture
def model() -> transmuter.Model:
    return transmuter.load(language_model(copy=TABLE + 1), trainable=True)


@pytest.mark.parametrize(
    "choice",
    [
        "head",
        "h*d",
        ["head"],
        re.compile("ea"),
        (re.compile("^he"), "head"),
        lambda name, shape: name == "head" and shape.shape == (12, 6),
    ],
)
def test_a_partition_is_by_name_pattern_or_predicate(model, choice):
    split = model.trainable(choice)
    assert list(split.trainable) == ["head"]
    assert sorted(split.frozen) == ["embedding", "ones", "ones_too", "scale"]
    assert split.params.keys() == split.mask.keys() == split.labels.keys() == model.params.keys()
    assert [name for name, trained in split.mask.items() if trained] == ["head"]


def test_optax_takes_the_mask_and_the_labels(model):
    split = model.trainable("head")
    grads = {name: jnp.ones_like(array) for name, array in model.params.items()}
    others = {name: not trained for name, trained in split.mask.items()}
    for optimizer in (
        optax.chain(optax.masked(optax.sgd(0.1), split.mask), optax.masked(optax.set_to_zero(), others)),
        optax.multi_transform({"trainable": optax.sgd(0.1), "frozen": optax.set_to_zero()}, split.labels),
    ):
        updates, _ = optimizer.update(grads, optimizer.init(model.params))
        np.testing.assert_allclose(updates["head"], -0.1)
        np.testing.assert_array_equal(updates["embedding"], 0)


def test_a_choice_that_matches_nothing_is_an_error(model):
    with pytest.raises(transmuter.InputError, match=r"No param matches 'heads'. The nearest names are head"):
        model.trainable("heads")
    with pytest.raises(transmuter.InputError, match=r"model\.params has names such as embedding"):
        model.trainable(lambda name, shape: False)


def test_quantised_weights_cannot_be_trained():
    weights = [
        numpy_helper.from_array(np.ones((300, 4), np.int8), "q"),
        numpy_helper.from_array(np.float32(0.1), "s"),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    model = transmuter.load(model_of(nodes, [info("x", ("n", 300))], [info("y", ("n", 4))], weights), trainable=True)
    with pytest.raises(transmuter.InputError, match="quantised weights"):
        model.trainable("q")
    assert "s" in model.trainable("*").trainable

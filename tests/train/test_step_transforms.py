"""Products in bfloat16 and values computed again: what they compute, what they keep, and with what they go together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import onnx
import optax
import pytest
from building import info, model_of
from onnx import TensorProto, helper, numpy_helper
from test_step import BATCH, BY_CONTENTS, CONSTANTS, classifier

import transmuter
from transmuter import train
from transmuter.train import losses
from transmuter.train.transforms import products_in_bfloat16, rematerialized

BFLOAT16 = {"compute_type": "bfloat16"}
REMAT = {"remat": "nothing_saveable"}
BOTH = {**BFLOAT16, "remat": "dots_saveable"}
CHECKPOINT = jax.make_jaxpr(jax.checkpoint(lambda x: 2 * x))(1.0).jaxpr.eqns[0].primitive
HIDDEN, TOKENS = 32, 16


@functools.cache
def encoder(layers: int) -> transmuter.Model:
    """Layers of self-attention and two dense ones, each normalised after its residual, with weights of their own."""
    random = np.random.default_rng(0)
    weights: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []

    def weight(name: str, *shape: int) -> str:
        array = random.normal(size=shape) / np.sqrt(shape[0]) if len(shape) > 1 else np.ones(shape)
        array = array / np.sqrt(HIDDEN) if name.endswith("q") else array  # attention's scale
        weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def op(kind: str, *operands: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, operands, [f"v{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    x = "x"
    for i in range(layers):
        q, k, v = (op("MatMul", x, weight(f"{i}.{role}", HIDDEN, HIDDEN)) for role in "qkv")
        shares = op("Softmax", op("MatMul", q, op("Transpose", k, perm=[0, 2, 1])), axis=-1)
        x = op("LayerNormalization", op("Add", op("MatMul", shares, v), x), weight(f"{i}.norm1", HIDDEN))
        wide = op("Gelu", op("MatMul", x, weight(f"{i}.up", HIDDEN, 4 * HIDDEN)))
        x = op(
            "LayerNormalization",
            op("Add", op("MatMul", wide, weight(f"{i}.down", 4 * HIDDEN, HIDDEN)), x),
            weight(f"{i}.norm2", HIDDEN),
        )
    nodes.append(helper.make_node("Identity", [x], ["y"]))
    shape = ("n", TOKENS, HIDDEN)
    return transmuter.load(model_of(nodes, [info("x", shape)], [info("y", shape)], weights, opset=20), trainable=True)


def batch(rows: int = 4) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {name: random.normal(size=(rows, TOKENS, HIDDEN)).astype(np.float32) for name in ("x", "target")}


LOSS = losses.regression("y", labels="target")


@functools.cache
def gradients(**options: Any) -> tuple[dict[str, np.ndarray], float]:
    """Those of a step, which its optimizer keeps, and its loss."""
    step = train.Step(encoder(3), LOSS, optax.trace(0.0), **options)
    state, metrics = step(step.init(), batch())
    _, kept = state.optimizer
    return jax.tree.map(np.asarray, kept.trace), float(metrics["loss"])


def equations(jaxpr: Any) -> Iterator[Any]:
    """Those of a jaxpr and of the jaxprs inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def products(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The dtypes of the operands of matrix products and convolutions."""
    found = equations(jax.make_jaxpr(function)(*arguments).jaxpr)
    names = ("dot_general", "conv_general_dilated")
    return [{v.aval.dtype.name for v in e.invars} for e in found if e.primitive.name in names]


# ---- products in bfloat16 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [BFLOAT16, BOTH])
def test_products_forwards_and_backwards_are_in_bfloat16(options):
    step = train.Step(encoder(1), LOSS, optax.adamw(1e-3), **options)
    state = step.init()
    kinds = products(step._update, state, step._frozen, batch())
    assert len(kinds) >= 18  # seven products, two more for the gradients of each, but none of the model's input
    assert all(kind == {"bfloat16"} for kind in kinds)
    state, _ = step(state, batch())
    floats = [x for x in jax.tree.leaves((state.params, state.optimizer)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype.name for x in floats} == {"float32"}


def test_gradients_in_bfloat16_are_close(tmp_path):
    expected, loss = gradients()
    found, loss_found = gradients(**BFLOAT16)
    assert loss_found == pytest.approx(loss, rel=1e-3)
    for name, array in found.items():
        cosine = np.vdot(array, expected[name]) / np.linalg.norm(array) / np.linalg.norm(expected[name])
        assert cosine > 0.999
        assert np.linalg.norm(array - expected[name]) < 0.03 * np.linalg.norm(expected[name])


def test_training_in_bfloat16_converges_as_in_float32(tmp_path):
    model = encoder(2)
    curves = {}
    for name, options in (("float32", {}), ("bfloat16", BFLOAT16)):
        step = train.Step(model, LOSS, optax.adamw(3e-3), **options)
        state, found = step.init(), []
        for _ in range(30):
            state, metrics = step(state, batch())
            found.append(float(metrics["loss"]))
        curves[name] = found
    assert curves["float32"][-1] < 0.75 * curves["float32"][0]
    np.testing.assert_allclose(curves["bfloat16"], curves["float32"], rtol=0.01)
    model.save(tmp_path / "tuned.onnx", params=step.params(state))
    written = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "tuned.onnx").graph.initializer}
    assert all(array.dtype == np.float32 for array in written.values())
    np.testing.assert_array_equal(written["0.up"], state.params["0.up"])


@pytest.mark.parametrize("options", [REMAT, BOTH])
@pytest.mark.parametrize("kind", ["accumulate", "break", "dropout"])
def test_they_go_together_with_everything_else(kind, options):
    """A step with `options` and one without have the same loss, and one after it."""
    model, data, loss, more = encoder(1), batch(), LOSS, {}
    if kind == "accumulate":
        more = {"accumulate": 2}
    elif kind == "dropout":
        model = train.with_dropout(model, dense=0.3)
    else:
        model, data, loss = classifier(BY_CONTENTS, CONSTANTS), BATCH, losses.cross_entropy()
    curves = []
    for chosen in ({}, options):
        step = train.Step(model, loss, optax.sgd(0.3), **more, **chosen)
        state, found = step.init(seed=3), []
        for _ in range(2):
            state, metrics = step(state, data)
            found.append(float(metrics["loss"]))
        curves.append(found)
        assert step._breaks == (kind == "break")
    np.testing.assert_allclose(*curves, rtol=1e-6 if options is REMAT else 5e-3)


def test_adapters_beside_quantised_weights_are_trained_in_bfloat16():
    random = np.random.default_rng(0)
    arrays = {
        "w": random.integers(-100, 100, (16, 8)).astype(np.int8),
        "scale": np.float32(0.01),
        "zero": np.int8(0),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["f"]),
        helper.make_node("MatMul", ["x", "f"], ["logits"], name="dense"),
    ]
    weights = [numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()]
    model = transmuter.load(
        model_of(nodes, [info("x", ("n", 16))], [info("logits", ("n", 8))], weights), trainable=True
    )
    adapted, _ = train.with_lora(model, "dense", rank=2)
    data = {"x": random.normal(size=(32, 16)).astype(np.float32), "labels": random.integers(0, 8, 32)}
    curves = []
    for options in ({}, BOTH):
        step = train.Step(adapted, losses.cross_entropy(), optax.adamw(0.05), trainable=train.lora.ADAPTERS, **options)
        state, found = step.init(), []
        for _ in range(10):
            state, metrics = step(state, data)
            found.append(float(metrics["loss"]))
        curves.append(found)
    assert curves[0][-1] < 0.9 * curves[0][0]
    np.testing.assert_allclose(*curves, rtol=0.02)


def test_products_of_positions_and_with_constants_stay_in_float32():
    """bfloat16 has no 1001; a rotary embedding would turn by the angle of another position."""
    nodes = [
        helper.make_node("Cast", ["positions"], ["p"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["p", "frequencies"], ["angles"]),
        helper.make_node("ConstantOfShape", ["square"], ["zeros"]),
        helper.make_node("Exp", ["zeros"], ["ones"]),
        helper.make_node("MatMul", ["angles", "ones"], ["sums"]),
    ]
    weights = [
        numpy_helper.from_array(np.linspace(1, 2, 20, dtype=np.float32)[None], "frequencies"),
        numpy_helper.from_array(np.array([20, 20]), "square"),
    ]
    proto = model_of(nodes, [info("positions", ("n", 1), TensorProto.INT64)], [info("sums", ("n", 20))], weights)
    model = transmuter.load(proto, trainable=True)
    positions = np.arange(1000, 1010)[:, None]
    run = lambda params, x: model.apply(params, {"positions": x}, outputs=["angles", "sums"])
    lowered = products_in_bfloat16(run)
    assert products(lowered, model.params, positions) == [{"float32"}] * 2
    for name, expected in run(model.params, positions).items():
        np.testing.assert_allclose(lowered(model.params, positions)[name], expected, rtol=1e-6)


def test_products_inside_of_loops_and_convolutions_are_in_bfloat16():
    random = np.random.default_rng(0)
    shapes = {"w": (1, 16, 4), "r": (1, 16, 4), "kernel": (4, 4, 3)}
    weights = [numpy_helper.from_array(random.normal(size=s).astype(np.float32) / 2, n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("Conv", ["x", "kernel"], ["c"], pads=[1, 1]),
        helper.make_node("Transpose", ["c"], ["t"], perm=[2, 0, 1]),
        helper.make_node("LSTM", ["t", "w", "r", "", "", "h"], ["", "y"], hidden_size=4),
    ]
    inputs = [info("x", ("n", 4, 6)), info("h", (1, "n", 4))]
    model = transmuter.load(model_of(nodes, inputs, [info("y", (1, "n", 4))], weights), trainable=True)
    x, h = (random.normal(size=s).astype(np.float32) for s in ((2, 4, 6), (1, 2, 4)))
    run = lambda params, x, h: model.apply(params, [x, h])["y"]
    lowered = products_in_bfloat16(run)
    traced = equations(jax.make_jaxpr(lowered)(model.params, x, h).jaxpr)
    assert "scan" in {equation.primitive.name for equation in traced}
    assert products(lowered, model.params, x, h).count({"bfloat16"}) == 4  # convolution, inputs, first state, loop
    slopes = lambda function: jax.grad(lambda params: (function(params, x, h) ** 2).sum())(model.params)
    found, expected = slopes(lowered), slopes(run)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=0.03 * np.abs(expected[name]).max())


@pytest.mark.parametrize("compute_type", ["float32", None])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_exports_are_trained_in_float32(dtype, compute_type, tmp_path):
    """Steps of 1e-4 on weights of 1, each of which half precision would round away."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = [numpy_helper.from_array(np.ones((4, 3), dtype), "w")]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    proto = model_of(nodes, [info("x", ("n", 4), element)], [info("y", ("n", 3), element)], weights)
    model = transmuter.load(proto, trainable=True, compute_type=compute_type)
    step = train.Step(model, lambda outputs, batch: outputs["y"].astype(np.float32).mean(), optax.sgd(3e-4))
    state = step.init()
    for _ in range(100):
        state, _ = step(state, {"x": np.ones((2, 4), dtype)})
    assert state.params["w"].dtype == np.float32
    np.testing.assert_allclose(state.params["w"], 1 - 100 * 3e-4 / 3, rtol=1e-4)
    model.save(tmp_path / "tuned.onnx", params=step.params(state))
    again = transmuter.load(tmp_path / "tuned.onnx", trainable=True).params["w"]
    assert again.dtype == dtype
    np.testing.assert_array_equal(again, state.params["w"].astype(dtype))


# ---- values computed again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["nothing_saveable", jax.checkpoint_policies.dots_with_no_batch_dims_saveable])
def test_gradients_are_those_without(policy):
    expected, loss = gradients()
    found, loss_found = gradients(remat=policy)
    assert loss_found == pytest.approx(loss, rel=1e-6)
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], atol=1e-6 * np.abs(expected[name]).max() + 1e-8)


def test_values_that_are_no_numbers_may_pass_between_blocks():
    """A mask of -inf is used by each layer; what makes blocks wait for each other does not multiply it."""
    nodes, weights = [], []
    for i in range(4):
        weights.append(numpy_helper.from_array(np.eye(8, dtype=np.float32) + i / 10, f"w{i}"))
        nodes += [
            helper.make_node("MatMul", [f"x{i}" if i else "x", f"w{i}"], [f"a{i}"]),
            helper.make_node("Add", [f"a{i}", "hidden"], [f"m{i}"]),
            helper.make_node("Softmax", [f"m{i}"], [f"s{i}"], axis=-1),
            helper.make_node("Tanh", [f"s{i}"], [f"x{i + 1}" if i < 3 else "y"]),
        ]
    nodes.insert(0, helper.make_node("Log", ["mask"], ["hidden"]))
    shape = ("n", 8)
    proto = model_of(nodes, [info("x", shape), info("mask", shape)], [info("y", shape)], weights)
    model = transmuter.load(proto, trainable=True)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    data = {"x": x, "mask": np.tile(np.float32([0, 1]), (16, 4)), "target": x}
    found = []
    for options in ({}, REMAT):
        step = train.Step(model, LOSS, optax.sgd(1.0), **options)
        state, metrics = step(step.init(), data)
        assert metrics["finite"]
        found.append(state.params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), *found)


def test_blocks_are_layers_or_parts_of_them():
    """As many blocks as there are layers, or more; what each takes and gives is one array, and its weights."""
    policy = jax.checkpoint_policies.nothing_saveable
    model = encoder(5)
    run = rematerialized(lambda params, x: model.apply(params, {"x": x})["y"], policy)
    jaxpr = jax.make_jaxpr(run)(model.params, batch()["x"]).jaxpr
    blocks = [equation for equation in jaxpr.eqns if equation.primitive is CHECKPOINT]
    assert 5 <= len(blocks) <= 15
    for block in blocks:
        assert sum(v.aval.size for v in block.outvars) == batch()["x"].size


def test_one_layer_is_one_block():
    model = classifier()
    run = rematerialized(lambda params, x: model.apply(params, {"x": x})["logits"], lambda *_, **__: False)
    jaxpr = jax.make_jaxpr(run)(model.params, BATCH["x"]).jaxpr
    assert CHECKPOINT not in [equation.primitive for equation in jaxpr.eqns]


def bytes_kept(step: train.Step, state: train.TrainState, data: dict) -> int:
    """What the backward pass takes of the forward one, params included."""
    forward = lambda params: step._in_one_piece(params, {}, data, state.key)["y"].sum()
    residuals = jax.eval_shape(lambda params: jax.vjp(forward, params)[1], state.params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(residuals))


def test_memory_falls():
    """That of a compiled step of a deep encoder; and what is kept for the backward pass, wherever it runs."""
    model, data = encoder(8), batch(16)
    temporary, kept = {}, {}
    for name, options in (("plain", {}), ("remat", REMAT), ("bfloat16", BFLOAT16), ("both", BOTH)):
        step = train.Step(model, LOSS, optax.adamw(1e-3), **options)
        step._is_rewritten = False  # which keeps less of its own: that is no part of this comparison
        state = step.init()
        kept[name] = bytes_kept(step, state, data) - model.nbytes
        if name in ("plain", "remat"):
            compiled = step._whole.lower(state, step._frozen, data).compile()
            temporary[name] = compiled.memory_analysis().temp_size_in_bytes
    assert temporary["plain"] > 4 * temporary["remat"]
    assert kept["plain"] > 10 * kept["remat"]
    assert kept["plain"] > 1.2 * kept["bfloat16"]
    assert kept["plain"] > 3 * kept["both"]


def test_frozen_weights_get_no_gradients():
    """Gradients wait for those of weights, but nothing makes gradients of weights that are not trained."""
    model = encoder(2)

    def count(**options: Any) -> int:
        step = train.Step(model, LOSS, optax.sgd(0.1), **options)
        return len(products(step._update, step.init(), step._frozen, batch()))

    assert count(trainable="1.down", remat="dots_saveable") == count(trainable="1.down")
    assert count(trainable="0.down", **REMAT) < count(**REMAT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_type": "float16"}, "compute_type is 'float16'.*loss scaled"),
        ({"remat": "dots"}, "remat is 'dots'. Give one of 'nothing_saveable'"),
        ({"remat": True}, "remat is True"),
    ],
)
def test_what_there_is_not_is_said(options, message):
    with pytest.raises(transmuter.InputError, match=message):
        train.Step(classifier(), losses.cross_entropy(), optax.sgd(0.1), **options)

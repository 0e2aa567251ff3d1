"""RNN, GRU, LSTM and DynamicQuantizeLSTM against ONNX Runtime, and their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from onenode import one_node, ort_node, run_node

import transmuter

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
RESULTS = {"RNN": 2, "GRU": 2, "LSTM": 3}
WITHOUT_OWN_DEFAULTS = ["Affine", "ScaledTanh", "ThresholdedRelu"]
ACTIVATIONS = ["Elu", "HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"]
HAVE_ALPHA = {"Elu", "HardSigmoid", "LeakyRelu", *WITHOUT_OWN_DEFAULTS}
HAVE_BETA = {"HardSigmoid", "Affine", "ScaledTanh"}
PLACES = {"RNN": 1, "GRU": 2, "LSTM": 3}
"""How many activations a direction has."""
HIDDEN = 6


def operands(
    op: str,
    *,
    directions: int = 1,
    length: int = 5,
    batch: int = 3,
    lens: list[int] | None = None,
    bias: bool = True,
    states: bool = True,
    peepholes: bool = False,
    seed: int = 0,
) -> list[np.ndarray | None]:
    draw = np.random.default_rng(seed)
    gates = GATES[op]

    def normal(*shape: int) -> np.ndarray:
        return (0.5 * draw.normal(size=shape)).astype(np.float32)

    found: list[np.ndarray | None] = [
        normal(length, batch, 4),
        normal(directions, gates * HIDDEN, 4),
        normal(directions, gates * HIDDEN, HIDDEN),
        normal(directions, 2 * gates * HIDDEN) if bias else None,
        None if lens is None else np.array(lens, np.int32),
        normal(directions, batch, HIDDEN) if states else None,
    ]
    if op == "LSTM":
        found.append(normal(directions, batch, HIDDEN) if states else None)
        found.append(normal(directions, 3 * HIDDEN) if peepholes else None)
    while found[-1] is None:
        found.pop()
    return found


def compare(op: str, inputs: list[Any], attributes: dict[str, Any], *, rtol: float = 1e-5, **kwargs: Any) -> None:
    kwargs = {"outputs": RESULTS[op], "output_types": [1] * RESULTS[op], "opset": 22} | kwargs
    expected = ort_node(op, inputs, {"hidden_size": HIDDEN} | attributes, **kwargs)
    actual = run_node(op, inputs, {"hidden_size": HIDDEN} | attributes, **kwargs)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_layers_match_onnxruntime(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(sorted(GATES)))
    direction = data.draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
    batch = data.draw(st.integers(1, 3))
    length = data.draw(st.sampled_from([1, 4]))
    lens = data.draw(st.none() | st.lists(st.integers(0, length), min_size=batch, max_size=batch))
    attributes: dict[str, Any] = {"direction": direction}
    if data.draw(st.booleans()):
        attributes["clip"] = 0.25
    if op == "GRU":
        attributes["linear_before_reset"] = data.draw(st.integers(0, 1))
    if op == "LSTM":
        attributes["input_forget"] = data.draw(st.integers(0, 1))
    directions = 1 + (direction == "bidirectional")
    if data.draw(st.booleans()):
        names = st.sampled_from(ACTIVATIONS + WITHOUT_OWN_DEFAULTS)
        chosen = data.draw(st.lists(names, min_size=directions * PLACES[op], max_size=directions * PLACES[op]))
        numbers = st.sampled_from([0.2, 0.5, 0.9])
        for name, having in (("alpha", HAVE_ALPHA), ("beta", HAVE_BETA)):
            if count := sum(activation in having for activation in chosen):
                attributes[f"activation_{name}"] = data.draw(st.lists(numbers, min_size=count, max_size=count))
        attributes["activations"] = chosen
    inputs = operands(
        op,
        directions=directions,
        length=length,
        batch=batch,
        lens=lens,
        bias=data.draw(st.booleans()),
        states=data.draw(st.booleans()),
        peepholes=op == "LSTM" and data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 99)),
    )
    compare(op, inputs, attributes, opset=data.draw(st.sampled_from([7, 14, 22])))


@pytest.mark.parametrize("name", ACTIVATIONS + WITHOUT_OWN_DEFAULTS)
def test_activations(name: str) -> None:
    values = {"activation_alpha": [0.7], "activation_beta": [0.3]}
    compare("RNN", operands("RNN"), {"activations": [name], **values})
    if name in ACTIVATIONS:  # ONNX Runtime has defaults of its own for the others
        compare("RNN", operands("RNN"), {"activations": [name]})


def test_alphas_and_betas_go_to_the_activations_that_have_them() -> None:
    names = ["Sigmoid", "LeakyRelu", "ScaledTanh"]
    compare("LSTM", operands("LSTM"), {"activations": names, "activation_alpha": [0.3, 0.9], "activation_beta": [0.4]})


def test_activations_that_do_not_fit() -> None:
    for names, message in ((["Cos"], "no activation"), (["ScaledTanh"], "alpha"), (["Tanh"] * 3, "3 activations")):
        with pytest.raises(transmuter.LoweringError, match=message):
            run_node("RNN", operands("RNN"), {"activations": names, "hidden_size": HIDDEN}, outputs=2)
    with pytest.raises(transmuter.LoweringError, match="direction"):
        run_node("RNN", operands("RNN"), {"direction": "backward", "hidden_size": HIDDEN}, outputs=2)


@pytest.mark.parametrize("op", GATES)
def test_layout(op: str) -> None:
    inputs = operands(op, directions=2, lens=[5, 2, 3])
    turned = [x if i in (1, 2, 3, 4) else np.swapaxes(x, 0, 1).copy() for i, x in enumerate(inputs)]
    attributes = {"hidden_size": HIDDEN, "direction": "bidirectional"}
    y, *ends = run_node(op, inputs, attributes, outputs=RESULTS[op])
    y1, *ends1 = run_node(op, turned, attributes | {"layout": 1}, outputs=RESULTS[op])
    np.testing.assert_allclose(y1, y.transpose(2, 0, 1, 3), rtol=1e-6)
    for end, end1 in zip(ends, ends1, strict=True):
        np.testing.assert_allclose(end1, np.swapaxes(end, 0, 1), rtol=1e-6)


@pytest.mark.parametrize("op", GATES)
def test_versions_before_7(op: str) -> None:
    inputs = operands(op)
    attributes = {"hidden_size": HIDDEN}
    expected = run_node(op, inputs, attributes, outputs=2, opset=7)
    for opset in (1, 3):
        found = run_node(op, inputs, attributes | {"output_sequence": 1}, outputs=2, opset=opset)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", GATES)
def test_half_types_accumulate_in_float32(op: str, dtype: Any) -> None:
    inputs = [x.astype(dtype) for x in operands(op, bias=False, states=False)]
    attributes = {"hidden_size": HIDDEN}
    found = run_node(op, inputs, attributes, outputs=2, opset=22)
    expected = run_node(op, [x.astype(np.float32) for x in inputs], attributes, outputs=2, opset=22)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        np.testing.assert_array_equal(a, b.astype(dtype))


def function(op: str, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    model = transmuter.load(one_node(op, inputs, {"hidden_size": HIDDEN} | attributes, outputs=RESULTS[op], opset=22))
    names = [f"x{i}" for i, x in enumerate(inputs) if x is not None and x.dtype == np.float32]
    others = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and x.dtype != np.float32}

    def call(*floats: Any) -> list[Any]:
        return list(model.apply({}, dict(zip(names, floats, strict=True)) | others).values())

    return call, [x for x in inputs if x is not None and x.dtype == np.float32]


@pytest.mark.parametrize("op", GATES)
def test_gradients(op: str) -> None:
    inputs = operands(op, directions=2, length=4, batch=3, lens=[4, 1, 0], peepholes=op == "LSTM")
    f, floats = function(op, inputs, {"direction": "bidirectional"})
    check_grads(jax.jit(f), floats, 1, modes=["rev"], rtol=2e-2, atol=2e-2)
    gradients = jax.jit(jax.grad(lambda *floats: sum(y.sum() for y in f(*floats)), range(len(floats))))
    for gradient in gradients(*floats):
        assert np.isfinite(gradient).all()
        assert np.abs(gradient).max() > 0


@pytest.mark.parametrize("op", GATES)
def test_no_steps(op: str) -> None:
    """The states stay as they are. (ONNX Runtime does not set them.)"""
    inputs = operands(op, directions=2, length=0)
    y, *ends = run_node(op, inputs, {"hidden_size": HIDDEN, "direction": "bidirectional"}, outputs=RESULTS[op])
    assert y.shape == (0, 2, 3, HIDDEN)
    for end, start in zip(ends, inputs[5:7], strict=True):
        np.testing.assert_array_equal(end, start)


def test_transforms() -> None:
    inputs = operands("LSTM", states=False)
    f, (x, *weights) = function("LSTM", inputs, {})
    expected = ort_node("LSTM", inputs, {"hidden_size": HIDDEN}, outputs=3, opset=22)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    specs = (P(None, "data"), *[P()] * len(weights))
    calls = {
        "jit": jax.jit(f),
        "checkpoint": jax.checkpoint(f),
        "vmap": lambda x, *weights: [y[0] for y in jax.vmap(f, (0, *[None] * len(weights)))(x[None], *weights)],
        "shard_map": jax.jit(
            jax.shard_map(
                f, mesh=mesh, in_specs=specs, out_specs=[P(None, None, "data"), P(None, "data"), P(None, "data")]
            )
        ),
    }
    for name, call in calls.items():
        for actual, wanted in zip(call(x, *weights), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_export_with_a_symbolic_batch_and_length() -> None:
    inputs = operands("GRU", states=False)
    inputs[0] = np.zeros((0, 0, 4), np.float32)
    model = one_node("GRU", inputs, {"hidden_size": HIDDEN}, outputs=2, opset=22, known=(1, 2, 3))
    for dim in model.graph.input[0].type.tensor_type.shape.dim[:2]:
        dim.ClearField("dim_value")
    model = transmuter.load(model)
    t, b = export.symbolic_shape("t, b")
    f = jax.jit(lambda x: model.apply(model.params, {"x0": x})["y0"])
    call = export.export(f)(jax.ShapeDtypeStruct((t, b, 4), jnp.float32)).call
    for length, batch in ((1, 2), (5, 3)):
        x = operands("GRU", length=length, batch=batch)[0]
        (expected, _) = ort_node("GRU", [x, *inputs[1:]], {"hidden_size": HIDDEN}, outputs=2, opset=22)
        np.testing.assert_allclose(call(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("per_channel", [False, True])
def test_dynamic_quantize_lstm(dtype: Any, per_channel: bool) -> None:
    draw = np.random.default_rng(0)
    x, _, _, bias, _, h, c, peepholes = operands("LSTM", directions=2, batch=1, peepholes=True)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max

    def weight(rows: int) -> list[np.ndarray]:
        shape = (2, 4 * HIDDEN) if per_channel else (2,)
        zero_points = np.full(shape, 121 if dtype is np.uint8 else 0)
        scales = draw.uniform(0.003, 0.006, shape)
        ints = draw.integers(low // 2, high, (2, rows, 4 * HIDDEN))
        return [ints.astype(dtype), scales.astype(np.float32), zero_points.astype(dtype)]

    (w, w_scale, w_zero), (r, r_scale, r_zero) = weight(4), weight(HIDDEN)
    inputs = [x, w, r, bias, None, h, c, peepholes, w_scale, w_zero, r_scale, r_zero]
    attributes = {"direction": "bidirectional", "hidden_size": HIDDEN}
    kwargs: dict[str, Any] = {"outputs": 3, "domain": "com.microsoft", "output_types": [1] * 3, "opset": 17}
    expected = ort_node("DynamicQuantizeLSTM", inputs, attributes, known=(1, 2, 8, 9, 10, 11), **kwargs)
    for actual, wanted in zip(run_node("DynamicQuantizeLSTM", inputs, attributes, **kwargs), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)

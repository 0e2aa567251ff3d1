"""Operators of normalization.py: ONNX Runtime, old versions, training, gradients, half types, x64 off."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from onenode import one_node, ort_node, reference_node, run_node
from onnx import helper

import transmuter
from transmuter.lowering import normalization

RNG = np.random.default_rng(0)
CONTRIB = {"domain": "com.microsoft"}
FLOAT = 1


def draw(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


X = draw(2, 6, 3, 4)
C, S = draw(6), np.abs(draw(6)) + 0.5
CASES = {
    "instance": ("InstanceNormalization", [X, S, C], {"epsilon": 1e-3}, {}),
    "instance 6": ("InstanceNormalization", [X[..., 0], S, C], {}, {"opset": 6}),
    "layer": ("LayerNormalization", [X, draw(4), draw(4)], {}, {"outputs": 3}),
    "layer from axis 1": ("LayerNormalization", [X, draw(6, 3, 4)], {"axis": 1, "epsilon": 1e-2}, {"outputs": 3}),
    "layer in float64": (
        "LayerNormalization",
        [draw(2, 3, dtype=np.float64), draw(3, dtype=np.float64)],
        {},
        {"outputs": 3, "output_types": [11, 1, 1]},
    ),
    "group 18": ("GroupNormalization", [X, S[:3], C[:3]], {"num_groups": 3}, {"opset": 18}),
    "group 21": ("GroupNormalization", [X, S, C], {"num_groups": 2}, {"opset": 21}),
    "rms": ("RMSNormalization", [X, draw(4)], {}, {"opset": 23}),
    "rms from axis 2": ("RMSNormalization", [X, draw(3, 4)], {"axis": -2}, {"opset": 23}),
    "simplified layer": ("SimplifiedLayerNormalization", [X, draw(4)], {"epsilon": 1e-3}, {"outputs": 2}),
    "batch": ("BatchNormalization", [X, S, C, C[::-1].copy(), S[::-1].copy()], {}, {}),
    "batch of a vector": ("BatchNormalization", [draw(5), S[:1], C[:1], C[1:2], S[1:2]], {}, {}),
    "batch 7": ("BatchNormalization", [X, S, C, C, S], {"epsilon": 1e-2}, {"opset": 7}),
    "batch 9": ("BatchNormalization", [X[:, :, 0, 0], S, C, C, S], {}, {"opset": 9}),
    "batch trains": (
        "BatchNormalization",
        [X, S, C, C, S],
        {"training_mode": 1, "momentum": 0.7},
        {"opset": 15, "outputs": 3},
    ),
    "lrn": ("LRN", [X], {"size": 3, "alpha": 0.1, "beta": 0.5, "bias": 2.0}, {}),
    "lrn wider than the channels": ("LRN", [X], {"size": 9, "alpha": 0.1}, {}),
    "lp 1": ("LpNormalization", [X], {"p": 1, "axis": 2}, {"opset": 22}),
    "lp of zero": ("LpNormalization", [X * np.arange(2, dtype=np.float32)[:, None, None, None]], {}, {"opset": 1}),
    "mvn": ("MeanVarianceNormalization", [X], {}, {}),
    "mvn of one axis": ("MeanVarianceNormalization", [X], {"axes": [1]}, {"opset": 9}),
    "skip layer": (
        "SkipLayerNormalization",
        [draw(2, 3, 8), draw(2, 3, 8), draw(8), draw(8), draw(8)],
        {},
        {"outputs": 4, **CONTRIB},
    ),
    "skip layer, one skip for all": ("SkipLayerNormalization", [draw(2, 3, 8), draw(3, 8), draw(8)], {}, CONTRIB),
    "skip simplified": (
        "SkipSimplifiedLayerNormalization",
        [draw(2, 3, 8), draw(2, 3, 8), draw(8), draw(8)],
        {"epsilon": 1e-4},
        CONTRIB,
    ),
    "embed": (
        "EmbedLayerNormalization",
        [
            np.array([[1, 2, 0], [4, 3, 3]], np.int32),
            np.array([[0, 1, 0], [1, 1, 0]], np.int32),
            draw(5, 8),
            draw(9, 8),
            draw(2, 8),
            draw(8),
            draw(8),
            np.array([[1, 1, 0], [1, 0, 0]], np.int32),
        ],
        {},
        {"outputs": 3, "output_types": [FLOAT, 6, FLOAT], **CONTRIB},
    ),
    "embed at positions": (
        "EmbedLayerNormalization",
        [
            np.array([[1, 2, 0]], np.int32),
            None,
            draw(5, 8),
            draw(9, 8),
            None,
            draw(8),
            draw(8),
            None,
            np.array([[8, 0, 4]], np.int32),
        ],
        {"epsilon": 1e-5},
        {"outputs": 2, "output_types": [FLOAT, 6], **CONTRIB},
    ),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["run", "compile"])
@pytest.mark.parametrize("name", CASES)
def test_as_onnx_runtime(name: str, compiled: bool) -> None:
    op, inputs, attributes, kwargs = CASES[name]
    expected = ort_node(op, inputs, attributes, **kwargs)
    with jax.numpy_dtype_promotion("strict"):
        actual = run_node(op, inputs, attributes, compiled=compiled, **kwargs)
    for i, (y, wanted) in enumerate(zip(actual, expected, strict=True)):
        if name == "skip layer" and i in (1, 2):
            continue  # ONNX Runtime leaves them unset on the CPU
        assert_equal(y, wanted, rtol=1e-4, atol=1e-5, where=f"output {i}")


def test_layer_norm_of_a_far_mean() -> None:
    """The squares of what is left are summed, not the difference of two large sums."""
    x = draw(5, 64) + np.float32(3000)
    centered = (x - x.mean(-1, keepdims=True, dtype=np.float64)).astype(np.float64)
    wanted = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(run_node("LayerNormalization", [x, np.ones(64, np.float32)])[0], wanted, atol=1e-3)


def test_lrn_of_an_even_size_reaches_further_up() -> None:
    window = [(X[:, max(c - 1, 0) : c + 3] ** 2).sum(1) for c in range(6)]
    wanted = X / (2 + 0.1 / 4 * np.stack(window, 1)) ** 0.5
    (y,) = run_node("LRN", [X], {"size": 4, "alpha": 0.1, "beta": 0.5, "bias": 2.0})
    np.testing.assert_allclose(y, wanted, rtol=1e-5)


SHAPES = [(2, 6, 3), (1, 6, 1), (0, 6, 2), (2, 6, 3, 4)]
FEATURES = st.sampled_from([*SHAPES, (2, 6), (2, 6, 0)])
FILLINGS = st.sampled_from([0.0, 1.0, 1e3])
"""What normal numbers are multiplied by: none, some or a large variance."""


@settings(max_examples=20, deadline=None)
@given(
    shape=FEATURES,
    filling=FILLINGS,
    opset=st.sampled_from([7, 9, 14, 15]),
    momentum=st.sampled_from([None, 0.0, 0.7, 1.0]),
    epsilon=st.sampled_from([1e-5, 0.1]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_batch_norm_as_onnx_runtime(shape, filling, opset, momentum, epsilon, dtype) -> None:
    """In training where there is a `momentum`, if ONNX Runtime trains in that version."""
    x = (filling * draw(*shape) + 1).astype(dtype)
    operands = [x, *(draw(6, dtype=dtype) for _ in range(3)), np.abs(draw(6, dtype=dtype))]
    attributes, outputs = {"epsilon": epsilon}, 1
    if opset >= 14 and momentum is not None and x.size:
        attributes, outputs = attributes | {"momentum": momentum, "training_mode": 1}, 3
    expected = ort_node("BatchNormalization", operands, attributes, opset=opset, outputs=outputs)
    actual = run_node("BatchNormalization", operands, attributes, opset=opset, outputs=outputs)
    assert_equal(actual, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(
    op=st.sampled_from(["LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"]),
    shape=FEATURES,
    filling=FILLINGS,
    from_axis=st.integers(-4, 3),
    bias=st.booleans(),
    epsilon=st.sampled_from([1e-5, 0.1]),
    dtype=st.sampled_from([np.float32, np.float64, np.float16]),
)
def test_layers_of_any_shape(op, shape, filling, from_axis, bias, epsilon, dtype) -> None:
    axis = max(-len(shape), min(from_axis, len(shape) - 1))
    size = shape[axis % len(shape) :]
    operands = [(filling * draw(*shape)).astype(dtype), draw(*size, dtype=dtype), draw(*size, dtype=dtype)]
    operands = operands if bias and op == "LayerNormalization" else operands[:2]
    outputs = {"LayerNormalization": 3, "RMSNormalization": 1, "SimplifiedLayerNormalization": 2}[op]
    types = [helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), FLOAT, FLOAT][:outputs]
    args = op, operands, {"axis": axis, "epsilon": epsilon}
    actual = run_node(*args, outputs=outputs, output_types=types)
    if np.prod(size) == 0:  # which ONNX Runtime refuses
        assert actual[0].shape == shape
        return
    expected = ort_node(*args, outputs=outputs, output_types=types)
    tolerance = 1e-2 if dtype == np.float16 else 1e-4
    assert_equal(actual, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=10, deadline=None)
@given(
    op=st.sampled_from(["LayerNormalization", "RMSNormalization"]), shape=st.sampled_from([(), (1,), (6, 1), (1, 3)])
)
def test_scales_broadcast(op: str, shape: tuple[int, ...]) -> None:
    x, scale = draw(2, 6, 3), np.asarray(draw(*shape))
    expected = reference_node(op, [x, scale], {"axis": 1})
    assert_equal(run_node(op, [x, scale], {"axis": 1}), expected[:1], rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from([*SHAPES, (2, 6, 0)]),
    filling=FILLINGS,
    opset=st.sampled_from([6, 18, 21, 22]),
    groups=st.sampled_from([1, 2, 6]),
    epsilon=st.sampled_from([1e-5, 0.1]),
    dtype=st.sampled_from([np.float32, np.float64, np.float16]),
)
def test_groups_as_onnx_runtime(shape, filling, opset, groups, epsilon, dtype) -> None:
    """GroupNormalization in the reference evaluator, which cannot reshape an empty array. (Large numbers cancel each
    other in ONNX Runtime's InstanceNormalization.)"""
    instances = opset in (6, 22)
    if instances:
        dtype, filling = np.float32, min(filling, 1.0)
    x, channels = (filling * draw(*shape)).astype(dtype), groups if opset == 18 else 6
    args = [x, draw(channels, dtype=dtype), draw(channels, dtype=dtype)], {"epsilon": epsilon}
    if instances:
        op, node = "InstanceNormalization", ort_node
    else:
        op, node = "GroupNormalization", reference_node
        args[1]["num_groups"] = groups
    (actual,) = run_node(op, *args, opset=opset)
    if x.size == 0 and not instances:
        assert actual.shape == shape
    else:
        tolerance = 2e-2 if dtype == np.float16 else 1e-4
        assert_equal(actual, node(op, *args, opset=opset)[0], rtol=tolerance, atol=tolerance)


@settings(max_examples=20, deadline=None)
@given(
    op=st.sampled_from(["LRN", "LpNormalization", "MeanVarianceNormalization"]),
    shape=st.sampled_from([(2, 6, 3, 4), (1, 6, 1, 1), (0, 6, 2, 1)]),
    filling=FILLINGS,
    size=st.sampled_from([1, 3, 5, 13]),
    exponent=st.sampled_from([0.5, 0.75, 2.0]),
    bias=st.sampled_from([0.5, 1.0]),
    axis=st.integers(-4, 3),
    p=st.sampled_from([1, 2]),
    axes=st.sampled_from([None, [1], [-1], [0, 2, 3], [0, 1, 2, 3]]),
)
def test_norms_without_parameters_as_onnx_runtime(op, shape, filling, size, exponent, bias, axis, p, axes) -> None:
    """ONNX Runtime has NaN, not 0, for what has no variance."""
    attributes = {
        "LRN": {"size": size, "alpha": 0.1, "beta": exponent, "bias": bias},
        "LpNormalization": {"axis": axis, "p": p},
        "MeanVarianceNormalization": {} if axes is None else {"axes": axes},
    }[op]
    x = filling * draw(*shape)
    expected = ort_node(op, [x], attributes, opset=13)
    if op == "MeanVarianceNormalization":
        expected = [np.nan_to_num(y) for y in expected]
    assert_equal(run_node(op, [x], attributes, opset=13), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("opset", "attributes"),
    [(1, {"consumed_inputs": [0, 0, 0, 1, 1]}), (6, {}), (7, {}), (9, {}), (14, {"training_mode": 1})],
)
def test_batch_norm_trains(opset: int, attributes: dict) -> None:
    """With five outputs below version 14, with three from there on."""
    outputs = 3 if opset >= 14 else 5
    mean, var = C.astype(np.float64), S.astype(np.float64)
    x = X.astype(np.float64)
    of_batch = x.mean((0, 2, 3)), x.var((0, 2, 3))
    y, *statistics = run_node(
        "BatchNormalization", [X, S, C, C, S], {"momentum": 0.75, **attributes}, outputs=outputs, opset=opset
    )
    m, v = (s[:, None, None] for s in of_batch)
    np.testing.assert_allclose(y, (x - m) / np.sqrt(v + 1e-5) * S[:, None, None] + C[:, None, None], atol=1e-5)
    wanted = [mean * 0.75 + of_batch[0] * 0.25, var * 0.75 + of_batch[1] * 0.25, *of_batch]
    for got, expected in zip(statistics, wanted, strict=False):
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("opset", [6, 7])
def test_batch_norm_per_feature(opset: int) -> None:
    """`spatial=0`: every feature has statistics of its own."""
    scale, bias, mean, var = draw(6, 3, 4), draw(6, 3, 4), draw(6, 3, 4), np.abs(draw(6, 3, 4))
    (y,) = run_node("BatchNormalization", [X, scale, bias, mean, var], {"spatial": 0}, opset=opset)
    np.testing.assert_allclose(y, (X - mean) / np.sqrt(var + 1e-5) * scale + bias, rtol=1e-4, atol=1e-4)
    *_, batch_mean, batch_var = run_node(
        "BatchNormalization", [X, scale, bias, mean, var], {"spatial": 0}, opset=opset, outputs=5
    )
    np.testing.assert_allclose(batch_mean, X.mean(0), atol=1e-6)
    np.testing.assert_allclose(batch_var, X.var(0), atol=1e-6)


@pytest.mark.parametrize("channels_last", [0, 1])
@pytest.mark.parametrize("skip_rank", [0, 2, 4])
def test_group_norm_of_diffusion_models(channels_last: int, skip_rank: int) -> None:
    x, gamma, beta, bias = draw(2, 6, 3, 4), draw(6), draw(6), draw(6)
    skip = {0: None, 2: draw(2, 6), 4: draw(2, 6, 3, 4)}[skip_rank]
    total = x if skip is None else x + skip.reshape(2, 6, *skip.shape[2:] or (1, 1)) + bias[:, None, None]
    groups = total.reshape(2, 3, -1)
    normalized = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    y = normalized.reshape(x.shape) * gamma[:, None, None] + beta[:, None, None]
    wanted = [y / (1 + np.exp(-y)), total]
    if channels_last:
        wanted = [np.moveaxis(w, 1, -1) for w in wanted]
        x = np.moveaxis(x, 1, -1)
        skip = np.moveaxis(skip, 1, -1) if skip_rank == 4 else skip
    attributes = {"groups": 3, "activation": 1, "channels_last": channels_last}
    if skip is None:
        actual = run_node("GroupNorm", [x, gamma, beta], attributes, **CONTRIB)
    else:
        if skip_rank == 2 and not channels_last:
            skip = skip[:, :, None, None]
        actual = run_node("SkipGroupNorm", [x, gamma, beta, skip, bias], attributes, outputs=2, **CONTRIB)
    for got, expected in zip(actual, wanted, strict=False):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_contrib_without_a_cpu_kernel() -> None:
    x, gate, scale = draw(2, 3, 8), draw(2, 3, 8), draw(4)
    unit = x.reshape(2, 3, 2, 4) / np.sqrt((x.reshape(2, 3, 2, 4) ** 2).mean(-1, keepdims=True) + 1e-5)
    (y,) = run_node("GatedRMSNorm", [x, scale, gate], {}, **CONTRIB)
    np.testing.assert_allclose(y, (unit * scale).reshape(x.shape) * gate / (1 + np.exp(-gate)), rtol=1e-4, atol=1e-5)
    for scale in (draw(8), draw(2, 4), draw(4)):
        (y,) = run_node("BranchwiseRMSNorm", [x, scale], {"num_branches": 2}, **CONTRIB)
        np.testing.assert_allclose(y, (unit * scale.reshape(-1, 4)).reshape(x.shape), rtol=1e-4, atol=1e-5)
    bias = draw(8)
    np.testing.assert_allclose(run_node("BiasAdd", [x, bias, gate], **CONTRIB)[0], x + bias + gate, rtol=1e-6)
    (y,) = run_node("BiasSplitGelu", [x, bias], **CONTRIB)
    left, right = np.split(x + bias, 2, axis=-1)
    np.testing.assert_allclose(y, left * np.asarray(jax.nn.gelu(right, approximate=False)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_statistics_of_half_types_are_float32(dtype: type) -> None:
    """Squares of 300 overflow float16, and sums of 4096 ones stall in bfloat16."""
    x = np.concatenate([np.full(2048, 300), np.full(2048, 302)]).astype(dtype)[None]
    scale = np.ones(4096, dtype)
    y, mean, factor = run_node(
        "LayerNormalization", [x, scale], outputs=3, output_types=[10 if dtype == np.float16 else 16, 1, 1]
    )
    assert (y.dtype, mean.dtype, factor.dtype) == (np.dtype(dtype), np.float32, np.float32)
    np.testing.assert_allclose(y.astype(np.float32), np.repeat([[-1.0, 1.0]], 2048, axis=1), rtol=1e-2)
    for op, inputs, attributes in [
        ("RMSNormalization", [x, scale], {}),
        ("LpNormalization", [x], {}),
        ("InstanceNormalization", [x[None], scale[:1], scale[:1]], {}),
        ("GroupNormalization", [x[None], scale[:1], scale[:1]], {"num_groups": 1}),
        (
            "LRN",
            [
                x[None].swapaxes(1, 2),
            ],
            {"size": 3},
        ),
        ("BatchNormalization", [x[None], *[scale[:1]] * 4], {}),
    ]:
        (y,) = run_node(op, inputs, attributes)
        assert y.dtype == dtype
        assert np.isfinite(y.astype(np.float32)).all()


def test_simplified_layer_norm_takes_the_dtype_of_its_scale() -> None:
    x, scale = draw(2, 8).astype(np.float16), draw(8)
    (y,) = run_node("SimplifiedLayerNormalization", [x, scale], output_types=[FLOAT])
    assert y.dtype == np.float32


GRADIENTS = {
    "layer": lambda x, s: normalization.LayerNormalization(x, s, s, axis=-1, epsilon=1e-5, stash_type=11),
    "rms": lambda x, s: normalization.RMSNormalization(x, s, axis=-1, epsilon=1e-5, stash_type=11),
    "skip layer": lambda x, s: normalization.SkipLayerNormalization(x, x, s, s, s),
    "skip simplified": lambda x, s: normalization.SkipSimplifiedLayerNormalization(x, x, s, s)[::3],
    "group": lambda x, s: normalization.GroupNormalization_21(x, s[:4], s[:4], num_groups=2, epsilon=1e-5),
    "instance": lambda x, s: normalization.InstanceNormalization(x, s[:4], s[:4], epsilon=1e-5),
    "batch": lambda x, s: normalization.BatchNormalization_14(
        x, s[:4], s[:4], s[:4], s[:4] ** 2 + 0.5, epsilon=1e-5, momentum=0.9, training_mode=0
    ),
    "batch trains": lambda x, s: normalization.BatchNormalization_14(
        x, s[:4], s[:4], s[:4], s[:4] ** 2 + 0.5, epsilon=1e-5, momentum=0.9, training_mode=1
    ),
    "lrn": lambda x, s: normalization.LRN(x, size=3, alpha=0.1, beta=0.75, bias=1.0),
    "lp 1": lambda x, s: normalization.LpNormalization(x, axis=-1, p=1),
    "lp 2": lambda x, s: normalization.LpNormalization(x, axis=-1, p=2),
    "mvn": lambda x, s: normalization.MeanVarianceNormalization(x, axes=(0, 2)),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    function = GRADIENTS[name]
    with jax.enable_x64(True):
        x, s = jnp.asarray(draw(2, 4, 5, dtype=np.float64)), jnp.asarray(draw(5, dtype=np.float64))
        check_grads(function, (x, s), 1, ["rev"], rtol=1e-4, atol=1e-4)
        for benign in (jnp.zeros_like(x), jnp.ones_like(x)):
            value, vjp = jax.vjp(function, benign, s)
            for gradient in vjp(jax.tree.map(jnp.ones_like, value)):
                assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("x64", [False, True])
def test_apply_under_jit(x64: bool) -> None:
    """float64 operands where x64 is off, too."""
    x, scale = draw(3, 4, dtype=np.float64), draw(4, dtype=np.float64)
    model = transmuter.load(one_node("LayerNormalization", [x, scale], outputs=3, output_types=[11, 1, 1]))
    wanted = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        feeds = {"x0": jnp.asarray(x), "x1": jnp.asarray(scale)}
        y, mean, _ = jax.jit(lambda feeds: model.apply(model.params, feeds))(feeds).values()
    assert (y.dtype, mean.dtype) == (np.float64 if x64 else np.float32, np.float32)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)


def test_groups_have_to_divide_the_channels() -> None:
    with pytest.raises(transmuter.TransmuterError, match="6 channels do not divide into 4 groups"):
        run_node("GroupNormalization", [X, S, C], {"num_groups": 4})

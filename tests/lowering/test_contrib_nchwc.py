"""Files that ONNX Runtime has saved after optimising them: the domain com.microsoft.nchwc, and fused operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from building import info, model_of
from comparison import assert_equal
from conftest import MATERIAL
from onnx import helper, numpy_helper
from test_models import load_recorded

import transmuter
from transmuter.lowering import contrib_nchwc

NCHWC = "com.microsoft.nchwc"


class Network:
    """A convolutional network with drawn weights, layer by layer."""

    def __init__(self, *shape: int) -> None:
        self.rng, self.nodes, self.weights = np.random.default_rng(0), [], []
        self.inputs = [info("x", ("n", *shape))]

    def constant(self, value: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value, np.float32), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [f"t{len(self.nodes)}"], **attributes))
        return self.nodes[-1].output[0]

    def conv(self, x: str, outputs: int, inputs: int, size: int = 3, *, bias: bool = True, **attributes: Any) -> str:
        shape = (outputs, inputs, size, size)
        weight = self.constant(self.rng.normal(size=shape) / np.sqrt(inputs * size * size))
        biases = [self.constant(self.rng.normal(size=outputs))] if bias else []
        return self.add("Conv", x, weight, *biases, pads=[size // 2] * 4, **attributes)

    def model(self, *outputs: str) -> onnx.ModelProto:
        return model_of(self.nodes, self.inputs, [info(y, None) for y in outputs], self.weights)


def residual() -> onnx.ModelProto:
    """Convolutions of every kind, with fused activations and a fused sum."""
    net = Network(3, 13, 11)
    x = net.add("Relu", net.conv("x", 32, 3))
    x = net.add("Clip", net.conv(x, 32, 1, group=32, strides=[2, 2]), net.constant(0), net.constant(6))
    x = skip = net.add("MaxPool", net.conv(x, 64, 32, 1), kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    x = net.add("Relu", net.add("Add", net.conv(x, 64, 64), skip))
    x = net.add("LeakyRelu", net.conv(x, 64, 32, group=2, dilations=[1, 1]), alpha=0.1)
    x = net.add("Sigmoid", net.conv(x, 32, 64, 1, bias=False))
    return net.model(net.add("GlobalAveragePool", x), net.add("GlobalMaxPool", x))


def odd_channels() -> onnx.ModelProto:
    """Channels that do not fill blocks, into a convolution, out of one, and from one to the next."""
    net = Network(20, 13, 11)
    x = net.add("Tanh", net.conv("x", 24, 20))
    y = net.conv(x, 20, 24, dilations=[2, 1])
    z = net.add("Transpose", net.conv(x, 12, 24, 1), perm=[0, 2, 3, 1])
    return net.model(net.add("HardSigmoid", y, alpha=0.3), z)


def few_channels() -> onnx.ModelProto:
    net = Network(12, 13, 11)
    x = net.add("Relu", net.conv("x", 12, 12))
    return net.model(net.conv(net.conv(x, 48, 12), 48, 1, group=48))


def depthwise() -> onnx.ModelProto:
    """Channels of a pool and of a depthwise convolution that do not fill blocks."""
    net = Network(20, 13, 11)
    x = net.add("MaxPool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    y = net.conv(net.add("Relu", net.conv(x, 20, 1, group=20)), 20, 20)
    return net.model(net.conv(net.add("Add", x, y), 20, 20, 1), net.conv(y, 40, 10, group=2))


def channels_last() -> onnx.ModelProto:
    net = Network(13, 11, 20)
    x = net.conv(net.add("Transpose", "x", perm=[0, 3, 1, 2]), 28, 20)
    return net.model(net.add("Transpose", x, perm=[0, 2, 3, 1]))


def pools() -> onnx.ModelProto:
    """Pools of every kind, what lies between two layouts, and images that grow."""
    net = Network(32, 13, 11)
    x = net.conv("x", 32, 32)
    a = net.add("AveragePool", x, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1], count_include_pad=1)
    b = net.add("AveragePool", x, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1], ceil_mode=1)
    c = net.add("MaxPool", net.add("Concat", a, b, axis=1), kernel_shape=[2, 2], dilations=[2, 1], auto_pad="VALID")
    nearest = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    scales = net.constant([1, 1, 2, 3])
    grown = [net.add("Resize", c, "", scales, **nearest)]
    for transformation in ("half_pixel", "align_corners", "asymmetric"):
        mode = {"mode": "linear", "coordinate_transformation_mode": transformation}
        grown.append(net.add("Resize", c, "", scales, **mode))
    return net.model(*(net.conv(y, 16, 64, 1) for y in grown))


def session(model: onnx.ModelProto | Path, level: str, save_to: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.log_severity_level = 4
    if save_to:
        options.optimized_model_filepath = str(save_to)
    given = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def saved(model: onnx.ModelProto | Path, path: Path, level: str = "ORT_ENABLE_ALL") -> onnx.ModelProto:
    """What ONNX Runtime writes after its optimisations, by default all of them."""
    session(model, level, path)
    return onnx.load(path)


def ort(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    return session(model, "ORT_DISABLE_ALL").run(None, inputs)


NETWORKS = {
    residual: {"Conv", "MaxPool", "GlobalAveragePool", "GlobalMaxPool", "ReorderOutput"},
    odd_channels: {"Conv", "ReorderInput", "ReorderOutput"},
    few_channels: {"Conv", "ReorderOutput"},
    depthwise: {"Conv", "ReorderInput", "ReorderOutput"},
    channels_last: {"Conv", "ReorderInput", "ReorderOutput"},
    pools: {"Conv", "MaxPool", "AveragePool", "Upsample", "ReorderInput", "ReorderOutput"},
}


@pytest.mark.parametrize("network", NETWORKS)
def test_a_file_saved_after_optimisation_computes_the_same(network: Any, tmp_path: Path) -> None:
    given = network()
    optimised = saved(given, tmp_path / "optimised.onnx")
    blocked = {node.op_type for node in optimised.graph.node if node.domain == NCHWC}
    if not blocked:
        pytest.skip("ONNX Runtime does not block channels on this CPU")
    assert blocked >= NETWORKS[network]
    shape = [d.dim_value for d in given.graph.input[0].type.tensor_type.shape.dim[1:]]
    x = np.random.default_rng(1).normal(size=(2, *shape)).astype(np.float32)
    with jax.numpy_dtype_promotion("strict"):
        actual = transmuter.compile(transmuter.load(optimised), {"x": x})({"x": x})
    assert_equal([np.asarray(y) for y in actual.values()], ort(optimised, {"x": x}), rtol=1e-5, atol=1e-5)
    assert_equal([np.asarray(y) for y in actual.values()], ort(given, {"x": x}), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not (MATERIAL / "zoo" / "zoo.json").exists(), reason="no recorded models")
@pytest.mark.parametrize(
    ("name", "level", "operators"),
    [
        ("bert-embeddings/onnx/model_q4.onnx", "ORT_ENABLE_BASIC", {"MatMulNBits"}),
        ("bert-embeddings/onnx/model_quantized.onnx", "ORT_ENABLE_EXTENDED", {"DynamicQuantizeMatMul", "Gelu"}),
        ("bert-optimized/onnx/model_O3.onnx", "ORT_ENABLE_ALL", {"Attention", "FastGelu", "SkipLayerNormalization"}),
        ("resnet/onnx/model.onnx", "ORT_ENABLE_ALL", {"Conv", "MaxPool", "GlobalAveragePool"}),
        ("resnet-static-int8/onnx/model_qdq.onnx", "ORT_ENABLE_ALL", {"QLinearConv", "QLinearAdd", "NhwcMaxPool"}),
    ],
)
def test_recorded_models_saved_after_optimisation(name: str, level: str, operators: set[str], tmp_path: Path) -> None:
    recorded = load_recorded(f"zoo/{name}")
    optimised = saved(recorded.path, tmp_path / "optimised.onnx", level)
    assert operators <= {node.op_type for node in optimised.graph.node if node.domain}
    inputs, _ = recorded.cases[0]
    actual = transmuter.run(transmuter.load(optimised), inputs)
    assert_equal([np.asarray(y) for y in actual.values()], ort(optimised, inputs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "group", "block", "inputs_too"),
    [
        ((24, 16, 2, 1), 1, 8, True),  # 24 outputs are no whole blocks of 16
        ((24, 5, 2, 1), 1, 8, False),  # 5 channels are less than a block
        ((32, 24, 1, 1), 1, 8, True),
        ((16, 12, 1, 1), 1, 16, False),  # 12 channels would have been filled up to 16 for blocks of 8
        ((24, 1, 3, 3), 24, 8, False),
        ((48, 8, 1, 1), 2, 8, True),
    ],
)
def test_shapes_tell_how_a_weight_is_blocked(shape: tuple[int, ...], group: int, block: int, inputs_too: bool) -> None:
    weight = np.random.default_rng(0).normal(size=shape)
    rows = block if inputs_too else 1
    blocked = [
        weight[o : o + block, i : i + rows, h, w].T.reshape(-1)
        for o in range(0, shape[0], block)
        for i in range(0, shape[1], rows)
        for h in range(shape[2])
        for w in range(shape[3])
    ]
    with jax.enable_x64(True):
        restored = contrib_nchwc._in_order(np.concatenate(blocked).reshape(shape), group)
    np.testing.assert_array_equal(restored, weight)


def test_a_weight_that_fits_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="neither 8 nor 16"):
        contrib_nchwc._in_order(np.zeros((20, 8, 2, 1)), 1)


def test_more_channels_than_a_block_are_not_filled_up() -> None:
    with pytest.raises(ValueError, match="32 channels are not 8"):
        contrib_nchwc.ReorderOutput(np.zeros((1, 32, 2, 2), np.float32), channels=8)

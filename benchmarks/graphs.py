"""ONNX graphs of common architectures with random weights, written node by node as exporters write them.

Nothing here needs PyTorch or a download. Weights are seeded, and scaled so that activations keep a size around one:
neither denormal nor infinite numbers distort a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dim = int | str
"""A dimension of a reshape: a number, or the name of a scalar value that the graph computes."""


class Graph:
    """Builds a graph: every method adds nodes and returns the name of their result."""

    def __init__(self, name: str, *, opset: int, seed: int):
        self._name, self._opset = name, opset
        # NumPy has frozen the stream of RandomState, so results recorded for a seed stay valid.
        self._random = np.random.RandomState(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._weights: list[onnx.TensorProto] = []

    # ---- values

    def input(self, name: str, element: int, shape: Sequence[Dim]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, element, shape))
        return name

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(value, dtype)))

    def weight(self, name: str, array: np.ndarray) -> str:
        self._weights.append(numpy_helper.from_array(array, name))
        return name

    def normal(self, name: str, shape: Sequence[int], deviation: float, mean: float = 0.0) -> str:
        """A weight drawn from a normal distribution."""
        drawn = self._random.standard_normal(shape) * deviation + mean
        return self.weight(name, drawn.astype(np.float32))

    def op(self, operator: str, *operands: str, outputs: int = 1, **attributes: Any) -> Any:
        """A node; its result's name, or a list of names where there are several `outputs`."""
        name = f"/{operator}_{len(self._nodes)}"
        results = [f"{name}_output_{i}" for i in range(outputs)]
        self._nodes.append(helper.make_node(operator, operands, results, name=name, **attributes))
        return results[0] if outputs == 1 else results

    def model(self, outputs: dict[str, tuple[str, Sequence[Dim]]]) -> onnx.ModelProto:
        """The model; `outputs` maps names to the values that they are, and their shapes."""
        for name, (value, _) in outputs.items():
            self._nodes.append(helper.make_node("Identity", [value], [name], name=f"/{name}"))
        infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, (_, shape) in outputs.items()]
        graph = helper.make_graph(self._nodes, self._name, self._inputs, infos, self._weights)
        opsets = [helper.make_opsetid("", self._opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)

    # ---- shapes

    def dim(self, x: str, axis: int) -> str:
        """A dimension of `x`, which the graph computes."""
        return self.op("Gather", self.op("Shape", x), self.constant(axis, np.int64), axis=0)

    def shape(self, dims: Sequence[Dim]) -> str:
        """A shape vector of fixed and computed dimensions."""
        axes = self.constant([0], np.int64)
        parts = [self.constant([d], np.int64) if isinstance(d, int) else self.op("Unsqueeze", d, axes) for d in dims]
        return self.op("Concat", *parts, axis=0)

    def reshape(self, x: str, dims: Sequence[Dim]) -> str:
        return self.op("Reshape", x, self.shape(dims))

    # ---- layers

    def linear(self, x: str, name: str, features_in: int, features_out: int) -> str:
        """A product with a weight of shape [in, out], which is how exporters write a linear layer of a 3-d operand."""
        weight = self.normal(f"{name}.weight", (features_in, features_out), features_in**-0.5)
        bias = self.normal(f"{name}.bias", (features_out,), 0.1)
        return self.op("Add", bias, self.op("MatMul", x, weight))

    def classifier(self, x: str, name: str, features: int, classes: int) -> str:
        weight = self.normal(f"{name}.weight", (classes, features), features**-0.5)
        return self.op("Gemm", x, weight, self.normal(f"{name}.bias", (classes,), 0.1), transB=1)

    def embedding(self, ids: str, name: str, rows: int, features: int, deviation: float) -> str:
        return self.op("Gather", self.normal(f"{name}.weight", (rows, features), deviation), ids)

    def layer_norm(self, x: str, name: str, features: int, epsilon: float) -> str:
        """LayerNormalization; by parts before opset 17, which has no such operator."""
        weight = self.normal(f"{name}.weight", (features,), 0.1, mean=1.0)
        bias = self.normal(f"{name}.bias", (features,), 0.1)
        if self._opset >= 17:
            return self.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=epsilon)
        centered = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
        variance = self.op("ReduceMean", self.op("Pow", centered, self.constant(2.0)), axes=[-1])
        deviation = self.op("Sqrt", self.op("Add", variance, self.constant(epsilon)))
        return self.op("Add", self.op("Mul", self.op("Div", centered, deviation), weight), bias)

    def gelu(self, x: str) -> str:
        error = self.op("Erf", self.op("Div", x, self.constant(math.sqrt(2))))
        product = self.op("Mul", x, self.op("Add", error, self.constant(1.0)))
        return self.op("Mul", product, self.constant(0.5))

    def tanh_gelu(self, x: str) -> str:
        cubed = self.op("Mul", self.op("Pow", x, self.constant(3.0)), self.constant(0.044715))
        inner = self.op("Mul", self.op("Add", x, cubed), self.constant(math.sqrt(2 / math.pi)))
        return self.op(
            "Mul",
            self.op("Mul", x, self.constant(0.5)),
            self.op("Add", self.op("Tanh", inner), self.constant(1.0)),
        )

    def attention(self, x: str, name: str, hidden: int, heads: int, mask: str | None = None) -> str:
        """Self-attention of `x` [batch, sequence, hidden], up to the joined heads; `mask` is added to the scores."""
        batch, sequence, size = self.dim(x, 0), self.dim(x, 1), hidden // heads

        def split(role: str, order: Sequence[int]) -> str:
            projected = self.linear(x, f"{name}.{role}", hidden, hidden)
            return self.op("Transpose", self.reshape(projected, (batch, sequence, heads, size)), perm=order)

        query, key, value = split("query", (0, 2, 1, 3)), split("key", (0, 2, 3, 1)), split("value", (0, 2, 1, 3))
        scores = self.op("Div", self.op("MatMul", query, key), self.constant(math.sqrt(size)))
        if mask is not None:
            scores = self.op("Add", scores, mask)
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        return self.reshape(self.op("Transpose", mixed, perm=(0, 2, 1, 3)), (batch, sequence, hidden))

    def conv(
        self,
        x: str,
        name: str,
        channels: tuple[int, int],
        kernel: int,
        *,
        stride: int = 1,
        pad: int | None = None,
        group: int = 1,
        gain: float = 1.0,
        bias: bool = True,
    ) -> str:
        """A convolution; `channels` are those in and out. With a `bias`, BatchNormalization may be folded into it."""
        pad = kernel // 2 if pad is None else pad
        shape = (channels[1], channels[0] // group, kernel, kernel)
        weight = self.normal(f"{name}.weight", shape, gain * math.sqrt(2 / math.prod(shape[1:])))
        biases = [self.normal(f"{name}.bias", (channels[1],), 0.1)] if bias else []
        return self.op(
            "Conv",
            x,
            weight,
            *biases,
            dilations=[1, 1],
            group=group,
            kernel_shape=[kernel, kernel],
            pads=[pad] * 4,
            strides=[stride, stride],
        )

    def batch_norm(self, x: str, name: str, channels: int) -> str:
        """BatchNormalization as it is before training: running statistics of 0 and 1."""
        scale = self.normal(f"{name}.weight", (channels,), 0.1, mean=1.0)
        bias = self.normal(f"{name}.bias", (channels,), 0.1)
        mean = self.weight(f"{name}.running_mean", np.zeros(channels, np.float32))
        var = self.weight(f"{name}.running_var", np.ones(channels, np.float32))
        return self.op("BatchNormalization", x, scale, bias, mean, var, epsilon=1e-5, momentum=0.9)


def bert(
    *,
    layers: int = 6,
    hidden: int = 384,
    heads: int = 12,
    ffn: int = 1536,
    vocab: int = 30522,
    positions: int = 512,
    norm: str = "parts",
    classes: int | None = None,
    seed: int = 0,
) -> onnx.ModelProto:
    """A BERT encoder, by default MiniLM-L6's. LayerNormalization is written by `"parts"` or as one `"op"`.

    With `classes` it has a head that classifies the text by its first token.
    """
    g = Graph("bert", opset={"parts": 14, "op": 17}[norm], seed=seed)
    tokens, attended, types = (
        g.input(name, TensorProto.INT64, ("batch", "sequence"))
        for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    # Masked positions get the lowest float32 added to their scores.
    wide = g.op("Unsqueeze", attended, g.constant([1, 2], np.int64))
    masked = g.op("Sub", g.constant(1.0), g.op("Cast", wide, to=TensorProto.FLOAT))
    mask = g.op("Mul", masked, g.constant(np.finfo(np.float32).min))

    ids = g.weight("embeddings.position_ids", np.arange(positions, dtype=np.int64)[None])
    zero, one = g.constant([0], np.int64), g.constant([1], np.int64)
    places = g.op("Slice", ids, zero, g.op("Unsqueeze", g.dim(tokens, 1), zero), one)
    x = g.embedding(tokens, "embeddings.word_embeddings", vocab, hidden, 1.0)
    x = g.op("Add", x, g.embedding(types, "embeddings.token_type_embeddings", 2, hidden, 0.5))
    x = g.op("Add", x, g.embedding(places, "embeddings.position_embeddings", positions, hidden, 0.5))
    x = g.layer_norm(x, "embeddings.LayerNorm", hidden, 1e-12)
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        mixed = g.attention(x, f"{layer}.attention.self", hidden, heads, mask)
        mixed = g.linear(mixed, f"{layer}.attention.output.dense", hidden, hidden)
        x = g.layer_norm(g.op("Add", mixed, x), f"{layer}.attention.output.LayerNorm", hidden, 1e-12)
        wide = g.gelu(g.linear(x, f"{layer}.intermediate.dense", hidden, ffn))
        wide = g.linear(wide, f"{layer}.output.dense", ffn, hidden)
        x = g.layer_norm(g.op("Add", wide, x), f"{layer}.output.LayerNorm", hidden, 1e-12)
    if classes is None:
        return g.model({"last_hidden_state": (x, ("batch", "sequence", hidden))})
    first = g.op("Gather", x, g.constant(0, np.int64), axis=1)
    pooled = g.op("Tanh", g.classifier(first, "pooler.dense", hidden, hidden))
    return g.model({"logits": (g.classifier(pooled, "classifier", hidden, classes), ("batch", classes))})


def gpt2(
    *,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    positions: int = 1024,
    norm: str = "parts",
    seed: int = 0,
) -> onnx.ModelProto:
    """A GPT-2 decoder with past keys and values, by default of the small size; the embedding is the head's weight."""
    g, size = Graph("gpt2", opset={"parts": 14, "op": 17}[norm], seed=seed), hidden // heads
    tokens = g.input("input_ids", TensorProto.INT64, ("batch", "sequence"))
    attended = g.input("attention_mask", TensorProto.INT64, ("batch", "total"))
    places = g.input("position_ids", TensorProto.INT64, ("batch", "sequence"))
    batch, sequence, zero = g.dim(tokens, 0), g.dim(tokens, 1), g.constant([0], np.int64)
    lowest = g.constant(np.finfo(np.float32).min)
    wide = g.op("Cast", g.op("Unsqueeze", attended, g.constant([1, 2], np.int64)), to=TensorProto.FLOAT)
    mask = g.op("Mul", g.op("Sub", g.constant(1.0), wide), lowest)
    causal = g.weight("attention.bias", np.tri(positions, dtype=np.bool_)[None, None])

    def conv1d(x: str, name: str, features_in: int, features_out: int) -> str:
        """The linear layer of this model: a Gemm of the rows."""
        rows = g.op("Reshape", x, g.constant([-1, features_in], np.int64))
        weight = g.normal(f"{name}.weight", (features_in, features_out), features_in**-0.5)
        y = g.op("Gemm", rows, weight, g.normal(f"{name}.bias", (features_out,), 0.1))
        return g.reshape(y, (batch, sequence, features_out))

    def attention(x: str, name: str, layer: int) -> tuple[str, str, str]:
        """Self-attention of `x` and of what came before it; with the keys and values that the next step needs."""
        shape = (batch, sequence, heads, size)
        parts = g.op("Split", conv1d(x, f"{name}.c_attn", hidden, 3 * hidden), outputs=3, axis=2)
        query, key, value = (g.op("Transpose", g.reshape(part, shape), perm=(0, 2, 1, 3)) for part in parts)
        kinds, past = ("key", "value"), ("batch", heads, "past", size)
        key_past, value_past = (g.input(f"past_key_values.{layer}.{k}", TensorProto.FLOAT, past) for k in kinds)
        key, value = g.op("Concat", key_past, key, axis=-2), g.op("Concat", value_past, value, axis=-2)
        scores = g.op("MatMul", query, g.op("Transpose", key, perm=(0, 1, 3, 2)))
        scores = g.op("Div", scores, g.constant(math.sqrt(size)))
        length, total = g.op("Unsqueeze", g.dim(query, 2), zero), g.op("Unsqueeze", g.dim(key, 2), zero)
        rows = g.op("Slice", causal, g.op("Sub", total, length), total, g.constant([2], np.int64))
        seen = g.op("Slice", rows, zero, total, g.constant([3], np.int64))
        scores = g.op("Add", g.op("Where", seen, scores, lowest), mask)
        mixed = g.op("MatMul", g.op("Softmax", scores, axis=-1), value)
        mixed = g.reshape(g.op("Transpose", mixed, perm=(0, 2, 1, 3)), (batch, sequence, hidden))
        return conv1d(mixed, f"{name}.c_proj", hidden, hidden), key, value

    words = g.normal("transformer.wte.weight", (vocab, hidden), hidden**-0.5)
    x = g.op("Add", g.op("Gather", words, tokens), g.embedding(places, "transformer.wpe", positions, hidden, 0.5))
    present = {}
    for i in range(layers):
        layer = f"transformer.h.{i}"
        mixed, *cache = attention(g.layer_norm(x, f"{layer}.ln_1", hidden, 1e-5), f"{layer}.attn", i)
        x = g.op("Add", mixed, x)
        wide = conv1d(g.layer_norm(x, f"{layer}.ln_2", hidden, 1e-5), f"{layer}.mlp.c_fc", hidden, 4 * hidden)
        x = g.op("Add", x, conv1d(g.tanh_gelu(wide), f"{layer}.mlp.c_proj", 4 * hidden, hidden))
        for kind, value in zip(("key", "value"), cache):
            present[f"present.{i}.{kind}"] = (value, ("batch", heads, "total", size))
    x = g.layer_norm(x, "transformer.ln_f", hidden, 1e-5)
    logits = g.op("MatMul", x, g.op("Transpose", words, perm=(1, 0)))
    return g.model({"logits": (logits, ("batch", "sequence", vocab)), **present})


def vit(
    *,
    layers: int = 12,
    hidden: int = 384,
    heads: int = 6,
    patch: int = 16,
    size: int = 224,
    classes: int = 1000,
    norm: str = "op",
    seed: int = 0,
) -> onnx.ModelProto:
    """A vision transformer, by default ViT-S/16."""
    g = Graph("vit", opset={"parts": 14, "op": 17}[norm], seed=seed)
    pixels = g.input("pixel_values", TensorProto.FLOAT, ("batch", 3, size, size))
    patches = g.conv(pixels, "embeddings.projection", (3, hidden), patch, stride=patch, pad=0, gain=0.7)
    batch, count = g.dim(pixels, 0), (size // patch) ** 2
    x = g.op("Transpose", g.reshape(patches, (batch, hidden, count)), perm=(0, 2, 1))
    first = g.op("Expand", g.normal("embeddings.cls_token", (1, 1, hidden), 1.0), g.shape((batch, 1, hidden)))
    x = g.op("Concat", first, x, axis=1)
    x = g.op("Add", x, g.normal("embeddings.position_embeddings", (1, count + 1, hidden), 0.5))
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        mixed = g.layer_norm(x, f"{layer}.layernorm_before", hidden, 1e-6)
        mixed = g.attention(mixed, f"{layer}.attention", hidden, heads)
        x = g.op("Add", x, g.linear(mixed, f"{layer}.attention.output.dense", hidden, hidden))
        wide = g.layer_norm(x, f"{layer}.layernorm_after", hidden, 1e-6)
        wide = g.gelu(g.linear(wide, f"{layer}.intermediate.dense", hidden, 4 * hidden))
        x = g.op("Add", x, g.linear(wide, f"{layer}.output.dense", 4 * hidden, hidden))
    x = g.op("Gather", g.layer_norm(x, "layernorm", hidden, 1e-6), g.constant(0, np.int64), axis=1)
    return g.model({"logits": (g.classifier(x, "classifier", hidden, classes), ("batch", classes))})


def resnet(
    *, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, size: int = 224, classes: int = 1000, seed: int = 0
) -> onnx.ModelProto:
    """A residual network of bottleneck blocks, by default ResNet-50 (v1.5: the 3x3 convolution has the stride)."""
    g = Graph("resnet", opset=17, seed=seed)
    pixels = g.input("input", TensorProto.FLOAT, ("batch", 3, size, size))
    x = g.op("Relu", g.conv(pixels, "conv1", (3, width), 7, stride=2))
    x = g.op("MaxPool", x, ceil_mode=0, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])
    channels = width
    for stage, count in enumerate(blocks):
        inner, outer = width * 2**stage, width * 2**stage * 4
        for i in range(count):
            name, stride = f"layer{stage + 1}.{i}", 2 if i == 0 and stage > 0 else 1
            y = g.op("Relu", g.conv(x, f"{name}.conv1", (channels, inner), 1))
            y = g.op("Relu", g.conv(y, f"{name}.conv2", (inner, inner), 3, stride=stride))
            y = g.conv(y, f"{name}.conv3", (inner, outer), 1, gain=0.5)
            if i == 0:
                x = g.conv(x, f"{name}.downsample.0", (channels, outer), 1, stride=stride, gain=0.5)
            x, channels = g.op("Relu", g.op("Add", y, x)), outer
    x = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    return g.model({"output": (g.classifier(x, "fc", channels, classes), ("batch", classes))})


def basic_resnet(
    *, blocks: Sequence[int] = (2, 2, 2, 2), width: int = 64, size: int = 224, classes: int = 1000, seed: int = 0
) -> onnx.ModelProto:
    """A residual network of basic blocks, by default ResNet-18, as it is exported to be trained: with
    BatchNormalization."""
    g = Graph("basic_resnet", opset=17, seed=seed)

    def normalized(x: str, conv: str, norm: str, channels: tuple[int, int], kernel: int, stride: int) -> str:
        return g.batch_norm(g.conv(x, conv, channels, kernel, stride=stride, bias=False), norm, channels[1])

    pixels = g.input("input", TensorProto.FLOAT, ("batch", 3, size, size))
    x = g.op("Relu", normalized(pixels, "conv1", "bn1", (3, width), 7, 2))
    x = g.op("MaxPool", x, ceil_mode=0, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])
    channels = width
    for stage, count in enumerate(blocks):
        outer = width * 2**stage
        for i in range(count):
            name, stride = f"layer{stage + 1}.{i}", 2 if i == 0 and stage > 0 else 1
            y = g.op("Relu", normalized(x, f"{name}.conv1", f"{name}.bn1", (channels, outer), 3, stride))
            y = normalized(y, f"{name}.conv2", f"{name}.bn2", (outer, outer), 3, 1)
            if stride > 1 or channels != outer:
                x = normalized(x, f"{name}.downsample.0", f"{name}.downsample.1", (channels, outer), 1, stride)
            x, channels = g.op("Relu", g.op("Add", y, x)), outer
    x = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    return g.model({"output": (g.classifier(x, "fc", channels, classes), ("batch", classes))})


_INVERTED_RESIDUALS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Of MobileNetV2: expansion, channels, how many, stride of the first."""


def mobilenet(
    *,
    blocks: Sequence[tuple[int, int, int, int]] = _INVERTED_RESIDUALS,
    stem: int = 32,
    head: int = 1280,
    size: int = 224,
    classes: int = 1000,
    seed: int = 0,
) -> onnx.ModelProto:
    """MobileNetV2, by default of width 1.0."""
    g = Graph("mobilenet", opset=17, seed=seed)

    def relu6(x: str) -> str:
        return g.op("Clip", x, g.constant(0.0), g.constant(6.0))

    x = g.input("input", TensorProto.FLOAT, ("batch", 3, size, size))
    x = relu6(g.conv(x, "features.0", (3, stem), 3, stride=2))
    channels, index = stem, 1
    for expansion, outer, count, first_stride in blocks:
        for i in range(count):
            name, stride, inner = f"features.{index}", first_stride if i == 0 else 1, channels * expansion
            y = x if expansion == 1 else relu6(g.conv(x, f"{name}.expand", (channels, inner), 1))
            y = relu6(g.conv(y, f"{name}.depthwise", (inner, inner), 3, stride=stride, group=inner))
            y = g.conv(y, f"{name}.project", (inner, outer), 1)
            x = g.op("Add", x, y) if stride == 1 and channels == outer else y
            channels, index = outer, index + 1
    x = relu6(g.conv(x, f"features.{index}", (channels, head), 1))
    x = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    return g.model({"output": (g.classifier(x, "classifier", head, classes), ("batch", classes))})


def lstm(*, layers: int = 2, features: int = 256, hidden: int = 256, seed: int = 0) -> onnx.ModelProto:
    """A stack of bidirectional LSTMs over [batch, sequence, features]; the sequence and the last hidden states."""
    g = Graph("lstm", opset=17, seed=seed)
    inputs = g.input("input", TensorProto.FLOAT, ("batch", "sequence", features))
    zero = numpy_helper.from_array(np.zeros(1, np.float32))
    start = g.op("ConstantOfShape", g.shape((2, g.dim(inputs, 0), hidden)), value=zero)
    x, lasts = g.op("Transpose", inputs, perm=(1, 0, 2)), []
    for i in range(layers):
        width = features if i == 0 else 2 * hidden
        y, last, _ = g.op(
            "LSTM",
            x,
            g.normal(f"lstm.{i}.W", (2, 4 * hidden, width), width**-0.5),
            g.normal(f"lstm.{i}.R", (2, 4 * hidden, hidden), hidden**-0.5),
            g.normal(f"lstm.{i}.B", (2, 8 * hidden), 0.1),
            "",
            start,
            start,
            outputs=3,
            direction="bidirectional",
            hidden_size=hidden,
        )
        x = g.op("Reshape", g.op("Transpose", y, perm=(0, 2, 1, 3)), g.constant([0, 0, -1], np.int64))
        lasts.append(last)
    y = g.op("Transpose", x, perm=(1, 0, 2))
    last = g.op("Concat", *lasts, axis=0)
    return g.model({"output": (y, ("batch", "sequence", 2 * hidden)), "hidden": (last, (2 * layers, "batch", hidden))})


class _Decoder(Graph):
    """A decoder as the model builder of ONNX Runtime GenAI writes it: fused operators, and weights in 4 bits."""

    def contrib(self, operator: str, *operands: str, outputs: int = 1, **attributes: Any) -> Any:
        return self.op(operator, *operands, outputs=outputs, domain="com.microsoft", **attributes)

    def linear_4bit(self, x: str, name: str, features_in: int, features_out: int, block: int = 32) -> str:
        """A product with a weight in blocks of 4 bits, each with a scale. The bits are random, as is their mean."""
        shape = (features_out, features_in // block, block // 2)
        packed = self.weight(f"{name}.qweight", self._random.randint(0, 256, shape).astype(np.uint8))
        deviation = math.sqrt((16**2 - 1) / 12 * features_in)  # of a sum of uniformly distributed nibbles
        scales = self._random.uniform(0.5, 1.5, math.prod(shape[:2])).astype(np.float32) / np.float32(deviation)
        attributes = {"K": features_in, "N": features_out, "bits": 4, "block_size": block, "accuracy_level": 0}
        return self.contrib("MatMulNBits", x, packed, self.weight(f"{name}.scales", scales), **attributes)

    def norm(self, x: str, name: str, features: int, skip: str | None = None) -> Any:
        """An RMSNorm; of `x + skip`, and that sum, if there is a skip connection."""
        weight = self.normal(f"{name}.weight", (features,), 0.1, mean=1.0)
        if skip is None:
            return self.op("SimplifiedLayerNormalization", x, weight, axis=-1, epsilon=1e-6, stash_type=1)
        operands = (x, skip, weight)
        y, _, _, total = self.contrib("SkipSimplifiedLayerNormalization", *operands, outputs=4, epsilon=1e-6)
        return y, total

    def head_norm(self, x: str, name: str, count: int, size: int) -> str:
        """An RMSNorm of each head by itself."""
        y = self.norm(self.op("Reshape", x, self.constant([0, -1, size], np.int64)), name, size)
        return self.op("Reshape", y, self.constant([0, -1, count * size], np.int64))


def qwen3(
    *,
    layers: int = 4,
    hidden: int = 1024,
    heads: int = 16,
    kv_heads: int = 8,
    size: int = 128,
    ffn: int = 3072,
    vocab: int = 32768,
    positions: int = 2048,
    seed: int = 0,
) -> onnx.ModelProto:
    """A Qwen3 decoder with a key-value cache and weights in 4 bits, by default of Qwen3-0.6B's shapes, but with fewer
    layers (of 28) and a smaller vocabulary (of 151936)."""
    g = _Decoder("qwen3", opset=17, seed=seed)
    tokens = g.input("input_ids", TensorProto.INT64, ("batch", "sequence"))
    attended = g.input("attention_mask", TensorProto.INT64, ("batch", "total"))
    places = g.input("position_ids", TensorProto.INT64, ("batch", "sequence"))
    lengths = g.op("Sub", g.op("ReduceSum", attended, g.constant([1], np.int64)), g.constant([1], np.int64))
    lengths = g.op("Cast", lengths, to=TensorProto.INT32)
    total = g.op("Cast", g.dim(attended, 1), to=TensorProto.INT32)
    angles = np.outer(np.arange(positions), 1e6 ** (-np.arange(0, size, 2) / size))
    caches = [g.weight(f"{f.__name__}_cache", f(angles).astype(np.float32)) for f in (np.cos, np.sin)]

    def rotated(x: str, count: int) -> str:
        return g.contrib("RotaryEmbedding", x, places, *caches, interleaved=0, num_heads=count, rotary_embedding_dim=0)

    x = g.embedding(tokens, "model.embed_tokens", vocab, hidden, 1.0)
    y = g.norm(x, "model.layers.0.input_layernorm", hidden)
    outputs: dict[str, tuple[str, Sequence[Dim]]] = {}
    for i in range(layers):
        name = f"model.layers.{i}"
        past = [
            g.input(f"past_key_values.{i}.{role}", TensorProto.FLOAT, ("batch", kv_heads, "past", size))
            for role in ("key", "value")
        ]
        query = g.linear_4bit(y, f"{name}.self_attn.q_proj", hidden, heads * size)
        key = g.linear_4bit(y, f"{name}.self_attn.k_proj", hidden, kv_heads * size)
        value = g.linear_4bit(y, f"{name}.self_attn.v_proj", hidden, kv_heads * size)
        query = rotated(g.head_norm(query, f"{name}.self_attn.q_norm", heads, size), heads)
        key = rotated(g.head_norm(key, f"{name}.self_attn.k_norm", kv_heads, size), kv_heads)
        operands = (query, key, value, *past, lengths, total)
        attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": size**-0.5}
        mixed, *present = g.contrib("GroupQueryAttention", *operands, outputs=3, **attributes)
        for role, cache in zip(("key", "value"), present, strict=True):
            outputs[f"present.{i}.{role}"] = cache, ("batch", kv_heads, "total", size)
        mixed = g.linear_4bit(mixed, f"{name}.self_attn.o_proj", heads * size, hidden)
        y, x = g.norm(x, f"{name}.post_attention_layernorm", hidden, skip=mixed)
        gate, up = (g.linear_4bit(y, f"{name}.mlp.{role}_proj", hidden, ffn) for role in ("gate", "up"))
        wide = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        wide = g.linear_4bit(wide, f"{name}.mlp.down_proj", ffn, hidden)
        following = f"model.layers.{i + 1}.input_layernorm" if i + 1 < layers else "model.norm"
        y, x = g.norm(x, following, hidden, skip=wide)
    logits = g.linear_4bit(y, "lm_head", hidden, vocab)
    return g.model({"logits": (logits, ("batch", "sequence", vocab)), **outputs})


def quantized_dynamically(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model with its linear layers in int8, as `onnxruntime.quantization.quantize_dynamic` writes them: the weights
    are symmetric, and what they are multiplied with is quantized where it is computed. Embeddings are int8, too."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    quantized: dict[str, tuple[str, str, str]] = {}
    """The integers, scale and zero point of activations and weights."""

    def add(operator: str, operands: Sequence[str], results: Sequence[str], **attributes: Any) -> None:
        name = f"{results[0]}_{operator}"
        nodes.append(helper.make_node(operator, operands, results, name=name, **attributes))

    def of_weight(name: str) -> tuple[str, str, str]:
        if name not in quantized:
            quantized[name] = names = f"{name}_quantized", f"{name}_scale", f"{name}_zero_point"
            array = numpy_helper.to_array(weights.pop(name))
            scale = np.float32(np.abs(array).max() / 127)
            integers = np.clip(np.round(array / scale), -127, 127).astype(np.int8)
            for part, contents in zip(names, (integers, scale, np.int8(0)), strict=True):
                weights[part] = numpy_helper.from_array(np.asarray(contents), part)
        return quantized[name]

    def of_activation(name: str) -> tuple[str, str, str]:
        if name not in quantized:
            quantized[name] = f"{name}_quantized", f"{name}_scale", f"{name}_zero_point"
            add("DynamicQuantizeLinear", [name], quantized[name])
        return quantized[name]

    for node in model.graph.node:
        y = node.output[0]
        if node.op_type == "MatMul" and node.input[1] in {*weights, *quantized}:
            (a, a_scale, a_zero), (b, b_scale, b_zero) = of_activation(node.input[0]), of_weight(node.input[1])
            add("MatMulInteger", [a, b, a_zero, b_zero], [f"{y}_quantized"])
            add("Cast", [f"{y}_quantized"], [f"{y}_cast"], to=TensorProto.FLOAT)
            add("Mul", [a_scale, b_scale], [f"{y}_scale"])
            add("Mul", [f"{y}_cast", f"{y}_scale"], [y])
        elif node.op_type == "Gather" and node.input[0] in {*weights, *quantized} and "embeddings" in node.input[0]:
            table, scale, zero = of_weight(node.input[0])
            add("Gather", [table, node.input[1]], [f"{y}_quantized"], axis=0)
            add("DequantizeLinear", [f"{y}_quantized", scale, zero], [y])
        else:
            nodes.append(node)
    graph = helper.make_graph(nodes, model.graph.name, model.graph.input, model.graph.output, weights.values())
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def halved(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model in float16 throughout: its weights, constants, casts, inputs and outputs."""
    halved = onnx.ModelProto()
    halved.CopyFrom(model)
    constants = [a.t for node in halved.graph.node for a in node.attribute if a.name == "value"]
    for tensor in (*halved.graph.initializer, *constants):
        if tensor.data_type == TensorProto.FLOAT:
            with np.errstate(over="ignore"):
                values = np.clip(numpy_helper.to_array(tensor), -65504, 65504).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for info in (*halved.graph.input, *halved.graph.output):
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = TensorProto.FLOAT16
    for attribute in (a for node in halved.graph.node if node.op_type == "Cast" for a in node.attribute):
        attribute.i = TensorProto.FLOAT16 if attribute.i == TensorProto.FLOAT else attribute.i
    return halved


def mlp(size: int, *, width: int = 2048, seed: int = 0) -> onnx.ModelProto:
    """A stack of square MatMul weights and Relus that holds `size` bytes of weights, rounded up to whole layers."""
    g = Graph("mlp", opset=17, seed=seed)
    x = g.input("input", TensorProto.FLOAT, ("batch", width))
    for i in range(math.ceil(size / (4 * width * width))):
        x = g.op("Relu", g.op("MatMul", x, g.normal(f"layers.{i}.weight", (width, width), math.sqrt(2 / width))))
    return g.model({"output": (x, ("batch", width))})


# ---- inputs --------------------------------------------------------------------------------------------------------


Inputs = dict[str, np.ndarray]


def bert_inputs(batch: int, sequence: int, *, vocab: int = 30522, padding: int = 0, seed: int = 0) -> Inputs:
    """Inputs of `bert`; each row has `padding` masked positions more at its end than the one before."""
    random = np.random.RandomState(seed)
    mask = (np.arange(sequence) < sequence - padding * np.arange(batch)[:, None]).astype(np.int64)
    types = np.broadcast_to(np.arange(sequence) >= sequence // 2, (batch, sequence)).astype(np.int64)
    ids = random.randint(0, vocab, (batch, sequence)).astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def gpt2_inputs(
    batch: int,
    past: int,
    *,
    sequence: int = 1,
    layers: int = 12,
    heads: int = 12,
    size: int = 64,
    vocab: int = 50257,
    seed: int = 0,
) -> Inputs:
    """Inputs of `gpt2` with `past` cached tokens before those of this step."""
    random = np.random.RandomState(seed)
    ids = random.randint(0, vocab, (batch, sequence)).astype(np.int64)
    mask = np.ones((batch, past + sequence), np.int64)
    places = np.broadcast_to(np.arange(past, past + sequence), (batch, sequence)).astype(np.int64)
    names = [f"past_key_values.{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    cache = {name: random.standard_normal((batch, heads, past, size)).astype(np.float32) for name in names}
    return {"input_ids": ids, "attention_mask": mask, "position_ids": places, **cache}


def normal_inputs(name: str, shape: Sequence[int], *, seed: int = 0, dtype: Any = np.float32) -> Inputs:
    """A standard normal input."""
    return {name: np.random.RandomState(seed).standard_normal(shape).astype(dtype)}


def image_inputs(batch: int, *, name: str = "input", size: int = 224, seed: int = 0) -> Inputs:
    """Inputs of the networks for images."""
    return normal_inputs(name, (batch, 3, size, size), seed=seed)


def decoder_inputs(
    past: int,
    *,
    batch: int = 1,
    tokens: int = 1,
    layers: int = 4,
    kv_heads: int = 8,
    size: int = 128,
    vocab: int = 32768,
    seed: int = 0,
) -> Inputs:
    """Inputs of `qwen3` for so many new tokens behind those in the cache."""
    random = np.random.RandomState(seed)
    places = np.broadcast_to(np.arange(past, past + tokens), (batch, tokens)).astype(np.int64)
    caches = {
        f"past_key_values.{i}.{role}": random.standard_normal((batch, kv_heads, past, size)).astype(np.float32)
        for i in range(layers)
        for role in ("key", "value")
    }
    return {
        "input_ids": random.randint(0, vocab, (batch, tokens)).astype(np.int64),
        "attention_mask": np.ones((batch, past + tokens), np.int64),
        "position_ids": places,
        **caches,
    }

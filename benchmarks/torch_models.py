"""The peers of `training.py`: the same networks in plain PyTorch, with the names that `graphs.py` gives to weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn


class Bert(nn.Module):
    """`graphs.bert` with a classifier, by default MiniLM-L6's shapes."""

    def __init__(
        self,
        *,
        layers: int = 6,
        hidden: int = 384,
        heads: int = 12,
        ffn: int = 1536,
        vocab: int = 30522,
        positions: int = 512,
        classes: int = 2,
    ):
        super().__init__()
        norm = lambda: nn.LayerNorm(hidden, 1e-12)
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(vocab, hidden),
                "token_type_embeddings": nn.Embedding(2, hidden),
                "position_embeddings": nn.Embedding(positions, hidden),
                "LayerNorm": norm(),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_EncoderLayer(hidden, heads, ffn) for _ in range(layers))})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(hidden, hidden)})
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.embeddings["word_embeddings"](input_ids) + self.embeddings["token_type_embeddings"](token_type_ids)
        x = self.embeddings["LayerNorm"](x + self.embeddings["position_embeddings"](torch.arange(length)))
        mask = (1.0 - attention_mask[:, None, None].float()) * torch.finfo(torch.float32).min
        mask = mask.expand(-1, 1, length, -1)
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
        return self.classifier(torch.tanh(self.pooler["dense"](x[:, 0])))


class _EncoderLayer(nn.Module):
    def __init__(self, hidden: int, heads: int, ffn: int):
        super().__init__()
        linear, norm = lambda: nn.Linear(hidden, hidden), lambda: nn.LayerNorm(hidden, 1e-12)
        self.heads = heads
        self.attention = nn.ModuleDict(
            {
                "self": nn.ModuleDict({"query": linear(), "key": linear(), "value": linear()}),
                "output": nn.ModuleDict({"dense": linear(), "LayerNorm": norm()}),
            }
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(hidden, ffn)})
        self.output = nn.ModuleDict({"dense": nn.Linear(ffn, hidden), "LayerNorm": norm()})

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        projections, output = self.attention["self"], self.attention["output"]
        parts = (projections[role](x).view(batch, length, self.heads, -1) for role in ("query", "key", "value"))
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        mixed = mixed.transpose(1, 2).reshape(batch, length, hidden)
        x = output["LayerNorm"](output["dense"](mixed) + x)
        wide = self.output["dense"](F.gelu(self.intermediate["dense"](x)))
        return self.output["LayerNorm"](wide + x)


class BasicResNet(nn.Module):
    """`graphs.basic_resnet`, by default ResNet-18."""

    def __init__(self, *, blocks: Sequence[int] = (2, 2, 2, 2), width: int = 64, classes: int = 1000):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        channels = width
        for stage, count in enumerate(blocks):
            outer = width * 2**stage
            strides = [2 if i == 0 and stage > 0 else 1 for i in range(count)]
            inner = [channels, *[outer] * (count - 1)]
            self.add_module(f"layer{stage + 1}", nn.Sequential(*map(_BasicBlock, inner, [outer] * count, strides)))
            channels = outer
        self.stages = [f"layer{stage + 1}" for stage in range(len(blocks))]
        self.fc = nn.Linear(channels, classes)

    def forward(self, input: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(input))), 3, 2, 1)
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        return self.fc(x.mean((2, 3)))


class _BasicBlock(nn.Module):
    def __init__(self, channels: int, outer: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.downsample = nn.Sequential()
        if stride > 1 or channels != outer:
            self.downsample.extend([nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)])

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The float weights of a graph as PyTorch's modules have them: those of linear layers as [out, in]."""
    multiplied = {node.input[1] for node in model.graph.node if node.op_type == "MatMul"}
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {
        name: array.T if name in multiplied else array for name, array in arrays.items() if array.dtype == np.float32
    }


def load(module: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Gives a module all its weights."""
    counters = {name for name, _ in module.named_buffers() if name.endswith("num_batches_tracked")}
    state = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    missing, unexpected = module.load_state_dict(state, strict=False)
    if set(missing) - counters or unexpected:
        raise ValueError(f"the graph lacks {set(missing) - counters}, the module {unexpected}")

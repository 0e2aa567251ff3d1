"""Records PyTorch's gradients of the encoder in `encoder.py` to `minilm.npz`. Needs torch and onnx.

    python tests/gradients/record_minilm.py

The encoder is written here a second time, as plain PyTorch modules in float64, from the weights in the ONNX graph.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))
import encoder

HIDDEN, HEADS, FFN, LAYERS, EPSILON = 384, 12, 1536, 6, 1e-12


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(encoder.VOCAB, HIDDEN)
        self.token_type_embeddings = nn.Embedding(2, HIDDEN)
        self.position_embeddings = nn.Embedding(64, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, EPSILON)

    def forward(self, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        places = self.position_embeddings(torch.arange(ids.shape[1]))
        return self.LayerNorm(self.word_embeddings(ids) + self.token_type_embeddings(types) + places)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        roles = {role: nn.Linear(HIDDEN, HIDDEN) for role in ("query", "key", "value")}
        joined = {"dense": nn.Linear(HIDDEN, HIDDEN), "LayerNorm": nn.LayerNorm(HIDDEN, EPSILON)}
        self.attention = nn.ModuleDict({"self": nn.ModuleDict(roles), "output": nn.ModuleDict(joined)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(HIDDEN, FFN)})
        self.output = nn.ModuleDict({"dense": nn.Linear(FFN, HIDDEN), "LayerNorm": nn.LayerNorm(HIDDEN, EPSILON)})

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        split = {role: m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for role, m in self.attention["self"].items()}
        mixed = F.scaled_dot_product_attention(split["query"], split["key"], split["value"], visible)
        mixed = self.attention["output"]["dense"](mixed.transpose(1, 2).flatten(2))
        x = self.attention["output"]["LayerNorm"](mixed + x)
        wide = self.output["dense"](F.gelu(self.intermediate["dense"](x)))
        return self.output["LayerNorm"](wide + x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList([Layer() for _ in range(LAYERS)])})

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(ids, types)
        for layer in self.encoder["layer"]:
            x = layer(x, mask[:, None, None, :].bool())
        return x


def main() -> None:
    arrays = {t.name: numpy_helper.to_array(t) for t in encoder.model().graph.initializer}
    weights = {name: a for name, a in arrays.items() if a.dtype == np.float32}
    model = Encoder().double()
    # The graph has a linear layer's weight as [in, out], PyTorch as [out, in].
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    state = {name: torch.from_numpy(a.T.copy() if name in linear else a.copy()).double() for name, a in weights.items()}
    model.load_state_dict(state, strict=True)

    batch = {name: torch.from_numpy(a) for name, a in encoder.batch().items()}
    hidden = model(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])
    mask = batch["attention_mask"][:, :, None].double()
    pooled = (hidden * mask).sum(1) / mask.sum(1)
    loss = F.mse_loss(pooled, torch.from_numpy(encoder.target()).double())
    loss.backward()

    gradients = {name: p.grad.T if name in linear else p.grad for name, p in model.named_parameters()}
    summaries = {f"gradient:{name}": encoder.summary(g.numpy()) for name, g in gradients.items()}
    checksum = encoder.weights_checksum(weights)
    np.savez_compressed(encoder.REFERENCE, loss=loss.item(), checksum=checksum, **summaries)
    print(f"loss {loss.item():.6f}, {len(summaries)} gradients, {encoder.REFERENCE.stat().st_size} bytes")


if __name__ == "__main__":
    main()

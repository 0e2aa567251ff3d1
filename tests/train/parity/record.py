"""Records what PyTorch makes of three small models in 30 steps of AdamW: the references of `test_parity.py`.

    python -m venv torchvenv && torchvenv/bin/pip install torch==2.13.0 onnx onnxscript
    torchvenv/bin/python tests/train/parity/record.py

The tests read only what this writes beside itself, and need no PyTorch. Recorded with torch 2.13.0 (CPU), onnx 1.23.2
and onnxscript 0.7.2. Weights and batches are drawn from fixed seeds; another version of torch changes rounding, and
maybe the exported graphs.

For each model there is what `torch.onnx.export` makes of it before training (`NAME.onnx`, float32) and `NAME.npz`:

    batch:INPUT                      what a step takes, [batches, rows, ...]; step i takes batch i modulo their number
    optimizer:OPTION                 learning_rate, b1, b2, eps, weight_decay (of matrices and kernels alone)
    loss                             [steps], float64, each before its step
    gradient:PARAM, trained:PARAM    of the first step; after the last. In PyTorch's layout
    statistic:NAME                   running statistics after the last step
    count:NAME                       of how many elements a batch's statistics are
    output                           of the trained model in evaluation mode, for the first batch
    homes                            rows of PARAM, the initializer that holds it, "transposed" or "as is"

Exporters rename, transpose and repeat weights. Which initializer holds which param is found by comparing values, here,
where both are at hand.

`losses.npz` has losses of drawn logits and their gradients as PyTorch computes them; `causal_lm` shifts labels as
transformers does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).parent
STEPS, BATCHES = 30, 5
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-6, 0.01
IGNORED = -100


# ---- a cross-encoder shaped as MiniLM (BERT) -----------------------------------------------------------------------


class BertLayer(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.attention_output, self.attention_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden, 1e-12)
        self.intermediate, self.output = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.output_norm = nn.LayerNorm(hidden, 1e-12)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2).flatten(2)
        x = self.attention_norm(self.attention_output(mixed) + x)
        return self.output_norm(self.output(F.gelu(self.intermediate(x))) + x)


class CrossEncoder(nn.Module):
    """One logit for a pair of texts."""

    def __init__(self, vocab: int = 120, positions: int = 20, hidden: int = 48, heads: int = 4, layers: int = 2):
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        self.token_type_embeddings, self.embeddings_norm = nn.Embedding(2, hidden), nn.LayerNorm(hidden, 1e-12)
        self.register_buffer("position_ids", torch.arange(positions)[None], persistent=False)
        self.layer = nn.ModuleList(BertLayer(hidden, heads) for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(hidden, hidden), nn.Linear(hidden, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        places = self.position_embeddings(self.position_ids[:, : input_ids.shape[1]])
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids) + places
        x = self.embeddings_norm(x)
        for layer in self.layer:
            x = layer(x, attention_mask[:, None, None, :].bool())
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


def pairs(rows: int = 8, tokens: int = 14, vocab: int = 120) -> dict[str, Tensor]:
    """Pairs of texts of several lengths, padded; the label is whether the second begins as the first does."""
    ids, types = torch.zeros(rows, tokens, dtype=torch.int64), torch.zeros(rows, tokens, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.randint(0, 2, (rows, 1)).float()
    for row in range(rows):
        first, length = 2 + int(torch.randint(0, 4, ())), tokens - int(torch.randint(0, 5, ()))
        ids[row, :length], mask[row, :length], types[row, first:length] = torch.randint(1, vocab, (length,)), 1, 1
        if labels[row]:
            ids[row, first] = ids[row, 1]
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "labels": labels}


# ---- a ResNet ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        changes = stride != 1 or channels != out
        conv = nn.Conv2d(channels, out, 1, stride, bias=False)
        self.downsample = nn.Sequential(conv, nn.BatchNorm2d(out)) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, classes: int = 5):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        self.layer1, self.layer2, self.layer3 = Block(16, 16, 1), Block(16, 24, 2), Block(24, 32, 2)
        self.fc = nn.Linear(32, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(pixels))))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def images(rows: int = 8, size: int = 16, classes: int = 5) -> dict[str, Tensor]:
    """Noise, with a stripe at the height that is the label."""
    pixels, labels = torch.randn(rows, 3, size, size), torch.randint(0, classes, (rows,))
    for row, label in enumerate(labels):
        pixels[row, :, 3 * label : 3 * label + 2] += 1
    return {"pixels": pixels, "labels": labels}


# ---- a language model shaped as GPT-2 ------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """A linear layer with a weight of [in, out], as GPT-2 has them."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class GptLayer(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.c_attn, self.c_proj = Conv1D(hidden, 3 * hidden), Conv1D(hidden, hidden)
        self.mlp_fc, self.mlp_proj = Conv1D(hidden, 4 * hidden), Conv1D(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        split = self.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(gelu_new(self.mlp_fc(self.ln_2(x))))


class LanguageModel(nn.Module):
    """Its table of tokens is also the last layer's weight."""

    def __init__(self, vocab: int = 160, positions: int = 16, hidden: int = 48, heads: int = 4, layers: int = 2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(positions, hidden)
        self.h = nn.ModuleList(GptLayer(hidden, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


def texts(rows: int = 6, tokens: int = 12, vocab: int = 160) -> dict[str, Tensor]:
    """Arithmetic progressions, some with a prompt or an end that does not count."""
    starts, strides = torch.randint(0, vocab, (rows, 1)), torch.randint(1, 4, (rows, 1))
    ids = (starts + strides * torch.arange(tokens)) % vocab
    labels = ids.clone()
    labels[0, 8:], labels[1, :4], labels[2, 5] = IGNORED, IGNORED, IGNORED
    return {"input_ids": ids, "labels": labels}


def causal_lm(logits: Tensor, labels: Tensor) -> Tensor:
    """transformers' ForCausalLMLoss: labels move one place to the left, and the last position has none."""
    shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return F.cross_entropy(logits.flatten(0, -2), shifted.flatten(), ignore_index=IGNORED)


# ---- recording -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    dynamic: dict[str, dict[int, torch.export.Dim]]
    """The inputs, with their free dimensions."""
    optimize: bool = True
    """Whether the exporter optimizes the graph. If so, it folds BatchNormalization into convolutions."""


ROWS, TOKENS = torch.export.Dim("rows", min=2), torch.export.Dim("tokens", min=2, max=16)
TEXT = {0: ROWS, 1: TOKENS}
CASES = {
    "cross_encoder": Case(
        CrossEncoder,
        pairs,
        F.binary_cross_entropy_with_logits,
        dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), TEXT),
    ),
    "resnet": Case(ResNet, images, F.cross_entropy, {"pixels": {0: ROWS}}, optimize=False),
    "language_model": Case(LanguageModel, texts, causal_lm, {"input_ids": TEXT}),
}


def draw(model: nn.Module) -> None:
    """Random weights of about the sizes that trained ones have, biases and norms too."""
    for name, param in model.named_parameters():
        drawn = torch.randn_like(param)
        is_scale = name.endswith("weight") and param.ndim == 1
        scale = math.sqrt(2 / param[0].numel()) if param.ndim == 4 else 0.1
        param.data = 1 + 0.1 * drawn if is_scale else scale * drawn


def train(case: Case, model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """Trains the model: the losses, and the gradients of the first step."""
    groups = {True: [], False: []}
    for param in model.parameters():
        groups[param.ndim > 1].append(param)
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": WEIGHT_DECAY if decays else 0.0} for decays, params in groups.items()],
        lr=LEARNING_RATE,
        betas=BETAS,
        eps=EPS,
    )
    losses, gradients = [], {}
    model.train()
    for step in range(STEPS):
        batch = batches[step % BATCHES]
        optimizer.zero_grad()
        loss = case.loss(model(*(batch[name] for name in case.dynamic)), batch["labels"])
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: param.grad.clone() for name, param in model.named_parameters()}
        optimizer.step()
    return losses, gradients


def homes(path: Path, params: dict[str, Tensor]) -> Iterator[tuple[str, str, str]]:
    """For each param the initializers that hold it, and whether they have it transposed."""
    initializers = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    for name, param in params.items():
        array = param.detach().numpy()
        found = [(name, other, "as is") for other, held in initializers.items() if np.array_equal(held, array)]
        found += [
            (name, other, "transposed")
            for other, held in initializers.items()
            if array.ndim == 2 and np.array_equal(held, array.T)
        ]
        if not found:
            raise ValueError(f"No initializer of {path.name} has the values of {name}.")
        yield from found


def export(path: Path, case: Case, model: nn.Module, batch: dict[str, Tensor]) -> None:
    with warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            model.eval(),
            tuple(batch[name] for name in case.dynamic),
            input_names=list(case.dynamic),
            output_names=["logits"],
            dynamic_shapes=tuple(case.dynamic.values()),
            optimize=case.optimize,
            verbose=False,
        )
    for node in program.model.graph:
        node.metadata_props.clear()  # the lines of Python that it came from: larger than the graph
    program.save(path)


def element_counts(model: nn.Module) -> dict[str, int]:
    """Of how many elements the statistics of each BatchNorm2d are, once the model has been called."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            hook = lambda _, inputs, __, name=name: counts.update({name: inputs[0].numel() // inputs[0].shape[1]})
            module.register_forward_hook(hook)
    return counts


def print_rounding(what: str, narrow: dict[str, Tensor], wide: dict[str, Tensor]) -> None:
    """How far PyTorch in float32 is from itself in float64, relative to each norm: the largest distances."""
    distances = {name: float((x.double() - wide[name]).norm() / wide[name].norm()) for name, x in narrow.items()}
    largest = sorted(distances, key=distances.__getitem__, reverse=True)[:4]
    print(f"  {what}: " + ", ".join(f"{name} {distances[name]:.1e}" for name in largest))


def record(name: str, case: Case) -> None:
    torch.manual_seed(0)
    model = case.model()
    draw(model)
    batches = [case.batch() for _ in range(BATCHES)]
    path = HERE / f"{name}.onnx"
    export(path, case, model, batches[0])
    placed = list(homes(path, dict(model.named_parameters())))

    wide = case.model().double()
    wide.load_state_dict(model.state_dict())
    widened = [{k: x.double() if x.is_floating_point() else x for k, x in batch.items()} for batch in batches]
    wide_losses, wide_gradients = train(case, wide, widened)

    counts = element_counts(model)
    losses, gradients = train(case, model, batches)
    trained = {k: p.detach() for k, p in model.named_parameters()}
    with torch.no_grad():
        output = model.eval()(*(batches[0][k] for k in case.dynamic))
    b1, b2 = BETAS
    options = {"learning_rate": LEARNING_RATE, "b1": b1, "b2": b2, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    np.savez_compressed(
        path.with_suffix(".npz"),
        loss=losses,
        output=output.numpy(),
        homes=np.array(placed),
        **{f"batch:{k}": torch.stack([batch[k] for batch in batches]).numpy() for k in batches[0]},
        **{f"optimizer:{k}": x for k, x in options.items()},
        **{f"gradient:{k}": g.numpy() for k, g in gradients.items()},
        **{f"trained:{k}": p.numpy() for k, p in trained.items()},
        **{f"statistic:{k}": b.numpy() for k, b in model.named_buffers() if "running" in k},
        **{f"count:{k}": n for k, n in counts.items()},
    )
    print(f"{name}: {sum(p.numel() for p in trained.values())} weights, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print_rounding("gradient", gradients, wide_gradients)
    print_rounding("trained", trained, {k: p.detach() for k, p in wide.named_parameters()})
    print(f"  loss: {max(abs(a - b) for a, b in zip(losses, wide_losses)):.1e}")


def record_losses() -> None:
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(3, 6, 7)).astype(np.float32) * 3, random.integers(0, 7, (3, 6))
    labels[0, 3:], labels[2, 0] = IGNORED, IGNORED
    class_weights = random.uniform(0.2, 2, 7).astype(np.float32)
    flat = lambda **options: lambda logits, labels: F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)
    functions = {
        "plain": flat(),
        "smoothed": flat(label_smoothing=0.1),
        "weighted": flat(weight=torch.from_numpy(class_weights)),
        "weighted and smoothed": flat(weight=torch.from_numpy(class_weights), label_smoothing=0.1),
        "causal_lm": causal_lm,
    }
    found = {}
    for name, function in functions.items():
        given = torch.from_numpy(logits).requires_grad_()
        loss = function(given, torch.from_numpy(labels))
        loss.backward()
        found |= {f"loss:{name}": loss.item(), f"gradient:{name}": given.grad.numpy()}
    np.savez_compressed(HERE / "losses.npz", logits=logits, labels=labels, class_weights=class_weights, **found)


def main() -> None:
    torch.use_deterministic_algorithms(True)
    for name, case in CASES.items():
        record(name, case)
    record_losses()
    print({path.name: path.stat().st_size for path in sorted(HERE.iterdir()) if path.suffix in (".onnx", ".npz")})


if __name__ == "__main__":
    main()

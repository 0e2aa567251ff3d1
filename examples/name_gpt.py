"""A small GPT-2 that writes names: its ONNX graph, and its training from scratch. `lora_lm.py` adapts it."""

from __future__ import annotations

from pathlib import Path

import names
import numpy as np
import onnx
import optax
from onnx import TensorProto, helper, numpy_helper
from reporting import print_evaluation

import transmuter
from transmuter import train
from transmuter.train import losses

VOCABULARY = 128  # ASCII
LENGTH = 16  # a name of at most 14 letters between two ends of lines


def read_names(countries: str) -> list[str]:
    """Names in Latin letters of people from some countries, shuffled.

    Args:
        countries: A condition in SQL, such as `"= 'IR'"`.
    """
    rows = names.select(f"SELECT DISTINCT latin FROM units WHERE country {countries} ORDER BY latin")
    return names.shuffled([name for (name,) in rows if name.isascii() and 3 <= len(name) <= LENGTH - 2])


def as_batch(chosen: list[str]) -> names.Batch:
    """`input_ids` int64 [names, LENGTH], and the same as `labels`, where what comes after a name does not count."""
    ids = np.full((len(chosen), LENGTH), ord("\n"))
    labels = np.full_like(ids, losses.IGNORED)
    for i, name in enumerate(chosen):
        letters = list(f"\n{name}\n".encode())
        ids[i, : len(letters)] = labels[i, : len(letters)] = letters
    return {"input_ids": ids, "labels": labels}


def gpt(*, width: int = 96, layers: int = 3, heads: int = 4, seed: int = 0) -> onnx.ModelProto:
    """A GPT-2 with random weights, as exporters write it: `input_ids` [batch, tokens] → `logits` [..., VOCABULARY]."""
    random = np.random.default_rng(seed)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def weight(name: str, array: np.ndarray) -> str:
        weights.append(numpy_helper.from_array(array, name))
        return name

    def normal(name: str, rows: int, columns: int, deviation: float) -> str:
        return weight(name, (deviation * random.standard_normal((rows, columns))).astype(np.float32))

    def node(operator: str, scope: str, *inputs: str, outputs: tuple[str, ...] = (), **attributes: object) -> str:
        outputs = outputs or (f"/{scope}/{operator}_output_0",)
        nodes.append(helper.make_node(operator, inputs, outputs, f"/{scope}/{operator}", **attributes))
        return outputs[0]

    def dense(scope: str, x: str, size_in: int, size_out: int) -> str:
        product = node("MatMul", scope, x, normal(f"{scope}.weight", size_in, size_out, size_in**-0.5))
        return node("Add", scope, product, weight(f"{scope}.bias", np.zeros(size_out, np.float32)))

    def norm(scope: str, x: str) -> str:
        scale, bias = np.ones(width, np.float32), np.zeros(width, np.float32)
        return node("LayerNormalization", scope, x, weight(f"{scope}.weight", scale), weight(f"{scope}.bias", bias))

    tokens = node("Shape", "wpe", "input_ids", start=1)
    positions = node("Slice", "wpe", normal("wpe.weight", LENGTH, width, 0.02), weight("zero", np.array([0])), tokens)
    letters = node("Gather", "wte", normal("wte.weight", VOCABULARY, width, 0.02), "input_ids")
    x = node("Add", "embeddings", letters, positions)
    for i in range(layers):
        attention, mlp = f"h.{i}.attn", f"h.{i}.mlp"
        qkv = tuple(f"/{attention}/{letter}" for letter in "qkv")
        joined = dense(f"{attention}.c_attn", norm(f"h.{i}.ln_1", x), width, 3 * width)
        node("Split", attention, joined, outputs=qkv, axis=-1, num_outputs=3)
        mixed = node("Attention", attention, *qkv, is_causal=1, q_num_heads=heads, kv_num_heads=heads)
        x = node("Add", attention, x, dense(f"{attention}.c_proj", mixed, width, width))
        hidden = dense(f"{mlp}.c_fc", norm(f"h.{i}.ln_2", x), width, 4 * width)
        hidden = node("Gelu", mlp, hidden, approximate="tanh")
        x = node("Add", mlp, x, dense(f"{mlp}.c_proj", hidden, 4 * width, width))
    head = normal("lm_head.weight", width, VOCABULARY, width**-0.5)
    node("MatMul", "lm_head", norm("ln_f", x), head, outputs=("logits",))
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", VOCABULARY])
    graph = helper.make_graph(nodes, "name_gpt", [ids], [logits], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def pretrain(path: Path, chosen: list[str], steps: int) -> None:
    """Trains the model on names, and saves it."""
    model = transmuter.load(gpt(), trainable=True)
    schedule = optax.schedules.warmup_cosine_decay_schedule(0, 5e-3, steps // 10, steps)
    result = train.fit(
        model,
        losses.causal_lm(),
        names.batches(chosen[500:], 128, as_batch),
        optax.adamw(schedule, weight_decay=0.1),
        epochs=steps,
        steps=steps,
        evaluation=[as_batch(chosen[:500])],
        evaluate_every=max(1, steps // 6),
        callback=print_evaluation,
    )
    model.save(path, params=result.params)

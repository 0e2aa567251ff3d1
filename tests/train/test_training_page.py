"""docs/training.md: its snippets run, one after the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from building import info, model_of
from onnx import TensorProto, helper, numpy_helper
from snippets import run_snippets

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
RANDOM = np.random.default_rng(0)


def classifier() -> onnx.ModelProto:
    """Embeddings, a dense layer with a residual, the mean over tokens, three classes."""
    shapes = {"embeddings": (20, 8), "encoder.layer.5.weight": (8, 8), "classifier.weight": (8, 3)}
    weights = [numpy_helper.from_array(RANDOM.normal(size=s).astype(np.float32), n) for n, s in shapes.items()]
    nodes = [
        helper.make_node("Gather", ["embeddings", "input_ids"], ["e"]),
        helper.make_node("MatMul", ["e", "encoder.layer.5.weight"], ["h"], name="/encoder/attention/MatMul"),
        helper.make_node("Add", ["e", "h"], ["last_hidden_state"]),
        helper.make_node("Cast", ["attention_mask"], ["m"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["m", "last"], ["m1"]),
        helper.make_node("Mul", ["last_hidden_state", "m1"], ["counted"]),
        helper.make_node("ReduceMean", ["counted", "middle"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "classifier.weight"], ["logits"]),
    ]
    weights += [numpy_helper.from_array(np.array([axis]), n) for n, axis in (("last", -1), ("middle", 1))]
    inputs = [info(n, ("b", "s"), TensorProto.INT64) for n in ("input_ids", "attention_mask")]
    return model_of(nodes, inputs, [info("logits", ("b", 3))], weights)


def test_snippets_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(), "classifier.onnx")
    ids, labels = RANDOM.integers(0, 20, (32, 5)), RANDOM.integers(0, 3, 32)
    batch = {"input_ids": ids[:16], "attention_mask": np.ones_like(ids[:16]), "labels": labels[:16]}
    names = {"ids": ids, "mask": np.ones_like(ids), "labels": labels, "held_out": [batch], "batch": batch}
    run_snippets(PAGE, names)
    assert names["trained"].keys() == {"encoder.layer.5.weight", "classifier.weight"}

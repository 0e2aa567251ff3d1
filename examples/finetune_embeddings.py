"""Fine-tunes an encoder of Arabic names into one that finds a name across two scripts.

The ONNX files of the package arabic-name-romanizer spell Arabic names in Latin letters, one letter after the other.
Here their encoder (two layers of GRUs over letters, which has never read a Latin one) learns to place a name and its
romanization at the same point, so that "Khadija" finds خديجه in a list by a product of matrices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import names
import numpy as np
import onnxruntime
import optax
from reporting import print_evaluation, print_fall, save_loss_curve

import transmuter
from transmuter import train
from transmuter.train import losses

LETTERS = {token: i for i, token in enumerate(json.loads((names.RESOURCES / "vocab.json").read_text())["tokens"])}
PREFIX = [LETTERS["<UNK_COUNTRY>"], LETTERS["<ROLE_UNKNOWN>"]]
LENGTH = 18  # tokens of a row: the prefix, at most 15 letters, and the end

Pair = tuple[str, str]
"""A name in Latin letters and in Arabic ones."""


def read_pairs() -> list[Pair]:
    """The names of at least two people, with their most frequent romanization, shuffled."""
    rows = names.select(
        "SELECT latin, arabic_key, MAX(count) FROM units WHERE count > 1 GROUP BY arabic_key ORDER BY arabic_key"
    )
    pairs = [(latin, arabic) for latin, arabic, _ in rows]
    return names.shuffled([p for p in pairs if all(4 <= len(name) <= 15 and LETTERS.keys() >= set(name) for name in p)])


def as_batch(pairs: list[Pair]) -> names.Batch:
    """The Latin names and then the Arabic ones, as `losses.contrastive` takes them.

    `src` int64 [2 * pairs, LENGTH] and `src_mask`, true where there is padding, are the model's inputs. `mask`, its
    opposite, is for the loss.
    """
    ids = np.full((2 * len(pairs), LENGTH), LETTERS["<PAD>"])
    for row, name in zip(ids, [latin for latin, _ in pairs] + [arabic for _, arabic in pairs]):
        tokens = [*PREFIX, *(LETTERS[letter] for letter in name), LETTERS["<EOS>"]]
        row[: len(tokens)] = tokens
    is_padding = ids == LETTERS["<PAD>"]
    return {"src": ids, "src_mask": is_padding, "mask": ~is_padding}


def similarities(hidden: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The cosines of all Latin names with all Arabic ones, float [pairs, pairs]: of the means over tokens."""
    vectors = np.sum(hidden * mask[..., None], 1) / np.sum(mask, 1, keepdims=True)
    latin, arabic = np.split(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), 2)
    return latin @ arabic.T


def recall(scores: np.ndarray, k: int) -> float:
    """How often the right Arabic name is among the `k` most similar ones."""
    return float(np.mean(np.sum(scores > scores.diagonal()[:, None], 1) < k))


def summary(scores: np.ndarray) -> str:
    return f"recall@1 {recall(scores, 1):.1%}, recall@5 {recall(scores, 5):.1%}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--pairs", type=int, default=64, help="in a batch: each name is told from so many")
    parser.add_argument("--out", type=Path, default=Path("runs/embeddings"), help="a folder for what is written")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)

    pairs = read_pairs()
    held_out, validation, training = as_batch(pairs[:500]), [as_batch(pairs[500:628])], pairs[628:]
    model = transmuter.load(names.RESOURCES / "encoder.onnx", trainable=True)
    compiled = transmuter.compile(model, outputs=["memory_out"])
    inputs = {name: held_out[name] for name in model.inputs}

    def scores(params: Mapping[str, Any]) -> np.ndarray:
        return similarities(np.asarray(compiled(inputs, params=params)["memory_out"]), held_out["mask"])

    before = scores(model.params)
    print(f"before         {summary(before)} among 500 held-out names")
    loss = losses.contrastive("memory_out", pooling="mean", mask="mask")
    start = train.Evaluator(model, loss)(model.params, validation)
    print_evaluation({"step": 0, "eval_loss": start["loss"]})
    result = train.fit(
        model,
        loss,
        names.batches(training, options.pairs, as_batch),
        optax.adamw(optax.schedules.warmup_cosine_decay_schedule(0, 2e-3, options.steps // 10, options.steps)),
        epochs=options.steps,
        steps=options.steps,
        evaluation=validation,
        evaluate_every=max(1, options.steps // 8),
        callback=print_evaluation,
    )
    print_fall(result)
    after = scores(result.params)
    print(f"after          {summary(after)}")

    model.save(options.out / "tuned.onnx", params=result.params)
    session = onnxruntime.InferenceSession(options.out / "tuned.onnx", providers=["CPUExecutionProvider"])
    in_runtime = similarities(session.run(["memory_out"], inputs)[0], held_out["mask"])
    print(f"ONNX Runtime   {summary(in_runtime)}, of tuned.onnx")
    for i in range(3):
        print(f"nearest to     {pairs[i][0]}: {', '.join(pairs[j][1] for j in np.argsort(-in_runtime[i])[:3])}")

    title = f"Names across scripts: recall@1 {recall(before, 1):.0%} → {recall(after, 1):.0%}"
    save_loss_curve(result, start["loss"], title, options.out / "loss.png")
    print(f"written to     {options.out}: tuned.onnx, loss.png")


if __name__ == "__main__":
    main()

"""Fine-tunes Magika, Google's detector of file types, on fragments of files.

The ONNX file of the package magika tells 214 types apart, but it was trained on whole files. Cut a few lines out of
one, as people paste them into a chat, and it is often wrong. Fragments that this example makes mend that.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import magika
import numpy as np
import onnxruntime
import optax
from reporting import print_evaluation, print_fall, save_loss_curve

import transmuter
from transmuter import train
from transmuter.train import losses

MAGIKA = Path(magika.__file__).parent / "models" / "standard_v3_3"
TYPES = json.loads((MAGIKA / "config.min.json").read_text())["target_labels_space"]
PADDING = 256  # what stands for no byte

Batch = dict[str, np.ndarray]

# ---- data: records of the same kind, written in eight formats

WORDS = """
    account address archive average backup balance branch buffer button cache category channel chapter city client
    cluster color comment company connection content contract counter country course credit customer database deadline
    delivery device discount document domain duration email employee engine error event export factor filter folder
    format gateway group header height host index interval invoice item journal language layer level library limit
    location manager margin market member memory message method metric model module monitor network node notice number
    offer option order origin output owner package parent partner password payment period phone picture player policy
    port price priority process product profile project provider quality quantity queue quota range rating reason
    record region release report request result retry review role route sample schedule score section server service
    session shipping signal size source stage status storage stream street subject summary supplier surface switch
    system target team template threshold ticket timeout title token topic total traffic transfer trigger update user
    vendor version volume warehouse weight width window worker zone
"""

FORMATS = {  # what stands before the fields, a field, what separates two, and what stands after them
    "ini": ("[{name}]\n", "{key} = {plain}", "\n", ""),
    "javascript": ("const {name} = {{\n", "  {key}: {json},", "\n", "\n}};"),
    "json": ('{{\n  "{name}": {{\n', '    "{key}": {json}', ",\n", "\n  }}\n}}"),
    "python": ("{name} = dict(\n", "    {key}={python},", "\n", "\n)"),
    "sql": ("UPDATE {name}\nSET ", "{key} = {python}", ",\n    ", "\nWHERE id = 1;"),
    "toml": ("[{name}]\n", "{key} = {json}", "\n", ""),
    "xml": ("<{name}>\n", "  <{key}>{plain}</{key}>", "\n", "\n</{name}>"),
    "yaml": ("{name}:\n", "  {key}: {plain}", "\n", ""),
}


def write(record: dict[str, Any], name: str, format: str) -> str:
    """A record in one of the formats."""
    before, field, separator, after = FORMATS[format]
    fields = [
        field.format(key=key, python=repr(value), json=json.dumps(value), plain=json.dumps(value).strip('"'))
        for key, value in record.items()
    ]
    return before.format(name=name) + separator.join(fields) + after.format(name=name)


def fragment(draw: random.Random, words: list[str], format: str) -> str:
    """40 to 160 characters out of a record of three to eight fields."""

    def value() -> Any:
        texts = " ".join(draw.choices(words, k=draw.randint(1, 3)))
        return draw.choice([draw.randrange(10_000), round(draw.uniform(0, 100), 2), draw.random() < 0.5, texts])

    record = {"_".join(draw.choices(words, k=draw.randint(1, 2))): value() for _ in range(draw.randint(3, 8))}
    text, length = write(record, draw.choice(words), format), draw.randint(40, 160)
    start = draw.randrange(max(1, len(text) - length))
    return text[start : start + length]


def as_input(text: str) -> np.ndarray:
    """What the model sees of a short file: its bytes at the beginning and again at the end, int32 [2048]."""
    content = np.frombuffer(text.strip().encode(), np.uint8)
    row = np.full(2048, PADDING, np.int32)
    row[: len(content)] = row[len(row) - len(content) :] = content
    return row


def make_batch(draw: random.Random, words: list[str]) -> Batch:
    """Two fragments of each format: `bytes` int32 [16, 2048], and the numbers of their types as `labels` [16]."""
    formats = [*FORMATS, *FORMATS]
    rows = [as_input(fragment(draw, words, format)) for format in formats]
    return {"bytes": np.stack(rows), "labels": np.array([TYPES.index(format) for format in formats])}


def make_batches(seed: int, words: list[str], count: int) -> list[Batch]:
    draw = random.Random(seed)
    return [make_batch(draw, words) for _ in range(count)]


# ---- training

of_logits = losses.cross_entropy("logits")


def loss(outputs: Mapping[str, jax.Array], batch: Mapping[str, Any]) -> Any:
    """The graph ends in a softmax. The logarithm of what it gives serves as logits."""
    return of_logits({"logits": jnp.log(outputs["target_label"] + 1e-9)}, batch)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--held-out", type=int, default=16, help="how many batches of 16 fragments to measure on")
    parser.add_argument("--out", type=Path, default=Path("runs/classifier"), help="a folder for what is written")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)

    # words to train on, and others to measure on
    words, others = WORDS.split()[::2], WORDS.split()[1::2]
    validation, held_out = make_batches(1, others, 4), make_batches(2, others, options.held_out)

    model = transmuter.load(MAGIKA / "model.onnx", trainable=True)
    evaluate = train.Evaluator(model, loss)
    before, start = evaluate(model.params, held_out), evaluate(model.params, validation)
    print(f"before         accuracy {before['accuracy']:.1%} on {16 * len(held_out)} held-out fragments")
    print_evaluation({"step": 0, "eval_loss": start["loss"]})
    result = train.fit(
        model,
        loss,
        make_batches(3, words, options.steps),
        optax.adamw(optax.schedules.warmup_cosine_decay_schedule(0, 5e-4, options.steps // 10, options.steps)),
        evaluation=validation,
        evaluate_every=max(1, options.steps // 8),
        callback=print_evaluation,
    )
    print_fall(result)
    after = evaluate(result.params, held_out)
    print(f"after          accuracy {after['accuracy']:.1%}")

    model.save(options.out / "tuned.onnx", params=result.params)
    session = onnxruntime.InferenceSession(options.out / "tuned.onnx", providers=["CPUExecutionProvider"])
    right = [session.run(None, {"bytes": b["bytes"]})[0].argmax(-1) == b["labels"] for b in held_out]
    print(f"ONNX Runtime   accuracy {np.mean(right):.1%}, of tuned.onnx")

    title = f"Magika on fragments: {before['accuracy']:.0%} → {after['accuracy']:.0%} right"
    save_loss_curve(result, start["loss"], title, options.out / "loss.png")
    print(f"written to     {options.out}: tuned.onnx, loss.png")


if __name__ == "__main__":
    main()

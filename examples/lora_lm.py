"""Adapts a language model of names to another country with LoRA, or on weights of 4 bits with QLoRA.

The model is a small GPT-2 that has learnt names from the Arab world, letter by letter. Adapters, a tenth of its size,
teach it how names are written in Iran. They are saved by themselves, and merged into an ONNX file that runs anywhere.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path

import names
import numpy as np
import onnx
import onnxruntime
import optax
from name_gpt import LENGTH, VOCABULARY, as_batch, pretrain, read_names
from reporting import print_evaluation, print_fall, save_loss_curve

import transmuter
from transmuter import train
from transmuter.train import losses


def quantize(source: Path, path: Path) -> None:
    """Writes a model with the weights of its blocks in 4 bits, as ONNX Runtime's quantiser rounds them."""
    logging.basicConfig(level=logging.WARNING)  # else the quantiser turns on everybody's messages
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), bits=4, block_size=32, nodes_to_exclude=["/lm_head/MatMul"])
    quantizer.process()
    quantizer.model.save_model_to_file(path)


def write_names(logits: Callable[[np.ndarray], np.ndarray], count: int = 8, temperature: float = 0.7) -> str:
    """Names that a model makes up, letter by letter."""
    random = np.random.default_rng(0)
    ids = np.full((count, LENGTH), ord("\n"))
    for i in range(LENGTH - 1):
        scores = logits(ids)[:, i].astype(np.float64) / temperature
        odds = np.exp(scores - scores.max(-1, keepdims=True))
        ids[:, i + 1] = [random.choice(VOCABULARY, p=row / row.sum()) for row in odds]
    return ", ".join(bytes(row.tolist()).decode().split("\n")[1] for row in ids)


def in_runtime(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """The logits of ids, as ONNX Runtime computes them."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda ids: session.run(["logits"], {"input_ids": ids})[0]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--qlora", action="store_true", help="put the adapters beside weights of 4 bits")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--pretraining", type=int, default=240, help="steps of training the base model")
    parser.add_argument("--out", type=Path, default=Path("runs/lora_lm"), help="a folder for what is written")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)

    arab = read_names("NOT IN ('AF', 'IR', 'PK')")
    known = set(arab)
    iranian = [name for name in read_names("= 'IR'") if name not in known]
    held_out, validation, training = as_batch(iranian[:500]), [as_batch(iranian[500:1000])], iranian[1000:]

    print(f"base model     learns {len(arab)} names from the Arab world")
    base = options.out / "base.onnx"
    pretrain(base, arab, options.pretraining)
    if options.qlora:
        quantize(base, base := options.out / "base_4bit.onnx")

    model = transmuter.load(base, trainable=True)
    adapted, adapters = train.with_lora(model, ["*attn*", "*mlp*"], rank=options.rank, alpha=2 * options.rank)
    sizes = [sum(shape.size for shape in m.shapes["param"].values()) for m in (model, adapted)]
    print(f"adapters       {len(adapters)} of rank {options.rank}, with {sizes[1] - sizes[0]} params")

    loss = losses.causal_lm()
    evaluate = train.Evaluator(adapted, loss)
    before, start = evaluate(adapted.params, [held_out]), evaluate(adapted.params, validation)
    print(f"before         perplexity {before['perplexity']:.2f} per letter of 500 held-out names from Iran")
    print_evaluation({"step": 0, "eval_loss": start["loss"]})
    result = train.fit(
        adapted,
        loss,
        names.batches(training, 128, as_batch),
        optax.adamw(optax.schedules.warmup_cosine_decay_schedule(0, 5e-3, options.steps // 10, options.steps)),
        epochs=options.steps,
        steps=options.steps,
        trainable=train.lora.ADAPTERS,
        evaluation=validation,
        evaluate_every=max(1, options.steps // 8),
        callback=print_evaluation,
    )
    print_fall(result)
    after = evaluate(result.params, [held_out])
    print(f"after          perplexity {after['perplexity']:.2f}")

    train.lora.save(options.out / "adapters.safetensors", result.params, adapters)
    tuned = options.out / "tuned.onnx"
    if options.qlora:  # nothing can be merged into weights of 4 bits: the adapters stay nodes of the graph
        adapted.save(tuned, params=result.params)
    else:
        model.save(tuned, params=train.lora.merge(model, result.params, adapters))

    again, _ = train.lora.load(options.out / "adapters.safetensors", model)
    reloaded = evaluate(again.params, [held_out])
    print(f"reloaded       perplexity {reloaded['perplexity']:.2f}, of the base model with adapters.safetensors")
    _, metrics = loss({"logits": in_runtime(tuned)(held_out["input_ids"])}, held_out)
    print(f"ONNX Runtime   perplexity {metrics['perplexity']:.2f}, of tuned.onnx")
    print(f"it wrote       {write_names(in_runtime(base))}")
    print(f"and now        {write_names(in_runtime(tuned))}")

    title = f"{'QLoRA' if options.qlora else 'LoRA'}: perplexity {before['perplexity']:.1f} → {after['perplexity']:.1f}"
    save_loss_curve(result, start["loss"], title, options.out / "loss.png")
    print(f"written to     {options.out}: base model, adapters.safetensors, tuned.onnx, loss.png")


if __name__ == "__main__":
    main()

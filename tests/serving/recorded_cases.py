"""The repositories of what is recorded of transformers and sentence-transformers, and where the recordings are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from formula_repositories import (
    RERANKER_CONFIG,
    RERANKER_TOKENS,
    byte_pieces,
    decoder,
    encoder,
    reranker_files,
    sentence_files,
    word_pieces,
    write,
)

FOLDER = Path(__file__).parent / "recorded"
NLI = {"id2label": {"0": "contradiction", "1": "neutral", "2": "entailment"}}
NLI |= {"label2id": {label: int(i) for i, label in NLI["id2label"].items()}}
PROMPTS = {"query": "query: ", "passage": "passage: the "}
TEXTS = [
    "",
    "The cat sat on the mat.",
    "a good film, a bad film",
    "Ünïcödé 日本語 🙂",
    "the [MASK] cat [SEP] sat",
    "cafe\u0301 e\u0301e\u0302",
    "\x00\t\n",
    " ".join(["a good cat"] * 100),
]


def _pooled(**pooling: Any) -> Callable[[Path], Path]:
    return lambda folder: write(folder, encoder(), files=sentence_files("Pooling", pooling=pooling))


def _classes(classes: int, **config: Any) -> Callable[[Path], Path]:
    labels = {str(i): f"class {i}" for i in range(classes)}
    config = {"id2label": labels, "label2id": {label: int(i) for i, label in labels.items()}, **config}
    config.setdefault("architectures", ["BertForSequenceClassification"])
    return lambda folder: write(folder, encoder(classes=classes), config=config, max_length=32)


def causal(folder: Path, files: dict[str, Any], **options: Any) -> Path:
    """Writes the repository of a causal reranker; `options` are those of `write`."""
    tokenizer = byte_pieces()
    return write(
        folder,
        decoder(tokenizer.get_vocab_size()),
        config=RERANKER_CONFIG,
        tokenizer=tokenizer,
        tokenizer_config=RERANKER_TOKENS,
        files=files,
        **options,
    )


def _causal(files: dict[str, Any], max_length: int = 256) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        return causal(folder, files, max_length=max_length)

    return make


def _message_embedding(folder: Path) -> Path:
    files = sentence_files("Pooling", pooling={"pooling_mode": "lasttoken"}, prompts=PROMPTS)
    files["sentence_bert_config.json"] = {
        "transformer_task": "feature-extraction",
        "modality_config": {
            kind: {"method": "forward", "method_output_name": "last_hidden_state"} for kind in ("text", "message")
        },
        "module_output_name": "token_embeddings",
    }
    files["chat_template.jinja"] = (
        "{% for m in messages %}[CLS] {{ m['role'] }} : {{ m.content[0].text }} [SEP]{% endfor %}"
    )
    return write(folder, encoder(), files=files, max_length=24)


_YES, _NO = (byte_pieces().token_to_id(token) for token in ("yes", "no"))
_CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

REPOSITORIES: dict[str, Callable[[Path], Path]] = {
    **{
        f"embedding/{mode}": _pooled(pooling_mode=mode)
        for mode in ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    },
    "embedding/several": _pooled(
        pooling_mode_mean_tokens=True, pooling_mode_cls_token=True, pooling_mode_lasttoken=True
    ),
    "embedding/in order": _pooled(pooling_mode=["max", "cls"]),
    "embedding/none set": _pooled(pooling_mode_mean_tokens=False),
    "embedding/normalized": lambda folder: write(folder, encoder(), files=sentence_files("Pooling", "Normalize")),
    "embedding/dropout": lambda folder: write(folder, encoder(), files=sentence_files("Pooling", "Dropout")),
    "embedding/no files": lambda folder: write(folder, encoder()),
    "embedding/prompts": lambda folder: write(
        folder, encoder(), files=sentence_files("Pooling", prompts=PROMPTS, default_prompt_name="query")
    ),
    "embedding/without prompt": lambda folder: write(
        folder,
        encoder(),
        files=sentence_files(
            "Pooling",
            pooling={"pooling_mode": ["cls", "mean", "max", "weightedmean", "lasttoken"], "include_prompt": False},
            prompts=PROMPTS,
        ),
    ),
    "embedding/short": lambda folder: write(
        folder, encoder(), files=sentence_files("Pooling", transformer={"max_seq_length": 8, "do_lower_case": False})
    ),
    "embedding/lower case": lambda folder: write(
        folder,
        encoder(),
        tokenizer=word_pieces(lower=False),
        files=sentence_files("Pooling", transformer={"max_seq_length": 64, "do_lower_case": True}),
    ),
    "embedding/truncated": lambda folder: write(
        folder, encoder(), files=sentence_files("Pooling", "Normalize", truncate_dim=5)
    ),
    "embedding/messages": _message_embedding,
    "classification/one": _classes(1),
    "classification/three": _classes(3),
    "classification/no names": lambda folder: write(folder, encoder(classes=2), max_length=32),
    "classification/regression": _classes(2, problem_type="regression"),
    "classification/several": _classes(3, problem_type="multi_label_classification"),
    "classification/single of one": _classes(1, problem_type="single_label_classification"),
    "ranking/sigmoid": _classes(1),
    "ranking/identity": _classes(1, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"}),
    "ranking/old name": _classes(1, sbert_ce_default_activation_function="torch.nn.modules.activation.Tanh"),
    "ranking/decoder": _causal(reranker_files(true_token_id=_YES, false_token_id=_NO)),
    "ranking/decoder with prompts": _causal(
        {
            **reranker_files(true_token_id=_YES, prompts={"web": "judge the web"}),
        },
        max_length=96,
    ),
    "ranking/decoder without files": _causal({"chat_template.jinja": _CHATML}),
    "ranking/decoder without template": _causal({}),
    "zero-shot/last": _classes(3, **NLI),
    "zero-shot/first": _classes(2, id2label={"0": "ENTAILMENT", "1": "not"}, label2id={"ENTAILMENT": 0, "not": 1}),
    "zero-shot/unnamed": _classes(3),
}
"""By task and name, what writes the repository into a folder."""


def recorded(task: str) -> list[Any]:
    """The recorded cases of a task: dicts of `repository`, `input`, `kwargs` and `output`."""
    return json.loads((FOLDER / f"{task}.json").read_text(encoding="utf-8"))["cases"]

"""What is recorded of transformers' pipelines for tokens, masks and questions: repositories, inputs and options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_repositories import make_repository

FOLDER = Path(__file__).parent / "recorded"
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
LONG = "The cat who likes Paris sat on a mat in New York City, and the dog of Berlin people was not unhappy. " * 4


def _tokens(kind: str, **options: Any) -> Callable[[Path], Path]:
    return lambda folder: make_repository(folder, head="tokens", kind=kind, labels=TAGS, **options)


def _masks(kind: str, **options: Any) -> Callable[[Path], Path]:
    return lambda folder: make_repository(folder, head="fill_mask", kind=kind, **options)


def _questions(kind: str, **options: Any) -> Callable[[Path], Path]:
    return lambda folder: make_repository(folder, head="question_answering", kind=kind, **options)


REPOSITORIES: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "tokens-wordpiece": ("token-classification", _tokens("wordpiece", lower_case=False)),
    "tokens-lowercase": ("token-classification", _tokens("wordpiece", seed=3)),
    "tokens-bpe": ("token-classification", _tokens("bpe", seed=1)),
    "tokens-unigram": ("token-classification", _tokens("unigram", seed=2)),
    "masks-wordpiece": ("fill-mask", _masks("wordpiece")),
    "masks-bpe": ("fill-mask", _masks("bpe")),
    "questions-wordpiece": ("question-answering", _questions("wordpiece")),
    "questions-bpe": ("question-answering", _questions("bpe", seed=4)),
    "questions-unigram": ("question-answering", _questions("unigram", seed=5)),
}
"""By name, the pipeline and what writes the repository to a folder."""

TEXTS = [
    "The cat sat on the mat in Paris.",
    "",
    "   ",
    "don't re-enter (the) house, Jean-Luc!",
    "café cafe\u0301 Zu\u0308rich naïve",
    "日本語 中文 in Paris",
    "a 🙂 dog 👩\u200d👧 🇫🇷 cat",
    "the [SEP] cat </s> [MASK] <mask> sat",
    "ﬁsh ① \uff30\uff41\uff52\uff49\uff53\u00a0Berlin\u200b!",
    "\ttwo\n\nlines  and   spaces\r\n",
    LONG,
]
WORDS = [
    ["The", "cat", "likes", "New", "York", "."],
    ["unhappy", "café", "日本語", "🙂"],
    ["Zu\u0308rich", "don't"],
]
AGGREGATIONS = ("none", "simple", "first", "average", "max")
STRIDES = (0, 5)

MASKED = [
    "Paris is the {} of France.",
    "{}",
    "The {} sat on the {}.",
    "日本語 {} 🙂 cafe\u0301",
    "{}{} cat",
    "{} is [CLS] the cat",
]
"""With the tokenizer's mask in the place of braces."""
MASK_OPTIONS: list[dict[str, Any]] = [{}, {"top_k": 2}, {"targets": ["cat", "dog", "mat"]}]
TARGETS: list[dict[str, Any]] = [
    {"targets": ["paris", "unhappy", "cat"]},
    {"targets": "dog", "top_k": 3},
    {"targets": ["cat", "cat", "the"], "top_k": 2},
]
"""Options of the WordPiece repository alone, whose vocabulary has these or has not."""

QUESTIONS = [
    ("Where is the cat?", "The cat sat on a mat in Paris."),
    ("Who likes Berlin?", "cat"),
    ("Where?", LONG),
    ("What is [SEP] it?", "the [SEP] cat [CLS] sat"),
    ("Qui\u0301?", "café cafe\u0301 Zu\u0308rich, 日本語 中文 🙂 dog 👩\u200d👧 in Paris"),
    ("what", "Paris paris PARIS paris, the paris"),
    ("what", "  \t spaces   and\nlines  "),
    ("The big red house of the cat who likes a small dog, and not the tower or the bridge of New York City?", "A cat."),
]
QUESTION_OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 4},
    {"top_k": 5, "align_to_words": False},
    {"top_k": 3, "handle_impossible_answer": True},
    {"max_answer_len": 2, "top_k": 3},
    {"doc_stride": 4, "max_seq_len": 32, "top_k": 3},
]

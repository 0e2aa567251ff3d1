"""Answers to questions that are parts of a given text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np

from transmuter.errors import InputError, ModelError
from transmuter.serving import offsets
from transmuter.serving.batching import Row
from transmuter.serving.inputs import merged, token_row
from transmuter.serving.offsets import Unit
from transmuter.serving.options import Options, open_text, served, token_batches
from transmuter.serving.outputs import softmax
from transmuter.serving.repository import Repository
from transmuter.serving.runtime import Serving
from transmuter.serving.tokenizer import Encoding, Tokenizer

WINDOW = 384
"""The tokens of a window, as in transformers."""
_OVERLAP = 128
_NEVER = np.float32(-10000)
"""The logit of a token that cannot be in the answer."""
_MASKED = 1_000_000.0
"""The score of no answer before a window has one."""


def question_answering(
    source: str | os.PathLike[str] | Repository,
    *,
    top_k: int = 1,
    doc_stride: int | None = None,
    max_answer_len: int = 15,
    max_seq_len: int | None = None,
    max_question_len: int | None = None,
    handle_impossible_answer: bool = False,
    align_to_words: bool = True,
    unit: Unit = "character",
    **options: Unpack[Options],
) -> Serving:
    """Answers questions with parts of a context, as transformers' `QuestionAnsweringPipeline`.

        serving = question_answering("Xenova/distilbert-base-cased-distilled-squad")
        serving({"question": "Where is the tower?", "context": "The Eiffel Tower is in Paris."})
        # {"results": [{"text": "Paris", "start": 23, "end": 28, "score": 0.98}]}

    An input is a dict of `question` and `context`, or a tuple of them. The result is a dict of `results`, the highest
    score first, each a dict of `text`, `start` and `end` in the context, and `score`. There are fewer than `top_k`
    where the context has no more, and none where it has no token. Answers of the same text, upper and lower case alike,
    are one, at the first place that was found: their scores add up, those of several windows too, so that they can pass
    1.

    A context that is too long is read in windows, each with the question before it.

    Args:
        source: A folder, or a repository of the Hub.
        top_k: How many answers.
        doc_stride: How many tokens windows share: half a window, and at most 128, where it is None.
        max_answer_len: The most tokens of an answer.
        max_seq_len: The most tokens of a window. None is the largest `sequence_length`, which is 384 here, or the most
            that the model takes where that is less.
        max_question_len: The most tokens of a question, which is cut behind them. None cuts no question, which is what
            transformers does with tokenizers of this kind whatever it is given.
        handle_impossible_answer: Whether no answer, an empty text, is a result too. Its score is the lowest that a
            window has for it.
        align_to_words: Whether an answer starts and ends with whole words.
        unit: What `start` and `end` count: characters, or bytes of UTF-8.
        options: Those of all tasks.

    All but `source` and `options` may be given at a call as well.

    Raises:
        HubError, ModelError: The repository could not be had, or is malformed.
        InputError: An option has an impossible value; or, of a call, the question or the context is empty, or the
            question leaves no room for the context.
    """
    opened = open_text(source, options)
    names = ("start_logits", "end_logits")
    if not all(name in opened.model.outputs for name in names):
        raise ModelError(
            f"The model has the outputs {', '.join(opened.model.outputs)}, but start_logits and end_logits are needed. "
            "Use a model that is exported for question answering."
        )
    batches = token_batches(opened, options, sequence_lengths=(WINDOW,), outputs=names)
    defaults = {
        "top_k": top_k,
        "doc_stride": doc_stride,
        "max_answer_len": max_answer_len,
        "max_seq_len": max_seq_len,
        "max_question_len": max_question_len,
        "handle_impossible_answer": handle_impossible_answer,
        "align_to_words": align_to_words,
        "unit": unit,
    }
    task = QuestionAnswering(opened.tokenizer, batches.max_length, defaults)
    task.options({})
    return served(task, batches, options, name="question_answering")


@dataclass(frozen=True)
class QuestionAnswering:
    """What comes before and after the model."""

    tokenizer: Tokenizer
    max_length: int | None
    defaults: Mapping[str, Any]

    def options(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a call, checked, with the sizes of windows in the place of None."""
        options = merged("question_answering", self.defaults, overrides)
        for name in ("top_k", "max_answer_len", "max_seq_len", "max_question_len", "doc_stride"):
            value, least = options[name], 0 if name == "doc_stride" else 1
            if value is None and name not in ("top_k", "max_answer_len"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name} is {value!r}. Give a number from {least}.")
        offsets.checked(options["unit"])
        window, overlap = options["max_seq_len"], options["doc_stride"]
        if window is None:
            window = WINDOW if self.max_length is None else self.max_length
        elif self.max_length is not None and window > self.max_length:
            raise InputError(
                f"max_seq_len is {window}, but the largest sequence_length is {self.max_length}. Give a smaller one, "
                "or a larger sequence_length if the model takes one."
            )
        overlap = min(window // 2, _OVERLAP) if overlap is None else overlap
        if overlap > window:
            raise InputError(f"doc_stride is {overlap}, more than a window of {window} tokens has. Give a smaller one.")
        return {**options, "max_seq_len": window, "doc_stride": overlap}

    def rows(self, item: Any, **overrides: Any) -> tuple[list[Row], Any]:
        """A row of each window."""
        options = self.options(overrides)
        question, context = _question(item)
        if options["max_question_len"] is not None:
            question = self._cut(question, options["max_question_len"])
        window, overlap = options["max_seq_len"], options["doc_stride"]
        is_first = self.tokenizer.padding_side == "right"
        texts = (question, context) if is_first else (context, question)
        room = window - len(self.tokenizer.encode(question, "").ids)
        if room > overlap:
            encoding = self.tokenizer.encode(
                *texts, max_length=window, truncation="only_second" if is_first else "only_first", stride=overlap
            )
        else:  # then there can be no second window
            encoding = self.tokenizer.encode(*texts)
            if len(encoding.ids) > window:
                raise InputError(
                    f"The question leaves {max(room, 0)} of {window} tokens for the context, and windows share "
                    f"{overlap}. Shorten the question, or give a smaller doc_stride or a larger sequence_length."
                )
        parts = (encoding, *encoding.overflowing)
        windows = [Window.of(part, 1 if is_first else 0, self.tokenizer.cls_id) for part in parts]
        return [token_row(part) for part in parts], (context, windows, options)

    def _cut(self, question: str, size: int) -> str:
        tokens = self.tokenizer.encode(question, add_special_tokens=False).offsets
        return question if len(tokens) <= size else question[: tokens[size - 1][1]]

    def result(self, context: Any, outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
        """The answers of an input."""
        text, windows, options = context
        top_k = options["top_k"]
        # Spans that become the same words are one answer, so that more are needed.
        count = 2 * top_k + 10 if options["align_to_words"] else top_k
        answers: list[Answer] = []
        null_score = _MASKED
        for window, output in zip(windows, outputs, strict=True):
            start, end = output["start_logits"], output["end_logits"]
            if start.shape != window.seen.shape or end.shape != window.seen.shape:
                raise ModelError(
                    f"The logits have the shapes {list(start.shape)} and {list(end.shape)} for {len(window.seen)} "
                    "tokens. Use a model that is exported for question answering."
                )
            start, end = probabilities(start, window.seen), probabilities(end, window.seen)
            null_score = min(null_score, float(start[0] * end[0]))
            start[0] = end[0] = 0  # what stands for no answer
            for span in best_spans(start, end, window.is_context, options["max_answer_len"], count):
                first, last = window.place(span, align=options["align_to_words"])
                answers.append(Answer(text[first:last], first, last, span.score))
        answers = added_up(answers)
        if options["handle_impossible_answer"]:
            answers.append(Answer("", 0, 0, null_score))
        answers.sort(key=lambda answer: -answer.score)
        place = offsets.counter(text, options["unit"])
        return {
            "results": [
                {"text": answer.text, "start": place(answer.start), "end": place(answer.end), "score": answer.score}
                for answer in answers[:top_k]
            ]
        }


def _question(item: Any) -> tuple[str, str]:
    if isinstance(item, Mapping) and set(item) == {"question", "context"}:
        item = (item["question"], item["context"])
    if not isinstance(item, tuple) or len(item) != 2 or not all(isinstance(text, str) for text in item):
        raise InputError(
            'The input is no question with a context. Give {"question": ..., "context": ...}, both strings.'
        )
    for name, text in zip(("question", "context"), item, strict=True):
        if not text:
            raise InputError(f"The {name} is empty. Give a text.")
    return item


class Span(NamedTuple):
    """Tokens that may be the answer: the first, the last, and their score."""

    first: int
    last: int
    score: float


class Answer(NamedTuple):
    """A part of the context, and its score."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class Window:
    """A part of a context, with the question.

    Attributes:
        encoding: Of both.
        side: Which of the two texts is the context.
        is_context: [tokens], whether each is of the context.
        seen: [tokens], whether each has a share in the probabilities: also the one that stands for no answer.
    """

    encoding: Encoding
    side: int
    is_context: np.ndarray
    seen: np.ndarray

    @classmethod
    def of(cls, encoding: Encoding, side: int, cls_id: int | None) -> Window:
        is_context = np.array([sequence == side for sequence in encoding.sequence_ids], bool)
        seen = is_context if cls_id is None else is_context | (np.array(encoding.ids) == cls_id)
        return cls(encoding, side, is_context, seen)

    def place(self, span: Span, *, align: bool) -> tuple[int, int]:
        """Where a span starts and ends in the context, in characters; whole words if it is to `align`."""
        if align:
            words = [self.encoding.word_ids[i] for i in (span.first, span.last)]
            if None not in words:
                return self._word(words[0])[0], self._word(words[1])[1]
        return self.encoding.offsets[span.first][0], self.encoding.offsets[span.last][1]

    def _word(self, word: int) -> tuple[int, int]:
        """Where a word of the context starts and ends, as far as this window has it."""
        tokens = [i for i in np.flatnonzero(self.is_context) if self.encoding.word_ids[i] == word]
        return self.encoding.offsets[tokens[0]][0], self.encoding.offsets[tokens[-1]][1]


def probabilities(logits: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Of each token, among those that are `seen`. Both are [tokens]."""
    return softmax(np.where(seen, np.asarray(logits, np.float32), _NEVER))


def best_spans(
    start: np.ndarray, end: np.ndarray, is_context: np.ndarray, max_answer_len: int, count: int
) -> list[Span]:
    """The spans of the highest scores, those first.

    Unlike transformers, which fills up with spans that end before they start, at a score of 0, only with spans.

    Args:
        start: [tokens], how probable each is as the first of the answer.
        end: And as the last.
        is_context: Which tokens an answer may start and end with.
        max_answer_len: The most tokens of a span.
        count: How many.
    """
    (places,) = np.nonzero(is_context)
    max_answer_len = min(max_answer_len, len(end))
    firsts = np.repeat(places, max_answer_len)
    lasts = firsts + np.tile(np.arange(max_answer_len), len(places))
    inside = lasts < len(end)
    firsts, lasts = firsts[inside], lasts[inside]
    allowed = is_context[lasts]
    firsts, lasts = firsts[allowed], lasts[allowed]
    scores = start[firsts] * end[lasts]
    order = np.argsort(-scores, kind="stable")[:count]
    return [Span(int(firsts[i]), int(lasts[i]), float(scores[i])) for i in order]


def added_up(answers: Iterable[Answer]) -> list[Answer]:
    """One answer of each text, in the order of the first of each, with the sum of their scores."""
    found: dict[str, Answer] = {}
    for answer in answers:
        key = answer.text.lower()
        before = found.get(key)
        found[key] = answer if before is None else before._replace(score=before.score + answer.score)
    return list(found.values())

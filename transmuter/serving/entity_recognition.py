"""Entities of any labels, found by GLiNER models."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np

from transmuter.errors import InputError, ModelError
from transmuter.serving import offsets
from transmuter.serving.batching import Row
from transmuter.serving.inputs import merged, text_of
from transmuter.serving.offsets import Unit
from transmuter.serving.options import Options, open_text, padded_lengths, served
from transmuter.serving.outputs import sigmoid
from transmuter.serving.repository import Repository, setting
from transmuter.serving.runtime import Serving
from transmuter.serving.tokenizer import Tokenizer
from transmuter.serving.word_batches import WordBatches

SEQUENCE_LENGTHS = (32, 128, 512, 1024)
"""One more than other tasks have: the labels come on top of a text, and gliner truncates words, not tokens."""
_FILE = "gliner_config.json"
_POOLINGS = ("first", "last", "mean", "max")
_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")

WordSplitter = Callable[[str], Iterable[tuple[str, int, int]]]
"""Splits a text into words, each with where it starts and ends."""


def zero_shot_entity_recognition(
    source: str | os.PathLike[str] | Repository,
    *,
    labels: Sequence[str] | Mapping[str, str] | None = None,
    threshold: float = 0.5,
    flat_ner: bool = True,
    multi_label: bool = False,
    unit: Unit = "character",
    words_splitter: WordSplitter | None = None,
    **options: Unpack[Options],
) -> Serving:
    """Finds the entities of given labels with a GLiNER model, as `GLiNER.inference` of gliner.

        serving = zero_shot_entity_recognition("onnx-community/gliner_small-v2.1")
        serving({"text": "Ada lives in London.", "labels": ["person", "city"]})
        # {"entities": [{"start": 0, "end": 3, "label": "person", "score": 0.97, "phrase": "Ada"}, ...]}

    An input is a dict of `text`, `labels` and any of the options below, or a text where `labels` are given otherwise.
    The result is a dict of `entities` in the order of the text, each a dict of `start` and `end` in the text, `label`,
    `score` and `phrase`. A blank text, or one without labels, has none. Models that score spans run, and those that
    score words (`span_mode` is `token_level`); those with another encoder for labels, a decoder, or relations do not.

    A text is read up to the `max_len` of gliner_config.json, which counts words, and up to the largest
    `sequence_length`, which counts tokens with those of the labels: (32, 128, 512, 1024), as far as the tokenizer goes.
    As in gliner, words whose tokens are cut off still are words of the text.

    Args:
        source: A folder, or a repository of the Hub.
        labels: What to look for, each once; or a dict of labels with what the model is to read in the place of each.
        threshold: The score that an entity must be above.
        flat_ner: Whether entities never overlap; without it one may lie in another. The surest come first.
        multi_label: Whether the same words may have several labels.
        unit: What `start` and `end` count: characters, or bytes of UTF-8.
        words_splitter: What splits texts into words, each as `(word, start, end)`; None is gliner's `whitespace`, and
            needed for models of another `words_splitter_type`.
        options: Those of all tasks.

    All but `source`, `words_splitter` and `options` may be given at a call, or with a text, as well.

    Raises:
        HubError, ModelError: The repository could not be had, is malformed, or is a GLiNER model of another kind.
        InputError: An option has an impossible value; or, of a call, the input has no text or labels, or the labels are
            too long for the model.
    """
    opened = open_text(source, options)
    prompt = Prompt.of(opened.repository, opened.tokenizer)
    scores_spans = "span_idx" in opened.model.inputs
    config = _config(opened.repository)
    kind = setting(config, "words_splitter_type", str, "whitespace", file=_FILE)
    if words_splitter is None and kind != "whitespace":
        raise ModelError(
            f"The model takes words as gliner's {kind!r} splits them, which is not known here. Give words_splitter, a "
            "function that yields (word, start, end)."
        )
    lengths, limit = padded_lengths(opened.model, options, SEQUENCE_LENGTHS, opened.tokenizer.max_length)
    defaults = {
        "labels": labels,
        "threshold": threshold,
        "flat_ner": flat_ner,
        "multi_label": multi_label,
        "unit": unit,
    }
    batches = WordBatches(
        opened.model,
        batch_size=options.get("batch_size", 1),
        sequence_lengths=lengths,
        max_length=limit,
        max_words=prompt.max_words,
        max_width=_positive(config, "max_width", 12) if scores_spans else None,
        pad_id=opened.tokenizer.pad_id,
        label_id=prompt.label_id,
        labels=max(len(labels or ()), 1),
        is_spread=prompt.pooling in ("mean", "max"),
    )
    task = EntityRecognition(
        opened.tokenizer, batches.max_length, prompt, words_splitter or words_of, scores_spans, defaults
    )
    task.options({})
    return served(task, batches, options, name="zero_shot_entity_recognition")


def words_of(text: str) -> Iterable[tuple[str, int, int]]:
    """The words of a text, with where each starts and ends: letters and digits, joined by hyphens or underscores, and
    any other character that is no space by itself (gliner's `WhitespaceTokenSplitter`)."""
    return ((match.group(), match.start(), match.end()) for match in _WORD.finditer(text))


def _config(repository: Repository) -> dict[str, Any]:
    home = repository.with_base(_FILE)
    if home is None:
        raise ModelError(f"{repository.name} has no {_FILE}. Use a repository of a GLiNER model.")
    return home.json(_FILE)


def _positive(config: Mapping[str, Any], key: str, default: int) -> int:
    value = setting(config, key, int, default, file=_FILE)
    if value < 1:
        raise ModelError(f"{key!r} in {_FILE} is {value}, but must be positive. Correct the file.")
    return value


@dataclass(frozen=True)
class Prompt:
    """How labels go before a text.

    Attributes:
        label: What stands before each label.
        end: What stands behind the last.
        label_id: The token of `label`.
        max_words: The most words of a text.
        pooling: Which tokens of a word stand for it: its `first`, its `last`, or all (`mean`, `max`).
    """

    label: str
    end: str
    label_id: int
    max_words: int
    pooling: str

    @classmethod
    def of(cls, repository: Repository, tokenizer: Tokenizer) -> Prompt:
        """That of a repository.

        Raises:
            ModelError: It is no GLiNER model whose labels go before the text.
        """
        config = _config(repository)
        for key in ("labels_encoder", "labels_decoder", "relations_layer"):
            if config.get(key) is not None:
                raise ModelError(
                    f"{repository.name} is a GLiNER model with {key!r}, and only those that read labels and text "
                    "together run here. Use one of these."
                )
        label = setting(config, "ent_token", str, "<<ENT>>", file=_FILE)
        label_id = tokenizer.id(label)
        if label_id is None:
            raise ModelError(
                f"The tokenizer has no token {label!r}, which {_FILE} puts before labels. Take both from the same "
                "repository."
            )
        pooling = setting(config, "subtoken_pooling", str, "first", file=_FILE)
        if pooling not in _POOLINGS:
            raise ModelError(
                f"'subtoken_pooling' in {_FILE} is {pooling!r}, but must be one of {', '.join(_POOLINGS)}."
            )
        end = setting(config, "sep_token", str, "<<SEP>>", file=_FILE)
        return cls(label, end, label_id, _positive(config, "max_len", 384), pooling)

    def words(self, labels: Iterable[str]) -> list[str]:
        """What goes before the text. An empty label has no words."""
        return [
            *itertools.chain.from_iterable((self.label, text) if text else (self.label,) for text in labels),
            self.end,
        ]

    def words_mask(self, word_ids: Sequence[int | None], before: int) -> np.ndarray:
        """[tokens] int64: which word of the text a token stands for, from 1; 0 if for none.

        Words that have no token keep their number, so that those behind them stay where they are in the text; gliner
        counts those with tokens alone.

        Args:
            word_ids: Of each token, the word that it is of, those of the prompt included.
            before: How many of these words are the prompt's.
        """
        words = np.array([-1 if word is None else word for word in word_ids])
        others = np.roll(words, 1 if self.pooling == "first" else -1)
        if len(others):
            others[0 if self.pooling == "first" else -1] = -1
        stands = (words >= before) & (True if self.pooling in ("mean", "max") else words != others)
        return np.where(stands, words - before + 1, 0)


@dataclass(frozen=True)
class EntityRecognition:
    """What comes before and after the model."""

    tokenizer: Tokenizer
    max_length: int | None
    prompt: Prompt
    words_splitter: WordSplitter
    scores_spans: bool
    defaults: Mapping[str, Any]

    def options(self, *given: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a text, checked, with labels as a dict of what the model reads for each."""
        options = merged("zero_shot_entity_recognition", self.defaults, *given)
        offsets.checked(options["unit"])
        threshold, labels = options["threshold"], options["labels"]
        if not isinstance(threshold, (int, float)) or isinstance(threshold, bool) or not 0 <= threshold <= 1:
            raise InputError(f"threshold is {threshold!r}. Give a score from 0 to 1.")
        if labels is not None:
            options["labels"] = _labels(labels)
        return options

    def rows(self, item: Any, **overrides: Any) -> tuple[list[Row], Any]:
        """The row of a text; none if nothing can be found in it."""
        return self.rows_of([item], **overrides)[0]

    def rows_of(self, items: Sequence[Any], **overrides: Any) -> list[tuple[list[Row], Any]]:
        """The row of each text."""
        prepared: list[tuple[list[Row], Any]] = []
        split = []
        for item in items:
            own = dict(item) if isinstance(item, Mapping) else {"text": item}
            text = text_of(own.pop("text", None))
            options = self.options(overrides, own)
            if options["labels"] is None:
                raise InputError(
                    'The input has no labels. Give {"text": ..., "labels": [...]}, or labels for all inputs.'
                )
            words = list(itertools.islice(self.words_splitter(text), self.prompt.max_words)) if text.strip() else []
            prepared.append(([], (text, words, options)))
            if words and options["labels"]:
                split.append(len(prepared) - 1)
        prompts = {i: self.prompt.words(prepared[i][1][2]["labels"].values()) for i in split}
        encodings = self.tokenizer.encode_batch(
            [[*prompts[i], *(word for word, _, _ in prepared[i][1][1])] for i in split],
            is_split_into_words=True,
            max_length=self.max_length,
            truncation="longest_first",
        )
        for i, encoding in zip(split, encodings, strict=True):
            (rows, (_, words, options)), ids = prepared[i], np.array(encoding.ids)
            labels, before = options["labels"], len(prompts[i])
            if np.count_nonzero(ids == self.prompt.label_id) != len(labels) or before - 1 not in encoding.word_ids:
                raise InputError(
                    f"The {len(labels)} labels do not fit into the {self.max_length} tokens that the model sees, or "
                    f"have {self.prompt.label!r} in them. Give fewer or shorter ones."
                )
            rows.append(
                Row(
                    {
                        "input_ids": ids,
                        "attention_mask": np.array(encoding.attention_mask),
                        "words_mask": self.prompt.words_mask(encoding.word_ids, before),
                        "words": np.array(len(words)),
                        "labels": np.array(len(labels)),
                    }
                )
            )
        return prepared

    def result(self, context: Any, outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
        """The entities of a text."""
        text, words, options = context
        labels, place = list(options["labels"]), offsets.counter(text, options["unit"])
        found: list[Span] = []
        for output in outputs:
            scores = sigmoid(np.asarray(output["logits"], np.float32))
            candidates = (spans_of_widths if self.scores_spans else spans_of_words)(scores, options["threshold"])
            found = chosen(candidates, is_flat=options["flat_ner"], multi_label=options["multi_label"])
        entities = []
        for span in found:
            start, end = words[span.first][1], words[span.last][2]
            entities.append(
                {
                    "start": place(start),
                    "end": place(end),
                    "label": labels[span.label],
                    "score": span.score,
                    "phrase": text[start:end],
                }
            )
        return {"entities": entities}


def _labels(labels: Any) -> dict[str, str]:
    """What the model reads for each label."""
    pairs = labels.items() if isinstance(labels, Mapping) else None
    if pairs is None and isinstance(labels, (list, tuple)):
        pairs = [(label, label) for label in labels]
    if pairs is None or not all(isinstance(name, str) and isinstance(text, str) for name, text in pairs):
        raise InputError(f"labels are {labels!r:.200}. Give a list of strings, or a dict of labels and descriptions.")
    return dict(pairs)


class Span(NamedTuple):
    """Words that may be an entity: the first, the last, which label, and the score."""

    first: int
    last: int
    label: int
    score: float


def spans_of_widths(scores: np.ndarray, threshold: float) -> list[Span]:
    """The spans above the threshold, in the order of the text.

    Args:
        scores: [words, widths, labels], of the span that starts with a word and has so many more.
        threshold: What scores must be above.
    """
    firsts, widths, labels = np.nonzero(scores > np.float32(threshold))
    inside = firsts + widths < len(scores)
    firsts, widths, labels = firsts[inside], widths[inside], labels[inside]
    values = scores[firsts, widths, labels]
    return [Span(*span) for span in zip(firsts.tolist(), (firsts + widths).tolist(), labels.tolist(), values.tolist())]


def spans_of_words(scores: np.ndarray, threshold: float) -> list[Span]:
    """The spans from a word that starts an entity to one that ends it, with all words inside of it, in the order of the
    text. Their score is the lowest of all of these.

    Args:
        scores: [words, labels, 3]: of each word that it starts an entity, that it ends one, and that it is inside.
        threshold: What the first two must be above, and the last not below.
    """
    limit = np.float32(threshold)
    starts, ends, insides = np.moveaxis(scores, -1, 0)
    found = []
    for first, label in zip(*(axis.tolist() for axis in np.nonzero(starts > limit))):
        inside = np.minimum.accumulate(insides[first:, label])
        lasts = ends[first:, label]
        values = np.minimum(np.minimum(inside, lasts), starts[first, label])
        (places,) = np.nonzero((lasts > limit) & (inside >= limit))
        found += [Span(first, first + place, label, float(values[place])) for place in places.tolist()]
    return found


def chosen(spans: Iterable[Span], *, is_flat: bool, multi_label: bool) -> list[Span]:
    """Of spans that rule each other out the surest, in the order of the text.

    Args:
        spans: The spans; of equal scores the former goes first.
        is_flat: Whether spans that have words in common rule each other out; otherwise only those do that overlap
            without one lying in the other.
        multi_label: Whether the same words may have several labels.
    """
    kept: list[Span] = []
    bounds = np.empty((0, 2), np.int64)
    for span in sorted(spans, key=lambda span: -span.score):
        first, last = bounds[: len(kept)].T
        is_same = (first == span.first) & (last == span.last)
        overlaps = (first <= span.last) & (last >= span.first)
        if not is_flat:
            contains = (first <= span.first) & (last >= span.last)
            is_inside = (first >= span.first) & (last <= span.last)
            overlaps &= ~(contains | is_inside)
        if np.where(is_same, not multi_label, overlaps).any():
            continue
        if len(kept) == len(bounds):
            bounds = np.concatenate([bounds, np.empty((max(len(bounds), 16), 2), np.int64)])
        bounds[len(kept)] = span.first, span.last
        kept.append(span)
    return sorted(kept, key=lambda span: span.first)

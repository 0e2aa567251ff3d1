"""Classes of tokens, and the entities that they make up."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Unpack

import numpy as np

from transmuter.errors import InputError, ModelError
from transmuter.serving import offsets
from transmuter.serving.batching import Row
from transmuter.serving.inputs import merged, text_of, token_row
from transmuter.serving.labels import label_of, read_labels
from transmuter.serving.offsets import Unit
from transmuter.serving.options import Options, open_text, served, token_batches
from transmuter.serving.outputs import find_output, softmax
from transmuter.serving.repository import Repository
from transmuter.serving.runtime import Serving
from transmuter.serving.tokenizer import Encoding, Tokenizer

Aggregation = Literal["none", "same", "simple", "first", "average", "max"]
_AGGREGATIONS = ("none", "same", "simple", "first", "average", "max")
_OF_WORDS = ("first", "average", "max")


def token_classification(
    source: str | os.PathLike[str] | Repository,
    *,
    aggregation: Aggregation | None = "none",
    ignore_labels: Sequence[str] = ("O",),
    stride: int | None = None,
    unit: Unit = "character",
    **options: Unpack[Options],
) -> Serving:
    """Finds entities by classifying tokens, as transformers' `TokenClassificationPipeline`.

        serving = token_classification("Xenova/bert-base-NER", aggregation="same")
        serving("Ada lived in London.")
        # {"entities": [{"start": 0, "end": 3, "label": "PER", "score": 0.99, "phrase": "Ada"}, ...]}

    An input is a text, or one that is split already: `{"words": [...]}`, with the words joined by spaces, or by its
    `delimiter`, as the text that offsets refer to. The result is a dict of `entities` in the order of the text, each a
    dict of `start` and `end` in the text, `label`, `score` and `phrase`: the token as the vocabulary has it, or those
    of a group decoded, which need not be the text's own spelling.

    Args:
        source: A folder, or a repository of the Hub.
        aggregation: How tokens become entities. `none`, or None: each is one. `same`, which transformers calls
            `simple`: neighbours of one label are grouped, whatever is `I-` of it behind its `B-`, and labels lose these
            prefixes. The others first settle on one label for all tokens of a word: `first` on that of its first token,
            `max` on that of its surest, `average` on the best of its scores' means. What is a word is exact for
            tokenizers that mark continued words (WordPiece); for others it is what has no space before it.
        ignore_labels: The labels whose entities are left out: after aggregation, that is without prefixes.
        stride: None truncates a text that is longer than the largest `sequence_length`. A number splits it into windows
            that share so many tokens; of entities that overlap the longest stays, and of equally long ones the surest.
            It needs an aggregation.
        unit: What `start` and `end` count: characters, or bytes of UTF-8.
        options: Those of all tasks.

    All four may be given at a call as well.

    Raises:
        HubError, ModelError: The repository could not be had, or is malformed.
        InputError: An option has an impossible value; or, of a call, the input is no text.
    """
    opened = open_text(source, options)
    output = find_output(opened.model, ["logits"], "token classification")
    batches = token_batches(opened, options, outputs=(output,))
    defaults = {"aggregation": aggregation, "ignore_labels": ignore_labels, "stride": stride, "unit": unit}
    task = TokenClassification(opened.tokenizer, batches.max_length, read_labels(opened.repository.config), defaults)
    task.options({})
    return served(task, batches, options, name="token_classification")


@dataclass(frozen=True)
class TokenClassification:
    """What comes before and after the model."""

    tokenizer: Tokenizer
    max_length: int | None
    labels: Mapping[int, str] | None
    defaults: Mapping[str, Any]

    def options(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a call, checked."""
        options = merged("token_classification", self.defaults, overrides)
        options["aggregation"] = options["aggregation"] or "none"
        aggregation, stride, ignored = options["aggregation"], options["stride"], options["ignore_labels"]
        if aggregation not in _AGGREGATIONS:
            raise InputError(f"aggregation is {aggregation!r}. Give one of {', '.join(_AGGREGATIONS)}.")
        offsets.checked(options["unit"])
        if (
            isinstance(ignored, str)
            or not isinstance(ignored, Collection)
            or not all(isinstance(label, str) for label in ignored)
        ):
            raise InputError(f"ignore_labels are {ignored!r}. Give a list of labels.")
        if stride is None:
            return options
        limit = None if self.max_length is None else self.max_length - len(self.tokenizer.encode("").ids)
        if not isinstance(stride, int) or stride < 0 or (limit is not None and stride >= limit):
            raise InputError(f"stride is {stride!r}. Give a number of tokens from 0 to below {limit}, or None.")
        if aggregation == "none":
            raise InputError("stride needs entities to tell which windows agree. Give an aggregation as well.")
        return options

    def rows(self, item: Any, **overrides: Any) -> tuple[list[Row], Any]:
        """A row of each window."""
        return self.rows_of([item], **overrides)[0]

    def rows_of(self, items: Sequence[Any], **overrides: Any) -> list[tuple[list[Row], Any]]:
        """The rows of each text or list of words."""
        options = self.options(overrides)
        texts = [_Text.of(item) for item in items]
        limits = {"max_length": self.max_length, "truncation": "longest_first", "stride": options["stride"] or 0}
        encodings: list[Encoding] = [None] * len(items)  # type: ignore[list-item]
        for is_split in {text.words is not None for text in texts}:
            places = [i for i, text in enumerate(texts) if (text.words is not None) is is_split]
            found = self.tokenizer.encode_batch(
                [texts[i].words if is_split else texts[i].text for i in places], is_split_into_words=is_split, **limits
            )
            for i, encoding in zip(places, found, strict=True):
                encodings[i] = encoding
        prepared = []
        for text, encoding in zip(texts, encodings, strict=True):
            windows = [encoding] if options["stride"] is None else [encoding, *encoding.overflowing]
            windows = [window for window in windows if not all(window.special_tokens_mask)]
            prepared.append(([token_row(window) for window in windows], (text, windows, options)))
        return prepared

    def result(self, context: Any, outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
        """The entities of a text."""
        text, windows, options = context
        entities: list[Entity] = []
        for window, output in zip(windows, outputs, strict=True):
            (logits,) = output.values()
            if logits.ndim != 2 or len(logits) != len(window.ids):
                raise ModelError(
                    f"The logits have the shape {list(logits.shape)} for {len(window.ids)} tokens, but axes of tokens "
                    "and classes are needed. Use a model that is exported for token classification."
                )
            tokens = tokens_of(text.text, window, softmax(np.asarray(logits, np.float32)), self.tokenizer, text.starts)
            found = entities_of(tokens, options["aggregation"], self.labels, self.tokenizer.join)
            entities += [entity for entity in found if entity.label not in options["ignore_labels"]]
        if len(windows) > 1:
            entities = without_overlaps(entities)
        place = offsets.counter(text.text, options["unit"])
        return {
            "entities": [
                {
                    "start": place(entity.start),
                    "end": place(entity.end),
                    "label": entity.label,
                    "score": entity.score,
                    "phrase": entity.phrase,
                }
                for entity in entities
            ]
        }


@dataclass(frozen=True)
class _Text:
    """An input.

    Attributes:
        text: What offsets refer to.
        words: If it is split.
        starts: Where in the text each word starts.
    """

    text: str
    words: list[str] | None = None
    starts: Sequence[int] | None = None

    @classmethod
    def of(cls, item: Any) -> _Text:
        if not isinstance(item, Mapping):
            return cls(text_of(item))
        words, delimiter = item.get("words"), item.get("delimiter", " ")
        if (
            not set(item) <= {"words", "delimiter"}
            or not isinstance(words, (list, tuple))
            or not all(isinstance(word, str) for word in words)
            or not isinstance(delimiter, str)
        ):
            raise InputError(
                'A dict as input is one of words that are split already. Give {"words": [...]}, with a "delimiter" if '
                "they "
                "are not separated by spaces; or give a text."
            )
        starts = accumulate((len(word) + len(delimiter) for word in words), initial=0)
        return cls(delimiter.join(words), list(words), tuple(starts))


@dataclass(frozen=True)
class Token:
    """A token of a text, that is no special one.

    Attributes:
        word: As the vocabulary has it; an unknown one as the text has it.
        scores: Of each class.
        start: Where it starts in the text.
        end: And ends.
        is_subword: Whether it goes on with the word of the token before it.
    """

    word: str
    scores: np.ndarray
    start: int
    end: int
    is_subword: bool


@dataclass(frozen=True)
class Entity:
    """One or several tokens of one label."""

    label: str
    score: float
    phrase: str
    start: int
    end: int


def tokens_of(
    text: str,
    encoding: Encoding,
    scores: np.ndarray,
    tokenizer: Tokenizer,
    starts: Sequence[int] | None = None,
) -> list[Token]:
    """The tokens of an encoded text with their scores.

    Args:
        text: What offsets refer to.
        encoding: Of the text, or of its words.
        scores: [tokens, classes].
        tokenizer: Its vocabulary, and whether it marks what goes on with a word.
        starts: Where in the text each word starts, if words were encoded: offsets then count from there.
    """
    marks_subwords = bool(tokenizer.subword_prefix)
    tokens = []
    for i, special in enumerate(encoding.special_tokens_mask):
        if special:
            continue
        word = encoding.tokens[i]
        start, end = encoding.offsets[i]
        if starts is not None and encoding.word_ids[i] is not None:
            start, end = start + starts[encoding.word_ids[i]], end + starts[encoding.word_ids[i]]
        spelling = text[start:end]
        if marks_subwords:  # the mark makes a token longer than what it stands for
            is_subword = len(word) != len(spelling)
        else:
            is_subword = start > 0 and " " not in text[start - 1 : start + 1]
        if encoding.ids[i] == tokenizer.unk_id:
            word, is_subword = spelling, False
        tokens.append(Token(word, scores[i], start, end, is_subword))
    return tokens


def entities_of(
    tokens: Iterable[Token],
    aggregation: Aggregation,
    labels: Mapping[int, str] | None,
    join: Callable[[Sequence[str]], str],
) -> list[Entity]:
    """Tokens, words or groups of them as entities.

    Args:
        tokens: In the order of the text.
        aggregation: See `token_classification`.
        labels: Names of the classes.
        join: Makes a phrase of tokens.

    Raises:
        ModelError: A class has no name.
    """
    if aggregation in _OF_WORDS:
        words: list[list[Token]] = []
        for token in tokens:
            if token.is_subword and words:
                words[-1].append(token)
            else:
                words.append([token])
        entities = [_word(word, aggregation, labels, join) for word in words]
    else:
        entities = [_entity(token.scores, [token], labels, token.word) for token in tokens]
    return entities if aggregation == "none" else _grouped(entities, join)


def _word(
    tokens: Sequence[Token],
    aggregation: Aggregation,
    labels: Mapping[int, str] | None,
    join: Callable[[Sequence[str]], str],
) -> Entity:
    if aggregation == "first":
        scores = tokens[0].scores
    elif aggregation == "max":
        scores = max(tokens, key=lambda token: token.scores.max()).scores
    else:
        scores = np.mean([token.scores for token in tokens], axis=0)
    return _entity(scores, tokens, labels, join([token.word for token in tokens]))


def _entity(scores: np.ndarray, tokens: Sequence[Token], labels: Mapping[int, str] | None, phrase: str) -> Entity:
    best = int(scores.argmax())
    return Entity(label_of(labels, best), float(scores[best]), phrase, tokens[0].start, tokens[-1].end)


def _grouped(entities: Iterable[Entity], join: Callable[[Sequence[str]], str]) -> list[Entity]:
    """Neighbours of one label as one, unless the latter begins an entity."""
    groups: list[list[Entity]] = []
    for entity in entities:
        prefix, tag = _parts(entity.label)
        if groups and prefix != "B" and tag == _parts(groups[-1][-1].label)[1]:
            groups[-1].append(entity)
        else:
            groups.append([entity])
    return [
        Entity(
            group[0].label.split("-", 1)[-1],
            float(np.mean(np.array([entity.score for entity in group], np.float32))),
            join([entity.phrase for entity in group]),
            group[0].start,
            group[-1].end,
        )
        for group in groups
    ]


def _parts(label: str) -> tuple[str, str]:
    """`B` or `I`, and what of."""
    return (label[0], label[2:]) if label.startswith(("B-", "I-")) else ("I", label)


def without_overlaps(entities: Iterable[Entity]) -> list[Entity]:
    """Of entities that overlap the longest one, and of equally long ones the surest."""
    kept: list[Entity] = []
    for entity in sorted(entities, key=lambda entity: entity.start):
        if not kept or not kept[-1].start <= entity.start < kept[-1].end:
            kept.append(entity)
        elif (entity.end - entity.start, entity.score) > (kept[-1].end - kept[-1].start, kept[-1].score):
            kept[-1] = entity
    return kept

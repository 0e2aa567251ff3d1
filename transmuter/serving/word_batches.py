"""Batches for models that score words, or spans of them, for labels in a prompt (GLiNER)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

import transmuter
from transmuter.errors import InputError, ModelError
from transmuter.model import Model
from transmuter.segments.executor import CompiledModel
from transmuter.serving.batching import Outputs, Row, positive_sizes, row_buckets, run_all

_SHAPES = 64
"""How many shapes stay compiled where each length is one."""
_LABELS = 8
"""And how many numbers of labels, for each shape of tokens and words."""


class WordBatches:
    """Runs rows of tokens that make up words, in batches of few shapes.

    The graph of such a model chooses the tokens of labels and words by their contents, so that not only the length of a
    row decides what has to be compiled, but also how many words all rows have, and how many the longest has. So:

    - Rows of one number of labels share a batch.
    - Words are padded to the length of the rows or to half of it, whichever is the smallest that holds them. Words in
      excess stand at any tokens that start none, outside of the text's length, where neither the recurrent layer nor a
      span gets to see them.
    - Behind the rows goes a copy of the last whose text is as long as the padding, so that the longest always is.

    A row has the arrays `input_ids`, `attention_mask` and `words_mask` [tokens] (from 1 the word that a token stands
    for, else 0), and the numbers `words` and `labels`.

    Attributes:
        model: The model.
        compiled: The `CompiledModel`, which keeps all the shapes.
        batch_sizes: The numbers of rows that batches are padded to.
        batch_size: The largest of them.
        sequence_lengths: The lengths that rows are padded to. None pads nothing, neither tokens nor words.
        max_length: The length of the longest row that may be given; None without a limit.
        max_width: The most words of a span; None for a model that scores words.
    """

    in_flight = 2
    """How many batches are launched before the results of the first are waited for."""

    def __init__(
        self,
        model: Model,
        *,
        batch_size: int | Sequence[int] = 1,
        sequence_lengths: int | Sequence[int] | None = (32, 128, 512),
        max_length: int | None = None,
        max_words: int = 384,
        max_width: int | None = None,
        pad_id: int = 0,
        label_id: int = 0,
        labels: int = 1,
        is_spread: bool = False,
    ):
        """
        Args:
            model: From `transmuter.load`.
            batch_size: How many rows share a batch at most, or the numbers of rows to compile for.
            sequence_lengths: The lengths to pad to, or None.
            max_length: The longest row, where `sequence_lengths` is None.
            max_words: The most words of a row.
            max_width: The most words of a span, as the graph has it; None if it has no spans.
            pad_id: The token to pad with.
            label_id: The token before each label.
            labels: How many labels `warm_up` compiles for.
            is_spread: Whether all tokens of a word stand for it, so that none can stand for a padded one.

        Raises:
            ValueError: A size is not positive.
        """
        self.model, self.max_words, self.max_width = model, max_words, max_width
        self.batch_sizes = row_buckets(batch_size)
        self.batch_size = self.batch_sizes[-1]
        lengths = None if sequence_lengths is None else positive_sizes("sequence_length", sequence_lengths)
        self.sequence_lengths = lengths
        self.max_length = max_length if self.sequence_lengths is None else self.sequence_lengths[-1]
        self._pad_id, self._label_id, self._labels, self._is_spread = pad_id, label_id, labels, is_spread
        shapes = _SHAPES if self.sequence_lengths is None else len(self.batch_sizes) * len(self._shapes())
        self.compiled: CompiledModel = transmuter.compile(model, cache_size=shapes * _LABELS)

    # -- what a row is

    def key(self, row: Row) -> Hashable:
        """What rows of one batch have in common: the number of labels, and all lengths if unpadded.

        Raises:
            InputError: The row is too long.
        """
        length, words = self.length(row), int(row.arrays["words"])
        if self.max_length is not None and length > self.max_length:
            raise InputError(
                f"A row has {length} tokens, but the longest that is compiled for has {self.max_length}. Truncate it, "
                "or give a larger sequence_length."
            )
        labels = int(row.arrays["labels"])
        return labels if self.sequence_lengths is not None else (labels, length, words)

    def length(self, row: Row) -> int:
        """How many tokens a row has."""
        return len(row.arrays["input_ids"])

    def width(self, row: Row) -> int:
        """How many tokens a row has once it is padded, if it has the longest row of its batch."""
        return self._width(self.length(row))

    def _width(self, length: int) -> int:
        if self.sequence_lengths is None:
            return length
        return next(size for size in self.sequence_lengths if size >= length)

    def room(self, row: Row) -> int:
        """How many rows a batch has at most whose longest row is this one."""
        return self.batch_size

    def places(self, count: int) -> int:
        """How many rows a batch of `count` has room for once it is padded."""
        return next(size for size in self.batch_sizes if size >= count)

    def _word_sizes(self, width: int) -> list[int]:
        """The numbers of words that rows of so many tokens are padded to."""
        return sorted({min(size, self.max_words) for size in ((width + 1) // 2, width)})

    def _shapes(self) -> list[tuple[int, int]]:
        """All the numbers of tokens and words."""
        return [(width, words) for width in self.sequence_lengths or () for words in self._word_sizes(width)]

    # -- running

    def __call__(self, rows: Sequence[Row]) -> list[Outputs]:
        """Runs any number of rows, in as many batches as that takes.

        Returns:
            By row, `logits`: views of [words, widths, labels], or of [words, labels, 3] of a model that scores words.

        Raises:
            InputError: A row is too long.
            ExecutionError: XLA failed.
        """
        return run_all(self, rows)

    def launch(self, rows: Sequence[Row]) -> Callable[[], list[Outputs]]:
        """Starts a batch of rows of one key, at most `batch_size`. Returns what waits for its results."""
        counts = [int(row.arrays["words"]) for row in rows]
        width = self._width(max(self.length(row) for row in rows))
        size = max(counts)
        places = len(rows)
        if self.sequence_lengths is not None:
            places = self.places(len(rows)) + 1
            size = next((words for words in self._word_sizes(width) if words >= size), size)
        inputs = self._inputs(rows, counts, places, width, size)
        results = self.compiled(inputs)
        labels = int(rows[0].arrays["labels"])
        return lambda: self._outputs(results, counts, places, size, labels)

    def _inputs(
        self, rows: Sequence[Row], counts: Sequence[int], places: int, width: int, size: int
    ) -> dict[str, np.ndarray]:
        ids = np.full((places, width), self._pad_id, np.int64)
        attention, words = np.zeros((places, width), np.int64), np.zeros((places, width), np.int64)
        lengths = np.full((places, 1), size, np.int64)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            place = slice(self.length(row))
            ids[i, place], attention[i, place] = row.arrays["input_ids"], row.arrays["attention_mask"]
            words[i, place] = row.arrays["words_mask"]
            if not self._is_spread:
                _fill(words[i], count, size)
            lengths[i] = count
        for array in (ids, attention, words):
            array[len(rows) :] = array[len(rows) - 1]
        inputs = {"input_ids": ids, "attention_mask": attention, "words_mask": words, "text_lengths": lengths}
        if self.max_width is not None:
            first = np.repeat(np.arange(size), self.max_width)
            last = first + np.tile(np.arange(self.max_width), size)
            is_inside = last < lengths
            inputs["span_idx"] = np.stack([first, last], -1) * is_inside[..., None]
            inputs["span_mask"] = is_inside
        dtypes = {name: spec.dtype for name, spec in self.model.inputs.items()}
        return {name: array.astype(dtypes[name], copy=False) for name, array in inputs.items() if name in dtypes}

    def _outputs(
        self, results: dict[str, np.ndarray], counts: Sequence[int], places: int, size: int, labels: int
    ) -> list[Outputs]:
        logits = np.asarray(results["logits"])
        wanted = (places, size, labels, 3) if self.max_width is None else (places, size, self.max_width, labels)
        if self.max_width is None and logits.shape == (3, places, size, labels) != wanted:
            logits = np.moveaxis(logits, 0, -1)  # as older exports have it
        if logits.shape != wanted:
            raise ModelError(
                f"The logits have the shape {list(logits.shape)}, but {list(wanted)} is expected for {places} rows of "
                f"{size} words and {labels} labels. Take gliner_config.json and the model from the same repository."
            )
        return [{"logits": logits[i, :count]} for i, count in enumerate(counts)]

    # -- ahead of calls

    def warm_up(self, *, progress: bool | None = None) -> None:
        """Compiles for all numbers of rows, tokens and words, with one number of labels.

        What follows the choice of tokens is compiled anew for another number of labels, the encoder is not.

        Args:
            progress: Show a bar; that needs tqdm. None shows it on a terminal, if tqdm is there.
        """
        examples = []
        for width, size in self._shapes():
            ids = np.full(width, self._pad_id)
            ids[: self._labels] = self._label_id
            words = np.zeros(width, np.int64)
            words[-1] = 1
            row = Row({"input_ids": ids, "attention_mask": np.ones_like(ids), "words_mask": words})
            if self._labels < width:
                examples += [self._inputs([row], [1], places + 1, width, size) for places in self.batch_sizes]
        self.compiled.warm_up(examples, progress=progress)


def _fill(words: np.ndarray, count: int, size: int) -> None:
    """Has as many tokens stand for words as there are with padding, those in excess for padded ones.

    Args:
        words: [tokens], which is changed.
        count: How many words the text has.
        size: How many there are with padding.
    """
    missing = size - np.count_nonzero(words)
    if missing > 0 and size > count:
        (free,) = np.nonzero(words == 0)
        words[free[-missing:]] = count + 1 + np.arange(missing) % (size - count)

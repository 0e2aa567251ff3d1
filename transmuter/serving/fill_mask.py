"""Words for masked places of a text."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np

from transmuter.errors import InputError, ModelError
from transmuter.serving.batching import Row
from transmuter.serving.inputs import merged, text_of, token_row
from transmuter.serving.options import Options, open_text, served, token_batches
from transmuter.serving.outputs import find_output, softmax
from transmuter.serving.repository import Repository
from transmuter.serving.runtime import Serving
from transmuter.serving.tokenizer import Tokenizer


def fill_mask(
    source: str | os.PathLike[str] | Repository,
    *,
    top_k: int = 5,
    targets: str | Sequence[str] | None = None,
    **options: Unpack[Options],
) -> Serving:
    """Fills in what is masked in a text, as transformers' `FillMaskPipeline`.

        serving = fill_mask("Xenova/bert-base-uncased")
        serving("Paris is the [MASK] of France.")
        # {"predictions": [{"score": 0.99, "token": "capital", "token_id": 3007,
        #                   "sequence": "paris is the capital of france."}, ...]}

    An input is a text with the tokenizer's mask token, or a dict of `text` and the options of that text. The result is
    a dict of `predictions`, the highest score first, each a dict of `score`, `token` (decoded), `token_id`, and
    `sequence`, the text with it. A text with several masks gets a list of such lists, one for each mask in the order of
    the text: each is filled in by itself, and the others stay as they are in its sequences.

    Args:
        source: A folder, or a repository of the Hub.
        top_k: How many predictions for each mask.
        targets: The words to choose from; scores stay those among the whole vocabulary. Of a word that is no token, the
            first of its tokens is taken, with a warning. None is the whole vocabulary.
        options: Those of all tasks.

    Both may be given at a call, or with a text, as well.

    Raises:
        HubError, ModelError: The repository could not be had, is malformed, or its tokenizer has no mask token.
        InputError: An option has an impossible value; or, of a call, the text has no mask, or one of them lies beyond
            the largest `sequence_length`.
    """
    opened = open_text(source, options)
    if opened.tokenizer.mask_id is None or opened.tokenizer.mask_token is None:
        raise ModelError("The tokenizer has no mask token. Use a repository of a masked language model.")
    batches = token_batches(opened, options, outputs=(find_output(opened.model, ["logits"], "masked language models"),))
    task = FillMask(opened.tokenizer, batches.max_length, {"top_k": top_k, "targets": targets})
    task.choice(task.defaults)
    return served(task, batches, options, name="fill_mask")


@dataclass(frozen=True)
class Choice:
    """What is asked for.

    Attributes:
        top_k: How many predictions.
        targets: Ids of the tokens to choose from; None is all.
    """

    top_k: int
    targets: np.ndarray | None


@dataclass(frozen=True)
class FillMask:
    """What comes before and after the model."""

    tokenizer: Tokenizer
    max_length: int | None
    defaults: Mapping[str, Any]

    def choice(self, options: Mapping[str, Any]) -> Choice:
        """The options, checked, with targets as tokens."""
        top_k, targets = options["top_k"], options["targets"]
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
            raise InputError(f"top_k is {top_k!r}. Give a number of predictions from 1.")
        return Choice(top_k, None if targets is None else target_ids(targets, self.tokenizer))

    def rows(self, item: Any, **overrides: Any) -> tuple[list[Row], Any]:
        """The row of a text."""
        return self.rows_of([item], **overrides)[0]

    def rows_of(self, items: Sequence[Any], **overrides: Any) -> list[tuple[list[Row], Any]]:
        """The row of each text."""
        shared: Choice | None = None
        texts, choices = [], []
        for item in items:
            if isinstance(item, Mapping):
                own = {name: value for name, value in item.items() if name != "text"}
                texts.append(text_of(item.get("text")))
                choices.append(self.choice(merged("fill_mask", self.defaults, overrides, own)))
            else:
                shared = shared or self.choice(merged("fill_mask", self.defaults, overrides))
                texts.append(text_of(item))
                choices.append(shared)
        encodings = self.tokenizer.encode_batch(texts, max_length=self.max_length, truncation="longest_first")
        prepared = []
        mask, name = self.tokenizer.mask_id, self.tokenizer.mask_token
        for encoding, choice in zip(encodings, choices, strict=True):
            if any(mask in window.ids for window in encoding.overflowing):
                raise InputError(
                    f"A {name} lies beyond the first {self.max_length} tokens, which is all that the model sees. "
                    "Shorten the text before it, or give a larger sequence_length if the model takes one."
                )
            if mask not in encoding.ids:
                raise InputError(f"There is no {name} in the text. Write it where a word is to be filled in.")
            prepared.append(([token_row(encoding)], (np.array(encoding.ids), choice)))
        return prepared

    def result(self, context: Any, outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
        """The predictions for a text."""
        ids, choice = context
        (logits,) = outputs[0].values()
        if logits.ndim != 2 or len(logits) != len(ids):
            raise ModelError(
                f"The logits have the shape {list(logits.shape)} for {len(ids)} tokens, but axes of tokens and "
                "vocabulary are needed. Use a model that is exported for masked language modelling."
            )
        places = np.flatnonzero(ids == self.tokenizer.mask_id)
        found = [
            [
                {
                    "score": score,
                    "token": self.tokenizer.decode([token]),
                    "token_id": token,
                    "sequence": self._sequence(ids, place, token, is_only=len(places) == 1),
                }
                for token, score in best_tokens(logits[place], choice)
            ]
            for place in places
        ]
        return {"predictions": found[0] if len(found) == 1 else found}

    def _sequence(self, ids: np.ndarray, place: int, token: int, *, is_only: bool) -> str:
        filled = ids.copy()
        filled[place] = token
        kept = filled[filled != self.tokenizer.pad_id]
        # Special tokens are no part of a readable text, but the other masks are.
        return self.tokenizer.decode(kept.tolist(), skip_special_tokens=is_only)


def best_tokens(logits: np.ndarray, choice: Choice) -> list[tuple[int, float]]:
    """The tokens of the highest scores, with these; of equal ones those of lower ids come first.

    Args:
        logits: [vocabulary], of one place.
        choice: How many, and of which.

    Raises:
        ModelError: A target is beyond the vocabulary that the model scores.
    """
    scores = softmax(np.asarray(logits, np.float32))
    tokens = np.arange(len(scores)) if choice.targets is None else choice.targets
    if len(tokens) and tokens.max() >= len(scores):
        raise ModelError(
            f"The tokenizer has a token {tokens.max()}, but the model scores {len(scores)}. Take both from the same "
            "repository."
        )
    chosen = scores[tokens]
    if choice.top_k < len(chosen):  # a sort of a whole vocabulary takes far longer
        least = np.partition(chosen, -choice.top_k)[-choice.top_k]
        tokens, chosen = tokens[chosen >= least], chosen[chosen >= least]
    order = np.argsort(-chosen, kind="stable")[: choice.top_k]
    return [(int(tokens[i]), float(chosen[i])) for i in order]


def target_ids(targets: str | Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """The ids of words, each once, in ascending order.

    Raises:
        InputError: They are no words, or none of them has a token.
    """
    words = [targets] if isinstance(targets, str) else targets
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise InputError(f"targets are {targets!r}. Give a word, or a list of words.")
    ids = set()
    for word in words:
        token = tokenizer.id(word)
        if token is None:
            pieces = tokenizer.encode(word, add_special_tokens=False).ids
            if not pieces:
                warnings.warn(
                    f"The target {word!r} has no token, and is left out. Give words that the vocabulary has.",
                    stacklevel=2,
                )
                continue
            token = pieces[0]
            warnings.warn(
                f"The target {word!r} is not in the vocabulary: its first token, {tokenizer.token(token)!r}, is taken. "
                "Give words that the vocabulary has.",
                stacklevel=2,
            )
        ids.add(token)
    if not ids:
        raise InputError("No target has a token. Give at least one word that the vocabulary has.")
    return np.array(sorted(ids))

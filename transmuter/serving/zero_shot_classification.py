"""Texts classified by labels that the model was never trained on."""

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
from transmuter.serving.labels import read_ids
from transmuter.serving.options import Options, open_text, served, token_batches
from transmuter.serving.outputs import find_output, softmax
from transmuter.serving.repository import Repository
from transmuter.serving.runtime import Serving
from transmuter.serving.tokenizer import Tokenizer


def zero_shot_classification(
    source: str | os.PathLike[str] | Repository,
    labels: str | Sequence[str] | None = None,
    *,
    hypothesis_template: str = "This example is {}.",
    multi_label: bool = False,
    **options: Unpack[Options],
) -> Serving:
    """Classifies texts by any labels, as transformers' `ZeroShotClassificationPipeline`.

        serving = zero_shot_classification("Xenova/distilbert-base-uncased-mnli", ["urgent", "phone", "tablet"])
        serving("My iphone is broken and I need it fixed today!")
        # {"predictions": [{"label": "urgent", "score": 0.71}, ...]}

    A model of natural language inference compares the text with a hypothesis for each label. An input is a text, or a
    dict of `text` and any of `labels`, `hypothesis_template` and `multi_label`. The result is a dict of `predictions`,
    one for each label, each a dict of `label` and `score`, the highest score first. Each label is one row of a batch.
    Where a text and a hypothesis are too long together, the text is truncated.

    Args:
        source: A folder, or a repository of the Hub.
        labels: The labels, or a string of them with commas between. May be given at a call as well.
        hypothesis_template: The hypothesis, with `{}` where the label goes. May be given at a call as well.
        multi_label: Whether each label is scored alone, by entailment against contradiction, rather than against the
            others with scores that add up to 1. One label is always scored alone. May be given at a call as well.
        options: Those of all tasks.

    Raises:
        HubError, ModelError: The repository could not be had, or is malformed.
        InputError: A template has no place for the label, there is no label, or a call's input is empty or no text.
    """
    opened = open_text(source, options)
    name = find_output(opened.model, ["logits"], "text classification")
    batches = token_batches(opened, options, outputs=(name,))
    defaults = {"labels": labels, "hypothesis_template": hypothesis_template, "multi_label": multi_label}
    hypotheses([] if labels is None else labels_of(labels), hypothesis_template)  # tells of a wrong template at once
    task = ZeroShotClassification(
        opened.tokenizer, batches.max_length, entailment_of(read_ids(opened.repository.config)), defaults
    )
    return served(task, batches, options, name="zero_shot_classification")


@dataclass(frozen=True)
class ZeroShotClassification:
    """What comes before and after the model."""

    tokenizer: Tokenizer
    max_length: int | None
    entailment: int
    defaults: Mapping[str, Any]

    def rows(self, item: Any, **overrides: Any) -> tuple[list[Row], dict[str, Any]]:
        """A row of each label."""
        given = {**overrides, **item} if isinstance(item, Mapping) else {**overrides, "text": item}
        text = text_of(given.pop("text", None))
        options = merged("zero_shot_classification", self.defaults, given)
        if not text:
            raise InputError("The text is empty. Give one that there is something to say of.")
        if options["labels"] is None:
            raise InputError("There are no labels. Give them when the serving is made, or with the input.")
        labels = labels_of(options["labels"])
        pairs = [(text, hypothesis) for hypothesis in hypotheses(labels, options["hypothesis_template"])]
        encodings = self.tokenizer.encode_batch(pairs, max_length=self.max_length, truncation="only_first")
        return [token_row(encoding) for encoding in encodings], {**options, "labels": labels}

    def result(self, context: Mapping[str, Any], outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
        """The labels of an input with their scores."""
        logits = np.stack([next(iter(found.values())) for found in outputs]).astype(np.float32)
        if logits.ndim != 2 or logits.shape[1] < 2 or self.entailment >= logits.shape[1]:
            raise ModelError(
                f"The logits have the shape {list(logits.shape[1:])} for each hypothesis, without one for entailment "
                "and another for contradiction. Use a model of natural language inference."
            )
        scores = label_scores(logits, self.entailment, context["multi_label"])
        order = np.argsort(scores)[::-1]  # of equal scores the last label is first, as in transformers
        return {"predictions": [{"label": context["labels"][i], "score": float(scores[i])} for i in order]}


def labels_of(given: Any) -> list[str]:
    """Labels as a list; a string has them with commas between.

    Raises:
        InputError: There is none, or one is no string.
    """
    labels = [label.strip() for label in given.split(",") if label.strip()] if isinstance(given, str) else given
    if not isinstance(labels, Sequence) or not labels or not all(isinstance(label, str) for label in labels):
        raise InputError(f"The labels are {given!r:.200}. Give a list of at least one string.")
    return list(labels)


def hypotheses(labels: Sequence[str], template: Any) -> list[str]:
    """The hypothesis of each label.

    Raises:
        InputError: The template is no string, or has no place for a label.
    """
    try:
        if isinstance(template, str) and template.format("label") != template:
            return [template.format(label) for label in labels]
    except (IndexError, KeyError, TypeError, ValueError, AttributeError):
        pass
    raise InputError(f"hypothesis_template is {template!r}, without a place for the label. Put {{}} there.")


def entailment_of(ids: Mapping[str, int]) -> int:
    """The class of entailment: that whose name begins with "entail", else the last one, -1, with a warning."""
    found = next((index for label, index in ids.items() if label.lower().startswith("entail")), None)
    if found is None:
        warnings.warn(
            f"No class of the model is named entailment ({', '.join(ids) or 'none has a name'}), so the last one is "
            "taken. Name it in label2id of config.json.",
            stacklevel=3,
        )
        return -1
    return found


def label_scores(logits: np.ndarray, entailment: int, multi_label: bool) -> np.ndarray:
    """Scores [labels] of the logits [labels, classes] of the hypotheses."""
    if multi_label or len(logits) == 1:
        contradiction = -1 if entailment == 0 else 0
        return softmax(logits[:, [contradiction, entailment]])[:, 1]
    return softmax(logits[:, entailment])

"""Classes of texts and of pairs of texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import numpy as np

from transmuter.errors import InputError, ModelError
from transmuter.serving.batching import Row
from transmuter.serving.inputs import merged, pair_of, token_row
from transmuter.serving.labels import label_of, read_labels
from transmuter.serving.options import Options, open_text, served, token_batches
from transmuter.serving.outputs import find_output, sigmoid, softmax
from transmuter.serving.repository import Repository
from transmuter.serving.runtime import Serving
from transmuter.serving.tokenizer import Tokenizer

Function = Literal["softmax", "sigmoid", "none"]
_FUNCTIONS = ("softmax", "sigmoid", "none")
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def text_classification(
    source: str | os.PathLike[str] | Repository,
    *,
    top_k: int | None = 1,
    function_to_apply: Function | None = None,
    **options: Unpack[Options],
) -> Serving:
    """Classifies texts, as transformers' `TextClassificationPipeline`.

        serving = text_classification("Xenova/distilbert-base-uncased-finetuned-sst-2-english")
        serving("I love this movie!")  # {"predictions": [{"label": "POSITIVE", "score": 0.9998}]}

    An input is a text, or a pair: `(text, pair)` or `{"text": ..., "text_pair": ...}`. What is longer than the largest
    `sequence_length` is truncated, the longer of a pair first. The result is a dict of `predictions`, each a dict of
    `label` (from `id2label` of `config.json`) and `score`, the highest score first; classes of equal scores keep their
    order.

    Args:
        source: A folder, or a repository of the Hub.
        top_k: How many predictions; None for one of each class. May be given at a call as well.
        function_to_apply: What makes scores of logits: `softmax`, `sigmoid` or `none`. None follows `problem_type` of
            `config.json`, and where that is absent it is a sigmoid for one class and a softmax for several; a
            regression has its logits. May be given at a call as well.
        options: Those of all tasks.

    Raises:
        HubError, ModelError: The repository could not be had, or is malformed.
        InputError: A call's input is neither a text nor a pair.
    """
    opened = open_text(source, options)
    config = opened.repository.config
    batches = token_batches(opened, options, outputs=(find_output(opened.model, ["logits"], "text classification"),))
    defaults = {"top_k": top_k, "function_to_apply": function_to_apply}
    _check(defaults)
    task = TextClassification(opened.tokenizer, batches.max_length, read_labels(config), _problem(config), defaults)
    return served(task, batches, options, name="text_classification")


@dataclass(frozen=True)
class TextClassification:
    """What comes before and after the model."""

    tokenizer: Tokenizer
    max_length: int | None
    labels: Mapping[int, str] | None
    problem: str | None
    defaults: Mapping[str, Any]

    def rows(self, item: Any, **overrides: Any) -> tuple[list[Row], dict[str, Any]]:
        """One row of a text or pair."""
        return self.rows_of([item], **overrides)[0]

    def rows_of(self, items: Sequence[Any], **overrides: Any) -> list[tuple[list[Row], dict[str, Any]]]:
        """One row of each text or pair."""
        options = merged("text_classification", self.defaults, overrides)
        _check(options)
        encodings = self.tokenizer.encode_batch(
            [pair_of(item) for item in items], max_length=self.max_length, truncation="longest_first"
        )
        return [([token_row(encoding)], options) for encoding in encodings]

    def result(self, context: Mapping[str, Any], outputs: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
        """The predictions of an input."""
        (logits,) = outputs[0].values()
        if logits.ndim != 1:
            raise ModelError(
                f"The logits have the shape {list(logits.shape)} for each text, but one axis of classes is needed. Use "
                "a model that is exported for text classification."
            )
        function = context["function_to_apply"] or default_function(self.problem, len(logits))
        return {"predictions": predictions(scores(logits, function), self.labels, context["top_k"])}


def default_function(problem: str | None, classes: int) -> Function:
    """What makes scores of the logits of a model of this `problem_type`, as in transformers."""
    if problem == "regression":
        return "none"
    if problem == "multi_label_classification" or (problem is None and classes == 1):
        return "sigmoid"
    return "softmax" if classes > 1 else "sigmoid"


def scores(logits: np.ndarray, function: Function) -> np.ndarray:
    """Scores of logits [classes], float32."""
    logits = np.asarray(logits, np.float32)
    if function == "none":
        return logits
    if function == "sigmoid":
        return sigmoid(logits)
    return softmax(logits)


def predictions(values: np.ndarray, labels: Mapping[int, str] | None, top_k: int | None = None) -> list[dict[str, Any]]:
    """Classes with their scores, the highest first; equal ones keep their order.

    Raises:
        ModelError: A class has no name.
    """
    order = np.argsort(-values, kind="stable")[:top_k]
    return [{"label": label_of(labels, int(i)), "score": float(values[i])} for i in order]


def _problem(config: Mapping[str, Any]) -> str | None:
    problem = config.get("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        raise ModelError(
            f"problem_type in config.json is {problem!r}, but the types are {', '.join(_PROBLEMS)}. Correct the file."
        )
    return problem


def _check(options: Mapping[str, Any]) -> None:
    top_k, function = options["top_k"], options["function_to_apply"]
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise InputError(f"top_k is {top_k!r}. Give a positive number, or None for all.")
    if function is not None and function not in _FUNCTIONS:
        raise InputError(f"function_to_apply is {function!r}. Give one of {', '.join(_FUNCTIONS)}.")

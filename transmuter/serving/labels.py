"""The names of a model's classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transmuter.errors import ModelError


def read_labels(config: Mapping[str, Any]) -> dict[int, str] | None:
    """The `id2label` of `config.json`, by class; None where it is absent, so that classes have numbers alone.

    Raises:
        ModelError: It is no dict of numbers and strings.
    """
    given = config.get("id2label")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise _malformed("id2label", given)
    labels = {}
    for key, label in given.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and isinstance(label, str)):
            raise _malformed("id2label", given)
        labels[int(key)] = label
    return labels or None


def read_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """The `label2id` of `config.json`, or what follows from `id2label`; empty where both are absent.

    Raises:
        ModelError: They are no dicts of numbers and strings.
    """
    given = config.get("label2id")
    if given is None:
        return {label: index for index, label in (read_labels(config) or {}).items()}
    if not isinstance(given, dict) or not all(type(index) is int and index >= 0 for index in given.values()):
        raise _malformed("label2id", given)
    return dict(given)


def label_of(labels: Mapping[int, str] | None, index: int) -> str:
    """The name of a class; `LABEL_3` and so on for a model without names.

    Raises:
        ModelError: The model has names, but none for this class.
    """
    if labels is None:
        return f"LABEL_{index}"
    if index not in labels:
        raise ModelError(
            f"The model scores a class {index}, but id2label in config.json names {len(labels)} classes without it. "
            "Take the configuration and the model from the same repository."
        )
    return labels[index]


def _malformed(name: str, given: Any) -> ModelError:
    return ModelError(
        f"{name} in config.json is {given!r:.200}, which does not map classes and names. Correct the file."
    )

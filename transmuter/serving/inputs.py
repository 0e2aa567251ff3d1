"""What a task is given, checked, and its tokens as a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from transmuter.errors import InputError
from transmuter.serving.batching import Row
from transmuter.serving.tokenizer import Encoding


def text_of(item: Any) -> str:
    """A text.

    Raises:
        InputError: It is no string.
    """
    if not isinstance(item, str):
        raise InputError(f"The input is {_named(item)}, but this takes text. Give a string, or a list of strings.")
    return item


def pair_of(item: Any) -> str | tuple[str, str]:
    """A text, or a pair of texts: `(text, pair)`, or a dict of `text` and `text_pair`.

    An empty second text is none, as for transformers' tokenizers (`encode_plus`).

    Raises:
        InputError: It is neither.
    """
    text, pair = item, None
    if isinstance(item, tuple) and len(item) == 2:
        text, pair = item
    elif isinstance(item, Mapping) and set(item) <= {"text", "text_pair"}:
        text, pair = item.get("text"), item.get("text_pair")
    if not isinstance(text, str) or not (pair is None or isinstance(pair, str)):
        raise InputError(
            f"The input is {_named(item)}, but this takes texts and pairs. Give a string, a tuple of two strings, or "
            '{"text": ..., "text_pair": ...}.'
        )
    return (text, pair) if pair else text


def merged(name: str, defaults: Mapping[str, Any], *given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of one input: the defaults, with those of the call and of the input in their place.

    Raises:
        InputError: There is no such option.
    """
    found = dict(defaults)
    for options in given:
        for key, value in options.items():
            if key not in defaults:
                raise InputError(
                    f"{name} has no option {key!r} for an input. Give some of {', '.join(defaults)}, or give it where "
                    "the serving is made."
                )
            found[key] = value
    return found


def token_row(encoding: Encoding) -> Row:
    """The row of an encoded text: `input_ids`, `attention_mask` and `token_type_ids`, each [tokens] int64."""
    return Row(
        {
            "input_ids": np.array(encoding.ids, np.int64),
            "attention_mask": np.ones(len(encoding.ids), np.int64),
            "token_type_ids": np.array(encoding.type_ids, np.int64),
        }
    )


def _named(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"a {type(item).__name__} of {len(item)}"
    if isinstance(item, Mapping):
        return f"a dict of {', '.join(map(str, item)) or 'nothing'}"
    return f"of type {type(item).__name__}"

"""Operators on string tensors, which are Python, and n-gram counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from transmuter.lowering import re2
from transmuter.lowering.arrays import Array, cast, is_string, xp
from transmuter.lowering.registry import operator


def _each(function: Callable[[str], Any], x: np.ndarray, kind: Any = object) -> np.ndarray:
    """`function` of each string."""
    return np.array([function(s) for s in x.reshape(-1)], kind).reshape(x.shape)


def table(rows: Sequence[list[str]], filler: str, shape: tuple[int, ...]) -> np.ndarray:
    """Lists of strings, one per element of a tensor of `shape`, along a new last axis; short ones are filled up."""
    width = max(map(len, rows), default=0)
    return np.array([row + [filler] * (width - len(row)) for row in rows], object).reshape(*shape, width)


@operator()
def StringConcat(X, Y):
    return np.asarray(np.add(X, Y), object)


@operator()
def StringSplit(X, *, delimiter, maxsplit):
    """An empty string is one substring if there is a delimiter, and white space is Unicode's; ONNX Runtime counts no
    substring there, and knows no white space but the space."""
    limit = -1 if maxsplit is None else maxsplit
    pieces = [s.split(delimiter, limit) if delimiter else s.strip().split(None, limit) for s in X.reshape(-1)]
    counts = np.array([len(p) for p in pieces], np.int64)
    return table(pieces, "", X.shape), counts.reshape(X.shape)


@operator()
def StringNormalizer(X, *, case_change_action, is_case_sensitive, locale, stopwords):
    """Case does not depend on the locale, and `ß` in upper case is `SS`; ONNX Runtime leaves it."""
    if X.ndim > 2 or (X.ndim == 2 and X.shape[0] != 1):
        raise ValueError(f"the shape is {X.shape}, neither [C] nor [1, C]")
    comparable = str if is_case_sensitive else str.lower
    change = {"LOWER": str.lower, "UPPER": str.upper, "NONE": str}[case_change_action]
    stops = {comparable(word) for word in stopwords or ()}
    kept = [change(s) for s in X.reshape(-1) if comparable(s) not in stops]
    return np.array(kept or [""], object).reshape((-1,) if X.ndim == 1 else (1, -1))


@operator()
def RegexFullMatch(X, *, pattern):
    """Classes of scripts (`\\p{Greek}`) are an error, since Python does not know them."""
    expression = re2.compiled(pattern)
    return _each(lambda s: expression.fullmatch(s) is not None, X, bool)


# ---- n-grams --------------------------------------------------------------------------------------------------------


def _grams(pool: np.ndarray, counts: Sequence[int]) -> Iterator[np.ndarray]:
    """The n-grams of the pool, an array [grams, n] for each n from 1 on."""
    ends = [*counts[1:], len(pool)]
    for length, (start, end) in enumerate(zip(counts, ends), 1):
        yield pool[start:end].reshape(-1, length)


def _occurrences(x: Array, grams: np.ndarray, skips: Sequence[int]) -> Array:
    """How often each of the n-grams occurs in each row of `x`, its elements one skip plus one apart."""
    length, total = grams.shape[1], np.zeros((x.shape[0], len(grams)), np.int32)
    for skip in skips:
        stride = skip + 1
        places = x.shape[1] - (length - 1) * stride
        if places > 0:
            same = [xp.equal(x[:, i * stride : i * stride + places, None], grams[:, i]) for i in range(length)]
            total = total + xp.sum(xp.all(xp.stack(same), axis=0), axis=1, dtype=np.int32)
    return total


@operator()
def TfIdfVectorizer(
    X,
    *,
    max_gram_length,
    max_skip_count,
    min_gram_length,
    mode,
    ngram_counts,
    ngram_indexes,
    pool_int64s,
    pool_strings,
    weights,
):
    if is_string(X):
        number = {word: i for i, word in enumerate(dict.fromkeys(pool_strings))}
        X, pool = _each(lambda s: number.get(s, -1), X, np.int32), np.array([number[s] for s in pool_strings], np.int32)
    else:
        pool = np.array(pool_int64s, np.int64)
    rows = xp.reshape(X, (1, -1)) if X.ndim == 1 else X
    pool = cast(pool, rows.dtype)
    counts = []
    for length, grams in enumerate(_grams(pool, ngram_counts), 1):
        counted = min_gram_length <= length <= max_gram_length
        skips = range(max_skip_count + 1) if length > 1 else (0,)
        counts.append(_occurrences(rows, grams, skips if counted else ()))
    found = xp.concatenate(counts, axis=1)
    columns = np.array(ngram_indexes)
    if len(np.unique(columns)) != len(columns) or found.shape[1] != len(columns):
        raise ValueError(f"{found.shape[1]} n-grams are counted in {len(np.unique(columns))} columns")
    scale = np.ones(len(columns), np.float32) if weights is None or mode == "TF" else np.array(weights, np.float32)
    found = cast(xp.minimum(found, 1) if mode == "IDF" else found, np.float32) * scale
    source = np.full(columns.max() + 1, len(columns))  # columns that no n-gram has are zero
    source[columns] = np.arange(len(columns))
    result = xp.take(xp.pad(found, ((0, 0), (0, 1))), source, axis=1)
    return result[0] if X.ndim == 1 else result

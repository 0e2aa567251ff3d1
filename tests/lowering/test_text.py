"""String operators and n-gram counts, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onenode import one_node, ort_node, run_node
from onnx import TensorProto

import transmuter
from lowering.paths import both_paths

WORDS = np.array([["a b  c ", " "], ["x", "a,b,,c"]], object)


def assert_same(op: str, x: np.ndarray, attributes: dict[str, Any], **options: Any) -> None:
    expected = ort_node(op, [x], attributes, **options)
    for compiled in (False, True):
        for actual, wanted in zip(run_node(op, [x], attributes, compiled=compiled, **options), expected, strict=True):
            assert actual.shape == np.shape(wanted)
            np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("delimiter", [None, "", ",", " "])
@pytest.mark.parametrize("maxsplit", [None, 0, 1, 2])
def test_split(delimiter: str | None, maxsplit: int | None) -> None:
    attributes = {"delimiter": delimiter, "maxsplit": maxsplit}
    types = [TensorProto.STRING, TensorProto.INT64]
    given = {k: v for k, v in attributes.items() if v is not None}
    assert_same("StringSplit", WORDS, given, outputs=2, output_types=types)


def test_split_of_nothing() -> None:
    types = {"outputs": 2, "output_types": [TensorProto.STRING, TensorProto.INT64]}
    pieces, counts = run_node("StringSplit", [np.array(["", " "], object)], {}, **types)
    assert pieces.shape == (2, 0)
    np.testing.assert_array_equal(counts, [0, 0])


@pytest.mark.parametrize("sensitive", [0, 1])
@pytest.mark.parametrize("action", ["LOWER", "UPPER", "NONE"])
def test_normalizer(action: str, sensitive: int) -> None:
    x = np.array(["Monday", "tuesday", "MONDAY"], object)
    attributes = {"case_change_action": action, "is_case_sensitive": sensitive, "stopwords": ["monday", "Tuesday"]}
    kept = [s for s in x if sensitive or s.lower() not in ("monday", "tuesday")] or [""]
    change = {"LOWER": str.lower, "UPPER": str.upper, "NONE": str}[action]
    for shaped in (x, x[None]):
        (y,) = run_node("StringNormalizer", [shaped], attributes)
        assert y.reshape(-1).tolist() == [change(s) for s in kept]
        assert y.ndim == shaped.ndim


@pytest.mark.parametrize(
    "pattern", ["[[:alpha:]]+", r"\w+", "[^[:digit:]]*", r"(?i)ABC|a\d\z", "a.*", ".", "(?s)x.", "x$"]
)
def test_regular_expressions_are_those_of_re2(pattern: str) -> None:
    x = np.array(["abc", "a1", "", "x\n", "Été", "a_b", "x"], object)
    assert_same("RegexFullMatch", x, {"pattern": pattern}, output_types=[TensorProto.BOOL])


def test_an_expression_that_python_lacks_is_an_error() -> None:
    with pytest.raises(transmuter.TransmuterError, match="bad escape"):
        run_node("RegexFullMatch", [WORDS], {"pattern": r"\pL+"}, output_types=[TensorProto.BOOL])


# ---- n-grams --------------------------------------------------------------------------------------------------------

GRAMS = [1, 2, 3, 1, 2, 2, 3, 3, 3, 1, 2, 3, 3, 1, 1]
COUNTS = {"ngram_counts": [0, 3, 9], "ngram_indexes": [7, 1, 2, 3, 0, 5, 6, 4]}


def ngrams(mode: str, skips: int, lengths: tuple[int, int]) -> dict[str, Any]:
    return {
        **COUNTS,
        "mode": mode,
        "max_skip_count": skips,
        "min_gram_length": lengths[0],
        "max_gram_length": lengths[1],
    }


@settings(max_examples=15, deadline=None)
@given(
    mode=st.sampled_from(["TF", "IDF", "TFIDF"]),
    skips=st.integers(0, 4),
    lengths=st.sampled_from([(1, 1), (1, 2), (2, 3), (1, 3), (3, 3)]),
    kind=st.sampled_from([np.int32, np.int64, object]),
    seed=st.integers(0, 99),
)
def test_ngrams(mode: str, skips: int, lengths: tuple[int, int], kind: Any, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 4, (2, 9))
    x = np.vectorize(str, otypes=[object])(x) if kind is object else x.astype(kind)
    pool = {"pool_strings": [str(g) for g in GRAMS]} if kind is object else {"pool_int64s": GRAMS}
    for rows in (x, x[0]):
        assert_same("TfIdfVectorizer", rows, {**ngrams(mode, skips, lengths), **pool}, output_types=[TensorProto.FLOAT])


def test_ngrams_of_weighted_columns() -> None:
    x, weights = np.array([[1, 2, 3, 3]]), np.arange(1, 9, dtype=np.float32)
    attributes = {**ngrams("TFIDF", 0, (1, 1)), "pool_int64s": GRAMS, "weights": weights.tolist()}
    (y,) = run_node("TfIdfVectorizer", [x], attributes, output_types=[TensorProto.FLOAT])
    np.testing.assert_array_equal(y, [[0, 2, 6, 0, 0, 0, 0, 1]])


def test_ngrams_of_known_values_are_known() -> None:
    x = np.array([[1, 2, 3, 3], [3, 1, 1, 2]])
    both_paths("TfIdfVectorizer", x, **ngrams("TF", 1, (1, 3)), pool_int64s=GRAMS)


def test_ngrams_with_64_bits_off() -> None:
    x = np.array([[1, 2, 3, 3]], np.int32)
    model = transmuter.load(one_node("TfIdfVectorizer", [x], {**ngrams("TF", 0, (1, 2)), "pool_int64s": GRAMS}))
    with jax.enable_x64(False), jax.numpy_dtype_promotion("strict"):
        y = jax.jit(lambda x: model.apply({}, [x])["y0"])(x)
    np.testing.assert_array_equal(y, [[1, 1, 2, 1, 0, 1, 0, 1]])

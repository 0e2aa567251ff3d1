"""String operators and n-gram counts, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from onenode import one_node, ort_node, run_node
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

import transmuter
from lowering.paths import both_paths

WORDS = np.array([["a b  c ", " "], ["x", "a,b,,c"]], object)


def assert_same(op: str, x: np.ndarray, attributes: dict[str, Any], *, compiled: bool = False, **options: Any) -> None:
    expected = ort_node(op, [x], attributes, **options)
    for actual, wanted in zip(run_node(op, [x], attributes, compiled=compiled, **options), expected, strict=True):
        assert_equal(actual, wanted)


TEXTS = st.text("aAbBkéÉß\u0131\u212a1_ .,-{\n\t\x0b\u00a0\u3000", max_size=8)
"""Strings that tell definitions of case, of space and of words apart."""

SPLIT = {"outputs": 2, "output_types": [TensorProto.STRING, TensorProto.INT64]}

shapes = st.sampled_from([(3,), (1, 3), (3, 1), (0,)])


def tensor(texts: list[str], shape: tuple[int, ...]) -> np.ndarray:
    return np.array(texts[: int(np.prod(shape))], object).reshape(shape)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text("ab ,é", max_size=6), min_size=3, max_size=3),
    shape=shapes,
    delimiter=st.sampled_from([None, "", ",", " ", "a", "ab"]),
    maxsplit=st.sampled_from([None, 0, 1, 2]),
)
def test_split(texts: list[str], shape: Any, delimiter: str | None, maxsplit: int | None) -> None:
    if delimiter:  # the specification counts an empty string as one part
        texts = [text or "x" for text in texts]
    given = {k: v for k, v in {"delimiter": delimiter, "maxsplit": maxsplit}.items() if v is not None}
    assert_same("StringSplit", tensor(texts, shape), given, **SPLIT)


@settings(max_examples=15, deadline=None)
@given(texts=st.lists(TEXTS, min_size=3, max_size=3), maxsplit=st.sampled_from([None, 0, 1]))
def test_split_at_white_space_of_every_kind(texts: list[str], maxsplit: int | None) -> None:
    x = np.array([text.strip() for text in texts], object)  # what the reference leaves at the end of the last part
    attributes = {} if maxsplit is None else {"maxsplit": maxsplit}
    reference = ReferenceEvaluator(one_node("StringSplit", [x], attributes, **SPLIT))
    for actual, wanted in zip(
        run_node("StringSplit", [x], attributes, **SPLIT), reference.run(None, {"x0": x}), strict=True
    ):
        assert_equal(actual, wanted)


def test_split_of_nothing() -> None:
    pieces, counts = run_node("StringSplit", [np.array(["", " "], object)], {}, **SPLIT)
    assert pieces.shape == (2, 0)
    np.testing.assert_array_equal(counts, [0, 0])
    pieces, counts = run_node("StringSplit", [np.array(["", "a,"], object)], {"delimiter": ","}, **SPLIT)
    assert pieces.tolist() == [["", ""], ["a", ""]]
    np.testing.assert_array_equal(counts, [1, 2])


@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=6, max_size=6), pair=st.sampled_from([((3,), (3,)), ((3, 1), (1, 3)), ((), (3,))])
)
def test_concatenation(texts: list[str], pair: Any) -> None:
    inputs = [tensor(texts, pair[0]), tensor(texts[3:], pair[1])]
    (wanted,), (y,) = (f("StringConcat", inputs) for f in (ort_node, run_node))
    assert_equal(y, wanted)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text("aAbBéÉßi ", max_size=3), min_size=3, max_size=3),
    shape=st.sampled_from([(3,), (1, 3)]),
    action=st.sampled_from([None, "LOWER", "UPPER", "NONE"]),
    sensitive=st.sampled_from([None, 0, 1]),
    stopwords=st.sampled_from([None, ["a", "É"], ["", "ab"], ["AB", "é", "b"]]),
)
def test_normalizer(texts: list[str], shape: Any, action: Any, sensitive: Any, stopwords: Any) -> None:
    """Of `ß`, whose upper case has two letters, ONNX Runtime makes nothing."""
    attributes = {"case_change_action": action, "is_case_sensitive": sensitive, "stopwords": stopwords}
    attributes = {k: v for k, v in attributes.items() if v is not None}
    if action == "UPPER":
        texts = [text.replace("ß", "b") for text in texts]
    assert_same("StringNormalizer", tensor(texts, shape), {**attributes, "locale": "C.UTF-8"})


def test_normalizer_of_a_shape_that_is_not_defined() -> None:
    with pytest.raises(transmuter.TransmuterError, match="neither"):
        run_node("StringNormalizer", [np.array([["a"], ["b"]], object)], {})


# ---- regular expressions --------------------------------------------------------------------------------------------

ATOMS = (
    r"a b ab . é A k ß [ab] [^a] \w \W \d \s \S [\w-] [^\W] [\D_] []a] [a-] [&&~|[] \b \B ^ $ \z \A \. \n \x41 { a{2}"
)
ATOMS = [*ATOMS.split(), " ", "[[:alpha:]]", "[[:^digit:]b]", "[[:space:]]", "(?P<n>a)", r"\Qa.\E", r"\x{e9}"]
ATOMS += [r"\pL", r"\p{Lu}", r"\P{L}", r"[\p{Nd}a]", "(?i)", "(?s)", "(?m)", "(?i-s)", ""]

EXPRESSIONS = st.recursive(
    st.sampled_from(ATOMS),
    lambda part: st.one_of(
        st.tuples(part, part).map("".join),
        st.tuples(part, part).map("|".join),
        part.map("({})".format),
        st.tuples(st.sampled_from(["i", "m", "s", "is", "U", "-i"]), part).map(lambda p: f"(?{p[0]}:{p[1]})"),
        st.tuples(part, st.sampled_from(["*", "+", "?", "*?", "+?", "{1,2}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=6,
).filter(bool)
"""Expressions of RE2, most of which mean something else, or nothing, to Python."""


@settings(max_examples=80, deadline=None)
@given(texts=st.lists(TEXTS, min_size=8, max_size=8), pattern=EXPRESSIONS)
def test_regular_expressions_are_those_of_re2(texts: list[str], pattern: str) -> None:
    x = np.array([*texts, ""], object)
    (wanted,), (y,) = (
        f("RegexFullMatch", [x], {"pattern": pattern}, output_types=[TensorProto.BOOL]) for f in (ort_node, run_node)
    )
    assert_equal(y, wanted)


def test_compiled_strings() -> None:
    counted = {**ngrams("TF", 1, (1, 3)), "pool_strings": [str(g) for g in GRAMS]}
    words = np.array(["1", "2", "3", "3"], object)
    assert_same("TfIdfVectorizer", words, counted, compiled=True, output_types=[TensorProto.FLOAT])
    assert_same("RegexFullMatch", WORDS, {"pattern": "a.*"}, compiled=True, output_types=[TensorProto.BOOL])
    assert_same("StringSplit", WORDS, {}, compiled=True, **SPLIT)
    assert_same("StringNormalizer", WORDS[0], {"case_change_action": "UPPER", "locale": "C"}, compiled=True)


def test_an_expression_that_python_lacks_is_an_error() -> None:
    with pytest.raises(transmuter.TransmuterError, match="class Greek of regular expressions is not supported"):
        run_node("RegexFullMatch", [WORDS], {"pattern": r"\p{Greek}+"}, output_types=[TensorProto.BOOL])


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


@settings(max_examples=20, deadline=None)
@given(
    mode=st.sampled_from(["TF", "IDF", "TFIDF"]),
    skips=st.sampled_from([0, 1, 4]),
    lengths=st.sampled_from([(1, 1), (2, 3), (1, 3)]),
    kind=st.sampled_from([np.int64, object]),
    shape=st.sampled_from([(2, 9), (9,), (2, 1), (2, 0)]),
    weights=st.sampled_from([None, [0.5, 1, 2, 3, 4, -1, 0, 7]]),
    seed=st.integers(0, 99),
)
def test_ngrams(mode: str, skips: int, lengths: Any, kind: Any, shape: Any, weights: Any, seed: int) -> None:
    x = np.random.default_rng(seed).integers(0, 4, shape)
    x = np.array([str(v) for v in x.flat], object).reshape(shape) if kind is object else x
    pool = {"pool_strings": [str(g) for g in GRAMS]} if kind is object else {"pool_int64s": GRAMS}
    attributes = {**ngrams(mode, skips, lengths), **pool} | ({"weights": weights} if weights else {})
    assert_same("TfIdfVectorizer", x, attributes, output_types=[TensorProto.FLOAT])


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

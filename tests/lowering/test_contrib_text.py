"""Tokens and hashes of strings, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from comparison import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from onenode import one_node, ort_node, run_node
from onnx import TensorProto as T

import transmuter
from lowering.test_text import EXPRESSIONS, TEXTS

CONTRIB = {"domain": "com.microsoft"}
TOKENS = {"mark": 0, "mincharnum": 1, "pad_value": "#"}


def assert_same(op: str, x: np.ndarray, attributes: dict[str, Any], **options: Any) -> None:
    (wanted,) = ort_node(op, [x], attributes, **options, **CONTRIB)
    (actual,) = run_node(op, [x], attributes, **options, **CONTRIB)
    assert_equal(actual, wanted)


# ---- tokens ---------------------------------------------------------------------------------------------------------

PLACES = st.sampled_from([(3,), (1, 3), (3, 1)])


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=3, max_size=3),
    shape=PLACES,
    mark=st.booleans(),
    minimum=st.integers(1, 3),
    how=st.one_of(
        st.fixed_dictionaries({"tokenexp": EXPRESSIONS}),
        st.fixed_dictionaries({"separators": st.lists(EXPRESSIONS, min_size=1, max_size=2)}),
        st.just({"separators": [""]}),
        st.just({"tokenexp": "."}),
    ),
)
def test_tokens(texts: list[str], shape: Any, mark: bool, minimum: int, how: dict[str, Any]) -> None:
    by_character = how in ({"separators": [""]}, {"tokenexp": "."})
    attributes = {**TOKENS, "mark": int(mark), "mincharnum": 1 if by_character else minimum, **how}
    assert_same("Tokenizer", np.array(texts, object).reshape(shape), attributes)


@pytest.mark.parametrize("shape", [(0,), (0, 2), (2, 0)])
def test_no_strings_have_no_tokens(shape: tuple[int, ...]) -> None:
    assert_same("Tokenizer", np.zeros(shape, object), {**TOKENS, "separators": [" "]})


def test_the_documented_tokens() -> None:
    x = np.array(["Hello World", "I love computer science !"], object)
    (y,) = run_node("Tokenizer", [x], {**TOKENS, "mark": 1, "separators": [" "]}, compiled=True, **CONTRIB)
    assert y.tolist() == [
        ["\x02", "Hello", "World", "\x03", "#", "#", "#"],
        ["\x02", "I", "love", "computer", "science", "!", "\x03"],
    ]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({}, "either separators or tokenexp"),
        ({"separators": [" "], "tokenexp": "a"}, "either separators or tokenexp"),
        ({"separators": [""], "mincharnum": 2}, "characters as tokens"),
        ({"separators": [" "], "mincharnum": 0}, "not positive"),
        ({"separators": [r"\p{Greek}"]}, "class Greek of regular expressions is not supported"),
    ],
)
def test_tokens_that_are_not_defined(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(transmuter.TransmuterError, match=message):
        run_node("Tokenizer", [np.array(["a"], object)], {**TOKENS, **attributes}, **CONTRIB)


# ---- hashes ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.text(max_size=9), max_size=4),
    positive=st.sampled_from([None, 0, 1]),
    seed=st.sampled_from([None, 0, 42, 2**32 - 1]),
)
def test_hashes_of_strings(texts: list[str], positive: int | None, seed: int | None) -> None:
    attributes = {k: v for k, v in {"positive": positive, "seed": seed}.items() if v is not None}
    kind = T.INT32 if positive == 0 else T.UINT32
    assert_same("MurmurHash3", np.array(texts, object), attributes, output_types=[kind])


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from([np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64]),
    values=st.lists(st.integers(0, 255), min_size=32, max_size=32),
    positive=st.sampled_from([0, 1]),
    shape=st.sampled_from([(2, 2), (0, 3), ()]),
)
def test_hashes_of_numbers(kind: Any, values: list[int], positive: int, shape: tuple[int, ...]) -> None:
    x = np.array(values, np.uint8).view(kind)
    x = np.zeros(shape, kind) if 0 in shape else x[: int(np.prod(shape))].reshape(shape)
    assert_same("MurmurHash3", x, {"positive": positive}, output_types=[T.UINT32 if positive else T.INT32])


def test_hashes_are_compiled() -> None:
    x = np.array([[1, -2, 3]])
    (wanted,) = ort_node("MurmurHash3", [x], {"seed": 7}, output_types=[T.UINT32], **CONTRIB)
    for compiled, known in ((True, []), (True, [0])):
        options = {"compiled": compiled, "known": known, "output_types": [T.UINT32]}
        assert_equal(run_node("MurmurHash3", [x], {"seed": 7}, **options, **CONTRIB)[0], wanted)
    x = x.astype(np.int32)
    (wanted,) = ort_node("MurmurHash3", [x], {}, output_types=[T.UINT32], **CONTRIB)
    model = transmuter.load(one_node("MurmurHash3", [x], {}, output_types=[T.UINT32], **CONTRIB))
    with jax.enable_x64(False), jax.numpy_dtype_promotion("strict"):
        assert_equal(jax.jit(lambda x: model.apply({}, [x])["y0"])(x), wanted)

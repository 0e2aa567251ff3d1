"""The list of models: what is written is read again, and what is malformed is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import transmuter
from transmuter.coverage import catalogue
from transmuter.coverage.catalogue import Entry

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)
VALUE = st.one_of(
    st.integers(-9, 9), st.booleans(), TEXT, st.floats(-1e6, 1e6), st.lists(st.integers(0, 9), max_size=3)
)


@given(
    reason=TEXT,
    inputs=st.dictionaries(TEXT, st.dictionaries(TEXT, VALUE, max_size=2), max_size=2),
    sizes=st.lists(st.dictionaries(TEXT, st.integers(0, 99), max_size=2), max_size=2),
)
def test_what_is_written_is_read(reason, inputs, sizes, tmp_path_factory):
    path = tmp_path_factory.mktemp("list") / "models.toml"
    written = [Entry("a", "hf://a/b/c.onnx", reason=reason, inputs=inputs, sizes=sizes), Entry("b.1", "local://x.onnx")]
    catalogue.write(written, path)
    assert catalogue.read(path) == written


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[model]]\nname = 'a'", "lacks 'source'"),
        ("[[model]]\nname = 'a b'\nsource = 'x'", "'a b' is no name"),
        ("[[model]]\nname = '../a'\nsource = 'x'", "is no name"),
        ("[[model]]\nname = 'a'\nsource = 'x'\ncolour = 1", "the key 'colour'"),
        ("[[model]]\nname = 'a'\nsource = 'x'\n[[model]]\nname = 'a'\nsource = 'x'", "two models called 'a'"),
        ("[[model", "is no TOML"),
    ],
)
def test_malformed_lists(text, told, tmp_path):
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(transmuter.CoverageError, match=told):
        catalogue.read(path)


def test_a_list_that_is_not_there(tmp_path):
    with pytest.raises(transmuter.CoverageError, match="--models"):
        catalogue.read(tmp_path / "models.toml")

"""Tokenizers against what transformers' tokenizers gave for the recorded repositories, and what those lack."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MATERIAL
from tiny_repositories import make_repository

from transmuter import InputError, ModelError
from transmuter.serving import Repository, Tokenizer


def _recorded() -> list[Any]:
    found = sorted(path.parent.name for path in (MATERIAL / "zoo").glob("*/tokenizer_reference.json"))
    if not found:
        reason = f"no recorded repositories at {MATERIAL}; TRANSMUTER_MATERIAL names their folder"
        return [pytest.param("", marks=pytest.mark.skip(reason=reason))]
    return found


def _load(name: str) -> tuple[Tokenizer, dict[str, Any]]:
    repository = Repository.open(MATERIAL / "zoo" / name)
    folder = "tokenizer" if "tokenizer/tokenizer.json" in repository else ""
    reference = json.loads((MATERIAL / "zoo" / name / "tokenizer_reference.json").read_text(encoding="utf-8"))
    return Tokenizer.load(repository, folder), reference


@pytest.mark.parametrize("name", _recorded())
def test_equals_transformers(name: str) -> None:
    tokenizer, reference = _load(name)
    assert len(reference["cases"]) >= 10
    texts = [case["text"] for case in reference["cases"]]
    together = tokenizer.encode_batch(texts)
    for case, of_batch in zip(reference["cases"], together, strict=True):
        encoding = tokenizer.encode(case["text"])
        assert encoding.ids == of_batch.ids == case["ids"]
        assert [tokenizer.token(id) for id in case["ids"]] == case["tokens"]
        assert tokenizer.encode(case["text"], add_special_tokens=False).ids == case["ids_without_special"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=True) == case["decoded_without_special"]
        assert [tokenizer.id(tokenizer.token(id)) for id in case["ids"]] == case["ids"]


@pytest.mark.parametrize("name", _recorded())
def test_pairs_and_batches_equal_transformers(name: str) -> None:
    tokenizer, reference = _load(name)
    pair = reference["pair"]
    encoding = tokenizer.encode(*pair["texts"])
    assert encoding.ids == pair["input_ids"]
    assert encoding.attention_mask == pair["attention_mask"]
    assert encoding.type_ids == pair.get("token_type_ids", encoding.type_ids)
    batch = reference["batch"]
    rows = tokenizer.pad(tokenizer.encode_batch(batch["texts"], max_length=batch["max_length"]), batch["max_length"])
    for key in rows.keys() & batch.keys():
        assert rows[key].tolist() == batch[key], key


def _others() -> list[Any]:
    """The recorded repositories without a reference of a tokenizer: of pictures and sound."""
    found = [path.parent.name for path in sorted((MATERIAL / "zoo").glob("*/config.json"))]
    others = [name for name in found if not (MATERIAL / "zoo" / name / "tokenizer_reference.json").exists()]
    return others or [pytest.param("", marks=pytest.mark.skip(reason=f"no recorded repositories at {MATERIAL}"))]


@pytest.mark.parametrize("name", _others())
def test_repositories_without_a_tokenizer_say_so(name: str) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json|is no definition of a tokenizer"):
        Tokenizer.load(MATERIAL / "zoo" / name)


# ---- what the recorded repositories lack ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make_repository(tmp_path_factory.mktemp(kind), kind=kind) for kind in ("wordpiece", "bpe", "unigram")}


@pytest.fixture(scope="module")
def bert(folders: dict[str, Path]) -> Tokenizer:
    return Tokenizer.load(folders["wordpiece"])


TEXT = "the cat sat on the mat in new york city"
SHORT = "who likes paris"


@pytest.mark.parametrize(
    ("pair", "truncation", "tokens"),
    [
        (None, "longest_first", "[CLS] the cat sat on the mat [SEP]"),
        (SHORT, "longest_first", "[CLS] the cat sat [SEP] who likes [SEP]"),
        (SHORT, "only_first", "[CLS] the cat [SEP] who likes paris [SEP]"),
        ("who", "longest_first", "[CLS] the cat sat on [SEP] who [SEP]"),
        (TEXT, "longest_first", "[CLS] the cat [SEP] the cat sat [SEP]"),
    ],
)
def test_truncation(bert: Tokenizer, pair: str | None, truncation: Any, tokens: str) -> None:
    assert bert.encode(TEXT, pair, max_length=8, truncation=truncation).tokens == tokens.split()
    assert len(bert.encode(TEXT, pair, truncation=truncation)) > 8
    assert len(bert.encode(TEXT, pair, max_length=8, truncation=None)) > 8
    assert len(bert.encode(TEXT, pair, max_length=100, truncation=truncation)) > 8


def test_truncation_of_the_second(bert: Tokenizer) -> None:
    encoding = bert.encode(SHORT, TEXT, max_length=8, truncation="only_second")
    assert encoding.tokens == ["[CLS]", "who", "likes", "paris", "[SEP]", "the", "cat", "[SEP]"]
    assert encoding.type_ids == [0, 0, 0, 0, 0, 1, 1, 1]
    assert encoding.sequence_ids == [None, 0, 0, 0, None, 1, 1, None]
    assert encoding.special_tokens_mask == [1, 0, 0, 0, 1, 0, 0, 1]
    assert encoding.word_ids == [None, 0, 1, 2, None, 0, 1, None]


def test_windows(bert: Tokenizer) -> None:
    first = bert.encode(SHORT, TEXT, max_length=9, truncation="only_second", stride=1)
    windows = [first, *first.overflowing]
    texts = [[t for t, s in zip(w.tokens, w.sequence_ids, strict=True) if s == 1] for w in windows]
    assert texts == [
        ["the", "cat", "sat"],
        ["sat", "on", "the"],
        ["the", "mat", "in"],
        ["in", "new", "york"],
        ["york", "city"],
    ]
    for window in windows:
        assert window.tokens[:5] == ["[CLS]", "who", "likes", "paris", "[SEP]"]
        assert window.type_ids == [0] * 5 + [1] * (len(window) - 5)
        for (start, end), token, sequence in zip(window.offsets, window.tokens, window.sequence_ids, strict=True):
            assert sequence is None or (SHORT, TEXT)[sequence][start:end] == token


def test_truncation_from_the_left(tmp_path: Path) -> None:
    settings = {"truncation_side": "left", "padding_side": "left"}
    tokenizer = Tokenizer.load(make_repository(tmp_path / "repo", tokenizer_config=settings))
    encoding = tokenizer.encode(TEXT, max_length=4)
    assert encoding.tokens == ["[CLS]", "york", "city", "[SEP]"]
    rows = tokenizer.pad([encoding, tokenizer.encode("")])
    assert rows["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert rows["input_ids"][1, :2].tolist() == [tokenizer.pad_id] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 2}, "no room beside the special tokens"),
        ({"max_length": 0}, "no room"),
        ({"max_length": 8, "truncation": "none"}, "truncation is 'none', but must be 'longest_first'"),
        ({"max_length": 5, "truncation": "only_first", "pair": TEXT}, "the text has 10 tokens, of which"),
        ({"max_length": 5, "truncation": "only_second"}, "The pair has 0 tokens"),
        ({"max_length": 5, "stride": 3}, "Windows of 3 tokens cannot overlap by 3"),
    ],
)
def test_impossible_truncation(bert: Tokenizer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"(?i){message}"):
        bert.encode(TEXT, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "A text is a NoneType, but must be a string"),
        (b"the cat", "A text is a bytes"),
        (3, "A text is a int"),
        (["the", "cat"], "A text is a list"),
        ("a \ud83d b", "half of a surrogate pair"),
    ],
)
def test_what_is_no_text(bert: Tokenizer, text: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bert.encode(text)
    with pytest.raises(InputError, match=message):
        bert.encode_batch(["the cat", text])


def test_words(bert: Tokenizer) -> None:
    words = ["the", "", "cats", "sat"]
    encoding = bert.encode(words, is_split_into_words=True)
    assert encoding.tokens == ["[CLS]", "the", "cat", "##s", "sat", "[SEP]"] or encoding.tokens[1] == "the"
    assert encoding.word_ids[1:-1] == sorted(encoding.word_ids[1:-1])
    assert 1 not in encoding.word_ids
    pair = bert.encode_batch([(["the"], ["cat", "sat"])], is_split_into_words=True)[0]
    assert pair.tokens == ["[CLS]", "the", "[SEP]", "cat", "sat", "[SEP]"]
    with pytest.raises(InputError, match="must be a list of words"):
        bert.encode("the cat", is_split_into_words=True)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\t \u00a0\u200b",
        "🙂 the 👩‍👩‍👧 cat 👍🏽",
        "née ne\u0301e nee",
        "日本語 と 中文",
        "ﬁne ½ ①",
        "[CLS] the [SEP] cat </s> <s>",
        "a\u0000b",
        "\U0010ffff",
    ],
)
def test_offsets_are_of_characters(folders: dict[str, Path], kind: str, text: str) -> None:
    tokenizer = Tokenizer.load(folders[kind])
    encoding = tokenizer.encode(text)
    assert encoding.ids == tokenizer.encode_batch([text, text])[1].ids
    previous = 0
    for (start, end), is_special in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
        assert 0 <= start <= end <= len(text)
        if not is_special:
            assert start >= previous or kind == "bpe"  # of bytes of one character
            previous = start
    words = {text[start:end].strip() for start, end in encoding.offsets}
    assert {"the", "cat"} & set(text.split()) <= words


def test_a_million_characters(bert: Tokenizer) -> None:
    encoding = bert.encode("the cat " * 125_000, max_length=64)
    assert len(encoding) == 64
    assert encoding.tokens[-3:] == ["the", "cat", "[SEP]"]


def test_many_threads_with_lengths_of_their_own(bert: Tokenizer) -> None:
    def one(length: int) -> int:
        return len(bert.encode(TEXT, SHORT, max_length=length))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, list(range(5, 16)) * 50)) == list(range(5, 16)) * 50


def test_settings_change_the_tokenizer(tmp_path: Path) -> None:
    def loaded(name: str, **options: Any) -> Tokenizer:
        return Tokenizer.load(make_repository(tmp_path / name, **options))

    cased = loaded("cased", lower_case=False, tokenizer_config={"do_lower_case": True})
    assert cased.encode("The").tokens[1] == "the"
    assert loaded("a", tokenizer_config={"do_lower_case": False}).encode("The").tokens[1] == "[UNK]"
    plain, prefixed = loaded("b", kind="bpe"), loaded("c", kind="bpe", tokenizer_config={"add_prefix_space": True})
    assert (plain.encode("the").tokens[1], prefixed.encode("the").tokens[1]) == ("the", "Ġthe")
    assert prefixed.encode("the").offsets[1] == (0, 3)
    lower = plain.lowercased()
    assert lower.encode("THE").tokens[1] == "the"
    assert plain.encode("THE").tokens[1] == "T"
    assert lower.lowercased() is lower
    added = {"97": {"content": "dog", "special": False, "single_word": True, "normalized": True}}
    own = loaded("d", kind="unigram", tokenizer_config={"added_tokens_decoder": added})
    assert own.encode("xdog dog").tokens[-2] == "dog"


def test_special_tokens(folders: dict[str, Path], tmp_path: Path) -> None:
    roberta = Tokenizer.load(folders["bpe"])
    assert (roberta.bos_id, roberta.pad_id, roberta.eos_id, roberta.unk_id, roberta.mask_id) == (0, 1, 2, 3, 4)
    assert (roberta.mask_token, roberta.max_length, roberta.name) == ("<mask>", 64, "Roberta")
    assert roberta.special_ids == {0, 1, 2, 3, 4}
    missing = dict.fromkeys(("cls_token", "sep_token", "mask_token", "unk_token", "pad_token"))
    for settings in (missing, {**missing, "tokenizer_class": None}):
        folder = make_repository(tmp_path / "repo", tokenizer_config=settings, files={"special_tokens_map.json": {}})
        assert Tokenizer.load(folder).mask_token == "[MASK]"
    extra = {"extra_special_tokens": {"image_token": "paris"}, "additional_special_tokens": [{"content": "berlin"}]}
    folder = make_repository(tmp_path / "extra", tokenizer_config={**extra, "added_tokens_decoder": {}})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special_tokens["image_token"] == "paris"
    assert {tokenizer.id("paris"), tokenizer.id("berlin")} <= tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("the paris berlin").ids, skip_special_tokens=True) == "the"


def test_decoding(bert: Tokenizer) -> None:
    ids = bert.encode("the cat , isn ' t it ?").ids
    assert bert.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=True) == "the cat, isn't it?"
    assert bert.decode([]) == ""
    assert bert.decode(np.array(ids)) == bert.decode(ids)
    for broken in ([-1], ["a"], [2**40], [None]):
        with pytest.raises(InputError, match="list of integers from 0"):
            bert.decode(broken)
    assert (bert.token(10**9), bert.token(-1), bert.id("no such token")) == ("", "", None)


def test_the_longest_text(tmp_path: Path) -> None:
    def limit(kind: Any, **options: Any) -> int | None:
        return Tokenizer.load(make_repository(tmp_path / "repo", kind=kind, **options)).max_length

    assert limit("wordpiece", max_length=32) == 32
    assert limit("wordpiece", max_length=None) == 64
    assert limit("wordpiece", max_length=10**30) == 64
    assert limit("bpe", max_length=None) == 64  # of 66 positions
    assert limit("unigram", max_length=None) is None
    with pytest.raises(ModelError, match=r"'model_max_length' in tokenizer_config\.json is 0"):
        limit("wordpiece", max_length=0)


def test_rows_that_do_not_fit(bert: Tokenizer) -> None:
    with pytest.raises(InputError, match="A row has 12 tokens, more than 8"):
        bert.pad([bert.encode(TEXT)], 8)
    assert bert.pad([], 8)["input_ids"].shape == (0, 8)


def test_a_repository_without_a_tokenizer(tmp_path: Path) -> None:
    folder = make_repository(tmp_path / "repo", files={"tokenizer.json": None})
    with pytest.raises(ModelError, match=r"has no tokenizer\.json\. Save one there with transformers"):
        Tokenizer.load(folder)


def test_a_missing_package_is_named(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModelError, match=r"tokenizers is not installed.*transmuter\[serving\]"):
        Tokenizer.load(folders["bpe"])

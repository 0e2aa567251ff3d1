"""Token classification: what transformers' pipeline says, and what it has no word on."""

from __future__ import annotations

import itertools
import json
import unicodedata
from typing import Any

import numpy as np
import onnxruntime
import pytest
import recorded_tokens as recorded
from conftest import ZOO, needs_zoo
from onnxruntime.quantization import QuantType, quantize_dynamic
from tiny_repositories import make_repository

from transmuter.errors import InputError, ModelError
from transmuter.serving import token_classification
from transmuter.serving.token_classification import Entity, Token, entities_of, without_overlaps

NAMES = [name for name, (task, _) in recorded.REPOSITORIES.items() if task == "token-classification"]
RECORDED = json.loads((recorded.FOLDER / "token-classification.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def servings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tokens")
    return {name: token_classification(recorded.REPOSITORIES[name][1](folder / name), batch_size=4) for name in NAMES}


@pytest.fixture(scope="module")
def serving(servings: dict[str, Any]) -> Any:
    return servings["tokens-wordpiece"]


def assert_same(found: list[dict[str, Any]], wanted: list[list[Any]]) -> None:
    assert [[e["start"], e["end"], e["label"], e["phrase"]] for e in found] == [[*w[:3], w[4]] for w in wanted]
    np.testing.assert_allclose([e["score"] for e in found], [w[3] for w in wanted], rtol=0, atol=1e-5)
    assert all(type(e["score"]) is float and type(e["start"]) is int for e in found)


@pytest.mark.parametrize("name", NAMES)
def test_recorded(servings: dict[str, Any], name: str) -> None:
    ran = 0
    for case in RECORDED[name]:
        options = dict(case["options"])
        options["aggregation"] = options.pop("aggregation_strategy")
        is_split = options.pop("is_split_into_words", False)
        if "error" in case:  # transformers splits no words with byte-level tokenizers that put no space before them
            assert is_split
            assert "bpe" in name
            continue
        found = servings[name]({"words": case["input"]} if is_split else case["input"], **options)
        assert_same(found["entities"], case["output"])
        ran += 1
    assert ran >= 80


@needs_zoo
def test_zoo() -> None:
    serving = token_classification(ZOO / "bert-ner")
    cases = json.loads((ZOO / "bert-ner" / "reference.json").read_text())["cases"]
    assert len(cases) >= 5
    for case in cases:
        strategy = case["kwargs"].get("aggregation_strategy", "none")
        found = serving(case["input"], aggregation=strategy)["entities"]
        name = "entity" if strategy == "none" else "entity_group"
        wanted = [[e["start"], e["end"], e[name], e["score"], e["word"]] for e in case["output"]]
        assert_same(found, wanted)
        if strategy == "simple":
            assert found == serving(case["input"], aggregation="same")["entities"]


def test_list_as_one_by_one(serving: Any) -> None:
    items = [*recorded.TEXTS, *({"words": words} for words in recorded.WORDS)]
    together = serving(items, aggregation="same", stride=5)
    assert serving([]) == []
    for item, found in zip(items, together, strict=True):
        wanted = serving(item, aggregation="same", stride=5)["entities"]
        assert_same(found["entities"], [[e["start"], e["end"], e["label"], e["score"], e["phrase"]] for e in wanted])


def test_started(serving: Any) -> None:
    with serving:
        futures = [serving.submit(text) for text in ("", "the cat", "   ")]
        assert [bool(future.result(60)["entities"]) for future in futures] == [False, True, False]


@pytest.mark.parametrize("text", ["Zürich 日本語 🙂 the cat", "cafe\u0301 in Paris", "a 👩\u200d👧 dog", "plain cat"])
def test_bytes(serving: Any, text: str) -> None:
    characters, octets = (serving(text, aggregation="first", unit=unit)["entities"] for unit in ("character", "byte"))
    assert len(characters) == len(octets) > 0
    for a, b in zip(characters, octets, strict=True):
        assert text[a["start"] : a["end"]] == text.encode()[b["start"] : b["end"]].decode()


def test_offsets_refer_to_the_text_before_its_normalization(servings: dict[str, Any]) -> None:
    text = "the CAFE\u0301 of \ufb01sh, \uff3aürich"
    for name, serving in servings.items():
        found = serving(text, ignore_labels=[])["entities"]
        covered = "".join(text[e["start"] : e["end"]] for e in found)
        assert set(text) - set(covered) <= {" ", "\u0301"}, name
    assert unicodedata.normalize("NFC", text) != text


def test_million_characters(serving: Any) -> None:
    text = "the cat " * 125_000
    assert serving(text, aggregation="first")["entities"] == serving(text[:2000], aggregation="first")["entities"]
    assert max(e["end"] for e in serving(text, ignore_labels=[])["entities"]) < 500


def test_long_text_in_windows(serving: Any) -> None:
    text = "The cat sat in Paris. " * 200
    found = serving(text, aggregation="first", stride=8, ignore_labels=[])["entities"]
    assert found[-1]["end"] > len(text) - 10
    assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(found))


def test_words_with_their_delimiter(serving: Any) -> None:
    joined = serving({"words": ["The", "cat"], "delimiter": ""}, ignore_labels=[])["entities"]
    spaced = serving({"words": ("The", "cat")}, ignore_labels=[])["entities"]
    assert [(e["start"], e["end"]) for e in joined] == [(0, 3), (3, 6)]
    assert [(e["start"], e["end"]) for e in spaced] == [(0, 3), (4, 7)]


@pytest.mark.parametrize(
    "options",
    [
        {"aggregation": "word"},
        {"unit": "line"},
        {"ignore_labels": "O"},
        {"ignore_labels": None},
        {"stride": 4},
        {"stride": -1, "aggregation": "same"},
        {"stride": 62, "aggregation": "same"},
        {"stride": 1.5, "aggregation": "same"},
        {"threshold": 0.5},
    ],
)
def test_impossible_options(serving: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        serving("the cat", **options)


@pytest.mark.parametrize(
    "item", [None, 3, ("a", "b"), {"text": "a"}, {"words": "a"}, {"words": [1]}, {"words": [], "x": 1}]
)
def test_impossible_inputs(serving: Any, item: Any) -> None:
    with pytest.raises(InputError):
        serving(item)


def test_unknown_option_of_the_function(tmp_path: Any) -> None:
    folder = make_repository(tmp_path / "r", head="tokens")
    with pytest.raises(TypeError):
        token_classification(folder, aggregate="same")
    with pytest.raises(InputError):
        token_classification(folder, aggregation="sum")


def test_too_few_labels(tmp_path: Any) -> None:
    folder = make_repository(tmp_path / "r", head="tokens", config={"id2label": {"0": "O"}, "label2id": {"O": 0}})
    serving = token_classification(folder)
    with pytest.raises(ModelError, match="id2label"):
        serving("the cat sat on the mat", ignore_labels=[])


def test_other_model(tmp_path: Any) -> None:
    folder = make_repository(tmp_path / "r", head="classification")
    with pytest.raises(ModelError, match="token classification"):
        token_classification(folder)("the cat")


def test_quantized_as_onnx_runtime(tmp_path: Any) -> None:
    folder = make_repository(tmp_path / "r", head="tokens", labels=recorded.TAGS)
    quantize_dynamic(folder / "onnx/model.onnx", folder / "onnx/model_quantized.onnx", weight_type=QuantType.QUInt8)
    serving = token_classification(folder, variant="q8", ignore_labels=[])
    session = onnxruntime.InferenceSession(folder / "onnx/model_quantized.onnx")
    for text in recorded.TEXTS[3:5]:
        rows, context = serving.task.rows(text)
        direct = [
            {"logits": session.run(["logits"], {name: x[None] for name, x in row.arrays.items()})[0][0]} for row in rows
        ]
        wanted = serving.task.result(context, direct)["entities"]
        found = serving(text)["entities"]
        assert_same(found, [[e["start"], e["end"], e["label"], e["score"], e["phrase"]] for e in wanted])


# -- aggregation alone


def token(word: str, start: int, label: int, score: float, *, is_subword: bool = False) -> Token:
    scores = np.full(3, (1 - score) / 2, np.float32)
    scores[label] = score
    return Token(word, scores, start, start + len(word), is_subword)


LABELS = {0: "O", 1: "B-X", 2: "I-X"}


def test_groups_begin_with_b() -> None:
    tokens = [token("a", 0, 1, 0.9), token("b", 2, 2, 0.7), token("c", 4, 1, 0.8), token("d", 6, 0, 0.5)]
    found = entities_of(tokens, "same", LABELS, " ".join)
    assert [(e.label, e.phrase, e.start, e.end) for e in found] == [
        ("X", "a b", 0, 3),
        ("X", "c", 4, 5),
        ("O", "d", 6, 7),
    ]
    assert found[0].score == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("aggregation", "label", "score"), [("first", "X", 0.6), ("max", "O", 0.9), ("average", "O", 0.55)]
)
def test_words_have_one_label(aggregation: Any, label: str, score: float) -> None:
    tokens = [token("mi", 0, 1, 0.6), token("cro", 2, 0, 0.9, is_subword=True)]
    (found,) = entities_of(tokens, aggregation, LABELS, "".join)
    assert (found.label, found.phrase, found.start, found.end) == (label, "micro", 0, 5)
    assert found.score == pytest.approx(score)


def test_first_token_that_goes_on_with_a_word() -> None:
    (found,) = entities_of([token("cro", 2, 1, 0.9, is_subword=True)], "first", LABELS, "".join)
    assert found.phrase == "cro"


def test_overlaps() -> None:
    long, sure, unsure = Entity("X", 0.1, "", 0, 9), Entity("Y", 0.9, "", 3, 5), Entity("Z", 0.2, "", 3, 5)
    assert without_overlaps([sure, long]) == [long]
    assert without_overlaps([unsure, sure]) == [sure]
    assert without_overlaps([sure, unsure, Entity("X", 0.1, "", 5, 6)])[1].start == 5
    assert without_overlaps([]) == []

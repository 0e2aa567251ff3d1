"""Entities of given labels: what gliner says, and what it has no word on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import ZOO, needs_zoo

from transmuter.errors import InputError, ModelError
from transmuter.serving import zero_shot_entity_recognition
from transmuter.serving.entity_recognition import Span, chosen, spans_of_widths, spans_of_words, words_of
from transmuter.serving.text_classification import sigmoid

RECORDED = Path(__file__).parent / "recorded"
CASES = json.loads((RECORDED / "entities.json").read_text(encoding="utf-8"))
LABELS = ["person", "city", "small animal"]
TEXT = "The cat sat on the mat in Paris."


@pytest.fixture(scope="module")
def servings() -> dict[str, Any]:
    return {
        kind: zero_shot_entity_recognition(RECORDED / kind, batch_size=[4], sequence_length=96, threshold=0.3)
        for kind in CASES
    }


@pytest.fixture(scope="module", params=["gliner_span", "gliner_token"])
def serving(servings: dict[str, Any], request: pytest.FixtureRequest) -> Any:
    return servings[request.param]


def assert_same(found: list[dict[str, Any]], wanted: list[list[Any]], *, atol: float = 1e-4) -> None:
    assert [[e["start"], e["end"], e["label"], e["phrase"]] for e in found] == [[*w[:3], w[4]] for w in wanted]
    np.testing.assert_allclose([e["score"] for e in found], [w[3] for w in wanted], rtol=0, atol=atol)
    assert all(type(e["score"]) is float and type(e["start"]) is int for e in found)


def listed(entities: list[dict[str, Any]]) -> list[list[Any]]:
    return [[e["start"], e["end"], e["label"], e["score"], e["phrase"]] for e in entities]


@pytest.mark.parametrize("kind", CASES)
def test_recorded(servings: dict[str, Any], kind: str) -> None:
    count = 0
    for case in CASES[kind][: 5 if kind == "gliner_token_mean" else None]:  # which compiles for each text
        labels = case["labels"]
        each = labels if isinstance(labels, list) and isinstance(labels[0], list) else [labels] * len(case["texts"])
        items = [{"text": text, "labels": own} for text, own in zip(case["texts"], each, strict=True)]
        for found, wanted in zip(servings[kind](items, **case["options"]), case["entities"], strict=True):
            assert_same(found["entities"], wanted)
            count += len(wanted)
    assert count >= 5


@needs_zoo
def test_zoo() -> None:
    """The recorded results are empty; so are ours, and the scores behind them are those of ONNX Runtime."""
    serving = zero_shot_entity_recognition(ZOO / "gliner")
    session = onnxruntime.InferenceSession(ZOO / "gliner" / "onnx" / "model.onnx")
    for case in json.loads((ZOO / "gliner" / "reference.json").read_text())["cases"]:
        assert serving(case["input"], **case["kwargs"])["entities"] == case["output"] == []
        for threshold in (0.0, 0.02, 0.1):
            options = {"threshold": threshold, "flat_ner": False, "multi_label": True}
            (row,), context = serving.task.rows(case["input"], **options)
            wanted = serving.task.result(context, [{"logits": direct(session, row, 4)}])["entities"]
            assert len(wanted) > 0 or threshold > 0
            assert_same(serving(case["input"], **options)["entities"], listed(wanted))


def direct(session: onnxruntime.InferenceSession, row: Any, max_width: int | None) -> np.ndarray:
    """Logits of one row, without any padding, in ONNX Runtime."""
    given, count = row.arrays, int(row.arrays["words"])
    inputs = {name: given[name][None] for name in ("input_ids", "attention_mask", "words_mask")}
    inputs["text_lengths"] = np.array([[count]])
    if max_width is not None:
        spans = np.array([[first, first + more] for first in range(count) for more in range(max_width)])
        inside = spans[:, 1] < count
        inputs |= {"span_idx": (spans * inside[:, None])[None], "span_mask": inside[None]}
    return session.run(["logits"], inputs)[0][0]


def test_padding_changes_nothing(serving: Any, servings: dict[str, Any]) -> None:
    kind = next(kind for kind, one in servings.items() if one is serving)
    session = onnxruntime.InferenceSession(RECORDED / kind / "onnx" / "model.onnx")
    width = 3 if kind == "gliner_span" else None
    texts = ["x", TEXT, "a b c d e f g h", "日本語 the 🙂 cat", "the red house and the bridge of new york city " * 6]
    rows = [serving.task.rows({"text": text, "labels": LABELS})[0][0] for text in texts]
    together, alone = serving.batches(rows), [serving.batches([row])[0] for row in rows]
    unpadded = zero_shot_entity_recognition(RECORDED / kind, sequence_length=None).batches(rows[1:2])[0]["logits"]
    for i, row in enumerate(rows):
        wanted, seen = direct(session, row, width), ...
        if width is not None:
            seen = np.arange(len(wanted))[:, None] + np.arange(width) < len(wanted)
        for found in (together[i]["logits"], alone[i]["logits"], *([unpadded] if i == 1 else [])):
            assert found.shape == wanted.shape
            # these weights are large: ONNX Runtime differs by as much without padding
            np.testing.assert_allclose(sigmoid(found[seen]), sigmoid(wanted[seen]), rtol=0, atol=3e-5)
            if i == 1:
                np.testing.assert_allclose(sigmoid(found[seen]), sigmoid(unpadded[seen]), rtol=0, atol=1e-5)


def test_lengths_share_what_is_compiled() -> None:
    """Another number of words compiles nothing, another number of labels does not compile the encoder again."""
    serving = zero_shot_entity_recognition(RECORDED / "gliner_span", labels=LABELS, sequence_length=96)
    serving.warm_up(progress=False)
    for count in (1, 5, 9, 30, 40):
        serving("cat " * count)
    info = serving.batches.compiled.cache_info()
    assert (info.misses, info.evictions) == (0, 0)
    serving({"text": TEXT, "labels": ["a", "b"]})
    info = serving.batches.compiled.cache_info()
    assert info.depths[0].misses == 0
    assert info.depths[1].misses == 1


def test_list_as_one_by_one(serving: Any) -> None:
    items = [
        {"text": TEXT, "labels": LABELS},
        {"text": "", "labels": LABELS},
        {"text": "The red house. " * 8, "labels": ["house"]},
        {"text": TEXT, "labels": []},
        {"text": "dog", "labels": {"animal": "small animal", "city": "city"}, "threshold": 0.0},
    ]
    for item, found in zip(items, serving(items), strict=True):
        assert_same(found["entities"], listed(serving(item)["entities"]), atol=1e-5)


def test_started(serving: Any) -> None:
    texts = [TEXT, " ", "The big cat"]
    alone = serving(texts, labels=LABELS)
    with serving:
        found = [future.result(60) for future in [serving.submit(text, labels=LABELS) for text in texts]]
    for one, other in zip(found, alone, strict=True):
        assert_same(one["entities"], listed(other["entities"]), atol=1e-5)


def test_descriptions_stand_for_labels(serving: Any) -> None:
    named = serving({"text": TEXT, "labels": {"A": "person", "B": "city"}}, threshold=0.1)["entities"]
    plain = serving({"text": TEXT, "labels": ["person", "city"]}, threshold=0.1)["entities"]
    assert [{**e, "label": {"A": "person", "B": "city"}[e["label"]]} for e in named] == plain


@pytest.mark.parametrize(
    "text", ["日本語 the 🙂 cat", "cafe\u0301 Zu\u0308rich-Berlin_x", "👩\u200d👧 dog", "the ﬁsh ①"]
)
def test_offsets(serving: Any, text: str) -> None:
    for unit in ("character", "byte"):
        options = {"labels": LABELS, "threshold": 0.0, "flat_ner": False, "multi_label": True, "unit": unit}
        found = serving(text, **options)["entities"]
        assert found
        for entity in found:
            start, end = entity["start"], entity["end"]
            assert entity["phrase"] == (text[start:end] if unit == "character" else text.encode()[start:end].decode())


def test_words_without_tokens_move_no_others(servings: dict[str, Any]) -> None:
    """Word 3 has none here: gliner counts only words with tokens, and would take word 4 for it."""
    prompt = servings["gliner_span"].task.prompt
    assert prompt.words_mask([None, 0, 1, 1, 2, 4, 4, 5, None], 2).tolist() == [0, 0, 0, 0, 1, 3, 0, 4, 0]


def test_poolings(servings: dict[str, Any]) -> None:
    ids = [None, 0, 1, 2, 2, 3, None]
    masks = {
        pooling: dataclasses.replace(servings["gliner_span"].task.prompt, pooling=pooling).words_mask(ids, 2).tolist()
        for pooling in ("first", "last", "mean", "max")
    }
    assert masks["first"] == [0, 0, 0, 1, 0, 2, 0]
    assert masks["last"] == [0, 0, 0, 0, 1, 2, 0]
    assert masks["mean"] == masks["max"] == [0, 0, 0, 1, 1, 2, 0]


def test_million_characters(serving: Any) -> None:
    text = "the cat " * 125_000
    found = serving(text, labels=LABELS, threshold=0.1)["entities"]
    assert found == serving(text[: 32 * 4], labels=LABELS, threshold=0.1)["entities"]


def test_words_whose_tokens_are_cut_off_are_words(serving: Any, servings: dict[str, Any]) -> None:
    kind = next(kind for kind, one in servings.items() if one is serving)
    text = "abcdefghij " * 20
    (row,), _ = serving.task.rows(text, labels=LABELS)
    assert int(row.arrays["words"]) == 20 > row.arrays["words_mask"].max()
    assert len(row.arrays["input_ids"]) == 96
    session = onnxruntime.InferenceSession(RECORDED / kind / "onnx" / "model.onnx")
    wanted = direct(session, row, 3 if kind == "gliner_span" else None)
    found = serving.batches([row])[0]["logits"]
    np.testing.assert_allclose(found[:17], wanted[:17], rtol=0, atol=1e-3)


def test_own_words(servings: dict[str, Any]) -> None:
    def letters(text: str) -> Any:
        return ((letter, i, i + 1) for i, letter in enumerate(text) if letter != " ")

    options = {"labels": LABELS, "threshold": 0.0, "sequence_length": 64}
    serving = zero_shot_entity_recognition(RECORDED / "gliner_span", words_splitter=letters, **options)
    assert {e["end"] - e["start"] for e in serving("ca t")["entities"]} <= {1, 2, 3, 4}
    assert serving("ca t")["entities"]


@pytest.mark.parametrize(
    "item",
    [
        TEXT,
        {"labels": LABELS},
        {"text": 3, "labels": LABELS},
        {"text": TEXT, "labels": "person"},
        {"text": TEXT, "labels": [1]},
        {"text": TEXT, "labels": LABELS, "threshold": 2},
        {"text": TEXT, "labels": LABELS, "threshold": "0.5"},
        {"text": TEXT, "labels": LABELS, "unit": "word"},
        {"text": TEXT, "labels": LABELS, "max_width": 3},
        {"text": TEXT, "labels": ["person", "<<ENT>>"]},
        {"text": TEXT, "labels": [f"label {i}" for i in range(60)]},
        (TEXT, LABELS),
    ],
)
def test_impossible_inputs(serving: Any, item: Any) -> None:
    with pytest.raises(InputError):
        serving(item)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels_encoder": "a/b"}, "labels_encoder"),
        ({"relations_layer": "x"}, "relations_layer"),
        ({"ent_token": "<<XXX>>"}, "<<XXX>>"),
        ({"words_splitter_type": "spacy"}, "spacy"),
        ({"max_width": 0}, "max_width"),
        ({"max_len": "long"}, "max_len"),
        ({"subtoken_pooling": "sum"}, "subtoken_pooling"),
        (None, "gliner_config.json"),
    ],
)
def test_impossible_configurations(tmp_path: Path, changes: dict[str, Any] | None, message: str) -> None:
    folder = shutil.copytree(RECORDED / "gliner_span", tmp_path / "r")
    path = folder / "gliner_config.json"
    if changes is None:
        path.unlink()
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelError, match=message):
        zero_shot_entity_recognition(folder, sequence_length=64)({"text": TEXT, "labels": LABELS})


def test_words_of() -> None:
    text = "don't e-mail x_y, 日本語 a--b 🙂"
    found = list(words_of(text))
    assert [word for word, _, _ in found] == ["don", "'", "t", "e-mail", "x_y", ",", "日本語", "a", "-", "-", "b", "🙂"]
    assert all(text[start:end] == word for word, start, end in found)


# -- spans alone


def test_spans_of_widths() -> None:
    scores = np.zeros((3, 2, 2), np.float32)
    scores[0, 1, 1] = 0.9
    scores[2, 0, 0] = 0.6
    scores[2, 1, 0] = 0.99  # beyond the text
    scores[1, 0, 0] = 0.5  # not above
    assert spans_of_widths(scores, 0.5) == [Span(0, 1, 1, pytest.approx(0.9)), Span(2, 2, 0, pytest.approx(0.6))]


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.9])
def test_spans_of_words_as_gliner_finds_them(threshold: float) -> None:
    scores = np.random.default_rng(3).random((6, 2, 3), np.float32)
    wanted = []
    for first, label in zip(*np.nonzero(scores[..., 0] > np.float32(threshold)), strict=True):
        for last, other in zip(*np.nonzero(scores[..., 1] > np.float32(threshold)), strict=True):
            inside = scores[first : last + 1, label, 2]
            if last < first or other != label or (inside < np.float32(threshold)).any():
                continue
            score = min(*inside, scores[first, label, 0], scores[last, label, 1])
            wanted.append(Span(int(first), int(last), int(label), float(score)))
    assert spans_of_words(scores, threshold) == wanted


def test_flat_and_nested() -> None:
    whole, part, across, same = Span(0, 3, 0, 0.9), Span(1, 2, 1, 0.8), Span(2, 5, 1, 0.7), Span(0, 3, 1, 0.6)
    spans = [same, across, part, whole]
    assert chosen(spans, is_flat=True, multi_label=False) == [whole]
    assert chosen(spans, is_flat=False, multi_label=False) == [whole, part]
    assert chosen(spans, is_flat=True, multi_label=True) == [whole, same]
    assert chosen(spans, is_flat=False, multi_label=True) == [whole, same, part]
    assert chosen([], is_flat=True, multi_label=False) == []
    assert chosen([across, Span(0, 1, 0, 0.1)], is_flat=True, multi_label=False) == [Span(0, 1, 0, 0.1), across]


def test_many_spans() -> None:
    draws = np.random.default_rng(0)
    spans = [Span(first, first + 1, 0, float(draws.random())) for first in range(0, 200, 2)]
    assert chosen(spans, is_flat=True, multi_label=False) == spans

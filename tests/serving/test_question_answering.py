"""Question answering: what transformers' pipeline says, and what it has no word on."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnxruntime
import pytest
import recorded_tokens as recorded
from conftest import ZOO, needs_zoo
from onnxruntime.quantization import QuantType, quantize_dynamic
from tiny_repositories import make_repository

from transmuter.errors import InputError, ModelError
from transmuter.serving import question_answering
from transmuter.serving.question_answering import Answer, Span, added_up, best_spans, probabilities

NAMES = [name for name, (task, _) in recorded.REPOSITORIES.items() if task == "question-answering"]
RECORDED = json.loads((recorded.FOLDER / "question-answering.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def servings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("questions")
    return {name: question_answering(recorded.REPOSITORIES[name][1](folder / name), batch_size=4) for name in NAMES}


@pytest.fixture(scope="module")
def serving(servings: dict[str, Any]) -> Any:
    return servings["questions-wordpiece"]


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [(a["text"], a["start"], a["end"]) for a in found] == [(a["answer"], a["start"], a["end"]) for a in wanted]
    np.testing.assert_allclose([a["score"] for a in found], [a["score"] for a in wanted], rtol=0, atol=1e-5)
    assert all(type(a["score"]) is float and type(a["start"]) is int for a in found)


@pytest.mark.parametrize("name", NAMES)
def test_recorded(servings: dict[str, Any], name: str) -> None:
    for case in RECORDED[name]:
        if "error" in case:
            with pytest.raises(InputError):
                servings[name](case["input"], **case["options"])
            continue
        wanted = case["output"] if isinstance(case["output"], list) else [case["output"]]
        # transformers fills up with spans that are none, at a score of 0
        wanted = [answer for answer in wanted if answer["score"] > 0]
        assert_same(servings[name](case["input"], **case["options"])["results"], wanted)


@needs_zoo
def test_zoo() -> None:
    serving = question_answering(ZOO / "distilbert-qa")
    for case in json.loads((ZOO / "distilbert-qa" / "reference.json").read_text())["cases"]:
        wanted = case["output"] if isinstance(case["output"], list) else [case["output"]]
        assert_same(serving(case["input"], **case["kwargs"])["results"], wanted)


def test_list_as_one_by_one(serving: Any) -> None:
    items = recorded.QUESTIONS[:7]
    for item, found in zip(items, serving(items, top_k=3), strict=True):
        wanted = serving(item, top_k=3)["results"]
        assert_same(found["results"], [{**answer, "answer": answer["text"]} for answer in wanted])


def test_tuples_are_dicts(serving: Any) -> None:
    question, context = recorded.QUESTIONS[0]
    assert serving((question, context)) == serving({"question": question, "context": context})


def test_started(serving: Any) -> None:
    with serving:
        futures = [serving.submit(item, top_k=2) for item in recorded.QUESTIONS[:7]]
        found = [future.result(60) for future in futures]
    for one, item in zip(found, recorded.QUESTIONS, strict=False):
        wanted = serving(item, top_k=2)["results"]
        assert_same(one["results"], [{**answer, "answer": answer["text"]} for answer in wanted])


def test_answers_lie_in_the_context(servings: dict[str, Any]) -> None:
    question, context = "what is [CLS] it </s> <s>?", "the [SEP] cat [CLS] sat 日本 🙂"
    for serving in servings.values():
        for answer in serving((question, context), top_k=9, align_to_words=False)["results"]:
            assert answer["text"] == context[answer["start"] : answer["end"]] != ""


def test_bytes(serving: Any) -> None:
    context = "日本語 🙂 café cat, Zu\u0308rich dog"
    for a, b in zip(*(serving(("what", context), top_k=5, unit=unit)["results"] for unit in ("character", "byte"))):
        assert a["text"] == b["text"] == context.encode()[b["start"] : b["end"]].decode()


def test_million_characters(serving: Any) -> None:
    context = "the cat sat " * 5000 + "in paris " * 100
    (found,) = serving(("where", context))["results"]
    assert found["text"] == context[found["start"] : found["end"]]


def test_context_without_a_token(serving: Any) -> None:
    assert serving(("where", " \n"))["results"] == []
    (answer,) = serving(("where", " \n"), handle_impossible_answer=True)["results"]
    assert (answer["text"], answer["start"], answer["end"]) == ("", 0, 0)
    assert answer["score"] == pytest.approx(1)


def test_questions_are_cut_if_asked(serving: Any) -> None:
    long = "where is the cat " * 30
    with pytest.raises(InputError, match="leaves 0"):
        serving((long, "the cat sat"))
    cut = serving((long, "the cat sat"), max_question_len=4)
    assert cut == serving(("where is the cat", "the cat sat"))
    assert serving(("where is", "the cat"), max_question_len=9) == serving(("where is", "the cat"))


def test_windows_of_the_function(tmp_path: Any) -> None:
    folder = make_repository(tmp_path / "r", head="question_answering")
    serving = question_answering(folder, sequence_length=24, top_k=2)
    rows, _ = serving.task.rows(("where", "the cat sat on the mat " * 20))
    assert {len(row.arrays["input_ids"]) for row in rows[:-1]} == {24}
    assert rows[0].arrays["input_ids"][-13:-1].tolist() == rows[1].arrays["input_ids"][3:15].tolist()  # half a window
    wide = question_answering(folder)
    assert wide.task.max_length == 64
    assert len(wide.task.rows(("where", "the cat sat on the mat " * 20), max_seq_len=24)[0]) == len(rows)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 0},
        {"top_k": None},
        {"max_answer_len": 0},
        {"doc_stride": -1},
        {"doc_stride": 65},
        {"max_seq_len": 65},
        {"max_seq_len": True},
        {"max_question_len": 0},
        {"unit": "word"},
        {"topk": 2},
    ],
)
def test_impossible_options(serving: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        serving(("where", "the cat"), **options)


@pytest.mark.parametrize(
    "item",
    [
        "where",
        ("a", ""),
        ("", "a"),
        ("a", None),
        ("a", "b", "c"),
        {"question": "a"},
        {"question": "a", "text": "b"},
        None,
    ],
)
def test_impossible_inputs(serving: Any, item: Any) -> None:
    with pytest.raises(InputError):
        serving(item)


def test_other_model(tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="start_logits"):
        question_answering(make_repository(tmp_path / "r", head="tokens"))


def test_quantized_as_onnx_runtime(tmp_path: Any) -> None:
    folder = make_repository(tmp_path / "r", head="question_answering")
    quantize_dynamic(folder / "onnx/model.onnx", folder / "onnx/model_quantized.onnx", weight_type=QuantType.QUInt8)
    serving = question_answering(folder, variant="q8", top_k=3)
    session = onnxruntime.InferenceSession(folder / "onnx/model_quantized.onnx")
    names = ["start_logits", "end_logits"]
    for item in recorded.QUESTIONS[:1]:
        rows, context = serving.task.rows(item)
        outputs = [session.run(names, {name: x[None] for name, x in row.arrays.items()}) for row in rows]
        direct = [{name: x[0] for name, x in zip(names, output, strict=True)} for output in outputs]
        wanted = serving.task.result(context, direct)["results"]
        assert_same(serving(item)["results"], [{**answer, "answer": answer["text"]} for answer in wanted])


# -- spans alone


def test_spans_are_in_the_context_and_short() -> None:
    draws = np.random.default_rng(0)
    start, end = draws.random(30, np.float32), draws.random(30, np.float32)
    is_context = np.arange(30) >= 10
    is_context[20] = False
    found = best_spans(start, end, is_context, 4, 1000)
    wanted = [
        Span(first, last, float(start[first] * end[last]))
        for first in range(10, 30)
        for last in range(first, min(first + 4, 30))
        if first != 20 and last != 20
    ]
    assert sorted(found) == sorted(wanted)
    assert [span.score for span in found] == sorted((span.score for span in wanted), reverse=True)
    assert best_spans(start, end, is_context, 4, 3) == found[:3]
    assert best_spans(start, end, np.zeros(30, bool), 4, 3) == []


def test_probabilities_of_what_is_seen() -> None:
    seen = np.array([True, False, True])
    found = probabilities(np.array([1.0, 50.0, 1.0]), seen)
    np.testing.assert_allclose(found, [0.5, 0, 0.5])


def test_equal_texts_are_one_answer() -> None:
    answers = [Answer("Paris", 3, 8, 0.2), Answer("Rome", 10, 14, 0.3), Answer("PARIS", 20, 25, 0.4)]
    assert added_up(answers) == [Answer("Paris", 3, 8, pytest.approx(0.6)), Answer("Rome", 10, 14, 0.3)]

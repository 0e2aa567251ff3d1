"""Zero-shot classification against transformers' pipeline."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ZOO, needs_zoo
from formula_repositories import encoder, write
from recorded_cases import NLI, REPOSITORIES, recorded

from transmuter.errors import InputError, ModelError
from transmuter.serving import Serving, zero_shot_classification
from transmuter.serving.zero_shot_classification import hypotheses, label_scores, labels_of


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Serving]:
    @functools.cache
    def make(name: str, **options: Any) -> Serving:
        folder = ZOO / name if name not in REPOSITORIES else REPOSITORIES[name](tmp_path_factory.mktemp("repository"))
        if name.endswith("unnamed"):
            with pytest.warns(UserWarning, match="entailment"):
                return zero_shot_classification(folder, **options)
        return zero_shot_classification(folder, **options)

    return make


def given(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Options of transformers as ours."""
    return {"labels" if key == "candidate_labels" else key: value for key, value in kwargs.items()}


def assert_same(found: dict[str, Any], wanted: dict[str, Any], atol: float) -> None:
    assert [p["label"] for p in found["predictions"]] == wanted["labels"]
    np.testing.assert_allclose([p["score"] for p in found["predictions"]], wanted["scores"], atol=atol)
    assert all(type(p["score"]) is float for p in found["predictions"])


@needs_zoo
@pytest.mark.parametrize("repository", ["bart-nli", "deberta-v3-nli"])
def test_equals_recorded_pipelines(served: Callable[..., Serving], repository: str) -> None:
    cases = json.loads((ZOO / repository / "reference.json").read_text())["cases"]
    assert cases
    for case in cases:
        found = served(repository, batch_size=3, sequence_length=64)(case["input"], **given(case["kwargs"]))
        assert_same(found, case["output"], 1e-4)


@needs_zoo
def test_a_text_with_the_end_of_texts_harms_no_other(served: Callable[..., Serving]) -> None:
    texts = ["The cat sat.", "a </s> b", "It slept.", "</s>", "A dog."]
    found = served("bart-nli", batch_size=8, sequence_length=32)(texts, labels=["a", "b"])
    for text, result in zip(texts, found, strict=True):
        wanted = served("bart-nli", sequence_length=None)(text, labels=["a", "b"])["predictions"]
        assert_same(result, {"labels": [p["label"] for p in wanted], "scores": [p["score"] for p in wanted]}, 1e-5)


@pytest.mark.parametrize("repository", [name for name in REPOSITORIES if name.startswith("zero-shot/")])
def test_equals_transformers(served: Callable[..., Serving], repository: str) -> None:
    serving = served(repository, batch_size=4)
    cases = [case for case in recorded("zero-shot") if case["repository"] == repository]
    assert cases
    for case in cases:
        results = serving(case["input"], **given(case["kwargs"]))
        for result, wanted in zip(results, case["output"], strict=True):
            assert_same(result, wanted, 1e-5)


def test_labels_of_a_serving_and_of_an_input(tmp_path: Path) -> None:
    folder = REPOSITORIES["zero-shot/last"](tmp_path)
    serving = zero_shot_classification(folder, ["good", "bad"], multi_label=True, sequence_length=32)
    assert {p["label"] for p in serving("the cat")["predictions"]} == {"good", "bad"}
    item = {"text": "the cat", "labels": ["film", "phone"], "multi_label": False}
    assert serving(item) == serving("the cat", labels=["film", "phone"], multi_label=False)
    assert sum(p["score"] for p in serving(item)["predictions"]) == pytest.approx(1, abs=1e-6)
    mixed = serving([item, "the cat", {"text": "a", "labels": "yes"}])
    assert [len(result["predictions"]) for result in mixed] == [2, 2, 1]


def test_long_text_is_truncated_before_the_hypothesis(served: Callable[..., Serving]) -> None:
    serving = served("zero-shot/last", batch_size=4)
    long = serving("the cat " * 150_000, labels=["good", "bad"])
    assert long == serving("the cat " * 50, labels=["good", "bad"])
    assert long["predictions"][0]["score"] != long["predictions"][1]["score"]


def test_hypothesis_that_is_too_long(served: Callable[..., Serving]) -> None:
    serving = served("zero-shot/last", batch_size=4)
    with pytest.raises(InputError):
        serving("the cat", labels=["good " * 40])
    assert serving("the cat", labels=["good"])["predictions"]


@pytest.mark.parametrize("text", ["", 3, None, ("a", "b"), {"labels": ["a"]}])
def test_is_no_text(served: Callable[..., Serving], text: Any) -> None:
    with pytest.raises(InputError):
        served("zero-shot/last", batch_size=4)(text, labels=["a"])


@pytest.mark.parametrize("labels", [[], "", " , ", [3], 7, None])
def test_no_labels(served: Callable[..., Serving], labels: Any) -> None:
    with pytest.raises(InputError):
        served("zero-shot/last", batch_size=4)("the cat", labels=labels)


@pytest.mark.parametrize("template", ["This is it.", "{", "{}{}", "{name}", "{0.nothing}", "{0[a]}", 3])
def test_template_without_a_place(served: Callable[..., Serving], tmp_path: Path, template: Any) -> None:
    with pytest.raises(InputError, match="hypothesis_template"):
        served("zero-shot/last", batch_size=4)("the cat", labels=["a"], hypothesis_template=template)
    with pytest.raises(InputError, match="hypothesis_template"):
        zero_shot_classification(REPOSITORIES["zero-shot/last"](tmp_path), "a", hypothesis_template=template)


def test_labels_and_hypotheses() -> None:
    assert labels_of(" a, b ,,c d") == ["a", "b", "c d"]
    assert hypotheses(["a", "{b}"], "It is {}.") == ["It is a.", "It is {b}."]


def test_scores_of_large_logits() -> None:
    logits = np.array([[-500, 0, 500], [500, 0, 400]], np.float32)
    np.testing.assert_allclose(label_scores(logits, 2, False), [1, 0], atol=1e-30)
    np.testing.assert_allclose(label_scores(logits, 2, True), [1, 0], atol=1e-30)
    np.testing.assert_allclose(label_scores(logits, 0, True), [0, 1], atol=1e-30)  # against the last class


@pytest.mark.parametrize("config", [{"label2id": {"entailment": "2"}}, {"label2id": ["entailment"]}, {"id2label": 3}])
def test_malformed_configuration(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        zero_shot_classification(write(tmp_path, encoder(classes=3), config=config), ["a"])


@pytest.mark.parametrize(("classes", "config"), [(1, NLI), (2, NLI)])
def test_model_of_another_kind(tmp_path: Path, classes: int, config: dict[str, Any]) -> None:
    serving = zero_shot_classification(
        write(tmp_path, encoder(classes=classes), config=config), "a", sequence_length=32
    )
    with pytest.raises(ModelError, match="natural language inference"):
        serving("the cat")


def test_labels_from_id2label(tmp_path: Path) -> None:
    config = {"id2label": NLI["id2label"]}
    one = zero_shot_classification(
        write(tmp_path / "one", encoder(classes=3), config=config), "a, b", sequence_length=32
    )
    two = zero_shot_classification(write(tmp_path / "two", encoder(classes=3), config=NLI), "a, b", sequence_length=32)
    assert one("the cat") == two("the cat")

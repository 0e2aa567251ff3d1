"""Classification against transformers' pipeline, and quantised files against ONNX Runtime."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ZOO, needs_zoo
from formula_repositories import PIECES, encoder, logits_of, write
from recorded_cases import REPOSITORIES, recorded
from test_models import onnxruntime_noise, onnxruntime_outputs, rms

from transmuter.errors import InputError, ModelError
from transmuter.serving import Repository, Serving, Tokenizer, text_classification
from transmuter.serving.text_classification import default_function, predictions, sigmoid, softmax


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Serving]:
    @functools.cache
    def make(name: str, **options: Any) -> Serving:
        folder = ZOO / name if name not in REPOSITORIES else REPOSITORIES[name](tmp_path_factory.mktemp("repository"))
        return text_classification(folder, **options)

    return make


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]], where: Any = "") -> None:
    assert [p["label"] for p in found] == [p["label"] for p in wanted], where
    np.testing.assert_allclose([p["score"] for p in found], [p["score"] for p in wanted], atol=1e-5, err_msg=str(where))
    assert all(type(p["score"]) is float for p in found)


@needs_zoo
def test_equals_recorded_pipelines(served: Callable[..., Serving]) -> None:
    serving = served("distilbert-sst2")
    cases = json.loads((ZOO / "distilbert-sst2" / "reference.json").read_text())["cases"]
    assert cases
    for case in cases:
        assert_same(serving(case["input"], **case["kwargs"])["predictions"], case["output"], case)


@needs_zoo
def test_quantised_file_equals_onnxruntime(served: Callable[..., Serving]) -> None:
    """Logits within twice ONNX Runtime's distance from itself."""
    folder = ZOO / "distilbert-sst2"
    path = folder / "onnx" / "model_quantized.onnx"
    serving = served("distilbert-sst2", variant="q8", top_k=None, function_to_apply="none", batch_size=2)
    tokenizer = Tokenizer.load(Repository.open(folder))
    texts = ["I love this movie!", "The food was terrible " * 40]
    for text, result in zip(texts, serving(texts), strict=True):
        ids = np.array([tokenizer.encode(text, max_length=64).ids], np.int64)
        inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        (wanted,) = onnxruntime_outputs(path, ["logits"], inputs)
        noise = onnxruntime_noise(path, inputs, {"logits": wanted})["logits"]
        scores = {p["label"]: p["score"] for p in result["predictions"]}
        found = np.array([scores["NEGATIVE"], scores["POSITIVE"]], np.float32)
        assert rms(found, wanted[0]) <= max(2 * noise, 1e-5), text


@pytest.mark.parametrize("repository", [name for name in REPOSITORIES if name.startswith("classification/")])
def test_equals_transformers(served: Callable[..., Serving], repository: str) -> None:
    serving = served(repository, batch_size=4)
    cases = [case for case in recorded("classification") if case["repository"] == repository]
    assert cases
    for case in cases:
        results = serving(case["input"], **case["kwargs"])
        for item, result, wanted in zip(case["input"], results, case["output"], strict=True):
            assert_same(result["predictions"], wanted, (item, case["kwargs"]))


def test_pairs_in_both_forms(served: Callable[..., Serving]) -> None:
    serving = served("classification/three", batch_size=4, top_k=None, function_to_apply="none")
    one, two, three = serving(
        [("the cat", "good"), {"text": "the cat", "text_pair": "good"}, {"text": "the cat", "text_pair": None}]
    )
    assert one == two
    ids = [2, PIECES.index("the"), PIECES.index("cat"), 3, PIECES.index("good"), 3]
    wanted = logits_of(ids, [0, 0, 0, 0, 1, 1], 3)
    found = {p["label"]: p["score"] for p in one["predictions"]}
    np.testing.assert_allclose([found[f"class {i}"] for i in range(3)], wanted, rtol=1e-5, atol=1e-5)
    assert_same(three["predictions"], serving("the cat")["predictions"])
    assert_same(serving(("the cat", ""))["predictions"], three["predictions"])  # as in transformers


def test_the_longer_of_a_pair_is_truncated(served: Callable[..., Serving]) -> None:
    serving = served("classification/three", batch_size=4, top_k=None, function_to_apply="none")
    text, pair = "the cat " * 100_000, "good film " * 3
    wanted = logits_of(
        [
            2,
            *([PIECES.index("the"), PIECES.index("cat")] * 99)[: 32 - 3 - 6],
            3,
            *[PIECES.index("good"), PIECES.index("film")] * 3,
            3,
        ],
        [0] * 25 + [1] * 7,
        3,
    )
    found = {p["label"]: p["score"] for p in serving((text, pair))["predictions"]}
    np.testing.assert_allclose([found[f"class {i}"] for i in range(3)], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "item", [3, None, ("a",), ("a", "b", "c"), ("a", 3), {"text_pair": "b"}, {"text": "a", "b": 1}]
)
def test_is_neither_text_nor_pair(served: Callable[..., Serving], item: Any) -> None:
    with pytest.raises(InputError, match="a tuple of two strings"):
        served("classification/three", batch_size=4)([item])


def test_options(served: Callable[..., Serving], tmp_path: Path) -> None:
    serving = served("classification/three", batch_size=4)
    assert [len(serving("good", top_k=k)["predictions"]) for k in (1, 2, 9, None)] == [1, 2, 3, 3]
    assert len(serving("good")["predictions"]) == 1
    for wrong in ({"top_k": 0}, {"top_k": True}, {"function_to_apply": "tanh"}, {"threshold": 0.5}):
        with pytest.raises(InputError):
            serving("good", **wrong)
    with pytest.raises(InputError):
        text_classification(REPOSITORIES["classification/three"](tmp_path), top_k=-1)


def test_equal_scores_keep_their_order() -> None:
    labels = {0: "a", 1: "b", 2: "c", 3: "d"}
    found = predictions(np.array([0.1, 0.4, 0.1, 0.4], np.float32), labels)
    assert [p["label"] for p in found] == ["b", "d", "a", "c"]
    assert [p["label"] for p in predictions(np.array([0.4, 0.4, 0.2], np.float32), labels, 1)] == ["a"]


def test_functions_of_large_logits() -> None:
    logits = np.array([-1000, 0, 1000], np.float32)
    np.testing.assert_array_equal(sigmoid(logits), [0, 0.5, 1])
    np.testing.assert_array_equal(softmax(logits), [0, 0, 1])
    small = np.linspace(-9, 9, 99, dtype=np.float32)
    np.testing.assert_allclose(sigmoid(small), 1 / (1 + np.exp(-small.astype(np.float64))), rtol=1e-6)


@pytest.mark.parametrize(
    ("problem", "classes", "function"),
    [
        (None, 1, "sigmoid"),
        (None, 2, "softmax"),
        ("regression", 1, "none"),
        ("regression", 4, "none"),
        ("multi_label_classification", 4, "sigmoid"),
        ("single_label_classification", 1, "sigmoid"),
        ("single_label_classification", 4, "softmax"),
    ],
)
def test_default_function(problem: str | None, classes: int, function: str) -> None:
    assert default_function(problem, classes) == function


@pytest.mark.parametrize(
    "config",
    [
        {"id2label": ["a", "b"]},
        {"id2label": {"0": 3}},
        {"id2label": {"zero": "a"}},
        {"id2label": {"-1": "a"}},
        {"problem_type": "guessing"},
        {"problem_type": ["regression"]},
    ],
)
def test_malformed_configuration(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        text_classification(write(tmp_path, encoder(classes=2), config=config))


def test_fewer_names_than_classes(tmp_path: Path) -> None:
    folder = write(tmp_path, encoder(classes=3), config={"id2label": {"0": "a", "1": "b"}})
    with pytest.raises(ModelError, match="names 2 classes"):
        text_classification(folder, top_k=None, sequence_length=16)("good")


def test_model_without_logits(tmp_path: Path) -> None:
    folder = write(tmp_path / "two", encoder(outputs=("last_hidden_state", "pooler_output")))
    with pytest.raises(ModelError, match="last_hidden_state, pooler_output"):
        text_classification(folder)
    with pytest.raises(ModelError, match="one axis of classes"):
        text_classification(write(tmp_path / "one", encoder()), sequence_length=16)("good")


def test_an_error_leaves_its_neighbours_alone(served: Callable[..., Serving]) -> None:
    serving = served("classification/three", batch_size=4)
    with serving:
        good = serving.submit("good")
        with pytest.raises(InputError):
            serving.submit(3).result()
        assert_same(good.result()["predictions"], serving("good")["predictions"])

"""Filling in masks: what transformers' pipeline says, and what it has no word on."""

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
from transmuter.serving import fill_mask
from transmuter.serving.fill_mask import Choice, best_tokens

NAMES = [name for name, (task, _) in recorded.REPOSITORIES.items() if task == "fill-mask"]
RECORDED = json.loads((recorded.FOLDER / "fill-mask.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def servings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("masks")
    return {name: fill_mask(recorded.REPOSITORIES[name][1](folder / name), batch_size=2) for name in NAMES}


@pytest.fixture(scope="module")
def serving(servings: dict[str, Any]) -> Any:
    return servings["masks-wordpiece"]


def assert_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [(p["token"], p["token_id"], p["sequence"]) for p in found] == [
        (p["token_str"], p["token"], p["sequence"]) for p in wanted
    ]
    np.testing.assert_allclose([p["score"] for p in found], [p["score"] for p in wanted], rtol=0, atol=1e-5)
    assert all(type(p["score"]) is float and type(p["token_id"]) is int for p in found)


def flat(predictions: list[Any]) -> list[dict[str, Any]]:
    return [p for ps in predictions for p in (ps if isinstance(ps, list) else [ps])]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:The target:UserWarning")
def test_recorded(servings: dict[str, Any], name: str) -> None:
    for case in RECORDED[name]:
        found = servings[name](case["input"], **case["options"])["predictions"]
        if isinstance(case["output"][0], list):
            for one, wanted in zip(found, case["output"], strict=True):
                assert_same(one, wanted)
        else:
            assert_same(found, case["output"])


@needs_zoo
def test_zoo() -> None:
    serving = fill_mask(ZOO / "bert-fill-mask")
    cases = json.loads((ZOO / "bert-fill-mask" / "reference.json").read_text())["cases"]
    for case in cases:
        assert_same(serving(case["input"], **case["kwargs"])["predictions"], case["output"])
    results = serving([case["input"] for case in cases])
    for result, case in zip(results, cases, strict=True):
        assert_same(result["predictions"], case["output"])


def test_list_as_one_by_one(serving: Any) -> None:
    texts = [text.replace("{}", "[MASK]") for text in recorded.MASKED]
    texts.insert(2, "[MASK] " + "the cat " * 20)
    items = [*texts, {"text": texts[0], "top_k": 2, "targets": ["cat", "dog"]}]
    for item, found in zip(items, serving(items), strict=True):
        wanted = serving(item)["predictions"]
        assert_same(
            flat(found["predictions"]), [{**p, "token_str": p["token"], "token": p["token_id"]} for p in flat(wanted)]
        )


def test_several_masks_are_lists(serving: Any) -> None:
    found = serving("the [MASK] [MASK] sat", top_k=3)["predictions"]
    assert [len(predictions) for predictions in found] == [3, 3]
    assert all("[MASK]" in p["sequence"] and p["sequence"].startswith("[CLS]") for ps in found for p in ps)


def test_top_k_of_all(serving: Any) -> None:
    found = serving("the [MASK]", top_k=10**6)["predictions"]
    assert len(found) == serving.task.tokenizer.vocab_size
    assert sum(p["score"] for p in found) == pytest.approx(1, abs=1e-5)


def test_targets_beyond_the_vocabulary(serving: Any) -> None:
    with pytest.warns(UserWarning, match="first token"):
        found = serving("the [MASK]", targets=["catty"])["predictions"]
    assert [p["token"] for p in found] == ["cat"]
    with pytest.warns(UserWarning, match="no token"):
        found = serving("the [MASK]", targets=[" ", "dog"])["predictions"]
    assert [p["token"] for p in found] == ["dog"]
    with pytest.warns(UserWarning, match="no token"), pytest.raises(InputError, match="No target"):
        serving("the [MASK]", targets=[""])
    with pytest.raises(InputError, match="surrogate"):
        serving("the [MASK]", targets=["\ud83d"])


def test_targets_of_the_function(tmp_path: Any) -> None:
    folder = make_repository(tmp_path / "r", head="fill_mask")
    serving = fill_mask(folder, targets=["cat", "dog"], top_k=1)
    assert len(serving("a [MASK]")["predictions"]) == 1
    assert {p["token"] for p in serving("a [MASK]", top_k=9)["predictions"]} == {"cat", "dog"}
    assert len(serving({"text": "a [MASK]", "targets": None, "top_k": 4})["predictions"]) == 4


def test_masks_that_are_cut_off(serving: Any) -> None:
    with pytest.raises(InputError, match="beyond the first 64"):
        serving("the cat " * 60 + "[MASK]")
    with pytest.raises(InputError, match="beyond the first 64"):
        serving("[MASK] " + "the cat " * 125_000 + "[MASK]")
    assert len(serving("[MASK] " + "the cat " * 125_000)["predictions"]) == 5


@pytest.mark.parametrize("item", ["", "the cat", "the mask", None, 1, ("[MASK]", "a"), {"texts": "[MASK]"}])
def test_impossible_inputs(serving: Any, item: Any) -> None:
    with pytest.raises(InputError):
        serving(item)


@pytest.mark.parametrize(
    "options", [{"top_k": 0}, {"top_k": None}, {"top_k": True}, {"targets": [1]}, {"targets": []}, {"k": 1}]
)
def test_impossible_options(serving: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        serving("the [MASK]", **options)


def test_tokenizer_without_a_mask(tmp_path: Any) -> None:
    folder = make_repository(
        tmp_path / "r",
        head="fill_mask",
        tokenizer_config={"mask_token": None, "tokenizer_class": "PreTrainedTokenizerFast"},
        files={"special_tokens_map.json": {}},
    )
    with pytest.raises(ModelError, match="mask token"):
        fill_mask(folder)


def test_quantized_as_onnx_runtime(tmp_path: Any) -> None:
    folder = make_repository(tmp_path / "r", head="fill_mask")
    quantize_dynamic(folder / "onnx/model.onnx", folder / "onnx/model_quantized.onnx", weight_type=QuantType.QUInt8)
    serving = fill_mask(folder, variant="q8")
    session = onnxruntime.InferenceSession(folder / "onnx/model_quantized.onnx")
    for text in ("[MASK] is the capital of france [MASK]",):
        (row,), context = serving.task.rows(text)
        logits = session.run(["logits"], {name: x[None] for name, x in row.arrays.items()})[0][0]
        wanted = serving.task.result(context, [{"logits": logits}])["predictions"]
        assert_same(
            flat(serving(text)["predictions"]),
            [{**p, "token_str": p["token"], "token": p["token_id"]} for p in flat(wanted)],
        )


def test_equal_scores_in_the_order_of_ids() -> None:
    logits = np.zeros(10, np.float32)
    logits[7] = 1
    assert [token for token, _ in best_tokens(logits, Choice(3, None))] == [7, 0, 1]
    assert [token for token, _ in best_tokens(logits, Choice(9, np.array([2, 5])))] == [2, 5]
    with pytest.raises(ModelError, match="11"):
        best_tokens(logits, Choice(1, np.array([11])))

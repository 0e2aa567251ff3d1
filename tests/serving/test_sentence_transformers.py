"""The files of sentence-transformers, and pooling by its definition."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formula_repositories import WIDTH, encoder, sentence_files, write

from transmuter.errors import InputError, ModelError
from transmuter.serving import Repository
from transmuter.serving.sentence_transformers import (
    POOLING_MODES,
    Module,
    Pooling,
    Prompts,
    normalize,
    pool,
    read_files,
    read_pooling,
)

RANDOM = np.random.default_rng(0)
SETTINGS = "config_sentence_transformers.json"


def pooled(tokens: np.ndarray, mask: np.ndarray, mode: str) -> np.ndarray:
    """An embedding of padded tokens [length, width] as sentence-transformers defines it, by loops over the tokens."""
    places = [i for i in range(len(tokens)) if mask[i]]
    if mode == "cls":
        return tokens[places[0]] if places else tokens[0]
    if mode == "lasttoken":
        return tokens[places[-1]] if places else 0 * tokens[0]
    if mode == "max":
        return np.array([max([tokens[i, j] for i in places], default=-np.inf) for j in range(tokens.shape[1])])
    shares = [i + 1 if mode == "weightedmean" else 1 for i in places]
    total = sum((share * tokens[i] for share, i in zip(shares, places, strict=True)), 0 * tokens[0])
    size = max(sum(shares), 1e-9)
    return total / (size**0.5 if mode == "mean_sqrt_len_tokens" else size)


@pytest.mark.parametrize("mode", POOLING_MODES)
@pytest.mark.parametrize(("length", "skipped"), [(1, 0), (7, 0), (7, 3), (3, 3), (2, 5)])
def test_pools_by_definition(mode: str, length: int, skipped: int) -> None:
    tokens = RANDOM.standard_normal((length, 5)).astype(np.float32)
    padded = np.concatenate([tokens, np.full((4, 5), 99)])
    mask = np.array([0] * skipped + [1] * 99)[: length + 4] * (np.arange(length + 4) < length)
    found = pool(tokens, [mode], skipped)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, pooled(padded, mask, mode), rtol=1e-5, atol=1e-6)


def test_joins_several_poolings() -> None:
    tokens = RANDOM.standard_normal((6, 4)).astype(np.float32)
    found = pool(tokens, POOLING_MODES)
    np.testing.assert_array_equal(found, np.concatenate([pool(tokens, [mode]) for mode in POOLING_MODES]))


def test_pools_half_precision_in_float32() -> None:
    tokens = np.full((3000, 2), 40, np.float16)  # their sum is beyond float16
    np.testing.assert_array_equal(pool(tokens, ["mean"]), [40, 40])


def test_does_not_share_memory() -> None:
    tokens = np.ones((2, 3), np.float32)
    for mode in POOLING_MODES:
        assert not np.shares_memory(pool(tokens, [mode]), tokens)


def test_normalizes_as_torch() -> None:
    np.testing.assert_allclose(normalize(np.array([3, 4], np.float32)), [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(normalize(np.zeros(3, np.float32)), [0, 0, 0])
    np.testing.assert_allclose(normalize(np.array([1e-13, 0], np.float32)), [0.1, 0], rtol=1e-5)


# -- files


@pytest.fixture
def made(tmp_path: Path) -> Callable[[dict[str, Any]], Repository]:
    def make(files: dict[str, Any], name: str = "here") -> Repository:
        return Repository.open(write(tmp_path / name, encoder(), files=files))

    return make


def test_reads_files(made: Callable[..., Repository]) -> None:
    files = sentence_files(
        "Pooling",
        "Normalize",
        pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        transformer={"max_seq_length": 20, "do_lower_case": True},
        prompts={"query": "q: ", "other": "o: "},
        default_prompt_name="other",
        truncate_dim=3,
    )
    repository = made(files)
    found = read_files(repository, "SentenceTransformer")
    assert [module.kind for module in found.modules] == ["Transformer", "Pooling", "Normalize"]
    assert read_pooling(repository, found.first("Pooling")) == Pooling(("cls",), True)
    assert (found.transformer.max_length, found.transformer.lower_case) == (20, True)
    assert found.prompts == Prompts({"query": "q: ", "document": "", "other": "o: "}, "other")
    assert found.settings["truncate_dim"] == 3


def test_reads_files_of_version_5(made: Callable[..., Repository]) -> None:
    files = sentence_files("Pooling", pooling={"pooling_mode": ["mean", "cls"], "include_prompt": False})
    package = "sentence_transformers.sentence_transformer.modules"
    files["modules.json"][1]["type"] = f"{package}.pooling.Pooling"
    files["sentence_bert_config.json"] = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"text": {"max_length": 30}},
    }
    repository = made(files)
    found = read_files(repository, "SentenceTransformer")
    assert found.first("Pooling") == Module("Pooling", "1_Pooling")
    assert read_pooling(repository, found.first("Pooling")) == Pooling(("mean", "cls"), False)
    assert found.transformer.output == "last_hidden_state"
    assert (found.transformer.messages, found.transformer.max_length) == (False, 30)


def test_reads_files_of_a_transformer_in_a_folder(made: Callable[..., Repository]) -> None:
    files = sentence_files("Pooling")
    files["modules.json"][0]["path"] = "0_Transformer"
    files["0_Transformer/sentence_roberta_config.json"] = {"max_seq_length": 9}
    assert read_files(made(files), "SentenceTransformer").transformer.max_length == 9


def test_files_of_another_kind_of_model_are_absent(made: Callable[..., Repository]) -> None:
    files = sentence_files("Pooling", model_type="SparseEncoder", prompts={"a": "b"})
    found = read_files(made(files), "SentenceTransformer")
    assert (found.modules, found.prompts) == ((), Prompts({"query": "", "document": ""}))
    found = read_files(made(sentence_files("Pooling"), "there"), "CrossEncoder")
    assert found.modules == ()


def test_pooling_without_modules(made: Callable[..., Repository]) -> None:
    repository = made({"1_Pooling/config.json": {"pooling_mode_cls_token": True}})
    assert read_files(repository, "SentenceTransformer").modules == ()
    assert read_pooling(repository, None) == Pooling(("cls",))
    assert read_pooling(made({}, "bare"), None) is None


def test_takes_missing_files_from_the_base_model(
    made: Callable[..., Repository], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = made(sentence_files("Pooling", "Normalize", transformer={"max_seq_length": 7}), "base")
    own = made({"1_Pooling/config.json": {"pooling_mode": "cls"}}, "own")
    monkeypatch.setattr(Repository, "base", lambda self: base if self is own else None)
    found = read_files(own, "SentenceTransformer")
    assert (found.home, found.transformer.max_length) == (base, 7)
    assert [module.kind for module in found.modules] == ["Transformer", "Pooling", "Normalize"]
    assert read_pooling(own, found.first("Pooling")) == Pooling(("cls",))  # its own comes first
    alone = read_files(own, "SentenceTransformer", base=False)
    assert (alone.modules, alone.transformer.max_length) == ((), None)


def test_a_repository_with_modules_is_whole(made: Callable[..., Repository], monkeypatch: pytest.MonkeyPatch) -> None:
    files = sentence_files("Pooling")
    del files[SETTINGS]
    own = made(files, "own")
    monkeypatch.setattr(Repository, "base", lambda self: pytest.fail("the base model is not needed"))
    assert read_files(own, "SentenceTransformer").prompts == Prompts({"query": "", "document": ""})


def test_pooling_module_without_a_file(made: Callable[..., Repository]) -> None:
    files = sentence_files("Pooling")
    del files["1_Pooling/config.json"]
    repository = made(files)
    with pytest.raises(ModelError, match="1_Pooling"):
        read_pooling(repository, read_files(repository, "SentenceTransformer").first("Pooling"))


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("modules.json", {"type": "Pooling"}),
        ("modules.json", ["Pooling"]),
        ("modules.json", [{"type": 3, "path": ""}]),
        ("modules.json", [{"type": "sentence_transformers.models.Pooling"}]),
        ("modules.json", "[{"),
        ("modules.json", [{"type": "sentence_transformers.models.Pooling", "path": "../../elsewhere"}]),
        ("1_Pooling/config.json", {"pooling_mode": "median"}),
        ("1_Pooling/config.json", {"pooling_mode": []}),
        ("1_Pooling/config.json", {"pooling_mode": 3}),
        ("1_Pooling/config.json", {"pooling_mode": [["cls"]]}),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": "yes"}),
        ("1_Pooling/config.json", {"include_prompt": 1}),
        ("sentence_bert_config.json", {"max_seq_length": "512"}),
        ("sentence_bert_config.json", {"max_seq_length": 0}),
        ("sentence_bert_config.json", {"max_seq_length": True}),
        ("sentence_bert_config.json", {"do_lower_case": "no"}),
        ("sentence_bert_config.json", {"modality_config": ["text"]}),
        ("sentence_bert_config.json", {"modality_config": {"text": "forward"}}),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": 3}}),
        ("sentence_bert_config.json", {"processing_kwargs": {"chat_template": {"messages": []}}}),
        (SETTINGS, {"prompts": ["query"]}),
        (SETTINGS, {"prompts": {"query": 3}}),
        (SETTINGS, {"default_prompt_name": "absent"}),
        (SETTINGS, {"model_type": ["SentenceTransformer"]}),
        (SETTINGS, [1, 2]),
    ],
)
def test_malformed_files(made: Callable[..., Repository], name: str, contents: Any) -> None:
    repository = made({**sentence_files("Pooling", "Normalize"), name: contents})
    with pytest.raises(ModelError):
        read_pooling(repository, read_files(repository, "SentenceTransformer").first("Pooling"))


def test_prompts() -> None:
    prompts = Prompts({"query": "q: ", "none": ""}, "query")
    assert prompts.resolve() == "q: "
    assert prompts.resolve(name="none") == ""
    assert prompts.resolve("x") == "x"
    assert Prompts().resolve() == ""
    with pytest.raises(InputError, match="none, query"):
        prompts.resolve(name="document")
    with pytest.raises(InputError, match="one of them"):
        prompts.resolve("x", "query")
    with pytest.raises(InputError, match="Give a string"):
        prompts.resolve(3)  # type: ignore[arg-type]


def test_formula_repositories_are_whole(tmp_path: Path) -> None:
    folder = write(tmp_path, encoder(), files=sentence_files("Pooling"))
    assert json.loads((folder / "1_Pooling" / "config.json").read_text())["word_embedding_dimension"] == WIDTH

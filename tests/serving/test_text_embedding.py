"""Embeddings against sentence-transformers, and variants against ONNX Runtime."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparison import assert_equal
from conftest import ZOO, needs_zoo
from formula_repositories import PIECES, WIDTH, encoder, hidden_states, sentence_files, write
from recorded_cases import REPOSITORIES, TEXTS, recorded
from test_models import (
    at_exact_level,
    in_float32,
    onnxruntime_noise,
    onnxruntime_outputs,
    quantises_activations,
    rms,
)

import transmuter
from transmuter.errors import InputError, ModelError
from transmuter.serving import Repository, Serving, Tokenizer, text_embedding
from transmuter.serving.sentence_transformers import normalize, pool

LONG = {"batch_size": 4, "sequence_length": (16, 64)}
SENTENCES = [
    "This is an example sentence.",
    "Each sentence is converted to a vector, 3,520,031 times!",
    "Ünïcödé",
    "",
    "x " * 300,
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Serving]:
    """Servings by the name of a recorded repository, or of a zoo's, compiled once."""

    @functools.cache
    def make(name: str, **options: Any) -> Serving:
        folder = ZOO / name if name not in REPOSITORIES else REPOSITORIES[name](tmp_path_factory.mktemp("repository"))
        return text_embedding(folder, **options)

    return make


@pytest.fixture(scope="module")
def plain(served: Callable[..., Serving]) -> Serving:
    """Means of hidden states."""
    return served("embedding/mean", **LONG)


def ids_of(text: str) -> list[int]:
    """The ids of words that the vocabulary has."""
    return [2, *(PIECES.index(word) for word in text.split()), 3]


# -- recorded results


@needs_zoo
@pytest.mark.parametrize("repository", ["bert-embeddings", "bert-optimized"])
def test_equals_recorded_pipelines(served: Callable[..., Serving], repository: str) -> None:
    cases = json.loads((ZOO / repository / "reference.json").read_text())["cases"]
    compared = 0
    for case in cases:
        if case["pipeline"] == "feature-extraction":
            serving = served(repository, output_pool="none", embedding_processor="none")
            (wanted,) = case["output"]
            found = serving(case["input"])["embedding"]
        else:
            assert case["pipeline"] == "sentence-transformers"
            wanted = case["output"]
            found = np.stack([result["embedding"] for result in served(repository)(case["input"])])
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
        compared += 1
    assert compared == len(cases) > 0


@needs_zoo
def test_pooling_of_a_repository_without_modules(served: Callable[..., Serving]) -> None:
    text = SENTENCES[0]
    tokens = served("bert-optimized", output_pool="none", embedding_processor="none")(text)["embedding"]
    np.testing.assert_allclose(served("bert-optimized")(text)["embedding"], tokens[0], rtol=0, atol=1e-6)
    tokens = served("bert-dynamo", output_pool="none", embedding_processor="none")(text)["embedding"]
    np.testing.assert_allclose(served("bert-dynamo")(text)["embedding"], tokens.mean(axis=0), rtol=0, atol=1e-6)


def _variants() -> list[Any]:
    names = ("bert-embeddings", "bert-optimized", "bert-dynamo")
    files = [f"{name}/{path.name}" for name in names for path in sorted((ZOO / name / "onnx").glob("*.onnx"))]
    return files or [pytest.param("", marks=needs_zoo)]


@pytest.mark.parametrize("file", _variants())
def test_variants_equal_onnxruntime(file: str) -> None:
    """float32 within 1e-5; float16 within 2e-3 of rms, or 1e-3 of the same weights in float32; what quantises while it
    runs within twice ONNX Runtime's distance from itself."""
    name, _, onnx_file = file.partition("/")
    path = ZOO / name / "onnx" / onnx_file
    tokenizer = Tokenizer.load(Repository.open(ZOO / name))
    model = transmuter.load(path)
    quantises = quantises_activations(model)
    texts = SENTENCES[2::2] if quantises else SENTENCES
    options = {"output_pool": "mean", "embedding_processor": "l2_norm", "batch_size": len(texts)}
    if not quantises:  # where it does, each length is compiled for itself
        options["sequence_length"] = 64
    serving = text_embedding(ZOO / name, variant=f"onnx/{onnx_file}", **options)
    source = at_exact_level(path)
    is_half = any(spec.dtype.itemsize == 2 for spec in model.shapes["param"].values())
    for text, result in zip(texts, serving(texts), strict=True):
        encoding = tokenizer.encode(text, max_length=64)
        arrays = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        inputs = {key: np.array([arrays[key]], np.int64) for key in model.inputs}

        def embedding(hidden: np.ndarray) -> np.ndarray:
            return normalize(pool(hidden, ["mean"]))

        (hidden,) = onnxruntime_outputs(source, ["last_hidden_state"], inputs)
        wanted, found = embedding(hidden[0]), result["embedding"]
        if quantises:
            noise = onnxruntime_noise(source, inputs, {"last_hidden_state": hidden})["last_hidden_state"]
            assert rms(found, wanted) <= max(2 * noise, 1e-5), text
        elif is_half:
            single = in_float32(source)
            (exact,) = onnxruntime_outputs(single, ["last_hidden_state"], inputs)
            assert rms(found, wanted) <= 2e-3 or rms(found, embedding(exact[0])) <= 1e-3, text
        else:
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5, err_msg=text)


@pytest.mark.parametrize("repository", [name for name in REPOSITORIES if name.startswith("embedding/")])
def test_equals_sentence_transformers(served: Callable[..., Serving], repository: str) -> None:
    serving = served(repository, **LONG)
    cases = [case for case in recorded("embedding") if case["repository"] == repository]
    assert cases
    for case in cases:
        found = [result["embedding"] for result in serving(case["input"], **case["kwargs"])]
        np.testing.assert_allclose(np.stack(found), case["output"], rtol=1e-6, atol=1e-5, err_msg=str(case["kwargs"]))


# -- texts


def test_a_list_gives_what_its_texts_give_alone(plain: Serving) -> None:
    texts = [*TEXTS, "good", "the cat " * 40, "日本語 " * 9]
    together = plain(texts)
    for text, result in zip(texts, together, strict=True):
        np.testing.assert_allclose(result["embedding"], plain(text)["embedding"], rtol=0, atol=1e-5)
    assert plain([]) == []


def test_is_the_formula(plain: Serving) -> None:
    for text in ("the cat sat on the mat", "good"):
        np.testing.assert_allclose(
            plain(text)["embedding"], hidden_states(ids_of(text)).mean(axis=0), rtol=1e-5, atol=1e-5
        )


def test_empty_text(plain: Serving) -> None:
    np.testing.assert_allclose(plain("")["embedding"], hidden_states([2, 3]).mean(axis=0), atol=1e-5)


def test_long_text_is_truncated(plain: Serving) -> None:
    text = "the cat sat on the mat " * 44_000
    assert len(text) > 10**6
    wanted = hidden_states([*ids_of(text)[:63], 3]).mean(axis=0)
    np.testing.assert_allclose(plain(text)["embedding"], wanted, rtol=1e-5, atol=1e-5)


def test_special_tokens_in_the_text(plain: Serving) -> None:
    ids = [2, PIECES.index("the"), 4, 3, PIECES.index("cat"), 3]
    np.testing.assert_allclose(
        plain("the [MASK] [SEP] cat")["embedding"], hidden_states(ids).mean(axis=0), rtol=1e-5, atol=1e-5
    )


def test_forms_of_unicode(plain: Serving) -> None:
    one, two = plain(["café 日本語🙂", "cafe\u0301 日本語🙂"])  # BERT's normalizer takes accents away
    np.testing.assert_array_equal(one["embedding"], two["embedding"])
    ids = [2, *(PIECES.index(sign) for sign in "日本語"), 3]
    np.testing.assert_allclose(plain("日本語")["embedding"], hidden_states(ids).mean(axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("item", [3, None, b"text", ("a", "b"), {"prompt": "a"}, {"text": 3}, ["nested"]])
def test_is_no_text(plain: Serving, item: Any) -> None:
    with pytest.raises(InputError):
        plain([item])


def test_lone_surrogates(plain: Serving) -> None:
    with pytest.raises(InputError, match="surrogate"):
        plain("a \ud83d b")


# -- options


def test_prompts_of_an_input(served: Callable[..., Serving]) -> None:
    serving = served("embedding/prompts", **LONG)
    by_default, by_item, by_call = (
        serving("cat"),
        serving({"text": "cat", "prompt_name": "passage"}),
        serving("cat", prompt_name="passage"),
    )
    np.testing.assert_array_equal(by_item["embedding"], by_call["embedding"])
    assert np.abs(by_item["embedding"] - by_default["embedding"]).max() > 1e-3
    np.testing.assert_allclose(
        serving({"text": "cat", "prompt": ""})["embedding"], hidden_states(ids_of("cat")).mean(axis=0), atol=1e-5
    )
    with pytest.raises(InputError, match="passage"):
        serving("cat", prompt_name="absent")
    with pytest.raises(InputError, match="passage"):
        serving("cat", prompt_name=["passage"])
    with pytest.raises(InputError, match="no option 'promt'"):
        serving("cat", promt="a")


def test_prompt_of_a_serving(tmp_path: Path) -> None:
    folder = REPOSITORIES["embedding/prompts"](tmp_path)
    serving = text_embedding(folder, prompt="good ", sequence_length=16)
    wanted = hidden_states(ids_of("good cat")).mean(axis=0)
    np.testing.assert_allclose(serving("cat")["embedding"], wanted, atol=1e-5)
    assert np.abs(serving("cat", prompt_name="passage")["embedding"] - wanted).max() > 1e-3
    with pytest.raises(InputError, match="absent"):
        text_embedding(folder, prompt_name="absent")


@pytest.mark.parametrize("mode", ["cls", "weightedmean"])
def test_output_pool(served: Callable[..., Serving], mode: str) -> None:
    serving = served("embedding/normalized", output_pool=mode, embedding_processor="none", sequence_length=16)
    wanted = pool(hidden_states(ids_of("the cat")), [mode])
    np.testing.assert_allclose(serving("the cat")["embedding"], wanted, rtol=1e-5, atol=1e-5)


def test_output_pool_in_bumblebees_words(served: Callable[..., Serving]) -> None:
    options = {"embedding_processor": "l2_norm", "sequence_length": 16}
    serving = served("embedding/mean", output_pool="cls_token_pooling", **options)
    wanted = normalize(hidden_states(ids_of("the cat"))[0])
    np.testing.assert_allclose(serving("the cat")["embedding"], wanted, rtol=1e-5, atol=1e-5)


def test_all_tokens(served: Callable[..., Serving]) -> None:
    serving = served("embedding/normalized", output_pool="none", sequence_length=16)
    found = serving("the cat")["embedding"]
    np.testing.assert_allclose(found, normalize(hidden_states(ids_of("the cat"))), rtol=1e-5, atol=1e-5)


def test_truncate_dim(served: Callable[..., Serving]) -> None:
    serving = served("embedding/normalized", truncate_dim=4, sequence_length=16)
    whole = hidden_states(ids_of("the cat")).mean(axis=0)
    np.testing.assert_allclose(serving("the cat")["embedding"], normalize(whole)[:4], rtol=1e-5, atol=1e-5)
    serving = served("embedding/mean", truncate_dim=4, embedding_processor="l2_norm", sequence_length=16)
    np.testing.assert_allclose(serving("the cat")["embedding"], normalize(whole[:4]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"output_pool": "median"},
        {"output_pool": ()},
        {"output_pool": ["mean", "none"]},
        {"embedding_processor": "l1_norm"},
        {"truncate_dim": 0},
        {"output": "logits"},
    ],
)
def test_options_that_are_none(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        text_embedding(REPOSITORIES["embedding/mean"](tmp_path), **options)


def test_unknown_option(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="pooling"):
        text_embedding(REPOSITORIES["embedding/mean"](tmp_path), pooling="mean")  # type: ignore[call-arg]


# -- modules and outputs


def test_unknown_module(tmp_path: Path) -> None:
    folder = write(tmp_path, encoder(), files=sentence_files("Pooling", "Dense"))
    with pytest.raises(ModelError, match=r"Dense.*output_pool and embedding_processor"):
        text_embedding(folder)
    with pytest.raises(ModelError, match="Dense"):
        text_embedding(folder, output_pool="mean")
    serving = text_embedding(folder, output_pool="mean", embedding_processor="none", sequence_length=16)
    assert serving("cat")["embedding"].shape == (WIDTH,)


def test_module_of_the_repositorys_own_code(tmp_path: Path) -> None:
    files = sentence_files("Pooling")
    files["modules.json"][0]["type"] = "custom_st.Transformer"
    with pytest.raises(ModelError, match=r"custom_st\.Transformer"):
        text_embedding(write(tmp_path, encoder(), files=files))


def test_sentence_embedding_of_the_graph(tmp_path: Path) -> None:
    both = encoder(outputs=("token_embeddings", "sentence_embedding"))
    mean = hidden_states(ids_of("cat")).mean(axis=0)
    options = {"sequence_length": 16}
    bare = text_embedding(write(tmp_path / "bare", both), **options)
    np.testing.assert_allclose(bare("cat")["embedding"], 2 * mean, rtol=1e-5, atol=1e-5)
    dense = write(tmp_path / "dense", both, files=sentence_files("Pooling", "Dense", "Normalize"))
    np.testing.assert_allclose(
        text_embedding(dense, **options)("cat")["embedding"], normalize(mean), rtol=1e-5, atol=1e-5
    )
    told = text_embedding(write(tmp_path / "told", both, files=sentence_files("Pooling")), **options)
    np.testing.assert_allclose(told("cat")["embedding"], mean, rtol=1e-5, atol=1e-5)
    alone = write(tmp_path / "alone", encoder(outputs=("sentence_embedding",)), files=sentence_files("Pooling"))
    np.testing.assert_allclose(text_embedding(alone, **options)("cat")["embedding"], 2 * mean, rtol=1e-5, atol=1e-5)


def test_named_output(tmp_path: Path) -> None:
    folder = write(tmp_path, encoder(outputs=("last_hidden_state", "pooler_output")), files=sentence_files("Pooling"))
    serving = text_embedding(folder, output="pooler_output", sequence_length=16)
    wanted = 3 * hidden_states(ids_of("cat"))[0]
    np.testing.assert_allclose(serving("cat")["embedding"], wanted, rtol=1e-5, atol=1e-5)


def test_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sentence_files("Pooling", "Normalize", pooling={"pooling_mode": "cls"}, transformer={"max_seq_length": 4})
    base = Repository.open(write(tmp_path / "base", encoder(), files=files))
    card = {"README.md": "---\nbase_model: org/base\n---\n"}
    own = Repository.open(write(tmp_path / "own", encoder(), files=card))
    monkeypatch.setattr(Repository, "base", lambda self: base if self.name == own.name else None)
    serving = text_embedding(own, sequence_length=16)
    wanted = normalize(hidden_states([*ids_of("the cat sat on mat")[:3], 3])[0])
    np.testing.assert_allclose(serving("the cat sat on mat")["embedding"], wanted, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(Repository, "base", lambda self: pytest.fail("the base model is not needed"))
    told = text_embedding(own, output_pool="mean", embedding_processor="none", sequence_length=16)
    assert_equal(told("cat")["embedding"], hidden_states(ids_of("cat")).mean(axis=0), atol=1e-5)


def test_started_serving(plain: Serving) -> None:
    with plain:
        futures = [plain.submit(text) for text in TEXTS]
        found = [future.result() for future in futures]
    for text, result in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(result["embedding"], plain(text)["embedding"], rtol=0, atol=1e-5)

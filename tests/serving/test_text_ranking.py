"""Ranking against sentence-transformers' CrossEncoder."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ZOO, needs_zoo
from formula_repositories import (
    RERANKER_CONFIG,
    RERANKER_TEMPLATE,
    byte_pieces,
    decoder,
    encoder,
    next_logits,
    reranker_files,
    sentence_files,
    write,
)
from recorded_cases import REPOSITORIES, causal, recorded
from test_models import at_exact_level, onnxruntime_outputs

import transmuter
from transmuter.errors import InputError, ModelError
from transmuter.serving import ChatTemplate, Repository, Serving, Tokenizer, text_ranking

DOCUMENTS = ["the cat sat on the mat", "berlin people", "a good film"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Serving]:
    @functools.cache
    def make(name: str, **options: Any) -> Serving:
        folder = ZOO / name if name not in REPOSITORIES else REPOSITORIES[name](tmp_path_factory.mktemp("repository"))
        return text_ranking(folder, **options)

    return make


@needs_zoo
def test_equals_recorded_pipelines(served: Callable[..., Serving]) -> None:
    cases = json.loads((ZOO / "bert-cross-encoder" / "reference.json").read_text())["cases"]
    assert {case["kwargs"]["activation"] for case in cases} == {"none", "sigmoid"}
    for case in cases:
        (query,) = {query for query, _ in case["input"]}
        activation = {"none": "identity", "sigmoid": "sigmoid"}[case["kwargs"]["activation"]]
        serving = served("bert-cross-encoder", activation=activation)
        results = serving({"query": query, "documents": [document for _, document in case["input"]]})["results"]
        wanted = [score for (score,) in case["output"]]
        assert [r["index"] for r in results] == list(np.argsort(wanted)[::-1])
        np.testing.assert_allclose([r["score"] for r in results], sorted(wanted, reverse=True), atol=1e-5)
    assert served("bert-cross-encoder")({"query": "a", "documents": ["b"]}) == served(
        "bert-cross-encoder", activation="sigmoid"
    )({"query": "a", "documents": ["b"]})


@pytest.mark.parametrize("repository", [name for name in REPOSITORIES if name.startswith("ranking/")])
def test_equals_sentence_transformers(served: Callable[..., Serving], repository: str) -> None:
    serving = served(repository, batch_size=4, sequence_length=(64, 256))
    cases = [case for case in recorded("ranking") if case["repository"] == repository]
    assert cases
    for case in cases:
        results = serving(case["input"], **case["kwargs"])["results"]
        scores = [r.pop("score") for r in results]
        np.testing.assert_allclose(
            scores, [r.pop("score") for r in case["output"]], rtol=1e-5, atol=1e-5, err_msg=str(case["kwargs"])
        )
        assert results == case["output"]
        assert all(type(score) is float for score in scores)


def test_a_list_of_queries(served: Callable[..., Serving]) -> None:
    serving = served("ranking/identity", batch_size=4, sequence_length=(64, 256))
    inputs = [{"query": query, "documents": DOCUMENTS[:n]} for query, n in (("yes", 3), ("", 1), ("the cat " * 99, 2))]
    together = serving(inputs)
    for item, result in zip(inputs, together, strict=True):
        alone = serving(item)["results"]
        assert [r["index"] for r in result["results"]] == [r["index"] for r in alone]
        np.testing.assert_allclose(
            [r["score"] for r in result["results"]], [r["score"] for r in alone], rtol=0, atol=1e-5
        )


def test_no_document(served: Callable[..., Serving]) -> None:
    serving = served("ranking/identity", batch_size=4, sequence_length=(64, 256))
    assert serving({"query": "a", "documents": []}) == {"results": []}


def test_options_of_an_input(served: Callable[..., Serving]) -> None:
    serving = served("ranking/identity", batch_size=4, sequence_length=(64, 256))
    item = {"query": "a query", "documents": DOCUMENTS}
    best = serving({**item, "top_k": 1, "return_documents": True})["results"]
    assert best == serving(item, top_k=1, return_documents=True)["results"]
    assert best[0]["text"] == DOCUMENTS[best[0]["index"]]
    assert serving({**item, "query": "the a query"}) == serving(item, prompt="the ")
    for wrong in ({"top_k": 0}, {"top_k": "all"}, {"prompt_name": "absent"}, {"limit": 3}):
        with pytest.raises(InputError):
            serving({**item, **wrong})


@pytest.mark.parametrize(
    "item",
    [
        "a query",
        ("a", ["b"]),
        {"query": "a"},
        {"documents": ["a"]},
        {"query": "a", "documents": "b"},
        {"query": "a", "documents": ["b", 3]},
        {"query": 3, "documents": ["b"]},
    ],
)
def test_is_no_query(served: Callable[..., Serving], item: Any) -> None:
    with pytest.raises(InputError, match='"documents"'):
        served("ranking/identity", batch_size=4, sequence_length=(64, 256))(item)


# -- cross-encoders


def test_several_logits(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="text_classification"):
        text_ranking(write(tmp_path, encoder(classes=3)))


def test_module_that_is_not_run(tmp_path: Path) -> None:
    files = sentence_files("Dense", model_type="CrossEncoder")
    with pytest.raises(ModelError, match="Dense"):
        text_ranking(write(tmp_path, encoder(classes=1), files=files))


def test_activation_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = {"query": "a", "documents": ["cat"]}

    def score(name: str, **options: Any) -> float:
        repository = Repository.open(tmp_path / name)
        return text_ranking(repository, sequence_length=16, **options)(item)["results"][0]["score"]

    write(tmp_path / "default", encoder(classes=1))
    logit = score("default", activation="identity")
    assert score("default") == pytest.approx(1 / (1 + np.exp(-logit)), rel=1e-5)
    files = sentence_files(model_type="CrossEncoder", activation_fn="torch.nn.modules.linear.Identity")
    config = {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    write(tmp_path / "both", encoder(classes=1), config=config, files=files)
    assert score("both") == logit
    write(tmp_path / "relu", encoder(classes=1), config={"sbert_ce_default_activation_function": "torch.nn.ReLU"})
    assert score("relu") == max(logit, 0)
    base = Repository.open(write(tmp_path / "base", encoder(classes=1), config=config))
    monkeypatch.setattr(Repository, "base", lambda self: base if self.name.endswith("default") else None)
    assert score("default") == pytest.approx(np.tanh(logit), rel=1e-5)


@pytest.mark.parametrize(
    "name", ["os.system", "torch.nn.modules.activation.GLU", "custom.Sigmoid", 3, ["torch.nn.Tanh"]]
)
def test_unknown_activation(tmp_path: Path, name: Any) -> None:
    folder = write(tmp_path, encoder(classes=1), config={"sentence_transformers": {"activation_fn": name}})
    with pytest.raises(ModelError):
        text_ranking(folder)
    text_ranking(folder, activation="identity")
    with pytest.raises(InputError):
        text_ranking(folder, activation="softmax")  # type: ignore[arg-type]


# -- causal language models


def test_scores_the_text_of_the_chat_template(served: Callable[..., Serving]) -> None:
    serving = served("ranking/decoder", batch_size=4, sequence_length=(64, 256))
    tokenizer = byte_pieces()
    text = (
        "<|im_start|>system\njudge<|im_end|>\n<|im_start|>user\n<Query>: a 日 cat\n<Document>: good 🙂<|im_end|>\n"
        "<|im_start|>assistant"  # Jinja drops the template's last line break
    )
    logits = next_logits(tokenizer.encode(text).ids, tokenizer.get_vocab_size())
    wanted = logits[tokenizer.token_to_id("yes")] - logits[tokenizer.token_to_id("no")]
    (result,) = serving({"query": "a 日 cat", "documents": ["good 🙂"]})["results"]
    assert result["score"] == pytest.approx(wanted, abs=1e-5)


def test_truncation_leaves_the_end_of_the_template(served: Callable[..., Serving]) -> None:
    serving = served("ranking/decoder", batch_size=4, sequence_length=(64, 256))
    tokenizer = byte_pieces()
    start = "<|im_start|>system\njudge<|im_end|>\n<|im_start|>user\n<Query>: q\n<Document>: "
    ids = tokenizer.encode(start + "cat " * 300).ids[:256]
    end = tokenizer.encode("<|im_end|>\n<|im_start|>assistant").ids
    ids[-len(end) :] = end
    logits = next_logits(ids, tokenizer.get_vocab_size())
    (result,) = serving({"query": "q", "documents": ["cat " * 250_000]})["results"]
    wanted = logits[tokenizer.token_to_id("yes")] - logits[tokenizer.token_to_id("no")]
    assert result["score"] == pytest.approx(wanted, abs=1e-5)


@needs_zoo
@pytest.mark.parametrize("file", ["qwen3/model.onnx", "qwen3-genai/model.onnx", "qwen3-genai/model_q4.onnx"])
def test_decoder_with_a_cache_equals_onnxruntime(tmp_path: Path, file: str) -> None:
    name, _, onnx_file = file.partition("/")
    folder = shutil.copytree(ZOO / name, tmp_path / name, ignore=shutil.ignore_patterns("reference*"))
    for path, held in reranker_files(true_token_id=7, false_token_id=300).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(held if isinstance(held, str) else json.dumps(held))
    documents = ["no", "", "It is a rather long document 日本, or so it says."]
    item = {"query": "Which one?", "documents": documents}
    serving = text_ranking(folder, variant=f"onnx/{onnx_file}", batch_size=3, sequence_length=128)
    found = {r["index"]: r["score"] for r in serving(item)["results"]}
    tokenizer = Tokenizer.load(Repository.open(folder))
    template = ChatTemplate.load(folder)
    model = transmuter.load(folder / "onnx" / onnx_file)
    for index, document in enumerate(documents):
        messages = [{"role": "query", "content": item["query"]}, {"role": "document", "content": document}]
        ids = np.array([tokenizer.encode(template.render(messages), add_special_tokens=False).ids], np.int64)
        made = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(ids.size)[None]}
        inputs = {
            key: made[key] if key in made else np.zeros((1, spec.shape[1], 0, spec.shape[3]), spec.dtype)
            for key, spec in model.inputs.items()
        }
        (logits,) = onnxruntime_outputs(at_exact_level(folder / "onnx" / onnx_file), ["logits"], inputs)
        assert found[index] == pytest.approx(logits[0, -1, 7] - logits[0, -1, 300], abs=1e-4)


def test_files_of_a_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_pieces()
    ids = {"true_token_id": tokenizer.token_to_id("yes"), "false_token_id": tokenizer.token_to_id("no")}
    own = causal(tmp_path / "own", {"chat_template.jinja": "{{ messages[0].content }}"})  # of a chat, not of ranking
    base = Repository.open(causal(tmp_path / "base", reranker_files(**ids)))
    item = {"query": "a", "documents": DOCUMENTS}
    wanted = text_ranking(base, sequence_length=256)(item)
    monkeypatch.setattr(Repository, "base", lambda self: base if self.name.endswith("own") else None)
    assert text_ranking(own, sequence_length=256)(item) == wanted


def test_template_that_leaves_the_document_out(tmp_path: Path) -> None:
    template = RERANKER_TEMPLATE.replace("document", "user")
    with pytest.raises(ModelError, match="document"):
        text_ranking(causal(tmp_path, {"chat_template.jinja": template}))


def test_asks_for_a_template_that_is_not_there(tmp_path: Path) -> None:
    files = reranker_files(true_token_id=1)
    del files["chat_template.jinja"]
    with pytest.raises(ModelError, match="chat template"):
        text_ranking(causal(tmp_path, files))


@pytest.mark.parametrize("score", [{"true_token_id": -1}, {"true_token_id": "yes"}, {"false_token_id": 3}])
def test_malformed_score_module(tmp_path: Path, score: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        text_ranking(causal(tmp_path, reranker_files(**score)))


def test_token_beyond_the_logits(tmp_path: Path) -> None:
    serving = text_ranking(causal(tmp_path, reranker_files(true_token_id=10**6)), sequence_length=256)
    with pytest.raises(ModelError, match="1000000"):
        serving({"query": "a", "documents": ["b"]})


def test_vocabulary_without_yes(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'yes' and 'no'"):
        text_ranking(
            write(tmp_path, decoder(300), config=RERANKER_CONFIG, tokenizer=_bytes_alone(), tokenizer_config={})
        )


def _bytes_alone() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE({sign: i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer

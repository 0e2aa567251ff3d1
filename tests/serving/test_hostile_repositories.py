"""Repositories that mean harm, or are broken: an error of ours, and nothing that is run, waits or lies outside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from hub_stand_in import Repository as Hosted
from hub_stand_in import StandIn
from tiny_repositories import encoder, make_repository, wordpiece

from transmuter import InputError, ModelError, TransmuterError, serving
from transmuter.serving import ChatTemplate, Repository, Tokenizer

OUTSIDE = (
    "../secret.json",
    "onnx/../../secret.json",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a//b",
    "./config.json",
    "..\\secret.json",
    "C:secret",
    "a\0b",
    "a\nb",
)


# ---- files outside -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OUTSIDE)
def test_names_that_lead_out_of_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.json").write_text("{}")
    repository = Repository.open(make_repository(tmp_path / "repo"))
    for read in (repository.path, repository.text, repository.json):
        with pytest.raises(ModelError, match=r"outside of the repository\. Do not trust it"):
            read(name)


def test_links_that_lead_out_of_a_folder(tmp_path: Path) -> None:
    folder = make_repository(tmp_path / "repo")
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "config.json").write_text("{}")
    (folder / "config.json").unlink()
    os.symlink(tmp_path / "secret.json", folder / "config.json")
    os.symlink(folder / "tokenizer.json", folder / "inside.json")
    os.symlink(tmp_path / "away", folder / "1_Pooling")
    repository = Repository.open(folder)
    with pytest.raises(ModelError, match=r"'config\.json' of .* is a link that leads out of the folder"):
        _ = repository.config
    assert repository.json("inside.json")["version"] == "1.0"
    assert "1_Pooling/config.json" not in repository
    with pytest.raises(ModelError, match=r"has no file '1_Pooling/config\.json'"):
        repository.json("1_Pooling/config.json")


def test_a_snapshot_of_the_cache_is_a_folder(tmp_path: Path) -> None:
    """Its files are links to blobs beside it; others still may not lead away."""
    made = make_repository(tmp_path / "made")
    root = tmp_path / "models--org--repo"
    folder = root / "snapshots" / "0123"
    (root / "blobs").mkdir(parents=True)
    for name in Repository.open(made).files():
        blob = root / "blobs" / name.replace("/", "_")
        blob.write_bytes((made / name).read_bytes())
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(os.path.relpath(blob, (folder / name).parent), folder / name)
    os.symlink(made / "config.json", folder / "other.json")
    repository = Repository.open(folder)
    assert repository.config["model_type"] == "bert"
    assert repository.model().inputs
    with pytest.raises(ModelError, match="leads out of the folder"):
        repository.json("other.json")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A Hub on loopback, with an empty cache in `tmp_path / "hub"`."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    with StandIn({}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield server


def test_a_hub_repository_that_lists_names_outside(here: StandIn, tmp_path: Path) -> None:
    names = [name for name in OUTSIDE if name and "\0" not in name and "\n" not in name]
    here.repositories["org/repo"] = Hosted({"config.json": b"{}", **dict.fromkeys(names, b"bad")})
    repository = Repository.open("org/repo")
    assert repository.files() == ("config.json",)
    for name in names:
        with pytest.raises(ModelError, match="outside of the repository"):
            repository.path(name)
    assert repository.config == {}
    here_now = {path.name for path in tmp_path.iterdir()}
    assert here_now == {"hub"}
    assert not here.gets("secret.json")


def _with_external_data(folder: Path, location: str) -> bytes:
    """A model whose weights lie in another file."""
    path = folder / "external.onnx"
    onnx.save(encoder(151), path, save_as_external_data=True, location="data", size_threshold=1024)
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    return proto.SerializeToString()


@pytest.mark.parametrize("location", ["../../secret", "/etc/passwd", "../../../hub/secret"])
def test_external_data_outside(here: StandIn, tmp_path: Path, location: str) -> None:
    (tmp_path / "made").mkdir()
    model = _with_external_data(tmp_path / "made", location)
    here.repositories["org/repo"] = Hosted({"config.json": b"{}", "onnx/model.onnx": model})
    folder = make_repository(tmp_path / "repo", files={"onnx/model.onnx": model})
    for source in ("org/repo", folder):
        with pytest.raises(ModelError, match=r"outside of the repository\. Do not trust it"):
            Repository.open(source).model()
    assert [request.path.rpartition("/")[2] for request in here.gets()] == ["config.json", "model.onnx"]


def test_modules_outside(tmp_path: Path) -> None:
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "../pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "pooling").mkdir()
    (tmp_path / "pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    folder = make_repository(tmp_path / "repo", files={"modules.json": modules})
    with pytest.raises(ModelError):
        serving.text_embedding(folder)


# ---- wrong types ---------------------------------------------------------------------------------------------------

WRONG = [None, True, -1, 1.5, "text", "9" * 400, [], [1], {}, {"a": [1]}]
TASKS: dict[str, tuple[str, Any]] = {
    "text_embedding": ("hidden", "the cat"),
    "text_classification": ("classification", "the cat"),
    "token_classification": ("tokens", "the cat"),
    "fill_mask": ("fill_mask", "the [MASK]"),
    "question_answering": ("question_answering", {"question": "who", "context": "the cat"}),
}
KEYS = {
    "config.json": ("model_type", "id2label", "label2id", "max_position_embeddings", "vocab_size", "problem_type"),
    "tokenizer_config.json": (
        "added_tokens_decoder",
        "additional_special_tokens",
        "cls_token",
        "do_lower_case",
        "mask_token",
        "model_max_length",
        "pad_token",
        "padding_side",
        "tokenizer_class",
        "truncation_side",
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_settings_of_wrong_types(tmp_path: Path, task: str) -> None:
    """Each is an error of ours, or makes no difference."""
    head, text = TASKS[task]
    folder = make_repository(tmp_path / "repo", head=head)
    model, tokenizer = Repository.open(folder).model(), Tokenizer.load(folder)
    sound = {name: json.loads((folder / name).read_text()) for name in KEYS}
    refused = 0
    for name, keys in KEYS.items():
        for key in keys:
            for value in WRONG:
                (folder / name).write_text(json.dumps({**sound[name], key: value}))
                held = {"model": model, **({"tokenizer": tokenizer} if name == "config.json" else {})}
                try:
                    run = getattr(serving, task)(folder, sequence_length=16, **held)
                    run.task.rows(text)
                except TransmuterError:
                    refused += 1
        (folder / name).write_text(json.dumps(sound[name]))
    assert refused >= 40


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b'"config"'])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "onnx/model.onnx"])
def test_broken_files(tmp_path: Path, name: str, content: bytes) -> None:
    folder = make_repository(tmp_path / "repo", head="classification", files={name: content})
    with pytest.raises(ModelError):
        serving.text_classification(folder)


# ---- tokenizers ----------------------------------------------------------------------------------------------------


def _edited(edit: Callable[[dict[str, Any]], Any]) -> str:
    held = json.loads(wordpiece().to_str())
    edit(held)
    return json.dumps(held)


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no model": lambda held: held.pop("model"),
    "no tokens": lambda held: held["model"].update(vocab={}),
    "ids that are no numbers": lambda held: held["model"].update(vocab={"a": "b"}),
    "an unknown kind": lambda held: held["model"].update(type="Evil"),
    "an unknown normalizer": lambda held: held.update(normalizer={"type": "Evil"}),
    "a malformed expression": lambda held: held.update(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    ),
    "special tokens that are not there": lambda held: held["post_processor"].update(special_tokens={}),
}


@pytest.mark.parametrize("edit", BROKEN.values(), ids=BROKEN.keys())
def test_broken_tokenizers(tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    folder = make_repository(tmp_path / "repo", files={"tokenizer.json": _edited(edit)})
    with pytest.raises((ModelError, InputError)):
        Tokenizer.load(folder).encode("the cat")


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    """Ids beyond the embeddings are errors; texts without them are answered."""
    rows = wordpiece().get_vocab_size() - 2  # "york" and "new" are the last
    folder = make_repository(tmp_path / "repo", head="classification", rows=rows)
    run = serving.text_classification(folder, sequence_length=8)
    assert run("the cat")["predictions"][0]["score"] > 0
    with pytest.raises(ModelError, match=r"'york' has the id \d+, but the model has embeddings for \d+ tokens"):
        run("new york")


def test_a_tokenizer_whose_special_tokens_the_model_lacks(tmp_path: Path) -> None:
    folder = make_repository(tmp_path / "repo", head="classification", rows=3)
    with pytest.raises(ModelError, match=r"'\[SEP\]' has the id 3, but the model has embeddings for 3 tokens"):
        serving.text_classification(folder)


# ---- chat templates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_chat_templates(tmp_path: Path, file: str, source: str) -> None:
    given: dict[str, Any] = {"tokenizer_config": {"chat_template": source}}
    folder = make_repository(tmp_path / "repo", **({"files": {file: source}} if file.endswith("jinja") else given))
    with pytest.raises(ModelError, match=r"The chat template of .* fails"):
        ChatTemplate.load(folder).render([{"role": "user", "content": "Hi"}])

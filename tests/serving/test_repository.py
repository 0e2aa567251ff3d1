"""Repositories: folders, and those of a Hub that a stand-in on loopback takes the place of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from building import info, model_of
from hub_stand_in import Fault, StandIn
from hub_stand_in import Repository as Hosted
from onnx import helper, numpy_helper
from tiny_repositories import make_repository

import transmuter
from transmuter import HubError, ModelError
from transmuter.serving import Repository, Tokenizer
from transmuter.serving.repository import setting

pytest.importorskip("huggingface_hub")

WEIGHT = np.arange(2048, dtype=np.float32).reshape(64, 32)
BIG = np.random.default_rng(0).bytes(12 << 20)  # huggingface_hub writes, and resumes, by 10 MiB
CARD = "---\nlicense: mit\nbase_model: {}\n---\n# A model\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository with a model whose weights lie beside it."""
    folder = tmp_path_factory.mktemp("repository")
    make_repository(folder)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    proto = model_of([node], [info("x")], [info("y", None)], [numpy_helper.from_array(WEIGHT, "w")])
    (folder / "onnx" / "model.onnx").unlink()
    path = folder / "onnx" / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    (folder / "onnx" / "model_fp16.onnx").write_bytes(b"never asked for")
    (folder / "pytorch_model.bin").write_bytes(BIG)
    (folder / "README.md").write_text(CARD.format("org/base"))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def stand_in(files: dict[str, bytes]) -> Iterator[StandIn]:
    repositories = {
        "org/repo": Hosted(dict(files), older={"v1": {"config.json": b'{"old": 1}'}}),
        "org/base": Hosted({"modules.json": b"[]", "config.json": b"{}"}),
        "org/private": Hosted({"config.json": b"{}"}, token="hf_right"),
        "org/gated": Hosted({"config.json": b"{}"}, token="hf_right", is_gated=True),
    }
    with StandIn(repositories) as server:
        yield server


@pytest.fixture
def here(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, which huggingface_hub takes for the Hub in this process, with an empty cache."""
    stand_in.be_the_hub(monkeypatch, tmp_path / "hub")
    return stand_in


def _downloaded(hub: StandIn) -> list[str]:
    return [request.path.partition("/resolve/")[2].partition("/")[2] for request in hub.gets()]


# ---- folders -------------------------------------------------------------------------------------------------------


def test_a_folder(tmp_path: Path) -> None:
    folder = make_repository(tmp_path / "repo", files={"1_Pooling/config.json": {"a": 1}, "modules.json": [1]})
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("x")
    for source in (folder, str(folder)):
        repository = Repository.open(source)
        assert Repository.open(repository) is repository
        assert "1_Pooling/config.json" in repository
        assert "onnx/model.onnx" in repository.files()
        assert not any(name.startswith(".git/") for name in repository.files())
        assert repository.config["model_type"] == "bert"
        assert repository.json("1_Pooling/config.json") == {"a": 1}
        assert repository.json("none.json", optional=True) == {}
        assert repository.json_value("modules.json") == [1]
        assert repository.base() is None
        assert repository.with_base("modules.json") is repository
        assert repository.with_base("none.json") is None
    outputs = transmuter.run(
        repository.model(),
        {name: np.ones((1, 3), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")},
    )
    assert outputs["last_hidden_state"].shape == (1, 3, 16)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", "'/no/such/folder' is neither a folder nor the name of a repository"),
        ("../x", "neither a folder nor the name"),
        ("org/repo/onnx", "neither a folder nor the name"),
        ("", "neither a folder nor the name"),
        ("org/..", "neither a folder nor the name"),
        (Path("no/such"), "no folder no/such"),
        (3, "cannot be read from a int"),
        (__file__, "is a file. Give the folder"),
    ],
)
def test_what_is_no_repository(source: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Repository.open(source)


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    for name, content in (("list.json", b"[1]"), ("bad.json", b"{"), ("deep.json", b"[" * 100_000), ("x.txt", b"\xff")):
        (tmp_path / name).write_bytes(content)
    repository = Repository.open(tmp_path)
    with pytest.raises(ModelError, match=r"has no file 'config\.json'"):
        _ = repository.config
    with pytest.raises(ModelError, match="holds a JSON list, not an object"):
        repository.json("list.json")
    for name in ("bad.json", "deep.json"):
        with pytest.raises(ModelError, match="is not JSON"):
            repository.json(name)
    with pytest.raises(ModelError, match="cannot be read as text"):
        repository.text("x.txt")


def test_settings_are_of_their_kind() -> None:
    held = {"a": 1, "b": "x", "c": None, "d": True, "e": 1.5, "f": [1]}
    assert setting(held, "a", int, file="f") == 1
    assert setting(held, "a", float, file="f") == 1.0
    assert setting(held, "c", int, 7, file="f") == setting(held, "none", int, 7, file="f") == 7
    assert setting(held, "d", bool, file="f") is True
    for key, kind in (("b", int), ("d", int), ("d", float), ("e", int), ("a", bool), ("a", str), ("f", dict)):
        with pytest.raises(ModelError, match=f"'{key}' in f is .*, but must be "):
            setting(held, key, kind, file="f")


# ---- the Hub -------------------------------------------------------------------------------------------------------


def test_only_what_is_needed_is_downloaded(here: StandIn) -> None:
    repository = Repository.open("org/repo")
    assert not here.requests
    assert repository.config["model_type"] == "bert"
    assert "pytorch_model.bin" in repository
    model = repository.model()
    assert float(transmuter.run(model, {"x": np.ones((1, 64), np.float32)})["y"].sum()) == WEIGHT.sum()
    assert Tokenizer.load(repository).encode("the cat").tokens == ["[CLS]", "the", "cat", "[SEP]"]
    assert set(_downloaded(here)) == {
        "config.json",
        "onnx/model.onnx",
        "onnx/model.onnx_data",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    }
    assert len([r for r in here.requests if r.path.startswith("/api/models")]) == 1


def test_offline_from_the_cache(here: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    Repository.open("org/repo").model()
    asked = len(here.requests)
    repository = Repository.open("org/repo", offline=True)
    repository.model()
    assert repository.files() == ("config.json", "onnx/model.onnx", "onnx/model.onnx_data")
    with pytest.raises(HubError, match=r"'tokenizer\.json' of org/repo is not in the cache, and offline mode is on"):
        repository.path("tokenizer.json")
    with pytest.raises(HubError, match="files of org/base is not in the cache, and offline mode is on"):
        Repository.open("org/base", offline=True).files()
    assert len(here.requests) == asked


def test_an_unreachable_hub_leaves_the_cache(here: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    Repository.open("org/repo").path("config.json")
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    )
    assert Repository.open("org/repo").config["model_type"] == "bert"
    with pytest.raises(HubError, match="files of org/base is not in the cache, and the Hub cannot be reached"):
        Repository.open("org/base").files()


def test_revisions_and_cache_dir(here: StandIn, tmp_path: Path) -> None:
    assert Repository.open("org/repo", revision="v1").config == {"old": 1}
    assert Repository.open("hf://org/repo@v1").config == {"old": 1}
    assert Repository.open("hf://org/repo").config["model_type"] == "bert"
    path = Repository.open("org/repo", cache_dir=tmp_path / "other").path("config.json")
    assert path.is_relative_to(tmp_path / "other")
    assert Repository.open("org/repo", cache_dir=tmp_path / "other", offline=True).files() == ("config.json",)
    with pytest.raises(HubError, match="no revision 'v9'"):
        Repository.open("org/repo", revision="v9").files()


def test_a_lost_connection_goes_on_where_it_was(here: StandIn) -> None:
    here.faults.append(Fault("GET", "pytorch_model.bin", drop_after=11 << 20))
    assert Repository.open("org/repo").path("pytorch_model.bin").read_bytes() == BIG
    assert [r.range for r in here.gets("pytorch_model.bin")] == [None, f"bytes={10 << 20}-"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/none", "no repository org/none, or it is private. Check the name, or set HF_TOKEN"),
        ("org/private", "no repository org/private, or it is private"),
        ("org/gated", "org/gated is gated. Accept its terms"),
    ],
)
def test_what_cannot_be_had(here: StandIn, name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HubError, match=message):
        _ = Repository.open(name).config
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match="wants a valid token for the list of files of"):
        Repository.open(name).files()
    if name != "org/none":
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        assert Repository.open(name).config == {}


def test_too_many_requests(here: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    here.faults.append(Fault("GET", "/api/models/org/repo", times=100, status=429, headers={"Retry-After": "7"}))
    with pytest.raises(HubError, match=r"too many requests.* Wait 7 s, or set HF_TOKEN"):
        Repository.open("org/repo").files()


# ---- the base model ------------------------------------------------------------------------------------------------


def test_the_base_model_of_the_card(here: StandIn, tmp_path: Path) -> None:
    repository = Repository.open("org/repo")
    assert repository.base().name == "org/base"
    assert repository.with_base("modules.json").json_value("modules.json") == []
    assert repository.with_base("config.json") is repository
    assert repository.with_base("none.json") is None
    folder = make_repository(tmp_path / "repo", files={"README.md": CARD.format("\n  - org/base\n  - org/other")})
    assert Repository.open(folder).with_base("modules.json").name == "org/base"
    assert "README.md" in _downloaded(here)
    assert set(_downloaded(here)) <= {"README.md", "modules.json"}


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (CARD.format("org/none"), "no repository org/none"),
        (CARD.format("{a: 1}"), "'base_model' in .*README.md is .*, but must name a repository"),
        ("---\nbase_model: [\n---\n", "is not YAML"),
        (CARD.format("../../etc"), r"'\.\./\.\./etc' is neither a folder nor the name"),
        (CARD.format("/etc"), "neither a folder nor the name"),
    ],
)
def test_malformed_cards(here: StandIn, tmp_path: Path, card: str, message: str) -> None:
    folder = make_repository(tmp_path / "repo", files={"README.md": card})
    with pytest.raises((HubError, ModelError), match=message):
        Repository.open(folder).with_base("modules.json")


@pytest.mark.parametrize(
    "card", ["# No front matter\n", "---\nlicense: mit\n---\n", "", "---\n- a\n---\n", CARD.format("")]
)
def test_cards_without_a_base(tmp_path: Path, card: str) -> None:
    folder = make_repository(tmp_path / "repo", files={"README.md": card})
    assert Repository.open(folder).with_base("modules.json") is None


def test_a_base_is_never_a_folder(here: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "base").mkdir(parents=True)
    (tmp_path / "org" / "base" / "modules.json").write_text(json.dumps(["from the working folder"]))
    folder = make_repository(tmp_path / "repo", files={"README.md": CARD.format("org/base")})
    assert Repository.open(folder).with_base("modules.json").json_value("modules.json") == []

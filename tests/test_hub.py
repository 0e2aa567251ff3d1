"""`hf://` addresses, against a stand-in of the Hub's file endpoints on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from building import info, model_of
from hub_stand_in import Fault, Repository, StandIn
from onnx import helper, numpy_helper

import transmuter
from transmuter import hub

pytest.importorskip("huggingface_hub")
WEIGHT = np.arange(2048, dtype=np.float32).reshape(64, 32)
BIG = np.random.default_rng(0).bytes(12 << 20)  # huggingface_hub writes, and resumes, by 10 MiB


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model with external data, one whose external data leaves the repository, and a big file."""
    folder = tmp_path_factory.mktemp("repository")
    proto = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [info("x")],
        [info("y", None)],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    onnx.save(proto, folder / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0)
    outside = onnx.load(folder / "model.onnx", load_external_data=False)
    outside.graph.initializer[0].external_data[0].value = "../../secret"
    return {
        "onnx/model.onnx": (folder / "model.onnx").read_bytes(),
        "onnx/model.onnx_data": (folder / "model.onnx_data").read_bytes(),
        "onnx/outside.onnx": outside.SerializeToString(),
        "big.bin": BIG,
    }


@pytest.fixture
def stand_in(files: dict[str, bytes]) -> Iterator[StandIn]:
    repositories = {
        "org/repo": Repository(dict(files), older={"v1": {"config.json": b"old"}}),
        "org/private": Repository({"model.onnx": b""}, token="hf_right"),
        "org/gated": Repository({"model.onnx": b""}, token="hf_right", is_gated=True),
    }
    with StandIn(repositories) as server:
        yield server


@pytest.fixture
def here(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The stand-in, which huggingface_hub takes for the Hub in this process, with an empty cache."""
    stand_in.be_the_hub(monkeypatch, tmp_path / "hub")
    return stand_in


# ---- settings of the environment -----------------------------------------------------------------------------------


def in_a_process(code: str, cache: Path, endpoint: str, **environment: str) -> str:
    """What `code` prints, in a process whose Hub is at `endpoint`: huggingface_hub reads it when imported."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment}
    prelude = "import numpy as np, transmuter\nfrom transmuter import HubError\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + code],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOAD = """
model = transmuter.load("hf://org/repo/onnx/model.onnx")
print(float(transmuter.run(model, {"x": np.ones((1, 64), np.float32)})["y"].sum()))
"""


def test_a_model_with_external_data_and_the_cache_offline(stand_in: StandIn, tmp_path: Path) -> None:
    assert float(in_a_process(LOAD, tmp_path, stand_in.endpoint)) == WEIGHT.sum()
    asked = len(stand_in.requests)
    assert float(in_a_process(LOAD, tmp_path, stand_in.endpoint, HF_HUB_OFFLINE="1")) == WEIGHT.sum()
    assert len(stand_in.requests) == asked


def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    code = (
        LOAD.replace("model =", "try:\n    model =").split("\nprint")[0]
        + "\nexcept HubError as error:\n    print(error)"
    )
    assert "cannot be reached" in in_a_process(code, tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")


def test_a_list_of_files_in_a_new_process(stand_in: StandIn, tmp_path: Path) -> None:
    """There, huggingface_hub has imported little of itself."""
    code = "from transmuter import hub\nprint(hub.list_files('org/repo'))"
    assert "big.bin" in in_a_process(code, tmp_path, stand_in.endpoint)
    code = (
        "from transmuter import hub\ntry:\n    hub.list_files('org/repo')\nexcept HubError as error:\n    print(error)"
    )
    assert "offline mode is on" in in_a_process(code, tmp_path / "other", stand_in.endpoint, HF_HUB_OFFLINE="1")


# ---- what is cached ------------------------------------------------------------------------------------------------


def test_a_file_is_downloaded_again_only_when_its_etag_has_changed(here: StandIn, files: dict[str, bytes]) -> None:
    path = hub.fetch("org/repo", "onnx/model.onnx_data")
    assert path.read_bytes() == files["onnx/model.onnx_data"]
    assert hub.fetch("org/repo", "onnx/model.onnx_data") == path
    assert len(here.gets()) == 1

    here.repositories["org/repo"].files["config.json"] = b"{}"  # another commit, which leaves this file as it was
    moved = hub.fetch("org/repo", "onnx/model.onnx_data")
    assert moved != path
    assert moved.read_bytes() == path.read_bytes()
    assert len(here.gets()) == 1

    here.repositories["org/repo"].files["onnx/model.onnx_data"] = b"new"
    assert hub.fetch("org/repo", "onnx/model.onnx_data").read_bytes() == b"new"
    assert path.read_bytes() == files["onnx/model.onnx_data"]
    assert len(here.gets()) == 2


def test_revisions_are_apart_and_a_commit_that_is_cached_asks_nothing(here: StandIn) -> None:
    here.repositories["org/repo"].files["config.json"] = b"new"
    assert hub.fetch("org/repo", "config.json").read_bytes() == b"new"
    assert hub.fetch("org/repo", "config.json", "v1").read_bytes() == b"old"
    commit, _ = here.repositories["org/repo"].at("v1")
    asked = len(here.requests)
    assert hub.fetch("org/repo", "config.json", commit).read_bytes() == b"old"
    assert len(here.requests) == asked


def test_offline_uses_the_cache_alone(here: StandIn) -> None:
    path = hub.fetch_model("hf://org/repo/onnx/model.onnx")
    assert (path.parent / "model.onnx_data").exists()
    asked = len(here.requests)
    assert hub.fetch_model("hf://org/repo/onnx/model.onnx", offline=True) == path
    with pytest.raises(transmuter.HubError, match=r"'big\.bin' of org/repo is not in the cache, and offline"):
        hub.fetch("org/repo", "big.bin", offline=True)
    assert len(here.requests) == asked


# ---- lost connections ----------------------------------------------------------------------------------------------


def test_a_lost_connection_goes_on_where_it_was(here: StandIn) -> None:
    here.faults.append(Fault("GET", "big.bin", drop_after=11 << 20))
    path = hub.fetch("org/repo", "big.bin")
    assert path.read_bytes() == BIG
    assert [r.range for r in here.gets("big.bin")] == [None, f"bytes={10 << 20}-"]


def test_a_connection_that_is_lost_again_and_again_leaves_nothing_behind(
    here: StandIn, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    here.faults.append(Fault("GET", "model.onnx", times=100, drop_after=50))
    with pytest.raises(transmuter.HubError, match="could not be downloaded"):
        hub.fetch_model("hf://org/repo/onnx/model.onnx")
    assert not list(tmp_path.rglob("*.onnx"))
    assert not list(tmp_path.rglob("*.incomplete"))
    here.faults.clear()
    assert hub.fetch_model("hf://org/repo/onnx/model.onnx").read_bytes() == files["onnx/model.onnx"]


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("hf://org/repo/onnx/none.onnx", r"no file 'onnx/none\.onnx' of org/repo\. Check the path"),
        ("hf://org/none/model.onnx", "no repository org/none, or it is private. Check the name, or set HF_TOKEN"),
        ("hf://org/private/model.onnx", "no repository org/private, or it is private"),
        ("hf://org/gated/model.onnx", "org/gated is gated. Accept its terms"),
        ("hf://org/repo@v9/onnx/model.onnx", "no revision 'v9'"),
    ],
)
def test_what_cannot_be_had_is_named(here: StandIn, address: str, message: str) -> None:
    with pytest.raises(transmuter.HubError, match=message):
        transmuter.load(address)


def test_tokens(here: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(transmuter.HubError, match=r"wants a valid token for 'model\.onnx' of org/private"):
        hub.fetch("org/private", "model.onnx")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    for name in ("org/private", "org/gated"):
        assert hub.fetch(name, "model.onnx").read_bytes() == b""


def test_too_many_requests_are_waited_for_and_named(
    here: StandIn, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    here.faults.append(Fault("GET", "model.onnx", status=429, headers={"Retry-After": "7"}))
    assert hub.fetch_model("hf://org/repo/onnx/model.onnx").read_bytes() == files["onnx/model.onnx"]
    assert any(seconds >= 7 for seconds in slept)
    here.faults.append(Fault("HEAD", "big.bin", times=100, status=429, headers={"Retry-After": "7"}))
    with pytest.raises(transmuter.HubError, match=r"too many requests.* Wait 7 s, or set HF_TOKEN"):
        hub.fetch("org/repo", "big.bin")


@pytest.mark.parametrize(("status", "message"), [(403, "forbids access"), (503, "answered 503.* Try again later")])
def test_other_refusals(here: StandIn, status: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    here.faults.append(Fault("HEAD", "model.onnx", times=100, status=status))
    with pytest.raises(transmuter.HubError, match=message):
        hub.fetch("org/repo", "onnx/model.onnx")


def test_external_data_outside_of_the_repository_is_refused(here: StandIn) -> None:
    with pytest.raises(transmuter.ModelError, match=r"'\.\./\.\./secret', outside of its repository"):
        hub.fetch_model("hf://org/repo/onnx/outside.onnx")
    assert not here.gets("secret")


@pytest.mark.parametrize("address", ["hf://", "hf://org", "hf://org/repo", "hf://org/repo@main"])
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(transmuter.HubError, match="hf://org/repo/path"):
        transmuter.load(address)


def test_a_missing_huggingface_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(transmuter.HubError, match=r"\.\[serving\]"):
        transmuter.load("hf://org/repo/onnx/model.onnx")

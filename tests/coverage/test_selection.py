"""Candidates for the list of models, and how they are added to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from hub_stand_in import Fault, Repository, StandIn
from python_packages import find_packages_in, model_bytes, wheel

from transmuter.coverage import catalogue, selection, sources
from transmuter.coverage.catalogue import Entry
from transmuter.errors import CoverageError, HubError

# ---- the Hub -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    """A stand-in of the Hub with four repositories, three of them for text classification."""
    constants = pytest.importorskip("huggingface_hub.constants")
    whole = {"onnx/model.onnx": model_bytes(), "onnx/model_q4.onnx": model_bytes()}
    card = {"license": "apache-2.0"}
    config = {"architectures": ["BertForSequenceClassification"]}
    task = "text-classification"
    repositories = {
        "org/seldom": Repository(dict(whole), task=task, downloads=3),
        "org/often": Repository(dict(whole), task=task, downloads=900, card=card, config=config),
        "org/other-format": Repository({"model.safetensors": b""}, task=task, downloads=5000),
        "org/speech": Repository(
            {f"onnx/{part}_model.onnx": model_bytes() for part in ("encoder", "decoder")}, task="asr", downloads=7
        ),
    }
    with StandIn(repositories) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield server


def test_the_most_downloaded_repositories_of_a_task(hub: StandIn, tmp_path: Path) -> None:
    often, seldom = selection.from_hub("text-classification", 5)
    commit, _ = hub.repositories["org/often"].at("main")
    assert often.source == f"hf://org/often@{commit}/onnx/model.onnx"
    assert (often.name, often.task, often.license) == ("org--often", "text-classification", "apache-2.0")
    assert often.architecture == "BertForSequenceClassification"
    assert (seldom.name, seldom.architecture, seldom.license) == ("org--seldom", "", "")
    assert [entry.name for entry in selection.from_hub("text-classification", 1)] == ["org--often"]
    assert sources.locate(often, cache=tmp_path, progress=False).read_bytes() == model_bytes()


def test_parts_of_a_model_are_entries_of_their_own(hub: StandIn) -> None:
    assert [entry.name for entry in selection.from_hub("asr", 5)] == [
        "org--speech--decoder_model",
        "org--speech--encoder_model",
    ]


def test_a_hub_that_refuses_is_named(hub: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.faults.append(Fault("GET", "/api/models", times=100, status=429))
    with pytest.raises(HubError, match=r"too many requests .the list of models for asr.*Wait some minutes"):
        selection.select(tmp_path / "models.toml", tasks=["asr"], cache=tmp_path)
    assert not (tmp_path / "models.toml").exists()


PARTS = [
    "onnx/encoder_model.onnx",
    "onnx/encoder_model_int8.onnx",
    "onnx/decoder_model.onnx",
    "onnx/decoder_with_past_model.onnx",
]


@pytest.mark.parametrize(
    ("paths", "chosen"),
    [
        (["onnx/model.onnx", "model.onnx", "onnx/model_fp16.onnx"], ["onnx/model.onnx"]),
        (["model.onnx", "model_quantized.onnx", "README.md"], ["model.onnx"]),
        (
            [*PARTS, "onnx/decoder_model_merged.onnx"],
            ["onnx/decoder_model_merged.onnx", "onnx/encoder_model.onnx"],
        ),
        (PARTS, [PARTS[2], PARTS[3], PARTS[0]]),
        (["unet/model.onnx", "vae_decoder/model.onnx"], ["unet/model.onnx", "vae_decoder/model.onnx"]),
        (["onnx/model_q4f16.onnx", "onnx/model_fp16.onnx"], ["onnx/model_fp16.onnx"]),
        (["model.safetensors"], []),
    ],
)
def test_files_of_a_model(paths: list[str], chosen: list[str]) -> None:
    assert selection.files_of_model(paths) == chosen


# ---- folders, packages, the suite ----------------------------------------------------------------------------------


def test_folders_of_repositories(tmp_path: Path) -> None:
    files = {
        "zoo/zoo.json": json.dumps({"bert": {"task": "fill-mask", "architecture": "BertForMaskedLM"}}),
        "zoo/bert/onnx/model.onnx": "",
        "zoo/bert/onnx/model_fp16.onnx": "",
        "zoo/diffusion/unet/model.onnx": "",
        "zoo/diffusion/unet/config.json": json.dumps({"architectures": ["UNet"]}),
        "zoo/diffusion/README.md": "---\ntags:\n- onnx\nlicense: mit\n---\nlicense: no\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    bert, half, unet = selection.from_folder(tmp_path / "zoo", tmp_path)
    assert (bert.name, bert.source) == ("bert", "local://zoo/bert/onnx/model.onnx")
    assert (bert.task, bert.architecture, bert.license) == ("fill-mask", "BertForMaskedLM", "")
    assert half.name == "bert--model_fp16"
    assert (unet.name, unet.source) == ("diffusion--unet", "local://zoo/diffusion/unet/model.onnx")
    assert (unet.architecture, unet.license) == ("UNet", "mit")
    assert next(selection.from_folder(tmp_path / "zoo")).source == "local://bert/onnx/model.onnx"
    with pytest.raises(CoverageError, match="is not below"):
        list(selection.from_folder(tmp_path / "zoo", tmp_path / "zoo/bert"))
    with pytest.raises(CoverageError, match="There is no folder"):
        list(selection.from_folder(tmp_path / "none"))
    (tmp_path / "zoo/zoo.json").write_text("[")
    with pytest.raises(CoverageError, match=r"zoo\.json is no JSON"):
        list(selection.from_folder(tmp_path / "zoo"))


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_packages_in(tmp_path, monkeypatch)
    wheel(tmp_path, {"tiny/a/model.onnx": model_bytes(), "tiny/big net.onnx": model_bytes(), "tiny/model.txt": b""})
    first, second = selection.from_package("tiny-model==1.0", cache=tmp_path / "cache")
    assert (first.name, first.source) == ("tiny-model--a--model", "pypi://tiny-model==1.0/tiny/a/model.onnx")
    assert (second.name, second.license, second.reason) == ("tiny-model--big-net", "MIT", "A naïve model")
    assert sources.locate(second, cache=tmp_path / "cache", offline=True).read_bytes() == model_bytes()
    with pytest.raises(CoverageError, match=r"No package tiny-model is installed. Write name==version"):
        list(selection.from_package("tiny-model", cache=tmp_path))


def test_installed_packages(tmp_path: Path) -> None:
    found = {entry.name: entry for entry in selection.from_package("onnxruntime", cache=tmp_path, offline=True)}
    version = metadata.version("onnxruntime")
    iris = found["onnxruntime--logreg_iris"]
    assert iris.source == f"pypi://onnxruntime=={version}/onnxruntime/datasets/logreg_iris.onnx"
    assert "MIT" in iris.license
    with pytest.raises(CoverageError, match=r"pytest .* has no ONNX file"):
        list(selection.from_package("pytest", cache=tmp_path))


def test_cases_of_the_suite() -> None:
    assert [entry.source for entry in selection.from_suite("test_relu*")] == [
        "backend://test_relu",
        "backend://test_relu_expanded_ver18",
    ]
    assert [entry.name for entry in selection.from_suite("test_shufflenet")] == ["test_shufflenet"]
    with pytest.raises(CoverageError, match="has no case none"):
        list(selection.from_suite("none"))


# ---- the list ------------------------------------------------------------------------------------------------------

LIST = """# Reviewed by hand.
[[model]]
name = "bert"
source = "hf://org/bert@aaa/onnx/model.onnx"
reason = "Everybody uses it."  # they do
[[model]]
name = "tiny"
source = "pypi://tiny==1.0/tiny/model.onnx"
inputs = {x = {low = 0, high = 9}}
"""


def test_what_is_in_the_list_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(LIST)
    known = [Entry("a", "hf://org/bert@bbb/onnx/model.onnx"), Entry("b", "pypi://tiny==2.0/tiny/model.onnx")]
    done = selection.add(known, path)
    assert (list(done.added), done.known) == ([], 2)
    assert path.read_text() == LIST

    new = Entry("bert", "hf://org/bert@bbb/onnx/model_fp16.onnx", task="fill-mask")
    done = selection.add([known[0], new, new], path)
    assert ([entry.name for entry in done.added], done.known) == (["bert-2"], 2)
    assert path.read_text().startswith(LIST)
    assert [entry.name for entry in catalogue.read(path)] == ["bert", "tiny", "bert-2"]
    assert catalogue.read(path)[2].task == "fill-mask"
    assert [p.name for p in tmp_path.iterdir()] == ["models.toml"]


def test_a_list_is_made_and_a_malformed_one_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "models.toml"
    done = selection.select(path, cases=["test_relu", "test_abs"], cache=tmp_path)
    assert len(done.added) == 2
    assert [entry.name for entry in catalogue.read(path)] == ["test_relu", "test_abs"]
    path.write_text("[[")
    with pytest.raises(CoverageError, match="is no TOML"):
        selection.select(path, cases=["test_relu"], cache=tmp_path)
    assert path.read_text() == "[["


def test_nothing_that_is_asked_for_and_the_hub_offline(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match="No models are asked for"):
        selection.select(tmp_path / "models.toml", cache=tmp_path)
    with pytest.raises(CoverageError, match="Leave out --offline"):
        selection.select(tmp_path / "models.toml", tasks=["fill-mask"], cache=tmp_path, offline=True)


def test_the_list_of_this_repository() -> None:
    """It is well formed; its sources are pinned."""
    entries = catalogue.read(Path(__file__).parents[2] / "coverage" / "models.toml")
    assert len({entry.source for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.source.split("://")[0] in ("hf", "pypi", "local", "backend")
        assert entry.task
        assert entry.architecture
        assert entry.reason
        assert entry.license or entry.source.startswith("local://")

"""The files behind sources: packages that pip gives, local folders, the backend suite and the Hub."""

from __future__ import annotations

import io
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from python_packages import WEIGHT, find_packages_in, model_bytes, wheel

from transmuter import hub
from transmuter.coverage import sources
from transmuter.coverage.catalogue import Entry
from transmuter.errors import CoverageError, ModelError


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder that pip finds packages in."""
    folder = tmp_path / "index"
    folder.mkdir()
    find_packages_in(folder, monkeypatch)
    return folder


def entry(source: str) -> Entry:
    return Entry("model", source)


TINY = entry("pypi://tiny-model==1.0/tiny_model/data/model.onnx")


# ---- packages ------------------------------------------------------------------------------------------------------


def test_a_model_of_a_package_comes_with_its_external_data_and_nothing_else(index: Path, tmp_path: Path) -> None:
    files = {"tiny_model/data/model.onnx": model_bytes("w.bin"), "tiny_model/data/w.bin": WEIGHT.tobytes()}
    wheel(index, {**files, "tiny_model/__init__.py": b"raise SystemExit"})
    path = sources.locate(TINY, cache=tmp_path / "cache")
    assert path == tmp_path / "cache/pypi/tiny-model==1.0/tiny_model/data/model.onnx"
    assert {p.name for p in (tmp_path / "cache/pypi/tiny-model==1.0").rglob("*") if p.is_file()} == {
        "model.onnx",
        "w.bin",
    }
    onnx.load(path)
    for kept in index.iterdir():  # both are in the cache now: the file, and the archive for its other files
        kept.unlink()
    assert sources.locate(TINY, cache=tmp_path / "cache", offline=True) == path
    path.unlink()
    assert sources.locate(TINY, cache=tmp_path / "cache", offline=True) == path


def test_an_installed_package_of_that_version_is_used(tmp_path: Path) -> None:
    version = metadata.version("onnxruntime")
    path = "onnxruntime/datasets/logreg_iris.onnx"
    found = sources.locate(entry(f"pypi://onnxruntime=={version}/{path}"), cache=tmp_path, offline=True)
    assert found == Path(onnxruntime.__file__).parents[1] / path
    with pytest.raises(CoverageError, match=r"onnxruntime==0\.0\.1 is neither installed nor in"):
        sources.locate(entry(f"pypi://onnxruntime==0.0.1/{path}"), cache=tmp_path, offline=True)


def test_what_pip_says_is_told_and_nothing_is_kept(index: Path, tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match=r"pip could not download tiny-model==1\.0 \(.*No matching distribution"):
        sources.locate(TINY, cache=tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_an_interrupted_download_leaves_nothing_behind(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index, {"tiny_model/data/model.onnx": model_bytes()})
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_archives", lambda folder: [] if folder.name == "tiny-model==1.0" else interrupt())
        with pytest.raises(KeyboardInterrupt):
            sources.locate(TINY, cache=tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert sources.locate(TINY, cache=tmp_path / "cache").read_bytes() == model_bytes()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_extraction_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = wheel(tmp_path, {"tiny_model/data/model.onnx": model_bytes("w.bin")})  # without w.bin
    with sources.Archive(path) as archive, pytest.raises(CoverageError, match=r"has no file tiny_model/data/w\.bin"):
        archive.extract_model("tiny_model/data/model.onnx", tmp_path / "out")
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"MatMul")] ^= 1
    path.write_bytes(damaged)
    with sources.Archive(path) as archive, pytest.raises(CoverageError, match=r"cannot be read.*Delete the archive"):
        archive.extract_model("tiny_model/data/model.onnx", tmp_path / "out")
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_file()]


@pytest.mark.parametrize("location", ["../../../secret.bin", "/etc/passwd"])
def test_external_data_outside_of_the_package_is_refused(tmp_path: Path, location: str) -> None:
    path = wheel(tmp_path, {"tiny/model.onnx": model_bytes(location), "secret.bin": WEIGHT.tobytes()})
    with sources.Archive(path) as archive, pytest.raises(ModelError, match="outside of the package"):
        archive.extract_model("tiny/model.onnx", tmp_path / "out")
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_file()]


def test_files_of_sources_are_found_where_they_would_be_installed(tmp_path: Path) -> None:
    path = tmp_path / "tiny-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in (("tiny-1.0/src/tiny/model.onnx", model_bytes()), ("tiny-1.0/PKG-INFO", b"Name: tiny\n")):
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
        link = tarfile.TarInfo("tiny-1.0/tiny/link.onnx")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with sources.Archive(path) as archive:
        assert archive.read("PKG-INFO") == b"Name: tiny\n"
        assert archive.extract_model("tiny/model.onnx", tmp_path / "out").read_bytes() == model_bytes()
        with pytest.raises(CoverageError, match=r"no file tiny/link\.onnx. Its ONNX files are tiny/model\.onnx"):
            archive.extract_model("tiny/link.onnx", tmp_path / "out")


def test_files_of_a_wheels_data_folder_are_found_where_they_would_be_installed(tmp_path: Path) -> None:
    path = wheel(tmp_path, {"tiny_model-1.0.data/purelib/tiny/model.onnx": model_bytes()})
    with sources.Archive(path) as archive:
        assert archive.extract_model("tiny/model.onnx", tmp_path / "out").read_bytes() == model_bytes()


@pytest.mark.parametrize(
    "source",
    [
        "pypi://tiny/model.onnx",
        "pypi://tiny==1.0",
        "pypi://tiny==1.0/model.bin",
        "pypi://tiny==1.0/../../model.onnx",
        "pypi://tiny==1.0//etc/model.onnx",
        "pypi://--index-url==1.0/model.onnx",
        "pypi://tiny==1.0 --index-url x/model.onnx",
    ],
)
def test_malformed_packages(source: str, tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match="Write pypi://name==version/path"):
        sources.locate(entry(source), cache=tmp_path)


def test_a_bar_counts_bytes(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[SimpleNamespace] = []

    def bar(**options: object) -> SimpleNamespace:
        made = SimpleNamespace(n=0, closed=False, **options)
        made.update = lambda n: setattr(made, "n", made.n + n)
        made.close = lambda: setattr(made, "closed", True)
        bars.append(made)
        return made

    monkeypatch.setattr(sources, "bar_class", lambda wanted: bar if wanted else None)
    monkeypatch.setattr(sources, "_LOOK", 0.02)
    wheel(index, {"tiny_model/data/model.onnx": model_bytes()})
    sources.locate(TINY, cache=tmp_path / "cache", progress=True)
    (made,) = bars
    assert (made.desc, made.unit, made.closed) == ("tiny-model==1.0", "B", True)


# ---- folders, the suite, the Hub -----------------------------------------------------------------------------------


def test_local_files(tmp_path: Path) -> None:
    (tmp_path / "zoo").mkdir()
    (tmp_path / "zoo/model.onnx").write_bytes(model_bytes())
    assert (
        sources.locate(entry("local://zoo/model.onnx"), cache=tmp_path, local=tmp_path) == tmp_path / "zoo/model.onnx"
    )
    with pytest.raises(CoverageError, match="Give the folder with --local"):
        sources.locate(entry("local://zoo/model.onnx"), cache=tmp_path)
    with pytest.raises(CoverageError, match=r"no file .*none\.onnx"):
        sources.locate(entry("local://zoo/none.onnx"), cache=tmp_path, local=tmp_path)
    with pytest.raises(CoverageError, match="leaves the folder"):
        sources.locate(entry("local://../model.onnx"), cache=tmp_path, local=tmp_path / "zoo")


@pytest.mark.parametrize("name", ["test_relu", "test_sequence_model1", "test_Conv2d"])
def test_cases_of_the_suite_come_with_their_data(tmp_path: Path, name: str) -> None:
    path = sources.locate(entry(f"backend://{name}"), cache=tmp_path)
    assert sources.locate(entry(f"backend://{name}"), cache=tmp_path) == path
    session = onnxruntime.InferenceSession(str(path))
    for number, inputs in enumerate(sources.given_inputs(path)):
        assert {i.name for i in session.get_inputs()} <= inputs.keys()
        result = session.run(None, {i.name: inputs[i.name] for i in session.get_inputs()})[0]
        expected = onnx.load_tensor(path.parent / f"test_data_set_{number}" / "output_0.pb")
        np.testing.assert_allclose(result, numpy_helper.to_array(expected), rtol=1e-3, atol=1e-6)
    assert [p.name for p in path.parents[1].iterdir()] == [name]


def test_whole_models_of_the_suite_and_unknown_cases(tmp_path: Path) -> None:
    path = sources.locate(entry("backend://test_shufflenet"), cache=tmp_path)
    assert onnx.load(path).graph.node[0].op_type
    assert sources.given_inputs(path) == []
    with pytest.raises(CoverageError, match="has no case 'test_none'"):
        sources.locate(entry("backend://test_none"), cache=tmp_path)


def test_a_source_of_no_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match=r"'ftp://x' is no source. Write hf://"):
        sources.locate(entry("ftp://x"), cache=tmp_path)


def test_the_hubs_bars_are_off_without_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("huggingface_hub.utils")
    seen = []

    def fetch_model(address: str, *, offline: bool) -> Path:
        seen.append((address, offline, utils.are_progress_bars_disabled()))
        return tmp_path

    monkeypatch.setattr(hub, "fetch_model", fetch_model)
    sources.locate(entry("hf://org/repo/model.onnx"), cache=tmp_path, offline=True, progress=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    sources.locate(entry("hf://org/repo/model.onnx"), cache=tmp_path, progress=False)
    assert seen[0] == ("hf://org/repo/model.onnx", True, True)
    assert not utils.are_progress_bars_disabled()
    assert len(seen) == 2

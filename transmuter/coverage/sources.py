"""Where an entry says that its model is → an ONNX file on this machine, with its external data beside it."""

from __future__ import annotations

import functools
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from onnx import numpy_helper

from transmuter import hub, reading
from transmuter.coverage.catalogue import Entry
from transmuter.errors import CoverageError, ModelError
from transmuter.progress import bar_class

_PACKAGE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_IN_WHEEL = re.compile(r"^[^/]+\.data/(purelib|platlib)/")
_IN_SOURCES = re.compile(r"^[^/]+/(src/)?")
"""What stands in an archive before the path that a file has once installed."""
_LOOK = 0.2
"""Seconds between two looks at how much has been downloaded."""
_TOLD = 300
"""So much of what pip says last is told."""


def locate(
    entry: Entry, *, cache: Path, local: Path | None = None, offline: bool = False, progress: bool | None = None
) -> Path:
    """The ONNX file of a model, which is downloaded unless it is there.

    A download that is interrupted leaves nothing under the name of its file; the same call starts it again.

    Args:
        entry: Its source counts: `hf://`, `pypi://`, `local://` or `backend://`, as `catalogue.Entry` says.
        cache: The folder for what is taken out of packages and of the backend suite; repositories of the Hub lie in
            the cache of huggingface_hub.
        local: The folder that `local://` paths start from.
        offline: Use what is there, and no network.
        progress: Show a bar; None shows it on a terminal.

    Raises:
        CoverageError: The source is malformed, or its file cannot be had; the message says what to do.
        HubError: The Hub does not give the file.
        ModelError: The file is no ONNX model, or its external data would lie outside of its package or repository.
    """
    scheme, _, rest = entry.source.partition("://")
    match scheme:
        case "hf":
            return _from_hub(entry.source, offline=offline, progress=progress)
        case "pypi":
            return _from_package(rest, entry, cache / "pypi", offline=offline, progress=progress)
        case "local":
            return _from_folder(rest, local)
        case "backend":
            return _from_suite(rest, cache / "backend")
    raise CoverageError(
        f"{entry.name}: {entry.source!r} is no source. Write hf://, pypi://, local:// or backend:// before it."
    )


def _from_hub(address: str, *, offline: bool, progress: bool | None) -> Path:
    if bar_class(progress) is not None:
        return hub.fetch_model(address, offline=offline)
    try:
        from huggingface_hub import utils
    except ImportError:
        return hub.fetch_model(address, offline=offline)  # says what to install
    was_off = utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        return hub.fetch_model(address, offline=offline)
    finally:
        if not was_off:
            utils.enable_progress_bars()


def _from_folder(path: str, local: Path | None) -> Path:
    if local is None:
        raise CoverageError(f"local://{path} lies below a folder that was not given. Give the folder with --local.")
    if not _stays_inside(path):
        raise CoverageError(f"local://{path} leaves the folder {local}. Correct the path.")
    file = local / path
    if not file.is_file():
        raise CoverageError(f"There is no file {file}. Give the folder that local:// paths start from with --local.")
    return file


# ---- packages ------------------------------------------------------------------------------------------------------


def _from_package(address: str, entry: Entry, cache: Path, *, offline: bool, progress: bool | None) -> Path:
    """The file in an installed package, if that is of this version; else out of a downloaded one."""
    named, _, path = address.partition("/")
    parts = _PACKAGE.fullmatch(named)
    if parts is None or not path.endswith(".onnx") or not _stays_inside(path):
        raise CoverageError(
            f"{entry.name}: {entry.source!r} is no file of a package. Write pypi://name==version/path/in/package.onnx."
        )
    distribution = installed(parts["name"], parts["version"])
    if distribution is not None and (file := Path(str(distribution.locate_file(path)))).is_file():
        return file
    folder = cache / named
    file = folder / path
    if not file.is_file():
        with Archive(package(named, cache, offline=offline, progress=progress)) as archive:
            archive.extract_model(path, folder)
    return file


def installed(name: str, version: str) -> metadata.Distribution | None:
    """The installed package of this name, if it is of this version."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return distribution if distribution.version == version else None


def package(named: str, cache: Path, *, offline: bool = False, progress: bool | None = None) -> Path:
    """A package's wheel, or its source archive where it has no wheel, downloaded by pip unless it is there.

    pip asks the index, with the proxy and credentials, that it is configured for. Of a source archive it runs the
    build, to learn the metadata. Python versions that the package asks for do not count: only files are taken.

    Args:
        named: As `name==version`.
        cache: The folder in which it is kept, below `archives`.
        offline, progress: As in `locate`.

    Raises:
        CoverageError: `named` is malformed, the package is not there and `offline`, or pip fails.
    """
    if _PACKAGE.fullmatch(named) is None:
        raise CoverageError(f"{named!r} is no version of a package. Write name==version.")
    folder = cache / "archives" / named
    if kept := _archives(folder):
        return kept[0]
    if offline:
        raise CoverageError(f"{named} is neither installed nor in {cache}. Run once without --offline, or install it.")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
        _download(named, Path(scratch), progress)
        found = _archives(Path(scratch))
        if not found:
            raise CoverageError(f"pip gave no archive for {named} that can be read. Install it instead.")
        return found[0].replace(folder / found[0].name)


def _archives(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.glob("*")) if p.name.endswith((".whl", ".zip", ".tar.gz", ".tar.bz2", ".tgz"))]


def _download(named: str, folder: Path, progress: bool | None) -> None:
    """Lets pip download into a folder. Its temporary files lie there too: their size is the progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python", "--quiet"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), named]
    printed = folder / "printed"
    tqdm = bar_class(progress)
    with printed.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(folder)}
        )
        bar = None if tqdm is None else tqdm(desc=named, unit="B", unit_scale=True)
        try:
            while process.poll() is None:
                try:
                    process.wait(_LOOK)
                except subprocess.TimeoutExpired:
                    if bar is not None:
                        bar.update(max(0, _size(folder) - bar.n))
        finally:
            process.kill()
            process.wait()
            if bar is not None:
                bar.close()
    if process.returncode != 0:
        said = " ".join(printed.read_text(errors="replace").split())[-_TOLD:]
        raise CoverageError(
            f"pip could not download {named} ({said}). Check the name, the version and the network, or install it."
        )


def _size(folder: Path) -> int:
    """The bytes of all files below a folder whose files come and go."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


class Archive:
    """A wheel or source archive of a package, open for reading in a `with` block.

    Attributes:
        path: Its file.
        names: Its plain files: by the path that each has where packages are installed, the archive's own name of it.
    """

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> Archive:
        try:
            if self.path.suffix in (".whl", ".zip"):
                self._open: Any = zipfile.ZipFile(self.path)
                names = [i.filename for i in self._open.infolist() if not i.is_dir()]
            else:
                self._open = tarfile.open(self.path)
                names = [m.name for m in self._open.getmembers() if m.isfile()]
        except (OSError, zipfile.BadZipFile, tarfile.TarError) as error:
            raise CoverageError(
                f"{self.path} cannot be read: {error}. Delete it, and it is downloaded again."
            ) from error
        before = _IN_WHEEL if self.path.suffix == ".whl" else _IN_SOURCES
        self.names = {before.sub("", name, count=1): name for name in names}
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, path: str) -> bytes:
        """The contents of one of `names`."""
        with self._stream(path) as stream:
            return stream.read()

    def _stream(self, path: str) -> IO[bytes]:
        name = self.names[path]
        return self._open.open(name) if isinstance(self._open, zipfile.ZipFile) else self._open.extractfile(name)

    def extract_model(self, path: str, folder: Path) -> Path:
        """Writes an ONNX file and its external data, and nothing else, below a folder, the file itself last.

        Args:
            path: Where the file is once the package is installed.
            folder: Stands for the folder that packages are installed in.

        Raises:
            CoverageError: The archive has no such file, or not its external data.
            ModelError: The file is no ONNX model, or its external data would lie outside of the folder.
        """
        file = folder / path
        partial = self._extract(path, file)
        try:
            for location in reading.external_locations(partial):
                beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), location))
                if not _stays_inside(beside):
                    raise ModelError(
                        f"{path} of {self.path.name} has external data in {location!r}, outside of the package. "
                        "Do not trust it."
                    )
                self._extract(beside, folder / beside).replace(folder / beside)
            return partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)

    def _extract(self, path: str, file: Path) -> Path:
        """Writes a file under a name of its own beside where it belongs."""
        if path not in self.names:
            models = [name for name in self.names if name.endswith(".onnx")]
            has = f"Its ONNX files are {', '.join(models[:5])}." if models else "It has no ONNX files."
            raise CoverageError(f"{self.path.name} has no file {path}. {has}")
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=f".{file.name}-", suffix=".partial", dir=file.parent)
        try:
            with open(descriptor, "wb") as out, self._stream(path) as stream:
                shutil.copyfileobj(stream, out, 1 << 20)
        except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError) as error:
            os.unlink(partial)
            raise CoverageError(f"{path} of {self.path} cannot be read: {error}. Delete the archive.") from error
        except BaseException:
            os.unlink(partial)
            raise
        return Path(partial)


def _stays_inside(path: str) -> bool:
    """Whether a path of `/`-separated names goes down alone, on every system."""
    return not any(name in ("", ".", "..") or ":" in name or "\\" in name for name in path.split("/"))


# ---- the backend suite ---------------------------------------------------------------------------------------------


def _from_suite(name: str, cache: Path) -> Path:
    """The model of a case of the ONNX backend suite; the case's data lies beside it, in the suite's layout."""
    folder = cache / onnx.__version__ / name
    file = folder / "model.onnx"
    if file.is_file():
        return file
    if (made := next((p for p in _recorded_cases().get(name, ()) if p.exists()), None)) is not None:
        case = None
    elif (case := _node_cases().get(name)) is None:
        raise CoverageError(f"The backend suite of onnx {onnx.__version__} has no case {name!r}. Correct its name.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        whole = Path(scratch) / "case"
        if case is not None:
            _write_case(case, whole)
        elif made.is_dir():
            shutil.copytree(made, whole)
        else:
            whole.mkdir()
            shutil.copyfile(made, whole / "model.onnx")
        try:
            whole.rename(folder)
        except OSError:  # another thread or process was faster
            if not file.is_file():
                raise
    return file


def suite_cases() -> list[str]:
    """The names of all cases of the backend suite of the installed onnx that have a model."""
    recorded = [name for name, paths in _recorded_cases().items() if any(p.exists() for p in paths)]
    return sorted({*recorded, *_node_cases()})


@functools.cache
def _recorded_cases() -> dict[str, list[Path]]:
    """Cases that onnx has as files: by name, their folder, or the model's file where there is no more."""
    from onnx.backend.test.loader import load_model_tests

    found = {}
    for kind in ("simple", "pytorch-converted", "pytorch-operator", "real"):
        for case in load_model_tests(kind=kind):
            beside = Path(onnx.__file__).parents[1] / (case.url or "none")
            found[case.name] = [Path(case.model_dir)] if case.model_dir else [beside]
    return found


@functools.cache
def _node_cases() -> dict[str, Any]:
    """Cases that onnx generates in code, by name."""
    import contextlib
    import io
    import warnings

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # the generators print and warn
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return {case.name: case for case in collect_testcases(None)}


def _write_case(case: Any, folder: Path) -> None:
    folder.mkdir()
    for position, (inputs, outputs) in enumerate(case.data_sets):
        data = folder / f"test_data_set_{position}"
        data.mkdir()
        for kind, values, declared in (
            ("input", inputs, case.model.graph.input),
            ("output", outputs, case.model.graph.output),
        ):
            for at, (value, info) in enumerate(zip(values, declared)):
                (data / f"{kind}_{at}.pb").write_bytes(_serialized(value, info))
    (folder / "model.onnx").write_bytes(case.model.SerializeToString())


def _serialized(value: Any, info: onnx.ValueInfoProto) -> bytes:
    match info.type.WhichOneof("value"):
        case "sequence_type":
            proto = numpy_helper.from_list(value, info.name)
        case "optional_type":
            proto = numpy_helper.from_optional(value, info.name)
        case _:
            proto = value if isinstance(value, onnx.TensorProto) else numpy_helper.from_array(np.asarray(value))
    return proto.SerializeToString()


def given_inputs(model: Path) -> list[dict[str, Any]]:
    """The inputs that lie beside a model in the layout of the backend suite, a dict for each data set; else none.

    Tensors are arrays, sequences are lists, an absent optional is None.
    """
    folders = sorted(model.parent.glob("test_data_set_*"))
    if not folders:
        return []
    graph = onnx.load(model, load_external_data=False).graph
    return [_given(graph.input, folder) for folder in folders]


def _given(declared: Sequence[onnx.ValueInfoProto], folder: Path) -> dict[str, Any]:
    values = {}
    for position, info in enumerate(declared):
        file = folder / f"input_{position}.pb"
        if not file.is_file():  # an input that an initializer gives
            continue
        match info.type.WhichOneof("value"):
            case "sequence_type":
                values[info.name] = numpy_helper.to_list(onnx.SequenceProto.FromString(file.read_bytes()))
            case "optional_type":
                values[info.name] = numpy_helper.to_optional(onnx.OptionalProto.FromString(file.read_bytes()))
            case _:
                values[info.name] = numpy_helper.to_array(onnx.TensorProto.FromString(file.read_bytes()))
    return values

"""`select`: candidates for the list of models, from the Hub, folders, Python packages and the ONNX backend suite.

What it adds is a proposal: the list is reviewed by hand, and nothing in it is ever changed here.
"""

from __future__ import annotations

import email
import email.message
import json
import os
import posixpath
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx

from transmuter import hub
from transmuter.coverage import catalogue, sources
from transmuter.coverage.catalogue import Entry
from transmuter.errors import CoverageError
from transmuter.progress import bar_class

_WHOLE = ("onnx/model.onnx", "model.onnx")
"""Files of a repository that are all of its model."""
_VARIANT = re.compile(r"_(fp16|bf16|int8|uint8|quantized|q8|q4|q4f16|bnb4|fp4|nf4|O[1-4]|qint8_.*|quint8_.*)$", re.I)
"""How names of files end that hold another precision of the file without it."""
_REVISION = re.compile(r"(?<=^hf://)([^/]+/[^/@]+)@[^/]+|(?<=^pypi://)([^/=]+)==[^/]+")
_LICENSE_OF_CARD = re.compile(r"\A---\n(?:(?!---).*\n)*?license:[ \t]*(\S.*)\n")


@dataclass(frozen=True)
class Selection:
    """What `select` did: the entries that it added, and how many candidates were in the list before."""

    added: Sequence[Entry]
    known: int


def select(
    into: Path,
    *,
    tasks: Sequence[str] = (),
    most: int = 5,
    folders: Sequence[Path] = (),
    local: Path | None = None,
    packages: Sequence[str] = (),
    cases: Sequence[str] = (),
    cache: Path,
    offline: bool = False,
    progress: bool | None = None,
) -> Selection:
    """Finds models, and adds those to a list that are not in it, at its end.

    A model is in the list if an entry has its file, of whatever revision or version. What is there stays as it is,
    comments too.

    Args:
        into: The list of models; made if it is not there.
        tasks: Tasks of the Hub, of each of which the `most` most downloaded repositories are taken.
        folders: Folders of repositories, see `from_folder`.
        local: The folder that `local://` paths start from; None is each folder itself.
        packages: Python packages, as `name==version`, or the name of one that is installed.
        cases: Patterns of names of the backend suite's cases, as `test_conv_*`.
        cache, offline, progress: As in `sources.locate`.

    Raises:
        CoverageError: Nothing is asked for, or a candidate cannot be had.
        HubError: The Hub does not answer.
    """
    wanted: list[tuple[str, Iterable[Entry]]] = []
    if tasks and offline:
        raise CoverageError("The Hub's most downloaded models cannot be asked for offline. Leave out --offline.")
    wanted += [(task, from_hub(task, most)) for task in tasks]
    wanted += [(str(folder), from_folder(folder, local)) for folder in folders]
    wanted += [(p, from_package(p, cache=cache, offline=offline, progress=progress)) for p in packages]
    wanted += [(pattern, from_suite(pattern)) for pattern in cases]
    if not wanted:
        raise CoverageError("No models are asked for. Name tasks of the Hub, folders, packages or cases of the suite.")
    found: list[Entry] = []
    tqdm = bar_class(progress)
    for _, candidates in wanted if tqdm is None else tqdm(wanted, desc="select", unit="source"):
        found += candidates
    return add(found, into)


def add(candidates: Iterable[Entry], into: Path) -> Selection:
    """Adds entries to a list of models, unless their files are in it; a name that is taken gets a number.

    Raises:
        CoverageError: The list is malformed.
    """
    entries = catalogue.read(into) if into.exists() else []
    files = {_file(entry) for entry in entries}
    names = {entry.name for entry in entries}
    added, known = [], 0
    for entry in candidates:
        file = _file(entry)
        if file in files:
            known += 1
            continue
        name, number = entry.name, 2
        while name in names:
            name, number = f"{entry.name}-{number}", number + 1
        files.add(file)
        names.add(name)
        added.append(replace(entry, name=name))
    if added:
        _append(added, into)
    return Selection(added, known)


def _file(entry: Entry) -> str:
    """Its source without the revision or version."""
    return _REVISION.sub(r"\1\2", entry.source)


def _append(entries: Sequence[Entry], into: Path) -> None:
    """Writes entries behind what is in a list, all or none of them."""
    into.parent.mkdir(parents=True, exist_ok=True)
    before = into.read_text().rstrip() if into.exists() else ""
    with tempfile.TemporaryDirectory(prefix=".select-", dir=into.parent) as scratch:
        whole = Path(scratch) / into.name
        catalogue.write(entries, whole)
        if before:
            whole.write_text(before + "\n\n" + whole.read_text())
        catalogue.read(whole)
        os.replace(whole, into)


def _named(*words: str) -> str:
    """A name for the matrix out of some words."""
    return "--".join(re.sub(r"[^A-Za-z0-9._-]+", "-", word).strip("-.") for word in words if word)


def _words(path: str) -> list[str]:
    """What a file's path in its repository adds to the repository's name: nothing for `onnx/model.onnx`."""
    *folders, stem = path.removesuffix(".onnx").split("/")
    return [*(folder for folder in folders if folder != "onnx"), *([] if stem == "model" else [stem])]


# ---- the Hub -------------------------------------------------------------------------------------------------------


def from_hub(task: str, most: int) -> Iterator[Entry]:
    """The most downloaded repositories with ONNX files for a task, each at the commit that it is at now.

    Raises:
        HubError: huggingface_hub is not installed, or the Hub does not answer.
    """
    for info in hub.most_downloaded(task, most):
        card = info.card_data.to_dict() if info.card_data is not None else {}
        license = card.get("license") or ""
        architectures = (info.config or {}).get("architectures") or [""]
        for path in files_of_model([sibling.rfilename for sibling in info.siblings or []]):
            yield Entry(
                name=_named(info.id.replace("/", "--"), *_words(path)),
                source=f"hf://{info.id}@{info.sha}/{path}",
                task=task,
                architecture=architectures[0],
                license=license if isinstance(license, str) else ", ".join(license),
                reason=f"Among the {most} most downloaded ONNX repositories for {task}.",
            )


def files_of_model(paths: Iterable[str]) -> list[str]:
    """Of the files of a repository, those that make its model at full precision.

    `onnx/model.onnx` or `model.onnx` alone; else all parts, as encoder and decoder, of which a merged decoder stands
    for the two that it was merged of; else the first file.
    """
    models = sorted(path for path in paths if path.endswith(".onnx"))
    if whole := [path for path in _WHOLE if path in models]:
        return whole[:1]
    in_folder = [path for path in models if path.startswith("onnx/")] or models
    parts = [path for path in in_folder if not _VARIANT.search(path.removesuffix(".onnx"))]
    for path in [path for path in parts if path.endswith("decoder_model_merged.onnx")]:
        merged = {posixpath.join(posixpath.dirname(path), f"decoder_{x}.onnx") for x in ("model", "with_past_model")}
        parts = [part for part in parts if part not in merged]
    return parts or in_folder[:1]


# ---- folders -------------------------------------------------------------------------------------------------------


def from_folder(folder: Path, local: Path | None = None) -> Iterator[Entry]:
    """Every ONNX file of the repositories that lie in a folder, each a folder of its own.

    Task and architecture are those that `zoo.json` in the folder tells by repository; else the architecture is that of
    the `config.json` nearest to the file. The licence is the one in the repository's card, `README.md`.

    Args:
        folder: The folder.
        local: The folder above it that `local://` paths start from; None is `folder`.

    Raises:
        CoverageError: There is no such folder, it is not below `local`, or a JSON file in it is malformed.
    """
    if not folder.is_dir():
        raise CoverageError(f"There is no folder {folder}. Name a folder of repositories.")
    start = (local or folder).resolve()
    if not folder.resolve().is_relative_to(start):
        raise CoverageError(f"{folder} is not below {start}, which local:// paths start from. Give one above it.")
    told = _json(folder / "zoo.json")
    for file in sorted(folder.rglob("*.onnx")):
        path = file.relative_to(folder)
        repository = path.parts[0] if len(path.parts) > 1 else folder.name
        about = told.get(repository, {})
        yield Entry(
            name=_named(repository, *_words("/".join(path.parts[1:] or path.parts))),
            source=f"local://{(folder.resolve() / path).relative_to(start).as_posix()}",
            task=about.get("task", ""),
            architecture=about.get("architecture") or _architecture(file, folder),
            license=_license_of_card(folder / repository / "README.md"),
            reason="; ".join(about.get("notes", ())),
        )


def _architecture(file: Path, folder: Path) -> str:
    """The architecture in the nearest `config.json`, upwards from a file to a folder."""
    here = file.parent
    while here.is_relative_to(folder):
        if names := _json(here / "config.json").get("architectures"):
            return names[0]
        here = here.parent
    return ""


def _json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise CoverageError(f"{file} is no JSON: {error}. Correct or remove it.") from error
    if not isinstance(found, dict):
        raise CoverageError(f"{file} holds no JSON object. Correct or remove it.")
    return found


def _license_of_card(card: Path) -> str:
    found = _LICENSE_OF_CARD.match(card.read_text(errors="replace")) if card.is_file() else None
    return "" if found is None else found[1].strip("\"' ")


# ---- packages and the suite ----------------------------------------------------------------------------------------


def from_package(named: str, *, cache: Path, offline: bool = False, progress: bool | None = None) -> Iterator[Entry]:
    """Every ONNX file in a Python package.

    Args:
        named: `name==version`, which is downloaded unless it is installed, or the name of an installed package.
        cache, offline, progress: As in `sources.locate`.

    Raises:
        CoverageError: The package cannot be had, or has no ONNX file.
    """
    name, _, version = named.partition("==")
    try:
        version = version or metadata.version(name)
    except metadata.PackageNotFoundError as error:
        raise CoverageError(f"No package {name} is installed. Write name==version, and it is downloaded.") from error
    if (distribution := sources.installed(name, version)) is not None:
        paths = [file.as_posix() for file in distribution.files or ()]
        about: email.message.Message = distribution.metadata
    else:
        file = sources.package(f"{name}=={version}", cache / "pypi", offline=offline, progress=progress)
        with sources.Archive(file) as archive:
            paths = list(archive.names)
            described = next((p for p in paths if re.search(r"(^|\.dist-info/)(METADATA|PKG-INFO)$", p)), None)
            about = email.message_from_string(archive.read(described).decode(errors="replace") if described else "")
    models = sorted(path for path in paths if path.endswith(".onnx") and not path.startswith(".."))
    if not models:
        raise CoverageError(f"{name} {version} has no ONNX file. Leave it out.")
    stems = [posixpath.basename(path) for path in models]
    for path, stem in zip(models, stems):
        folder = posixpath.basename(posixpath.dirname(path)) if stems.count(stem) > 1 or stem == "model.onnx" else ""
        yield Entry(
            name=_named(name, folder, stem.removesuffix(".onnx")),
            source=f"pypi://{name}=={version}/{path}",
            license=_license(about),
            reason=" ".join((about.get("Summary") or "").split()),
        )


def _license(about: email.message.Message) -> str:
    """The licence in a package's metadata: the expression, else the classifier, else a free text's first line."""
    if expression := about.get("License-Expression"):
        return expression
    classifiers = [c.split(" :: ")[-1] for c in about.get_all("Classifier") or () if c.startswith("License ::")]
    text = (about.get("License") or "").strip().splitlines()
    return ", ".join(classifiers) or (text[0] if text else "")


def from_suite(pattern: str) -> Iterator[Entry]:
    """The cases of the installed onnx's backend suite whose names match a pattern, as `test_conv_*`.

    Raises:
        CoverageError: There is none.
    """
    found = [name for name in sources.suite_cases() if fnmatchcase(name, pattern)]
    if not found:
        raise CoverageError(f"The backend suite of onnx {onnx.__version__} has no case {pattern}. Correct the pattern.")
    for name in found:
        yield Entry(
            name=name,
            source=f"backend://{name}",
            task="operator",
            license="Apache-2.0",
            reason=f"A case of the backend suite of onnx {onnx.__version__}.",
        )

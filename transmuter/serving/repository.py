"""A Hugging Face repository: a folder, or one on the Hub of which the files that are asked for are downloaded."""

from __future__ import annotations

import functools
import json
import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, overload

import transmuter
from transmuter import hub, reading
from transmuter.errors import HubError, ModelError
from transmuter.serving import variants

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_ADDRESS = re.compile(r"hf://(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/?")
_T = TypeVar("_T")


class Repository:
    """A folder or a Hub repository, of which only the files that are asked for are downloaded. `open` makes one.

    Names of files are relative, with `/` between folders. A name with `..`, an absolute one, and a link that leads out
    of the folder are `ModelError`s.

    Attributes:
        name: `org/repo`, or the folder's path.
        folder: The folder; None for a repository of the Hub.
        revision: Branch, tag or commit on the Hub; None is the main branch.
        cache_dir: The Hub's cache, if not huggingface_hub's.
        offline: Whether the cache alone is used.
    """

    def __init__(
        self,
        name: str,
        folder: Path | None,
        revision: str | None,
        cache_dir: str | os.PathLike[str] | None,
        offline: bool,
    ):
        self.name, self.folder, self.revision, self.cache_dir, self.offline = name, folder, revision, cache_dir, offline

    def __repr__(self) -> str:
        return f"Repository({self.name!r})"

    @classmethod
    def open(
        cls,
        source: str | os.PathLike[str] | Repository,
        *,
        revision: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        offline: bool = False,
    ) -> Repository:
        """A repository; nothing is downloaded yet.

        Args:
            source: A folder if there is one of this path; else a repository of the Hub, `"org/repo"` or
                `"hf://org/repo[@revision]"`. Token and endpoint are those of huggingface_hub (`HF_TOKEN`,
                `HF_ENDPOINT`).
            revision: Branch, tag or commit on the Hub.
            cache_dir: The Hub's cache, if not huggingface_hub's (`HF_HOME`).
            offline: Use the cache alone, as `HF_HUB_OFFLINE` does for the whole process.

        Raises:
            ModelError: The source is neither a folder nor the name of a repository.
        """
        if isinstance(source, Repository):
            return source
        if not isinstance(source, (str, os.PathLike)):
            raise ModelError(
                f"A repository cannot be read from a {type(source).__name__}. Give a folder, or org/repo on the Hub."
            )
        text = os.fspath(source)
        if isinstance(text, str) and (address := _ADDRESS.fullmatch(text)):
            return cls._hosted(address["name"], revision or address["revision"], cache_dir, offline)
        if not text:
            raise ModelError("'' is neither a folder nor the name of a repository. Check the path, or org/repo.")
        folder = Path(os.fsdecode(text)).expanduser()
        if folder.is_dir():
            return cls(str(folder), folder, None, cache_dir, offline)
        if folder.exists():
            raise ModelError(f"{folder} is a file. Give the folder of its repository, or load it with transmuter.load.")
        if not isinstance(source, str):
            raise ModelError(f"There is no folder {folder}. Check the path, or give org/repo as a string.")
        return cls._hosted(source, revision, cache_dir, offline)

    @classmethod
    def _hosted(
        cls, name: str, revision: str | None, cache_dir: str | os.PathLike[str] | None, offline: bool
    ) -> Repository:
        if not _NAME.fullmatch(name) or ".." in name or "--" in name:
            raise ModelError(f"{name!r} is neither a folder nor the name of a repository. Check the path, or org/repo.")
        return cls(name, None, revision, cache_dir, offline)

    # -- files

    @functools.cached_property
    def _files(self) -> tuple[str, ...]:
        if self.folder is None:
            names = hub.list_files(self.name, self.revision, offline=self.offline, cache_dir=self.cache_dir)
            return tuple(name for name in names if _is_inside(name))
        found = []
        for place, folders, files in os.walk(self.folder):  # links to folders are not followed
            folders[:] = [f for f in folders if not f.startswith(".")]
            found += [Path(place, file).relative_to(self.folder).as_posix() for file in files]
        return tuple(sorted(found))

    def files(self) -> tuple[str, ...]:
        """The names of all files, sorted. The Hub is asked once; offline, they are those in the cache.

        Raises:
            HubError: The Hub has no such repository, or cannot be reached and nothing is in the cache.
        """
        return self._files

    def __contains__(self, name: str) -> bool:
        return name in self.files()

    def path(self, name: str) -> Path:
        """A file, which is downloaded if it is not here yet.

        Raises:
            ModelError: The name leads out of the repository, or there is no such file.
            HubError: The Hub does not give it.
        """
        if not _is_inside(name):
            raise ModelError(f"{self.name} names the file {name!r}, outside of the repository. Do not trust it.")
        if name not in self.files():
            if self.folder is None and self.offline:
                raise HubError(
                    f"{name!r} of {self.name} is not in the cache, and offline mode is on. Download it first."
                )
            raise ModelError(f"{self.name} has no file {name!r}. Check that the repository is complete.")
        if self.folder is None:
            return hub.fetch(self.name, name, self.revision, offline=self.offline, cache_dir=self.cache_dir)
        path = self.folder / name
        if not any(path.resolve().is_relative_to(root) for root in self._roots):
            raise ModelError(
                f"{name!r} of {self.name} is a link that leads out of the folder. Put the file itself there if you "
                "trust it."
            )
        return path

    @functools.cached_property
    def _roots(self) -> tuple[Path, ...]:
        """Where the files of a folder may lie: in it, or, for a snapshot in the Hub's cache, among its blobs."""
        folder = self.folder.resolve()
        if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
            return folder, folder.parents[1] / "blobs"
        return (folder,)

    def text(self, name: str) -> str:
        """A file's text.

        Raises:
            ModelError: There is no such file, or it is not UTF-8.
            HubError: The Hub does not give it.
        """
        try:
            return self.path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise ModelError(
                f"{name!r} of {self.name} cannot be read as text: {error}. Download the repository again."
            ) from error

    def json(self, name: str, *, optional: bool = False) -> dict[str, Any]:
        """The object in a JSON file; an empty one for a file that is `optional` and absent.

        Raises:
            ModelError: There is no such file, or it holds no JSON object.
            HubError: The Hub does not give it.
        """
        if optional and name not in self:
            return {}
        held = self.json_value(name)
        if not isinstance(held, dict):
            raise ModelError(
                f"{name!r} of {self.name} holds a JSON {type(held).__name__}, not an object. "
                "Download the repository again."
            )
        return held

    def json_value(self, name: str, *, optional: bool = False) -> Any:
        """Whatever value a JSON file holds (`modules.json` is a list); None for one that is `optional` and absent.

        Raises:
            ModelError: There is no such file, or it is not JSON.
            HubError: The Hub does not give it.
        """
        if optional and name not in self:
            return None
        text = self.text(name)
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{name!r} of {self.name} is not JSON: {error}. Download the repository again.") from error

    # -- configuration

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`.

        Raises:
            ModelError: There is none, or it holds no JSON object.
            HubError: The Hub does not give it.
        """
        return self.json("config.json")

    @overload
    def setting(self, key: str, kind: type[_T]) -> _T | None: ...
    @overload
    def setting(self, key: str, kind: type[_T], default: _T) -> _T: ...
    def setting(self, key: str, kind: type[_T], default: _T | None = None) -> _T | None:
        """A value of `config.json` that must be of a kind (`int` or `float`, `str`, `bool`, `list`, `dict`).

        Raises:
            ModelError: It is of another kind.
        """
        return setting(self.config, key, kind, default, file="config.json")

    # -- the base model

    @functools.cached_property
    def _base(self) -> Repository | None:
        name = _base_model(self.text("README.md"), self.name) if "README.md" in self else None
        # the name comes from a file that others wrote: it is one of the Hub's, never a folder
        return None if name is None else Repository._hosted(name, None, self.cache_dir, self.offline)

    def base(self) -> Repository | None:
        """The repository of which this is an export: the (first) `base_model` of the model card, None without one.

        Raises:
            ModelError: The model card's front matter cannot be read, or names no repository.
            HubError: The Hub does not give the model card.
        """
        return self._base

    def with_base(self, name: str) -> Repository | None:
        """This repository if it has the file, else its `base` if that has it, else None.

        Raises:
            ModelError, HubError: As `base`; the Hub does not tell the base's files.
        """
        if name in self:
            return self
        base = self.base()
        return base if base is not None and name in base else None

    # -- the model

    def model(
        self,
        stem: str = "model",
        *,
        variant: str | Mapping[str, str] | None = None,
        default: str = "fp32",
        compute_type: str | None = "float32",
        **options: Any,
    ) -> transmuter.Model:
        """Loads an ONNX file: `onnx/{stem}.onnx` or `{stem}.onnx`, or the same with the ending of a variant.

        Args:
            stem: The file's name without variant and `.onnx`.
            variant, default: As those of `variants.choose`.
            compute_type, options: As those of `transmuter.load`.

        Raises:
            ModelError: There is no such file, or it is no usable ONNX model.
            HubError: The Hub does not give it.
        """
        return transmuter.load(
            self.model_path(stem, variant=variant, default=default), compute_type=compute_type, **options
        )

    def model_path(
        self, stem: str = "model", *, variant: str | Mapping[str, str] | None = None, default: str = "fp32"
    ) -> Path:
        """The ONNX file that `model` loads, its external data beside it.

        Raises:
            ModelError: There is no such file, it is no ONNX model, or its external data lies outside of the repository.
            HubError: The Hub does not give it.
        """
        config = self.config if "config.json" in self else {}
        name = variants.choose(self.files(), stem, variant=variant, config=config, default=default)
        path = self.path(name)
        for location in reading.external_locations(path):
            self.path(posixpath.normpath(posixpath.join(posixpath.dirname(name), location)))
        return path


def setting(held: Mapping[str, Any], key: str, kind: type[_T], default: Any = None, *, file: str) -> Any:
    """A value of a configuration that must be of a kind; an absent one and null are the default.

    Args:
        held: The configuration.
        key: Its key.
        kind: `int` (no bool), `float` (an int too), `str`, `bool`, `list` or `dict`.
        default: What an absent one is.
        file: The configuration's file, for the error.

    Raises:
        ModelError: It is of another kind.
    """
    value = held.get(key)
    if value is None:
        return default
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", list: "a list"}
        raise ModelError(
            f"{key!r} in {file} is {_shown(value)}, but must be {names.get(kind, 'an object')}. Correct the file."
        )
    return float(value) if kind is float else value


def _shown(value: Any) -> str:
    """A JSON value, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:36]} ..."


def _is_inside(name: str) -> bool:
    """Whether a name of a file stays in its repository, on every system."""
    parts = name.split("/")
    return not any(part in ("", ".", "..") for part in parts) and not re.search(r"[\\:\x00-\x1f]", name)


def _base_model(card: str, name: str) -> str | None:
    """The `base_model` in the YAML front matter of a model card."""
    front = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", card, re.DOTALL)
    if front is None:
        return None
    import yaml

    try:
        held = yaml.safe_load(front[1])
        base = held.get("base_model") if isinstance(held, dict) else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ModelError(f"The front matter of {name}'s README.md is not YAML: {error}. Correct the file.") from error
    if isinstance(base, list):
        base = base[0] if base else None
    if base is None:
        return None
    if not isinstance(base, str):
        raise ModelError(
            f"'base_model' in {name}'s README.md is {_shown(base)}, but must name a repository. Correct the file."
        )
    return base

"""The Hugging Face Hub: `hf://org/repo[@revision]/path` → a local file, and its list of models."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from transmuter import reading
from transmuter.errors import HubError, ModelError

_ADDRESS = re.compile(r"hf://(?P<repository>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<path>.+)")


def fetch_model(address: str, *, offline: bool = False) -> Path:
    """Downloads an ONNX file and its external data, or finds them in the Hub's cache.

    Args:
        address: `hf://org/repo/path.onnx`, or `hf://org/repo@revision/path.onnx`. Token, endpoint, cache folder and
            offline mode are those of huggingface_hub (`HF_TOKEN`, `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_OFFLINE`).
        offline: Use the cache alone, as `HF_HUB_OFFLINE` does for the whole process.

    Raises:
        HubError: The address is malformed, huggingface_hub is not installed, or the file could not be had.
        ModelError: The file is no ONNX model, or its external data would lie outside of the repository.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise HubError(
            f"{address!r} is no address of a file. Write hf://org/repo/path.onnx or hf://org/repo@revision/path.onnx."
        )
    path = fetch(parts["repository"], parts["path"], parts["revision"], offline=offline)
    for location in reading.external_locations(path):
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(parts["path"]), location))
        if posixpath.isabs(beside) or beside.split("/")[0] == "..":
            raise ModelError(
                f"{address} has external data in {location!r}, outside of its repository. Do not trust it."
            )
        fetch(parts["repository"], beside, parts["revision"], offline=offline)
    return path


def fetch(
    repository: str,
    path: str,
    revision: str | None = None,
    *,
    offline: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Downloads one file of a repository, or finds it in the Hub's cache.

    A download whose connection is lost goes on where it was; one that fails leaves nothing under the file's name.

    Args:
        repository: `org/repo`.
        path: The file's name in the repository.
        revision: Branch, tag or commit; None is the main branch.
        offline: Use the cache alone.
        cache_dir: The cache's folder, if not huggingface_hub's.

    Raises:
        HubError: huggingface_hub is not installed, or the file could not be had.
    """
    huggingface_hub, errors = _imported()
    where = f"{path!r} of {repository}" + (f" at {revision}" if revision else "")
    try:
        return Path(
            huggingface_hub.hf_hub_download(
                repository, path, revision=revision, local_files_only=offline, cache_dir=cache_dir
            )
        )
    except errors.LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise _refused(where, error.__cause__, repository, revision) from error
        reason = "offline mode is on" if offline else "the Hub cannot be reached"
        raise HubError(f"{where} is not in the cache, and {reason}. Check the network, or HF_HUB_OFFLINE.") from error
    except errors.EntryNotFoundError as error:
        raise HubError(f"There is no file {where}. Check the path on the repository's page.") from error
    except errors.HfHubHTTPError as error:
        raise _refused(where, error, repository, revision) from error
    except Exception as error:
        raise HubError(f"{where} could not be downloaded: {error}. Try again, or download it by hand.") from error


def list_files(
    repository: str,
    revision: str | None = None,
    *,
    offline: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> list[str]:
    """The names of a repository's files, sorted; those in the Hub's cache where the Hub cannot be reached.

    Args:
        repository, revision, offline, cache_dir: As those of `fetch`.

    Raises:
        HubError: huggingface_hub is not installed, the Hub refuses, or it cannot be reached and nothing is in the
            cache.
    """
    huggingface_hub, errors = _imported()
    from huggingface_hub import constants  # which the package itself imports only when it needs them

    where = f"the list of files of {repository}" + (f" at {revision}" if revision else "")
    if not (offline or constants.HF_HUB_OFFLINE):
        try:
            told = huggingface_hub.HfApi().model_info(repository, revision=revision)
            return sorted(file.rfilename for file in told.siblings or ())
        except errors.HfHubHTTPError as error:
            raise _refused(where, error, repository, revision) from error
        except errors.HFValidationError as error:
            raise HubError(f"{repository!r} is no name of a repository. Write org/repo.") from error
        except Exception as error:  # of the connection, whose classes are those of the HTTP library in use
            unreachable = error
    else:
        unreachable = None
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, cache_dir=cache_dir, local_files_only=True
        )
    except Exception as error:
        reason = f"the Hub cannot be reached ({unreachable})" if unreachable else "offline mode is on"
        raise HubError(f"{where} is not in the cache, and {reason}. Check the network, or HF_HUB_OFFLINE.") from error
    found = (path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    return sorted(found)


def most_downloaded(task: str, limit: int) -> list[Any]:
    """The most downloaded repositories with ONNX files for a task, as `huggingface_hub.ModelInfo`, the first on top.

    Args:
        task: A task of the Hub, as `text-classification`.
        limit: How many at most.

    Raises:
        HubError: huggingface_hub is not installed, or the Hub does not answer.
    """
    huggingface_hub, errors = _imported()
    what = f"the list of models for {task}"
    try:
        return list(
            huggingface_hub.HfApi().list_models(
                filter="onnx",
                pipeline_tag=task,
                sort="downloads",
                limit=limit,
                full=True,
                cardData=True,
                fetch_config=True,
            )
        )
    except errors.HfHubHTTPError as error:
        raise _refused(what, error) from error
    except Exception as error:
        raise HubError(f"{what} could not be had: {error}. Check the network, or HF_HUB_OFFLINE.") from error


def _imported() -> tuple[Any, Any]:
    """huggingface_hub and its module of errors."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise HubError(
            "huggingface_hub is not installed, and what is on the Hub needs it. "
            "Install Transmuter with its extra `serving`, in its checkout: pip install '.[serving]'"
        ) from error
    return huggingface_hub, errors


def _refused(what: str, error: Any, repository: str = "", revision: str | None = None) -> HubError:
    """What to tell of an answer of the Hub that is a refusal.

    Args:
        what: What was asked for.
        error: A `huggingface_hub.errors.HfHubHTTPError`.
        repository, revision: Of which it was asked.
    """
    _, errors = _imported()
    if isinstance(error, errors.GatedRepoError):
        return HubError(f"{repository} is gated. Accept its terms on the Hub and set HF_TOKEN.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubError(f"There is no repository {repository}, or it is private. Check the name, or set HF_TOKEN.")
    if isinstance(error, errors.RevisionNotFoundError):
        return HubError(f"{repository} has no revision {revision!r}. Check the branch, tag or commit.")
    status = error.response.status_code
    if status == 401:
        return HubError(f"The Hub wants a valid token for {what}. Set HF_TOKEN to one, or remove what is there.")
    if status == 403:
        return HubError(f"The Hub forbids access to {what}. Set HF_TOKEN to a token that may read it.")
    if status == 429:
        after = error.response.headers.get("Retry-After")
        wait = f"Wait {after} s" if after else "Wait some minutes"
        return HubError(f"The Hub has had too many requests ({what}). {wait}, or set HF_TOKEN for a higher limit.")
    return HubError(f"The Hub answered {status} for {what}. Try again later.")

"""`hf://org/repo[@revision]/path` → a local file, through huggingface_hub."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from transmuter import reading
from transmuter.errors import HubError

_ADDRESS = re.compile(r"hf://(?P<repository>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<path>.+)")


def fetch_model(address: str) -> Path:
    """Downloads an ONNX file and its external data, or finds them in the Hub's cache.

    Args:
        address: `hf://org/repo/path.onnx`, or `hf://org/repo@revision/path.onnx`. Token, endpoint, cache folder and
            offline mode are those of huggingface_hub (`HF_TOKEN`, `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_OFFLINE`).

    Raises:
        HubError: The address is malformed, huggingface_hub is not installed, or the file could not be had.
        ModelError: The file is no ONNX model.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None:
        raise HubError(
            f"{address!r} is no address of a file. Write hf://org/repo/path.onnx or hf://org/repo@revision/path.onnx."
        )
    path = fetch(parts["repository"], parts["path"], parts["revision"])
    for location in reading.external_locations(path):
        fetch(parts["repository"], posixpath.join(posixpath.dirname(parts["path"]), location), parts["revision"])
    return path


def fetch(repository: str, path: str, revision: str | None = None) -> Path:
    """Downloads one file of a repository, or finds it in the Hub's cache.

    Raises:
        HubError: huggingface_hub is not installed, or the file could not be had.
    """
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise HubError(
            "huggingface_hub is not installed, and hf:// addresses need it. "
            "Install Transmuter with its extra `serving`, in its checkout: pip install '.[serving]'"
        ) from error
    where = f"{path!r} of {repository}" + (f" at {revision}" if revision else "")
    try:
        return Path(huggingface_hub.hf_hub_download(repository, path, revision=revision))
    except errors.GatedRepoError as error:
        raise HubError(f"{repository} is gated. Accept its terms on the Hub and set HF_TOKEN.") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"There is no repository {repository}, or it is private. Check the name, or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{repository} has no revision {revision!r}. Check the branch, tag or commit.") from error
    except errors.LocalEntryNotFoundError as error:
        raise HubError(
            f"{where} is not in the cache, and the Hub cannot be reached. Check the network, or HF_HUB_OFFLINE."
        ) from error
    except errors.EntryNotFoundError as error:
        raise HubError(f"There is no file {where}. Check the path on the repository's page.") from error
    except Exception as error:
        raise HubError(f"{where} could not be downloaded: {error}. Try again, or download it by hand.") from error

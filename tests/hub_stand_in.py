"""A stand-in of the Hugging Face Hub's file endpoints on loopback, with the faults that the real one has.

What it answers follows what huggingface_hub reads: `X-Repo-Commit` and `ETag` (or `X-Linked-ETag` and `X-Linked-Size`
of a large file), `X-Error-Code` and `X-Error-Message` of a refusal, ranges of a file, and the list of models.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LARGE = 1 << 20
"""Files of so many bytes are told of as those in large file storage are."""


@dataclass
class Repository:
    """A repository of models.

    Attributes:
        files: Contents by path, at the branch `main`.
        older: Contents by path of other revisions: a tag, or a commit.
        task, downloads, card, config: What the list of models tells of it.
        token: Who may read it, if not everybody.
    """

    files: dict[str, bytes]
    older: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    task: str = ""
    downloads: int = 0
    card: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    token: str | None = None
    is_gated: bool = False

    def at(self, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        """The commit of a revision, and the files there."""
        for name, files in {"main": self.files, **self.older}.items():
            if revision in (name, commit := _commit(files)):
                return commit, files
        return None


def _commit(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha1()
    for path, data in sorted(files.items()):
        digest.update(path.encode() + hashlib.sha1(data).digest())
    return digest.hexdigest()


@dataclass
class Fault:
    """What goes wrong with requests of one kind.

    Attributes:
        method: Of the requests, `HEAD` or `GET`.
        path: How their paths end.
        times: How often it happens.
        status, headers: The answer instead of the right one.
        drop_after: The right answer, but the connection is lost after so many bytes of its body.
    """

    method: str
    path: str
    times: int = 1
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    drop_after: int | None = None


@dataclass(frozen=True)
class Request:
    """A request as it came."""

    method: str
    path: str
    range: str | None


class StandIn:
    """A server of repositories while its `with` block runs.

    Attributes:
        repositories: By name, as `org/repo`.
        faults: Those to come.
        requests: Those that came, in order.
        endpoint: Its address.
    """

    def __init__(self, repositories: Mapping[str, Repository]):
        self.repositories = dict(repositories)
        self.faults: list[Fault] = []
        self.requests: list[Request] = []

    def __enter__(self) -> StandIn:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (_Answers,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def be_the_hub(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Lets huggingface_hub take it for the Hub in this process, with a cache of its own and no token."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        template = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.delenv("HF_TOKEN", raising=False)

    def gets(self, path: str = "") -> list[Request]:
        """The downloads of files whose paths end like this."""
        return [r for r in self.requests if r.method == "GET" and "/resolve/" in r.path and r.path.endswith(path)]

    def fault(self, request: Request) -> Fault | None:
        """The fault that this request meets; it is used up."""
        for fault in self.faults:
            if fault.times > 0 and fault.method == request.method and request.path.endswith(fault.path):
                fault.times -= 1
                return fault
        return None


class _Answers(BaseHTTPRequestHandler):
    hub: StandIn

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        request = Request(self.command, path, self.headers.get("Range"))
        self.hub.requests.append(request)
        fault = self.hub.fault(request)
        if fault is not None and fault.status is not None:
            self._send(fault.status, b"", fault.headers)
        elif path == "/api/models":
            self._list(parse_qs(url.query))
        elif path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            if (found := self._found(name, revision or "main")) is not None:
                repository, commit, files = found
                self._send_json(_about(name, repository, commit, files))
        else:
            name, _, rest = path.strip("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            if (found := self._found(name, revision)) is not None:
                _, commit, files = found
                self._file(commit, files.get(file), fault)

    def _found(self, name: str, revision: str) -> tuple[Repository, str, Mapping[str, bytes]] | None:
        """The repository, commit and files of a revision; None once it has told that they cannot be had."""
        repository = self.hub.repositories.get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        if token is not None and token not in {r.token for r in self.hub.repositories.values()}:
            return self._refuse(401, message="Invalid credentials in Authorization header")
        if repository is None or (repository.token not in (None, token) and not repository.is_gated):
            # The Hub does not tell those who may not read a repository whether it exists.
            return self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        if repository.token not in (None, token):
            return self._refuse(401, "GatedRepo", f"Access to model {name} is restricted.")
        at = repository.at(revision)
        if at is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository, *at

    def _refuse(self, status: int, code: str = "", message: str = "") -> None:
        self._send(status, b"", {**({"X-Error-Code": code} if code else {}), "X-Error-Message": message})

    def _file(self, commit: str, data: bytes | None, fault: Fault | None) -> None:
        if data is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        digest = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{digest[:40]}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if len(data) >= LARGE:
            headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        asked = self.headers.get("Range")
        drop = None if fault is None else fault.drop_after
        if asked is None:
            self._send(200, data, headers, drop)
            return
        start = int(asked.removeprefix("bytes=").split("-")[0])
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206, data[start:], headers, drop)

    def _list(self, query: Mapping[str, list[str]]) -> None:
        """The models of a task, the most downloaded first."""
        found = [
            _about(name, repository, *repository.at("main"))
            for name, repository in self.hub.repositories.items()
            if repository.token is None and query.get("pipeline_tag", [repository.task]) == [repository.task]
        ]
        found = [about for about in found if set(query.get("filter", [])) <= set(about["tags"])]
        found.sort(key=lambda about: -about["downloads"])
        self._send_json(found[: int(query.get("limit", [len(found)])[0])])

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], drop_after: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:drop_after])
        if drop_after is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)


def _about(name: str, repository: Repository, commit: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    has_onnx = any(path.endswith(".onnx") for path in files)
    return {
        "_id": hashlib.sha1(name.encode()).hexdigest()[:24],
        "id": name,
        "modelId": name,
        "sha": commit,
        "private": repository.token is not None and not repository.is_gated,
        "gated": "auto" if repository.is_gated else False,
        "downloads": repository.downloads,
        "pipeline_tag": repository.task,
        "tags": [*(["onnx"] if has_onnx else []), repository.task],
        "cardData": dict(repository.card),
        "config": dict(repository.config),
        "siblings": [{"rfilename": path} for path in files],
    }

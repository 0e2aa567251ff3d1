"""`hf://` addresses, against a stand-in of the Hub's file endpoint on loopback."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import onnx
import pytest
from building import info, model_of
from onnx import helper, numpy_helper

import transmuter

pytest.importorskip("huggingface_hub")
WEIGHT = np.arange(2048, dtype=np.float32).reshape(64, 32)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that has `onnx/model.onnx` and its external data in org/repo at the revision main."""
    folder = tmp_path_factory.mktemp("repository")
    proto = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [info("x")],
        [info("y", None)],
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    onnx.save(proto, folder / "model.onnx", save_as_external_data=True, location="model.onnx_data", size_threshold=0)

    class Files(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            prefix = "/org/repo/resolve/main/onnx/"
            file = folder / self.path.removeprefix(prefix)
            if not self.path.startswith(prefix) or not file.is_file():
                code = "EntryNotFound" if self.path.startswith("/org/repo/resolve/main/") else "RepoNotFound"
                code = "RevisionNotFound" if self.path.startswith("/org/repo/resolve/v9/") else code
                self.send_response(404)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = file.read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", "a" * 40)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


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


def test_a_model_with_external_data_and_the_cache_offline(endpoint: str, tmp_path: Path) -> None:
    assert float(in_a_process(LOAD, tmp_path, endpoint)) == WEIGHT.sum()
    assert float(in_a_process(LOAD, tmp_path, endpoint, HF_HUB_OFFLINE="1")) == WEIGHT.sum()


def test_what_is_not_there_is_named(endpoint: str, tmp_path: Path) -> None:
    code = """
for address in ("hf://org/repo/onnx/none.onnx", "hf://org/none/model.onnx", "hf://org/repo@v9/onnx/model.onnx"):
    try:
        transmuter.load(address)
    except HubError as error:
        print(error)
"""
    file, repository, revision = in_a_process(code, tmp_path, endpoint).splitlines()
    assert "no file 'onnx/none.onnx' of org/repo" in file
    assert "no repository org/none" in repository
    assert "no revision 'v9'" in revision


def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    code = (
        LOAD.replace("model =", "try:\n    model =").split("\nprint")[0]
        + "\nexcept HubError as error:\n    print(error)"
    )
    assert "cannot be reached" in in_a_process(code, tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1")


@pytest.mark.parametrize("address", ["hf://", "hf://org", "hf://org/repo", "hf://org/repo@main"])
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(transmuter.HubError, match="hf://org/repo/path"):
        transmuter.load(address)


def test_a_missing_huggingface_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(transmuter.HubError, match=r"\.\[serving\]"):
        transmuter.load("hf://org/repo/onnx/model.onnx")

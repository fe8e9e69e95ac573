"""Models under a hub's name: the hub's own client against a server on this machine, and what is said without one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from mlsys_core.models import is_hub_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"code",
    "q4.gguf": b"GGUF",
}


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as its client asks for."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        headers = {"X-Repo-Commit": COMMIT}
        if not path.startswith(("/api/models/org/tiny", "/org/tiny/")):
            self._send(
                401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, with_body
            )
        elif "/resolve/" in path:
            name = path.rpartition("/")[2]
            if name not in FILES:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
                return
            headers["ETag"] = f'"{hashlib.sha256(FILES[name]).hexdigest()}"'
            self._send(200, FILES[name], headers, with_body)
        elif "/tree/" in path:
            entries = [
                {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": name}
                for name, data in FILES.items()
            ]
            self._send(200, json.dumps(entries).encode(), headers, with_body)
        else:
            body = {
                "id": "org/tiny",
                "modelId": "org/tiny",
                "sha": COMMIT,
                "siblings": [{"rfilename": n} for n in FILES],
            }
            self._send(200, json.dumps(body).encode(), headers, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def path_of(name: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    without = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    command = [str(Path(sys.executable).with_name("mlsys")), "models", "path", name]
    environment = {**without, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=home, timeout=120)


def test_a_repository_is_downloaded_once_without_code_and_pickles(hub: str, tmp_path: Path) -> None:
    done = path_of("org/tiny", tmp_path, HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    again = path_of("org/tiny", tmp_path, HF_HUB_OFFLINE="1")  # from the cache
    assert again.stdout == done.stdout


def test_one_gguf_file(hub: str, tmp_path: Path) -> None:
    done = path_of("org/tiny/q4.gguf", tmp_path, HF_ENDPOINT=hub)
    assert Path(done.stdout.strip()).read_bytes() == FILES["q4.gguf"], done.stderr
    missing = path_of("org/tiny/q8.gguf", tmp_path, HF_ENDPOINT=hub)
    assert (missing.returncode, missing.stderr.strip()) == (2, "mlsys: error: org/tiny has no file q8.gguf")


def test_what_is_not_there_or_not_reached_says_what_to_do(hub: str, tmp_path: Path) -> None:
    unknown = path_of("org/other", tmp_path, HF_ENDPOINT=hub)
    assert unknown.returncode == 2
    assert "neither a folder here nor a repository of the hub" in unknown.stderr
    for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}):
        offline = path_of("org/none", tmp_path, **environment)
        assert offline.returncode == 1
        assert "hf download org/none --local-dir none" in offline.stderr
        assert "mlsys models list" in offline.stderr
        assert len(offline.stderr.strip().splitlines()) == 1, offline.stderr


def test_names() -> None:
    assert is_hub_name("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert is_hub_name("org/model-GGUF/model-q4_k_m.gguf")
    for name in (
        "models",
        "./models/x",
        "/models/x",
        "a/b/c",
        "a//b",
        "../a/b",
        "a/..",
        "org/mo del",
        "org/m/../x.gguf",
    ):
        assert not is_hub_name(name), name

"""Model sources: directories, GGUF files that are none, and the hub, against a local fake of its HTTP."""

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

from model_pool.catalog import resolve
from policies.errors import ConfigError, LoadFailed

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORIES = {
    "acme/tiny": {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "model.safetensors": b"weights",
        "pytorch_model.bin": b"a pickle",
        "modeling_evil.py": b"import os",
    },
    "acme/old": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
}


class FakeHub(BaseHTTPRequestHandler):
    """As much of the hub as a snapshot needs: the file list, and files by resolve URLs."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        for name, files in REPOSITORIES.items():
            if path in (f"/api/models/{name}/revision/main", f"/api/models/{name}"):
                listed = [{"rfilename": file} for file in files]
                data = json.dumps({"id": name, "sha": COMMIT, "siblings": listed, "private": False}).encode()
                return self._send(200, data, {"Content-Type": "application/json"}, body=body)
            if path == f"/api/models/{name}/tree/{COMMIT}":
                tree = [
                    {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for file, content in files.items()
                ]
                return self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body=body)
            for file, content in files.items():
                if path == f"/{name}/resolve/{COMMIT}/{file}":
                    tags = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
                    return self._send(200, content, tags, body=body)
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    FakeHub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", FakeHub.asked
    server.shutdown()
    thread.join()
    server.server_close()


SCRIPT = """
import sys
from pathlib import Path
from model_pool.catalog import resolve
from policies.errors import LoadFailed
try:
    print(resolve(sys.argv[1], Path(sys.argv[2]), lambda what, share: None))
except LoadFailed as error:
    sys.exit(error.message)
"""


def fetch(endpoint: str, source: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment once, at import."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", SCRIPT, source, str(cache)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_hub_id_is_fetched_once_and_only_what_does_not_execute(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    ended = fetch(endpoint, "acme/tiny", tmp_path)
    assert ended.returncode == 0, ended.stderr
    files = {path.name for path in Path(ended.stdout.strip()).iterdir()}
    assert files == {"config.json", "tokenizer.json", "model.safetensors"}
    assert not any("pytorch_model" in path or "evil" in path for path in asked)
    downloads = len([path for path in asked if "resolve" in path])
    assert fetch(endpoint, "acme/tiny", tmp_path).stdout == ended.stdout
    assert len([path for path in asked if path.endswith("model.safetensors")]) <= downloads


def test_the_hub_says_no(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, _ = hub
    assert "no public model 'acme/nothing'" in fetch(endpoint, "acme/nothing", tmp_path).stderr
    assert "no .safetensors file" in fetch(endpoint, "acme/old", tmp_path).stderr


def test_the_hub_is_away(tmp_path: Path) -> None:
    assert "did not deliver acme/tiny" in fetch("http://127.0.0.1:9", "acme/tiny", tmp_path).stderr


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("demo:smolm2-135m-instruct", ConfigError, "did you mean 'smollm2-135m-instruct'"),
        ("/no/such/place", LoadFailed, "not a directory"),
        ("/no/such/file.gguf", LoadFailed, "does not exist"),
    ],
)
def test_a_source_that_is_none(source: str, error: type[Exception], said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        resolve(source, tmp_path, lambda what, share: None)


def test_a_file_that_is_no_gguf_fails_with_the_cause_and_leaves_nothing(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF but not really")
    with pytest.raises(LoadFailed, match=r"converting bad\.gguf failed"):
        resolve(str(bad), tmp_path / "cache", lambda what, share: None)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path), tmp_path / "cache", lambda what, share: None) == tmp_path
    assert resolve("fake", tmp_path, lambda what, share: None) is None

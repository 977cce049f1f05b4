"""Pushing to the hub: a server of the hub's protocol accepts the uploads of Hugging Face's client
for a Trainer with the callback.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import unified_ckpt as uc
from tests.support.processes.launch import PROGRAMS, environment

pytestmark = pytest.mark.slow  # in its own process, because the client reads its settings at import


class Hub(ThreadingHTTPServer):
    """Accepts files within commits, and records each commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.commits: list[dict[str, bytes]] = []
        self.unknown: list[str] = []


class _Request(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self._answer({"siblings": [], "id": "me/run", "sha": "0" * 40})

    def do_POST(self) -> None:
        nbytes = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(nbytes) if nbytes else self._read_chunks()
        if self.path.startswith("/api/repos/create"):
            self._answer(
                {"url": f"http://{self.headers['Host']}/me/run", "name": "me/run", "id": "me/run"}
            )
        elif "/preupload/" in self.path:
            files = [
                {"path": item["path"], "uploadMode": "regular", "shouldIgnore": False}
                for item in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = [item["value"] for item in lines if item["key"] == "file"]
            self.server.commits.append(
                {item["path"]: base64.b64decode(item["content"]) for item in files}
            )
            self._answer(
                {
                    "commitUrl": f"http://{self.headers['Host']}/me/run/commit/1",
                    "commitOid": "1" * 40,
                }
            )
        elif self.path.startswith("/api/validate-yaml"):
            self._answer({"errors": [], "warnings": []})
        else:
            self.server.unknown.append(self.path)
            self.send_error(404)

    def _read_chunks(self) -> bytes:
        body = b""
        while nbytes := int(self.rfile.readline(), 16):
            body += self.rfile.read(nbytes)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_pushed_checkpoint_is_complete(tmp_path: Path, hub: Hub) -> None:
    settings = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_x",
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, str(PROGRAMS / "worker_hub.py"), str(tmp_path / "run")]
    ended = subprocess.run(
        command,
        env=environment() | settings,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        errors="replace",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert hub.unknown == []
    assert [entry.name for entry in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-4"], (
        "the older one went when it had been sent"
    )
    models = [entry for entry in hub.commits if "model.safetensors" in entry]
    assert len(models) == 2, "the weights of each save, at the top"
    for step in (2, 4):
        (pushed,) = [
            entry for entry in hub.commits if f"checkpoint-{step}/unified_checkpoint.json" in entry
        ]
        for name, content in pushed.items():
            (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "hub" / name).write_bytes(content)
        assert uc.verify(tmp_path / "hub" / f"checkpoint-{step}", deep=True).ok

"""Downloading a hub id: progress in bytes, and cancelled when no client waits. The hub is a local HTTP server."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHA = "a" * 40
FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 1000, "model.bin": b"never asked for"}

DOWNLOAD = """
import json, sys
from streamserve.engine.model.load.source import resolve

class Gone(Exception): ...

def progress(*report):
    reports.append(report)
    if sys.argv[1] == "gone" and report[2] > 0:
        raise Gone

reports = []
try:
    folder = resolve("org/model", progress=progress)
    print(json.dumps([sorted(file.name for file in folder.iterdir()), reports]))
except Gone:
    print(json.dumps("gone"))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """The three addresses that a download asks for."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, headers = self.path.partition("?")[0], {}
        if path == "/api/models/org/model/revision/main":
            body = json.dumps({"id": "org/model", "sha": SHA, "siblings": []}).encode()
        elif path == f"/api/models/org/model/tree/{SHA}":
            body = json.dumps([_entry(name, data) for name, data in FILES.items()]).encode()
        elif path.startswith(f"/org/model/resolve/{SHA}/"):
            body = FILES[path.rpartition("/")[2]]
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": SHA}
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        """Log nothing."""


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A hub's environment, with a cache of its own."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    server.shutdown()
    thread.join()
    server.server_close()


def download(environment: dict[str, str], how: str) -> Any:
    command = [sys.executable, "-c", DOWNLOAD, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_download_reports_its_bytes(hub: dict[str, str]) -> None:
    """The needed files are downloaded, and no other; the bytes grow up to the total."""
    names, reports = download(hub, "whole")
    total = len(FILES["config.json"]) + len(FILES["model.safetensors"])
    assert names == ["config.json", "model.safetensors"]
    assert {report[0] for report in reports} == {"download"}
    assert reports[-1] == ["download", 1.0, total, total]
    loaded = [report[2] for report in reports]
    assert loaded == sorted(loaded)


def test_a_download_can_be_given_up(hub: dict[str, str]) -> None:
    """An exception that progress raises passes through unchanged: it is no failure of the hub."""
    assert download(hub, "gone") == "gone"

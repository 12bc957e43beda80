"""A hub on loopback: what huggingface_hub asks of one, with ranges, and connections that break where a test says.

GET  /api/models/{id}/revision/main       the commit
GET  /api/models/{id}/tree/{commit}       the files with their sizes
HEAD /{id}/resolve/{commit}/{file}        ETag, X-Repo-Commit, Content-Length
GET  /{id}/resolve/{commit}/{file}        the bytes, or those of a Range
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHA = "a" * 40
_PART = 16 * 1024


@dataclass
class Hub:
    """One model's files. `cuts[file]` are after how many bytes its downloads break off, one after the other.

    `asked` has each request's method, file and Range. While `go` is cleared, a download stands after its first part.
    """

    files: Mapping[str, bytes]
    model_id: str = "org/model"
    cuts: dict[str, list[int]] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    ignores_ranges: bool = False
    url: str = ""

    def environment(self, home: Path) -> dict[str, str]:
        """Return the environment of a process that uses this hub, with a cache of its own."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        return {**os.environ, **own, "HF_HUB_DISABLE_XET": "1"}

    def ranges(self, name: str) -> list[str]:
        """Return the Range of each GET of a file, "" for none."""
        return [given for method, file, given in self.asked if (method, file) == ("GET", name)]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        if path == f"/api/models/{hub.model_id}/revision/main":
            self._send_json({"id": hub.model_id, "sha": SHA, "siblings": []})
        elif path == f"/api/models/{hub.model_id}/tree/{SHA}":
            self._send_json([_entry(name, data) for name, data in hub.files.items()])
        elif path.startswith(f"/{hub.model_id}/resolve/{SHA}/"):
            self._send_file(path.partition(f"/resolve/{SHA}/")[2])
        else:
            self.send_error(404)

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self._head(200, len(body), {"Content-Type": "application/json"})
        self.wfile.write(body)

    def _send_file(self, name: str) -> None:
        hub = self.hub
        given = self.headers.get("Range", "")
        hub.asked.append((self.command, name, given))
        body = hub.files.get(name)
        if body is None:
            self.send_error(404)
            return
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        start = 0
        if given and not hub.ignores_ranges:
            start = int(given.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self._head(206 if "Content-Range" in headers else 200, len(body) - start, headers)
        if self.command == "GET":
            self._send_body(name, body[start:])

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_body(self, name: str, body: bytes) -> None:
        cuts = self.hub.cuts.get(name, [])
        end = cuts.pop(0) if cuts else len(body)
        with suppress(ConnectionError):  # the client gave it up
            for start in range(0, min(end, len(body)), _PART):
                if start:  # never after the last part: the client has its body, and asks again on this connection
                    self.hub.go.wait()
                self.wfile.write(body[start : min(start + _PART, end)])
        if end < len(body):
            self.close_connection = True  # in the middle of the body: the client sees that it is short

    def log_message(self, *_args: Any) -> None:
        """Log nothing."""


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def hub_of(files: Mapping[str, bytes], **fields: Any) -> Iterator[Hub]:
    """Serve `files` as the model org/model."""
    hub = Hub(files, **fields)
    hub.go.set()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.go.set()
        server.shutdown()
        thread.join()
        server.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, as a hub has them."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}

"""A file of 200 MiB goes up and comes down; the web process grows by 32 MiB at most. One byte more is refused."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from streamserve.protocol.limits import Limits
from tests.support.servers.web_servers import SERVERS, Server
from tests.support.sites.batch_site import BatchSite, engines_stopped, make_site

MAX_BYTES = Limits().max_file_bytes
MAX_GROWTH = 32 * 2**20


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BatchSite]:
    site = make_site(tmp_path_factory.mktemp("site"))
    with engines_stopped(site):
        yield site


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, site: BatchSite) -> Iterator[Server]:
    with SERVERS[request.param]("project.asgi:application", env=site.env) as server:
        site.port = server.port
        yield server


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the largest size."""
    path = tmp_path_factory.mktemp("files") / "whole.jsonl"
    piece = b"0123456789abcde\n" * 65_536
    with path.open("wb") as file:
        for _ in range(MAX_BYTES // len(piece)):
            file.write(piece)
    assert path.stat().st_size == MAX_BYTES
    return path


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Peak:
    """The largest memory of a process since this was made, by the kernel's own mark."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): resets the mark
        self._before = self._read()

    def growth(self) -> int:
        return self._read() - self._before

    def _read(self) -> int:
        (line,) = [one for one in self._status.read_text().splitlines() if one.startswith("VmHWM")]
        return int(line.split()[1]) * 1024


def test_the_web_process_holds_neither_an_upload_nor_a_download(
    server: Server, site: BatchSite, whole: Path, tmp_path: Path
) -> None:
    """Both come out the same, byte by byte."""
    with site.client() as client:
        client.post("/v1/files", files={"file": b"warm\n"}, data={"purpose": "batch"}).raise_for_status()
        peak = Peak(server.process.pid)
        with whole.open("rb") as file:
            up = client.post("/v1/files", files={"file": file}, data={"purpose": "batch"})
        assert up.json()["bytes"] == MAX_BYTES
        up_growth = peak.growth()
        peak = Peak(server.process.pid)
        with (
            client.stream("GET", f"/v1/files/{up.json()['id']}/content") as down,
            (tmp_path / "down.jsonl").open("wb") as out,
        ):
            for piece in down.iter_raw():
                out.write(piece)
        down_growth = peak.growth()
        assert digest(tmp_path / "down.jsonl") == digest(whole)
        client.delete(f"/v1/files/{up.json()['id']}").raise_for_status()
    print(f"\n{MAX_BYTES:,} bytes: up {up_growth / 2**20:.1f} MiB, down {down_growth / 2**20:.1f} MiB more memory")
    assert up_growth <= MAX_GROWTH
    assert down_growth <= MAX_GROWTH


def test_one_byte_more_is_refused(server: Server, site: BatchSite, whole: Path, tmp_path: Path) -> None:
    """By name, and nothing of it is kept."""
    larger = tmp_path / "larger.jsonl"
    with larger.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with site.client() as client, larger.open("rb") as file:
        refused = client.post("/v1/files", files={"file": file}, data={"purpose": "batch"})
        assert refused.status_code == 413
        assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == ("file_too_large", "file")
        assert all(one["bytes"] < MAX_BYTES for one in client.get("/v1/files").json()["data"])


@pytest.mark.parametrize("num_bytes", [MAX_BYTES + 2**20, 10**15])
def test_what_is_announced_too_large_is_not_read(server: Server, site: BatchSite, num_bytes: int) -> None:
    """The answer comes before the body does, and is the same."""
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {site.key}\r\n"
        f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {num_bytes}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", site.port), timeout=30) as client:
        client.sendall(head.encode())
        answer = b""
        while piece := client.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413")
    error = httpx.Response(413, content=answer.partition(b"\r\n\r\n")[2]).json()["error"]
    assert (error["code"], error["param"]) == ("file_too_large", "file")

"""A disk that is full when a file is uploaded: the answer names it, nothing stays, and a smaller file is taken.

The site's temporary folder and its files are file systems of a few MiB, in a mount namespace of the server's.
"""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers.web_servers import ROOT, Server, environ_of, run_server
from tests.support.sites.batch_site import BatchSite, make_site

MIB = 2**20
TEMPORARY_MIB, FILES_MIB = 8, 2
# Of which it fills: the temporary folder with the body; with what is parsed of it; the folder of files.
SIZES = (12 * MIB, 5 * MIB, 3 * MIB)
COMMANDS = {
    "daphne": "-m daphne -b 127.0.0.1 -p {port} project.asgi:application",
    "uvicorn": "-m uvicorn --host 127.0.0.1 --port {port} project.asgi:application",
}


@dataclass
class Small:
    """A server whose disks are small."""

    site: BatchSite
    server: Server
    folders: tuple[Path, Path]

    def free(self) -> list[int]:
        """Return the free bytes of its disks."""
        root = f"/proc/{self.server.process.pid}/root"
        found = [os.statvfs(f"{root}{folder}") for folder in self.folders]
        return [one.f_bfree * one.f_frsize for one in found]

    def num_rows(self) -> int:
        """Return how many files the database knows of, shown or not."""
        path = Path(self.site.env["STREAMSERVE_STATE_DIR"]) / "site.sqlite3"
        with closing(sqlite3.connect(path)) as database:
            return int(database.execute("SELECT count(*) FROM streamserve_storedfile").fetchone()[0])


@pytest.fixture(scope="module", params=COMMANDS)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    can = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    if can.returncode:
        pytest.skip("mounting a tmpfs needs user namespaces or root")
    site = make_site(tmp_path_factory.mktemp("site"))
    folders = (tmp_path_factory.mktemp("temporary"), Path(site.env["STREAMSERVE_STATE_DIR"]) / "files")
    folders[1].mkdir(exist_ok=True)
    sizes = (TEMPORARY_MIB, FILES_MIB)
    mounts = [f"mount -t tmpfs -o size={size}m none {folder}" for size, folder in zip(sizes, folders, strict=True)]
    serve = f"exec {shlex.quote(sys.executable)} {COMMANDS[request.param].format(port=site.port)}"
    command = ["unshare", "-rm", "sh", "-c", " && ".join([*mounts, serve])]
    env = environ_of(ROOT, {**site.env, "TMPDIR": str(folders[0])})
    with run_server(command, site.port, ROOT, env) as server:
        yield Small(site, server, folders)


def upload(client: httpx.Client, num_bytes: int) -> httpx.Response:
    return client.post("/v1/files", files={"file": b"x" * num_bytes}, data={"purpose": "batch"})


def create(client: httpx.Client, num_bytes: int) -> httpx.Response:
    """Create a message batch whose body has about so many bytes."""
    one = {"model": "echo", "max_tokens": 1, "messages": [{"role": "user", "content": "x" * 100_000}]}
    lines = (json.dumps({"custom_id": str(number), "params": one}) for number in range(num_bytes // 100_000))
    headers = {"Content-Type": "application/x-ndjson"}
    return client.post("/v1/messages/batches", content="\n".join(lines).encode(), headers=headers)


@pytest.mark.parametrize("num_bytes", SIZES)
@pytest.mark.parametrize("send", [upload, create])
def test_a_full_disk_is_named(small: Small, send: Any, num_bytes: int) -> None:
    """507 with its code; the disks have the room that they had, and the database has no row of it."""
    with small.site.client() as client:
        kept = upload(client, 1000).json()["id"]
        before = small.free()
        refused = send(client, num_bytes)
        assert refused.status_code == 507, refused.text
        error = refused.json()["error"]
        assert "insufficient_storage" in (error.get("code"), error["type"]) or "disk" in error["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert small.free() == before
        assert small.num_rows() == 1
        taken = upload(client, MIB)
        assert taken.status_code == 200, taken.text
        for file_id in (kept, taken.json()["id"]):
            client.delete(f"/v1/files/{file_id}").raise_for_status()
    assert small.num_rows() == 0

"""Uploads on real servers: the caller is known before a byte of the body is read, and so much comes in at a time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.servers.web_servers import SERVERS, Server
from tests.support.sites.batch_site import BatchSite, make_site

MIB = 2**20
MAX_BYTES = 40 * MIB
LIMITS = {"MAX_UPLOADS": 3, "MAX_UPLOADS_PER_PRINCIPAL": 2, "MAX_UPLOAD_BYTES": MAX_BYTES}
FILES, MESSAGES = "/v1/files", "/v1/messages/batches"
KINDS = {FILES: "multipart/form-data; boundary=x", MESSAGES: "application/x-ndjson"}
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
)
FORM_END = b"\r\n--x--\r\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> BatchSite:
    return make_site(tmp_path_factory.mktemp("site"), {"LIMITS": json.dumps(LIMITS)})


@pytest.fixture(scope="module")
def other_key(site: BatchSite) -> str:
    printed = site.manage("streamserve_key", "create", "--name", "other")
    return next(one for one in printed.split() if len(one) > 30)


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, site: BatchSite) -> Iterator[Server]:
    with SERVERS[request.param]("project.asgi:application", env=site.env) as server:
        site.port = server.port
        yield server


class Upload:
    """A request whose head has been sent. `length` None: the body comes in chunks."""

    def __init__(self, server: Server, key: str, length: int | None, path: str = FILES, *more: str) -> None:
        size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
        sent = [f"Authorization: Bearer {key}"] if key else []
        lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {KINDS[path]}", size, *sent, *more]
        self.socket = server.connect()
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def answer(self) -> httpx.Response:
        """Return the answer: it ends with the connection, or as its length says."""
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._receive()
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        while len(body) < int(headers["content-length"]):
            body += self._receive()
        return httpx.Response(int(first.split()[1]), headers=headers, content=body)

    def _receive(self) -> bytes:
        piece = self.socket.recv(65_536)
        assert piece, "the connection ended"
        return piece


def error_of(answer: httpx.Response) -> tuple[int, Any]:
    return answer.status_code, answer.json()["error"].get("code") or answer.json()["error"]["type"]


@pytest.mark.parametrize("length", [30 * MIB, None])
@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("key", ["wrong" * 8, ""])
def test_a_stranger_is_refused_before_a_byte_of_the_body(
    server: Server, path: str, length: int | None, key: str
) -> None:
    """However its length is announced; a client that waits for a 100 gets the refusal in its place."""
    for more in ((), ("Expect: 100-continue",)):
        with Upload(server, key, length, path, *more) as upload:
            assert upload.answer().status_code == 401


def test_a_stranger_that_sends_on_reads_its_refusal(server: Server) -> None:
    """The body is dropped as it comes: no reset overtakes the answer."""
    body = iter([b"x" * MIB] * 30)
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        headers = {"Content-Type": KINDS[FILES], "Content-Length": str(30 * MIB), "Authorization": "Bearer wrong"}
        refused = client.post(FILES, content=body, headers=headers)
    assert refused.status_code == 401


def test_what_the_head_shows_is_refused_before_the_body(server: Server, site: BatchSite) -> None:
    """A wrong type, a compressed body."""
    with Upload(server, site.key, 30 * MIB, MESSAGES, "Content-Encoding: gzip") as upload:
        assert upload.answer().status_code == 415


def test_a_caller_has_so_many_uploads_at_a_time(server: Server, site: BatchSite, other_key: str) -> None:
    """One more is a 429; beyond those of all callers a 503. A place is free again when its upload ends, or leaves."""
    with Upload(server, site.key, 5 * MIB) as first, Upload(server, site.key, 5 * MIB, MESSAGES) as second:
        for upload in (first, second):
            upload.socket.sendall(b"--x\r\n")
        refused = until_refused(server, site.key)
        assert error_of(refused) == (429, "too_many_uploads")
        assert int(refused.headers["retry-after"]) > 0
        with Upload(server, other_key, 5 * MIB) as third:
            third.socket.sendall(b"--x\r\n")
            refused = until_refused(server, other_key)
            assert error_of(refused) == (503, "uploads_busy")
            assert int(refused.headers["retry-after"]) > 0
        first.socket.close()
        until_taken(server, other_key)


def test_uploads_have_so_many_bytes_at_a_time(server: Server, site: BatchSite, other_key: str) -> None:
    """Those that are announced count before they come."""
    with Upload(server, site.key, MAX_BYTES - 5 * MIB) as upload:
        upload.socket.sendall(b"--x\r\n")
        assert error_of(until_refused(server, other_key, 6 * MIB)) == (503, "uploads_busy")
        until_taken(server, other_key)


def test_a_large_file_goes_up_as_it_comes(server: Server, site: BatchSite) -> None:
    """With its length, or in chunks; the connection serves the next request."""
    content = b"0123456789abcde\n" * (3 * MIB // 16)
    with site.client() as client:
        for form in (FORM + content + FORM_END, iter([FORM, content, FORM_END])):
            stored = client.post(FILES, content=form, headers={"Content-Type": KINDS[FILES]})
            assert stored.status_code == 200, stored.text
            assert stored.json()["bytes"] == len(content)
            assert client.get(f"/v1/files/{stored.json()['id']}/content").content == content


def until_refused(server: Server, key: str, length: int = 5 * MIB) -> httpx.Response:
    """Announce uploads until one is refused: those before may not have been noticed yet."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with Upload(server, key, length) as upload:
            upload.socket.settimeout(1)
            try:
                return upload.answer()
            except TimeoutError:
                continue
    raise AssertionError("none was refused")


def until_taken(server: Server, key: str) -> None:
    """Upload a file, which may have to wait until an upload that left is noticed."""
    form = FORM + b"x" * 2 * MIB + FORM_END
    deadline = time.monotonic() + 60
    while True:
        with Upload(server, key, len(form)) as upload:
            upload.socket.sendall(form)
            answer = upload.answer()
        if answer.status_code == 200:
            return
        assert answer.status_code in (429, 503)
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)

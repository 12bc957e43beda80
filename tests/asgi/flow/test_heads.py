"""The heads that FlowServer takes, and how it answers those that it does not take."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.servers.flow_driver import connect, flow, read_all, read_until, state
from tests.support.servers.web_servers import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with flow() as server:
        yield server


@pytest.mark.parametrize(
    ("head", "status"),
    [
        pytest.param(b"GET /" + b"a" * 16_384, 414, id="a line without an end"),
        pytest.param(b"GET /" + b"a" * 16_384 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, id="a long line"),
        pytest.param(b"GET /%b HTTP/1.1\r\n" % (b"a" * 300_000), 414, id="a line of 300 kB"),
        pytest.param(b"GET / HTTP/1.1\r\nA: " + b"a" * 17_000, 431, id="a header without an end"),
        pytest.param(b"GET / HTTP/1.1\r\nCookie: %b\r\n\r\n" % (b"a" * 17_000), 431, id="a long header"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"A: %b\r\n" % (b"a" * 1000) * 17 + b"\r\n", 431, id="large together"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"A: 1\r\n" * 501 + b"\r\n", 431, id="many headers"),
        pytest.param(b"GET /\r\nno header\r\n\r\n", 400, id="not HTTP/1.1"),
        pytest.param(b"GET / HTTP/1.1\r\nno header\r\nA: 1\r\n\r\n", 400, id="no header"),
        pytest.param(b"GET / HTTP/1.1\r\nContent-Length: x\r\nA: 1\r\n\r\n", 400, id="no length"),
    ],
)
def test_a_bad_head_is_answered_and_calls_no_app(server: Server, head: bytes, status: int) -> None:
    """A head that is too large gets a 414 for its line or a 431 for its headers, others a 400: once, and whole."""
    before = state(server)
    with connect(server) as client:
        client.sendall(head)
        answer, is_clean = read_all(client)
    top, _, body = answer.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 %d " % status)
    assert b"Connection: close" in top
    assert b"Content-Length: %d" % len(body) in top
    assert b"HTTP/" not in body.replace(b"HTTP/1.1,", b"")
    assert is_clean
    assert state(server)["called"] == before["called"] + 1, "only the asking"


def test_a_head_up_to_the_limit_is_served(server: Server) -> None:
    """A head of 16 kB, and 500 headers, reach the app; so does a second request on the connection."""
    for head in (b"A: %b\r\n" % (b"a" * 16_000), b"A: 1\r\n" * 499):
        with connect(server) as client:
            for _ in range(2):
                client.sendall(b"GET /fill?bytes=0 HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
                assert read_until(client, b"0\r\n\r\n").startswith(b"HTTP/1.1 200 ")

"""FlowServer's limits: bodies, slow requests, stalled readers, vanished peers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.processes import open_names
from tests.support.servers.flow_driver import (
    BLOCK_SECONDS,
    chunks,
    connect,
    flow,
    get,
    read_all,
    read_until,
    state,
    stock,
    until,
    websocket,
)
from tests.support.servers.web_servers import ROOT, Server

BODY_BYTES = 1000


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """FlowServer with limits that a test can wait for."""
    options = ("--body-bytes", str(BODY_BYTES), "--head-seconds", "0.4", "--stall-seconds", "0.4")
    with flow(*options) as server:
        yield server


def chunked(*pieces: bytes) -> bytes:
    """Return a chunked body."""
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


@pytest.mark.parametrize("num", [0, 1, BODY_BYTES])
def test_a_body_up_to_the_limit(server: Server, num: int) -> None:
    """A body arrives whole, with its length announced or not, and the connection stays open."""
    with httpx.Client(base_url=server.url) as client:
        assert client.post("/body", content=b"x" * num).text == str(num)
        assert client.post("/body", content=iter([b"x" * num])).text == str(num)


def test_a_body_reaches_its_app_as_it_arrives(server: Server) -> None:
    """As under other servers: what has come is there, and a connection whose body was read whole stays open."""
    with connect(server) as client:
        client.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nExpect: 100-continue\r\n\r\n")
        assert read_until(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n", "the app asks for it"
        for _ in range(2):
            client.sendall(b"12")
        assert read_until(client, b"1\r\n4\r\n0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        client.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n123")
        assert read_until(client, b"1\r\n3\r\n0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_a_handshake_with_a_body_is_refused(server: Server) -> None:
    """Its body would be read as the WebSocket's first frames."""
    head = (
        b"GET /wait HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    )
    for length in (b"Content-Length: 2\r\n\r\nab", b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"):
        with connect(server) as client:
            client.sendall(head + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" + length)
            assert read_all(client)[0].startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("length", [BODY_BYTES + 1, 10**12, 10**18])
def test_a_body_announced_too_large(server: Server, length: int) -> None:
    """The body is refused by its announcement: nothing is read, stored or asked for, and no app is called."""
    before = state(server)
    with connect(server) as client:
        head = f"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nExpect: 100-continue\r\n\r\n"
        client.sendall(head.encode())
        answer, is_clean = read_all(client)
    assert answer.startswith(b"HTTP/1.1 413 Content Too Large\r\n")
    assert b"Connection: close" in answer
    assert b"100 Continue" not in answer
    assert f"{BODY_BYTES:,} bytes".encode() in answer
    assert is_clean
    assert state(server)["called"] == before["called"] + 1, "only the asking"


@pytest.mark.parametrize("pieces", [[b"x" * (BODY_BYTES + 1)], [b"x" * 100] * 11, [b"x"] * (BODY_BYTES + 1)])
def test_a_chunked_body_too_large(server: Server, pieces: list[bytes]) -> None:
    """A chunked body is refused when it passes the limit, in however many chunks."""
    before = state(server)
    with connect(server) as client:
        client.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(*pieces))
        assert read_all(client)[0].startswith(b"HTTP/1.1 413 ")
    assert state(server)["bodies"] == before["bodies"]


def test_a_client_that_sends_a_refused_body_gets_a_413(server: Server) -> None:
    """The client reads its 413: the server takes and drops what comes, and does not reset the connection."""
    with connect(server) as client:
        client.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n")
        client.sendall(b"x" * 500_000)
        assert read_all(client)[0].startswith(b"HTTP/1.1 413 ")


def test_nothing_of_a_refused_body_is_stored(server: Server) -> None:
    """daphne spools any body into a file, however large; FlowServer creates no file for a refused one."""
    assert not spooled(server, b"Content-Length: 1000000000\r\n\r\n" + b"x" * 200_000)
    with stock() as other:
        assert spooled(other, b"Content-Length: 1000000000\r\n\r\n" + b"x" * 200_000)


def spooled(server: Server, rest: bytes) -> bool:
    """Send the start of a body; return whether the server has put it into a file."""
    with connect(server) as client:
        client.sendall(b"POST /body HTTP/1.1\r\nHost: x\r\n" + rest)
        state(server)
        names = open_names(server.process.pid)
        return any(name.startswith("/") and name.endswith("(deleted)") for name in names)


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(b"GET / HT", id="no line"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nA: ", id="half a header"),
        pytest.param(b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n", id="no body"),
        pytest.param(b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", id="no chunk"),
    ],
)
def test_a_slow_request_is_refused(server: Server, start: bytes) -> None:
    """A request that comes a byte at a time gets a 408, and its connection ends. No app gets a body of it."""
    before = state(server)
    with connect(server) as client:
        client.sendall(start)
        client.setblocking(False)
        answer = b""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and b"\r\n\r\n" not in answer:
            try:
                answer += client.recv(65536)
            except BlockingIOError:
                client.send(b"1")
                time.sleep(0.05)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    after = state(server)
    assert after["called"] - before["called"] == 1 + start.startswith(b"POST"), "the asking, and an app that waited"
    assert after["bodies"] == before["bodies"]


def test_an_idle_connection_is_not_late(server: Server) -> None:
    """The deadline is for a request that has begun: one connection, two requests with a pause between."""
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/fill?bytes=0").status_code == 200
        time.sleep(BLOCK_SECONDS)
        assert client.get("/fill?bytes=0").status_code == 200
        assert client.post("/body", content=b"x").text == "1"


def test_a_slow_answer_is_not_late(server: Server) -> None:
    """The deadline ends no slow answer, and no reader without anything to read."""
    with get(server, "/wait") as client:
        time.sleep(BLOCK_SECONDS)
        assert state(server)["connections"] == 2
        assert b": hello" in client.recv(65536)
    with websocket(server, "/wait") as client:
        time.sleep(BLOCK_SECONDS)
        assert state(server)["connections"] == 2


@pytest.mark.parametrize("ask", [get, websocket])
def test_a_stalled_reader_is_cut_off(server: Server, ask: object) -> None:
    """The reader's connection ends, not as if it were whole; the app's `send` returns, and a disconnect follows."""
    with (get if ask is get else websocket)(server, "/fill?bytes=16777216") as client:
        until(lambda: "it took nothing" in server.output(), "it is cut off", server)
        until(lambda: state(server)["connections"] == 1, "the app has ended", server)
        data, is_clean = read_all(client)
        assert not is_clean
        if ask is get:
            assert chunks(data)[1] is False


def test_a_slow_reader_is_kept(server: Server) -> None:
    """Slow is not stalled: longer than the limit in all, never so long without taking something."""
    num = 0
    with get(server, "/fill?bytes=524288", "Connection: close") as client:
        client.settimeout(30)
        while more := client.recv(65536 if num > 200_000 else 8192):
            num += len(more)
            if num < 200_000:
                time.sleep(0.02)
    assert num > 524288


_VANISH = """
import sys
sys.path.insert(0, {root!r})
from tests.support.servers.flow_driver import *

with flow("--vanish-seconds", "2", "--stall-seconds", "0") as server:
    clients = [get(server, "/wait"), websocket(server, "/wait")]
    for client in clients:
        read_until(client, b"\\r\\n\\r\\n")
    os.system("ip link set lo down")
    lines = until(lambda: len(printed_lines(server)) >= 4 and printed_lines(server), "both are noticed", server)
    print(sorted(lines))
"""


@pytest.mark.proof
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"), reason="needs root, ip")
def test_a_vanished_peer_is_noticed() -> None:
    """Without any packet either way, and without data in flight, the apps still get a disconnect."""
    script = f"import os; os.system('ip link set lo up')\n{_VANISH.format(root=str(ROOT))}"
    command = ["unshare", "-n", sys.executable, "-c", script]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "http.disconnect" in out.stdout, out.stderr
    assert "websocket.disconnect 1006" in out.stdout


def test_the_kernel_holds_little() -> None:
    """Both socket options are set on accepted sockets; without the second no vanished peer is noticed."""
    from streamserve.asgi.flow.transport import FlowConfig, tune

    class Transport:
        def getHandle(self) -> socket.socket:
            return one

    with socket.socket() as one:
        tune(Transport(), FlowConfig(vanish_seconds=30))
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 16 * 1024
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1

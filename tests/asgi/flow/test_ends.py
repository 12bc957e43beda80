"""How responses and WebSockets end under FlowServer: truthfully, at once, and with nothing left behind."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.proofs.scale import scaled
from tests.support.servers.flow_driver import (
    chunks,
    close_code,
    flow,
    frame,
    frames,
    get,
    printed_lines,
    read_all,
    read_until,
    reset,
    state,
    stock,
    until,
    websocket,
)
from tests.support.servers.web_servers import Server

NUM_REQUESTS = scaled(1000)
NUM_ENDS = scaled(10_000)  # in all


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """FlowServer with its default options."""
    with flow() as server:
        yield server


def is_bare(server: Server) -> bool:
    """Return whether only the request that asks, the server's lifespan, and the accept socket are left."""
    now = state(server)
    return (now["connections"], now["transports"], now["tasks"]) == (1, 1, 2)


@pytest.mark.parametrize("name", ["fail", "return"])
def test_an_app_that_ends_before_its_head(server: Server, name: str) -> None:
    """The response is a 500, and the connection stays open."""
    with httpx.Client(base_url=server.url) as client:
        assert [client.get(f"/{name}?pieces=-1").status_code for _ in range(3)] == [500] * 3
        assert client.get("/fill?bytes=0").status_code == 200


@pytest.mark.parametrize("name", ["fail", "return"])
def test_an_app_that_ends_before_its_first_byte(server: Server, name: str) -> None:
    """The head was not sent: a 500 without the app's headers is still possible, and true."""
    response = httpx.get(f"{server.url}/{name}?pieces=0")
    assert (response.status_code, response.headers["content-type"]) == (500, "text/html; charset=utf-8")


@pytest.mark.parametrize("name", ["fail", "return"])
def test_an_app_that_ends_in_the_middle(server: Server, name: str) -> None:
    """All that it sent arrives, and then an end without the terminator: no client takes it for whole."""
    with get(server, f"/{name}?pieces=3") as client:
        data, _ = read_all(client)
    assert chunks(data) == (b"piece\n" * 3, False)
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
        httpx.get(f"{server.url}/{name}?pieces=3")


def test_an_app_that_ends_in_the_middle_of_http_1_0(server: Server) -> None:
    """In HTTP/1.0 the end of the connection is the end of the body, so that only a reset is a failure."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET /fail?pieces=3 HTTP/1.0\r\n\r\n")
        assert read_all(client)[1] is False


def test_after_an_exception_the_next_requests_are_served_and_reaped(server: Server) -> None:
    """FlowServer mends the fault of stock daphne that the next test shows."""
    with get(server, "/fail?pieces=3") as client:
        read_all(client)
    with httpx.Client(base_url=server.url) as client:
        for _ in range(NUM_REQUESTS):
            assert client.get("/fill?bytes=65536").status_code == 200
    until(lambda: is_bare(server), "all is reaped", server)


@pytest.mark.proof
def test_stock_daphne_hangs_and_never_reaps_again() -> None:
    """After one exception behind the head, stock daphne's client waits for ever and connections pile up."""
    with stock() as server, get(server, "/fail?pieces=3") as client:
        read_until(client, b"piece\n" * 1)
        client.settimeout(3.0)
        with pytest.raises(TimeoutError):
            read_all(client)
        for _ in range(20):
            with get(server, "/fill?bytes=65536", "Connection: close") as other:
                read_all(other)
        client.settimeout(3.0)
        with pytest.raises(TimeoutError):
            read_all(client)
        assert state(server)["connections"] > 20


@pytest.mark.parametrize(
    ("path", "code"),
    [
        pytest.param("/fail", 1011, id="fails"),
        pytest.param("/return", 1000, id="returns"),
    ],
)
def test_a_websocket_app_that_ends(server: Server, path: str, code: int) -> None:
    """The WebSocket gets a close frame whose code names the kind of end."""
    with websocket(server, path) as client:
        data = read_until(client, code.to_bytes(2, "big"))
    assert close_code(data) == code
    assert [load for opcode, load in frames(data) if opcode == 1] == ([b"one"] if path == "/fail" else [])


@pytest.mark.parametrize("path", ["/fail?accept=no", "/return?accept=no"])
def test_a_websocket_app_that_ends_before_it_accepts(server: Server, path: str) -> None:
    """The handshake of the WebSocket is denied."""
    with websocket(server, path) as client:
        assert read_all(client)[0].startswith(b"HTTP/1.1 500 ")


def fin(client: socket.socket) -> None:
    client.close()


def half_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


def close_frame(client: socket.socket) -> None:
    client.sendall(frame(8, b"\x03\xe9"))


PHASES = {
    "waiting": ("/wait?kind=none", "/wait?accept=no"),
    "open": ("/wait", "/wait"),
    "blocked": ("/fill?bytes=16777216", "/fill?bytes=16777216"),
}


LEAVING = {
    "http fin": (get, fin),
    "http reset": (get, reset),
    "http half-close": (get, half_close),
    "websocket fin": (websocket, fin),
    "websocket reset": (websocket, reset),
    "websocket close": (websocket, close_frame),
}
# Before its handshake is answered there is no WebSocket to send a frame on.
CASES = [(way, phase) for way in LEAVING for phase in PHASES if (way, phase) != ("websocket close", "waiting")]


@pytest.mark.parametrize(("way", "phase"), CASES)
def test_abrupt_ends_leave_nothing(server: Server, way: str, phase: str) -> None:
    """However and whenever a client leaves, no connection, task or descriptor stays, and the app gets a disconnect."""
    ask, leave = LEAVING[way]
    until(lambda: is_bare(server), "a clean start", server)
    before, num_lines = state(server), len(printed_lines(server))
    clients = [ask(server, PHASES[phase][ask is websocket]) for _ in range(NUM_ENDS // len(CASES))]
    until(lambda: state(server)["called"] > before["called"] + len(clients), "all are there", server)
    if phase == "open" or (ask is websocket and phase == "blocked"):
        for client in clients:
            read_until(client, b"\r\n\r\n")
    for client in clients:
        leave(client)
    if phase == "blocked" and leave is close_frame:  # what was written is sent first
        for client in clients:
            read_all(client)
    until(lambda: is_bare(server), "nothing is left", server)
    for client in clients:
        client.close()
    until(lambda: state(server)["fds"] <= before["fds"], "no descriptor is left", server)
    if phase != "blocked":
        word = "websocket.disconnect" if ask is websocket else "http.disconnect"
        assert sum(line.startswith(word) for line in printed_lines(server)[num_lines:]) == len(clients)


@pytest.mark.parametrize("code", [1005, 1006, 1015, 999, 2000, 5000])
def test_no_app_sends_a_code_that_may_not_be_sent(code: int) -> None:
    """An app that sends a forbidden close code (RFC 6455, 7.4) gets an error."""
    from streamserve.asgi.flow import apps as flow_apps

    with pytest.raises(ValueError, match=str(code)):
        flow_apps._close_websocket(None, {"type": "websocket.close", "code": code})

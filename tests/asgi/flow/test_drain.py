"""Laws of the drain: what each connection gets, in which order, and that nothing is cut off or left. No times here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest

from tests.proofs.scale import scaled
from tests.support.apps.flow_app import BLOCK, pattern
from tests.support.servers.flow_driver import (
    APP,
    DEADLINE_SECONDS,
    HELLO,
    chunks,
    close_code,
    exit_code,
    flow,
    frame,
    get,
    printed_lines,
    read_all,
    read_until,
    state,
    stock,
    terminate,
    until,
    websocket,
)
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import ROOT, Server

pytestmark = pytest.mark.proof

NUM_STREAMS = scaled(200)
AT_ONCE = ("--drain-seconds", "0")
FOR_LONG = ("--drain-seconds", "600")
BYE = b"event: bye\n\n"


def begin(server: Server, path: str = "/wait") -> socket.socket:
    """Open a response and read its first bytes."""
    client = get(server, path)
    read_until(client, HELLO)
    return client


def drain(server: Server) -> None:
    """Send SIGTERM; return when the app's drain hook has run."""
    terminate(server)
    until(lambda: "drain" in printed_lines(server), "draining has begun", server)


def test_in_flight_responses_finish_and_new_ones_are_refused() -> None:
    """A good drain is unready at once, refuses new work with 503, ends every stream whole, and exits with 0."""
    with flow(*FOR_LONG) as server, ExitStack() as stack:
        kept = stack.enter_context(httpx.Client(base_url=server.url))
        assert kept.get("/fill?bytes=0").headers.get("connection") is None
        clients = [stack.enter_context(begin(server)) for _ in range(NUM_STREAMS)]
        drain(server)
        for refused in (kept.get("/fill?bytes=0"), httpx.get(f"{server.url}/wait")):
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert refused.headers["connection"] == "close"
        with websocket(server, "/wait") as late:
            assert read_all(late)[0].startswith(b"HTTP/1.1 503 ")
        assert state(server)["connections"] == NUM_STREAMS + 1, "what `serves` names is served"
        assert httpx.get(f"{server.url}/go").headers["connection"] == "close"
        for client in clients:
            assert chunks(b"\r\n\r\n" + read_all(client)[0]) == (BYE, True)
        assert exit_code(server) == 0
        assert printed_lines(server) == ["drain", *["finally event-stream disconnect"] * NUM_STREAMS, "shutdown"]


def test_an_app_with_a_hook_ends_by_itself() -> None:
    """When time is up the going-away hook is called, and what the app then sends is the whole and proper end."""
    with flow(*AT_ONCE, env={"GOING_AWAY": "1"}) as server, ExitStack() as stack:
        clients = [stack.enter_context(begin(server)) for _ in range(NUM_STREAMS)]
        terminate(server)
        assert [chunks(b"\r\n\r\n" + read_all(client)[0]) for client in clients] == [(BYE, True)] * NUM_STREAMS
        assert exit_code(server) == 0
        assert printed_lines(server) == [
            "drain",
            "going away",
            *["finally event-stream disconnect"] * NUM_STREAMS,
            "shutdown",
        ]


@pytest.mark.parametrize("receiving", ["disconnect", "none", "child"])
def test_an_event_stream_that_is_not_over_in_time(receiving: str) -> None:
    """It ends with the terminator and a FIN; its app gets a disconnect or a cancel, and every `finally` runs."""
    with flow(*AT_ONCE) as server, begin(server, f"/wait?receiving={receiving}") as client:
        terminate(server)
        data, is_clean = read_all(client)
        assert (data, is_clean) == (b"0\r\n\r\n", True)
        assert exit_code(server) == 0
        assert f"finally event-stream {receiving}" in printed_lines(server)
        assert ("http.disconnect" in printed_lines(server)) == (receiving == "disconnect")
        assert ("finally generator" in printed_lines(server)) == (receiving == "child")


@pytest.mark.parametrize("kind", ["plain", "length"])
def test_another_response_that_is_not_over_in_time(kind: str) -> None:
    """A download that is cut must not look whole: no terminator, or less than its length."""
    with flow(*AT_ONCE) as server:
        with get(server, f"/wait?kind={kind}") as client:
            data = read_until(client, HELLO)
            terminate(server)
            data += read_all(client)[0]
        assert data.endswith(HELLO + b"\r\n" * (kind == "plain")), "no terminator, and nothing of 1000 bytes"
        assert exit_code(server) == 0
        assert f"finally {kind} disconnect" in printed_lines(server)


def test_a_request_without_a_head_when_time_is_up() -> None:
    """The request gets 503 with Retry-After, and its app a disconnect."""
    with flow(*AT_ONCE) as server, get(server, "/wait?kind=none") as client:
        until(lambda: state(server)["called"] == 2 or state(server)["connections"] == 2, "it waits", server)
        terminate(server)
        data, _ = read_all(client)
        assert data.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 2\r\n" in data
        assert exit_code(server) == 0
        assert "finally none disconnect" in printed_lines(server)


@pytest.mark.parametrize("receiving", ["disconnect", "none"])
def test_a_websocket_when_time_is_up(receiving: str) -> None:
    """The WebSocket is closed with 1012 "service restart" (IANA), and its app gets that code."""
    with flow(*AT_ONCE) as server, websocket(server, f"/wait?receiving={receiving}") as client:
        head = read_until(client, b"\r\n\r\n")
        terminate(server)
        assert close_code(head + read_all(client)[0]) == 1012
        assert exit_code(server) == 0
        assert ("websocket.disconnect 1012" in printed_lines(server)) == (receiving == "disconnect")
        assert f"finally websocket {receiving}" in printed_lines(server)


def test_a_websocket_that_is_not_accepted_when_time_is_up() -> None:
    """The handshake of a WebSocket is denied with 503."""
    with flow(*AT_ONCE) as server, websocket(server, "/wait?accept=no") as client:
        until(lambda: state(server)["connections"] == 2, "it waits", server)
        terminate(server)
        assert read_all(client)[0].startswith(b"HTTP/1.1 503 ")
        assert exit_code(server) == 0
        assert printed_lines(server).count("websocket.disconnect 1012") == 1


def test_a_websocket_that_ends_in_time() -> None:
    """A WebSocket is left open until the drain's time is up."""
    with flow(*FOR_LONG) as server, websocket(server, "/wait") as client:
        read_until(client, b"\r\n\r\n")
        drain(server)
        client.sendall(frame(8, b"\x03\xe9"))
        read_all(client)
        assert exit_code(server) == 0
        assert printed_lines(server) == [
            "drain",
            "websocket.disconnect 1001",
            "finally websocket disconnect",
            "shutdown",
        ]


def test_a_late_reader_gets_all_that_was_sent() -> None:
    """What the app sent before it returned is still delivered: the drain waits for readers, not only for apps."""
    with flow(*FOR_LONG) as server, get(server, f"/fill?bytes={BLOCK // 2}&piece=all") as client:
        until(lambda: state(server)["filled"] == 1, "the app has returned", server)
        drain(server)
        assert chunks(read_all(client)[0]) == (pattern(0, BLOCK // 2), True)
        assert exit_code(server) == 0


def test_a_stalled_reader_does_not_delay_the_drain() -> None:
    """A stalled reader is cut off, and the server ends."""
    with flow(*AT_ONCE) as server, get(server, "/fill?bytes=16777216"):
        until(lambda: state(server)["connections"] == 2, "it is there", server)
        terminate(server)
        assert exit_code(server) == 0
        assert "shutdown" in printed_lines(server)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second: int) -> None:
    """After a second signal every end is still a proper one, and every `finally` runs."""
    with flow(*FOR_LONG) as server, begin(server) as client:
        drain(server)
        terminate(server, second)
        assert read_all(client) == (b"0\r\n\r\n", True)
        assert exit_code(server) == 0
        assert printed_lines(server) == ["drain", "http.disconnect", "finally event-stream disconnect", "shutdown"]


def test_ctrl_c_ends_at_once() -> None:
    """Ctrl-C ends the server at once, because it comes from a terminal."""
    with flow(*FOR_LONG) as server, begin(server) as client:
        terminate(server, signal.SIGINT)
        assert read_all(client) == (b"0\r\n\r\n", True)
        assert exit_code(server) == 0
        assert printed_lines(server) == ["drain", "http.disconnect", "finally event-stream disconnect", "shutdown"]


def test_an_idle_server_ends_at_once() -> None:
    """An idle kept-alive connection is closed at once."""
    with flow(*FOR_LONG) as server, get(server, "/fill?bytes=0") as client:
        read_until(client, b"0\r\n\r\n")
        terminate(server)
        assert read_all(client) == (b"", True)
        assert exit_code(server) == 0
        assert printed_lines(server) == ["drain", "shutdown"]


def test_stock_daphne_cuts_streams() -> None:
    """Stock daphne sends no terminator and leaves the app's child to the collector: the reason for FlowServer."""
    with stock() as server, begin(server, "/wait?receiving=child") as client:
        terminate(server)
        assert read_all(client)[0] == b""
        exit_code(server)
        assert "finally generator" not in printed_lines(server)


def test_an_app_that_cannot_start() -> None:
    """The server logs the reason and exits with 1."""
    port = free_port()
    command = [sys.executable, "-m", "streamserve.asgi.flow", APP, "--port", str(port)]
    env = {**os.environ, "FAIL_STARTUP": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 1
    assert "the app could not start: no model" in done.stderr


_IN_A_THREAD = """
import sys, threading
from streamserve.asgi.flow.install import server_class
from tests.support.apps.flow_app import app

endpoint = f"tcp:port={sys.argv[1]}:interface=127.0.0.1"
server = server_class()(app, endpoints=[endpoint], signal_handlers=False)
threading.Thread(target=server.run, daemon=True).start()
sys.stdin.readline()
sys.exit(3)  # as django.utils.autoreload does
"""


def test_under_the_autoreloader_the_server_ends_at_once() -> None:
    """The autoreloader runs the server in a daemon thread without signals; the interpreter's exit ends it in order."""
    port = free_port()
    command = [sys.executable, "-c", _IN_A_THREAD, str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:  # type: ignore[call-overload]
        with _connect(port) as client:
            client.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
            read_until(client, HELLO)
            out, _ = process.communicate("\n", timeout=DEADLINE_SECONDS)
            assert read_all(client) == (b"0\r\n\r\n", True)
        assert process.returncode == 3
    assert out.split("\n")[:-1] == [
        f"PRINTED {line}" for line in ("drain", "http.disconnect", "finally event-stream disconnect", "shutdown")
    ]


def _connect(port: int) -> socket.socket:
    def attempt() -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS)
        except ConnectionRefusedError:
            return None

    client = until(attempt, "it listens")
    assert isinstance(client, socket.socket)
    return client

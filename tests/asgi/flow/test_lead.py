"""Laws of the lead: it counts from what a reader's system has taken, and what a server's kernel holds is unread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.checks.stream_checks import check_native, text_of
from tests.support.servers.flow_driver import chunks, flow, get, read_all, state, until
from tests.support.servers.web_servers import Server, uvicorn

APP = "tests.support.apps.wire_app:app"
# About 60 kB of events: any server's buffers take that, though the engine should stop 256 tokens ahead of a reader.
NUM_TOKENS = 1500
STREAM = f"/streams?prompt=hello&max_tokens={NUM_TOKENS}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with flow(app=APP) as server:
        yield server


def stream_of(server: Server) -> dict[str, Any]:
    """Return the newest stream's metrics."""
    streams: list[dict[str, Any]] = state(server)["streams"]
    return streams[-1] if streams else {"state": "none"}


def settled(server: Server) -> dict[str, Any]:
    """Wait until the newest stream stands still, and return its metrics."""
    seen: list[dict[str, Any]] = []

    def is_still() -> bool:
        seen.append(stream_of(server))
        places = {(stream["state"], stream.get("completion_tokens")) for stream in seen[-20:]}
        return len(seen) >= 20 and len(places) == 1 and seen[-1]["state"] in {"parked", "finished"}

    until(is_still, "it stands still", server)
    return seen[-1]


def test_a_reader_that_stops_is_parked_and_resumed(server: Server) -> None:
    """The stream parks long before the kernel's buffers are full; only a poll of the socket notices the reader."""
    body = httpx.get(server.url + STREAM, timeout=60).content
    with get(server, STREAM, "Connection: close") as client:
        stream = settled(server)
        assert (stream["state"], stream["park_reason"]) == ("parked", "lead")
        assert stream["completion_tokens"] < NUM_TOKENS // 2
        got, is_whole = chunks(read_all(client)[0])
    assert is_whole
    assert text_of(check_native(got)) == text_of(check_native(body))


def test_a_large_frame_is_written_as_there_is_room(server: Server) -> None:
    """A frame of many megabytes is written a piece at a time, and its event is whole when all have left."""
    num_bytes, piece_bytes = 12 * 2**20, 32 * 1024  # more than kernels buffer; an eighth of connection_bytes
    before = state(server)["num_written"]
    with get(server, f"/large?bytes={num_bytes}", "Connection: close") as client:
        seen: list[int] = []

        def is_still() -> bool:
            seen.append(state(server)["num_written"] - before)
            return len(seen) >= 20 and seen[-1] > 1 and len(set(seen[-20:])) == 1

        until(is_still, "no more is written", server)
        got, is_whole = chunks(read_all(client)[0])
    assert seen[-1] < num_bytes // piece_bytes
    assert state(server)["num_written"] - before >= num_bytes // piece_bytes
    assert is_whole
    assert len(text_of(check_native(got))) == num_bytes


def test_an_outer_middleware_sees_every_frame() -> None:
    """With a `send` of another middleware between the server and StreamMiddleware, every frame goes through it."""
    with flow(app="tests.support.apps.wire_app:changing") as server:
        body = httpx.get(server.url + "/streams?prompt=hello&max_tokens=200", timeout=60).content
        tokens = [frame.json for frame in check_native(body) if frame.event == "token"]
        assert all(token["is_changed"] for token in tokens)
        assert sum(len(token["token_ids"]) for token in tokens) == 200


@pytest.mark.parametrize("serve", [flow, uvicorn])
def test_a_delivery_that_fails_breaks_the_connection(serve: Callable[..., Any]) -> None:
    """Half an answer in plain text has no last chunk: its reader cannot take it for the whole one."""
    with serve(app=APP) as server, httpx.stream("GET", server.url + "/broken", timeout=60) as response:
        assert response.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            response.read()


def test_uvicorns_sockets_are_counted_too() -> None:
    """Under uvicorn a reader that stops is parked as well, and gets the whole answer when it reads on."""
    with uvicorn(APP) as server:
        body = httpx.get(server.url + STREAM, timeout=60).content
        with get(server, STREAM, "Connection: close") as client:
            stream = settled(server)
            assert (stream["state"], stream["park_reason"]) == ("parked", "lead")
            got, is_whole = chunks(read_all(client)[0])
    assert is_whole
    assert text_of(check_native(got)) == text_of(check_native(body))


def test_what_a_server_does_not_count_is_taken() -> None:
    """Behind a middleware that wraps `send`, what was accepted counts as read: the answer is made to its end."""
    with uvicorn("tests.support.apps.wire_app:changing") as server, get(server, STREAM):
        until(lambda: stream_of(server)["state"] == "finished", "it is made to its end", server)
        assert stream_of(server)["completion_tokens"] == NUM_TOKENS

"""A worker shuts down with WebSockets open: each gets the place to resume at, and the other worker sends the rest.

Real daphne with FlowServer, two processes on one FileLog, SIGTERM. Answers wait for acks, so that none ends before.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.docs.demo_site import environment
from tests.support.plugins.migrated import KEY, MAKE_KEY, prepare
from tests.support.servers.sockets import Socket, open_socket, text_of
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.pages.own_engines_site"}
ASK = {"messages": [{"role": "user", "content": "tell me"}], "max_tokens": 400, "seed": 7, "ignore_eos": True}
END_SECONDS = 120.0

Start = Callable[[float], Server]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("farewell")
    prepare(folder, MAKE_KEY)
    return folder


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Start]:
    """Start a worker whose drain waits so many seconds for answers."""
    with contextlib.ExitStack() as stack:

        def start(drain_seconds: float) -> Server:
            env = environment(folder, **SETTINGS, DRAIN_SECONDS=str(drain_seconds))
            server = stack.enter_context(daphne("project.asgi:application", env=env))
            wait_until_ready(server.url)
            return server

        yield start


@pytest.fixture(scope="module")
def other(start: Start) -> Server:
    """The worker that stays."""
    return start(0)


def terminate(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)


def begin(socket: Socket, **fields: Any) -> str:
    """Start an answer of which four events come, and no more without acks."""
    stream_id = str(socket.ask("start", request={**ASK, **fields}, credit=4)["id"])
    assert len(socket.events(stream_id, last=4)) == 4
    return stream_id


def whole_text(server: Server, **fields: Any) -> str:
    with open_socket(server.websocket_url, KEY) as socket:
        return text_of(socket.events(socket.ask("start", request={**ASK, **fields})["id"]))


def test_the_last_message_has_the_place_to_resume_from(start: Start, other: Server) -> None:
    """One for each stream, then 1012, exit code 0; the other worker sends the rest: no word missing, none twice."""
    worker = start(0)
    reference = {seed: whole_text(other, seed=seed) for seed in (7, 8)}
    with (
        open_socket(worker.websocket_url, KEY) as socket,
        open_socket(worker.websocket_url, KEY) as idle,
        open_socket(other.websocket_url, KEY) as elsewhere,
    ):
        ids = {seed: begin(socket, seed=seed) for seed in (7, 8)}
        terminate(worker)
        assert socket.close_code() == 1012
        assert (idle.close_code(), idle.got) == (1012, [])
        farewells = {message["id"]: message for message in socket.got if message["type"] == "farewell"}
        assert set(farewells) == set(ids.values())
        assert socket.got[-2:] == [message for message in socket.got if message["type"] == "farewell"]
        for seed, stream_id in ids.items():
            shown, bye = socket.events(stream_id, last=4), farewells[stream_id]
            assert (bye["after"], bye["event_id"]) == (shown[-1]["seq"], shown[-1]["event_id"])
            elsewhere.send("resume", id=stream_id, after=bye["after"])
            rest = elsewhere.events(stream_id)
            assert text_of(shown) + text_of(rest) == reference[seed]
            assert rest[-1]["data"]["finish_reason"] == "length"
            assert rest[-1]["data"]["totalTokens"] == ASK["max_tokens"]
    assert worker.process.wait(END_SECONDS) == 0


def test_an_answer_in_flight_may_finish(start: Start, other: Server) -> None:
    """During the drain an idle socket is closed at once, a busy one starts nothing and is closed at its end."""
    worker = start(600)
    reference = whole_text(other)
    with open_socket(worker.websocket_url, KEY) as socket, open_socket(worker.websocket_url, KEY) as idle:
        stream_id = begin(socket)
        terminate(worker)
        assert idle.close_code() == 1012
        socket.send("start", request=ASK)
        assert socket.error_code() == "engine_unavailable"
        assert socket.ask("ping")["type"] == "pong"
        shown = socket.events_acked(stream_id)
        assert socket.close_code() == 1012
        assert text_of(shown) == reference
        assert not any(message["type"] == "farewell" for message in socket.got)
    assert worker.process.wait(END_SECONDS) == 0


def test_a_conversation_continues_at_the_other_worker(start: Start, other: Server) -> None:
    """A turn can be continued at the other worker while its answer runs; after its end the error names the way out."""
    worker = start(0)
    with open_socket(worker.websocket_url, KEY) as socket, open_socket(other.websocket_url, KEY) as elsewhere:
        finished = socket.ask("start", request=ASK)["id"]
        socket.events(finished)
        stream_id = begin(socket)
        seen = socket.events(stream_id, last=4)
        elsewhere.send("input", id=finished, text="And then?")
        assert elsewhere.error_code() == "conversation_gone"
        answer = elsewhere.ask("input", id=stream_id, seen_seq=seen[-1]["seq"], text="No, wait.")
        assert (answer["type"], answer["continues"]) == ("started", stream_id)
        turns = [{"role": "assistant", "content": text_of(seen)}, {"role": "user", "content": "No, wait."}]
        text = text_of(elsewhere.events(answer["id"]))
        assert text == whole_text(other, messages=[*ASK["messages"], *turns])
        end = socket.events_acked(stream_id)[-1]
        assert (end["data"]["finish_reason"], end["data"]["kept_seq"]) == ("cancelled", seen[-1]["seq"])

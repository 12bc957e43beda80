"""Laws of the watch over all streams of the suite: it covers every kind of client, and finds every planted fault."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from websockets.sync.client import connect
from websockets.sync.server import ServerConnection, serve

from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.events import Done, LoggedEvent, is_terminal
from streamserve.protocol.requests import Admission
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.registry import Streams
from tests.support.checks import stream_watch
from tests.support.checks.planted_streams import (
    DONE,
    GOOD,
    LOG_ID,
    META,
    OK,
    TOKEN,
    answering,
    by_httpx,
    durable,
    native,
    tokens,
)
from tests.support.checks.stream_watch import Watch
from tests.support.servers.web_servers import ROOT
from tests.support.streams.hand_made import ScriptedClient, ask, tok

Read = Callable[[int], object]


CANCELLED = '{"error":{"code":"cancelled","message":"","param":null}}'
CHUNK = '{"choices":[{"index":0,"delta":{},"finish_reason":"cancelled"}]}'
BLOCK_STOP = '{"choice":0,"index":0}'
BLOCK = '{"choice":0,"index":0,"kind":"thinking"}'
FAULTS = {
    "doubled terminal": (GOOD + native(4, "done"), "follows the end"),
    "token after the end": (GOOD + native(4, "token", TOKEN), "follows the end"),
    "gap": (OK + META + DONE, "seq 3 after 1"),
    "duplicate": (OK + META + META + native(2, "done"), "seq 1 after 1"),
    "no first event": (OK + native(2, "token", TOKEN) + DONE, "seq 2 after 0"),
    "missing terminal": (OK + META, "no terminal event"),
    "half an event": (GOOD + b"event: tok", "unfinished"),
    "nothing": (OK, "no events"),
    "broken code point": (OK + META + native(2, "token", TOKEN.replace('x"', '\ufffdx"')) + DONE, "code point"),
    "no utf-8": (OK + META + native(2, "token", TOKEN).replace(b'"x', b'"\xf0\x9f') + DONE, "UnicodeDecodeError"),
    "done after cancelled": (OK + tokens(2, CANCELLED) + tokens(3, "[DONE]"), "2 ends"),
    "done after a cancelled chunk": (OK + tokens(2, CHUNK) + tokens(3, "[DONE]"), "cancelled"),
    "tokens without an end": (OK + tokens(2, '{"token":"x"}'), "0 ends"),
    "tokens out of order": (OK + tokens(3, '{"token":"x"}') + tokens(2, "[DONE]"), "do not rise"),
    "token of a block that never began": (
        OK + META + native(2, "token", '{"text":"x","token_ids":[1],"index":1,"choice":0}') + DONE,
        "a token names the open block",
    ),
    "success in an open block": (OK + META + native(2, "block_start", BLOCK) + DONE, "no block is open when"),
    "ids that usage does not count": (
        OK + META + native(2, "token", TOKEN) + native(3, "done", '{"usage":{"completion_tokens":2}}'),
        "the ids of all tokens are as many as usage counts",
    ),
    "durable with a gap": (OK + durable(1, "meta") + durable(3, "done"), "seq=3"),
    "durable without its end": (OK + durable(1, "meta") + durable(2, "token", TOKEN), "not closed"),
    "durable data without its offset": (OK + durable(1, "done").partition(b"event: control")[0], "without its control"),
    "something after a farewell": (OK + META + b"event: farewell\ndata: {}\n\n" + native(2, "done"), "follows the end"),
}
RIGHT = {
    "success": GOOD,
    "durable": OK + durable(1, "meta") + durable(2, "token", TOKEN) + durable(3, "done"),
    "farewell": OK + META + b'event: farewell\ndata: {"after":1,"event_id":"%s-1"}\n\n' % LOG_ID.encode(),
    "snapshot": OK + META + native(900, "snapshot", '{"text":"x","seq":900}') + native(901, "done"),
    "blocks": OK + META + native(2, "block_start", BLOCK) + native(3, "block_stop", BLOCK_STOP) + native(4, "done"),
    "a notice": OK + META + b'event: status\ndata: {"status":"waiting"}\n\n' + native(2, "token", TOKEN) + DONE,
    "an event of a later release": OK + META + native(2, "mood") + DONE,
    "tokens": OK + tokens(2, '{"token":"x"}') + tokens(5, "[DONE]"),
    "failed tokens": OK + tokens(2, '{"token":"x"}') + tokens(3, CANCELLED),
}


def by_async_httpx(port: int) -> None:
    async def read() -> None:
        async with (
            httpx.AsyncClient(trust_env=False) as client,
            client.stream("GET", f"http://127.0.0.1:{port}/") as one,
        ):
            async for _ in one.aiter_raw():
                pass

    asyncio.run(read())


def by_openai(port: int) -> None:
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}", api_key="k", http_client=http, max_retries=0) as client:
        messages = [{"role": "user", "content": "hi"}]
        stream = client.chat.completions.create(model="m", messages=messages, stream=True)  # type: ignore[call-overload]
        with contextlib.suppress(openai.APIError):
            list(stream)
        stream.response.read() if not stream.response.is_closed else None


def by_http_client(port: int) -> None:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as client:
        for _ in range(2):
            client.request("GET", "/")
            client.getresponse().read()


def by_bytes(port: int) -> None:
    """Read from a raw socket, a byte at a time."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: any\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        while client.recv(1):
            pass


CLIENTS: list[Read] = [by_httpx, by_async_httpx, by_http_client, by_bytes]


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_seen(stream_watch: Watch, name: str) -> None:
    """A fault in a response that came whole is found."""
    body, fault = FAULTS[name]
    with answering(body) as port:
        by_httpx(port)
    (seen,) = stream_watch.faults()
    assert fault in seen


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_no_fault(stream_watch: Watch, name: str) -> None:
    """No right end of a stream is a fault, nor any beginning whose client disconnected."""
    with answering(RIGHT[name]) as port:
        by_httpx(port)
        assert stream_watch.faults() == []
        for size in range(1, len(RIGHT[name]), 29):
            with httpx.stream("GET", f"http://127.0.0.1:{port}/", trust_env=False) as response:
                next(response.iter_raw(size))
        assert stream_watch.faults() == []


@pytest.mark.parametrize("read", CLIENTS)
@pytest.mark.parametrize("is_chunked", [True, False], ids=["chunked", "until the end"])
def test_every_client_is_watched(stream_watch: Watch, read: Read, is_chunked: bool) -> None:
    """Each client is watched on a connection of its own and on a reused one."""
    with answering(GOOD, is_chunked=is_chunked) as port:
        if is_chunked or read is not by_http_client:
            read(port)
            assert stream_watch.faults() == []
    with answering(OK + META + DONE, starts_at=1, is_chunked=is_chunked) as port:
        read(port)
    assert stream_watch.faults()


def test_the_openai_client_is_watched(stream_watch: Watch) -> None:
    """The client stops reading at `[DONE]`; a fault before that is found."""
    with answering(OK + tokens(3, '{"choices":[]}') + tokens(2, "[DONE]")) as port:
        by_openai(port)
    assert "do not rise" in stream_watch.faults()[0]


def test_a_resumed_stream_begins_at_its_header(stream_watch: Watch) -> None:
    """The first id follows `Streamserve-From`: there is no gap."""
    for starts_at, num_faults in ((2, 0), (1, 1), (3, 1)):
        with answering(OK + native(2, "token", TOKEN) + DONE, starts_at=starts_at) as port:
            by_httpx(port)
        assert len(stream_watch.faults()) == num_faults


def test_a_stream_that_is_cut_off_is_a_fault(stream_watch: Watch) -> None:
    """A cut is a fault unless the test is marked or all had come; what came before must be right in any case."""
    cases = ((OK + META, False, 1), (GOOD, False, 0), (OK + META, True, 0), (OK + META + DONE, True, 1))
    for body, may_be_cut, num_faults in cases:
        with answering(body, is_cut=True) as port, pytest.raises(httpx.RemoteProtocolError):
            by_httpx(port)
        assert len(stream_watch.faults(may_be_cut=may_be_cut)) == num_faults


class Doubling(NativeEncoder):
    """Encodes the last event twice."""

    def encode(self, logged: LoggedEvent) -> bytes:
        return super().encode(logged) * (2 if is_terminal(logged.event) else 1)


@pytest.mark.parametrize("how", ["run", "pull"])
async def test_a_client_in_this_process_is_watched(stream_watch: Watch, how: str) -> None:
    """The bytes that a delivery sends or yields are checked."""
    scripted = ScriptedClient()
    streams = Streams({"scripted": scripted}, MemoryLog())
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    scripted.last.push(tok("a"), Done(finish_reason="stop"))
    await stream.ended.wait()
    for encoder, num_faults in ((NativeEncoder(stream.log_id), 0), (Doubling(stream.log_id), 1)):
        delivery = Delivery(streams, stream, encoder)
        if how == "run":
            await delivery.run(_take)
        else:
            assert [data async for data in delivery]
        assert len(stream_watch.faults()) == num_faults
    await streams.aclose()


async def _take(data: bytes) -> None:
    pass


def event(seq: int, name: str = "") -> dict[str, object]:
    name = name or ("meta" if seq == 1 else "status")
    return {"type": "event", "id": "s", "event_id": f"{LOG_ID}-{seq}", "seq": seq, "event": name, "data": {}}


@pytest.mark.parametrize("compression", [None, "deflate"])
@pytest.mark.parametrize(
    ("messages", "num_faults"),
    [
        ([event(1), event(2), event(3, "done")], 0),
        ([event(1), {"resume": 7}, event(2), event(8), event(9, "done"), {"resume": 0}, event(1)], 0),
        ([event(1), event(3, "done")], 1),
        ([event(1), event(1)], 1),
        ([event(2)], 1),
        ([event(1), event(2, "done"), event(3)], 1),
        ([event(1), {"resume": 7}, event(8), event(1)], 1),
    ],
    ids=["whole", "resumed", "gap", "twice", "no beginning", "after the end", "back without a resume"],
)
def test_a_websocket_is_watched(
    stream_watch: Watch, messages: list[dict[str, object]], num_faults: int, compression: str | None
) -> None:
    """A socket's events are checked, with its client's resumes, since those may begin anywhere."""

    def answer(connection: ServerConnection) -> None:
        for message in messages:
            if "resume" in message:
                connection.recv()
            else:
                connection.send(json.dumps(message))

    with serve(answer, "127.0.0.1", 0, compression=compression) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.socket.getsockname()[1]
        with connect(f"ws://127.0.0.1:{port}", proxy=None, compression=compression) as client:
            for message in messages:
                if "resume" in message:
                    client.send(json.dumps({"type": "resume", "id": "s", "after": message["resume"]}))
                else:
                    client.recv()
        server.shutdown()
        thread.join()
    assert len(stream_watch.faults()) == num_faults


def test_a_test_with_a_wrong_stream_fails(tmp_path: Path) -> None:
    """The fixture is active in every test; the marker excuses a cut, and no other fault."""
    (tmp_path / "test_it.py").write_text(
        "import httpx, pytest\n"
        "from tests.support.checks.planted_streams import DONE, GOOD, META, OK, answering, by_httpx\n"
        "def read(body, **how):\n"
        "    with answering(body, **how) as port:\n"
        "        try: by_httpx(port)\n"
        "        except httpx.RemoteProtocolError: pass\n"
        "def test_good(): read(GOOD)\n"
        "def test_gap(): read(OK + META + DONE)\n"
        "def test_cut(): read(OK + META, is_cut=True)\n"
        "@pytest.mark.cut_streams('on purpose')\n"
        "def test_excused(): read(OK + META, is_cut=True)\n"
        "@pytest.mark.cut_streams('on purpose')\n"
        "def test_gap_and_cut(): read(OK + META + DONE, is_cut=True)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--strict-markers", "-p", "no:cacheprovider", "-p"]
    command += ["tests.support.checks.stream_watch", "-c", os.devnull, f"--rootdir={tmp_path}", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    assert "the connection broke within a stream" in run.stdout
    ends = {line.split()[1].rpartition("::")[2]: line.split()[0] for line in run.stdout.splitlines() if "::" in line}
    assert ends == {
        "test_good": "PASSED",
        "test_gap": "ERROR",
        "test_cut": "ERROR",
        "test_excused": "PASSED",
        "test_gap_and_cut": "ERROR",
    }, run.stdout


@pytest.mark.timeout(60)
def test_what_is_collected_may_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection that begins while a connection is noted may close a generator, whose loop wakes by a byte."""
    (one, _), (other, reader) = pairs = socket.socketpair(), socket.socketpair()
    make, others = stream_watch.Connection, [other]

    def collecting(watch: Watch) -> stream_watch.Connection:
        if others:
            others.pop().send(b"x")
        return make(watch)

    monkeypatch.setattr(stream_watch, "Connection", collecting)
    one.send(b"y")
    assert reader.recv(1) == b"x"
    for pair in pairs:
        for end in pair:
            end.close()

"""Laws of a reader's pace: the send interval and the keepalive, by the same fields on every streaming route."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator
from django.test.utils import override_settings

from streamserve import Run, pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import Frame, parse_sse
from tests.support.engines.turns import take_turns
from tests.web.sockets.conftest import connect, receive, until_end

pytestmark = pytest.mark.django_db(transaction=True)

ASK: dict[str, Any] = {"prompt": "The quiet river", "max_tokens": 12, "seed": 7, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "seed": 7}
QUERY = "?prompt=The+quiet+river&max_tokens=12&seed=7&ignore_eos=true"
BODIES: dict[str, dict[str, Any]] = {
    "/streams": ASK,
    "/v1/chat/completions": {**CHAT, "ignore_eos": True, "stream": True},
    "/v1/completions": {**ASK, "stream": True},
    "/v1/completions/stream": ASK,
    "/v1/messages": {**CHAT, "stream": True},
    "/pipelines/river": {**ASK, "stream": True},
}
# What a keepalive is as an event of each route's format.
EVENTS = {
    "/streams": ("keepalive", {}),
    "/v1/chat/completions": ("message", {"choices": []}),
    "/v1/completions": ("message", {"choices": []}),
    "/v1/completions/stream": ("message", {"token": ""}),
    "/v1/messages": ("ping", {"type": "ping"}),
    "/pipelines/river": ("keepalive", {}),
}
WRONG = [
    ("interval_ms", -1),
    ("interval_ms", 5001),
    ("interval_ms", "soon"),
    ("interval_tokens", 0),
    ("interval_tokens", 1001),
    ("keepalive_seconds", 0.5),
    ("keepalive_seconds", 301),
    ("keepalive", "both"),
]


async def river(run: Run) -> None:
    await run.generate(None, max_tokens=12, seed=7, ignore_eos=True)


def have_readers() -> bool:
    """Whether each live stream has a reader."""
    return all(stream.readers.attached for stream in site.get_site().streams.all() if stream.is_live)


@asynccontextmanager
async def served(pause: Callable[[], object] | None = None) -> AsyncIterator[None]:
    """Serve the echo engine, and the pipeline `river`. Each step waits for `pause`, or its readers have each token."""
    await site.reset()
    pipeline("river")(river)
    try:
        with override_settings(STREAMSERVE={"TESTING": True, "PROMPT_IN_URL": True}):
            await until_ready()
            if pause is None:
                take_turns(have_readers)
            else:
                site.get_site().clients["echo"]._thread.engine.runner._pause = pause
            yield
            await site.reset()
    finally:
        forget("river")


@pytest.fixture
def caller(transactional_db: Any, alice_key: str) -> Caller:
    return Caller(key=alice_key)


def text_in(frame: Frame) -> str:
    """Return the answer's text in a frame of any of the formats."""
    if not frame.data.startswith("{"):
        return ""
    data = json.loads(frame.data)
    choice = (data.get("choices") or [{}])[0]
    delta = choice.get("delta") or (data["delta"] if data.get("type") == "content_block_delta" else {})
    places = (data.get("token"), data.get("text"), choice.get("text"), delta.get("content"), delta.get("text"))
    return next(filter(None, places), "")


def texts_in(body: bytes) -> list[str]:
    return [text for frame in parse_sse(body) if (text := text_in(frame))]


@pytest.mark.parametrize("path", BODIES)
async def test_a_reader_chooses_its_interval(caller: Caller, path: str) -> None:
    """By time: every token alone, or all after the first in one frame. By number: six. The text is the same."""
    async with served():
        paces = [{"interval_ms": 0}, {"interval_ms": 5000}, {"interval_tokens": 6}]
        bodies = [await body_of(await caller.post(path, BODIES[path] | pace)) for pace in paces]
        alone, joined, six = map(texts_in, bodies)
        assert "".join(alone) == "".join(joined) == "".join(six)
        assert len(joined) == 2
        assert len(alone) > 6
        assert len(joined) < len(six) <= 4


async def test_several_prompts_share_a_pace(caller: Caller) -> None:
    """Each prompt's stream has it."""
    async with served():
        ask = {**ASK, "prompt": ["The quiet river", "An old boat"], "stream": True}
        bodies = [await body_of(await caller.post("/v1/completions", {**ask, "interval_ms": ms})) for ms in (0, 5000)]
        alone, joined = map(texts_in, bodies)
        assert len(joined) == 4
        assert len(alone) > 12


async def test_a_query_chooses_a_pace(caller: Caller) -> None:
    """Where an answer is started by GET; the fields are no input of a pipeline."""
    async with served():
        accept = {"accept": "text/event-stream"}
        for path in ("/streams/new" + QUERY, "/v1/completions/stream" + QUERY, "/pipelines/river?question=why"):
            alone, joined = [
                texts_in(await body_of(await caller.get(f"{path}&interval_ms={ms}", **accept))) for ms in (0, 5000)
            ]
            assert (len(alone) > 6, len(joined)) == (True, 2), path


async def test_a_resume_chooses_anew(caller: Caller) -> None:
    """On each route that resumes, in each format: another number of tokens a frame than the answer began with."""
    async with served():
        response = await caller.post("/streams", {**ASK, "interval_tokens": 12})
        first = parse_sse(await body_of(response))[0]
        events = f"/streams/{response['X-Stream-Id']}/events"
        last = {"last-event-id": first.id}
        plain = "/v1/completions/stream?"
        urls = [f"{prefix}{events}?format={format}&" for prefix in ("", "/v1") for format in ("native", "tokens")]
        urls += [f"/v1{events}?format={format}&" for format in ("openai", "completions", "anthropic")]
        for url in (*urls, "/streams/new?", plain):
            alone, joined = [
                texts_in(await body_of(await caller.get(f"{url}interval_tokens={number}", **last)))
                for number in (1, 1000)
            ]
            assert "".join(alone) == "".join(joined), url
            assert len(alone) > len(joined) > 0, url
        ran = await caller.post("/pipelines/river", {**ASK, "stream": True})
        last = {"last-event-id": parse_sse(await body_of(ran))[0].id, "accept": "text/event-stream"}
        again = await caller.get("/pipelines/river?interval_tokens=1", **last)
        assert len(texts_in(await body_of(again))) > 6


def keepalives_in(path: str, body: bytes) -> tuple[bool, bool]:
    """Return whether there is one as an event of the route's format, and whether one as a comment."""
    name, data = EVENTS[path]
    events = [
        frame
        for frame in parse_sse(body.rpartition(b"\n\n")[0] + b"\n\n")
        if frame.event == name and not frame.id and data.items() <= (frame.json if frame.data else {}).items()
    ]
    starts_so = path == "/v1/completions/stream"  # its first event, sent at once, is one too
    return len(events) > starts_so, b"\n: keepalive\n" in body


async def test_a_keepalive_is_an_event_or_a_comment(caller: Caller) -> None:
    """As each reader asks; it has no id, and the official formats keep their shape."""
    silence = threading.Event()  # ends when each reader has had one
    waiting = {(path, form) for path in BODIES for form in ("event", "comment")}
    async with served(lambda: silence.wait(60)):

        async def read(path: str, form: str) -> bytes:
            fields = {"max_tokens": 2, "keepalive_seconds": 1, "keepalive": form}
            body = b""
            async for chunk in await caller.post(path, BODIES[path] | fields):
                body += chunk
                if any(keepalives_in(path, body)):
                    waiting.discard((path, form))
                if not waiting:
                    silence.set()
            return body

        asked = list(waiting)
        for (path, form), body in zip(asked, await asyncio.gather(*(read(*one) for one in asked)), strict=True):
            assert keepalives_in(path, body) == (form == "event", form == "comment"), (path, form, body)


@pytest.mark.parametrize("path", BODIES)
async def test_wrong_values_are_named(caller: Caller, path: str) -> None:
    """A 400 before anything starts, in the body and in a query."""
    async with served():
        for name, value in WRONG:
            refused = await caller.post(path, BODIES[path] | {name: value})
            assert (refused.status_code, name in refused.content.decode()) == (400, True), (name, value)
        response = await caller.post("/streams", ASK)
        await body_of(response)
        for name, value in WRONG:
            for url in (f"/streams/{response['X-Stream-Id']}/events?", f"/streams/new{QUERY}&", "/pipelines/river?"):
                refused = await caller.get(f"{url}{name}={value}")
                assert (refused.status_code, name in refused.content.decode()) == (400, True), (url, name, value)
        for field in ({"keepalive": "event"}, {"keepalive_seconds": 5}):
            refused = await caller.post("/streams", {**ASK, "format": "text", **field})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(field)))


@pytest.fixture
async def socket(alice_key: str) -> AsyncIterator[WebsocketCommunicator]:
    async with served():
        socket = connect(alice_key)
        assert (await socket.connect())[0]
        yield socket
        await socket.disconnect()


def num_texts(messages: list[dict[str, Any]]) -> int:
    return sum(message.get("event") == "token" for message in messages)


async def test_a_socket_chooses_for_each_stream(socket: WebsocketCommunicator) -> None:
    """In `request`; an input keeps the pace of the answer that it stops, and a resume chooses anew."""
    await socket.send_json_to({"type": "start", "request": {**CHAT, "ignore_eos": True, "interval_ms": 5000}})
    started = await receive(socket)
    assert num_texts(await until_end(socket)) == 2
    await socket.send_json_to({"type": "resume", "id": started["id"], "interval_tokens": 1})
    assert num_texts(await until_end(socket)) > 6
    await socket.send_json_to({"type": "start", "request": {**CHAT, "max_tokens": 400, "interval_tokens": 9}})
    started = await receive(socket)
    while num_texts([await receive(socket)]) == 0:
        pass
    turn = {"type": "input", "id": started["id"], "text": "No.", "request": {"max_tokens": 12}}
    await socket.send_json_to(turn)
    while (message := await receive(socket))["type"] != "started":
        pass
    rest = [one for one in await until_end(socket) if one["id"] == message["id"]]
    if rest[-1]["event"] != "done":
        rest = await until_end(socket)
    assert num_texts(rest) <= 3


async def test_a_sockets_keepalive_is_a_ping(alice_key: str) -> None:
    """After the silence that the request names; a comment is nothing that a socket has."""
    silence = threading.Event()  # ends with the first ping
    async with served(lambda: silence.wait(60)):
        socket = connect(alice_key)
        assert (await socket.connect())[0]
        await socket.send_json_to({"type": "start", "request": {**ASK, "keepalive": "comment"}})
        refused = await receive(socket)
        assert (refused["type"], refused["error"]["param"]) == ("error", "keepalive")
        await socket.send_json_to({"type": "start", "request": {**ASK, "max_tokens": 2, "keepalive_seconds": 1}})
        while await receive(socket) != {"type": "ping"}:
            pass
        silence.set()
        await until_end(socket)
        await socket.disconnect()

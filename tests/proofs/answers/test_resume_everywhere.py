"""Resume at every event of a stream, in every way there is, on the real site: exactly the later events come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket

from tests.proofs.scale import IS_SOAK
from tests.proofs.support.gated_engine import GatedEngine, gated_engine
from tests.support.checks.stream_checks import Frame, check_native, check_native_part, check_tokens, text_of
from tests.support.docs.demo_site import environment
from tests.support.plugins.migrated import KEY, MAKE_KEY, prepare
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

pytestmark = [pytest.mark.timeout(3600)]

HEADERS = {"Authorization": f"Bearer {KEY}"}
NUM_TOKENS = 480 if IS_SOAK else 60
# For streams in progress: the engine is held after so many tokens, and the reader resumes at these events.
NUM_BEFORE = NUM_TOKENS // 2
WHILE_RUNNING = sorted({1, 2, NUM_BEFORE // 3, NUM_BEFORE // 2, NUM_BEFORE, NUM_BEFORE + 1})
SECONDS = 60.0


@dataclass(frozen=True)
class Site:
    """One worker and its engine."""

    server: Server
    engine: GatedEngine


@dataclass(frozen=True)
class Reference:
    """A whole stream as its first reader received it."""

    id: str
    frames: list[Frame]

    @property
    def log_id(self) -> str:
        return self.frames[0].log_id

    def tail(self, after: int) -> list[Frame]:
        return self.frames[after:]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    env = environment(folder, DJANGO_SETTINGS_MODULE="tests.support.sites.pages.gated_site")
    prepare(folder, MAKE_KEY)
    with ExitStack() as stack:
        engine = stack.enter_context(gated_engine(folder, env))
        server = stack.enter_context(daphne("project.asgi:application", env=env))
        wait_until_ready(server.url)
        yield Site(server, engine)


@pytest.fixture
async def http(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=site.server.url, headers=HEADERS, trust_env=False, timeout=SECONDS, limits=limits
    ) as client:
        yield client


@pytest.fixture
async def websocket(site: Site) -> AsyncIterator[ClientConnection]:
    address = f"{site.server.websocket_url}/ws/streams"
    async with connect_websocket(address, additional_headers=HEADERS, proxy=None) as connection:
        yield connection


def question(**fields: Any) -> dict[str, Any]:
    return {"prompt": "resume", "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 5, **fields}


async def ask(http: httpx.AsyncClient) -> Reference:
    """Read an answer whole; each of its tokens is an event."""
    response = await http.post("/streams", json=question())
    frames = check_native(response.content)
    assert [frame.seq for frame in frames] == list(range(1, NUM_TOKENS + 3))
    return Reference(response.headers["x-stream-id"], frames)


async def by_event_id(http: httpx.AsyncClient, reference: Reference, after: int) -> httpx.Response:
    """Resume as an EventSource does. Before the first event there is no id."""
    headers = {"Last-Event-ID": f"{reference.log_id}-{after}"} if after else {}
    return await http.get(f"/streams/{reference.id}/events", headers=headers)


async def by_number(http: httpx.AsyncClient, reference: Reference, after: int) -> httpx.Response:
    return await http.get(f"/streams/{reference.id}/events?after={after}")


async def by_new(http: httpx.AsyncClient, reference: Reference, after: int) -> httpx.Response:
    """Resume at the address where the stream began."""
    return await http.get("/streams/new?prompt=never", headers={"Last-Event-ID": f"{reference.log_id}-{after}"})


async def is_the_tail(asking: Awaitable[httpx.Response], reference: Reference, after: int) -> None:
    """The answer is the later events, to the last byte of their data; or a statement that there are none."""
    response = await asking
    if after == len(reference.frames):
        assert (response.status_code, response.content) == (204, b"")
        return
    assert response.status_code == 200, response.text
    assert response.headers["streamserve-from"] == str(after + 1)
    assert response.headers["x-stream-id"] == reference.id
    assert check_native(response.content, after=after) == reference.tail(after)


async def is_the_tail_as(format_: str, http: httpx.AsyncClient, reference: Reference, after: int) -> None:
    """The text in another format is that of the later events, and the end is right."""
    response = await http.get(f"/streams/{reference.id}/events?after={after}&format={format_}")
    if after == len(reference.frames):
        assert response.status_code == 204
        return
    assert response.headers["streamserve-from"] == str(after + 1)
    text = check_tokens(response.content) if format_ == "tokens" else response.text
    assert text == text_of(reference.tail(after))


async def over_websocket(connection: ClientConnection, reference: Reference, after: int) -> list[dict[str, Any]]:
    """Resume over a WebSocket, and return the messages up to the end."""
    await connection.send(json.dumps({"type": "resume", "id": reference.id, "after": after}))
    return [message async for message in events_of(connection, reference)]


async def events_of(connection: ClientConnection, reference: Reference) -> AsyncIterator[dict[str, Any]]:
    while True:
        message = json.loads(await asyncio.wait_for(connection.recv(), SECONDS))
        assert (message["type"], message["id"]) == ("event", reference.id), message
        if "event_id" not in message:
            assert message["event"] == "meta"  # before `done`; it is not in the log
            continue
        yield message
        if message["event"] in {"done", "error"}:
            return


def as_messages(frames: list[Frame]) -> list[tuple[str, str, Any]]:
    return [(frame.id, frame.event, frame.json) for frame in frames]


async def test_resume_at_every_event(site: Site, http: httpx.AsyncClient, websocket: ClientConnection) -> None:
    """After each event: twice, with two readers at once, by id and by number; over the WebSocket; in all formats."""
    reference = await ask(http)
    num_resumes = 0
    for after in range(len(reference.frames) + 1):
        readers = [by_event_id, by_number] if after % 2 else [by_new if after else by_event_id, by_number]
        for _ in range(2):
            await asyncio.gather(*(is_the_tail(reader(http, reference, after), reference, after) for reader in readers))
        await asyncio.gather(*(is_the_tail_as(format_, http, reference, after) for format_ in ("tokens", "text")))
        num_resumes += 6
        if after < len(reference.frames):
            messages = await over_websocket(websocket, reference, after)
            seen = [(message["event_id"], message["event"], message["data"]) for message in messages]
            assert seen == as_messages(reference.tail(after))
            num_resumes += 1
    assert (await by_number(http, reference, len(reference.frames) + 1)).status_code == 410
    print(f"\nresume: at each of {len(reference.frames)} events, {num_resumes:,} times in all: all the same")


class Follower:
    """Reads a stream in progress, and returns how far it has read."""

    def __init__(self, http: httpx.AsyncClient, reference: Reference, after: int, *, by_id: bool) -> None:
        headers = {"Last-Event-ID": f"{reference.log_id}-{after}"} if by_id else {}
        query = "" if by_id else f"?after={after}"
        self._answer = http.stream("GET", f"/streams/{reference.id}/events{query}", headers=headers)
        self._after = after
        self._data = bytearray()
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def until(self, seq: int) -> list[Frame]:
        """Wait until event `seq` has come; return all events so far."""
        async with asyncio.timeout(SECONDS):
            while not (frames := check_native_part(bytes(self._data), after=self._after)) or frames[-1].seq < seq:
                self._news.clear()
                await self._news.wait()
        return frames

    async def whole(self) -> list[Frame]:
        """Read to the end."""
        await self._reading
        return check_native(bytes(self._data), after=self._after)

    async def _read(self) -> None:
        async with self._answer as response:
            assert response.status_code == 200
            assert response.headers["streamserve-from"] == str(self._after + 1)
            async for piece in response.aiter_bytes():
                self._data += piece
                self._news.set()


async def test_resume_while_it_is_written(site: Site, http: httpx.AsyncClient, websocket: ClientConnection) -> None:
    """The engine is held in the middle: each reader gets all events so far, then all of the rest."""
    reference = await ask(http)
    begun = site.engine.hold()
    first = await asyncio.create_task(_begin(http))
    site.engine.held(begun + 1)
    site.engine.step(NUM_BEFORE)
    num_events = NUM_BEFORE + 1  # with `meta`
    running = Reference(first.id, await first.follower.until(num_events))
    readers = [
        Follower(http, running, after, by_id=by_id)
        for after in WHILE_RUNNING
        for by_id in (True, False)
        for _ in range(2)
    ]
    await websocket.send(json.dumps({"type": "resume", "id": running.id, "after": 3}))
    messages = events_of(websocket, running)
    seen = [await anext(messages) for _ in range(num_events - 3)]
    state = (await http.get(f"/streams/{running.id}")).json()
    assert (state["state"], state["last_seq"]) == ("running", num_events)
    for index, reader in enumerate(readers):
        after = WHILE_RUNNING[index // 4]
        if after < num_events:
            assert await reader.until(num_events) == running.frames[after:]
    site.engine.open()
    whole = await first.follower.whole()
    assert [frame.json for frame in whole[1:-1]] == [frame.json for frame in reference.frames[1:-1]]
    for index, reader in enumerate(readers):
        assert await reader.whole() == whole[WHILE_RUNNING[index // 4] :]
    seen += [message async for message in messages]
    assert [(one["event_id"], one["event"], one["data"]) for one in seen] == as_messages(whole[3:])
    print(f"\nresume while it is written: {len(readers)} readers and a WebSocket: all the same")


@dataclass(frozen=True)
class _Begun:
    id: str
    follower: Follower


async def _begin(http: httpx.AsyncClient) -> _Begun:
    """Start an answer, and follow it from its first event. Its first reader leaves; the second one holds it."""
    async with http.stream("POST", "/streams", json=question()) as response:
        stream_id = response.headers["x-stream-id"]
        follower = Follower(http, Reference(stream_id, []), 0, by_id=False)
        await follower.until(1)
    return _Begun(stream_id, follower)

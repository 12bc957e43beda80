"""Remote clients of our own endpoint, what they tell of an answer, and a way to it that is cut.

No token ids come over a remote. Compared are the blocks of every choice, how it ended, the log-probabilities of its
text, and the usage.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import pytest
import uvicorn

from streamserve.asgi import anyone, app
from streamserve.clients.base import EngineClient
from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import BlockStart, ChoiceDone, Done, Error, Event, Token, Usage
from streamserve.protocol.requests import GenerateRequest
from tests.proofs.support.pairs import ReceivedChoice
from tests.support.engines.clients import collect, until

_MARK = b'"delta"'  # stands once in each chunk of a chat


@dataclass(frozen=True, slots=True)
class Told:
    """What a client reads of an answer, or the field that it refuses.

    `choices`: of each its blocks (kind, name, text) and its end. `logprobs`: of each the tokens of its text and their
    candidates, with numbers that `assert_close` compares: they differ by rounding.
    """

    choices: tuple[tuple[tuple[tuple[str, str | None, str], ...], str | None], ...] = ()
    usage: Usage = field(default_factory=Usage)  # without what was cached and tried: that is no part of the answer
    logprobs: tuple[tuple[tuple[bytes, float], ...], ...] = field(default=(), compare=False)
    refused: str | None = None

    @property
    def kinds(self) -> set[str]:
        """The kinds of blocks that there are."""
        return {kind for kind, _ in self.texts}

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The kind and the text of each block of each choice."""
        return [(kind, text) for blocks, _ in self.choices for kind, _, text in blocks]


async def ask(client: EngineClient, request: GenerateRequest) -> Told:
    """Return what a client reads of the whole answer."""
    try:
        generation = await client.generate(request)
    except BadRequest as error:
        return Told(refused=error.param)
    return told(await collect(generation), request.n)  # type: ignore[arg-type]


def told(events: Iterable[Event], n: int) -> Told:
    """Return what these events, which end well, tell of an answer of `n` choices."""
    choices, usage = [ReceivedChoice()] * n, None
    logprobs: list[list[tuple[bytes, float]]] = [[] for _ in range(n)]
    for event in events:
        assert not isinstance(event, Error), event
        if isinstance(event, Token):
            choices[event.choice] = choices[event.choice].take(event)
            if choices[event.choice].blocks[event.index][0] == "text":
                ones = [one for position in event.logprobs or () for one in (position.chosen, *position.top)]
                logprobs[event.choice] += [(one.bytes_, max(one.logprob or 0.0, -9999.0)) for one in ones]
        elif isinstance(event, BlockStart):
            choices[event.choice] = choices[event.choice].begin(event)
        elif isinstance(event, ChoiceDone):
            choices[event.choice] = replace(choices[event.choice], finish_reason=event.finish_reason)
        elif isinstance(event, Done):
            none = {"cached_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
            usage = replace(event.usage, **none)
            if n == 1:
                choices[0] = replace(choices[0], finish_reason=event.finish_reason)
    assert usage is not None, "it ended without an end"
    ended = tuple((_blocks_of(one), one.finish_reason) for one in choices)
    return Told(ended, usage, tuple(map(tuple, logprobs)))


def assert_close(one: Told, other: Told) -> None:
    """The same tokens have the same log-probabilities, but for rounding."""
    for found, expected in zip(one.logprobs, other.logprobs, strict=True):
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert [number for _, number in found] == pytest.approx([number for _, number in expected], abs=1e-3)


def _blocks_of(choice: ReceivedChoice) -> tuple[tuple[str, str | None, str], ...]:
    """Return the blocks that have begun for a reader: an empty text is none."""
    blocks = (choice.blocks[index] for index in sorted(choice.blocks))
    return tuple(block for block in blocks if block[2] or block[0] == "tool_use")


@asynccontextmanager
async def endpoint(engine: EngineClient) -> AsyncIterator[int]:
    """Serve our routes by uvicorn on a thread and event loop of its own; yields the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    site = app(models={"proof": engine}, authenticate=anyone)
    server = uvicorn.Server(
        uvicorn.Config(site, log_config=None, access_log=False, timeout_graceful_shutdown=5, timeout_keep_alive=600)
    )
    thread = Thread(target=server.run, kwargs={"sockets": [listener]}, name="endpoint", daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()


@asynccontextmanager
async def remote(port: int, **fields: Any) -> AsyncIterator[RemoteClient]:
    """Start a remote client that has found the endpoint ready."""
    patient = {f"{name}_seconds": 600.0 for name in ("queue", "first_token", "silence")}
    client = RemoteClient(RemoteConfig(alias="proof", url=f"http://127.0.0.1:{port}/v1", **patient, **fields))
    try:
        client.start()
        await until(lambda: client.describe().state != "loading")
        assert client.describe().dtype == "streamserve"
        yield client
    finally:
        await client.aclose()


class Cutter:
    """A way to the endpoint that stops after so many chunks of the next answer: for good, or until `go_on` is set."""

    def __init__(self, target: int) -> None:
        self.go_on = asyncio.Event()
        self._target = target
        self._is_cut = False
        self._num_chunks: int | None = None  # of the next answer, before it is disturbed
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def disturb(self, *, is_cut: bool, num_chunks: int) -> None:
        """Cut the next answer, or hold it up, after `num_chunks`."""
        self.go_on.clear()
        self._is_cut, self._num_chunks = is_cut, num_chunks

    async def start(self) -> int:
        """Return the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there = await asyncio.open_connection("127.0.0.1", self._target)
        tasks = [
            asyncio.ensure_future(_copy(reader, there)),
            asyncio.ensure_future(self._answers(there_reader, writer)),
        ]
        self._tasks.update(tasks)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for one in (writer, there):
                one.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy what the endpoint says, up to the chunk where it is to be disturbed."""
        num_chunks = 0
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                most, now = self._num_chunks, data.count(_MARK)
                if most is not None and num_chunks + now > most:
                    self._num_chunks = None
                    at = _nth_last(data, _MARK, num_chunks + now - most)
                    writer.write(data[:at])
                    await writer.drain()
                    if self._is_cut:
                        return
                    await self.go_on.wait()
                    data = data[at:]
                num_chunks = 0 if most is None else num_chunks + now
                writer.write(data)
                await writer.drain()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


def _nth_last(data: bytes, mark: bytes, number: int) -> int:
    """Return where the `number`th last mark begins."""
    at = len(data)
    for _ in range(number):
        at = data.rindex(mark, 0, at)
    return at


def pairs(names: Sequence[str], together: Sequence[frozenset[str]]) -> list[tuple[str, str]]:
    """Return all pairs of names that may stand together: none of the sets in `together` has both."""
    return [
        (one, other)
        for number, one in enumerate(names)
        for other in names[number + 1 :]
        if not any({one, other} <= group for group in together)
    ]

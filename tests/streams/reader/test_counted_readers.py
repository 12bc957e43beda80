"""Laws of the counts of readers: who leaves before the answer, and who comes back, is counted once on any transport."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from streamserve.protocol.requests import Admission
from streamserve.streams.reader.follow import collect, follow
from streamserve.streams.reader.poll import Poll
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.streams.conftest import DONE, start
from tests.support.streams.deliveries import deliver
from tests.support.streams.hand_made import ScriptedClient, ask, tok, until

Read = Callable[[Streams, Stream], Awaitable[Any]]


async def over_http(streams: Streams, stream: Stream) -> None:
    """Read as a server that takes bytes has it sent."""

    async def send(data: bytes) -> None:
        """Take them."""

    await deliver(streams, stream).run(send)


async def over_a_socket(streams: Streams, stream: Stream) -> None:
    """Read events, as a WebSocket does."""
    events = follow(streams, stream)
    try:
        async for _ in events:
            pass
    finally:
        events.close()


async def by_long_poll(streams: Streams, stream: Stream) -> None:
    """Ask again and again."""
    poll = Poll.begin(streams, stream, 0)
    try:
        while not stream.ended.is_set():
            await poll.wait(60)
            poll.resume(stream.last_seq)
    finally:
        poll.close()


def counts(streams: Streams) -> tuple[int, int]:
    """Return how many readers left early, and how many came back."""
    of_model = streams.measures.of("scripted").readers
    return of_model.num_disconnects, of_model.num_resumes


@pytest.mark.parametrize("read", [over_http, over_a_socket, by_long_poll, collect])
async def test_a_reader_that_leaves_early_is_counted(streams: Streams, scripted: ScriptedClient, read: Read) -> None:
    """A connection that ends before its answer counts once; a connection that has all of it does not count."""
    stream = await start(streams)
    reading = asyncio.create_task(read(streams, stream))
    await until(lambda: stream.readers.num_holding == 1, "it reads")
    reading.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    assert counts(streams) == (1, 0)

    other = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    reading = asyncio.create_task(read(streams, other))
    await until(lambda: other.readers.num_holding == 1, "it reads")
    scripted.last.push(tok("a"), DONE)
    await reading
    assert counts(streams) == (1, 0)


async def test_a_reader_that_comes_back_is_counted(streams: Streams, scripted: ScriptedClient) -> None:
    """After an event that it has, or from the start of an answer that was left; a second reader beside it is new."""
    stream = await start(streams, on_disconnect="finish")
    first = deliver(streams, stream)
    first.reader.attach()
    beside = deliver(streams, stream)
    beside.reader.attach()
    assert counts(streams) == (0, 0)
    first.close()
    beside.close()
    assert counts(streams) == (2, 0)
    again = deliver(streams, stream)
    again.reader.attach()
    assert counts(streams) == (2, 1)
    later = deliver(streams, stream, after=1)
    later.reader.attach()
    assert counts(streams) == (2, 2)


async def test_a_watcher_and_a_server_that_stops_count_nothing(streams: Streams, scripted: ScriptedClient) -> None:
    """A watcher is no reader of the answer; a reader that this server sends away did not leave."""
    stream = await start(streams, on_disconnect="finish")
    watcher = deliver(streams, stream, watcher=True)
    watcher.reader.attach()
    watcher.close()
    for end in ("cut_off", "break_off", "go_away"):
        delivery = deliver(streams, stream)
        delivery.reader.attach()
        if end == "go_away":
            delivery.reader.go_away()
        elif end == "cut_off":
            delivery.cut_off()
        else:
            delivery.break_off(ConnectionError())
    assert counts(streams) == (0, 0)

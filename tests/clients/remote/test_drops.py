"""Laws of a stream over a remote client: a drop is continued where the server can do that, else it is an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from streamserve.clients.remote.client import RemoteClient
from streamserve.protocol.events import Done, Error, Event, Meta, Status, Token, Usage
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import Admission
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.servers.upstreams import (
    DONE,
    STREAM_HEAD,
    Asked,
    Upstream,
    chat,
    chunk,
    counts,
    delta,
    raw,
    remote,
    response,
    says,
    until,
    usage,
)

WORDS = ["The ", "quiet ", "river ", "runs ", "to ", "the ", "sea."]


async def goes_on(asked: Asked, writer: asyncio.StreamWriter, *, most: int = 99) -> bool:
    """Answer as a server that continues does: the words after those in the last message; break after `most`."""
    last = asked.body["messages"][-1]
    so_far = last["content"] if last["role"] == "assistant" else ""
    begun = next(number for number in range(len(WORDS) + 1) if "".join(WORDS[:number]) == so_far)
    words = WORDS[begun : begun + most]
    end = [delta(finish_reason="stop"), usage(10 + begun, len(WORDS) - begun), DONE]
    is_whole = begun + most >= len(WORDS)
    return bool(
        await says(*[delta(content=word) for word in words], *(end if is_whole else ()), whole=is_whole)(asked, writer)
    )


async def breaks(asked: Asked, writer: asyncio.StreamWriter) -> bool:
    return await goes_on(asked, writer, most=3)


@asynccontextmanager
async def serving(upstream: Upstream, **fields: Any) -> AsyncIterator[tuple[Streams, RemoteClient]]:
    async with remote(upstream, **fields) as client:
        streams = Streams({"m": client}, MemoryLog())
        try:
            yield streams, client
        finally:
            await streams.aclose()


async def start(streams: Streams, reader: Attachment | None = None, **fields: Any) -> Stream:
    request = chat(**fields)
    stream = await streams.start(request, Admission(owner="u1", tenant="t1", on_disconnect="park"))
    if reader is not None:
        stream.attach(reader)
    return stream


async def end_of(streams: Streams, stream: Stream) -> list[Event]:
    async with asyncio.timeout(60):
        await stream.ended.wait()
    events = [logged.event for logged in await streams.log.read(stream.log_id, 0)]
    check_events(events)
    return events


def words_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token))


async def test_a_drop_in_the_middle_is_continued() -> None:
    """The readers see the whole answer once, and that it waited; the counts are of the whole answer."""
    upstream = Upstream(breaks, breaks, goes_on)
    async with serving(upstream) as (streams, client):
        stream = await start(streams, Attachment(is_paced=False))
        events = await end_of(streams, stream)
        assert words_of(events) == "".join(WORDS)
        assert [event.status for event in events if isinstance(event, Status)] == ["waiting", "resumed"] * 2
        assert isinstance(events[0], Meta)
        assert events[0].has_token_ids is False
        done = events[-1]
        assert isinstance(done, Done)
        assert (done.finish_reason, done.usage) == (
            "stop", Usage(prompt_tokens=10, completion_tokens=7, cached_tokens=0)
        )  # fmt: skip
        found = counts(client)
        assert (found["lost"], found["continued"]) == (2, 2)
    contents = [asked.body["messages"][-1]["content"] for asked in upstream.posts]
    assert contents == ["Hello?", "The quiet river ", "The quiet river runs to the "]
    assert [asked.body["max_tokens"] for asked in upstream.posts] == [64, 61, 58]


async def test_a_server_that_does_not_continue_gives_an_honest_error() -> None:
    """The text so far stays, and the error says that the answer may be asked for again."""
    upstream = Upstream(breaks, owned_by="someone")
    async with serving(upstream) as (streams, _):
        events = await end_of(streams, await start(streams, Attachment(is_paced=False)))
    assert words_of(events) == "The quiet river "
    assert isinstance(events[-1], Error)
    assert (events[-1].code, events[-1].retryable) == ("cannot_continue", True)
    assert len(upstream.posts) == 1


@pytest.mark.parametrize("owned_by", ["vllm", "someone"])
async def test_a_drop_before_the_first_token_is_asked_again(owned_by: str) -> None:
    """Nothing was shown, so any server can begin anew."""
    upstream = Upstream(says(delta(role="assistant"), whole=False), goes_on, owned_by=owned_by)
    async with serving(upstream) as (streams, _):
        events = await end_of(streams, await start(streams, Attachment(is_paced=False)))
    assert words_of(events) == "".join(WORDS)
    assert len(upstream.posts) == 2


async def test_a_server_that_is_away_for_a_while_is_waited_for() -> None:
    """It refuses, and answers when it is back: the readers see that the answer waits."""
    busy = raw(response("503 Busy", b"", "Retry-After: 1"))
    upstream = Upstream(breaks, busy, goes_on)
    async with serving(upstream) as (streams, _):
        events = await end_of(streams, await start(streams, Attachment(is_paced=False)))
    assert words_of(events) == "".join(WORDS)
    assert len(upstream.posts) == 3


async def test_a_server_that_always_breaks_is_given_up() -> None:
    """After five losses without a new token the answer ends in an error."""
    upstream = Upstream(says(delta(role="assistant"), whole=False))
    async with serving(upstream) as (streams, _):
        events = await end_of(streams, await start(streams, Attachment(is_paced=False)))
    assert isinstance(events[-1], Error)
    assert events[-1].retryable
    assert len(upstream.posts) == 5


async def test_a_reader_that_leaves_parks_the_answer() -> None:
    """The connection is closed, so the server is free; the reader's return continues the text."""
    go = asyncio.Event()

    async def waits(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(chunk(delta(content=word)) for word in WORDS[:3]))
        await go.wait()

    upstream = Upstream(waits, goes_on)
    async with serving(upstream) as (streams, _):
        stream = await start(streams, reader := Attachment())
        await until(lambda: stream.last_seq == 4)
        stream.detach(reader)
        assert stream.state == "parked"
        async with asyncio.timeout(60):
            await upstream.gone[0].wait()
        stream.attach(Attachment(is_paced=False))
        events = await end_of(streams, stream)
    assert words_of(events) == "".join(WORDS)
    assert upstream.posts[1].body["messages"][-1] == {"role": "assistant", "content": "The quiet river "}


async def test_a_thought_is_not_parked_when_its_reader_leaves() -> None:
    """No server continues a thought, so its connection is kept, and the same answer goes on."""
    go = asyncio.Event()

    async def thinks(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta(reasoning_content="Hm")))
        await go.wait()
        for part in (delta(content="Yes."), delta(finish_reason="stop"), usage(), DONE):
            writer.write(chunk(part))
        writer.write(b"0\r\n\r\n")

    upstream = Upstream(thinks)
    async with serving(upstream) as (streams, _):
        stream = await start(streams, reader := Attachment())
        await until(lambda: stream.last_seq == 3)
        stream.detach(reader)
        assert stream.state == "running"
        go.set()
        stream.attach(Attachment(is_paced=False))
        events = await end_of(streams, stream)
    assert words_of(events) == "HmYes."
    assert len(upstream.posts) == 1

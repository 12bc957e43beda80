"""A directory over a scripted engine, and one over the echo engine; both closed after the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.events import Done, Event, Usage, is_terminal
from streamserve.protocol.requests import Admission
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.streams.hand_made import ScriptedClient, ask

DONE = Done(finish_reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=1))


@pytest.fixture
def scripted() -> ScriptedClient:
    """An engine that yields what the test scripts."""
    return ScriptedClient()


@pytest.fixture
async def streams(scripted: ScriptedClient) -> AsyncIterator[Streams]:
    """A directory whose only model is `scripted`."""
    streams = Streams({"scripted": scripted}, MemoryLog())
    yield streams
    await streams.aclose()


@pytest.fixture
async def echo_streams(echo: ThreadClient) -> AsyncIterator[Streams]:
    """A directory whose only model is `echo`."""
    streams = Streams({"echo": echo}, MemoryLog())
    yield streams
    await streams.aclose()


async def start(streams: Streams, **rest: object) -> Stream:
    """Start a stream on the scripted engine."""
    on_disconnect = str(rest.pop("on_disconnect", "park"))
    return await streams.start(ask("scripted", **rest), Admission(owner="u1", tenant="t1", on_disconnect=on_disconnect))


async def events_of(streams: Streams, stream: Stream) -> list[Event]:
    """Wait for the end and return every event, after checking that exactly the last one is an end."""
    async with asyncio.timeout(60):
        await stream.ended.wait()
    logged = await streams.log.read(stream.log_id, 0)
    assert [entry.seq for entry in logged] == list(range(1, len(logged) + 1))
    events = [entry.event for entry in logged]
    assert [event for event in events if is_terminal(event)] == events[-1:]
    assert stream.terminal is events[-1]
    assert stream.state == "finished"
    return events

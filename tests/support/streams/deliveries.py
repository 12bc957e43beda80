"""Deliveries of a scripted engine's streams."""

from __future__ import annotations

from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.events import Done
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.streams.hand_made import ScriptedClient, ask

DONE = Done(finish_reason="stop")
LONG = 3600.0


def serving(scripted: ScriptedClient, log: MemoryLog | None = None, **settings: float) -> Streams:
    return Streams({"scripted": scripted}, log or MemoryLog(), StreamConfig(**settings))


async def start(streams: Streams) -> Stream:
    return await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))


def deliver(streams: Streams, stream: Stream, after: int = 0, **rest: bool) -> Delivery:
    return Delivery(streams, stream, NativeEncoder(stream.log_id), after=after, **rest)


async def written(streams: Streams, scripted: ScriptedClient, *events: object) -> Stream:
    """Return a finished stream that holds `events`."""
    stream = await start(streams)
    scripted.last.push(*events)
    await stream.ended.wait()
    return stream

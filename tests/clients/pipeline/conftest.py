"""A site of one pipeline over the echo engine, and what its tests ask of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import pytest

from streamserve.clients.base import EngineClient
from streamserve.clients.pipeline.client import Pipeline, PipelineClient
from streamserve.clients.pipeline.run import Run
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.events import Event, Token
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import Admission, GenerateRequest, Message
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream

Function = Callable[[Run], Awaitable[Any]]
CHAT = (Message(role="user", content="Where is my bill?"),)
SHORT = {"max_tokens": 6, "seed": 3, "ignore_eos": True}


def asked(**fields: Any) -> GenerateRequest:
    return GenerateRequest(model="p", **({"messages": CHAT} | fields))


class Site:
    """Streams over the echo engine, and the pipeline `p` beside it."""

    def __init__(self, echo: EngineClient) -> None:
        self.echo = echo
        self.clients: dict[str, EngineClient] = {"echo": echo}
        self.streams = Streams(self.clients, MemoryLog(), StreamConfig(first_reader_seconds=60))

    def serve(self, function: Function, **options: Any) -> None:
        self.serve_pipeline(Pipeline(name="p", function=function, **options))

    def serve_pipeline(self, one: Pipeline) -> None:
        self.clients["p"] = PipelineClient(
            one,
            {"echo": self.echo},
            default_model="echo",
            memo_of=self.streams.memo_of,
            interrupts=self.streams.interrupts,
        )

    async def begin(self, **fields: Any) -> Stream:
        return await self.streams.start(asked(**fields), Admission(owner="u1", tenant="t1"))

    async def run(self, function: Function, filters: Any = (), **fields: Any) -> list[Event]:
        """Run a pipeline to its end; return its events, which keep the grammar."""
        self.serve(function, filters=filters)
        return await self.events(**fields)

    async def events(self, **fields: Any) -> list[Event]:
        """Run what is served to its end; return its events, which keep the grammar."""
        stream = await self.begin(**fields)
        async with aclosing(follow(self.streams, stream)) as reading:
            events = [logged.event async for logged in reading]
        check_events(events)
        return events


SiteT = TypeVar("SiteT", bound=Site)


@asynccontextmanager
async def closing(site: SiteT) -> AsyncIterator[SiteT]:
    """Close a site's streams and clients, but for the engine, which is the test's."""
    yield site
    await site.streams.aclose()
    for client in site.clients.values():
        if client is not site.echo:
            await client.aclose()


@pytest.fixture
async def site(echo: ThreadClient) -> AsyncIterator[Site]:
    async with closing(Site(echo)) as site:
        yield site


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Token))

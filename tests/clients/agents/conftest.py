"""A site whose only pipeline is an agent, and what its tests ask of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from streamserve.clients.agents.adapt import adapted
from streamserve.clients.pipeline.client import Pipeline, PipelineClient
from streamserve.clients.thread.client import ThreadClient
from streamserve.dialects.fold import Answer
from streamserve.protocol.events import Event
from streamserve.protocol.grammar import check_events
from streamserve.streams.reader.follow import follow
from tests.clients.pipeline.conftest import Site, text_of

__all__ = ["AgentSite", "blocks_of", "text_of"]


class AgentSite(Site):
    """Streams over the echo engine, and the agent `p` beside it."""

    def serve_agent(self, agent: Any, **options: Any) -> None:
        function = adapted(agent)
        assert function is not None
        one = Pipeline(name="p", function=function, is_agent=True, **options)
        self.clients["p"] = PipelineClient(
            one,
            {"echo": self.echo},
            default_model="echo",
            memo_of=self.streams.memo_of,
            interrupts=self.streams.interrupts,
        )

    async def run_agent(self, agent: Any, filters: Any = (), **fields: Any) -> list[Event]:
        """Run an agent to its end; return its events, which keep the grammar."""
        self.serve_agent(agent, filters=filters)
        stream = await self.begin(**fields)
        async with aclosing(follow(self.streams, stream)) as reading:
            events = [logged.event async for logged in reading]
        check_events(events)
        return events


@pytest.fixture
async def site(echo: ThreadClient) -> AsyncIterator[AgentSite]:
    site = AgentSite(echo)
    yield site
    await site.streams.aclose()
    for client in site.clients.values():
        if client is not echo:
            await client.aclose()


def blocks_of(events: list[Event]) -> list[tuple[str, str, str]]:
    """Return the blocks of an answer: kind, name, text."""
    answer = Answer()
    for event in events:
        answer.feed(event)
    return [(one.kind, one.block.name or "", one.text) for one in answer.choices[0].blocks]

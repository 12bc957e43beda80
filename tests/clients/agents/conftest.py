"""A site whose only pipeline is an agent, and what its tests ask of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from streamserve.clients.agents.adapt import adapted
from streamserve.clients.pipeline.client import Pipeline
from streamserve.clients.thread.client import ThreadClient
from streamserve.dialects.fold import Answer
from streamserve.protocol.events import Event
from tests.clients.pipeline.conftest import Site, closing, text_of

__all__ = ["AgentSite", "blocks_of", "text_of"]


class AgentSite(Site):
    """Streams over the echo engine, and the agent `p` beside it."""

    def serve_agent(self, agent: Any, **options: Any) -> None:
        function = adapted(agent)
        assert function is not None
        self.serve_pipeline(Pipeline(name="p", function=function, is_agent=True, **options))

    async def run_agent(self, agent: Any, filters: Any = (), **fields: Any) -> list[Event]:
        """Run an agent to its end; return its events, which keep the grammar."""
        self.serve_agent(agent, filters=filters)
        return await self.events(**fields)


@pytest.fixture
async def site(echo: ThreadClient) -> AsyncIterator[AgentSite]:
    async with closing(AgentSite(echo)) as site:
        yield site


def blocks_of(events: list[Event]) -> list[tuple[str, str, str]]:
    """Return the blocks of an answer: kind, name, text."""
    answer = Answer()
    for event in events:
        answer.feed(event)
    return [(one.kind, one.block.name or "", one.text) for one in answer.choices[0].blocks]

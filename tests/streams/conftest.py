"""A directory over a scripted engine, and one over the echo engine; both closed after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.registry import Streams
from tests.support.streams.hand_made import ScriptedClient


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

"""Two workers of one site over a held echo engine, and what their tests ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.events import Done
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.reader.follow import collect
from streamserve.streams.stream import Stream
from tests.support.checks.stream_checks import check_native, text_of
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, ask, until

NUM_TOKENS = 12
FINE = StreamConfig(coalesce_tokens=0)


@pytest.fixture
async def one(echo: ThreadClient, tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path, echo, FINE)
    yield worker
    await worker.aclose()


@pytest.fixture
async def two(echo: ThreadClient, tmp_path: Path) -> AsyncIterator[Worker]:
    worker = Worker(tmp_path, echo, FINE)
    yield worker
    await worker.aclose()


def asked(**fields: Any) -> GenerateRequest:
    return ask(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **fields})


async def quiet(worker: Worker, request: GenerateRequest) -> tuple[str, Done]:
    """Return text and end of an uninterrupted run."""
    stream = await worker.start(request)
    end = (await collect(worker.streams, stream))[-1].event
    assert isinstance(end, Done)
    return text_of(check_native(await worker.read(stream.id))), end


async def held(worker: Worker, gate: Gate, request: GenerateRequest, num_steps: int) -> tuple[Stream, Any]:
    """Start an answer whose engine is held after that many steps; return it and a task that reads it to its end."""
    gate.allow(num_steps)
    stream = await worker.start(request)
    reading = asyncio.create_task(worker.read(stream.id))
    await until(
        lambda: gate.is_holding and stream.last_seq > num_steps and stream.readers.num_holding == 1, "it is held"
    )
    return stream, reading


async def left(reading: asyncio.Task[bytes]) -> None:
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)

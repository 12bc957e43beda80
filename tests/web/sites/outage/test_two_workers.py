"""Two workers of a site, one of which has no room in its log for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.streams.config import StreamConfig
from streamserve.streams.stream import Stream
from tests.support.checks.stream_checks import Frame, check_native, check_native_part, text_of
from tests.support.sites.rows import in_row
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, ask, started_echo, until
from tests.support.streams.outages import FullFile
from tests.web.sites.outage.conftest import num_tokens

pytestmark = pytest.mark.django_db(transaction=True)

NUM_TOKENS = 60
FINE = StreamConfig(coalesce_tokens=0, log_outage_seconds=3600.0)


@pytest.fixture
async def gated() -> AsyncIterator[tuple[ThreadClient, Gate]]:
    gate = Gate()
    client = await started_echo(gate)
    yield client, gate
    gate.open()
    await client.aclose()


@pytest.fixture
async def one(gated: tuple[ThreadClient, Gate], tmp_path: Path, full: FullFile) -> AsyncIterator[Worker]:
    """The worker that has no room when `full` has begun."""
    worker = Worker(tmp_path, gated[0], FINE)
    await worker.log.aclose()
    worker.log = worker.streams.log = worker.streams.writer.log = full.log  # type: ignore[assignment]
    yield worker
    full.store.is_full = False
    gated[1].open()
    await worker.aclose()


@pytest.fixture
async def two(gated: tuple[ThreadClient, Gate], tmp_path: Path) -> AsyncIterator[Worker]:
    """A worker that has room."""
    worker = Worker(tmp_path, gated[0], FINE)
    yield worker
    gated[1].open()
    await worker.aclose()


async def held(worker: Worker, gate: Gate, full: FullFile) -> tuple[Stream, asyncio.Task[bytes]]:
    """Start an answer, and begin an outage in its middle, which it finds while the engine is held.

    Returns it and a task that reads it to its end.
    """
    gate.allow(4)
    stream = await worker.start(ask(max_tokens=NUM_TOKENS, ignore_eos=True))
    reading = asyncio.create_task(worker.read(stream.id))
    await until(lambda: stream.last_seq >= 3 and stream.readers.num_holding == 1, "it runs")
    await full.begin()
    gate.allow(1)
    await until(lambda: worker.streams.writer.outage is not None, "the outage is noticed")
    return stream, reading


async def cut_off(worker: Worker, gate: Gate, full: FullFile) -> tuple[Stream, list[Frame]]:
    """The same; the outage lasts, so that the reader is cut off. Returns the stream and what the reader has."""
    stream, reading = await held(worker, gate, full)
    worker.streams.writer._outage_seconds = 0.0
    seen = check_native_part(await reading)
    await until(lambda: not stream.lease.is_held, "its lease is released")
    return stream, seen


async def test_another_worker_resumes_what_was_cut(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile
) -> None:
    """The answer continues at the worker with room, in the middle of a word, before the first worker has room again."""
    gate = gated[1]
    stream, seen = await cut_off(one, gate, full)
    gate.open()
    rest = check_native(await two.read(stream.id, seen[-1].seq), after=seen[-1].seq)
    whole = check_native(await two.read(stream.id))
    assert text_of(whole) == text_of(seen + rest)
    assert num_tokens(whole) == NUM_TOKENS
    await full.end()
    await until(lambda: one.streams.writer.outage is None, "the first worker's batch is refused")
    assert check_native(await two.read(stream.id)) == whole
    await in_row(stream.id, state="finished", finish_reason="length")


async def test_an_early_reader_keeps_no_worker_away(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that returns to the worker without room is cut: that worker claims it in vain and releases it."""
    gate = gated[1]
    stream, seen = await cut_off(one, gate, full)
    one.streams.writer._outage_seconds = 3600.0
    full.store.refuses_claims = True
    fence = stream.lease.fence
    returned = asyncio.create_task(one.read(stream.id, seen[-1].seq))
    await until(lambda: stream.lease.fence > fence, "it is claimed")
    await until(lambda: stream.follower.away is not None, "the log does not take the claim")
    returned.cancel()
    await asyncio.gather(returned, return_exceptions=True)
    gate.open()
    rest = check_native(await two.read(stream.id, seen[-1].seq), after=seen[-1].seq)
    assert num_tokens(seen + rest) == NUM_TOKENS


@pytest.mark.parametrize("is_back", [True, False])
async def test_a_server_stops_during_an_outage(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile, is_back: bool
) -> None:
    """The answer is left at once, with what was shown, and the next process continues it."""
    gate = gated[1]
    stream, reading = await held(one, gate, full)
    gate.open()
    one.streams.shut_down()
    seen = check_native_part(await reading)
    assert stream.has_left
    assert seen[-1].event != "done"
    if is_back:
        await full.end()
    await one.streams.aclose()
    whole = check_native(await two.read(stream.id))
    assert text_of(whole).startswith(text_of(seen))
    assert num_tokens(whole) == NUM_TOKENS


async def test_another_worker_stops_a_stream_during_an_outage(
    one: Worker, two: Worker, gated: tuple[ThreadClient, Gate], full: FullFile
) -> None:
    """The other worker's end is in the log first: the batch in doubt is refused, and the reader here gets the end."""
    gate = gated[1]
    stream, reading = await held(one, gate, full)
    there = await two.streams.reach(stream.id)
    assert there is not None
    await there.stop()
    await full.end()
    frames = check_native(await reading)
    assert frames[-1].json["finish_reason"] == "cancelled"
    gate.open()
    assert check_native(await two.read(stream.id)) == frames
    await in_row(stream.id, state="finished", finish_reason="cancelled")

"""Laws of watchers: a stream takes no notice of them. Two workers share a database and a log; the engine is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.dialects.native import NativeEncoder
from streamserve.models import Stream as StreamRow
from streamserve.protocol.events import Done
from streamserve.streams.config import StreamConfig
from streamserve.streams.reader.delivery import Delivery
from tests.support.checks.stream_checks import check_native, text_of
from tests.support.engines.runners import DEADLINE_SECONDS
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, ask, until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def make_worker(echo: ThreadClient, tmp_path: Path) -> AsyncIterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(**settings: Any) -> Worker:
        made.append(Worker(tmp_path, echo, StreamConfig(coalesce_tokens=0, first_reader_seconds=60, **settings)))
        return made[-1]

    yield make
    for worker in made:
        await worker.aclose()


async def watched(worker: Worker, stream_id: str) -> bytes:
    """Watch to the end."""
    stream = await worker.streams.reach(stream_id)
    assert stream is not None
    delivery = Delivery(worker.streams, stream, NativeEncoder(stream.log_id), watcher=True)
    return b"".join([piece async for piece in delivery])


@pytest.mark.parametrize("on_disconnect", ["park", "abort"])
async def test_a_stream_with_watchers_alone_is_abandoned(
    make_worker: Callable[..., Worker], gate: Gate, on_disconnect: str
) -> None:
    """The stream is not made further and not claimed, and watchers read its abandoned end, at any worker."""
    one, two = make_worker(resume_window_seconds=1), make_worker()
    gate.allow(4)
    stream = await one.start(ask(max_tokens=500, ignore_eos=True), on_disconnect=on_disconnect)
    reading = asyncio.create_task(one.read(stream.id))
    watching = [asyncio.create_task(watched(worker, stream.id)) for worker in (one, two)]
    await until(lambda: gate.is_holding and stream.readers.num_attached == 2 and stream.last_seq > 4, "it is held")
    await until(lambda: two.streams.find(stream.id) is not None, "it is followed")
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    num_plans = len(gate.plans)
    gate.open()
    late = asyncio.create_task(watched(two, stream.id))
    here, there, later = [check_native(data) for data in await asyncio.gather(*watching, late)]
    assert here == there == later
    assert here[-1].json["finish_reason"] == "abandoned"
    assert len(gate.plans) == num_plans  # the step that was held, and none after it
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await StreamRow.objects.filter(pk=stream.id, finish_reason="abandoned").aexists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not two.streams.find(stream.id).lease.is_held


async def test_a_watcher_does_not_move_the_lead(make_worker: Callable[..., Worker], gate: Gate) -> None:
    """A watcher that read all does not lift the lead of an owner that has not; a slow watcher parks nothing."""
    worker = make_worker()
    gate.allow(6)
    stream = await worker.start(ask(max_tokens=20, ignore_eos=True))
    owner = Delivery(worker.streams, stream, NativeEncoder(stream.log_id))
    pieces = aiter(owner)
    await anext(pieces)  # `: ok`; it takes nothing further
    watching = asyncio.create_task(watched(worker, stream.id))
    await until(lambda: stream.readers.num_watchers == 1 and stream.last_seq > 6, "the watcher is there")
    [watcher] = [one for one in stream.readers.attached if one.is_watcher]
    await until(lambda: watcher.received_seq == stream.last_seq and gate.is_holding, "it has all there is")
    assert stream.lag.reader_tokens == (0,)
    assert stream.lag.num_unread == stream.transcript.num_tokens
    idle = Delivery(worker.streams, stream, NativeEncoder(stream.log_id), watcher=True)
    slow_pieces = aiter(idle)
    await anext(slow_pieces)  # and never again
    gate.open()
    text = text_of(check_native(b"".join([piece async for piece in pieces])))
    assert text_of(check_native(await watching)) == text
    await stream.ended.wait()
    end = stream.terminal
    assert isinstance(end, Done)
    assert (end.usage.completion_tokens, stream.engine.parking.num_parks) == (20, 0)
    await slow_pieces.aclose()

"""Laws of streams that two workers share, on one database and one log: read and resumed by both, written by one."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import QuotaExceeded, UnmetNeeds
from streamserve.protocol.events import Done, LoggedEvent, Status
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Admission
from streamserve.rows.store import record_of
from streamserve.streams.reader.follow import follow
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from tests.rows.conftest import FINE, NUM_TOKENS, asked, held, left, quiet
from tests.support.checks.stream_checks import check_native, check_native_part, going_away_of, text_of
from tests.support.sites.rows import in_row
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, until

pytestmark = pytest.mark.django_db(transaction=True)


async def test_leaving_one_worker_for_the_other_at_every_event(one: Worker, two: Worker, gate: Gate) -> None:
    """What is read here up to any event, and there after it, is the uninterrupted text, for each of two readers."""
    reference, reference_end = await quiet(one, asked())
    for cut in range(1, NUM_TOKENS + 1):
        gate.allow(cut)
        stream = await one.start(asked())
        first = check_native_part(await one.read(stream.id, 0, cut))[:cut]
        gate.open()
        for _ in range(2):
            pair = await asyncio.gather(*(two.read(stream.id, cut) for _ in range(2)))
            for rest in pair:
                assert text_of(first + check_native(rest, after=cut)) == reference
        end = two.streams.find(stream.id).terminal
        assert isinstance(end, Done)
        assert (end.finish_reason, end.usage.completion_tokens) == ("length", reference_end.usage.completion_tokens)
        await in_row(stream.id, state="finished", completion_tokens=NUM_TOKENS)


async def test_replay_from_every_seq_by_the_other_worker(one: Worker, two: Worker) -> None:
    """A finished stream has the same events at the other worker, and its row stays as it was written."""
    stream = await one.start(asked())
    full = check_native(await one.read(stream.id))
    await in_row(stream.id, state="finished")
    for after in range(stream.last_seq):
        for data in await asyncio.gather(*(two.read(stream.id, after) for _ in range(2))):
            assert check_native(data, after=after) == full[after:]


async def test_a_reader_at_the_other_worker_follows_live(one: Worker, two: Worker, gate: Gate) -> None:
    """While the first worker writes, the second claims nothing, and both readers have the same."""
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    other = asyncio.create_task(two.read(stream.id))
    await until(lambda: two.streams.find(stream.id) is not None, "it is found")
    shadow = two.streams.find(stream.id)
    assert (shadow.state, shadow.lease.is_held, shadow.is_live) == ("running", False, False)
    await asyncio.sleep(1.2)  # it has polled again by now
    gate.open()
    here, there = [check_native(data) for data in await asyncio.gather(reading, other)]
    assert here == there
    assert stream.lease.fence == 1
    assert stream.engine.parking.num_parks == 0


async def test_the_other_worker_resumes_when_the_first_has_no_reader(one: Worker, two: Worker, gate: Gate) -> None:
    """The lease is released, the stream resumes at the reader's worker, and the reader sees one `resumed` at most."""
    reference, _ = await quiet(one, asked(max_tokens=30))
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    other = asyncio.create_task(two.read(stream.id))
    await until(lambda: two.streams.find(stream.id) is not None, "it is found")
    await left(reading)
    gate.open()
    frames = check_native(await other)
    assert text_of(frames) == reference
    assert two.streams.find(stream.id).lease.fence == 2
    assert [frame.json["status"] for frame in frames if frame.event == "status"] == ["resumed"]
    assert stream.state == "parked"  # a stale value: the next read of the stream polls the row
    assert (await one.streams.reach(stream.id)).state == "finished"


async def test_a_reader_alternates_between_workers(one: Worker, two: Worker, gate: Gate) -> None:
    """A reader that changes workers after every event loses nothing; each worker finds what the other wrote."""
    reference, _ = await quiet(one, asked())
    gate.allow(1)
    stream = await one.start(asked())
    seen: list[Any] = []
    turn = 0
    while not seen or not isinstance(seen[-1].event, Done):
        worker = (one, two)[turn % 2]
        turn += 1
        found = await worker.streams.reach(stream.id)
        gate.allow(2)
        async with aclosing(follow(worker.streams, found, seen[-1].seq if seen else 0)) as events:
            async for logged in events:
                seen.append(logged)
                if not isinstance(logged.event, Status):
                    break
    gate.open()
    assert [logged.seq for logged in seen] == list(range(1, len(seen) + 1))
    assert "".join(getattr(logged.event, "text", "") for logged in seen) == reference
    await in_row(stream.id, state="finished")


async def test_a_worker_that_only_seems_dead_cannot_write(one: Worker, two: Worker, gate: Gate) -> None:
    """The other worker resumes; the log refuses what the first still makes, and its reader follows to the same end."""
    reference, _ = await quiet(one, asked(max_tokens=30))
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    one.release_lock()
    other = asyncio.create_task(two.read(stream.id))
    await until(lambda: getattr(two.streams.find(stream.id), "lease", stream.lease).fence == 2, "it is claimed")
    gate.open()
    here, there = [check_native(data) for data in await asyncio.gather(reading, other)]
    assert text_of(here) == text_of(there) == reference
    await in_row(stream.id, state="finished", completion_tokens=30, fence=2)  # the row is written after the last event


async def test_stop_from_the_other_worker(one: Worker, two: Worker, gate: Gate) -> None:
    """Stop cuts the stream where its user stopped reading, and frees the engine at once or with its next token."""
    stream, reading = await held(one, gate, asked(max_tokens=500), 6)
    found = await two.streams.reach(stream.id)
    stopping = asyncio.create_task(found.stop(4))
    await asyncio.wait_for(stopping, 60)
    assert isinstance(found.terminal, Done)
    assert (found.terminal.finish_reason, found.terminal.kept_seq) == ("cancelled", 4)
    gate.open()
    frames = check_native(await asyncio.wait_for(reading, 60))
    assert frames[-1].json["finish_reason"] == "cancelled"
    await until(lambda: one.streams.find(stream.id).terminal is not None, "the first has its end")
    await in_row(stream.id, state="finished", finish_reason="cancelled")
    await found.stop(2)
    assert found.terminal.kept_seq == 4


@pytest.mark.cut_streams("the worker stops")
async def test_a_worker_that_stops_leaves_its_streams(one: Worker, two: Worker, gate: Gate) -> None:
    """Readers get a going-away event and their connections end; the other worker resumes at once."""
    reference, _ = await quiet(one, asked(max_tokens=30))
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    closing = asyncio.create_task(one.streams.aclose())
    await until(lambda: stream.has_left, "it is cut")
    gate.open()
    await closing
    data = await reading
    first = check_native_part(data)
    assert going_away_of(data) is not None
    rest = check_native(await two.read(stream.id, first[-1].seq), after=first[-1].seq)
    assert text_of(first + rest) == reference


@pytest.mark.cut_streams("the worker stops")
async def test_an_end_that_is_read_late_is_no_fault(
    one: Worker, two: Worker, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker stops while a request of it reads the end that the other one has written."""
    stream, reading = await held(one, gate, asked(), 2)
    found = await two.streams.reach(stream.id)
    assert found is not None
    gate.open()
    await reading
    read, has_read, may_return = two.log.read, asyncio.Event(), asyncio.Event()

    async def read_slowly(log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        page = await read(log_id, after, limit)
        has_read.set()
        await may_return.wait()
        return page

    monkeypatch.setattr(two.log, "read", read_slowly)
    reaching = asyncio.create_task(two.streams.reach(stream.id))
    await has_read.wait()
    found.shut_down()
    async with asyncio.timeout(60):
        await found.ended.wait()
        may_return.set()
        assert await reaching is found
    assert isinstance(found.terminal, Done)


def needing_canvas(kept: dict[str, Any], **fields: str) -> dict[str, Any]:
    return {**kept, "request": {**kept["request"], "needs": ["canvas"], **fields}}


@pytest.mark.cut_streams("the reader leaves")
async def test_a_worker_that_lacks_what_a_request_needs_keeps_it(one: Worker, two: Worker, gate: Gate) -> None:
    """An older worker shows a newer one's stream, but does not resume it without what it needs, nor end it."""
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    row = await StreamRow.objects.aget(pk=stream.id)
    await StreamRow.objects.filter(pk=stream.id).aupdate(request=needing_canvas(row.request, canvas="x"))
    assert check_native_part(await two.read(stream.id, 0, 3))[-1].seq >= 3
    record = record_of(await StreamRow.objects.aget(pk=stream.id))
    assert record.request is None
    assert isinstance(record.refusal, UnmetNeeds)
    gate.open()
    check_native(await reading)
    await in_row(stream.id, state="finished", completion_tokens=30)


async def test_an_unmet_need_is_no_end(one: Worker, two: Worker, gate: Gate) -> None:
    """When the newer worker has died, the older one's reader waits: the stream does not end with an error."""
    stream, reading = await held(one, gate, asked(max_tokens=30), 4)
    await left(reading)
    row = await StreamRow.objects.aget(pk=stream.id)
    await StreamRow.objects.filter(pk=stream.id).aupdate(request=needing_canvas(row.request))
    one.release_lock()
    reading = asyncio.create_task(two.read(stream.id))
    await until(lambda: two.streams.find(stream.id) is not None, "the older worker has it")
    found = two.streams.find(stream.id)
    assert found is not None
    await until(
        lambda: found.terminal is not None or found.engine.parking._refused_at is not None, "the engine has answered"
    )
    assert found.terminal is None
    await left(reading)
    gate.open()


async def test_a_stream_without_a_returning_reader_is_abandoned(one: Worker, two: Worker, gate: Gate) -> None:
    """A dead worker's stream has the resume window from when that is noticed; then any worker ends it as abandoned."""
    stream, reading = await held(one, gate, asked(max_tokens=500), 4)
    await left(reading)
    await in_row(stream.id, producer="")
    await StreamRow.objects.filter(pk=stream.id).aupdate(producer=f"{one.workers.host}-dead", released_at=None)
    await two.reaper.round()
    await in_row(stream.id, producer="", released_at__isnull=False, state="running")
    await two.reaper.round()
    assert two.streams.find(stream.id).terminal is None
    await StreamRow.objects.filter(pk=stream.id).aupdate(released_at=timezone.now() - timedelta(seconds=601))
    await two.reaper.round()
    await in_row(stream.id, state="finished", finish_reason="abandoned", request__isnull=True)
    gate.open()


async def test_a_finish_stream_is_finished(one: Worker, two: Worker, gate: Gate) -> None:
    """When the worker of an `on_disconnect="finish"` stream dies, another makes the rest without a reader."""
    gate.allow(3)
    stream = await one.start(asked(max_tokens=40), on_disconnect="finish")
    await until(lambda: gate.is_holding, "the engine is held")
    one.release_lock()
    await two.reaper.round()
    await until(lambda: two.streams.find(stream.id) is not None, "it is found")
    gate.open()
    await in_row(stream.id, state="finished", finish_reason="length", completion_tokens=40)


async def test_a_stream_without_its_log_is_over(one: Worker, two: Worker, gate: Gate) -> None:
    """A stream without its log cannot be resumed: readers get 410, and its row has the reason."""
    stream, reading = await held(one, gate, asked(max_tokens=500), 4)
    await left(reading)
    await in_row(stream.id, producer="")
    await two.log.drop(stream.log_id)
    assert await two.streams.reach(stream.id) is None
    await StreamRow.objects.filter(pk=stream.id).aupdate(released_at=timezone.now() - timedelta(days=1))
    await two.reaper.round()
    await in_row(stream.id, state="finished", error_code="producer_lost")
    gate.open()


async def test_a_quota_counts_what_other_workers_run(one: Worker, two: Worker, gate: Gate) -> None:
    """A quota counts streams that no worker runs too, and ends the oldest of them first."""
    gate.allow(0)
    read, left = await one.start(asked()), await one.start(asked())
    reader = Attachment()
    read.attach(reader)
    bounded = Streams(two.streams.clients, two.log, FINE, store=two.store, limits=Limits(max_streams_per_principal=2))
    with pytest.raises(QuotaExceeded):
        await bounded.start(asked(), Admission(owner="user:1", tenant="user:1"))
    left.attach(other := Attachment())
    left.detach(other)
    await until(lambda: not left.lease.is_held, "no worker runs it")
    newcomer = await bounded.start(asked(), Admission(owner="user:1", tenant="user:1"))
    await in_row(left.id, state="finished", finish_reason="abandoned")
    assert (read.terminal, newcomer.terminal) == (None, None)
    read.detach(reader)
    gate.open()
    await bounded.aclose()

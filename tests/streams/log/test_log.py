"""Laws of every log: in memory, in a file, in Redis."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamserve.protocol.events import Done, Error, Event, Meta, PositionLogprobs, Status, Token, TokenLogprob
from streamserve.streams.log.base import (
    UNFINISHED_SECONDS,
    Ended,
    Fenced,
    LogLost,
    MemoryLog,
    append,
    make_batch,
    new_log_id,
)
from tests.support.streams.hand_made import tok
from tests.support.streams.logs import MakeLog, everything, make_log, numbered, redis_server

__all__ = ["make_log", "redis_server"]

_DEADLINE_SECONDS = 60.0


async def test_events_are_numbered_densely_from_one(make_log: MakeLog) -> None:
    """Seqs continue from append to append; `after` and `limit` cut exactly."""
    log, log_id = make_log(), new_log_id()
    assert await append(log, log_id, 1, [tok("x"), tok("y")]) == 2
    assert await append(log, log_id, 1, [tok("z")]) == 3
    assert await log.read(log_id, 1) == numbered([tok("y"), tok("z")], 2)
    assert [entry.seq for entry in await log.read(log_id, 0, limit=2)] == [1, 2]
    assert await log.read(log_id, 3) == []
    assert await log.last_seq(log_id) == 3


async def test_another_process_reads_the_same(make_log: MakeLog) -> None:
    """A second process reads every acknowledged event, from every seq, at any page size."""
    ours, theirs, log_id = make_log(), make_log(), new_log_id()
    events = [tok(f"{number} ") for number in range(40)]
    for start in (0, 1, 4, 5, 25):
        end = {0: 1, 1: 4, 4: 5, 5: 25, 25: 40}[start]
        assert await append(ours, log_id, 1, events[start:end]) == end
    for log in (ours, theirs):
        assert await log.last_seq(log_id) == 40
        for after in range(41):
            assert await log.read(log_id, after) == numbered(events)[after:]
        for page in (1, 3, 39):
            assert await everything(log, log_id, page) == numbered(events)


async def test_every_event_comes_back_as_it_was(make_log: MakeLog) -> None:
    """Every kind of event comes back with all its fields."""
    logprob = TokenLogprob(token_id=7, token="", bytes_=b"\xf0\x9f", logprob=float("-inf"))
    position = PositionLogprobs(chosen=logprob, top=(logprob,))
    events: list[Event] = [
        Meta(model="m", stream_id="s", created=1, prompt_tokens=5),
        Status(status="queued", step=1, of=2, message="\x00\u2028\r\n"),
        Token(text="é👩‍👩‍👧", token_ids=(1, 2), choice=1, logprobs=(position,)),
        Done(finish_reason="stop", latency=0.25, breakdown={"ttft": 0.1}, kept_seq=2),
    ]
    log_id = new_log_id()
    await append(make_log(), log_id, 1, events)
    assert await everything(make_log(), log_id) == numbered(events)


async def test_a_stale_producer_is_fenced(make_log: MakeLog) -> None:
    """Once a later fence has written, an earlier one is refused in every process."""
    ours, theirs, log_id = make_log(), make_log(), new_log_id()
    await append(ours, log_id, 1, [tok("x")])
    assert await append(theirs, log_id, 2, [tok("y")]) == 2
    for log in (ours, theirs):
        with pytest.raises(Fenced):
            await append(log, log_id, 1, [tok("z")])
    assert await append(ours, log_id, 3, [tok("w")]) == 3
    with pytest.raises(Fenced):
        await append(theirs, log_id, 2, [tok("z")])
    assert await everything(theirs, log_id) == numbered([tok("x"), tok("y"), tok("w")])


async def test_a_claim_fences_without_an_event(make_log: MakeLog) -> None:
    """A claim without events sets the fence and returns the last seq; nothing is written."""
    ours, theirs, log_id = make_log(), make_log(), new_log_id()
    await append(ours, log_id, 1, [tok("x")])
    assert await append(theirs, log_id, 2, []) == 1
    with pytest.raises(Fenced):
        await append(ours, log_id, 1, [tok("y")])
    assert await everything(ours, log_id) == numbered([tok("x")])


async def test_a_log_that_is_not_there_cannot_be_claimed(make_log: MakeLog) -> None:
    """A claim of an unknown log raises and creates no log."""
    log, log_id = make_log(), new_log_id()
    with pytest.raises(KeyError):
        await append(log, log_id, 1, [])
    with pytest.raises(KeyError):
        await log.last_seq(log_id)


@pytest.mark.parametrize("terminal", [Done(finish_reason="stop"), Error(code="timeout", message="late")])
async def test_nothing_follows_a_terminal_event(make_log: MakeLog, terminal: Event) -> None:
    """An append to an ended log raises with any fence; a claim returns where the log ended."""
    ours, theirs, log_id = make_log(), make_log(), new_log_id()
    await append(ours, log_id, 1, [tok("x"), terminal])
    for log in (ours, theirs):
        with pytest.raises(Ended):
            await append(log, log_id, 2, [terminal])
    assert await append(theirs, log_id, 2, []) == 2
    with pytest.raises(Ended):
        await append(theirs, log_id, 2, [tok("y")])
    assert await everything(theirs, log_id) == numbered([tok("x"), terminal])


@pytest.mark.parametrize("what", ["append", "wake", "drop"])
async def test_waiting_readers_are_woken(make_log: MakeLog, what: str) -> None:
    """A commit, `wake` and the loss of the log each end a wait."""
    log, log_id = make_log(), new_log_id()
    await append(log, log_id, 1, [tok("x")])
    waiting = [asyncio.create_task(log.wait(log_id, 1)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    if what == "append":
        await append(log, log_id, 1, [tok("y")])
    elif what == "drop":
        await log.drop(log_id)
    else:
        log.wake(log_id)
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await asyncio.gather(*waiting)


async def test_commits_of_another_stream_end_no_wait(make_log: MakeLog) -> None:
    """A wait past the end continues when another stream's events come."""
    log, log_id, other_id = make_log(), new_log_id(), new_log_id()
    await append(log, log_id, 1, [tok("x")])
    await append(log, other_id, 1, [tok("x")])
    await _still(log.wait(log_id, 1))
    waiting = asyncio.create_task(log.wait(log_id, 1))
    await asyncio.sleep(0)
    for _ in range(20):
        await append(log, other_id, 1, [tok("y")])
    await asyncio.sleep(0.2)
    assert not waiting.done()
    waiting.cancel()
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await log.wait(log_id, 0)


async def test_appends_of_another_process_wake_all_waits(make_log: MakeLog) -> None:
    """Another process's appends and drops wake every waiting reader here, also one that came while it was quiet."""
    ours, theirs = make_log(), make_log()
    log_ids = [new_log_id() for _ in range(10)]
    for log_id in log_ids:
        await append(theirs, log_id, 1, [tok("x")])
    readers = [asyncio.create_task(_read_to(ours, log_id, 3)) for log_id in log_ids]
    for _ in range(2):
        await asyncio.sleep(0.15)
        for log_id in log_ids:
            await append(theirs, log_id, 1, [tok("y")])
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await asyncio.gather(*readers)
    waiting = [asyncio.create_task(_read_to(ours, log_id, 4)) for log_id in log_ids]
    await asyncio.sleep(0.15)
    for log_id in log_ids:
        await theirs.drop(log_id)
    async with asyncio.timeout(_DEADLINE_SECONDS):
        assert {type(one) for one in await asyncio.gather(*waiting, return_exceptions=True)} <= {KeyError}


async def test_a_wait_after_an_append_returns_at_once(make_log: MakeLog) -> None:
    """An append of another process before `wait` counts, also when it was already noticed for another reader."""
    ours, theirs, quiet_id, log_id = make_log(), make_log(), new_log_id(), new_log_id()
    await append(theirs, quiet_id, 1, [tok("x")])
    await _still(ours.wait(quiet_id, 1))
    others = asyncio.create_task(_read_to(ours, quiet_id, 2))
    await append(theirs, log_id, 1, [tok("x"), tok("y")])
    await asyncio.sleep(0.3)
    async with asyncio.timeout(_DEADLINE_SECONDS):
        await ours.wait(log_id, 1)
    others.cancel()


async def test_what_is_gone_raises_and_is_not_waited_for(make_log: MakeLog) -> None:
    """A dropped log is unknown in every process, and a wait for it ends."""
    log, log_id = make_log(), new_log_id()
    await append(log, log_id, 1, [tok("x")])
    await log.drop(log_id)
    for one in (log, make_log()):
        with pytest.raises(KeyError):
            await one.read(log_id, 0)
        async with asyncio.timeout(_DEADLINE_SECONDS):
            await one.wait(log_id, 1)
    await log.drop(log_id)


async def test_purge_deletes_finished_logs_without_an_append_since(make_log: MakeLog) -> None:
    """`purge` deletes finished logs without an append since, returns their number, and keeps the rest."""
    log, end = make_log(), Done(finish_reason="stop")
    await log.purge(time.time() + 2 * UNFINISHED_SECONDS)
    log_ids = [new_log_id() for _ in range(120)]
    await asyncio.gather(*[append(log, log_id, 1, [tok("x")] * 3 + [end]) for log_id in log_ids])
    assert await log.purge(time.time() - 3600) == 0
    assert await everything(log, log_ids[0]) == numbered([tok("x")] * 3 + [end])
    assert await log.old(time.time() - 3600) == []
    assert sorted(await make_log().old(time.time() + 3600)) == sorted(log_ids)
    assert await make_log().purge(time.time() + 3600) == 120
    for log_id in log_ids:
        with pytest.raises(KeyError):
            await make_log().last_seq(log_id)


async def test_an_unfinished_log_outlives_the_retention(make_log: MakeLog) -> None:
    """An unfinished log is deleted only after a day without an append, because a reader may be that slow."""
    log, log_id = make_log(), new_log_id()
    await log.purge(time.time() + 2 * UNFINISHED_SECONDS)
    await append(log, log_id, 1, [tok("x")])
    assert await log.purge(time.time() + 3600) == 0
    assert await log.old(time.time() + 3600) == []
    assert await append(log, log_id, 1, [tok("y")]) == 2
    assert await log.old(time.time() + UNFINISHED_SECONDS + 3600) == [log_id]
    assert await log.purge(time.time() + UNFINISHED_SECONDS + 3600) == 1


async def test_a_batch_that_is_retried_is_committed_once(make_log: MakeLog) -> None:
    """The same batch from any process has its first result, also when it ends the log."""
    ours, theirs, log_id = make_log(), make_log(), new_log_id()
    first = make_batch(log_id, 1, 0, [tok("x"), tok("y")])
    last = make_batch(log_id, 1, 2, [Done(finish_reason="stop")])
    for batch, end in ((first, 2), (last, 3)):
        for log in (ours, ours, theirs):
            assert await log.commit([batch]) == [end]
    assert len(await everything(theirs, log_id)) == 3


async def test_a_batch_that_does_not_follow_is_refused(make_log: MakeLog) -> None:
    """After a log that ends earlier a batch is lost; after one that went further it is fenced; nothing is written."""
    log, log_id = make_log(), new_log_id()
    batches = [make_batch(log_id, 1, 3, [tok("z")]), make_batch(log_id, 1, 0, [tok("x")])]
    lost, made = await log.commit(batches)
    assert (type(lost), made) == (LogLost, 1)
    await append(log, log_id, 1, [tok("y")] * 3)
    results = await log.commit([make_batch(log_id, 1, base, [tok("z")] * 2) for base in (5, 1)])
    assert [type(result) for result in results] == [LogLost, Fenced]
    assert await log.last_seq(log_id) == 4


async def test_many_streams_at_once_keep_apart(make_log: MakeLog) -> None:
    """Group commit mixes the appends of many streams, but never their events."""
    log, log_ids = make_log(), [new_log_id() for _ in range(40)]

    async def write(log_id: str) -> None:
        for number in range(15):
            assert await append(log, log_id, 1, [tok(f"{log_id} {number}")]) == number + 1

    await asyncio.gather(*map(write, log_ids))
    other = make_log()
    for log_id in log_ids:
        assert await everything(other, log_id) == numbered([tok(f"{log_id} {number}") for number in range(15)])


async def test_a_refusal_costs_only_its_append(make_log: MakeLog) -> None:
    """A fenced append in a commit leaves the other appends of that commit whole."""
    log, log_ids = make_log(), [new_log_id() for _ in range(9)]
    await asyncio.gather(*[append(log, log_id, 2, [tok("x")]) for log_id in log_ids])
    fences = [1 if number % 3 == 0 else 2 for number in range(9)]
    both = zip(log_ids, fences, strict=True)
    results = await asyncio.gather(
        *[append(log, log_id, fence, [tok("y")]) for log_id, fence in both], return_exceptions=True
    )
    assert [result if isinstance(result, int) else type(result) for result in results] == [Fenced, 2, 2] * 3
    assert [await log.last_seq(log_id) for log_id in log_ids] == [1, 2, 2] * 3


async def test_a_cancelled_commit_is_whole_or_not_there(make_log: MakeLog) -> None:
    """A batch cancelled at any moment and appended again is in the log once."""
    log, log_id = make_log(), new_log_id()
    await append(log, log_id, 1, [tok("start")])
    texts = ["start"]
    for number in range(60):
        words = [f"{number} {part}" for part in range(3)]
        batch = make_batch(log_id, 1, len(texts), list(map(tok, words)))
        task = asyncio.ensure_future(log.commit([batch]))
        for _ in range(number % 6):
            await asyncio.sleep(0)
        if number % 5 == 0:
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.wait([task])
        texts += words
        assert await log.commit([batch]) == [len(texts)]
    found = await everything(make_log(), log_id)
    assert [one.event.text for one in found if isinstance(one.event, Token)] == texts


async def test_closing_commits_what_was_appended(make_log: MakeLog) -> None:
    """`aclose` commits every batch that was appended."""
    log, log_ids = make_log(), [new_log_id() for _ in range(5)]
    appends = [asyncio.create_task(append(log, log_id, 1, [tok("x")])) for log_id in log_ids]
    await asyncio.sleep(0)
    await log.aclose()
    assert await asyncio.gather(*appends) == [1] * 5
    assert [await make_log().last_seq(log_id) for log_id in log_ids] == [1] * 5


def test_log_ids_are_unique_names() -> None:
    """A log id is twelve characters that fit an event id."""
    names = {new_log_id() for _ in range(1000)}
    assert len(names) == 1000
    assert all(len(name) == 12 and name.isalnum() and name.islower() | name.isdigit() for name in names)


async def _still(waiting: object) -> None:
    """Let a first wait return early, as it may, or continue for a while."""
    task = asyncio.ensure_future(waiting)
    await asyncio.wait([task], timeout=0.5)
    task.cancel()


async def _read_to(log: MemoryLog, log_id: str, last_seq: int) -> None:
    """Read as a reader does, until an event has come."""
    after = 0
    while after < last_seq:
        page = await log.read(log_id, after)
        after = page[-1].seq if page else after
        if not page:
            await log.wait(log_id, after)

"""Laws of streams while their log is away: nothing shown is lost or changed, and it looks like a slow reader."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from streamserve.engine.config import Policy
from streamserve.protocol.errors import Refused
from streamserve.protocol.events import Done, Token
from streamserve.protocol.requests import Admission
from streamserve.streams import stream as stream_module
from streamserve.streams.log.base import LogFull, LogUnavailable
from streamserve.streams.reader.follow import collect
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.streams.log.outage.conftest import DEADLINE_SECONDS, DONE, DOWN, Follower, start, streams_on, words
from tests.support.streams.hand_made import Gate, ScriptedClient, StallingLog, ask, started_echo, tok, until, untimed
from tests.support.streams.logs import everything
from tests.support.streams.outages import Outage

# Every kind of outage


async def test_readers_wait_and_lose_nothing(outage: Outage, waiting: Streams, scripted: ScriptedClient) -> None:
    """An early and a late reader each see the log, which is the uninterrupted answer, and each gets the notices."""
    streams = waiting
    stream = await start(streams)
    early, generation = Follower(streams, stream), scripted.last
    generation.push(*words(0, 3))
    await until(lambda: len(early.logged) == 4, "three words are read")
    await outage.begin()
    generation.push(*words(3, 9))
    await until(lambda: early.notices == ["waiting"], "it is shown that the answer waits")
    late = Follower(streams, stream, after=2)
    await until(lambda: len(late.logged) == 2, "what is committed can be read")
    with pytest.raises(LogUnavailable) as refused:
        await start(streams)
    assert (refused.value.code, refused.value.http_status) == outage.refusal
    assert len(scripted.requests) == 1, "the engine got no request"
    generation.push(*words(9, 40))
    assert not generation.is_cancelled
    await outage.end()
    await until(lambda: "resumed" in early.notices, "it is shown that it continues")
    generation.push(*words(40, 42), DONE)
    seen, rest = await early.end(), await late.end()
    assert [one.seq for one in seen] == list(range(1, 45))
    assert [untimed(one.event) for one in seen[1:]] == [*words(0, 42), DONE]
    assert rest == seen[2:]
    assert await everything(outage.other(), stream.log_id) == seen
    assert early.notices == late.notices == ["waiting", "resumed"]
    assert (await start(streams)).last_seq == 1, "new answers are accepted again"


async def test_it_can_be_away_again_and_again(outage: Outage, waiting: Streams, scripted: ScriptedClient) -> None:
    """Each outage shows one notice, and the answer is whole."""
    stream = await start(waiting)
    reader = Follower(waiting, stream)
    for turn in range(1, 4):
        await outage.begin()
        scripted.last.push(*words(5 * turn, 5 * turn + 5))
        await until(lambda turn=turn: len(reader.notices) == 2 * turn - 1, "it waits")
        await outage.end()
        await until(lambda turn=turn: stream.last_seq == 5 * turn + 1, "it continues")
    scripted.last.push(DONE)
    seen = await reader.end()
    assert [untimed(one.event) for one in seen[1:]] == [*words(5, 20), DONE]
    assert reader.notices == ["waiting", "resumed"] * 3
    assert await everything(outage.other(), stream.log_id) == seen


async def test_a_cut_answer_resumes_without_a_gap(outage: Outage, scripted: ScriptedClient) -> None:
    """The engine drops the answer, the connection ends, and a returning reader gets the rest of the same words."""
    async with streams_on(outage.log, scripted, outage_seconds=0.0) as streams:
        stream = await start(streams)
        reader = Follower(streams, stream)
        scripted.last.push(*words(0, 3))
        await until(lambda: len(reader.logged) == 4, "three words are read")
        await outage.begin()
        scripted.last.push(*words(3, 5))
        seen = await reader.end()
        assert reader.was_let_go
        assert scripted.sources[0].is_cancelled
        assert len(seen) == 4
        await outage.end()
        await until(lambda: stream.last_seq == 6, "the commit in doubt is settled")
        again = Follower(streams, stream, after=4)
        await until(lambda: len(scripted.sources) == 2, "the engine is asked to continue")
        assert scripted.resumes[1].output_token_ids == ((0, 1, 2, 3, 4),)
        scripted.last.push(*words(5, 9), DONE)
        seen += await again.end()
        assert [one.seq for one in seen] == list(range(1, len(seen) + 1))
        assert [one.event for one in seen if isinstance(one.event, Token)] == words(0, 9)
        assert await everything(outage.other(), stream.log_id) == seen


# Refusals


async def test_the_answer_that_finds_the_outage_is_refused(
    log: StallingLog, streams: Streams, scripted: ScriptedClient
) -> None:
    """The refused answer's generation is cancelled, and nothing of it is in the log later."""
    log.outage = LogFull("full", retry_after=30)
    with pytest.raises(LogFull):
        await start(streams)
    assert scripted.last.is_cancelled
    scripted.last.push(tok("late"))
    with pytest.raises(LogFull):
        await start(streams)
    assert len(scripted.requests) == 1
    log.outage = None
    await until(lambda: streams.writer.outage is None, "it is over")
    await until(lambda: not log._logs, "its log is dropped")
    assert (await start(streams)).last_seq == 1
    assert len(log._logs) == 1


async def test_an_answer_that_waited_behind_the_outage_is_refused_too(
    log: StallingLog, streams: Streams, scripted: ScriptedClient
) -> None:
    """A first event that was pending and not tried is never committed."""
    running = await start(streams)
    log.go.clear()
    scripted.last.push(tok("a"))
    await until(lambda: log.num_commits == 2, "a commit is under way")
    starting = asyncio.create_task(start(streams))
    await until(lambda: len(scripted.requests) == 2, "the engine has accepted")
    await asyncio.sleep(0)
    log.outage = DOWN
    log.go.set()
    with pytest.raises(LogUnavailable):
        await starting
    log.outage = None
    await until(lambda: running.last_seq == 2, "it is over")
    scripted.sources[0].push(tok("b"))
    await until(lambda: running.last_seq == 3, "it continues")
    assert list(log._logs) == [running.log_id]


# Stops


async def test_a_stop_is_recorded_and_takes_effect_later(
    log: StallingLog, streams: Streams, scripted: ScriptedClient
) -> None:
    """The engine drops the stream, the caller gets the outage's error, and the end is in the log when that is back."""
    stream = await start(streams)
    reader = Follower(streams, stream)
    scripted.last.push(tok("a"), tok("b"))
    await until(lambda: len(reader.logged) == 3, "two tokens are read")
    log.outage = LogFull("full", retry_after=30)
    scripted.last.push(tok("c"))
    await until(lambda: streams.writer.outage is not None, "the outage is noticed")
    with pytest.raises(LogFull):
        await stream.stop(2)
    assert scripted.last.is_cancelled
    assert not stream.ended.is_set()
    log.outage = None
    async with asyncio.timeout(DEADLINE_SECONDS):
        await stream.stop()
    *_, last = await reader.end()
    assert isinstance(last.event, Done)
    assert (last.event.finish_reason, last.event.kept_seq) == ("cancelled", 2)
    assert await everything(log, stream.log_id) == reader.logged


async def test_a_stop_while_the_log_is_slow_waits(log: StallingLog, streams: Streams, scripted: ScriptedClient) -> None:
    """A slow commit is no outage."""
    stream = await start(streams)
    log.go.clear()
    stopping = asyncio.create_task(stream.stop())
    await until(lambda: log.num_commits == 2, "the end is being committed")
    await asyncio.sleep(3 * stream_module.STOP_SECONDS)
    assert not stopping.done()
    log.go.set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await stopping
    assert isinstance(stream.terminal, Done)


# Reading positions


@pytest.mark.parametrize("kind", ["finish", "whole"])
async def test_the_engine_keeps_to_the_log_meanwhile(
    log: StallingLog, streams: Streams, scripted: ScriptedClient, kind: str
) -> None:
    """A stream that waits for no reader passes the committed tokens as read, and none of them again afterwards."""
    stream = await start(streams, on_disconnect="finish" if kind == "finish" else "park")
    collecting = asyncio.create_task(collect(streams, stream)) if kind == "whole" else None
    await until(lambda: stream.readers.num_attached == (collecting is not None), "it is read")
    scripted.last.push(tok("a", 1), tok("b", 2, 3))
    await until(lambda: stream.last_seq == 3, "three tokens are committed")
    before = len(scripted.last.positions)
    log.outage = DOWN
    scripted.last.push(tok("c", 4))
    await until(lambda: len(scripted.last.positions) > before, "the engine is informed")
    assert scripted.last.positions[before:] == [(3,)]
    log.outage = None
    await until(lambda: stream.last_seq == 4, "it continues")
    assert scripted.last.positions[before:] == [(3,), None]
    scripted.last.push(DONE)
    if collecting is not None:
        assert [untimed(one.event) for one in await collecting][1:] == [tok("a", 1), tok("b", 2, 3), tok("c", 4), DONE]
    else:
        await stream.ended.wait()


async def test_an_unread_answer_does_not_run_away(log: StallingLog) -> None:
    """The engine parks it at its lead, and the whole answer is that of an uninterrupted run."""
    gate, request = Gate(keeps_plans=False), ask(max_tokens=400, ignore_eos=True)
    client = await started_echo(gate, lead_tokens=32, policy=Policy(stalled_seconds=0.0))
    async with aclosing(client), streams_on(log, client) as streams:
        plain = await streams.start(request, Admission(owner="o", tenant="t", on_disconnect="finish"))
        await plain.ended.wait()
        gate.allow(8)
        stream = await streams.start(request, Admission(owner="o", tenant="t", on_disconnect="finish"))
        await until(lambda: stream.last_seq > 4, "it runs")
        log.outage = DOWN
        gate.allow(1)
        await until(lambda: stream.lag.is_log_down, "the outage is noticed")
        generation = stream.engine.generation
        assert generation is not None
        gate.open()
        await until(lambda: not generation.is_open, "the engine parks it")
        assert generation.parked is not None
        assert generation.parked.reason == "lead"
        assert client.stats().running == 0
        log.outage = None
        await stream.ended.wait()
        assert [await shown(log, one) for one in (plain, stream)] == [await shown(log, plain)] * 2
        assert stream.usage.completion_tokens == 400


async def shown(log: StallingLog, stream: Stream) -> str:
    """Return the text of the answer."""
    return "".join(one.event.text for one in await everything(log, stream.log_id) if isinstance(one.event, Token))


async def test_a_stop_has_a_deadline(
    log: StallingLog, streams: Streams, scripted: ScriptedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop whose end hangs in a commit is answered after a while; it is recorded, and takes effect later."""
    monkeypatch.setattr(stream_module, "STOP_DEADLINE_SECONDS", 0.05)
    stream = await start(streams)
    log.go.clear()
    with pytest.raises(Refused) as caught:
        await stream.stop()
    assert (caught.value.code, stream.terminal) == ("stop_pending", None)
    log.go.set()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await stream.ended.wait()
    assert isinstance(stream.terminal, Done)
    assert stream.terminal.finish_reason == "cancelled"

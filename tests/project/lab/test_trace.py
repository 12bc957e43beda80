"""Laws of the lab's trace: where a token was when, in order, and nothing of it stays behind."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from project.lab.reports import answer_report, follow
from project.lab.trace import Trace
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.streams.conftest import DONE, start
from tests.support.streams.hand_made import ScriptedClient, tok, until


class Prompt(Attachment):
    """A reader to whom each event is sent as it is committed, unless it holds them to be joined."""

    sent_seq = 0
    holds = False

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def advance(self) -> None:
        if not self.holds:
            self.sent_seq = self.stream.last_seq


@pytest.fixture
def scripted() -> ScriptedClient:
    return ScriptedClient()


@pytest.fixture
async def streams(scripted: ScriptedClient) -> AsyncIterator[Streams]:
    streams = Streams({"scripted": scripted}, MemoryLog())
    yield streams
    await streams.aclose()


async def say(scripted: ScriptedClient, stream: Stream, text: str, *, sent_at: float | None = None) -> None:
    """Have the engine make a token, and wait until it is in the log."""
    before = stream.last_seq
    scripted.last.generation.sent_at = sent_at
    scripted.last.push(tok(text))
    await until(lambda: stream.last_seq > before, "the token is committed")


async def test_a_token_s_moments_are_in_order(streams: Streams, scripted: ScriptedClient) -> None:
    """It leaves the engine, comes, is logged, and is written; a step lasts from one token to the next."""
    stream = await start(streams)
    stream.attach(Prompt(stream))
    trace = Trace(stream)
    trace.begin()
    began = time.monotonic()
    await say(scripted, stream, "a", sent_at=began)
    await say(scripted, stream, "b", sent_at=began + 0.5)
    first, second = trace.tokens
    assert began == first.left <= first.came <= first.logged <= first.written <= time.monotonic()
    assert (first.seq, second.seq) == (stream.last_seq - 1, stream.last_seq)
    assert (first.step_seconds, second.step_seconds) == (None, 0.5)
    reported = trace.report()[0]
    assert reported["left"] <= reported["came"] <= reported["logged"] <= reported["written"] <= 1000 * time.time()


async def test_an_engine_of_this_process_sends_nothing(streams: Streams, scripted: ScriptedClient) -> None:
    """When the token left, and its step, are not known; the rest is."""
    stream = await start(streams)
    stream.attach(Prompt(stream))
    trace = Trace(stream)
    trace.begin()
    await say(scripted, stream, "a")
    await say(scripted, stream, "b")
    assert [(token.left, token.step_seconds) for token in trace.tokens] == [(None, None)] * 2
    assert trace.report()[0]["left"] is None


async def test_a_token_that_is_held_to_be_joined_is_left_out(streams: Streams, scripted: ScriptedClient) -> None:
    """When its frame is written is not seen here."""
    stream = await start(streams)
    reader = Prompt(stream)
    stream.attach(reader)
    trace = Trace(stream)
    trace.begin()
    reader.holds = True
    await say(scripted, stream, "a")
    assert not trace.tokens
    reader.holds = False
    await say(scripted, stream, "b")
    assert [token.seq for token in trace.tokens] == [stream.last_seq]


async def test_it_stands_behind_a_reader_that_has_returned(streams: Streams, scripted: ScriptedClient) -> None:
    """The reader writes first, so that its frame's time is seen."""
    stream = await start(streams)
    stream.attach(Prompt(stream))
    trace = Trace(stream)
    trace.begin()
    returned = Prompt(stream)
    stream.attach(returned)
    trace.begin()
    assert stream.readers.attached[-1] is trace
    assert stream.readers.num_watchers == 1


async def test_only_what_is_made_and_read_here_is_traced(streams: Streams, scripted: ScriptedClient) -> None:
    """A reader's leaving, and the end, leave no watcher behind."""
    stream = await start(streams)
    traces: dict[str, Trace] = {}
    follow({stream.id: stream}, traces)
    assert traces == {}
    reader = Prompt(stream)
    stream.attach(reader)
    follow({stream.id: stream}, traces)
    await say(scripted, stream, "a")
    assert len(answer_report(stream, traces[stream.id])["trace"]) == 1
    stream.detach(reader)
    follow({stream.id: stream}, traces)
    assert (traces, stream.readers.num_attached) == ({}, 0)
    assert answer_report(stream)["trace"] == []

    other = await start(streams)
    other.attach(Prompt(other))
    follow({other.id: other}, traces)
    scripted.last.push(DONE)
    await other.ended.wait()
    assert other.readers.num_watchers == 0

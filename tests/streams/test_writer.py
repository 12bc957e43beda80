"""Laws of the log writer: one commit for all that is pending, order, and what an outage of the log does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from streamserve.protocol.events import Event
from streamserve.streams import writer as writer_module
from streamserve.streams.log.base import (
    Batch,
    Fenced,
    LogFull,
    LogLost,
    LogUnavailable,
    MemoryLog,
    Result,
    append,
    make_batch,
)
from streamserve.streams.writer import LogWriter
from tests.support.streams.hand_made import StallingLog, tok, until
from tests.support.streams.logs import everything, numbered

DOWN = LogUnavailable("The log is away.")


class Feed:
    """A producer that writes the texts it is given, one batch each, to the log of its name."""

    def __init__(self, writer: LogWriter, name: str, *, has_begun: bool = True, fence: int = 1) -> None:
        self.name, self.fence = name, fence
        self.has_begun = has_begun  # False: an outage refuses it
        self.pending: deque[tuple[str, ...]] = deque()
        self.last_seq = 0
        self.results: list[Result | Exception] = []
        self.noted: list[str] = []  # the notices it got
        self.failure: Exception | None = None
        self._writer = writer
        self._in_flight: Batch | None = None

    def write(self, *texts: str) -> None:
        """Have these texts committed as one batch."""
        self.pending.append(texts)
        self._writer.mark(self)

    def take_batch(self) -> Batch | None:
        if self.failure is not None:
            self.pending.clear()
            raise self.failure
        assert self._in_flight is None, "its last batch has no result yet"
        if self.pending:
            events: list[Event] = [tok(text) for text in self.pending.popleft()]
            self._in_flight = make_batch(self.name, self.fence, self.last_seq, events)
        return self._in_flight

    def on_result(self, batch: Batch | None, result: Result | Exception) -> None:
        assert batch is self._in_flight
        self._in_flight = None
        self.results.append(result)
        if isinstance(result, int):
            self.last_seq = result
        if self.pending:
            self._writer.mark(self)

    def on_outage(self, reason: LogUnavailable) -> bool:
        self.noted.append(reason.code)
        return self.has_begun

    def on_recovery(self) -> None:
        self.noted.append("recovered")

    def cut(self) -> None:
        self.noted.append("cut")


@contextmanager
def away(log: StallingLog, reason: LogUnavailable = DOWN) -> Iterator[None]:
    """Have the log commit nothing meanwhile."""
    log.outage = reason
    yield
    log.outage = None


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> StallingLog:
    """A log whose commits are retried soon."""
    monkeypatch.setattr(writer_module, "_FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(writer_module, "_MAX_RETRY_SECONDS", 0.002)
    return StallingLog()


@pytest.fixture
async def writer(log: StallingLog) -> AsyncIterator[LogWriter]:
    writer = LogWriter(log)
    yield writer
    await writer.aclose()


async def test_what_is_pending_is_one_commit(log: StallingLog, writer: LogWriter) -> None:
    """Streams that are marked during a commit share the next one."""
    feeds = [Feed(writer, f"log{number}") for number in range(5)]
    log.go.clear()
    feeds[0].write("a")
    await until(lambda: log.num_commits == 1, "the first commit has begun")
    for feed in feeds[1:]:
        feed.write("b", "c")
        feed.write("d")
    log.go.set()
    await until(lambda: feeds[-1].results == [2, 3], "all is committed")
    assert [feed.results for feed in feeds] == [[1], *[[2, 3]] * 4]
    assert log.num_commits == 3, "the first, one for each stream's next batch, one for the batches after those"


async def test_a_log_that_waits_for_nothing_costs_a_turn_of_the_loop() -> None:
    """What all streams have at a step is committed and shown in the loop's next turn, and no task is made for it."""
    writer, tasks = LogWriter(MemoryLog()), asyncio.all_tasks()
    feeds = [Feed(writer, f"log{number}") for number in range(32)]
    for turn in range(1, 4):
        for feed in feeds:
            feed.write("a")
        await asyncio.sleep(0)
        assert all(feed.last_seq == turn for feed in feeds)
        assert asyncio.all_tasks() == tasks
    await writer.aclose()


async def test_a_streams_events_keep_their_order(log: StallingLog, writer: LogWriter) -> None:
    """A stream's events keep their order, however its batches fall into commits."""
    feeds = [Feed(writer, f"log{number}") for number in range(7)]
    for turn in range(20):
        for feed in feeds[turn % 3 :: 2]:
            feed.write(f"{turn} a", f"{turn} b")
        await asyncio.sleep(0)
    await until(lambda: not any(feed.pending for feed in feeds), "all is taken")
    await until(lambda: all(len(feed.results) * 2 == feed.last_seq for feed in feeds), "all is committed")
    for feed in feeds:
        texts = [logged.event.text for logged in await everything(log, feed.name)]
        assert texts == sorted(texts, key=lambda text: int(text.split()[0]))
        assert texts[::2] == [text.replace("b", "a") for text in texts[1::2]]


async def test_a_refusal_costs_only_its_stream(log: StallingLog, writer: LogWriter) -> None:
    """A fenced and a lost stream in a commit leave the other batches in the log."""
    await append(log, "fenced", 2, [tok("theirs")])
    feeds = [Feed(writer, name) for name in ("a", "fenced", "b", "lost", "c")]
    feeds[3].last_seq = 9
    for feed in feeds:
        feed.write("x")
    await until(lambda: all(feed.results for feed in feeds), "each has its result")
    assert [type(feed.results[0]) for feed in feeds] == [int, Fenced, int, LogLost, int]


async def test_an_exception_of_one_stream_is_its_own(log: StallingLog, writer: LogWriter) -> None:
    """An exception from `take_batch` is that stream's result alone."""
    feeds = [Feed(writer, name) for name in "abc"]
    feeds[1].failure = ValueError("no event")
    for feed in feeds:
        feed.write("x")
    await until(lambda: all(feed.results for feed in feeds), "each has its result")
    assert [feed.results for feed in feeds] == [[1], [feeds[1].failure], [1]]


async def test_a_commit_that_fails_for_no_known_reason_fails_its_streams(log: StallingLog, writer: LogWriter) -> None:
    """A commit that fails for an unknown reason is not retried, and the next one is tried."""
    feeds = [Feed(writer, name) for name in "ab"]
    log.is_broken = True
    for feed in feeds:
        feed.write("x")
    await until(lambda: all(feed.results for feed in feeds), "each has its result")
    assert [type(feed.results[0]) for feed in feeds] == [OSError, OSError]
    assert log.num_commits == 1
    log.is_broken = False
    feeds[0].write("y")
    await until(lambda: feeds[0].results[1:] == [1], "the writer works")


async def test_the_identical_batches_are_retried(log: StallingLog, writer: LogWriter) -> None:
    """Batches marked meanwhile wait; a batch whose reply was lost is in the log once."""
    first, second = Feed(writer, "a"), Feed(writer, "b")
    first.write("x", "y")
    await until(lambda: first.results == [2], "it is up")
    with away(log):
        first.write("z")
        await until(lambda: log.num_commits >= 3, "it is retried")
        first.write("too late for this batch")
        second.write("later")
        num_tries = log.num_commits
        await until(lambda: log.num_commits >= num_tries + 3, "it is retried on")
        assert first.results == [2]
        assert first.noted == second.noted == ["log_down"]
        await append(log_of(log), "a", 1, [tok("z")])  # the commit that seemed to fail
    await until(lambda: first.results == [2, 3, 4] and second.results == [1], "all is committed")
    assert await everything(log, "a") == numbered(
        [tok("x"), tok("y"), tok("z"), tok("too late for this batch")],
    )
    assert first.noted == second.noted == ["log_down", "recovered"]


def log_of(log: StallingLog) -> StallingLog:
    """Return the same events without the outage, as another process has them."""
    twin = StallingLog()
    twin._logs = log._logs
    return twin


async def test_new_answers_are_refused_with_the_reason(log: StallingLog, writer: LogWriter) -> None:
    """New answers get 503 or 507 while the log does not commit, and no error before and after."""
    feed = Feed(writer, "a")
    writer.refuse_if_down()
    for reason in (DOWN, LogFull("full", retry_after=30)):
        with away(log, reason):
            feed.write("x")
            await until(lambda: writer.outage is not None, "the outage is noticed")
            with pytest.raises(LogUnavailable) as raised:
                writer.refuse_if_down()
            assert raised.value.code == reason.code
            assert raised.value is not reason, "each caller's own: it gets a traceback"
        await until(lambda: writer.outage is None, "it is over")
        writer.refuse_if_down()


async def test_a_failure_in_an_outage_ends_it(log: StallingLog, writer: LogWriter) -> None:
    """A commit that fails for no known reason is not retried, so new answers are not refused for ever after it."""
    feed = Feed(writer, "a")
    with away(log):
        feed.write("x")
        await until(lambda: writer.outage is not None, "the outage is noticed")
        log.is_broken = True
    await until(lambda: bool(feed.results), "it has its result")
    assert isinstance(feed.results[0], OSError)
    writer.refuse_if_down()
    assert feed.noted == ["log_down", "recovered"]


async def test_the_log_of_a_refused_answer_is_dropped(log: StallingLog, writer: LogWriter) -> None:
    """A refused answer's first batch may reach the log by the retry; after the recovery there is no such log."""
    refused, running = Feed(writer, "refused", has_begun=False), Feed(writer, "running")
    with away(log):
        refused.write("meta")
        running.write("x")
        await until(lambda: refused.noted == running.noted == ["log_down"], "both know")
    await until(lambda: running.results == [1], "it is over")
    await until(lambda: "refused" not in log._logs, "it is dropped")
    assert await everything(log, "running") == numbered([tok("x")])


async def test_an_outage_that_lasts_cuts_each_stream_once(log: StallingLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream is cut once, after `outage_seconds` or when it comes later; the writer keeps trying."""
    writer = LogWriter(log, outage_seconds=0.0)
    first, second = Feed(writer, "a"), Feed(writer, "b")
    with away(log):
        first.write("x")
        await until(lambda: "cut" in first.noted, "it is cut")
        second.write("y")
        num_tries = log.num_commits
        await until(lambda: log.num_commits >= num_tries + 5, "it is retried")
        assert first.noted == second.noted == ["log_down", "cut"]
    await until(lambda: first.results == second.results == [1], "both are committed")
    assert first.noted == second.noted == ["log_down", "cut", "recovered"]
    with away(log):
        first.write("z")
        await until(lambda: first.noted[3:] == ["log_down", "cut"], "the next outage is counted from its beginning")
    await writer.aclose()


async def test_closing_leaves_what_is_pending(log: StallingLog, writer: LogWriter) -> None:
    """During an outage too, closing ends the task, and nothing is committed any more."""
    feed = Feed(writer, "a")
    await LogWriter(log).aclose()  # nothing was marked
    with away(log):
        feed.write("x")
        await until(lambda: log.num_commits > 0, "it is tried")
        await writer.aclose()
    num_commits = log.num_commits
    for _ in range(5):
        await asyncio.sleep(0.002)
    assert (feed.results, log.num_commits) == ([], num_commits)

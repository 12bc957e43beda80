"""Laws of a run whose worker dies: it continues at another one, which repeats no finished step and no shown token."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.pipeline.client import Pipeline, PipelineClient
from streamserve.clients.pipeline.run import Run
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.errors import DatabaseUnavailable
from streamserve.protocol.events import Citation, Done, Error, Event, Status, Token
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams
from streamserve.rows.store import RowStore
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog
from streamserve.streams.reader.follow import collect
from streamserve.streams.run_memo import run_log
from streamserve.streams.store import Record
from streamserve.streams.stream import Stream
from tests.support.sites.rows import in_row
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, until

pytestmark = pytest.mark.django_db(transaction=True)

LONG = {"max_tokens": 24, "ignore_eos": True}


class Author:
    """A pipeline of two steps, an answer in a step and a text, and how often each function was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.is_found = asyncio.Event()
        self.words = itertools.repeat("half ")  # of a text that is in no step

    async def run(self, run: Run) -> None:
        name = await run.step("read", self.read, run.question, of=3)
        run.cite("help", id="7", title=name)
        await run.say(next(self.words))
        places = await run.step("search", self.search, of=3)
        answer = await run.step("write", run.generate, f"{name} {places}", of=3, **LONG)
        await run.say(f" [{len(answer.text)}]")

    def read(self, question: str) -> str:
        self.calls["read"] += 1
        return f"about {question}"

    async def search(self) -> list[int]:
        self.calls["search"] += 1
        await self.is_found.wait()
        return [1, 2]


@pytest.fixture
def author() -> Author:
    return Author()


@pytest.fixture
async def workers(author: Author, echo: ThreadClient, tmp_path: Path) -> AsyncIterator[list[Worker]]:
    """Two workers that serve the pipeline."""
    one = Pipeline(name="p", function=author.run)
    settings = StreamConfig(coalesce_tokens=0)
    made = [Worker(tmp_path, echo, settings) for _ in range(3)]
    for worker in made:
        client = PipelineClient(one, {"m": echo}, default_model="m", memo_of=worker.streams.memo_of)
        worker.streams.clients = {"p": client}
    yield made
    for worker in made:
        await worker.aclose()


async def begun(worker: Worker, on_disconnect: str = "park") -> tuple[Stream, asyncio.Task[Any]]:
    """Start a run, and read it."""
    messages = (Message(role="user", content="bills"),)
    request = GenerateRequest(model="p", messages=messages, sampling=SamplingParams(seed=5))
    stream = await worker.start(request, on_disconnect=on_disconnect)
    return stream, asyncio.create_task(collect(worker.streams, stream))


async def die(worker: Worker, reading: asyncio.Task[Any]) -> None:
    """Be taken for dead, and run on: the worst of deaths."""
    worker.release_lock()
    reading.add_done_callback(lambda task: task.cancelled() or task.exception())


async def read(worker: Worker, stream_id: str) -> list[Event]:
    """Return what a reader of that worker gets, to the end."""
    found = await worker.streams.reach(stream_id)
    assert found is not None
    async with asyncio.timeout(60):
        events = [logged.event for logged in await collect(worker.streams, found)]
    check_events(events)
    return events


def shown(events: list[Event]) -> tuple[str, list[int], list[Event]]:
    """Return the text, the token ids, and the steps and citations."""
    tokens = [event for event in events if isinstance(event, Token)]
    marks = [one for one in events if isinstance(one, Citation) or (isinstance(one, Status) and one.status == "step")]
    return "".join(one.text for one in tokens), [id for one in tokens for id in one.token_ids], marks


@pytest.mark.parametrize("on_disconnect", ["park", "finish"])
@pytest.mark.parametrize("moment", ["in a step", "in the answer", "again in the answer"])
async def test_a_run_continues_at_another_worker(
    transactional_db: Any, workers: list[Worker], author: Author, gate: Gate, on_disconnect: str, moment: str
) -> None:
    """Its reader gets what an uninterrupted run shows, once; only the step that had not finished is called again."""
    author.is_found.set()
    gate.open()
    whole, reading = await begun(workers[2])
    expected = shown([logged.event for logged in await reading])
    assert isinstance(whole.terminal, Done)
    author.calls.clear()
    gate.allow(0)
    author.is_found.clear()
    stream, reading = await begun(workers[0], on_disconnect)
    await until(lambda: author.calls["search"] == 1 and stream.last_seq >= 4, "it is in the step")
    if moment != "in a step":
        author.is_found.set()
        gate.allow(8)
        await until(lambda: stream.transcript.num_tokens >= 4, "it is in the answer")
    await die(workers[0], reading)
    second = workers[1]
    if moment == "again in the answer":
        found = await second.streams.reach(stream.id)
        again = asyncio.create_task(collect(second.streams, found))
        await until(lambda: found.lease.is_held and found.engine.generation is not None, "it continues")
        num_before = found.transcript.num_tokens
        async with asyncio.timeout(60):
            while found.transcript.num_tokens == num_before:
                gate.allow(1)  # step by step: until it is fenced, the first worker's answer takes steps too
                await asyncio.sleep(0.001)
        await die(second, again)
        second = workers[2]
    last = asyncio.create_task(read(second, stream.id))
    if moment == "in a step":
        await until(lambda: author.calls["search"] == 2, "the step is called again")
    author.is_found.set()
    gate.open()
    assert shown(await last) == expected
    assert author.calls == {"read": 1, "search": 2 if moment == "in a step" else 1}
    await in_row(stream.id, state="finished", error_code="", finish_reason="length")
    with suppress(asyncio.CancelledError):
        reading.cancel()
        await reading


async def test_nothing_is_kept_after_the_end(
    transactional_db: Any, workers: list[Worker], author: Author, gate: Gate
) -> None:
    """What a run keeps for another worker goes with its end."""
    stream, reading = await begun(workers[0])
    await until(lambda: author.calls["search"] == 1, "its first step is kept")
    assert await workers[0].log.last_seq(run_log(stream.id)) >= 1
    author.is_found.set()
    gate.open()
    await reading
    with pytest.raises(KeyError):
        await until_gone(workers[0].log, run_log(stream.id))


class Late(RowStore):
    """A store that takes no row: the database goes away once the run has finished a step."""

    def __init__(self, worker: Worker, author: Author) -> None:
        super().__init__(worker.workers)
        self.stream_id = ""
        self._log, self._author = worker.log, author

    async def insert(self, record: Record) -> None:
        await until(lambda: self._author.calls["search"] == 1, "its first step is kept")
        self.stream_id = record.id
        assert await self._log.last_seq(run_log(record.id)) >= 1
        raise DatabaseUnavailable("The database is away.")


async def test_nothing_is_kept_of_a_run_that_does_not_begin(
    transactional_db: Any, workers: list[Worker], author: Author
) -> None:
    """What a run had kept goes with the refusal, and does not wait for the purge."""
    worker = workers[0]
    worker.streams.store = store = Late(worker, author)
    with pytest.raises(DatabaseUnavailable):
        await begun(worker)
    with pytest.raises(KeyError):
        await until_gone(worker.log, run_log(store.stream_id))


async def until_gone(log: EventLog, log_id: str) -> None:
    """Wait until `last_seq` raises KeyError: there is no such log."""
    async with asyncio.timeout(60):
        while True:
            await log.last_seq(log_id)
            await asyncio.sleep(0.01)


async def check_lost(workers: list[Worker], author: Author, text: str) -> None:
    """Let a run's worker die in the search; the run has shown `text` and ends in `producer_lost` at the next worker."""
    stream, reading = await begun(workers[0])
    await until(lambda: author.calls["search"] == 1 and stream.last_seq >= 5, "it has said something")
    await die(workers[0], reading)
    *events, end = await read(workers[1], stream.id)
    assert shown(events)[0] == text
    assert isinstance(end, Error)
    assert (end.code, end.retryable) == ("producer_lost", True)
    await in_row(stream.id, state="finished", error_code="producer_lost")
    with suppress(asyncio.CancelledError):
        reading.cancel()
        await reading


async def test_a_run_that_does_something_else_cannot_continue(
    transactional_db: Any, workers: list[Worker], author: Author
) -> None:
    """What is in no step may differ the second time: one error says to ask again, to its reader and in its row."""
    author.words = map(str, itertools.count())
    await check_lost(workers, author, "0")


async def test_a_site_whose_runs_keep_nothing(
    transactional_db: Any, workers: list[Worker], author: Author, echo: ThreadClient
) -> None:
    """Without a memo a run ends with its worker, in the same error."""
    for worker in workers[:2]:
        one = Pipeline(name="p", function=author.run)
        worker.streams.clients = {"p": PipelineClient(one, {"m": echo}, default_model="m")}
    await check_lost(workers, author, "half ")

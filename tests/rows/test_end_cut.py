"""A worker dies between the commit of an answer's last token and that of its `done`: another worker writes the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.base import Generation
from streamserve.clients.thread.client import ThreadClient
from streamserve.models import Stream as StreamRow
from streamserve.protocol.engine import Park
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.events import Done, Token
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import Batch, EventLog, LogUnavailable, Result, make_batch
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.log.redis_log import RedisLog
from tests.support.checks.stream_checks import check_native, check_native_part, text_of
from tests.support.servers.redis_server import RedisServer
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, ScriptedSource, ask, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.cut_streams("a worker dies")]

NUM_TOKENS = 12
LAST_TOKEN_SEQ = NUM_TOKENS + 1  # `meta` is the first event
FINE = StreamConfig(coalesce_tokens=0)


class WithoutEnd:
    """A log whose process dies before `done` is committed: the events before it are in the log, no result comes."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.is_dead = False
        self.is_over = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def commit(self, batches: Sequence[Batch]) -> list[Result]:
        if not any(batch.is_end for batch in batches):
            return await self._log.commit(batches)
        cut = [
            make_batch(one.log_id, one.fence, one.base_seq, one.events[:-1] if one.is_end else one.events)
            for one in batches
        ]
        await self._log.commit([one for one in cut if one.events])
        self.is_dead = True
        await self.is_over.wait()
        raise LogUnavailable("The test is over.")


class Restarting:
    """The engine, which restarts: it refuses, then loses what it has accepted, and then works."""

    def __init__(self, client: ThreadClient) -> None:
        self._client = client
        self.num_asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, *asked: Any) -> Generation:
        self.num_asked += 1
        if self.num_asked == 1:
            raise EngineUnavailable("the engine is loading.", code="engine_loading", retry_after=2)
        if self.num_asked == 2:
            lost = ScriptedSource(asked[0])
            lost.park(Park(reason="lost", is_counted=False))
            return lost.generation
        return await self._client.generate(*asked)


@pytest.fixture(params=["file", "redis"])
def new_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], EventLog]]:
    if request.param == "file":
        yield lambda: FileLog(tmp_path / "streams.sqlite3")
        return
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as server:
        yield lambda: RedisLog(server.url)


@pytest.fixture
async def cut(
    echo: ThreadClient, gate: Gate, tmp_path: Path, new_log: Callable[[], EventLog]
) -> AsyncIterator[tuple[str, str]]:
    """The id of a stream whose worker has died there, and the text of its answer."""
    log = WithoutEnd(new_log())
    worker = Worker(tmp_path, echo, FINE, log)
    gate.allow(1)  # else all events are one batch
    stream = await worker.start(ask(max_tokens=NUM_TOKENS, ignore_eos=True))
    reading = asyncio.create_task(worker.read(stream.id))
    gate.open()
    await until(lambda: log.is_dead, "its last token is committed")
    worker.release_lock()
    events = await log.read(stream.log_id, 0)
    assert [one.seq for one in events] == list(range(1, LAST_TOKEN_SEQ + 1))
    yield stream.id, "".join(one.event.text for one in events if isinstance(one.event, Token))
    log.is_over.set()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await worker.aclose()


async def whole(worker: Worker, stream_id: str, after: int) -> str:
    """Read to the end; return the text of what came."""
    return text_of(check_native(await worker.read(stream_id, after), after=after))


async def the_end(worker: Worker, stream_id: str) -> Done:
    """Return the log's one end, which is its last event; the row has it too."""
    row = await StreamRow.objects.aget(pk=stream_id)
    events = await worker.log.read(row.log_id, 0)
    assert [one.seq for one in events] == list(range(1, len(events) + 1))
    assert [isinstance(one.event, Done) for one in events].index(True) == len(events) - 1
    end = events[-1].event
    assert isinstance(end, Done)
    return end


@pytest.mark.parametrize("after", [0, LAST_TOKEN_SEQ - 1, LAST_TOKEN_SEQ])
async def test_the_worker_that_takes_over_writes_the_end(
    cut: tuple[str, str], echo: ThreadClient, tmp_path: Path, new_log: Callable[[], EventLog], after: int
) -> None:
    """A reader that has all tokens, or none, gets `done` at another worker, and the log has it once."""
    stream_id, text = cut
    worker = Worker(tmp_path, echo, FINE, new_log())
    seen = text_of(check_native_part(await worker.read(stream_id, 0, LAST_TOKEN_SEQ))) if after else ""
    assert seen in ("", text)
    rest = await whole(worker, stream_id, after)
    assert text.endswith(rest)
    end = await the_end(worker, stream_id)
    assert (end.finish_reason, end.usage.completion_tokens) == ("length", NUM_TOKENS)
    await worker.aclose()


async def test_two_workers_that_take_over_write_one_end(
    cut: tuple[str, str], echo: ThreadClient, tmp_path: Path, new_log: Callable[[], EventLog]
) -> None:
    """Both serve their readers to the end; one of them writes it."""
    stream_id, text = cut
    workers = [Worker(tmp_path, echo, FINE, new_log()) for _ in range(2)]
    readings = [whole(worker, stream_id, after) for worker in workers for after in (0, LAST_TOKEN_SEQ)]
    assert await asyncio.gather(*readings) == [text, "", text, ""]
    await the_end(workers[0], stream_id)
    for worker in workers:
        await worker.aclose()


async def test_the_end_is_written_across_a_restart_of_the_engine(
    cut: tuple[str, str], echo: ThreadClient, tmp_path: Path, new_log: Callable[[], EventLog]
) -> None:
    """An engine that loads, and one that loses the answer, delay the end."""
    stream_id, text = cut
    client = Restarting(echo)
    worker = Worker(tmp_path, client, replace(FINE, resume_window_seconds=60), new_log())
    assert await whole(worker, stream_id, 0) == text
    assert client.num_asked == 3
    await the_end(worker, stream_id)
    await worker.aclose()

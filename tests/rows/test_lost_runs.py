"""Laws of a run whose worker dies: it ends in `producer_lost`, once, for readers of every worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.pipeline.client import Pipeline, PipelineClient
from streamserve.clients.pipeline.run import Run
from streamserve.clients.thread.client import ThreadClient
from streamserve.models import Stream as StreamRow
from streamserve.protocol.events import Error, Token
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import GenerateRequest, Message
from streamserve.streams.config import StreamConfig
from streamserve.streams.reader.follow import collect
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def workers(echo: ThreadClient, tmp_path: Path) -> AsyncIterator[list[Worker]]:
    """Two workers whose one model is a pipeline that waits, once it has said something."""

    async def waits(run: Run) -> None:
        await run.say("half ")
        if run.question == "q with tokens":
            await run.generate("x", max_tokens=4, ignore_eos=True)
        await asyncio.Event().wait()

    one = Pipeline(name="p", function=waits)
    settings = StreamConfig(coalesce_tokens=0)
    made = [Worker(tmp_path, echo, settings) for _ in range(2)]
    for worker in made:
        worker.streams.clients = {"p": PipelineClient(one, {"m": echo}, default_model="m")}
    yield made
    for worker in made:
        await worker.aclose()


@pytest.mark.parametrize("question", ["q", "q with tokens"])
@pytest.mark.parametrize("on_disconnect", ["park", "finish"])
async def test_a_run_ends_with_its_worker(
    transactional_db: Any, workers: list[Worker], question: str, on_disconnect: str
) -> None:
    """The reader at another worker gets what was said and one error, which says to ask again; so does the row."""
    first, second = workers
    request = GenerateRequest(model="p", messages=(Message(role="user", content=question),))
    stream = await first.start(request, on_disconnect=on_disconnect)
    watching = asyncio.create_task(collect(first.streams, stream))
    num_tokens = 0 if question == "q" else 4
    await until(lambda: stream.last_seq >= 2 and stream.transcript.num_tokens == num_tokens, "it has said something")
    first.release_lock()  # taken for dead, while it still runs: the worst of deaths
    found = await second.streams.reach(stream.id)
    assert found is not None
    async with asyncio.timeout(20):
        events = [logged.event for logged in await collect(second.streams, found)]
    check_events(events)
    assert "".join(event.text for event in events if isinstance(event, Token)).startswith("half ")
    end = events[-1]
    assert isinstance(end, Error)
    assert (end.code, end.retryable) == ("producer_lost", True)
    for _ in range(400):
        row = await StreamRow.objects.aget(pk=stream.id)
        if row.state == "finished":
            break
        await asyncio.sleep(0.05)
    assert (row.state, row.error_code) == ("finished", "producer_lost")
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching

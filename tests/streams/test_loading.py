"""Laws of answers that are asked for while their model loads: the start waits, or the answer begins and shows it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from streamserve.protocol.engine import ModelDescription
from streamserve.protocol.errors import BadRequest, EngineUnavailable, StreamserveError
from streamserve.protocol.events import Done, Error, Event, Meta, Status, Token, Usage
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import collect
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.streams.hand_made import ScriptedClient, ask, tok, until
from tests.support.streams.stores import SharedRecords

LOADING = ModelDescription(alias="scripted", state="loading")
UNLOADED = EngineUnavailable("model scripted is loading.", code="engine_loading", retry_after=2)
DONE = Done(finish_reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=1))
WAITS = Admission(owner="u", tenant="t")
BEGINS = replace(WAITS, begins_unloaded=True)


@pytest.fixture
def loading(scripted: ScriptedClient) -> ScriptedClient:
    """An engine that is being loaded, and refuses until `load` says that it is loaded."""
    scripted.description = LOADING
    scripted.refusals.append(UNLOADED)
    return scripted


def load(client: ScriptedClient) -> None:
    """Have the engine loaded."""
    client.refusals.clear()
    client.description = replace(LOADING, state="ready")


async def begin(streams: Streams, **fields: object) -> Stream:
    """Start an answer that does not wait, and attach its reader."""
    stream = await streams.start(ask("scripted", **fields), BEGINS)
    stream.attach(Attachment())
    return stream


async def events_of(streams: Streams, stream: Stream) -> list[Event]:
    """Return all events of the stream, once it has ended."""
    return [logged.event for logged in await collect(streams, stream)]


async def test_an_answer_begins_before_its_model_is_loaded(streams: Streams, loading: ScriptedClient) -> None:
    """It shows `loading`, then its tokens as any other; acceptance gives it the prompt's length, a seed and a limit."""
    stream = await begin(streams, seed=None, max_tokens=None)
    assert stream.request.sampling.seed is not None  # another process may continue it
    seed = stream.request.sampling.seed
    load(loading)
    await until(lambda: bool(loading.sources), "the loaded engine is asked")
    loading.last.push(tok("a", 5), DONE)
    meta, *statuses, token, done = await events_of(streams, stream)
    assert isinstance(meta, Meta)
    assert [event.status for event in statuses if isinstance(event, Status)] == ["loading"]
    assert (token, len(statuses)) == (tok("a", 5), 1)
    assert isinstance(done, Done)
    assert loading.requests[-1].sampling.seed == seed
    assert stream.request.sampling.max_tokens == loading.last.generation.accepted.max_tokens
    assert stream.usage.prompt_tokens == 3
    assert stream.summary().num_parks == 0


async def test_the_time_of_loading_is_a_phase_of_its_own(streams: Streams, loading: ScriptedClient) -> None:
    """`loading` is neither intake nor queue; with it the phases add up to the latency, and the queue begins after."""
    stream = await begin(streams)
    arrived_at, began_at = stream.admission.arrived_at, time.monotonic()
    load(loading)
    loaded_at = time.monotonic()
    await until(lambda: bool(loading.sources), "the loaded engine is asked")
    loading.last.push(tok("a", 5), DONE)
    done = (await events_of(streams, stream))[-1]
    assert isinstance(done, Done)
    assert done.phases is not None
    assert done.phases["loading"] >= loaded_at - began_at
    assert sum(done.phases.values()) == pytest.approx(done.latency)
    assert arrived_at is not None
    queued_at = loading.admissions[-1].arrived_at
    assert queued_at is not None
    assert arrived_at < began_at < loaded_at < queued_at


async def test_any_other_start_waits(streams: Streams, loading: ScriptedClient) -> None:
    """The start returns the accepted answer once the model is loaded; its own time in the queue begins then."""
    starting = asyncio.create_task(streams.start(ask("scripted"), WAITS))
    await until(lambda: len(loading.requests) == 1, "the engine has refused once")
    load(loading)
    stream = await starting
    first, last = loading.admissions
    assert last.arrived_at > first.arrived_at
    stream.attach(Attachment())
    loading.last.push(tok("a", 5), DONE)
    events = await events_of(streams, stream)
    assert [type(event) for event in events] == [Meta, Token, Done]
    assert sum(events[-1].phases.values()) == pytest.approx(events[-1].latency)
    assert events[-1].phases["loading"] > 0


@pytest.mark.parametrize(
    ("error", "is_retryable"),
    [
        (EngineUnavailable("model scripted is not available.", retry_after=30), True),
        (BadRequest("the prompt is too long.", code="context_length_exceeded"), False),
    ],
    ids=["load failed", "never fits"],
)
async def test_a_refusal_after_the_load_ends_it(
    streams: Streams, loading: ScriptedClient, error: StreamserveError, is_retryable: bool
) -> None:
    """An answer that has begun ends in the error that its start would have raised."""
    stream = await begin(streams)
    loading.refusals = type(loading.refusals)([error])
    loading.description = replace(LOADING, state="failed")
    end = (await events_of(streams, stream))[-1]
    assert end == Error(code=error.code, message=error.message, retryable=is_retryable)


async def test_the_wait_has_an_end(loading: ScriptedClient) -> None:
    """After ENGINE_WAIT_SECONDS a start is refused, and an answer that has begun ends in the same error."""
    streams = Streams({"scripted": loading}, MemoryLog(), StreamConfig(engine_wait_seconds=0.05))
    loading.refusals.extend([UNLOADED] * 8)
    with pytest.raises(EngineUnavailable) as caught:
        await streams.start(ask("scripted"), WAITS)
    assert (caught.value.code, caught.value.retry_after) == ("engine_loading", 2)
    end = (await events_of(streams, await begin(streams)))[-1]
    assert end == Error(code="engine_loading", message=UNLOADED.message, retryable=True)
    await streams.aclose()


async def test_an_answer_that_loads_is_stopped_and_abandoned_like_any_other(loading: ScriptedClient) -> None:
    """A stop ends it at once; without a reader it ends after its window, and its engine is never asked again."""
    streams = Streams(
        {"scripted": loading}, MemoryLog(), StreamConfig(first_reader_seconds=0.01, resume_window_seconds=0.01)
    )
    stopped = await begin(streams)
    await stopped.stop()
    assert (await events_of(streams, stopped))[-1].finish_reason == "cancelled"
    loading.refusals.append(UNLOADED)
    alone = await streams.start(ask("scripted"), BEGINS)
    await until(lambda: alone.terminal is not None, "it is abandoned")
    assert alone.terminal.finish_reason == "abandoned"
    assert len(loading.requests) == 2
    await streams.aclose()


async def test_the_server_may_go_down_while_a_model_loads(streams: Streams, loading: ScriptedClient) -> None:
    """Both kinds end with the server: the one that has begun in an `error`, the one that waits in a refusal."""
    stream = await begin(streams)
    loading.refusals.append(UNLOADED)
    starting = asyncio.create_task(streams.start(ask("scripted"), WAITS))
    await until(lambda: len(loading.requests) == 2, "the second one waits")
    await streams.aclose()
    assert isinstance(stream.terminal, Error)
    load(loading)
    with pytest.raises(EngineUnavailable):
        await starting


async def test_another_process_continues_an_answer_that_loads(loading: ScriptedClient) -> None:
    """An answer that began before its engine is accepted there: its usage has the length of its prompt."""
    shared, log = SharedRecords(), MemoryLog()
    one, two = (Streams({"scripted": loading}, log, store=shared.worker(name)) for name in ("one", "two"))
    begun = await begin(one, seed=None, max_tokens=None)
    one.shut_down()
    await begun.ended.wait()
    stream = await two.reach(begun.id, shared.records[begun.id])
    assert stream is not None
    stream.attach(Attachment())
    load(loading)
    await until(lambda: bool(loading.sources), "the loaded engine is asked")
    assert loading.requests[-1].sampling.seed == begun.request.sampling.seed
    loading.last.push(tok("a", 5))
    await until(lambda: stream.usage.completion_tokens == 1, "a token came")
    assert stream.usage.prompt_tokens == loading.last.generation.accepted.num_prompt_tokens
    await stream.stop()
    end = (await events_of(two, stream))[-1]
    assert isinstance(end, Done)
    assert end.usage.prompt_tokens == loading.last.generation.accepted.num_prompt_tokens
    await one.aclose()
    await two.aclose()

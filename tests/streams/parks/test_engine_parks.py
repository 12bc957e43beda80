"""Laws of a stream whose engine parks it: what is asked again and when, and what its readers see of that."""

from __future__ import annotations

import asyncio

import pytest

from streamserve.protocol.engine import ModelDescription, Park
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.events import Done, Error, Event, Meta, Status, Usage
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import collect
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.streams.conftest import DONE, start
from tests.support.streams.hand_made import ScriptedClient, tok, until

LEAD = Park(reason="lead", resume_at_lead=2)
LONG_AHEAD = Park(reason="ahead", resume_seconds=3600.0)


async def read(streams: Streams, reader: Attachment, **rest: object) -> Stream:
    """Start a stream that `reader` reads."""
    stream = await start(streams, **rest)
    stream.attach(reader)
    return stream


async def events_of(streams: Streams, stream: Stream) -> list[Event]:
    """Wait for the end and return every event but `meta`."""
    async with asyncio.timeout(60):
        await stream.ended.wait()
    meta, *events = [logged.event for logged in await streams.log.read(stream.log_id, 0)]
    assert isinstance(meta, Meta)
    return events


async def few_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_stream_too_far_ahead_is_asked_for_when_it_is_read(streams: Streams, scripted: ScriptedClient) -> None:
    """The engine is not asked until no more than the limit is unread; readers see tokens only."""
    stream = await read(streams, reader := Attachment())
    tokens = [tok("x", number) for number in range(5)]
    scripted.last.push(*tokens)
    scripted.last.park(LEAD)
    await until(lambda: stream.state == "parked", "it is parked")
    assert (stream.last_seq, stream.summary().park_reason, stream.summary().lead) == (6, "lead", 5)
    for seq in (2, 3):
        stream.moved(reader, seq)
        await few_turns()
    assert len(scripted.requests) == 1
    stream.moved(reader, 4)
    await until(lambda: stream.state == "running", "it goes on")
    assert scripted.resumes[1].output_token_ids == ((0, 1, 2, 3, 4),)
    assert scripted.resumes[1].reader_tokens == (3,)
    scripted.last.push(tok("y"), DONE)
    assert (await events_of(streams, stream))[:-1] == [*tokens, tok("y")]
    assert (stream.summary().num_parks, stream.summary().park_reason) == (1, None)


async def test_a_stream_that_made_room_resumes_when_its_reader_starves(
    streams: Streams, scripted: ScriptedClient
) -> None:
    """A stream that made room is asked for as soon as all of it is read, before its time."""
    stream = await read(streams, reader := Attachment())
    scripted.last.push(tok("a"), tok("b"))
    scripted.last.park(LONG_AHEAD)
    await until(lambda: stream.state == "parked", "it is parked")
    stream.moved(reader, 2)
    await few_turns()
    assert stream.state == "parked"
    stream.moved(reader, 3)
    await until(lambda: stream.state == "running", "it goes on")
    scripted.last.push(DONE)
    assert [type(event) for event in await events_of(streams, stream)][2:] == [Done]


async def test_a_stream_that_made_room_resumes_after_a_while(streams: Streams, scripted: ScriptedClient) -> None:
    """A stream that made room is asked for after a while, read or not."""
    stream = await read(streams, Attachment())
    scripted.last.push(tok("a"))
    scripted.last.park(Park(reason="ahead", resume_seconds=0.01))
    await until(lambda: len(scripted.sources) == 2, "it goes on")
    assert stream.summary().lead == 1


@pytest.mark.parametrize("reason", ["paused", "lost"])
async def test_a_missing_engine_shows_a_status(streams: Streams, scripted: ScriptedClient, reason: str) -> None:
    """A missing engine shows readers one status at once and one at the resume; refusals in between are waited out."""
    stream = await read(streams, Attachment())
    scripted.last.push(tok("a", 5), tok("b", 6))
    scripted.refusals.extend([EngineUnavailable("starting", retry_after=9)] * 2)
    scripted.last.park(Park(reason=reason))
    await until(lambda: len(scripted.sources) == 2, "it goes on")
    scripted.last.push(tok("c", 7), DONE)
    *before, waiting, resumed, token, end = await events_of(streams, stream)
    assert (before, token) == ([tok("a", 5), tok("b", 6)], tok("c", 7))
    assert isinstance(waiting, Status)
    assert waiting.status == "waiting"
    assert waiting.message
    assert resumed == Status(status="resumed")
    assert isinstance(end, Done)
    first, *again = scripted.resumes
    assert first.first_token_at is None
    assert [resume.output_token_ids for resume in again] == [((5, 6),)] * 3
    assert len({admission.arrived_at for admission in scripted.admissions}) == 1
    assert {resume.first_token_at for resume in again} == {stream.transcript.timings.first_at}


async def test_an_answer_that_kills_its_engine_ends_in_an_error(streams: Streams, scripted: ScriptedClient) -> None:
    """An answer lost five times without a new token is not asked for a sixth time."""
    stream = await read(streams, Attachment())
    scripted.last.push(tok("a"))
    for number in range(1, 6):
        await until(lambda: len(scripted.sources) == number, "it is asked for")  # noqa: B023
        scripted.last.park(Park(reason="lost"))
    *_, end = await events_of(streams, stream)
    assert isinstance(end, Error)
    assert (end.code, end.retryable, len(scripted.requests)) == ("engine_died", True, 5)


def lost_before_it_was_known(*, alone: bool) -> EngineUnavailable:
    """What is raised when the engine ends in a step with the request, before its acceptance is read."""
    refused = EngineUnavailable("being replaced", retry_after=1)
    refused.lost = Park(reason="lost", was_alone=alone)
    return refused


async def test_an_engine_lost_before_it_accepts_is_counted(streams: Streams, scripted: ScriptedClient) -> None:
    """At a readmission as after it: the third loss, of a step that held nothing else, ends the answer."""
    stream = await read(streams, Attachment())
    scripted.refusals.extend(lost_before_it_was_known(alone=alone) for alone in (False, True))
    scripted.last.park(Park(reason="lost"))
    *_, end = await events_of(streams, stream)
    assert isinstance(end, Error)
    assert (end.code, [resume.num_losses for resume in scripted.resumes]) == ("engine_died", [0, 1, 2])


async def test_an_engine_lost_before_the_first_acceptance_is_counted(scripted: ScriptedClient) -> None:
    """A new request is asked again with its losses, which its stream keeps; the third one, alone, is refused."""
    coming = ModelDescription(alias="scripted", state="loading", was_ready=True)
    scripted.description = coming
    streams = Streams({"scripted": scripted}, MemoryLog(), StreamConfig(engine_wait_seconds=60))
    scripted.refusals.extend(lost_before_it_was_known(alone=False) for _ in range(2))
    stream = await read(streams, Attachment())
    assert stream.engine.parking.losses.num_losses == 2
    await stream.stop()
    scripted.refusals.extend(lost_before_it_was_known(alone=alone) for alone in (False, False, True))
    with pytest.raises(EngineUnavailable) as caught:
        await read(streams, Attachment())
    assert caught.value.code == "engine_died"
    assert [resume.num_losses for resume in scripted.resumes] == [0, 1, 2, 0, 1, 2]
    await streams.aclose()


async def test_a_model_that_has_failed_is_not_waited_for(streams: Streams, scripted: ScriptedClient) -> None:
    """A failed model's engine is not replaced any more: the reader gets an error."""
    stream = await read(streams, Attachment())
    scripted.refusals.append(EngineUnavailable("out of order", code="engine_died", retry_after=30))
    scripted.last.park(Park(reason="lost"))
    *_, end = await events_of(streams, stream)
    assert end == Error(code="engine_died", message="out of order", retryable=True)


async def test_stop_does_not_wait_for_a_paused_engine(streams: Streams, scripted: ScriptedClient) -> None:
    """A stop takes effect while the engine is paused, and a reader that leaves starts the resume window."""
    stream = await read(streams, Attachment())
    scripted.refusals.append(EngineUnavailable("paused", code="engine_paused", retry_after=100))
    scripted.last.park(Park(reason="paused"))
    await until(lambda: len(scripted.requests) == 2, "the engine refuses")
    async with asyncio.timeout(60):
        await stream.stop()
    assert len(scripted.requests) == 2


async def test_a_parked_answer_without_a_reader_is_not_asked_for(scripted: ScriptedClient) -> None:
    """The resume window of a stream that its engine parked passes like any other."""
    streams = Streams({"scripted": scripted}, MemoryLog(), StreamConfig(resume_window_seconds=0.01))
    stream = await read(streams, reader := Attachment())
    scripted.last.push(tok("a"))
    scripted.last.park(LONG_AHEAD)
    await until(lambda: stream.state == "parked", "it is parked")
    stream.detach(reader)
    *_, end = await events_of(streams, stream)
    assert isinstance(end, Done)
    assert (end.finish_reason, len(scripted.requests), stream.engine.parking.num_parks) == ("abandoned", 1, 1)
    await streams.aclose()


async def test_a_returning_reader_replays_before_the_engine_prefills(
    streams: Streams, scripted: ScriptedClient
) -> None:
    """A reload of a long answer asks the engine when the reader is near its end, not before."""
    stream = await read(streams, reader := Attachment())
    scripted.last.push(*(tok("x", number) for number in range(200)))
    await until(lambda: stream.last_seq == 201, "the tokens are committed")
    stream.detach(reader)
    stream.attach(again := Attachment())
    stream.moved(again, 72)
    await few_turns()
    assert (stream.state, stream.summary().park_reason) == ("parked", "reader")
    stream.moved(again, 73)
    await until(lambda: stream.state == "running", "it goes on")
    assert scripted.resumes[1].reader_tokens == (72,)


async def test_the_engine_gets_the_reader_position(streams: Streams, scripted: ScriptedClient) -> None:
    """The engine gets the furthest owner's reader's position, the next one's after it left, and never a watcher's."""
    stream = await read(streams, reader := Attachment(), n=2)
    assert scripted.resumes[0].reader_tokens == (0, 0)
    second, watcher = Attachment(), Attachment(is_watcher=True)
    stream.attach(second)
    stream.attach(watcher)
    scripted.last.push(*(tok("x", choice=number % 2) for number in range(100)))
    await until(lambda: stream.last_seq == 101, "the tokens are committed")
    stream.moved(watcher, 101)
    assert scripted.last.positions == []
    stream.moved(reader, 81)
    stream.moved(second, 2)
    stream.detach(reader)
    assert scripted.last.positions == [(40, 40), (1, 0)]


async def test_a_whole_answer_is_not_held_back(streams: Streams, scripted: ScriptedClient) -> None:
    """A collecting reader reads nothing before the end, so the engine runs without a bound."""
    stream = await start(streams)
    collecting = asyncio.create_task(collect(streams, stream))
    await until(lambda: scripted.last.positions == [None], "the engine hears of it")
    scripted.last.push(DONE)
    await collecting
    finishing = await start(streams, on_disconnect="finish")
    assert scripted.resumes[-1].reader_tokens is None
    finishing.attach(Attachment())
    assert scripted.last.positions == []


async def test_usage_of_a_stopped_stream_has_its_cached_tokens(streams: Streams, scripted: ScriptedClient) -> None:
    """Cached tokens are those of the prompt that the first run found, not those that this answer cached itself."""
    stream = await read(streams, reader := Attachment())
    for num_cached, name in ((2, "a"), (9, "b")):
        scripted.last.generation.num_cached_tokens = num_cached
        scripted.last.push(tok(name))
        await until(lambda: stream.last_seq == len(scripted.requests) + 1, "the token is committed")
        stream.moved(reader, stream.last_seq)
        scripted.last.park(LEAD)
        await until(lambda: len(scripted.sources) > stream.transcript.num_tokens, "it goes on")
    await stream.stop()
    assert isinstance(stream.terminal, Done)
    assert stream.terminal.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=2)

"""Laws of a parked stream that a reader returns to: what the engine is asked again, and what a refusal does."""

from __future__ import annotations

import asyncio
import time

import pytest

from streamserve.protocol.errors import BadRequest, Overloaded
from streamserve.protocol.events import ChoiceDone, Done, Error, Status, Usage
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from tests.streams.conftest import DONE, events_of, start
from tests.support.streams.hand_made import ScriptedClient, StallingLog, ask, tok, until


async def test_a_return_stops_the_resume_window(scripted: ScriptedClient) -> None:
    """Of two streams parked one after the other, only the one without a reader is abandoned."""
    streams = Streams({"scripted": scripted}, StallingLog(), StreamConfig(resume_window_seconds=0.02))
    returned, left = await start(streams), await start(streams)
    returned.release()
    left.release()
    returned.attach(Attachment())
    assert isinstance((await events_of(streams, left))[-1], Done)
    for _ in range(5):
        await asyncio.sleep(0)
    assert returned.state == "running"
    await streams.aclose()


async def test_timeout_ends_a_parked_stream_too(streams: Streams) -> None:
    """`timeout_seconds` counts from arrival, with or without a reader."""
    stream = await start(streams, timeout_seconds=0.02)
    stream.release()
    *_, end = await events_of(streams, stream)
    assert isinstance(end, Error)
    assert end.code == "timeout"


async def test_a_returning_reader_has_it_continued_as_accepted(streams: Streams, scripted: ScriptedClient) -> None:
    """The engine gets the same request again, with the shown tokens, its arrival time, seed and max_tokens."""
    stream = await start(streams, max_tokens=50)
    reader = Attachment()
    stream.attach(reader)
    scripted.last.push(tok("a", 5), tok("b", 6, 7))
    await until(lambda: stream.last_seq == 3, "the tokens are committed")
    stream.detach(reader)
    stream.attach(Attachment())
    await until(lambda: len(scripted.sources) == 2, "it is admitted again")
    first, second = scripted.admissions
    assert scripted.resumes[1].output_token_ids == ((5, 6, 7),)
    assert (second.arrived_at, second.stream_id) == (first.arrived_at, stream.id)
    sampling = scripted.requests[1].sampling
    assert (sampling.seed, sampling.max_tokens) == (11, 50)
    scripted.last.push(tok("c", 8), Done(finish_reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=4)))
    *_, resumed, token, end = await events_of(streams, stream)
    assert (resumed, token) == (Status(status="resumed"), tok("c", 8))
    assert isinstance(end, Done)
    assert end.usage.completion_tokens == 4
    assert end.latency >= end.breakdown["ttft"]


async def test_times_count_from_the_arrival_at_the_server(streams: Streams, scripted: ScriptedClient) -> None:
    """What came before the registry (body, caller, session) counts in these, and not in the queue."""
    long_ago = time.monotonic() - 100
    stream = await streams.start(ask("scripted"), Admission(owner="u", tenant="t", received_at=long_ago))
    assert scripted.admissions[-1].arrived_at > long_ago + 90
    scripted.last.push(tok("a", 5))
    await until(lambda: stream.last_seq == 2, "the token is committed")
    scripted.last.push(Done(finish_reason="stop", usage=Usage(completion_tokens=1), breakdown={"ttft": 3.0}))
    await stream.ended.wait()
    end = stream.terminal
    assert isinstance(end, Done)
    assert 100 <= end.breakdown["intake"] <= end.breakdown["ttft"] <= end.latency < 200


async def test_finished_choices_are_not_repeated(streams: Streams, scripted: ScriptedClient) -> None:
    """Tokens that a re-admitted generation repeats of a finished choice are left out."""
    stream = await start(streams, n=2)
    reader = Attachment()
    stream.attach(reader)
    scripted.last.push(tok("a", 5), tok("x", 6, choice=1), ChoiceDone(choice=1, finish_reason="stop"))
    await until(lambda: stream.last_seq == 4, "one choice is done")
    stream.detach(reader)
    stream.attach(reader)
    await until(lambda: len(scripted.sources) == 2, "it is admitted again")
    assert scripted.resumes[1].output_token_ids == ((5,), (6,))
    again = ChoiceDone(choice=1, finish_reason="stop")
    scripted.last.push(again, tok("y", 9, choice=1), tok("b", 8), ChoiceDone(choice=0, finish_reason="stop"), DONE)
    tail = (await events_of(streams, stream))[5:-1]
    assert tail == [tok("b", 8), ChoiceDone(choice=0, finish_reason="stop")]


async def test_a_reader_that_leaves_during_readmission_frees_it(streams: Streams, scripted: ScriptedClient) -> None:
    """A generation accepted after the last reader left is cancelled at once."""
    stream = await start(streams)
    stream.release()
    scripted.hold = asyncio.Event()
    reader = Attachment()
    stream.attach(reader)
    await until(lambda: len(scripted.requests) == 2, "the engine is asked again")
    stream.detach(reader)
    scripted.hold.set()
    await until(lambda: len(scripted.sources) == 2, "the engine accepts")
    await until(lambda: scripted.last.is_cancelled, "it is cancelled")
    assert stream.state == "parked"


async def test_a_refused_return_waits_and_asks_again(streams: Streams, scripted: ScriptedClient) -> None:
    """A full engine does not lose the stream: it sends one `waiting` status, and asks again for a new reader."""
    stream = await start(streams)
    stream.release()
    scripted.refusals.extend([Overloaded("full", retry_after=100)] * 2)
    stream.attach(Attachment())
    await until(lambda: stream.last_seq == 2, "the reader has it")
    stream.attach(Attachment())
    await until(lambda: len(scripted.requests) == 3, "asked again")
    assert stream.state == "parked"
    stream.attach(Attachment())
    await until(lambda: len(scripted.sources) == 2, "accepted")
    scripted.last.push(DONE)
    events = await events_of(streams, stream)
    assert events[1:3] == [Status(status="waiting", message="full"), Status(status="resumed")]


async def test_stop_while_a_refused_return_waits(streams: Streams, scripted: ScriptedClient) -> None:
    """Stop does not wait until the engine has room."""
    stream = await start(streams)
    stream.release()
    scripted.refusals.append(Overloaded("full", retry_after=100))
    stream.attach(Attachment())
    await until(lambda: stream.last_seq == 2, "the reader has it")
    async with asyncio.timeout(60):
        await stream.stop()


async def test_a_return_the_engine_cannot_serve_is_an_error(streams: Streams, scripted: ScriptedClient) -> None:
    """An error that a retry cannot mend ends the stream with its code."""
    stream = await start(streams)
    stream.release()
    scripted.refusals.append(BadRequest("no longer", code="never_fits"))
    stream.attach(Attachment())
    *_, end = await events_of(streams, stream)
    assert end == Error(code="never_fits", message="no longer")


async def test_phases_of_a_parked_and_readmitted_answer_add_up(streams: Streams, scripted: ScriptedClient) -> None:
    """The engine's parts are those of the last run only: the stream's own phases stand there, and the park."""
    stream = await start(streams, max_tokens=50)
    reader = Attachment()
    stream.attach(reader)
    scripted.last.push(tok("a", 5))
    await until(lambda: stream.last_seq == 2, "the token is committed")
    stream.detach(reader)
    assert stream.summary().phases.keys() >= {"parked"}
    stream.attach(Attachment())
    await until(lambda: len(scripted.sources) == 2, "it is admitted again")
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    parts = {"queue": 50.0, "prefill": 50.0, "decode": 50.0}
    scripted.last.push(tok("b", 6))
    scripted.last.push(Done(finish_reason="stop", usage=usage, breakdown=parts))
    await stream.ended.wait()
    end = stream.terminal
    assert isinstance(end, Done)
    assert end.phases is not None
    assert {"intake", "first_token", "generation", "parked"} <= end.phases.keys()
    assert "queue" not in end.phases
    assert sum(end.phases.values()) == pytest.approx(end.latency, abs=1e-6)
    assert stream.summary().phases == end.phases

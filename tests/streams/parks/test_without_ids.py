"""Laws of a stream whose engine gives no token ids: what counts, what it is continued by, and what is not parked."""

from __future__ import annotations

import asyncio

import pytest

from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.errors import CannotContinue
from streamserve.protocol.events import BlockStart, BlockStop, BlockText, Done, Error, Event, Meta, Token, Usage
from streamserve.protocol.requests import Admission, GenerateRequest, ShownChoice
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from streamserve.streams.transcript import Transcript
from tests.support.streams.hand_made import ScriptedClient, ScriptedSource, ask, until

WITHOUT_IDS = Accepted(num_prompt_tokens=0, max_tokens=9, seed=0, has_token_ids=False)
LEAD = Park(reason="lead", resume_at_lead=2)


def part(text: str, index: int = 0) -> Token:
    return Token(text=text, token_ids=(), index=index)


class IdlessClient(ScriptedClient):
    """An engine whose generations have no ids, and can be parked while `can_park`."""

    can_park = True

    def _source(self, request: GenerateRequest) -> ScriptedSource:
        return ScriptedSource(request, can_park=self.can_park, has_token_ids=False)


@pytest.fixture
def idless(streams: Streams) -> IdlessClient:
    client = IdlessClient()
    streams.clients = {**streams.clients, "scripted": client}
    return client


async def read(streams: Streams, reader: Attachment) -> Stream:
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1", on_disconnect="park"))
    stream.attach(reader)
    return stream


async def test_meta_says_that_there_are_no_ids(streams: Streams, idless: IdlessClient) -> None:
    """The first event has the fact, so any process that reads the log counts in the same way."""
    stream = await read(streams, Attachment())
    [first] = await streams.log.read(stream.log_id, 0)
    assert isinstance(first.event, Meta)
    assert first.event.payload()["has_token_ids"] is False


async def test_each_token_with_text_counts_as_one(streams: Streams, idless: IdlessClient) -> None:
    """The reader's lag is in these tokens, so a server elsewhere learns when its reader is slow."""
    stream = await read(streams, reader := Attachment())
    idless.last.push(*(part("x") for _ in range(40)), part(""))
    await until(lambda: stream.last_seq == 42, "the tokens are committed")
    assert (stream.usage.completion_tokens, stream.summary().lead) == (40, 40)
    stream.moved(reader, 35)
    assert idless.last.positions == [(34,)]


async def test_it_is_continued_by_its_text(streams: Streams, idless: IdlessClient) -> None:
    """The engine is asked with the blocks that were committed, and with no ids."""
    stream = await read(streams, reader := Attachment())
    thought = [BlockStart(choice=0, index=0, kind="thinking"), part("Hm"), part("m."), BlockStop(choice=0, index=0)]
    events: list[Event] = [*thought, BlockStart(choice=0, index=1, kind="text"), part("So", 1)]
    idless.last.push(*events)
    idless.last.park(LEAD)
    await until(lambda: stream.last_seq == 7, "the tokens are committed")
    stream.moved(reader, 7)
    await until(lambda: len(idless.requests) == 2, "the engine is asked again")
    blocks = (
        BlockText(index=0, kind="thinking", text="Hmm."),
        BlockText(index=1, kind="text", text="So", is_open=True),
    )
    assert idless.resumes[1].shown == (ShownChoice(blocks=blocks, num_tokens=3),)
    assert idless.resumes[1].output_token_ids == ()


async def test_a_log_that_is_read_again_gives_the_same(streams: Streams, idless: IdlessClient) -> None:
    """A process that restores the stream from its log continues it by the same text."""
    stream = await read(streams, Attachment())
    idless.last.push(part("So "), part("it goes"))
    await until(lambda: stream.last_seq == 3, "the tokens are committed")
    restored = Transcript(Accepted(num_prompt_tokens=0, max_tokens=0, seed=0), 1, 0.0)
    for logged in await streams.log.read(stream.log_id, 0):
        restored.note(logged.event, logged.seq, is_ours=False)
    assert restored.shown == stream.transcript.shown
    assert restored.shown[0].blocks[0].text == "So it goes"
    assert (restored.num_tokens, restored.token_ids) == (2, ())


async def test_what_cannot_be_continued_is_not_parked(streams: Streams, idless: IdlessClient) -> None:
    """Its reader leaves and returns, and the same generation goes on; it learns that nothing is read meanwhile."""
    idless.can_park = False
    stream = await read(streams, reader := Attachment())
    idless.last.push(*(part("x") for _ in range(40)))
    await until(lambda: stream.last_seq == 41, "the tokens are committed")
    stream.moved(reader, 41)
    stream.detach(reader)
    assert (stream.state, idless.last.is_cancelled) == ("running", False)
    assert idless.last.positions == [(40,), (0,)]
    stream.attach(Attachment())
    idless.last.push(part("y"), Done(finish_reason="stop", usage=Usage(completion_tokens=41)))
    async with asyncio.timeout(60):
        await stream.ended.wait()
    assert len(idless.requests) == 1
    assert isinstance(stream.terminal, Done)


async def test_a_refusal_to_continue_ends_the_answer(streams: Streams, idless: IdlessClient) -> None:
    """An engine that can never continue it is asked once; the error says that the answer may be asked for again."""
    stream = await read(streams, Attachment())
    idless.refusals.append(CannotContinue("The connection was lost. Ask again."))
    idless.last.push(part("x"))
    idless.last.park(LEAD)
    async with asyncio.timeout(60):
        await stream.ended.wait()
    assert stream.terminal == Error(
        code="cannot_continue", message="The connection was lost. Ask again.", retryable=True
    )
    assert len(idless.requests) == 2

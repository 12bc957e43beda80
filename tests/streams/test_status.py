"""Laws of the statuses in a stream: who has them, that a replay repeats them, and which dialects leave them out."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from streamserve.dialects.encoder import Encoder
from streamserve.dialects.native import NativeEncoder
from streamserve.dialects.openai.chat import ChatEncoder
from streamserve.dialects.plain import TextEncoder, TokensEncoder
from streamserve.protocol.engine import Park
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.events import Done, Meta, Status, Token, Usage
from streamserve.protocol.requests import Admission
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.checks.joined import with_joined_text
from tests.support.checks.stream_checks import check_native, check_openai, check_tokens, text_of
from tests.support.streams.hand_made import Gate, ScriptedClient, StallingLog, ask, started_echo, tok, until

DONE = Done(finish_reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=1))


async def shown(streams: Streams, stream: Stream, encoder: Encoder, after: int = 0) -> bytes:
    """Return all that a reader gets who asks after `after`."""
    async with aclosing(aiter(Delivery(streams, stream, encoder, after=after))) as pieces:
        return b"".join([piece async for piece in pieces])


async def test_a_lone_answer_pays_no_commit_before_its_first_token() -> None:
    """Nothing is committed between `meta` and the first token."""
    log = StallingLog()
    client = await started_echo()
    streams = Streams({"echo": client}, log)
    stream = await streams.start(ask(max_tokens=3), Admission(owner="u", tenant="t"))
    await collect(streams, stream)
    committed = [event for batch in log.batches for event in batch]
    assert [type(event) for event in committed[:2]] == [Meta, Token]
    await streams.aclose()
    await client.aclose()


async def test_a_queue_is_shown_replayed_and_left_out_by_other_dialects() -> None:
    """A reader that comes later, or again after any event, gets the same statuses; the other dialects have none."""
    gate = Gate()
    gate.allow(0)
    client = await started_echo(gate, max_num_seqs=1)
    streams = Streams({"echo": client}, MemoryLog())
    first, second, third = [await streams.start(ask(max_tokens=4), Admission(owner="u", tenant="t")) for _ in range(3)]
    gate.open()
    for stream in (first, second, third):
        await collect(streams, stream)
    events = [logged.event for logged in await collect(streams, third)]
    statuses = [Status(status="queued", step=2), Status(status="queued", step=1), Status(status="generating")]
    assert events[1:4] == statuses
    assert [event for event in events if isinstance(event, Status)] == statuses
    whole = check_native(await shown(streams, third, NativeEncoder(third.log_id)))
    for after in range(1, 5):
        again = check_native(await shown(streams, third, NativeEncoder(third.log_id), after), after=after)
        assert with_joined_text(again) == with_joined_text(whole[after:])
    text = text_of(whole)
    chat = ChatEncoder(third.log_id, completion_id="c", model="echo", created=1)
    chunks = check_openai(await shown(streams, third, chat))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
    assert check_tokens(await shown(streams, third, TokensEncoder(third.log_id))) == text
    assert await shown(streams, third, TextEncoder()) == text.encode()
    await streams.aclose()
    await client.aclose()


@pytest.mark.parametrize(
    ("park", "retry_after"), [(Park(reason="lost"), 9), (Park(reason="ahead", resume_seconds=0.01), 1)]
)
async def test_an_answer_whose_next_engine_loads_shows_that(
    streams: Streams, scripted: ScriptedClient, park: Park, retry_after: int
) -> None:
    """`waiting`, then `loading` while the next engine loads, however often that refuses, then `resumed`.

    Also after a park that is not shown: the engine may be lost while the answer is parked for its reader.
    """
    stream = await streams.start(ask("scripted"), Admission(owner="u", tenant="t"))
    stream.attach(Attachment())
    scripted.last.push(tok("a", 5))
    scripted.refusals.extend([EngineUnavailable("loading", code="engine_loading", retry_after=retry_after)] * 3)
    scripted.last.park(park)
    await until(lambda: len(scripted.sources) == 2, "it continues")
    scripted.last.push(tok("b", 6), DONE)
    events = [logged.event for logged in await collect(streams, stream)]
    shown = [event for event in events if isinstance(event, Status)]
    assert [event.status for event in shown] == ["waiting", "loading", "resumed"]
    assert shown[1].message
    assert len(scripted.requests) == 5

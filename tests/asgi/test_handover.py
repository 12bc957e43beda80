"""Laws of offers: random, taken once, gone after their time."""

from __future__ import annotations

from streamserve.asgi import handover
from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.requests import Admission
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.streams.hand_made import ScriptedClient, ask, until


async def make(streams: Streams) -> tuple[Stream, Delivery]:
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    return stream, Delivery(streams, stream, NativeEncoder(stream.log_id))


async def test_an_offer_is_taken_once(streams: Streams) -> None:
    """The id gives the delivery the first time and nothing after."""
    _, delivery = await make(streams)
    ticket = handover.offer(delivery)
    assert handover.take(ticket) is delivery
    assert handover.take(ticket) is None
    assert handover.take("nosuch") is None


async def test_ids_cannot_be_guessed(streams: Streams) -> None:
    """An id has 128 bits of randomness, and no two are alike."""
    _, delivery = await make(streams)
    tickets = {handover.offer(delivery) for _ in range(100)}
    assert len(tickets) == 100
    assert all(len(ticket) >= 22 and handover.take(ticket) for ticket in tickets)


async def test_an_offer_expires(streams: Streams, scripted: ScriptedClient) -> None:
    """An offer that is not taken parks its stream, and the engine is freed."""
    stream, delivery = await make(streams)
    ticket = handover.offer(delivery, expires_seconds=0.01)
    await until(lambda: stream.state == "parked", "the stream is parked")
    assert scripted.last.is_cancelled
    assert handover.take(ticket) is None


async def test_a_withdrawn_offer_that_was_taken_is_left_alone(streams: Streams) -> None:
    """A delivery that was taken belongs to its taker, and a withdrawal does not close it."""
    stream, delivery = await make(streams)
    ticket = handover.offer(delivery)
    assert handover.take(ticket) is delivery
    handover.withdraw(ticket)
    assert stream.state == "running"

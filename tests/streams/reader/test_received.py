"""Laws of `Received`: what was sent less what the peer's system has not taken, in whole events, never ahead."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import Admission
from streamserve.streams.reader.channel import _MAX_ENDS, _POLL_SECONDS, Received
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.registry import Streams
from tests.support.streams.deliveries import DONE
from tests.support.streams.hand_made import ScriptedClient, ask, tok, until
from tests.support.streams.wire import Wire


class Socket:
    """A socket that holds some bytes that its peer has not taken."""

    num_untaken = num_looks = 0

    def __call__(self) -> int:
        self.num_looks += 1
        return self.num_untaken


def test_an_event_counts_when_its_last_byte_is_taken() -> None:
    socket = Socket()
    received = Received(4, socket)
    for seq, num_bytes in ((5, 100), (8, 50), (9, 1)):
        received.send(num_bytes, seq, 0.0)
    for num_untaken, seq in ((151, 4), (52, 4), (51, 5), (2, 5), (1, 8), (0, 9)):
        socket.num_untaken = num_untaken
        assert (received.poll(0.0), received.is_behind) == (seq, num_untaken > 0)


def test_without_a_count_what_is_sent_is_taken() -> None:
    received = Received(0, Socket())
    received.send(10, 1, 0.0)
    assert (received.poll(0.0), received.is_behind) == (1, False)


def test_an_untaken_count_above_what_was_sent_takes_nothing() -> None:
    """The head of the response, or the rest of another response, is in the same socket."""
    socket = Socket()
    socket.num_untaken = 10**6
    received = Received(3, socket)
    received.send(10, 4, 0.0)
    assert (received.poll(0.0), received.is_behind) == (3, True)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(0, 3), st.data())
def test_it_is_the_last_event_that_is_whole(sizes: list[int], over: int, data: st.DataObject) -> None:
    """The count equals a plain one; with frames beyond what is remembered it may be behind but never ahead."""
    sizes = sizes * (1 + over * _MAX_ENDS // len(sizes))
    socket, total = Socket(), sum(sizes)
    received = Received(0, socket)
    for seq, size in enumerate(sizes, 1):
        socket.num_untaken += size
        received.send(size, seq, 0.0)
    for num_untaken in sorted(data.draw(st.lists(st.integers(0, total), max_size=8)), reverse=True):
        socket.num_untaken = num_untaken
        ends = [sum(sizes[:seq]) for seq in range(len(sizes) + 1)] if len(sizes) <= _MAX_ENDS else None
        got = received.poll(0.0)
        if ends is not None:
            assert got == max(seq for seq, end in enumerate(ends) if end <= total - num_untaken)
        assert sum(sizes[:got]) <= total - num_untaken
    socket.num_untaken = 0
    assert (received.poll(0.0), received.is_behind) == (len(sizes), False)


def test_a_reader_that_acknowledges_is_where_it_says() -> None:
    """What the socket took counts again five seconds after the last acknowledgement; a lower one moves nothing."""
    socket = Socket()
    received = Received(0, socket)
    for seq in range(1, 11):
        received.send(10, seq, 0.0)
    assert received.poll(0.0) == 10
    received.ack(4, 1.0)
    assert (received.poll(1.0), received.is_behind) == (4, True)
    received.ack(3, 2.0)
    assert received.poll(6.9) == 4
    assert (received.poll(7.0), received.is_behind) == (10, False)
    received.ack(10, 8.0)
    assert (received.poll(8.0), received.is_behind) == (10, False)


def test_what_is_acknowledged_is_taken() -> None:
    """A reader may know more than the last look at its socket, and never has more than was taken or acknowledged."""
    socket = Socket()
    received = Received(0, socket)
    for seq in range(1, 11):
        received.send(10, seq, 0.0)
    socket.num_untaken = 70
    received.ack(5, 1.0)
    assert received.poll(1.0) == 5
    received.ack(9, 2.0)
    assert received.poll(2.0) == 9
    assert received.poll(8.0) == 9


async def test_a_silent_page_holds_no_answer_back(streams: Streams, scripted: ScriptedClient) -> None:
    """A page that acknowledges no more, and is sent nothing more, is counted by its socket in the end."""
    wire = Wire()
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    delivery = Delivery(streams, stream, NativeEncoder(stream.log_id))
    running = asyncio.create_task(delivery.run(wire.send, Socket()))
    scripted.last.push(*(tok("a") for _ in range(20)))
    await until(lambda: delivery.reader.received_seq == 21, "all is taken")
    delivery.reader.ack(5, is_away=True)
    assert (delivery.reader.received_seq, delivery.reader.is_away) == (5, True)
    assert (scripted.last.positions[-1], scripted.last.are_away[-1]) == ((4,), True)
    with pytest.raises(BadRequest) as refused:
        delivery.reader.ack(22)
    assert refused.value.code == "not_sent"
    await until(lambda: delivery.reader.received_seq == 21, "the socket counts")
    assert scripted.last.positions[-1] == (20,)
    scripted.last.push(DONE)
    await running


async def test_a_delivery_counts_what_is_taken(streams: Streams, scripted: ScriptedClient) -> None:
    """Bytes in the socket are not read; once they are taken that is noticed, though nothing is sent meanwhile."""
    wire, socket = Wire(), Socket()
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    delivery = Delivery(streams, stream, NativeEncoder(stream.log_id))
    running = asyncio.create_task(delivery.run(wire.send, socket))
    await until(lambda: delivery.reader.received_seq == 1, "meta was taken")
    socket.num_untaken = 1
    scripted.last.push(tok("a"))
    await until(lambda: b'"a"' in wire.data, "the token is sent")
    scripted.last.push(tok("b"))
    await until(lambda: b'"b"' in wire.data, "another one, and it was looked where the first is")
    assert delivery.reader.received_seq < 3
    socket.num_untaken = 0
    await until(lambda: delivery.reader.received_seq == 3, "the system has taken both")
    scripted.last.push(DONE)
    await running


async def test_what_waits_in_send_is_not_taken(streams: Streams, scripted: ScriptedClient) -> None:
    """A frame that the transport has not accepted yet is not counted against what its socket holds."""
    wire, socket = Wire(), Socket()
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    delivery = Delivery(streams, stream, NativeEncoder(stream.log_id))
    running = asyncio.create_task(delivery.run(wire.send, socket))
    await until(lambda: delivery.reader.received_seq == 1, "meta was taken")
    socket.num_untaken = 10
    scripted.last.push(tok("a"))
    await until(lambda: b'"a"' in wire.data, "a token is sent")
    wire.go.clear()
    scripted.last.push(tok("b" * 1000))
    await until(lambda: stream.last_seq == 3, "a long one waits in send")
    num_looks = socket.num_looks
    await until(lambda: socket.num_looks > num_looks + 2, "it was looked where the reader is")
    assert delivery.reader.received_seq == 1
    socket.num_untaken = 0
    await until(lambda: delivery.reader.received_seq == 2, "the first is taken")
    wire.go.set()
    await until(lambda: delivery.reader.received_seq == 3, "and the other one")
    scripted.last.push(DONE)
    await running


async def test_polls_end_with_the_reader(streams: Streams, scripted: ScriptedClient) -> None:
    """A closed socket is not polled."""
    wire, socket = Wire(), Socket()
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    delivery = Delivery(streams, stream, NativeEncoder(stream.log_id))
    running = asyncio.create_task(delivery.run(wire.send, socket))
    socket.num_untaken = 10
    await until(lambda: socket.num_looks > 3, "it is looked")
    delivery.close()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    num_looks = socket.num_looks
    await asyncio.sleep(2 * _POLL_SECONDS)
    assert socket.num_looks == num_looks

"""Laws of a process that ends its connections: each dialect's last event is true, and nothing is lost by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.dialects.encoder import Encoder
from streamserve.dialects.native import NativeEncoder
from streamserve.dialects.openai.chat import ChatEncoder
from streamserve.dialects.plain import TextEncoder, TokensEncoder
from streamserve.streams.config import StreamConfig
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.stream import Stream
from tests.support.checks.stream_checks import (
    check_native,
    check_native_part,
    check_openai,
    going_away_of,
    parse_sse,
    text_of,
)
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, ask, until

pytestmark = pytest.mark.django_db(transaction=True)

ASKED = ask(max_tokens=30, ignore_eos=True)


@pytest.fixture
async def workers(echo: ThreadClient, tmp_path: Path) -> AsyncIterator[tuple[Worker, Worker]]:
    one, two = [Worker(tmp_path, echo, StreamConfig(coalesce_tokens=0)) for _ in range(2)]
    yield one, two
    await two.aclose()
    await one.aclose()


async def let_go(
    worker: Worker, gate: Gate, encoder: Callable[[Stream], Encoder], on_disconnect: str = "park"
) -> tuple[Stream, bytes]:
    """Start an answer, shut its worker down in its middle, and return what its reader got."""
    gate.allow(6)
    stream = await worker.start(ASKED, on_disconnect=on_disconnect)
    data = bytearray()

    async def send(more: bytes) -> None:
        data.extend(more)

    reading = asyncio.create_task(Delivery(worker.streams, stream, encoder(stream)).run(send))
    await until(lambda: gate.is_holding and stream.readers.furthest_seq > 5, "it is in the middle, and read so far")
    closing = asyncio.create_task(worker.streams.aclose())
    await until(lambda: stream.has_left or stream.terminal is not None, "it is cut")
    gate.open()
    await asyncio.gather(reading, closing)
    return stream, bytes(data)


def native(stream: Stream) -> Encoder:
    return NativeEncoder(stream.log_id)


def openai(stream: Stream) -> Encoder:
    return ChatEncoder(stream.log_id, completion_id="c", model="echo", created=1)


async def test_a_native_reader_gets_its_cursor(workers: tuple[Worker, Worker], gate: Gate) -> None:
    """The going-away event names the reader's last event; the other worker has the rest after that one."""
    one, two = workers
    stream, data = await let_go(one, gate, native)
    frames = check_native_part(data)
    farewell, after = going_away_of(data), frames[-1].seq
    assert farewell is not None
    retry = farewell.json["retry"]
    event_id = f"{stream.log_id}-{after}"
    assert farewell.json == {"id": stream.id, "after": after, "event_id": event_id, "retry": retry}
    assert 500 <= retry <= 1500
    assert data.endswith(f"event: farewell\nretry: {retry}\ndata: {farewell.data}\n\n".encode())
    rest = check_native(await two.read(stream.id, after), after=after)
    again = check_native(await two.read(stream.id))
    assert text_of(frames + rest) == text_of(again)
    assert [frame.seq for frame in [*frames, *rest]] == [frame.seq for frame in again]


@pytest.mark.cut_streams("this format has no farewell")
async def test_tokens_end_without_a_last_event(workers: tuple[Worker, Worker], gate: Gate) -> None:
    """Neither `[DONE]` nor an error is sent: the answer is not over, and an EventSource reconnects by itself."""
    stream, data = await let_go(workers[0], gate, lambda stream: TokensEncoder(stream.log_id))
    frames = parse_sse(data)
    assert frames
    assert all("token" in frame.json for frame in frames)
    assert frames[-1].log_id == stream.log_id


async def test_text_ends_with_an_error_line(workers: tuple[Worker, Worker], gate: Gate) -> None:
    """A last line marks the text as cut: a clean end would look like the answer's."""
    stream, data = await let_go(workers[0], gate, lambda stream: TextEncoder())
    assert data.decode().endswith("\n[error engine_unavailable: The server is shutting down.]\n")
    whole = text_of(check_native(await workers[1].read(stream.id)))
    assert whole.startswith(data.decode().partition("\n[error")[0])


@pytest.mark.parametrize("on_disconnect", ["abort", "park"])
async def test_openai_ends_in_an_error(workers: tuple[Worker, Worker], gate: Gate, on_disconnect: str) -> None:
    """An OpenAI client cannot resume, so it gets an error, whether or not another worker continues the stream."""
    _, data = await let_go(workers[0], gate, openai, on_disconnect)
    assert check_openai(data)[-1]["error"]["code"] == "engine_unavailable"
    assert b"[DONE]" not in data


async def test_an_abort_stream_ends_in_an_error(workers: tuple[Worker, Worker], gate: Gate) -> None:
    """A native reader of an `abort` stream gets an error and no cursor."""
    _, data = await let_go(workers[0], gate, native, "abort")
    frames = check_native(data)
    assert (frames[-1].event, frames[-1].json["code"]) == ("error", "engine_unavailable")


async def test_a_frame_cut_off_in_send_is_not_counted(workers: tuple[Worker, Worker], gate: Gate) -> None:
    """When a server cancels, a frame it had not accepted is not counted as read."""
    one, two = workers
    gate.allow(6)
    stream = await one.start(ASKED)
    sent: list[bytes] = []
    is_held = asyncio.Event()

    async def send(data: bytes) -> None:
        if b"event: token" in b"".join(sent):
            is_held.set()
            await asyncio.Event().wait()
        sent.append(data)

    delivery = Delivery(one.streams, stream, native(stream))
    reading = asyncio.create_task(delivery.run(send))
    await until(lambda: b"event: token" in b"".join(sent), "some tokens are sent")
    gate.allow(6)
    await is_held.wait()
    last_word = delivery.cut_off()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert last_word is not None
    frames = check_native_part(b"".join([*sent, last_word]))
    gate.open()
    await until(lambda: not stream.lease.is_held, "it is let go of")
    after = frames[-1].seq
    rest = check_native(await two.read(stream.id, after), after=after)
    assert text_of(frames + rest) == text_of(check_native(await two.read(stream.id)))

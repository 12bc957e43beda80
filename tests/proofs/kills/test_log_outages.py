"""The log is away at random moments, for random times, under 20 readers: their text = log = uninterrupted run.

SQLite without room; Redis killed, stalled, out of memory. Once the streams wait for the log, once they are cut and
their readers return.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

import pytest

from streamserve.clients.factory import echo_client
from streamserve.clients.thread.client import ThreadClient
from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.events import Token
from streamserve.protocol.requests import Admission
from streamserve.streams import writer as writer_module
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog, MemoryLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.reader import BrokenStream
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.proofs.scale import scaled
from tests.support.checks.stream_checks import Frame, check_native_part, going_away_of, notices_of
from tests.support.streams.hand_made import ask, until
from tests.support.streams.logs import everything
from tests.support.streams.outages import Outage, outage

__all__ = ["outage"]

pytestmark = pytest.mark.timeout(3600)

NUM_STREAMS = 20
NUM_ROUNDS = scaled(20)
NUM_TOKENS = 144  # none of the answers ends within a code point then


@pytest.fixture
async def client() -> AsyncIterator[ThreadClient]:
    """An engine that takes some seconds for an answer."""
    async with aclosing(echo_client(step_delay_seconds=0.01)) as client:
        client.start()
        await until(lambda: client.describe().state == "ready", "the engine is ready")
        yield client


@pytest.mark.parametrize("outage_seconds", [3600.0, 0.05], ids=["waits", "is cut"])
async def test_nothing_shown_is_lost_or_changed(
    outage: Outage, client: ThreadClient, outage_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every reader, whenever the log was away and however often."""
    monkeypatch.setattr(writer_module, "_MAX_RETRY_SECONDS", 0.2)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, num_outages, num_returns, num_notices = random.Random(seed), 0, 0, 0
    plain = await _texts(client, MemoryLog())
    config = StreamConfig(snapshot_events=0, log_outage_seconds=outage_seconds)
    for _ in range(NUM_ROUNDS):
        streams = Streams({"echo": client}, outage.log, config)
        made = [await _start(streams, number) for number in range(NUM_STREAMS)]
        readers = [asyncio.create_task(_read(streams, stream)) for stream in made]
        while not all(reader.done() for reader in readers):
            await asyncio.sleep(rng.uniform(0.0, 0.4))
            await outage.begin()
            num_outages += 1
            await asyncio.sleep(outage.notice_seconds + rng.uniform(0.0, 0.4))
            await outage.end()
            await asyncio.wait(readers, timeout=rng.uniform(0.1, 0.6))
        other = outage.other()
        for stream, reader, text in zip(made, readers, plain, strict=True):
            frames, returns, notices = await reader
            logged = await everything(other, stream.log_id)
            shown = "".join(frame.json["text"] for frame in frames if frame.event == "token")
            assert shown == "".join(one.event.text for one in logged if isinstance(one.event, Token)) == text
            ids = [one for frame in frames if frame.event == "token" for one in frame.json["token_ids"]]
            assert len(ids) == NUM_TOKENS
            assert frames[-1].json["finish_reason"] == "length"
            num_returns += returns
            num_notices += notices
        await streams.aclose()
    print(f"{num_outages} outages, {num_returns} readers cut and returned, {num_notices} notices")


async def _start(streams: Streams, number: int) -> Stream:
    request = ask(max_tokens=NUM_TOKENS, ignore_eos=True, prompt=f"question {number}")
    return await streams.start(request, Admission(owner="o", tenant="t"))


async def _texts(client: ThreadClient, log: EventLog) -> list[str]:
    """Return the uninterrupted answers."""
    streams = Streams({"echo": client}, log)
    made = [await _start(streams, number) for number in range(NUM_STREAMS)]
    frames = await asyncio.gather(*[_read(streams, stream) for stream in made])
    await streams.aclose()
    return ["".join(frame.json["text"] for frame in one if frame.event == "token") for one, _, _ in frames]


async def _read(streams: Streams, stream: Stream) -> tuple[list[Frame], int, int]:
    """Read to the terminal event, and return as a client does; return the frames, the returns and the notices."""
    frames: list[Frame] = []
    num_returns = num_notices = 0
    while not frames or frames[-1].event not in ("done", "error"):
        after, data = frames[-1].seq if frames else 0, bytearray()
        with suppress(BrokenStream):  # there was no room for the farewell
            async with aclosing(aiter(Delivery(streams, stream, NativeEncoder(stream.log_id), after=after))) as pieces:
                async for piece in pieces:
                    data += piece
        frames += check_native_part(bytes(data), after=after) if len(data) > len(b": ok\n\n") else []
        num_notices += len(notices_of(bytes(data)))
        if going_away_of(bytes(data)) is not None:
            num_returns += 1
            await asyncio.sleep(0.05)
    return frames, num_returns, num_notices

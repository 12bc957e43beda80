"""Two workers of one site in one process: each with its own directory, log and lock, on one database and one folder."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import Any

from streamserve.clients.base import EngineClient
from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.requests import Admission, GenerateRequest
from streamserve.rows.answer_messages import AnswerMessages
from streamserve.rows.reaper import Reaper
from streamserve.rows.store import RowStore
from streamserve.streams.config import StreamConfig
from streamserve.streams.lease.liveness import Liveness
from streamserve.streams.log.base import EventLog
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.checks.stream_checks import check_native_part


class Worker:
    """The parts that runtime.py makes, with the engine of the test."""

    def __init__(self, folder: Path, client: EngineClient, settings: StreamConfig, log: EventLog | None = None) -> None:
        self.log = log or FileLog(folder / "streams.sqlite3")
        self.workers = Liveness(folder / "workers")
        self.store = RowStore(self.workers, messages=AnswerMessages(self.log))
        self.streams = Streams({"echo": client}, self.log, settings, store=self.store)
        self.reaper = Reaper(self.streams, self.workers)

    async def start(self, request: GenerateRequest, *, on_disconnect: str = "park", **decided: Any) -> Stream:
        """Start an answer. `decided`: fields of its admission."""
        admission = {"owner": "user:1", "tenant": "user:1", "on_disconnect": on_disconnect, **decided}
        return await self.streams.start(request, Admission(**admission))

    async def read(self, stream_id: str, after: int = 0, last: int | None = None) -> bytes:
        """Read native SSE as a client does, from what this worker finds; leave when event `last` has come."""
        stream = await self.streams.reach(stream_id)
        assert stream is not None
        out = bytearray()
        delivery = Delivery(self.streams, stream, NativeEncoder(stream.log_id), after=after)
        async with aclosing(aiter(delivery)) as pieces:
            async for data in pieces:
                out += data
                frames = check_native_part(bytes(out), after=after)
                if last is not None and frames and frames[-1].seq >= last:
                    break
        return bytes(out)

    def release_lock(self) -> None:
        """Release the lock and keep writing: the worst behaviour of a process taken for dead."""
        self.workers.close()

    async def aclose(self) -> None:
        await self.streams.aclose()
        await self.log.aclose()
        self.workers.close()

"""`Streams`: every stream of this process: started here, found here, forgotten here.

Owns one task per stream, which runs the stream to its end, reports it, keeps it for replay and drops it. With `claims`,
the log and the streams in it are shared with other processes: what is not here is looked for there (`reach`). Lives on
one event loop; knows no wire, no users beyond the `owner` and `tenant` strings it is given, and no framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from dataclasses import replace

from streamserve.clients.base import EngineClient, Generation
from streamserve.protocol.errors import EngineUnavailable, NotFound
from streamserve.protocol.requests import GenerateRequest
from streamserve.protocol.stats import ModelDescription
from streamserve.streams.config import StreamConfig
from streamserve.streams.lease.lease import Claims, Lease
from streamserve.streams.log.base import EventLog
from streamserve.streams.restore import recall
from streamserve.streams.stream import Stream

logger = logging.getLogger("streamserve.streams")

# `aclose` waits this long for terminal events to be committed and reported, then cancels.
_CLOSE_SECONDS = 5.0
_ENGINE_POLL_SECONDS = 0.05

OnFinished = Callable[[Stream], Awaitable[None]]


class Streams:
    """The directory. `on_finished` is awaited for each stream, after its terminal event is committed, at least once.

    Again where a stream is recalled whose producer is gone: it may have died between the two.
    """

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        log: EventLog,
        settings: StreamConfig | None = None,
        *,
        on_finished: OnFinished | None = None,
        claims: Claims | None = None,
    ) -> None:
        self.clients = clients
        self.log = log
        self.settings = settings or StreamConfig()
        self._on_finished = on_finished
        self._claims = claims
        self._streams: dict[str, Stream] = {}
        self._by_log: dict[str, Stream] = {}
        self._starting: Counter[str] = Counter()
        self._kept: OrderedDict[str, asyncio.Event] = OrderedDict()  # finished streams; set the event to drop one
        self._expired: OrderedDict[str, None] = OrderedDict()  # ids and log ids of dropped streams
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def start(self, request: GenerateRequest, *, owner: str, tenant: str, on_disconnect: str = "park") -> Stream:
        """Have the engine accept `request` and return its running stream. Whatever is raised, nothing was created.

        Raises NotFound for an unknown model, and what the client raises: BadRequest, Refused.
        """
        client = self._find_client(request.model)
        arrived_at = time.monotonic() if request.arrived_at is None else request.arrived_at
        reader_tokens = None if on_disconnect == "finish" else (0,) * request.n
        request = replace(
            request,
            tenant=tenant,
            stream_id=secrets.token_hex(16),
            arrived_at=arrived_at,
            reader_tokens=reader_tokens,
        )
        self._starting[owner] += 1
        try:
            stream = await self._open(client, request, owner, on_disconnect)
        finally:
            self._starting -= Counter([owner])
        self._add(stream)
        return stream

    def find(self, stream_id: str) -> Stream | None:
        """Return the stream of that id, running or kept in this process."""
        return self._streams.get(stream_id)

    async def reach(self, stream_id: str) -> Stream | None:
        """Return the stream of that id, whichever process it belongs to, with all that is committed counted.

        None if there is no such stream or its events are no longer kept. Who comes to read must attach soon. Raises
        LogUnavailable.
        """
        stream = self._streams.get(stream_id)
        if self._claims is None:
            return stream
        if self._is_closing:
            raise EngineUnavailable("The server is shutting down.")
        if stream is None or stream.has_left:
            return await self._recall(stream_id, self._claims)
        try:
            await stream.catch_up()
        except KeyError:
            return None
        return stream

    def find_log(self, log_id: str) -> Stream | None:
        """Return the stream whose events carry that log id."""
        return self._by_log.get(log_id)

    def is_expired(self, some_id: str) -> bool:
        """Tell whether a stream of that id or log id was here and has been dropped: 410 rather than 404."""
        return some_id in self._expired

    def all(self) -> list[Stream]:
        """Return every stream, oldest first, the finished ones that are kept too."""
        return list(self._streams.values())

    def num_live(self, owner: str | None = None) -> int:
        """Count this process's unfinished streams, and those being started: right before `start` it cannot race."""
        starting = self._starting.total() if owner is None else self._starting[owner]
        return starting + sum(stream.is_live for stream in self.all() if owner in (None, stream.owner))

    def shut_down(self) -> None:
        """Take no new stream, and end those that are here; on a shared log another worker can go on with them."""
        self._is_closing = True
        for stream in self.all():
            stream.shut_down()

    async def aclose(self) -> None:
        """End every live stream with a retryable `error`; returns when that is committed and no task is left."""
        self.shut_down()
        for drop in self._kept.values():
            drop.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _find_client(self, model: str) -> EngineClient:
        client = self.clients.get(model)
        if client is None:
            raise NotFound(f"There is no model {model!r} here.", code="model_not_found", param="model")
        return client

    async def _open(self, client: EngineClient, request: GenerateRequest, owner: str, on_disconnect: str) -> Stream:
        generation, request = await self._accept(client, request)
        try:
            if self._is_closing:
                raise EngineUnavailable("The server is shutting down.")
            stream = Stream(
                client,
                self.log,
                self.settings,
                request,
                generation,
                owner=owner,
                on_disconnect=on_disconnect,
                claim=Lease(self._claims, request.stream_id),
            )
            await stream.open()
        except BaseException:
            generation.cancel()
            raise
        return stream

    async def _accept(self, client: EngineClient, request: GenerateRequest) -> tuple[Generation, GenerateRequest]:
        """Have the engine accept `request`; the wait for one that is being replaced is no queue time."""
        wait_until = time.monotonic() + self.settings.engine_wait_seconds
        while True:
            try:
                return await client.generate(request), request
            except EngineUnavailable:
                if self._is_closing or not _is_coming(client.describe()) or time.monotonic() >= wait_until:
                    raise
            await asyncio.sleep(_ENGINE_POLL_SECONDS)
            request = replace(request, arrived_at=time.monotonic())

    async def _recall(self, stream_id: str, claims: Claims) -> Stream | None:
        record = await claims.find(stream_id)
        if record is None:
            return None
        stream = await recall(record, claims, self.clients.get(record.model), self.log, self.settings)
        quicker = self._streams.get(stream_id)
        if quicker is not None and not quicker.has_left:
            return quicker
        if stream is not None:
            self._add(stream)
        return stream

    def _add(self, stream: Stream) -> None:
        self._streams[stream.id] = self._by_log[stream.log_id] = stream
        # An empty context: the stream outlives the request that started it, and must keep nothing of it alive.
        task = asyncio.get_running_loop().create_task(self._live(stream), name=f"stream {stream.id}", context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _live(self, stream: Stream) -> None:
        """The life of one stream. When the server stops, logs are left to the readers who still read them."""
        try:
            await stream.run()
            is_ended = stream.terminal is not None and not stream.claim.is_elsewhere
            if stream.claim.is_held or is_ended:  # else that is for whoever wrote its end, who lives
                await self._report(stream)
            if not self._is_closing and not stream.has_left:
                await self._keep(stream)
            if not self._is_closing:
                await self._drop(stream)
        except Exception:
            logger.exception("stream %s: failed after its end", stream.id)

    async def _report(self, stream: Stream) -> None:
        if self._on_finished is None:
            return
        try:
            await self._on_finished(stream)
        except Exception:
            logger.exception("stream %s: on_finished failed", stream.id)

    async def _keep(self, stream: Stream) -> None:
        """Wait until the finished stream may go: its time is over, or newer ones need its room."""
        self._kept[stream.id] = drop = asyncio.Event()
        self._make_room()
        while not drop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.retention_seconds):
                    await drop.wait()
            if stream.readers.num_attached == 0 or self._is_closing:
                break
        self._kept.pop(stream.id, None)

    def _make_room(self) -> None:
        """Let the oldest finished stream without readers go, if there are too many."""
        if len(self._kept) > self.settings.max_finished:
            idle = (name for name in self._kept if self._streams[name].readers.num_attached == 0)
            oldest = next(idle, None)
            if oldest is not None:
                self._kept.pop(oldest).set()

    async def _drop(self, stream: Stream) -> None:
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id], self._by_log[stream.log_id]
        if self._claims is not None:
            return  # others may read the log; it is purged when it is old
        for name in (stream.id, stream.log_id):
            self._expired[name] = None
        while len(self._expired) > 2 * self.settings.max_expired:
            self._expired.popitem(last=False)
        await self.log.drop(stream.log_id)


def _is_coming(model: ModelDescription) -> bool:
    """Tell whether an engine may be expected in a moment: there was one, or this process has not looked yet.

    One that drains may make way for another; that it is "ready" may be old news.
    """
    return (model.was_ready and model.state in ("ready", "draining", "loading")) or model.stage == "connecting"

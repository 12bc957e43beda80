"""`Streams`: every stream of this process: started here, found here, dropped here.

Owns one task per stream, which writes its record, runs it to its end, records that, keeps the stream for replay and
drops it. With a shared store, other processes have the same log and streams: `reach` restores what is not here. Lives
on one event loop; knows no wire, no users beyond the `owner` and `tenant` strings, and no framework.

`restore`: a stream of another process, or of one that has died, rebuilt from its record and its log.

It begins as a replica, which follows the log; an owner's reader has it claim the stream (lease.py) and resume. asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from contextvars import Context
from dataclasses import replace
from typing import Any, cast

from streamserve.clients.base import EngineClient, Generation
from streamserve.protocol.errors import EngineUnavailable, NotFound, StreamserveError
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest
from streamserve.protocol.stats import ModelDescription
from streamserve.streams.config import StreamConfig
from streamserve.streams.lease.lease import Lease
from streamserve.streams.log.base import EventLog, LogUnavailable
from streamserve.streams.quota import StreamQuota
from streamserve.streams.store import NullStore, Record, StreamStore, answer_text
from streamserve.streams.stream import Stream
from streamserve.streams.transcript import StreamSummary
from streamserve.streams.writer import LogWriter

logger = logging.getLogger("streamserve.streams")

# `aclose` waits this long for terminal events to be committed and their records finished, then cancels.
_CLOSE_SECONDS = 5.0
_ENGINE_POLL_SECONDS = 0.05
# Between attempts to write a stream's end. The longest leaves room for one more while the process closes.
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 4.0


class Streams:
    """The registry. `limits` bounds how many streams an owner may have at once; None is no bound."""

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        log: EventLog,
        settings: StreamConfig | None = None,
        *,
        store: StreamStore | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.clients = clients
        self.log = log
        self.settings = settings or StreamConfig()
        self.store = store or NullStore()
        self.writer = LogWriter(log, outage_seconds=self.settings.log_outage_seconds)
        self._quota = StreamQuota(limits, self)
        self._streams: dict[str, Stream] = {}
        self._by_log: dict[str, Stream] = {}
        self._kept: OrderedDict[str, asyncio.Event] = OrderedDict()  # finished streams; set the event to drop one
        self._expired: OrderedDict[str, None] = OrderedDict()  # ids and log ids of dropped streams
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def start(self, request: GenerateRequest, *, owner: str, tenant: str, on_disconnect: str = "park") -> Stream:
        """Start an answer: a place in the quota, the engine's acceptance, the record, `meta`; then its task runs.

        Whatever is raised, no stream runs: NotFound for an unknown model, QuotaExceeded, Overloaded, LogUnavailable,
        what the store raises, and what the client raises: BadRequest, Refused.
        """
        self.writer.refuse_if_down()
        client = self.clients.get(request.model)
        if client is None:
            raise NotFound(f"There is no model {request.model!r} here.", code="model_not_found", param="model")
        request = replace(
            request,
            tenant=tenant,
            stream_id=secrets.token_hex(16),
            arrived_at=time.monotonic() if request.arrived_at is None else request.arrived_at,
            reader_tokens=None if on_disconnect == "finish" else (0,) * request.n,
        )
        async with self._quota.place_for(owner) as take_place:
            generation, request = await self._accept(client, request)
            try:
                if self._is_closing:
                    raise EngineUnavailable("The server is shutting down.")
                take_place()
                lease = Lease(self.store, request.stream_id)
                stream = Stream(
                    client,
                    self.writer,
                    self.settings,
                    request,
                    generation,
                    owner=owner,
                    on_disconnect=on_disconnect,
                    lease=lease,
                )
            except BaseException:
                generation.cancel()
                raise
            begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._add(stream, self._begin(stream, generation, begun))
        try:
            await begun
        except asyncio.CancelledError:
            stream.abandon()
            raise
        return stream

    def find(self, stream_id: str) -> Stream | None:
        """Return the stream of that id, running or kept in this process."""
        return self._streams.get(stream_id)

    async def reach(self, stream_id: str, record: Record | None = None) -> Stream | None:
        """Return the stream of that id, whichever process runs it, with all that is committed counted.

        `record` is the stream's, if the caller has just read it. None if there is no such stream or its events are no
        longer kept. A reader must attach soon. Raises LogUnavailable.
        """
        stream = self._streams.get(stream_id)
        if not self.store.is_shared:
            return stream
        if self._is_closing:
            raise EngineUnavailable("The server is shutting down.")
        if stream is not None and not stream.has_left:
            if record is not None:
                stream.lease.note(record)
            try:
                await stream.catch_up()
            except KeyError:
                return None
            return stream
        record = record or await self.store.find(stream_id=stream_id)
        if record is None:
            return None
        stream = await restore(record, self.store, self.clients.get(record.model), self.writer, self.settings)
        quicker = self._streams.get(stream_id)
        if quicker is not None and not quicker.has_left:
            return quicker
        if stream is not None:
            self._add(stream, is_recorded=record.is_finished)
        return stream

    def find_log(self, log_id: str) -> Stream | None:
        """Return the stream whose events carry that log id."""
        return self._by_log.get(log_id)

    def is_expired(self, some_id: str) -> bool:
        """Return whether a stream of that id or log id was here and has been dropped: 410 rather than 404."""
        return some_id in self._expired

    def all(self) -> list[Stream]:
        """Return every stream, oldest first, the finished ones that are kept too."""
        return list(self._streams.values())

    def shut_down(self) -> None:
        """Take no new stream, and end those that are here; on a shared log another worker can resume them."""
        self._is_closing = True
        for stream in self.all():
            if stream.last_seq:  # else its client is still being answered, and `aclose` gives it some seconds
                stream.shut_down()

    async def aclose(self) -> None:
        """End every live stream with a retryable `error`; return when that is committed and no task is left."""
        self.shut_down()
        for drop in self._kept.values():
            drop.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._quota.aclose()
        await self.writer.aclose()

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

    def _add(
        self, stream: Stream, beginning: Coroutine[Any, Any, bool] | None = None, *, is_recorded: bool = False
    ) -> None:
        """Enter the stream and run its task: the `beginning` of a new one first; its end may be recorded already."""
        self._streams[stream.id] = self._by_log[stream.log_id] = stream
        live = self._live(stream, beginning, is_recorded)
        # An empty context: the stream outlives the request that started it, and must keep nothing of it alive.
        task = asyncio.get_running_loop().create_task(live, name=f"stream {stream.id}", context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, stream: Stream, generation: Generation, begun: asyncio.Future[None]) -> bool:
        """Insert the record, commit `meta` and set `begun`. Return False if that failed; `begun` has the exception."""
        failure: Exception | None = None
        is_inserted = False
        record = Record(
            id=stream.id,
            log_id=stream.log_id,
            owner=stream.owner,
            tenant=stream.tenant,
            model=stream.model,
            created=time.time(),
            on_disconnect=stream.on_disconnect,
            request=stream.request,
            fence=stream.lease.fence,
            producer=self.store.worker_id,
        )
        try:
            await self.store.insert(record)
            is_inserted = True
            await stream.open()
        except Exception as error:
            failure = error
        except asyncio.CancelledError:
            generation.cancel()
            if not begun.done():
                begun.set_exception(EngineUnavailable("The server is shutting down."))
            raise
        if failure is None:
            if not begun.done():
                begun.set_result(None)
            return True
        generation.cancel()
        stream.ended.set()
        self._remove(stream)
        if not begun.done():
            begun.set_exception(failure)
        if is_inserted:
            code = failure.code if isinstance(failure, StreamserveError) else "internal_error"
            await self._write_end(replace(stream.summary(), error_code=code), stream.last_seq, "")
        return False

    async def _live(self, stream: Stream, beginning: Coroutine[Any, Any, bool] | None, is_recorded: bool) -> None:
        """Run the stream to its end, write that and keep the stream. When the server stops, nothing is dropped."""
        try:
            if beginning is not None and not await beginning:
                return
            await stream.run()
            is_ended = stream.terminal is not None and not stream.lease.is_elsewhere
            # One that ended elsewhere is recorded by the process that wrote its end, if that is alive.
            if (stream.lease.is_held or is_ended) and not is_recorded:
                await self._write_end(stream.summary(), stream.last_seq, await self._text_of(stream))
            if not (self._is_closing or stream.has_left or stream.is_lost):
                await self._keep(stream)
            if not self._is_closing:
                await self._drop(stream)
        except Exception:
            logger.exception("stream %s: failed after its end", stream.id)

    async def _write_end(self, summary: StreamSummary, last_seq: int, text: str) -> None:
        """Finish the stream's record, again and again until that succeeds. Until then other processes count it."""
        delay = _RETRY_SECONDS
        while True:
            try:
                await self.store.finish(summary, last_seq=last_seq, text=text)
                return
            except Exception as error:
                if delay == _RETRY_SECONDS:
                    logger.exception("stream %s: its end is not written yet", summary.id)
                else:
                    logger.warning("stream %s: its end is not written yet: %s", summary.id, error)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, _MAX_RETRY_SECONDS)

    async def _text_of(self, stream: Stream) -> str:
        """Return the answer as it is to be stored: nothing of one that ends while the log cannot be read."""
        if not self.store.keeps_text:
            return ""
        try:
            return await answer_text(self.log, stream.log_id)
        except (KeyError, LogUnavailable):
            logger.exception("stream %s: its text is not stored", stream.id)
            return ""

    async def _keep(self, stream: Stream) -> None:
        """Wait until the finished stream may be dropped: its time is over, or newer ones need its room."""
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
        """Drop the oldest finished stream without readers, if there are too many."""
        if len(self._kept) > self.settings.max_finished:
            idle = (name for name in self._kept if self._streams[name].readers.num_attached == 0)
            oldest = next(idle, None)
            if oldest is not None:
                self._kept.pop(oldest).set()

    async def _drop(self, stream: Stream) -> None:
        self._remove(stream)
        if self.store.is_shared:
            return  # other processes may read the log; it is purged when it is old
        for name in (stream.id, stream.log_id):
            self._expired[name] = None
        while len(self._expired) > 2 * self.settings.max_expired:
            self._expired.popitem(last=False)
        await self.log.drop(stream.log_id)

    def _remove(self, stream: Stream) -> None:
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id], self._by_log[stream.log_id]


def _is_coming(model: ModelDescription) -> bool:
    """Return whether an engine may be expected in a moment: there was one, or this process has not looked yet.

    One that drains may be replaced; that it is "ready" may be out of date.
    """
    return (model.was_ready and model.state in ("ready", "draining", "loading")) or model.stage == "connecting"


# The monotonic clock restarts when the machine boots: a time further off wall time than this is of another boot.
_CLOCK_SECONDS = 5.0


async def restore(
    record: Record, store: StreamStore, client: EngineClient | None, writer: LogWriter, settings: StreamConfig
) -> Stream | None:
    """Return the stream with all that is committed counted; None if its log is gone. `run` must follow."""
    stream = Stream(
        client if client is not None and record.request is not None else _unable(record),
        writer,
        settings,
        _request_of(record),
        None,
        owner=record.owner,
        on_disconnect=record.on_disconnect,
        lease=Lease(store, record.id, fence=record.fence, is_held=False, producer=record.producer),
        log_id=record.log_id,
        created=int(record.created),
    )
    try:
        await stream.catch_up()
    except KeyError:
        return None
    # A finished record without an end in the log: the end was shown elsewhere while the log was away.
    return stream if stream.last_seq and (stream.terminal is not None or not record.is_finished) else None


def _request_of(record: Record) -> GenerateRequest:
    """Return the request with its arrival on this machine's clock; a stand-in for a finished stream's."""
    arrived_at = time.monotonic() - (time.time() - record.created)
    if record.request is None:
        return GenerateRequest(
            model=record.model, prompt="", tenant=record.tenant, stream_id=record.id, arrived_at=arrived_at
        )
    kept = record.request.arrived_at
    if kept is not None and abs(kept - arrived_at) < _CLOCK_SECONDS:
        arrived_at = kept
    return replace(record.request, tenant=record.tenant, stream_id=record.id, arrived_at=arrived_at)


class _Unable:
    """Stands in for an engine, and raises why there is none."""

    def __init__(self, error: StreamserveError) -> None:
        self._error = error

    async def generate(self, request: GenerateRequest) -> Generation:
        raise self._error


def _unable(record: Record) -> EngineClient:
    error: StreamserveError
    if record.refusal is not None:
        error = record.refusal
    elif record.request is None:
        error = StreamserveError("The server can no longer go on with this answer. Ask again.", code="producer_lost")
    else:
        error = NotFound(f"There is no model {record.model!r} here any more.", code="model_not_found", param="model")
    return cast(EngineClient, _Unable(error))

"""`Streams`: every stream of this process: it starts, finds and drops them.

Owns one task per stream, which inserts its record, runs it, finishes the record, keeps it for replay and drops it. With
a shared store other processes have the same log and streams; `reach` restores a stream that is not in this process. On
one event loop; knows no transport, no framework, and of users only `owner` and `tenant`.
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
from functools import partial
from types import MappingProxyType
from typing import Any

from streamserve.clients.base import EngineClient, until_loaded
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.clients.pipeline.interrupts import LoneMemo
from streamserve.clients.pipeline.journal import Memo
from streamserve.protocol.engine import HOPELESS, Losses, ModelDescription
from streamserve.protocol.errors import EngineUnavailable, StreamserveError, no_model
from streamserve.protocol.events import Error
from streamserve.protocol.limits import Limits
from streamserve.protocol.measures import Measures
from streamserve.protocol.requests import Admission, GenerateRequest, Resume, size_of
from streamserve.streams.config import StreamConfig
from streamserve.streams.interrupts import InterruptLog
from streamserve.streams.lease.lease import Lease
from streamserve.streams.lease.restore import record_of, restore
from streamserve.streams.log.base import EventLog, LogUnavailable
from streamserve.streams.quota import Places, StreamQuota
from streamserve.streams.run_memo import RunMemo, run_log
from streamserve.streams.store import Group, NullStore, Record, StreamStore, answer_text, groups_of
from streamserve.streams.stream import Stream
from streamserve.streams.transcript import StreamSummary
from streamserve.streams.writer import LogWriter
from streamserve.tracing.answers import begin_answer, operation_of
from streamserve.tracing.spans import Span, enter, error_type

logger = logging.getLogger("streamserve.streams")

_CLOSE_SECONDS = 5.0  # `aclose` waits so long for ends to be committed and recorded, then cancels
_ENGINE_POLL_SECONDS = 0.05
_MAX_LOAD_POLL_SECONDS = 1.0  # an engine that loads is asked again so often: what is known may be out of date
# The delays between attempts to write a stream's end. The longest allows one more attempt while the process closes.
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.1, 4.0
# About what a finished stream takes: its objects, a token in its transcript, and an event as objects to one encoded.
_STREAM_BYTES, _TOKEN_BYTES, _OBJECT_FACTOR = 8 * 1024, 4, 5


class Streams:
    """The registry. `limits` bounds the concurrent streams of an owner; None is no bound. `interrupts`: of `log`.

    `patience`: how many seconds a request of each latency class may wait for its place; a class without any does not.
    `traces`: whether spans are recorded where the site has set up OpenTelemetry.
    """

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        log: EventLog,
        settings: StreamConfig | None = None,
        *,
        store: StreamStore | None = None,
        limits: Limits | None = None,
        patience: Mapping[str, float] = MappingProxyType({}),
        interrupts: InterruptLog | None = None,
        traces: bool = True,
    ) -> None:
        self.clients, self.traces = clients, traces
        self.log = log
        self.settings = settings or StreamConfig()
        self.store = store or NullStore()
        self.interrupts = interrupts or InterruptLog(log, self.settings, forgets=not self.store.is_shared)
        self.writer = LogWriter(log, outage_seconds=self.settings.log_outage_seconds)
        self.measures = Measures(tuple(clients))
        self._quota, self._patience = StreamQuota(limits, self), patience
        self._streams: dict[str, Stream] = {}
        self._by_log: dict[str, Stream] = {}
        self._starting: dict[str, asyncio.Event] = {}  # streams that are being accepted; set once they have begun
        # The streams whose tasks run, by group and id, oldest first; some may just have ended.
        self.unfinished: dict[Group, dict[str, Stream]] = {}
        self._kept: OrderedDict[str, asyncio.Event] = OrderedDict()  # finished streams; the event drops a stream
        self._kept_bytes: dict[str, int] = {}
        self._num_kept_bytes = 0
        self._expired: OrderedDict[str, None] = OrderedDict()  # ids and log ids of dropped streams
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def start(self, request: GenerateRequest, admission: Admission, places: Places | None = None) -> Stream:
        """Start an answer: the quota, the engine's acceptance, the record, `meta`; then its task runs.

        Beyond its caller's places it waits for a place, for as long as its class may. `places`: of several streams that
        begin together. Raises KeyTaken where there is a record of the admission's key, NotFound for an unknown model,
        QuotaExceeded, RateLimited, Overloaded, LogUnavailable, what the store raises, and what the client raises:
        BadRequest, Refused. Then no stream runs.
        """
        asked_at = time.monotonic()
        span = None
        if not self.traces:
            admission = self._as_traced(admission)
        else:
            operation = self._operation_of(request)
            span = begin_answer(request, operation, admission.trace, admission.received_at or asked_at)
        if span is None:
            return await self._start(request, admission, places, asked_at)
        try:
            return await self._start(request, replace(admission, trace=span.trace), places, asked_at, span)
        except BaseException as error:
            if not span.is_taken:
                span.end(time.monotonic(), error=error_type(error))
            raise

    async def _start(
        self,
        request: GenerateRequest,
        admission: Admission,
        places: Places | None,
        asked_at: float,
        span: Span | None = None,
    ) -> Stream:
        """Do what `start` does. The stream takes `span` when it has begun."""
        self.writer.refuse_if_down()
        self.store.refuse_early(admission)
        client = self.clients.get(request.model)
        if client is None:
            raise no_model(request.model, self.clients)
        patience = self._patience.get(request.latency_class, 0.0)
        async with self._quota.reserve(admission.place_of, patience, places) as make_room:
            now = time.monotonic()
            admission = replace(
                admission, stream_id=secrets.token_hex(16), arrived_at=now, waited_seconds=now - asked_at
            )
            self._starting[admission.stream_id] = has_begun = asyncio.Event()
            try:
                stream = await self._accepted(client, request, admission)
            finally:
                del self._starting[admission.stream_id]
            try:
                await make_room()
            except BaseException:
                self._discard(stream)
                raise
            stream.transcript.timings.started_at = admission.received_at or asked_at
            begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._add(stream, self._begin(stream, begun, has_begun, span))
        try:
            await begun
        except asyncio.CancelledError:
            stream.abandon()
            raise
        return stream

    def find(self, stream_id: str) -> Stream | None:
        """Return the stream of that id, if it runs or is kept in this process."""
        return self._streams.get(stream_id)

    async def reach(self, stream_id: str, record: Record | None = None) -> Stream | None:
        """Return the stream of that id, in any process, with every committed event counted; a reader must attach soon.

        `record` is the stream's, if it was just read. None: no such stream or no events. Raises LogUnavailable.
        """
        stream = self._streams.get(stream_id)
        if not self.store.is_shared:
            return stream
        if self._is_closing:
            raise EngineUnavailable("The server is shutting down.")
        if stream is not None and not stream.has_left:
            if record is not None and record.log_id != stream.log_id:  # another process has deleted its events
                self.forget(stream_id)
                return None
            if record is not None:
                stream.lease.note(record)
            try:
                await stream.follower.catch_up()
            except KeyError:
                return None
            return stream
        record = record or await self.store.find(stream_id=stream_id)
        if record is None:
            return None
        stream = await self._restored(record)
        concurrent = self._streams.get(stream_id)
        if concurrent is not None and not concurrent.has_left:
            return concurrent
        if stream is not None:
            self._add(stream, is_recorded=record.is_finished)
        return stream

    async def adopt(self, record: Record) -> None:
        """Take in a job's stream, whose first event is in the log, where no other process could restore it."""
        stream = await self._restored(record)
        if stream is not None:
            stream.hold()
            self._add(stream)

    def forget(self, stream_id: str) -> bool:
        """Drop a finished stream, if this process keeps it; return whether it did."""
        self._num_kept_bytes -= self._kept_bytes.pop(stream_id, 0)
        drop = self._kept.pop(stream_id, None)
        if drop is not None:
            drop.set()
        return drop is not None

    def find_log(self, log_id: str) -> Stream | None:
        """Return the stream whose events carry that log id."""
        return self._by_log.get(log_id)

    def is_expired(self, some_id: str) -> bool:
        """Return whether this process had a stream of that id or log id and dropped it: 410, not 404."""
        return some_id in self._expired

    def all(self) -> list[Stream]:
        """Return every stream, oldest first, with the finished streams that are kept."""
        return list(self._streams.values())

    def memo_of(self, stream_id: str) -> Memo | None:
        """Return what the run of a stream keeps: for another process, or, of a run that begins, for an interrupt."""
        stream, begun = self._streams.get(stream_id), self._starting.get(stream_id)
        if not self.store.is_shared:
            return None if begun is None else LoneMemo(begun)
        if stream is None:
            return None if begun is None else RunMemo(self.log, stream_id, begun=begun)
        return RunMemo(self.log, stream_id, log_id=stream.log_id, fence=stream.lease.fence)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place of their caller."""
        return self._quota.num_waiting

    def begin_to_drain(self) -> None:
        """Refuse the requests that wait for a place, so that another process may take them."""
        self._quota.close_queue()

    def shut_down(self) -> None:
        """Start no more streams, and end this process's streams; with a shared log another process can resume them."""
        self._is_closing = True
        self._quota.close_queue()
        for stream in self.all():
            if stream.last_seq:  # else it still starts, and `aclose` gives it some seconds
                stream.shut_down()

    async def aclose(self) -> None:
        """End every live stream with a retryable `error`; return when those are committed and no task is left."""
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

    async def _restored(self, record: Record) -> Stream | None:
        record = replace(record, admission=self._as_traced(record.admission))
        return await restore(record, self.store, self.clients.get(record.model), self.writer, self.settings)

    def _as_traced(self, admission: Admission) -> Admission:
        """Return an admission whose trace says whether spans are recorded here."""
        trace = admission.trace
        if trace is None or trace.is_recorded == self.traces:
            return admission
        return replace(admission, trace=replace(trace, is_recorded=self.traces))

    def _operation_of(self, request: GenerateRequest) -> str:
        client = self.clients.get(request.model)
        return client.operation if isinstance(client, PipelineClient) else operation_of(request)

    async def _accepted(self, client: EngineClient, request: GenerateRequest, admission: Admission) -> Stream:
        """Return the accepted stream. While the engine loads or is replaced, wait and restart the arrival time.

        A stream that `begins_unloaded` is returned without a generation while its model loads.
        """
        began, losses = time.monotonic(), Losses()
        resume = Resume(reader_tokens=None if admission.on_disconnect == "finish" else (0,) * request.n)
        wait_until, loaded_at, generation = began + self.settings.engine_wait_seconds, None, None
        while generation is None:
            try:
                generation = await client.generate(request, admission, resume)
                break
            except EngineUnavailable as refused:
                if refused.lost is not None:
                    losses.note(refused.lost, 0)
                    if losses.is_hopeless:
                        raise EngineUnavailable(HOPELESS, code="engine_died") from refused
                is_loading = refused.code == "engine_loading" or client.describe().is_loading
                if is_loading and admission.begins_unloaded and not self._is_closing:
                    break
                is_coming = is_loading or _is_replaced(client.describe())
                if self._is_closing or not is_coming or time.monotonic() >= wait_until:
                    raise
            await until_loaded(client, min(wait_until - time.monotonic(), _MAX_LOAD_POLL_SECONDS))
            await asyncio.sleep(_ENGINE_POLL_SECONDS)
            loaded_at = time.monotonic()
            admission = replace(admission, arrived_at=loaded_at)
            resume = replace(resume, num_losses=losses.num_losses)
        if self._is_closing:
            if generation is not None:
                generation.cancel()
            raise EngineUnavailable("The server is shutting down.")
        if generation is None:  # another process may continue the answer
            request = request.with_seed(secrets.randbits(63))
        lease = Lease(self.store, admission.stream_id)
        stream = Stream(
            client,
            self.writer,
            self.settings,
            request,
            admission,
            generation,
            lease=lease,
            resume=resume,
        )
        if generation is None:
            stream.engine.parking.await_engine(time.monotonic())
        elif loaded_at is not None:
            stream.transcript.timings.loading_seconds = loaded_at - began
        return stream

    def _add(
        self, stream: Stream, beginning: Coroutine[Any, Any, bool] | None = None, *, is_recorded: bool = False
    ) -> None:
        """Register the stream and start its task: the `beginning` of a new one first. `is_recorded`: its end is."""
        self._streams[stream.id] = self._by_log[stream.log_id] = stream
        stream.readers.counts = self.measures.of(stream.model).readers
        if self.traces:
            stream.spans.new = partial(begin_answer, stream.request, self._operation_of(stream.request))
        for group in groups_of(stream.admission.place_of):
            self.unfinished.setdefault(group, {})[stream.id] = stream
        live = self._live(stream, beginning, is_recorded)
        # An empty context: the stream outlives the request that started it, and must not keep it alive.
        task = asyncio.get_running_loop().create_task(live, name=f"stream {stream.id}", context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(
        self, stream: Stream, begun: asyncio.Future[None], has_begun: asyncio.Event, span: Span | None
    ) -> bool:
        """Insert the record, commit `meta` and set `begun`. Return False on failure; `begun` has the exception.

        `has_begun`: for a run that waits for it. `span`: of the stream, unless its start was given up meanwhile.
        """
        failure: Exception | None = None
        is_inserted = False
        try:
            stream.rates = await self.store.insert(record_of(stream, self.store.own_id))
            is_inserted = True
            await stream.open()
        except Exception as error:
            failure = error
        except asyncio.CancelledError:
            stream.discard()
            if not begun.done():
                begun.set_exception(EngineUnavailable("The server is shutting down."))
            raise
        if failure is None:
            if span is not None and not span.is_over:
                stream.spans.take(span)
            has_begun.set()
            if not begun.done():
                begun.set_result(None)
            return True
        self._discard(stream)
        self._remove(stream)
        if not begun.done():
            begun.set_exception(failure)
        if is_inserted:
            code = failure.code if isinstance(failure, StreamserveError) else "internal_error"
            await self._write_end(replace(stream.summary(), error_code=code), stream.last_seq, "")
        return False

    async def _live(self, stream: Stream, beginning: Coroutine[Any, Any, bool] | None, is_recorded: bool) -> None:
        """Run the stream to its end, write the end, keep the stream, drop it. A server that stops drops nothing."""
        enter(stream.admission.trace)
        try:
            if beginning is not None and not await beginning:
                return
            await stream.run()
            self._note_end(stream)
            self._quota.note_end(stream)
            is_ended = stream.terminal is not None and not stream.lease.is_elsewhere
            # The end of a follower is recorded by the process that wrote it, if that is alive.
            if (stream.lease.is_held or is_ended) and not is_recorded:
                self._measure(stream)
                await self._write_end(stream.summary(), stream.last_seq, await self._text_of(stream))
                await self._drop_run(stream)
                await self._drop_interrupted(stream.request.continues)
            if not (self._is_closing or stream.has_left or stream.is_lost):
                await self._keep(stream)
            if not self._is_closing:
                await self._drop(stream)
        except Exception:
            logger.exception("stream %s: its task failed after its end", stream.id)

    def _measure(self, stream: Stream) -> None:
        """Count an answer that this process has brought to its end."""
        end, timings = stream.terminal, stream.transcript.timings
        if end is None or stream.is_lost:
            return
        self.measures.of(stream.model).note(
            end.code if isinstance(end, Error) else end.finish_reason,
            is_error=isinstance(end, Error),
            latency=time.monotonic() - timings.started_at,
            breakdown=timings.since_arrival() if isinstance(end, Error) else end.breakdown,
            gaps=timings.gaps,
        )

    async def _write_end(self, summary: StreamSummary, last_seq: int, text: str) -> None:
        """Finish the stream's record; retry until that succeeds. Until then the quotas of other processes count it."""
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
        """Return the text of the answer to store; "" if the log cannot be read."""
        if not self.store.keeps_text:
            return ""
        try:
            return await answer_text(self.log, stream.log_id)
        except (KeyError, LogUnavailable):
            logger.exception("stream %s: its text is not stored", stream.id)
            return ""

    async def _keep(self, stream: Stream) -> None:
        """Wait until the finished stream may be dropped: `retention_seconds` are over, or newer streams need room."""
        self._kept[stream.id] = drop = asyncio.Event()
        self._kept_bytes[stream.id] = self._size_of(stream)
        self._num_kept_bytes += self._kept_bytes[stream.id]
        self._make_room()
        while not drop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.retention_seconds):
                    await drop.wait()
            if stream.readers.num_attached == 0 or self._is_closing:
                break
        self.forget(stream.id)

    def _make_room(self) -> None:
        """Drop the oldest finished streams without readers, if too many are kept or they take too much memory.

        The newest stream is not too large for itself.
        """
        while True:
            is_too_many = len(self._kept) > self.settings.max_finished
            if not is_too_many and (self._num_kept_bytes <= self.settings.max_finished_bytes or len(self._kept) == 1):
                return
            newest = None if is_too_many else next(reversed(self._kept))
            idle = (one for one in self._kept if one != newest and self._streams[one].readers.num_attached == 0)
            if not self.forget(next(idle, "")):
                return

    def _size_of(self, stream: Stream) -> int:
        """Return about how many bytes a finished stream holds: with a log in memory its events as objects, too."""
        in_log = 0 if self.store.is_shared else _OBJECT_FACTOR * stream.outbox.num_bytes
        num_bytes = _STREAM_BYTES + size_of(stream.request) + stream.recent.num_bytes
        return num_bytes + _TOKEN_BYTES * stream.transcript.num_tokens + in_log

    def _discard(self, stream: Stream) -> None:
        """End a stream that does not begin, and drop what its run has kept already."""
        stream.discard()
        dropping = asyncio.get_running_loop().create_task(self._drop_run(stream), name="drop run", context=Context())
        self._tasks.add(dropping)
        dropping.add_done_callback(self._tasks.discard)

    async def _drop_run(self, stream: Stream) -> None:
        """Drop what the run of a stream has kept: it is over."""
        if self.store.is_shared and isinstance(self.clients.get(stream.model), PipelineClient):
            try:
                await self.log.drop(run_log(stream.id))
            except Exception:
                logger.warning("stream %s: what its run has kept is left to the purge", stream.id)

    async def _drop_interrupted(self, stream_id: str) -> None:
        """Drop the interrupted run of that stream: the run that continues it is over. "": there is none."""
        if stream_id:
            try:
                await self.interrupts.drop(stream_id)
            except Exception:
                logger.warning("stream %s: what its run has left is left to the purge", stream_id)

    async def _drop(self, stream: Stream) -> None:
        self._remove(stream)
        if self.store.is_shared:
            return  # other processes may read the log; the log is purged by age
        self._expired |= dict.fromkeys((stream.id, stream.log_id))
        while len(self._expired) > 2 * self.settings.max_expired:
            self._expired.popitem(last=False)
        await self.log.drop(stream.log_id)

    def _note_end(self, stream: Stream) -> None:
        """Take the stream out of the unfinished streams. A restored stream with its id may have followed it."""
        for group in groups_of(stream.admission.place_of):
            others = self.unfinished.get(group, {})
            if others.get(stream.id) is stream:
                del others[stream.id]
                if not others:
                    del self.unfinished[group]

    def _remove(self, stream: Stream) -> None:
        self._note_end(stream)
        if self._streams.get(stream.id) is stream:
            del self._streams[stream.id], self._by_log[stream.log_id]


def _is_replaced(model: ModelDescription) -> bool:
    """Return whether another engine may accept soon. A draining engine may be replaced; "ready" may be out of date."""
    return (model.was_ready and model.state in ("ready", "draining")) or model.stage == "connecting"

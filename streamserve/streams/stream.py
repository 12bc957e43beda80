"""`Stream`: one answer as its readers see it, from the first event to the one terminal event, across parks.

    Replica     what is committed, and the readers; follows a log that another process writes    (replica.py)
    Producer    what is to be committed: the generation, its parks, the log writer's questions   (producer.py)
    Stream      what readers and operators ask for, and the task that does what must wait        (here)

The task (`Stream.run`, owned by `Streams`) readmits, claims and ends. Everything else only records what should happen
(`stop`, `detach`, a timer) and cancels the generation synchronously. Parked means: the engine has forgotten the
sequence and the stream remembers its tokens; `Parking` has the reasons and what each waits for. Lives on the event
loop; knows no wire, no dialect and no framework.

    running ── engine's Done or Error, stop, timeout ────────────────────────────────► finished
       │ ▲                                                                                ▲
       │ └── an owner's reader is there, `Parking` is due, the engine accepts again       │
       │                                                                                  │
       ├── the last owner's reader left ──► parked ── resume window over, stop, timeout, ─┘
       └── the engine parked it ──────────────┘       engine refuses for good or dies of it

Where several processes share a log, only the one that holds the stream's `Lease` does any of this; the others are
replicas, and one of them continues when the lease is released or its process dies (lease/lease.py).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Sequence
from functools import partial

from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.parking import LOADING, NO_READER, Parking
from streamserve.protocol.errors import Refused
from streamserve.protocol.events import Citation, Done, Error, Meta, Status, Usage
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import JOB, StreamConfig
from streamserve.streams.lease.lease import Lease
from streamserve.streams.log.base import Ended, Fenced, LogLost, new_log_id
from streamserve.streams.producer import Producer
from streamserve.streams.readers import Attachment
from streamserve.streams.replica import RETRY_SECONDS
from streamserve.streams.store import Admission
from streamserve.streams.transcript import StreamSummary, summarize
from streamserve.streams.writer import LogWriter

__all__ = ["ON_DISCONNECT", "Stream", "StreamConfig", "StreamSummary"]

logger = logging.getLogger("streamserve.streams")

ON_DISCONNECT = ("park", "abort", "finish")
# While the log is away, a stop is recorded and its caller waits for so long.
STOP_SECONDS = 3.0
# And so long at most, when its end is not committed for another reason.
STOP_DEADLINE_SECONDS = 9.0
_STOP_PENDING = "The stop is recorded, and takes effect as soon as the server can write it down. Look again later."

_ABANDONED = Done(finish_reason="abandoned")
_INTERNAL = Error(code="internal_error", message="The server failed while answering. It has been logged.")
_STOPPING = Error(code="engine_unavailable", message="The server is shutting down.", retryable=True)
LOST = Error(code="log_lost", message="The server has lost this answer. Ask again.", retryable=True)


class Stream(Producer):
    """One answer as readers see it. Made by `Streams`: with an accepted generation, or restored without one."""

    def __init__(
        self,
        client: EngineClient,
        writer: LogWriter,
        config: StreamConfig,
        request: GenerateRequest,
        generation: Generation | None,
        *,
        admission: Admission,
        lease: Lease | None = None,
        log_id: str = "",
        created: int | None = None,
    ) -> None:
        super().__init__(
            client,
            writer,
            config,
            request,
            generation,
            log_id=log_id or new_log_id(),
            lease=lease or Lease(None, request.stream_id),
            on_disconnect=admission.on_disconnect,
        )
        self.admission = admission
        self.id = request.stream_id
        self.owner, self.tenant, self.model = admission.owner, admission.tenant, request.model
        self.created = int(time.time()) if created is None else created
        self.ended_at: float | None = None
        self.is_lost = False  # the log has forgotten it: readers get an error that is in no log
        self._work_over = asyncio.Event()  # of a job's attempt
        self._work_error: Error | None = None

    @property
    def state(self) -> str:
        """One of running, parked (also while it waits to be admitted again), finished."""
        if self.terminal is not None or self.ended.is_set():
            return "finished"
        return "parked" if self._generation is None and not self.lease.is_elsewhere else "running"

    @property
    def awaits_first_reader(self) -> bool:
        """Whether its first reader is still on its way."""
        return "first_reader" in self._timers

    @property
    def has_token_ids(self) -> bool:
        """Whether its tokens have ids; those of a server elsewhere have none."""
        return self.transcript.has_token_ids

    @property
    def outline(self) -> Sequence[Citation | Status]:
        """The citations and steps of a run so far."""
        return self.transcript.outline

    @property
    def is_live(self) -> bool:
        """Whether it is unfinished, and this process is responsible for it."""
        return self.state != "finished" and not self.lease.is_elsewhere

    @property
    def usage(self) -> Usage:
        """Token counts: the terminal event's, before that what the log holds."""
        if isinstance(self.terminal, Done):
            return self.terminal.usage
        if self._generation is not None:
            self.transcript.note_cached(self._generation.num_cached_tokens)
        return self.transcript.usage

    def summary(self) -> StreamSummary:
        """Return the stream's metrics of now."""
        return summarize(self)

    # What readers and operators ask for

    async def stop(self, seen_seq: int | None = None) -> None:
        """End the stream as its user asks, and return once that is committed. After the end nothing happens.

        The wait has an end: the stop is recorded, and LogUnavailable is raised after `STOP_SECONDS` while the log is
        away, Refused after `STOP_DEADLINE_SECONDS` whatever the reason.
        """
        give_up_at = time.monotonic() + STOP_DEADLINE_SECONDS
        self.end_with(Done(finish_reason="cancelled", kept_seq=None if seen_seq is None else max(0, seen_seq)))
        while not self.ended.is_set():
            try:
                async with asyncio.timeout(min(STOP_SECONDS, STOP_DEADLINE_SECONDS)):
                    await self.ended.wait()
            except TimeoutError:
                self._writer.refuse_if_down()
                if self._away is not None:
                    raise copy.copy(self._away) from None
                if time.monotonic() >= give_up_at:
                    raise Refused(_STOP_PENDING, code="stop_pending", retry_after=5) from None

    def abandon(self) -> None:
        """End a stream without an owner's reader."""
        if not self._is_wanted:
            self.end_with(_ABANDONED)

    def shut_down(self) -> None:
        """The server stops: leave a stream that another process can continue, end any other."""
        if self.can_leave:
            self._has_left = True
            self._cancel()
            self._wake()
        else:
            self.end_with(_STOPPING)

    def attach(self, reader: Attachment) -> None:
        """Count `reader` in. An owner's reader has a parked stream continued."""
        self.readers.add(reader)
        if not reader.is_watcher:
            if reader.is_paced and self.transcript.timings.first_byte_at is None:
                self.transcript.timings.first_byte_at = time.monotonic()
            self._timers.disarm("first_reader", "resume_window")
            self.parking.skip_delay()
            self._note_position()
        self._wake()

    def moved(self, reader: Attachment, seq: int, *, is_away: bool | None = None) -> None:
        """Note that `reader` has every event up to `seq`, and whether it looks away (None: as before)."""
        is_away = reader.is_away if is_away is None else is_away
        if reader.received_seq != seq or reader.is_away != is_away:
            reader.received_seq, reader.is_away = seq, is_away
            if not reader.is_watcher:
                self._note_position()

    def detach(self, reader: Attachment) -> None:
        """Count `reader` out, once. Losing the last owner's reader takes effect before this returns."""
        if self.readers.discard(reader):
            if not reader.is_watcher:
                self.release()
                self._note_position()
            if self.ended.is_set():
                self.recent.clear()
            self._wake()

    def release(self) -> None:
        """Do what `on_disconnect` says, unless an owner's reader is attached. Also for a reader that never came."""
        is_ending = self._is_ending or (self._in_flight is not None and self._in_flight.is_end)
        if is_ending or self._is_wanted or not self.lease.is_held or self.on_disconnect == JOB:
            return
        if self.on_disconnect == "abort":
            self.end_with(_ABANDONED)
            return
        if self._generation is not None and self._generation.can_park:
            self._cancel()
            self._begin_park(NO_READER)
        self._timers.disarm("first_reader")
        window = self._config.resume_window_seconds
        self._timers.arm("resume_window", window, lambda: self.end_with(_ABANDONED))

    # Of a job

    async def work(self) -> Error | None:
        """Produce here until the end, because the job of this stream runs here; return why the attempt failed.

        None: it ended, or another process has taken it (`terminal` is None then). Cancelled, it stands still.
        """
        self._work_over.clear()
        self._work_error, self.parking, self._is_worked = None, Parking(), True
        self.transcript.timings.started_at = time.monotonic()
        self._wake()
        try:
            if not self.ended.is_set():
                await self._work_over.wait()
        finally:
            self._is_worked = False
            if not self._is_ending:
                self._stand_down()
        return self._work_error

    async def bury(self, error: Error) -> None:
        """End the stream of a job with `error`, which is not tried again."""
        self.end_with(error)
        await self.work()

    def fail_attempt(self, error: Error) -> None:
        """Stop producing without an end: the job is tried again, or buried. `work` returns the error."""
        self._work_error = error
        self._work_over.set()

    def _stand_down(self) -> None:
        self._cancel()
        self._own.clear()
        self._timers.disarm_all()
        self.parking.begin(NO_READER, self.transcript.num_tokens, time.monotonic())
        self._wake()

    def _give_up(self, error: Error) -> None:
        if self.on_disconnect == JOB:
            self.fail_attempt(error)
        else:
            super()._give_up(error)

    def _stop_producing(self) -> None:
        super()._stop_producing()
        self._is_worked = False
        self._work_over.set()

    def on_loss(self) -> bool:
        """The log no longer has what it had acknowledged. Return whether the stream ends here in an error for that."""
        if self.lease.is_held and self.terminal is None:
            self._failure = LogLost(self.log_id)
            self._wake()
            return True
        return self.is_lost

    # The stream's task

    async def open(self) -> None:
        """Commit `meta`, the first event, and begin to wait for a reader. `run` must follow. Raises LogUnavailable."""
        meta = Meta(
            model=self.model,
            stream_id=self.id,
            created=self.created,
            prompt_tokens=self.usage.prompt_tokens,
            has_token_ids=self.has_token_ids,
        )
        self._own.append(meta)
        if self.parking.unloaded_at is not None:
            self._own.append(Status(status="loading", message=LOADING))
        self._writer.mark(self)
        while self.last_seq == 0:
            await self._change()
            if self._failure is not None:
                raise self._failure
        if self._generation is not None:
            self._generation.on_news = partial(self._writer.mark, self)
            self._writer.mark(self)
        self._timers.arm("first_reader", self._config.first_reader_seconds, self.release)
        self._arm_timeout()

    async def run(self) -> None:
        """Bring the stream to its end, whatever happens."""
        try:
            while self.terminal is None and not self._has_left:
                await (self._produce() if self.lease.is_held else self._follow())
        except asyncio.CancelledError:
            await self._fail(_STOPPING)
            raise
        except LogLost:
            logger.error("stream %s: log %s no longer has it", self.id, self.log_id)
            self.is_lost, self.terminal = True, LOST
        except Fenced:
            logger.warning("stream %s: another producer has claimed it", self.id)
        except Exception:
            logger.exception("stream %s: failed", self.id)
            await self._fail(_INTERNAL)
        finally:
            await self._close()

    async def _produce(self) -> None:
        """Wait for the writer and the engine, and do what is next, across parks."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if not isinstance(failure, Fenced | Ended) or not self.lease.lose():
                raise failure
            self._stop_producing()
        elif self._is_cut:
            await self._after_cut()
        elif self._in_flight is not None or self._own or self._ending is not None:
            await self._change()
        elif self._generation is not None:
            if self._is_drained:
                self._stand_still(self._generation)
            else:
                await self._change()
        elif (seconds := self._seconds_left()) == 0:
            await self._readmit()
        elif self._is_wanted or not self.lease.is_shared:
            await self._change(seconds)
        elif "first_reader" in self._timers:
            await self._change(self._config.first_reader_seconds)
        else:
            await self.lease.release()
            if self.lease.is_held:
                await self._change(RETRY_SECONDS)

    async def _after_cut(self) -> None:
        """Release the lease, so that any process continues; one that shares with none waits for the log itself."""
        if self.lease.is_shared:
            await self.lease.release()
        if not self.lease.is_held:
            self._stop_producing()
        elif self._in_flight is not None:
            await self._change(RETRY_SECONDS)
            return
        self._is_cut = False

    async def _fail(self, error: Error) -> None:
        """Commit `error` if the stream has no end yet. A log that does not take even that leaves it without one."""
        self._cancel()
        if self.terminal is not None or not self.lease.is_held or not self._writer.can_commit:
            return
        self._failure = None
        self._ending = error
        self._own.clear()
        self._writer.mark(self)
        while self.terminal is None and self._failure is None and self._writer.can_commit:
            await self._change(RETRY_SECONDS)
        if self._failure is not None:
            logger.error("stream %s: its log does not take the terminal event", self.id, exc_info=self._failure)

    async def _close(self) -> None:
        """Free engine and timers, and have the readers notice the end."""
        self._cancel()
        self._timers.disarm_all()
        try:
            if self.terminal is None:
                self._has_left = self.lease.is_shared
                await self.lease.release()
        finally:
            self.ended_at = time.monotonic()
            self.ended.set()
            self._work_over.set()
            for reader in self.readers.attached:
                reader.advance()
            if self.readers.last_transport:  # else the first one, which is on its way, takes them
                self.recent.clear()

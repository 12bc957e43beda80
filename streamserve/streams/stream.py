"""`Stream`: one answer as its readers see it, from the first event to the one terminal event, across parks.

The log writer asks for what is to be committed (`take_batch`) and brings the result (`on_result`); one task
(`Stream.run`, owned by `Streams`) does what must wait: parks, readmission, claims. Everything else only records what
should happen (`stop`, `detach`, a timer) and cancels the generation synchronously. Parked means: the engine has
forgotten the sequence and the stream remembers its tokens; `Parking` has the reasons and what each waits for. Lives on
the event loop; knows no wire, no dialect and no framework.

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
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import count

from streamserve.clients.base import EngineClient, Generation
from streamserve.protocol.errors import Refused, StreamserveError
from streamserve.protocol.events import TERMINALS, Done, Error, Event, LoggedEvent, Meta, Status, Usage
from streamserve.protocol.frames import encode_event
from streamserve.protocol.park import Accepted, Park
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.lease.lease import Lease
from streamserve.streams.log.base import Batch, Ended, Fenced, LogLost, LogUnavailable, Result, new_log_id
from streamserve.streams.parking import MESSAGES, NO_READER, Parking
from streamserve.streams.readers import Attachment, ReaderLag
from streamserve.streams.replica import RETRY_SECONDS, Replica
from streamserve.streams.transcript import StreamSummary, Transcript, summarize
from streamserve.streams.writer import MAX_BATCH_EVENTS, LogWriter

__all__ = ["ON_DISCONNECT", "Stream", "StreamConfig", "StreamSummary"]

logger = logging.getLogger("streamserve.streams")

ON_DISCONNECT = ("park", "abort", "finish")
# While the log is away, a stop is recorded and its caller waits for so long.
STOP_SECONDS = 3.0

_NOT_ACCEPTED = Accepted(num_prompt_tokens=0, max_tokens=0, seed=0)  # of a restored stream; its meta event has the rest
_ABANDONED = Done(finish_reason="abandoned")
_INTERNAL = Error(code="internal_error", message="The server failed while answering. It has been logged.")
_HOPELESS = Error(code="engine_died", message="The engine failed repeatedly on this answer. Try again.", retryable=True)
_STOPPING = Error(code="engine_unavailable", message="The server is shutting down.", retryable=True)
_TIMEOUT = Error(code="timeout", message="The answer was not finished within timeout_seconds.")
LOST = Error(code="log_lost", message="The server has lost this answer. Ask again.", retryable=True)
LOG_AWAY = Status(status="waiting", message="The server cannot save the answer now. It continues by itself.")
_LOG_BACK = Status(status="resumed")


class Stream(Replica):
    """One answer as readers see it. Made by `Streams`: with an accepted generation, or restored without one."""

    def __init__(
        self,
        client: EngineClient,
        writer: LogWriter,
        config: StreamConfig,
        request: GenerateRequest,
        generation: Generation | None,
        *,
        owner: str,
        on_disconnect: str = "park",
        lease: Lease | None = None,
        log_id: str = "",
        created: int | None = None,
    ) -> None:
        accepted = _NOT_ACCEPTED if generation is None else generation.accepted
        transcript = Transcript(accepted, request.n, request.arrived_at or time.monotonic())
        lease = lease or Lease(None, request.stream_id)
        super().__init__(writer.log, log_id or new_log_id(), transcript, lease, on_disconnect)
        self.id = request.stream_id
        self.owner, self.tenant, self.model = owner, request.tenant, request.model
        self.created = int(time.time()) if created is None else created
        self.request = request if generation is None else _as_accepted(request, generation)
        self.lag = ReaderLag(
            transcript, self.readers, is_bounded=on_disconnect != "finish", known=request.reader_tokens
        )
        self.parking = Parking()
        self.ended_at: float | None = None
        self.is_lost = False  # the log has forgotten it: readers get an error that is in no log
        self._client, self._writer, self._config = client, writer, config
        self._generation = generation
        self._own: deque[Event] = deque()  # to be committed, before what the generation has
        self._in_flight: Batch | None = None
        self._failure: Exception | None = None  # of a commit, for the task to act on
        self._is_drained = False  # the generation has ended, and all it had is taken
        self._has_backlog = False  # it had more than fits into a batch
        self._is_cut = False
        self._away: LogUnavailable | None = None  # why a replica cannot read its log

    @property
    def state(self) -> str:
        """One of running, parked (also while it waits to be admitted again), finished."""
        if self.terminal is not None or self.ended.is_set():
            return "finished"
        return "parked" if self._generation is None and not self.lease.is_elsewhere else "running"

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

        While the log is away the stop is recorded, and LogUnavailable is raised after `STOP_SECONDS`.
        """
        self.end_with(Done(finish_reason="cancelled", kept_seq=None if seen_seq is None else max(0, seen_seq)))
        while not self.ended.is_set():
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self.ended.wait()
            except TimeoutError:
                self._writer.refuse_if_down()
                if self._away is not None:
                    raise copy.copy(self._away) from None

    def abandon(self) -> None:
        """End a stream without an owner's reader."""
        if not self._is_wanted:
            self.end_with(_ABANDONED)

    def end_with(self, ending: Done | Error) -> None:
        """Have `ending` committed after what is being committed now, unless the stream is ending already."""
        if not self._is_ending:
            self._ending = ending
            self._cancel()
            self._own = deque(event for event in self._own if isinstance(event, Meta))
            self._writer.mark(self)
            self._wake()

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
            self._timers.disarm("first_reader", "resume_window")
            self.parking.skip_delay()
            self._note_position()
        self._wake()

    def moved(self, reader: Attachment, seq: int) -> None:
        """Note that `reader` has every event up to `seq`."""
        if reader.received_seq != seq:
            reader.received_seq = seq
            if not reader.is_watcher:
                self._note_position()

    def detach(self, reader: Attachment) -> None:
        """Count `reader` out, once. Losing the last owner's reader takes effect before this returns."""
        if self.readers.discard(reader):
            self._wake()
            if not reader.is_watcher:
                self.release()
                self._note_position()

    def release(self) -> None:
        """Do what `on_disconnect` says, unless an owner's reader is attached. Also for a reader that never came."""
        if self._is_wanted or self._is_ending or not self.lease.is_held:
            return
        if self.on_disconnect == "abort":
            self.end_with(_ABANDONED)
            return
        if self._generation is not None:
            self._cancel()
            self.parking.begin(NO_READER, self.transcript.num_tokens, time.monotonic())
        self._timers.disarm("first_reader")
        window = self._config.resume_window_seconds
        self._timers.arm("resume_window", window, lambda: self.end_with(_ABANDONED))

    def on_loss(self) -> bool:
        """The log no longer has what it had acknowledged. Return whether the stream ends here in an error for that."""
        if self.lease.is_held and self.terminal is None:
            self._failure = LogLost(self.log_id)
            self._wake()
            return True
        return self.is_lost

    # What the log writer asks for

    def take_batch(self) -> Batch | None:
        """Return what is to be committed next: the ending alone, or own events and then the generation's."""
        if self._in_flight is not None or self.terminal is not None or not self.lease.is_held or self._has_left:
            return None
        is_end = self._ending is not None
        events: list[Event] = []
        if self._ending is not None:
            events = [*self._own, self._as_kept(self._ending)]
            self._own.clear()
        else:
            while self._own and len(events) < MAX_BATCH_EVENTS:
                events.append(self._own.popleft())
            generation, limit = self._generation, MAX_BATCH_EVENTS - len(events)
            self._has_backlog = limit == 0
            while generation is not None and limit and not is_end:
                ready = generation.ready(limit)
                self._has_backlog = len(ready) == limit
                for event in ready:
                    if isinstance(event, TERMINALS):
                        events.append(self._as_kept(event))
                        is_end = True
                        break
                    if not (self.transcript.has_finished and self.transcript.is_repeated(event)):
                        events.append(event)
                if not ready and not generation.is_open and not events:
                    self._is_drained = True
                    self._wake()
                if events or not ready:
                    break
        if events:
            bodies = [encode_event(event) for event in events]
            self._in_flight = Batch(self.log_id, self.lease.fence, self.last_seq, events, bodies, is_end)
        return self._in_flight

    def on_result(self, batch: Batch | None, result: Result | Exception) -> None:
        """Count and show what is committed now; leave a refusal to the task.

        A batch that is not in flight any more was given up in an outage: the log may have it, and its fence is old.
        """
        is_awaited = batch is self._in_flight
        if is_awaited:
            self._in_flight = None
        if batch is None or not isinstance(result, int):
            if is_awaited and self.lease.is_held and isinstance(result, Exception):
                self._failure = result
                self._wake()
            return
        first_seq = result - len(batch.events) + 1
        if first_seq != self.last_seq + 1 or self.terminal is not None:
            return  # committed late, after a cut; what follows is read from the log
        try:
            self.on_committed(list(map(LoggedEvent, count(first_seq), batch.events)), batch.bodies, is_ours=True)
        except Exception as error:
            self._failure = error
            self._wake()
            return
        generation = self._generation
        is_ending = generation is not None and not generation.is_open
        if self._has_backlog or self._own or self._ending is not None or is_ending:
            self._writer.mark(self)
        if generation is None or first_seq == 1:
            self._wake()

    def on_outage(self, reason: LogUnavailable) -> bool:
        """Show the readers that the answer waits; refuse a stream whose first event is not committed."""
        if self.last_seq == 0:
            self._in_flight, self._failure = None, copy.copy(reason)
            self._own.clear()
            self._cancel()
            self._wake()
            return False
        self.lag.is_log_down = True
        self._note_position()
        for reader in self.readers.attached:
            reader.notify(LOG_AWAY)
        return True

    def on_recovery(self) -> None:
        """Continue as before the outage."""
        self.lag.is_log_down = False
        self._note_position()
        for reader in self.readers.attached:
            reader.notify(_LOG_BACK)

    def cut(self) -> None:
        """Stop generating and end the connections: the outage lasts. The stream resumes when the log is back."""
        if not self._is_cut and self.terminal is None:
            self._is_cut = True
            if self._generation is not None:
                self._cancel()
                self.parking.begin(NO_READER, self.transcript.num_tokens, time.monotonic())
            for reader in self.readers.attached:
                reader.go_away()
            self._wake()

    # The stream's task

    async def open(self) -> None:
        """Commit `meta`, the first event, and begin to wait for a reader. `run` must follow. Raises LogUnavailable."""
        meta = Meta(model=self.model, stream_id=self.id, created=self.created, prompt_tokens=self.usage.prompt_tokens)
        self._own.append(meta)
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

    async def _follow(self) -> None:
        """Be a replica for a while; a log that is away is asked again."""
        try:
            await self._stand_by()
            self._away = None
        except LogUnavailable as reason:
            self._away = reason
            await self.lease.release()  # else a claim without a producer keeps every other process away
            await self._change(RETRY_SECONDS)
        except (Fenced, Ended):
            self.lease.lose()

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

    def _stop_producing(self) -> None:
        """Another process writes from now on, or none: keep nothing that only the producer needs."""
        self._cancel()
        self._own.clear()
        self._in_flight, self._is_cut = None, False
        self._timers.disarm_all()

    def _begin_to_produce(self) -> None:
        self._arm_timeout()
        if self.parking.park is None:
            self.parking.begin(NO_READER, self.transcript.num_tokens, time.monotonic())
        if self._ending is not None:
            self._writer.mark(self)

    def _stand_still(self, generation: Generation) -> None:
        """Remember why the engine has parked the answer, and show that to the readers if they will notice."""
        self.transcript.note_cached(generation.num_cached_tokens)
        park: Park | None = generation.parked
        if park is None:
            raise RuntimeError("the generation ended without a terminal event")
        self._generation = generation.on_news = None
        self.parking.begin(park, self.transcript.num_tokens, time.monotonic())
        if self.parking.is_hopeless:
            self.end_with(_HOPELESS)
        elif park.reason in MESSAGES:
            self._show_waiting(MESSAGES[park.reason])

    async def _readmit(self) -> None:
        """Ask the engine to continue after the tokens in the log. A refusal keeps the stream: it asks again."""
        self._news.clear()  # what changes from here on cuts a wait short
        request = replace(
            self.request,
            output_token_ids=self.transcript.token_ids,
            first_token_at=self.transcript.timings.first_at,
            reader_tokens=self.lag.reader_tokens,
        )
        try:
            generation = await self._client.generate(request)
        except Refused as refused:
            seconds = self.parking.refuse(refused, time.monotonic())
            if refused.code == "engine_died" or seconds > self._config.resume_window_seconds:
                self.end_with(Error(code=refused.code, message=refused.message, retryable=True))
            else:
                self._show_waiting(MESSAGES["paused"] if refused.code == "engine_paused" else refused.message)
            return
        except StreamserveError as error:
            self.end_with(Error(code=error.code, message=error.message))
            return
        if self._is_ending or not self._is_wanted or self._is_cut:
            generation.cancel()
            return
        self.lag.begin(request.reader_tokens)
        if self.parking.end():
            self._own.append(Status(status="resumed"))
        self._generation = generation
        self._is_drained = self._has_backlog = False
        generation.on_news = partial(self._writer.mark, self)
        self._note_position()
        self._writer.mark(self)

    def _show_waiting(self, message: str) -> None:
        if not self.parking.has_shown_waiting:
            self.parking.has_shown_waiting = True
            self._own.append(Status(status="waiting", message=message))
            self._writer.mark(self)

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
            for reader in self.readers.attached:
                reader.advance()
            self.recent.clear()

    def _arm_timeout(self) -> None:
        if self.request.timeout_seconds is not None:
            left = self.transcript.timings.started_at + self.request.timeout_seconds - time.monotonic()
            self._timers.arm("timeout", left, lambda: self.end_with(_TIMEOUT))

    def _as_kept(self, event: Done | Error) -> Done | Error:
        """Return a terminal event as it is kept: a `done` has the metrics of all runs, or of the one cut short."""
        if not isinstance(event, Done):
            return event
        if event is self._ending:
            kept_seq = None if event.kept_seq is None else min(event.kept_seq, self.last_seq)
            return self.transcript.with_metrics(replace(event, kept_seq=kept_seq))
        return self.transcript.over_all_runs(event) if self.parking.num_parks else event

    # Decisions, synchronous

    @property
    def _is_ending(self) -> bool:
        return self._ending is not None or self.state == "finished"

    def _seconds_left(self) -> float | None:
        """Seconds until the engine is asked to continue: 0 is now, None is until a reader comes or has read more."""
        return self.parking.seconds_left(self.lag.num_unread, time.monotonic()) if self._is_wanted else None

    def _note_position(self) -> None:
        """Report the furthest reader's position to the engine, or find that it is time to continue."""
        if self._generation is not None:
            self.lag.report(self._generation)
        elif self.lease.is_held and not self._is_ending and self._seconds_left() == 0:
            self._wake()

    def _cancel(self) -> None:
        """Once this returns, no StepPlan built later holds the sequence."""
        if self._generation is not None:
            self._generation.on_news = None
            self._generation.cancel()
            self.transcript.note_cached(self._generation.num_cached_tokens)
            self._generation = None


def _as_accepted(request: GenerateRequest, generation: Generation) -> GenerateRequest:
    """Return `request` with what acceptance has decided, so that asking again gives the same tokens."""
    accepted = generation.accepted
    unset = tuple(name for name in ("seed", "max_tokens") if getattr(request.sampling, name) is None)
    sampling = replace(request.sampling, seed=accepted.seed, max_tokens=accepted.max_tokens)
    return replace(request, sampling=sampling, unset=request.unset + unset)

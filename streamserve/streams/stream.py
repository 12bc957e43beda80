"""`Stream`: one answer as its readers see it, from the first event to the one terminal event, across parks.

    EngineRun    the generation, its parks, when the engine is asked again       (clients/engine_run.py)
    Outbox       what is to be committed: own events, the ending, the batch      (outbox.py)
    Follower     the lease, and a log that another process writes                (follower.py)
    Transcript   what the log holds; `Recent`, its newest events                 (transcript.py, recent.py)
    Readers      who reads it here; `ReaderLag`, how far it is ahead of them     (readers.py)
    StreamSpans  the spans of what this process makes of it                      (spans.py)

The stream has one state (`Life`, with the table of all changes, in life.py). Its task (`Stream.run`, owned by
`Streams`) readmits, claims and ends. Everything else only records what should happen (`stop`, `detach`, a timer) and
cancels the generation synchronously. Parked means: the engine has forgotten the sequence and the stream remembers its
tokens. Lives on the event loop; knows no wire, no dialect and no framework.

Where several processes share a log, only the process that holds the stream's `Lease` writes it; the others follow, and
one of them continues when the lease is released or its process dies (lease/lease.py).
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.engine_run import LOADING, NO_READER, EngineRun, Parking, RunState
from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.errors import EngineUnavailable, Refused, StreamserveError
from streamserve.protocol.events import Approval, Citation, Done, Error, Event, LoggedEvent, Meta, Status, Usage
from streamserve.protocol.measures import FIRST_TOKEN, PARKED
from streamserve.protocol.rates import Rates
from streamserve.protocol.requests import START, Admission, GenerateRequest, Resume
from streamserve.streams.config import JOB, StreamConfig
from streamserve.streams.follower import Follower
from streamserve.streams.lease.lease import Lease, LeaseResult
from streamserve.streams.life import CLOSING, OVER, WRITING, Cause, Life, after
from streamserve.streams.log.base import Batch, Ended, Fenced, LogLost, LogUnavailable, Result, new_log_id
from streamserve.streams.outbox import Outbox
from streamserve.streams.readers import Attachment, ReaderLag, Readers
from streamserve.streams.recent import Recent
from streamserve.streams.spans import StreamSpans, begin_delivery, end_delivery
from streamserve.streams.timers import Timers
from streamserve.streams.transcript import StreamSummary, Transcript
from streamserve.streams.writer import LogWriter

__all__ = ["ON_DISCONNECT", "Stream", "StreamConfig", "StreamSummary"]

logger = logging.getLogger("streamserve.streams")

ON_DISCONNECT = ("park", "abort", "finish")
# While the log is away, a stop is recorded and its caller waits for so long.
STOP_SECONDS = 3.0
# And so long at most, when its end is not committed for another reason.
STOP_DEADLINE_SECONDS = 9.0
_STOP_PENDING = "The stop is recorded, and takes effect as soon as the server can write it down. Look again later."
# Without a database or a log: how long until it is asked again.
_RETRY_SECONDS = 2.0

_NOT_ACCEPTED = Accepted(num_prompt_tokens=0, max_tokens=0, seed=0)  # of a restored stream; its meta event has the rest
_ABANDONED = Done(finish_reason="abandoned")
_TIMEOUT = Error(code="timeout", message="The answer was not finished within timeout_seconds.")
_INTERNAL = Error(code="internal_error", message="The server failed while answering. It has been logged.")
_STOPPING = Error(code="engine_unavailable", message="The server is shutting down.", retryable=True)
LOST = Error(code="log_lost", message="The server has lost this answer. Ask again.", retryable=True)
LOG_AWAY = Status(status="waiting", message="The server cannot save the answer now. It continues by itself.")
_LOG_BACK = Status(status="resumed")


class Stream:
    """One answer as readers see it. Made by `Streams`: with an accepted generation, or restored from its log."""

    def __init__(
        self,
        client: EngineClient,
        writer: LogWriter,
        config: StreamConfig,
        request: GenerateRequest,
        admission: Admission,
        generation: Generation | None,
        *,
        lease: Lease | None = None,
        log_id: str = "",
        created_at: float | None = None,
        resume: Resume = START,
    ) -> None:
        self.id, self.log_id = admission.stream_id, log_id or new_log_id()
        self.created_at = time.time() if created_at is None else created_at  # wall time
        self.created = int(self.created_at)
        lease = lease or Lease(None, admission.stream_id)
        self.life = Life.OPENING if lease.is_held else Life.FOLLOWING
        self.readers, self.recent, self.outbox = Readers(), Recent(), Outbox()
        self.transcript = Transcript(
            _NOT_ACCEPTED if generation is None else generation.accepted,
            request.n,
            admission.arrived_at or time.monotonic(),
            shows_prompt=request.shows_prompt,
        )
        if generation is not None:
            self.transcript.timings.accept(time.monotonic())
        is_bounded = admission.on_disconnect not in ("finish", JOB)
        self.lag = ReaderLag(self.transcript, self.readers, is_bounded)
        was_admitted = not lease.is_held and admission.on_disconnect != JOB  # a job's run is begun anew
        self.engine = EngineRun(
            client, request, admission, self.lag, generation, resume=resume, was_admitted=was_admitted
        )
        self.follower = Follower(writer.log, self.log_id, lease, self.transcript, self.readers, self._on_committed)
        self.rates: Rates | None = None  # what its start has left of its caller's limits over time
        self.spans = StreamSpans(admission.trace)
        self.ended = asyncio.Event()  # set once nothing more will be committed here
        self._config, self._writer, self._timers = config, writer, Timers()
        self._attempt: asyncio.Future[Error | None] | None = None  # of the job of this stream, while it runs here

    # What it is

    @property
    def owner(self) -> str:
        """Who asked for it, and holds it by reading."""
        return self.admission.owner

    @property
    def tenant(self) -> str:
        """Whose callers may read it."""
        return self.admission.tenant

    @property
    def model(self) -> str:
        """The model's or pipeline's name."""
        return self.engine.request.model

    @property
    def request(self) -> GenerateRequest:
        """What was asked for, with what acceptance has decided."""
        return self.engine.request

    @property
    def admission(self) -> Admission:
        """What was decided about it."""
        return self.engine.admission

    @property
    def on_disconnect(self) -> str:
        """What becomes of it without a reader."""
        return self.admission.on_disconnect

    @property
    def lease(self) -> Lease:
        """Whether this process writes its log."""
        return self.follower.lease

    @property
    def last_seq(self) -> int:
        """The last event committed and counted here: while another process writes, the log may be ahead."""
        return self.transcript.last_seq

    @property
    def terminal(self) -> Done | Error | None:
        """Its terminal event, once that is committed; for a lost stream `LOST`, which is in no log."""
        return LOST if self.life is Life.LOST else self.transcript.terminal

    @property
    def state(self) -> str:
        """What operators are shown: running, parked (also while it waits to be admitted again) or finished.

        One whose end is decided runs until that is committed: nothing waits for it to be continued.
        """
        if self.life in OVER:
            return "finished"
        if self.life in (Life.ENDING, Life.CLAIMING):
            return "running"
        return "parked" if self.engine.generation is None and not self.lease.is_elsewhere else "running"

    @property
    def awaits_first_reader(self) -> bool:
        """Whether its first reader is still on its way."""
        return "first_reader" in self._timers

    @property
    def has_token_ids(self) -> bool:
        """Whether its tokens have ids; tokens of a server elsewhere have no ids."""
        return self.transcript.has_token_ids

    @property
    def outline(self) -> Sequence[Citation | Status | Approval]:
        """The citations and steps of a run so far, and what it asks its user."""
        return self.transcript.outline

    @property
    def is_live(self) -> bool:
        """Whether it is unfinished, and this process is responsible for it."""
        return self.life not in OVER and not self.lease.is_elsewhere

    @property
    def is_lost(self) -> bool:
        """Whether the log has forgotten it: readers get an error that is in no log."""
        return self.life is Life.LOST

    @property
    def has_left(self) -> bool:
        """Whether it is over in this process only: readers return and are served by the process that has it then."""
        return self.life in (Life.LEAVING, Life.LEFT)

    @property
    def can_leave(self) -> bool:
        """Whether another process can continue it when this process goes down."""
        is_ours_to_end = self.outbox.ending is not None or (self.lease.is_held and self.on_disconnect == "abort")
        return self.lease.is_shared and self.terminal is None and not is_ours_to_end

    @property
    def usage(self) -> Usage:
        """Token counts: the terminal event's, before that what the log holds."""
        if isinstance(self.terminal, Done):
            return self.terminal.usage
        self._note_cached()
        return self.transcript.usage

    def summary(self) -> StreamSummary:
        """Return the stream's metrics of now."""
        usage, timings, end = self.usage, self.transcript.timings, self.terminal
        times, age = timings.since_arrival(), (timings.ended_at or time.monotonic()) - timings.started_at
        phases = end.phases if end is not None else None
        if isinstance(end, Error) or phases is None:
            phases = timings.phases(timings.started_at + age, phases)
        return StreamSummary(
            id=self.id,
            log_id=self.log_id,
            model=self.model,
            owner=self.owner,
            tenant=self.tenant,
            state=self.state,
            created=self.created,
            age_seconds=age,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            tokens_per_second=timings.tokens_per_second(usage.completion_tokens),
            ttft=timings.ttft,
            itl_p50=timings.itl(0.5),
            itl_p95=timings.itl(0.95),
            finish_reason=end.finish_reason if isinstance(end, Done) else None,
            error_code=end.code if isinstance(end, Error) else None,
            num_readers=self.readers.num_holding,
            num_watchers=self.readers.num_watchers,
            lead=self.lag.num_unread,
            num_parks=self.engine.parking.num_parks,
            park_reason=self.engine.parking.reason if self.state == "parked" else None,
            transport=self.readers.last_transport,
            intake=times.get("intake"),
            ttfb=times.get("ttfb"),
            latency=end.latency if isinstance(end, Done) else age,
            phases=phases,
            usage=usage,
            counted_as=self.admission.counted_as,
            on_disconnect=self.on_disconnect,
            trace=self.admission.trace,
        )

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
                if self.follower.away is not None:
                    raise copy.copy(self.follower.away) from None
                if time.monotonic() >= give_up_at:
                    raise Refused(_STOP_PENDING, code="stop_pending", retry_after=5) from None

    def end_with(self, ending: Done | Error) -> None:
        """Have `ending` committed after what is being committed now, unless the stream is ending already."""
        if self._is_ending or self.life is Life.LEAVING:
            return
        self._change(Cause.ENDING)
        self.outbox.end_with(ending)
        self._cancel()
        self._writer.mark(self)
        self.follower.wake()

    def abandon(self) -> None:
        """End a stream without an owner's reader."""
        if not self._is_wanted:
            self.end_with(_ABANDONED)

    def discard(self) -> None:
        """End a stream that does not begin: its log does not exist."""
        self._cancel()
        if self.life not in OVER:
            self._change(Cause.BROKE)
        self.ended.set()

    def shut_down(self) -> None:
        """The server stops: leave a stream that another process can continue, end any other."""
        if not self.can_leave:
            self.end_with(_STOPPING)
        elif self.life not in CLOSING:
            self._change(Cause.LEAVE)
            self._cancel()
            self.follower.wake()

    def attach(self, reader: Attachment) -> None:
        """Count `reader` in. An owner's reader has a parked stream continued."""
        is_return = bool(self.readers.last_transport) or reader.received_seq > 0
        self.readers.add(reader)
        if not reader.is_watcher:
            begin_delivery(reader, self.admission.trace, is_return=is_return)
            if reader.is_paced and self.transcript.timings.first_byte_at is None:
                self.transcript.timings.first_byte_at = time.monotonic()
            self._timers.disarm("first_reader", "resume_window")
            self.engine.parking.skip_delay()
            self._note_position()
        self.follower.wake()

    def moved(self, reader: Attachment, seq: int, *, is_away: bool | None = None) -> None:
        """Note that `reader` has every event up to `seq`, and whether it looks away (None: as before)."""
        is_away = reader.is_away if is_away is None else is_away
        if reader.received_seq != seq or reader.is_away != is_away:
            reader.received_seq, reader.is_away = seq, is_away
            if not reader.is_watcher:
                self._note_position()

    def detach(self, reader: Attachment, *, is_dismissed: bool = False) -> None:
        """Count `reader` out, once. Losing the last owner's reader takes effect before this returns.

        See `Readers.discard`.
        """
        if self.readers.discard(reader, is_dismissed=is_dismissed):
            end_delivery(reader)
            if not reader.is_watcher:
                self.release()
                self._note_position()
            if self.ended.is_set():
                self.recent.clear()
            self.follower.wake()

    def release(self) -> None:
        """Apply `on_disconnect`, unless an owner's reader is attached. Also for a reader that never came."""
        in_flight = self.outbox.in_flight
        is_ending = self._is_ending or (in_flight is not None and in_flight.is_end)
        if is_ending or self._is_wanted or not self.lease.is_held or self.on_disconnect == JOB:
            return
        if self.on_disconnect == "abort":
            self.end_with(_ABANDONED)
            return
        if self.engine.generation is not None and self.engine.generation.can_park:
            self._cancel()
            self._park(NO_READER)
        self._timers.disarm("first_reader")
        window = self._config.resume_window_seconds
        self._timers.arm("resume_window", window, lambda: self.end_with(_ABANDONED))

    def on_loss(self) -> bool:
        """The log no longer has what it had acknowledged. Return whether the stream ends here in an error for that."""
        if self.lease.is_held and self.terminal is None:
            self.outbox.failure = LogLost(self.log_id)
            self.follower.wake()
            return True
        return self.is_lost

    # Of a job

    async def work(self) -> Error | None:
        """Produce here until the end, because the job of this stream runs here; return why the attempt failed.

        None: it ended, or another process has taken it (`terminal` is None then). Cancelled, it stands still.
        """
        self._attempt = attempt = asyncio.get_running_loop().create_future()
        self.engine.parking = Parking()
        self.transcript.timings.started_at = time.monotonic()
        self.follower.wake()
        try:
            return None if self.ended.is_set() else await asyncio.shield(attempt)
        finally:
            self._attempt = None
            if not self._is_ending:
                self._stand_down(attempt.result() if attempt.done() else None)

    def hold(self) -> None:
        """Write the log of a restored stream from now on: no other process can have its lease."""
        self.lease.is_held = True
        self._change(Cause.CLAIMED)

    async def bury(self, error: Error) -> None:
        """End the stream of a job with `error`, which is not tried again."""
        self.end_with(error)
        await self.work()

    def end_attempt(self, error: Error | None = None) -> None:
        """Have `work` return `error`: the attempt is over without an end of the stream."""
        if self._attempt is not None and not self._attempt.done():
            self._attempt.set_result(error)

    def _stand_down(self, error: Error | None) -> None:
        self._cancel()
        self._end_span(error)
        self.outbox.drop_own()
        self._timers.disarm_all()
        self._park(NO_READER)
        self.follower.wake()

    # The log writer's source

    def take_batch(self) -> Batch | None:
        """Return what is to be committed next: the ending alone, or own events and then the generation's."""
        if self.life not in WRITING:
            return None
        is_new = self._is_new if self.engine.may_repeat else None
        fence, last_seq = self.follower.lease.fence, self.transcript.last_seq
        batch = self.outbox.pack(self.log_id, fence, last_seq, self.engine.ready, self._as_kept, is_new)
        if self.engine.state is RunState.DRAINED:
            self.follower.wake()
        return batch

    def on_result(self, batch: Batch | None, result: Result | Exception) -> None:
        """Count and show what is committed now; leave a refusal to the task."""
        events = self.outbox.settle(batch, result)
        if self.outbox.failure is not None:
            self.follower.wake()
        if batch is None or not events or events[0].seq != self.transcript.last_seq + 1 or self.life in OVER:
            return  # refused; or committed late, after a cut: what follows is read from the log
        try:
            self._on_committed(events, batch.bodies)
        except Exception as error:
            self.outbox.failure = error
            self.follower.wake()
            return
        generation = self.engine.generation
        if self.outbox.has_more or (generation is not None and not generation.is_open):
            self._writer.mark(self)
        if generation is None or events[0].seq == 1:
            self.follower.wake()

    def on_outage(self, reason: LogUnavailable) -> bool:
        """Show the readers that the answer waits; refuse a stream whose first event is not committed."""
        if self.last_seq == 0:
            self.outbox.clear()
            self.outbox.failure = copy.copy(reason)
            self._cancel()
            self.follower.wake()
            return False
        self._note_outage(LOG_AWAY, is_log_down=True)
        return True

    def on_recovery(self) -> None:
        """Continue as before the outage."""
        self._note_outage(_LOG_BACK, is_log_down=False)

    def cut(self) -> None:
        """Stop generating and end the connections: the outage lasts. The stream resumes when the log is back."""
        if self.life in OVER or self.life in (Life.OPENING, Life.CUT):
            return
        if self.lease.is_held and self.life is not Life.LEAVING:  # who follows has no lease to release
            if self.engine.generation is not None:
                self._cancel()
                self._park(NO_READER)
            self._change(Cause.OUTAGE)
        for reader in self.readers.attached:
            reader.go_away()
        self.follower.wake()

    def _note_outage(self, status: Status, *, is_log_down: bool) -> None:
        self.lag.is_log_down = is_log_down
        self._note_position()
        for reader in self.readers.attached:
            reader.notify(status)

    def _is_new(self, event: Event) -> bool:
        """Return whether the log does not have what a resumed generation gives."""
        return not self.transcript.is_repeated(event)

    def _as_kept(self, event: Done | Error) -> Done | Error:
        """Return a terminal event as it is kept: a `done` has the metrics of all runs, or of the run cut short."""
        if not isinstance(event, Done):
            return event
        if event is self.outbox.ending:
            kept_seq = None if event.kept_seq is None else min(event.kept_seq, self.last_seq)
            return self.transcript.with_metrics(replace(event, kept_seq=kept_seq))
        # A job's run counts all its attempts.
        is_one_run = not self.engine.parking.num_parks or self.on_disconnect == JOB
        return self.transcript.of_one_run(event) if is_one_run else self.transcript.over_all_runs(event)

    # What is in the log

    def _on_committed(self, events: list[LoggedEvent], bodies: Sequence[bytes] | None = None) -> None:
        """Count events that are in the log, and show them to the readers of this process.

        `bodies`: the events encoded, where this process has committed them.
        """
        is_ours = bodies is not None
        for logged in events:
            self.transcript.note(logged.event, logged.seq, is_ours=is_ours)
        if self.transcript.terminal is not None:
            if self.life not in OVER:  # else a request was still reading a log that is left here
                self._change(Cause.TERMINAL)
            self.follower.wake()
        if is_ours or self.readers.attached:
            self.recent.add(events, bodies)
            for reader in self.readers.attached:
                reader.advance()
            if len(events) > 1:
                self.recent.shrink()

    # Its task

    async def open(self) -> None:
        """Commit `meta`, the first event, and begin to wait for a reader. `run` must follow. Raises LogUnavailable."""
        meta = Meta(
            model=self.model,
            stream_id=self.id,
            created=self.created,
            prompt_tokens=self.usage.prompt_tokens,
            has_token_ids=self.has_token_ids,
        )
        is_loading = self.engine.parking.unloaded_at is not None
        trimmed = self.admission.trimmed
        self.outbox.put([meta, *([] if trimmed is None else [trimmed])])
        self.outbox.put([Status(status="loading", message=LOADING)] if is_loading else [])
        self._writer.mark(self)
        while self.last_seq == 0:
            await self.follower.wait()
            if (failure := self.outbox.take_failure()) is not None:
                raise failure
        if self.life is Life.OPENING:
            self._change(Cause.PARKED if self.engine.generation is None else Cause.ADMITTED)
        if self.engine.generation is not None:
            self.engine.generation.on_news = partial(self._writer.mark, self)
            self._writer.mark(self)
        self._timers.arm("first_reader", self._config.first_reader_seconds, self.release)
        self._arm_timeout()

    async def run(self) -> None:
        """Bring the stream to its end, whatever happens."""
        try:
            while self.life not in CLOSING:
                await self._next()
        except asyncio.CancelledError:
            await self._fail(_STOPPING)
            raise
        except LogLost:
            logger.error("stream %s: log %s no longer has it", self.id, self.log_id)
            self._change(Cause.LOSS)
        except Fenced:
            logger.warning("stream %s: another producer has claimed it", self.id)
        except Exception:
            logger.exception("stream %s: failed", self.id)
            await self._fail(_INTERNAL)
        finally:
            await self._close()

    async def _next(self) -> None:
        """Wait for the log writer, the engine, a reader or another process, and do what is next."""
        if not self.lease.is_held:
            await self._follow()
        elif (failure := self.outbox.take_failure()) is not None:
            if not isinstance(failure, Fenced | Ended) or not self.lease.lose():
                raise failure
            self._stop_producing(Cause.FENCED)
        elif self.life is Life.CUT:
            await self._leave_cut()
        elif not self.outbox.is_idle:
            await self.follower.wait()
        elif self.engine.state is RunState.DRAINED:
            self._stand_still()
        elif self.life is Life.PARKED:
            await self._stay_parked()
        else:
            await self.follower.wait()

    async def _stay_parked(self) -> None:
        """Readmit the answer when that is due; release the lease if no owner's reader waits."""
        seconds = self._seconds_left()
        if seconds == 0:
            await self._readmit()
        elif self._is_wanted or not self.lease.is_shared:
            await self.follower.wait(seconds)
        elif self.awaits_first_reader:
            await self.follower.wait(self._config.first_reader_seconds)
        else:
            await self.lease.release()
            if self.lease.is_held:
                await self.follower.wait(_RETRY_SECONDS)
            else:
                self._lose_log(Cause.RELEASED)

    async def _leave_cut(self) -> None:
        """Release the lease, so that any process continues; a process that shares no log waits for its log itself."""
        if self.lease.is_shared:
            await self.lease.release()
        if not self.lease.is_held:
            self._stop_producing(Cause.RELEASED)
        elif self.outbox.in_flight is not None:
            await self.follower.wait(_RETRY_SECONDS)
        elif self.life is Life.CUT:
            self._change(Cause.OUTAGE_OVER)
            if self.outbox.ending is not None:
                self._change(Cause.ENDING)
            self._writer.mark(self)

    async def _follow(self) -> None:
        """Follow a log that another process writes, or none does, and continue it once that is due here."""
        follower, lease = self.follower, self.lease
        try:
            if self.readers.num_attached:
                await follower.catch_up()
            is_due = self.life is Life.CLAIMING or self._is_wanted
            result = await self._ask_for_lease() if is_due else LeaseResult.HELD_ELSEWHERE
            if result is LeaseResult.TAKEN:
                await follower.take_over()
                self._begin_to_produce()
            elif result is LeaseResult.OVER:
                await follower.catch_up()
                self._leave()
            elif result is LeaseResult.UNKNOWN:
                await follower.wait(_RETRY_SECONDS)
            elif self.life not in OVER:
                seconds = self._seconds_beside()
                if seconds == 0:
                    self._leave()
                else:
                    await follower.wait(seconds, for_log=self.readers.num_attached > 0)
            follower.away = None
        except KeyError:  # the log is gone
            self._leave()
            follower.away = None
        except LogUnavailable as reason:
            follower.away = reason
            await lease.release()  # else a claim without a producer keeps every other process away
            await follower.wait(_RETRY_SECONDS)
        except (Fenced, Ended):
            lease.lose()

    async def _ask_for_lease(self) -> LeaseResult:
        """Claim the stream: for a reader; by force to stop it; to end it otherwise, only if none claimed it since."""
        ending = self.outbox.ending
        is_stop = isinstance(ending, Done) and ending.finish_reason == "cancelled"
        by_force = is_stop or self._is_worked  # who has the job decides
        result = await self.lease.take(by_force=by_force, only_as_last=ending is not None and not by_force)
        if result is LeaseResult.HELD_ELSEWHERE and ending is not None and not by_force:
            if self.life is Life.CLAIMING:
                self._change(Cause.DECLINED)
            self.outbox.ending = None
        return result

    def _begin_to_produce(self) -> None:
        """The lease is held and the log is read to its end."""
        if self.life not in (Life.FOLLOWING, Life.CLAIMING):  # it has ended, or leaves
            return
        self._change(Cause.CLAIMED)
        self._arm_timeout()
        if self.engine.parking.park is None:
            self._park(NO_READER)
        if self.outbox.ending is not None:
            self._writer.mark(self)

    async def _readmit(self) -> None:
        """Ask the engine to continue after the tokens in the log. A refusal keeps the stream: it asks again."""
        self.follower.note_all()
        if (trace := self.spans.begin()) is not None:
            self.engine.admission = replace(self.engine.admission, trace=trace)
        now, since = time.monotonic(), self.engine.parking.unloaded_at
        if since is not None:
            self.transcript.timings.loading_seconds = now - since
            if self.engine.is_loading(now, self._config.engine_wait_seconds):
                return
        try:
            given = await self.engine.ask(self.transcript.resume(), self._config.resume_window_seconds)
        except Refused as refused:
            self._give_up(Error(code=refused.code, message=refused.message, retryable=True))
            return
        except StreamserveError as error:
            self.end_with(Error(code=error.code, message=error.message, retryable=error.is_retryable))
            return
        if isinstance(given, list):
            self._show(given)
        elif self.life is Life.PARKED and self._is_wanted:
            self._continue(given)
        else:
            given.cancel()

    def _continue(self, generation: Generation) -> None:
        """Take the events of the generation that the engine has resumed."""
        now, is_first = time.monotonic(), self.engine.parking.unloaded_at is not None
        self.transcript.accept(generation.accepted)
        if is_first:
            self.transcript.timings.accept(now)
        else:
            self.transcript.timings.enter(FIRST_TOKEN, now)
        is_shown = self.engine.take(generation)
        if is_shown and (self.on_disconnect != JOB or self.last_seq > 1):  # a job's first attempt is none
            self.outbox.put([Status(status="resumed")])
        self._change(Cause.ADMITTED)
        generation.on_news = partial(self._writer.mark, self)
        self._note_position()
        self._writer.mark(self)

    def _stand_still(self) -> None:
        """Remember why the engine has parked the answer, and show that to the readers if they will notice."""
        park = self.engine.drain()
        self._note_cached()
        self._change(Cause.PARKED)
        self.transcript.timings.enter(PARKED, time.monotonic(), park.reason)
        try:
            self._show(self.engine.lose(park))
        except EngineUnavailable as error:
            self.end_with(Error(code=error.code, message=error.message, retryable=True))

    def _give_up(self, error: Error) -> None:
        """The engine refuses to continue: the end, but for a job, which may be tried again."""
        if self.on_disconnect == JOB:
            self.end_attempt(error)
        else:
            self.end_with(error)

    async def _fail(self, error: Error) -> None:
        """Commit `error` if the stream has no end yet. A log that does not take the error leaves the stream open."""
        self._cancel()
        is_ours = self.lease.is_held and self.life not in CLOSING
        if not is_ours or not self._writer.can_commit:
            return
        self._change(Cause.FAILED)
        self.outbox.take_failure()
        self.outbox.ending = error
        self.outbox.drop_own()
        self._writer.mark(self)
        while self.life not in OVER and self.outbox.failure is None and self._writer.can_commit:
            await self.follower.wait(_RETRY_SECONDS)
        if self.outbox.failure is not None:
            logger.error("stream %s: its log does not take the terminal event", self.id, exc_info=self.outbox.failure)

    async def _close(self) -> None:
        """Free engine and timers, and have the readers notice the end."""
        self._cancel()
        self._timers.disarm_all()
        self._leave()
        try:
            if self.life is Life.LEAVING:
                await self.lease.release()
        finally:
            if self.life is Life.LEAVING:
                self._change(Cause.CLOSED)
            self.transcript.timings.ended_at = time.monotonic()
            self._end_span()
            self.ended.set()
            self.end_attempt()
            for reader in self.readers.attached:
                reader.advance()
            if self.readers.last_transport:  # else the first reader, which is on its way, takes them
                self.recent.clear()

    # What the parts have in common

    def _change(self, cause: Cause) -> None:
        self.life = after(self.life, cause)

    def _end_span(self, failure: Error | None = None) -> None:
        """End the span of what this process has made of the answer. `failure`: why the attempt of a job is over."""
        if self.spans.is_open:
            self.spans.end(self.summary(), self.transcript.timings, self.terminal, failure)

    def _leave(self) -> None:
        """Give the stream up here, if it has no end: another process may continue it, unless none shares it."""
        if self.life not in CLOSING:
            self._change(Cause.LEAVE if self.lease.is_shared else Cause.BROKE)

    def _lose_log(self, cause: Cause) -> None:
        """This process does not write the log from now on. An ending is claimed for, if it is decided."""
        self.outbox.clear()  # also of a refusal that comes late: the next lease has nothing to do with it
        if self.life in CLOSING:
            return
        self._change(cause)
        if self.life is Life.FOLLOWING and self.outbox.ending is not None:
            self._change(Cause.ENDING)

    def _stop_producing(self, cause: Cause) -> None:
        """Another process writes from now on, or none: keep nothing that only the producer needs."""
        self._cancel()
        self._timers.disarm_all()
        self._end_span()
        self.end_attempt()
        self._lose_log(cause)

    def _cancel(self) -> None:
        """Once this returns, no StepPlan built later holds the sequence."""
        if self.engine.generation is not None:
            self.engine.cancel()
            self._note_cached()

    def _park(self, park: Park) -> None:
        """The engine holds no part of the answer any more."""
        if self.life is Life.RUNNING:
            self._change(Cause.PARKED)
        self.engine.park(park)
        self.transcript.timings.enter(PARKED, time.monotonic(), park.reason)

    def _show(self, statuses: list[Status]) -> None:
        if statuses and self.life is Life.PARKED:
            self.outbox.put(statuses)
            self._writer.mark(self)

    def _note_cached(self) -> None:
        if (num_tokens := self.engine.num_cached_tokens) is not None:
            self.transcript.note_cached(num_tokens)

    def _note_position(self) -> None:
        """Report the furthest reader's position to the engine, or find that it is time to continue."""
        if self.engine.generation is not None:
            self.engine.report()
        elif self.life is Life.PARKED and self._seconds_left() == 0:
            self.follower.wake()

    def _seconds_left(self) -> float | None:
        """Seconds until the engine is asked to continue: 0 is now, None is until a reader comes or has read more."""
        return self.engine.seconds_left if self._is_wanted else None

    def _seconds_beside(self) -> float | None:
        """Seconds until a log that another process writes is looked at again. None: until something changes."""
        if self.readers.num_attached == 0:
            if self.life is Life.CLAIMING:
                return _RETRY_SECONDS
            if "resume_window" in self._timers:
                return None
        return self.follower.seconds_left()

    def _arm_timeout(self) -> None:
        if self.request.timeout_seconds is not None:
            left = self.transcript.timings.started_at + self.request.timeout_seconds - time.monotonic()
            self._timers.arm("timeout", left, lambda: self.end_with(_TIMEOUT))

    @property
    def _is_wanted(self) -> bool:
        if self.on_disconnect == JOB:
            return self._is_worked
        return self.readers.num_holding > 0 or self.on_disconnect == "finish"

    @property
    def _is_worked(self) -> bool:
        return self._attempt is not None and not self._attempt.done()

    @property
    def _is_ending(self) -> bool:
        return self.outbox.ending is not None or self.life in OVER

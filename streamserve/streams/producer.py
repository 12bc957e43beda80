"""`Producer`: the half of a `Stream` that makes its events: what is to be committed, its generation, parks, outages.

The log writer asks for what is pending (`take_batch`) and brings the result (`on_result`). Of an outage of the log it
learns here too. Lives on the event loop; the stream's task and its readers are `Stream`'s.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import count

from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.parking import NO_READER, Parking
from streamserve.protocol.engine import HOPELESS, Accepted, Losses, Park
from streamserve.protocol.errors import EngineUnavailable, Refused, StreamserveError
from streamserve.protocol.events import TERMINALS, Done, Error, Event, LoggedEvent, Meta, Status
from streamserve.protocol.frames import encode_event
from streamserve.protocol.measures import FIRST_TOKEN, PARKED
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import JOB, StreamConfig
from streamserve.streams.lease.lease import Lease
from streamserve.streams.log.base import Batch, LogUnavailable, Result
from streamserve.streams.readers import ReaderLag
from streamserve.streams.replica import Replica
from streamserve.streams.shown_prompt import ShownPrompt
from streamserve.streams.transcript import Transcript
from streamserve.streams.writer import MAX_BATCH_EVENTS, LogWriter

# Of a batch: with log-probabilities sixteen events are some hundred kilobytes while they are committed.
_MAX_BATCH_BYTES = 8 * 1024

_NOT_ACCEPTED = Accepted(num_prompt_tokens=0, max_tokens=0, seed=0)  # of a restored stream; its meta event has the rest
_HOPELESS = Error(code="engine_died", message=HOPELESS, retryable=True)
_TIMEOUT = Error(code="timeout", message="The answer was not finished within timeout_seconds.")
LOG_AWAY = Status(status="waiting", message="The server cannot save the answer now. It continues by itself.")
_LOG_BACK = Status(status="resumed")


class Producer(Replica):
    """See above. `Stream` adds its readers, its task and its end."""

    def __init__(
        self,
        client: EngineClient,
        writer: LogWriter,
        config: StreamConfig,
        request: GenerateRequest,
        generation: Generation | None,
        *,
        log_id: str,
        lease: Lease,
        on_disconnect: str,
    ) -> None:
        accepted = _NOT_ACCEPTED if generation is None else generation.accepted
        transcript = Transcript(accepted, request.n, request.arrived_at or time.monotonic())
        if generation is not None:
            transcript.timings.accept(time.monotonic())
        super().__init__(writer.log, log_id, transcript, lease, on_disconnect)
        self.request = request if generation is None else _as_accepted(request, generation)
        if request.echo or request.sampling.prompt_logprobs is not None:
            self.shown_prompt = ShownPrompt()
        self.lag = ReaderLag(
            transcript, self.readers, is_bounded=on_disconnect not in ("finish", JOB), known=request.reader_tokens
        )
        self.parking = Parking(Losses(request.num_losses))
        self._client, self._writer, self._config = client, writer, config
        self._generation = generation
        self._own: deque[Event] = deque()  # to be committed, before what the generation has
        self._in_flight: Batch | None = None
        self._failure: Exception | None = None  # of a commit, for the task to act on
        self._has_resumed = False  # the generation is not the stream's first: it may repeat what the log has
        self._is_drained = False  # the generation has ended, and all it had is taken
        self._has_backlog = False  # it had more than fits into a batch
        self._max_events = MAX_BATCH_EVENTS  # of the next batch, from how large those of the last one were
        self._is_cut = False
        self.num_event_bytes = 0  # of the events that were made here, as the log has them

    def end_with(self, ending: Done | Error) -> None:
        """Have `ending` committed after what is being committed now, unless the stream is ending already."""
        if not self._is_ending:
            self._ending = ending
            self._cancel()
            self._own = deque(event for event in self._own if isinstance(event, Meta))
            self._writer.mark(self)
            self._wake()

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
            while self._own and len(events) < self._max_events:
                events.append(self._own.popleft())
            generation, limit = self._generation, self._max_events - len(events)
            self._has_backlog = limit == 0
            while generation is not None and limit and not is_end:
                ready = generation.ready(limit)
                self._has_backlog = len(ready) == limit
                for event in ready:
                    if isinstance(event, TERMINALS):
                        events.append(self._as_kept(event))
                        is_end = True
                        break
                    if not (self._has_resumed and self.transcript.is_repeated(event)):
                        events.append(event)
                if not ready and not generation.is_open and not events:
                    self._is_drained = True
                    self._wake()
                if events or not ready:
                    break
        if events:
            bodies = [encode_event(event) for event in events]
            self._in_flight = Batch(self.log_id, self.lease.fence, self.last_seq, events, bodies, is_end)
            num_bytes = sum(map(len, bodies))
            self.num_event_bytes += num_bytes
            num_fitting = len(bodies) * _MAX_BATCH_BYTES // num_bytes
            self._max_events = min(MAX_BATCH_EVENTS, num_fitting) or 1
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
            self._is_cut = self.lease.is_held  # a replica has no lease to release
            if self._generation is not None:
                self._cancel()
                self._begin_park(NO_READER)
            for reader in self.readers.attached:
                reader.go_away()
            self._wake()

    # The generation and its parks

    async def _readmit(self) -> None:
        """Ask the engine to continue after the tokens in the log. A refusal keeps the stream: it asks again."""
        self._news.clear()  # what changes from here on cuts a wait short
        if self._awaits_engine(time.monotonic()):
            return
        shown = self.shown_prompt
        request = replace(
            self.request,
            output_token_ids=self.transcript.token_ids,
            shown=self.transcript.shown,
            first_token_at=self.transcript.timings.first_at,
            reader_tokens=self.lag.reader_tokens,
            num_losses=self.parking.losses.num_losses,
            was_admitted=self.on_disconnect != JOB and self.parking.unloaded_at is None,  # a job's run is begun anew
            num_prompt_chars=() if shown is None else shown.num_chars(self.request.n),
            num_prompt_logprobs=0 if shown is None else shown.num_logprobs,
        )
        try:
            generation = await self._client.generate(request)
        except Refused as refused:
            if isinstance(refused, EngineUnavailable) and refused.lost is not None:
                self._lose(refused.lost)
                return
            if self.parking.refuse(refused, time.monotonic(), self._config.resume_window_seconds):
                self._show(self.parking.news(refused))
            else:
                self._give_up(Error(code=refused.code, message=refused.message, retryable=True))
            return
        except StreamserveError as error:
            self.end_with(Error(code=error.code, message=error.message, retryable=error.is_retryable))
            return
        if self._is_ending or not self._is_wanted or self._is_cut:
            generation.cancel()
            return
        self._continue(generation, request.reader_tokens)

    def _awaits_engine(self, now: float) -> bool:
        """Return whether an answer that began unloaded still waits for its engine; its time in the queue begins then.

        After `engine_wait_seconds` the engine's refusal ends it.
        """
        since, timings = self.parking.unloaded_at, self.transcript.timings
        if since is None:
            return False
        timings.loading_seconds = now - since
        self.request = replace(self.request, arrived_at=now)
        if not self._client.describe().is_loading or now >= since + self._config.engine_wait_seconds:
            return False
        self.parking.await_engine(now)
        return True

    def _continue(self, generation: Generation, reader_tokens: tuple[int, ...] | None) -> None:
        """Take the events of the generation that the engine has resumed."""
        self.lag.begin(reader_tokens)
        now = time.monotonic()
        self.transcript.accept(generation.accepted)
        if self.parking.unloaded_at is not None:
            self.request = _as_accepted(self.request, generation)
            self.transcript.timings.accept(now)
        else:
            self.transcript.timings.enter(FIRST_TOKEN, now)
        if self.parking.end() and (self.on_disconnect != JOB or self.last_seq > 1):  # a job's first attempt is none
            self._own.append(Status(status="resumed"))
        self._generation, self._has_resumed = generation, self.on_disconnect != JOB  # a job's run repeats nothing
        self._is_drained = self._has_backlog = False
        generation.on_news = partial(self._writer.mark, self)
        self._note_position()
        self._writer.mark(self)

    def _stand_still(self, generation: Generation) -> None:
        """Remember why the engine has parked the answer, and show that to the readers if they will notice."""
        self.transcript.note_cached(generation.num_cached_tokens)
        park: Park | None = generation.parked
        if park is None:
            raise RuntimeError("the generation ended without a terminal event")
        self._generation = generation.on_news = None
        self._lose(park)

    def _lose(self, park: Park) -> None:
        """The engine holds nothing of the answer any more."""
        self._begin_park(park)
        if self.parking.losses.is_hopeless:
            self.end_with(_HOPELESS)
        else:
            self._show(self.parking.news())

    def _begin_park(self, park: Park) -> None:
        now = time.monotonic()
        self.parking.begin(park, self.transcript.num_tokens, now)
        self.transcript.timings.enter(PARKED, now)

    def _show(self, statuses: list[Status]) -> None:
        if statuses:
            self._own.extend(statuses)
            self._writer.mark(self)

    def _begin_to_produce(self) -> None:
        self._arm_timeout()
        if self.parking.park is None:
            self._begin_park(NO_READER)
        if self._ending is not None:
            self._writer.mark(self)

    def _give_up(self, error: Error) -> None:
        """The engine refuses to continue: the end, but for a job, which may be tried again."""
        self.end_with(error)

    def _stop_producing(self) -> None:
        """Another process writes from now on, or none: keep nothing that only the producer needs."""
        self._cancel()
        self._own.clear()
        self._in_flight, self._is_cut = None, False
        self._timers.disarm_all()

    def drop_generation(self) -> None:
        """Cancel the generation of a stream that does not begin."""
        self._cancel()

    def _cancel(self) -> None:
        """Once this returns, no StepPlan built later holds the sequence."""
        if self._generation is not None:
            self._generation.on_news = None
            self._generation.cancel()
            self.transcript.note_cached(self._generation.num_cached_tokens)
            self._generation = None

    def _note_position(self) -> None:
        """Report the furthest reader's position to the engine, or find that it is time to continue."""
        if self._generation is not None:
            self.lag.report(self._generation)
        elif self.lease.is_held and not self._is_ending and self._seconds_left() == 0:
            self._wake()

    def _seconds_left(self) -> float | None:
        """Seconds until the engine is asked to continue: 0 is now, None is until a reader comes or has read more."""
        return self.parking.seconds_left(self.lag.num_unread, time.monotonic()) if self._is_wanted else None

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
        is_one_run = not self.parking.num_parks or self.on_disconnect == JOB  # a job's run counts all its attempts
        return self.transcript.of_one_run(event) if is_one_run else self.transcript.over_all_runs(event)

    @property
    def _is_ending(self) -> bool:
        return self._ending is not None or self.terminal is not None or self.ended.is_set()


def _as_accepted(request: GenerateRequest, generation: Generation) -> GenerateRequest:
    """Return `request` with what acceptance has decided, so that asking again gives the same tokens."""
    accepted = generation.accepted
    unset = tuple(name for name in ("seed", "max_tokens") if getattr(request.sampling, name) is None)
    sampling = replace(request.sampling, seed=accepted.seed, max_tokens=accepted.max_tokens)
    needs = tuple(sorted({*request.needs, *accepted.needs}))
    # What it waited for its first acceptance is spent.
    return replace(request, sampling=sampling, unset=request.unset + unset, needs=needs, waited_seconds=0.0)

"""`Stream`: one answer as its readers see it, from the first event to the one terminal event, across parks.

One task (`Stream.run`, owned by `Streams`) does every append, or waits while a `Relay` does, so the order of events
needs no lock; everything else only says what should happen (`stop`, `detach`, a timer) and cancels the generation
synchronously. What is committed is shown in the same turn of the loop (followed.py, `_settle`). Parked means: the
engine has forgotten the sequence and the stream remembers its tokens; `Parking` has the reasons and what each waits
for. Lives on the event loop; knows no wire, no dialect and no framework.

    running ── engine's Done or Error, stop, timeout ────────────────────────────────► finished
       │ ▲                                                                                ▲
       │ └── an owner's reader is there, `Parking` says now, the engine accepts again     │
       │                                                                                  │
       ├── the last owner's reader left ──► parked ── resume window over, stop, timeout, ─┘
       └── the engine parked it ──────────────┘       engine refuses for good or dies of it

Where several processes share a log, only the one that holds the stream's `Lease` does any of this; the others follow
the log for the readers they have, and one of them goes on when it is let go of, or its process dies (claim.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from streamserve.clients.base import EngineClient, Generation
from streamserve.protocol.errors import Refused, StreamserveError
from streamserve.protocol.events import Done, Error, Meta, Status, Usage
from streamserve.protocol.park import Accepted, Park
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.lead import Lead
from streamserve.streams.lease.lease import Lease
from streamserve.streams.log.base import Ended, EventLog, Fenced, Forked, LogLost, LogUnavailable, new_log_id
from streamserve.streams.parking import MESSAGES, NO_READER, Parking
from streamserve.streams.readers import Reader
from streamserve.streams.relay import Relay
from streamserve.streams.replica import RETRY_SECONDS, FollowedStream
from streamserve.streams.transcript import StreamSummary, Transcript, summarize

__all__ = ["ON_DISCONNECT", "Reader", "Stream", "StreamConfig", "StreamSummary"]

logger = logging.getLogger("streamserve.streams")

ON_DISCONNECT = ("park", "abort", "finish")

_NOT_ACCEPTED = Accepted(num_prompt_tokens=0, max_tokens=0, seed=0)  # of a stream from elsewhere; its meta says more
_ABANDONED = Done(finish_reason="abandoned")
_INTERNAL = Error(code="internal_error", message="The server failed while answering. It has been logged.")
_HOPELESS = Error(code="engine_died", message="The engine failed repeatedly on this answer. Try again.", retryable=True)
_STOPPING = Error(code="engine_unavailable", message="The server is shutting down.", retryable=True)
_TIMEOUT = Error(code="timeout", message="The answer was not finished within timeout_seconds.")


class Stream(FollowedStream):
    """One answer as readers see it. Made by `Streams`, with a generation that is accepted, or by `recall` without."""

    def __init__(
        self,
        client: EngineClient,
        log: EventLog,
        settings: StreamConfig,
        request: GenerateRequest,
        generation: Generation | None,
        *,
        owner: str,
        on_disconnect: str = "park",
        claim: Lease | None = None,
        log_id: str = "",
        created: int | None = None,
    ) -> None:
        accepted = _NOT_ACCEPTED if generation is None else generation.accepted
        tally = Transcript(accepted, request.n, request.arrived_at or time.monotonic())
        claim = claim or Lease(None, request.stream_id)
        super().__init__(log, log_id or new_log_id(), tally, claim, on_disconnect)
        self.id = request.stream_id
        self.owner, self.tenant, self.model = owner, request.tenant, request.model
        self.created = int(time.time()) if created is None else created
        self.request = request if generation is None else _fix(request, generation)
        self.lead = Lead(tally, self.readers, is_bounded=on_disconnect != "finish", told=request.reader_tokens)
        self.parking = Parking()
        self.ended = asyncio.Event()  # set once nothing more will be appended
        self.ended_at: float | None = None
        self._client, self._settings = client, settings
        self._generation = generation
        self._relaying: Relay | None = None  # of the generation of now, once it is relayed

    # What others see

    @property
    def state(self) -> str:
        """One of running, parked (also while it waits to be admitted again), finished."""
        if self.terminal is not None or self.ended.is_set():
            return "finished"
        return "parked" if self._generation is None and not self.claim.is_elsewhere else "running"

    @property
    def is_live(self) -> bool:
        """Whether it is unfinished, and this process answers for it."""
        return self.state != "finished" and not self.claim.is_elsewhere

    @property
    def is_writing(self) -> bool:
        """Whether the engine is at it for this process: then only a claim by force has others write the log."""
        return self._generation is not None

    @property
    def usage(self) -> Usage:
        """Token counts: the terminal event's, before that what the log holds."""
        if isinstance(self.terminal, Done):
            return self.terminal.usage
        if self._generation is not None:
            self.tally.note_cached(self._generation.num_cached_tokens)
        return self.tally.usage

    def summary(self) -> StreamSummary:
        """Return the stream's figures of now."""
        return summarize(self)

    # What others ask for

    async def stop(self, seen_seq: int | None = None) -> None:
        """End the stream as its user asks; returns once that is committed. After the end nothing happens."""
        self._end_with(Done(finish_reason="cancelled", kept_seq=None if seen_seq is None else max(0, seen_seq)))
        await self.ended.wait()

    def abandon(self) -> None:
        """End the stream that nobody came back to, unless somebody has."""
        if not self._is_wanted:
            self._end_with(_ABANDONED)

    def shut_down(self) -> None:
        """End the stream because the server stops; one that others can go on with is only let go of."""
        if self.can_leave:
            self._has_left = True
            self._cancel()
            self._news.set()
        else:
            self._end_with(_STOPPING)

    def attach(self, reader: Reader) -> None:
        """Count `reader` in. An owner's reader has a parked stream continued."""
        self.readers.add(reader)
        if not reader.is_watcher:
            self._timers.disarm("first_reader", "resume_window")
            self.parking.hurry()
            self._note_position()
            self._news.set()

    def moved(self, reader: Reader, seq: int) -> None:
        """Note that `reader` has every event up to `seq`."""
        if reader.seq != seq:
            reader.seq = seq
            if not reader.is_watcher:
                self._note_position()

    def detach(self, reader: Reader) -> None:
        """Count `reader` out, once. Losing the last owner's reader takes effect before this returns."""
        if self.readers.discard(reader):
            self._news.set()
            if not reader.is_watcher:
                self.release()
                self._note_position()

    def release(self) -> None:
        """Do what `on_disconnect` says, unless an owner's reader is attached. Also for one that was promised only."""
        if self._is_wanted or self._is_ending or not self.claim.is_held:
            return
        if self.on_disconnect == "abort":
            self._end_with(_ABANDONED)
        else:
            self._park()

    # The stream's task

    async def open(self) -> None:
        """Commit `meta`, the first event, and begin to wait for a reader. `run` must follow."""
        meta = Meta(model=self.model, stream_id=self.id, created=self.created, prompt_tokens=self.usage.prompt_tokens)
        await self._append([meta])
        self._timers.arm("first_reader", self._settings.first_reader_seconds, self.release)
        self._arm_timeout()

    def _arm_timeout(self) -> None:
        if self.request.timeout_seconds is not None:
            left = self.tally.pace.started_at + self.request.timeout_seconds - time.monotonic()
            self._timers.arm("timeout", left, lambda: self._end_with(_TIMEOUT))

    async def run(self) -> None:
        """Bring the stream to its end, whatever happens."""
        try:
            await self._pump()
        except asyncio.CancelledError:
            await self._fail(_STOPPING)
            raise
        except Fenced:
            logger.warning("stream %s: another producer has claimed it", self.id)
        except Exception:
            logger.exception("stream %s: failed", self.id)
            await self._fail(_INTERNAL)
        finally:
            await self._close()

    async def _pump(self) -> None:
        """Bring the stream on, whoever writes it, until its terminal event is committed or it is let go of."""
        while self.terminal is None and not self._has_left:
            try:
                await (self._produce() if self.claim.is_held else self._follow())
            except (Forked, LogLost) as loss:
                self.is_forked = isinstance(loss, Forked)
                raise
            except (Fenced, Ended, LogUnavailable) as reason:
                if not self.claim.lose():
                    raise
                self._cancel()
                self._timers.disarm_all()
                if isinstance(reason, LogUnavailable):  # what was being committed is in the log or not: claim it anew
                    await self._change(RETRY_SECONDS)

    async def _produce(self) -> None:
        """Take the next step from the engine to the log, across parks."""
        if self._ending is not None:
            await self._append([self._ending])
        elif self._generation is not None:
            await self._relay(self._generation)
        elif (seconds := self._seconds_left()) == 0:
            await self._readmit()
        elif not (self.is_resumable and self._says_resumable):
            await self._outlast(seconds)
        elif self._is_wanted or not self.claim.is_shared:
            await self._change(seconds)
        else:
            await self.claim.release()
            if self.claim.is_held:
                await self._change(RETRY_SECONDS)

    async def _outlast(self, seconds: float | None) -> None:
        """Hold the stream while its log is away, for nobody else can go on with it; hear when that is over."""
        await self._change(min(RETRY_SECONDS, seconds or RETRY_SECONDS))
        await self._log.append(self.log_id, self.claim.fence, [])  # raises what has become of it
        await self._append([])

    def _take_over(self) -> None:
        self._arm_timeout()
        if self.parking.park is None:
            self.parking.begin(NO_READER, self.tally.num_tokens, time.monotonic())

    async def _relay(self, generation: Generation) -> None:
        """Commit what `generation` yields until it is over: by itself, parked by the engine, or cancelled by us."""
        self._relaying = relay = Relay(generation, self._batch, self._submit)
        try:
            generation.on_news = relay.go_on
            relay.go_on()
            await relay.over()
        finally:
            self._relaying = generation.on_news = None
            self.tally.note_cached(generation.num_cached_tokens)
        if self.terminal is None and self._generation is generation:
            await self._stand_still(generation.parked)

    async def _stand_still(self, park: Park | None) -> None:
        """Remember why the engine has parked the answer, and tell the readers if they will notice."""
        if park is None:
            raise RuntimeError("the generation ended without a terminal event")
        self._generation = None
        self.parking.begin(park, self.tally.num_tokens, time.monotonic())
        if self.parking.is_hopeless:
            self._end_with(_HOPELESS)
        elif park.reason in MESSAGES:
            await self._tell_waiting(MESSAGES[park.reason])

    async def _readmit(self) -> None:
        """Ask the engine to go on after the tokens in the log. A refusal keeps the stream: it asks again."""
        self._news.clear()  # what is news from here on cuts a wait short
        request = replace(
            self.request,
            output_token_ids=self.tally.token_ids,
            first_token_at=self.tally.pace.first_at,
            reader_tokens=self.lead.reader_tokens,
        )
        try:
            generation = await self._client.generate(request)
        except Refused as refused:
            await self._wait_out(refused)
            return
        except StreamserveError as error:
            self._end_with(Error(code=error.code, message=error.message))
            return
        if self._is_ending or not self._is_wanted:
            generation.cancel()
            return
        self._generation = generation
        self.lead.begin(request.reader_tokens)
        self._note_position()
        if self.parking.end():
            await self._append([Status(status="resumed")])

    async def _wait_out(self, refused: Refused) -> None:
        """Tell the readers once; give up on a model that has failed, or after as long as the resume window."""
        seconds = self.parking.refuse(refused, time.monotonic())
        if refused.code == "engine_died" or seconds > self._settings.resume_window_seconds:
            self._end_with(Error(code=refused.code, message=refused.message, retryable=True))
        else:
            await self._tell_waiting(MESSAGES["paused"] if refused.code == "engine_paused" else refused.message)

    async def _tell_waiting(self, message: str) -> None:
        if not self.parking.has_told:
            self.parking.has_told = True
            await self._append([Status(status="waiting", message=message)])

    async def _fail(self, error: Error) -> None:
        """Commit `error` if the stream has no end yet. A log that cannot take even that leaves it without one."""
        self._cancel()
        try:
            if self.terminal is None and self.claim.is_held:
                await self._append([error])
        except Exception:
            logger.exception("stream %s: its log does not take the terminal event", self.id)

    async def _close(self) -> None:
        """Let go of engine and timers, and wake the readers who wait."""
        self._cancel()
        self._timers.disarm_all()
        if self.terminal is None:
            self._has_left = self.claim.is_shared
            await self.claim.release()
        self.ended_at = time.monotonic()
        self.ended.set()
        try:
            await self._log.seal(self.log_id)
        except Exception:
            logger.exception("stream %s: its log cannot be sealed", self.id)

    def _settled(self, event: Done) -> Done:
        """Return `event` as it is to be kept: a `done` speaks for all runs, or for one that was cut short."""
        if event is self._ending:
            kept_seq = None if event.kept_seq is None else min(event.kept_seq, self.last_seq)
            return self.tally.with_figures(replace(event, kept_seq=kept_seq))
        return self.tally.over_all_runs(event) if self.parking.num_parks else event

    # Decisions, synchronous

    @property
    def _is_ending(self) -> bool:
        return self._ending is not None or self.state == "finished"

    def _seconds_left(self) -> float | None:
        """How long until the engine is asked to go on: 0 is now, None is until somebody comes or has read more."""
        return self.parking.seconds_left(self.lead.num_unread, time.monotonic()) if self._is_wanted else None

    def _note_position(self) -> None:
        """Tell the engine how far the furthest reader is, or find that it is time to go on."""
        if self._generation is not None:
            self.lead.tell(self._generation)
        elif not self._is_ending and self._seconds_left() == 0:
            self._news.set()

    def _end_with(self, ending: Done | Error) -> None:
        if not self._is_ending:
            self._ending = ending
            self._cancel()
            self._news.set()

    def _park(self) -> None:
        """Have the engine forget the sequence, and give the reader `resume_window_seconds` to come back."""
        if self._generation is not None:
            self._cancel()
            self.parking.begin(NO_READER, self.tally.num_tokens, time.monotonic())
        self._timers.disarm("first_reader")
        window = self._settings.resume_window_seconds
        self._timers.arm("resume_window", window, lambda: self._end_with(_ABANDONED))

    def _cancel(self) -> None:
        """Once this returns, no StepPlan built later holds the sequence."""
        if self._generation is not None:
            self._generation.cancel()
            self._generation = None
            if self._relaying is not None:
                self._relaying.go_on()


def _fix(request: GenerateRequest, generation: Generation) -> GenerateRequest:
    """Return `request` with what acceptance has decided, so that asking again gives the same tokens."""
    accepted = generation.accepted
    unset = tuple(name for name in ("seed", "max_tokens") if getattr(request.sampling, name) is None)
    sampling = replace(request.sampling, seed=accepted.seed, max_tokens=accepted.max_tokens)
    return replace(request, sampling=sampling, unset=request.unset + unset)

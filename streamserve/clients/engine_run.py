"""`EngineRun`: one answer in its engine, across parks and refusals. Streams and pipelines' answers hold it.

    WAITING ── ask, take ──► RUNNING ── the engine has ended it early, and all that it gave is taken ──► DRAINED
       ▲                        │                                                                          │
       └──────── cancel ────────┴─────────────────────────── drain ────────────────────────────────────────┘

It knows the generation, why there is none, when the engine is asked again, and what the engine knows of the readers.
What was shown so far is its owner's, who passes it with each `ask`. On the event loop.

`Parking`: why an answer is parked or refused, and when its engine is asked again. Parked means that the engine holds
no part of the answer, and the stream or the pipeline's run holds its tokens. A refusal is waited for as a park is,
unless it is final. Pure: the caller passes the time and the number of unread tokens.

    reason   parked by, because                          asks again when                      events shown
    reader   the stream: no owner's reader is attached   one attaches and has nearly read all resumed
    lead     the engine: the reader is too far behind    it has nearly read all               none
    ahead    the engine: other answers need the blocks   its time is over, or all is read     none
    paused   the engine: the operator pauses it          at once, then with backoff           waiting, resumed
    lost     the client: the engine has ended            at once, then with backoff           waiting, loading, resumed
    loading  the stream: it began before its engine      the engine is loaded                 loading
             the engine or its client refuses it         the refusal sets it                  waiting, loading, resumed
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from streamserve.clients.base import EngineClient, Generation
from streamserve.protocol.engine import HOPELESS, Losses, Park
from streamserve.protocol.errors import CannotContinue, EngineUnavailable, Refused
from streamserve.protocol.events import Event, Status
from streamserve.protocol.requests import START, Admission, GenerateRequest, Resume

# A reader that returns to a long answer replays it first; a prefill is worth its cost when so few tokens are unread.
NO_READER = Park(reason="reader", resume_at_lead=128)
_UNLOADED = Park(reason="loading")

# Of parks that their readers notice, by the reason.
MESSAGES = {
    "paused": "Answers are paused for a while. This answer continues by itself.",
    "lost": "The engine is being restarted. The answer continues in a moment.",
}
# Of refusals, by their code; any other has its own message.
LOADING = "The model is being loaded. The answer continues by itself."
_MESSAGES_OF_CODES = {
    "engine_loading": LOADING,
    "engine_paused": MESSAGES["paused"],
}

# How often a stream looks whether its first engine is loaded: at a value in this process.
_LOADED_SECONDS = 0.2
# The first delay before an engine that starts is asked again. It doubles up to the engine's own `retry_after`.
_BACKOFF_SECONDS = 0.1
_MAX_DOUBLINGS = 10
# The longest delay after a park. An answer that was refused while an engine loaded, and then loses that engine, too,
# must not wait as if the next one were refusing already.
_MOST_PARK_SECONDS = 2.0

# The engine learns a reader's position in steps of about one frame: what it knows is a quarter of a second old at most.
_STEP = 5
# That a reader looks away or comes back is sent at once, and so often at most; else with the next position.
_AWAY_SECONDS = 0.5

ReaderTokens = tuple[int, ...] | None


@dataclass(slots=True, eq=False)
class Parking:
    """The parking of one answer, over its whole life. `park` is None while it has a generation, and before its first.

    `losses` has those before the engine has taken it.
    """

    losses: Losses = field(default_factory=Losses)
    park: Park | None = None
    num_parks: int = 0
    unloaded_at: float | None = None  # since when its first engine is waited for; None once that has accepted it
    shown: set[str] = field(default_factory=set)  # statuses shown to readers during this park: "resumed" follows
    _ask_at: float = 0.0
    _refused_at: float | None = None
    _num_tries: int = 0  # parks and refusals of any kind, since the answer's last new token
    _num_tokens: int = 0

    def begin(self, park: Park, num_tokens: int, now: float) -> None:
        """Note that the engine has parked the answer, which has `num_tokens` so far."""
        self.park = park
        self.num_parks += 1
        if num_tokens > self._num_tokens:
            self._num_tries = 0
        self._num_tokens = num_tokens
        self.losses.note(park, num_tokens)
        is_shown = park.reason in MESSAGES
        self._ask_at = now + (min(self._backoff(), _MOST_PARK_SECONDS) if is_shown else park.resume_seconds)
        self._num_tries += 1

    def await_engine(self, now: float) -> None:
        """Note that the answer's first engine is being loaded. That is no park in its figures."""
        self.park, self._ask_at = _UNLOADED, now + _LOADED_SECONDS
        if self.unloaded_at is None:
            self.unloaded_at = now

    @property
    def reason(self) -> str | None:
        """Why the answer is parked; None while it is not."""
        return None if self.park is None else self.park.reason

    def refuse(self, refused: Refused, now: float, patience_seconds: float) -> bool:
        """Note that the engine refuses the answer; return whether it is to be asked again.

        Not after a final refusal, nor once it has refused for `patience_seconds`.
        """
        is_coming_up = isinstance(refused, EngineUnavailable)
        self._ask_at = now + (min(self._backoff(), refused.retry_after) if is_coming_up else refused.retry_after)
        self._num_tries += 1
        if self._refused_at is None:
            self._refused_at = now
        has_not_loaded = is_coming_up and self.unloaded_at is not None
        is_final = isinstance(refused, CannotContinue) or refused.code == "engine_died" or has_not_loaded
        return not is_final and now - self._refused_at < patience_seconds

    def news(self, refused: Refused | None = None) -> list[Status]:
        """Return what readers are shown of the park, or of a refusal: each status once in a park."""
        message = MESSAGES.get(self.reason or "") if refused is None else _MESSAGES_OF_CODES.get(refused.code)
        if message is None and refused is not None:
            message = refused.message
        statuses = ("waiting", "loading") if refused is not None and refused.code == "engine_loading" else ("waiting",)
        new = [Status(status=one, message=message) for one in statuses if message and one not in self.shown]
        self.shown.update(status.status for status in new)
        return new

    def skip_delay(self) -> None:
        """Drop the delay after a refusal, because a reader attached."""
        if self._refused_at is not None:
            self._ask_at = 0.0

    def seconds_left(self, num_unread: int, now: float) -> float | None:
        """Return the seconds until the engine is asked again. None: not before fewer tokens are unread."""
        if self._refused_at is None:
            if self.park is None:
                return 0.0
            if self.park.reason in ("reader", "lead") and num_unread > self.park.resume_at_lead:
                return None
            if self.park.reason == "ahead" and num_unread == 0:
                return 0.0
        return max(0.0, self._ask_at - now)

    def end(self) -> bool:
        """Note that the engine has resumed it; return whether readers are shown "resumed"."""
        is_shown = bool(self.shown) or self.park is NO_READER
        self.park, self._refused_at, self.unloaded_at, self.shown = None, None, None, set()
        return is_shown

    def _backoff(self) -> float:
        return _BACKOFF_SECONDS * 2.0 ** min(self._num_tries - 1, _MAX_DOUBLINGS) if self._num_tries else 0.0


class Lag(Protocol):
    """How far an answer is ahead of its readers, as its owner counts it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far, of all choices."""

    @property
    def reader_tokens(self) -> ReaderTokens:
        """Tokens of each choice that the furthest reader has; None: the engine waits for no reader."""

    @property
    def num_unread(self) -> int:
        """Tokens that this reader has not received; 0 where the engine waits for none."""

    @property
    def is_away(self) -> bool:
        """Whether the readers look away now, as in a hidden tab."""


class RunState(Enum):
    """Where the answer is, as its engine sees it."""

    WAITING = "waiting"  # the engine holds no part of it: it has not begun, is parked, or is refused
    RUNNING = "running"
    DRAINED = "drained"  # the engine has ended it early, and all that it gave is taken


class EngineRun:
    """See above. `request` is what the engine is asked for, with what its first acceptance has decided.

    `resume`: what the `generation` that is given was asked to continue after.
    `generation` is there while the answer runs, or was accepted for a new run. `was_admitted`: an engine has accepted
    it before.
    """

    def __init__(
        self,
        client: EngineClient,
        request: GenerateRequest,
        admission: Admission,
        lag: Lag,
        generation: Generation | None = None,
        *,
        resume: Resume = START,
        was_admitted: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client, self.request, self.admission, self.lag = client, request, admission, lag
        self.parking = Parking(Losses(resume.num_losses))
        self.state = RunState.WAITING
        self.generation: Generation | None = None
        self.may_repeat = False  # the generation continues an answer, and may give events again that were shown
        self.was_admitted, self._clock = was_admitted, clock
        self._num_cached_tokens: int | None = None  # of the last generation
        self._known = resume.reader_tokens  # the position that the engine has
        self._is_known_away = False
        self._away_at = -math.inf  # when that was last sent
        if generation is not None:
            self.take(generation)

    async def ask(self, resume: Resume, patience_seconds: float) -> Generation | list[Status]:
        """Ask the engine to begin or to continue; `resume` has what was shown so far.

        Returns the generation, to `take` or to cancel; or what readers are shown while it refuses. Raises a refusal
        that is final, the refusal of an engine that has refused for `patience_seconds`, and other StreamserveErrors.
        """
        resume = replace(
            resume,
            reader_tokens=self.lag.reader_tokens,
            num_losses=self.parking.losses.num_losses,
            was_admitted=self.was_admitted,
        )
        try:
            generation = await self.client.generate(self.request, self.admission, resume)
        except Refused as refused:
            if isinstance(refused, EngineUnavailable) and refused.lost is not None:
                return self.lose(refused.lost)
            if not self.parking.refuse(refused, self._clock(), patience_seconds):
                raise
            return self.parking.news(refused)
        self._known, self._is_known_away = resume.reader_tokens, False
        return generation

    def take(self, generation: Generation) -> bool:
        """Continue with what the engine makes from now on; return whether readers are shown "resumed"."""
        self.may_repeat = self.was_admitted and generation.accepted.may_repeat
        if not self.was_admitted:  # what was decided for it stays when it continues
            self.request, self.was_admitted = self.request.as_accepted(generation.accepted), True
        self.generation, self.state = generation, RunState.RUNNING
        return self.parking.end()

    def ready(self, most: int) -> list[Event]:
        """Take up to `most` events that are there now, without waiting."""
        if self.generation is None:
            return []
        events = self.generation.ready(most)
        if not events and not self.generation.is_open:
            self.state = RunState.DRAINED
        return events

    def report(self) -> None:
        """Send the furthest reader's position to the engine, if that is worth a message."""
        if self.generation is None:
            return
        read, is_away = self.lag.reader_tokens, self.lag.is_away
        if read is None or self._known is None:
            is_news = read is not self._known
        else:
            is_news = max(abs(now - before) for now, before in zip(read, self._known, strict=True)) >= _STEP
        if is_away is not self._is_known_away and not is_news:
            is_news = self._clock() - self._away_at >= _AWAY_SECONDS
        if is_news:
            if is_away is not self._is_known_away:
                self._away_at = self._clock()
            self._known, self._is_known_away = read, is_away
            self.generation.reader_at(read, is_away)

    def cancel(self) -> None:
        """Once this returns, no StepPlan built later holds the sequences. Idempotent."""
        if self.generation is not None:
            self.generation.on_news = None
            self.generation.cancel()
            self._leave(self.generation)

    def drain(self) -> Park:
        """Let go of a generation that the engine has ended early, and return why it has."""
        assert self.generation is not None
        park = self.generation.parked
        if park is None:
            raise RuntimeError("the generation ended without a terminal event")
        self.generation.on_news = None
        self._leave(self.generation)
        return park

    def park(self, park: Park) -> None:
        """Note that the engine holds no part of the answer any more, and why."""
        self.parking.begin(park, self.lag.num_tokens, self._clock())

    def lose(self, park: Park) -> list[Status]:
        """Do `park`, and return what readers are shown. Raises EngineUnavailable if the answer ends its engines."""
        self.park(park)
        if self.parking.losses.is_hopeless:
            raise EngineUnavailable(HOPELESS, code="engine_died")
        return self.parking.news()

    def is_loading(self, now: float, seconds: float) -> bool:
        """Return whether an answer that began unloaded still waits for its engine; its time in the queue begins then.

        After `seconds` the engine is asked all the same, and its refusal is final.
        """
        since = self.parking.unloaded_at
        if since is None:
            return False
        self.admission = replace(self.admission, arrived_at=now)
        self.client.wake()  # it may have gone to sleep again
        if not self.client.describe().is_loading or now >= since + seconds:
            return False
        self.parking.await_engine(now)
        return True

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the engine is asked to continue. None: not before fewer tokens are unread."""
        return self.parking.seconds_left(self.lag.num_unread, self._clock())

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that the newest generation found in the prefix cache; None before the first."""
        return self._num_cached_tokens if self.generation is None else self.generation.num_cached_tokens

    def _leave(self, generation: Generation) -> None:
        self._num_cached_tokens = generation.num_cached_tokens
        self.generation, self.state = None, RunState.WAITING

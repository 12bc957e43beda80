"""`Parking`: why an answer is parked or refused, and when its engine is asked again. For streams and answers of runs.

Parked means that the engine holds nothing of the answer, and the stream or the run holds its tokens. A refusal is
waited for as a park is, unless it is final. Pure: the caller passes the time and the number of unread tokens.

    reason   parked by, because                          asks again when                      events shown
    reader   the stream: no owner's reader is attached   one attaches and has nearly read all resumed
    lead     the engine: the reader is too far behind    it has nearly read all               none
    ahead    the engine: other answers need the blocks   its time is over, or all is read     none
    paused   the engine: the operator pauses it          at once, then with backoff           waiting, resumed
    lost     the client: the engine has ended            at once, then with backoff           waiting, loading, resumed
    loading  the stream: it began before its engine      the engine is loaded                 loading
             the engine or its client refuses it         as the refusal says                  waiting, loading, resumed
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamserve.protocol.engine import Losses, Park
from streamserve.protocol.errors import CannotContinue, EngineUnavailable, Refused
from streamserve.protocol.events import Status

# A reader that returns to a long answer replays it first; a prefill is worth its cost when so few tokens are unread.
NO_READER = Park(reason="reader", resume_at_lead=128)
_UNLOADED = Park(reason="loading")

# Of parks that their readers notice, by the reason.
MESSAGES = {
    "paused": "Answers are paused for a while. This one continues by itself.",
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

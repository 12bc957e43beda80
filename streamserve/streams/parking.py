"""`Parking`: why a stream's generation is parked, and when the engine is to be asked to go on.

Parked: the engine holds nothing of the answer, the log has its tokens. Pure: told the time and how much is unread.

    reason   who parks, why                           asked again                          readers are told
    reader   stream: no owner's reader is here        one is, and has nearly caught up     resumed
    lead     engine: the reader is too far behind     it has nearly caught up              nothing
    ahead    engine: others need the room more        after a while, or nothing is unread  nothing
    paused   engine: its operator wants it            at once, then with backoff           waiting, resumed
    lost     client: the engine is gone               at once, then with backoff           waiting, resumed
"""

from __future__ import annotations

from streamserve.protocol.errors import EngineUnavailable, Refused
from streamserve.protocol.park import Park

# A reader who comes back to a long answer replays it first; a prefill is worth it when the rest is this short.
NO_READER = Park(reason="reader", resume_at_lead=128)

MESSAGES = {
    "paused": "Answers are paused for a while. This one goes on by itself.",
    "lost": "The engine is being restarted. The answer goes on in a moment.",
}

# An answer that has lost its engine this often without a new token between may be what kills it.
_MAX_LOSSES = 5
# An engine that is coming up is asked after this, then twice that, and so on, up to what it says itself.
_BACKOFF_SECONDS = 0.1
_MAX_DOUBLINGS = 10


class Parking:
    """Of one stream, for as long as it lives. `park` is None while it has a generation."""

    def __init__(self) -> None:
        self.park: Park | None = None
        self.num_parks = 0
        self.has_told = False  # readers have seen "waiting", and are to see "resumed"
        self._ask_at = 0.0
        self._refused_at: float | None = None
        # Since the answer had its last new token: how often the engine was lost, and how often it did not help to ask.
        self._num_losses = self._num_tries = 0
        self._num_tokens = 0

    def begin(self, park: Park, num_tokens: int, now: float) -> None:
        """Note that the engine has forgotten an answer of `num_tokens` so far."""
        self.park = park
        self.num_parks += 1
        if num_tokens > self._num_tokens:
            self._num_losses = self._num_tries = 0
        self._num_tokens = num_tokens
        self._num_losses += park.reason == "lost"
        self._ask_at = now + (self._backoff() if park.reason in MESSAGES else park.resume_seconds)
        self._num_tries += 1

    @property
    def reason(self) -> str | None:
        """Why the answer stands still; None while it does not."""
        return None if self.park is None else self.park.reason

    @property
    def is_hopeless(self) -> bool:
        """Whether the engine is lost again and again and the answer does not grow."""
        return self._num_losses >= _MAX_LOSSES

    def refuse(self, refused: Refused, now: float) -> float:
        """Note that the engine does not take it back yet; return for how many seconds it has not."""
        is_coming_up = isinstance(refused, EngineUnavailable)
        self._ask_at = now + (min(self._backoff(), refused.retry_after) if is_coming_up else refused.retry_after)
        self._num_tries += 1
        if self._refused_at is None:
            self._refused_at = now
        return now - self._refused_at

    def hurry(self) -> None:
        """Wait out no refusal: somebody came."""
        if self._refused_at is not None:
            self._ask_at = 0.0

    def seconds_left(self, num_unread: int, now: float) -> float | None:
        """How long to wait before the engine is asked: 0 is now, None is until less is unread."""
        if self.park is None:
            return 0.0
        if self._refused_at is None:
            if self.park.reason in ("reader", "lead") and num_unread > self.park.resume_at_lead:
                return None
            if self.park.reason == "ahead" and num_unread == 0:
                return 0.0
        return max(0.0, self._ask_at - now)

    def end(self) -> bool:
        """Note that the engine has taken it back; return whether readers are to be told."""
        is_told = self.has_told or self.park is NO_READER
        self.park, self._refused_at, self.has_told = None, None, False
        return is_told

    def _backoff(self) -> float:
        return _BACKOFF_SECONDS * 2.0 ** min(self._num_tries - 1, _MAX_DOUBLINGS) if self._num_tries else 0.0

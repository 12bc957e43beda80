"""`Shown`: what earlier attempts of a job have shown, so that another one shows none of it again. Pure.

A run that is tried again gives the same events from the start. Those that the log has are taken off here, in order:
texts character by character, token ids by their number, since a whole answer may come as one event now. A run that
gives something else than before cannot be continued: what was shown is never retracted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace

from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import TEXT, BlockStart, BlockStop, Citation, Event, Status, Token

KEPT_STATUSES = ("step", "trimmed")


class NotRepeatable(StreamserveError):
    """A run that was tried again did something else than before."""

    code = "not_repeatable"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The job was tried again and did something else than before ({reason}), so it cannot go on. Put what may "
            "change (times, random choices, searches) into steps: their results are kept."
        )


class Shown:
    """The events of a log, as far as the present attempt has not come to them yet."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._marks: Counter[Status | Citation] = Counter()  # steps and citations: in any order
        self._spoken: deque[Token | BlockStart | BlockStop] = deque()  # neighbouring tokens of a block as one
        for event in events:
            if isinstance(event, Citation) or (isinstance(event, Status) and event.status in KEPT_STATUSES):
                self._marks[event] += 1
            elif isinstance(event, Token | BlockStart | BlockStop):
                self._note(event)

    def _note(self, event: Token | BlockStart | BlockStop) -> None:
        last = self._spoken[-1] if self._spoken else None
        if isinstance(event, Token) and isinstance(last, Token) and last.index == event.index:
            self._spoken[-1] = joined(last, event)
        else:
            self._spoken.append(event)

    @property
    def is_over(self) -> bool:
        """Whether every text of earlier attempts has come again."""
        return not self._spoken

    def rest_of(self, event: Event) -> Event | None:
        """Return what of `event` was not shown before; None if all was. Raises NotRepeatable."""
        if isinstance(event, Token):
            return self._rest_of_token(event) if self._spoken else event
        if isinstance(event, BlockStart | BlockStop) and self._spoken:
            if self._spoken[0] != event:
                raise NotRepeatable(f"another block {event.index}")
            self._spoken.popleft()
            return None
        if isinstance(event, Status | Citation) and self._marks[event]:
            self._marks[event] -= 1
            return None
        return event

    def _rest_of_token(self, event: Token) -> Token | None:
        first = self._spoken[0]
        if not isinstance(first, Token) or first.index != event.index:
            raise NotRepeatable("a longer text")
        num_chars = min(len(first.text), len(event.text))
        if first.text[:num_chars] != event.text[:num_chars]:
            raise NotRepeatable("another text")
        num_ids = min(len(first.token_ids), len(event.token_ids))
        left = replace(first, text=first.text[num_chars:], token_ids=first.token_ids[num_ids:])
        rest = replace(event, text=event.text[num_chars:], token_ids=event.token_ids[num_ids:])
        if left.text or left.token_ids:
            self._spoken[0] = left
        else:
            self._spoken.popleft()
        if rest.text and len(self._spoken) > 1:
            raise NotRepeatable("a longer text")
        return rest if rest.text or rest.token_ids else None

    def plain_answer(self) -> Token | None:
        """Return what an answer has shown that was cut off, if it is text with token ids; else None."""
        spoken = [one for one in self._spoken if not (isinstance(one, BlockStart) and one.kind == TEXT)]
        if len(spoken) != 1 or not isinstance(spoken[0], Token) or not spoken[0].token_ids:
            return None
        return spoken[0]

    def check_over(self) -> None:
        """Raise NotRepeatable if the run ends and has not come to all that was shown before."""
        if self._spoken:
            raise NotRepeatable("a shorter text")


def joined(one: Token, other: Token) -> Token:
    """Return two tokens of a block as one."""
    return replace(one, text=one.text + other.text, token_ids=(*one.token_ids, *other.token_ids))

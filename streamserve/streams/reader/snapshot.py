"""`take_snapshot`: what stands for the events that a reader far behind has missed: the whole text, once.

Folds the log from its beginning, page by page: in memory are a page and the text. asyncio.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from io import StringIO

from streamserve.protocol.events import ChoiceDone, ChoiceText, Event, LoggedEvent, Meta, Snapshot, Token

# (after, limit) -> some of the events that follow `after`, at least one while there are any.
ReadPage = Callable[[int, int], Awaitable[list[LoggedEvent]]]


async def take_snapshot(read_page: ReadPage, after: int, until: int) -> list[LoggedEvent]:
    """Return what a reader that has the events up to `after` is given in place of those up to `until`.

    That is `meta` if it lacks it, a snapshot that ends with the last text, and the events behind that: a status that
    holds, the terminal event. [] if there is no text that it lacks, or there are logprobs, which no snapshot has.
    """
    answer, head, behind, seq, text_seq = _Answer(), list[LoggedEvent](), list[LoggedEvent](), 0, 0
    while seq < until:
        page = await read_page(seq, until - seq)
        if not page:
            return []
        for logged in page:
            seq, event = logged.seq, logged.event
            if isinstance(event, Token) and event.logprobs is not None:
                return []
            if answer.note(event):
                text_seq = seq
                behind.clear()
            elif seq > after:
                (head if isinstance(event, Meta) else behind).append(logged)
        await asyncio.sleep(0)
    if text_seq <= after:
        return []
    return [*head, LoggedEvent(seq=text_seq, event=answer.snapshot(text_seq)), *behind]


class _Answer:
    """Fed every event, in order."""

    def __init__(self) -> None:
        self._texts: defaultdict[int, StringIO] = defaultdict(StringIO)
        self._finish_reasons: dict[int, str] = {}

    def note(self, event: Event) -> bool:
        """Take `event` in, and tell whether a snapshot says what it said."""
        if isinstance(event, Token):
            self._texts[event.choice].write(event.text)
        elif isinstance(event, ChoiceDone):
            self._finish_reasons[event.choice] = event.finish_reason
        else:
            return False
        return True

    def snapshot(self, seq: int) -> Snapshot:
        num_choices = max([*self._texts, *self._finish_reasons]) + 1
        choices = ((self._texts[choice].getvalue(), self._finish_reasons.get(choice)) for choice in range(num_choices))
        return Snapshot(seq=seq, choices=tuple(ChoiceText(text=text, finish_reason=why) for text, why in choices))

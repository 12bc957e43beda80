"""`RunPhases`: where the time of a run goes. Pure but for the clock.

Phases may lie within each other, and side by side: at each moment the phase that began last counts, so they add up to
the whole time. Time in no phase is `other`.

    step(phase="retrieval")   ──────────┐              │
    generate                            │   ┌──────────┴─────────┐   what the engine has measured divides it
                              retrieval │ … │ queue prefill … generation
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from streamserve.protocol.measures import OTHER, cut_to

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MAX_NAMES = 32  # they stand in `done`, and in the row


class Span:
    """One phase that runs; `seconds` are those that counted for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0


class RunPhases:
    """The phases of one run, from when it is made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._open: list[Span] = [Span(OTHER)]
        self._seconds: dict[str, float] = {}

    def begin(self, name: str) -> Span:
        """Begin a phase; `end` must follow. Raises ValueError for a name that is none, and for too many."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no phase: 1 to 32 of a-z 0-9 _, with a letter first")
        names = {*self._seconds, *(span.name for span in self._open)}
        if name not in names and len(names) >= _MAX_NAMES:
            raise ValueError(f"a run has {_MAX_NAMES} different phases at most")
        self._count()
        span = Span(name)
        self._open.append(span)
        return span

    def end(self, span: Span, parts: Mapping[str, float] | None = None) -> None:
        """End a phase. `parts` divide its time, as far as they fit; what is left of it is `other` then."""
        self._count()
        self._open.remove(span)
        self._add({span.name: span.seconds} if parts is None else cut_to(parts, span.seconds))

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Count the time of a `with` block for a phase; "" counts it for none of its own."""
        span = self.begin(name) if name else None
        try:
            yield
        finally:
            if span is not None:
                self.end(span)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase so far, without those that took none."""
        self._count()
        out = dict(self._seconds)
        for span in self._open:
            out[span.name] = out.get(span.name, 0.0) + span.seconds
        return {name: seconds for name, seconds in out.items() if seconds > 0.0}

    def _count(self) -> None:
        now = self._clock()
        self._open[-1].seconds += now - self._at
        self._at = now

    def _add(self, seconds: Mapping[str, float]) -> None:
        for name, more in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + more

"""`Pace` and `StreamSummary`: the figures of one stream, as measured where its events are committed.

All times are `time.monotonic()` seconds. Never holds prompt or answer text.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamserve.protocol.events import Done, Error
from streamserve.protocol.figures import percentile

if TYPE_CHECKING:
    from streamserve.streams.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSummary:
    """One stream for people: the admin page, the log line, the figures.

    `ttft`, `itl_p50`, `itl_p95` are seconds, None before there is anything to measure. `num_readers` are the owner's;
    `lead` is how many tokens the furthest of them has not received. `park_reason` is one of `streams/parking.py`.
    """

    id: str
    log_id: str
    model: str
    owner: str
    tenant: str
    state: str
    created: int
    age_seconds: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens_per_second: float
    ttft: float | None
    itl_p50: float | None
    itl_p95: float | None
    finish_reason: str | None
    error_code: str | None
    num_readers: int
    num_watchers: int
    lead: int
    num_parks: int
    park_reason: str | None
    transport: str


class Pace:
    """When output came: first token, and the gaps after it (four bytes a gap)."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.first_at: float | None = None
        self.last_at: float | None = None
        self._gaps = array("f")
        self._knows_first = self._knows_all = True

    def note(self, now: float) -> None:
        """Count one token event of now."""
        if self.last_at is None:
            self.first_at = now
        else:
            self._gaps.append(now - self.last_at)
        self.last_at = now

    def skip(self, now: float) -> None:
        """Take note of a token event that came some time before now."""
        if self.first_at is None:
            self.first_at = now  # a reader cannot have had more time to read
            self._knows_first = False
        self.last_at = now
        self._knows_all = False

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first output token, unless another process had it."""
        return None if self.first_at is None or not self._knows_first else self.first_at - self.started_at

    def itl(self, share: float) -> float | None:
        """Return the gap that `share` of all gaps do not exceed."""
        return percentile(self._gaps, share)

    def breakdown(self) -> dict[str, float]:
        """Return what is known, under the names of the `done` event."""
        known = {"ttft": self.ttft, "itl_p50": self.itl(0.5), "itl_p95": self.itl(0.95)}
        return {name: seconds for name, seconds in known.items() if seconds is not None}

    def tokens_per_second(self, num_tokens: int) -> float:
        """Return the mean rate after the first token."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at or not self._knows_all:
            return 0.0
        return (num_tokens - 1) / (self.last_at - self.first_at)


def summarize(stream: Stream) -> StreamSummary:
    """Return the figures of `stream` as they are now."""
    usage, pace, end = stream.usage, stream.tally.pace, stream.terminal
    return StreamSummary(
        id=stream.id,
        log_id=stream.log_id,
        model=stream.model,
        owner=stream.owner,
        tenant=stream.tenant,
        state=stream.state,
        created=stream.created,
        age_seconds=(stream.ended_at or time.monotonic()) - pace.started_at,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        tokens_per_second=pace.tokens_per_second(usage.completion_tokens),
        ttft=pace.ttft,
        itl_p50=pace.itl(0.5),
        itl_p95=pace.itl(0.95),
        finish_reason=end.finish_reason if isinstance(end, Done) else None,
        error_code=end.code if isinstance(end, Error) else None,
        num_readers=stream.readers.num_holding,
        num_watchers=stream.readers.num_watchers,
        lead=stream.lead.num_unread,
        num_parks=stream.parking.num_parks,
        park_reason=stream.parking.reason if stream.state == "parked" else None,
        transport=stream.readers.last_transport,
    )

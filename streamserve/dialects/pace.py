"""`Pace`: how often one reader gets frames, by fields that every streaming route takes under the same names.

    interval_ms         tokens wait at most so long to be joined in one frame; 0: each has a frame of its own
    interval_tokens     a frame leaves when it has so many
    keepalive_seconds   after so long a silence the reader gets a keepalive
    keepalive           its form: a comment, which page scripts cannot see, or an event of the reader's format

They change when bytes leave, and not the answer. A reader that resumes chooses anew. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.dialects.encoder import Encoder
from streamserve.dialects.fields import Table, conflict, integer, number, one_of, read
from streamserve.protocol.sse import KEEPALIVE

MAX_INTERVAL_MS, MAX_INTERVAL_TOKENS, MAX_KEEPALIVE_SECONDS = 5_000, 1_000, 300
COMMENT, EVENT = "comment", "event"
PACE: Table = {
    "interval_ms": integer(0, MAX_INTERVAL_MS),
    "interval_tokens": integer(1, MAX_INTERVAL_TOKENS),
    "keepalive_seconds": number(1, MAX_KEEPALIVE_SECONDS),
    "keepalive": one_of(COMMENT, EVENT),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A reader's choice; None leaves it to the site, and the form of its keepalive to the dialect."""

    interval_ms: int | None = None
    interval_tokens: int | None = None
    keepalive_seconds: float | None = None
    keepalive: str | None = None

    @property
    def frames(self) -> tuple[float, int] | None:
        """How many seconds tokens wait at most, and how many a frame has; None as the site has it.

        The bound that is not chosen alone is the largest, so that the other is what counts.
        """
        if self.interval_ms is None and self.interval_tokens is None:
            return None
        interval_ms = MAX_INTERVAL_MS if self.interval_ms is None else self.interval_ms
        return interval_ms / 1000, self.interval_tokens or MAX_INTERVAL_TOKENS

    def keepalive_of(self, encoder: Encoder) -> bytes:
        """Return the keepalive in the form chosen; b"" in a dialect that has none."""
        if self.keepalive is None or not encoder.keepalive:
            return encoder.keepalive
        return KEEPALIVE if self.keepalive == COMMENT else encoder.keepalive_event


SITES_OWN = Pace()


def pace_of(values: Mapping[str, Any]) -> Pace:
    """Return the pace in checked fields, which may hold other fields."""
    return Pace(**{name: values[name] for name in PACE if name in values})


def pace_of_query(query: Mapping[str, Any]) -> Pace:
    """Check the pace in a query's JSON values, whatever else is in it. Raises BadRequest."""
    return pace_of(read({name: query[name] for name in PACE if name in query}, PACE))


def refuse_silent(values: Mapping[str, Any], format_: str) -> None:
    """Raise BadRequest for a keepalive in plain text, which has none."""
    for name in ("keepalive", "keepalive_seconds"):
        if format_ == "text" and name in values:
            raise conflict("format text has no keepalive; use native or tokens.", name)

"""From GPU to glass: what one reader measured of its answer, and how that joins the server's own phases. Pure.

    whole   queue + prefill + … (the stream's phases)  + network           + render              = last paint
    first   server's time to the first token           + network           + render              = first paint
                                                         way there and back   came until painted

All are durations, each by one clock: the phases by the server's monotonic clock, the reader's times by the reader's
(`performance.now()`), counted from the moment at which it sent its request. No wall clocks are compared: `network` is
what the reader's time has more than the server's. The idea is that of Paint Timing (W3C), for an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from streamserve.protocol.measures import FIRST_PAINT, NETWORK, READER_ITL_P95, READER_TTFT, RENDER

MAX_SECONDS = 86_400.0  # an answer that takes longer is none that a page waited for
MAX_RECONNECTS = 100_000
# The reader's clock may show less than the server's by the rounding of browsers' clocks. By more: it did not wait from
# the beginning, as one that sent the same Idempotency-Key again.
_ROUNDING_SECONDS = 0.05
# Where the readers' time is this much longer than the server's, a hop between them is named.
_PARTED_SECONDS, _PARTED_SHARE = 0.1, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderTimes:
    """What a reader reports. Moments are seconds since it sent its request; None: it did not come to that, or unknown.

    A tab in the background paints nothing: it reports `hidden`, and no paint from then on.
    """

    headers: float
    """The response's headers came."""
    first_byte: float | None = None
    """The first byte of the response's body came."""
    first_delta: float | None = None
    """The first text came."""
    first_paint: float | None = None
    """The frame with the first text was painted."""
    ended: float | None = None
    """The last event came."""
    last_paint: float | None = None
    """The frame with the whole answer was painted."""
    gap_p95: float | None = None
    """95th percentile of the gaps between deltas as they came. Deltas that came together are one."""
    paint_gap_p95: float | None = None
    """The same of the frames that showed them."""
    render: float = 0.0
    """Time in the page's own rendering, all frames together."""
    reconnects: int = 0
    """Connections after the first."""
    hidden: bool = False
    """The tab was in the background meanwhile."""

    def as_json(self) -> dict[str, Any]:
        """Return what is known, to the tenth of a millisecond."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in known.items()}

    @classmethod
    def of_json(cls, kept: Mapping[str, Any]) -> ReaderTimes:
        """Return what a row has kept; fields of other releases are left out."""
        return cls(**{one.name: kept[one.name] for one in fields(cls) if one.name in kept})


# Moments, each not before the one named with it.
ORDER = (
    ("first_byte", "headers"),
    ("first_delta", "first_byte"),
    ("first_paint", "first_delta"),
    ("ended", "first_delta"),
    ("last_paint", "first_paint"),
    ("last_paint", "ended"),
)


def disorder(times: ReaderTimes) -> tuple[str, str] | None:
    """Return the first two moments that are in the wrong order; None if all are right."""
    for later, earlier in ORDER:
        one, other = getattr(times, later), getattr(times, earlier)
        if one is not None and (other is not None and one < other):
            return later, earlier
    last = max(value for name in ("headers", "ended", "last_paint") if (value := getattr(times, name)) is not None)
    for name in ("gap_p95", "paint_gap_p95", "render"):
        whole = "last_paint" if times.last_paint is not None else "ended"
        if times.ended is not None and (getattr(times, name) or 0.0) > last + _ROUNDING_SECONDS:
            return whole, name
    return None


def hops(server_ttft: float | None, phases: Mapping[str, float] | None, times: ReaderTimes) -> dict[str, Any]:
    """Return what the reader waited for: `first` adds up to its first paint, `whole` to its last.

    Where nothing was painted, to the first delta and the last event: `render` is missing then. Either is missing where
    a side of it is not known.
    """
    out: dict[str, Any] = {}
    if server_ttft is not None and times.first_delta is not None:
        joined = _joined({"server": server_ttft}, times.first_delta, times.first_paint)
        out |= {"first": joined} if joined else {}
    if phases is not None and times.ended is not None:
        own = {name: seconds for name, seconds in phases.items() if name != "network_in"}  # by two clocks
        joined = _joined(own, times.ended, times.last_paint)
        out |= {"whole": joined} if joined else {}
    return out


def _joined(server: Mapping[str, float], came: float, painted: float | None) -> dict[str, float] | None:
    """Return the server's parts with the hops after them; None for a reader that did not wait from the beginning.

    A reader cannot tell when within a rendering something came, and reports its beginning: nothing came before it was
    sent.
    """
    sent = sum(server.values())
    if (came if painted is None else painted) < sent - _ROUNDING_SECONDS:
        return None
    out = {**server, "network": max(0.0, came - sent)}
    if painted is not None:
        out["render"] = max(0.0, painted - max(came, sent))
    return {name: round(seconds, 4) for name, seconds in out.items()}


def observed(server_ttft: float | None, times: ReaderTimes) -> dict[str, float]:
    """Return what is counted of a report, by the names of the metrics."""
    first = hops(server_ttft, None, times).get("first", {})
    render = first.get("render")
    if render is None and times.first_paint is not None and times.first_delta is not None:
        render = times.first_paint - times.first_delta
    known = {
        READER_TTFT: times.first_delta,
        FIRST_PAINT: times.first_paint,
        NETWORK: first.get("network"),
        RENDER: render,
        READER_ITL_P95: times.gap_p95,
    }
    return {name: seconds for name, seconds in known.items() if seconds is not None}


@dataclass(frozen=True, slots=True)
class Parting:
    """Where the readers' time parts from the server's: `hop` is "network", "render" or "" for nowhere."""

    hop: str
    words: str


def parting(server: float | None, network: float | None, render: float | None) -> Parting:
    """Return the hop at which the server's time to the first token and the readers' part, and a sentence about it.

    The three are the same percentile of `time_to_first_token_seconds`, `reader_network_seconds` and
    `reader_render_seconds`.
    """
    if server is None or (network is None and render is None):
        return Parting("", "No reader has reported its times.")
    hop, seconds = max((("network", network or 0.0), ("render", render or 0.0)), key=lambda pair: pair[1])
    if seconds < max(_PARTED_SECONDS, _PARTED_SHARE * server):
        return Parting("", f"Readers see the first token as the server does, within {_in_words(seconds)}.")
    if hop == "network":
        words = f"The first token takes {_in_words(seconds)} more between server and page: the network, or a proxy that"
        return Parting(hop, f"{words} buffers. manage.py streamserve_doctor names the proxy.")
    words = f"The first token comes in time, and takes {_in_words(seconds)} more in the page, until it is painted:"
    return Parting(hop, f"{words} look at what else runs in that page.")


def _in_words(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"

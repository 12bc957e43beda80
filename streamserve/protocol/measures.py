"""What requests took: `Timings` of one request, `Buckets` of many, and `Measures`, all of a process. Pure but for its
state.

Buckets cost the same however much was observed, add up, and give percentiles without a sort. `/metrics`, the live page
and the `done` event are made from them. Names and meanings are protocol/metrics.py's. Event loop only.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from streamserve.protocol.events import FINISH_REASONS
from streamserve.protocol.metrics import METRICS, Histogram, Sample, quantile

# Twelve to a decade from 0.1 ms to 1000 s, so a percentile is right to some per cent. Every second bound is a round
# number (1, 1.5, 2, 3, 5, 7): these are the buckets of `/metrics`.
_STEPS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.5)
_DECADES = range(-4, 3)
BOUNDS = tuple(round(step * 10.0**decade, 8) for decade in _DECADES for step in _STEPS)
_SHOWN_EVERY = 2

# What is measured of each answer: the metric's name → its key in the `done` event's breakdown.
_OF_BREAKDOWN = {
    "time_to_first_token_seconds": "ttft",
    "time_to_first_byte_seconds": "ttfb",
    "request_time_per_output_token_seconds": "tpot",
    "request_intake_time_seconds": "intake",
    "request_queue_time_seconds": "queue",
    "request_prefill_time_seconds": "prefill",
    "request_decode_time_seconds": "decode",
}
ITL, E2E, TTFT = "inter_token_latency_seconds", "e2e_request_latency_seconds", "time_to_first_token_seconds"
HISTOGRAMS = (*_OF_BREAKDOWN, ITL, E2E)
# What readers have reported (protocol/glass.py); the first is beside TTFT, and TTFT + NETWORK + RENDER = FIRST_PAINT.
READER_TTFT, FIRST_PAINT = "reader_time_to_first_token_seconds", "reader_first_paint_seconds"
NETWORK, RENDER, READER_ITL_P95 = (
    "reader_network_seconds",
    "reader_render_seconds",
    "reader_inter_token_latency_p95_seconds",
)
OF_READERS = (READER_TTFT, FIRST_PAINT, NETWORK, RENDER, READER_ITL_P95)

# Phases of an answer (protocol/metrics.py has the others): what the stream itself can tell apart.
LOADING, FIRST_TOKEN, PARKED, OTHER = "loading", "first_token", "parked", "other"
GENERATION = "generation"
_MAX_CHANGES = 64  # of phases that are kept one by one, for a trace
# A client's clock that differs by more than this is not believed.
_MAX_NETWORK_SECONDS = 60.0
_SENT = re.compile(r"(?:t=)?([0-9]{9,17}(?:\.[0-9]{1,9})?)")


class Arrival(float):
    """When a request arrived, `time.monotonic()`, and what is known of its way in.

    `admitted_at`: its caller was known and may make it. `network_seconds`: it took so long to get here.
    """

    admitted_at: float | None
    network_seconds: float | None

    def __new__(cls, at: float, *, admitted_at: float | None = None, network_seconds: float | None = None) -> Arrival:
        """Return the moment `at`."""
        self = super().__new__(cls, at)
        self.admitted_at, self.network_seconds = admitted_at, network_seconds
        return self


def network_seconds(sent: str, arrived: float) -> float | None:
    """Return how long a request was on its way, None if that cannot be. `arrived` is wall time.

    `sent` is the header X-Request-Start: Unix time in seconds, milliseconds or microseconds, with or without `t=`. Two
    clocks are compared: a negative time, and one of over a minute, is the clocks' and not the network's.
    """
    match = _SENT.fullmatch(sent.strip())
    if match is None:
        return None
    at = float(match[1])
    while at > 1e11:  # not seconds before the year 5138
        at /= 1000.0
    return arrived - at if 0.0 <= arrived - at <= _MAX_NETWORK_SECONDS else None


def parts_of(breakdown: Mapping[str, float]) -> dict[str, float]:
    """Return the phases that an engine has measured, in order."""
    parts = {name: breakdown[name] for name in ("queue", "prefill") if name in breakdown}
    if "decode" in breakdown:
        first = min(breakdown.get("first_decode", 0.0), breakdown["decode"])
        parts |= {"first_decode": first, GENERATION: breakdown["decode"] - first}
    return parts


def cut_to(parts: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return `parts` as far as they fit into `seconds`, in their order, and what is left as `other`.

    Two processes have measured them, so that they may overlap by what a message takes.
    """
    out: dict[str, float] = {}
    for name in sorted(parts, key=lambda name: name == OTHER):
        out[name] = min(parts[name], seconds)
        seconds -= out[name]
    out[OTHER] = out.get(OTHER, 0.0) + max(0.0, seconds)
    return out


@dataclass(slots=True, eq=False)
class Buckets:
    """Observed seconds, counted by `BOUNDS`: counts[i] is how many were ≤ BOUNDS[i] and above the bound before it."""

    counts: array[int] = field(default_factory=lambda: array("I", bytes(4 * (len(BOUNDS) + 1))))
    total: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times

    def add(self, other: Buckets) -> None:
        """Count all that `other` has."""
        for index, count in enumerate(other.counts):
            self.counts[index] += count
        self.total += other.total

    def quantile(self, share: float) -> float | None:
        """Return about the value that `share` (0 to 1) of all do not exceed; None if there are none."""
        return quantile(BOUNDS, self.counts, share)

    def histogram(self) -> Histogram:
        """Return them as a value; `/metrics` shows half as many buckets."""
        return Histogram(bounds=BOUNDS, counts=tuple(self.counts), total=self.total, shown_every=_SHOWN_EVERY)


@dataclass(slots=True, eq=False)
class Timings:
    """The times of one answer: arrival, acceptance, first byte and first token, and the gaps after it in buckets.

    `started_at` is the request's arrival at the server. What another process saw is None. From acceptance on the answer
    is in one phase at each moment, so that the phases add up. All times are `time.monotonic()` seconds. `changes` are
    the first phases that it was in, with when each began, and why it was parked.
    """

    started_at: float
    loading_seconds: float = 0.0  # before acceptance, while its engine was not there
    accepted_at: float | None = None
    first_byte_at: float | None = None
    first_at: float | None = None
    last_at: float | None = None
    ended_at: float | None = None
    gaps: Buckets = field(default_factory=Buckets)  # between the tokens of one choice
    changes: list[tuple[str, float, str]] = field(default_factory=list)
    _phase: str = ""  # "" before acceptance
    _phase_at: float = 0.0
    _phases: dict[str, float] = field(default_factory=dict)
    _last_ats: dict[int, float] = field(default_factory=dict)
    _knows_first: bool = True
    _knows_all: bool = True

    def note(self, now: float, choice: int = 0, num_tokens: int = 1) -> None:
        """Count a token event committed now: its tokens share the gap before them, as in the engine's own figures."""
        if self._phase is not GENERATION:
            if self.first_at is None:
                self.first_at = now
            self.enter(GENERATION, now)
        before = self._last_ats.get(choice)
        if before is not None:
            self.gaps.observe((now - before) / max(1, num_tokens), num_tokens)
        if num_tokens:
            self._last_ats[choice] = now
        self.last_at = now

    def skip(self, now: float) -> None:
        """Count a token event committed at an unknown time before now."""
        if self.first_at is None:
            self.first_at = now  # a lower bound on the time that readers had
            self._knows_first = False
        self.last_at = now
        self._last_ats.clear()
        self._knows_all = False

    def enter(self, phase: str, now: float, reason: str = "") -> None:
        """Begin a phase, which ends the phase before it."""
        if self._phase:
            self._phases[self._phase] = self._phases.get(self._phase, 0.0) + now - self._phase_at
        self._phase, self._phase_at = phase, now
        if len(self.changes) < _MAX_CHANGES:
            self.changes.append((phase, now, reason))

    def accept(self, now: float) -> None:
        """Note that the engine has accepted the request."""
        self.accepted_at = now
        self.enter(FIRST_TOKEN, now)

    def phases(self, now: float, parts: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return what the time until `now` went to: from the arrival on they add up to the latency.

        `parts` is what the engine or the pipeline has measured of an answer without a park, in order.
        """
        spans = dict(self._phases)
        if self._phase:
            spans[self._phase] = spans.get(self._phase, 0.0) + now - self._phase_at
        if parts and PARKED not in spans:
            spans = cut_to(parts, sum(spans.values()))
        out: dict[str, float] = {}
        arrival = self.started_at
        if isinstance(arrival, Arrival) and arrival.network_seconds is not None:
            out["network_in"] = arrival.network_seconds
        if self.accepted_at is not None:
            admitted_at = arrival.admitted_at if isinstance(arrival, Arrival) else None
            if admitted_at is not None:
                out["auth"] = max(0.0, admitted_at - arrival)
            out["intake"] = max(0.0, self.accepted_at - (admitted_at or arrival) - self.loading_seconds)
        out[LOADING] = self.loading_seconds
        known = sum(out.values()) - out.get("network_in", 0.0) + sum(spans.values())
        out |= spans
        out[OTHER] = max(0.0, out.get(OTHER, 0.0) + now - arrival - known)
        return {name: seconds for name, seconds in out.items() if seconds > 0.0}

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first output token; None if another process produced that."""
        return None if self.first_at is None or not self._knows_first else self.first_at - self.started_at

    def itl(self, share: float) -> float | None:
        """Return about the gap that `share` of all gaps do not exceed."""
        return self.gaps.quantile(share)

    def since_arrival(self) -> dict[str, float]:
        """Return the known times that count from the request's arrival, under their names in the `done` event."""
        out: dict[str, float] = {}
        if self.accepted_at is not None:
            out["intake"] = max(0.0, self.accepted_at - self.started_at - self.loading_seconds)
        if self.first_byte_at is not None and self.accepted_at is not None:
            out["ttfb"] = max(0.0, self.first_byte_at - self.started_at)
        if self.ttft is not None:
            out["ttft"] = self.ttft
        return out

    def breakdown(self, num_tokens: int) -> dict[str, float]:
        """Return all that is known, under their names in the `done` event. `num_tokens`: of the longest choice."""
        known = {"itl_p50": self.itl(0.5), "itl_p95": self.itl(0.95)}
        if num_tokens > 1 and self._knows_all and self.first_at is not None and self.last_at is not None:
            known["tpot"] = (self.last_at - self.first_at) / (num_tokens - 1)
        return {**self.since_arrival(), **{name: time for name, time in known.items() if time is not None}}

    def tokens_per_second(self, num_tokens: int) -> float:
        """Return the mean rate after the first token."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at or not self._knows_all:
            return 0.0
        return (num_tokens - 1) / (self.last_at - self.first_at)


@dataclass(slots=True, eq=False)
class ReaderCounts:
    """Readers of one model's answers: how many connections ended before their answer, and how many came back."""

    num_disconnects: int = 0
    num_resumes: int = 0


class ModelMeasures:
    """One model's answers that have ended: how, and what they took; and what their readers did."""

    def __init__(self) -> None:
        self.readers = ReaderCounts()
        self.finished: Counter[str] = Counter()  # by finish reason
        self.failed: Counter[str] = Counter()  # by error code
        self.reports = self.reconnects = 0  # of readers
        self.gap_budgets: Counter[tuple[str, str]] = Counter()  # by latency class and outcome
        self.buckets = {name: Buckets() for name in (*HISTOGRAMS, *OF_READERS)}

    def note(self, end: str, *, is_error: bool, latency: float, breakdown: Mapping[str, float], gaps: Buckets) -> None:
        """Count one answer by its end; `breakdown` may lack what is not known, `gaps` are those between tokens."""
        (self.failed if is_error else self.finished)[end] += 1
        self.buckets[E2E].observe(latency)
        self.buckets[ITL].add(gaps)
        for name, key in _OF_BREAKDOWN.items():
            if key in breakdown:
                self.buckets[name].observe(breakdown[key])

    def note_reader(self, times: Mapping[str, float], num_reconnects: int) -> None:
        """Count what one reader has reported: `times`, by names of OF_READERS, may lack what is not known."""
        self.reports += 1
        self.reconnects += num_reconnects
        for name, seconds in times.items():
            self.buckets[name].observe(seconds)

    def note_gaps(self, latency_class: str, *, is_kept: bool) -> None:
        """Count an answer whose gaps at its reader kept, or missed, the budget of its class."""
        self.gap_budgets[latency_class, "kept" if is_kept else "missed"] += 1

    def samples(self, alias: str) -> Iterator[Sample]:
        """Yield them for `/metrics`; a finish reason that none had is 0, so that its rate has a beginning."""
        labels = {"model_name": alias}
        for reason in sorted(FINISH_REASONS | self.finished.keys()):
            count = self.finished[reason]
            yield Sample(name="request_success", value=count, labels={**labels, "finished_reason": reason})
        for code, count in sorted(self.failed.items()):
            yield Sample(name="request_errors", value=count, labels={**labels, "error_code": code})
        yield Sample(name="reader_reports", value=self.reports, labels=labels)
        yield Sample(name="reader_reconnects", value=self.reconnects, labels=labels)
        for (latency_class, outcome), count in sorted(self.gap_budgets.items()):
            of_class = {**labels, "latency_class": latency_class, "outcome": outcome}
            yield Sample(name="reader_gap_budget", value=count, labels=of_class)
        yield Sample(name="reader_disconnects", value=self.readers.num_disconnects, labels=labels)
        yield Sample(name="stream_resumes", value=self.readers.num_resumes, labels=labels)
        for name, buckets in self.buckets.items():
            yield Sample(name=name, value=buckets.histogram(), labels=labels)


class Measures:
    """The answers that this process has ended, by model."""

    def __init__(self, aliases: Sequence[str]) -> None:
        self._models = {alias: ModelMeasures() for alias in aliases}

    def of(self, alias: str) -> ModelMeasures:
        """Return a model's measures, also of a model that is not served here any more."""
        return self._models.setdefault(alias, ModelMeasures())

    def samples(self) -> Iterator[Sample]:
        """Yield every model's."""
        for alias, model in self._models.items():
            yield from model.samples(alias)


class Responses:
    """HTTP responses of this process: by route and status, and errors by code. Counted where replies are made."""

    def __init__(self) -> None:
        self.by_status: Counter[tuple[str, int]] = Counter()
        self.by_code: Counter[str] = Counter()

    def samples(self) -> Iterator[Sample]:
        """Yield them for `/metrics`."""
        for (handler, status), count in sorted(self.by_status.items()):
            yield Sample(name="http_requests", value=count, labels={"handler": handler, "status": str(status)})
        for code, count in sorted(self.by_code.items()):
            yield Sample(name="http_errors", value=count, labels={"error_code": code})


class McpCalls:
    """Calls of MCP servers' tools, of this process: by server, tool and outcome. Counted on the servers' thread."""

    def __init__(self) -> None:
        self.by_outcome: Counter[tuple[str, str, str]] = Counter()

    def samples(self) -> Iterator[Sample]:
        """Yield them for `/metrics`."""
        for (server, tool, outcome), count in sorted(self.by_outcome.copy().items()):
            yield Sample(name="mcp_calls", value=count, labels={"server": server, "tool": tool, "outcome": outcome})


# Of the whole process: a request that is refused before it has a site is counted too.
RESPONSES = Responses()
MCP_CALLS = McpCalls()

assert {*HISTOGRAMS, *OF_READERS} <= METRICS.keys()

"""From GPU to glass over time: percentiles of each hop of many answers, in columns of equal time. Pure.

    answers' rows ──► `hops_of` each: intake, queue, prefill, decode, other │ network, render
                  ──► `columns`: p50, p95 and p99 of each hop, of the server's first token and of the reader's

A percentile is of one hop: those of an answer's hops add up to what its reader waited for, their percentiles need not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamserve.protocol.glass import ReaderTimes, hops
from streamserve.protocol.metrics import percentile

FIRST, WHOLE = "first", "whole"  # until the first token is painted, until the last is
INTAKE, DECODE, OTHER, NETWORK, RENDER = "intake", "decode", "other", "network", "render"
HOPS = (INTAKE, "queue", "prefill", DECODE, OTHER, NETWORK, RENDER)
SERVER, GLASS = "server", "glass"  # the first token, as the server and as the reader saw it
REPORTED = "reported"  # as the server saw it, of the answers that have GLASS: the two can be compared
PERCENTS = (50, 95, 99)

# The phases of each hop (protocol/metrics.py has their meanings). The others are OTHER.
_HOP_OF = {
    "auth": INTAKE,
    "intake": INTAKE,
    "loading": INTAKE,
    "queue": "queue",
    "prefill": "prefill",
    "first_decode": DECODE,
    "generation": DECODE,
    NETWORK: NETWORK,
    RENDER: RENDER,
}
_UNTIL_FIRST = (INTAKE, "queue", "prefill")
_LEAST_SECONDS = 0.001  # of what is left: less is the rounding of the phases


@dataclass(frozen=True, slots=True)
class Answered:
    """What is kept of an answer. `at`: Unix time of its arrival; `reader`: what its reader reported, if it did."""

    at: float
    ttft: float | None
    phases: Mapping[str, float] | None
    reader: Mapping[str, Any] | None


@dataclass(slots=True)
class Column:
    """The answers that arrived from `at` on, for so many seconds: what each hop of each took."""

    at: float
    seconds: float
    num_answers: int = 0
    num_reports: int = 0
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, answer: Answered, until: str) -> None:
        """Count an answer."""
        times = None if answer.reader is None else ReaderTimes.of_json(answer.reader)
        self.num_answers += 1
        self.num_reports += times is not None
        seen = None if times is None else times.first_delta if times.first_paint is None else times.first_paint
        own = {SERVER: answer.ttft, GLASS: seen, REPORTED: None if seen is None else answer.ttft}
        for name, value in (*hops_of(answer, times, until).items(), *own.items()):
            if value is not None:
                self.values.setdefault(name, []).append(value)

    def at_percent(self, percent: int, name: str) -> float | None:
        """Return a percentile of a hop, SERVER or GLASS; None where no answer had it."""
        return percentile(self.values.get(name, ()), percent / 100)


def hops_of(answer: Answered, times: ReaderTimes | None, until: str) -> dict[str, float]:
    """Return what an answer's reader waited for; the server's hops alone where the reader reported nothing."""
    phases = {name: seconds for name, seconds in (answer.phases or {}).items() if name != "network_in"}
    out: dict[str, float] = {}
    for name, seconds in phases.items():
        hop = _HOP_OF.get(name, OTHER)
        out[hop] = out.get(hop, 0.0) + seconds
    if until == FIRST:
        out = {name: out[name] for name in _UNTIL_FIRST if name in out}
        out[OTHER] = (answer.ttft or 0.0) - sum(out.values())
    if out.get(OTHER, 0.0) < _LEAST_SECONDS:
        out.pop(OTHER, None)
    if times is not None:
        joined = hops(answer.ttft, answer.phases, times).get(until, {})
        out |= {name: joined[name] for name in (NETWORK, RENDER) if name in joined}
    return out if answer.ttft is not None else {}


def columns(answers: Iterable[Answered], until: str, *, begin: float, seconds: float, num: int) -> Sequence[Column]:
    """Return `num` columns of so many seconds each from `begin` on, the oldest first."""
    found = [Column(begin + seconds * index, seconds) for index in range(num)]
    for answer in answers:
        index = int((answer.at - begin) // seconds)
        if 0 <= index < num:
            found[index].add(answer, until)
    return found


def together(found: Sequence[Column]) -> Column:
    """Return all columns as one."""
    out = Column(found[0].at, sum(one.seconds for one in found))
    for one in found:
        out.num_answers += one.num_answers
        out.num_reports += one.num_reports
        for name, values in one.values.items():
            out.values.setdefault(name, []).extend(values)
    return out


def longest(column: Column, percent: int) -> tuple[str, float] | None:
    """Return the hop with the largest percentile; None without an answer."""
    known = [(seconds, name) for name in HOPS if (seconds := column.at_percent(percent, name)) is not None]
    return max(known)[::-1] if known else None

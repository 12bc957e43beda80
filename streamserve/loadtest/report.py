"""`Report`: what a load showed, by latency class: percentiles, the budgets, goodput, a verdict. Pure.

A request is **good** if its answer came whole and kept three promises: the first token within the class's
`TTFT_SECONDS`; the whole answer within `TOTAL_SECONDS`, or by the time at which its reader would have read it anyway;
and no more than `STALL_SECONDS` in which the reader had nothing to read. Where the gaps are judged, too: 95 % of the
gaps between its deltas within the class's `GAP_P95_SECONDS`, whatever the reader's pace. (Goodput: DistServe, arXiv
2401.09670; the reader's pace: Andes, arXiv 2404.16283.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any

from streamserve.engine.config import LatencyClass
from streamserve.loadtest.reading import STALL_SECONDS
from streamserve.loadtest.run import Outcome
from streamserve.loadtest.visits import PACES

_TOGETHER_SECONDS = 0.001  # deltas that one read of the connection brought


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of some seconds: the values that 50, 95 and 99 % of them do not exceed; None where there are none."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Return those of `seconds`, in any order."""
        ordered = sorted(seconds)

        def at(percent: int) -> float | None:
            return ordered[-(-len(ordered) * percent // 100) - 1] if ordered else None

        return cls(p50=at(50), p95=at(95), p99=at(99))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """The readers of one latency class. Shares are of all of them, 0 to 1; a budget of None: the class has none.

    `gap_p95`: of each reader's own 95th percentile, as GAP_P95_SECONDS has it.
    """

    name: str
    num_readers: int
    num_whole: int
    num_good: int
    ttft: Percentiles
    itl: Percentiles
    gap_p95: Percentiles
    total: Percentiles
    ttft_budget: float
    total_budget: float | None
    gap_p95_budget: float | None
    first_in_time: float
    whole_in_time: float
    at_pace: float
    gaps_in_time: float
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole run. `num_unserved`: the requests that ended otherwise than whole, by code; `messages`: what one said.

    `judges_gaps`: whether the tail of the gaps counts for `num_good` and `holds`.
    """

    site: str
    model: str
    per_second: float
    seconds: float
    goal: float
    judges_gaps: bool
    classes: tuple[ClassReport, ...]
    num_unserved: Mapping[str, int]
    messages: Mapping[str, str]

    @property
    def num_readers(self) -> int:
        """How many came."""
        return sum(one.num_readers for one in self.classes)

    @property
    def goodput(self) -> float:
        """Good requests a second, while readers came."""
        return sum(one.num_good for one in self.classes) / self.seconds

    @property
    def holds(self) -> bool:
        """Whether every class kept every budget for as many readers as the goal says."""
        return all(one.holds for one in self.classes)

    def as_json(self) -> dict[str, Any]:
        """Return it for programs. Times are seconds."""
        return {**asdict(self), "num_readers": self.num_readers, "goodput": self.goodput, "holds": self.holds}

    def lines(self) -> Iterator[str]:
        """Yield it for people."""
        yield (
            f"{self.site}, model {self.model}: {self.num_readers} readers in {self.seconds:g} s "
            f"({self.per_second:g} a second), who read {min(PACES):g} to {max(PACES):g} tokens a second"
        )
        yield ""
        yield (
            f"{'':12}{'readers':>8}{'whole':>7}{'TTFT p50':>11}{'p95':>8}{'p99':>8}"
            f"{'ITL p50':>11}{'p95':>8}{'p99':>8}{'gap p95: p50':>16}{'p95':>8}{'p99':>8}"
            f"{'answer p50':>13}{'p95':>8}{'p99':>8}"
        )
        for one in self.classes:
            yield f"{one.name:12}{one.num_readers:8}{one.num_whole:7}" + "".join(
                f"{_time(each.p50):>{width}}{_time(each.p95):>8}{_time(each.p99):>8}"
                for each, width in ((one.ttft, 11), (one.itl, 11), (one.gap_p95, 16), (one.total, 13))
            )
        yield ""
        for one in self.classes:
            yield f"{one.name}: {'holds' if one.holds else 'DOES NOT HOLD'}. {_kept(one, self.judges_gaps)}"
        for code, num in self.num_unserved.items():
            yield f"Not served: {num} × {code}. {self.messages.get(code, '')}".rstrip()
        yield ""
        yield self.verdict()

    def verdict(self) -> str:
        """Return the result in a sentence or two."""
        good = f"goodput {self.goodput:.2f} of {self.num_readers / self.seconds:.2f} requests a second"
        if self.holds:
            return f"The budgets hold for {_percent(self.goal)} of the readers: {good}. Try a higher --rate."
        worst = min(self.classes, key=lambda one: min(_shares(one, self.judges_gaps).values()))
        shares = _shares(worst, self.judges_gaps)
        broken = min(shares, key=lambda name: shares[name])
        return (
            f"The budgets do not hold for {_percent(self.goal)} of the readers: {good}. Furthest off is {broken} of "
            f"{worst.name} ({_percent(shares[broken])}). Try a lower --rate; docs/loadtest.md says where to look."
        )


def report_of(
    outcomes: Sequence[Outcome],
    budgets: Mapping[str, LatencyClass],
    *,
    site: str,
    model: str,
    per_second: float,
    seconds: float,
    goal: float,
    judges_gaps: bool = False,
) -> Report:
    """Return the report of a run that is over."""
    names = [name for name in budgets if any(one.reading.visit.latency_class == name for one in outcomes)]
    by_class = {name: [one for one in outcomes if one.reading.visit.latency_class == name] for name in names}
    unserved = [one for one in outcomes if not one.is_whole]
    return Report(
        site=site,
        model=model,
        per_second=per_second,
        seconds=seconds,
        goal=goal,
        judges_gaps=judges_gaps,
        classes=tuple(_class_report(name, some, budgets[name], goal, judges_gaps) for name, some in by_class.items()),
        num_unserved=dict(Counter(one.code for one in unserved).most_common()),
        messages={one.code: one.message for one in unserved if one.message},
    )


def _class_report(
    name: str, outcomes: Sequence[Outcome], budget: LatencyClass, goal: float, judges_gaps: bool
) -> ClassReport:
    first = [one.is_whole and _first_seconds(one) <= budget.ttft_seconds for one in outcomes]
    whole = [one.is_whole and _is_in_time(one, budget.total_seconds) for one in outcomes]
    pace = [one.is_whole and one.reading.stall_seconds <= STALL_SECONDS for one in outcomes]
    tails = [gap_p95(one.reading.came_at) for one in outcomes]
    gaps_kept = [
        one.is_whole and (budget.gap_p95_seconds is None or tail is None or tail <= budget.gap_p95_seconds)
        for one, tail in zip(outcomes, tails, strict=True)
    ]
    judged = (first, whole, pace, gaps_kept) if judges_gaps else (first, whole, pace)
    begun = [one for one in outcomes if one.reading.came_at]
    shares = [sum(each) / len(outcomes) for each in (first, whole, pace, gaps_kept)]
    return ClassReport(
        name=name,
        num_readers=len(outcomes),
        num_whole=sum(one.is_whole for one in outcomes),
        num_good=sum(all(each) for each in zip(*judged, strict=True)),
        ttft=Percentiles.of([_first_seconds(one) for one in begun]),
        itl=Percentiles.of([gap for one in begun for gap in gaps(one.reading.came_at)]),
        gap_p95=Percentiles.of([tail for tail in tails if tail is not None]),
        total=Percentiles.of([_total_seconds(one) for one in outcomes if one.is_whole]),
        ttft_budget=budget.ttft_seconds,
        total_budget=budget.total_seconds,
        gap_p95_budget=budget.gap_p95_seconds,
        first_in_time=shares[0],
        whole_in_time=shares[1],
        at_pace=shares[2],
        gaps_in_time=shares[3],
        holds=min(shares[: len(judged)]) >= goal,
    )


def gaps(came_at: Sequence[float]) -> list[float]:
    """Return the gaps between an answer's tokens; tokens that came together share the gap before them."""
    arrivals = [(at, len(list(some))) for at, some in groupby(came_at)]
    return [(at - before) / num for (before, _), (at, num) in pairwise(arrivals) for _ in range(num)]


def gap_p95(came_at: Sequence[float]) -> float | None:
    """Return the 95th percentile of the gaps between an answer's deltas; None for fewer than two.

    Deltas that came together are one, as in the reports of the chat page.
    """
    moments = list(came_at[:1])
    for at in came_at:
        if at - moments[-1] >= _TOGETHER_SECONDS:
            moments.append(at)
    return Percentiles.of([at - before for before, at in pairwise(moments)]).p95


def _first_seconds(outcome: Outcome) -> float:
    return outcome.reading.first_seconds


def _total_seconds(outcome: Outcome) -> float:
    assert outcome.ended_at is not None  # it is whole
    return outcome.ended_at - outcome.reading.visit.arrives_at


def _is_in_time(outcome: Outcome, budget: float | None) -> bool:
    """Return whether a whole answer kept the budget, or came no later than its reader could have read it.

    The engine holds the answer of a slow reader back on purpose, as nobody waits for it.
    """
    reading = outcome.reading
    if budget is None:
        return True
    reads_until = reading.first_seconds + len(reading.came_at) / reading.visit.pace
    return _total_seconds(outcome) <= max(budget, reads_until)


def _shares(one: ClassReport, judges_gaps: bool) -> dict[str, float]:
    shares = {"the first token": one.first_in_time, "the whole answer": one.whole_in_time, "the pace": one.at_pace}
    return {**shares, "the tail of the gaps": one.gaps_in_time} if judges_gaps else shares


def _kept(one: ClassReport, judges_gaps: bool) -> str:
    whole = (
        "no budget for the whole answer"
        if one.total_budget is None
        else f"{_percent(one.whole_in_time)} of answers within {one.total_budget:g} s or at their reader's pace"
    )
    return (
        f"{_percent(one.first_in_time)} of first tokens within {one.ttft_budget:g} s, {whole}, "
        f"{_percent(one.at_pace)} of readers had text to read all the time, {_gaps_kept(one, judges_gaps)}."
    )


def _gaps_kept(one: ClassReport, judges_gaps: bool) -> str:
    if one.gap_p95_budget is None:
        return "no budget for the gaps"
    kept = f"{_percent(one.gaps_in_time)} had 95 % of their gaps within {one.gap_p95_budget:g} s"
    return kept if judges_gaps else f"{kept} (not judged without --gaps)"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"

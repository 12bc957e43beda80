"""Laws of a load's report: percentiles, which promises a reader counts for, the verdict, the chart."""

from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from streamserve.engine.config import LatencyClass
from streamserve.loadtest.chart import chart
from streamserve.loadtest.reading import Reading
from streamserve.loadtest.report import Percentiles, Report, gap_p95, gaps, report_of
from streamserve.loadtest.run import UNFINISHED, WHOLE, Outcome
from streamserve.loadtest.visits import Visit

CHAT = LatencyClass(ttft_seconds=1.0, total_seconds=5.0, gap_p95_seconds=0.4)
BUDGETS = {"chat": CHAT, "document": LatencyClass(ttft_seconds=9.0)}
VISIT = Visit(number=0, arrives_at=10.0, pace=10.0, latency_class="chat", prompt_len=5, answer_len=20, ttft_seconds=1.0)


def read(*came_after: float, pace: float = 10.0, code: str = WHOLE, kind: str = "chat", message: str = "") -> Outcome:
    """Return a reader whose tokens came so many seconds after the question; the last one ends the answer."""
    reading = Reading(replace(VISIT, pace=pace, latency_class=kind))
    for after in came_after:
        reading.take(VISIT.arrives_at + after)
    reading.is_whole = code == WHOLE
    ended_at = VISIT.arrives_at + (came_after[-1] if came_after else 0.0)
    return Outcome(reading, code=code, message=message, ended_at=ended_at)


def report(*outcomes: Outcome, goal: float = 1.0, **more: bool) -> Report:
    return report_of(outcomes, BUDGETS, site="http://s", model="m", per_second=1.0, seconds=2.0, goal=goal, **more)


GOOD = read(0.5, 0.6, 0.7)
LATE = read(1.5, 1.6, 1.7)
STALLED = read(0.5, 0.6, 2.0)  # at 10 tokens a second it had nothing to read for 1.3 s
LONG = read(0.5, *[0.5 + 0.1 * index for index in range(1, 60)])  # whole after 6.4 s, read by 6.5 s
SLOW_END = read(0.5, *[0.5 + 0.09 * index for index in range(1, 60)], pace=30.0)  # 5.8 s, and would be read by 2.5 s


def test_percentiles_are_values_that_were_measured() -> None:
    """The nearest rank; of nothing there are none."""
    assert Percentiles.of([float(number) for number in range(100, 0, -1)]) == Percentiles(p50=50.0, p95=95.0, p99=99.0)
    assert Percentiles.of([7.0]) == Percentiles(p50=7.0, p95=7.0, p99=7.0)
    assert Percentiles.of([]) == Percentiles(p50=None, p95=None, p99=None)


def test_tokens_that_come_together_share_their_gap() -> None:
    """As in the engine's own figures."""
    assert gaps([1.0, 2.0, 3.0, 3.0]) == [1.0, 0.5, 0.5]
    assert gaps([1.0]) == gaps([]) == []


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (GOOD, (1, 1, 1)),
        (LATE, (0, 1, 1)),
        (STALLED, (1, 1, 0)),
        (LONG, (1, 1, 1)),
        (SLOW_END, (1, 0, 0)),
        (read(0.5, 0.6, code=UNFINISHED), (0, 0, 0)),
        (read(code="overloaded"), (0, 0, 0)),
    ],
)
def test_each_promise_is_judged_by_itself(outcome: Outcome, kept: tuple[int, int, int]) -> None:
    """The first token, the whole answer by its budget or by its reader's pace, and text to read at all times."""
    [chat] = report(outcome).classes
    assert (chat.first_in_time, chat.whole_in_time, chat.at_pace) == kept
    assert chat.num_good == int(all(kept))


def test_the_goal_decides_what_holds() -> None:
    """Half of the readers are served: that holds for a goal of a half, and for no higher goal."""
    assert report(GOOD, LATE, goal=0.5).holds
    judged = report(GOOD, LATE, goal=0.51)
    assert not judged.holds
    assert judged.goodput == 0.5
    assert "the first token of chat (50 %)" in judged.verdict()


def test_a_class_without_a_budget_for_the_whole_keeps_it() -> None:
    """A budget that is not there is not missed, and its line says so."""
    judged = report(read(8.0, kind="document"))
    assert judged.holds
    assert "no budget for the whole answer" in "\n".join(judged.lines())


def test_the_tail_of_the_gaps_is_of_deltas() -> None:
    """Nineteen of twenty gaps are no longer; deltas that one read brought are one; one delta has no gap."""
    came_at = [0.0, *(0.1 * number for number in range(1, 20)), 2.9]
    assert gap_p95(came_at) == pytest.approx(0.1)
    assert gap_p95([*came_at, 3.9]) == pytest.approx(1.0)
    assert gap_p95([0.0, 1e-5, 2e-5, 1.0, 1.0 + 1e-5]) == 1.0
    assert gap_p95([0.5, 0.5]) is None
    assert gap_p95([]) is None


# Read in 7 s: its reader has text all the time, and some gaps of half a second.
LUMPY = read(*(0.5 + 0.5 * number for number in range(6) for _ in range(10)), pace=10.0)


def test_the_tail_of_the_gaps_is_judged_where_asked() -> None:
    """It is always shown; with `judges_gaps` it is a promise, and its share is in the verdict."""
    shown, judged = report(GOOD, LUMPY, goal=0.75), report(GOOD, LUMPY, goal=0.75, judges_gaps=True)
    for one, num_good in ((shown, 2), (judged, 1)):
        [chat] = one.classes
        assert (chat.gaps_in_time, chat.gap_p95_budget, chat.num_good) == (0.5, 0.4, num_good)
        assert chat.gap_p95.p99 == 0.5
        assert chat.at_pace == 1.0
        assert "50 % had 95 % of their gaps within 0.4 s" in "\n".join(one.lines())
    assert shown.holds
    assert "(not judged without --gaps)" in "\n".join(shown.lines())
    assert not judged.holds
    assert judged.goodput == 0.5
    assert "Furthest off is the tail of the gaps of chat (50 %)" in judged.verdict()
    assert report(GOOD, read(0.5), goal=1.0, judges_gaps=True).holds
    assert not report(read(0.5, 0.6, code=UNFINISHED), judges_gaps=True).classes[0].gaps_in_time


def test_a_class_without_a_budget_for_the_gaps_keeps_it() -> None:
    """As for the whole answer."""
    judged = report(read(1.0, 9.0, pace=0.1, kind="document"), judges_gaps=True)
    assert judged.holds
    assert "no budget for the gaps" in "\n".join(judged.lines())


def test_requests_that_were_not_served_are_named() -> None:
    """By code, the most frequent first, with what one of them was told."""
    full = read(code="overloaded", message="The engine is full.")
    judged = report(full, full, read(0.1, code=UNFINISHED))
    assert list(judged.num_unserved.items()) == [("overloaded", 2), ("unfinished", 1)]
    assert "Not served: 2 × overloaded. The engine is full." in list(judged.lines())
    assert json.loads(json.dumps(judged.as_json()))["classes"][0]["num_whole"] == 0


def test_the_chart_has_a_line_for_each_reader() -> None:
    """Well-formed XML that loads nothing, with what a name brings as text."""
    outcomes = [GOOD, LATE, read(code="overloaded"), read(0.5, code=UNFINISHED)]
    drawn = chart(replace(report(*outcomes), model="<&>"), outcomes)
    root = ElementTree.fromstring(drawn)
    kinds = [element.get("class") for element in root.iter("{http://www.w3.org/2000/svg}path")]
    assert kinds.count("wait") == 1 + 3  # one in the key; the refused reader did not wait
    assert kinds.count("ended") == 1 + 2
    assert (kinds.count("comes"), kinds.count("late")) == (2, 2)
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "").replace("http://s", "")

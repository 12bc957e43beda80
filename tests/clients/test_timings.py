"""Laws of the times that clients measure."""

from __future__ import annotations

import pytest

from streamserve.clients.timings import RecentTimes, RequestTimes
from streamserve.engine.config import CLASSES
from tests.support.engines.runners import FakeClock


def test_rate_looks_back_five_seconds() -> None:
    """Tokens count for five seconds, and then no more."""
    clock = FakeClock(100.0)
    figures = RecentTimes(clock)
    for at in (99.0, 99.0, 100.0):
        figures.note(at, 2)
    assert figures.tokens_per_second() == pytest.approx(6 / 5)
    clock.advance(4.5)
    assert figures.tokens_per_second() == pytest.approx(2 / 5)
    clock.advance(10)
    assert figures.tokens_per_second() == 0


def test_running_seconds_are_a_mean() -> None:
    """How long recent answers ran, whole or in parts; nothing before one has."""
    figures = RecentTimes(FakeClock())
    assert figures.running_seconds() is None
    figures.note_finished({"prefill": 1.0, "decode": 3.0, "queue": 0.0, "ttft": 1.0, "itl_p50": 0.1, "itl_p95": 0.2})
    assert figures.running_seconds() == 4.0
    assert figures.latency()["ttft_p95"] == 1.0
    figures.note_finished(dict.fromkeys(figures.latency(), 0.0) | {"prefill": 0.0, "decode": 2.0}, is_whole=False)
    assert figures.running_seconds() == 3.0
    assert figures.latency()["ttft_p95"] == 1.0


def test_classes_show_budgets_and_measurements() -> None:
    """Each class has its targets; classes with answers also have measurements, and how many were in time."""
    figures = RecentTimes(FakeClock())
    for ttft, decode, name in ((0.4, 2.0, "chat"), (0.4, 9.0, "chat"), (0.8, 2.0, "chat"), (1.0, 1.0, "batch")):
        breakdown = {"queue": 0.0, "prefill": ttft, "decode": decode, "ttft": ttft, "itl_p50": 0.0, "itl_p95": 0.0}
        figures.note_finished(breakdown, latency_class=name)
    classes = figures.by_class(CLASSES)
    assert classes["completion"] == {"ttft_budget": 0.2, "total_budget": 2.0, "num_answers": 0, "refused": 0}
    chat = classes["chat"]
    assert (chat["ttft_budget"], chat["total_budget"], chat["num_answers"]) == (0.5, 5.0, 3)
    assert (chat["ttft_p50"], chat["total_p50"]) == pytest.approx((0.4, 2.8))
    assert chat["in_time"] == pytest.approx(1 / 3)
    assert classes["batch"]["in_time"] == 1.0


def test_times_add_up() -> None:
    """Queue, prefill and decode are the latency; gaps are between tokens of one choice, not between choices."""
    times = RequestTimes(accepted_at=10.0)
    assert set(times.breakdown().values()) == {0.0}
    for at, num_tokens, choice in ((12.0, 0, 1), (13.0, 1, 1), (13.5, 1, 2), (15.0, 1, 1), (15.5, 1, 2)):
        times.note(at, num_tokens, choice=choice, scheduled_at=11.0)
    figures = times.breakdown()
    assert (figures["queue"], figures["prefill"], figures["decode"], figures["ttft"]) == (1.0, 2.0, 2.5, 3.0)
    assert times.latency == 5.5
    assert (figures["first_decode"], figures["itl_p50"], figures["itl_p95"]) == (2.0, 2.0, 2.0)


def test_tokens_that_come_together_share_their_gap() -> None:
    """Of a step or a read with three tokens, each has a third of the time; two first tokens have no gap."""
    times = RequestTimes(accepted_at=0.0)
    times.note(1.0, 2)
    assert times.breakdown()["itl_p95"] == 0.0
    times.note(4.0, 3)
    times.note(6.0, 1)
    figures = times.breakdown()
    assert (figures["first_decode"], figures["itl_p50"], figures["itl_p95"]) == (3.0, 1.0, pytest.approx(1.85))


@pytest.mark.parametrize(
    ("queue", "prefill", "found"),
    [
        (None, None, (2.0, 4.0)),
        (None, 1.0, (5.0, 1.0)),
        (0.5, None, (2.5, 3.5)),
        (0.5, 1.0, (2.5, 3.5)),
        (99.0, None, (6.0, 0.0)),  # more than there was
        (None, 99.0, (2.0, 4.0)),
    ],
)
def test_what_a_server_tells_of_its_queue_is_queue(
    queue: float | None, prefill: float | None, found: tuple[float, float]
) -> None:
    """Its prefill, or its queue; no more than the time until the first token, so that all still adds up."""
    times = RequestTimes(accepted_at=0.0, scheduled_at=2.0)
    times.tell(queue, prefill)
    times.note(6.0, 1)
    times.tell(queue, prefill)
    figures = times.breakdown()
    assert (figures["queue"], figures["prefill"], figures["ttft"]) == (*found, 6.0)

"""Laws of an overload: which requests are refused, when, and how late the others are. Five simulated minutes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from streamserve.engine.config import CLASSES, EngineConfig
from tests.support.engines.overload import Outcome, Overload

CHATS = {"chat": 1.0}
MIX = {"chat": 0.6, "completion": 0.25, "document": 0.15}
SECONDS = 300.0
# Answers of the engine in a second while its queue is never empty (measured without refusals).
CHATS_PER_SECOND, MIXED_PER_SECOND = 3.27, 2.34


@cache
def after(per_second: float, mix: tuple[tuple[str, float], ...]) -> Overload:
    overload = Overload()
    overload.run(per_second, SECONDS, dict(mix))
    overload.drain()
    return overload


def overloaded(mix: dict[str, float]) -> Overload:
    """Five minutes at one and a half times that rate."""
    return after(1.5 * (CHATS_PER_SECOND if mix is CHATS else MIXED_PER_SECOND), tuple(mix.items()))


def begun(outcomes: list[Outcome], latency_class: str) -> list[Outcome]:
    return [one for one in outcomes if one.latency_class == latency_class and one.first_at is not None]


def test_the_rates_are_what_the_engine_can_do() -> None:
    """Without refusals and with a queue that is never empty, about this many answers end in a second."""
    endless = {name: replace(one, max_queue_seconds=None) for name, one in CLASSES.items()}
    for mix, expected in ((CHATS, CHATS_PER_SECOND), (MIX, MIXED_PER_SECOND)):
        overload = Overload(EngineConfig(max_num_seqs=8, max_waiting=100_000, classes=endless))
        overload.run(3 * expected, 60.0, mix)  # no more: each step looks through the queue
        assert expected * 0.75 < sum(one.ended_at is not None for one in overload.outcomes) / 60.0 < expected * 1.25


def test_no_answer_begins_late_in_an_overload() -> None:
    """After the first minute no first token is later than its budget + 2.5 s, though half too many chats come."""
    outcomes = begun(overloaded(CHATS).outcomes, "chat")
    late = [one for one in outcomes if (one.first_at or 0.0) > 60.0 and one.ttft > CLASSES["chat"].ttft_seconds + 2.5]
    assert not late, f"{len(late)} of {len(outcomes)}, the latest after {max(one.ttft for one in late)} s"


def test_an_overloaded_engine_is_busy() -> None:
    """It answers nine tenths of its capacity, nine tenths of these in their budget + 2 s."""
    outcomes = [one for one in begun(overloaded(CHATS).outcomes, "chat") if one.asked_at > 60.0]
    in_time = [one for one in outcomes if one.ttft <= CLASSES["chat"].ttft_seconds + 2.0]
    assert len(outcomes) >= 0.9 * CHATS_PER_SECOND * (SECONDS - 60.0)
    assert len(in_time) >= 0.9 * len(outcomes)


def test_some_refusals_come_before_the_head() -> None:
    """A request that is sure to be late is refused at once, a twentieth at least; the others as they expire."""
    for mix in (CHATS, MIX):
        counts = overloaded(mix).counts()
        assert counts["refused"] >= (counts["refused"] + counts["queue_timeout"]) / 20
        assert counts["refused"] + counts["queue_timeout"] > SECONDS / 2


class Probed(Overload):
    """Asks after each step whether the door would accept what it has refused. The retry is then right, or not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.are_right: list[bool] = []
        self._refused: list[Outcome] = []

    def ask(self, latency_class: str, prompt: tuple[int, ...] | None = None, **fields: Any) -> Outcome:
        outcome = super().ask(latency_class, prompt, **fields)
        if outcome.retry_after:
            self._refused.append(outcome)
        return outcome

    def step(self) -> None:
        super().step()
        for outcome in list(self._refused):
            seconds, most = self.admission.predict(self.core.backlog, outcome.latency_class)
            if seconds <= most:
                self._refused.remove(outcome)
                assert outcome.retry_after is not None
                waited = max(1.0, self.clock() - outcome.asked_at)
                self.are_right.append(outcome.retry_after / 2 <= waited <= 2 * outcome.retry_after)


def test_retry_after_is_right() -> None:
    """Within a factor of 2 in 9 of 10 refusals, below a second not counted: overloads, a burst, and one seat."""
    steady, mixed, burst = Probed(seed=2), Probed(seed=3), Probed(seed=4)
    steady.run(2.0 * CHATS_PER_SECOND, 90.0, CHATS)
    mixed.run(2.0 * MIXED_PER_SECOND, 90.0, MIX)
    burst.run(2.0, 60.0, CHATS)
    for _ in range(256):
        burst.ask("chat")
    one_seat = Probed(EngineConfig(max_num_seqs=1, speculation="off"), seed=5)
    one_seat.run(1.0, 150.0, CHATS)
    for overload in (steady, mixed, burst, one_seat):
        overload.drain()
        assert overload.are_right
        assert sum(overload.are_right) >= 0.9 * len(overload.are_right)


def test_classes_share_an_overload() -> None:
    """In a mix every class is served, and in order: each class gets at least a fifth of its requests."""
    outcomes = overloaded(MIX).outcomes
    for name in MIX:
        asked = [one for one in outcomes if one.latency_class == name]
        assert len(begun(asked, name)) > len(asked) / 5, name
    late = [one for one in begun(outcomes, "chat") if one.asked_at > 60.0 and one.ttft > 2 * (0.5 + 2.5)]
    assert not late


def test_a_burst_is_answered() -> None:
    """256 chats at once, in an engine with eight seats that answers three a second.

    Chats that can begin within half a minute are answered; no other is accepted; a minute later the same again.
    """
    overload = Overload()
    overload.run(2.0, 60.0, CHATS)
    for _ in range(2):
        overload.drain()
        overload.clock.advance(60.0)
        burst = [overload.ask("chat") for _ in range(256)]
        overload.drain()
        answered = [one for one in burst if one.first_at is not None]
        assert 30 * CHATS_PER_SECOND * 0.75 < len(answered) < 256
        assert sum(one.retry_after is not None for one in burst) >= 0.75 * (256 - len(answered))


def test_a_burst_that_is_quick_is_answered_whole() -> None:
    """160 completions at once on 64 seats, cold: only their time limit bounds them, and it suffices."""
    overload = Overload(EngineConfig(max_num_seqs=64))
    burst = [overload.ask("completion") for _ in range(160)]
    overload.drain()
    assert [one for one in burst if one.error or one.retry_after] == []


def test_who_has_started_is_no_queue() -> None:
    """Three of four choices wait in their seats for blocks that the first one writes: a chat begins all the same."""
    overload = Overload(num_blocks=8000)
    overload.run(5.0, 20.0, CHATS)  # the door learns what a token takes
    overload.drain()
    prompt = tuple(range(30_000))
    choices = [overload.ask("batch", prompt) for _ in range(4)]
    asked_at = overload.clock()
    while overload.clock() < asked_at + 12.0:  # a chat that comes later is behind them
        overload.step()
    chat = overload.ask("chat")
    overload.drain()
    assert chat.retry_after is None
    assert chat.ttft < 2.5
    assert [one.error for one in choices] == [None] * 4

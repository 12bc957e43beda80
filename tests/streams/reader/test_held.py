"""Laws of what a reader holds: when it leaves, joined with what, and how much of it without an acknowledgement."""

from __future__ import annotations

import math

import pytest

from streamserve.protocol.events import LoggedEvent, Status, Token
from streamserve.streams.reader.held import Held
from tests.support.streams.hand_made import tok

SECONDS, TOKENS = 0.05, 5


def words(first: int, last: int) -> list[LoggedEvent]:
    """Return the tokens of these seqs."""
    return [LoggedEvent(seq, tok(f"{seq} ", seq)) for seq in range(first, last + 1)]


def text_of(events: list[LoggedEvent]) -> str:
    return "".join(one.event.text for one in events if isinstance(one.event, Token))


def test_the_first_token_leaves_at_once_and_the_next_waits() -> None:
    """A token is due when the wait after the last tokens is over; what comes meanwhile is joined to it."""
    held = Held(SECONDS, TOKENS, None)
    held.add(words(1, 1), 10.0)
    assert held.due_at == -math.inf
    assert len(held.take(10.0)) == 1
    held.add(words(2, 2), 10.01)
    assert 10.0 < held.due_at <= 10.0 + SECONDS
    held.add(words(3, 4), 10.02)
    (joined,) = held.take(held.due_at)
    assert (joined.seq, text_of([joined])) == (4, "2 3 4 ")


@pytest.mark.parametrize("gap", [0.002, 0.011, 0.02, 0.024, 0.026, 0.03, 0.04, 0.049, 0.06])
def test_a_steady_stream_waits_for_no_clock(gap: float) -> None:
    """Tokens at an even pace leave when a token comes: with the last that is in time, and no later than that."""
    held, left = Held(SECONDS, TOKENS, None), [0.0]
    for number in range(1, 100):
        now = number * gap
        if held.events:
            assert held.due_at > now, "the clock is never reached"
        held.add(words(number, number), now)
        if held.due_at == -math.inf:
            num_joined = len(text_of(held.take(now)).split())
            assert num_joined <= TOKENS
            assert now - left[-1] <= max(SECONDS, gap) + 1e-9 or number == 1
            assert num_joined == TOKENS or now + max(gap, 0.01) > left[-1] + SECONDS - 1e-9 or number == 1
            left.append(now)
    assert held.events == [] or 99 * gap - left[-1] < SECONDS


def test_enough_tokens_leave_at_once() -> None:
    """As many as a frame joins wait for no clock."""
    held = Held(SECONDS, TOKENS, None)
    held.add(words(1, 1), 10.0)
    held.take(10.0)
    held.add(words(2, TOKENS), 10.01)
    assert held.due_at > 10.0
    held.add(words(TOKENS + 1, TOKENS + 1), 10.02)
    assert held.due_at == -math.inf


def test_another_event_takes_the_tokens_before_it_along() -> None:
    """A status leaves at once, after the tokens that waited, in order."""
    held = Held(SECONDS, TOKENS, None)
    held.add(words(1, 1), 10.0)
    held.take(10.0)
    held.add([*words(2, 3), LoggedEvent(4, Status(status="resumed"))], 10.01)
    assert held.due_at == -math.inf
    assert [one.seq for one in held.take(10.0)] == [3, 4]


def test_no_more_leaves_than_the_credit_allows() -> None:
    """The rest is kept in order, waits for an acknowledgement only, and then leaves at once."""
    held = Held(0.0, 0, 2)
    held.add(words(1, 5), 1.0)
    assert [one.seq for one in held.take(1.0)] == [1, 2]
    assert held.due_at == math.inf
    held.ack(1)
    assert held.due_at == -math.inf
    assert [one.seq for one in held.take(1.0)] == [3]
    held.ack(3)
    assert [one.seq for one in held.take(1.0)] == [4, 5]
    assert held.events == []

"""Laws of a stream's recent events: what is kept is what was committed, and it stays small."""

from __future__ import annotations

import random
from dataclasses import replace

from streamserve.protocol.events import LoggedEvent, PositionLogprobs, TokenLogprob
from streamserve.protocol.frames import encode_event
from streamserve.streams.recent import _MAX_BYTES, _MAX_OBJECT_BYTES, Recent
from tests.support.streams.hand_made import tok


def batch(first_seq: int, num_events: int, *, is_large: bool = False) -> list[LoggedEvent]:
    """Return events numbered from `first_seq`, with twenty candidates for each token if `is_large`."""
    candidate = TokenLogprob(token_id=7, token="word", bytes_=b"word", logprob=-1.0)
    logprobs = (PositionLogprobs(chosen=candidate, top=(candidate,) * 20),) if is_large else None
    tokens = [replace(tok(f"w{seq}"), logprobs=logprobs) for seq in range(first_seq, first_seq + num_events)]
    return [LoggedEvent(seq, token) for seq, token in enumerate(tokens, first_seq)]


def bodies_of(events: list[LoggedEvent]) -> list[bytes]:
    return [encode_event(logged.event) for logged in events]


def test_what_is_kept_is_what_was_committed() -> None:
    """Any part that `since` returns equals the committed events of those seqs, or it returns nothing."""
    dice = random.Random(11)
    recent, committed = Recent(), list[LoggedEvent]()
    for _ in range(200):
        events = batch(len(committed) + 1, dice.randint(1, 16), is_large=dice.random() < 0.2)
        recent.add(events, bodies_of(events) if dice.random() < 0.8 else None)
        committed += events
        if dice.random() < 0.5:
            recent.shrink()
        after, limit = dice.randint(0, len(committed)), dice.randint(1, 64)
        found = recent.since(after, limit)
        assert found == committed[after : after + len(found)], "seed 11"
        assert len(found) <= limit
    assert recent.since(len(committed) - 1, 1) == committed[-1:]
    assert recent.since(len(committed), 1) == []


def test_events_behind_a_gap_are_dropped() -> None:
    """After a gap only the new batch is kept."""
    recent = Recent()
    recent.add(batch(1, 3), None)
    recent.add(batch(9, 2), None)
    assert recent.since(0, 9) == recent.since(3, 9) == []
    assert [logged.seq for logged in recent.since(8, 9)] == [9, 10]


def test_large_batches_are_kept_as_bytes() -> None:
    """Objects with other candidates take many times their bytes: a never-reader would hold them."""
    recent = Recent()
    for number in range(40):
        events = batch(1 + 16 * number, 16, is_large=True)
        recent.add(events, bodies := bodies_of(events))
        assert sum(map(len, bodies)) > _MAX_OBJECT_BYTES
        recent.shrink()
        assert recent._last == []
        assert sum(map(len, recent._bodies)) <= _MAX_BYTES

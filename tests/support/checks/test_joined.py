"""Laws of `with_joined_text`: in each dialect it forgets how tokens were joined, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.dialects.encoder import coalesce
from streamserve.protocol.events import LoggedEvent
from tests.dialects.test_golden import ENCODERS, READABLE
from tests.support.bodies.random_logs import RandomAnswer, random_answer
from tests.support.checks.joined import with_joined_text

SEEDS = range(40)
EVENTS = sorted({*READABLE} - {"text"})  # whose frames are text alone


def shown(name: str, answer: RandomAnswer, log: list[LoggedEvent]) -> list[dict[str, Any]]:
    """Return what a reader of the dialect compares."""
    encoder = ENCODERS[name](answer)
    return with_joined_text(b"".join([encoder.first_bytes, *map(encoder.encode, log)]))


@pytest.mark.parametrize("name", EVENTS)
def test_it_forgets_how_tokens_were_joined(name: str) -> None:
    """However many stand in a frame, two reads of an answer are equal."""
    for seed in SEEDS:
        answer = random_answer(seed, succeeds=True)
        alone = shown(name, answer, answer.log)
        for most in (2, 3, None):
            assert shown(name, answer, coalesce(answer.log, max_tokens=most)) == alone, (seed, most)


def delta(text: str, number: int, block: int = 0) -> dict[str, Any]:
    return {"type": "delta", "index": block, "delta": text, "seq": number}


END = {"type": "end", "seq": 9}


@pytest.mark.parametrize(
    "other",
    [
        [delta("ab", 2), END],
        [delta("a", 1), delta("c", 2), delta("b", 3), END],
        [delta("abc", 2), END],
        [delta("abc", 3, block=1), END],
        [delta("a", 1), END, delta("bc", 3)],
        [delta("abc", 3), END, END],
        [delta("abc", 3)],
    ],
    ids=["text is lost", "order", "a number", "a block", "an event between", "an event twice", "no end"],
)
def test_it_forgets_nothing_else(other: list[dict[str, Any]]) -> None:
    """Lost text, another number at the end of a text and other events make another stream."""
    stream = [delta("a", 1), delta("b", 2), delta("c", 3), END]
    assert with_joined_text(stream) == [delta("abc", 3), END]
    assert with_joined_text(other) != with_joined_text(stream)

"""Laws of the observed lengths of answers."""

from __future__ import annotations

import pytest

from streamserve.engine.policy.reserve import AnswerLengths


def test_a_few_answers_say_nothing() -> None:
    """Until eight have ended nothing is known; of another class never."""
    lengths = AnswerLengths()
    for _ in range(7):
        lengths.note("chat", 100)
    assert lengths.left("chat", 0) is None
    lengths.note("chat", 100)
    assert (lengths.left("chat", 0), lengths.left("document", 0)) == (100.0, None)


def test_what_is_left_shrinks_to_a_quarter() -> None:
    """An answer that is as long as the mean is not taken to be over."""
    lengths = AnswerLengths()
    for number in range(8):
        lengths.note("chat", 96 + number)
    assert lengths.left("chat", 40) == pytest.approx(59.5)
    assert lengths.left("chat", 5000) == pytest.approx(99.5 / 4)


def test_the_mean_follows() -> None:
    """Answers that become longer are known to be within about a hundred."""
    lengths = AnswerLengths()
    for num_tokens in [10] * 1000 + [300] * 100:
        lengths.note("chat", num_tokens)
    assert 280 < (lengths.left("chat", 0) or 0) < 300

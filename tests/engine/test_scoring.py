"""`PromptScoring`: each position of a prompt is scored once, and until then computed."""

from __future__ import annotations

import sys

from streamserve.engine.plan import ScoreSpec
from streamserve.engine.scoring import PromptScoring

PROMPT = tuple(range(10, 20))


def test_each_position_is_scored_once() -> None:
    """A chunk that is computed again is scored from the first position that was not; the last has no next token."""
    scoring = PromptScoring(PROMPT, 2, 0)
    first = scoring.spec(0, 4)
    assert first == ScoreSpec(first=0, token_ids=(11, 12, 13, 14), num_top=2)
    scoring.note(first)
    assert scoring.spec(0, 3) is None
    rest = scoring.spec(0, 10)
    assert rest == ScoreSpec(first=4, token_ids=(15, 16, 17, 18, 19), num_top=2)
    scoring.note(rest)
    assert scoring.spec(0, 10) is None
    assert scoring.spec(9, 12) is None


def test_what_is_not_scored_is_computed() -> None:
    """The cache stands in for the scored positions only; once all are scored it may for all."""
    scoring = PromptScoring(PROMPT, 0, 3)
    assert scoring.num_reusable_tokens == 3
    scoring.note(ScoreSpec(first=3, token_ids=PROMPT[4:], num_top=0))
    assert scoring.num_reusable_tokens == scoring.most_tokens == sys.maxsize


def test_a_step_names_a_bounded_number_of_tokens() -> None:
    """Each position costs a row of the vocabulary: with many tokens beside its own a step holds fewer, at least one."""
    assert [PromptScoring(PROMPT, num_top, 0).most_tokens for num_top in (0, 15, 9_999)] == [256, 128, 1]

"""Laws of `PromptLookup`: what it finds stood after the same tokens before, the longest match first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.engine.policy.lookup import MAX_MATCH, MIN_MATCH, PromptLookup


def follow(*token_ids: int, most: int = 4, num_prompt: int = 0, prediction: tuple[int, ...] = ()) -> tuple[int, ...]:
    return PromptLookup(num_prompt or len(token_ids), prediction).follow(token_ids, most).token_ids


def test_what_stood_after_the_same_tokens() -> None:
    """Up to so many tokens, and from where the text ends as it has repeated itself."""
    assert follow(1, 2, 3, 9, 8, 7, 6, 1, 2, 3) == (9, 8, 7, 6)
    assert follow(1, 2, 3, 9, 1, 2, 3) == (9, 1, 2, 3)
    assert follow(1, 2, 3, 1, 2, 3, most=7) == (1, 2, 3, 1, 2, 3, 1)
    assert follow(5, 5, 5, 5, most=2) == (5, 5)


@pytest.mark.parametrize("token_ids", [(), (1,), (1, 2, 3), (1, 2, 9, 1, 2), (1, 2, 3, 4, 5, 6)])
def test_nothing_before(token_ids: tuple[int, ...]) -> None:
    """Two tokens that are alike are too few."""
    assert follow(*token_ids) == ()


def test_the_longest_match_goes_before_the_latest() -> None:
    """Of equal matches the latest is taken."""
    assert follow(4, 1, 2, 3, 70, 5, 1, 2, 3, 80, 4, 1, 2, 3, most=1) == (70,)
    assert follow(1, 2, 3, 70, 1, 2, 3, 80, 9, 1, 2, 3, most=1) == (80,)


def test_tokens_are_compared_whole() -> None:
    """Bytes that are alike across two tokens are no match."""
    assert follow(0x01000000, 0x02000001, 0x03000002, 0x00000003, 9, 1, 2, 3) == ()


def test_an_answer_that_is_predicted() -> None:
    """From its beginning; where it has left the prediction, from where it comes back to it."""
    prediction = (10, 11, 12, 13, 14, 15, 16)
    assert follow(1, 2, prediction=prediction) == (10, 11, 12, 13)
    assert follow(1, 2, 10, 11, num_prompt=2, prediction=prediction) == (12, 13, 14, 15)
    assert follow(1, 2, 10, 99, num_prompt=2, prediction=prediction) == ()
    assert follow(1, 2, 10, 99, 12, 13, 14, num_prompt=2, prediction=prediction) == (15, 16)
    assert follow(1, 2, 10, 11, 12, 13, 14, 15, 16, num_prompt=2, prediction=prediction) == ()


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 20), st.lists(st.integers(0, 3), max_size=12))
def test_what_is_found_follows_a_match(token_ids: list[int], most: int, prediction: list[int]) -> None:
    """Whatever was asked before: what a lookup has seen piece by piece it finds as at once."""
    lookup = PromptLookup(0, prediction)
    for end in range(len(token_ids) + 1):
        found = lookup.follow(token_ids[:end], most)
    assert found == PromptLookup(0, prediction).follow(token_ids, most)
    assert len(found.token_ids) <= most
    is_beginning = len(token_ids) < MIN_MATCH and token_ids == prediction[: len(token_ids)]
    if not found.token_ids or (prediction and is_beginning):
        return
    text = [*prediction, -1, *token_ids] if prediction else token_ids
    alike, first = text[-found.num_alike :], found.token_ids[0]
    assert MIN_MATCH <= found.num_alike <= MAX_MATCH
    places = range(len(text) - found.num_alike)
    assert any(text[at : at + found.num_alike] == alike and text[at + found.num_alike] == first for at in places)

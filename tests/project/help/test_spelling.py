"""Typing errors: what becomes a word of the help pages, and what stays as it is typed."""

from __future__ import annotations

import pytest

from project.help.spelling import Spelling

SPELLING = Spelling({"cancel": 9, "cancels": 1, "card": 5, "pay": 7, "press": 3, "notebook": 8, "export": 2})


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cancle", "cancel"),  # swapped
        ("cancell", "cancel"),  # one too many
        ("notebok", "notebook"),  # one too few
        ("exporr", "export"),  # another
        ("Please CANCLE my crad, now!", "Please cancel my card, now!"),
    ],
)
def test_a_word_becomes_the_word_one_letter_away(typed: str, meant: str) -> None:
    """What stands in no page and no dictionary; the rest of the text is as it was."""
    assert SPELLING.corrected(typed) == meant


@pytest.mark.parametrize(
    "typed",
    [
        "can I play chess",  # English, although one letter away from "pay"
        "crd",  # too short to know
        "2fa canc3l",
        "kartoffelsalat",  # near to nothing
        "x" * 10_000,
        "",
    ],
)
def test_other_words_stay(typed: str) -> None:
    """English words, short words, words that come near to none."""
    assert SPELLING.corrected(typed) == typed

"""Laws of output filters: what is shown does not depend on how the text is cut, and nothing forbidden is shown."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.clients.pipeline.filters import MAX_HELD_CHARS, Blocklist, Chain, OutputFilter, Redaction, Stopped

TEXT = "The secret is Swordfish, and swordfishes are fish; sword fish too. Card 4111 1111 1111 1111, mail bob@site.org!"
CARD = r"\b(?:\d[ -]?){13,16}\b"
EMAIL = r"[\w.+-]+@[\w-]+\.[\w.]*\w"


def shown(filters: list[OutputFilter], pieces: list[str]) -> tuple[str, bool]:
    """Return what a reader sees of the pieces, and whether the answer was stopped."""
    chain, out = Chain(filters), ""
    try:
        for piece in pieces:
            out += chain.feed(piece)
        return out + chain.flush(), False
    except Stopped as stopped:
        return out + stopped.text, True


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    """Return the ways to cut a text into pieces, empty ones too."""
    places = st.lists(st.integers(0, len(text)), max_size=40).map(sorted)
    return places.map(lambda at: [text[a:b] for a, b in pairwise([0, *at, len(text)])])


@pytest.mark.parametrize("size", range(1, len(TEXT) + 1))
def test_a_forbidden_word_is_stopped_at_every_split(size: int) -> None:
    """Cut into pieces of any size, the text ends before the word: no character of it is shown."""
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    assert shown([Blocklist(["swordfish"])], pieces) == ("The secret is ", True)


@pytest.mark.parametrize("split", range(len(TEXT) + 1))
def test_two_pieces_at_every_place(split: int) -> None:
    """A blocklist that replaces, and a redaction after it, show the same for each of the two pieces."""
    filters = [Blocklist(["swordfish"], replacement="***"), Redaction(CARD), Redaction(EMAIL, "[mail]")]
    expected = "The secret is ***, and swordfishes are fish; sword fish too. Card [removed], mail [mail]!"
    assert shown(list(filters), [TEXT[:split], TEXT[split:]]) == (expected, False)


@given(cuts(TEXT))
def test_the_cuts_do_not_matter(pieces: list[str]) -> None:
    """However the tokens fall, a reader sees the same."""
    once = shown([Redaction(CARD), Redaction(EMAIL), Blocklist(["fish"])], [TEXT])
    assert shown([Redaction(CARD), Redaction(EMAIL), Blocklist(["fish"])], pieces) == once
    assert once[1]


@given(st.text("ab \n"), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4), st.data())
def test_what_is_shown_is_what_a_plain_substitution_gives(text: str, words: list[str], data: st.DataObject) -> None:
    """The reference: `re.sub` over the whole text."""
    pattern = rf"(?<!\w)(?:{'|'.join(map(re.escape, sorted(words, key=len, reverse=True)))})(?!\w)"
    pieces = data.draw(cuts(text))
    assert shown([Blocklist(words, replacement="*")], pieces) == (re.sub(pattern, "*", text), False)


def test_what_is_held_back_is_bounded() -> None:
    """Text is shown as soon as it cannot be part of a match."""
    one = Redaction("x{1,10}", max_chars=10)
    out = "".join(one.feed("a") for _ in range(1000))
    assert len(out) == 1000 - 11


def test_an_empty_match_is_none() -> None:
    """A pattern that also matches nothing changes only what it matches."""
    assert shown([Redaction("b*", "-")], list("abbac")) == ("a-ac", False)


@pytest.mark.parametrize(
    "make",
    [lambda: Blocklist([]), lambda: Blocklist(["a" * 300]), lambda: Redaction("a", max_chars=MAX_HELD_CHARS + 1)],
)
def test_a_filter_that_cannot_work_is_refused(make: object) -> None:
    """A list without a word, and a match that would hold back too much."""
    with pytest.raises(ValueError, match=r"needs a word|max_chars"):
        make()  # type: ignore[operator]

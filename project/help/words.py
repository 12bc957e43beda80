"""Text as the words a search compares: lower case, without stop words, stemmed by Snowball's English rules. Pure."""

from __future__ import annotations

import re
from functools import cache

import Stemmer

_WORD = re.compile(r"[^\W_]+")
_POSSESSIVE = re.compile(r"['’](?:s|d|ll|m|re|ve|t)\b")
# Words of questions that do not tell what is asked for. `how` and `where` do: passages of one topic differ by them.
_STOP_TEXT = """
a about am an and any anything are as at be been but by can could did do does down everything explain for from get
give got had has have i if in into is it its just know let may me might must my no not of on one or our out over
please quillbox shall should show so some something tell than that the their them then there these they this those to
too up us very was we were what who whom will with would you your
"""
_STOP_WORDS = frozenset(_STOP_TEXT.split())


@cache
def _stemmer() -> Stemmer.Stemmer:
    return Stemmer.Stemmer("english")


def stems(text: str) -> list[str]:
    """Return the stems of a text's words, in order, with repetitions."""
    return _stemmer().stemWords([word for word in words(text) if word not in _STOP_WORDS])


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, stop words included, in order, with repetitions."""
    return _WORD.findall(_POSSESSIVE.sub("", text.lower()))


def is_stop_word(word: str) -> bool:
    """Whether a search leaves this word out."""
    return word in _STOP_WORDS

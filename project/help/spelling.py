"""A question's typing errors, corrected to words of the help pages. Blocking: the first call reads a dictionary.

A word is wrong where neither the pages nor an English dictionary have it. It becomes the word of the pages that is one
letter away: left out, added, changed, or swapped with its neighbour (Damerau's distance, by pyspellchecker).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from spellchecker import SpellChecker

MIN_WORD_CHARS, MAX_WORD_CHARS = 4, 24  # shorter words are one letter away from too many
_WORD = re.compile(r"[^\W\d_]+")


class Spelling:
    """The words of the help pages, and how often each stands there."""

    def __init__(self, words: Mapping[str, int]) -> None:
        self._words = words
        self._near = SpellChecker(language=None, distance=1)
        self._near.word_frequency.load_json({word: number for word, number in words.items() if word})

    def corrected(self, text: str) -> str:
        """Return the text with each wrong word replaced; letters stay as they are typed elsewhere."""
        return _WORD.sub(lambda found: self._right(found[0]), text)

    def _right(self, typed: str) -> str:
        word = typed.lower()
        if not MIN_WORD_CHARS <= len(word) <= MAX_WORD_CHARS or word in self._words or word in _english():
            return typed
        near = self._near.candidates(word) or set()
        return max(sorted(near & self._words.keys()), key=lambda one: self._words[one], default=typed)


@cache
def _english() -> SpellChecker:
    return SpellChecker(language="en", distance=1)

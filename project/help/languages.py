"""Questions in German, French, Spanish and Japanese: which language it is, and its words in English. Pure.

The help pages are in English, and so is their index. A question is searched by the English words of the terms that it
has (`languages.toml`); its answer is in English, the sentence around it, or the one that declines, in its language.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ENGLISH = "en"
_WORD = re.compile(r"[^\W\d_]+")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """What is known of a language. `terms`: how a word begins (in Japanese: what stands anywhere), and its English."""

    small_words: frozenset[str]
    terms: Mapping[str, str]
    no_answer: str
    in_english: str
    not_from_pages: str

    def knows(self, word: str) -> bool:
        """Whether the word is of this language, as far as is known."""
        return word in self.small_words or any(map(word.startswith, self.terms))


@cache
def languages() -> dict[str, Language]:
    """Return the languages beside English, by code."""
    entries = tomllib.loads(Path(__file__).with_name("languages.toml").read_text(encoding="utf-8"))
    return {
        code: Language(**{**entry, "small_words": frozenset(entry["small_words"].split())})
        for code, entry in entries.items()
    }


def language_of(question: str, is_english: Callable[[str], bool]) -> str:
    """Return the code of the language that has most of the question's words, at least a third of them; else English."""
    if _JAPANESE.search(question):
        return "ja"
    words = _WORD.findall(question.lower())
    known = {code: sum(map(language.knows, words)) for code, language in languages().items()}
    best = max(known, key=lambda code: known[code])
    is_that = 3 * known[best] >= len(words) and known[best] > sum(map(is_english, words))
    return best if is_that else ENGLISH


def in_english(question: str, code: str) -> str:
    """Return the question as English words to search by: terms that are known, and words that no term begins."""
    if code == ENGLISH:
        return question
    terms = languages()[code].terms
    if code == "ja":
        found = [english for term, english in terms.items() if term in question]
        return " ".join([*found, *re.findall(r"[A-Za-z0-9]+", question)])
    words = _WORD.findall(question.lower())
    return " ".join(
        _english(word, terms) for word in words if word not in languages()[code].small_words or word in terms
    )


def _english(word: str, terms: Mapping[str, str]) -> str:
    beginnings = [term for term in terms if word.startswith(term)]
    return terms[max(beginnings, key=len)] if beginnings else word

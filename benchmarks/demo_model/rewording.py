"""Rewordings of a question: other openings, synonyms, frames, dropped words, typos, casing.

Pure functions of a random generator and a string. A rewording keeps the meaning only as far as the word lists in
`phrases/wording.toml` do.
"""

import re
from collections.abc import Sequence
from random import Random

from benchmarks.demo_model.phrases import FRAMES, GREETING_PREFIXES, OPENINGS, SYNONYMS

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SYNONYM = re.compile(
    r"\b(" + "|".join(sorted(map(re.escape, SYNONYMS), key=len, reverse=True)) + r")\b", re.IGNORECASE
)
# Words that carry no topic: a reader still understands the question when some of them are missing.
_SMALL_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the my your our me i we you do does did is are am be to of for on in at it that this can could would "
        "will have has had and so please with from by any some there get",
    )
)
_KEYWORD_FRAMES = (
    "{k}",
    "{k}?",
    "question about {k}",
    "something about {k}",
    "info on {k}",
    "problem with {k}",
    "help with {k}",
)


def reword(rng: Random, questions: Sequence[str], keywords: str) -> str:
    """Return one of `questions` reworded, or now and then only a few of the search words."""
    if rng.random() < 0.18:
        return _keyword_query(rng, keywords)
    text = reopen(rng, rng.choice(questions))
    if rng.random() < 0.12:
        text = f"{_ended(text)} {reopen(rng, rng.choice(questions))}"
    return roughen(rng, framed(rng, with_synonyms(rng, text)))


def reopen(rng: Random, question: str) -> str:
    """Exchange the first words for others of the same meaning, half of the time."""
    lowered = question.lower()
    for opening, others in OPENINGS.items():
        if lowered.startswith(opening):
            return question if rng.random() < 0.4 else rng.choice(others) + question[len(opening) :]
    return question


def with_synonyms(rng: Random, text: str, share: float = 0.28) -> str:
    """Exchange some words for synonyms."""

    def swap(match: re.Match[str]) -> str:
        return rng.choice(SYNONYMS[match[0].lower()]) if rng.random() < share else match[0]

    return _SYNONYM.sub(swap, text)


def framed(rng: Random, text: str) -> str:
    """Put a sentence before or after the question, a quarter of the time."""
    return rng.choice(FRAMES).format(q=text) if rng.random() < 0.25 else text


def greeted(rng: Random, text: str) -> str:
    """Put a greeting before the question."""
    return rng.choice(GREETING_PREFIXES) + text


def roughen(rng: Random, text: str) -> str:
    """Type it as people do: small words missing, lower case, no question mark, slips of the finger."""
    if rng.random() < 0.15:
        text = " ".join(word for word in text.split() if word.lower() not in _SMALL_WORDS or rng.random() < 0.5) or text
    if rng.random() < 0.35:
        text = text.rstrip(".?!")
    style = rng.random()
    text = text.lower() if style < 0.4 else text.upper() if style < 0.42 else text
    for _ in range(rng.choice((1, 1, 2)) if rng.random() < 0.14 else 0):
        text = _typo(rng, text)
    return text


def _keyword_query(rng: Random, keywords: str) -> str:
    words = keywords.split()
    chosen = rng.sample(words, min(len(words), rng.choice((2, 3, 3, 4))))
    return rng.choice(_KEYWORD_FRAMES).format(k=" ".join(chosen))


def _ended(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else text + "."


def _typo(rng: Random, text: str) -> str:
    """Swap, drop, double or replace one character."""
    if len(text) < 6:
        return text
    at = rng.randrange(1, len(text) - 1)
    middle = rng.choice(
        (text[at + 1] + text[at], text[at + 1], text[at] * 2 + text[at + 1], rng.choice(_LETTERS) + text[at + 1])
    )
    return text[:at] + middle + text[at + 2 :]

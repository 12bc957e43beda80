"""The knowledge base of Quillbox, a fictional notebook service with a help desk: the facts in the TOML files here.

Every fact is fixed and made up. This package does not know who asks (the corpus generator, a retriever, a page with
citations) or how an answer is worded.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["FACTS", "FACTS_BY_ID", "Fact", "facts_stated_in"]

_FOLDER = Path(__file__).parent
# The corpus draws facts by their number, so their order is a part of it.
_FILES = ("subscription", "payments", "plans", "account", "team", "content", "apps", "deliveries", "contact")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fixed fact. `answer` may be quoted verbatim; `keywords` are search words, space separated.

    `questions` are ways to ask for it. An answer that has all `key_terms` states it.
    """

    id: str
    topic: str
    answer: str
    key_terms: tuple[str, ...]
    keywords: str
    questions: tuple[str, ...]

    def is_stated_in(self, text: str) -> bool:
        """True when every key term stands in `text` as whole words (case and runs of spaces do not matter)."""
        plain = " ".join(text.split())
        return all(_whole(term).search(plain) for term in self.key_terms)


@cache
def _whole(term: str) -> re.Pattern[str]:
    """A term between word boundaries that also hold for numbers: `5 GB` is not in `1.5 GB`, nor `$8` in `$8.50`."""
    return re.compile(rf"(?<!\w)(?<!\d[.,]){re.escape(term)}(?!\w)(?![.,]\d)", re.IGNORECASE)


def _facts() -> Iterator[Fact]:
    for name in _FILES:
        for fields in tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))["fact"]:
            yield Fact(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


FACTS: tuple[Fact, ...] = tuple(_facts())
FACTS_BY_ID: dict[str, Fact] = {fact.id: fact for fact in FACTS}


def facts_stated_in(text: str) -> frozenset[str]:
    """Return the ids of every fact that `text` states."""
    return frozenset(fact.id for fact in FACTS if fact.is_stated_in(text))

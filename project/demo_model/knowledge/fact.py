"""One fact of the help desk: what it says, how people ask for it, and how to tell that an answer states it.

Plain data and one matching rule; it does not know the model, the corpus or any retriever.
"""

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fixed fact. `answer` may be quoted verbatim; `keywords` are search words, space separated."""

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

"""The index of the passages: rebuilt when a passage has changed, in every process that searches.

    the version in the database ── as known? ──► the index in memory, else read all passages, build anew

It holds what BM25 needs: the stems of each passage, and how many passages have a stem. Candidates come from
PostgreSQL's full-text search where that is the database, else from bm25s. Blocking: call it from a thread.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from django.conf import settings
from django.db import connection

from project.help.models import Passage
from project.help.slots import fill, resolved
from project.help.spelling import Spelling
from project.help.words import is_stop_word, stems, words
from streamserve import embed
from streamserve.protocol.errors import Refused

if TYPE_CHECKING:
    import bm25s

logger = logging.getLogger(__name__)

MIN_LIKENESS = 0.6
_K1, _B = 1.2, 0.5  # of BM25: how much repetitions and a passage's length count


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A passage as the index has it."""

    slug: str
    title: str
    url: str
    sentences: tuple[str, ...]  # with their slots
    values: Mapping[str, str]
    text: str  # filled, with the body: what a model may read
    asked: tuple[frozenset[str], ...]  # the words of its title and of each other way to ask
    words: Mapping[str, int]  # that it is searched by, as they stand there
    counts: Mapping[str, int]  # of its stems

    @property
    def length(self) -> int:
        """The number of its stems."""
        return sum(self.counts.values())


def document_of(passage: Passage, others: Mapping[str, Mapping[str, str]]) -> Document:
    """Return a passage as a document; `others` has the values of all. Raises KeyError for one that is not there."""
    values = resolved(passage.values, others)
    said = " ".join(fill(sentence, values) for sentence in passage.sentence_list)
    text = f"{said}\n{fill(passage.body, values)}".strip()
    searched = " ".join((passage.title, passage.also_asked, passage.keywords, passage.topic.name, text))
    return Document(
        slug=passage.slug,
        title=passage.title,
        url=passage.get_absolute_url(),
        sentences=tuple(passage.sentence_list),
        values=values,
        text=text,
        asked=tuple(
            frozenset(words(line)) for line in (passage.title, *passage.also_asked.splitlines()) if line.strip()
        ),
        words=Counter(words(searched)),
        counts=Counter(stems(searched)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """All passages of one version. `vectors` are theirs where the site has an embedding model."""

    version: str
    documents: Mapping[str, Document]
    frequencies: Mapping[str, int]  # of a stem: the number of passages that have it
    mean_length: float
    spelling: Spelling = field(compare=False)
    bm25: bm25s.BM25 | None = None
    vectors: np.ndarray | None = field(default=None, compare=False)  # (num_passages, dimensions), of length 1

    def weight(self, stem: str) -> float:
        """Return the weight of a stem: BM25's inverse document frequency, largest where no passage has it."""
        frequency = self.frequencies.get(stem, 0)
        return math.log(1 + (len(self.documents) - frequency + 0.5) / (frequency + 0.5))

    def bm25_score(self, words: set[str], document: Document) -> float:
        """Return the BM25 score of one passage."""
        norm = _K1 * (1 - _B + _B * document.length / self.mean_length)
        found = ((self.weight(word), document.counts[word]) for word in words if word in document.counts)
        return sum(weight * count / (count + norm) for weight, count in found)

    def coverage(self, words: set[str], document: Document) -> float:
        """Return the share of the words' information that the passage has: 0 to 1."""
        whole = sum(map(self.weight, words))
        return sum(self.weight(word) for word in words if word in document.counts) / whole if whole else 0.0

    def knows(self, word: str) -> bool:
        """Whether a word is English, as far as passages and stop words show it."""
        return is_stop_word(word) or any(stem in self.frequencies for stem in stems(word))

    def asked_like(self, question: str) -> dict[str, float]:
        """Return the passages that are asked for in these words: 1 for the same words as one of their questions.

        A question of stop words alone, as "What is this?", has no other words to search by: it comes as near to a
        passage as the share of words that it has in common with one of its questions.
        """
        asked = frozenset(words(question))
        least = 1.0 if stems(question) or not asked else MIN_LIKENESS
        near = {slug: max(map(partial(_likeness, asked), one.asked)) for slug, one in self.documents.items()}
        return {slug: likeness for slug, likeness in near.items() if likeness >= least}


def _likeness(words_of_one: frozenset[str], words_of_other: frozenset[str]) -> float:
    """Return Jaccard's: the share of all words that both have."""
    return len(words_of_one & words_of_other) / max(1, len(words_of_one | words_of_other))


_current: Index | None = None
_building = threading.Lock()


def current_index() -> Index:
    """Return the index of the passages as they are now: one query, and a new index if they have changed."""
    global _current
    version = f"{connection.alias} {connection.settings_dict['NAME']} {Passage.objects.version()}"
    with _building:
        if _current is None or _current.version != version:
            _current = _build(version)
        if _current.vectors is None:  # also where the model could not be asked until now
            vectors = vectors_of([one.text for one in _current.documents.values()])
            _current = _current if vectors is None else replace(_current, vectors=vectors)
        return _current


def _build(version: str) -> Index:
    documents = _documents()
    frequencies = Counter(stem for one in documents.values() for stem in one.counts)
    bm25 = None
    if documents and frequencies and connection.vendor != "postgresql":
        import bm25s  # here, since scipy comes with it: a tenth of the start of every command

        logging.getLogger("bm25s").setLevel(logging.WARNING)  # its import sets DEBUG
        bm25 = bm25s.BM25(k1=_K1, b=_B)
        bm25.index([list(Counter(one.counts).elements()) for one in documents.values()], show_progress=False)
    return Index(
        version=version,
        documents=documents,
        frequencies=frequencies,
        spelling=Spelling(sum((Counter(one.words) for one in documents.values()), Counter())),
        mean_length=sum(one.length for one in documents.values()) / max(1, len(documents)) or 1.0,
        bm25=bm25,
    )


def _documents() -> dict[str, Document]:
    """Return the passages as documents, without those whose value is that of a passage which is gone."""
    passages = list(Passage.objects.select_related("topic"))
    others = {one.slug: one.values for one in passages}
    found = {}
    for one in passages:
        with suppress(KeyError):
            found[one.slug] = document_of(one, others)
    return found


def vectors_of(texts: Sequence[str]) -> np.ndarray | None:
    """Return the texts' vectors as rows of length 1, by the site's embedding model HELP_EMBEDDING.

    None without one, and while it cannot be asked: the search goes by words then.
    """
    model = getattr(settings, "HELP_EMBEDDING", "")
    if not model or not texts:
        return None
    try:
        rows = np.asarray(embed(texts, model=model), dtype=np.float32)
    except Refused as refused:
        logger.warning("passages are not searched by meaning now: %s", refused.message)
        return None
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)

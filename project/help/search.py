"""Find the passages that answer a question: candidates, rerank, select. Blocking: call it from a thread.

    understand   typing errors corrected; German, French, Spanish and Japanese terms in English
    candidates   20 by full-text search (PostgreSQL, else bm25s), and 20 by meaning where HELP_EMBEDDING is set
    rerank       BM25 × (0.5 + the share of the question's weight that the passage has), + 4 where the passage names the
                 question in the same words, + 4 × cosine with an embedding
    select       what reaches MIN_SCORE and comes close to the best: nothing means "I do not know"

The numbers were chosen on the demo model's forty questions and ten off-topic questions, and on `questions/dev.py`.
"""

from __future__ import annotations

import re
from typing import Any, TypedDict

import numpy as np
from django.contrib.postgres.search import SearchQuery, SearchRank, SearchVector
from django.db import connection

from project.help.index import Document, Index, current_index, vectors_of
from project.help.languages import ENGLISH, in_english, language_of
from project.help.models import Passage
from project.help.words import stems

NUM_CANDIDATES = 20
MAX_WORDS, MAX_WORD_CHARS = 100, 100  # of a question: what follows is not searched for
MAX_PASSAGES = 3
MIN_SCORE = 2.4  # of a passage that answers at all
CLOSE = 0.9  # of the best score: a passage that comes so close may answer, too
COSINE_WEIGHT = ASKED_WEIGHT = 4.0
MAX_FOLLOW_UP_WORDS = 8
# A question that leans on the question before it: "And for how long?", "What does it cost?"
_FOLLOW_UP = re.compile(
    r"\W*(?:(?:and|but|so|or|then|what about|how about)\b|.*\b(?:it|that|this|they|them|those)\b)", re.I
)


class Hit(TypedDict):
    """A passage that may answer the question. JSON, as what a step of a pipeline returns must be."""

    slug: str
    title: str
    url: str
    sentences: list[str]  # with their slots
    values: dict[str, str]
    text: str  # filled
    score: float


class Candidates(TypedDict):
    """What a question has found, before it is ranked. JSON, too."""

    question: str
    searched: str  # the question as the search understands it: corrected, in English
    language: str  # that it is asked in: a code
    slugs: list[str]
    cosines: dict[str, float]


def candidates(question: str, limit: int = NUM_CANDIDATES) -> Candidates:
    """Return the passages that share a word with the question, or come near to its meaning."""
    typed = question.replace("\0", " ").split()[:MAX_WORDS]  # PostgreSQL refuses NUL
    index, question = current_index(), " ".join(word[:MAX_WORD_CHARS] for word in typed)
    language = language_of(question, index.knows)
    searched = index.spelling.corrected(question) if language == ENGLISH else in_english(question, language)
    known = sorted({stem for stem in stems(searched) if stem in index.frequencies})
    slugs = list(index.asked_like(searched))
    if known:
        slugs += _by_postgres(searched, limit) if index.bm25 is None else _by_bm25(index, known, limit)
    cosines = _cosines(index, question)
    slugs += sorted(cosines, key=lambda slug: -cosines[slug])[:limit]
    return Candidates(
        question=question, searched=searched, language=language, slugs=list(dict.fromkeys(slugs)), cosines=cosines
    )


def rerank(found: Candidates, asked_weight: float = ASKED_WEIGHT) -> list[Hit]:
    """Return the candidates by score, the best first."""
    index, words = current_index(), set(stems(found["searched"]))
    asked = index.asked_like(found["searched"])

    def score(document: Document) -> float:
        meant = max(0.0, found["cosines"].get(document.slug, 0.0))
        exact = index.bm25_score(words, document)
        named = asked_weight * asked.get(document.slug, 0.0)
        return exact * (0.5 + index.coverage(words, document)) + named + COSINE_WEIGHT * meant

    documents = [index.documents[slug] for slug in found["slugs"] if slug in index.documents]
    hits = [_hit(document, score(document)) for document in documents]
    return sorted(hits, key=lambda hit: (-hit["score"], hit["slug"]))


def select(hits: list[Hit], most: int = MAX_PASSAGES) -> list[Hit]:
    """Return the best hit and those that come close to it; [] where no passage answers."""
    if not hits or hits[0]["score"] < MIN_SCORE:
        return []
    return [hit for hit in hits[:most] if hit["score"] >= CLOSE * hits[0]["score"]]


def choose(found: Candidates, earlier: str = "") -> list[Hit]:
    """Return the passages that answer. A question that leans on the `earlier` question is searched together with it."""
    question = found["question"]
    leans = len(question.split()) <= MAX_FOLLOW_UP_WORDS and _FOLLOW_UP.match(question)
    if not earlier or not leans or not select(rerank(candidates(earlier))):
        return select(rerank(found))
    scores = {hit["slug"]: hit["score"] for hit in rerank(found, asked_weight=0.0)}  # "it" is not what a passage means
    both = rerank(candidates(f"{earlier} {question}"))
    summed = [Hit(**{**hit, "score": hit["score"] + scores.get(hit["slug"], 0.0)}) for hit in both]
    return select(sorted(summed, key=lambda hit: (-hit["score"], hit["slug"])))


def hits_of(slugs: list[str]) -> list[Hit]:
    """Return the passages with these slugs that there are."""
    documents = current_index().documents
    return [_hit(documents[slug], 0.0) for slug in slugs if slug in documents]


def _hit(document: Document, score: float) -> Hit:
    return Hit(
        slug=document.slug,
        title=document.title,
        url=document.url,
        sentences=list(document.sentences),
        values=dict(document.values),
        text=document.text,
        score=round(score, 4),
    )


def _by_bm25(index: Index, words: list[str], limit: int) -> list[str]:
    assert index.bm25 is not None
    scores = index.bm25.get_scores(words)
    slugs = list(index.documents)
    return [slugs[at] for at in np.argsort(-scores, kind="stable")[:limit] if scores[at] > 0]


def _by_postgres(question: str, limit: int) -> list[str]:
    """Return slugs by PostgreSQL's rank: any of the question's words counts."""
    assert connection.vendor == "postgresql"
    query: Any = SearchQuery(" or ".join(question.split()), config="english", search_type="websearch")
    vector = SearchVector("title", "keywords", weight="A", config="english")
    vector += SearchVector("also_asked", "sentences", "values", "body", "topic__name", weight="B", config="english")
    ranked = Passage.objects.annotate(rank=SearchRank(vector, query)).filter(rank__gt=0).order_by("-rank", "slug")
    return list(ranked.values_list("slug", flat=True)[:limit])


def _cosines(index: Index, question: str) -> dict[str, float]:
    if index.vectors is None or not question:
        return {}
    asked = vectors_of([question])
    if asked is None:
        return {}
    return dict(zip(index.documents, map(float, index.vectors @ asked[0]), strict=True))

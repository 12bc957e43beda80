"""The held-out questions of the billing assistant: their number, their kinds, and that their words are their own."""

from __future__ import annotations

import re

from benchmarks.demo_model.knowledge import FACTS, FACTS_BY_ID
from benchmarks.demo_model.questions import QUESTIONS
from project.help.questions.held_out import ABSENT, EDITED, HELD_OUT, PRESENT

RUN = 5  # words in a row, as for the held-out questions of the model


def runs_of(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9']+", text.lower())
    return {tuple(words[at : at + RUN]) for at in range(len(words) - RUN + 1)}


def test_there_are_sixty_of_three_kinds() -> None:
    """44 present facts, 8 edited ones, 8 absent ones; each text and each fact once."""
    assert (len(PRESENT), len(EDITED), len(ABSENT)) == (44, 8, 8)
    assert len({one.text for one in HELD_OUT}) == 60
    facts = [one.fact_id for one in HELD_OUT if one.fact_id is not None]
    assert len(set(facts)) == len(facts) == 52
    assert set(facts) | {one.removed for one in ABSENT if one.removed} <= set(FACTS_BY_ID)


def test_an_edited_value_stands_in_its_fact() -> None:
    """Each old value is words of a fact's answer, and the new one is not."""
    for one in EDITED:
        assert one.fact_id is not None
        answer = FACTS_BY_ID[one.fact_id].answer
        assert re.search(rf"(?<!\w){re.escape(one.old)}(?!\w)", answer)
        assert one.new not in answer


def test_they_are_asked_in_words_of_their_own() -> None:
    """No run of five words is a fact's, nor that of the model's held-out questions, which served to tune."""
    known = set()
    for fact in FACTS:
        for text in (fact.answer, fact.keywords, *fact.questions):
            known |= runs_of(text)
    for question in QUESTIONS:
        known |= runs_of(question.text)
    assert {one.text: shared for one in HELD_OUT if (shared := runs_of(one.text) & known)} == {}

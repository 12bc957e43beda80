"""The billing assistant with the shipped model on forty questions as people type them."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")

from project.help.assistant import NO_ANSWER
from project.help.languages import languages
from project.help.questions.natural import NATURAL, Natural
from tests.support.sites.help_desk import Answered, Ask, assistant_over, shipped_model


def is_right(question: Natural, answered: Answered) -> bool:
    """Whether the first source is one of its pages; or there is none, where no page answers."""
    return answered.cited[0] in question.pages if answered.cited else not question.pages


def beginning_of(question: Natural, answered: Answered) -> str:
    """Return how the answer begins: in the question's language, or with the words that decline in it."""
    language = languages().get(question.language)
    if answered.cited:
        return language.in_english if language else ""
    return language.no_answer if language else NO_ANSWER


async def ask_it(ask: Ask, question: Natural) -> Answered:
    """Ask it, after its earlier question and that question's answer."""
    if not question.earlier:
        return await ask(question.text)
    return await ask(question.earlier, (await ask(question.earlier)).text, question.text)


async def test_it_answers_natural_questions(shared_knowledge: None) -> None:
    """Typing errors, single words, follow-ups, other languages: the right page is first, or none where none answers."""
    async with shipped_model() as model, assistant_over(model) as ask:
        got = await asyncio.gather(*(ask_it(ask, question) for question in NATURAL))
    right = [question for question, answered in zip(NATURAL, got, strict=True) if is_right(question, answered)]
    asked, answered_by = Counter(one.kind for one in NATURAL), Counter(one.kind for one in right)
    print({kind: f"{answered_by[kind]} of {number}" for kind, number in asked.items()}, len(right))
    wrong = [
        (question.text, answered.cited, answered.text)
        for question, answered in zip(NATURAL, got, strict=True)
        if not is_right(question, answered)
    ]
    assert len(NATURAL) == 40
    for question, answered in zip(NATURAL, got, strict=True):
        assert answered.text.startswith(beginning_of(question, answered)), question.text
    assert len(right) >= 35, wrong

"""The billing assistant with the shipped model on sixty questions that nothing was tuned on."""

from __future__ import annotations

import asyncio
import re

import pytest
from asgiref.sync import sync_to_async

pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")

from benchmarks.demo_model.knowledge import FACTS_BY_ID
from project.help.assistant import NO_ANSWER
from project.help.models import Passage
from project.help.questions.held_out import ABSENT, EDITED, HELD_OUT, PRESENT, HeldOut
from tests.support.sites.help_desk import Answered, Ask, assistant_over, shipped_model


def is_right(question: HeldOut, answered: Answered) -> bool:
    """Whether the answer states the fact, with its edited value, and cites its passage alone; or knows of none."""
    if question.fact_id is None:
        return answered.cited == [] and answered.text == NO_ANSWER
    terms = FACTS_BY_ID[question.fact_id].key_terms
    wanted = [replaced(question, term) for term in terms] + [question.new]
    return answered.cited == [question.fact_id] and all(term in answered.text for term in wanted)


def replaced(question: HeldOut, text: str) -> str:
    return re.sub(rf"(?<!\w){re.escape(question.old)}(?!\w)", question.new, text) if question.old else text


def edit(question: HeldOut) -> None:
    """Give a passage the new value, as the admin does."""
    passage = Passage.objects.get(slug=question.fact_id)
    before = passage.text
    passage.values = {name: replaced(question, value) for name, value in passage.values.items()}
    passage.full_clean()
    passage.save()
    assert passage.text != before


async def answers_to(questions: tuple[HeldOut, ...], ask: Ask) -> list[tuple[HeldOut, Answered]]:
    return list(zip(questions, await asyncio.gather(*(ask(one.text) for one in questions)), strict=True))


async def test_it_answers_49_of_60_held_out_questions(shared_knowledge: None) -> None:
    """Present facts, edited ones and absent ones: the right fact and the right passage, or none."""
    async with shipped_model() as model, assistant_over(model) as ask:
        got = await answers_to(PRESENT, ask)
        for question in EDITED:
            await sync_to_async(edit)(question)
        removed = [question.removed for question in ABSENT if question.removed]
        await sync_to_async(Passage.objects.filter(slug__in=removed).delete)()
        got += await answers_to(EDITED + ABSENT, ask)
    assert [question for question, _ in got] == list(HELD_OUT)
    wrong = [
        (question.text, answered.text, answered.cited) for question, answered in got if not is_right(question, answered)
    ]
    print(len(got) - len(wrong), "of", len(got))
    assert len(got) - len(wrong) >= 49, wrong

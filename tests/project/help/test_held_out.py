"""The billing assistant with the shipped model on sixty questions that nothing was tuned on."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from asgiref.sync import sync_to_async

pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")

from project.demo_model.knowledge import FACTS_BY_ID
from project.demo_model.quality import HELPDESK
from project.help.models import Passage
from project.help.questions.held_out import ABSENT, EDITED, HELD_OUT, PRESENT, HeldOut
from streamserve.clients.factory import hf_client
from streamserve.engine.config import EngineConfig, ModelConfig
from tests.support.help_desk import Answered, Ask, assistant_over


def is_right(question: HeldOut, answered: Answered) -> bool:
    """Whether the answer states the fact, with its edited value, and cites its passage alone; or knows of none."""
    if question.fact_id is None:
        return answered.cited == [] and "do not know" in answered.text
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


async def test_it_answers_48_of_60_held_out_questions(shared_knowledge: None) -> None:
    """Present facts, edited ones and absent ones: the right fact and the right passage, or none."""
    model = ModelConfig(alias="helpdesk", path=str(HELPDESK), dtype="float32", num_threads=1)
    client: Any = hf_client(model, EngineConfig())
    client.start()
    try:
        async with asyncio.timeout(120):
            while client.describe().state == "loading":  # noqa: ASYNC110  # loading happens on another thread
                await asyncio.sleep(0.05)
        async with assistant_over(client) as ask:
            got = await answers_to(PRESENT, ask)
            for question in EDITED:
                await sync_to_async(edit)(question)
            removed = [question.removed for question in ABSENT if question.removed]
            await sync_to_async(Passage.objects.filter(slug__in=removed).delete)()
            got += await answers_to(EDITED + ABSENT, ask)
    finally:
        await client.aclose()
    assert [question for question, _ in got] == list(HELD_OUT)
    wrong = [
        (question.text, answered.text, answered.cited) for question, answered in got if not is_right(question, answered)
    ]
    assert len(got) - len(wrong) >= 48, wrong

"""The demo site's suggested questions are answered by its own assistant, each from its passage."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")

from asgiref.sync import sync_to_async

from project.context import SUGGESTIONS
from tests.support.sites.help_desk import assistant_over, load_knowledge, shipped_model

WANTED = ("about-quillbox", "price-team", "cancel-how", "discount-student")


@pytest.mark.django_db(transaction=True)
@pytest.mark.urls("project.urls")
async def test_each_suggestion_is_answered_from_its_passage(settings: Any) -> None:
    """With the model that is shipped: what a newcomer clicks first is right."""
    settings.HELP_ANSWERS, settings.HELP_BESIDE_PAGES = "slots", False
    await sync_to_async(load_knowledge)()
    async with shipped_model() as model, assistant_over(model) as ask:
        cited = [(await ask(question)).cited for question in SUGGESTIONS]
    assert cited == [[slug] for slug in WANTED]

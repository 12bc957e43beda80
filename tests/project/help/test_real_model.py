"""The help desk over a real model, as `make run MODEL=smollm2` has it: it answers from passages, and without."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")

from project import settings as demo
from project.help.assistant import NOT_FROM_PAGES
from streamserve.clients.factory import make_client
from streamserve.engine.config import EngineConfig, ModelConfig
from tests.support.models.smollm2 import smollm2
from tests.support.sites.help_desk import Ask, assistant_over

pytestmark = [pytest.mark.usefixtures("shared_knowledge"), pytest.mark.timeout(600)]


@pytest.fixture
async def ask(settings: Any) -> AsyncIterator[Ask]:
    """The assistant over SmolLM2-135M-Instruct, from its GGUF file."""
    settings.HELP_ANSWERS = "slots" if demo._SMALL & {"smollm2"} else "quotes"
    settings.HELP_BESIDE_PAGES = True
    client = make_client(ModelConfig(alias="smollm2", path=str(smollm2()), num_threads=2), EngineConfig(num_blocks=128))
    client.start()
    try:
        async with asyncio.timeout(300):
            while client.describe().state == "loading":  # noqa: ASYNC110  # loading happens on another thread
                await asyncio.sleep(0.05)
        assert client.describe().state == "ready", client.describe()
        async with assistant_over(client) as asking:
            yield asking
    finally:
        await client.aclose()


async def test_a_real_model_answers_from_the_passages_and_beside_them(ask: Ask) -> None:
    """Held to the passages' sentences it states the price; what no page answers it answers freely, marked so."""
    price = await ask("What does the Team plan cost?")
    assert price.text == "The Team plan costs $15 per seat a month, with a minimum of two seats. [1]"
    assert price.cited == ["price-team"]
    capital = await ask("What is the capital of France?")
    assert capital.text.startswith(f"*{NOT_FROM_PAGES}*")
    assert "Paris" in capital.text
    assert re.search(r"<\|im_|assistant\n", capital.text) is None  # nothing of the template
    assert capital.cited == []

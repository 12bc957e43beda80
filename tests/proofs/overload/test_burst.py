"""A burst on the demo model: 256 chats at the same moment, all answered, by the engine in its default configuration."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from streamserve.clients.factory import hf_client
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.events import Done, Error
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams
from tests.support.engines.clients import ready

pytestmark = pytest.mark.proof

HELPDESK = Path(__file__).resolve().parents[3] / "project" / "demo_model" / "helpdesk"
NUM_CHATS = 256


async def test_a_burst_of_the_demo_model_is_answered() -> None:
    """None is refused, at admission or later, cold: no answer has finished that a wait could be predicted from."""
    pytest.importorskip("torch")
    client = await ready(hf_client(ModelConfig(alias="demo", path=str(HELPDESK)), EngineConfig()))

    async def chat(number: int) -> str:
        message = Message(role="user", content=f"Ticket {number}: how do I export my data?")
        how = SamplingParams(max_tokens=60, seed=number)
        generation = await client.generate(GenerateRequest(model="demo", messages=(message,), sampling=how))
        last = [event async for event in generation][-1]
        return "answered" if isinstance(last, Done) else last.code if isinstance(last, Error) else last.type

    try:
        for _ in range(2):  # cold, and with the first one's measurements
            ends = Counter(await asyncio.gather(*map(chat, range(NUM_CHATS))))
            assert ends == {"answered": NUM_CHATS}
            print(f"\nburst: {client.stats().latency}")
    finally:
        await client.aclose()

"""The shipped model through our own engine: it answers its help desk's questions with the tokens of transformers."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")

from benchmarks.demo_model.quality import HELPDESK, score, transformers_answer
from benchmarks.demo_model.questions import OFF_TOPIC, QUESTIONS
from streamserve.clients.factory import hf_client
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.events import Done, Token
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=160)
ASKED = [question.text for question in QUESTIONS] + list(OFF_TOPIC)


async def ask_all(questions: list[str]) -> dict[str, str]:
    """Submit all questions at once, in one batch, in fp32."""
    model = ModelConfig(alias="helpdesk", path=str(HELPDESK), dtype="float32", num_threads=1)
    client = hf_client(model, EngineConfig(check_integrity=True))
    client.start()
    async with asyncio.timeout(120):
        while client.describe().state == "loading":  # noqa: ASYNC110  # loading happens on another thread
            await asyncio.sleep(0.05)
    assert client.describe().state == "ready", client.describe()

    async def ask(text: str) -> str:
        request = GenerateRequest(model="helpdesk", messages=(Message(role="user", content=text),), sampling=GREEDY)
        events = [event async for event in await client.generate(request)]
        assert isinstance(events[-1], Done), events[-1]
        return "".join(event.text for event in events if isinstance(event, Token)).strip()

    try:
        return dict(zip(questions, await asyncio.gather(*map(ask, questions)), strict=True))
    finally:
        await client.aclose()


async def test_the_engine_answers_the_held_out_questions() -> None:
    """At least 28 of 40 facts and 9 of 10 refusals, all submitted at once; some are compared with transformers."""
    answers = await ask_all(ASKED)
    plain = transformers_answer()
    for text in ASKED[::10]:
        assert [answers[text]] == plain([[{"role": "user", "content": text}]])
    report = score(lambda asked: [answers[messages[0]["content"]] for messages in asked])
    assert report.num_right >= 28, report
    assert report.num_refused >= 9, report

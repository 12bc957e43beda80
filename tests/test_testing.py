"""Laws of streamserve.testing: the models answer what a test says, in this process and under a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from streamserve import acomplete, complete
from streamserve.clients.factory import echo_client
from streamserve.engine.config import EngineConfig
from streamserve.models import Stream as StreamRow
from streamserve.testing import DaphneServer, StreamClient, scripted
from streamserve.web import site
from streamserve.web.calls import background
from tests.conftest import until
from tests.support.streams.hand_made import ask

pytestmark = pytest.mark.django_db(transaction=True)

SCRIPT = {"price": "It costs 3 €.", "hours": "From nine to five."}


@pytest.fixture(autouse=True)
def _no_site_is_left() -> Iterator[None]:
    yield
    if site.running_loop() is not None:
        background.run(site.reset, "")


def test_a_question_gets_the_answer_of_its_word(alice: Any) -> None:
    """By a word, whatever its case; any other question is its own answer; every answer ends by itself."""
    with scripted(SCRIPT):
        assert [complete(text).text for text in ("The PRICE?", "opening hours", "something")] == [
            "It costs 3 €.",
            "From nine to five.",
            "something",
        ]
        asked = StreamClient(user=alice).ask("What is the price?")
    assert (asked.status, asked.text, asked.events[-1][1]["finish_reason"]) == (200, "It costs 3 €.", "stop")
    assert StreamRow.objects.get(pk=asked.stream_id).tenant == f"user:{alice.pk}"


async def test_one_text_answers_everything(alice: Any) -> None:
    """In async tests too, on the test's own loop."""
    async with scripted("Hello there."):
        assert (await acomplete("anything")).text == "Hello there."
        assert (await acomplete(prompt="once upon")).text == "Hello there."


def test_a_refusal_has_its_error(alice: Any) -> None:
    """The client reports what a program would get."""
    with scripted(SCRIPT):
        assert StreamClient().ask("hi").status == 401
        asked = StreamClient(user=alice).ask("hi", max_tokens=-1)
    assert (asked.status, asked.error["param"]) == (400, "max_tokens")


def test_a_server_answers_by_its_settings(alice_key: str) -> None:
    """The same script under a real daphne."""
    models = {"chat": {"PATH": "echo", "ANSWERS": SCRIPT}}
    with DaphneServer(settings={"STREAMSERVE": {"MODELS": models}}) as server:
        headers = {"Authorization": f"Bearer {alice_key}"}
        with httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=30) as client:
            while client.get("/readyz").status_code != 200:
                pass
            reply = client.post("/streams", json={"prompt": "your hours?", "format": "text"})
    assert reply.text == "From nine to five."


async def test_an_answer_continues_after_preemptions() -> None:
    """Answers that do not fit in the engine's memory together are all given whole."""
    config = EngineConfig(num_blocks=12, block_size=4, check_integrity=True)
    client = echo_client("echo", config, answers={"": "0123456789" * 2})
    client.start()
    await until(lambda: client.describe().state == "ready")
    texts = ["", "", "", ""]
    async for event in await client.generate(ask(prompt="q", n=4)):  # four sequences of six blocks each
        if event.type == "token":
            texts[event.choice] += event.text
    assert texts == ["0123456789" * 2] * 4
    assert client.stats().preemptions + client.stats().parks > 0
    await client.aclose()

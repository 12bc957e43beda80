"""docs/pipelines.md: its pipeline answers the request of its curl line, and its filters filter."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from streamserve.clients.pipeline.client import PIPELINES, forget
from streamserve.engine.config import EngineConfig
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.docs.doc_blocks import blocks_of

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass
class Passage:
    """What the page's search finds."""

    pk: int = 7
    title: str = "Prices"
    text: str = "A plan costs 3 euros."

    def get_absolute_url(self) -> str:
        return f"/help/{self.pk}/"


@pytest.fixture(autouse=True)
def short_answers() -> Iterator[None]:
    """The page's runs name no `max_tokens`: the echo engine would fill its context, 8,000 tokens a run."""
    with override_settings(STREAMSERVE={**settings.STREAMSERVE, "ENGINE": {"DEFAULT_MAX_TOKENS": 64}}):
        yield


async def test_the_page_s_pipeline_answers_its_curl_line(
    transactional_db: Any, alice_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, citations and text as the page shows them; the second block's filters are made for each run."""
    search = ModuleType("help.search")
    search.best_passages = lambda question: [Passage()]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "help.search", search)
    blocks = blocks_of("docs/pipelines.md")
    python = [block.text for block in blocks if block.language == "python"]
    curl = next(block.text for block in blocks if block.language == "sh")
    body = json.loads(re.search(r"-d '(.*)'", curl)[1])  # type: ignore[index]
    try:
        exec(python[0].replace('model="chat"', 'model="echo"'), {"__name__": "help.pipelines"})  # noqa: S102  (the page is ours)
        await until_ready()
        answer = (await Caller(key=alice_key).post("/pipelines/billing", {**body, "max_tokens": 8})).json()
        await site.reset()
        assert answer["text"]
        assert answer["citations"] == [{"source": "help", "id": "7", "title": "Prices", "url": "/help/7/"}]
        assert [step["message"] for step in answer["steps"]] == ["Looking up your question", "Writing the answer"]
        forget("billing")
        source = next(text for text in python if "Redaction" in text).replace('model="chat"', 'model="echo"')
        exec(f"from streamserve import Run, pipeline\n{source}", {"__name__": "help.pipelines"})  # noqa: S102  (the page is ours)
        chain = [make() for make in PIPELINES["billing"].filters]
        assert chain[1].feed("mail bob@site.org now") + chain[1].flush() == "mail [e-mail] now"
    finally:
        forget("billing")


async def test_the_page_s_state_is_seen_as_the_page_has_it(
    transactional_db: Any, alice_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's events, streamed, are those of the page; whole, the run has the state and the event of its own."""
    search = ModuleType("help.search")
    search.best_passages = lambda question: [Passage()] * (3 if "prices" in question else 1)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "help.search", search)
    blocks = blocks_of("docs/pipelines.md")
    at = next(index for index, block in enumerate(blocks) if "run.emit(" in block.text)
    try:
        exec(blocks[at].text.replace('model="chat"', 'model="echo"'), {"__name__": "help.pipelines"})  # noqa: S102  (the page is ours)
        await until_ready()
        body = {"prompt": "What does it cost?"}
        streamed = await Caller(key=alice_key).post("/pipelines/research", {**body, "stream": True})
        shown = (await body_of(streamed)).decode()
        whole = (await Caller(key=alice_key).post("/pipelines/research", body)).json()
        await site.reset()
    finally:
        forget("research")
    for event in blocks[at + 1].text.strip().split("\n\n"):
        kind, data = event.split("\n")
        assert re.search(rf"^{kind}\nid: .*\n{re.escape(data)}$", shown, re.MULTILINE), event
    assert whole["state"] == {"topics": [{"name": "prices", "found": 3}, {"name": "terms", "found": 1}]}
    assert whole["customs"] == [{"name": "chart", "value": {"kind": "bars", "values": [3, 1]}}]


async def test_the_page_s_static_text_is_computed_once(transactional_db: Any, alice_key: str, lonely_key: str) -> None:
    """Another tenant's first question finds the rules in the cache, and nothing after them."""
    text = next(block.text for block in blocks_of("docs/pipelines.md") if "Static(" in block.text)
    names: dict[str, Any] = {"__name__": "help.pipelines"}
    try:
        exec(text.replace('model="chat"', 'model="echo"'), names)  # noqa: S102  (the page is ours)
        await until_ready()
        usages = []
        for key in (alice_key, lonely_key):
            run = (
                await Caller(key=key).post("/pipelines/prices", {"prompt": "What is a year?", "max_tokens": 4})
            ).json()
            usages.append(run["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert usages[0] == 0
        size = EngineConfig().block_size
        assert usages[1] == (len(names["RULES"]) + 3) // size * size > 0
        await site.reset()
    finally:
        forget("prices")


async def test_the_page_s_tool_asks_first(transactional_db: Any, alice_key: str) -> None:
    """The page's pipeline ends where its call asks, and the body of its curl line continues it."""
    blocks = blocks_of("docs/pipelines.md")
    source = next(block.text for block in blocks if "confirm=lambda" in block.text).replace('model="chat"', "")
    curl = next(block.text for block in blocks if "/approvals" in block.text and block.language == "sh")
    call = '<tool_call>\n{"name": "cancel_invoice", "arguments": {"number": 7}}\n</tool_call>'
    echo = {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"is cancelled": "Done.", "": call}}
    try:
        with override_settings(STREAMSERVE={"TESTING": True, "MODELS": {"chat": echo}}):
            await site.reset()
            exec(source, {"__name__": "bills.pipelines"})  # noqa: S102  (the page is ours)
            await until_ready()
            caller = Caller(key=alice_key)
            asked = (
                await caller.post("/pipelines/desk", {"messages": [{"role": "user", "content": "Cancel invoice 7"}]})
            ).json()
            (approval,) = asked["approvals"]
            assert (asked["finish_reason"], approval["message"]) == ("interrupt", "Cancel invoice 7?")
            body = re.search(r"-d '(.*)'", curl)[1].replace("call_1", approval["id"])  # type: ignore[index]
            rest = await body_of(await caller.post(f"/streams/{asked['id']}/approvals", json.loads(body)))
            assert b"Invoice 7 is cancelled." in rest
            lines = [line.removeprefix("data: ") for line in rest.decode().split("\n") if line.startswith("data: ")]
            assert "Done." in "".join(json.loads(line).get("text", "") for line in lines)  # in one event or several
            await site.reset()
    finally:
        forget("desk")

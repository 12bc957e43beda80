"""docs/agents.md: each framework's agent answers with the site's own model, as its curl line asks."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from streamserve.clients.pipeline.client import PIPELINES, forget
from streamserve.web import site
from tests.conftest import Caller, body_of
from tests.support.checks.stream_checks import check_native, text_of
from tests.support.docs.doc_blocks import blocks_of

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = "docs/agents.md"


@pytest.mark.parametrize(
    ("heading", "package"),
    [("Pydantic AI", "pydantic_ai"), ("LangGraph", "langgraph"), ("OpenAI Agents SDK", "agents")],
)
async def test_each_agent_answers(heading: str, package: str, engine: None, alice_key: str) -> None:
    """The block as it stands, but for the model's name; its text is the model's, its usage is counted."""
    pytest.importorskip(package)
    blocks = blocks_of(PAGE)
    (python,) = [block for block in blocks if block.heading == heading and block.language == "python"]
    curl = next(block.text for block in blocks if block.language == "sh" and "curl" in block.text)
    body = json.loads(re.search(r"-d '(.*)'", curl)[1])  # type: ignore[index]
    short = {"ENGINE": {"DEFAULT_MAX_TOKENS": 16}}
    with override_settings(STREAMSERVE={**settings.STREAMSERVE, **short}):
        try:
            exec(python.code.replace('"chat"', '"echo"'), {"__name__": "shop.pipelines"})  # noqa: S102  (the page is ours)
            assert PIPELINES["orders"].is_agent
            await site.reset()
            caller = Caller(key=alice_key)
            frames = check_native(await body_of(await caller.post("/pipelines/orders", body)))
            assert text_of(frames)
            assert frames[-1].json["finish_reason"] in ("stop", "length")
            whole: dict[str, Any] = (await caller.post("/pipelines/orders", {**body, "stream": False})).json()
            assert whole["text"]
            assert whole["usage"]["completion_tokens"] == 16
        finally:
            forget("orders")
            await site.reset()

"""docs/ag-ui.md: its pipeline asks before its tool runs, and is answered as the page says; its tables name it all.

Its programs are run by tests/e2e/frontends/ag_ui.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test import override_settings

from streamserve.clients.pipeline.client import forget
from streamserve.dialects.ag_ui.events import CITATION, STATUS
from streamserve.dialects.ag_ui.request import body_fields
from streamserve.protocol.limits import Limits
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.run_checks import Page, events_of
from tests.support.docs.doc_blocks import ROOT, blocks_of

pytestmark = pytest.mark.django_db(transaction=True)

CALL = '<tool_call>\n{"name": "cancel_invoice", "arguments": {"number": 7}}\n</tool_call>'
MODELS = {"chat": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"is cancelled": "Done.", "Cancel 7": CALL}}}


@pytest.fixture
async def caller(transactional_db: Any, alice_key: str) -> AsyncIterator[Caller]:
    (text,) = [block.text for block in blocks_of("docs/ag-ui.md") if block.language == "python"]
    exec(text, {"__name__": "help.pipelines"})  # noqa: S102  (the page is ours)
    try:
        with override_settings(STREAMSERVE={"TESTING": True, "MODELS": MODELS}):
            await site.reset()
            await until_ready()
            yield Caller(key=alice_key)
            await site.reset()
    finally:
        forget("guide")


async def test_the_page_s_pipeline_asks_its_user(caller: Caller) -> None:
    """Its state is seen, its question is the interrupt's message, and the answer continues the run."""
    ask = {"threadId": "t", "runId": "r1", "messages": [{"id": "m", "role": "user", "content": "Cancel 7"}]}
    page = Page().read(events_of(await body_of(await caller.post("/ag-ui/guide", ask))))
    assert page.state == {"asked": "Cancel 7"}
    (interrupt,) = page.end["outcome"]["interrupts"]
    assert interrupt["message"] == "Cancel invoice 7?"
    answer = {"interruptId": interrupt["id"], "status": "resolved", "payload": {"approved": True}}
    resumed = await caller.post("/ag-ui/guide", {**ask, "runId": "r2", "resume": [answer]})
    assert Page().read(events_of(await body_of(resumed))).text == "Done."


def test_the_page_names_it_all() -> None:
    """Every event that a run shows, and every field of a body that is taken."""
    text = (ROOT / "docs" / "ag-ui.md").read_text()
    named = set(re.findall(r"`([^`\n]+)`", text))
    own = {CITATION, STATUS, "RUN_STARTED", "RUN_FINISHED", "RUN_ERROR", "STATE_SNAPSHOT", "STATE_DELTA", "CUSTOM"}
    shown = {"STEP_STARTED", "STEP_FINISHED", "TOOL_CALL_RESULT", "TEXT_MESSAGE_START", "REASONING_START"}
    fields = set(body_fields(Limits())) - {"parentRunId", "protocolVersion"}
    assert own | shown | fields <= named

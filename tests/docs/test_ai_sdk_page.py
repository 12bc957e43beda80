"""docs/ai-sdk.md: its curl lines run on a served site. tests/e2e/frontends/ai_sdk runs its pages in Chromium."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from streamserve.dialects.ai_sdk import chunks
from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from tests.docs.test_conversations_page import Shell
from tests.support.checks.ui_message_checks import check_chunks
from tests.support.docs.doc_blocks import blocks_of

PAGE = "docs/ai-sdk.md"


@pytest.mark.django_db(transaction=True)
def test_the_page_s_commands_run(hard_server: DaphneServer) -> None:
    """A chat is asked, and its messages are read."""
    shell = Shell(hard_server.url, ApiKey.objects.make()[1])
    (block,) = (one for one in blocks_of(PAGE) if one.language == "sh")
    asked, listed = shell.run(block)
    page = check_chunks(asked)
    found = json.loads(listed)
    assert found["id"] == "first"
    assert [one["role"] for one in found["messages"]] == ["user", "assistant"]
    assert found["messages"][1]["id"] == page.message["id"]


def test_the_table_has_every_chunk() -> None:
    """Those that the encoder makes, by their names."""
    table = Path(PAGE).read_text().partition("## The chunks")[2].partition("## ")[0]
    named = re.findall(r"`([a-z-]+)`", table)
    made = set(re.findall(r'"type": "([a-z-]+)"', Path(chunks.__file__).read_text()))
    assert {"start", "finish", "abort", "tool-approval-request"} <= made
    rebuilt = {"tool-approval-response", "data-keepalive"}  # of a message that is replayed; of a pace that asks for it
    assert sorted(one for one in made - rebuilt if one not in named) == []

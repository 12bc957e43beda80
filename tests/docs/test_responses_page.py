"""docs/responses.md: its examples run in order on a served site, with the official client."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from tests.support.docs.doc_blocks import blocks_of

pytestmark = pytest.mark.proof

PAGE = "docs/responses.md"
SHOWN = "http://127.0.0.1:8000"
MODEL = "echo"


@pytest.mark.django_db(transaction=True)
def test_the_pages_examples_run(hard_server: DaphneServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends with the response that it is about."""
    monkeypatch.setenv("NO_PROXY", "*")
    key = ApiKey.objects.make()[1]
    headers = {"Authorization": f"Bearer {key}"}
    talk = httpx.post(f"{hard_server.url}/conversations", json={}, headers=headers, trust_env=False).json()["id"]
    names: dict[str, Any] = {"KEY": key, "MODEL": MODEL, "CONVERSATION": f"conv_{talk}"}
    for block in blocks_of(PAGE):
        if block.language == "python":
            exec(block.text.replace(SHOWN, hard_server.url), names)  # noqa: S102  (the page's own code)
    assert names["second"].previous_response_id == names["first"].id
    assert isinstance(names["client"], openai.OpenAI)
    assert names["begun"].status in ("completed", "incomplete")
    messages = httpx.get(f"{hard_server.url}/conversations/{talk}/messages", headers=headers, trust_env=False).json()
    assert [one["role"] for one in messages["messages"]] == ["user", "assistant"] * 2
    assert names["event"].type in ("response.completed", "response.incomplete")

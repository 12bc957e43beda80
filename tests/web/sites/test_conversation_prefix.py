"""A conversation's prompt is found in the prefix cache at every turn, also after the web process was reloaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EngineConfig
from streamserve.models import Message
from streamserve.web import site
from tests.conftest import Caller, body_of
from tests.support.checks.stream_checks import check_native
from tests.support.sites.rows import in_row

pytestmark = pytest.mark.django_db(transaction=True)

NUM_TURNS = 5


@pytest.fixture
async def engine(tmp_path: Path, transactional_db: Any, echo: ThreadClient) -> AsyncIterator[ThreadClient]:
    """The engine of a site, which stays when the site's process is reloaded, as an engine process does."""
    conf = {"MODELS": {"echo": {"PATH": "echo"}}, "CLIENT": "thread", "STATE_DIR": tmp_path, "CONVERSATIONS": True}
    with override_settings(STREAMSERVE=conf):
        site.get_site().clients["echo"] = echo  # type: ignore[index]
        yield echo
        await site.reset()


async def reload(engine: ThreadClient) -> None:
    await site.reset()
    site.get_site().clients["echo"] = engine  # type: ignore[index]


async def test_every_turn_finds_the_turn_before_in_the_cache(engine: ThreadClient, alice_key: str) -> None:
    """All whole blocks of the prompt before are cached, over five turns and a reload; so are earlier answers in it.

    The echo engine writes words that its tokenizer reads as letters, so that the newest answer is computed anew.
    """
    caller = Caller(key=alice_key)
    conversation = (await caller.post("/conversations", {})).json()["id"]
    block_size, num_before = EngineConfig().block_size, 0
    for turn in range(NUM_TURNS):
        if turn == 3:
            await reload(engine)
        body = {"content": f"Question {turn}: " + "why is it late? " * 8, "max_tokens": 40, "ignore_eos": True}
        response = await caller.post(f"/conversations/{conversation}/messages", body)
        frames = check_native(await body_of(response))
        usage = frames[-1].json["usage"]
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert num_cached >= num_before // block_size * block_size, (turn, usage)
        num_before = usage["prompt_tokens"]
        await in_row(response["X-Stream-Id"], state="finished")
        row = await Message.objects.aget(stream_id=response["X-Stream-Id"])
        assert (row.state, row.cached_tokens, row.prompt_tokens) == ("done", num_cached, usage["prompt_tokens"])

"""A conversation's prompt is found in the prefix cache at every turn, also after the web process was reloaded."""

from __future__ import annotations

import json
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
from tests.support.streams.hand_made import started_echo

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


async def test_a_conversation_that_is_too_long_goes_on(engine: ThreadClient, alice_key: str) -> None:
    """Its oldest turns are left out, its readers are told, and the message keeps that; all messages stay."""
    small = await started_echo(max_model_len=640)
    await reload(small)
    caller = Caller(key=alice_key)
    conversation = (await caller.post("/conversations", {})).json()["id"]
    num_told = 0
    for turn in range(6):
        body = {"content": f"Question {turn}", "max_tokens": 40, "ignore_eos": True}
        response = await caller.post(f"/conversations/{conversation}/messages", body)
        frames = check_native(await body_of(response))
        assert frames[-1].event == "done", frames[-1]
        told = [frame.json for frame in frames if frame.json.get("status") == "trimmed"]
        num_told += bool(told)
        await in_row(response["X-Stream-Id"], state="finished")
        row = await Message.objects.aget(stream_id=response["X-Stream-Id"])
        assert [step["status"] for step in json.loads(row.content)["steps"]] == ["trimmed"] * len(told)
    assert num_told
    assert await Message.objects.acount() == 12
    await site.reset()
    await small.aclose()

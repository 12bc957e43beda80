"""The assistant over a model that a server elsewhere runs, which counts tokens or does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from project.help.questions.dev import ANSWERED
from project.help.search import candidates, choose
from tests.support.servers.upstreams import (
    DONE,
    JSON,
    Asked,
    Upstream,
    delta,
    remote,
    response,
    says,
    usage,
)
from tests.support.sites.help_desk import assistant_over

pytestmark = pytest.mark.usefixtures("shared_knowledge")

ANSWER = (delta(content="It is so [1]."), delta(finish_reason="stop"), usage(), DONE)


@pytest.mark.parametrize("counts", [True, False])
async def test_the_assistant_answers_on_vllm(settings: Any, counts: bool) -> None:
    """By its passages, with the source that it names; a server without /tokenize gets the same prompt."""
    settings.HELP_ANSWERS = "quotes"

    async def answer(asked: Asked, writer: Any) -> bool | None:
        if asked.path != "/tokenize":
            return await says(*ANSWER)(asked, writer)
        tokens = [*range(len(asked.body["prompt"].split()))]
        body = json.dumps({"tokens": tokens}).encode()
        writer.write(response("200 OK", body, JSON) if counts else response("404 Not Found"))
        await writer.drain()
        return True

    upstream = Upstream(answer)
    question = ANSWERED[0][1]
    hits = await sync_to_async(lambda: choose(candidates(question)))()
    async with remote(upstream) as client, assistant_over(client) as ask:
        answered = await ask(question)
    assert (answered.text, answered.cited) == ("It is so [1].", [hits[0]["slug"]])
    prompts = [one.body for one in upstream.posts if one.path.endswith("/chat/completions")]
    assert all(hit["text"] in prompts[-1]["messages"][-1]["content"] for hit in hits)

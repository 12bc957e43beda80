"""Responses on the rows of conversations: what continues another is a branch, and outlives the events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.models import Conversation, Message, StoredResponse
from streamserve.web import site
from tests.api.openai.test_responses import MODELS, TOOL, ask, made, refusal
from tests.conftest import Caller, until_ready

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "/v1/responses"


@pytest.fixture
async def talks(tmp_path: Any, transactional_db: Any) -> AsyncIterator[None]:
    """A site that keeps conversations."""
    conf = {"MODELS": MODELS, "CLIENT": "thread", "STATE_DIR": tmp_path, "CONVERSATIONS": True, "TITLES": "words"}
    with override_settings(STREAMSERVE={**conf, "ANONYMOUS": True}):
        await until_ready()
        yield
        await site.reset()


async def rows(conversation_id: str = "") -> list[tuple[str, str]]:
    """Return role and text of the messages, the oldest first."""
    found = Message.objects.filter(conversation=conversation_id) if conversation_id else Message.objects.all()
    return [(row.role, row.text) async for row in found]


async def test_a_response_is_a_conversation_that_the_chat_page_does_not_list(talks: None, caller: Caller) -> None:
    """Its question and its answer are messages; `source` names what has begun it."""
    whole = await made(caller)
    (row,) = [row async for row in Conversation.objects.all()]
    text = whole["output"][0]["content"][0]["text"]
    await made(caller, previous_response_id=whole["id"], input="And then?")
    (again,) = [row async for row in Conversation.objects.all()]
    assert (row.pk, row.source) == (again.pk, "responses")
    assert (await rows(row.pk))[:3] == [("user", "How is the weather?"), ("assistant", text), ("user", "And then?")]
    assert (await caller.get("/conversations?source=chat")).json()["conversations"] == []


async def test_what_continues_a_response_has_its_branch_as_the_prompt(talks: None, caller: Caller) -> None:
    """Word for word, with calls and results; a second time it is a branch of its own."""
    asked = {"model": "calls", "tools": [TOOL], "max_output_tokens": 200}
    first = await made(caller, **asked)
    call = next(one for one in first["output"] if one["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny"}
    seconds = [
        await made(caller, **{**asked, "previous_response_id": first["id"], "input": [result]}) for _ in range(2)
    ]
    sent = [{"role": "user", "content": "How is the weather?"}, call, result]
    alone = await made(caller, **{**asked, "input": sent, "store": False})
    assert {one["usage"]["input_tokens"] for one in seconds} == {alone["usage"]["input_tokens"]}
    assert [role for role, _ in await rows()] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    unknown = {**result, "call_id": "call_none"}
    refused = await caller.post(PATH, ask(**{**asked, "previous_response_id": first["id"], "input": [unknown]}))
    assert (await refusal(refused))[:2] == (400, "invalid_value")


async def test_a_conversation_outlives_what_is_kept_of_its_responses(talks: None, caller: Caller) -> None:
    """The response itself is gone then, and can still be continued."""
    first = await made(caller)
    await StoredResponse.objects.all().adelete()
    assert (await refusal(await caller.get(f"{PATH}/{first['id']}")))[0] == 404
    second = await made(caller, previous_response_id=first["id"], input="And then?")
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_several_messages_that_come_together_are_all_in_the_prompt(talks: None, caller: Caller) -> None:
    """Also at the next turn; instructions are of one response alone."""
    two = [{"role": "user", "content": "One thing."}, {"role": "user", "content": "Another thing."}]
    first = await made(caller, input=two, instructions="Be brief.")
    alone = await made(caller, input=two, store=False)
    assert first["usage"]["input_tokens"] > alone["usage"]["input_tokens"]
    second = await made(caller, previous_response_id=first["id"], input="Third.")
    sent = [*two, *first["output"], {"role": "user", "content": "Third."}]
    together = await made(caller, input=sent, store=False)
    assert second["usage"]["input_tokens"] == together["usage"]["input_tokens"]


async def test_a_response_that_is_not_stored_leaves_no_message(talks: None, caller: Caller) -> None:
    """Nor does a visitor's, whose responses continue each other all the same."""
    await made(caller, store=False)
    visitor = Caller()
    first = await made(visitor)
    second = await made(visitor, previous_response_id=first["id"], input="And then?")
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert await rows() == []


async def test_a_key_adds_its_messages_once(talks: None, caller: Caller) -> None:
    """Sent again, also after other turns."""
    first = await caller.post(PATH, ask(), **{"Idempotency-Key": "k1"})
    again = await caller.post(PATH, ask(), **{"Idempotency-Key": "k1"})
    assert again.json() == first.json()
    assert len(await rows()) == 2


async def test_a_conversation_is_continued_by_its_id(talks: None, caller: Caller, bob: Any) -> None:
    """Any of the caller's; of another's and of none there is nothing."""
    talk = (await caller.post("/conversations", {"source": "api"})).json()["id"]
    first = await made(caller, conversation=f"conv_{talk}")
    assert first["conversation"] == {"id": f"conv_{talk}"}
    second = await made(caller, conversation={"id": f"conv_{talk}"}, input="And then?")
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert [role for role, _ in await rows(talk)] == ["user", "assistant"] * 2
    for unknown in ("conv_x", f"conv_{'0' * 32}"):
        refused = await refusal(await caller.post(PATH, ask(conversation=unknown)))
        assert refused == (404, "conversation_not_found", "conversation")
    counted = await caller.post(
        f"{PATH}/input_tokens", {"model": "echo", "input": "And then?", "conversation": f"conv_{talk}"}
    )
    assert json.loads(counted.content)["input_tokens"] > second["usage"]["input_tokens"]


async def test_a_site_without_conversations_says_so(engine: None, caller: Caller) -> None:
    """A conversation cannot be named there."""
    refused = await refusal(await caller.post(PATH, {"input": "Hi", "conversation": f"conv_{'0' * 32}"}))
    assert refused == (404, "conversations_off", "conversation")

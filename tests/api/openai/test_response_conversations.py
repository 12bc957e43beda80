"""Responses on the rows of conversations: what continues another is a branch, and outlives the events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings
from openai.types.conversations import Conversation as Made
from openai.types.conversations import ConversationItemList as ItemList

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


async def test_a_deleted_user_leaves_nothing(talks: None, caller: Caller, alice: Any) -> None:
    """Of what was asked, and of conversations and their messages."""
    await made(caller)
    assert await StoredResponse.objects.acount() == 1
    await until_written()
    await alice.adelete()
    assert not await StoredResponse.objects.aexists()
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


TALKS = "/v1/conversations"


async def test_a_conversation_is_made_changed_and_deleted(talks: None, caller: Caller) -> None:
    """With notes of the caller's own, which no other list shows."""
    made_ = (await caller.post(TALKS, {"metadata": {"topic": "bills"}})).json()
    Made.model_validate(made_)
    path = f"{TALKS}/{made_['id']}"
    assert (await caller.get(path)).json() == made_
    changed = (await caller.post(path, {"metadata": {"topic": "\0"}})).json()
    assert changed == {**made_, "metadata": {"topic": "\0"}} == (await caller.get(path)).json()
    assert (await caller.post(path, {"metadata": None})).json()["metadata"] == {}
    assert await refusal(await caller.post(path, {})) == (400, "missing_field", "metadata")
    deleted = {"id": made_["id"], "object": "conversation.deleted", "deleted": True}
    assert (await caller.delete(path)).json() == deleted
    assert (await refusal(await caller.get(path)))[:2] == (404, "conversation_not_found")
    assert (await refusal(await caller.get(f"{TALKS}/conv_x")))[:2] == (404, "conversation_not_found")


async def test_the_items_of_a_conversation_are_those_of_its_responses(talks: None, caller: Caller) -> None:
    """With the ids that they had there; what was added before is in the prompt of the next."""
    begun = (await caller.post(TALKS, {"items": [{"role": "user", "content": "My name is Alice."}]})).json()
    path = f"{TALKS}/{begun['id']}/items"
    asked = {"model": "calls", "tools": [TOOL], "max_output_tokens": 200, "conversation": begun["id"]}
    first = await made(caller, **asked)
    alone = await made(caller, **{**asked, "conversation": None, "store": False})
    assert first["usage"]["input_tokens"] > alone["usage"]["input_tokens"]
    call = next(one for one in first["output"] if one["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny"}
    second = await made(caller, **{**asked, "input": [result]})
    await until_written()
    shown = (await caller.get(f"{path}?order=asc&limit=100")).json()
    ItemList.model_validate(shown)
    ids = [one["id"] for one in first["output"] + second["output"]]
    assert [one["id"] for one in shown["data"] if one["id"] in ids] == ids
    assert [one["type"] for one in shown["data"][:2]] == ["message", "message"]
    output = next(one for one in shown["data"] if one["type"] == "function_call_output")
    assert (output["call_id"], output["output"]) == (call["call_id"], "Sunny")
    assert (await caller.get(f"{path}/{call['id']}")).json() == next(
        one for one in shown["data"] if one["id"] == call["id"]
    )
    page = (await caller.get(f"{path}?limit=2")).json()
    assert (len(page["data"]), page["has_more"]) == (2, True)


async def until_written() -> None:
    """Wait until each answer is in its message."""
    async with asyncio.timeout(60):
        while await Message.objects.filter(state="running").aexists():  # noqa: ASYNC110  (a row has no event)
            await asyncio.sleep(0.005)


async def test_items_are_added_and_deleted(talks: None, caller: Caller) -> None:
    """At the end, in order; an answer of several items is whole or not there."""
    begun = (await caller.post(TALKS, {})).json()
    path = f"{TALKS}/{begun['id']}"
    items = [
        {"role": "user", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Three."},
    ]
    added = (await caller.post(f"{path}/items", {"items": items})).json()["data"]
    assert [one["type"] for one in added] == ["message", "message", "function_call", "function_call_output"]
    refused = await refusal(await caller.delete(f"{path}/items/{added[1]['id']}"))
    assert refused == (400, "unsupported_parameter", "item_id")
    assert (await caller.delete(f"{path}/items/{added[3]['id']}")).json() == begun
    assert (await caller.delete(f"{path}/items/{added[0]['id']}")).json() == begun
    left = (await caller.get(f"{path}/items?order=asc")).json()["data"]
    assert [one["id"] for one in left] == [one["id"] for one in added[1:3]]
    for gone in (added[0]["id"], "msg_x"):
        assert (await refusal(await caller.delete(f"{path}/items/{gone}")))[:2] == (404, "item_not_found")
        assert (await refusal(await caller.get(f"{path}/items/{gone}")))[:2] == (404, "item_not_found")


@pytest.mark.parametrize(
    ("items", "code", "param"),
    [
        ([], "invalid_value", "items"),
        (None, "missing_field", "items"),
        ([{"role": "system", "content": "Be brief."}], "unsupported_content", "items[0]"),
        ([{"role": "user", "content": "x"}] * 21, "invalid_value", "items"),
        ([{"role": "user"}], "missing_field", "items[0].content"),
    ],
)
async def test_wrong_items_are_refused(talks: None, caller: Caller, items: Any, code: str, param: str) -> None:
    """With their place."""
    begun = (await caller.post(TALKS, {})).json()
    refused = await caller.post(f"{TALKS}/{begun['id']}/items", {"items": items})
    assert await refusal(refused) == (400, code, param)


async def test_a_site_without_conversations_says_so(engine: None, caller: Caller) -> None:
    """A conversation cannot be named there."""
    refused = await refusal(await caller.post(PATH, {"input": "Hi", "conversation": f"conv_{'0' * 32}"}))
    assert refused == (404, "conversations_off", "conversation")
    assert (await refusal(await caller.post(TALKS, {})))[:2] == (404, "conversations_off")

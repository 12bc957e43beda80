"""Laws of /conversations: what is asked, kept, listed, changed, rated and exported over HTTP, sockets and in Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from django.test import AsyncClient
from django.test.utils import override_settings

from streamserve import Run, acomplete, pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.models import Conversation, Message, Share
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import BadRequest, NotFound
from streamserve.protocol.events import Usage
from streamserve.protocol.requests import GenerateRequest
from streamserve.signals import answer_finished, message_rated
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.rows.test_rows import query_hook
from tests.support.checks.stream_checks import check_native, text_of
from tests.support.sites.connected import connected
from tests.support.streams.hand_made import Gate
from tests.web.sockets.conftest import connect, receive, until_end

pytestmark = pytest.mark.django_db(transaction=True)

KEEPS = {"TESTING": True, "CONVERSATIONS": True, "SHARE_LINKS": True, "TITLES": "words"}
UNKNOWN = "0" * 32
SHORT = {"max_tokens": 6, "seed": 7}
DEADLINE = 60.0


@pytest.fixture
async def keeps(site_gate: Gate) -> AsyncIterator[None]:
    """A site that keeps conversations; its gate is open until a test closes it."""
    site_gate.open()
    with override_settings(STREAMSERVE=KEEPS):
        await site.reset()
        await until_ready()
        yield
        await site.reset()


@pytest.fixture
def device(alice: Any) -> Caller:
    """A browser in which the user of `caller`'s key has logged in."""
    return Caller(user=alice)


@pytest.fixture
def other(bob: Any) -> Caller:
    return Caller(user=bob)


async def begin(caller: Caller, **fields: Any) -> str:
    """Make a conversation; return its id."""
    made = await caller.post("/conversations", fields)
    assert made.status_code == 201, made.content
    return str(made.json()["id"])


async def ask(caller: Caller, conversation: str, content: str | None = None, **fields: Any) -> dict[str, str]:
    """Ask to the end; return the ids in the headers, and the text that was streamed."""
    body = {**SHORT, **({} if content is None else {"content": content}), **fields}
    response = await caller.post(f"/conversations/{conversation}/messages", body)
    assert response.status_code == 200, response.content
    events = check_native(await body_of(response))
    assert response["X-Conversation-Id"] == conversation
    names = {"stream": "X-Stream-Id", "question": "X-Question-Id", "answer": "X-Message-Id"}
    ids = {name: response[header] for name, header in names.items() if header in response}
    await ended(ids["answer"])
    return {**ids, "text": text_of(events)}


async def ended(message: str) -> None:
    """Wait until an answer's message is written: that is after its readers have the last event."""
    async with asyncio.timeout(DEADLINE):
        while await Message.objects.filter(pk=message, state="running").aexists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def messages_of(caller: Caller, conversation: str) -> dict[str, dict[str, Any]]:
    """Return the messages of a conversation by their ids."""
    found = (await caller.get(f"/conversations/{conversation}/messages")).json()
    assert not found["has_more"]
    return {one["id"]: one for one in found["messages"]}


def request_of(stream_id: str) -> GenerateRequest:
    """Return what the model was asked."""
    stream = site.get_site().streams.find(stream_id)
    assert stream is not None
    return stream.request


def asked_of(stream_id: str) -> list[tuple[str, str]]:
    """Return what the model was asked: roles and contents."""
    return [(turn.role, turn.content) for turn in request_of(stream_id).messages or ()]


def error_of(response: Any) -> tuple[int, str, str | None]:
    error = response.json()["error"]
    return response.status_code, error["code"], error["param"]


# -- Asking -----------------------------------------------------------------------------------------------------------


async def test_the_server_holds_the_history(keeps: None, caller: Caller) -> None:
    """A second question is sent alone; its prompt has the first with its answer, word for word."""
    conversation = await begin(caller)
    first = await ask(caller, conversation, "Where is my invoice?")
    second = await ask(caller, conversation, "And when is it due?")
    assert asked_of(second["stream"]) == [
        ("user", "Where is my invoice?"),
        ("assistant", first["text"]),
        ("user", "And when is it due?"),
    ]
    messages = await messages_of(caller, conversation)
    assert [one["role"] for one in messages.values()] == ["user", "assistant", "user", "assistant"]
    answer = messages[first["answer"]]
    assert (answer["parent"], answer["state"], answer["stream"]) == (first["question"], "done", first["stream"])
    assert "".join(block["text"] for block in answer["blocks"]) == first["text"]
    assert (answer["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 6)
    found = (await caller.get(f"/conversations/{conversation}")).json()
    assert (found["leaf"], found["running"], found["title"]) == (second["answer"], False, "Where is my invoice?")


async def test_a_tree_grows_by_what_a_body_names(keeps: None, caller: Caller) -> None:
    """After a message, at the beginning, another answer, the rest of an answer: each is a sibling or a child."""
    conversation = await begin(caller)
    first = await ask(caller, conversation, "one")
    await ask(caller, conversation, "two")
    branch = await ask(caller, conversation, "three", parent=first["answer"])
    anew = await ask(caller, conversation, "four", parent=None)
    again = await ask(caller, conversation, parent=first["question"])
    rest = await ask(caller, conversation, **{"continue": first["answer"]})
    messages = await messages_of(caller, conversation)
    assert messages[branch["question"]]["parent"] == first["answer"]
    assert messages[anew["question"]]["parent"] is None
    assert (messages[again["answer"]]["parent"], "question" in again) == (first["question"], False)
    assert messages[rest["answer"]]["parent"] == first["answer"]
    assert asked_of(rest["stream"]) == [("user", "one"), ("assistant", first["text"])]
    assert request_of(rest["stream"]).continue_final_message
    assert asked_of(anew["stream"]) == [("user", "four")]


@pytest.mark.parametrize("form", [{"prompt": "hello"}, {"messages": [{"role": "user", "content": "hello"}]}])
async def test_a_stream_may_be_started_in_a_conversation(keeps: None, caller: Caller, form: dict[str, Any]) -> None:
    """POST /streams with `conversation` adds what POST messages adds."""
    conversation = await begin(caller)
    response = await caller.post("/streams", {**SHORT, **form, "conversation": conversation})
    events = check_native(await body_of(response))
    await ended(response["X-Message-Id"])
    messages = list((await messages_of(caller, conversation)).values())
    assert [one["id"] for one in messages] == [response["X-Question-Id"], response["X-Message-Id"]]
    assert messages[0]["blocks"][0]["text"] == "hello"
    assert messages[1]["blocks"][0]["text"] == text_of(events)


async def test_what_is_sent_again_with_its_key_is_asked_once(keeps: None, caller: Caller) -> None:
    """The second POST shows the first's answer and ids, also while it runs, and adds nothing."""
    conversation = await begin(caller)
    ids = []
    for _ in range(2):
        response = await caller.post(
            f"/conversations/{conversation}/messages", {**SHORT, "content": "once"}, **{"idempotency-key": "k"}
        )
        await body_of(response)
        ids.append([response[name] for name in ("X-Stream-Id", "X-Conversation-Id", "X-Question-Id", "X-Message-Id")])
    assert ids[0] == ids[1]
    assert len(await messages_of(caller, conversation)) == 2
    changed = await caller.post(
        f"/conversations/{conversation}/messages", {**SHORT, "content": "twice"}, **{"idempotency-key": "k"}
    )
    assert error_of(changed) == (422, "idempotency_key_reused", None)


async def test_of_two_equal_questions_at_once_one_is_asked(keeps: None, caller: Caller, site_gate: Gate) -> None:
    """Both POSTs with one key show one answer with its ids, while it runs."""
    conversation = await begin(caller)
    site_gate.allow(0)
    path, body = f"/conversations/{conversation}/messages", {**SHORT, "content": "once"}
    posts = [caller.post(path, body, **{"idempotency-key": "k"}) for _ in range(3)]
    answers = await asyncio.gather(*posts)
    site_gate.open()
    assert [answer.status_code for answer in answers] == [200] * 3
    for name in ("X-Stream-Id", "X-Question-Id", "X-Message-Id"):
        assert len({answer[name] for answer in answers}) == 1
    assert len({text_of(check_native(await body_of(answer))) for answer in answers}) == 1
    assert len(await messages_of(caller, conversation)) == 2


async def test_a_running_answer_is_shown_as_such(keeps: None, caller: Caller, device: Caller, site_gate: Gate) -> None:
    """To a key and to the login of one user alike; its stream is read by either, and no question follows it yet."""
    conversation = await begin(caller)
    site_gate.allow(0)
    response = await caller.post(f"/conversations/{conversation}/messages", {**SHORT, "content": "slowly"})
    [question, answer] = (await messages_of(device, conversation)).values()
    assert (question["state"], answer["state"], answer["blocks"]) == ("done", "running", [])
    assert answer["stream"] == response["X-Stream-Id"]
    assert (await device.get(f"/conversations/{conversation}")).json()["running"] is True
    refused = await device.post(f"/conversations/{conversation}/messages", {"content": "And?"})
    assert error_of(refused) == (409, "answer_running", "parent")
    site_gate.open()
    events = check_native(await body_of(await device.get(f"/streams/{answer['stream']}/events")))
    await ended(answer["id"])
    assert (await messages_of(device, conversation))[answer["id"]]["blocks"][0]["text"] == text_of(events)


async def test_a_conversation_keeps_its_model(keeps: None, caller: Caller) -> None:
    """A question that names no model goes to the conversation's."""
    with override_settings(STREAMSERVE={**KEEPS, "MODELS": {"one": {"PATH": "echo"}, "two": {"PATH": "echo"}}}):
        await site.reset()
        await until_ready()
        conversation = await begin(caller, model="two")
        first = await ask(caller, conversation, "hello")
        assert (await messages_of(caller, conversation))[first["answer"]]["model"] == "two"
        await ask(caller, conversation, "hello", model="one")
        assert (await caller.get(f"/conversations/{conversation}")).json()["model"] == "one"
        unknown = await caller.post("/conversations", {"model": "three"})
        assert error_of(unknown)[:2] == (404, "model_not_found")


async def test_a_pipeline_is_asked_in_a_conversation_and_continues_none(keeps: None, caller: Caller) -> None:
    """It gets the history as messages. An answer of its own it begins anew: `continue` is refused, and adds nothing."""

    @pipeline("helper")
    async def helper(run: Run) -> None:
        await run.say(f"You asked {run.question} after {len(run.messages) - 1} messages.")

    try:
        await site.reset()
        await until_ready()
        conversation = await begin(caller, model="helper")
        first = await ask(caller, conversation, "one")
        second = await ask(caller, conversation, "two")
        assert (first["text"], second["text"]) == ("You asked one after 0 messages.", "You asked two after 2 messages.")
        refused = await caller.post(f"/conversations/{conversation}/messages", {"continue": second["answer"]})
        assert refused.status_code == 400
        assert len(await messages_of(caller, conversation)) == 4
    finally:
        forget("helper")


WRONG = [
    ({}, "missing_field", "content"),
    ({"content": ""}, "empty_prompt", "content"),
    ({"content": 7}, "invalid_type", "content"),
    ({"content": "x" * 400_001}, "context_length_exceeded", "content"),
    ({"content": "x", "messages": []}, "unknown_field", "messages"),
    ({"content": "x", "conversation": UNKNOWN}, "unknown_field", "conversation"),
    ({"content": "x", "parent": "nothing"}, "invalid_value", "parent"),
    ({"content": "x", "parent": 1}, "invalid_type", "parent"),
    ({"content": "x", "continue": UNKNOWN}, "conflicting_fields", "continue"),
    ({"continue": UNKNOWN, "parent": UNKNOWN}, "conflicting_fields", "continue"),
    ({"parent": UNKNOWN, "attachments": [UNKNOWN]}, "conflicting_fields", "attachments"),
    ({"content": "x", "attachments": [UNKNOWN] * 9}, "invalid_value", "attachments"),
    ({"content": "x", "n": 2}, "conflicting_fields", "n"),
    ({"content": "x", "echo": True}, "conflicting_fields", "echo"),
    ({"content": "x", "continue_final_message": True}, "conflicting_fields", "continue_final_message"),
    ({"content": "x", "prompt_logprobs": 1}, "conflicting_fields", "prompt_logprobs"),
    ({"content": "x", "temprature": 1}, "unknown_field", "temprature"),
]


async def test_a_wrong_question_is_a_400_and_adds_nothing(keeps: None, caller: Caller) -> None:
    """The error names the field; a message of another conversation is not found."""
    conversation = await begin(caller)
    for body, code, param in WRONG:
        refused = await caller.post(f"/conversations/{conversation}/messages", body)
        assert error_of(refused) == (400, code, param), body
    for body in ({"content": "x", "parent": UNKNOWN}, {"parent": UNKNOWN}, {"continue": UNKNOWN}):
        refused = await caller.post(f"/conversations/{conversation}/messages", body)
        assert error_of(refused)[:2] == (404, "message_not_found"), body
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    refused = await caller.post("/streams", {"conversation": conversation, "messages": history})
    assert error_of(refused) == (400, "invalid_value", "messages")
    alone = await caller.post("/streams", {"prompt": "x", "parent": UNKNOWN})
    assert error_of(alone) == (400, "conflicting_fields", "parent")
    assert await messages_of(caller, conversation) == {}
    assert not await StreamRow.objects.aexists()


async def test_the_fields_are_unknown_where_no_answer_is_added(keeps: None, caller: Caller) -> None:
    """Jobs, OpenAI's and Anthropic's routes keep no conversation."""
    asked = {"messages": [{"role": "user", "content": "x"}], "conversation": UNKNOWN}
    for path, more in (("/v1/chat/completions", {}), ("/jobs", {"pipeline": "x"})):
        refused = await caller.post(path, {**asked, **more})
        assert refused.status_code == 400, (path, refused.content)


async def test_a_socket_starts_in_a_conversation(keeps: None, caller: Caller, alice_key: str) -> None:
    """`started` has the ids; an input to such a stream is refused, as it would leave the conversation."""
    conversation = await begin(caller)
    socket = connect(alice_key)
    assert (await socket.connect())[0]
    await socket.send_json_to({"type": "start", "request": {**SHORT, "prompt": "hello", "conversation": conversation}})
    started = await receive(socket)
    await until_end(socket)
    messages = await messages_of(caller, conversation)
    assert (started["conversation"], [started["question"], started["message"]]) == (conversation, list(messages))
    await socket.send_json_to({"type": "input", "id": started["id"], "text": "No, wait."})
    refused = await receive(socket)
    assert refused["error"]["code"] == "in_conversation"
    await socket.send_json_to({"type": "start", "request": {"prompt": "x", "conversation": UNKNOWN}})
    assert (await receive(socket))["error"]["code"] == "conversation_not_found"
    await socket.disconnect()


async def test_python_code_asks_in_a_conversation(keeps: None, alice: Any, caller: Caller) -> None:
    """`conversation` is an option of `acomplete`, for its owner alone."""
    conversation = await begin(caller)
    answer = await acomplete("hello", user=alice, conversation=conversation, **SHORT)
    await ended(answer.message_id)
    messages = await messages_of(caller, conversation)
    assert messages[answer.message_id]["blocks"][0]["text"] == answer.text
    again = await acomplete(
        user=alice, conversation=conversation, parent=messages[answer.message_id]["parent"], **SHORT
    )
    assert again.text == answer.text
    with pytest.raises(NotFound):
        await acomplete("hello", tenant="another", conversation=conversation)
    with pytest.raises(BadRequest, match="question alone"):
        await acomplete("hello", system="Be short.", user=alice, conversation=conversation)


async def test_the_next_question_may_come_at_once(keeps: None, alice: Any, caller: Caller) -> None:
    """Whoever has read an answer's end need not wait until its message is written."""
    conversation = await begin(caller)
    answers = [
        await acomplete(text, user=alice, conversation=conversation, **SHORT) for text in ("one", "two", "three")
    ]
    assert [content for role, content in asked_of(answers[2].stream_id) if role == "assistant"] == [
        answer.text for answer in answers[:2]
    ]


# -- Who may ----------------------------------------------------------------------------------------------------------


def addresses(conversation: str, message: str, share: str) -> list[tuple[str, str, Any]]:
    """Return a call of every route of one conversation."""
    head = f"/conversations/{conversation}"
    return [
        ("GET", head, None),
        ("POST", head, {"title": "mine now"}),
        ("POST", head, {"deleted": False}),
        ("GET", f"{head}/messages", None),
        ("POST", f"{head}/messages", {"content": "hello"}),
        ("POST", f"{head}/messages/{message}", {"rating": 1}),
        ("GET", f"{head}/export", None),
        ("GET", f"{head}/shares", None),
        ("POST", f"{head}/shares", {}),
        ("DELETE", f"{head}/shares/{share}", None),
        ("DELETE", head, None),
        ("POST", "/streams", {"prompt": "hello", "conversation": conversation}),
    ]


async def call(caller: Caller, method: str, path: str, body: Any) -> Any:
    if method == "GET":
        return await caller.get(path)
    return await (caller.delete(path) if method == "DELETE" else caller.post(path, body))


async def test_another_owner_finds_nothing(keeps: None, caller: Caller, other: Caller, lonely_key: str) -> None:
    """Another user and a key without a user get the same 404 as for an unknown id, at every route."""
    conversation = await begin(caller)
    asked = await ask(caller, conversation, "hello")
    share = (await caller.post(f"/conversations/{conversation}/shares")).json()["id"]
    for stranger in (other, Caller(key=lonely_key)):
        assert (await stranger.get("/conversations")).json()["conversations"] == []
        for method, path, body in addresses(conversation, asked["answer"], share):
            theirs = await call(stranger, method, path, body)
            unknown = await call(
                stranger,
                method,
                path.replace(conversation, UNKNOWN),
                body and json.loads(json.dumps(body).replace(conversation, UNKNOWN)),
            )
            assert error_of(theirs) == error_of(unknown) == (404, "conversation_not_found", "conversation"), path
    assert (await caller.get(f"/conversations/{conversation}")).json()["title"] == "hello"


async def test_visitors_without_a_login_have_no_conversations(keeps: None) -> None:
    """Also where they may ask: theirs are in their browsers."""
    with override_settings(STREAMSERVE={**KEEPS, "ANONYMOUS": True}):
        await site.reset()
        await until_ready()
        visitor = Caller()
        for method, path, body in addresses(UNKNOWN, UNKNOWN, UNKNOWN):
            assert error_of(await call(visitor, method, path, body))[:2] == (401, "unauthorized"), path
        assert (await visitor.get("/conversations")).status_code == 401


async def test_a_site_that_keeps_none_answers_404(engine: None, caller: Caller) -> None:
    """The message names the setting. Without the field /streams asks as ever."""
    for method, path, body in addresses(UNKNOWN, UNKNOWN, UNKNOWN):
        code = "share_links_off" if "/shares" in path else "conversations_off"
        response = await call(caller, method, path, body)
        assert error_of(response)[:2] == (404, code), path
        assert "CONVERSATIONS" in response.json()["error"]["message"]
    assert (await caller.post("/streams", {"prompt": "hello", **SHORT})).status_code == 200


# -- Lists and changes ------------------------------------------------------------------------------------------------


async def test_a_list_is_read_in_pages(keeps: None, caller: Caller) -> None:
    """`after` is the last id; a page that has not changed is a 304."""
    made = [await begin(caller, title=f"About {number}", source="api") for number in range(5)]
    first = (await caller.get("/conversations?limit=2&source=api")).json()
    assert [one["id"] for one in first["conversations"]] == [made[4], made[3]]
    assert (first["has_more"], first["last_id"]) == (True, made[3])
    rest = (await caller.get(f"/conversations?limit=100&after={made[3]}")).json()
    assert ([one["id"] for one in rest["conversations"]], rest["has_more"]) == (made[2::-1], False)
    found = (await caller.get("/conversations?q=bout+2")).json()["conversations"]
    assert [one["title"] for one in found] == ["About 2"]


@pytest.mark.parametrize("rest", ["", "/messages"])
async def test_what_has_not_changed_is_a_304(keeps: None, caller: Caller, rest: str) -> None:
    """A page that polls sends `If-None-Match`; what has changed comes whole."""
    conversation = await begin(caller)
    path = f"/conversations/{conversation}{rest}" if rest else "/conversations"
    etag = (await caller.get(path))["ETag"]
    same = await caller.get(path, **{"if-none-match": f'"other", W/{etag}'})
    assert (same.status_code, same["ETag"], same.content) == (304, etag, b"")
    await ask(caller, conversation, "hello")
    changed = await caller.get(path, **{"if-none-match": etag})
    assert changed.status_code == 200
    assert changed["ETag"] != etag


async def test_a_conversation_is_renamed_and_pinned(keeps: None, caller: Caller) -> None:
    """A title that its owner gave stays; a pinned conversation is first; the branch shown is a message's."""
    old, new = await begin(caller), await begin(caller)
    changed = await caller.post(f"/conversations/{old}", {"title": "  My \n title ", "pinned": True})
    assert (changed.json()["title"], changed.json()["pinned"]) == ("My title", True)
    first, second = await ask(caller, old, "one"), await ask(caller, old, "two")
    shown = await caller.post(f"/conversations/{old}", {"leaf": first["answer"]})
    assert (shown.json()["leaf"], shown.json()["title"]) == (first["answer"], "My title")
    third = await ask(caller, old, "three")
    assert (await messages_of(caller, old))[third["question"]]["parent"] == first["answer"] != second["answer"]
    assert [one["id"] for one in (await caller.get("/conversations")).json()["conversations"]] == [old, new]


async def test_a_deleted_conversation_can_be_brought_back(keeps: None, caller: Caller, site_gate: Gate) -> None:
    """A DELETE stops what runs, and hides all of it; `{"deleted": false}` undoes it."""
    conversation = await begin(caller, title="Mine")
    first = await ask(caller, conversation, "one")
    site_gate.allow(0)
    running = await caller.post(f"/conversations/{conversation}/messages", {**SHORT, "content": "two"})
    deleting = asyncio.create_task(caller.delete(f"/conversations/{conversation}"))
    site_gate.open()
    assert (await deleting).json() == {"id": conversation, "deleted": True}
    await body_of(running)
    assert (await caller.get("/conversations")).json()["conversations"] == []
    for method, path, body in addresses(conversation, first["answer"], UNKNOWN):
        if body != {"deleted": False}:
            assert (await call(caller, method, path, body)).status_code == 404, path
    back = await caller.post(f"/conversations/{conversation}", {"deleted": False})
    assert back.json()["title"] == "Mine"
    assert len(await messages_of(caller, conversation)) == 4


async def test_an_answer_is_rated(keeps: None, caller: Caller) -> None:
    """Good or bad with a comment, or no more; a question is not."""
    conversation = await begin(caller)
    asked = await ask(caller, conversation, "hello")
    path = f"/conversations/{conversation}/messages/{asked['answer']}"
    rated = (await caller.post(path, {"rating": -1, "comment": "Wrong year."})).json()
    assert (rated["rating"], rated["comment"]) == (-1, "Wrong year.")
    rated = (await caller.post(path, {"rating": None})).json()
    assert (rated["rating"], rated["comment"]) == (None, "")
    for body, code in (({}, "missing_field"), ({"rating": 2}, "invalid_value"), ({"rating": True}, "invalid_value")):
        assert error_of(await caller.post(path, body)) == (400, code, "rating")
    assert error_of(await caller.post(path, {"rating": None, "comment": "x"}))[:2] == (400, "conflicting_fields")
    question = await caller.post(path.replace(asked["answer"], asked["question"]), {"rating": 1})
    assert question.status_code == 400
    unknown = await caller.post(path.replace(asked["answer"], UNKNOWN), {"rating": 1})
    assert error_of(unknown)[:2] == (404, "message_not_found")


async def test_receivers_are_told_of_the_message(keeps: None, caller: Caller, alice: Any) -> None:
    """An answer's end is told of when its message is written, in that transaction; a rating with its conversation."""
    told: list[tuple[Any, ...]] = []

    def note_end(message_id: str, conversation_id: str, usage: Usage, **others: Any) -> None:
        row = Message.objects.get(pk=message_id)
        told.append((conversation_id, message_id, row.state, row.completion_tokens == usage.completion_tokens))

    def note_rating(message_id: str, conversation_id: str, rating: int, comment: str, **others: Any) -> None:
        told.append((conversation_id, message_id, others["user_id"], others["stream_id"], rating, comment))

    conversation = await begin(caller)
    with connected(answer_finished, note_end), connected(message_rated, note_rating):
        asked = await ask(caller, conversation, "hello")
        path = f"/conversations/{conversation}/messages/{asked['answer']}"
        assert (await caller.post(path, {"rating": -1, "comment": "Wrong."})).status_code == 200
        assert (await caller.post(path.replace(asked["answer"], asked["question"]), {"rating": 1})).status_code == 400
    assert told == [
        (conversation, asked["answer"], "done", True),
        (conversation, asked["answer"], alice.pk, asked["stream"], -1, "Wrong."),
    ]


async def test_a_conversation_is_exported(keeps: None, caller: Caller) -> None:
    """As Markdown: the branch shown, with its sources; as JSON: everything."""
    conversation = await begin(caller, title="Late fees / ünder: 1")
    first = await ask(caller, conversation, "Where?")
    again = await ask(caller, conversation, parent=first["question"])
    cited = {"source": "help", "id": "7", "title": "Bills [new]", "url": "/help/7/"}
    row = await Message.objects.aget(pk=again["answer"])
    row.content = json.dumps({**json.loads(row.content), "citations": [cited, cited]})
    await row.asave()
    markdown = await caller.get(f"/conversations/{conversation}/export")
    assert markdown["Content-Disposition"] == 'attachment; filename="Late-fees-nder-1.md"'
    text = markdown.content.decode()
    assert text.startswith("# Late fees / ünder: 1\n")
    assert "## You\n\nWhere?\n" in text
    assert text.endswith(f"{again['text']}\n\n1. [Bills \\[new\\]](</help/7/>)\n")
    assert text.count("## echo") == 1
    whole = (await caller.get(f"/conversations/{conversation}/export?format=json")).json()
    assert whole["conversation"]["id"] == conversation
    assert [one["id"] for one in whole["messages"]] == [first["question"], first["answer"], again["answer"]]
    assert error_of(await caller.get(f"/conversations/{conversation}/export?format=pdf"))[0] == 400


@pytest.mark.parametrize(
    "path",
    [
        "?limit=0", "?limit=101", "?limit=x", "?after=x", "?after=%00", "?page=2", "?q=" + "x" * 201, "?source=A%20B",
        "/" + UNKNOWN + "/messages?limit=0", "/" + UNKNOWN + "/shares?limit=999", "/" + UNKNOWN + "/export?as=x",
    ],
)  # fmt: skip
async def test_a_wrong_parameter_is_a_400(keeps: None, caller: Caller, path: str) -> None:
    """Before anything is looked up."""
    assert error_of(await caller.get("/conversations" + path))[0] == 400


async def test_an_unknown_page_is_a_404(keeps: None, caller: Caller) -> None:
    """`after` is an id of the list; other addresses below /conversations are none."""
    conversation = await begin(caller)
    assert (await caller.get(f"/conversations?after={UNKNOWN}")).status_code == 404
    assert (await caller.get(f"/conversations/{conversation}/messages?after={UNKNOWN}")).status_code == 404
    assert error_of(await caller.get("/conversations/nothing"))[:2] == (404, "unknown_url")


async def test_a_head_is_the_get_without_its_body(keeps: None, caller: Caller) -> None:
    """Of every list, and of the export."""
    conversation = await begin(caller, title="x")
    for rest in (
        "",
        f"/{conversation}",
        f"/{conversation}/messages",
        f"/{conversation}/export",
        f"/{conversation}/shares",
    ):
        got = await caller.get("/conversations" + rest)
        head = await caller.client.head("/conversations" + rest, headers=caller.headers)
        assert (head.status_code, head.content, int(head["Content-Length"])) == (200, b"", len(got.content)), rest


# -- Share links ------------------------------------------------------------------------------------------------------


async def test_a_link_shows_the_branch_as_it_was(keeps: None, caller: Caller) -> None:
    """To anyone, as a page and as JSON, without ids; later questions are not in it."""
    conversation = await begin(caller, title="<Fees>")
    first = await ask(caller, conversation, "<b>Where?</b>")
    made = await caller.post(f"/conversations/{conversation}/shares", {"expires_in": 3600})
    assert made.status_code == 201
    link = made.json()
    await ask(caller, conversation, "A secret question")
    page = await AsyncClient().get(link["url"])
    text = page.content.decode()
    assert page.status_code == 200
    assert "&lt;b&gt;Where?&lt;/b&gt;" in text
    assert "&lt;Fees&gt;" in text
    assert first["text"] in text
    assert "secret" not in text
    assert conversation not in text
    assert (page["X-Robots-Tag"], page["Referrer-Policy"]) == ("noindex, nofollow", "no-referrer")
    assert "default-src 'none'" in page["Content-Security-Policy"]
    assert page["Cache-Control"] == "private, no-store"
    shared = (await AsyncClient().get(link["url"] + "?format=json")).json()
    assert [(one["role"], one["text"]) for one in shared["messages"]] == [
        ("user", "<b>Where?</b>"),
        ("assistant", first["text"]),
    ]
    assert "Set-Cookie" not in page
    assert (await AsyncClient().post(link["url"])).status_code == 405


async def test_a_link_that_has_ended_is_a_404(keeps: None, caller: Caller) -> None:
    """Revoked, expired, deleted, of a site that turned links off, or never made: all the same."""
    conversation = await begin(caller)
    empty = await caller.post(f"/conversations/{conversation}/shares")
    assert error_of(empty)[:2] == (400, "nothing_to_share")
    await ask(caller, conversation, "hello")
    revoked, expired, deleted = [(await caller.post(f"/conversations/{conversation}/shares")).json() for _ in range(3)]
    for _ in range(2):
        ended = await caller.delete(f"/conversations/{conversation}/shares/{revoked['id']}")
        assert ended.json() == {"id": revoked["id"], "revoked": True}
    await Share.objects.filter(pk=expired["id"]).aupdate(expires_at="2026-01-01T00:00:00Z")
    listed = (await caller.get(f"/conversations/{conversation}/shares")).json()
    assert [one["id"] for one in listed["shares"]] == [deleted["id"]]
    assert "url" not in listed["shares"][0]
    assert (await AsyncClient().get(deleted["url"])).status_code == 200
    await caller.delete(f"/conversations/{conversation}")
    for url in (revoked["url"], expired["url"], deleted["url"], "/shared/" + "x" * 43, "/shared/%00"):
        assert (await AsyncClient().get(url)).status_code == 404, url
        answered = await AsyncClient().get(url + "?format=json")
        assert error_of(answered)[:2] == (404, "share_not_found")
    await caller.post(f"/conversations/{conversation}", {"deleted": False})
    assert (await AsyncClient().get(deleted["url"])).status_code == 200
    with override_settings(STREAMSERVE={**KEEPS, "SHARE_LINKS": False}):
        await site.reset()
        assert (await AsyncClient().get(deleted["url"])).status_code == 404
        off = await caller.get(f"/conversations/{conversation}/shares")
        assert error_of(off)[:2] == (404, "share_links_off")


async def test_a_links_token_is_not_kept(keeps: None, caller: Caller) -> None:
    """Neither in its row nor in a list; it has more than 128 bits, and expires within a year."""
    conversation = await begin(caller)
    await ask(caller, conversation, "hello")
    link = (await caller.post(f"/conversations/{conversation}/shares")).json()
    token = link["url"].rpartition("/")[2]
    assert len(token) == 43
    [row] = [one async for one in Share.objects.values()]
    assert token not in str(row)
    for wrong in (0, 59, 10**9, "1h", True):
        refused = await caller.post(f"/conversations/{conversation}/shares", {"expires_in": wrong})
        assert error_of(refused)[2] == "expires_in", wrong


# -- How many queries -------------------------------------------------------------------------------------------------


MOST_QUERIES = 4
NUM_MESSAGES = 300


@pytest.fixture
def queries() -> Iterator[list[str]]:
    """The statements that are sent, by any thread."""
    statements: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        statements.append(sql)
        return execute(sql, params, many, context)

    with query_hook(note):
        yield statements


@pytest.fixture
def many(alice: Any) -> str:
    """A conversation of many messages and links, among others of the same user."""
    owner = {"owner": f"user:{alice.pk}", "tenant": f"user:{alice.pk}", "user": alice}
    Conversation.objects.bulk_create([Conversation(title=f"{number}", **owner) for number in range(200)])
    conversation = Conversation.objects.create(**owner)
    content = json.dumps({"blocks": [{"index": 0, "kind": "text", "text": "x"}], "citations": [], "steps": []})
    roles = ("user", "assistant") * (NUM_MESSAGES // 2)
    Message.objects.bulk_create([Message(conversation=conversation, role=role, content=content) for role in roles])
    Share.objects.bulk_create([Share(conversation=conversation, digest=f"{number}") for number in range(90)])
    return str(conversation.pk)


async def test_every_list_takes_few_queries(many: str, keeps: None, device: Caller, queries: list[str]) -> None:
    """At most four on its rows, beside those of the login, for its first page as for a later."""
    for path in ("/conversations", f"/conversations/{many}/messages", f"/conversations/{many}/shares", "/attachments"):
        after = ""
        for _ in range(2):
            queries.clear()
            page = (await device.get(f"{path}?limit=20{after}")).json()
            own = [query for query in queries if "streamserve_" in query]
            assert 0 < len(own) <= MOST_QUERIES, (path, own)
            after = f"&after={page['last_id']}" if page["has_more"] else ""

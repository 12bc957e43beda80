"""Laws of approvals over HTTP, sockets, jobs and in Python: who may answer, once, and what goes on in which place."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve import Run, acomplete, aenqueue_job, pipeline, run_pipeline, tool
from streamserve.clients.pipeline.client import forget
from streamserve.models import Message
from streamserve.protocol.errors import Answered
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import check_native, parse_sse, text_of
from tests.web.sockets.conftest import connect, until_end

pytestmark = pytest.mark.django_db(transaction=True)

CALL = '<tool_call>\n{"name": "pay", "arguments": {"euros": 5}}\n</tool_call>'
ECHO = {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"Paid": "It is paid.", "refused": "As you like.", "Pay": CALL}}
SITE = {"TESTING": True, "MODELS": {"echo": ECHO}, "CONVERSATIONS": True, "TITLES": "words"}
ASKED = {"messages": [{"role": "user", "content": "Pay my bill"}], "model": "shop"}
DEADLINE = 60.0
PAID: Counter[str] = Counter()


@tool(confirm=lambda euros: f"Pay {euros} euros?")
def pay(euros: int) -> str:
    """Pay a bill."""
    PAID["pay"] += 1
    return f"Paid {euros} euros."


async def shop(run: Run) -> None:
    run.cite("help", id="1")
    await run.generate(tools=[pay], max_tokens=200)


@pytest.fixture
async def caller(transactional_db: Any, alice_key: str) -> AsyncIterator[Caller]:
    PAID.clear()
    pipeline("shop")(shop)
    try:
        with override_settings(STREAMSERVE=SITE):
            await site.reset()
            await until_ready()
            yield Caller(key=alice_key)
            await site.reset()
    finally:
        forget("shop")


@pytest.fixture
def stranger(bob: Any) -> Caller:
    return Caller(user=bob)


async def interrupted(caller: Caller, path: str = "/streams", **fields: Any) -> tuple[str, str]:
    """Ask; return the stream's id, and the id of the call that it asks about."""
    response = await caller.post(path, {**ASKED, **fields})
    events = check_native(await body_of(response))
    (asked,) = [frame.json for frame in events if frame.event == "approval"]
    assert (asked["name"], asked["message"]) == ("pay", "Pay 5 euros?")
    assert json.loads(asked["arguments"]) == {"euros": 5}
    assert events[-1].json["finish_reason"] == "interrupt"
    return response["X-Stream-Id"], asked["id"]


def answer(call: str, *, allow: bool = True, **more: Any) -> dict[str, Any]:
    return {"approvals": [{"id": call, "allow": allow, **more}]}


async def test_an_answer_continues_the_run_in_a_stream_of_its_own(caller: Caller) -> None:
    """The state of the first stream has the question; the second has the result and the answer, and no more."""
    stream_id, call = await interrupted(caller)
    state = (await caller.get(f"/streams/{stream_id}")).json()
    assert (state["finish_reason"], [one["id"] for one in state["approvals"]]) == ("interrupt", [call])
    response = await caller.post(f"/streams/{stream_id}/approvals", answer(call))
    assert response["X-Stream-Id"] != stream_id
    events = check_native(await body_of(response))
    assert [(one.json["kind"], one.json.get("id")) for one in events if one.event == "block_start"] == [
        ("tool_result", call),
        ("text", None),
    ]
    assert text_of(events) == "It is paid."
    assert not [one for one in events if one.event in ("citation", "approval")]
    assert PAID["pay"] == 1


async def test_an_interrupt_has_one_answer(caller: Caller) -> None:
    """A second answer is a 409, whatever it says; the same answer with the same key is the same stream."""
    stream_id, call = await interrupted(caller)
    keyed = {"idempotency-key": "k1"}
    path = f"/streams/{stream_id}/approvals"
    first = await caller.post(path, answer(call), **keyed)
    text = text_of(check_native(await body_of(first)))
    again = await caller.post(path, answer(call), **keyed)
    assert again["X-Stream-Id"] == first["X-Stream-Id"]
    assert text_of(check_native(await body_of(again))) == text
    for body, headers in ((answer(call), {}), (answer(call, allow=False), keyed), (answer("other"), {})):
        refused = await caller.post(path, body, **headers)
        assert refused.status_code == 409, refused.content
        assert refused.json()["error"]["code"] == "approval_answered"
        assert first["X-Stream-Id"] in refused.json()["error"]["message"]
    assert PAID["pay"] == 1


async def test_two_answers_at_once_run_the_tool_once(caller: Caller) -> None:
    """One stream begins, and the others are refused."""
    stream_id, call = await interrupted(caller)
    path = f"/streams/{stream_id}/approvals"
    replies = await asyncio.gather(*(caller.post(path, answer(call)) for _ in range(4)))
    assert sorted(reply.status_code for reply in replies) == [200, 409, 409, 409]
    (begun,) = [reply for reply in replies if reply.status_code == 200]
    assert text_of(check_native(await body_of(begun))) == "It is paid."
    assert PAID["pay"] == 1


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_field", "approvals"),
        ({"approvals": []}, "invalid_value", "approvals"),
        ({"approvals": [7]}, "invalid_type", "approvals[0]"),
        ({"approvals": [{"id": "CALL"}]}, "missing_field", "approvals[0].allow"),
        ({"approvals": [{"id": "CALL", "allow": 1}]}, "invalid_type", "approvals[0].allow"),
        ({"approvals": [{"id": "CALL", "allow": True, "why": ""}]}, "unknown_field", "approvals[0].why"),
        ({"approvals": [{"id": "other", "allow": True}]}, "unknown_call", "approvals[0].id"),
        ({"approvals": 2 * [{"id": "CALL", "allow": True}]}, "unknown_call", "approvals[1].id"),
        ({"approvals": [{"id": "CALL", "allow": True}], "model": "x"}, "unknown_field", "model"),
    ],
)
async def test_a_wrong_answer_names_its_field(caller: Caller, body: dict[str, Any], code: str, param: str) -> None:
    """Nothing runs, and the right answer is taken after it."""
    stream_id, call = await interrupted(caller)
    body = json.loads(json.dumps(body).replace("CALL", call))
    refused = await caller.post(f"/streams/{stream_id}/approvals", body)
    assert refused.status_code == 400, refused.content
    assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == (code, param)
    assert PAID["pay"] == 0
    if code == "unknown_call":
        assert (await caller.post(f"/streams/{stream_id}/approvals", answer(call))).status_code == 200


async def test_what_asks_nothing_takes_no_answer(caller: Caller, stranger: Caller) -> None:
    """Another's stream is a 404, a whole answer a 400, and so is a stream that waits for too long a 410."""
    stream_id, call = await interrupted(caller)
    other = await stranger.post(f"/streams/{stream_id}/approvals", answer(call))
    assert (other.status_code, other.json()["error"]["code"]) == (404, "stream_not_found")
    whole = await caller.post("/streams", {"prompt": "hello", "model": "echo", "max_tokens": 3})
    await body_of(whole)
    refused = await caller.post(f"/streams/{whole['X-Stream-Id']}/approvals", answer(call))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_interrupted")
    await site.get_site().streams.interrupts.drop(stream_id)
    late = await caller.post(f"/streams/{stream_id}/approvals", answer(call))
    assert (late.status_code, late.json()["error"]["code"]) == (410, "approval_expired")


async def test_in_a_conversation_the_rest_is_a_child_of_the_answer(caller: Caller) -> None:
    """The message keeps what is asked; the rest follows it, and both are one turn of the next prompt."""
    made = (await caller.post("/conversations", {"model": "shop"})).json()["id"]
    response = await caller.post(f"/conversations/{made}/messages", {"content": "Pay my bill"})
    events = check_native(await body_of(response))
    (asked,) = [frame.json for frame in events if frame.event == "approval"]
    path = f"/streams/{response['X-Stream-Id']}/approvals"
    rest = await caller.post(path, answer(asked["id"]))
    assert rest["X-Conversation-Id"] == made
    assert text_of(check_native(await body_of(rest))) == "It is paid."
    async with asyncio.timeout(DEADLINE):
        while await Message.objects.filter(state="running").aexists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    messages = (await caller.get(f"/conversations/{made}/messages")).json()["messages"]
    question, first, second = messages
    assert [one["id"] for one in first["approvals"]] == [asked["id"]]
    assert "approvals" not in second
    assert (first["parent"], second["parent"], second["id"]) == (question["id"], first["id"], rest["X-Message-Id"])
    assert (await caller.get(f"/conversations/{made}")).json()["leaf"] == second["id"]


async def test_over_a_socket(caller: Caller, alice_key: str) -> None:
    """`approve` continues on the same socket: `started` names the stream before; a wrong answer is an error."""
    socket = connect(alice_key)
    assert (await socket.connect())[0]
    await socket.send_json_to({"type": "start", "request": ASKED})
    events = await until_end(socket)
    (asked,) = [one["data"] for one in events if one.get("event") == "approval"]
    stream_id = events[0]["id"]
    await socket.send_json_to({"type": "approve", "id": stream_id, "ref": "a", **answer("other")})
    assert json.loads(await socket.receive_from(timeout=30))["error"]["code"] == "unknown_call"
    said = answer(asked["id"], allow=False, message="Not today.")
    await socket.send_json_to({"type": "approve", "id": stream_id, "ref": "b", **said})
    events = await until_end(socket)
    assert (events[0]["type"], events[0]["continues"], events[0]["ref"]) == ("started", stream_id, "b")
    text = "".join(one["data"]["text"] for one in events if one.get("event") == "token")
    assert text == "The user has refused this call. Not today.As you like."
    await socket.disconnect()
    assert PAID["pay"] == 0


async def test_from_python(caller: Caller) -> None:
    """`approvals` has the questions of an answer and of a run; `continues` goes on, once."""
    first = await acomplete("Pay my bill", model="shop", tenant="t")
    (asked,) = first.approvals
    assert (first.finish_reason, asked["message"]) == ("interrupt", "Pay 5 euros?")
    given = {"continues": first.stream_id, "approvals": [{"id": asked["id"], "allow": True}]}
    assert str(await acomplete(tenant="t", **given)) == "It is paid."
    with pytest.raises(Answered):
        await acomplete(tenant="t", **given)
    run = await run_pipeline("shop", "Pay my bill", tenant="t")
    assert (run.finish_reason, len(run.approvals)) == ("interrupt", 1)
    given = {"continues": run.stream_id, "approvals": [{"id": run.approvals[0]["id"], "allow": False}]}
    assert str(await run_pipeline("shop", tenant="t", **given)) == "As you like."
    assert PAID["pay"] == 1


async def ended(caller: Caller, job_id: str) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE):
        while (job := (await caller.get(f"/jobs/{job_id}")).json())["status"] in ("queued", "running"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return dict(job)


async def test_a_job_that_asks_is_done_and_another_job_continues_it(caller: Caller) -> None:
    """Its result has the question; the job that continues it gives the rest, and the question has one answer."""
    begun = (await caller.post("/jobs", {"pipeline": "shop", "messages": ASKED["messages"]})).json()
    job = await ended(caller, begun["job_id"])
    assert (job["status"], job["result"]["finish_reason"]) == ("done", "interrupt")
    (asked,) = job["result"]["approvals"]
    body = {"continues": job["stream_id"], **answer(asked["id"])}
    wrong = await caller.post("/jobs", {**body, "prompt": "x"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
    queued = await caller.post("/jobs", body, **{"idempotency-key": "j1"})
    assert queued.status_code == 202, queued.content
    rest = await ended(caller, queued.json()["job_id"])
    assert (rest["status"], rest["result"]["text"], rest["result"]["citations"]) == ("done", "It is paid.", [])
    assert PAID["pay"] == 1
    again = await caller.post("/jobs", body, **{"idempotency-key": "j1"})
    assert again.json()["job_id"] == rest["job_id"]
    for path, said in (("/jobs", body), (f"/streams/{job['stream_id']}/approvals", answer(asked["id"]))):
        assert (await caller.post(path, said)).status_code == 409


async def test_a_job_continues_what_a_page_has_begun(caller: Caller) -> None:
    """Streams and jobs continue each other; Python code queues such a job too."""
    stream_id, call = await interrupted(caller)
    queued = await caller.post("/jobs", {"continues": stream_id, **answer(call)})
    assert (await ended(caller, queued.json()["job_id"]))["result"]["text"] == "It is paid."
    first = await aenqueue_job("shop", "Pay my bill", tenant="t")
    async with asyncio.timeout(DEADLINE):
        while (found := await site.get_site().work.jobs.find(_tenant(), first.id)).status in ("queued", "running"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert found.result is not None
    given = [{"id": found.result["approvals"][0]["id"], "allow": False}]
    rest = await aenqueue_job("shop", tenant="t", continues=first.stream_id, approvals=given)
    assert rest.pipeline == "shop"


def _tenant() -> Any:
    from streamserve.api.call import Caller as Owner

    return Owner("site:t")


async def test_clients_of_other_apis_see_a_whole_answer_with_the_question(caller: Caller) -> None:
    """OpenAI's and Anthropic's shapes have `approvals`; the id of the answer names the stream that is continued."""
    chat = (await caller.post("/v1/chat/completions", ASKED)).json()
    (asked,) = chat["choices"][0]["message"]["approvals"]
    assert chat["choices"][0]["finish_reason"] == "stop"
    stream_id = chat["id"].removeprefix("chatcmpl-")
    rest = await caller.post(f"/streams/{stream_id}/approvals", answer(asked["id"]))
    assert text_of(check_native(await body_of(rest))) == "It is paid."
    message = (await caller.post("/v1/messages", {**ASKED, "max_tokens": 100})).json()
    assert (message["stop_reason"], message["approvals"][0]["name"]) == ("end_turn", "pay")
    plain = await caller.post("/streams", {**ASKED, "format": "tokens"})
    assert parse_sse(await body_of(plain))[-1].data == "[DONE]"

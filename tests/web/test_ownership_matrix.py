"""Who gets which status at which route: every route of `ROUTES`, asked by every kind of caller for alice's objects.

A new route needs its lines in `MATRIX`: METHOD, name, and a status for each column. What its path needs of alice's is
in `OBJECTS`, its body in `BODIES`. A cell is what a caller gets who asks for what alice has made:

    visitor   no login (ANONYMOUS is on)                alice's   a key of alice's
    alice     who has made it                           bob's     a key of bob's
    bob       any other user                            revoked   a revoked key of alice's
    mate      a user of alice's team (TENANT)           ops       a key of alice's with the scope `ops` alone
    staff     is_staff, without any permission          narrow    a key of alice's whose list lacks the model
                                                        denied    a user who may not use the model (PERMISSION)

A batch that has ended cannot be cancelled: 400. `/mcp` answers a message that it could read with 200, also by an error
(a tool that is not there for the caller), and sends nothing unasked: 405.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test.utils import override_settings

from streamserve import Run, pipeline
from streamserve.api.routes import ROUTES, Route
from streamserve.clients.pipeline.client import forget
from streamserve.models import ApiKey, Conversation, Message, Stream
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.sites.batch_runs import CHAT, jsonl, line
from tests.web.conftest import make_caller

pytestmark = pytest.mark.django_db(transaction=True)

MATRIX = """
method name                      visitor alice bob mate staff | alice's bob's revoked ops narrow denied
POST   streams                       200   200 200  200   200 |     200   200     401 403    404    404
GET    new_stream                    200   200 200  200   200 |     200   200     401 403    404    404
GET    stream                        404   200 404  404   404 |     200   404     401 403    404    404
GET    stream_events                 404   200 404  404   404 |     200   404     401 403    404    404
GET    stream_log                    404   200 404  404   404 |     200   404     401 403    404    404
POST   stop_stream                   404   200 404  404   404 |     200   404     401 403    404    404
POST   approve_stream                404   400 404  404   404 |     400   404     401 403    404    404
POST   ack_stream                    200   200 200  200   200 |     200   200     401 403    200    200
POST   stream_timings                404   200 404  404   404 |     200   404     401 403    404    404
GET    watch_stream                  401   404 404  404   404 |     403   403     401 403    403    404
GET    pipelines                     200   200 200  200   200 |     200   200     401 403    200    200
GET    pipeline                      200   200 200  200   200 |     200   200     401 403    404    404
POST   pipeline                      200   200 200  200   200 |     200   200     401 403    404    404
GET    jobs                          200   200 200  200   200 |     200   200     401 403    200    200
POST   jobs                          202   202 202  202   202 |     202   202     401 403    404    404
GET    job                           404   200 404  404   404 |     200   404     401 403    200    404
GET    job_events                    404   200 404  404   404 |     200   404     401 403    404    404
POST   cancel_job                    404   200 404  404   404 |     200   404     401 403    200    404
GET    conversations                 401   200 200  200   200 |     200   200     401 403    200    200
POST   conversations                 401   201 201  201   201 |     201   201     401 403    404    404
GET    conversation                  401   200 404  404   404 |     200   404     401 403    200    404
POST   conversation                  401   200 404  404   404 |     200   404     401 403    200    404
DELETE conversation                  401   200 404  404   404 |     200   404     401 403    200    404
GET    conversation_messages         401   200 404  404   404 |     200   404     401 403    200    404
POST   conversation_messages         401   200 404  404   404 |     200   404     401 403    404    404
POST   conversation_message          401   200 404  404   404 |     200   404     401 403    200    404
GET    export_conversation           401   200 404  404   404 |     200   404     401 403    200    404
GET    conversation_shares           401   200 404  404   404 |     200   404     401 403    200    404
POST   conversation_shares           401   201 404  404   404 |     201   404     401 403    201    404
DELETE conversation_share            401   200 404  404   404 |     200   404     401 403    200    404
GET    attachments                   401   200 200  200   200 |     200   200     401 403    200    200
POST   attachments                   401   201 201  201   201 |     201   201     401 403    201    201
GET    attachment                    401   200 404  404   404 |     200   404     401 403    200    404
DELETE attachment                    401   200 404  404   404 |     200   404     401 403    200    404
GET    attachment_content            401   200 404  404   404 |     200   404     401 403    200    404
POST   ai_chat                       200   200 200  200   200 |     200   200     401 403    404    404
GET    ai_chat_messages              200   200 200  200   200 |     200   200     401 403    200    200
GET    ai_chat_stream                204   200 204  204   204 |     200   204     401 403    204    204
POST   stop_ai_chat                  200   200 200  200   200 |     200   200     401 403    200    200
POST   ag_ui                         200   200 200  200   200 |     200   200     401 403    404    404
GET    ag_ui_messages                200   200 200  200   200 |     200   200     401 403    404    404
GET    ag_ui_stream                  204   204 204  204   204 |     204   204     401 403    404    404
POST   stop_ag_ui                    200   200 200  200   200 |     200   200     401 403    404    404
GET    usage                         401   200 200  200   200 |     200   200     401 403    200    200
GET    chat_completions              200   200 200  200   200 |     200   200     401 403    200    200
POST   chat_completions              200   200 200  200   200 |     200   200     401 403    404    404
GET    chat_completion               404   200 404  404   404 |     200   404     401 403    200    404
POST   chat_completion               404   200 404  404   404 |     200   404     401 403    200    404
DELETE chat_completion               404   200 404  404   404 |     200   404     401 403    200    404
GET    chat_completion_messages      404   200 404  404   404 |     200   404     401 403    200    404
POST   responses                     200   200 200  200   200 |     200   200     401 403    404    404
POST   response_tokens               200   200 200  200   200 |     200   200     401 403    404    404
GET    response                      404   200 404  404   404 |     200   404     401 403    200    404
DELETE response                      404   200 404  404   404 |     200   404     401 403    200    404
POST   cancel_response               404   200 404  404   404 |     200   404     401 403    404    404
GET    response_input_items          404   200 404  404   404 |     200   404     401 403    200    404
POST   response_conversations        401   200 200  200   200 |     200   200     401 403    200    200
GET    response_conversation         401   200 404  404   404 |     200   404     401 403    200    404
POST   response_conversation         401   200 404  404   404 |     200   404     401 403    200    404
DELETE response_conversation         401   200 404  404   404 |     200   404     401 403    200    404
GET    conversation_items            401   200 404  404   404 |     200   404     401 403    200    404
POST   conversation_items            401   200 404  404   404 |     200   404     401 403    200    404
GET    conversation_item             401   200 404  404   404 |     200   404     401 403    200    404
DELETE conversation_item             401   200 404  404   404 |     200   404     401 403    200    404
POST   completions                   200   200 200  200   200 |     200   200     401 403    404    404
GET    completions_stream            200   200 200  200   200 |     200   200     401 403    404    404
POST   completions_stream            200   200 200  200   200 |     200   200     401 403    404    404
POST   embeddings                    200   200 200  200   200 |     200   200     401 403    404    404
POST   moderations                   200   200 200  200   200 |     200   200     401 403    200    200
POST   messages                      200   200 200  200   200 |     200   200     401 403    404    404
POST   count_tokens                  200   200 200  200   200 |     200   200     401 403    404    404
GET    message_batches               401   200 200  200   200 |     200   200     401 403    200    200
POST   message_batches               401   200 200  200   200 |     200   200     401 403    200    200
GET    message_batch                 401   200 404  404   404 |     200   404     401 403    200    404
DELETE message_batch                 401   200 404  404   404 |     200   404     401 403    200    404
POST   cancel_message_batch          401   400 404  404   404 |     400   404     401 403    400    404
GET    message_batch_results         401   200 404  404   404 |     200   404     401 403    200    404
GET    chat_stream_events            404   200 404  404   404 |     200   404     401 403    404    404
GET    models                        200   200 200  200   200 |     200   200     401 403    200    200
GET    model                         200   200 200  200   200 |     200   200     401 403    404    404
GET    files                         401   200 200  200   200 |     200   200     401 403    200    200
POST   files                         401   200 200  200   200 |     200   200     401 403    200    200
GET    file                          401   200 404  404   404 |     200   404     401 403    200    404
DELETE file                          401   200 404  404   404 |     200   404     401 403    200    404
GET    file_content                  401   200 404  404   404 |     200   404     401 403    200    404
GET    batches                       401   200 200  200   200 |     200   200     401 403    200    200
POST   batches                       401   200 404  404   404 |     200   404     401 403    400    400
GET    batch                         401   200 404  404   404 |     200   404     401 403    200    404
POST   cancel_batch                  401   400 404  404   404 |     400   404     401 403    400    404
GET    mcp                           401   403 403  403   403 |     405   405     401 403    405    403
POST   mcp                           401   403 403  403   403 |     200   200     401 403    200    403
POST   tokenize                      200   200 200  200   200 |     200   200     401 403    404    404
POST   detokenize                    200   200 200  200   200 |     200   200     401 403    404    404
GET    livez                         200   200 200  200   200 |     200   200     200 200    200    200
GET    health                        200   200 200  200   200 |     200   200     200 200    200    200
GET    readyz                        200   200 200  200   200 |     200   200     200 200    200    200
GET    openapi                       200   200 200  200   200 |     200   200     200 200    200    200
GET    metrics                       401   403 403  403   403 |     403   403     401 200    403    403
"""

MODEL, PIPELINE, EMBEDDER = "theirs", "review", "search"
SHORT = {"max_tokens": 2, "seed": 7}
MESSAGES = [{"role": "user", "content": "hello"}]
_CHAT = {"model": MODEL, "messages": MESSAGES, **SHORT}
_UI_MESSAGES = [{"id": "u1", "role": "user", "parts": [{"type": "text", "text": "hello"}]}]
_RESPONSE = {"model": MODEL, "input": "hi", "max_output_tokens": 2, "seed": 7}
# What a route sends, where it sends something; {} for the rest of the POSTs. `{name}`: of alice's.
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "streams"): {"model": MODEL, "prompt": "hi", **SHORT},
    ("POST", "approve_stream"): {"approvals": [{"id": "call_1", "allow": True}]},  # that stream asks nothing: 400
    ("POST", "ack_stream"): {"reader": "r" * 8, "seq": 1},
    ("POST", "stream_timings"): {"headers": 0.1, "first_delta": 0.2},
    ("POST", "pipeline"): {"messages": MESSAGES},
    ("POST", "jobs"): {"pipeline": PIPELINE, "messages": MESSAGES},
    ("POST", "conversations"): {"model": MODEL},
    ("POST", "conversation"): {"pinned": True},
    ("POST", "conversation_messages"): {"content": "and then?", **SHORT},
    ("POST", "conversation_message"): {"rating": 1},
    ("POST", "ai_chat"): {"id": "other", "messages": _UI_MESSAGES, "model": MODEL, **SHORT},
    ("POST", "ag_ui"): {
        "threadId": "thread-1",
        "runId": "run-1",
        "messages": [{"id": "m1", "role": "user", "content": "hello"}],
        "forwardedProps": SHORT,
    },
    ("POST", "chat_completions"): _CHAT,
    ("POST", "chat_completion"): {"metadata": {"a": "b"}},
    ("POST", "responses"): _RESPONSE,
    ("POST", "response_tokens"): {"model": MODEL, "input": "hi"},
    ("POST", "response_conversation"): {"metadata": {"a": "b"}},
    ("POST", "conversation_items"): {"items": [{"role": "user", "content": "hi"}]},
    ("POST", "completions"): {"model": MODEL, "prompt": "hi", **SHORT},
    ("POST", "completions_stream"): {"model": MODEL, "prompt": "hi", **SHORT},
    ("POST", "embeddings"): {"model": EMBEDDER, "input": "hi"},
    ("POST", "tokenize"): {"model": MODEL, "prompt": "hi"},
    ("POST", "detokenize"): {"model": MODEL, "tokens": [104, 105]},
    ("POST", "moderations"): {"input": "hi"},
    ("POST", "messages"): _CHAT,
    ("POST", "count_tokens"): {"model": MODEL, "messages": MESSAGES},
    ("POST", "message_batches"): {"requests": [{"custom_id": "a", "params": _CHAT}]},
    ("POST", "mcp"): {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": PIPELINE, "arguments": {"question": "hi"}},
    },
    ("POST", "batches"): {
        "input_file_id": "{file_id}",
        "endpoint": f"/pipelines/{PIPELINE}",
        "completion_window": "24h",
    },
}
QUERIES = {
    "new_stream": f"?prompt=hi&model={MODEL}&max_tokens=2",
    "pipeline": "?question=hi",
    "completions_stream": f"?prompt=hi&model={MODEL}&max_tokens=2",
}
# What the path needs of alice's, by the route's name; each is made once, but for the DELETEs, anew for each cell.
OBJECTS = {
    **dict.fromkeys(
        ("stream", "stream_events", "stream_log", "stop_stream", "ack_stream", "stream_timings", "watch_stream"),
        "stream",
    ),
    **dict.fromkeys(("approve_stream", "chat_stream_events"), "stream"),
    **dict.fromkeys(("job", "job_events", "cancel_job"), "job"),
    **dict.fromkeys(("chat_completion", "chat_completion_messages"), "stored chat"),
    **dict.fromkeys(("response_conversation", "conversation_items", "conversation_item"), "response conversation"),
    **dict.fromkeys(("response", "cancel_response", "response_input_items"), "response"),
    **dict.fromkeys(("message_batch", "cancel_message_batch", "message_batch_results"), "message batch"),
    **dict.fromkeys(("file", "file_content", "batches"), "file"),
    **dict.fromkeys(("batch", "cancel_batch"), "batch"),
    **dict.fromkeys(("conversation", "conversation_messages", "conversation_message"), "conversation"),
    **dict.fromkeys(("export_conversation", "conversation_shares"), "conversation"),
    **dict.fromkeys(("ai_chat_messages", "ai_chat_stream", "stop_ai_chat"), "ui chat"),
    "conversation_share": "share",
    **dict.fromkeys(("attachment", "attachment_content"), "attachment"),
}


def may_use(user: Any, caller: Any) -> bool:
    return user is None or user.username != "denied"


def scores_of(texts: list[str]) -> list[dict[str, float]]:
    return [{} for _ in texts]


def team_of(user: Any, key: Any) -> str:
    return "shop" if user is not None and user.username in ("alice", "mate") else ""


SITE = {
    "TESTING": True,
    "ANONYMOUS": True,
    "STORE": True,
    "PROMPT_IN_URL": True,
    "CONVERSATIONS": True,
    "TITLES": "words",
    "SHARE_LINKS": True,
    "MCP_ENDPOINT": True,
    "MODELS": {
        "open": {"PATH": "echo", "ANSWERS": None},
        MODEL: {"PATH": "echo", "ANSWERS": None, "PERMISSION": f"{__name__}.may_use"},
    },
    "EMBEDDING_MODELS": {EMBEDDER: {"PATH": "echo", "PERMISSION": f"{__name__}.may_use"}},
    "MODERATION": f"{__name__}.scores_of",
    "TENANT": f"{__name__}.team_of",
    "LIMITS": {"MAX_JOBS_PER_PRINCIPAL": 1000, "MAX_JOBS_PER_VISITOR": 1000, "MAX_BATCHES": 1000},
}


def rows() -> dict[tuple[str, str], list[int]]:
    """Return the table: (method, name) → the statuses."""
    lines = [text.replace("|", " ").split() for text in MATRIX.strip().splitlines()[1:]]
    return {(method, name): [int(one) for one in cells] for method, name, *cells in lines}


COLUMNS = MATRIX.strip().splitlines()[0].replace("|", " ").split()[2:]


async def review(run: Run) -> None:
    """Review an account."""
    await run.generate("hello", model="open", max_tokens=2, seed=7)


class Alice:
    """What alice makes for others to ask for: each method makes one object, and returns the parts of paths."""

    def __init__(self, caller: Caller, user: Any) -> None:
        self._caller, self._user = caller, user
        self._made: dict[str, dict[str, str]] = {}

    async def parts_of(self, kind: str, *, anew: bool) -> dict[str, str]:
        """Return the ids of an object."""
        if anew or kind not in self._made:
            makers: dict[str, Callable[[], Awaitable[dict[str, str]]]] = {
                "stream": self._stream,
                "ui chat": self._ui_chat,
                "job": self._job,
                "stored chat": self._stored_chat,
                "response": self._response,
                "response conversation": self._response_conversation,
                "message batch": self._message_batch,
                "file": self._file,
                "batch": self._batch,
                "conversation": self._conversation,
                "share": self._share,
                "attachment": self._attachment,
            }
            self._made[kind] = await makers[kind]()
        return self._made[kind]

    async def _post(self, path: str, body: Any) -> Any:
        response = await self._caller.post(path, body)
        content = await body_of(response)
        assert response.status_code < 300, (path, content)
        return response

    async def _until(self, path: str, field: str, wanted: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while (found := (await self._caller.get(path)).json())[field] != wanted:  # noqa: ASYNC110  (as a client polls)
                await asyncio.sleep(0.02)
        return dict(found)

    async def _stream(self) -> dict[str, str]:
        response = await self._post("/streams", BODIES["POST", "streams"])
        return {"stream_id": response["X-Stream-Id"]}

    async def _ui_chat(self) -> dict[str, str]:
        await self._post("/ai/chat", {**BODIES["POST", "ai_chat"], "id": "hers"})
        return {"chat_id": "hers"}

    async def _job(self) -> dict[str, str]:
        job_id = (await self._post("/jobs", BODIES["POST", "jobs"])).json()["job_id"]
        await self._until(f"/jobs/{job_id}", "status", "done")
        return {"job_id": job_id}

    async def _stored_chat(self) -> dict[str, str]:
        response = await self._post("/v1/chat/completions", {**_CHAT, "store": True})
        return {"stream_id": response["X-Stream-Id"]}

    async def _response(self) -> dict[str, str]:
        made = (await self._post("/v1/responses", _RESPONSE)).json()
        ended = Stream.objects.filter(pk=made["id"].removeprefix("resp_"), state="finished")
        async with asyncio.timeout(60):
            while not await ended.aexists():  # noqa: ASYNC110  (a row has no event)
                await asyncio.sleep(0.005)
        return {"response_id": made["id"]}

    async def _response_conversation(self) -> dict[str, str]:
        made = (await self._post("/v1/conversations", {"items": [{"role": "user", "content": "hi"}]})).json()
        items = (await self._caller.get(f"/v1/conversations/{made['id']}/items")).json()
        return {"conversation_id": made["id"], "item_id": items["first_id"]}

    async def _file(self) -> dict[str, str]:
        content = jsonl([line("a", f"/pipelines/{PIPELINE}", messages=MESSAGES)])
        form = {"purpose": "batch", "file": SimpleUploadedFile("in.jsonl", content)}
        response = await self._caller.client.post("/v1/files", form)
        return {"file_id": response.json()["id"]}

    async def _batch(self) -> dict[str, str]:
        content = jsonl([line("a", CHAT, **_CHAT)])
        form = {"purpose": "batch", "file": SimpleUploadedFile("in.jsonl", content)}
        file_id = (await self._caller.client.post("/v1/files", form)).json()["id"]
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch_id = (await self._post("/v1/batches", body)).json()["id"]
        await self._until(f"/v1/batches/{batch_id}", "status", "completed")
        return {"batch_id": batch_id}

    async def _message_batch(self) -> dict[str, str]:
        path = "/v1/messages/batches"
        batch_id = (await self._post(path, BODIES["POST", "message_batches"])).json()["id"]
        await self._until(f"{path}/{batch_id}", "processing_status", "ended")
        return {"batch_id": batch_id}

    async def _conversation(self) -> dict[str, str]:
        owner = {"owner": f"user:{self._user.pk}", "tenant": f"user:{self._user.pk}", "user": self._user}
        talk = await Conversation.objects.acreate(model=MODEL, title="Late fees", **owner)
        text = {"content": '{"blocks": [{"index": 0, "kind": "text", "text": "hi"}]}', "text": "hi", "model": MODEL}
        question = await Message.objects.acreate(conversation=talk, role="user", **text)
        answer = await Message.objects.acreate(conversation=talk, role="assistant", parent=question, **text)
        talk.leaf = answer.pk
        await talk.asave()
        return {"conversation_id": talk.pk, "message_id": answer.pk}

    async def _attachment(self) -> dict[str, str]:
        response = await self._caller.client.post("/attachments", {"file": SimpleUploadedFile("a.txt", b"hi")})
        return {"attachment_id": response.json()["id"]}

    async def _share(self) -> dict[str, str]:
        parts = await self._conversation()
        made = await self._post(f"/conversations/{parts['conversation_id']}/shares", {})
        return {**parts, "share_id": made.json()["id"]}


async def callers() -> dict[str, Caller]:
    """Return who asks, by column."""

    def keys() -> dict[str, str]:
        alice, bob = (get_user_model().objects.get(username=name) for name in ("alice", "bob"))
        row, revoked = ApiKey.objects.make(user=alice)
        ApiKey.objects.filter(pk=row.pk).revoke()
        return {
            "alice's": ApiKey.objects.make(user=alice)[1],
            "bob's": ApiKey.objects.make(user=bob)[1],
            "revoked": revoked,
            "ops": ApiKey.objects.make(user=alice, scopes=["ops"])[1],
            "narrow": ApiKey.objects.make(user=alice, allowed_models=["open"])[1],
        }

    users = {}
    for name in ("alice", "bob", "mate", "staff", "denied"):
        user = await get_user_model().objects.acreate_user(name, password="pw", is_staff=name == "staff")
        users[name] = await make_caller(user)
    with_key = {name: Caller(key=key) for name, key in (await sync_to_async(keys)()).items()}
    return {"visitor": Caller(), **users, **with_key}


@pytest.fixture
async def ready(transactional_db: Any) -> AsyncIterator[None]:
    pipeline(PIPELINE, permission=may_use)(review)
    try:
        with override_settings(STREAMSERVE=SITE):
            await until_ready()
            yield
            await site.reset()
    finally:
        forget(PIPELINE)


def test_every_route_has_its_lines() -> None:
    """A new route, or a new method, needs a line in the table."""
    served = {
        (method, route.name) for route in ROUTES if route.name for method in route.methods if method in _WITH_LINES
    }
    assert rows().keys() == served
    assert all(len(cells) == len(COLUMNS) for cells in rows().values())


_WITH_LINES = ("GET", "POST", "PUT", "PATCH", "DELETE")  # HEAD is GET without a body


async def test_each_caller_gets_the_status_of_the_table(ready: None) -> None:
    """For alice's objects, at each route; all that differs is shown."""
    asking = await callers()
    alice = Alice(asking["alice"], await get_user_model().objects.aget(username="alice"))
    named = {route.name: route for route in ROUTES}
    wrong = []
    for (method, name), statuses in rows().items():
        for column, status in zip(COLUMNS, statuses, strict=True):
            found = await ask(asking[column], alice, method, named[name])
            if found != status:
                wrong.append(f"{method} {name}: {column} gets {found}, the table has {status}")
    assert not wrong, "\n".join(wrong)


async def ask(caller: Caller, alice: Alice, method: str, route: Route) -> int:
    """Return the status that a route gives; its answer is read to the end."""
    kind = OBJECTS.get(route.name)
    parts = {} if kind is None else await alice.parts_of(kind, anew=method == "DELETE")
    parts = {"model": MODEL, "name": PIPELINE, "thread_id": "thread-1", **parts}
    path = "/" + re.sub(r"<\w+:(\w+)>", lambda part: parts[part[1]], route.path)
    if method == "GET":
        response = await caller.get(path + QUERIES.get(route.name, ""))
    elif method == "DELETE":
        response = await caller.delete(path)
    elif route.name == "files":
        form = {"purpose": "batch", "file": SimpleUploadedFile("in.jsonl", jsonl([line("a")]))}
        response = await caller.client.post(path, form, headers=caller.headers)
    elif route.name == "attachments":
        form = {"file": SimpleUploadedFile("a.txt", b"hi")}
        response = await caller.client.post(path, form, headers=caller.headers)
    else:
        body = BODIES.get((method, route.name), {})
        if isinstance(body.get("input_file_id"), str):
            body = {**body, "input_file_id": body["input_file_id"].format(**parts)}
        response = await caller.post(path, body)
    await body_of(response)
    return int(response.status_code)


async def test_nobody_is_served_where_nothing_is(ready: None) -> None:
    """Addresses below the routes: 404, whoever asks."""
    asking = await callers()
    for route in ROUTES:
        if not route.name:
            path = "/" + re.sub(r"<\w+:\w+>", "nothing/here", route.path)
            for column in ("visitor", "alice", "staff", "revoked"):
                assert (await asking[column].get(path)).status_code == 404, (column, path)


async def test_without_anonymous_a_visitor_is_asked_to_sign_in(ready: None) -> None:
    """401 at every route that is not open to anyone, whatever its object is."""
    await site.reset()
    with override_settings(STREAMSERVE={**SITE, "ANONYMOUS": False}):
        await until_ready()
        asking = await callers()
        alice = Alice(asking["alice"], await get_user_model().objects.aget(username="alice"))
        for route in ROUTES:
            if route.name and "anyone" not in route.access.callers:
                for method in route.methods:
                    if method in _WITH_LINES:
                        assert await ask(Caller(), alice, method, route) == 401, (method, route.name)
        await site.reset()

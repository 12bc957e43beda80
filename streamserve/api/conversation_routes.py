"""`/conversations`: lists, changes, questions, ratings, exports and share links. asyncio; framework-free.

A question is a `POST /streams` with the conversation from the path: `native.start_body` starts both.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from typing import Any, NoReturn

from streamserve.api import exports
from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.api.conversations import (
    Change,
    Conversations,
    Listed,
    Shares,
    path_of,
)
from streamserve.api.idempotency import once_of
from streamserve.api.native import start_body
from streamserve.dialects.conversation import row_id
from streamserve.dialects.fields import (
    Table,
    boolean,
    described,
    digits,
    integer,
    one_of,
    plain_text,
    read,
    required,
    schema_of,
    text,
    wrong_type,
    wrong_value,
)
from streamserve.dialects.generate import prompt_text
from streamserve.protocol.errors import BadRequest, NotFound
from streamserve.protocol.ids import is_stream_id

MAX_PAGE, _PAGE = 100, 20
MAX_TITLE_CHARS, MAX_COMMENT_CHARS, _MAX_SEARCH_CHARS = 200, 2_000, 200
_LEAST_SECONDS, _MOST_SECONDS = 60, 366 * 86_400  # that a share link works
_SOURCE = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_RATINGS = (1, -1)
FORMATS = ("markdown", "json")


_some_title = plain_text(1, MAX_TITLE_CHARS)


@described(schema_of(_some_title))
def _title(value: Any, param: str) -> str:
    """Read a title, in one line."""
    title = " ".join(_some_title(value, param).split())
    if not title:
        wrong_value(param, "has no visible character")
    return title


@described({"type": "string", "pattern": f"^{_SOURCE.pattern}$"})
def _source(value: Any, param: str) -> str:
    """Read what has begun a conversation."""
    if not isinstance(value, str):
        wrong_type(value, param, "a string")
    if _SOURCE.fullmatch(value) is None:
        wrong_value(param, "has 1 to 32 lower-case letters, digits, hyphens and underscores")
    return value


@described({"type": "integer", "enum": list(_RATINGS)})
def _rating(value: Any, param: str) -> int:
    """Read a rating."""
    if type(value) is not int or value not in _RATINGS:
        wrong_value(param, "is 1 (good), -1 (bad) or null")
    return value


NEW: Table = {"model": text(1, 200), "title": _title, "source": _source}
CHANGE: Table = {"title": _title, "pinned": boolean, "leaf": row_id, "deleted": boolean}
RATE: Table = {"rating": _rating, "comment": plain_text(0, MAX_COMMENT_CHARS)}
SHARE: Table = {"expires_in": integer(_LEAST_SECONDS, _MOST_SECONDS)}


@described({"type": "string", "pattern": f"^({_SOURCE.pattern})?$"})
def _any_source(value: Any, param: str) -> str:
    """Read what has begun the conversations of a list; "" is anything."""
    return _source(value, param) if value else ""


@described({"type": "string", "pattern": "^([0-9a-f]{32})?$"})
def _after(value: Any, param: str) -> str:
    """Read the id after which a page begins; "" is none."""
    if value and not is_stream_id(value):
        _refuse_after()
    return str(value)


PAGE: Table = {"limit": digits(1, MAX_PAGE), "after": _after}
LIST: Table = {**PAGE, "q": plain_text(0, _MAX_SEARCH_CHARS), "source": _any_source}
EXPORT: Table = {"format": one_of(*FORMATS)}
IN_PATH = ("conversation", "messages", "prompt")


async def list_conversations(call: Call, conversations: Conversations) -> Reply:
    """GET /conversations?limit=&after=&q=&source=: pinned conversations, then the newest."""
    query = read(call.query(), LIST)
    listed = Listed(
        limit=query.get("limit", _PAGE),
        after=query.get("after", ""),
        search=query.get("q", "").strip(),
        source=query.get("source", ""),
    )
    found, has_more = await conversations.page(call.caller, listed)
    return _polled(call, {"conversations": [one.as_json() for one in found], **_end_of(found, has_more)})


async def create(call: Call, conversations: Conversations, answers: Answers) -> Reply:
    """POST /conversations {model?, title?, source?}: a new conversation, 201."""
    values = read(await call.json(answers.limits, optional=True), NEW)
    if "model" in values:
        await answers.client(call.caller, values["model"])
    made = await conversations.create(call.caller, **values)
    return json_reply(made.as_json(), status=201)


async def conversation(call: Call, conversations: Conversations) -> Reply:
    """GET /conversations/{id}: one conversation."""
    return _polled(call, (await conversations.find(call.caller, _id(call))).as_json())


async def change(call: Call, conversations: Conversations, answers: Answers) -> Reply:
    """POST /conversations/{id} {title?, pinned?, leaf?, deleted?}: change it; `"deleted": false` undoes a DELETE."""
    values = read(await call.json(answers.limits), CHANGE)
    if not values:
        raise BadRequest("Send 'title', 'pinned', 'leaf' or 'deleted'.", code="missing_field", param="title")
    is_deleted = values.pop("deleted", None)
    if is_deleted:
        raise BadRequest("Delete a conversation with DELETE. 'deleted' takes false, which undoes it.", param="deleted")
    if is_deleted is not None:
        found = await conversations.restore(call.caller, _id(call))
    if values:
        changes = Change(title=values.get("title"), is_pinned=values.get("pinned"), leaf=values.get("leaf"))
        found = await conversations.change(call.caller, _id(call), changes)
    return json_reply(found.as_json())


async def delete(call: Call, conversations: Conversations, answers: Answers) -> Reply:
    """DELETE /conversations/{id}: delete it, and stop the answers that run in it."""
    for stream_id in await conversations.delete(call.caller, _id(call)):
        try:
            found = await answers.find(call.caller, stream_id=stream_id)
        except NotFound:  # its row was dropped
            continue
        if found.stream is not None:
            await found.stream.stop()
    return json_reply({"id": _id(call), "deleted": True})


async def list_messages(call: Call, conversations: Conversations) -> Reply:
    """GET /conversations/{id}/messages?limit=&after=: the messages of all branches, the oldest first."""
    query = read(call.query(), PAGE)
    found, has_more = await conversations.messages(
        call.caller, _id(call), limit=query.get("limit", MAX_PAGE), after=query.get("after", "")
    )
    return _polled(call, {"messages": [one.as_json() for one in found], **_end_of(found, has_more)})


async def ask(call: Call, conversations: Conversations, answers: Answers) -> Reply:
    """POST /conversations/{id}/messages {content?, parent?, continue?, attachments?, …}: start an answer, stream it."""
    body = await call.json(answers.limits)
    for name in IN_PATH:
        if name in body:
            message = f"{name} is no field here: the question is 'content', and the conversation is in the address."
            raise BadRequest(message, code="unknown_field", param=name)
    once = once_of(call, f"conversations/{_id(call)}/messages", body)
    asked = {name: value for name, value in body.items() if name != "content"}
    if body.get("content") is not None:
        asked["prompt"] = prompt_text(answers.limits)(body["content"], "content")
    return await start_body(call, answers, conversations, {**asked, "conversation": _id(call)}, once)


async def rate(call: Call, conversations: Conversations, answers: Answers) -> Reply:
    """POST /conversations/{id}/messages/{message} {rating, comment?}: rate an answer."""
    body = await call.json(answers.limits)
    values = read(body, RATE)
    if "rating" not in body:
        required(values, "rating")
    rating, comment = values.get("rating"), values.get("comment", "")
    if rating is None and comment:
        raise BadRequest("A comment goes with a rating, 1 or -1.", code="conflicting_fields", param="comment")
    rated = await conversations.rate(call.caller, _id(call), call.params["message_id"], rating=rating, comment=comment)
    return json_reply(rated.as_json())


async def export(call: Call, conversations: Conversations) -> Reply:
    """GET /conversations/{id}/export?format=: the branch shown as Markdown, or everything as JSON. A download."""
    format = read(call.query(), EXPORT).get("format", FORMATS[0])
    found, messages = await conversations.whole(call.caller, _id(call))

    def encode() -> bytes:
        """Return the file; a long conversation takes its time."""
        if format == "json":
            whole = {"conversation": found.as_json(), "messages": [one.as_json() for one in messages]}
            return json.dumps(whole, ensure_ascii=False, indent=1).encode()
        return exports.markdown(found, path_of(messages, found.leaf)).encode()

    kind, end = ("text/markdown; charset=utf-8", "md") if format == "markdown" else ("application/json", "json")
    headers = {
        "Content-Type": kind,
        "Content-Disposition": f'attachment; filename="{exports.file_name(found.title)}.{end}"',
        "Cache-Control": "no-store",
    }
    return Reply(body=await asyncio.to_thread(encode), headers=headers)


async def list_shares(call: Call, shares: Shares) -> Reply:
    """GET /conversations/{id}/shares?limit=&after=: the links that work, the newest first."""
    query = read(call.query(), PAGE)
    limit, after = query.get("limit", _PAGE), query.get("after", "")
    found, has_more = await shares.page(call.caller, _id(call), limit=limit, after=after)
    return json_reply({"shares": [one.as_json() for one in found], **_end_of(found, has_more)})


async def share(call: Call, shares: Shares, answers: Answers) -> Reply:
    """POST /conversations/{id}/shares {expires_in?}: a link to the branch shown, 201. Its address is shown once."""
    values = read(await call.json(answers.limits, optional=True), SHARE)
    made, token = await shares.make(call.caller, _id(call), expires_in=values.get("expires_in"))
    root = call.path.removesuffix(f"conversations/{_id(call)}/shares")
    return json_reply({**made.as_json(), "url": f"{root}shared/{token}"}, status=201)


async def revoke_share(call: Call, shares: Shares) -> Reply:
    """DELETE /conversations/{id}/shares/{share}: end a link. Idempotent."""
    share_id = call.params["share_id"]
    await shares.revoke(call.caller, _id(call), share_id)
    return json_reply({"id": share_id, "revoked": True})


def _id(call: Call) -> str:
    return call.params["conversation_id"]


def _refuse_after() -> NoReturn:
    raise BadRequest("'after' is the 'last_id' of the page before: 32 hex digits.", param="after")


def _end_of(found: Any, has_more: bool) -> dict[str, Any]:
    return {"has_more": has_more, "last_id": found[-1].id if found else None}


def _polled(call: Call, value: Any) -> Reply:
    """Return JSON with its ETag; 304 if the client has it already (RFC 9110, 13.1.2)."""
    reply = json_reply(value)
    assert isinstance(reply.body, bytes)
    etag = f'"{hashlib.sha256(reply.body).hexdigest()[:32]}"'
    known = {one.strip().removeprefix("W/") for one in call.headers.get("if-none-match", "").split(",")}
    if etag in known or "*" in known:
        return Reply(status=304, headers={"ETag": etag, "Cache-Control": "no-store"})
    return Reply(body=reply.body, headers={**reply.headers, "ETag": etag})

"""The endpoints of `/v1/conversations`: the conversations that `/v1/responses` continues, and their items. asyncio.

They are the conversations of `/conversations` (api/conversation_routes.py) in the shape of this API: `conv_` and the id
of any of the caller's.
"""

from __future__ import annotations

from typing import Any

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.api.conversations import Change, Conversations, ConversationView, no_conversation, path_of
from streamserve.api.openai.responses import SOURCE
from streamserve.dialects.openai.responses import conversation as dialect
from streamserve.dialects.openai.responses.conversation import no_item
from streamserve.dialects.openai.responses.items import Item
from streamserve.dialects.openai.responses.stored import conversation_row, page_json
from streamserve.protocol.errors import BadRequest, NotFound


async def create(call: Call, conversations: Conversations, answers: Answers) -> Reply:
    """POST /v1/conversations {items?, metadata?}: a new conversation."""
    messages, notes = dialect.parse_new(await call.json(answers.limits, optional=True), answers.limits)
    made = await conversations.create(call.caller, source=SOURCE, metadata=notes)
    if messages:
        await conversations.add(call.caller, made.id, messages)
    return json_reply(_json(made))


async def conversation(call: Call, conversations: Conversations) -> Reply:
    """GET /v1/conversations/{id}: a conversation."""
    return json_reply(_json(await conversations.find(call.caller, _row(call))))


async def update(call: Call, conversations: Conversations, answers: Answers) -> Reply:
    """POST /v1/conversations/{id} {metadata}: replace its metadata."""
    notes = dialect.parse_metadata(await call.json(answers.limits), answers.limits)
    return json_reply(_json(await conversations.change(call.caller, _row(call), Change(metadata=notes))))


async def delete(call: Call, conversations: Conversations, answers: Answers) -> Reply:
    """DELETE /v1/conversations/{id}: delete it, and stop the answers that run in it."""
    for stream_id in await conversations.delete(call.caller, _row(call)):
        try:
            found = await answers.find(call.caller, stream_id=stream_id)
        except NotFound:  # its row was dropped
            continue
        if found.stream is not None:
            await found.stream.stop()
    return json_reply(dialect.deleted_json(_row(call)))


async def list_items(call: Call, conversations: Conversations) -> Reply:
    """GET /v1/conversations/{id}/items?limit=&order=&after=: the items of the branch shown."""
    return json_reply(page_json(await _items(call, conversations), call.query()))


async def add_items(call: Call, conversations: Conversations, answers: Answers) -> Reply:
    """POST /v1/conversations/{id}/items {items}: add items at the end, without an answer."""
    messages = dialect.parse_items(await call.json(answers.limits), answers.limits)
    added = await conversations.add(call.caller, _row(call), messages)
    items = dialect.items_of(added)
    return json_reply(page_json(items, {"order": "asc", "limit": "100"}))


async def item(call: Call, conversations: Conversations) -> Reply:
    """GET /v1/conversations/{id}/items/{item}: an item."""
    item_id = call.params["item_id"]
    for found in await _items(call, conversations):
        if found["id"] == item_id:
            return json_reply(found)
    raise no_item(item_id)


async def delete_item(call: Call, conversations: Conversations) -> Reply:
    """DELETE /v1/conversations/{id}/items/{item}: delete a message that was sent, or an answer of one item."""
    item_id = call.params["item_id"]
    view, messages = await conversations.whole(call.caller, _row(call))
    row = dialect.row_of(item_id)
    message = next((one for one in messages if row and row in (one.id, one.stream_id)), None)
    if message is None or item_id not in [one["id"] for one in dialect.items_of([message])]:
        raise no_item(item_id)
    if len(dialect.items_of([message])) > 1:
        text = "The item is a part of an answer, which is kept whole. Delete the conversation, or begin a branch."
        raise BadRequest(text, code="unsupported_parameter", param="item_id")
    await conversations.remove(call.caller, view.id, message.id)
    return json_reply(_json(view))


async def _items(call: Call, conversations: Conversations) -> list[Item]:
    view, messages = await conversations.whole(call.caller, _row(call))
    return dialect.items_of(path_of(messages, view.leaf))


def _row(call: Call) -> str:
    """Return the id of the conversation's row. Raises NotFound."""
    row = conversation_row(call.params["conversation_id"])
    if not row:
        raise no_conversation()
    return row


def _json(view: ConversationView) -> dict[str, Any]:
    return dialect.conversation_json(view.id, int(view.created_at.timestamp()), view.metadata)

"""`/attachments`: files of text that questions of conversations bring. asyncio; framework-free. docs/conversations.md.

A file is uploaded first, and named by its id in a question. An attachment is of its caller's tenant; for another
tenant it does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from streamserve.api.batch.files import Form
from streamserve.api.call import Body, Call, Caller, Reply, json_reply
from streamserve.api.conversations import AttachmentView
from streamserve.dialects.batches import Page
from streamserve.dialects.fields import Table, digits, plain_text, read
from streamserve.protocol.errors import BadRequest, NotFound

MAX_PAGE, _PAGE = 100, 20
LIST: Table = {"limit": digits(1, MAX_PAGE), "after": plain_text(0, 64)}


class Attachments(Protocol):
    """The attachments of a site's tenants. Every call may raise a database error."""

    def receive(self, call: Call) -> AbstractAsyncContextManager[Form]:
        """Receive the form in the body of `call`; its file is gone after the context. Raises StorageFull, TooLarge."""

    async def add(self, caller: Caller, form: Form) -> AttachmentView:
        """Read the text of the form's file, and store both.

        Raises UnsupportedMedia, TooLarge, StorageFull; BadRequest for a file that is broken, locked or without text.
        """

    async def find(self, caller: Caller, attachment_id: str) -> AttachmentView:
        """Return an attachment. Raises NotFound for an unknown id and for another tenant's."""

    async def page(self, caller: Caller, page: Page) -> tuple[Sequence[AttachmentView], bool]:
        """Return a part of the tenant's attachments, the newest first, and whether there are more."""

    async def delete(self, caller: Caller, attachment_id: str) -> None:
        """Delete an attachment. Raises NotFound; BadRequest for an attachment that a message has."""

    async def content(self, caller: Caller, attachment_id: str) -> Body:
        """Return the file, as it was sent, as the body of a response."""


async def upload(call: Call, attachments: Attachments) -> Reply:
    """POST /attachments: store the file of a form, with the text that is in it; 201."""
    async with attachments.receive(call) as form:
        if form.file is None:
            raise BadRequest("file is missing. Send the file in the part 'file'.", code="missing_field", param="file")
        if form.fields:
            name = min(form.fields)[:64]
            raise BadRequest(f"The form has a part {name!r}; it takes 'file'.", code="unknown_field", param=name)
        if not form.num_bytes:
            raise BadRequest("The file is empty.", code="empty_file", param="file")
        return json_reply((await attachments.add(call.caller, form)).as_json(), status=201)


async def list_attachments(call: Call, attachments: Attachments) -> Reply:
    """GET /attachments?limit=&after=: the newest first."""
    query = read(call.query(), LIST)
    page = Page(limit=query.get("limit", _PAGE), after=query.get("after", ""))
    found, has_more = await attachments.page(call.caller, page)
    last_id = found[-1].id if found else None
    return json_reply({"attachments": [one.as_json() for one in found], "has_more": has_more, "last_id": last_id})


async def attachment(call: Call, attachments: Attachments) -> Reply:
    """GET /attachments/{id}: its name, type, and sizes."""
    return json_reply((await attachments.find(call.caller, call.params["attachment_id"])).as_json())


async def delete(call: Call, attachments: Attachments) -> Reply:
    """DELETE /attachments/{id}: delete a file that no question has brought yet."""
    attachment_id = call.params["attachment_id"]
    await attachments.delete(call.caller, attachment_id)
    return json_reply({"id": attachment_id, "deleted": True})


async def content(call: Call, attachments: Attachments) -> Reply:
    """GET /attachments/{id}/content: the file itself, as it was sent."""
    return Reply(body=await attachments.content(call.caller, call.params["attachment_id"]))


def no_attachment(attachment_id: str, param: str = "id") -> NotFound:
    """Return the error for an id that names no attachment of the caller's."""
    message = f"No attachment has the id {attachment_id[:64]!r}. GET /attachments lists yours."
    return NotFound(message, code="attachment_not_found", param=param)

"""`Attachments`: the files that questions bring, in a Django storage, with a row each. See api/attachments.py.

The text is read before anything is stored. Then, as with files of batches: a row is inserted before its content and
deleted after it, so that a process that is killed in between leaves a row, which the purge finds.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from django.core.files.base import File
from django.core.files.storage import Storage, storages
from django.db import transaction

from streamserve.api.attachments import no_attachment
from streamserve.api.batch.files import FORM_BYTES, FileBody, Form
from streamserve.api.call import Body, Call, Caller
from streamserve.api.conversations import AttachmentView
from streamserve.api.logs import get_logger
from streamserve.conf import SiteConfig
from streamserve.dialects.batches import FileRecord, Page
from streamserve.protocol.errors import BadRequest, StorageFull, UnsupportedMedia
from streamserve.rows import orm
from streamserve.rows.conversation_views import attachment_view
from streamserve.rows.conversations import Attachment
from streamserve.rows.queries import hold_limit, last_of, part_of
from streamserve.work.file_text import PDF, read_text, type_of
from streamserve.work.files import opened, parse_form, private_storage
from streamserve.work.uploads import Uploads

log = get_logger(__name__)

_FOLDER = "streamserve-attachments"  # in the storage
_PRIVATE_FOLDER = "attachments"  # in STATE_DIR
_PDFS_AT_ONCE = 2  # processes that read one, of a web process
_IN_USE = (
    "A question has brought this file, and is asked again with it. Delete the conversation, and the file goes too."
)


class Attachments:
    """Any event loop of a process that has the site's settings."""

    def __init__(self, settings: SiteConfig) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._uploads = Uploads(replace(settings.limits, max_file_bytes=settings.limits.max_attachment_bytes))
        self._pdfs = asyncio.Semaphore(_PDFS_AT_ONCE)

    @property
    def storage(self) -> Storage:
        """Where the contents are."""
        return storage_for(self._settings)

    @asynccontextmanager
    async def receive(self, call: Call) -> AsyncIterator[Form]:
        """Parse the form in the body of `call`, on a thread. Raises before its first byte where it cannot be stored."""
        if call.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
            raise UnsupportedMedia("Send the file as multipart/form-data.", param="Content-Type")
        await orm.read(self._check_room, call.caller.tenant, self._uploads.num_bytes_of(call) - FORM_BYTES)
        async with self._uploads.receive(call) as body:
            form = await asyncio.to_thread(parse_form, call.headers, body, self._limits.max_attachment_bytes)
            body.close()  # the file of the form is another
            try:
                yield form
            finally:
                if form.file is not None:
                    form.file.close()

    async def add(self, caller: Caller, form: Form) -> AttachmentView:
        """Read the text of the form's file, and store both."""
        name = (form.filename or "")[-255:]
        content_type = type_of(name)
        assert form.file is not None
        text = await self._text_of(form, content_type)
        row = Attachment(
            owner=caller.owner,
            tenant=caller.tenant,
            user_id=_user_of(caller),
            name=name,
            content_type=content_type,
            num_bytes=form.num_bytes,
            stored_as=f"{_FOLDER}/{secrets.token_hex(16)}",
            num_chars=len(text),
            text=text,
        )
        await orm.call(self._insert, row)
        try:
            form.file.seek(0)
            row.stored_as = await asyncio.to_thread(self.storage.save, row.stored_as, File(form.file))
            row.is_ready = True
            ready = Attachment.objects.filter(pk=row.pk)
            await orm.write(ready.update, stored_as=row.stored_as, is_ready=True)
        except BaseException:
            with suppress(Exception):
                await self._drop(row)
            raise
        return attachment_view(row)

    async def _text_of(self, form: Form, content_type: str) -> str:
        """Return the text of the form's file; few PDFs at a time."""
        assert form.file is not None
        read = asyncio.to_thread(read_text, form.file, form.num_bytes, content_type, self._limits)
        if content_type != PDF:
            return await read
        async with self._pdfs:
            return await read

    def _check_room(self, tenant: str, num_bytes: int) -> None:
        limits = self._limits
        num, of_bytes = Attachment.objects.room_of(tenant)
        if num >= limits.max_tenant_attachments:
            message = (
                f"You keep {num:,} attached files, which is the limit. Delete some, or conversations that have some."
            )
            raise StorageFull(message, param="file")
        if of_bytes + num_bytes > limits.max_tenant_attachment_bytes:
            most = limits.max_tenant_attachment_bytes
            message = f"Your attached files take up to {most:,} bytes. Delete some, or conversations that have some."
            raise StorageFull(message, param="file")

    @transaction.atomic
    def _insert(self, row: Attachment) -> None:
        hold_limit(Attachment.objects.all(), row.tenant)
        self._check_room(row.tenant, row.num_bytes)
        row.save(force_insert=True)

    async def find(self, caller: Caller, attachment_id: str) -> AttachmentView:
        """Return an attachment."""
        return attachment_view(await self._row(caller, attachment_id))

    async def page(self, caller: Caller, page: Page) -> tuple[Sequence[AttachmentView], bool]:
        """Return a part of the tenant's attachments."""
        rows = Attachment.objects.of(caller.tenant).defer("text")
        found, has_more = await orm.read(lambda: part_of(rows, page, last_of(rows, page, no_attachment)))
        return [attachment_view(row) for row in found], has_more

    async def delete(self, caller: Caller, attachment_id: str) -> None:
        """Delete an attachment, unless a message has it."""
        row = await self._row(caller, attachment_id)
        if not await orm.call(Attachment.objects.take_away, row.pk):
            raise BadRequest(_IN_USE, code="attachment_in_use", param="id")
        await self._drop(row)

    async def content(self, caller: Caller, attachment_id: str) -> Body:
        """Return the file as the body of a response."""
        row = await self._row(caller, attachment_id)
        try:  # before the answer begins: it may be deleted then
            file = await opened(self.storage, row.stored_as)
        except FileNotFoundError:
            log.error("attachment_lost", attachment_id=row.pk)
            raise no_attachment(attachment_id) from None
        record = FileRecord(
            id=row.pk,
            filename=row.name,
            num_bytes=row.num_bytes,
            purpose="",
            created_at=int(row.created_at.timestamp()),
            expires_at=None,
        )
        return FileBody(record, file)

    async def purge(self) -> int:
        """Drop what is unused; return how many."""
        num = 0
        for row in await orm.bulk(lambda: list(Attachment.objects.unused().defer("text"))):
            try:
                if await orm.call(Attachment.objects.take_away, row.pk, if_unused=True):
                    await self._drop(row)
                    num += 1
            except Exception:  # the storage keeps it; the others are still dropped
                log.exception("attachment_not_dropped", attachment_id=row.pk)
        if num:
            log.info("attachments_purged", num=num)
        return num

    async def _drop(self, row: Attachment) -> None:
        """Delete the content, then the row."""
        await asyncio.to_thread(self.storage.delete, row.stored_as)
        await orm.call(row.delete)

    async def _row(self, caller: Caller, attachment_id: str) -> Attachment:
        row = await orm.read(Attachment.objects.of(caller.tenant).defer("text").filter(pk=attachment_id).first)
        if row is None:
            raise no_attachment(attachment_id)
        return row


def _user_of(caller: Caller) -> Any:
    """Return the id of the user whose session or key it is."""
    return getattr(caller, "user_id", None)


def storage_for(settings: SiteConfig) -> Storage:
    """Return the storage that ATTACHMENTS["STORAGE"] names; "" is the folder of STATE_DIR, which nothing serves."""
    if settings.attachments.storage:
        return storages[settings.attachments.storage]
    return private_storage(str(Path(settings.state_dir) / _PRIVATE_FOLDER))

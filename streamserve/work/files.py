"""`Files`: the files of tenants, in a Django storage, with a row each. See `Files` in api/batch/files.py.

A row is inserted before its content and deleted after it: a process that is killed in between leaves a row, which the
purge finds. Contents have random names, which no client is shown. Storage and parser block, so they run on threads.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from django.core.exceptions import SuspiciousOperation
from django.core.files.base import File
from django.core.files.storage import FileSystemStorage, Storage, storages
from django.core.files.uploadhandler import TemporaryFileUploadHandler
from django.db import models, transaction
from django.http.multipartparser import MultiPartParser, MultiPartParserError
from django.utils import timezone

from streamserve.api.batch.files import FORM_BYTES, FileBody, Form, no_file
from streamserve.api.call import Body, Call, Caller
from streamserve.api.logs import get_logger
from streamserve.conf import SiteConfig
from streamserve.dialects.batches import PURPOSE, FileRecord, Page
from streamserve.models import Batch, StoredFile
from streamserve.protocol.errors import (
    BadRequest,
    StorageFull,
    UnsupportedMedia,
)
from streamserve.protocol.json_body import file_too_large
from streamserve.protocol.requests import Once
from streamserve.rows import orm
from streamserve.rows.queries import delete_in_parts, hold_limit, last_of, made_once, part_of, sent_before
from streamserve.work.uploads import Uploads

log = get_logger(__name__)

_FOLDER = "streamserve-files"  # in the storage
_PRIVATE_FOLDER = "files"  # in STATE_DIR
_OTHER_FILE = "This Idempotency-Key was sent with another file. Send a new key with a new upload."
_UNFINISHED = timedelta(days=1)  # a file that is not whole by then never will be


class Files:
    """Any event loop of a process that has the site's settings."""

    def __init__(self, settings: SiteConfig) -> None:
        self._settings = settings
        self._limits = settings.limits
        self._uploads = Uploads(settings.limits)

    @property
    def storage(self) -> Storage:
        """Where the contents are."""
        return storage_for(self._settings)

    @asynccontextmanager
    async def body(self, call: Call) -> AsyncIterator[IO[bytes]]:
        """Receive the body of `call`. Raises before that where it cannot be stored."""
        await orm.read(self._check_room, call.caller.tenant, self._uploads.num_bytes_of(call))
        async with self._uploads.receive(call) as body:
            yield body

    @asynccontextmanager
    async def receive(self, call: Call) -> AsyncIterator[Form]:
        """Parse the form in the body of `call`, on a thread."""
        if call.headers.get("content-type", "").partition(";")[0].strip().lower() != "multipart/form-data":
            raise UnsupportedMedia("Send the file as multipart/form-data.", param="Content-Type")
        async with self.body(call) as body:
            form = await asyncio.to_thread(parse_form, call.headers, body, self._limits.max_file_bytes)
            body.close()  # the file of the form is another
            try:
                yield form
            finally:
                if form.file is not None:
                    form.file.close()

    def _check_room(self, tenant: str, num_bytes: int) -> None:
        most = self._limits.max_tenant_file_bytes
        if StoredFile.objects.num_bytes_of(tenant) + num_bytes > most + FORM_BYTES:
            raise StorageFull(f"Your files take up to {most:,} bytes. Delete some.", param="file")

    async def add(
        self, caller: Caller, form: Form, expires_seconds: int | None, once: Once | None = None
    ) -> FileRecord:
        """Store the form's file; with `once`, return the file that its key has stored before."""
        file = form.file
        assert file is not None

        async def make() -> FileRecord:
            return await self.store(
                file,
                caller,
                filename=form.filename or "file",
                purpose=PURPOSE,
                num_bytes=form.num_bytes,
                expires_seconds=expires_seconds,
                once=once,
            )

        return await made_once(lambda: orm.call(_sent_before, once), make)

    async def store(
        self,
        content: IO[bytes],
        caller: Caller,
        *,
        filename: str,
        purpose: str,
        num_bytes: int,
        expires_seconds: int | None = None,
        is_output: bool = False,
        once: Once | None = None,
    ) -> FileRecord:
        """Store a file of `caller`. An output is not shown yet, nor refused. Raises StorageFull, IntegrityError."""
        now = timezone.now()
        seconds = expires_seconds or self._settings.batches.keep_days * 86_400
        row = StoredFile(
            id=f"file-{secrets.token_hex(16)}",
            name=f"{_FOLDER}/{secrets.token_hex(16)}",
            filename=filename[-255:],
            owner=caller.owner,
            tenant=caller.tenant,
            purpose=purpose,
            num_bytes=num_bytes,
            created_at=now,
            expires_at=now + timedelta(seconds=seconds) if seconds else None,
        )
        await orm.call(self._insert, row, not is_output)
        try:
            file = content if isinstance(content, File) else File(content)
            row.name = await asyncio.to_thread(self.storage.save, row.name, file)
            # Only a file that is whole takes the key: an upload that was cut off does not hold it.
            sent = {} if once is None else {"request_key": once.key, "request_digest": once.digest}
            ready = StoredFile.objects.filter(pk=row.pk)
            await orm.write(ready.update, name=row.name, is_ready=not is_output, **sent)
        except BaseException:
            with suppress(Exception):
                await self._drop(row)
            raise
        return record_of(row)

    @transaction.atomic
    def _insert(self, row: StoredFile, is_limited: bool) -> None:
        if is_limited:
            hold_limit(StoredFile.objects.all(), row.tenant)
            self._check_room(row.tenant, row.num_bytes)
        row.save(force_insert=True)

    async def find(self, caller: Caller, file_id: str) -> FileRecord:
        """Return the file."""
        return record_of(await self._row(caller, file_id))

    async def page(self, caller: Caller, page: Page) -> tuple[Sequence[FileRecord], bool]:
        """Return a part of the tenant's files."""
        rows = StoredFile.objects.of(caller.tenant)
        if page.purpose:
            rows = rows.filter(purpose=page.purpose)
        found, has_more = await orm.read(lambda: part_of(rows, page, last_of(rows, page, no_file)))
        return [record_of(row) for row in found], has_more

    async def delete(self, caller: Caller, file_id: str) -> None:
        """Delete the file, unless a batch reads it."""
        row = await self._row(caller, file_id)
        batch_id = await orm.call(self._take_away, row)
        if batch_id is not None:
            message = f"The batch {batch_id} reads this file. Cancel it, or delete the file when it has ended."
            raise BadRequest(message, code="file_in_use", param="file_id")
        await self._drop(row)

    @transaction.atomic
    def _take_away(self, row: StoredFile) -> str | None:
        """Show the file no more, so that no batch begins with it. If a batch reads it, return the batch instead."""
        hold_limit(Batch.objects.all(), row.tenant)  # held while a batch begins
        batch_id = Batch.objects.unfinished().filter(input_file_id=row.pk).values_list("pk", flat=True).first()
        if batch_id is None:
            StoredFile.objects.filter(pk=row.pk).update(is_ready=False, request_key=None)
        return batch_id

    async def content(self, caller: Caller, file_id: str) -> Body:
        """Return the file as the body of a response."""
        row = await self._row(caller, file_id)
        try:  # before the answer begins: it may be deleted then
            file = await opened(self.storage, row.name)
        except FileNotFoundError:
            log.error("stored_file_lost", file_id=row.pk)
            raise no_file(file_id) from None
        return FileBody(record_of(row), file)

    async def open(self, tenant: str, file_id: str) -> IO[bytes]:
        """Open a file of the tenant for a batch that began with it, expired or not. Blocking reads. Raises NotFound."""
        row = await orm.read(StoredFile.objects.filter(pk=file_id, tenant=tenant, is_ready=True).first)
        if row is None:
            raise no_file(file_id)
        return await opened(self.storage, row.name)

    def old(self) -> tuple[models.QuerySet[StoredFile], models.QuerySet[Batch]]:
        """Return expired files, except those that a batch reads, and old batches."""
        now, days = timezone.now(), self._settings.batches.keep_days
        in_use = Batch.objects.unfinished().values("input_file_id")
        expired = StoredFile.objects.expired(now, now - _UNFINISHED).exclude(pk__in=in_use)
        return expired, Batch.objects.finished_before(now - timedelta(days=days)) if days else Batch.objects.none()

    async def purge(self) -> tuple[int, int]:
        """Delete what is old; return how many files and batches."""
        files, batches = self.old()
        num_files = 0
        for row in await orm.bulk(lambda: list(files)):
            try:
                if await orm.call(self._take_away, row) is not None:
                    continue
                await self._drop(row)
                num_files += 1
            except Exception:  # the storage keeps it; the other files are still deleted
                log.exception("stored_file_not_dropped", file_id=row.pk)
        num_batches = await orm.bulk(delete_in_parts, batches)
        if num_files or num_batches:
            log.info("batches_purged", files=num_files, batches=num_batches)
        return num_files, num_batches

    async def _drop(self, row: StoredFile) -> None:
        """Delete the content, then the row."""
        await asyncio.to_thread(self.storage.delete, row.name)
        await orm.call(row.delete)

    async def _row(self, caller: Caller, file_id: str) -> StoredFile:
        row = await orm.read(StoredFile.objects.of(caller.tenant).filter(pk=file_id).first)
        if row is None:
            raise no_file(file_id)
        return row


async def opened(storage: Storage, name: str) -> IO[bytes]:
    """Return a file of the storage, opened on a thread. If the caller is cancelled meanwhile, it is closed again."""
    opening = asyncio.get_running_loop().run_in_executor(None, storage.open, name, "rb")
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close)
        raise


def _close(opening: asyncio.Future[Any]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _sent_before(once: Once | None) -> FileRecord | None:
    """Return the file that this key has stored before, if it is still there. Raises KeyReused."""
    if once is None:
        return None
    StoredFile.objects.filter(request_key=once.key, expires_at__lte=timezone.now()).update(request_key=None)
    row = sent_before(StoredFile.objects.all(), once, _OTHER_FILE)
    return None if row is None else record_of(row)


class _FormHandler(TemporaryFileUploadHandler):
    """Takes one file, in the part `file`, up to a size."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self.found: Any = None

    def new_file(self, field_name: str, *args: Any, **options: Any) -> None:
        if field_name != "file" or self.found is not None:
            raise BadRequest("The form takes one file, in the part 'file'.", code="invalid_form", param=field_name[:64])
        super().new_file(field_name, *args, **options)
        self.found = self.file

    def receive_data_chunk(self, raw_data: bytes, start: int) -> None:
        if start + len(raw_data) > self._max_bytes:
            raise file_too_large(self._max_bytes)
        super().receive_data_chunk(raw_data, start)


def parse_form(headers: Mapping[str, str], body: IO[bytes], max_bytes: int) -> Form:
    """Return the form in `body`. Blocks."""
    handler = _FormHandler(max_bytes)
    meta = {
        "CONTENT_TYPE": headers.get("content-type", ""),
        "CONTENT_LENGTH": headers.get("content-length") or "1",  # 0 is an empty form
    }
    try:
        fields, _ = MultiPartParser(meta, body, [handler], "utf-8").parse()  # type: ignore[arg-type]
    except BaseException as error:
        if handler.found is not None:
            with suppress(OSError):  # what a full disk has not taken is written again
                handler.found.close()
        if not isinstance(error, MultiPartParserError | SuspiciousOperation):
            raise
        raise BadRequest("The form cannot be read as multipart/form-data.", code="invalid_form") from error
    found = handler.found
    return Form(
        fields={str(name): str(value) for name, value in fields.items()},
        filename=None if found is None else found.name,
        num_bytes=0 if found is None else found.size,
        file=found,
    )


def record_of(row: StoredFile) -> FileRecord:
    """Return the row as a value."""
    return FileRecord(
        id=row.pk,
        filename=row.filename,
        num_bytes=row.num_bytes,
        purpose=row.purpose,
        created_at=int(row.created_at.timestamp()),
        expires_at=seconds_of(row.expires_at),
    )


def seconds_of(moment: datetime | None) -> int | None:
    """Return whole seconds of the epoch."""
    return None if moment is None else int(moment.timestamp())


def storage_for(settings: SiteConfig) -> Storage:
    """Return the storage that BATCHES["STORAGE"] names; "" is the folder of STATE_DIR, which no web server serves."""
    if settings.batches.storage:
        return storages[settings.batches.storage]
    return private_storage(str(Path(settings.state_dir) / _PRIVATE_FOLDER))


@lru_cache(maxsize=8)
def private_storage(folder: str) -> Storage:
    return FileSystemStorage(location=folder, file_permissions_mode=0o600, directory_permissions_mode=0o700)

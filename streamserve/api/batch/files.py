"""The endpoints under /v1/files, in the OpenAI shape: input and output files of batches. asyncio; framework-free.

Neither an upload nor a download is ever whole in memory. Who may read an answer of a tenant may read its files.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import IO, Protocol
from urllib.parse import quote

from streamserve.api.call import Body, Call, Caller, Reply, json_reply
from streamserve.api.idempotency import HEADER, once_of
from streamserve.dialects.batches import FileRecord, Page
from streamserve.dialects.openai.batches import MOST_FILES, deleted_json, file_json, list_json, parse_page, parse_upload
from streamserve.protocol.errors import BadRequest, NotFound
from streamserve.protocol.requests import Once
from streamserve.streams.reader.channel import nothing
from streamserve.streams.reader.delivery import Closing

# Beside the file, what a form may have: its fields, and the heads of its parts.
FORM_BYTES = 64 * 1024
_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an upload, received: its fields, and its file on this machine's disk."""

    fields: Mapping[str, str]
    filename: str | None
    num_bytes: int
    file: IO[bytes] | None


class Files(Protocol):
    """The files of the site's tenants."""

    def body(self, call: Call) -> AbstractAsyncContextManager[IO[bytes]]:
        """Receive the body of `call`, within the caller's limits; its file is gone after the context."""

    def receive(self, call: Call) -> AbstractAsyncContextManager[Form]:
        """Receive the form in the body of `call`; its file is gone after the context."""

    async def add(
        self, caller: Caller, form: Form, expires_seconds: int | None, once: Once | None = None
    ) -> FileRecord:
        """Store the form's file; with `once`, return the file that its key has stored before.

        Raises StorageFull, KeyReused.
        """

    async def store(
        self, content: IO[bytes], caller: Caller, *, filename: str, purpose: str, num_bytes: int
    ) -> FileRecord:
        """Store a file of `caller`. Raises StorageFull."""

    async def find(self, caller: Caller, file_id: str) -> FileRecord:
        """Return the file. Raises NotFound for an unknown id and for another tenant's."""

    async def page(self, caller: Caller, page: Page) -> tuple[Sequence[FileRecord], bool]:
        """Return a part of the tenant's files, and whether there are more."""

    async def delete(self, caller: Caller, file_id: str) -> None:
        """Delete the file. Raises NotFound; BadRequest while a batch reads it."""

    async def content(self, caller: Caller, file_id: str) -> Body:
        """Return the file as the body of a response."""


async def upload(call: Call, files: Files) -> Reply:
    """POST /v1/files: store the file of a form."""
    async with files.receive(call) as form:
        expires_seconds = parse_upload(form.fields)
        if form.file is None:
            raise BadRequest("file is missing. Send the file in the part 'file'.", code="missing_field", param="file")
        if not form.num_bytes:
            raise BadRequest("The file is empty.", code="empty_file", param="file")
        once = await asyncio.to_thread(_once_of, call, form) if HEADER in call.headers else None
        return json_reply(file_json(await files.add(call.caller, form, expires_seconds, once)))


def _once_of(call: Call, form: Form) -> Once | None:
    """Return the upload's key and digest. Blocks."""
    assert form.file is not None
    digest = hashlib.file_digest(form.file, "sha256").hexdigest()  # type: ignore[arg-type]  # a file can be read into
    form.file.seek(0)
    return once_of(call, "files", {"fields": dict(form.fields), "filename": form.filename, "file": digest})


async def list_files(call: Call, files: Files) -> Reply:
    """GET /v1/files: a page of the tenant's files."""
    page = parse_page(call.query(), most=MOST_FILES, usual=MOST_FILES)
    found, has_more = await files.page(call.caller, page)
    return json_reply(list_json([file_json(record) for record in found], has_more=has_more))


async def file(call: Call, files: Files) -> Reply:
    """GET /v1/files/{id}: its name, size, purpose and times."""
    return json_reply(file_json(await files.find(call.caller, call.params["file_id"])))


async def delete(call: Call, files: Files) -> Reply:
    """DELETE /v1/files/{id}: delete the file."""
    file_id = call.params["file_id"]
    await files.delete(call.caller, file_id)
    return json_reply(deleted_json(file_id))


async def content(call: Call, files: Files) -> Reply:
    """GET /v1/files/{id}/content: the file itself."""
    return Reply(body=await files.content(call.caller, call.params["file_id"]))


def no_file(file_id: str, param: str = "file_id") -> NotFound:
    """Return the error for an id that names no file of the caller's, whatever it looks like."""
    return NotFound(f"There is no file {file_id[:64]!r} here.", code="file_not_found", param=param)


class FileBody(Closing):
    """A file as a response's `Body`. It is read on a thread, a piece at a time, when the reader has taken the last."""

    def __init__(self, record: FileRecord, file: IO[bytes]) -> None:
        self._record, self._file = record, file
        self.on_close(file.close)

    @property
    def stream(self) -> FileRecord:
        """What log lines name."""
        return self._record

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """No browser shows it as a page, and no middleware compresses it."""
        name = quote(self._record.filename, safe="")
        return [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % self._record.num_bytes),
            (b"content-disposition", f"attachment; filename*=UTF-8''{name}".encode()),
            (b"content-encoding", b"identity"),
            (b"cache-control", b"private, no-store, no-transform"),
            (b"x-content-type-options", b"nosniff"),
        ]

    async def run(self, send: Callable[[bytes], Awaitable[None]], num_untaken: Callable[[], int] = nothing) -> None:
        """Send the file."""
        async for piece in self:
            await send(piece)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            while not self.is_closed and (piece := await asyncio.to_thread(self._file.read, _PIECE_BYTES)):
                yield piece
        finally:
            self.close()

    def cut_off(self) -> bytes | None:
        """Close the file. It has no last bytes that name where to resume."""
        self.close()
        return None

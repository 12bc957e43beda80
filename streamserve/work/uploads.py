"""`Uploads`: the bodies with a file that a process receives, so many at a time, each into a file of this machine.

The caller is known, and a place is taken, before the first byte is asked for. asyncio; the disk is written on threads.
"""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import IO

from streamserve.api.batch.files import FORM_BYTES
from streamserve.api.call import Call
from streamserve.asgi.guard import uploads_busy
from streamserve.protocol.errors import DiskFull, QuotaExceeded
from streamserve.protocol.json_body import announced_bytes, check_encoding, file_too_large
from streamserve.protocol.limits import Limits

_RETRY_SECONDS = 5
_PIECE_BYTES = 1024 * 1024  # written at once; a smaller body stays in memory
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Uploads:
    """The uploads of one process, on the loop that serves."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_bytes = 0  # announced, or what a body without a length may have
        self._by_owner: Counter[str] = Counter()

    def num_bytes_of(self, call: Call) -> int:
        """Return how large the body is, or may be. Raises for a compressed body, and for a body over the limit."""
        check_encoding(call.headers.get("content-encoding", ""))
        announced = announced_bytes(call.headers.get("content-length", ""))
        if announced is None:
            return self._limits.max_file_bytes + FORM_BYTES
        _check_size(announced, self._limits)
        return announced

    @asynccontextmanager
    async def receive(self, call: Call) -> AsyncIterator[IO[bytes]]:
        """Receive the body of `call`; its file is gone after the block. Raises QuotaExceeded, Overloaded, DiskFull."""
        place = self._place(call.caller.owner, self.num_bytes_of(call))
        with place, full_disk_named(), tempfile.SpooledTemporaryFile(max_size=_PIECE_BYTES) as file:
            await _write_body(call, file, self._limits)
            yield file

    @contextmanager
    def _place(self, owner: str, num_bytes: int) -> Iterator[None]:
        limits, total = self._limits, self._num_bytes + num_bytes
        if self._by_owner[owner] >= limits.max_uploads_per_principal:
            message = f"You send {limits.max_uploads_per_principal} files now, which is the limit. Wait until one ends."
            raise QuotaExceeded(message, code="too_many_uploads", retry_after=_RETRY_SECONDS)
        if self._by_owner.total() >= limits.max_uploads or (self._num_bytes and total > limits.max_upload_bytes):
            raise uploads_busy()
        self._num_bytes = total
        self._by_owner[owner] += 1
        try:
            yield
        finally:
            self._num_bytes -= num_bytes
            self._by_owner[owner] -= 1
            self._by_owner += Counter()  # forgets those that have none


def _check_size(num_bytes: int, limits: Limits) -> None:
    """Raise TooLarge for more bytes than a form may have; also where no guard stands."""
    if num_bytes > limits.max_file_bytes + FORM_BYTES:
        raise file_too_large(limits.max_file_bytes)


async def _write_body(call: Call, file: IO[bytes], limits: Limits) -> None:
    """Write the body to `file`, whose place is then its start."""
    pieces, num_held, num_bytes = list[bytes](), 0, 0
    async for piece in call.body():
        num_bytes += len(piece)
        _check_size(num_bytes, limits)
        pieces.append(piece)
        num_held += len(piece)
        if num_held >= _PIECE_BYTES:
            await asyncio.to_thread(file.write, b"".join(pieces))
            pieces, num_held = [], 0
    await asyncio.to_thread(file.write, b"".join(pieces))
    file.seek(0)


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Raise DiskFull for the error of a disk, or a quota of it, that has no room."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        message = "The server's disk has no room for this upload. Send it again later, or a smaller file."
        raise DiskFull(message, retry_after=_RETRY_SECONDS) from error

"""`SSEDecoder`: bytes of an event stream → the data of its events, as they come (WHATWG HTML, 9.2.6).

The other end of protocol/sse.py, for a server that is not ours: lines end in LF, CR or CRLF, a read may end anywhere,
also inside a code point, and nothing is held beyond `max_bytes`. Pure: no I/O.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"


class SSEError(ValueError):
    """Bytes that are no event stream, or a line or an event over the limit."""


class SSEDecoder:
    """Fed bytes, it returns the data of the events that are whole. Comments, ids, names and retries are skipped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()  # the unfinished line
        self._data: list[str] = []  # the data lines of the unfinished event
        self._num_data_bytes = 0
        self._follows_cr = False
        self._is_first = True

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of each event that `chunk` completes. Raises SSEError."""
        if self._follows_cr and chunk.startswith(b"\n"):  # the second half of a CRLF
            chunk = chunk[1:]
        if not chunk:
            return []
        self._follows_cr = chunk.endswith(b"\r")
        *whole, rest = _lines(chunk)
        if not whole:
            self._hold(rest)
            return []
        out: list[str] = []
        self._hold(whole[0])
        self._take(bytes(self._line), out)
        self._line.clear()
        for line in whole[1:]:
            self._take(line, out)
        self._hold(rest)
        return out

    def _hold(self, part: bytes) -> None:
        if len(self._line) + len(part) > self._max_bytes:
            raise SSEError(f"a line of more than {self._max_bytes:,} bytes")
        self._line += part

    def _take(self, line: bytes, out: list[str]) -> None:
        """Take one line; an empty one ends an event."""
        if self._is_first:
            line, self._is_first = line.removeprefix(_BOM), False
        if not line:
            if self._data:
                out.append("\n".join(self._data))
                self._data, self._num_data_bytes = [], 0
            return
        name, _, value = line.partition(b":")
        if name != b"data":
            return
        self._num_data_bytes += len(line)
        if self._num_data_bytes > self._max_bytes:
            raise SSEError(f"an event of more than {self._max_bytes:,} bytes")
        try:
            self._data.append(value.removeprefix(b" ").decode())
        except UnicodeDecodeError as error:
            raise SSEError("an event that is not UTF-8") from error


def _lines(chunk: bytes) -> list[bytes]:
    """Split at LF, CR and CRLF; the last item is what follows the last line end."""
    lines = chunk.splitlines()
    return [*lines, b""] if chunk.endswith((b"\n", b"\r")) else lines

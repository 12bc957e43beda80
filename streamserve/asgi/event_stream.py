"""`EventBounds`: where the events of a `text/event-stream` end, while its bytes come in pieces of any size. Pure.

WHATWG HTML, 9.2.5: a line ends with CRLF, LF or CR; a blank line ends an event. A piece may end inside a CRLF.
"""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventBounds:
    """Fed every byte of a stream. `size`: how many bytes of the event that is open there are."""

    def __init__(self) -> None:
        self.size = 0
        self._is_line_empty = True
        self._ends_in_cr = False  # an LF that comes next belongs to it
        self._has_bare_cr = False  # lines of this stream end in CR alone

    @property
    def is_between(self) -> bool:
        """Whether a comment may be put here: no event is open, and no LF is missing of the CRLF that ended the last."""
        return self.size == 0 and (self._has_bare_cr or not self._ends_in_cr)

    def feed(self, data: bytes) -> int:
        """Take the next bytes; return the size of the largest event that any of them belongs to, as far as it came."""
        if not data:
            return self.size
        place = int(self._ends_in_cr and data.startswith(b"\n"))
        self._has_bare_cr |= self._ends_in_cr and not place
        largest = 0
        for end in _LINE_END.finditer(data, place):
            self._has_bare_cr |= end.group() == b"\r" and end.end() < len(data)
            is_blank = self._is_line_empty and end.start() == place
            self.size += end.end() - place
            largest = max(largest, self.size)
            self.size = 0 if is_blank else self.size
            self._is_line_empty = True
            place = end.end()
        self._is_line_empty = self._is_line_empty and place == len(data)
        self._ends_in_cr = data.endswith(b"\r")
        self.size += len(data) - place
        return max(largest, self.size)

"""What `benchmarks.paths` has recorded: entries of our functions, marks, and windows between two moments."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of one of our functions."""

    at: int
    process: str
    thread: str
    function: tuple[str, int, str]  # file, line, qualified name
    is_resumed: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """Something else that happened (child.py)."""

    at: int
    thread: str
    text: str


class Record:
    """What one process has recorded."""

    def __init__(self, process: str, data: dict[str, Any]) -> None:
        self.process = process
        self.entries: list[Entry] = []
        self.marks: list[Mark] = []
        for at, thread_id, index, note in data["events"]:
            thread = data["threads"].get(str(thread_id), "")
            if index is None:
                self.marks.append(Mark(at, thread, note))
            else:
                self.entries.append(Entry(at, process, thread, tuple(data["functions"][index]), note))

    def find(self, text: str, after: int = 0, thread: str | None = None) -> Mark:
        """Return the first mark of that text, on that thread if one is given. Raises Missing."""
        for mark in self.marks[bisect_right(self.marks, after, key=_at) :]:
            if mark.text == text and thread in (None, mark.thread):
                return mark
        raise Missing(f"{self.process}: nothing is marked {text!r}. Does child.py know this tree's functions?")

    def all(self, pattern: str) -> list[Mark]:
        """Return the marks whose text matches."""
        return [mark for mark in self.marks if re.fullmatch(pattern, mark.text)]

    def window(self, begin: int, end: int) -> Window:
        """Return what happened between two moments, both included."""
        entries, marks = (
            events[bisect_left(events, begin, key=_at) : bisect_right(events, end, key=_at)]
            for events in (self.entries, self.marks)
        )
        return Window(entries, Counter(mark.text[4:] for mark in marks if mark.text.startswith("sql ")))


class Missing(Exception):
    """Something that begins or ends a path did not happen."""


class Window:
    """One walk of a path, or of a part of it."""

    def __init__(self, entries: Sequence[Entry], sql: Counter[str]) -> None:
        self.entries = sorted(entries, key=_at)
        self.sql = sql
        self.calls = Counter(one.function for one in self.entries)  # in the order of first entry
        self.num_resumed = sum(one.is_resumed for one in entries)
        self.files = {file for file, _, _ in self.calls}

    @property
    def size(self) -> tuple[int, int]:
        """Functions, then calls."""
        return len(self.calls), self.calls.total()

    def __add__(self, other: Window) -> Window:
        return Window([*self.entries, *other.entries], self.sql + other.sql)

    def __and__(self, other: Window) -> Window:
        """Return what both have: of each function the first calls here, as many as there are in both."""
        left = self.calls & other.calls
        entries = []
        for one in self.entries:
            if left[one.function]:
                left[one.function] -= 1
                entries.append(one)
        return Window(entries, self.sql & other.sql)

    def listing(self) -> list[dict[str, Any]]:
        """Return the functions in the order of their first entry, with who entered them first and how often."""
        firsts: dict[tuple[str, int, str], Entry] = {}
        for one in self.entries:
            firsts.setdefault(one.function, one)
        return [
            {"process": one.process, "thread": one.thread, "file": file, "line": line, "function": name}
            | {"calls": self.calls[one.function]}
            for (file, line, name), one in firsts.items()
        ]


def _at(event: Entry | Mark) -> int:
    return event.at

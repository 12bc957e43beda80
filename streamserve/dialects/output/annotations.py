"""Citations of the log → `annotations` of the chat API, as its types have them (openai 3.52, `AnnotationURLCitation`).

That type requires a title and a place in the content. A citation without a title shows its source; one of the answer as
a whole shows an empty place: where the content was when it was cited. Citations without a url have no such form. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from streamserve.protocol.events import TEXT, BlockStart, Citation, Token


class Annotations:
    """A fold: what each choice has cited so far, and where each of its text blocks begins in its content."""

    def __init__(self, n: int) -> None:
        # The record of a finished stream does not have `n`: a replay meets further choices.
        self._num_chars = dict.fromkeys(range(n), 0)
        self._begins: dict[tuple[int, int], int] = {}  # (choice, index) of the text blocks that have a start
        self._num_shown: Counter[int] = Counter()

    def note(self, event: BlockStart | Token, kind: str) -> None:
        """Take an event of a block of that kind."""
        if isinstance(event, BlockStart):
            self._begins[event.choice, event.index] = self._num_chars.get(event.choice, 0) if kind == TEXT else -1
        elif kind == TEXT:
            self._num_chars[event.choice] = self._num_chars.get(event.choice, 0) + len(event.text)

    def of(self, citation: Citation) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each choice that shows it, with its annotation.

        `index` is its number there: the official client joins deltas by it.
        """
        if citation.url is None:
            return
        choices = tuple(self._num_chars) if citation.choice is None else (citation.choice,)
        for choice in choices:
            start, end = self._place(choice, citation)
            place = {"start_index": start, "end_index": end}
            cited = {"url": citation.url, "title": citation.title or citation.source, **place}
            yield choice, {"index": self._num_shown[choice], "type": "url_citation", "url_citation": cited}
            self._num_shown[choice] += 1

    def _place(self, choice: int, citation: Citation) -> tuple[int, int]:
        """Return where in the content the cited characters are."""
        index = citation.index or 0
        begin = self._begins.get((choice, index), -1 if index else 0)
        if citation.start is None or citation.end is None or begin < 0:
            num_chars = self._num_chars.get(choice, 0)
            return num_chars, num_chars
        return begin + citation.start, begin + citation.end

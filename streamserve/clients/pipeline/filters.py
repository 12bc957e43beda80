"""Output filters: they see the text of an answer before any reader does, and pass, replace or stop it.

A filter holds back what may be the beginning of something that it acts on, `MAX_HELD_CHARS` at most. Each run has its
own. A model continues after its own text, not after a filter's. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

# A filter that holds back more than this shows readers a pause; longer patterns are refused.
MAX_HELD_CHARS = 256


class Stopped(Exception):
    """A filter ends the answer: finish_reason `content_filter`. `text` may still be shown."""

    def __init__(self, text: str = "") -> None:
        super().__init__("the answer was stopped by a filter")
        self.text = text


class OutputFilter(Protocol):
    """One filter of one run."""

    def feed(self, text: str) -> str:
        """Take the next text, and return what may be shown by now. Raises Stopped."""

    def flush(self) -> str:
        """Return what was held back: the text is over. Raises Stopped."""


class PatternFilter:
    """Acts on what a regular expression matches. `_on_match` returns what is shown instead, or None to stop.

    Shown text lags by `max_chars`, the longest match that is found whole, and one character, on which its end may
    depend. What is shown does not depend on how the text was cut.
    """

    def __init__(self, pattern: str, *, max_chars: int) -> None:
        if not 0 < max_chars <= MAX_HELD_CHARS:
            raise ValueError(f"max_chars is 1 to {MAX_HELD_CHARS}")
        self._pattern = re.compile(pattern, re.IGNORECASE)
        self._num_held = max_chars + 1
        self._held = ""  # not shown yet
        self._before = ""  # the character before it, for \b and lookbehind

    def feed(self, text: str) -> str:
        """Take the next text, and return what may be shown by now. Raises Stopped."""
        self._held += text
        return self._show(len(self._held) - self._num_held)

    def flush(self) -> str:
        """Return what was held back. Raises Stopped."""
        return self._show(len(self._held))

    def _on_match(self, match: re.Match[str]) -> str | None:
        raise NotImplementedError

    def _show(self, num_chars: int) -> str:
        """Return the first `num_chars` of what is held, with the matches that begin there acted on."""
        text, at = self._before + self._held, len(self._before)
        limit, shown = at + max(0, num_chars), ""
        while at < limit:
            match = self._pattern.search(text, at)
            if match is None or match.start() >= limit:
                shown, at = shown + text[at:limit], limit
                break
            shown += text[at : match.start()]
            at = match.end()
            if match.end() == match.start():  # an empty match is none
                at += 1
                shown += text[match.start() : at]
                continue
            instead = self._on_match(match)
            if instead is None:
                self._held = ""
                raise Stopped(shown)
            shown += instead
        self._before, self._held = text[max(0, at - 1) : at], text[at:]
        return shown


class Blocklist(PatternFilter):
    """Stops the answer at a word of the list, or shows `replacement` instead. Whole words, in upper or lower case.

    No character of such a word is shown, wherever the tokens cut it.
    """

    def __init__(self, words: Iterable[str], *, replacement: str | None = None) -> None:
        words = sorted(filter(None, words), key=len, reverse=True)
        if not words:
            raise ValueError("a blocklist needs a word")
        super().__init__(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)", max_chars=len(words[0]))
        self._replacement = replacement

    def _on_match(self, match: re.Match[str]) -> str | None:
        return self._replacement


class Redaction(PatternFilter):
    """Shows `replacement` instead of what a regular expression matches: card numbers, e-mail addresses.

    A match longer than `max_chars` is not found whole: choose it generously.
    """

    def __init__(self, pattern: str, replacement: str = "[removed]", *, max_chars: int = 64) -> None:
        super().__init__(pattern, max_chars=max_chars)
        self._replacement = replacement

    def _on_match(self, match: re.Match[str]) -> str:
        return self._replacement


class Chain:
    """Several filters, each fed with what the filter before it shows."""

    def __init__(self, filters: Iterable[OutputFilter]) -> None:
        self._filters = tuple(filters)

    @property
    def is_empty(self) -> bool:
        """Whether it has no filter."""
        return not self._filters

    def feed(self, text: str) -> str:
        """Return what may be shown by now. Raises Stopped."""
        return self._through(text, self._filters)

    def flush(self) -> str:
        """Return the rest. Raises Stopped."""
        shown = ""
        for index, one in enumerate(self._filters):
            try:
                rest = one.flush()
            except Stopped as stopped:
                raise Stopped(shown + self._passed(stopped.text, index + 1)) from None
            shown += self._through(rest, self._filters[index + 1 :])
        return shown

    def _through(self, text: str, filters: tuple[OutputFilter, ...]) -> str:
        for index, one in enumerate(filters):
            try:
                text = one.feed(text)
            except Stopped as stopped:
                raise Stopped(self._passed(stopped.text, len(self._filters) - len(filters) + index + 1)) from None
        return text

    def _passed(self, text: str, first: int) -> str:
        """Return `text` as the filters from `first` on show it, with what they held back: nothing follows."""
        rest = Chain(self._filters[first:])
        try:
            return rest.feed(text) + rest.flush()
        except Stopped as stopped:
            return stopped.text

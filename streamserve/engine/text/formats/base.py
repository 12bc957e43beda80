"""The seam between a model's text and the blocks of its answer: `OutputFormat`, its `Parser`, and what a parser says.

A model marks its thoughts and tool calls with tags. Where the tokenizer has a tag as one token, only that token is the
tag: text that spells it is text, so that a document that an answer quotes can forge neither a thought nor a call. Such
a token reaches the parser as one character that no decoder gives, a lone surrogate; `Tags` knows which. Other tags are
found in the text. Pure: no I/O, no clock, no transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from streamserve.engine.text.tokenizer import Prompt
from streamserve.protocol.requests import GenerateRequest, Grammar

# UTF-8 has no surrogates, so no decoded text holds one.
_FIRST_MARK = 0xD800
_MARKS = re.compile("[\ud800-\udfff]")
_QUOTED = re.compile("«(.*?)»", re.DOTALL)


class Opened(NamedTuple):
    """A block begins. The block before it is over, whether it was closed or not. `name` is a tool's."""

    kind: str
    name: str | None = None


class Written(NamedTuple):
    """Text of the open block; of a text block, which begins if none is open."""

    text: str


class Closed(NamedTuple):
    """The open block is whole. What follows it and is no block is markup."""


class Markup(NamedTuple):
    """Text that stands in no block: a tag, the white space around it, the frame of a call."""

    text: str


class Made(NamedTuple):
    """Text of the open block that stands for markup before it: arguments that the model left out, or quoted."""

    text: str


Part = Opened | Written | Closed | Markup | Made


class Parser(Protocol):
    """The state of one answer between the blocks. The texts of all its parts but `Made`, joined, are what it was fed.

    `num_calls` counts the whole tool calls so far.
    """

    num_calls: int

    def passes(self, text: str) -> bool:
        """Return whether `feed(text)` would return the text and change nothing. It may be False for such text too."""

    def feed(self, text: str) -> list[Part]:
        """Return what is certain now. Never raises, whatever the text."""

    def finish(self) -> list[Part]:
        """Return what is left at the end."""


class OutputFormat(Protocol):
    """How one model marks thoughts and tool calls, for its tokenizer."""

    name: str
    tags: Tags

    def parser(self, request: GenerateRequest, prompt: Prompt) -> Parser | None:
        """Return the parser of an answer to `prompt`, in the state that the prompt begins it in; None: it is text."""

    def grammar(self, request: GenerateRequest, prompt: Prompt) -> Grammar | None:
        """Return the grammar of the whole output, its markup included, that `request` asks for; None: it is free."""


class Tags:
    """The tags that a tokenizer has as one token, each with the character that stands for it in a parser's text.

    `is_hidden(id)`: the token is left out of plain text. With `is_text` a tag's own text stands for it.
    """

    def __init__(
        self,
        texts: Iterable[str],
        token_id: Callable[[str], int | None],
        is_hidden: Callable[[int], bool],
        *,
        is_text: bool = False,
    ) -> None:
        self.ids: dict[str, int] = {}
        for text in dict.fromkeys(texts):
            if (one := token_id(text)) is not None:
                self.ids[text] = one
        self._marks = {text: text if is_text else chr(_FIRST_MARK + index) for index, text in enumerate(self.ids)}
        self._texts = {mark: text for text, mark in self._marks.items()}
        self.marks: Mapping[int, str] = {self.ids[text]: mark for text, mark in self._marks.items()}
        self.has_hidden = any(map(is_hidden, self.ids.values()))

    def pattern(self, source: str) -> str:
        """Return a regular expression in which each «tag» is the tag: its character, or its text."""
        return _QUOTED.sub(lambda match: self._marks.get(match[1]) or re.escape(match[1]), source)

    def marked(self, text: str) -> str:
        """Return `text` with each tag that is a token as its character."""
        for tag, mark in self._marks.items():
            text = text.replace(tag, mark)
        return text

    def shown(self, text: str) -> str:
        """Return `text` with each tag as its text."""
        return _MARKS.sub(lambda match: self._texts.get(match[0], ""), text) if _MARKS.search(text) else text

"""A model's text as blocks: `OutputFormat`, its `Parser`, the parts that a parser finds, and `BlockWriter`.

A model marks its thoughts and tool calls with tags. Where the tokenizer has a tag as one token, only that token is the
tag: text that spells it is text, so that a document that an answer quotes can forge neither a thought nor a call. Such
a token reaches the parser as one character that no decoder gives, a lone surrogate; `Tags` knows which. Other tags are
found in the text.

`BlockWriter` makes events of the parts and the ids that made them. Each id is one `Token` event, at once, in the block
that is open when its text is known: a `Token` with "" for markup and for text that is held back. So readers are never
behind by what the parser waits for. The blocks' own events stand before the id's, and one id carries text of one block
only; its text for the next block comes with the next id. So an id that was shown was shown with all its events, and
the events of the id after it differ from new events in their index: a resumed answer repeats them, and
`streams/transcript.py` drops them. Only the end has tokens without ids: the text that is left, at most one of each
block. A text block at the beginning is the implied block, which has no events. Pure: no I/O, no clock, no transformers.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from streamserve.engine.text.tokenizer import Prompt, StopStrings
from streamserve.protocol.events import TEXT, BlockStart, BlockStop, Event, Token
from streamserve.protocol.ids import tool_call_id
from streamserve.protocol.requests import GenerateRequest, Grammar

# UTF-8 has no surrogates, so no decoded text holds a surrogate.
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

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what is left at the end. `is_cut`: the model had not ended the answer."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSource:
    """What the choices of a request need for their blocks.

    `answer` names the answer in the ids of its tool calls. `has_echo`: the answer begins with what is
    shown of the prompt, in an implied text block.
    """

    tags: Tags
    make_parser: Callable[[], Parser]
    answer: str
    has_echo: bool = False


class BlockWriter:
    """The blocks of one choice.

    `is_stopped`: a stop string has ended the text, of text blocks only; nothing follows it.
    """

    def __init__(self, source: AnswerSource, stop: StopStrings | None, *, choice: int) -> None:
        self.is_stopped = False
        self.num_reasoning_tokens = 0
        self._parser = source.make_parser()
        self._stop = stop
        self._choice = choice
        self._answer = source.answer
        self._waiting: deque[Part] = deque()
        self._kind = TEXT if source.has_echo else None  # of the newest block; None before the first
        self._index = 0
        self._is_implied, self._is_closed = source.has_echo, False
        self._events: list[Event] = []

    @property
    def num_calls(self) -> int:
        """How many whole tool calls there are."""
        return self._parser.num_calls

    def feed(self, token_id: int, text: str, *, is_checked: bool = True) -> list[Event]:
        """Return the events of an id and its text, the id's `Token` last. `is_checked`: stop strings count."""
        if self._stop is None and not self._waiting and self._takes_text() and self._parser.passes(text):
            self.num_reasoning_tokens += self._kind == "thinking"
            return [Token(text=text, token_ids=(token_id,), index=self._index, choice=self._choice)]
        self._waiting.extend(self._parser.feed(text) if text else ())
        return self._with_id(token_id, self._take(is_checked=is_checked))

    def finish(self, token_id: int, text: str, *, is_checked: bool = True, is_cut: bool = False) -> list[Event]:
        """Return the events of the last id and all that is left, with no block open at the end.

        `is_cut`: the model had not ended the answer.
        """
        self._waiting.extend(self._parser.feed(text) if text else ())
        self._waiting.extend(self._parser.finish(is_cut=is_cut))
        is_first = True
        while is_first or self._waiting:
            written = self._take(is_checked=is_checked)
            if not self._waiting and not self.is_stopped:
                written += self._flush_stop()
            if is_first:
                self._with_id(token_id, written, keeps=True)
            elif written:
                self._events.append(Token(text=written, token_ids=(), index=self._index, choice=self._choice))
            is_first = False
        return self.close()

    def close(self) -> list[Event]:
        """Return what is not returned yet, and close the open block."""
        if self._kind is not None and not self._is_implied:
            self._events.append(BlockStop(choice=self._choice, index=self._index))
            self._is_implied = True  # closed once
        events, self._events = self._events, []
        return events

    def _with_id(self, token_id: int, text: str, *, keeps: bool = False) -> list[Event]:
        """Append the id's event, in a block that is begun if there is none."""
        if self._kind is None:
            self._begin(Opened(TEXT))
        self.num_reasoning_tokens += self._kind == "thinking"
        self._events.append(Token(text=text, token_ids=(token_id,), index=self._index, choice=self._choice))
        if keeps:
            return []
        events, self._events = self._events, []
        return events

    def _take(self, *, is_checked: bool) -> str:
        """Take parts up to the text of a second block; return the text."""
        out = ""
        while self._waiting and not self.is_stopped:
            part = self._waiting[0]
            if isinstance(part, Closed):
                out += self._flush_stop()
                self._is_closed = True
            elif isinstance(part, Opened) or (isinstance(part, Written | Made) and not self._takes_text()):
                out += self._flush_stop()
                if out or self.is_stopped:
                    return out
                self._begin(part if isinstance(part, Opened) else Opened(TEXT))
                if not isinstance(part, Opened):
                    continue
            elif isinstance(part, Written | Made):
                out += self._filtered(part.text, is_checked=is_checked)
            self._waiting.popleft()
        if self.is_stopped:
            self._waiting.clear()
        return out

    def _takes_text(self) -> bool:
        return self._kind is not None and not self._is_closed

    def _begin(self, opened: Opened) -> None:
        """Begin a block, and end the previous block. A text block that is the first needs no event."""
        if self._kind is not None:
            if not self._is_implied:
                self._events.append(BlockStop(choice=self._choice, index=self._index))
            self._index += 1
        self._is_implied = self._kind is None and opened.kind == TEXT
        self._kind, self._is_closed = opened.kind, False
        if not self._is_implied:
            is_call = opened.name is not None
            call_id = tool_call_id(self._answer, self._choice, self._index) if is_call else None
            self._events.append(
                BlockStart(choice=self._choice, index=self._index, kind=opened.kind, id=call_id, name=opened.name)
            )

    def _filtered(self, text: str, *, is_checked: bool) -> str:
        """Return what stop strings let through."""
        if self._stop is None or self._kind != TEXT:
            return text
        if not is_checked:
            return self._stop.feed_unchecked(text)
        text = self._stop.feed(text)
        self.is_stopped = self._stop.is_found
        return text

    def _flush_stop(self) -> str:
        """Return the text that was held back because a stop string might begin there; none spans two blocks."""
        return "" if self._stop is None else self._stop.flush()

"""`MarkedFormat`: the format of a known family of models for one tokenizer. `PlainFormat`: text, with its tags as text.

Read-only after it is made; used on tokenising threads and the event loop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from streamserve.engine.text.formats import lark
from streamserve.engine.text.formats.base import Parser, Part, Tags, Written
from streamserve.engine.text.formats.known import KNOWN, ModelMarkup
from streamserve.engine.text.formats.regions import THINKING, RegionParser, Regions
from streamserve.engine.text.tokenizer import Prompt, Tokenizer
from streamserve.protocol.requests import GenerateRequest, Grammar, Tool

_QUOTED = re.compile("«(.*?)»", re.DOTALL)
_TAIL = 64  # tokens of a prompt's end that may open a region


class TaggedTokenizer(Tokenizer, Protocol):
    """A tokenizer that says which texts are one token of their own."""

    def tag_id(self, text: str) -> int | None:
        """Return the id of an added token, None for text that is none."""


def tags_of(markups: Iterable[ModelMarkup]) -> list[str]:
    """Return the tags that appear in the markups, in order."""
    sources = [
        source
        for markup in markups
        for source in (
            *(part for region in markup.regions for part in (region.opening, region.closing, region.separator)),
            *(markup.thought, markup.call, markup.calls_begin, markup.calls_between, markup.calls_end, markup.answer),
        )
    ]
    return list(dict.fromkeys(tag for source in sources for tag in _QUOTED.findall(source)))


def make_tags(texts: Iterable[str], tokenizer: TaggedTokenizer) -> Tags:
    """Return those of the tags that the tokenizer has as tokens."""
    return Tags(texts, tokenizer.tag_id, tokenizer.is_special)


class PlainParser:
    """An answer that is one text. Tags are text too."""

    num_calls = 0

    def __init__(self, tags: Tags) -> None:
        self._tags = tags

    def passes(self, text: str) -> bool:
        """Return whether the text has no tag."""
        return self._tags.shown(text) is text

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        return [Written(self._tags.shown(text))]

    def finish(self) -> list[Part]:
        """Return nothing: nothing is held back."""
        return []


class PlainFormat:
    """See `OutputFormat`. For models without a known markup: no tag of any known one disappears from the text."""

    name = "text"

    def __init__(self, tokenizer: TaggedTokenizer) -> None:
        self.tags = make_tags(tags_of(KNOWN), tokenizer)

    def parser(self, request: GenerateRequest, prompt: Prompt) -> Parser | None:
        """Return a parser only if a tag would be left out of the text."""
        return PlainParser(self.tags) if self.tags.has_hidden else None

    def grammar(self, request: GenerateRequest, prompt: Prompt) -> Grammar | None:
        """Return the request's own grammar: the whole output is text. Raises BadRequest for a forced call."""
        lark.refuse_forced(request, self.name)
        return request.grammar


class MarkedFormat:
    """See `OutputFormat`."""

    def __init__(self, markup: ModelMarkup, tokenizer: TaggedTokenizer) -> None:
        self.name = markup.name
        self.tags = make_tags(tags_of((markup,)), tokenizer)
        self.markup = markup
        self._tokenizer = tokenizer
        self._regions = Regions(markup.regions, self.tags)

    def parser(self, request: GenerateRequest, prompt: Prompt) -> Parser | None:
        """Return the parser of an answer. A prompt that is no chat is the caller's own markup, and so is its answer."""
        if request.messages is None:
            return PlainParser(self.tags) if self.tags.has_hidden else None
        return RegionParser(
            self._regions,
            starts_in=self._starts_in(request, prompt),
            tools=tools_of(request),
            is_continued=is_continued(request),
        )

    def grammar(self, request: GenerateRequest, prompt: Prompt) -> Grammar | None:
        """Return the grammar of the whole output, or None if the request asks for nothing."""
        if request.messages is None:
            return request.grammar
        return lark.whole_output(self.markup, self.tags, request, self.thought(request, prompt))

    def thought(self, request: GenerateRequest, prompt: Prompt) -> lark.Thought:
        """Return whether the output begins in a thought, may have one, or has none."""
        region = self._starts_in(request, prompt)
        if region is not None:
            is_thought = self.markup.regions[region].kind == THINKING
            return lark.Thought.BEGUN if is_thought else lark.Thought.NONE
        if is_continued(request) or not self.markup.thought:
            return lark.Thought.NONE
        closings = [one.closing for one in self._regions.all if one.region.kind == THINKING]
        tail = self._tail(prompt).rstrip()
        has_ended = any(match.end() == len(tail) for closing in closings for match in closing.finditer(tail))
        return lark.Thought.NONE if has_ended else lark.Thought.MAYBE

    def _starts_in(self, request: GenerateRequest, prompt: Prompt) -> int | None:
        """Return the number of the region that the prompt leaves open."""
        if not is_continued(request):
            return self._regions.left_open_by(self._tail(prompt))
        assert request.messages
        last = request.messages[-1]
        if not last.content and last.extra.get("reasoning_content"):
            kinds = [one.kind for one in self.markup.regions]
            return kinds.index(THINKING) if THINKING in kinds else None
        return self._regions.left_open_in(self.tags.marked(last.content))

    def _tail(self, prompt: Prompt) -> str:
        return tail_of(prompt, self.tags, self._tokenizer)


def tail_of(prompt: Prompt, tags: Tags, tokenizer: Tokenizer, *, num_tokens: int | None = _TAIL) -> str:
    """Return the text of a prompt's last tokens, None: of all, a tag as its character."""
    out, data = "", b""
    for token_id in prompt.token_ids[-num_tokens:] if num_tokens else prompt.token_ids:
        mark = tags.marks.get(token_id)
        if mark is None:
            data += tokenizer.token_bytes(token_id)
        else:
            out, data = out + data.decode(errors="replace") + mark, b""
    return out + data.decode(errors="replace")


def tools_of(request: GenerateRequest) -> Mapping[str, Tool] | None:
    """Return the request's tools by name; None if it has none to call."""
    if not request.tools or request.tool_choice.mode == "none":
        return None
    return {tool.name: tool for tool in request.tools}


def is_continued(request: GenerateRequest) -> bool:
    """Return whether the beginning of the answer is the request's last message."""
    return request.continue_final_message or bool(request.chat_template_kwargs.get("continue_final_message"))

"""The formats of a model's output, and `choose_format`: the setting's, else the tokenizer's own, else a known format.

    PlainFormat       text, with its tags as text: a model without markup
    MarkedFormat      a known family of models (known.py), for one tokenizer
    TemplateFormat    what the model's own tokenizer describes in its `response_template`

transformers reads and checks such a template and parses the values of calls; the text is cut here, as for the known
formats, so that ids keep their blocks and a call that does not parse is text. A call's arguments come when it is
whole: a template may describe any syntax. Its patterns are of text, so tags that are tokens are fed as their text.
(Source: transformers.utils.chat_parsing, 5.23.)

Read-only after they are made; used on tokenising threads and the event loop.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from streamserve.engine.text.formats import lark
from streamserve.engine.text.formats.base import OutputFormat, Parser, Part, Tags, Written
from streamserve.engine.text.formats.json_call import Call, call_of
from streamserve.engine.text.formats.known import ALIASES, KNOWN, ModelMarkup
from streamserve.engine.text.formats.lark import holds_calls
from streamserve.engine.text.formats.regions import (
    BETWEEN,
    TEXT,
    THINKING,
    TOOL_USE,
    Region,
    RegionParser,
    Regions,
)
from streamserve.engine.text.tokenizer import Prompt, Tokenizer
from streamserve.protocol.errors import BadRequest, EngineUnavailable
from streamserve.protocol.requests import GenerateRequest, Grammar, Tool

_QUOTED = re.compile("«(.*?)»", re.DOTALL)
_TAIL = 64  # tokens of a prompt's end that may open a region


class TaggedTokenizer(Tokenizer, Protocol):
    """A tokenizer that tells which texts are one token of their own."""

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
    """Return the tags that the tokenizer has as tokens."""
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

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return nothing: nothing is held back."""
        return []


class PlainFormat:
    """See `OutputFormat`. For models without a known markup: no tag of any known markup disappears from the text."""

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
        """Return the grammar of the whole output, or None if the request asks for no grammar."""
        if request.messages is None:
            return request.grammar
        return lark.whole_output(self.markup, self.tags, request, self.thought(request, prompt))

    def thought(self, request: GenerateRequest, prompt: Prompt) -> lark.Thought:
        """Return whether the output begins in a thought, may have a thought, or has no thought."""
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


logger = logging.getLogger(__name__)

_KINDS = {
    "content": TEXT,
    "reasoning_content": THINKING,
    "reasoning": THINKING,
    "thinking": THINKING,
    "tool_calls": TOOL_USE,
}


class TemplateFormat:
    """See `OutputFormat`."""

    name = "response_template"

    def __init__(self, template: dict[str, Any], tokenizer: TaggedTokenizer, added: Mapping[str, int]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._template = load_response_template(template)
        source = json.dumps(template, ensure_ascii=False).replace("\\", "")
        self.tags = Tags([text for text in added if text in source], added.get, tokenizer.is_special, is_text=True)
        self._tokenizer = tokenizer
        self._regions = Regions(tuple(self._region(field) for field in self._template.fields.values()), self.tags)

    def parser(self, request: GenerateRequest, prompt: Prompt) -> Parser | None:
        """Return the parser of an answer, in the state in which the end of the prompt leaves it."""
        if request.messages is None:
            return PlainParser(self.tags) if self.tags.has_hidden else None
        begun = self._template.truncate_past_last_anchor(tail_of(prompt, self.tags, self._tokenizer, num_tokens=None))
        return RegionParser(
            self._regions,
            starts_in=self._regions.left_open_in(begun),
            tools=tools_of(request),
            is_continued=is_continued(request) or bool(begun.strip()),
        )

    def grammar(self, request: GenerateRequest, prompt: Prompt) -> Grammar | None:
        """Return the request's own grammar: a template defines how to read calls, not how to write them.

        Raises BadRequest for what would need that.
        """
        if request.messages is None:
            return request.grammar
        is_held = holds_calls(request)
        if is_held or (request.grammar is not None and self._has_thoughts):
            raise BadRequest(
                "this model's output is read by its response_template, which cannot hold it to a grammar. "
                "Name its FORMAT in the settings; or use tool_choice auto, parallel calls, no strict tools and no "
                "grammar or response_format.",
                code="unsupported_grammar",
                param="tools" if is_held else "grammar",
            )
        return request.grammar

    @property
    def _has_thoughts(self) -> bool:
        return any(one.region.kind == THINKING for one in self._regions.all)

    def _region(self, field: Any) -> Region:
        """Return a field as a region. The region that needs no opening is the text outside; its closing is markup."""
        closing = "" if field.close_re is None else field.close_re.pattern
        if field.open_re is None:
            return Region(kind=BETWEEN, opening=closing or r"(?!)", can_grow=field.close_literals is None)
        kind = _KINDS.get(field.name, BETWEEN)
        return Region(
            kind=kind,
            opening=field.open_re.pattern
            if kind != BETWEEN
            else r"(?!)",  # what is known to no dialect stays text, with its tags
            closing=rf"\s{{0,8}}(?:{closing})" if closing and kind == THINKING else closing,
            is_first=field.open_re.match("") is not None,
            can_grow=field.open_literals is None,
            read=partial(_calls_of, field) if kind == TOOL_USE else None,
        )


def _calls_of(field: Any, body: str, captures: Mapping[str, str], tools: Mapping[str, Tool]) -> list[Call] | None:
    """Return the calls of a region, None if it does not hold together."""
    from transformers.utils.chat_parsing.content_parsers import process_field

    try:
        value = process_field(body, field, dict(captures))
        found = [_call_of(one) for one in (value if isinstance(value, list) else [value])]
    except Exception:  # what a template does with a model's text has no other bounds
        logger.debug("a call does not parse", exc_info=True)
        return None
    return found if found and all(found) else None  # type: ignore[return-value]


def _call_of(value: Any) -> Call | None:
    function = value.get("function", value)
    name, arguments = function.get("name"), function.get("arguments")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments or {}, dict):
        return None
    return call_of(name, arguments or {})


NAMES = ("text", *(one.name for one in KNOWN), *ALIASES)


class TemplatedTokenizer(TaggedTokenizer, Protocol):
    """A tokenizer with its model's description of its markup."""

    chat_template: str
    response_template: dict[str, Any] | None

    @property
    def added_ids(self) -> Mapping[str, int]:
        """The added tokens by their text."""


def choose_format(tokenizer: TemplatedTokenizer, setting: str | None = None) -> OutputFormat:
    """Return the format. `setting` is a name of NAMES, or the dotted path of a function that makes a format.

    Raises EngineUnavailable for a setting that names neither.
    """
    if setting is not None and "." in setting:
        return _imported(setting, tokenizer)
    if setting is not None:
        return _named(ALIASES.get(setting, setting), tokenizer)
    if tokenizer.response_template:
        try:
            return TemplateFormat(tokenizer.response_template, tokenizer, tokenizer.added_ids)
        except Exception:  # a template may be anything, also one of a later version
            logger.warning("the tokenizer's response_template cannot be used; the format is looked for", exc_info=True)
    for markup in KNOWN:
        if markup.is_it(tokenizer.chat_template, lambda text: tokenizer.tag_id(text) is not None):
            return MarkedFormat(markup, tokenizer)
    return PlainFormat(tokenizer)


def _named(name: str, tokenizer: TemplatedTokenizer) -> OutputFormat:
    if name == PlainFormat.name:
        return PlainFormat(tokenizer)
    for markup in KNOWN:
        if markup.name == name:
            return MarkedFormat(markup, tokenizer)
    message = (
        f"FORMAT {name!r} is not known. It is one of {', '.join(sorted(NAMES))}, or the dotted path of a function."
    )
    raise EngineUnavailable(message, code="load_failed")


def _imported(path: str, tokenizer: TemplatedTokenizer) -> OutputFormat:
    module, _, name = path.rpartition(".")
    try:
        make = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EngineUnavailable(f"FORMAT {path!r} cannot be imported: {error}", code="load_failed") from error
    made: OutputFormat = make(tokenizer)
    return made

"""`TemplateFormat`: the format that a model's own tokenizer describes in its `response_template`.

transformers reads and checks the template and parses the values of calls; the text is cut here, as for the known
formats, so that ids keep their blocks and a call that does not parse is text. A call's arguments come when it is
whole: a template may describe any syntax. Its patterns are of text, so tags that are tokens are fed as their text.
(Source: transformers.utils.chat_parsing, 5.23.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from streamserve.engine.text.formats.base import Parser, Tags
from streamserve.engine.text.formats.json_call import Call, call_of
from streamserve.engine.text.formats.lark import holds_calls
from streamserve.engine.text.formats.markup import PlainParser, TaggedTokenizer, is_continued, tail_of, tools_of
from streamserve.engine.text.formats.regions import (
    BETWEEN,
    TEXT,
    THINKING,
    TOOL_USE,
    Region,
    RegionParser,
    Regions,
)
from streamserve.engine.text.tokenizer import Prompt
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import GenerateRequest, Grammar, Tool

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
        """Return the request's own grammar: a template says how to read calls, not how to write them.

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
        """Return a field as a region. The one that needs no opening is the text outside; its closing is markup."""
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

"""The grammar of a whole output: a thought, then the calls that are forced, or text that matches the request's grammar.

In llguidance's Lark (docs/syntax.md of guidance-ai/llguidance): a tag that is a token is `<[id]>`, so that text that
spells it is not the tag, as it is not for the parser. Only the text is made here; `engine/grammar/` compiles it. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from streamserve.engine.grammar.gbnf import as_lark
from streamserve.engine.grammar.limits import GrammarLimits
from streamserve.engine.text.formats.base import Tags
from streamserve.engine.text.formats.xml_call import parameters_of
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.requests import GenerateRequest, Grammar, Tool

if TYPE_CHECKING:
    from streamserve.engine.text.formats.known import ModelMarkup

# A blank after a comma or a colon, as most models were trained to write the arguments of a call.
_SPACED = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_PIECES = re.compile(r"«(.*?)»|\$(\w+)", re.DOTALL)


class Thought(Enum):
    """Whether an output begins within a thought, may begin with a thought, or has no thought."""

    BEGUN = auto()
    MAYBE = auto()
    NONE = auto()


def whole_output(markup: ModelMarkup, tags: Tags, request: GenerateRequest, thought: Thought) -> Grammar | None:
    """Return the grammar of the output that `request` asks for; None where it may be any.

    Raises BadRequest for a call that the model has no markup for.
    """
    tools = callable_tools(request)
    is_forced = bool(tools) and request.tool_choice.mode == "required"
    if not markup.call:
        refuse_forced(request, markup.name)
    if request.grammar is None and not (markup.call and holds_calls(request)):
        return None
    if not tools and thought is Thought.NONE and markup.answer == "$text":
        return request.grammar
    rules = _Rules(markup, tags)
    before = rules.thought(thought)
    if is_forced:
        rules.add("start", f"{before} {rules.calls(tools, request.parallel_tool_calls)}")
    elif request.grammar is not None:
        answer = rules.answer(request.grammar)
        calls = f" | {rules.calls(tools, request.parallel_tool_calls)}" if tools and markup.call else ""
        rules.add("start", f"{before} ({answer}{calls})")
    else:
        rules.add("start", f"{before} {rules.text_or_calls(tools, request.parallel_tool_calls)}")
    return Grammar(kind="lark", value=rules.source())


def holds_calls(request: GenerateRequest) -> bool:
    """Return whether the request asks for a call, for one call at most, for some of the tools, or for strict tools."""
    tools, choice = callable_tools(request), request.tool_choice
    is_bound = choice.mode == "required" or bool(choice.names) or not request.parallel_tool_calls
    return bool(tools) and (is_bound or any(tool.strict for tool in tools))


def refuse_forced(request: GenerateRequest, name: str) -> None:
    """Raise BadRequest for a forced call of a model whose output format has no calls."""
    if callable_tools(request) and request.tool_choice.mode == "required":
        raise BadRequest(
            f"this model's output format, {name}, has no tool calls. Use tool_choice auto or none.",
            code="tools_unsupported",
            param="tool_choice",
        )


def callable_tools(request: GenerateRequest) -> tuple[Tool, ...]:
    """Return the tools that the model may call."""
    choice = request.tool_choice
    if choice.mode == "none":
        return ()
    return tuple(tool for tool in request.tools if not choice.names or tool.name in choice.names)


class _Rules:
    """Rules of a grammar, made in any order. A method that makes an expression adds the rules that it needs."""

    def __init__(self, markup: ModelMarkup, tags: Tags) -> None:
        self._markup = markup
        self._tags = tags
        self._rules: dict[str, str] = {}

    def add(self, name: str, expression: str, *, options: str = "") -> str:
        """Add a rule; return its name."""
        self._rules[name] = f"{name}{options}: {expression.strip()}"
        return name

    def source(self) -> str:
        """Return the grammar."""
        return "\n".join((self._rules["start"], *(rule for name, rule in self._rules.items() if name != "start")))

    def thought(self, thought: Thought) -> str:
        """Return the expression of the thought before everything else."""
        if thought is Thought.NONE or not self._markup.thought:
            return ""
        opening, _, closing = self._markup.thought.partition("$text")
        ending, end = self._until(closing)
        whole = f"{ending} {self._written(end)}" if thought is Thought.BEGUN else ""
        if thought is Thought.MAYBE:
            whole = f"({self._written(opening)} {ending} {self._written(end)})?"
        return whole

    def _until(self, closing: str) -> tuple[str, str]:
        """Return the expression of any text up to the tag that `closing` begins with, and the rest of `closing`."""
        match = _PIECES.match(closing)
        assert match is not None
        if match[1] in self._tags.ids:
            self.add("THOUGHT", "/(?s:.*)/")
            return f"THOUGHT {self._tag(match[1])}", closing[match.end() :]
        return self.add("thought_text", f"/(?s:.*){_escaped(match[1])}/", options="[lazy]"), closing[match.end() :]

    def answer(self, grammar: Grammar) -> str:
        """Return the expression of a text answer, as the model frames it."""
        self.add("answer_text", _of_grammar(grammar))
        return self._written(self._markup.answer, {"text": "answer_text"})

    def calls(self, tools: tuple[Tool, ...], is_parallel: bool, *, begins: bool = True) -> str:
        """Return the expression of one call of `tools`, or of several. `begins` False: without its first tag."""
        markup = self._markup
        self.add("one_call", " | ".join(self._call(number, tool, markup.call) for number, tool in enumerate(tools)))
        first, opening = "one_call", markup.calls_begin
        if not begins:
            opening, call = _without_first_tag(markup.calls_begin), markup.call
            if not markup.calls_begin:
                call = _without_first_tag(markup.call)
                self.add("first_call", " | ".join(self._call(number, tool, call) for number, tool in enumerate(tools)))
                first = "first_call"
        more = f"({self._written(markup.calls_between)} one_call)*" if is_parallel else ""
        return f"{self._written(opening)} {first} {more} {self._written(markup.calls_end)}"

    def _call(self, number: int, tool: Tool, call: str) -> str:
        if "$parameters" in call:
            return self._xml_call(number, tool, call)
        schema: Mapping[str, Any] = {"type": "object", **(tool.parameters if tool.strict else {})}
        self.add(f"arguments_{number}", _json({**schema, "x-guidance": _SPACED}))
        name = {"name": _literal(json.dumps(tool.name)), "bare_name": _literal(tool.name)}
        return self._written(call, {**name, "arguments": f"arguments_{number}"})

    def _xml_call(self, number: int, tool: Tool, call: str) -> str:
        """Return the expression of a call whose arguments stand in tags of their own."""
        self.add("xml_text", r"/(?s:.*)\n<\/parameter>\n/", options="[lazy]")
        rules: list[str] = []

        def add(expression: str) -> str:
            rules.append(self.add(f"parameter_{number}_{len(rules)}", expression))
            return rules[-1]

        parameters = parameters_of(tool, add, _literal, lambda schema: _json({**schema, "x-guidance": _SPACED}))
        return self._written(call, {"bare_name": _literal(tool.name), "parameters": parameters})

    def text_or_calls(self, tools: tuple[Tool, ...], is_parallel: bool) -> str:
        """Return the expression of free text, and of calls after it that hold to the tools' schemas."""
        tag = _PIECES.match(self._markup.calls_begin or self._markup.call)
        if tag is None:  # calls begin with the "{" of their JSON, and text does not
            self.add("TEXT", r"/[^{\s](?s:.*)/")
            return f"(TEXT? | {self.calls(tools, is_parallel)})"
        self.add("TEXT", "/(?s:.*)/")
        if self._markup.answer != "$text":
            return f"({self._written(self._markup.answer, {'text': 'TEXT'})} | {self.calls(tools, is_parallel)})"
        if tag[1] in self._tags.ids:
            return f"TEXT ({self.calls(tools, is_parallel)})?"
        self.add("until_call", f"/(?s:.*){_escaped(tag[1])}/", options="[lazy]")
        return f"(TEXT | until_call {self.calls(tools, is_parallel, begins=False)})"

    def _written(self, source: str, values: Mapping[str, str] | None = None) -> str:
        """Return the expression of markup, with `values` for its $names."""
        out, at = [], 0
        for match in _PIECES.finditer(source):
            out.append(_literal(source[at : match.start()]))
            out.append(self._tag(match[1]) if match[1] is not None else (values or {})[match[2]])
            at = match.end()
        return " ".join(filter(None, [*out, _literal(source[at:])]))

    def _tag(self, text: str) -> str:
        token_id = self._tags.ids.get(text)
        return _literal(text) if token_id is None else f"<[{token_id}]>"


def _without_first_tag(source: str) -> str:
    match = _PIECES.match(source)
    return source if match is None else source[match.end() :]


def _literal(text: str) -> str:
    """Return a string of Lark; "" for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    """Return a regular expression of Lark, without its slashes, that is `text`."""
    return re.escape(text).replace("/", r"\/")


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps(schema, ensure_ascii=False)


def _of_grammar(grammar: Grammar) -> str:
    """Return the expression of a request's own grammar."""
    if grammar.kind == "json_schema":
        schema = json.loads(grammar.value)
        return _json(schema if isinstance(schema, dict) else {"anyOf": [schema]})
    if grammar.kind == "json_object":
        return _json({"type": "object"})
    if grammar.kind == "choice":
        return " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(grammar.value))
    if grammar.kind == "regex":
        pattern = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", grammar.value, flags=re.DOTALL)
        return "/" + pattern.replace("\n", r"\n") + "/"
    return "%lark {\n" + as_lark(grammar, GrammarLimits()).value + "\n}"

"""`ChatTemplate`: renders conversations so that the model is shown all of them. `Form`: how one template wants them.

A template leaves out without a word what it does not know: a role, tools, the text beside a call, content that is no
list of parts. So each is probed once, at load, with words that the rendering must have:

    [developer "zq0zq", user "zq1zq"]   → without zq0zq, developers are shown as the system
    [user …, assistant calling zq3zq …] → with arguments as an object or as text, beside null or ""

A probe that raises shows nothing. Where the form alone does not settle it (only the first system turn may be shown, or
no text beside an early call), the conversation itself is rendered again with words in place of its texts: see
`worded`. Nothing here knows transformers or tokens: `Render` is a function. On tokenising threads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, product, starmap, takewhile
from typing import Any

from jinja2 import Environment, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from streamserve.protocol.errors import BadRequest
from streamserve.protocol.json_body import num_containers
from streamserve.protocol.requests import Message

logger = logging.getLogger(__name__)

Turn = dict[str, Any]
Tools = list[dict[str, Any]] | None
# The prompt of turns and tools; raises whatever the template raises.
Render = Callable[[list[Turn], Tools], str]

OBJECT, TEXT = "object", "text"
_ABSENT = object()
# The content of a turn that is a call without text: some templates ask for null, some for a string, some for neither.
_SILENCES = (None, "", _ABSENT)
# Roles that may be shown as another.
_STAND_INS = {"developer": ("developer", "system"), "tool": ("tool", "function"), "function": ("function", "tool")}
# Arguments with more are not parsed into an object.
_MAX_CONTAINERS, _MAX_DEPTH = 20_000, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a template shows: each role, and as which; the roles whose content are parts; calls; tools.

    `arguments` of calls are "object" or "text", "" where calls are not shown; `silence` is the content beside a call
    without text.
    """

    roles: Mapping[str, str] = field(default_factory=lambda: {"user": "user"})
    parts: frozenset[str] = frozenset()
    arguments: str = ""
    silence: object = ""
    has_tools: bool = False

    def turns(self, messages: Sequence[Message]) -> list[Turn]:
        """Return the messages as the template reads them."""
        return [self._turn(message) for message in messages]

    def _turn(self, message: Message) -> Turn:
        role = self.roles.get(message.role, message.role)
        turn: Turn = {**message.extra, "role": role}
        content: object = message.content
        if message.extra.get("tool_calls"):
            turn["tool_calls"] = [self._call(call) for call in message.extra["tool_calls"]]
            content = content or self.silence
        if content is not _ABSENT:
            turn["content"] = _as_parts(content) if role in self.parts and isinstance(content, str) else content
        return turn

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        given = call["function"]["arguments"]
        arguments = arguments_text(given) if self.arguments == TEXT else arguments_object(given)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def lacks(self, message: Message) -> str:
        """Return what of a message the template does not show by itself: a role, or its calls; "" if it shows all."""
        if message.role not in self.roles:
            return f"messages of role {message.role}"
        return "tool calls" if message.extra.get("tool_calls") and not self.arguments else ""

    def notes(self) -> Iterator[str]:
        """Yield what the template shows, for operators."""
        shown = [name if as_role == name else f"{name} (as {as_role})" for name, as_role in self.roles.items()]
        yield f"roles {', '.join(shown)}"
        if self.parts:
            yield "content as parts"
        yield f"tool calls, arguments as {self.arguments}" if self.arguments else "no tool calls"
        yield "tools" if self.has_tools else "no tools"


def _as_parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def arguments_text(given: object) -> str:
    """Return the arguments of a call as text: as the model wrote them, or `{}` for none."""
    if not isinstance(given, str):
        return json.dumps({} if given is None else given, ensure_ascii=False)
    return "{}" if given.strip() in ("", "null") else given.encode("utf-8", "replace").decode()


def arguments_object(given: object) -> dict[str, Any]:
    """Return the arguments of a call as an object: `{}` for none, `{"partial_json": text}` for text that is no object.

    So is text of which an object would lose something: the first of two equal keys, half of a surrogate pair. The name
    is the Anthropic dialect's for the arguments of a cut call.
    """
    if isinstance(given, Mapping):
        return dict(given)
    text = arguments_text(given)
    try:
        if num_containers(text) > _MAX_CONTAINERS:
            raise ValueError("it has too many arrays and objects")
        value = json.loads(text, object_pairs_hook=_unique)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) and not _is_deep(value, _MAX_DEPTH) else {"partial_json": text}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key is there twice")
    return out


def _is_deep(value: object, most: int) -> bool:
    """Return whether objects and arrays nest more than `most` deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return bool(inner) and (most == 0 or any(_is_deep(one, most - 1) for one in inner))


def answered(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the conversation with an id for each call, and with each result's call: its id and the function's name.

    Some clients leave out the name or the id, and some templates need both. A result without an id answers the first
    call of its name that has no result yet, else the first of all.
    """
    if not any(message.role in ("tool", "function") or "tool_calls" in message.extra for message in messages):
        return tuple(messages)
    open_calls: list[tuple[str, str]] = []  # (id, name)
    names: dict[str, str] = {}
    turns = []
    for number, message in enumerate(messages):
        extra = dict(message.extra)
        if extra.get("tool_calls"):
            calls = enumerate(extra["tool_calls"])
            extra["tool_calls"] = [{**call, "id": call.get("id") or f"{number:05d}{at:04d}"} for at, call in calls]
            open_calls = [(call["id"], call["function"]["name"]) for call in extra["tool_calls"]]
            names |= dict(open_calls)
        elif message.role in ("tool", "function"):
            call_id = extra.get("tool_call_id")
            if not call_id and open_calls:
                of_name = (one for one, name in open_calls if name == extra.get("name"))
                call_id = extra["tool_call_id"] = next(of_name, open_calls[0][0])
            if call_id in names:
                extra.setdefault("name", names[call_id])
            open_calls = [one for one in open_calls if one[0] != call_id]
        turns.append(replace(message, extra=extra))
    return tuple(turns)


# Other forms of a conversation, for templates that do not show the plain form.


def variants(messages: Sequence[Message]) -> Iterator[tuple[tuple[Message, ...], tuple[int, ...]]]:
    """Yield the conversation as it is, and in other turns; each with the number of every turn's message.

    The text beside a call as a turn before it, or in the answer that follows the calls, where turns must alternate;
    calls of one turn one after the other, each with its result; the system turns at the beginning as one turn.
    """
    yield tuple(messages), tuple(range(len(messages)))
    plain = [(message, number) for number, message in enumerate(messages)]
    parted = list(chain.from_iterable(starmap(_parted, plain)))
    found = [plain]
    for one in (parted, _gathered(parted), _in_series(parted), _gathered(_in_series(parted))):
        found += [one] if one not in found else []
    found += [joined for joined in map(_joined, found) if joined not in found]
    for one in found[1:]:
        yield tuple(message for message, _ in one), tuple(number for _, number in one)


def _parted(message: Message, number: int) -> Iterator[tuple[Message, int]]:
    calls = message.extra.get("tool_calls")
    if calls and message.content.strip():
        rest = {name: value for name, value in message.extra.items() if name != "tool_calls"}
        yield replace(message, extra=rest), number
        yield replace(message, content="", extra={"tool_calls": calls}), number
    else:
        yield message, number


def _gathered(parted: list[tuple[Message, int]]) -> list[tuple[Message, int]]:
    """Join the assistant's texts between two turns of the user: in the last of them, or before the calls."""
    out: list[tuple[Message, int]] = []
    for is_round, several in groupby(parted, key=lambda pair: pair[0].role in ("assistant", "tool", "function")):
        turns = list(several)
        said = [at for at, (turn, _) in enumerate(turns) if turn.role == "assistant" and "tool_calls" not in turn.extra]
        if is_round and len(said) > 1:
            kept = said[-1] if said[-1] == len(turns) - 1 else said[0]
            text = "\n\n".join(turns[at][0].content for at in said)
            turns[kept] = (replace(turns[kept][0], content=text), turns[kept][1])
            turns = [pair for at, pair in enumerate(turns) if at == kept or at not in said]
        out += turns
    return out


def _in_series(parted: list[tuple[Message, int]]) -> list[tuple[Message, int]]:
    """Make each call of a turn with several a turn of its own, before its result."""
    out: list[tuple[Message, int]] = []
    placed: set[int] = set()  # numbers of results
    for at, (message, number) in enumerate(parted):
        calls = message.extra.get("tool_calls") or ()
        if len(calls) > 1:
            results = takewhile(lambda pair: pair[0].role in ("tool", "function"), parted[at + 1 :])
            of_call = {result.extra.get("tool_call_id"): (result, place) for result, place in results}
            for call in calls:
                out.append((replace(message, extra={**message.extra, "tool_calls": [call]}), number))
                if call.get("id") in of_call:
                    out.append(of_call[call["id"]])
                    placed.add(of_call[call["id"]][1])
        elif number not in placed:
            out.append((message, number))
    return out


def _joined(numbered: list[tuple[Message, int]]) -> list[tuple[Message, int]]:
    leading = 0
    while leading < len(numbered) and numbered[leading][0].role in ("system", "developer"):
        leading += 1
    if leading < 2:
        return numbered
    text = "\n\n".join(message.content for message, _ in numbered[:leading])
    return [(Message(role="system", content=text), numbered[0][1]), *numbered[leading:]]


# Words in place of texts.


def _word(number: int) -> str:
    """Return a word that no template has, and that is no part of another word."""
    return f"zq{number}zq"


def worded(messages: Sequence[Message]) -> tuple[tuple[Message, ...], list[tuple[str, ...]]]:
    """Return the conversation with a word for each text, and each turn's words: of its content, then of its calls.

    Turns of the same shape give the same words, so what a template shows of a shape can be remembered.
    """
    numbers = iter(range(10**9))
    ids: dict[object, str] = {}
    turns, words = [], []
    for message in messages:
        said = _word(next(numbers)) if message.content.strip() else ""
        extra: dict[str, Any] = {name: "zq" for name in message.extra if name != "tool_calls"}
        calls: list[dict[str, Any]] = []
        called: list[str] = []
        for call in message.extra.get("tool_calls") or ():
            name, given = _word(next(numbers)), _word(next(numbers))
            has_arguments = bool(arguments_object(call["function"]["arguments"]))
            calls.append(_call(name, json.dumps({"zq": given}) if has_arguments else "{}", _id(ids, call.get("id"))))
            called += [name, given] if has_arguments else [name]
        if calls:
            extra["tool_calls"] = calls
        if "tool_call_id" in extra:
            extra["tool_call_id"] = _id(ids, message.extra["tool_call_id"])
        turns.append(Message(role=message.role, content=said or message.content, extra=extra))
        words.append((said, *called))
    return tuple(turns), words


def _id(ids: dict[object, str], given: object) -> str:
    return ids.setdefault(given, f"zqid{len(ids):05d}")  # nine letters and digits, as Mistral's templates want them


def _call(name: str, arguments: str, call_id: str = "zqid00000") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def worded_tools(num_tools: int) -> list[dict[str, Any]]:
    """Return so many tools whose names are words."""
    return [_tool(f"zqtool{number}zq") for number in range(num_tools)]


def _tool(name: str) -> dict[str, Any]:
    properties = {"zq": {"type": "string", "description": "zq"}}
    parameters = {"type": "object", "properties": properties, "required": ["zq"]}
    return {"type": "function", "function": {"name": name, "description": "zq", "parameters": parameters}}


# The probes of one template.


def probe(render: Render, *, with_tools: bool) -> Form:
    """Return what a template shows, by rendering minimal valid conversations. About thirty renderings."""
    tools = worded_tools(1) if with_tools else None

    def shown(turns: list[Turn], *words: str) -> str:
        """Return the rendering, "" if it lacks a word or raises."""
        try:
            text = render(turns, tools)
        except Exception:
            return ""
        return text if all(word in text for word in words) else ""

    form = _with_texts(shown)
    form = _with_calls(shown, form)
    return replace(form, has_tools=with_tools and bool(shown(form.turns([_said("user", 0)]), "zqtool0zq")))


Shown = Callable[..., str]


def _said(role: str, number: int) -> Message:
    return Message(role=role, content=_word(number))


def _with_texts(shown: Shown) -> Form:
    """Probe the roles that need no call, each with content as text, then as parts."""
    form = Form()
    if not shown(form.turns([_said("user", 0)]), _word(0)):
        parts = replace(form, parts=frozenset({"user"}))
        form = parts if shown(parts.turns([_said("user", 0)]), _word(0)) else form
    conversations = {
        "system": [_said("system", 1), _said("user", 0)],
        "assistant": [_said("user", 0), _said("assistant", 1), _said("user", 2)],
        "developer": [_said("developer", 1), _said("user", 0)],
    }
    for role, conversation in conversations.items():
        form = _with_role(shown, form, role, conversation, [_word(1)])
    order = ("system", "developer", "user", "assistant")
    return replace(form, roles={name: form.roles[name] for name in order if name in form.roles})


def _with_role(shown: Shown, form: Form, role: str, conversation: list[Message], words: list[str]) -> Form:
    """Return the form with a role that is shown: by itself, unlike the turns of other roles, else as another role.

    Content is parts where it is not shown as text. A template that takes an unknown role for the user's or the
    assistant's shows it too, if nothing else does; so does a template that takes results for the system's.
    """
    found, others = [], ("user", "assistant", *(("system",) if role in ("tool", "function") else ()))
    for as_role in _STAND_INS.get(role, (role,)):
        one = replace(form, roles={**form.roles, role: as_role})
        text = shown(one.turns(conversation), *words)
        if not text:
            one = replace(one, parts=one.parts | {as_role})
            text = shown(one.turns(conversation), *words)
        if text:
            found.append(one)
            as_others = (replace(one, roles={**one.roles, role: other}) for other in others)
            if all(shown(other.turns(conversation)) != text for other in as_others):
                return one
    return found[0] if found else form


def _with_calls(shown: Shown, form: Form) -> Form:
    """Probe calls and their results: arguments as object or text, beside null, "" or no content; the best shows most.

    Of two that show as much, the better prints no null and no object in Python's notation.
    """
    call = Message(role="assistant", content="", extra={"tool_calls": [_call(_word(3), json.dumps({"zq": _word(4)}))]})
    result = Message(role="tool", content=_word(5), extra={"tool_call_id": "zqid00000", "name": _word(3)})
    begun = [_said("user", 0), call]
    best, best_rank = form, (False, 0)
    for silence, arguments in product(_SILENCES, (OBJECT, TEXT)):
        one = _with_role(
            shown, replace(form, silence=silence, arguments=arguments), "tool", [*begun, result], [_word(5)]
        )
        endings: tuple[list[Message], ...] = ([result], [_said("user", 2)], [])
        texts = (shown(one.turns([*begun, *ending]), _word(3), _word(4)) for ending in endings)
        text = next(filter(None, texts), "")
        rank = ("tool" in one.roles, -sum(map(text.count, ("None", "null", f"'{_word(4)}'"))))
        if text and (not best.arguments or rank > best_rank):
            best, best_rank = one, rank
    best = _with_role(shown, best, "tool", [*begun, result], [_word(5)])
    return _with_role(shown, best, "function", [*begun, replace(result, role="function")], [_word(5)])


# One model's template.

# Shapes of conversations whose rendering is remembered.
_MOST_SHAPES = 1_024
_TOOLS = -1


class ChatTemplate:
    """Renders conversations in the form of its template, and refuses those of which it does not show all.

    `render(turns, tools, **options)` is called by one thread at a time: it is Python, two would only take turns.
    """

    def __init__(self, render: Callable[..., str]) -> None:
        self._render = render
        self._lock = threading.Lock()
        self._shapes: dict[bytes, int | None] = {}
        self.forms = {
            with_tools: probe(partial(render, add_generation_prompt=True), with_tools=with_tools)
            for with_tools in (False, True)
        }

    def notes(self) -> Iterator[str]:
        """Yield what the template shows, for operators."""
        with_tools, without = self.forms[True], self.forms[False]
        yield from with_tools.notes()
        if with_tools.arguments and not without.arguments:
            yield "tool calls only beside tools"

    def prompt(self, messages: Sequence[Message], tools: Tools, *, has_own_system: bool, **options: Any) -> str:
        """Return the prompt. Raises BadRequest for what the template refuses, or does not show.

        Its `param` is the turn to blame, or `tools`. `has_own_system`: the first message is the site's.
        """
        form, messages = self.forms[tools is not None], answered(messages)
        problem: BadRequest | None = None
        with self._lock:
            for turns, numbers in variants(messages):
                try:
                    text = self._render(form.turns(turns), tools, **options)
                except Exception as error:  # a template may raise anything, for instance "roles must alternate"
                    logger.info("chat template refused a request", exc_info=True)
                    problem = problem or _refused(error, form, messages, has_own_system=has_own_system)
                    continue
                missing = self._missing(form, turns, tools, options)
                if missing is None:
                    return text
                number = missing if missing == _TOOLS else numbers[missing]
                problem = problem or _not_shown(form, messages, number, has_own_system=has_own_system)
        assert problem is not None
        raise problem

    def _missing(self, form: Form, turns: Sequence[Message], tools: Tools, options: dict[str, Any]) -> int | None:
        """Return the number of the first turn that is not shown whole, _TOOLS if those are not, else None.

        It depends on the shape of the conversation only, so it is remembered.
        """
        shape, words = worded(turns)
        num_tools = len(tools or ())
        key = hashlib.sha256(repr((shape, num_tools, options)).encode("utf-8", "replace")).digest()
        if key not in self._shapes:
            while len(self._shapes) >= _MOST_SHAPES:
                del self._shapes[next(iter(self._shapes))]
            self._shapes[key] = self._look(form, shape, words, num_tools, options)
        return self._shapes[key]

    def _look(
        self,
        form: Form,
        shape: Sequence[Message],
        words: Sequence[tuple[str, ...]],
        num_tools: int,
        options: dict[str, Any],
    ) -> int | None:
        tools = worded_tools(num_tools) if num_tools else None
        try:
            text = self._render(form.turns(shape), tools, **options)
        except Exception:
            return None
        if any(tool["function"]["name"] not in text for tool in tools or ()):
            return _TOOLS
        return next((number for number, one in enumerate(words) if any(word not in text for word in one)), None)


def _refused(error: Exception, form: Form, messages: Sequence[Message], *, has_own_system: bool) -> BadRequest:
    """Return the error for a rendering that failed; what the template does not know is to blame.

    A template's own `raise_exception` is written for the caller; other failures are not shown.
    """
    number = next((number for number, message in enumerate(messages) if form.lacks(message)), None)
    if number is not None and type(error).__name__ != "TemplateError":
        return _not_shown(form, messages, number, has_own_system=has_own_system)
    reason = "cannot render these messages."
    if type(error).__name__ == "TemplateError":
        reason = f"refuses these messages: {str(error)[:200]}"
    param = "messages" if number is None else _place(messages, number, has_own_system=has_own_system)
    return BadRequest(f"the model's chat template {reason}", code="template_error", param=param)


def _not_shown(form: Form, messages: Sequence[Message], number: int, *, has_own_system: bool) -> BadRequest:
    if number == _TOOLS:
        reason = "the model's chat template does not show tools. Leave them out, or describe them in a message."
        return BadRequest(reason, code="template_error", param="tools")
    param = _place(messages, number, has_own_system=has_own_system)
    if param is None:
        logger.error("the chat template does not show the site's system prompt (SYSTEM of MODELS)")
        return BadRequest("the model's chat template does not show this site's system prompt.", code="template_error")
    message = messages[number]
    what = form.lacks(message) or (
        "all of this turn's text and calls" if "tool_calls" in message.extra else "this turn"
    )
    reason = f"{param}: the model's chat template does not show {what} here. Its roles: {', '.join(form.roles)}."
    return BadRequest(reason, code="template_error", param=param)


def _place(messages: Sequence[Message], number: int, *, has_own_system: bool) -> str | None:
    """Return the place of a turn in the caller's body, None for the site's own."""
    if has_own_system and number == 0:
        return None
    return messages[number].param or f"messages[{number - has_own_system}]"


# The variables that a template reads.


class _Generation(Extension):
    """The block that transformers' templates may have around an answer."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 has it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def variables(template: str) -> frozenset[str]:
    """Return the names that a template reads from outside, apart from jinja's own and transformers' names.

    A name that the template sets itself is its own, unless it is set only where it is not defined: jinja takes
    `{% if … %}{% set system = … %}{% endif %}` for a name that may come from outside.
    """
    environment = Environment(extensions=[_Generation, loopcontrols])
    parsed = environment.parse(template)
    found = meta.find_undeclared_variables(parsed) - set(_own_names(parsed, frozenset()))
    return frozenset(found) - environment.globals.keys() - {"raise_exception", "strftime_now"}


def _own_names(node: nodes.Node, defaulted: frozenset[str]) -> Iterator[str]:
    """Yield the names that are set, apart from those whose being defined was asked before, or by the value itself."""
    if isinstance(node, nodes.If):
        defaulted |= _asked_in(node.test)
    elif isinstance(node, nodes.Assign):
        defaulted |= _asked_in(node.node)
    elif isinstance(node, nodes.Name) and node.ctx != "load" and node.name not in defaulted:
        yield node.name
    for child in node.iter_child_nodes():
        yield from _own_names(child, defaulted)


def _asked_in(expression: nodes.Node) -> frozenset[str]:
    """Return the names of which an expression asks whether they are defined, or for which it has a default."""
    asking = chain([expression], expression.find_all((nodes.Test, nodes.Filter)))
    return frozenset(
        one.node.name
        for one in asking
        if isinstance(one, nodes.Test | nodes.Filter)
        and one.name in ("defined", "undefined", "default", "d")
        and isinstance(one.node, nodes.Name)
    )

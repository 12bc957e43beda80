"""What a Lark grammar holds beyond its syntax: how deep it is nested, its JSON schemas, and which rules never end.

A reader of llguidance's dialect of Lark: rules are expressions of other rules; terminals, texts and regular expressions
all end. It is run on texts that the compiler has not seen, so anything that it does not know ends the reading, and the
compiler judges the text. (Productive symbols: Hopcroft and Ullman, 1979, lemma 4.1.) Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from streamserve.engine.grammar.limits import GrammarLimits, too_complex

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|(?://|\#)[^\n]*)
    |(?P<newline>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*+"i?)
    |(?P<regex>/(?![/*])(?:\\.|[^/\\\n])++/[imslux]*)
    |(?P<special><[^<>\n]*>)
    |(?P<count>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*+(?:\d++\s*+)?+(?:,\s*+(?:\d++\s*+)?+)?+\})
    |(?P<arrow>->)
    |(?P<range>\.\.)
    |(?P<directive>%[a-z_]+)
    |(?P<name>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<number>\d+)
    |(?P<mark>[|:()\[\]?*+!&~@.,=])""",
    re.VERBOSE,
)
_LEAST = re.compile(r"[~{]\s*+(\d*+)")  # of a count
_WITH_JSON = ("%json", "%regex", "%llguidance")
_DECODER = json.JSONDecoder()


@dataclass(slots=True, eq=False)
class Node:
    """An expression: "all" or "any" of its parts, or a "rule" by name. Parts that may be left out are gone."""

    kind: str
    parts: list[Node]
    name: str = ""
    whole: Node | None = None  # the expression that it is a part of
    num_left: int = 0  # of an "all": parts that are not known to end
    ends: bool = False


class Unreadable(Exception):
    """The text has what this reader does not know."""


def with_schemas(text: str, change: Callable[[str], str]) -> str:
    """Return the grammar with the JSON text of each `%json` changed."""
    out: list[str] = []
    last = 0
    for name, start, end in _directives(text):
        if name == "%json" and end > start:
            out += [text[last:start], change(text[start:end])]
            last = end
    return "".join([*out, text[last:]])


def _directives(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield `_directive_at` of each directive outside of texts, expressions and comments."""
    place = 0
    unclosed = {'"': 0, "/": 0}  # up to where no text, and no expression, has an end
    while place < len(text):
        char = text[place]
        match = None if place < unclosed.get(char, 0) else _TOKEN.match(text, place)
        if match is None:
            if place >= unclosed.get(char, place + 1) and not text.startswith("/*", place):
                end_of_line = text.find("\n", place)
                unclosed[char] = len(text) if end_of_line < 0 else end_of_line
            place += 1
        elif match.lastgroup == "directive":
            name, start, place = _directive_at(text, place)
            yield name, start, place
        else:
            place = match.end()


def _directive_at(text: str, place: int) -> tuple[str, int, int]:
    """Return a directive's name, and where its JSON value begins and ends (at once, without a value)."""
    match = _TOKEN.match(text, place)
    assert match is not None
    name, start = match[0], match.end()
    while start < len(text) and text[start].isspace():
        start += 1
    if name not in _WITH_JSON or not text.startswith("{", start):
        return name, match.end(), match.end()
    try:
        return name, start, _DECODER.raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        raise Unreadable from None


def endless_rules(text: str, limits: GrammarLimits) -> list[str]:
    """Return the rules that no finite text matches; [] where the text cannot be read. Raises BadRequest on depth."""
    try:
        rules = _Reader(text, limits).rules()
    except Unreadable:
        return []
    references: dict[str, list[Node]] = {}
    ended: list[Node] = []
    names: dict[int, str] = {}
    for name, body in rules.items():
        names[id(body)] = name
        _prepare(body, rules, references, ended)
    while ended:  # each node once: linear in the text
        node = ended.pop()
        if node.ends:
            continue
        node.ends = True
        ended += references.get(names.get(id(node), ""), [])
        if node.whole is not None:
            node.whole.num_left -= 1
            if node.whole.kind == "any" or node.whole.num_left == 0:
                ended.append(node.whole)
    return [name for name, body in rules.items() if not body.ends]


def _prepare(node: Node, rules: dict[str, Node], references: dict[str, list[Node]], ended: list[Node]) -> None:
    """Link a node's parts to it, and note what ends by itself and what other rules must settle."""
    node.num_left = len(node.parts)
    if node.kind == "rule" and node.name in rules:
        references.setdefault(node.name, []).append(node)
    elif not node.parts:
        ended.append(node)
    for part in node.parts:
        part.whole = node
        _prepare(part, rules, references, ended)


class _Reader:
    """Reads the rules of a grammar, from left to right."""

    def __init__(self, text: str, limits: GrammarLimits) -> None:
        self._limits = limits
        self._depth = 0
        self._tokens = list(_tokens(text))
        self._place = 0

    def rules(self) -> dict[str, Node]:
        """Return the bodies of rules and terminals by name."""
        out: dict[str, Node] = {}
        while self._place < len(self._tokens):
            kind = self._peek()[0]
            if kind == "newline":
                self._place += 1
            elif kind == "directive":
                self._skip_line()
            else:
                name = self._header()
                out[name] = self._any()
                if self._place < len(self._tokens) and self._peek()[0] != "newline":
                    raise Unreadable
        return out

    def _header(self) -> str:
        """Read `?name[attributes]:`."""
        while self._peek()[1] in ("?", "!"):
            self._place += 1
        kind, name = self._take()
        if kind != "name":
            raise Unreadable
        while self._peek()[1] != ":":
            if self._take()[0] == "newline":
                raise Unreadable
        self._place += 1
        return name

    def _any(self) -> Node:
        options = [self._all()]
        while self._next_is_bar():
            self._place += 1
            options.append(self._all())
        return Node("any", options)

    def _all(self) -> Node:
        parts: list[Node] = []
        while (one := self._one()) is not None:
            if not self._may_be_left_out():
                parts.append(one)
        return Node("all", parts)

    def _one(self) -> Node | None:
        """Read one part; None at the end of a sequence."""
        self._skip_newlines_in_group()
        kind, token = self._peek()
        if kind == "arrow":
            self._place += 2
            return self._one()
        if kind in ("", "newline") or token in ("|", ")", "]"):
            return None
        self._place += 1
        if token in ("(", "["):
            inner = self._group(")" if token == "(" else "]")
            return inner if token == "(" else Node("all", [])
        if kind == "name":
            return Node("rule", [], token)
        if kind in ("text", "regex", "special", "json"):
            if self._peek()[0] == "range":
                self._place += 2
            return Node("all", [])
        if token in ("~", "&"):  # of terminals: these end
            return Node("all", [])
        raise Unreadable

    def _group(self, closing: str) -> Node:
        self._depth += 1
        if self._depth > self._limits.max_depth:
            raise too_complex(f"groups are nested more than {self._limits.max_depth} levels deep.")
        inner = self._any()
        self._skip_newlines_in_group()
        if self._take()[1] != closing:
            raise Unreadable
        self._depth -= 1
        return inner

    def _may_be_left_out(self) -> bool:
        """Read what follows a part; whether it allows none of it."""
        found = False
        while self._peek()[1] in ("?", "*", "+") or self._peek()[0] == "count":
            _, token = self._take()
            least = _LEAST.match(token)
            found = found or token in ("?", "*") or (least is not None and not least[1].strip("0"))
        return found

    def _next_is_bar(self) -> bool:
        """Whether another option follows, perhaps on the next line."""
        place = self._place
        while place < len(self._tokens) and self._tokens[place][0] == "newline":
            place += 1
        if place < len(self._tokens) and self._tokens[place][1] == "|":
            self._place = place
            return True
        return False

    def _skip_newlines_in_group(self) -> None:
        while self._depth and self._peek()[0] == "newline":
            self._place += 1

    def _skip_line(self) -> None:
        while self._peek()[0] not in ("newline", ""):
            self._place += 1

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._place] if self._place < len(self._tokens) else ("", "")

    def _take(self) -> tuple[str, str]:
        if self._place >= len(self._tokens):
            raise Unreadable
        self._place += 1
        return self._tokens[self._place - 1]


def _tokens(text: str) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise Unreadable
        kind = match.lastgroup or ""
        if kind == "directive":
            name, start, end = _directive_at(text, place)
            out.append(("json", name) if end > start and name != "%llguidance" else ("directive", name))
            place = end
            continue
        if kind != "space":
            out.append((kind, match[0]))
        place = match.end()
    return out

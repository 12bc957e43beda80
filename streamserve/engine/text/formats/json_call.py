"""Incremental JSON: `JsonValue` finds the end of one value or where it breaks, `CallReader` reads a tool call; `Call`.

A call is one object, {"name": …, "arguments": {…}} in any order, or only the arguments. Their source text is passed on
as it comes, once the name is known. (Grammar: RFC 8259.) Pure; time is linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.engine.text.formats.base import Made, Markup, Written

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_CONSTANTS = ("true", "false", "null")
_MAX_WORD = 400  # characters of a number: no tool could read a longer number
_MAX_DEPTH = 200  # arrays and objects in each other
_MAX_FRAME = 4_096  # characters of a call before its name is known, and of a key

_ARGUMENTS = ("arguments", "parameters")
_KEYS = (*_ARGUMENTS, "name", "type", "id")

# What a value waits for.
_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _AFTER, _IN_STRING, _ESCAPE, _HEX, _IN_WORD = range(10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A whole tool call. `arguments` is a JSON object as text."""

    name: str
    arguments: str


def call_of(name: str, arguments: Mapping[str, Any]) -> Call:
    """Return a call as JSON. Raises ValueError for numbers that JSON lacks; half a surrogate pair stays escaped."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(arguments)
    return Call(name=name, arguments=text)


class JsonValue:
    """One JSON value. After `feed`, at most one of `is_whole` and `is_broken` is true."""

    def __init__(self) -> None:
        self.is_whole = self.is_broken = False
        self._closers: list[str] = []
        self._state = _VALUE
        self._is_key = False
        self._word = ""
        self._num_hex = 0

    @property
    def is_in_string(self) -> bool:
        """Whether the next character is one of a string, or its end."""
        return self._state == _IN_STRING

    def feed(self, text: str, start: int) -> int:
        """Take `text` from `start`; return where the value ends or breaks, or the text's length."""
        at = start
        while at < len(text) and not self.is_whole and not self.is_broken:
            if self._state == _IN_STRING:
                at = self._string(text, _STRING.match(text, at).end())  # type: ignore[union-attr]
            elif self._state == _IN_WORD:
                at = self._take_word(text, at)
            elif self._state in (_ESCAPE, _HEX):
                at += self._escape(text[at])
            else:
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
                if at < len(text):
                    at += self._mark(text[at])
        return at

    def _string(self, text: str, at: int) -> int:
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = _ESCAPE
        elif text[at] == '"':
            if self._is_key:
                self._is_key, self._state = False, _COLON
            else:
                self._end_value()
        else:
            self.is_broken = True
            return at
        return at + 1

    def _escape(self, character: str) -> int:
        if self._state == _HEX:
            self.is_broken = character not in "0123456789abcdefABCDEF"
            self._num_hex -= 1
            self._state = _IN_STRING if self._num_hex == 0 else _HEX
        elif character == "u":
            self._state, self._num_hex = _HEX, 4
        else:
            self.is_broken = character not in '"\\/bfnrt'
            self._state = _IN_STRING
        return not self.is_broken

    def _take_word(self, text: str, at: int) -> int:
        end = _WORD.match(text, at).end()  # type: ignore[union-attr]
        self._word += text[at:end]
        if len(self._word) > _MAX_WORD:
            self.is_broken = True
        elif end < len(text):
            if self._word in _CONSTANTS or _NUMBER.fullmatch(self._word):
                self._end_value()
            else:
                self.is_broken = True
        return end

    def _mark(self, character: str) -> int:
        """Take one character outside of strings and words; return how many were taken."""
        state = self._state
        if state in (_VALUE, _FIRST_ITEM) and character in '"{[-0123456789tfn':
            return self._begin(character)
        if state in (_FIRST_KEY, _KEY) and character == '"':
            self._is_key, self._state = True, _IN_STRING
        elif state == _COLON and character == ":":
            self._state = _VALUE
        elif state == _AFTER and character == ",":
            self._state = _KEY if self._closers[-1] == "}" else _VALUE
        elif state in (_AFTER, _FIRST_ITEM, _FIRST_KEY) and character == self._closers[-1]:
            self._closers.pop()
            self._end_value()
        else:
            self.is_broken = True
            return 0
        return 1

    def _begin(self, character: str) -> int:
        if character == '"':
            self._state = _IN_STRING
        elif character in "{[" and len(self._closers) < _MAX_DEPTH:
            self._closers.append("}" if character == "{" else "]")
            self._state = _FIRST_KEY if character == "{" else _FIRST_ITEM
        elif character in "{[":
            self.is_broken = True
            return 0
        else:
            self._state, self._word = _IN_WORD, character
        return 1

    def _end_value(self) -> None:
        self._state = _AFTER
        self.is_whole = not self._closers


class CallReader:
    """One call. `parts` has what was read, in order; the caller takes them once `name` is known.

    With `name` given the text is the arguments alone. `is_bare`: a call has no tags; only its keys mark it. `unread`:
    text that was taken before the call broke, and is no part of it.
    """

    def __init__(self, name: str | None = None, *, is_bare: bool = False) -> None:
        self.name = name
        self.parts: list[Written | Markup | Made] = []
        self.is_whole = self.is_broken = False
        self.unread = ""
        self.has_arguments = self.has_whole_arguments = False
        self._is_bare = is_bare
        self._has_frame = name is None
        self._key = "" if self._has_frame else _ARGUMENTS[0]
        self._state = _VALUE if self._has_frame else _IN_WORD  # of the frame; _IN_WORD: in the value of `_key`
        self._value = JsonValue()
        self._has_begun = False  # the arguments' value
        self._pending = ""  # of a key, or of a value that is not passed on as it comes
        self._is_left_out = False
        self._num_framed = 0

    def passes(self, text: str) -> bool:
        """Return whether the text is within a string of the arguments, and leaves it there."""
        is_in_arguments = self._state == _IN_WORD and self._key in _ARGUMENTS and self.has_arguments
        return is_in_arguments and self._value.is_in_string and bool(_STRING.fullmatch(text))

    def feed(self, text: str, start: int) -> int:
        """Take `text` from `start`; return where the call ends or breaks, or the text's length."""
        at = start
        while at < len(text) and not self.is_whole and not self.is_broken:
            before = at
            if self._state == _IN_WORD:
                at = self._take_value(text, at)
            elif self._state == _IN_STRING:
                at = self._take_key(text, at)
            else:
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
                at += self._take_mark(text[at]) if at < len(text) else 0
                self._add(Markup, text[before:at])
            self._num_framed += 0 if self.name is not None else at - before
            self.is_broken = self.is_broken or self._num_framed > _MAX_FRAME
        if self.is_broken:
            self.unread, self._pending = self._pending, ""
        if self.is_broken and self.name is not None and self.has_whole_arguments:
            self.is_broken, self.is_whole = False, True  # only the rest of the frame is missing
        if self.is_whole:
            self.end()
        return at

    def end(self) -> None:
        """Take the call as whole, with the arguments that it has, or none."""
        self.is_whole = True
        if not self.has_arguments:
            self.has_arguments = self.has_whole_arguments = self._is_left_out = True
            self.parts.append(Made("{}"))

    def skip_space(self, text: str) -> int:
        """Take the white space that `text` begins with, of any kind; return its length."""
        num = len(text) - len(text.lstrip())
        self._add(Markup, text[:num])
        return num

    def rest(self) -> Written | Markup:
        """Return what is left at the end of the answer. Arguments that are half a string stay as they stand."""
        pending, self._pending = self._pending, ""
        is_text = self._state == _IN_WORD and self._key in _ARGUMENTS and pending.startswith('"')
        return Written(pending) if is_text else Markup(pending)

    @property
    def is_named_alone(self) -> bool:
        """Whether the name was given, and the text, the arguments alone, has not begun."""
        return not (self._has_frame or self._has_begun or self.is_whole or self.is_broken)

    @property
    def has_own_arguments(self) -> bool:
        """Whether the model wrote arguments, and did not leave them out."""
        return self.has_arguments and not self._is_left_out

    @property
    def is_certain(self) -> bool:
        """Whether this is a call, whatever follows: its name is known, and it does not begin with anything else."""
        return self.name is not None and (self._has_frame or self.has_arguments)

    def _add(self, kind: type[Written] | type[Markup], text: str) -> None:
        if text:
            self.parts.append(kind(text))

    def _take_mark(self, character: str) -> int:
        """Take one character of the frame; return how many were taken."""
        if self._state == _VALUE and character == "{":
            self._state = _FIRST_KEY
        elif self._state in (_FIRST_KEY, _KEY) and character == '"':
            self._state, self._value = _IN_STRING, JsonValue()
            return 0
        elif self._state == _COLON and character == ":":
            self._state, self._value, self._has_begun = _IN_WORD, JsonValue(), False
        elif self._state == _AFTER and character == ",":
            self._state = _KEY
        elif self._state == _AFTER and character == "}" and self.name is not None:
            self.is_whole = True
        else:
            self.is_broken = True
            return 0
        return 1

    def _take_key(self, text: str, at: int) -> int:
        end = self._take_pending(text, at)
        if self._value.is_whole:
            self._key, self._state = str(_decoded(self._pending)), _COLON
            self.is_broken = self._is_bare and self._key not in _KEYS
            if not self.is_broken:
                self._settle()
        return end

    def _take_value(self, text: str, at: int) -> int:
        if self._key not in _ARGUMENTS:
            return self._take_other(text, at)
        if not self._has_begun:  # arguments are one object, given once; white space before it is no part of them
            begin = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            self._add(Markup, text[at:begin])
            if begin == len(text):
                return begin
            if text[begin] not in ('{"n' if self._has_frame else "{") or self.has_arguments:
                self.is_broken = True
                return begin
            self._has_begun, self.has_arguments, at = True, text[begin] == "{", begin
        if self.has_arguments:
            end = self._value.feed(text, at)
            self._add(Written, text[at:end])
        else:
            end = self._take_pending(text, at)
            if self._value.is_whole:
                self._settle_arguments()
        self._end_value()
        self.has_whole_arguments = self._value.is_whole and self.has_arguments
        return end

    def _settle_arguments(self) -> None:
        """Take arguments that are a string of JSON, as some models write them, or nothing: null, a blank string."""
        written = _decoded(self._pending)
        arguments = written if isinstance(written, str) and written.strip() not in ("", "null") else "{}"
        self.is_broken = not isinstance(_decoded(arguments), dict)
        if not self.is_broken:
            self.has_arguments = True
            self._settle()
            self.parts.append(Made(arguments))

    def _take_other(self, text: str, at: int) -> int:
        """Take the value of a key that is not the arguments'."""
        end = self._take_pending(text, at)
        if self._value.is_whole:
            if self._key == "name":
                name = _decoded(self._pending)
                self.is_broken = not isinstance(name, str) or not name or self.name is not None
                self.name = self.name if self.is_broken else name
            if not self.is_broken:
                self._settle()
        self._end_value()
        return end

    def _take_pending(self, text: str, at: int) -> int:
        """Take text of a key or value that counts once it is whole."""
        end = self._value.feed(text, at)
        self._pending += text[at:end]
        self.is_broken = self._value.is_broken
        return end

    def _settle(self) -> None:
        """Take the pending text as markup."""
        self._add(Markup, self._pending)
        self._pending = ""

    def _end_value(self) -> None:
        """Continue the frame if the value is whole."""
        self.is_broken = self.is_broken or self._value.is_broken
        if self._value.is_whole and not self.is_broken:
            self._state = _AFTER
            self.is_whole = not self._has_frame


def _decoded(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        return ""

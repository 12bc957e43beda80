"""`SettingsReader`: convert dicts with upper-case keys to frozen dataclasses and collect every problem.

Pure; conf.py has the keys. For a wrong value the default is used, so that one `check` reports every problem.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

MAX_WHOLE_NUMBER = 2**53  # a config travels as JSON, whose readers keep whole numbers up to here
MAX_NUMBER = 1_000_000_000.0  # 30 years of seconds: a thread cannot wait much longer
MAX_DAYS = 36_500
_MAX_SHOWN_CHARS = 100
_KINDS = {
    type(None): "None",
    str: "a text",
    list: "a list",
    dict: "a dict",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}
_WORDS: Mapping[type, str] = {bool: "True or False", str: "a text", types.NoneType: "None"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong in the settings. `kind` is "key", "value" or "missing"; checks.py turns it into an id."""

    kind: str
    message: str
    hint: str


class SettingsReader:
    """Used once; `problems` are those found so far."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def dataclass(
        self,
        cls: type[T],
        raw: object,
        where: str,
        *,
        fixed: Mapping[str, Any] = {},
        defaults: Mapping[str, Any] = {},
    ) -> T:
        """Build `cls` from `raw` over `defaults`. `fixed` are fields that are not keys."""
        given = self.mapping(raw, where)
        fields = {name.upper(): name for name in field_names(cls) if name not in fixed}
        hints = typing.get_type_hints(cls)
        self.refuse_unknown(given, fields, where)
        accepted = dict(fixed)
        for key, value in {**defaults, **given}.items():
            name = fields.get(key)
            if name is not None and self.fits(value, hints[name], f'{where}["{key}"]', report=key in given):
                accepted[name] = float(value) if hints[name] is float else value
        return cls(**accepted)

    def fits(self, value: object, annotation: Any, where: str, *, report: bool = True) -> bool:
        """Return whether `value` is of the annotated type and, as a number, from 0 to its bound; report it if not."""
        allowed = _allowed_types(annotation)
        right_type = isinstance(value, allowed) and (not isinstance(value, bool) or bool in allowed)
        most = MAX_NUMBER if float in allowed else MAX_WHOLE_NUMBER
        if right_type and (not isinstance(value, int | float) or 0 <= value <= most):
            return True
        if report:
            self.wrong(f"{where} is {_shown(value)}.", f"It takes {_described(allowed, most)}.")
        return False

    def boolean(self, given: Mapping[str, Any], key: str) -> bool:
        """Return the boolean under `key`; False if it is missing."""
        value = given.get(key, False)
        return value is True if self.fits(value, bool, f'STREAMSERVE["{key}"]') else False

    def number(self, given: Mapping[str, Any], key: str) -> float:
        """Return the number of seconds under `key`; 0 if it is missing."""
        value = given.get(key, 0.0)
        return float(value) if self.fits(value, float, f'STREAMSERVE["{key}"]') else 0.0

    def days(self, given: Mapping[str, Any], key: str) -> float:
        """Return the number of days under `key`; 0 if it is missing. So many days ago there is still a date."""
        value = self.number(given, key)
        if value > MAX_DAYS:
            self.wrong(f'STREAMSERVE["{key}"] is {value!r}.', f"It takes days, at most {MAX_DAYS:,}; 0 keeps all.")
        return min(value, MAX_DAYS)

    def one_of(self, value: object, choices: tuple[str, ...], where: str) -> None:
        """Report a value that is no choice."""
        if value not in choices:
            self.wrong(f"{where} is {_shown(value)}.", f"It takes one of {', '.join(choices)}.")

    def dotted_paths(self, raw: object, where: str) -> tuple[str, ...]:
        """Return a list of dotted paths, or () and a problem."""
        paths = raw if isinstance(raw, list | tuple) else [raw]
        if all(isinstance(path, str) and "." in path.strip(".") for path in paths):
            return tuple(paths)
        self.wrong(f"{where} is {raw!r}.", "It takes a list of dotted paths, as mysite.filters.no_bluebird.")
        return ()

    def mapping(self, raw: object, where: str) -> Mapping[str, Any]:
        """Return `raw`, or {} and a problem."""
        if isinstance(raw, Mapping):
            return raw
        self.wrong(f"{where} is {kind_of(raw)}.", "It takes a dict.")
        return {}

    def refuse_unknown(self, given: Mapping[str, Any], known: Iterable[str], where: str) -> None:
        """Report the unknown keys, each with the key that was probably meant."""
        names = list(known)
        for key in given:
            if key not in names:
                hint = nearest(str(key), names) or f"Known keys: {', '.join(names)}."
                self.problem("key", f"{where} has the unknown key {key!r}.", hint)

    def wrong(self, message: str, hint: str) -> None:
        """Report a wrong value."""
        self.problem("value", message, hint)

    def problem(self, kind: str, message: str, hint: str) -> None:
        """Report a problem."""
        self.problems.append(Problem(kind=kind, message=message, hint=hint))


def field_names(cls: Any) -> list[str]:
    """Return the names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(cls)]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean ...?", or "" when nothing is like it."""
    names = list(known)
    close = difflib.get_close_matches(name.upper(), names, n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else ""


def _allowed_types(annotation: Any) -> tuple[type, ...]:
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return (*members, int) if float in members else tuple(members)


def kind_of(value: object) -> str:
    """Return what a value is, for messages about a value that may hold a secret."""
    return _KINDS.get(type(value)) or f"of type {type(value).__name__}"


def _shown(value: object) -> str:
    """Return a value of the settings as it stands in a message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}… (a {type(value).__name__})"


def _described(allowed: tuple[type, ...], most: float) -> str:
    """Return what a key takes, for a hint."""
    number = "a number" if float in allowed else "a whole number"
    names = [
        _WORDS.get(kind, f"{number} from 0 to {most:,.0f}")
        for kind in allowed
        if kind is not int or float not in allowed
    ]
    return " or ".join(names)


def is_base_url(url: str) -> bool:
    """Return whether `url` is an http(s) address that routes can be appended to."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    is_bare = not (parts.query or parts.fragment or "@" in parts.netloc or "\\" in url)
    return parts.scheme in ("http", "https") and has_host and is_bare


def without_login(url: object) -> object:
    """Return an address without what stands before its last @, so that no password gets into a message."""
    return url.rpartition("@")[2] if isinstance(url, str) else url

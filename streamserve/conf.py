"""Typed settings from `STREAMSERVE = {...}`: read lazily, checked whole, read again when a test changes them.

The only reader of `STREAMSERVE`. `read()` is pure and collects every problem, for checks.py; `get_settings()` raises on
the first use of wrong settings. Pattern: whitenoise and django-htmx (lazy typed conf), stamina (every mistake named).
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.limits import Limits
from streamserve.streams.stream import StreamSettings

ECHO_PATH = "echo"
DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One entry of MODELS: which model, and its engine's shape (ENGINE, with the model's own ENGINE on top)."""

    model: ModelConfig
    engine: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`STREAMSERVE`, checked. Field names are the keys in lower case; docs/settings.md says what each one does."""

    models: Mapping[str, ModelSettings] = field(default_factory=dict)
    default_model: str = ""
    engine: EngineConfig = field(default_factory=EngineConfig)
    limits: Limits = field(default_factory=Limits)
    streams: StreamSettings = field(default_factory=StreamSettings)
    anonymous: bool = False
    store: bool = False
    testing: bool = False
    echo_step_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong in `STREAMSERVE`. `kind` is "key", "value" or "missing"; checks.py turns it into an id."""

    kind: str
    message: str
    hint: str


def get_settings() -> Settings:
    """Return the checked settings. Raises ImproperlyConfigured, naming every problem and its way out."""
    settings, problems = _current()
    if problems:
        raise ImproperlyConfigured(" ".join(f"{problem.message} {problem.hint}" for problem in problems))
    return settings


def get_problems() -> tuple[Problem, ...]:
    """Return what is wrong with `STREAMSERVE`, for the system checks."""
    return _current()[1]


@lru_cache(maxsize=1)
def _current() -> tuple[Settings, tuple[Problem, ...]]:
    return read(getattr(django_settings, "STREAMSERVE", {}))


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == "STREAMSERVE":
        _current.cache_clear()


setting_changed.connect(_forget, dispatch_uid="streamserve.conf")


def read(raw: object) -> tuple[Settings, tuple[Problem, ...]]:
    """Return the settings that `raw` means and everything that is wrong with it."""
    reader = _Reader()
    return reader.settings(raw), tuple(reader.problems)


class _Reader:
    """Collects problems while it reads, so that one `check` shows them all."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def settings(self, raw: object) -> Settings:
        given = self._mapping(raw, "STREAMSERVE")
        known = [name.upper() for name in _field_names(Settings)]
        self._refuse_unknown(given, known, "STREAMSERVE")
        engine = self._dataclass(EngineConfig, given.get("ENGINE", {}), "ENGINE")
        testing = self._boolean(given, "TESTING")
        models = self._models(given.get("MODELS", {}), given.get("ENGINE", {}), testing=testing)
        return Settings(
            models=models,
            default_model=self._default_model(given.get("DEFAULT_MODEL"), models),
            engine=engine,
            limits=self._dataclass(Limits, given.get("LIMITS", {}), "LIMITS"),
            streams=self._dataclass(StreamSettings, given.get("STREAMS", {}), "STREAMS"),
            anonymous=self._boolean(given, "ANONYMOUS"),
            store=self._boolean(given, "STORE"),
            testing=testing,
            echo_step_seconds=self._seconds(given, "ECHO_STEP_SECONDS"),
        )

    def _models(self, raw: object, engine: object, *, testing: bool) -> dict[str, ModelSettings]:
        given = self._mapping(raw, "MODELS")
        if testing and not given:
            given = {ECHO_PATH: {"PATH": ECHO_PATH}}
        elif not given:
            self._problem(
                "missing", 'STREAMSERVE["MODELS"] names no model.', 'Try {"MODELS": {"echo": {"PATH": "echo"}}}.'
            )
        out = {}
        for alias, options in given.items():
            model = self._model(alias, options, engine)
            if model is not None:
                out[alias] = _as_echo(model) if testing else model
        return out

    def _model(self, alias: object, raw: object, engine: object) -> ModelSettings | None:
        where = f'MODELS["{alias}"]'
        options = dict(self._mapping(raw, where))
        own_engine = self._mapping(options.pop("ENGINE", {}), f'{where}["ENGINE"]')
        if not isinstance(alias, str) or not alias or not isinstance(options.get("PATH"), str) or not options["PATH"]:
            self._problem("value", f"{where} needs a PATH.", "Give a folder, a hub id such as org/name, or 'echo'.")
            return None
        model = self._dataclass(ModelConfig, {**options, "ALIAS": alias}, where, hidden=("ALIAS",))
        self._one_of(model.dtype, DTYPES, f'{where}["DTYPE"]')
        self._one_of(model.device, DEVICES, f'{where}["DEVICE"]')
        shared = engine if isinstance(engine, Mapping) else {}
        merged = self._dataclass(EngineConfig, own_engine, f'{where}["ENGINE"]', defaults=shared)
        return ModelSettings(model=model, engine=merged)

    def _default_model(self, raw: object, models: Mapping[str, ModelSettings]) -> str:
        if raw is None:
            return next(iter(models), "")
        if not isinstance(raw, str) or raw not in models:
            hint = _nearest(str(raw), models) or "Name one of MODELS."
            self._problem("value", f'STREAMSERVE["DEFAULT_MODEL"] is {raw!r}, which is not in MODELS.', hint)
            return next(iter(models), "")
        return raw

    def _dataclass(
        self, cls: type[T], raw: object, where: str, *, hidden: tuple[str, ...] = (), defaults: Mapping[str, Any] = {}
    ) -> T:
        """Build `cls` from upper-case keys. A wrong value is reported and its default used instead."""
        given = self._mapping(raw, where)
        fields = {f.name.upper(): f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        hints = typing.get_type_hints(cls)
        self._refuse_unknown(given, [name for name in fields if name not in hidden], where, allowed=hidden)
        accepted = {}
        for key, value in {**defaults, **given}.items():
            if key in fields and self._fits(value, hints[fields[key].name], f'{where}["{key}"]', report=key in given):
                accepted[fields[key].name] = float(value) if hints[fields[key].name] is float else value
        return cls(**accepted)

    def _fits(self, value: object, annotation: Any, where: str, *, report: bool) -> bool:
        allowed = _allowed_types(annotation)
        right_type = isinstance(value, allowed) and (not isinstance(value, bool) or bool in allowed)
        negative = isinstance(value, int | float) and value < 0
        if right_type and not negative:
            return True
        if report:
            names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in allowed)
            self._problem("value", f"STREAMSERVE {where} is {value!r}.", f"It takes {names}, not negative.")
        return False

    def _boolean(self, given: Mapping[str, Any], key: str) -> bool:
        value = given.get(key, False)
        if not isinstance(value, bool):
            self._problem("value", f'STREAMSERVE["{key}"] is {value!r}.', "It takes True or False.")
        return value is True

    def _seconds(self, given: Mapping[str, Any], key: str) -> float:
        value = given.get(key, 0.0)
        return float(value) if self._fits(value, float, f'["{key}"]', report=True) else 0.0

    def _one_of(self, value: str, choices: tuple[str, ...], where: str) -> None:
        if value not in choices:
            self._problem("value", f"STREAMSERVE {where} is {value!r}.", f"It takes one of {', '.join(choices)}.")

    def _mapping(self, raw: object, where: str) -> Mapping[str, Any]:
        if isinstance(raw, Mapping):
            return raw
        self._problem("value", f"{where} is {type(raw).__name__}.", "It takes a dict.")
        return {}

    def _refuse_unknown(
        self, given: Mapping[str, Any], known: Iterable[str], where: str, allowed: tuple[str, ...] = ()
    ) -> None:
        names = list(known)
        for key in given:
            if key not in names and key not in allowed:
                self._problem("key", f"{where} has the unknown key {key!r}.", _nearest(str(key), names) or _list(names))

    def _problem(self, kind: str, message: str, hint: str) -> None:
        self.problems.append(Problem(kind=kind, message=message, hint=hint))


def _as_echo(model: ModelSettings) -> ModelSettings:
    """TESTING: every alias answers, none of them needs weights."""
    return dataclasses.replace(model, model=dataclasses.replace(model.model, path=ECHO_PATH))


def _allowed_types(annotation: Any) -> tuple[type, ...]:
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return (*members, int) if float in members else tuple(members)


def _field_names(cls: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.upper(), [*known], n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else ""


def _list(names: Iterable[str]) -> str:
    return f"Known keys: {', '.join(names)}."

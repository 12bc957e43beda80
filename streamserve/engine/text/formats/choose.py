"""Which format a model's output has: the setting's, else the tokenizer's own, else a known one, else plain text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol

from streamserve.engine.text.formats.base import OutputFormat
from streamserve.engine.text.formats.known import ALIASES, KNOWN
from streamserve.engine.text.formats.markup import MarkedFormat, PlainFormat, TaggedTokenizer
from streamserve.engine.text.formats.template import TemplateFormat
from streamserve.protocol.errors import EngineUnavailable

logger = logging.getLogger(__name__)

NAMES = ("text", *(one.name for one in KNOWN), *ALIASES)


class TemplatedTokenizer(TaggedTokenizer, Protocol):
    """A tokenizer with what models say of their markup."""

    chat_template: str
    response_template: dict[str, Any] | None

    @property
    def added_ids(self) -> Mapping[str, int]:
        """The added tokens by their text."""


def choose_format(tokenizer: TemplatedTokenizer, setting: str | None = None) -> OutputFormat:
    """Return the format. `setting` is a name of NAMES, or the dotted path of a function that makes one.

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

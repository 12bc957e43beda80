"""What is asked of a model's tokenizer beside prompts: `Spell`, `Spelled`. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """Of a `text`, its ids without those that begin or end a prompt; else the text of `token_ids`.

    `is_apart`: the text of each id by itself.
    """

    text: str | None = None
    token_ids: tuple[int, ...] = ()
    is_apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelled:
    """The ids of a text, or the texts of ids: one, or of each."""

    token_ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()

"""docs/widget.md names every argument of the chat's tag and every variable of its style sheet."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from streamserve.templatetags.streamserve import streamserve_chat

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "widget.md").read_text(encoding="utf-8")
STYLES = ROOT / "streamserve" / "static" / "streamserve" / "chat.css"


def first_column(head: str) -> set[str]:
    """Return the names in the first column of the table whose head begins with `head`."""
    table = PAGE[PAGE.index(f"| {head} |") :].partition("\n\n")[0]
    return {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])}


def test_every_argument_is_named() -> None:
    arguments = set(inspect.signature(inspect.unwrap(streamserve_chat)).parameters) - {"context"}
    assert first_column("argument") == arguments


def test_every_variable_is_named() -> None:
    assert first_column("variable") == set(
        re.findall(r"^\s*(--ss-[\w-]+):", STYLES.read_text(encoding="utf-8"), re.MULTILINE)
    )

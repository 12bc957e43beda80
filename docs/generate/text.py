"""Markdown of values: the head of a page, tables, and links to other pages from texts of the code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# How texts of the code name a page: (docs/fairness.md#the-door).
_PAGE = re.compile(r"\(docs/((?:[\w-]+/)*)([\w-]+)\.md(#[\w-]+)?\)")
# A link that repeats the word before it.
_TWICE = re.compile(r"\b([\w -]+) \(\[\1\]\(([^)]+)\)\)", re.IGNORECASE)


def head(title: str, text: str, source: str) -> str:
    """Return the first lines of a page: its title, where it comes from, and what it is about."""
    note = f"<!-- Written by `python -m docs.generate` from {source}: change that, not this page. -->"
    return f"# {title}\n\n{note}\n\n{text.strip()}\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Cells are Markdown; a line break or a bar in a cell becomes what a table can hold."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def linked(text: str) -> str:
    """Return the text of a docstring as Markdown of a page in docs/reference/, on one line."""
    return _TWICE.sub(r"[\1](\2)", _PAGE.sub(_link, " ".join(text.split())))


def _link(found: re.Match[str]) -> str:
    folder, page, fragment = found.group(1), found.group(2), found.group(3) or ""
    words = (fragment[1:] or page).replace("-", " ")
    path = f"{page}.md" if folder == "reference/" else f"../{folder}{page}.md"
    return f"([{words}]({path}{fragment}))"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

"""The code blocks of a Markdown page, for the tests that run documents literally."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FILE = re.compile(r"\A(?:# ([\w./-]+\.\w+)|<!-- ([\w./-]+) -->)\n")
_SERVER = re.compile(r"daphne |uvicorn |python manage\.py (runserver|streamserve_engine( [\w-]+)?$)")
_COMMENT = re.compile(r"(?:^|\s+)# .*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: its language, its text, and the heading above it."""

    language: str
    text: str
    heading: str

    @property
    def file_name(self) -> str:
        """The file that the block belongs to, from a comment in its first line; "" for none."""
        found = _FILE.match(self.text)
        return (found.group(1) or found.group(2)) if found else ""

    @property
    def code(self) -> str:
        """The text without that comment."""
        return _FILE.sub("", self.text)

    @property
    def commands(self) -> list[str]:
        r"""The shell commands of the block, without comments; a line that ends with `\` continues in the next one."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := _COMMENT.sub("", line).strip())]


def blocks_of(page: str, heading: str | None = None) -> list[Block]:
    """Return the blocks of `page` (a path from the root), or those under one heading, in order."""
    text = (ROOT / page).read_text()
    headings = [(found.start(), found.group(1)) for found in _HEADING.finditer(_without_blocks(text))]
    out = []
    for found in _FENCE.finditer(text):
        above = [title for start, title in headings if start < found.start()]
        out.append(Block(language=found.group(1), text=found.group(2), heading=above[-1] if above else ""))
    assert out, page
    return [block for block in out if heading in (None, block.heading)]


def is_server(command: str) -> bool:
    """Return whether the command runs until it is ended."""
    return _SERVER.match(command) is not None


def _without_blocks(text: str) -> str:
    """Return `text` with its blocks blanked: a comment in one is no heading. Positions stay."""
    return _FENCE.sub(lambda found: re.sub(r"[^\n]", " ", found.group(0)), text)

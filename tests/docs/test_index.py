"""docs/README.md lists every page once."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_PAGE = re.compile(r"^\| \[[^\]]+\]\(([\w-]+\.md)\) \| \S", re.MULTILINE)


def test_the_index_has_one_line_for_each_page() -> None:
    """A new page needs its line, with what is in it."""
    listed = _PAGE.findall((DOCS / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md")

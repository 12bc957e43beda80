"""docs/hooks.py: the navigation is docs/README.md, and links of GitHub lead to the same pages in the site.

`make docs`, which CI runs, builds the site with warnings as errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs import hooks

DOCS = Path(hooks.__file__).parent


def pages(nav: list[Any]) -> Iterator[str]:
    """Yield the pages of a navigation."""
    for entry in nav:
        for _, value in entry.items():
            if isinstance(value, str):
                yield value
            else:
                yield from pages(value)


def test_the_navigation_has_three_doors_and_every_page() -> None:
    """Each page of docs/ and of the repository's root is there once."""
    nav = hooks.navigation((DOCS / "README.md").read_text())
    titles = [title for entry in nav for title in entry]
    assert titles == ["Home", "Build a site", "Run it", "Change it", "Reference"]
    in_docs = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert sorted(pages(nav)) == sorted(in_docs | set(hooks.ROOT_PAGES.values()))


def test_a_link_to_the_repository_leads_to_the_page_of_the_site() -> None:
    """The root's pages have names of their own; a file that is no page is its text; code stays."""
    text = "[r](../README.md#begin) [s](../streamserve/conf.py) [d](api.md) [u](https://x.y) ![i](img/a.svg)"
    assert hooks.with_links(text, "docs/a.md", "a.md") == (
        "[r](overview.md#begin) s [d](api.md) [u](https://x.y) ![i](img/a.svg)"
    )
    assert hooks.with_links("[`c`](../errors.md#x)", "docs/reference/a.md", "reference/a.md") == "[`c`](../errors.md#x)"
    assert hooks.with_links("![i](docs/img/a.svg) [d](docs/api.md)", "README.md", "overview.md") == (
        "![i](img/a.svg) [d](api.md)"
    )
    assert hooks.with_links("[s](#1-ask) [t](b.md#1-ask)", "docs/a.md", "a.md") == "[s](#_1-ask) [t](b.md#_1-ask)"
    assert hooks.slug("1. Ask `it`, now") == "_1-ask-it-now"
    code = "```\n[r](../README.md)\n```\n"
    assert hooks.with_links(code, "docs/a.md", "a.md") == code

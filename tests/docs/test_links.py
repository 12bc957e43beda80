"""README.md, the pages beside it and docs/: every relative link and every file that they name exists."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# A file, or a folder with its closing slash, from the root of the repository.
_FILE = re.compile(r"(?<![\w/.-])(?:streamserve|tests|docs|project|benchmarks)/[\w./@-]+(?:\.[a-z]+|/)(?![\w/])")
# The tree of docs/life-of-a-request.md names files from the package on: `streams/reader/reader.py`.
_OF_PACKAGE = re.compile(r"(?<![\w/.-])(?:\w+/)+\w+\.py\b")
# The first line of an example names a file of the reader's site.
_BLOCK_FILE = re.compile(r"(?<=```python\n)# \S+$|<!-- \S+ -->", re.MULTILINE)
_MODULE = re.compile(r"^(?:from (streamserve[\w.]*) import ([\w, ]+)|import (streamserve[\w.]*))$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    """The target of a link exists; a fragment names one of its headings."""
    assert [link for link in _LINK.findall(page.read_text()) if not _leads_somewhere(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_named_file_exists(page: Path) -> None:
    """A path that a page names is a file or a folder of the repository, or the name of a template or a static file."""
    places = [ROOT, ROOT / "streamserve" / "templates", ROOT / "streamserve" / "static"]
    named = sorted(set(_named(page.read_text())))
    assert [path for path in named if not any((place / path).exists() for place in places)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_import_of_an_example_works(page: Path) -> None:
    """The modules that examples import are there, with the names that are imported from them."""
    for module, names, alone in _MODULE.findall(page.read_text()):
        found = importlib.import_module(module or alone)
        missing = [name.strip() for name in names.split(",") if name and not hasattr(found, name.strip())]
        assert missing == [], module


def test_the_tests_find_what_they_look_for() -> None:
    """Links, files and imports are found in a page that has each kind."""
    page = (
        "[a](b.md#c) `tests/docs/test_links.py` streams/stream.py tests/docs/ docs/no.md https://x.y/streamserve/z.py"
    )
    assert _LINK.findall(page) == ["b.md#c"]
    assert sorted(_named(page)) == [
        "docs/no.md",
        "streamserve/streams/stream.py",
        "tests/docs/",
        "tests/docs/test_links.py",
    ]
    assert _MODULE.findall("from streamserve.asgi import Caller, app") == [("streamserve.asgi", "Caller, app", "")]
    assert (_slug("`STREAMS`, and the log's place"), _slug("Other people's event streams")) == (
        "streams-and-the-logs-place",
        "other-peoples-event-streams",
    )


def _named(text: str) -> Iterator[str]:
    text = _BLOCK_FILE.sub("", text)
    yield from _FILE.findall(text)
    for path in _OF_PACKAGE.findall(text):
        if not path.startswith(("streamserve/", "tests/", "docs/", "project/", "benchmarks/")):
            yield f"streamserve/{path}"


def _leads_somewhere(page: Path, link: str) -> bool:
    if ":" in link:  # a URL
        return True
    path, _, fragment = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return False
    return not fragment or fragment in map(_slug, _HEADING.findall(target.read_text()))


def _slug(heading: str) -> str:
    """Return the fragment that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

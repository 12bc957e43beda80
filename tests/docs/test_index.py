"""docs/README.md lists every page once; docs/api.md lists every route, and none that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

from streamserve.api.routes import ROUTES

DOCS = Path(__file__).parents[2] / "docs"
_PAGE = re.compile(r"^\| \[[^\]]+\]\(([\w-]+\.md)\) \| \S", re.MULTILINE)
_ROUTE = re.compile(r"`(GET|POST|PUT|PATCH|DELETE) (/[^`?]*)")
_VARIABLE = re.compile(r"\{\w+\}|(?:chatcmpl-)?<\w+:\w+>")


def test_the_index_has_one_line_for_each_page() -> None:
    """A new page needs its line, with what is in it."""
    listed = _PAGE.findall((DOCS / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in DOCS.glob("*.md") if path.name != "README.md")


def test_the_table_of_routes_is_that_of_the_code() -> None:
    """Each method and path of ROUTES has a place in the first table, and nothing else has."""
    table = (DOCS / "api.md").read_text().partition("| route |")[2].partition("\n\n")[0]
    listed = {(method, _VARIABLE.sub("{}", path)) for method, path in _ROUTE.findall(table)}
    routes = [route for route in ROUTES if route.name]  # the others answer what is at no address
    served = {(method, _VARIABLE.sub("{}", f"/{route.path}")) for route in routes for method in route.methods}
    assert listed == {(method, path) for method, path in served if method != "HEAD"}

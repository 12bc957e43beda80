"""The hook of properdocs.yml: what GitHub shows works in the site too.

- The navigation is docs/README.md: its headings, and the pages of their tables.
- README.md, CONTRIBUTING.md, CHANGELOG.md and SECURITY.md of the repository are pages of the site.
- A link to another file of the repository becomes its text: the site has no such file.
- Headings have the fragments that GitHub gives them.

Runs in ProperDocs' own virtual environment, and imports nothing of ours. Tests import it without ProperDocs.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INDEX = "README.md"
# Pages of the repository's root: where they are in the site.
ROOT_PAGES = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
# Pages of the site that are not listed by themselves: who lists them.
UNLISTED = ("Overview", "overview.md"), ("Security", "security.md")

_LOG = logging.getLogger("properdocs.hooks.streamserve")  # its warnings fail the build
_HEADING = re.compile(r"^(##+) (.+)$")
_ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)#]+)\) \| ")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_ITEM = re.compile(r"^(?:- |[0-9]+\. )", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Set the navigation, and the fragments of headings."""
    config.nav = navigation((ROOT / "docs" / INDEX).read_text())
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda heading, separator: slug(heading)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root, and the style sheet."""
    from properdocs.structure.files import File

    for name, path in ROOT_PAGES.items():
        files.append(File.generated(config, path, content=(ROOT / name).read_text()))
    files.append(File.generated(config, "site.css", content=style()))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Make the links of a page those of the site."""
    path = page.file.src_uri
    sources = {site: name for name, site in ROOT_PAGES.items()}
    return with_links(markdown, sources.get(path, f"docs/{path}"), path)


def on_page_content(html: str, page: Any, **kwargs: Any) -> str:
    """Warn of list items that GitHub shows and Python-Markdown does not: it wants a blank line before some lists."""
    text = _FENCE.sub("", page.markdown or "")
    written, shown = len(_ITEM.findall(text)), html.count("<li")
    if shown < written:
        _LOG.warning("%s: %d of %d list items are shown as text", page.file.src_uri, written - shown, written)
    return html


def navigation(index: str) -> list[Any]:
    """Return the navigation that the headings and tables of docs/README.md stand for."""
    nav: list[Any] = [{"Home": INDEX}]
    sections: list[list[Any]] = [nav]
    for line in index.splitlines():
        if heading := _HEADING.match(line):
            depth, entries = len(heading[1]) - 1, list[Any]()
            del sections[depth:]
            sections[-1].append({heading[2]: entries})
            sections.append(entries)
        elif row := _ROW.match(line):
            path = row[2].removeprefix("../") if row[2].startswith("../") else row[2]
            sections[-1].append({row[1].replace("`", ""): ROOT_PAGES.get(path, path) if ".." in row[2] else path})
    nav[-2][next(iter(nav[-2]))].extend({title: path} for title, path in UNLISTED)
    nav[-2][next(iter(nav[-2]))].extend([_one_by_one("Figures"), _one_by_one("Decisions")])
    return nav


def _one_by_one(title: str) -> Any:
    """Return the entry of a folder's pages, which another page lists."""
    folder = title.lower()
    pages = sorted(path for path in (ROOT / "docs" / folder).glob("*.md") if path.name != INDEX)
    titles = {path: path.read_text().partition("\n")[0].lstrip("# ").replace("`", "") for path in pages}
    return {f"{title}, one by one": [{titles[path]: f"{folder}/{path.name}"} for path in pages]}


def with_links(markdown: str, source: str, path: str) -> str:
    """Return the text of the repository's page `source` with links for `path` in the site; code stays."""
    pieces, at = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_relinked(markdown[at : fence.start()], source, path), fence.group()]
        at = fence.end()
    return "".join([*pieces, _relinked(markdown[at:], source, path)])


def _relinked(text: str, source: str, path: str) -> str:
    return _LINK.sub(lambda found: _link(found[1], found[2], found[3], source, path), text)


def _link(bang: str, words: str, target: str, source: str, path: str) -> str:
    if ":" in target:
        return f"{bang}[{words}]({target})"
    file, _, fragment = target.partition("#")
    end = f"#{_id(fragment)}" if fragment else ""
    if not file:
        return f"[{words}]({end})"
    meant = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
    found = ROOT_PAGES.get(meant) or (meant.removeprefix("docs/") if meant.startswith("docs/") else None)
    if found is None and (ROOT / meant).exists():
        return words
    there = posixpath.relpath(found or meant, posixpath.dirname(path) or ".")
    return f"{bang}[{words}]({there}{end})"


def slug(heading: str) -> str:
    """Return the fragment that GitHub makes of a heading, as an id of the site."""
    return _id(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))


def _id(fragment: str) -> str:
    """Return a fragment that the theme's scripts can take as a selector: it does not begin with a digit."""
    return f"_{fragment}" if fragment[:1].isdigit() else fragment


def style() -> str:
    """Return the style sheet: the colours of code, light and dark, and a handful of rules."""
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".codehilite")
    dark = HtmlFormatter(style="github-dark").get_style_defs("[data-bs-theme=dark] .codehilite")
    return f"{light}\n{dark}\n{_RULES}"


_RULES = """
body::before { background-image: none !important; }
.container { max-width: 1400px; }
.navbar.bg-primary { background: #17324d !important; }
.navbar .nav-link, .navbar-brand { color: #fff !important; }
[data-bs-theme=light] .col-md-9 a, [data-bs-theme=light] .modal a,
[data-bs-theme=light] .bs-sidebar .nav-link { color: #0b57d0; }
[data-bs-theme=dark] .col-md-9 a, [data-bs-theme=dark] .modal a,
[data-bs-theme=dark] .bs-sidebar .nav-link { color: #8ab4f8; }
h1, h2, h3 { font-weight: 600; letter-spacing: 0; }
h1 { font-size: 2rem; } h2 { font-size: 1.5rem; margin-top: 2rem; } h3 { font-size: 1.2rem; margin-top: 1.5rem; }
.codehilite, .codehilite pre { background: transparent !important; }
table { display: block; overflow-x: auto; max-width: 100%; }
table td, table th { padding: 0.35rem 0.6rem; vertical-align: top; }
td code { white-space: nowrap; }
td:last-child { min-width: 16rem; }
td:last-child code { white-space: normal; overflow-wrap: anywhere; }
img { max-width: 100%; height: auto; }
.headerlink { margin-left: 0.4em; opacity: 0; text-decoration: none; }
h1:hover .headerlink, h2:hover .headerlink, h3:hover .headerlink, .headerlink:focus { opacity: 0.6; }
"""

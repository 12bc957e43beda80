"""README.md, "Add it to your own site": its lines make a site, and the address that they end in works. Its table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.support.checks.axe import axe_violations
from tests.support.docs.doc_blocks import ROOT, blocks_of, is_server
from tests.support.docs.doc_site import README_SECTION, DocSite
from tests.support.servers.browser import ask, chromium, wait_for_status, watching
from tests.support.servers.web_servers import wait_until_ready

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocSite]:
    site = DocSite(tmp_path_factory.mktemp("readme"))
    yield site
    site.close()


def test_seven_lines_are_seven() -> None:
    """The blocks of the three files have as many lines as the text says."""
    blocks = [block for block in blocks_of("README.md", README_SECTION) if block.file_name]
    lines = [line for block in blocks for line in block.code.splitlines() if line]
    assert len(lines) == 7
    assert "seven lines" in (ROOT / "README.md").read_text()


def test_the_short_comparison_is_of_the_long_one() -> None:
    """Each row of README's table is a row of docs/compare.md, word for word, so that they cannot differ."""
    table = (ROOT / "README.md").read_text().partition("\n## Compared\n")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) > 5
    assert set(rows) <= set((ROOT / "docs" / "compare.md").read_text().splitlines())


@pytest.mark.browser
def test_the_address_that_the_lines_end_in_answers(site: DocSite) -> None:
    """In Chromium: the page is there without a login or a key, axe finds nothing, and it shows a whole answer."""
    [address] = re.findall(r"\*\*(http://127\.0\.0\.1:8000/\S+)\*\*", (ROOT / "README.md").read_text())
    commands = [command for block in blocks_of("README.md", README_SECTION) for command in block.commands]
    [serve] = [command for command in commands if is_server(command) and "runserver" in command]
    with site.serve(serve) as server, chromium() as browser:
        wait_until_ready(server.url)
        with watching(browser, server.url) as visit:
            visit.page.goto(server.url + urlsplit(address).path)
            expect(visit.page.get_by_label("Your question")).to_be_visible()
            assert axe_violations(visit.page) == []
            ask(visit.page, "Which lines make a chat?")
            wait_for_status(visit.page, "Answer complete")
            expect(visit.page.locator("[data-ss=body]")).to_contain_text("Which lines make a chat?")

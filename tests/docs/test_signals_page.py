"""docs/signals.md: its app bills an answer of a new site, as the page says; its tables name what is sent."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import streamserve
from streamserve import signals
from tests.support.docs.doc_blocks import ROOT, blocks_of
from tests.support.docs.doc_site import DocSite

pytestmark = pytest.mark.proof

PAGE = "docs/signals.md"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocSite]:
    site = DocSite(tmp_path_factory.mktemp("signals"))
    yield site
    site.close()


def test_the_page_s_app_bills_an_answer(site: DocSite) -> None:
    """The files are written and the commands run as the page has them: one charge, with the tokens of the answer."""
    blocks = blocks_of(PAGE)
    for block in blocks:
        if block.file_name:
            site.write(block)
    for command in [command for block in blocks if block.language == "sh" for command in block.commands]:
        site.run(command)
    asked, shown = list(site.output.values())[-2:]
    [usage] = re.findall(r"Usage\(.*\)", asked)
    [charge] = re.findall(r"\{.*?\}", shown)
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        [told] = re.findall(rf"{name}=(\d+)", usage)
        assert f"'{name}': {told}" in charge
    assert "'completion_tokens': 8" in charge
    assert "'user_id': None" in charge


def test_the_tables_name_every_signal_and_what_it_gives() -> None:
    """Each name in the strings of streamserve/signals.py is on the page."""
    page = (ROOT / PAGE).read_text()
    source = (ROOT / "streamserve" / "signals.py").read_text()
    for name, about in re.findall(r'^(\w+) = Signal\(\)\n"""(.*?)"""', source, re.MULTILINE | re.DOTALL):
        assert getattr(streamserve, name) is getattr(signals, name)
        assert f"| `{name}` |" in page
        given = set(re.findall(r"`([a-z_]+)`", about)) - {"answer_started", "answer_finished"}
        assert given <= set(re.findall(r"`([a-z_]+)`", page)), name

"""What the demo's texts name exists: the buttons of its chat, its pages, and addresses that nobody else can own."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from project import settings as project_settings
from project.context import SUGGESTIONS
from project.help.assistant import NO_ANSWER, billing
from project.help.languages import languages
from project.help.review import EXAMPLE, account_review
from streamserve import pipeline
from streamserve.clients.pipeline.client import PIPELINES, _pipelines
from tests.support.servers.web_servers import ROOT

pytestmark = pytest.mark.usefixtures("knowledge", "demo_pages")

ANSWERS = ("sentences", "body", "values", "answer", "replies", "answers")  # what is said, and not what is asked
IN_CHAT = re.compile(r"(?:press|click|use|open|choose) ([A-Z][\w ]*?) in this chat")
ADDRESS = re.compile(r"[\w.+-]+@[\w.-]+\w|https?://[^\s\"',)]+|\b(?:[\w-]+\.)+(?:com|org|net|io|dev|app|example)\b")


@pytest.fixture
def demo_pages(settings: Any) -> Iterator[None]:
    """The demo's templates and the names of its assistants; nothing is asked."""
    settings.TEMPLATES = project_settings.TEMPLATES
    settings.STREAMSERVE = {"TESTING": True, "MODELS": {"echo": {"PATH": "echo"}}, "ANONYMOUS": True}
    settings.LAB_MODEL, settings.LAB_QUESTION = "echo", "?"
    before = dict(PIPELINES)
    for function in (billing, account_review):
        if function.__name__ not in before:
            pipeline()(function)
    yield
    for name in set(PIPELINES) - set(before):
        del _pipelines[name]


def strings(value: Any) -> Iterator[str]:
    """Return every text in a value of TOML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from strings(each)


def answers(value: Any) -> Iterator[str]:
    """Return the texts of TOML that answer somebody."""
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, dict):
            for name, each in entry.items():
                yield from strings(each) if name in ANSWERS else answers(each)


def files() -> list[Path]:
    return sorted(path for folder in ("project", "benchmarks") for path in (ROOT / folder).rglob("*.toml"))


def said() -> list[str]:
    """Return everything that the assistant or the demo model may say."""
    declined = [NO_ANSWER, *(language.no_answer for language in languages().values())]
    return [*declined, EXAMPLE, *(text for path in files() for text in answers(tomllib.loads(path.read_text())))]


class Page(HTMLParser):
    """The addresses of a page's links, and the names of its links and buttons."""

    def __init__(self, client: Client, url: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.names: list[str] = []
        self._is_named = False
        response = client.get(url)
        assert response.status_code == 200, url
        self.feed(response.content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_named = tag in ("a", "button")
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]

    def handle_data(self, data: str) -> None:
        if self._is_named and data.strip():
            self.names.append(data.strip())


def test_a_button_of_this_chat_that_a_text_names_is_there(client: Client) -> None:
    """Each "press … in this chat" has its link or button on the chat page; nothing else is said of this page."""
    texts = said()
    assert len(texts) > 400
    about_here = [text for text in texts if re.search(r"\bthis (?:chat|page|site|window|form)\b", text)]
    named = {name for text in about_here for name in IN_CHAT.findall(text)}
    assert [text for text in about_here if not IN_CHAT.search(text)] == []
    assert named == {"Talk to a human"}
    assert named <= set(Page(client, "/").names)


def test_every_link_of_the_demos_pages_leads_somewhere(admin_client: Client) -> None:
    """From the chat page, the help pages and the one for a person: each link of this site answers."""
    seen = {"/", "/help/support-contact/"}
    todo = [*seen]
    while todo:
        page = Page(admin_client, todo.pop())
        new = {link.partition("#")[0] for link in page.links} - seen - {""}
        assert all(link.startswith("/") for link in new), new
        seen |= new
        todo += [link for link in new if link == "/" or link.startswith("/help/")]
    assert all(admin_client.get(link).status_code == 200 for link in seen if not link.startswith("/help/"))
    assert "/help/support/talk-to-a-human/" in seen


def test_who_talks_to_a_human_is_told_that_nobody_is_there(client: Client) -> None:
    """The service is invented, and the page says so."""
    page = client.get("/help/support/talk-to-a-human/").content.decode()
    assert "Nobody works there" in page
    assert "Quillbox is invented" in client.get("/").content.decode()


def test_addresses_belong_to_nobody() -> None:
    """Every address in a demo text is of the reserved top-level domain `example` (RFC 2606)."""
    texts = [*SUGGESTIONS, *said(), *(text for path in files() for text in strings(tomllib.loads(path.read_text())))]
    found = {address for text in texts for address in ADDRESS.findall(text)}
    assert "help@quillbox.example" in found
    assert {address for address in found if not re.search(r"\.example(?:/|$)", address)} == set()

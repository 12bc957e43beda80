"""`useChat` of @ai-sdk/react in Chromium against a daphne-served site: reload, lost network, stop, approval, branches.

After each the page shows what the site has kept, word for word: no gap, no duplicate.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from tests.support.docs.demo_site import end_engines
from tests.support.docs.doc_blocks import blocks_of
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import ADMINISTRATOR, MAKE_ADMINISTRATOR, Watched, signed_in
from tests.support.servers.cutting_relay import cutting
from tests.support.servers.node import bundle
from tests.support.servers.web_servers import daphne, wait_until_ready

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

PAGE = Path(__file__).parent / "page.jsx"
WEATHER = Path(__file__).parent / "weather.jsx"  # beside useWeather.jsx of the docs
ANSWER_MS = 60_000
# What Chromium logs of a network that a test takes away.
LOST = ("net::ERR",)
_SOME = re.compile(r"\S{3}")


@pytest.fixture(scope="module")
def url(node: str, tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    """The address of the site, which serves the page of the tests and the page of docs/ai-sdk.md."""
    state, scripts = tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("react")
    for block in blocks_of("docs/ai-sdk.md"):
        if block.language == "jsx" and (name := block.text.splitlines()[0].removeprefix("// ")).endswith(".jsx"):
            (scripts / name).write_text(block.text)
    shutil.copy(WEATHER, scripts)
    for entry in (PAGE, scripts / WEATHER.name, scripts / "main.jsx"):
        bundle(entry, scripts)
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.support.sites.pages.ai_sdk_site",
        "STREAMSERVE_STATE_DIR": str(state),
        "STREAMSERVE_MODEL": "echo",
        "REACT": str(scripts),
    }
    migrated(state, MAKE_ADMINISTRATOR, **ADMINISTRATOR)
    with daphne("project.asgi:application", env=env) as server:
        wait_until_ready(server.url)
        yield server.url
    end_engines(state)


_SHOWN = """[...document.querySelectorAll('main > p')].map((message) => [
  message.dataset.id,
  message.className,
  [...message.querySelectorAll('.text')].map((one) => one.textContent).join(''),
])"""


@dataclass
class Chat:
    """A page with a chat of its own."""

    visit: Watched
    url: str
    path: str
    id: str

    @property
    def page(self) -> Page:
        return self.visit.page

    @property
    def answer(self) -> Any:
        return self.page.locator("p.assistant").last

    def ask(self, text: str) -> None:
        self.page.get_by_label("Question").fill(text)
        self.page.get_by_label("Question").press("Enter")

    def until_begun(self, num_chars: int = 20) -> None:
        """Wait until the answer has some text, and is not over."""
        self.page.wait_for_function(
            "(num) => [...document.querySelectorAll('p.assistant')].at(-1)?.textContent.length >= num",
            arg=num_chars,
            timeout=ANSWER_MS,
        )

    def until(self, status: str) -> None:
        expect(self.page.locator("output")).to_have_text(status, timeout=ANSWER_MS)

    def shown(self) -> list[list[str]]:
        """Return id, role and text of the messages on screen."""
        return list(self.page.evaluate(f"() => {_SHOWN}"))

    def kept(self) -> list[list[str]]:
        """Return the same of the messages that the site has, once no answer runs."""
        listed = f"{self.url}/conversations?source=ai-sdk&limit=100"
        while any(one["running"] for one in self.page.request.get(listed).json()["conversations"]):
            self.page.wait_for_timeout(50)
        messages = self.page.request.get(f"{self.url}/ai/chat/{self.id}").json()["messages"]
        return [
            [one["id"], one["role"], "".join(part["text"] for part in one["parts"] if part["type"] == "text")]
            for one in messages
        ]

    def until_as_kept(self, num_messages: int) -> list[list[str]]:
        """Wait until the answer has ended, and the page shows what the site has; return it."""
        self.until_begun(1)
        kept = self.kept()
        script = f"(kept) => JSON.stringify({_SHOWN}) === JSON.stringify(kept)"
        try:
            self.page.wait_for_function(script, arg=kept, timeout=ANSWER_MS)
        except PlaywrightTimeout:
            assert self.shown() == kept
            raise
        assert len(kept) == num_messages
        self.until("ready")
        assert self.shown() == kept
        return kept

    def reload(self) -> None:
        self.page.reload()
        expect(self.page.locator("output")).to_be_visible(timeout=ANSWER_MS)


def path_of(chat: str, *, model: str = "echo", page: str = "page", **fields: Any) -> str:
    query = urlencode({"chat": chat, "model": model, "fields": json.dumps(fields)})
    return f"/react/{page}/?{query}"


@pytest.fixture(scope="module")
def visit(browser: Browser, url: str) -> Iterator[Watched]:
    """A browser in which a user has signed in."""
    with signed_in(browser, url, path="/") as visit:
        visit.expect_complaint(*LOST)
        yield visit


@pytest.fixture
def chat(visit: Watched, url: str, request: pytest.FixtureRequest) -> Chat:
    """The page, with a chat of the test's own, whose answers take some seconds."""
    return opened(visit, url, re.sub(r"\W+", "-", request.node.name))


def opened(visit: Watched, url: str, id_: str, **options: Any) -> Chat:
    path = path_of(id_, **{"max_tokens": 150, **options})
    visit.page.goto(url + path)
    expect(visit.page.locator("output")).to_have_text("ready", timeout=ANSWER_MS)
    return Chat(visit, url, path, id_)


def test_a_page_that_is_reloaded_in_mid_answer_goes_on(chat: Chat) -> None:
    """It shows the answer from its beginning, under the id that the site has; loaded once more, the same."""
    chat.ask("one")
    chat.until_begun()
    chat.reload()
    chat.until_begun()
    chat.reload()
    chat.until_as_kept(2)
    chat.ask("two")
    expect(chat.page.locator("p.assistant")).to_have_count(2, timeout=ANSWER_MS)
    kept = chat.until_as_kept(4)
    assert [role for _, role, _ in kept] == ["user", "assistant", "user", "assistant"]
    assert '"tokensPerSecond"' in chat.page.locator("pre").inner_text()
    chat.reload()
    chat.until_as_kept(4)


def test_a_page_that_loses_its_network_goes_on_once_it_is_back(browser: Browser, url: str) -> None:
    """The connection breaks in mid-answer, and the page fails; online again it has the whole answer, once."""
    with (
        cutting(url, "POST /ai/chat ", num_bytes=3_000) as relay,
        signed_in(browser, relay.url, path="/") as visit,
    ):
        visit.expect_complaint(*LOST)
        chat = opened(visit, relay.url, "lost", max_tokens=400)
        chat.ask("one")
        chat.until("error")
        assert relay.num_cut == 1
        visit.page.context.set_offline(True)
        visit.page.context.set_offline(False)
        chat.until("streaming")
        chat.until_as_kept(2)


def test_an_answer_is_stopped_and_the_chat_goes_on(chat: Chat) -> None:
    """What was shown is kept, and a further question follows it."""
    chat.ask("one")
    chat.until_begun()
    chat.page.get_by_role("button", name="Stop").click()
    chat.until_as_kept(2)
    chat.ask("two")
    expect(chat.page.locator("p.assistant")).to_have_count(2, timeout=ANSWER_MS)
    chat.until_as_kept(4)


def test_an_answer_is_asked_for_again_and_a_question_changed(chat: Chat) -> None:
    """The page shows the branch that the site shows: the new answer, then the new question."""
    chat.ask("one")
    first = chat.until_as_kept(2)
    chat.page.get_by_role("button", name="Again").click()
    expect(chat.page.locator(f"p[data-id='{first[1][0]}']")).to_have_count(0, timeout=ANSWER_MS)
    second = chat.until_as_kept(2)
    assert (second[0], second[1][0] != first[1][0]) == (first[0], True)
    chat.page.get_by_role("button", name="Change").click()
    expect(chat.page.locator(f"p[data-id='{second[1][0]}']")).to_have_count(0, timeout=ANSWER_MS)
    assert chat.until_as_kept(2)[0] == [first[0][0], "user", "changed"]


def test_an_answer_that_was_left_is_there_in_another_tab(chat: Chat) -> None:
    """The tab is closed in mid-answer; a tab that opens the chat later shows the whole answer."""
    chat.ask("one")
    chat.until_begun()
    chat.page.goto("about:blank")
    chat.page.goto(chat.url + chat.path)
    chat.until_as_kept(2)


@pytest.mark.parametrize(("button", "said"), [("Allow", "It is paid."), ("Refuse", "Then I leave it.")])
def test_a_tool_asks_its_user(visit: Watched, url: str, button: str, said: str) -> None:
    """The question stays when the page is loaded anew; the answer goes on in the same message."""
    chat = opened(visit, url, f"asks-{button}", model="shop")
    chat.ask("The bill?")
    expect(chat.page.get_by_text("Pay 5 euros?")).to_be_visible(timeout=ANSWER_MS)
    chat.until_as_kept(2)
    chat.reload()
    expect(chat.page.get_by_text("Pay 5 euros?")).to_be_visible(timeout=ANSWER_MS)
    chat.until("ready")
    chat.page.get_by_role("button", name=button).click()
    expect(chat.answer).to_contain_text(said, timeout=ANSWER_MS)
    chat.until_as_kept(2)
    chat.reload()
    chat.until_as_kept(2)
    state = "output-available" if button == "Allow" else "output-denied"
    expect(chat.page.locator(".tool")).to_have_attribute("data-state", state)


def test_a_tool_of_the_page_is_called_and_its_result_answered(visit: Watched, url: str) -> None:
    """As docs/ai-sdk.md has it: one message, on screen and kept, also when the page is loaded anew."""
    chat = opened(visit, url, "weather", model="caller", page="weather", max_tokens=200)
    chat.ask("The weather?")
    expect(chat.answer).to_have_text("Go out.", timeout=ANSWER_MS)
    chat.until_as_kept(2)
    chat.reload()
    chat.until_as_kept(2)
    tool = chat.page.request.get(f"{url}/ai/chat/weather").json()["messages"][1]["parts"][1]
    assert (tool["type"], tool["state"], tool["output"]) == ("tool-weather", "output-available", "Sunny in Oslo")


def test_the_page_of_the_docs_chats(visit: Watched, url: str) -> None:
    """docs/ai-sdk.md, as it stands there: it asks, is loaded anew in mid-answer, and stops."""
    page = visit.page
    page.goto(f"{url}/react/main/?chat=docs")
    page.get_by_label("Question").fill("one")
    page.get_by_label("Question").press("Enter")
    answer = page.locator("p").nth(1)
    expect(answer).to_have_text(_SOME, timeout=ANSWER_MS)
    page.reload()
    expect(answer).to_have_text(_SOME, timeout=ANSWER_MS)
    page.get_by_role("button", name="Stop").click()
    page.wait_for_function(
        "async (url) => (await (await fetch(url)).json()).messages.length === 2",
        arg=f"{url}/ai/chat/docs",
        timeout=ANSWER_MS,
        polling=200,
    )
    messages = page.request.get(f"{url}/ai/chat/docs").json()["messages"]
    expect(answer).to_have_text("".join(part.get("text", "") for part in messages[1]["parts"]))
    assert messages[1]["metadata"]["finishReason"] in ("cancelled", "length")

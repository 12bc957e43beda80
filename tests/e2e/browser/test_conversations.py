"""A user's conversations on the page: the list, two devices, a killed worker; by keyboard alone, and on a phone."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.support.checks.axe import axe_violations
from tests.support.docs.demo_site import end_engines
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import (
    ADMIN_NAME,
    ADMIN_PASSWORD,
    Watched,
    answer_text,
    ask,
    manage,
    origin_of,
    shorten_answers,
    signed_in,
    wait_for_status,
    wait_for_text,
    watching,
)
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

SETTINGS = "tests.support.sites.pages.conversations_site"
# A whole answer takes some twenty seconds: long enough for a second device to open it. Tests shorten the others.
STEP_SECONDS = "0.016"
PHONE = {"viewport": {"width": 390, "height": 780}, "has_touch": True}
# What a page logs while its server is killed and started again, and for what a test refuses on purpose.
WHILE_GONE = ("net::ERR", "status of 503")
# The page is looked at again: all pages of headless Chromium are visible, and none is told so.
LOOK = "window.dispatchEvent(new Event('focus'))"

# Conversations of a user that were begun at these ages in days, each with one answer.
PLANT = """
import json
from datetime import timedelta
from django.contrib.auth import get_user_model
from django.utils import timezone
from streamserve.rows.conversations import Conversation, Message
user = get_user_model().objects.get(username={user!r})
whose = f"user:{{user.pk}}"
def content(words):
    blocks = [{{"index": 0, "kind": "text", "text": words}}]
    return {{"content": json.dumps({{"blocks": blocks, "citations": [], "steps": []}}), "text": words}}
for title, days in {titles!r}:
    at = timezone.now() - timedelta(days=days)
    times = {{"created_at": at, "updated_at": at}}
    owned = Conversation(owner=whose, tenant=whose, user=user, title=title, source="help-desk", **times)
    asked = Message(conversation=owned, role="user", created_at=at, **content(title))
    given = Message(conversation=owned, role="assistant", parent=asked, **content("About " + title))
    given.created_at, given.finish_reason = at + timedelta(seconds=1), "stop"
    owned.leaf = given.pk
    for row in (owned, asked, given):
        row.save()
"""


@dataclass
class Site:
    """The demo site, whose web process can be killed and started again on its port."""

    state: Path
    port: int = field(default_factory=free_port)
    servers: ExitStack = field(default_factory=ExitStack)
    server: Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        state = {"STREAMSERVE_STATE_DIR": str(self.state), "STREAMSERVE_MODEL": "echo", "STEP_SECONDS": STEP_SECONDS}
        return {"DJANGO_SETTINGS_MODULE": SETTINGS, "DJANGO_SUPERUSER_PASSWORD": ADMIN_PASSWORD, **state}

    def start(self) -> None:
        self.server = self.servers.enter_context(daphne("project.asgi:application", port=self.port, env=self.env))
        wait_until_ready(self.url)

    def kill(self) -> None:
        """End the web process as a crash does. The engine is another process, and stays."""
        assert self.server is not None
        self.server.process.send_signal(signal.SIGKILL)
        self.server.process.wait(30)

    def make_user(self, name: str, titles: list[tuple[str, float]]) -> None:
        """Make a user with conversations of these titles and ages in days."""
        manage(self.env, "createsuperuser", "--noinput", "--username", name, "--email", "user@example.com")
        if titles:
            manage(self.env, "shell", "-c", PLANT.format(user=name, titles=titles))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[Site]:
    """Serve the demo with CONVERSATIONS to users of the tests."""
    site = Site(tmp_path_factory.mktemp("state"))
    migrated(site.state)
    site.make_user(ADMIN_NAME, [])
    site.make_user("reader", [("Late fees", 0), ("Refunds of yearly plans", 1), ("Export to Markdown", 3)])
    site.make_user("writer", [(f"Question {number}", number) for number in range(90)])
    with site.servers:
        site.start()
        yield site
    end_engines(site.state)


def device(
    browser: Browser, home: Site, user: str = ADMIN_NAME, path: str = "/", **options: Any
) -> AbstractContextManager[Watched]:
    """Sign a user in, in a browser of its own, and open a page."""
    return signed_in(browser, home.url, user=user, path=path, **options)


def titles(page: Page) -> list[str]:
    return page.locator(".ss-item-title").all_inner_texts()


def item(page: Page, title: str) -> Locator:
    return page.locator(".ss-item").filter(has=page.get_by_text(title, exact=True))


def questions(page: Page) -> list[str]:
    return page.locator(".ss-question p").all_inner_texts()


def conversation_id(page: Page) -> str:
    """Return the id in the page's address."""
    (found,) = parse_qs(urlsplit(page.url).query)["c"]
    return found


def messages(page: Page) -> list[dict[str, Any]]:
    """Return the messages of the open conversation, as the server has them."""
    body = page.request.get(f"{origin_of(page)}/conversations/{conversation_id(page)}/messages?limit=100")
    assert body.status == 200
    return list(body.json()["messages"])


def expect_written(page: Page) -> list[dict[str, Any]]:
    """Return the messages once all have ended."""
    until = time.monotonic() + 60
    while any(one["state"] == "running" for one in messages(page)):
        assert time.monotonic() < until, messages(page)
        page.wait_for_timeout(100)
    return messages(page)


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["blocks"])


def open_menu(page: Page, title: str) -> Locator:
    item(page, title).hover()
    item(page, title).get_by_role("button", name=f"Options of “{title}”").click()
    return page.get_by_role("menu")


# --- two devices -----------------------------------------------------------------------------------------------------


def test_two_devices_show_one_conversation_whole_although_the_worker_is_killed(browser: Browser, home: Site) -> None:
    """The second device opens what runs on the first; the kill loses nothing, and doubles nothing, on either."""
    with device(browser, home) as first, device(browser, home) as second:
        one, two = first.page, second.page
        for visit in (first, second):
            visit.expect_complaint(*WHILE_GONE)
        ask(one, "What is asked on the first?")
        wait_for_text(one, 60)
        running = two.locator(".ss-item.is-running")
        two.evaluate(LOOK)
        expect(running).to_contain_text("is being answered")
        running.locator(".ss-item-link").click()
        wait_for_text(two, 60)
        home.kill()
        home.start()
        for page in (one, two):
            wait_for_status(page, "Answer complete")
        shorten_answers(two, 60)
        ask(two, "And on the second?")
        wait_for_status(two, "Answer complete")
        expect(one.locator(".ss-foot:visible")).to_have_count(2, timeout=60_000)
        written = expect_written(one)
        assert [message["role"] for message in written] == ["user", "assistant"] * 2
        assert [message["parent"] for message in written] == [None, *(message["id"] for message in written[:-1])]
        assert [message["state"] for message in written] == ["done"] * 4
        for page in (one, two):
            assert questions(page) == ["What is asked on the first?", "And on the second?"]
            shown = [answer_text(page, turn) for turn in (0, 1)]
            page.reload()
            expect(page.locator(".ss-foot:visible")).to_have_count(2)
            assert [answer_text(page, turn) for turn in (0, 1)] == shown
        assert [answer_text(one, turn) for turn in (0, 1)] == [answer_text(two, turn) for turn in (0, 1)]
        kept = one.evaluate("() => JSON.stringify([{ ...localStorage }, { ...sessionStorage }])")
        assert "What is asked" not in kept
        assert text_of(written[1])[:40] not in kept


def test_a_title_that_is_changed_on_one_device_is_shown_on_the_other(browser: Browser, home: Site) -> None:
    """As soon as the other page is looked at again; so is a deletion."""
    with device(browser, home, "reader") as first, device(browser, home, "reader") as second:
        one, two = first.page, second.page
        expect(item(two, "Late fees")).to_be_visible()
        open_menu(one, "Late fees").get_by_role("menuitem", name="Rename").click()
        one.keyboard.type("Fees")
        one.keyboard.press("Enter")
        expect(item(one, "Fees").locator(".ss-item-link")).to_be_focused()
        two.evaluate(LOOK)
        item(two, "Fees").locator(".ss-item-link").click()
        expect(two.locator(".ss-question p")).to_have_text(["Late fees"])
        open_menu(one, "Fees").get_by_role("menuitem", name="Delete").click()
        expect(one.get_by_text("“Fees” is deleted.")).to_be_visible()
        two.evaluate(LOOK)
        expect(two.get_by_text("This conversation is not there any more.")).to_be_visible()
        one.get_by_role("button", name="Undo").click()
        expect(item(one, "Fees")).to_be_visible()
        open_menu(one, "Fees").get_by_role("menuitem", name="Rename").click()
        one.keyboard.type("Late fees")
        one.keyboard.press("Enter")
        expect(item(one, "Late fees")).to_be_visible()


def test_a_link_is_copied_and_taken_back(browser: Browser, home: Site) -> None:
    """Whoever has it reads the conversation without a login, until that is undone."""
    with device(browser, home, "reader") as visit:
        page = visit.page
        with page.expect_response(lambda response: response.url.endswith("/shares")) as made:
            open_menu(page, "Export to Markdown").get_by_role("menuitem", name="Copy a link").click()
        link = home.url + made.value.json()["url"]
        expect(page.get_by_text("Whoever has")).to_be_visible()
        assert "About Export to Markdown" in read(link)
        page.get_by_role("button", name="Undo").click()
        expect(page.get_by_text("The link does not work any more.")).to_be_visible()
        with pytest.raises(HTTPError, match="404"):
            read(link)


def read(url: str) -> str:
    """Return a page as a visitor gets it."""
    with urlopen(url, timeout=30) as response:
        return str(response.read().decode())


# --- the list --------------------------------------------------------------------------------------------------------


def test_the_list_is_used_by_keyboard_alone(browser: Browser, home: Site) -> None:
    """Arrows, Enter, F2, the menu, Delete, undo, search: the focus is never lost."""
    with device(browser, home, "reader") as visit:
        page = visit.page
        expect(page.locator(".ss-list h2")).to_have_text(["Today", "Yesterday", "Last 7 days"])
        page.get_by_role("searchbox").focus()
        page.keyboard.press("ArrowDown")
        expect(item(page, "Late fees").locator(".ss-item-link")).to_be_focused()
        page.keyboard.press("End")
        page.keyboard.press("F2")
        page.keyboard.type("Exports")
        page.keyboard.press("Escape")
        expect(item(page, "Export to Markdown").locator(".ss-item-link")).to_be_focused()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        expect(page.get_by_role("menuitem", name="Rename")).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.get_by_role("menu")).to_be_hidden()
        page.keyboard.press("Enter")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")  # Pin
        expect(page.locator(".ss-list h2")).to_have_text(["Pinned", "Today", "Yesterday"])
        assert titles(page)[0] == "Export to Markdown"
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator(".ss-question p")).to_have_text(["Late fees"])
        expect(page.get_by_label("Your question")).to_be_focused()
        item(page, "Late fees").locator(".ss-item-link").focus()
        page.keyboard.press("Delete")
        expect(item(page, "Refunds of yearly plans").locator(".ss-item-link")).to_be_focused()
        expect(page.locator(".ss-turn")).to_have_count(0)  # it was open
        expect(page.get_by_role("button", name="Undo")).to_be_visible()
        page.keyboard.press("Control+z")
        expect(page.locator(".ss-question p")).to_have_text(["Late fees"])
        page.get_by_role("searchbox").focus()
        page.keyboard.type("markdown")
        expect(page.locator(".ss-item-title")).to_have_text(["Export to Markdown"])
        page.keyboard.press("Escape")
        expect(page.locator(".ss-item-title")).to_have_count(3)
        open_menu(page, "Export to Markdown").get_by_role("menuitem", name="Unpin").click()
        expect(page.locator(".ss-list h2")).to_have_text(["Today", "Yesterday", "Last 7 days"])


def test_a_search_finds_words_of_the_answers_too(browser: Browser, home: Site) -> None:
    with device(browser, home, "reader") as visit:
        page = visit.page
        page.get_by_role("searchbox").fill("about refunds")
        expect(page.locator(".ss-item-title")).to_have_text(["Refunds of yearly plans"])
        page.get_by_role("searchbox").fill("nowhere")
        expect(page.get_by_text("Nothing has “nowhere” in it.")).to_be_visible()


def test_scrolling_loads_the_rest_of_a_long_list(browser: Browser, home: Site) -> None:
    """Page by page, each conversation once, in the order of their times."""
    with device(browser, home, "writer") as visit:
        page = visit.page
        expect(item(page, "Question 0")).to_be_visible()
        assert len(titles(page)) < 90
        page.wait_for_function(
            """() => {
              const scroll = document.querySelector('[data-list=scroll]');
              scroll.scrollTo(0, scroll.scrollHeight);
              return document.querySelectorAll('.ss-item').length === 90;
            }"""
        )
        assert titles(page) == [f"Question {number}" for number in range(90)]


# --- the address -----------------------------------------------------------------------------------------------------


def test_the_address_opens_a_conversation_again(browser: Browser, home: Site) -> None:
    """A reload, a second tab, and the browser's back and forward."""
    with device(browser, home, "reader") as visit:
        page = visit.page
        item(page, "Late fees").locator(".ss-item-link").click()
        expect(page.locator(".ss-question p")).to_have_text(["Late fees"])
        expect(page).to_have_title("Late fees · streamserve · help desk")
        item(page, "Export to Markdown").locator(".ss-item-link").click()
        expect(page.locator(".ss-question p")).to_have_text(["Export to Markdown"])
        page.reload()
        expect(page.locator(".ss-question p")).to_have_text(["Export to Markdown"])
        expect(item(page, "Export to Markdown").locator("[aria-current=page]")).to_be_visible()
        page.go_back()
        expect(page.locator(".ss-question p")).to_have_text(["Late fees"])
        page.go_back()
        expect(page.get_by_text("How can we help?")).to_be_visible()
        page.go_forward()
        expect(page.locator(".ss-question p")).to_have_text(["Late fees"])
        other = page.context.new_page()
        other.goto(page.url)
        expect(other.locator(".ss-question p")).to_have_text(["Late fees"])
        other.close()


def test_a_conversation_of_another_user_is_not_there(browser: Browser, home: Site) -> None:
    with device(browser, home, "reader") as visit, device(browser, home, "writer") as stranger:
        item(visit.page, "Late fees").locator(".ss-item-link").click()
        expect(visit.page.locator(".ss-question p")).to_have_text(["Late fees"])
        stranger.page.goto(visit.page.url)
        expect(stranger.page.get_by_text("This conversation is not there any more.")).to_be_visible()
        assert stranger.page.url == f"{home.url}/"
        assert "Late fees" not in stranger.page.content()


def test_after_a_logout_nothing_of_the_user_is_shown(browser: Browser, home: Site) -> None:
    """Neither the list nor the conversation, in a tab that was open; signing in opens the conversation again."""
    with device(browser, home, "reader") as visit:
        page = visit.page
        visit.expect_complaint("status of 401")
        item(page, "Late fees").locator(".ss-item-link").click()
        expect(page.locator(".ss-question p")).to_have_text(["Late fees"])
        other = page.context.new_page()
        other.goto(f"{home.url}/admin/")
        other.get_by_role("button", name="Log out").click()
        expect(other.get_by_text("Logged out")).to_be_visible()
        page.bring_to_front()
        page.evaluate(LOOK)
        expect(page.get_by_text("Sign in to ask a question.")).to_be_visible()
        assert "Late fees" not in page.content()
        page.locator(".ss-sign-in").get_by_role("link", name="Sign in").click()
        page.get_by_label("Username").fill("reader")
        page.get_by_label("Password").fill(ADMIN_PASSWORD)
        page.get_by_role("button", name="Log in").click()
        expect(page.locator(".ss-question p")).to_have_text(["Late fees"])


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_conversation_that_cannot_be_loaded_can_be_tried_again(browser: Browser, home: Site) -> None:
    """What is typed meanwhile stays, and is not sent into a conversation that is not here."""
    with device(browser, home, "reader") as visit:
        page = visit.page
        visit.expect_complaint("status of 500")
        expect(item(page, "Late fees")).to_be_visible()
        page.route("**/conversations/*/messages?*", lambda route: route.fulfill(status=500, json={}))
        item(page, "Late fees").locator(".ss-item-link").click()
        expect(page.get_by_text("This conversation could not be loaded.")).to_be_visible()
        ask(page, "Is this lost?")
        expect(page.get_by_label("Your question")).to_have_value("Is this lost?")
        page.unroute("**/conversations/*/messages?*")
        page.get_by_role("button", name="Try again").locator("visible=true").click()
        expect(page.locator(".ss-question p")).to_have_text(["Late fees"])
        expect(page.get_by_label("Your question")).to_have_value("Is this lost?")
        page.get_by_label("Your question").fill("")


def test_a_question_that_does_not_reach_the_server_is_kept(browser: Browser, home: Site) -> None:
    """On the page with "Try again", after a reload in the composer, and then it is asked once."""
    with device(browser, home) as visit:
        page = visit.page
        visit.expect_complaint("net::ERR_FAILED")
        page.route("**/streams", lambda route: route.abort())
        ask(page, "Where am I?")
        expect(page.locator(".ss-notice")).to_contain_text("The server could not be reached.")
        page.reload()
        expect(page.get_by_label("Your question")).to_have_value("Where am I?")
        page.unroute("**/streams")
        shorten_answers(page, 60)
        page.get_by_label("Your question").press("Enter")
        wait_for_status(page, "Answer complete")
        expect(page.get_by_label("Your question")).to_have_value("")
        assert [message["role"] for message in expect_written(page)] == ["user", "assistant"]
        page.reload()
        expect(page.locator(".ss-question p")).to_have_text(["Where am I?"])
        expect(page.get_by_label("Your question")).to_have_value("")


def test_a_question_whose_response_is_lost_is_shown_once(browser: Browser, home: Site) -> None:
    """The server has it: what the page shows as failed gives way to what the server has."""
    with device(browser, home) as visit:
        page = visit.page
        visit.expect_complaint("net::ERR_FAILED")

        def lose(route: Route) -> None:
            body = json.dumps({**json.loads(route.request.post_data or "{}"), "max_tokens": 20})
            route.fetch(post_data=body)
            route.abort()

        page.route("**/streams", lose, times=1)
        ask(page, "Did you hear me?")
        expect(page.locator(".ss-foot:visible")).to_have_count(1, timeout=60_000)
        assert questions(page) == ["Did you hear me?"]
        assert [message["role"] for message in expect_written(page)] == ["user", "assistant"]
        assert page.get_by_label("Your question").input_value() == ""


# --- forms and looks -------------------------------------------------------------------------------------------------


def test_on_a_phone_the_list_is_a_drawer(browser: Browser, home: Site) -> None:
    """It is out of reach while it is closed; a choice, Escape and the ground beside it close it."""
    with device(browser, home, "reader", **PHONE) as visit:
        page = visit.page
        toggle, drawer = page.get_by_role("button", name="Conversations", exact=True), page.locator(".ss-list")
        expect(toggle).to_have_attribute("aria-expanded", "false")
        expect(item(page, "Late fees")).to_be_attached()
        expect(drawer).not_to_be_in_viewport()
        toggle.click()
        expect(drawer).to_be_in_viewport(ratio=1)
        expect(item(page, "Late fees").locator(".ss-item-link")).to_be_focused()
        assert axe_violations(page) == []
        page.keyboard.press("Escape")
        expect(drawer).not_to_be_in_viewport()
        expect(toggle).to_be_focused()
        toggle.click()
        page.locator(".ss-backdrop").click(position={"x": 380, "y": 300})
        expect(drawer).not_to_be_in_viewport()
        toggle.click()
        item(page, "Late fees").locator(".ss-item-link").click()
        expect(drawer).not_to_be_in_viewport()
        expect(page.locator("[data-list=title]")).to_have_text("Late fees")
        page.get_by_role("button", name="New chat").locator("visible=true").click()
        expect(page.get_by_text("How can we help?")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_beside_the_chat_the_list_can_be_hidden(browser: Browser, home: Site) -> None:
    """And stays so on the next page; the focus goes to the button that brings it back."""
    with device(browser, home, "reader") as visit:
        page = visit.page
        page.get_by_role("button", name="Hide the conversations").click()
        toggle = page.get_by_role("button", name="Conversations", exact=True)
        expect(toggle).to_be_focused()
        page.reload()
        expect(page.locator(".ss-list")).to_be_hidden()
        toggle.click()
        expect(item(page, "Late fees")).to_be_visible()
        expect(page.get_by_role("button", name="Hide the conversations")).to_be_focused()


def test_from_right_to_left_the_list_is_on_the_right(browser: Browser, home: Site) -> None:
    """Beside the chat, and as a drawer; the arrow to the menu is the other one."""
    with device(browser, home, "reader") as visit:
        page = visit.page
        page.evaluate("document.documentElement.dir = 'rtl'")
        first = item(page, "Late fees").locator(".ss-item-link")
        first.focus()
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("button", name="Options of “Late fees”")).to_be_focused()
        assert page.evaluate("document.querySelector('.ss-list').getBoundingClientRect().right") == 1280
        page.set_viewport_size({"width": 600, "height": 800})
        expect(page.locator(".ss-list")).not_to_be_in_viewport()
        page.get_by_role("button", name="Conversations", exact=True).click()
        expect(page.locator(".ss-list")).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.querySelector('.ss-list').getBoundingClientRect().right") == 600
        assert page.evaluate("document.documentElement.scrollWidth") == 600


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_with_the_list_has_nothing_that_axe_finds(browser: Browser, home: Site, scheme: Any) -> None:
    """With a conversation open, a menu open, a title in change, and a deletion to undo."""
    with device(browser, home, "reader", color_scheme=scheme) as visit:
        page = visit.page
        item(page, "Late fees").locator(".ss-item-link").click()
        expect(page.locator(".ss-question p")).to_have_text(["Late fees"])
        open_menu(page, "Export to Markdown")
        assert axe_violations(page) == []
        page.get_by_role("menuitem", name="Rename").click()
        assert axe_violations(page) == []
        page.keyboard.press("Escape")
        page.keyboard.press("Delete")
        expect(page.get_by_role("button", name="Undo")).to_be_visible()
        assert axe_violations(page) == []
        page.get_by_role("button", name="Undo").click()
        expect(item(page, "Export to Markdown")).to_be_visible()


def test_the_floating_chat_has_the_list_behind_a_button(browser: Browser, home: Site) -> None:
    """It has no address: the next page of the tab opens the conversation again."""
    with device(browser, home, "reader", "/corner/") as visit:
        page = visit.page
        page.get_by_role("button", name="Open the chat").click()
        ask(page, "In the corner?")
        wait_for_text(page, 20)
        page.get_by_role("button", name="Stop").click()
        wait_for_status(page, "Stopped")
        assert page.url == f"{home.url}/corner/"
        page.reload()
        expect(page.locator(".ss-question p")).to_have_text(["In the corner?"])
        page.get_by_role("button", name="Conversations", exact=True).click()
        expect(page.locator(".ss-item-title")).to_have_text(["In the corner?"])  # of this element alone
        assert axe_violations(page) == []
        page.keyboard.press("Escape")
        expect(page.locator(".ss-list")).not_to_be_in_viewport()
        expect(page.get_by_role("dialog")).to_be_visible()


def test_a_visitor_keeps_the_browsers_history(browser: Browser, home: Site) -> None:
    """Without a login there is no list, and the answer is in the browser's storage."""
    with watching(browser, home.url) as visit:
        page = visit.page
        page.goto(home.url)
        ask(page, "Nobody asks")
        wait_for_text(page, 20)
        page.keyboard.press("Escape")
        wait_for_status(page, "Stopped")
        expect(page.locator(".ss-list")).to_have_count(0)
        assert page.url == f"{home.url}/"
        page.reload()
        expect(page.locator(".ss-question p")).to_have_text(["Nobody asks"])

"""The chat element in pages of a site's own: under a prefix, behind a login, on light and dark pages, by keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import (
    ADMIN_NAME,
    ADMIN_PASSWORD,
    CONTRAST,
    Watched,
    ask,
    echo_site,
    stored_turns,
    wait_for_status,
    wait_for_text,
    watching,
)

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

GROUND = "getComputedStyle(document.querySelector('.ss-chat')).backgroundColor"


@pytest.fixture(scope="module")
def under(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    """Serve the site of `widget_site`; yield the address of its prefix."""
    settings = "tests.support.sites.pages.widget_site"
    with echo_site(settings, tmp_path_factory.mktemp("state"), migrated, prefix="/under") as url:
        yield url


def origin(url: str) -> str:
    target = urlsplit(url)
    return f"{target.scheme}://{target.netloc}"


def sign_in(page: Page, under: str, path: str) -> None:
    page.goto(f"{under}/admin/login/?next=/under/{path}")
    page.get_by_label("Username").fill(ADMIN_NAME)
    page.get_by_label("Password").fill(ADMIN_PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{under}/{path}")  # and so until it is loaded


def tab_to(page: Page, name: str) -> None:
    """Press Tab until the element of that accessible name has the focus, and shows it."""
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.locator(":focus")
        if focused.count() and (focused.get_attribute("aria-label") or focused.inner_text()).strip() == name:
            assert page.evaluate("document.activeElement.matches(':focus-visible')")
            return
    pytest.fail(f"Tab does not reach {name!r}")


def test_a_visitor_without_a_login_is_shown_the_way_to_it(browser: Browser, under: str) -> None:
    """The element says so and asks nothing; after the login the visitor is back on the page, and may ask."""
    with watching(browser, origin(under)) as visit:
        page = visit.page
        visit.expect_complaint("404")  # the admin's login has no icon
        page.goto(f"{under}/light/")
        expect(page.get_by_text("Sign in to ask a question.")).to_be_visible()
        expect(page.get_by_label("Your question")).to_be_hidden()
        expect(page.get_by_role("button", name="One?")).to_have_count(0)
        tab_to(page, "Sign in")
        page.keyboard.press("Enter")
        page.get_by_label("Username").fill(ADMIN_NAME)
        page.get_by_label("Password").fill(ADMIN_PASSWORD)
        page.keyboard.press("Enter")
        page.wait_for_url(f"{under}/light/")
        expect(page.get_by_text("Sign in to ask a question.")).to_be_hidden()
        ask(page, "Hello")
        wait_for_text(page, 20)
        page.keyboard.press("Escape")
        wait_for_status(page, "Stopped")


def test_a_session_that_ends_is_named_with_the_way_back(browser: Browser, under: str) -> None:
    with watching(browser, origin(under)) as visit:
        page = visit.page
        visit.expect_complaint("401")
        sign_in(page, under, "light/")
        expect(page.get_by_label("Your question")).to_be_visible()
        page.context.clear_cookies(name="sessionid")
        ask(page, "Am I still here?")
        expect(page.locator(".ss-notice")).to_contain_text("Your session has ended.")
        expect(page.get_by_role("link", name="Sign in")).to_be_visible()


def test_every_request_goes_under_the_prefix(browser: Browser, under: str) -> None:
    """Questions, resuming, readiness and liveness, under an `include` with a prefix."""
    with watching(browser, origin(under)) as visit:
        page = visit.page
        paths: list[str] = []
        sign_in(page, under, "light/")
        page.on("request", lambda request: paths.append(urlsplit(request.url).path))
        ask(page, "Hello")
        wait_for_text(page, 20)
        page.reload()
        wait_for_text(page, 60)
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Stop").click()
        wait_for_status(page, "Stopped")
        (turn,) = stored_turns(page)
        ours = [path for path in paths if not path.startswith("/static/")]
        assert {"/under/streams", "/under/readyz", f"/under/streams/{turn['streamId']}/events"} <= set(ours)
        assert f"/under/streams/{turn['streamId']}/stop" in ours
        assert [path for path in ours if not path.startswith("/under/")] == []


@pytest.mark.parametrize(("path", "is_light"), [("light/", True), ("dark/", False)])
@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_element_is_as_light_as_its_page(
    browser: Browser, under: str, path: str, is_light: bool, system: str
) -> None:
    """A page that names no scheme is light whatever the system prefers, and every text has a contrast of 4.5."""
    with watching(browser, origin(under), color_scheme=system) as visit:
        page = visit.page
        visit.expect_complaint("404")  # the site has no icon
        sign_in(page, under, path)
        expect(page.locator(".ss-suggestions button").first).to_be_visible()
        red = int(page.evaluate(GROUND).removeprefix("rgb(").partition(",")[0])
        assert (red > 127) is is_light
        texts = [page.locator(one).first for one in (".ss-empty h2", ".ss-suggestions button", ".ss-composer textarea")]
        assert [round(text.evaluate(CONTRAST), 1) for text in texts if text.evaluate(CONTRAST) < 4.5] == []
        ask(page, "Hello")
        wait_for_text(page, 20)
        page.keyboard.press("Escape")
        wait_for_status(page, "Stopped")
        texts = [page.locator(one).first for one in (".ss-question p", ".ss-body", ".ss-notice p", ".ss-new")]
        assert [round(text.evaluate(CONTRAST), 1) for text in texts if text.evaluate(CONTRAST) < 4.5] == []


def test_two_elements_of_one_page_are_two_conversations(browser: Browser, under: str) -> None:
    with watching(browser, origin(under)) as visit:
        page = visit.page
        sign_in(page, under, "two/")
        for index, question in enumerate(("To the first", "To the second")):
            box = page.get_by_label("Your question").nth(index)
            box.fill(question)
            box.press("Enter")
        for chat, question in zip(page.locator(".ss-chat").all(), ("To the first", "To the second"), strict=True):
            expect(chat.locator(".ss-question p")).to_have_text([question])
        expect(page.locator(".ss-foot:visible")).to_have_count(2, timeout=60_000)
        page.reload()
        for root, question in enumerate(("To the first", "To the second")):
            expect(page.locator(".ss-chat").nth(root).locator(".ss-question p")).to_have_text([question])
            assert [turn["question"] for turn in stored_turns(page, root)] == [question]


def test_the_page_brings_no_content_of_the_demo_and_hides_its_prompt(browser: Browser, under: str) -> None:
    with watching(browser, origin(under)) as visit:
        page = visit.page
        sign_in(page, under, "light/")
        html = page.content()
        assert "pirate" not in html
        assert "subscription" not in html
        assert page.locator(".ss-suggestions button").all_inner_texts() == ["One?", "Two?"]
        ask(page, "Hello")
        wait_for_text(page, 20)
        (turn,) = stored_turns(page)
        page.keyboard.press("Escape")
        assert "pirate" not in str(turn)


def test_the_chat_page_is_used_by_keyboard_alone(watched: Watched) -> None:
    """A suggestion, a stop, the answer's buttons, a new chat: Tab reaches each, and the focus is never lost."""
    page = watched.page
    box = page.get_by_label("Your question")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    tab_to(page, "Your question")
    for _ in range(4):
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")  # a suggestion
    expect(page.locator(".ss-question p")).to_have_count(1)
    expect(box).to_be_focused()
    wait_for_text(page, 60)
    page.keyboard.press("Escape")
    wait_for_status(page, "Stopped")
    expect(box).to_be_focused()
    page.keyboard.type("And now?")
    page.keyboard.press("Enter")
    wait_for_text(page, 60)
    tab_to(page, "Stop")
    page.keyboard.press("Enter")
    wait_for_status(page, "Stopped")
    expect(box).to_be_focused()
    # It comes with the server's `done` event, after the word "Stopped".
    expect(page.locator(".ss-made summary").last).to_be_visible()
    tab_to(page, "New chat")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")  # past the box to what is below the last answer
    assert page.locator(":focus").inner_text() == "How this answer was made"
    page.keyboard.press("Shift+Tab")
    assert page.locator(":focus").inner_text() == "Answer again"
    tab_to(page, "New chat")
    page.keyboard.press("Enter")
    expect(page.get_by_text("How can we help?")).to_be_visible()
    expect(box).to_be_focused()

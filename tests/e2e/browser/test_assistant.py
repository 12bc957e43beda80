"""The demo's first page: the billing assistant answers, shows its steps and sources, and follows an edited price."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.checks.axe import axe_violations
from tests.support.servers.browser import (
    ADMIN_NAME,
    ADMIN_PASSWORD,
    CONTRAST,
    Watched,
    answer_text,
    ask,
    wait_for_status,
    watching,
)

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

QUESTION = "What does the Team plan cost?"


@pytest.fixture
def chat(watched: Watched) -> Page:
    """The demo site's chat with the assistant chosen; it is the default where the model is no echo."""
    watched.page.locator("[data-ss='model']").select_option("billing")
    return watched.page


@pytest.fixture
def edited(browser: Browser, site: str) -> Iterator[Page]:
    """The admin's page of the Team plan's price; the price is set back afterwards."""
    with watching(browser, site) as visit:
        page = visit.page
        visit.expect_complaint("404 (Not Found)")  # the admin has no icon
        page.goto(f"{site}/admin/login/?next=/admin/help/passage/%3Fq=price-team")
        page.get_by_label("Username").fill(ADMIN_NAME)
        page.get_by_label("Password").fill(ADMIN_PASSWORD)
        page.get_by_role("button", name="Log in").click()
        page.get_by_role("link", name="How much is the Team plan?").click()
        yield page
        save_values(page, "month: $15\nminimum: two seats")


def save_values(page: Page, lines: str) -> None:
    page.get_by_label("Values").fill(lines)
    page.get_by_role("button", name="Save and continue editing").click()
    expect(page.locator(".messagelist")).to_contain_text("changed successfully")


def ask_and_wait(page: Page, question: str = QUESTION) -> None:
    ask(page, question)
    wait_for_status(page, "Answer complete")


def test_an_answer_has_steps_and_a_source_to_follow(chat: Page) -> None:
    """The marker in the text and the list link to the passage's page; steps and times are folded under the answer."""
    ask_and_wait(chat)
    assert answer_text(chat).startswith("The Team plan costs $15 per seat a month, with a minimum of two seats.")
    marker = chat.locator(".ss-marker")
    assert marker.get_attribute("title") == "How much is the Team plan?"
    assert marker.get_attribute("aria-label") == "Source 1: How much is the Team plan?"
    expect(chat.locator(".ss-sources li")).to_have_count(1)
    expect(chat.locator(".ss-skeleton")).to_be_hidden()
    made = chat.locator(".ss-made")
    expect(made.locator("li").first).to_be_hidden()
    made.locator("summary").focus()
    chat.keyboard.press("Enter")  # by the keyboard
    expect(made.locator("li")).to_have_text(["Searching the help pages", "Choosing the passages", "Writing the answer"])
    expect(made.locator("dt")).to_contain_text(["retrieval", "rerank", "generation"])
    expect(chat.locator(".ss-figures")).to_contain_text("(≤ 500 ms)")
    expect(chat.locator(".ss-figures")).to_contain_text("(≤ 5 s)")
    small = chat.locator(".ss-foot :is(span, small, button):visible, .ss-made :is(summary, li, dt, dd):visible").all()
    assert [text.inner_text() for text in small if text.evaluate(CONTRAST) < 4.5] == []
    with chat.expect_popup() as opened:
        marker.click()
    expect(opened.value.locator(".help-said")).to_contain_text("The Team plan costs $15 per seat a month")


def test_a_price_edited_in_the_admin_changes_the_next_answer(chat: Page, edited: Page) -> None:
    """The one before keeps what it said; the page that both cite has the new price."""
    ask_and_wait(chat)
    save_values(edited, "month: $17\nminimum: two seats")
    ask_and_wait(chat)
    assert "costs $15 per seat" in answer_text(chat, 0)
    assert "costs $17 per seat" in answer_text(chat, 1)
    save_values(edited, "month: $18\nminimum: two seats")
    with chat.expect_popup() as opened:
        chat.locator(".ss-sources a").last.click()
    expect(opened.value.locator(".help-said")).to_contain_text("$18")


def test_what_no_page_answers_has_no_source(chat: Page) -> None:
    """It declines, and says so after a reload too."""
    ask_and_wait(chat, "Who won the match last night?")
    assert answer_text(chat).startswith("Sorry, I could not find that")
    expect(chat.locator(".ss-sources")).to_be_hidden()
    chat.reload()
    assert answer_text(chat).startswith("Sorry, I could not find that")
    expect(chat.locator(".ss-made summary")).to_be_visible()


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (320, "dark")])
def test_an_answer_with_sources_fits_a_phone(browser: Browser, site: str, width: int, scheme: str) -> None:
    """Steps and times opened, nothing is wider than the screen."""
    with watching(browser, site, viewport={"width": width, "height": 700}, color_scheme=scheme) as visit:
        page = visit.page
        page.goto(site)
        page.locator("[data-ss='model']").select_option("billing")
        ask_and_wait(page)
        page.locator(".ss-made summary").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelector('.ss-scroll').scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_the_help_pages(browser: Browser, site: str, scheme: Any) -> None:
    """The list of pages, and a page."""
    with watching(browser, site, color_scheme=scheme) as visit:
        page = visit.page
        page.goto(f"{site}/help/")
        assert axe_violations(page) == []
        page.get_by_role("link", name="How much is the Team plan?").first.click()
        expect(page.get_by_role("heading", name="How much is the Team plan?")).to_be_visible()
        assert axe_violations(page) == []

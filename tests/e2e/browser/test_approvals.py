"""A run that asks its user, in Chromium: the card, its keys, a reload before the answer, and the rest in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.checks.axe import axe_violations
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import (
    Watched,
    ask,
    echo_site,
    signed_in,
    stored_turns,
    wait_for_status,
    watching,
)

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

SETTINGS = "tests.support.sites.pages.approvals_site"
ASKED = "Your answer is needed: Cancel invoice 7?"


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    with echo_site(SETTINGS, tmp_path_factory.mktemp("state"), migrated) as url:
        yield url


@pytest.fixture
def seen(browser: Browser, asking: str) -> Iterator[Watched]:
    with watching(browser, asking) as visit:
        visit.page.goto(f"{asking}/invoices/")
        yield visit


def begin(page: Page) -> Any:
    """Ask, and return the card."""
    ask(page, "Cancel invoice 7")
    wait_for_status(page, ASKED)
    return page.get_by_role("group", name="Cancel invoice 7?")


def test_a_card_asks_and_the_rest_follows_in_its_place(seen: Watched) -> None:
    """It shows the tool and its arguments as text; after Allow the answer goes on in the same bubble."""
    page = seen.page
    card = begin(page)
    expect(card.locator("code")).to_have_text("cancel_invoice")
    assert card.locator("dt").all_inner_texts() == ["number", "why"]
    assert card.locator("dd").all_inner_texts() == ["7", "<b>twice</b>"]
    card.get_by_role("button", name="Allow").click()
    wait_for_status(page, "Answer complete")
    expect(page.locator(".ss-approval")).to_have_count(0)
    assert page.locator(".ss-text").all_inner_texts() == ["I cancel it.", "It is done."]
    expect(page.locator(".ss-tool").last).to_contain_text("Invoice 7 is cancelled.")
    (turn,) = stored_turns(page)
    assert [part["finishReason"] for part in turn["earlier"]] == ["interrupt"]


def test_after_a_reload_the_card_is_there_and_keys_refuse(seen: Watched) -> None:
    """By keyboard alone: a word of why, then Refuse; the model is told both. Another reload shows the whole answer."""
    page = seen.page
    begin(page)
    page.reload()
    card = page.get_by_role("group", name="Cancel invoice 7?")
    expect(card).to_be_visible()
    card.get_by_label("Why, if you like").focus()
    page.keyboard.type("Wrong invoice.")
    page.keyboard.press("Tab")
    expect(card.get_by_role("button", name="Refuse")).to_be_focused()
    page.keyboard.press("Enter")
    wait_for_status(page, "Answer complete")
    for _ in range(2):
        expect(page.locator(".ss-approval")).to_have_count(0)
        expect(page.locator(".ss-text").last).to_have_text("Then I leave it.")
        expect(page.locator(".ss-tool").last).to_contain_text("The user has refused this call. Wrong invoice.")
        page.reload()


def test_an_answer_of_another_tab_is_not_given_twice(seen: Watched) -> None:
    """A card that was answered elsewhere says so, and is gone."""
    page = seen.page
    card = begin(page)
    page.evaluate(
        """async () => {
          const { streamId, approvals } = JSON.parse(localStorage.getItem(Object.keys(localStorage).find(
            (name) => localStorage.getItem(name).includes('"interrupt"'))));
          const answers = approvals.map(({ id }) => ({ id, allow: true }));
          const token = document.querySelector('[name=csrfmiddlewaretoken]').value;
          const headers = { 'Content-Type': 'application/json', 'X-CSRFToken': token };
          const body = JSON.stringify({ approvals: answers });
          await (await fetch(`/streams/${streamId}/approvals`, { method: 'POST', headers, body })).text();
        }"""
    )
    seen.expect_complaint("409")
    card.get_by_role("button", name="Refuse").click()
    expect(page.locator(".ss-notice")).to_contain_text("given or refused before")
    expect(page.locator(".ss-approval")).to_have_count(0)


def test_another_device_answers_what_this_one_has_asked(browser: Browser, asking: str) -> None:
    """In a conversation that the server keeps the card is on each device of its user, and so is the whole answer."""
    with signed_in(browser, asking, path="/invoices/") as here:
        begin(here.page)
        with signed_in(browser, asking, path="/invoices/") as there:
            other = there.page
            other.locator(".ss-item-link").click()
            other.get_by_role("group", name="Cancel invoice 7?").get_by_role("button", name="Allow").click()
            wait_for_status(other, "Answer complete")
            for page in (other, here.page):
                page.reload()
                page.locator(".ss-item-link").first.click()
                expect(page.locator(".ss-text").last).to_have_text("It is done.")
                expect(page.locator(".ss-turn")).to_have_count(1)
                expect(page.locator(".ss-approval")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_a_phone(browser: Browser, asking: str, scheme: Any) -> None:
    """The card fits a narrow screen, light and dark."""
    with watching(browser, asking, viewport={"width": 375, "height": 740}, color_scheme=scheme) as visit:
        visit.page.goto(f"{asking}/invoices/")
        card = begin(visit.page)
        assert axe_violations(visit.page) == []
        box = card.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 375

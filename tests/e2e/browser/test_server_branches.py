"""Branches, continuations, ratings and exports of a conversation that the server keeps, on two devices of its user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.checks.axe import axe_violations
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import (
    answer_text,
    ask,
    echo_site,
    origin_of,
    shorten_answers,
    signed_in,
    slow_down,
    wait_for_status,
    wait_for_text,
)

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

SETTINGS = "tests.support.sites.pages.conversations_site"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    """Serve the demo, which keeps its users' conversations."""
    with echo_site(SETTINGS, tmp_path_factory.mktemp("state"), migrated) as url:
        yield url


def ask_and_wait(page: Page, question: str) -> None:
    count = page.locator(".ss-turn").count()
    ask(page, question)
    expect(page.locator(".ss-foot:visible")).to_have_count(count + 1)


def asked(page: Page) -> Locator:
    return page.locator(".ss-question p")


def messages(page: Page) -> list[dict[str, Any]]:
    """Return the messages of the open conversation, as the server has them."""
    conversation = page.url.partition("c=")[2]
    found = page.request.get(f"{origin_of(page)}/conversations/{conversation}/messages").json()["messages"]
    return list(found)


def letters(text: str) -> str:
    """Return what is left of a text when markdown has taken line breaks and list marks away."""
    return re.sub(r"[\s\-]+", "", text)


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["blocks"] if block["kind"] == "text")


def test_a_branch_is_shown_on_another_device(browser: Browser, home: str) -> None:
    """An edited question and another answer are siblings; the branch chosen here is the one that opens there."""
    with signed_in(browser, home) as here, signed_in(browser, home) as there:
        page, other = here.page, there.page
        shorten_answers(page, 8)
        ask_and_wait(page, "One?")
        ask_and_wait(page, "Two?")
        page.get_by_role("button", name="Edit", exact=True).first.click()
        draft = page.get_by_role("textbox", name="Change the question")
        draft.fill("One, changed?")
        draft.press("Enter")
        expect(asked(page)).to_have_text(["One, changed?"])
        expect(page.locator(".ss-foot:visible")).to_have_count(1)
        page.get_by_role("button", name="Answer again").click()
        expect(page.get_by_role("group", name="Version 3 of 3")).to_be_visible()
        expect(page.locator(".ss-foot:visible")).to_have_count(1)
        other.goto(page.url)
        expect(other.get_by_role("group", name="Version 3 of 3")).to_be_visible()
        with page.expect_response(
            lambda response: response.request.method == "POST" and "/conversations/" in response.url
        ):
            page.get_by_role("button", name="Version before").click()
            page.get_by_role("button", name="Version before").click()
        expect(asked(page)).to_have_text(["One?", "Two?"])
        other.reload()
        expect(asked(other)).to_have_text(["One?", "Two?"])
        assert len([one for one in messages(page) if one["role"] == "user"]) == 3  # the same question once


def test_a_continuation_is_one_answer_on_both_devices(browser: Browser, home: str) -> None:
    """It is a message of its own, shown in the bubble that it continues, through a reload in its middle."""
    with signed_in(browser, home) as here, signed_in(browser, home) as there:
        page, other = here.page, there.page
        slow_down(page, 8)
        ask(page, "Something long")
        wait_for_text(page, 60)
        page.get_by_role("button", name="Stop").click()
        wait_for_status(page, "Stopped")
        other.goto(page.url)
        expect(other.get_by_text("Stopped", exact=True).first).to_be_visible()
        page.get_by_role("button", name="Continue").click()
        length = len(answer_text(page))
        wait_for_text(page, length + 40)
        page.reload()
        slow_down(page, None)
        wait_for_status(page, "Answer complete")
        expect(page.locator(".ss-turn")).to_have_count(1)
        _, first, second = messages(page)
        assert second["parent"] == first["id"]
        assert (first["finish_reason"], second["state"]) == ("cancelled", "done")
        whole = letters(text_of(first) + text_of(second))
        assert letters(answer_text(page)) == whole
        wait_for_text(other, len(answer_text(page)))
        expect(other.locator(".ss-turn")).to_have_count(1)
        assert letters(answer_text(other)) == whole


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_answer_is_rated_with_a_comment(browser: Browser, home: str, scheme: Any) -> None:
    """By keyboard; a reload shows it, pressing again takes it back, and axe finds nothing in the form."""
    with signed_in(browser, home, color_scheme=scheme) as visit:
        page = visit.page
        shorten_answers(page, 8)
        ask_and_wait(page, "One?")
        bad = page.get_by_role("button", name="Bad answer")
        bad.press("Enter")
        comment = page.get_by_role("textbox", name="Comment")
        expect(comment).to_be_focused()
        assert axe_violations(page) == []
        comment.fill("Too short")
        comment.press("Enter")
        expect(comment).to_be_hidden()
        expect(bad).to_be_focused()
        assert [(one["rating"], one["comment"]) for one in messages(page)][-1] == (-1, "Too short")
        page.reload()
        expect(bad).to_have_attribute("aria-pressed", "true")
        bad.press("Enter")
        expect(bad).to_have_attribute("aria-pressed", "false")
        assert messages(page)[-1]["rating"] is None


def test_a_rating_that_is_not_stored_is_told(browser: Browser, home: str) -> None:
    with signed_in(browser, home) as visit:
        page = visit.page
        visit.expect_complaint("500")
        shorten_answers(page, 8)
        ask_and_wait(page, "One?")
        page.route("**/messages/*", lambda route: route.fulfill(status=500, body="{}"))
        good = page.get_by_role("button", name="Good answer")
        good.click()
        expect(page.locator(".ss-foot")).to_contain_text("Your rating could not be stored. Try again.")
        expect(good).to_have_attribute("aria-pressed", "false")


def test_the_server_exports_the_branch(browser: Browser, home: str) -> None:
    with signed_in(browser, home) as visit:
        page = visit.page
        shorten_answers(page, 8)
        ask_and_wait(page, "Exported?")
        with page.expect_download() as caught:
            page.get_by_role("button", name="Export this chat as Markdown").click()
        assert "Exported?" in caught.value.path().read_text(encoding="utf-8")

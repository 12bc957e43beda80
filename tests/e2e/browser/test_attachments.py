"""Files of a question on the page: chosen, dropped and pasted; chips, refusals, and what the answer was made of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.bodies.pdfs import pdf
from tests.support.checks.axe import axe_violations
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import (
    Watched,
    ask,
    echo_site,
    origin_of,
    shorten_answers,
    signed_in,
    wait_for_status,
)

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

SETTINGS = "tests.support.sites.pages.conversations_site"
PHONE = {"viewport": {"width": 390, "height": 780}, "has_touch": True}
BILL = b"month,total\nMay,9.90\nJune,12.50\n"
DROP = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  const chat = document.querySelector('[data-streamserve-chat]');
  for (const type of ['dragover', 'drop']) {
    chat.dispatchEvent(new DragEvent(type, {bubbles: true, cancelable: true, dataTransfer: data}));
  }
}"""
PASTE = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  const event = new ClipboardEvent('paste', {bubbles: true, cancelable: true, clipboardData: data});
  document.querySelector('[data-ss=input]').dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    """Serve the demo with CONVERSATIONS."""
    state = tmp_path_factory.mktemp("state")
    with echo_site(SETTINGS, state, migrated) as url:
        yield url


@contextmanager
def visiting(browser: Browser, home: str, **options: Any) -> Iterator[Watched]:
    with signed_in(browser, home, **options) as visit:
        shorten_answers(visit.page, 40)
        yield visit


def chips(page: Page) -> Locator:
    """The files of the next question."""
    return page.locator(".ss-composer .ss-chip")


def asked_files(page: Page) -> Locator:
    """The files of questions that were asked."""
    return page.locator(".ss-question .ss-chip")


def choose(page: Page, name: str, content: bytes) -> None:
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Attach files").click()
    chooser.value.set_files([{"name": name, "mimeType": "application/octet-stream", "buffer": content}])


def shoot(page: Page, name: str) -> None:
    """Keep a picture where SHOTS names a folder, for people."""
    if folder := os.environ.get("SHOTS"):
        page.screenshot(path=Path(folder) / f"attach_{name}.png")


def test_a_file_goes_with_its_question(browser: Browser, home: str) -> None:
    """A real CSV and a real PDF: chips with name and size, also on the question after a reload, as links."""
    with visiting(browser, home) as visit:
        page = visit.page
        choose(page, "bill.csv", BILL)
        expect(chips(page)).to_contain_text(["bill.csv"])
        expect(chips(page).locator("small")).to_have_text(["32 B"])
        choose(page, "report.pdf", pdf("The fourth quarter"))
        expect(chips(page).locator("small").nth(1)).to_have_text("562 B")
        expect(page.locator("[data-ss=status]")).to_have_text("report.pdf is attached.")
        shoot(page, "composer")
        assert axe_violations(page) == []
        ask(page, "What was June's?")
        wait_for_status(page, "Answer complete")
        expect(chips(page)).to_have_count(0)
        expect(asked_files(page)).to_contain_text(["bill.csv", "report.pdf"])
        shoot(page, "asked")
        page.reload()
        expect(asked_files(page)).to_contain_text(["bill.csv", "report.pdf"])
        with page.expect_download() as download:
            asked_files(page).first.get_by_role("link").click()
        assert Path(download.value.path()).read_bytes() == BILL
        assert axe_violations(page) == []
        page.emulate_media(color_scheme="dark")
        shoot(page, "dark")
        assert axe_violations(page) == []
        page.get_by_role("button", name="Answer again").click()
        wait_for_status(page, "Answer complete")
        expect(asked_files(page)).to_contain_text(["bill.csv", "report.pdf"])


def test_files_are_dropped_pasted_and_taken_back(browser: Browser, home: str) -> None:
    """By keyboard too; the server forgets a file that was taken back, and the focus stays near."""
    with visiting(browser, home) as visit:
        page = visit.page
        page.evaluate(DROP, ["a.txt", "dropped"])
        expect(chips(page)).to_contain_text(["a.txt"])
        page.evaluate(PASTE, ["b.md", "pasted"])
        expect(chips(page)).to_contain_text(["a.txt", "b.md"])
        expect(page.locator(".ss-chip.is-sending")).to_have_count(0)
        url = f"{origin_of(page)}/attachments?limit=100"
        names = {one["name"] for one in page.request.get(url).json()["attachments"]}
        assert {"a.txt", "b.md"} <= names
        remove = page.get_by_role("button", name="Remove a.txt")
        remove.focus()
        with page.expect_response(lambda one: one.request.method == "DELETE"):
            page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Remove b.md")).to_be_focused()
        with page.expect_response(lambda one: one.request.method == "DELETE"):
            page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Attach files")).to_be_focused()
        expect(chips(page)).to_have_count(0)
        names = {one["name"] for one in page.request.get(url).json()["attachments"]}
        assert not {"a.txt", "b.md"} & names


def test_what_cannot_be_attached_says_why(browser: Browser, home: str) -> None:
    """In the chip and to a screen reader; the question can still be asked, without it."""
    with visiting(browser, home, **PHONE) as visit:
        visit.expect_complaint("404", "status of 400")
        page = visit.page
        page.evaluate(DROP, ["a.exe", "x"])
        expect(chips(page)).to_contain_text([".txt"])
        choose(page, "scan.pdf", pdf(""))
        expect(chips(page).nth(1)).to_contain_text("pictures")
        expect(page.locator("[data-ss=status]")).to_contain_text("scan.pdf: The PDF has no text")
        expect(page.locator(".ss-chip.is-error")).to_have_count(2)
        shoot(page, "refused")
        assert axe_violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ask(page, "What is in it?")
        wait_for_status(page, "Answer complete")
        expect(page.locator(".ss-chip:visible")).to_have_count(0)


def test_a_question_waits_for_its_files(browser: Browser, home: str) -> None:
    """Enter while a file is on its way asks nothing, and says so. An edited question has the files of the old one."""
    with visiting(browser, home) as visit:
        page = visit.page
        held: list[Any] = []
        page.route("**/attachments", lambda route: held.append(route))
        choose(page, "bill.csv", BILL)
        expect(page.locator(".ss-chip.is-sending")).to_have_count(1)
        page.locator("[data-ss=input]").fill("What was May's?")
        page.keyboard.press("Enter")
        expect(page.locator("[data-ss=status]")).to_have_text("Wait until your files are here.")
        expect(page.locator("[data-ss=send]")).to_be_disabled()
        held[0].continue_()
        expect(page.locator(".ss-chip.is-sending")).to_have_count(0)
        page.locator("[data-ss=input]").press("Enter")
        wait_for_status(page, "Answer complete")
        expect(asked_files(page)).to_contain_text(["bill.csv"])
        page.get_by_role("button", name="Edit", exact=True).click()
        page.get_by_label("Change the question").fill("What was June's?")
        with page.expect_request(lambda one: one.method == "POST" and "June's" in (one.post_data or "")) as sent:
            page.get_by_label("Change the question").press("Enter")
        assert len(sent.value.post_data_json["attachments"]) == 1
        wait_for_status(page, "Answer complete")
        expect(page.locator("[data-ss=place]")).to_have_text("2/2")
        expect(asked_files(page)).to_contain_text(["bill.csv"])

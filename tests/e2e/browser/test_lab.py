"""The lab in a browser: whatever is closed, cut and killed, its page has the whole answer in the end."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.checks.axe import axe_violations
from tests.support.docs.demo_site import free_port, serve
from tests.support.servers.browser import watching

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

MINUTE = 60_000
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a demo whose lab writes faster."""
    port = free_port()
    process = serve(tmp_path_factory.mktemp("demo"), PORT=port, LAB="1", ECHO_STEP_SECONDS="0.012")
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "Ctrl-C" in line:
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


@pytest.fixture
def lab(demo: str, browser: Browser) -> Iterator[Page]:
    """The lab's page, whose policy nothing breaks."""
    with watching(browser, demo) as watched:
        watched.expect_complaint("net::ERR", "503", "429")  # of connections that a test ends
        watched.page.goto(f"{demo}/lab/")
        yield watched.page


def part(page: Page, name: str) -> Locator:
    return page.locator(f"[data-lab-part={name}]")


def do(page: Page, name: str) -> None:
    page.click(f"[data-lab-do={name}]")


def happened(page: Page, words: str) -> None:
    expect(part(page, "events")).to_contain_text(re.compile(words), timeout=MINUTE)


def test_an_answer_survives_all_interruptions(lab: Page) -> None:
    """Read slowly, closed and opened, the web process and the engine killed: compared with the log, nothing differs."""
    do(lab, "ask")
    expect(part(lab, "text")).to_contain_text("made to be interrupted", timeout=MINUTE)
    do(lab, "slow")
    expect(part(lab, "now")).to_contain_text(re.compile("until you have (read on|caught up)"), timeout=MINUTE)
    do(lab, "slow")
    do(lab, "close")
    happened(lab, "The answer left the batch")
    expect(part(lab, "now")).to_contain_text("its memory is given back", timeout=MINUTE)
    do(lab, "close")
    happened(lab, "The answer is in the batch again")
    do(lab, "web")
    happened(lab, "You killed the web process")
    happened(lab, "has taken the answer over")
    do(lab, "engine")
    happened(lab, "You killed the engine")
    happened(lab, r"Engine \d+ has started")
    do(lab, "cut")
    happened(lab, "Connected again")
    expect(part(lab, "verdict")).to_contain_text("in order, and none twice", timeout=2 * MINUTE)
    expect(part(lab, "text")).to_contain_text("what each reader has really received")


def test_stop_keeps_what_was_shown(lab: Page) -> None:
    """The answer ends at once; the log has what the page has."""
    do(lab, "ask")
    expect(part(lab, "text")).to_contain_text("made to be", timeout=MINUTE)
    do(lab, "stop")
    happened(lab, "The answer is stopped")
    expect(part(lab, "verdict")).to_contain_text("none twice", timeout=MINUTE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_pages_are_accessible(demo: str, browser: Browser, size: dict[str, int], scheme: str) -> None:
    """axe finds nothing, light and dark, and nothing is wider than a phone."""
    with watching(browser, demo, viewport=size, color_scheme=scheme) as watched:
        for path in ("/lab/",):
            watched.page.goto(demo + path)
            assert axe_violations(watched.page) == []
            assert watched.page.evaluate("document.documentElement.scrollWidth") <= size["width"]

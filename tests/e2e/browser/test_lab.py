"""The lab in a browser: whatever is closed, cut and killed, its page has the whole answer in the end."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.support.docs.demo_site import free_port, serve

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

MINUTE = 60_000


@pytest.fixture
def lab(tmp_path: Path, browser: Browser) -> Iterator[Page]:
    """The lab's page of a demo whose lab writes faster."""
    port = free_port()
    demo = serve(tmp_path, PORT=port, LAB="1", ECHO_STEP_SECONDS="0.012")
    assert demo.stdout is not None
    try:
        for line in demo.stdout:
            if "Ctrl-C" in line:
                break
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/lab/")
        yield page
        page.close()
    finally:
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=30)


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

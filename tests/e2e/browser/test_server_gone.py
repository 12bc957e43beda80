"""The page names a server that is gone, also while nothing is asked; one that is back goes on with the answer."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.docs.demo_site import environment, manage
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import (
    ask,
    log_text,
    server_log,
    stored_turns,
    wait_for_status,
    wait_for_text,
    watching,
)
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

pytestmark = [pytest.mark.browser, pytest.mark.proof, pytest.mark.timeout(300)]

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.pages.browser_site"}
GONE = "The server does not answer. Trying again…"
# A server that has just begun, and has not found its engine yet, answers 503: the page asks again.
WHILE_GONE = ("net::ERR", "status of 503")
SHOWN_MS = 6_000  # twice the three seconds that are promised


@pytest.fixture
def start(tmp_path: Path, migrated: Migrate) -> Iterator[Callable[[], Server]]:
    """Start the demo site, again and again, on one port and one state folder."""
    migrated(tmp_path)
    port = free_port()
    with ExitStack() as servers:

        def start() -> Server:
            env = environment(tmp_path, **SETTINGS)
            server = servers.enter_context(daphne("project.asgi:application", port=port, env=env))
            wait_until_ready(server.url)
            return server

        yield start
    manage(tmp_path, "streamserve_engine", "--stop", **SETTINGS)


def test_the_page_names_a_server_that_is_gone_and_goes_on_when_it_is_back(
    browser: Browser, start: Callable[[], Server]
) -> None:
    """Killed while nothing is asked; back; killed in an answer; back: the answer is the log's, in one turn."""
    server = start()
    with watching(browser, server.url) as visit:
        page = visit.page
        visit.expect_complaint(*WHILE_GONE)
        page.goto(server.url)
        banner = page.locator("[data-ss=banner-words]")
        for asks in (False, True):
            if asks:
                ask(page, "Something long")
                wait_for_text(page, 60)
            server.process.send_signal(signal.SIGKILL)
            expect(banner).to_have_text(GONE, timeout=SHOWN_MS)
            expect(banner).to_be_visible(timeout=SHOWN_MS)
            if not asks:
                expect(page.get_by_role("status").first).to_have_text(GONE)
            server = start()
            expect(banner).to_be_hidden(timeout=SHOWN_MS)
        wait_for_status(page, "Answer complete")
        (turn,) = stored_turns(page)
        assert turn["text"] == log_text(server_log(page, turn["streamId"]))


def test_a_server_that_hangs_is_named_too(browser: Browser, start: Callable[[], Server]) -> None:
    """A stopped process accepts connections and answers none."""
    server = start()
    with watching(browser, server.url) as visit:
        page = visit.page
        visit.expect_complaint(*WHILE_GONE)
        page.goto(server.url)
        banner = page.locator("[data-ss=banner-words]")
        server.process.send_signal(signal.SIGSTOP)
        try:
            expect(banner).to_have_text(GONE, timeout=SHOWN_MS)
        finally:
            server.process.send_signal(signal.SIGCONT)
        expect(banner).to_be_hidden(timeout=SHOWN_MS)

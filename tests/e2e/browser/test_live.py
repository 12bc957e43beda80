"""The admin's live page, and the page that watches an answer, in Chromium over a real daphne with the echo engine."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.support.servers.browser import (
    ADMIN_NAME,
    ADMIN_PASSWORD,
    ANSWER_MS,
    Watched,
    ask,
    log_text,
    server_log,
    stored_turns,
    wait_for_status,
    wait_for_text,
    watching,
)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


def open_live_page(staff: Watched) -> None:
    """Log in as staff and wait for the first metrics."""
    staff.expect_complaint("404")  # the admin's login page names no icon
    staff.page.goto(f"{staff.origin}/admin/login/?next=/admin/streamserve/live/")
    staff.page.get_by_label("Username").fill(ADMIN_NAME)
    staff.page.get_by_label("Password").fill(ADMIN_PASSWORD)
    staff.page.get_by_role("button", name="Log in").click()
    expect(staff.page.get_by_text("Up to date")).to_be_visible()


def test_the_live_page_shows_a_running_stream_and_stops_it(browser: Browser, site: str) -> None:
    """A stream asked on the chat page appears with its model's metrics, is stopped from the admin, and disappears."""
    with watching(browser, site) as staff, watching(browser, site) as visitor:
        admin = staff.page
        open_live_page(staff)
        expect(admin.get_by_role("heading", name="echo")).to_be_visible()
        visitor.page.goto(site)
        ask(visitor.page, "Something long")
        wait_for_text(visitor.page, 20)
        stream_id = stored_turns(visitor.page)[0]["streamId"]
        row = admin.locator(f"[data-stream-id='{stream_id}']")
        expect(row).to_contain_text("running")
        row.get_by_role("button", name="Stop").click()
        wait_for_status(visitor.page, "Stopped")
        state = visitor.page.request.get(f"{site}/streams/{stream_id}").json()
        assert state["finish_reason"] == "cancelled"
        expect(row).to_have_count(0, timeout=ANSWER_MS)


SHOWN = """() => {
  const numbers = (root) => Object.fromEntries(
    [...root.querySelectorAll('.ss-counts div')].map((item) => [item.closest('section').querySelector('h3').textContent
      + ': ' + item.querySelector('dt').textContent, Number(item.querySelector('dd').textContent)]));
  return {
    ...numbers(document.querySelector('.ss-card')),
    sum: document.querySelector('.ss-sum').textContent,
    rows: [...document.querySelectorAll('[data-stream-id] .ss-state')].map((state) => state.textContent.split(':')[0]),
  };
}"""


def test_what_is_shown_at_one_moment_adds_up(browser: Browser, site: str) -> None:
    """The table's rows, the line above it and the model's card have the same streams; sequences are of two kinds."""
    with watching(browser, site) as staff, watching(browser, site) as visitor:
        open_live_page(staff)
        visitor.page.goto(site)
        ask(visitor.page, "Something long")
        wait_for_text(visitor.page, 20)
        states_shown = staff.page.locator("[data-stream-id] .ss-state")  # those of earlier tests' readers are parked
        expect(states_shown.get_by_text("running", exact=True)).to_be_visible()
        shown = staff.page.evaluate(SHOWN)
        states = [shown["rows"].count(state) for state in ("starting", "running", "parked")]
        assert [shown[f"Streams now: {name}"] for name in ("Starting", "Running", "Parked")] == states
        assert shown["Streams now: Streams"] == sum(states) == len(shown["rows"])
        assert shown["sum"].startswith(f"{len(shown['rows'])} stream")
        in_engine = [shown[f"In the engine now: {name}"] for name in ("Sequences", "Running", "Waiting")]
        assert in_engine[0] == in_engine[1] + in_engine[2]
        for words in ("Last 5 min", "Since the engine began", "tokens/s, last 5 s", "Capacity, last"):
            expect(staff.page.locator(".ss-card")).to_contain_text(words)
        visitor.page.keyboard.press("Escape")
        wait_for_status(visitor.page, "Stopped")


def test_an_answer_is_watched_from_the_admin(browser: Browser, site: str) -> None:
    """The link on the stream's page opens a watch that shows what the log holds to its end, and is recorded."""
    with watching(browser, site) as staff, watching(browser, site) as visitor:
        admin = staff.page
        open_live_page(staff)
        visitor.page.goto(site)
        ask(visitor.page, "Something long")
        wait_for_text(visitor.page, 20)
        stream_id = stored_turns(visitor.page)[0]["streamId"]
        admin.goto(f"{site}/admin/streamserve/stream/{stream_id}/change/")
        admin.get_by_role("link", name="Watch", exact=True).click()
        expect(admin.locator("[data-ss=state]")).to_contain_text("Ended:", timeout=ANSWER_MS)
        wait_for_status(visitor.page, "Answer complete")
        assert admin.locator("[data-ss=text]").text_content() == log_text(server_log(visitor.page, stream_id))
        admin.goto(f"{site}/admin/streamserve/watch/?q={stream_id}")
        expect(admin.locator("#result_list tbody tr")).to_have_count(1)
        expect(admin.locator(".field-username")).to_have_text(ADMIN_NAME)


def test_a_model_is_paused_and_resumed_from_the_live_page(browser: Browser, site: str) -> None:
    """Readers see that the model is paused, then the rest without a gap; a new page shows it too."""
    with watching(browser, site) as staff, watching(browser, site) as visitor:
        open_live_page(staff)
        card = staff.page.locator(".ss-card")
        page = visitor.page
        visitor.expect_complaint("503")  # of the page's question whether the model is ready
        page.goto(site)
        ask(page, "Something long")
        wait_for_text(page, 60)
        card.get_by_role("button", name="Pause").click()
        expect(page.locator(".ss-typing")).to_contain_text("Answers are paused for a while.")
        expect(card).to_contain_text("paused")
        newcomer = page.context.new_page()
        newcomer.goto(f"{site}/?new")
        expect(newcomer.get_by_text("The model is paused.")).to_be_visible()
        newcomer.close()
        card.get_by_role("button", name="Resume").click()
        wait_for_status(page, "Answer complete")
        expect(page.locator(".ss-typing")).to_be_hidden()
        expect(card.get_by_role("button", name="Pause")).to_be_visible()
        (turn,) = stored_turns(page)
        assert turn["text"] == log_text(server_log(page, turn["streamId"]))


def test_the_live_page_fits_a_phone(browser: Browser, site: str) -> None:
    """The table scrolls inside itself."""
    with watching(browser, site, viewport={"width": 390, "height": 700}) as staff:
        open_live_page(staff)
        assert staff.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_live_page_comes_back_after_a_lost_connection(browser: Browser, site: str) -> None:
    with watching(browser, site) as staff:
        admin = staff.page
        staff.expect_complaint("Failed to load resource", "net::ERR")
        cut = {"count": 0}

        def once(route: Route) -> None:
            cut["count"] += 1
            route.abort() if cut["count"] == 1 else route.continue_()

        admin.route("**/live/events", once)
        open_live_page(staff)
        assert cut["count"] >= 2

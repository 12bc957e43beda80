"""The admin's live page, and the page that watches an answer, in Chromium over a real daphne with the echo engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, Route, expect

from tests.support.checks.axe import axe_violations
from tests.support.plugins.migrated import KEY, Migrate
from tests.support.servers.browser import (
    ADMIN_NAME,
    ADMIN_PASSWORD,
    ANSWER_MS,
    CONTRAST,
    Watched,
    ask,
    echo_site,
    log_text,
    server_log,
    signed_in,
    stored_turns,
    wait_for_status,
    wait_for_text,
    watching,
)

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]


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
  const text = (query) => document.querySelector(query).textContent;
  const numbers = (query) => Object.fromEntries(text(query).split(/[,.] ?/).filter(Boolean)
    .map((part) => part.trim().split(' ').reverse()).map(([name, number]) => [name, Number(number)]));
  const cells = [...document.querySelectorAll('[data-figure]')];
  return {
    snapshot: document.querySelector('[data-streamserve-live]').dataset.snapshot,
    source: text('[data-ss=source]'),
    headline: text('[data-ss=headline-words]'),
    readers: numbers('[data-panel=readers] .ss-verdict'),
    keys: Object.fromEntries([...document.querySelectorAll('[data-panel=readers] .ss-key')]
      .map((key) => key.textContent.split(' ')).map(([name, number]) => [name, Number(number)])),
    figures: Object.fromEntries(cells
      .map((cell) => [cell.dataset.figure, Number(cell.textContent.replaceAll(',', ''))])),
    newest: [...document.querySelectorAll('.ss-minutes tbody tr:first-child td')].slice(0, 4)
      .map((cell) => Number(cell.textContent)),
    now: text('.ss-now'),
    sum: text('.ss-sum'),
    rows: [...document.querySelectorAll('[data-stream-id] .ss-state')].map((state) => state.textContent.split(':')[0]),
    owners: [...document.querySelectorAll('[data-stream-id] .ss-owner')].map((owner) => owner.textContent),
    links: [...document.querySelectorAll('[data-stream-id] a')].map((link) => link.getAttribute('href')),
    ids: [...document.querySelectorAll('[data-stream-id]')].map((row) => row.dataset.streamId),
  };
}"""
READER_STATES = ("late", "hungry", "ahead", "away")
# An answer runs for a moment before its reader counts: "Nobody reads now".
SHOWN_WITH_READERS = f"""() => {{
  const shown = ({SHOWN})();
  const readers = {list(READER_STATES)}.reduce((sum, state) => sum + shown.figures['num_readers_' + state], 0);
  return readers > 0 && shown.figures.num_requests_running > 0 ? shown : null;
}}"""


def test_what_is_shown_at_one_moment_adds_up(browser: Browser, site: str) -> None:
    """Headline, panel, chart, tables and rows are of one snapshot, whose id is shown; so their figures agree."""
    with watching(browser, site) as staff, watching(browser, site) as visitor:
        open_live_page(staff)
        for summary in staff.page.locator(".ss-card summary").all():
            summary.press("Enter")
        visitor.page.goto(site)
        ask(visitor.page, "Something long")
        wait_for_text(visitor.page, 20)
        states_shown = staff.page.locator("[data-stream-id] .ss-state")  # those of earlier tests' readers are parked
        expect(states_shown.get_by_text("running", exact=True)).to_be_visible()
        expect(staff.page.locator("[data-ss=headline-words]")).to_contain_text("reader")
        shown = staff.page.wait_for_function(SHOWN_WITH_READERS).json_value()
        figures = shown["figures"]
        readers = {state: figures[f"num_readers_{state}"] for state in READER_STATES}
        assert shown["readers"] == shown["keys"] == readers
        assert shown["newest"] == [readers[state] for state in READER_STATES]
        assert f"{sum(readers.values())} reader" in shown["headline"]
        assert f"{figures['num_requests_running']} running, {figures['num_requests_waiting']} waiting" in shown["now"]
        assert figures["kv_blocks_total"] == sum(figures[f"kv_blocks_{name}"] for name in ("used", "cached", "free"))
        states = [shown["rows"].count(state) for state in ("starting", "running", "parked")]
        parts = f"{states[0]} starting, {states[1]} running, {states[2]} parked"
        assert shown["sum"].startswith(f"{len(shown['rows'])} stream")
        assert parts in shown["sum"]
        assert parts in shown["now"]
        assert f"Snapshot {shown['snapshot']}" in shown["source"]
        assert shown["links"] == [f"/admin/streamserve/stream/{stream_id}/change/" for stream_id in shown["ids"]]
        assert any(re.fullmatch("visitor [0-9a-f]{8}", owner) for owner in shown["owners"])
        visitor.page.keyboard.press("Escape")
        wait_for_status(visitor.page, "Stopped")


# What can be scrolled sideways, by its class.
SIDEWAYS = """() => [...document.querySelectorAll('#content *')]
  .filter((each) => each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 2)
  .filter((each) => /auto|scroll/.test(getComputedStyle(each).overflowX)).map((each) => each.className)"""


@pytest.fixture(scope="module")
def alerting(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    """A site whose answers are beyond two of its thresholds: as many as a rule needs, some of them stopped."""
    settings, state = "tests.support.sites.pages.alerts_site", tmp_path_factory.mktemp("alerts")
    with echo_site(settings, state, migrated) as url:
        yield url


def have_answers(url: str, num: int, num_stopped: int) -> None:
    """Have so many answers; the readers of those that are stopped leave before the end."""
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "tell me", "ignore_eos": True}
    with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
        for _ in range(num):
            assert client.post("/streams", json={**body, "max_tokens": 8}).status_code == 200
        for _ in range(num_stopped):
            with client.stream("POST", "/streams", json={**body, "max_tokens": 3000}) as answer:
                assert any(line.startswith("event: token") for line in answer.iter_lines())
            assert client.post(f"/streams/{answer.headers['x-stream-id']}/stop").status_code == 200


def test_figures_beyond_their_thresholds_are_marked_and_named(browser: Browser, alerting: str) -> None:
    """Below 20 answers nothing is judged; then each figure says in words what it is, and the headline where to look."""
    have_answers(alerting, 2, 0)
    with watching(browser, alerting, color_scheme="light", viewport={"width": 400, "height": 800}) as staff:
        page = staff.page
        open_live_page(staff)
        tiles = page.locator(".ss-tile")
        late, left = (
            page.locator(f"[data-figure=Streamserve{name}].ss-tile") for name in ("FirstTokenP95", "ReadersLeave")
        )
        expect(tiles).to_have_count(8)
        expect(late).to_contain_text("too few answers")
        have_answers(alerting, 18, 4)
        headline = page.locator("[data-ss=headline]")
        expect(headline).to_have_class("ss-headline is-warn")
        expect(headline).to_contain_text(re.compile(r"First tokens come late: p95 .+, the threshold is 0.0002 s"))
        expect(headline).to_contain_text("1 more figure is beyond its threshold")
        for tile in (late, left):
            expect(tile).to_contain_text("over the threshold")
            expect(tile.get_by_role("link", name="Look there")).to_be_visible()
        expect(tiles.filter(has_text="too few answers")).to_have_count(0)  # some figures come with the next poll
        assert sorted(set(tiles.locator(".ss-level").all_text_contents())) == [
            "in order",
            "no threshold",
            "over the threshold",
        ]
        expect(left).to_contain_text("17 %")
        panel = page.locator("[data-panel=leaving]")
        expect(panel).to_contain_text(
            "24 answers in the last 10 min: 4 stopped or left (17 %). 4 connections ended early"
        )
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.wait_for_function("() => document.getAnimations().length === 0")  # links change their colour slowly
            assert axe_violations(page) == [], scheme
            for query in (".ss-tile-limit", ".ss-tile-label", ".ss-tile.is-warn .ss-meaning"):
                assert page.locator(query).first.evaluate(CONTRAST) >= 4.5, (scheme, query)
        assert page.evaluate(SIDEWAYS) == []
        left.get_by_role("link", name="Look there").click()
        assert page.evaluate("location.hash.slice(1) === document.querySelector('[data-panel=leaving]').id")
        headline.get_by_role("link", name="Look there").click()
        expect(page).to_have_url(re.compile(r"/admin/streamserve/stream/\?model=echo$"))
        expect(page.locator("#result_list tbody tr")).to_have_count(24)
        page.goto(f"{alerting}/admin/streamserve/stream/?model=echo&error_code__gt=")
        expect(page.locator("#content")).to_contain_text("0 streams")


PICTURE = "(canvas) => canvas.toDataURL()"


def test_each_chart_is_drawn_and_follows_the_theme(browser: Browser, site: str) -> None:
    """Five charts with time axes, redrawn in the colours of the dark theme; words can be read, axe finds nothing."""
    with watching(browser, site, color_scheme="light") as staff:
        open_live_page(staff)
        canvas = staff.page.locator("[data-panel=memory] canvas")
        expect(staff.page.locator(".ss-panel canvas")).to_have_count(5)
        words = [".ss-headline-words", ".ss-level", ".ss-verdict", ".ss-explained", ".ss-key", ".ss-now"]
        for scheme in ("light", "dark"):
            staff.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            for query in words:
                assert staff.page.locator(query).first.evaluate(CONTRAST) >= 4.5, (scheme, query)
            assert axe_violations(staff.page) == [], scheme
            if scheme == "light":
                light = canvas.evaluate(PICTURE)
        staff.page.wait_for_function(
            "(light) => document.querySelector('[data-panel=memory] canvas').toDataURL() !== light", arg=light
        )


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
        expect(admin.locator(".field-short_user")).to_have_text(ADMIN_NAME)


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


def test_the_live_page_fits_a_phone_and_a_laptop(browser: Browser, site: str) -> None:
    """With a stream and every table open, nothing scrolls sideways."""
    with watching(browser, site, viewport={"width": 390, "height": 700}) as staff, watching(browser, site) as visitor:
        open_live_page(staff)
        visitor.page.goto(site)
        ask(visitor.page, "Something long")
        wait_for_text(visitor.page, 20)
        expect(staff.page.locator("[data-stream-id]").first).to_be_visible()
        for summary in staff.page.locator(".ss-card summary").all():
            summary.click()
        expect(staff.page.locator(".ss-minutes tbody tr").first).to_be_visible()
        for width in (390, 1280):
            staff.page.set_viewport_size({"width": width, "height": 800})
            assert staff.page.evaluate("document.documentElement.scrollWidth") <= width
            assert staff.page.evaluate(SIDEWAYS) == []
        visitor.page.keyboard.press("Escape")
        wait_for_status(visitor.page, "Stopped")


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


EMBED = """(texts) => fetch('/v1/embeddings', {
  method: 'POST',
  headers: {
    'Content-Type': 'application/json',
    'X-CSRFToken': document.querySelector('[name=csrfmiddlewaretoken]').value,
  },
  body: JSON.stringify({ input: texts }),
}).then((response) => response.status)"""


def test_an_embedding_model_is_shown_with_what_it_has_computed(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, migrated: Migrate
) -> None:
    """Requests, inputs and tokens, counted by its process."""
    state = tmp_path_factory.mktemp("state")
    with (
        echo_site("tests.support.sites.pages.embedding_site", state, migrated) as url,
        signed_in(browser, url, path="/admin/streamserve/live/") as staff,
    ):
        assert staff.page.evaluate(EMBED, ["one", "two", "three"]) == 200
        row = staff.page.locator("[data-embedder=search]")
        for label, figure in (("Requests", "1"), ("Inputs", "3"), ("Tokens", "11"), ("Waiting", "0")):
            expect(row.locator(f"[data-label={label}]")).to_have_text(figure)
        expect(row).to_contain_text("ready")
        assert axe_violations(staff.page) == []

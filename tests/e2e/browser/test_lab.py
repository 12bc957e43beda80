"""The lab in a browser: whatever is closed, cut and killed, its page has the whole answer in the end."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from project.lab.pace import SCENARIOS
from project.lab.views import WAYS
from tests.support.checks.axe import axe_violations
from tests.support.docs.demo_site import serve
from tests.support.servers.browser import watching
from tests.support.servers.ports import free_port

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

MINUTE = 60_000
PATHS = ("/lab/", "/lab/compare/", "/lab/token/")
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a demo whose lab writes faster."""
    port = str(free_port())
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


def test_by_keyboard_alone_an_answer_is_slowed_and_stopped(lab: Page) -> None:
    """Tab reaches each control, whose focus is seen; the stopped answer is what the log has, and another is asked."""
    press_by_tab(lab, "ask", "Enter")
    expect(part(lab, "text")).to_contain_text("made to be", timeout=MINUTE)
    slow = press_by_tab(lab, "slow", "Space")
    expect(slow).to_have_attribute("aria-pressed", "true")
    lab.keyboard.press("Space")
    expect(slow).to_have_attribute("aria-pressed", "false")
    for name in ("close", "close"):  # the tab is closed, and opened again
        press_by_tab(lab, name, "Enter")
    press_by_tab(lab, "stop", "Enter")
    happened(lab, "The answer is stopped")
    expect(part(lab, "verdict")).to_contain_text("none twice", timeout=MINUTE)
    press_by_tab(lab, "ask", "Enter")
    expect(part(lab, "verdict")).to_be_hidden()
    expect(part(lab, "text")).to_contain_text("made to be", timeout=MINUTE)


def press_by_tab(page: Page, name: str, key: str) -> Locator:
    """Press a button as a visitor without a mouse does; return it. Its focus has an outline."""
    button = page.locator(f"[data-lab-do={name}]")
    expect(button).to_be_enabled()
    for _ in range(60):
        if button.evaluate("button => button === document.activeElement"):
            assert button.evaluate("button => getComputedStyle(button).outlineStyle") != "none"
            page.keyboard.press(key)
            return button
        page.keyboard.press("Tab")
    raise AssertionError(f"Tab does not reach {name!r}")


def test_the_simulator_measures_what_the_screen_has_shown(demo: str, browser: Browser) -> None:
    """By keyboard: a real stream in four panes with the same text; buffered there is nothing until the end.

    The thoughts of the scenario come before its answer, and are no part of it. All cells of the table are filled.
    """
    scenario = SCENARIOS["reasoning"]
    with watching(browser, demo) as watched:
        page = watched.page
        page.goto(f"{demo}/lab/compare/")
        page.get_by_role("radio", name="Short chat").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(part(page, "question")).to_contain_text(scenario.question)
        page.get_by_role("slider", name="Rate").fill("40")
        page.get_by_role("slider", name="Time to first token").fill("0.2")
        page.keyboard.press("Enter")
        panes = [page.locator(f"[data-lab-way={way['key']}]") for way in WAYS]
        buffered, streamed = panes[:2]
        thoughts = streamed.locator("[data-lab-part=thoughts]")
        expect(thoughts).to_contain_text("Three seats cost 45 dollars", timeout=MINUTE)
        assert buffered.locator("[data-lab-part=text]").inner_text().strip() == ""
        expect(part(page, "status")).to_contain_text("Measured.", timeout=MINUTE)
        for pane in panes:
            assert pane.locator("[data-lab-part=thoughts]").text_content() == scenario.thoughts
            assert pane.locator("[data-lab-part=answer]").text_content() == scenario.answer
        words = len(scenario.thoughts.split()) + len(scenario.answer.split())
        cells = page.locator("[data-lab-seen] td").all_inner_texts()
        assert len(cells) == 12
        assert all(re.match(r"nothing|\d+ words?|all \d+ words", cell) for cell in cells), cells
        assert cells[2::3] == [f"all {words} words"] * 4
        scores = [int(pane.locator("[data-lab-part=score]").inner_text()) for pane in panes]
        assert 0 == scores[0] < scores[1] <= 100, scores
        expect(streamed.locator("dl")).to_contain_text("Answer begins")
        page.wait_for_function("() => document.querySelector('.lab-guide img').naturalWidth > 0")
        assert axe_violations(page) == []


def test_a_token_is_followed_from_the_engine_to_the_glass(demo: str, browser: Browser) -> None:
    """Every stage has its time, and the token is marked; at the end the parts of the first token's time add up."""
    with watching(browser, demo) as watched:
        page = watched.page
        page.goto(f"{demo}/lab/token/")
        page.get_by_role("button", name="Ask").press("Enter")
        expect(part(page, "token")).to_contain_text(re.compile(r"Event \d+: (“|a blank)"), timeout=MINUTE)
        expect(page.locator(".is-traced")).to_have_count(1)
        stages = page.locator("[data-lab-stage]")
        expect(stages).to_have_count(8)
        for stage in stages.all():
            expect(stage.locator("b")).to_contain_text(re.compile(r"^[\d.]+ ms$"), timeout=MINUTE)
        expect(part(page, "engine")).to_contain_text(re.compile(r"engine process \d+"))
        expect(part(page, "web")).to_contain_text(re.compile(r"web process \d+"))
        expect(part(page, "ttft")).to_be_visible(timeout=MINUTE)
        server, glass = (milliseconds(part(page, name).inner_text()) for name in ("server", "glass"))
        assert 0 < server < glass
        rows = part(page, "between").locator("tr").all()
        times = [milliseconds(row.locator("b").inner_text()) for row in rows]
        assert abs(sum(times) - glass) <= 0.5 * len(times) + 0.1 * glass, (times, glass)
        assert [row.locator("th").inner_text() for row in rows][-1] == "Painted"
        assert axe_violations(page) == []


def test_a_visitor_from_elsewhere_sees_the_browsers_side(demo: str, browser: Browser) -> None:
    """A visitor through a proxy gets no state of the server, but the figures of the answer's own end."""
    with watching(browser, demo, extra_http_headers={"X-Forwarded-For": "192.0.2.7"}) as watched:
        page = watched.page
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{demo}/lab/token/")
        expect(page.get_by_text("Only visitors from the site's own machine")).to_be_visible()
        do(page, "ask")
        expect(part(page, "ttft")).to_be_visible(timeout=MINUTE)
        assert page.locator("[data-lab-stage] b").all_inner_texts() == ["–"] * 8
        assert not [url for url in asked if url.endswith("/state/")]


def milliseconds(words: str) -> float:
    """Return the number of "3.4 ms"."""
    return float(words.removesuffix(" ms"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_pages_are_accessible(demo: str, browser: Browser, size: dict[str, int], scheme: str) -> None:
    """axe finds nothing, light and dark, and nothing is wider than a phone."""
    with watching(browser, demo, viewport=size, color_scheme=scheme) as watched:
        for path in PATHS:
            watched.page.goto(demo + path)
            assert axe_violations(watched.page) == []
            assert watched.page.evaluate("document.documentElement.scrollWidth") <= size["width"]

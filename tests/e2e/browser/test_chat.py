"""The chat page in Chromium, over a real daphne with the echo engine."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

import pytest
from playwright.sync_api import Browser, Request, Route, expect

from tests.support.servers.browser import (
    Watched,
    answer_text,
    ask,
    fake_answer,
    log_text,
    notice,
    post_bodies,
    server_log,
    slow_down,
    store_turn,
    stored_turns,
    wait_for_status,
    wait_for_text,
    watching,
)

SCROLL = "document.querySelector('.ss-scroll')"
# Notes, at every change of the page: the answer's length on screen, what the status region says, whether it is busy.
RECORD = """() => {
  window.record = [];
  new MutationObserver(() => {
    const answer = document.querySelector('.ss-answer');
    if (answer === null) return;
    const said = document.querySelector('[role=status]').textContent;
    window.record.push([answer.querySelector('.ss-body').textContent.length, said, answer.getAttribute('aria-busy')]);
  }).observe(document.querySelector('.ss-chat'), { childList: true, subtree: true, attributes: true });
}"""
pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


def words(text: str) -> str:
    """Return what is left of a text when markdown has taken line breaks and list marks away."""
    return re.sub(r"[\s\-]+", "", text)


def refused(status_code: int, code: str, message: str, **headers: str) -> dict[str, Any]:
    body = json.dumps({"error": {"code": code, "message": message, "param": None}})
    return {"status": status_code, "body": body, "headers": {"Content-Type": "application/json", **headers}}


# --- an answer -------------------------------------------------------------------------------------------------------


def test_an_answer_grows_on_screen_and_ends_as_the_servers_log(watched: Watched) -> None:
    """Text appears while the model writes; at the end page and log hold the same, and the status changes once."""
    page = watched.page
    page.evaluate(RECORD)
    ask(page, "How do I pause my subscription?")
    wait_for_status(page, "Answer complete")
    record = page.evaluate("window.record")
    lengths = [length for length, _, busy in record if busy == "true"]
    assert len(set(lengths)) > 10
    assert lengths == sorted(lengths)
    assert [said for said, _ in groupby(said for _, said, _ in record)] == ["Generating", "Answer complete"]
    (turn,) = stored_turns(page)
    events = server_log(page, turn["streamId"])
    assert turn["text"] == log_text(events)
    assert words(answer_text(page)) == words(turn["text"])
    assert turn["figures"]["tokens"] == events[-1]["data"]["totalTokens"]
    expect(page.locator(".ss-figures")).to_contain_text(re.compile(r"tokens.*tok/s.*first token.*here.*server"))
    assert page.locator(".ss-answer").get_attribute("aria-busy") == "false"
    expect(page.get_by_label("Your question")).to_be_focused()
    page.locator(".ss-made summary").click()
    expect(page.locator(".ss-made dt")).to_contain_text(["prefill", "generation"])
    expect(page.locator(".ss-made ol")).to_be_hidden()  # no steps


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_a_stop_keeps_exactly_what_was_on_screen(watched: Watched, way: str) -> None:
    """The text freezes as it is, the server ends the stream there, and both agree on the last event seen."""
    page = watched.page
    slow_down(page, 8)  # the server is far ahead of what is on screen
    ask(page, "Tell me everything")
    wait_for_text(page, 100)
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    wait_for_status(page, "Stopped")
    frozen = answer_text(page)
    slow_down(page, None)
    expect(page.locator(".ss-figures")).to_contain_text("token")  # the terminal event has come
    assert answer_text(page) == frozen
    (turn,) = stored_turns(page)
    events = server_log(page, turn["streamId"])
    ending = events[-1]["data"]
    assert (ending["finish_reason"], turn["state"]) == ("cancelled", "stopped")
    assert turn["lastId"].endswith(f"-{ending['kept_seq']}")
    unseen = server_log(page, turn["streamId"], after=ending["kept_seq"])
    assert turn["text"] + log_text(unseen) == log_text(events)
    assert words(frozen) == words(turn["text"])
    expect(page.get_by_label("Your question")).to_be_focused()
    page.reload()
    assert answer_text(page) == frozen


def test_an_answer_survives_reloads_without_gap_or_duplicate(watched: Watched) -> None:
    """Reloaded twice in the middle, the page shows the log's text, and has asked once."""
    page = watched.page
    bodies = post_bodies(page)
    slow_down(page, 20)
    ask(page, "Something long")
    for length in (60, 600):
        wait_for_text(page, length)
        before = answer_text(page)
        page.reload()
        expect(page.locator(".ss-body")).not_to_be_empty()
        assert words(answer_text(page)).startswith(words(before)[:200])
        assert stored_turns(page)[0]["state"] == "streaming"
    slow_down(page, None)
    wait_for_status(page, "Answer complete")
    (turn,) = stored_turns(page)
    assert turn["text"] == log_text(server_log(page, turn["streamId"]))
    assert words(answer_text(page)) == words(turn["text"])
    assert len(bodies) == 1


@pytest.mark.proof
def test_a_lost_network_is_shown_and_bridged(watched: Watched) -> None:
    """When reads fail in mid-answer a banner shows it, and the rest follows without a seam."""
    page = watched.page
    watched.expect_complaint("Failed to load resource", "net::ERR")
    page.route("**/events", lambda route: route.abort())
    ask(page, "Something long")
    wait_for_text(page, 60)
    page.reload()  # from here on the page reads by GET .../events, which fails
    expect(page.get_by_text("Connection lost.")).to_be_visible()
    expect(page.get_by_role("button", name="Try now")).to_be_visible()
    page.unroute("**/events")
    wait_for_status(page, "Answer complete")
    expect(page.get_by_text("Connection lost.")).to_be_hidden()
    (turn,) = stored_turns(page)
    assert turn["text"] == log_text(server_log(page, turn["streamId"]))


def test_turns_build_on_each_other_until_a_new_chat(watched: Watched) -> None:
    """The second question includes the first turn; a new chat includes none."""
    page = watched.page
    page.route("**/streams", lambda route: route.fulfill(**fake_answer("<think>hm</think>In **settings**.")))
    bodies = post_bodies(page)
    page.get_by_role("button", name="What does the Team plan cost?").click()
    wait_for_status(page, "Answer complete")
    ask(page, "And how long?")
    expect(page.locator(".ss-turn")).to_have_count(2)
    wait_for_status(page, "Answer complete")
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert bodies[1]["messages"][1]["content"] == "In **settings**."  # an earlier thought is not sent back
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_text("How can we help?")).to_be_visible()
    ask(page, "Hello")
    wait_for_status(page, "Answer complete")
    assert bodies[2]["messages"] == [{"role": "user", "content": "Hello"}]


def test_a_new_chat_can_be_undone(watched: Watched) -> None:
    """Also after a reload, until the new chat has a question; by then the old one is gone from the browser."""
    page = watched.page
    page.route("**/streams", lambda route: route.fulfill(**fake_answer("In settings.")))
    new, back = (page.get_by_role("button", name=name) for name in ("New chat", "Last chat"))
    expect(back).to_be_hidden()
    ask(page, "The old one")
    wait_for_status(page, "Answer complete")
    new.click()
    wait_for_status(page, "New chat. The last one can be brought back.")
    expect(page.locator(".ss-turn")).to_have_count(0)
    page.reload()
    back.click()
    expect(page.locator(".ss-question p")).to_have_text(["The old one"])
    assert answer_text(page) == "In settings."
    expect(back).to_be_hidden()
    expect(page.get_by_label("Your question")).to_be_focused()
    new.click()
    ask(page, "The new one")
    wait_for_status(page, "Answer complete")
    expect(page.locator(".ss-question p")).to_have_text(["The new one"])
    page.wait_for_function("() => !Object.values(localStorage).some((text) => text.includes('The old one'))")
    new.click()
    back.click()
    expect(page.locator(".ss-question p")).to_have_text(["The new one"])


def test_text_typed_before_the_scripts_have_loaded_can_be_sent(browser: Browser, site: str) -> None:
    """The button that sends it works as soon as there are scripts."""
    with watching(browser, site) as visit:
        page = visit.page
        held: list[Route] = []
        page.route("**/chat.js", lambda route: held.append(route))
        page.goto(site, wait_until="commit")
        page.get_by_label("Your question").fill("Typed early")
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        held[0].continue_()
        page.get_by_role("button", name="Send").click()
        wait_for_text(page, 20)
        page.keyboard.press("Escape")
        wait_for_status(page, "Stopped")


def test_a_page_comes_to_rest(watched: Watched) -> None:
    """Every request of a page that is left open comes to its end, the questions whether the server is there too."""
    page = watched.page
    page.wait_for_load_state("networkidle")  # what is still under way ends with the page that is left
    failed: list[str] = []
    page.on("requestfailed", lambda request: failed.append(f"{request.url} {request.failure}"))
    page.goto(watched.origin, wait_until="networkidle")
    for _ in range(3):
        page.wait_for_event("requestfinished", lambda request: request.url.endswith("/livez"))
    page.wait_for_load_state("networkidle")
    assert failed == []


# --- not now, not at all ---------------------------------------------------------------------------------------------


def test_a_question_typed_while_the_model_loads_is_sent_when_it_is_ready(watched: Watched) -> None:
    """The bar shows stage, fraction, bytes and seconds; nothing is posted before the model is ready."""
    page = watched.page
    watched.expect_complaint("503")
    model = {
        "alias": "echo",
        "state": "loading",
        "stage": "weights",
        "fraction": 0.42,
        "loaded_bytes": 227_000_000,
        "total_bytes": 540_000_000,
        "elapsed_seconds": 3.4,
        "message": "",
    }
    body = json.dumps({"ready": False, "models": [model]})
    page.route("**/readyz", lambda route: route.fulfill(status=503, body=body, content_type="application/json"))
    bodies = post_bodies(page)
    page.reload()
    expect(page.get_by_text("The model is loading · weights 42 % · 227 of 540 MB · 3 s")).to_be_visible()
    assert page.get_by_role("progressbar").get_attribute("value") == "0.42"
    ask(page, "Are you there?")
    expect(page.locator(".ss-typing")).to_be_visible()
    assert bodies == []
    page.unroute("**/readyz")
    wait_for_text(page, 20)
    assert len(bodies) == 1
    expect(page.get_by_role("progressbar")).to_be_hidden()
    page.keyboard.press("Escape")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("failed", "The model cannot answer. The engine ended 5 times."),
        ("paused", "The model is paused. Answers go on when it is resumed."),
        ("draining", "The model is about to be restarted. New answers wait until it is back."),
    ],
)
def test_a_model_that_is_not_loading_has_its_reason_shown(watched: Watched, state: str, words: str) -> None:
    """A model that is not loading has its reason in words, and no progress."""
    page = watched.page
    watched.expect_complaint("503")
    body = json.dumps(
        {"ready": False, "models": [{"alias": "echo", "state": state, "message": "The engine ended 5 times."}]}
    )
    page.route("**/readyz", lambda route: route.fulfill(status=503, body=body, content_type="application/json"))
    page.reload()
    expect(page.get_by_text(words, exact=True)).to_be_visible()
    expect(page.get_by_role("progressbar")).to_be_hidden()


def is_question(sent: Request) -> bool:
    """Whether it asks a question, and does not acknowledge an answer."""
    return sent.method == "POST" and sent.url.endswith("/streams")


@pytest.mark.parametrize(("status_code", "code"), [(503, "overloaded"), (429, "quota_exceeded")])
def test_a_refusal_counts_down_and_is_sent_again(watched: Watched, status_code: int, code: str) -> None:
    """Retry-After counts down in seconds, and the question is sent when it ends."""
    page = watched.page
    watched.expect_complaint(str(status_code))
    refusal = refused(status_code, code, "Not now.", **{"Retry-After": "3"})
    page.route("**/streams", lambda route: route.fulfill(**refusal), times=1)
    keys: list[str | None] = []
    page.on("request", lambda sent: keys.append(sent.headers.get("idempotency-key")) if is_question(sent) else None)
    ask(page, "Now?")
    expect(page.get_by_text("Trying again in 3 s")).to_be_visible()
    wait_for_text(page, 20)
    assert keys[0] is not None
    assert keys == [keys[0]] * 2, "one question has one key"
    page.keyboard.press("Escape")
    wait_for_status(page, "Stopped")


def test_a_failed_answer_keeps_its_text_and_can_be_asked_again(watched: Watched) -> None:
    """An `error` event ends the answer with a readable notice; "Try again" sends the same question."""
    page = watched.page
    failure = ("error", {"code": "engine_died", "message": "internals", "retryable": True})
    page.route("**/streams", lambda route: route.fulfill(**fake_answer("Half an answer", ending=failure)), times=1)
    ask(page, "Why?")
    expect(notice(page)).to_contain_text("The model has stopped working.")
    assert answer_text(page) == "Half an answer"
    bodies = post_bodies(page)
    page.get_by_role("button", name="Try again").click()
    wait_for_text(page, 20)
    assert bodies[0]["messages"] == [{"role": "user", "content": "Why?"}]
    expect(page.locator(".ss-turn")).to_have_count(1)
    page.keyboard.press("Escape")


def test_a_first_question_that_is_too_long_can_be_edited(watched: Watched) -> None:
    """No conversation has grown, and sending the same again cannot help: its editor opens, and it is replaced."""
    page = watched.page
    watched.expect_complaint("400")
    refusal = refused(400, "context_length_exceeded", "prompt has 9,120 tokens; this model takes 8,192.")
    page.route("**/streams", lambda route: route.fulfill(**refusal), times=1)
    ask(page, "Very long")
    expect(notice(page)).to_contain_text("This question is too long for the model.")
    expect(page.get_by_role("button", name="Try again")).to_be_hidden()
    page.get_by_role("button", name="Edit the question").click()
    draft = page.get_by_label("Change the question")
    expect(draft).to_have_value("Very long")
    expect(draft).to_be_focused()
    page.route("**/streams", lambda route: route.fulfill(**fake_answer("Yes.")), times=1)
    draft.fill("Long")
    draft.press("Enter")
    wait_for_status(page, "Answer complete")
    expect(page.locator(".ss-question p")).to_have_text(["Long"])
    expect(page.locator(".ss-siblings:visible")).to_have_count(0)  # no answer was lost with it
    assert len(stored_turns(page)) == 1


@pytest.mark.parametrize("code", ["context_length_exceeded", "body_too_large"])
@pytest.mark.parametrize(("question", "words"), [("Q" * 900, "This question is too long"), ("Q", "This conversation")])
def test_what_is_too_long_is_named(watched: Watched, question: str, words: str, code: str) -> None:
    """After an answer of 400 characters: a question of 900 is itself too long, one of a single letter is not."""
    page = watched.page
    watched.expect_complaint("400")
    page.route("**/streams", lambda route: route.fulfill(**fake_answer("A" * 400)), times=1)
    ask(page, "First")
    wait_for_status(page, "Answer complete")
    refusal = refused(400, code, "prompt has 9,120 tokens; this model takes 8,192.")
    page.route("**/streams", lambda route: route.fulfill(**refusal), times=1)
    ask(page, question)
    expect(notice(page)).to_contain_text(words)


def test_a_question_beyond_every_bound_is_not_cut(watched: Watched) -> None:
    """Nothing of a long text is dropped silently: the server refuses it, and it can be shortened."""
    page = watched.page
    watched.expect_complaint("400")
    question = "long " * 100_000
    page.get_by_label("Your question").fill(question)
    page.get_by_role("button", name="Send").click()
    expect(notice(page)).to_contain_text("This question is too long for the model.")
    page.get_by_role("button", name="Edit the question").click()
    assert page.get_by_label("Change the question").input_value() == question.strip()


def test_a_question_that_reaches_no_server_is_kept(watched: Watched) -> None:
    page = watched.page
    watched.expect_complaint("net::ERR")
    page.route("**/streams", lambda route: route.abort(), times=1)
    ask(page, "Anybody?")
    expect(notice(page)).to_contain_text("The server could not be reached.")
    expect(page.locator(".ss-question")).to_contain_text("Anybody?")


def test_an_answer_whose_log_has_expired_shows_a_notice(watched: Watched) -> None:
    """The text on screen stays, and a notice names the rest as gone."""
    page = watched.page
    watched.expect_complaint("404", "410")
    store_turn(
        page,
        question="Old?",
        text="The beginning",
        state="streaming",
        streamId="f" * 32,
        lastId="aaaaaaaaaaaa-3",
    )
    page.reload()
    expect(notice(page)).to_contain_text("The rest of this answer is no longer kept.")
    assert answer_text(page) == "The beginning"


# --- reading and writing ---------------------------------------------------------------------------------------------


def test_scrolling_up_stops_following_until_the_button_is_clicked(watched: Watched) -> None:
    page = watched.page
    slow_down(page, 60)
    ask(page, "Something long")
    page.wait_for_function(
        "() => { const s = document.querySelector('.ss-scroll'); return s.scrollHeight > s.clientHeight + 600; }"
    )
    page.locator(".ss-scroll").hover()
    page.mouse.wheel(0, -500)
    jump = page.get_by_role("button", name="Jump to latest")
    expect(jump).to_be_visible()
    top = page.evaluate("document.querySelector('.ss-scroll').scrollTop")
    wait_for_text(page, len(answer_text(page)) + 300)
    assert page.evaluate("document.querySelector('.ss-scroll').scrollTop") == top
    jump.click()
    expect(jump).to_be_hidden()
    page.wait_for_function(f"() => {{ const s = {SCROLL}; return s.scrollHeight - s.scrollTop - s.clientHeight < 4; }}")
    page.keyboard.press("Escape")


def test_the_transcript_is_silent_and_one_region_announces(watched: Watched) -> None:
    """role=log, aria-live=off, one polite status; Shift+Enter starts a line, an input method's Enter sends nothing."""
    page = watched.page
    assert page.get_by_role("log", include_hidden=True).get_attribute("aria-live") == "off"
    assert page.locator("[aria-live=polite]").count() == 1
    box = page.get_by_label("Your question")
    expect(box).to_be_focused()
    height = box.bounding_box()
    box.fill("one")
    box.press("Shift+Enter")
    box.type("two")
    assert box.input_value() == "one\ntwo"
    taller = box.bounding_box()
    assert height is not None
    assert taller is not None
    assert taller["height"] > height["height"]
    box.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    assert page.locator(".ss-turn").count() == 0


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_is_wider_than_a_phone(browser: Browser, site: str, width: int) -> None:
    """Long words, code and tables scroll inside themselves."""
    text = (
        "W" * 300
        + "\n\n```\n"
        + "c" * 300
        + "\n```\n\n| a | b |\n|---|---|\n| "
        + "t" * 90
        + " | "
        + "u" * 90
        + " |\n\n"
    )
    with watching(browser, site, viewport={"width": width, "height": 700}, is_mobile=True, has_touch=True) as phone:
        page = phone.page
        page.route("**/streams", lambda route: route.fulfill(**fake_answer(text + "https://example.com/" + "x" * 200)))
        page.goto(site)
        ask(page, "Q" * 200)
        wait_for_status(page, "Answer complete")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert (
            page.evaluate(
                "(() => { const s = document.querySelector('.ss-scroll'); return s.scrollWidth - s.clientWidth; })()"
            )
            <= 0
        )


def test_the_page_has_a_strict_policy_and_nothing_inline(browser: Browser, site: str) -> None:
    with watching(browser, site) as visit:
        response = visit.page.goto(site)
        assert response is not None
        policy = response.headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        html = response.text()
        assert re.search(r"<script(?![^>]*\bsrc=)", html) is None
        assert re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", html) is None


def test_a_second_tab_takes_over_what_the_first_one_asked(watched: Watched) -> None:
    """Both tabs are the owner's readers of one stream and end with the same text."""
    page = watched.page
    ask(page, "Something long")
    wait_for_text(page, 60)
    other = page.context.new_page()
    other.goto(page.url)
    wait_for_status(page, "Answer complete")
    wait_for_status(other, "Answer complete")
    (turn,) = stored_turns(other)
    assert turn["text"] == log_text(server_log(page, turn["streamId"]))
    assert words(answer_text(other)) == words(answer_text(page))

"""Branches of a conversation that the browser keeps: edit, answer again, versions, continue; by mouse and keyboard."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.support.checks.axe import axe_violations
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
    stored_turns,
    wait_for_status,
    wait_for_text,
    watching,
)

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

LENGTH = ("done", {"finish_reason": "length", "totalTokens": 3, "latency": 0.5, "breakdown": {"ttft": 0.1}})


def answer_each(page: Page) -> list[dict[str, Any]]:
    """Answer each question of the page with its number and its words; return what is asked."""
    bodies = post_bodies(page)

    def answer(route: Route) -> None:
        question = json.loads(route.request.post_data or "{}")["messages"][-1]["content"]
        route.fulfill(**fake_answer(f"Answer {len(bodies)} to {question}"))

    page.route("**/streams", answer)
    return bodies


def ask_and_wait(page: Page, question: str) -> None:
    count = page.locator(".ss-turn").count()
    ask(page, question)
    expect(page.locator(".ss-foot:visible")).to_have_count(count + 1)


def asked(page: Page) -> Locator:
    return page.locator(".ss-question p")


def turn(page: Page, index: int) -> Locator:
    return page.locator(".ss-turn").nth(index)


def draft(page: Page) -> Locator:
    """Return the editor that is open."""
    return page.get_by_role("textbox", name="Change the question")


def wait_for_record(page: Page, condition: str) -> None:
    """Wait until the browser keeps a turn of which the JavaScript condition holds."""
    parse = "text.startsWith('{') ? [JSON.parse(text)] : []"
    page.wait_for_function(f"() => Object.values(localStorage).flatMap((text) => {parse}).some((turn) => {condition})")


def edit(page: Page, index: int, question: str) -> None:
    turn(page, index).get_by_role("button", name="Edit", exact=True).click()
    draft(page).fill(question)
    draft(page).press("Enter")


def test_a_changed_question_is_a_branch_and_the_other_stays(watched: Watched) -> None:
    """The request has the branch alone; ‹ and › lead to each branch, to its end; a reload shows the branch shown."""
    page = watched.page
    bodies = answer_each(page)
    ask_and_wait(page, "One?")
    ask_and_wait(page, "Two?")
    edit(page, 0, "One, changed?")
    expect(asked(page)).to_have_text(["One, changed?"])
    expect(turn(page, 0).get_by_role("group", name="Version 2 of 2")).to_be_visible()
    expect(page.locator(".ss-foot:visible")).to_have_count(1)
    assert bodies[-1]["messages"] == [{"role": "user", "content": "One, changed?"}]
    before, after = (turn(page, 0).get_by_role("button", name=name) for name in ("Version before", "Next version"))
    expect(after).to_be_disabled()
    before.click()
    expect(asked(page)).to_have_text(["One?", "Two?"])
    expect(after).to_be_focused()
    assert answer_text(page, 0) == "Answer 1 to One?"
    page.reload()
    expect(asked(page)).to_have_text(["One?", "Two?"])
    after.press("Enter")
    expect(asked(page)).to_have_text(["One, changed?"])
    ask_and_wait(page, "Then?")
    assert [message["content"] for message in bodies[-1]["messages"]] == [
        "One, changed?",
        "Answer 3 to One, changed?",
        "Then?",
    ]
    assert len(stored_turns(page)) == 4


def test_answer_again_is_a_sibling(watched: Watched) -> None:
    """Also of an earlier question: what followed its first answer stays with that answer, an edit that is open too."""
    page = watched.page
    bodies = answer_each(page)
    ask_and_wait(page, "One?")
    ask_and_wait(page, "Two?")
    turn(page, 1).get_by_role("button", name="Edit", exact=True).click()
    draft(page).fill("Two, not asked yet")
    turn(page, 0).get_by_role("button", name="Answer again").click()
    expect(asked(page)).to_have_text(["One?"])
    expect(page.locator(".ss-foot:visible")).to_have_count(1)
    assert answer_text(page) == "Answer 3 to One?"
    assert bodies[-1]["messages"] == bodies[0]["messages"]
    turn(page, 0).get_by_role("button", name="Version before").click()
    expect(asked(page)).to_have_text(["One?", "Two?"])
    assert answer_text(page, 0) == "Answer 1 to One?"
    expect(draft(page)).to_have_value("Two, not asked yet")


def test_the_editor_by_keyboard(watched: Watched) -> None:
    """ArrowUp in the empty composer edits the last question, Shift+Enter starts a line, Escape leaves it as it was."""
    page = watched.page
    answer_each(page)
    box = page.get_by_label("Your question")
    box.press("ArrowUp")
    expect(draft(page)).to_be_hidden()  # there is no question yet
    ask_and_wait(page, "One?")
    ask_and_wait(page, "Two?")
    box.fill("typed")
    box.press("ArrowUp")
    expect(box).to_be_focused()
    box.fill("")
    box.press("ArrowUp")
    expect(draft(page)).to_be_focused()
    expect(draft(page)).to_have_value("Two?")
    draft(page).press("Shift+Enter")
    draft(page).type("more")
    expect(draft(page)).to_have_value("Two?\nmore")
    draft(page).press("Escape")
    expect(draft(page)).to_be_hidden()
    expect(turn(page, 1).get_by_role("button", name="Edit", exact=True)).to_be_focused()
    expect(asked(page)).to_have_text(["One?", "Two?"])
    page.keyboard.press("Enter")
    draft(page).press("Enter")  # unchanged: nothing is asked
    expect(draft(page)).to_be_hidden()
    expect(page.locator(".ss-siblings:visible")).to_have_count(0)
    page.keyboard.press("Enter")
    draft(page).fill("Two, changed?")
    draft(page).press("Enter")
    expect(asked(page)).to_have_text(["One?", "Two, changed?"])
    expect(box).to_be_focused()


def test_a_stopped_answer_is_continued_in_its_bubble_also_through_a_reload(watched: Watched) -> None:
    """The continuation begins after exactly the text that the stop kept, and a reload in its middle loses nothing."""
    page = watched.page
    slow_down(page, 8)
    ask(page, "Something long")
    wait_for_text(page, 60)
    page.get_by_role("button", name="Stop").click()
    wait_for_status(page, "Stopped")
    bodies = post_bodies(page)
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    wait_for_record(page, "turn.earlier.length === 1 && turn.text.length > 20")
    (kept,) = stored_turns(page)
    begun = kept["earlier"][0]["text"]
    assert bodies[0]["continue_final_message"] is True
    assert bodies[0]["messages"] == [
        {"role": "user", "content": "Something long"},
        {"role": "assistant", "content": begun},
    ]
    page.reload()
    slow_down(page, None)
    wait_for_status(page, "Answer complete")
    (whole,) = stored_turns(page)
    assert whole["earlier"][0]["text"] == begun
    assert whole["streamId"] != whole["earlier"][0]["streamId"]
    assert whole["text"] == log_text(server_log(page, whole["streamId"]))
    expect(page.locator(".ss-turn")).to_have_count(1)
    expect(page.locator(".ss-siblings:visible")).to_have_count(0)


def test_an_answer_that_ended_at_its_length_is_continued(watched: Watched) -> None:
    """The next question is asked after the whole answer."""
    page = watched.page
    bodies = post_bodies(page)
    parts = [fake_answer("Half of the", ending=LENGTH), fake_answer(" answer.")]
    page.route("**/streams", lambda route: route.fulfill(**parts[min(len(bodies), 2) - 1]))
    ask(page, "Why?")
    expect(notice(page)).to_contain_text("Ended at the length limit")
    page.get_by_role("button", name="Continue").click()
    wait_for_status(page, "Answer complete")
    expect(page.locator(".ss-body p")).to_have_text(["Half of the answer."])
    expect(notice(page)).to_be_hidden()
    ask(page, "And then?")
    expect(page.locator(".ss-foot:visible")).to_have_count(2)
    assert [message["content"] for message in bodies[2]["messages"]] == ["Why?", "Half of the answer.", "And then?"]


def test_a_continuation_that_is_refused_takes_nothing_back(watched: Watched) -> None:
    """The reason is shown beside the text, which stays, through a reload too; it is not offered again."""
    page = watched.page
    watched.expect_complaint("400")
    page.route("**/streams", lambda route: route.fulfill(**fake_answer("Half of the", ending=LENGTH)), times=1)
    ask(page, "Why?")
    expect(notice(page)).to_contain_text("Ended at the length limit")
    error = {"error": {"code": "unsupported_parameter", "message": "This server does not continue a message."}}
    page.route(
        "**/streams",
        lambda route: route.fulfill(status=400, body=json.dumps(error), content_type="application/json"),
    )
    page.get_by_role("button", name="Continue").click()
    expect(notice(page)).to_contain_text("This server does not continue a message.")
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()
    assert answer_text(page) == "Half of the"
    page.reload()
    expect(notice(page)).to_contain_text("This server does not continue a message.")
    assert answer_text(page) == "Half of the"
    expect(page.get_by_role("button", name="Answer again")).to_be_visible()


def test_a_pipelines_answer_is_not_continued(watched: Watched) -> None:
    """It would write another answer after the first. The picker has its title; what is asked is its name."""
    page = watched.page
    bodies = post_bodies(page)
    page.route("**/streams", lambda route: route.fulfill(**fake_answer("Half of the", ending=LENGTH)))
    page.get_by_role("combobox", name="Model").select_option(label="Help desk")
    ask(page, "Why?")
    expect(notice(page)).to_contain_text("Ended at the length limit")
    assert bodies[0]["model"] == "billing"
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()
    expect(page.get_by_role("button", name="Answer again")).to_be_visible()


def test_another_tab_sees_branches_and_follows_a_continuation(watched: Watched) -> None:
    """What one tab continues grows in the other one too, and both end with the same text."""
    page = watched.page
    slow_down(page, 8)
    ask(page, "Something long")
    wait_for_text(page, 60)
    page.keyboard.press("Escape")
    wait_for_status(page, "Stopped")
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.get_by_text("Stopped", exact=True).first).to_be_visible()
    length = len(answer_text(other))
    page.get_by_role("button", name="Continue").click()
    wait_for_text(other, length + 20)
    other.get_by_role("button", name="Stop").click()
    wait_for_status(other, "Stopped")
    slow_down(page, None)
    wait_for_status(page, "Stopped")
    for one in (page, other):
        one.wait_for_function("() => document.querySelectorAll('.ss-turn').length === 1")
    (stored,) = stored_turns(page)
    assert stored["state"] == "stopped"
    assert len(stored["earlier"]) == 1


def test_a_long_question_is_folded(watched: Watched) -> None:
    page = watched.page
    answer_each(page)
    ask_and_wait(page, "word " * 400)
    more = page.get_by_role("button", name="Show more")
    expect(more).to_have_attribute("aria-expanded", "false")
    height = "document.querySelector('.ss-question p').getBoundingClientRect().height"
    folded = page.evaluate(height)
    more.press("Enter")
    less = page.get_by_role("button", name="Show less")
    expect(less).to_have_attribute("aria-expanded", "true")
    assert page.evaluate(height) > folded * 1.5
    less.click()
    assert page.evaluate(height) == folded


def test_the_branch_shown_is_exported_as_markdown(watched: Watched) -> None:
    """A file of the browser's own history, made without a request."""
    page = watched.page
    bodies = answer_each(page)
    export = page.get_by_role("button", name="Export this chat as Markdown")
    expect(export).to_be_hidden()
    ask_and_wait(page, "One?")
    edit(page, 0, "One, changed?")
    expect(page.locator(".ss-foot:visible")).to_have_count(1)
    with page.expect_download() as caught:
        export.press("Enter")
    assert caught.value.suggested_filename == "chat.md"
    text = caught.value.path().read_text(encoding="utf-8")
    assert text.endswith("## You asked\n\n> One, changed?\n\n## Answer\n\nAnswer 2 to One, changed?\n")
    assert "> One?" not in text
    assert len(bodies) == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_branches(browser: Browser, site: str, scheme: Any) -> None:
    """On a phone, with versions, an open editor, a folded question, the button that continues; nothing is too wide."""
    with watching(
        browser, site, color_scheme=scheme, viewport={"width": 360, "height": 720}, is_mobile=True, has_touch=True
    ) as watched:
        page = watched.page
        page.goto(site)
        answer_each(page)
        ask_and_wait(page, "word " * 400)
        turn(page, 0).get_by_role("button", name="Answer again").click()
        expect(page.get_by_role("group", name="Version 2 of 2")).to_be_visible()
        expect(page.locator(".ss-foot:visible")).to_have_count(1)
        page.unroute("**/streams")
        page.route("**/streams", lambda route: route.fulfill(**fake_answer("Half", ending=LENGTH)))
        ask(page, "Two?")
        expect(page.get_by_role("button", name="Continue")).to_be_visible()
        assert axe_violations(page) == []
        turn(page, 1).get_by_role("button", name="Edit", exact=True).click()
        assert axe_violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 360

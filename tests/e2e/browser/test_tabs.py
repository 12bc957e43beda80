"""Two tabs of one browser: one conversation, each answer written by one tab, and none destroyed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.servers.browser import (
    ADMIN_NAME,
    ADMIN_PASSWORD,
    Watched,
    answer_text,
    ask,
    log_text,
    record_names,
    server_log,
    shorten_answers,
    slow_down,
    stored_turns,
    wait_for_status,
    wait_for_text,
    watching,
)

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

SECONDS = 60.0

# Over plain http on a network address there are no Web Locks, and the tabs ask each other.
NO_LOCKS = "Object.defineProperty(Navigator.prototype, 'locks', { value: undefined });"

# What this tab stores reaches the storage when `letGo` is called: until then no other tab sees it.
HOLD_BACK = """() => {
  const { setItem } = Storage.prototype;
  const held = [];
  Storage.prototype.setItem = function (...pair) {
    held.push([this, pair]);
  };
  window.letGo = () => {
    Storage.prototype.setItem = setItem;
    for (const [storage, pair] of held) setItem.apply(storage, pair);
  };
}"""

# Set `news`: whether this tab shows the answer as finished, just after it has read an unfinished record.
LISTEN = """() => {
  window.news = new Promise((resolve) => {
    window.addEventListener('storage', ({ newValue }) => {
      if (newValue?.includes('"state":"streaming"')) resolve(!document.querySelector('.ss-foot').hidden);
    });
  });
}"""

# Store the answer as its owner does while it is still reading.
STORE_AS_UNFINISHED = """(name) => {
  const turn = JSON.parse(localStorage.getItem(name));
  const unfinished = { ...turn, state: 'streaming', text: turn.text.slice(0, 60), revision: turn.revision + 1 };
  localStorage.setItem(name, JSON.stringify(unfinished));
}"""


@pytest.fixture(params=["locks", pytest.param("no locks", marks=pytest.mark.proof)])
def tabs(request: pytest.FixtureRequest, browser: Browser, site: str) -> Iterator[tuple[Page, Page]]:
    """Two tabs, both opened before anything is asked. None may show an error."""
    with watching(browser, site) as watched:
        if request.param == "no locks":
            watched.page.context.add_init_script(NO_LOCKS)
        first, second = watched.page, watched.page.context.new_page()
        for page in (first, second):
            page.goto(site)
        yield first, second
        for page in (first, second):
            if not page.is_closed():
                assert page.locator(".ss-notice.is-error:visible").count() == 0


def questions(page: Page) -> list[str]:
    return page.locator(".ss-question p").all_inner_texts()


def expect_stored(page: Page, count: int) -> None:
    """Wait until so many answers are stored, each as the server has it: another tab may still have to write it."""
    until = time.monotonic() + SECONDS
    while [turn["state"] for turn in stored_turns(page)] != ["done"] * count:
        assert time.monotonic() < until, stored_turns(page)
        page.wait_for_timeout(50)
    for turn in stored_turns(page):
        assert turn["text"] == log_text(server_log(page, turn["streamId"]))


def assert_whole(page: Page) -> None:
    """Every stored answer is the server's, and the page shows as many."""
    expect_stored(page, len(stored_turns(page)))
    turns = stored_turns(page)
    expect(page.locator(".ss-turn")).to_have_count(len(turns))
    for index in range(len(turns)):
        assert answer_text(page, index).strip() != ""


def test_asking_in_both_tabs_destroys_no_answer(tabs: tuple[Page, Page]) -> None:
    """Tab 1 shows what tab 2 asked, and adds to it: both tabs and the storage keep both answers."""
    first, second = tabs
    shorten_answers(first)
    ask(second, "Asked in tab 2")
    wait_for_status(second, "Answer complete")
    expect(first.locator(".ss-foot")).to_be_visible()
    assert answer_text(first) == answer_text(second)
    ask(first, "Asked in tab 1")
    wait_for_text(first, 20)
    wait_for_status(first, "Answer complete")
    expect(second.locator(".ss-foot:visible")).to_have_count(2)
    for page in tabs:
        assert questions(page) == ["Asked in tab 2", "Asked in tab 1"]
        assert_whole(page)
    first.reload()
    assert_whole(first)


def test_another_tab_follows_and_takes_over_when_the_first_one_closes(tabs: tuple[Page, Page]) -> None:
    """The follower shows the answer while it grows; after the owner is gone it finishes and stores it."""
    first, second = tabs
    slow_down(first, 8)
    slow_down(second, 8)
    ask(first, "Something long")
    wait_for_text(second, 60)
    first.close()
    slow_down(second, None)
    wait_for_status(second, "Answer complete")
    expect(second.locator(".ss-foot")).to_be_visible()
    second.wait_for_function('() => Object.values(localStorage).some((text) => text.includes(\'"state":"done"\'))')
    assert_whole(second)


def test_a_follower_that_is_ahead_of_the_owner_keeps_the_end(tabs: tuple[Page, Page]) -> None:
    """What a slower owner stores while it is still reading does not take back the end that the follower shows."""
    first, second = tabs
    shorten_answers(first)
    ask(first, "Something long")
    for page in tabs:
        wait_for_status(page, "Answer complete")
        expect(page.locator(".ss-foot")).to_be_visible()
    (name,) = record_names(second)
    whole = answer_text(second)
    first.wait_for_function('(name) => localStorage.getItem(name).includes(\'"state":"done"\')', arg=name)
    second.evaluate(LISTEN)
    first.evaluate(STORE_AS_UNFINISHED, name)
    assert second.evaluate("window.news")
    assert answer_text(second) == whole


def test_questions_asked_at_the_same_time_are_both_kept(tabs: tuple[Page, Page]) -> None:
    """Neither tab knows of the other's question when it asks its own: each shows its own, beside the other."""
    first, second = tabs
    ask(first, "Hello")  # a visitor's first question makes the session that both tabs share
    for page in tabs:
        expect(page.locator(".ss-foot:visible")).to_have_count(1, timeout=60_000)
        page.evaluate(HOLD_BACK)
        slow_down(page, 8)  # neither answer ends before both questions are stored
    ask(first, "Asked by first")
    ask(second, "Asked by second")
    assert questions(first) == ["Hello", "Asked by first"]
    assert questions(second) == ["Hello", "Asked by second"]
    for page in tabs:
        page.evaluate("window.letGo()")
        slow_down(page, None)
    for page, own in ((first, "Asked by first"), (second, "Asked by second")):
        expect(page.locator(".ss-foot:visible")).to_have_count(2, timeout=60_000)
        assert questions(page) == ["Hello", own]
    expect_stored(first, 3)
    hello, *asked = stored_turns(first)
    assert [turn["parent"] for turn in asked] == [hello["id"]] * 2
    assert sorted(turn["question"] for turn in asked) == ["Asked by first", "Asked by second"]


def test_a_question_stays_in_the_composer_while_another_tab_is_answered(tabs: tuple[Page, Page]) -> None:
    """One answer at a time, as in one tab: Enter sends the question when that answer has ended."""
    first, second = tabs
    slow_down(first, 8)
    slow_down(second, 8)
    ask(first, "Asked by first")
    expect(second.get_by_role("button", name="Stop")).to_be_visible()
    ask(second, "Asked by second")
    expect(second.get_by_label("Your question")).to_have_value("Asked by second")
    assert questions(second) == ["Asked by first"]
    wait_for_text(second, 60)
    second.get_by_role("button", name="Stop").click()
    wait_for_status(second, "Stopped")
    second.get_by_label("Your question").press("Enter")
    for page in tabs:
        expect(page.locator(".ss-question p")).to_have_text(["Asked by first", "Asked by second"])


def test_a_stop_in_the_following_tab_stops_both(tabs: tuple[Page, Page]) -> None:
    first, second = tabs
    slow_down(first, 8)
    slow_down(second, 8)
    ask(first, "Something long")
    wait_for_text(second, 60)
    second.get_by_role("button", name="Stop").click()
    wait_for_status(second, "Stopped")
    slow_down(first, None)
    wait_for_status(first, "Stopped")
    (turn,) = stored_turns(first)
    assert turn["state"] == "stopped"
    assert turn["finishReason"] == "cancelled"


def test_a_new_chat_in_one_tab_leaves_the_other_its_conversation(tabs: tuple[Page, Page]) -> None:
    """Each tab reloads to its own conversation; what no tab shows is forgotten."""
    first, second = tabs
    ask(first, "The old one")
    expect(second.locator(".ss-foot:visible")).to_have_count(1, timeout=60_000)
    first.get_by_role("button", name="New chat").click()
    expect(first.get_by_text("How can we help?")).to_be_visible()
    assert questions(second) == ["The old one"]
    ask(first, "The new one")
    wait_for_text(first, 20)
    second.reload()
    assert questions(second) == ["The old one"]
    assert questions(first) == ["The new one"]
    second.get_by_role("button", name="New chat").click()
    ask(second, "Another one")
    second.wait_for_function("() => !Object.values(localStorage).some((text) => text.includes('The old one'))")
    for page in tabs:
        page.keyboard.press("Escape")
        wait_for_status(page, "Stopped")


def owners(page: Page) -> set[str]:
    """Return whose records the browser keeps: the names of users, "" for a visitor."""
    names = page.evaluate("() => [localStorage, sessionStorage].flatMap((storage) => Object.keys(storage))")
    return {name.split("/")[1] for name in names if name.startswith("streamserve.chat/")}


def leave_record(page: Page, user: str) -> None:
    """Store what a visit of that user leaves."""
    page.evaluate(
        """(key) => {
          for (const storage of [localStorage, sessionStorage]) storage.setItem(key, '1-2');
          localStorage.setItem(`${key}/1-2/000000001-1`, '{"version": 2, "question": "a", "text": "secret"}');
        }""",
        f"streamserve.chat/{user}/chat",
    )


def test_a_users_history_goes_at_logout(watched: Watched) -> None:
    """The next page for nobody, or for another user, removes it; the user's other tab shows it no more."""
    page = watched.page
    watched.expect_complaint("404")  # the admin has no icon
    leave_record(page, "")
    page.goto(f"{watched.origin}/admin/login/?next=/")
    leave_record(page, "bob")
    page.get_by_label("Username").fill(ADMIN_NAME)
    page.get_by_label("Password").fill(ADMIN_PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{watched.origin}/")
    ask(page, "Mine")
    wait_for_text(page, 20)
    page.keyboard.press("Escape")
    wait_for_status(page, "Stopped")
    assert owners(page) == {"", ADMIN_NAME}
    other = page.context.new_page()
    other.goto(f"{watched.origin}/admin/")
    other.get_by_role("button", name="Log out").click()
    expect(other.get_by_text("Logged out")).to_be_visible()
    other.goto(watched.origin)
    assert owners(other) == {""}
    expect(page.locator(".ss-turn")).to_have_count(0)

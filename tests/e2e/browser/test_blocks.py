"""What an answer has besides text, in Chromium: thoughts, tool calls, JSON, a pipeline's steps and sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.docs.demo_site import end_engines
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import (
    Watched,
    answer_text,
    ask,
    sse,
    stored_turns,
    wait_for_status,
    watching,
)
from tests.support.servers.web_servers import daphne, wait_until_ready
from tests.support.sites.pages.blocks_site import JSON, THOUGHT

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

CALL = '{"city": "Oslo", "html": "<img src=x onerror=alert(1)>"}'
SHOWN_CALL = '{\n  "city": "Oslo",\n  "html": "<img src=x onerror=alert(1)>"\n}'
SHOWN_JSON = (
    '{\n  "id": 12345678901234567890,\n  "rate": 1.50,\n  "tags": [\n    "<b>a</b>",\n    "b"\n  ],\n  "none": []\n}'
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    state = tmp_path_factory.mktemp("state")
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.support.sites.pages.blocks_site",
        "STREAMSERVE_STATE_DIR": str(state),
    }
    migrated(state)
    with daphne("project.asgi:application", env=env) as server:
        wait_until_ready(server.url)
        yield server.url
    end_engines(state)


@pytest.fixture
def seen(browser: Browser, thinking: str) -> Iterator[Watched]:
    with watching(browser, thinking) as visit:
        visit.page.goto(f"{thinking}/model/")
        yield visit


def thought(page: Page) -> str:
    """Return the thought on the page, folded or not, without the white space that its lines are joined by."""
    return " ".join((page.locator(".ss-think-body").text_content() or "").split())


def wait_for_thought(page: Page, word: str) -> None:
    expect(page.locator(".ss-think-body")).to_contain_text(word)


def test_a_thought_is_folded_and_says_how_long_it_took(seen: Watched) -> None:
    """It opens by keyboard while it grows, stays open, and is not part of the answer."""
    page = seen.page
    ask(page, "think")
    wait_for_thought(page, "thought9")
    label = page.locator(".ss-think summary")
    expect(label).to_have_text("Thinking…")
    expect(page.locator(".ss-think-body")).to_be_hidden()
    wait_for_status(page, "Thinking…")
    label.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".ss-think-body")).to_be_visible()
    wait_for_status(page, "Answer complete")
    assert (label.inner_text().removeprefix("Thought for ").removesuffix(" s")).isdecimal()
    expect(page.locator(".ss-think-body")).to_be_visible()
    expect(label).to_be_focused()
    assert thought(page) == THOUGHT
    assert page.locator(".ss-text").inner_text() == "Two and two make four."
    (turn,) = stored_turns(page)
    assert turn["text"].strip() == "Two and two make four."


def test_a_reload_within_a_thought_continues_it(seen: Watched) -> None:
    page = seen.page
    ask(page, "think")
    wait_for_thought(page, "thought20")
    page.reload()
    wait_for_thought(page, "thought40")
    expect(page.locator(".ss-think summary")).to_have_text("Thinking…")
    wait_for_status(page, "Answer complete")
    assert thought(page) == THOUGHT
    assert page.locator(".ss-text").inner_text() == "Two and two make four."
    page.reload()
    expect(page.locator(".ss-text")).to_have_text("Two and two make four.")
    assert thought(page) == THOUGHT


def test_a_stop_within_a_thought_keeps_what_was_shown(seen: Watched) -> None:
    page = seen.page
    ask(page, "think")
    wait_for_thought(page, "thought15")
    page.keyboard.press("Escape")
    wait_for_status(page, "Stopped")
    kept = thought(page)
    assert THOUGHT.startswith(kept)
    assert 100 < len(kept) < len(THOUGHT)
    expect(page.locator(".ss-think summary")).to_contain_text("Thought")
    expect(page.get_by_role("button", name="Answer again")).to_be_visible()
    expect(page.get_by_role("button", name="Copy", exact=True)).to_be_hidden()
    page.reload()
    expect(page.locator(".ss-think summary")).to_contain_text("Thought")
    assert thought(page) == kept
    ask(page, "json")  # the stopped answer is not sent as a message
    wait_for_status(page, "Answer complete")


def test_a_second_tab_shows_the_same_thought(seen: Watched) -> None:
    page = seen.page
    ask(page, "think")
    wait_for_thought(page, "thought9")
    other = page.context.new_page()
    other.goto(page.url)
    wait_for_status(other, "Answer complete")
    assert thought(other) == THOUGHT


def stream(*events: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what `route.fulfill` needs to answer a question with these events."""
    headers = {"Content-Type": "text/event-stream", "X-Stream-Id": "0" * 32}
    return {"status": 200, "body": sse(("meta", {"model": "echo"}), *events), "headers": headers}


def test_a_call_is_named_and_its_arguments_are_shown_as_they_are(seen: Watched) -> None:
    """The arguments are JSON, formatted, and never elements; the call is part of the stored turn."""
    page = seen.page
    block: dict[str, Any] = {"choice": 0, "index": 1, "kind": "tool_use", "id": "call_1", "name": "get_weather"}
    tokens = [("token", {"text": CALL[at : at + 5], "index": 1, "choice": 0}) for at in range(0, len(CALL), 5)]
    done = ("done", {"finish_reason": "tool_calls", "totalTokens": 9, "latency": 0.5})
    answer = stream(("block_start", block), *tokens, ("block_stop", {"choice": 0, "index": 1}), done)
    page.route("**/streams", lambda route: route.fulfill(**answer))
    ask(page, "weather")
    wait_for_status(page, "Answer complete")
    box = page.locator(".ss-tool")
    assert box.locator(".ss-code-label").inner_text() == "Tool call · get_weather"
    assert box.locator("code").text_content() == SHOWN_CALL
    assert page.locator(".ss-body img").count() == 0
    page.reload()
    assert page.locator(".ss-tool code").text_content() == SHOWN_CALL
    (turn,) = stored_turns(page)
    assert [(one["kind"], one["text"], one["isOpen"]) for one in turn["blocks"]] == [("tool_use", CALL, False)]
    assert turn["text"] == ""


def test_a_result_is_named_after_its_call(seen: Watched) -> None:
    """It is no call, and both are named also after a reload."""
    page = seen.page
    call = {"choice": 0, "index": 0, "kind": "server_tool_use", "id": "call_1", "name": "get_weather"}
    result = {"choice": 0, "index": 1, "kind": "tool_result", "id": "call_1"}
    answer = stream(
        ("block_start", call),
        ("token", {"text": "{}", "index": 0, "choice": 0}),
        ("block_stop", {"choice": 0, "index": 0}),
        ("block_start", result),
        ("token", {"text": '{"sky": "rain"}', "index": 1, "choice": 0}),
        ("block_stop", {"choice": 0, "index": 1}),
        ("done", {"finish_reason": "stop", "totalTokens": 9, "latency": 0.5}),
    )
    page.route("**/streams", lambda route: route.fulfill(**answer))
    ask(page, "weather")
    wait_for_status(page, "Answer complete")
    labels = ["Tool call · get_weather", "Tool result · get_weather"]
    expect(page.locator(".ss-tool .ss-code-label")).to_have_text(labels)
    page.reload()
    expect(page.locator(".ss-tool .ss-code-label")).to_have_text(labels)


def test_a_call_is_shown_as_it_streams(seen: Watched) -> None:
    """Half of the arguments are formatted like the whole; a reader far behind gets both by a snapshot."""
    page = seen.page
    half = CALL[: CALL.index("<img") + 4]
    blocks = [
        {"index": 0, "kind": "thinking", "text": "Hm."},
        {"index": 1, "kind": "tool_use", "text": half, "id": "call_1", "name": "get_weather", "is_open": True},
    ]
    answer = stream(("snapshot", {"text": "", "seq": 2, "blocks": blocks}))
    page.route("**/streams", lambda route: route.fulfill(**answer))
    page.route("**/events", lambda route: None)  # the rest is still to come
    ask(page, "anything")
    expect(page.locator(".ss-tool.is-calling")).to_be_visible()
    assert page.locator(".ss-tool code").text_content() == SHOWN_CALL[: SHOWN_CALL.index("<img") + 4]
    assert page.locator(".ss-think summary").inner_text() == "Thought"


def test_an_answer_in_json_is_formatted(seen: Watched) -> None:
    """Its own characters with other white space: long numbers stay exact, and markup is text."""
    page = seen.page
    ask(page, "json")
    wait_for_status(page, "Answer complete")
    assert page.locator(".ss-json code").text_content() == SHOWN_JSON
    assert stored_turns(page)[0]["text"] == JSON
    page.get_by_role("button", name="New chat").click()
    ask(page, "{no object} at all")  # the echo engine answers with the question
    wait_for_status(page, "Answer complete")
    assert answer_text(page) == "{no object} at all"


def test_a_pipelines_steps_and_sources_are_shown(browser: Browser, thinking: str) -> None:
    """Steps are announced; sources are numbered once each; only addresses of the web and of this site are links."""
    with watching(browser, thinking) as visit:
        page = visit.page
        page.goto(f"{thinking}/pipeline/")
        page.evaluate(
            """() => {
              window.said = [];
              const region = document.querySelector('[data-ss="status"]');
              new MutationObserver(() => said.push(region.textContent)).observe(region, { childList: true });
            }"""
        )
        ask(page, "Why is my bill higher?")
        wait_for_status(page, "Answer complete")
        assert page.evaluate("said.filter((text) => text.startsWith('Step'))") == [
            "Step 1 of 2: Looking up",
            "Step 2 of 2: Writing",
        ]
        assert page.locator(".ss-text").inner_text() == "See the prices."
        expect(page.locator(".ss-notes")).to_contain_text("of 5 passages")
        items = page.locator(".ss-sources li").all_inner_texts()
        assert [item.split()[0] for item in items] == ["Prices", "<b>Elsewhere</b>", *["bad"] * 4]
        links = page.locator(".ss-sources a")
        hrefs = [link.get_attribute("href") for link in links.all()]
        assert hrefs == [f"{thinking}/help/7/", "https://example.com/a?b=c"]
        page.reload()
        expect(links).to_have_count(2)

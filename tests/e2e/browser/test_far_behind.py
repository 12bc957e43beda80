"""The chat page far behind its answer, or after a going-away event: it shows the whole text once, and no alarm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route

from tests.support.docs.demo_site import end_engines, environment
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import (
    ask,
    log_text,
    server_log,
    sse,
    stored_turns,
    wait_for_status,
    wait_for_text,
    watching,
)
from tests.support.servers.web_servers import daphne, wait_until_ready

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.pages.far_behind_site"}
# What a device switched off long ago holds: an early event, and text that no token can mend.
STALE = """
for (const name of Object.keys(localStorage).filter((name) => name.split("/").length === 5)) {
  const stored = JSON.parse(localStorage.getItem(name));
  stored.text = "STALE";
  stored.lastId = stored.lastId.replace(/-[0-9]+$/, "-2");
  localStorage.setItem(name, JSON.stringify(stored));
}
"""
ALARMS = """
window.alarms = [];
addEventListener("DOMContentLoaded", () => new MutationObserver(() => {
  const text = document.body.innerText;
  if (text.includes("Connection lost")) window.alarms.push(text);
}).observe(document.body, { subtree: true, childList: true, attributes: true, characterData: true }));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("state")
    migrated(folder)
    with daphne("project.asgi:application", env=environment(folder, **SETTINGS)) as server:
        wait_until_ready(server.url)
        yield server.url
    end_engines(folder)


def test_a_snapshot_replaces_what_is_shown(browser: Browser, site: str) -> None:
    """A page that holds an early part of a running answer replaces it by the log's text."""
    with watching(browser, site) as visit:
        page = visit.page
        page.goto(site)
        ask(page, "Something long")
        wait_for_text(page, 120)
        late = page.context.new_page()
        late.add_init_script(STALE)
        late.goto(site)
        wait_for_text(late, 200)
        page.goto("about:blank")  # else it stores what it shows, in other pieces
        late.get_by_role("button", name="Stop").click()
        wait_for_status(late, "Stopped")
        (turn,) = stored_turns(late)
        log = server_log(late, turn["streamId"], after=2)
        assert (log[0]["type"], log[-1]["type"]) == ("snapshot", "done")
        assert turn["text"] == log_text([event for event in log if event["seq"] <= log[-1]["data"]["kept_seq"]])
        assert "STALE" not in shown(late)


def shown(page: Page) -> str:
    """Return the answer's words on screen."""
    return " ".join(page.locator(".ss-turn .ss-body").last.inner_text().split())


def test_going_away_is_no_alarm(browser: Browser, site: str) -> None:
    """The page reconnects by itself after the last event it has, without an alarm."""
    first = [("meta", {"model": "echo", "stream_id": "0" * 32, "created": 0}), token("Half "), token("an ")]
    bye = {"id": "0" * 32, "after": 3, "event_id": "aaaaaaaaaaaa-3", "retry": 600}
    farewell = f"event: farewell\nretry: 600\ndata: {json.dumps(bye)}\n\n"
    done = ("done", {"finish_reason": "stop", "totalTokens": 3, "latency": 0.5, "breakdown": {"ttft": 0.1}})
    rest = sse(*first, token("answer."), done).partition("id: aaaaaaaaaaaa-3\n")[2].partition("\n\n")[2]
    asked: list[str | None] = []
    head = {"Content-Type": "text/event-stream", "X-Stream-Id": "0" * 32}

    def go_on(route: Route) -> None:
        asked.append(route.request.headers.get("last-event-id"))
        route.fulfill(status=200, body=rest, headers={**head, "Streamserve-From": "4"})

    with watching(browser, site) as visit:
        page = visit.page
        page.add_init_script(ALARMS)
        page.route("**/streams", lambda route: route.fulfill(status=200, body=sse(*first) + farewell, headers=head))
        page.route("**/events", go_on)
        page.goto(site)
        ask(page, "Anything")
        wait_for_status(page, "Answer complete")
        assert shown(page) == "Half an answer."
        assert asked == ["aaaaaaaaaaaa-3"]
        assert page.evaluate("window.alarms") == []


def token(text: str) -> tuple[str, dict[str, Any]]:
    return "token", {"text": text, "token_ids": [1], "index": 0, "choice": 0}

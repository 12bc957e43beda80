"""What the chat page acknowledges: the text that it shows, and whether its tab is hidden."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Page, Response

from tests.support.servers.browser import Watched, ask, stored_turns, wait_for_status, wait_for_text

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

# The tab is hidden, or shown again, as far as the page can tell.
HIDE = """(isHidden) => {
  Object.defineProperty(document, 'hidden', { get: () => isHidden, configurable: true });
  document.dispatchEvent(new Event('visibilitychange'));
}"""

# Acks with a clock of the test's: what is sent after each step [clock, method, argument].
RUN_ACKS = """async (steps) => {
  const chat = document.querySelector('script[type=module][src*="chat"]');
  const { Acks } = await import(chat.src.replace('chat.js', 'acks.js'));
  const sent = [];
  let clock = 0;
  const acks = new Acks((ack) => Promise.resolve(sent.push(ack) && ack.seq < 1000), () => clock);
  const counts = [];
  for (const [at, method, argument] of steps) {
    clock = at;
    acks[method](argument);
    await Promise.resolve().then(() => {}).then(() => {}).then(() => {});
    counts.push(sent.length);
  }
  acks.end();
  return { sent, counts };
}"""


def acks_of(page: Page) -> list[Response]:
    """Collect the answers to the page's acknowledgements from now on."""
    seen: list[Response] = []
    page.on("response", lambda response: seen.append(response) if response.url.endswith("/ack") else None)
    return seen


def bodies(seen: list[Response]) -> list[dict[str, Any]]:
    return [response.request.post_data_json for response in seen]


def test_the_page_acknowledges_what_it_shows(watched: Watched) -> None:
    """A few times while the answer comes, each time more, never more than came; the server counts each."""
    page = watched.page
    seen = acks_of(page)
    ask(page, "Tell me a long story")
    wait_for_status(page, "Answer complete")
    last_seq = int(stored_turns(page)[-1]["lastId"].rpartition("-")[2])
    seqs = [body["seq"] for body in bodies(seen)]
    assert len(seqs) >= 3
    assert all(before < after for before, after in pairwise(seqs))
    assert seqs[-1] <= last_seq
    assert len({body["reader"] for body in bodies(seen)}) == 1
    assert not any(body["away"] for body in bodies(seen))
    # The last one may reach the server after the connection has ended.
    assert [response.json() for response in seen[:-1]] == [{"counted": True}] * (len(seen) - 1)


def test_a_hidden_tab_says_so(watched: Watched) -> None:
    """It is away from then on, its answer is still made to the end, and it is back when it is shown again."""
    page = watched.page
    seen = acks_of(page)
    ask(page, "Tell me a long story")
    wait_for_text(page, 40)
    page.evaluate(HIDE, True)
    with page.expect_response(
        lambda response: response.url.endswith("/ack") and '"away":true' in response.request.post_data
    ):
        pass
    page.evaluate(HIDE, False)
    with page.expect_response(
        lambda response: response.url.endswith("/ack") and '"away":false' in response.request.post_data
    ):
        pass
    page.evaluate(HIDE, True)
    wait_for_status(page, "Answer complete")
    turns = [body["away"] for body in bodies(seen)]
    assert [after for before, after in pairwise([None, *turns]) if after is not before][:3] == [False, True, False]
    assert stored_turns(page)[-1]["finishReason"] in {"stop", "length"}


def test_acknowledgements_are_few(watched: Watched) -> None:
    """One a second, sooner for 64 events or a tab that turns; one at a time; none once they do not count."""
    steps = [
        [0.0, "shown", 1],  # before there is a connection
        [0.0, "begin", "r"],
        [0.0, "shown", 1],
        [0.1, "shown", 9],
        [0.9, "shown", 20],
        [1.0, "shown", 21],
        [1.1, "shown", 90],
        [1.3, "shown", 91],
        [1.4, "lookAway", True],
        [1.6, "lookAway", True],
        [1.7, "lookAway", False],
        [1.8, "lookAway", True],  # back in time: there is nothing to say
        [9.0, "shown", 91],
        [9.1, "shown", 1000],
        [99.0, "shown", 2000],  # the one before did not count
        [99.0, "begin", "s"],
        [99.0, "shown", 3],
    ]
    result = watched.page.evaluate(RUN_ACKS, steps)
    assert result["counts"] == [0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 6]
    assert [(ack["reader"], ack["seq"], ack["away"]) for ack in result["sent"]] == [
        ("r", 1, False),
        ("r", 21, False),
        ("r", 91, False),
        ("r", 91, True),
        ("r", 1000, True),
        ("s", 3, True),
    ]

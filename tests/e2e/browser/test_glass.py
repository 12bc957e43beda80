"""From GPU to glass, against a client that sees packets: each planted delay shows in the right number.

A relay between reader and server delays the request or the answer, buffers it, or stalls it; the page is slow to
render; the engine is busy. Each answer is compared with the same without a plant: the number that grew most is the
right one. The reader is the chat page in Chromium, or client.js on Node.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.e2e.browser.test_acks import HIDE
from tests.support.plugins.migrated import KEY, Migrate
from tests.support.servers.browser import ask, echo_site, stored_turns, wait_for_status, wait_for_text, watching
from tests.support.servers.node import node_of_tests
from tests.support.servers.slow_relay import Plan, SlowRelay, slow_relay
from tests.support.servers.web_servers import ROOT

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

SETTINGS = "tests.support.sites.pages.glass_site"
PLANTED = 1.2  # seconds: more than a busy machine adds by itself
GREW = PLANTED / 2
UNHINDERED, IDLE = Plan(), nullcontext()
# How far the page's own figure may be from what its reader saw: some frames of a busy machine.
TOLERANCE = 0.3

# What the reader sees, apart from our measuring: when the page asks, and when text is first and last on the screen.
# With `slow` each change of the answer's text costs the page so many milliseconds.
WATCH = """([slow]) => {
  const seen = (window.seen = { asked: null, first: null, last: null });
  const { fetch } = window;
  window.fetch = (url, options) => {
    if (options?.method === 'POST' && String(url).endsWith('/streams')) seen.asked = performance.now();
    return fetch(url, options);
  };
  let length = 0;
  new MutationObserver(() => {
    const now = document.querySelector('.ss-turn .ss-body')?.innerText.length ?? 0;
    if (now === length) return;
    length = now;
    const end = performance.now() + slow;
    while (performance.now() < end);
    requestAnimationFrame(() => {
      seen.first ??= performance.now();
      seen.last = performance.now();
    });
  }).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""

ASK = """
import { ask } from "streamserve-client";
const [url, key, slow] = [process.env.SITE, process.env.KEY, Number(process.env.SLOW)];
const headers = { Authorization: `Bearer ${key}` };
const answer = ask({ url: `${url}/streams`, body: { prompt: "Tell me a story." }, headers });
let isFirst = true;
for await (const { type } of answer) {
  if (type !== "token" || !isFirst) continue;
  isFirst = false;
  const end = performance.now() + slow;
  while (performance.now() < end);
}
console.log(answer.streamId);
"""


@pytest.fixture(scope="module")
def glass_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def glass_site(glass_state: Path, migrated: Migrate) -> Iterator[str]:
    with echo_site(SETTINGS, glass_state, migrated) as url:
        yield url


@pytest.fixture(scope="module")
def key() -> str:
    return KEY


@pytest.fixture(scope="module")
def relay(glass_site: str) -> Iterator[SlowRelay]:
    with slow_relay(glass_site, "POST /streams ") as relay:
        yield relay


@contextmanager
def busy_engine(site: str, key: str) -> Iterator[None]:
    """Have another answer run: the next one waits in the engine's queue until it ends."""
    body = json.dumps({"prompt": "Keep it busy.", "max_tokens": int(4 * PLANTED / 0.02), "ignore_eos": True}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{site}/streams", body, headers)) as answer:
        while b"event: token" not in answer.readline():
            pass
        yield


def on_page(
    browser: Browser, relay: SlowRelay, *, slow: float = 0.0, busy: AbstractContextManager[None] = IDLE
) -> dict[str, Any]:
    """Ask in the chat page; return the reader's times as the server keeps them, with what the page saw itself."""
    with watching(browser, relay.url) as watched:
        page = watched.page
        page.goto(relay.url)
        page.evaluate(WATCH, [slow * 1000])
        with busy, page.expect_response(lambda response: response.url.endswith("/timings")):
            ask(page, "Tell me a story.")
            wait_for_status(page, "Answer complete")
        (turn,) = stored_turns(page)
        state = page.request.get(f"{relay.url}/streams/{turn['streamId']}").json()
        seen = page.evaluate("[(seen.first - seen.asked) / 1000, (seen.last - seen.asked) / 1000]")
        return {**state["reader"], "seen": seen, "ttft": state["reader"]["first"]["server"]}


def on_node(relay: SlowRelay, key: str, folder: Path, *, slow: float = 0.0) -> dict[str, Any]:
    """Ask with client.js on Node; return the reader's times as the server keeps them."""
    modules = folder / "node_modules"
    if not modules.exists():
        modules.mkdir()
        (modules / "streamserve-client").symlink_to(ROOT / "streamserve" / "static" / "streamserve")
        (folder / "ask.mjs").write_text(ASK)
    env = {"SITE": relay.url, "KEY": key, "SLOW": str(slow * 1000), "NO_PROXY": "*"}
    done = subprocess.run(
        [node_of_tests(), "ask.mjs"], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    request = urllib.request.Request(
        f"{relay.url}/streams/{done.stdout.strip()}", headers={"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request) as answer:
        state = json.load(answer)
    return {**state["reader"], "ttft": state["reader"]["first"]["server"]}


def numbers(reader: dict[str, Any]) -> dict[str, float]:
    """Return the hops to the first token, and of the whole answer."""
    first = {f"first {name}": seconds for name, seconds in reader["first"].items()}
    return first | {f"whole {name}": seconds for name, seconds in reader["whole"].items()}


def grown(planted: dict[str, Any], usual: dict[str, Any]) -> dict[str, float]:
    """Return by how much each number grew."""
    before = numbers(usual)
    return {name: seconds - before.get(name, 0.0) for name, seconds in numbers(planted).items()}


def most(growth: dict[str, float], which: str) -> str:
    """Return the number of `which` that grew most."""
    return max((name for name in growth if name.startswith(which)), key=lambda name: growth[name])


def check_sums(reader: dict[str, Any]) -> None:
    """The hops add up to what the reader saw, to a millisecond."""
    painted = (reader.get("first_paint") or reader["first_delta"], reader.get("last_paint") or reader["ended"])
    assert sum(reader["first"].values()) == pytest.approx(painted[0], abs=0.001)
    assert sum(reader["whole"].values()) == pytest.approx(painted[1], abs=0.001)


Reader = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", params=["page", "node"])
def reader(
    request: pytest.FixtureRequest, relay: SlowRelay, key: str, tmp_path_factory: pytest.TempPathFactory
) -> Reader:
    """Ask through the relay, by a plan: in the chat page, or on Node."""
    browser: Browser = request.getfixturevalue("browser")
    folder = tmp_path_factory.mktemp("node")

    def answer(
        plan: Plan = UNHINDERED, *, slow: float = 0.0, busy: AbstractContextManager[None] = IDLE
    ) -> dict[str, Any]:
        relay.plan = plan
        if request.param == "page":
            return on_page(browser, relay, slow=slow, busy=busy)
        with busy:
            return on_node(relay, key, folder, slow=slow)

    return answer


@pytest.fixture(scope="module")
def usual(reader: Reader) -> dict[str, Any]:
    """An answer without a plant; the first one of a process loads modules."""
    reader()
    return reader()


def test_the_hops_add_up_to_what_the_reader_saw(usual: dict[str, Any]) -> None:
    """By the report to a millisecond; by what the page saw beside our measuring to some frames."""
    check_sums(usual)
    if "seen" in usual:
        assert usual["first_paint"] == pytest.approx(usual["seen"][0], abs=TOLERANCE)
        assert usual["last_paint"] == pytest.approx(usual["seen"][1], abs=TOLERANCE)


def test_a_delay_on_the_way_in_is_the_networks(reader: Reader, usual: dict[str, Any]) -> None:
    """Headers, first byte and first delta come later by it, and the server has none of it."""
    found = reader(Plan(way_in=PLANTED))
    check_sums(found)
    growth = grown(found, usual)
    assert (most(growth, "first"), most(growth, "whole")) == ("first network", "whole network")
    assert growth["first network"] > GREW
    assert growth["whole network"] > GREW
    assert found["headers"] - usual["headers"] > GREW


def test_a_delay_on_the_way_out_is_the_networks(reader: Reader, usual: dict[str, Any]) -> None:
    """The first byte comes later; the server was in time."""
    found = reader(Plan(way_out=PLANTED))
    check_sums(found)
    growth = grown(found, usual)
    assert most(growth, "first") == "first network"
    assert growth["first network"] > GREW / 2  # the server has worked meanwhile
    assert found["headers"] - usual["headers"] > GREW / 2


def test_a_proxy_that_buffers_is_the_networks(reader: Reader, usual: dict[str, Any]) -> None:
    """The headers come in time, and the first delta late, together with what was kept back."""
    found = reader(Plan(buffering=PLANTED))
    check_sums(found)
    growth = grown(found, usual)
    assert most(growth, "first") == "first network"
    assert growth["first network"] > GREW / 2
    waited = [one["first_delta"] - one["headers"] for one in (found, usual)]
    assert waited[0] - waited[1] > GREW / 2


def test_stalls_of_the_answer_are_gaps(reader: Reader, usual: dict[str, Any]) -> None:
    """The tail of the gaps grows as they came and as they were painted; the first token is not late."""
    # After some deltas: a stall is one gap, and what comes meanwhile is one delta, so stalls are the tail of the gaps.
    stalls = tuple((num_bytes, PLANTED) for num_bytes in (1000, 2500, 4000))
    found = reader(Plan(stalls=stalls))
    check_sums(found)
    growth = grown(found, usual)
    assert most(growth, "whole") == "whole network"
    assert growth["first network"] < growth["whole network"]
    assert found["gap_p95"] - usual["gap_p95"] > GREW
    if "seen" in found:
        assert found["paint_gap_p95"] - usual["paint_gap_p95"] > GREW


def test_a_slow_page_is_rendering(reader: Reader, usual: dict[str, Any]) -> None:
    """What comes in time and is shown late is the page's, also where the next text came while it was busy."""
    found = reader(slow=PLANTED)
    check_sums(found)
    assert found["render"] - usual["render"] > GREW
    growth = grown(found, usual)
    if "seen" not in found:  # on Node nothing is painted: the loop's time is no hop
        assert growth["first network"] < GREW
        return
    assert (most(growth, "first"), most(growth, "whole")) == ("first render", "whole render")
    assert growth["first render"] > GREW
    assert growth["whole render"] > GREW
    assert found["first_paint"] == pytest.approx(found["seen"][0], abs=TOLERANCE)


def test_a_tab_in_the_background_says_so(browser: Browser, relay: SlowRelay) -> None:
    """It reports that nothing was painted, with what came, instead of the time at which it is looked at again."""
    relay.plan = UNHINDERED
    with watching(browser, relay.url) as watched:
        page = watched.page
        page.goto(relay.url)
        with page.expect_response(lambda response: response.url.endswith("/timings")) as reported:
            ask(page, "Tell me a story.")
            wait_for_text(page, 20)
            page.evaluate(HIDE, True)
            wait_for_status(page, "Answer complete")
        reader = page.request.get(reported.value.url.removesuffix("/timings")).json()["reader"]
    assert reader["hidden"] is True
    assert reader["first_delta"] <= reader["first_paint"] < reader["ended"]
    assert not {"last_paint", "paint_gap_p95"} & reader.keys()
    assert "render" not in reader["whole"]
    check_sums(reader)


@pytest.mark.cut_streams("the page is left within its answer")
def test_a_page_that_is_left_reports_what_it_has(browser: Browser, relay: SlowRelay) -> None:
    """A beacon outlives its page; the answer is not ended by it, and what follows elsewhere reports nothing more."""
    relay.plan = UNHINDERED
    with watching(browser, relay.url) as watched:
        page, other = watched.page, watched.page.context.new_page()
        page.goto(relay.url)
        other.goto(f"{relay.url}/livez")
        ask(page, "Tell me a story.")
        wait_for_text(page, 20)
        (turn,) = stored_turns(page)
        address = f"{relay.url}/streams/{turn['streamId']}"
        page.goto("about:blank")
        while "reader" not in (state := other.request.get(address).json()):
            assert state["state"] in ("running", "parked", "finished")
    assert state["reader"]["first_paint"] > 0
    assert "ended" not in state["reader"]


def test_a_busy_engine_is_the_servers(reader: Reader, usual: dict[str, Any], glass_site: str, key: str) -> None:
    """The wait is in the phase `queue`, and in the server's time to the first token."""
    found = reader(busy=busy_engine(glass_site, key))
    check_sums(found)
    growth = grown(found, usual)
    assert (most(growth, "first"), most(growth, "whole")) == ("first server", "whole queue")
    assert growth["first server"] > GREW

"""The live page's numbers on a running site: each picture adds up, while answers begin, run, park and end."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.support.plugins.migrated import KEY, Migrate
from tests.support.servers.browser import ADMIN_NAME, ADMIN_PASSWORD, echo_site

pytestmark = [pytest.mark.proof, pytest.mark.timeout(300)]

SETTINGS = "tests.support.sites.pages.browser_site"
BY_KEY = {"Authorization": f"Bearer {KEY}"}
LONG = {"prompt": "hi", "max_tokens": 6000, "ignore_eos": True}
SECONDS = 60.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    """Serve the demo site with the echo engine in a process of its own."""
    state = tmp_path_factory.mktemp("state")
    with echo_site(SETTINGS, state, migrated) as url:
        yield url


@pytest.fixture
def staff(site: str) -> Iterator[httpx.Client]:
    """An administrator who is signed in."""
    with httpx.Client(base_url=site, timeout=SECONDS, trust_env=False) as client:
        client.get("/admin/login/")
        form = {"username": ADMIN_NAME, "password": ADMIN_PASSWORD, "csrfmiddlewaretoken": client.cookies["csrftoken"]}
        assert client.post("/admin/login/", data=form, headers={"referer": site}).status_code == 302
        yield client


@pytest.fixture
def pictures(staff: httpx.Client) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the pictures of the live page, as an administrator's page gets them."""
    with staff.stream("GET", "/admin/streamserve/live/events") as events:
        yield (json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: "))


def reads(site: str, stack: ExitStack, body: dict[str, Any]) -> None:
    """Ask, and read the answer in a thread until the block ends."""
    client = stack.enter_context(httpx.Client(base_url=site, timeout=SECONDS, trust_env=False))
    answer = stack.enter_context(client.stream("POST", "/streams", json=body, headers=BY_KEY))
    assert answer.status_code == 200
    stopped = threading.Event()

    def read() -> None:
        for _ in answer.iter_raw():
            if stopped.is_set():
                return

    thread = threading.Thread(target=read)
    thread.start()
    stack.callback(thread.join)
    stack.callback(stopped.set)


def assert_adds_up(picture: dict[str, Any]) -> None:
    """Each total is the sum of its parts, and of the rows."""
    rows = picture["streams"]
    assert sum(picture["by_state"].values()) == sum(picture["by_model"].values()) == len(rows)
    for model in picture["models"]:
        own = [row["state"] for row in rows if row["model"] == model["alias"]]
        assert model["streams"] == len(own) == sum(model["by_state"].values())
        assert model["by_state"] == {state: own.count(state) for state in ("starting", "running", "parked")}
        figures, points = model["figures"], model["points"]
        assert sum(model["readers"].values()) == figures["num_requests_running"]
        assert min(model["readers"].values()) >= 0
        blocks = [figures[f"kv_blocks_{name}"] for name in ("used", "cached", "free", "total")]
        assert sum(blocks[:3]) == blocks[3]
        for name in points.keys() - {"at", "ttft_of_budget"}:  # a chart ends with what is shown beside it
            assert points[name][-1] == pytest.approx(figures[name], abs=0.01), name
        if model["capacity"] is not None:
            assert sum(model["capacity"].values()) == pytest.approx(1.0, abs=2e-4)


def test_every_picture_adds_up(site: str, pictures: Iterator[dict[str, Any]]) -> None:
    """Six answers, one of them of three choices, and one whose reader has left: eight sequences, seven streams."""
    with ExitStack() as stack:
        for number in range(6):
            reads(site, stack, {**LONG, **({"n": 3} if number == 0 else {})})
        with httpx.stream("POST", f"{site}/streams", json=LONG, headers=BY_KEY, timeout=SECONDS) as left:
            next(left.iter_raw())
        until = time.monotonic() + SECONDS
        for picture in pictures:
            assert_adds_up(picture)
            [model] = picture["models"]
            figures = model["figures"]
            seen = (picture["by_state"], figures["num_requests_running"] + figures["num_requests_waiting"])
            if seen == ({"starting": 0, "running": 6, "parked": 1}, 8):
                break
            assert time.monotonic() < until, seen
    for picture in pictures:  # until the last one is gone
        assert_adds_up(picture)
        if not picture["streams"] and not picture["models"][0]["figures"]["num_requests_running"]:
            break
        for row in picture["streams"]:
            httpx.post(f"{site}/streams/{row['id']}/stop", json={}, headers=BY_KEY, timeout=SECONDS)
        assert time.monotonic() < until + SECONDS, picture


def test_every_page_gets_the_same_history(staff: httpx.Client, pictures: Iterator[dict[str, Any]]) -> None:
    """It is kept on the server: a page that is opened later begins with what the earlier page has seen."""
    first = next(pictures)
    assert first["is_whole"]
    with staff.stream("GET", "/admin/streamserve/live/events") as events:
        later = json.loads(next(line for line in events.iter_lines() if line.startswith("data: "))[6:])
    points, before = later["models"][0]["points"], first["models"][0]["points"]
    closed = len(before["at"]) - 1  # the slot of now may still change
    assert {name: column[:closed] for name, column in points.items() if name != "ttft_of_budget"} == (
        {name: column[:closed] for name, column in before.items() if name != "ttft_of_budget"}
    )
    following = next(pictures)
    assert not following["is_whole"]
    assert len(following["models"][0]["points"]["at"]) <= 6


def test_windows_are_given(pictures: Iterator[dict[str, Any]]) -> None:
    """Every rate and share names the time that it is of."""
    for picture in pictures:
        [model] = picture["models"]
        if model["capacity"] is None:
            continue
        assert (picture["window_seconds"], picture["speed_seconds"], model["rate_seconds"]) == (900, 5.0, 5.0)
        assert 0 < model["capacity_seconds"] <= picture["window_seconds"]
        return


def test_a_failed_streams_page_adds_up(site: str, staff: httpx.Client) -> None:
    """An answer whose time is over failed; on its page the phases add up to what it took, to the millisecond."""
    body = {**LONG, "timeout_seconds": 0.4}
    answer = httpx.post(f"{site}/streams", json=body, headers=BY_KEY, timeout=SECONDS)
    stream_id = answer.headers["X-Stream-Id"]
    assert "event: error" in answer.text
    until = time.monotonic() + SECONDS
    while "error: timeout" not in (page := staff.get(f"/admin/streamserve/stream/{stream_id}/change/").text):
        assert time.monotonic() < until
    took, phases = (
        [int(each) for each in re.findall(r"(\d+) ms", page.split(f"field-{name}")[1].split("</div>\n")[0])]
        for name in ("took", "phases_in_words")
    )
    assert len(phases) >= 3
    assert sum(phases) == pytest.approx(took[0], abs=len(phases))

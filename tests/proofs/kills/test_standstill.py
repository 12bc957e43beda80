"""A machine on which no process runs for a while: no engine counts as hung. An engine that alone stands still does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest

from tests.proofs.kills.test_engine_process import ask, text_of
from tests.support.docs.demo_site import end_engines, environment, processes_of
from tests.support.plugins.migrated import MAKE_KEY, prepare
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.pages.impatient_site"}
PATIENCE_SECONDS = 2.0
ASKED: dict[str, Any] = {"prompt": "tell me", "max_tokens": 150, "ignore_eos": True, "seed": 5}
# The answer is disturbed once, here: it has begun, and most of it is still to come.
DISTURBED_AT = 5


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Server]:
    """A web process and its engine, with short time-outs for each other."""
    prepare(tmp_path, MAKE_KEY)
    with daphne("project.asgi:application", env=environment(tmp_path, **SETTINGS)) as server:
        wait_until_ready(server.url)
        yield server
    end_engines(tmp_path)


def engine_of(site: Server, folder: Path) -> int:
    [engine] = processes_of(folder) - {site.process.pid}
    return engine


def disturbed(site: Server, disturb: Callable[[], None]) -> list[dict[str, Any]]:
    """Return the events of an answer during which `disturb` is called."""
    seen: list[dict[str, Any]] = []
    for event in ask(site, **ASKED):
        seen.append(event)
        if len(seen) == DISTURBED_AT:
            disturb()
    assert seen[-1]["event"] == "done"
    return seen


def test_a_machine_that_stands_still_kills_no_engine(site: Server, tmp_path: Path) -> None:
    """All processes are stopped for longer than any time-out, three times; the answers continue."""
    quiet = list(ask(site, **ASKED))
    engine = engine_of(site, tmp_path)

    def stand_still() -> None:
        for pid in (site.process.pid, engine):
            os.kill(pid, SIGSTOP)
        time.sleep(2 * PATIENCE_SECONDS)  # this wait is the case under test
        for pid in (site.process.pid, engine):
            os.kill(pid, SIGCONT)

    for _ in range(3):
        seen = disturbed(site, stand_still)
        assert text_of(seen) == text_of(quiet)
        assert [event for event in seen if event["event"] == "status"] == []
        assert engine_of(site, tmp_path) == engine


def test_an_engine_that_stands_still_alone_is_replaced(site: Server, tmp_path: Path) -> None:
    """The readers see a pause, and the next engine gives the rest."""
    quiet = list(ask(site, **ASKED))
    engine = engine_of(site, tmp_path)
    seen = disturbed(site, lambda: os.kill(engine, SIGSTOP))
    assert text_of(seen) == text_of(quiet)
    statuses = [event["status"] for event in seen if event["event"] == "status"]
    assert statuses in (["waiting", "resumed"], ["waiting", "loading", "resumed"])
    assert engine_of(site, tmp_path) != engine

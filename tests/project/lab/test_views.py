"""Laws of the lab's views: who may see the server's side and kill, and what is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.http import Http404, HttpRequest
from django.test import RequestFactory, override_settings

from project.lab import views
from project.lab.reports import write
from tests.project.lab.test_reports import ID, report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reports' folder of a site with DEBUG, whose kills wait for no report."""
    monkeypatch.setattr(views, "KILL_SECONDS", 0.0)
    with override_settings(DEBUG=True, STATE_DIR=tmp_path):
        (tmp_path / "lab").mkdir()
        yield tmp_path / "lab"


def post(**meta: Any) -> HttpRequest:
    return RequestFactory().post("/lab/", **{"REMOTE_ADDR": "127.0.0.1", **meta})


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits to be killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_the_maker_is_killed(folder: Path, child: subprocess.Popen[bytes]) -> None:
    """By SIGKILL: the web process that makes the answer, which has the same parent as this process."""
    write(folder, report(child.pid, parent=os.getppid(), is_made_here=True))
    assert views.kill(post(), "web", ID).status_code == 200
    assert child.wait(10) == -signal.SIGKILL
    assert views.kill(post(), "web", "b" * 32).status_code == 400


def test_the_engine_is_killed(folder: Path, child: subprocess.Popen[bytes]) -> None:
    """The engine that a web process is connected to; without an engine the answer is 400."""
    assert views.kill(post(), "engine", ID).status_code == 400
    write(folder, report(os.getpid(), engine=child.pid))
    assert views.kill(post(), "engine", ID).status_code == 200
    assert child.wait(10) == -signal.SIGKILL


def test_a_kill_waits_for_the_report(
    folder: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has just begun to make the answer is killed once it has reported that."""
    monkeypatch.setattr(views, "KILL_SECONDS", 60.0)
    reporting = threading.Timer(0.3, write, (folder, report(child.pid, parent=os.getppid(), is_made_here=True)))
    reporting.start()
    assert views.kill(post(), "web", ID).status_code == 200
    assert child.wait(10) == -signal.SIGKILL
    reporting.join()


def test_a_process_of_another_parent_is_no_victim() -> None:
    """Only siblings of this process are killed, whatever a file in the folder says."""
    assert views.victim([report(1, parent=os.getppid() + 1, is_made_here=True)], "web", ID) is None
    assert views.victim([report(1, parent=os.getppid(), is_made_here=False)], "web", ID) is None


@pytest.mark.parametrize(
    "meta",
    [
        {"REMOTE_ADDR": "192.0.2.7"},
        {"REMOTE_ADDR": ""},
        {"HTTP_X_FORWARDED_FOR": "127.0.0.1"},
        {"HTTP_FORWARDED": "for=127.0.0.1"},
        {"HTTP_X_REAL_IP": "127.0.0.1"},
    ],
)
async def test_only_visitors_from_this_machine_see_and_kill(folder: Path, meta: dict[str, str]) -> None:
    """A request from another address, or through a proxy, gets 404 from both views."""
    with pytest.raises(Http404):
        views.kill(post(**meta), "engine", ID)
    with pytest.raises(Http404):
        await views.state(RequestFactory().get("/lab/", **{"REMOTE_ADDR": "127.0.0.1", **meta}), ID)


def test_nothing_is_killed_without_debug(folder: Path) -> None:
    """A site in production has no such buttons."""
    with override_settings(DEBUG=False), pytest.raises(Http404):
        views.kill(post(), "engine", ID)
    assert views.is_at_this_machine(post(REMOTE_ADDR="::1"))

"""A site with its engine in a process of its own: what the web process does not load, and what it survives."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from project.settings import HELPDESK
from tests.support.docs.demo_site import environment, manage, processes_of
from tests.support.plugins.migrated import KEY, MAKE_KEY, prepare
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

pytestmark = [pytest.mark.timeout(300)]

# What `-X importtime` prints for each module: "import time: self | cumulative | name".
IMPORTED = re.compile(r"^import time:[^|]*\|[^|]*\| *(\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder with a database and a key."""
    folder = tmp_path_factory.mktemp("site")
    prepare(folder, MAKE_KEY)
    return folder


def serve(folder: Path, **variables: str) -> Iterator[Server]:
    """Serve the demo site; its child processes end with it."""
    env = environment(folder, **variables)
    with daphne("project.asgi:application", env=env) as server:
        wait_until_ready(server.url)
        yield server
    manage(folder, "streamserve_engine", "--stop", **variables)
    assert processes_of(folder) == set()


@pytest.fixture
def helpdesk(folder: Path) -> Iterator[Server]:
    """The demo site with the model it ships; every import of its processes is printed."""
    pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")
    yield from serve(folder, MODEL=str(HELPDESK), DTYPE="float32", PYTHONPROFILEIMPORTTIME="1")


@pytest.fixture
def echo(folder: Path) -> Iterator[Server]:
    """The demo site with the echo engine."""
    yield from serve(folder)


def ask(server: Server, **fields: Any) -> Iterator[dict[str, Any]]:
    """Yield the events of an answer as they come: their names under "event"."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream("POST", f"{server.url}/streams", json={"temperature": 0, **fields}, headers=headers) as response,
    ):
        assert response.status_code == 200, response.read()
        name = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield {"event": name, **json.loads(line[6:])}


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["text"] for event in events if event["event"] == "token")


def test_the_web_process_never_imports_torch(helpdesk: Server, folder: Path) -> None:
    """Nor the modules that come with it, though the demo model has answered. The engine process did import it."""
    answer = list(ask(helpdesk, messages=[{"role": "user", "content": "How do I pause my subscription?"}]))
    assert answer[-1]["event"] == "done"
    assert "Pause subscription" in text_of(answer)
    heavy = {"torch", "transformers", "tokenizers", "safetensors"}  # numpy comes with the search of the help pages
    assert heavy & set(IMPORTED.findall(helpdesk.output())) == set()
    assert "django" in IMPORTED.findall(helpdesk.output())
    [log] = folder.glob("engine-*.log")
    assert "torch" in IMPORTED.findall(log.read_text())


def test_an_answer_survives_the_death_of_its_engine(echo: Server, folder: Path) -> None:
    """After kill -9 in mid-answer a reader gets a status, then the rest; the text is that of an undisturbed run."""
    asked = {"prompt": "tell me", "max_tokens": 3000, "ignore_eos": True, "seed": 5}
    quiet = list(ask(echo, **asked))
    seen: list[dict[str, Any]] = []
    for event in ask(echo, **asked):
        seen.append(event)
        if len(seen) == 5:
            [engine] = processes_of(folder) - {echo.process.pid}
            os.kill(engine, signal.SIGKILL)
    assert text_of(seen) == text_of(quiet)
    assert [event["event"] for event in seen].count("done") == 1
    statuses = [event["status"] for event in seen if event["event"] == "status"]
    assert statuses in (["waiting", "resumed"], ["waiting", "loading", "resumed"])

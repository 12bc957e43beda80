"""For the tests of sites that use streamserve: scripted answers, a client in the process, and a real daphne.

    with scripted({"price": "3 euros."}): ...         # what the models answer, by a word of the question
    StreamClient(user=user).ask("What is the price?") # the site's HTTP API, without a server
    with DaphneServer() as server: ...                # the site under a real server; `pytest_fixtures` has a fixture
    STREAMSERVE = streamserve.testing.SETTINGS        # every model is an echo engine, logs are in memory

They need no pytest: `manage.py test` runs them in a TransactionTestCase (the engine's threads see only what is
committed). docs/tutorial.md has a test. Django's `live_server` is WSGI and cannot stream: `DaphneServer` runs the
site's ASGI application in a process of its own, on the test's databases, which must therefore be files or servers (no
in-memory sqlite).
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

SETTINGS: Mapping[str, Any] = {"TESTING": True}

_KEPT = ("PERMISSION",)  # of a model whose answers are scripted

START_SECONDS = 120.0
END_SECONDS = 10.0
_EVENT = re.compile(r"^event: (\w+)\n(?:id: [^\n]*\n)?data: ([^\n]*)$", re.MULTILINE)
_LISTENING = re.compile(r"Listening on TCP address 127\.0\.0\.1:(\d+)")


class scripted:
    """`with scripted(answers):` or `async with`: the models of this process give the test's answers.

    `answers` is the text of every answer, or a dict of words: a question that has the word gets its answer, and any
    other question is its own answer.
    """

    def __init__(self, answers: str | Mapping[str, str]) -> None:
        self._answers = {"": answers} if isinstance(answers, str) else dict(answers)

    def __enter__(self) -> None:
        from streamserve.web import site
        from streamserve.web.calls import background

        self._settings = self._override()
        background.run(site.reset, "async with")
        self._settings.__enter__()

    def __exit__(self, *error: Any) -> None:
        from streamserve.web import site
        from streamserve.web.calls import background

        background.run(site.reset, "async with")
        self._settings.__exit__(*error)

    async def __aenter__(self) -> None:
        from streamserve.web import site

        self._settings = self._override()
        await site.reset()
        self._settings.__enter__()

    async def __aexit__(self, *error: Any) -> None:
        from streamserve.web import site

        await site.reset()
        self._settings.__exit__(*error)

    def _override(self) -> AbstractContextManager[Any]:
        from django.conf import settings
        from django.test.utils import override_settings

        given = getattr(settings, "STREAMSERVE", {})
        own = given.get("MODELS") or {"echo": {}}
        kept = {alias: {key: one[key] for key in _KEPT if key in one} for alias, one in own.items()}
        models = {alias: {"PATH": "echo", "ANSWERS": self._answers, **kept[alias]} for alias in own}
        return override_settings(STREAMSERVE={**given, "TESTING": True, "MODELS": models})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A response of the site: `events` are (name, data), `text` their tokens, `error` the body of a refusal."""

    status: int
    text: str = ""
    events: tuple[tuple[str, dict[str, Any]], ...] = ()
    error: Mapping[str, Any] = field(default_factory=dict)
    stream_id: str = ""


class StreamClient:
    """Asks the site's HTTP API in this process, as `user`, by `key`, or as a visitor. Each has its own session."""

    def __init__(self, *, user: Any = None, key: str = "") -> None:
        from django.test import AsyncClient

        self._client = AsyncClient()
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        if user is not None:
            self._client.force_login(user)

    def ask(self, question: str, **fields: Any) -> Asked:
        """POST a chat message to /streams and read the answer to its end. `fields` are further fields of the body."""
        from streamserve.web.calls import background

        return background.run(lambda: self.aask(question, **fields), "await aask()")

    async def aask(self, question: str, **fields: Any) -> Asked:
        """Do what `ask` does, from async code."""
        from django.urls import reverse

        body = {"messages": [{"role": "user", "content": question}], **fields}
        response: Any = await self._client.post(
            reverse("streamserve:streams"), body, content_type="application/json", headers=self._headers
        )
        if not response.streaming:
            return Asked(status=response.status_code, error=json.loads(response.content)["error"])
        data = b"".join([chunk async for chunk in response.streaming_content]).decode()
        events = tuple((name, json.loads(text)) for name, text in _EVENT.findall(data))
        said = "".join(event["text"] for name, event in events if name == "token")
        return Asked(status=response.status_code, text=said, events=events, stream_id=response["X-Stream-Id"])


class DaphneServer:
    """`with DaphneServer() as server: ... server.url`: the configured site, served by daphne on a free port.

    `databases` maps aliases to names (default: those the test runner has set up), `settings` overrides settings by JSON
    values, `settings_module` names another module of settings. `log()` returns the server's output so far.
    """

    def __init__(
        self,
        *,
        databases: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        settings_module: str | None = None,
    ) -> None:
        self._settings_module = settings_module
        self._plan = {"databases": dict(databases or _test_databases()), "settings": dict(settings or {})}
        self._lines: list[str] = []
        self._ports: queue.Queue[int | None] = queue.Queue()
        self.url = self.websocket_url = ""

    def __enter__(self) -> DaphneServer:
        command = [sys.executable, "-m", "streamserve.testing", json.dumps(self._plan)]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **_environment(self._settings_module)},
            stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        port = self._ports.get(timeout=START_SECONDS)
        if port is None:
            self._process.wait()
            raise RuntimeError(f"daphne did not start:\n{self.log()}")
        self.url, self.websocket_url = f"http://127.0.0.1:{port}", f"ws://127.0.0.1:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def log(self) -> str:
        """Return the server's output so far."""
        return "".join(self._lines)

    def _read(self) -> None:
        """Collect the server's output, and the port from it. Its own thread."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            listening = _LISTENING.search(line)
            if listening:
                self._ports.put(int(listening.group(1)))
        self._ports.put(None)


def _environment(settings_module: str | None) -> dict[str, str]:
    """Return the variables with which the child imports the same site as this process."""
    from django.conf import settings

    path = os.pathsep.join(entry for entry in sys.path if entry)
    module = settings_module or getattr(settings, "SETTINGS_MODULE", "") or os.environ.get("DJANGO_SETTINGS_MODULE", "")
    return {"PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": module, "PYTHONUNBUFFERED": "1"}


def _test_databases() -> dict[str, str]:
    """Return the names of the test databases."""
    from django.db import connections

    return {alias: str(connections[alias].settings_dict["NAME"]) for alias in connections}


def _serve(plan: Mapping[str, Any]) -> None:
    """Run the child: the same settings on the test's databases, with the echo engine, by daphne's own command."""
    from django.conf import settings

    for alias, name in plan["databases"].items():
        settings.DATABASES[alias]["NAME"] = name
    for name, value in plan["settings"].items():
        setattr(settings, name, value)
    settings.STREAMSERVE = {**getattr(settings, "STREAMSERVE", {}), "TESTING": True}
    if not settings.ALLOWED_HOSTS:
        settings.ALLOWED_HOSTS = ["127.0.0.1", "localhost"]

    from daphne.cli import CommandLineInterface

    application = settings.ASGI_APPLICATION.rpartition(".")
    endpoint = "tcp:port=0:interface=127.0.0.1"
    CommandLineInterface().run(["-e", endpoint, f"{application[0]}:{application[2]}"])


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))

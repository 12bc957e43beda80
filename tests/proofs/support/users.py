"""A real server under tests/support/sites/users_site.py, its logged-in users, and its threads by /proc."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.proofs.scale import IS_SOAK
from tests.support.docs.demo_site import environment, manage
from tests.support.processes import open_names, threads_of
from tests.support.servers.web_servers import SERVERS, Server, wait_until_ready

DEADLINE_SECONDS = 300.0 if IS_SOAK else 60.0
NUM_USERS = 100
_SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.users_settings", "ALLOWED_HOSTS": "127.0.0.1,testserver"}
_NO_TLS = ssl.create_default_context()  # one for all: each client would make its own, slowly
_MAKE_USERS = f"""
import json
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.test import Client
call_command("migrate", verbosity=0)
sessions = []
for number in range({NUM_USERS}):
    client = Client()
    client.force_login(get_user_model().objects.create_user(f"user {{number}}"))
    sessions.append(client.cookies["sessionid"].value)
print("SESSIONS " + json.dumps(sessions))
"""


@dataclass(frozen=True)
class Site:
    """A running site; `sessions` are those of its users."""

    server: Server
    folder: Path
    sessions: list[str]

    def client(self, number: int = 0) -> httpx.Client:
        """Return a browser of that user."""
        return httpx.Client(
            base_url=self.server.url,
            cookies={"sessionid": self.sessions[number]},
            headers={"Sec-Fetch-Site": "same-origin"},
            timeout=DEADLINE_SECONDS,
            trust_env=False,
            verify=_NO_TLS,
        )

    def control(self, query: str = "") -> dict[str, int]:
        """Hold the engine or release it; return what the server holds, this request included."""
        value: dict[str, int] = httpx.get(f"{self.server.url}/control{query}", timeout=DEADLINE_SECONDS).json()
        return value

    def num_threads(self) -> int:
        return len(threads_of(self.server.process.pid))

    def num_descriptors(self) -> int:
        return len(open_names(self.server.process.pid))

    def num_database_connections(self) -> int:
        """Each connection to sqlite holds the database's file open once."""
        return open_names(self.server.process.pid).count(str(self.folder / "site.sqlite3"))

    def until(self, claim: Callable[[], Any], what: str) -> Any:
        """Query until `claim()` is true, and return its value."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            if value := claim():
                return value
            time.sleep(0.02)
        raise AssertionError(f"not within {DEADLINE_SECONDS:.0f} s: {what}\n{self.server.output()[-4000:]}")

    def least(self, measure: Callable[[], int]) -> int:
        """Return the least value that a number keeps for a while: without short-lived ones."""
        seen: list[int] = []

        def is_known() -> bool:
            seen.append(measure())
            return seen.count(min(seen)) >= 15

        self.until(is_known, "it stays the same")
        return min(seen)


def make_users(folder: Path) -> list[str]:
    """Make the site's database there, and its users; return their sessions."""
    done = manage(folder, "shell", "-v", "0", "-c", _MAKE_USERS, **_SETTINGS)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("SESSIONS "))
    sessions: list[str] = json.loads(line.removeprefix("SESSIONS "))
    return sessions


@contextlib.contextmanager
def serving(name: str, folder: Path, sessions: list[str]) -> Iterator[Site]:
    """Serve the site with daphne (which makes it FlowServer) or uvicorn while the block runs."""
    environ = environment(folder, **_SETTINGS)
    with SERVERS[name]("tests.support.sites.users_site:application", env=environ) as server:
        wait_until_ready(server.url)
        yield Site(server, folder, sessions)

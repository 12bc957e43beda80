"""FlowServer installed from `AppConfig.ready()`: under the unchanged `daphne` command and runserver."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.flow_driver import (
    HELLO,
    daphne,
    exit_code,
    get,
    printed_lines,
    read_all,
    read_until,
    state,
    terminate,
    until,
)
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import ROOT, Server, wait_until_listening

_SETTINGS = """
DEBUG = True
SECRET_KEY = "x"
INSTALLED_APPS = ["daphne", "site_app.apps.SiteConfig"]
ASGI_APPLICATION = "site_app.asgi.application"
"""
_APPS = """
from django.apps import AppConfig
from streamserve.asgi.flow.transport import FlowConfig
from streamserve.asgi.flow.install import install

class SiteConfig(AppConfig):
    name = "site_app"

    def ready(self):
        assert install(FlowConfig(connection_bytes=8192))
"""
_ASGI = """
import os
import django
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "site_app.settings")
django.setup()
from tests.support.apps.flow_app import app as application
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A Django site of three files."""
    package = tmp_path / "site_app"
    package.mkdir()
    for name, text in {"__init__": "", "settings": _SETTINGS, "apps": _APPS, "asgi": _ASGI}.items():
        (package / f"{name}.py").write_text(text)
    return tmp_path


def environment(site: Path) -> dict[str, str]:
    path = os.pathsep.join([str(site), str(ROOT)])
    return {"PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": "site_app.settings", "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def runserver(site: Path, *options: str) -> Iterator[Server]:
    """`manage.py runserver`, and the child that its autoreloader makes, in a session of their own."""
    port = free_port()
    command = [sys.executable, "-m", "django", "runserver", *options, f"127.0.0.1:{port}"]
    env = {**os.environ, **environment(site)}
    log = site / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=site, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            server = Server(port, process, log)
            wait_until_listening(server)
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_flow_server(server: Server) -> bool:
    return bool(state(server)["transports"] == 1)


def test_under_the_daphne_command(site: Path) -> None:
    """The `daphne` command needs no option for it, and SIGTERM drains."""
    with daphne("site_app.asgi:application", cwd=site, env=environment(site)) as server, get(server, "/wait") as client:
        read_until(client, HELLO)
        until(lambda: state(server)["transports"] == 2, "it is FlowServer", server)
        terminate(server)
        until(lambda: "drain" in printed_lines(server), "it drains", server)
        terminate(server)
        assert read_all(client) == (b"0\r\n\r\n", True)
        assert exit_code(server) == 0
        assert printed_lines(server) == ["drain", "http.disconnect", "finally event-stream disconnect", "shutdown"]


def test_under_runserver(site: Path) -> None:
    """Without the autoreloader Ctrl-C ends runserver at once."""
    with runserver(site, "--noreload") as server, get(server, "/wait") as client:
        read_until(client, HELLO)
        terminate(server, signal.SIGINT)
        assert read_all(client) == (b"0\r\n\r\n", True)
        assert exit_code(server) == 0
        assert printed_lines(server) == ["drain", "http.disconnect", "finally event-stream disconnect", "shutdown"]


def test_a_reload_ends_at_once(site: Path) -> None:
    """With the autoreloader, a file that changes under an open stream ends it properly, and the server is back."""
    with runserver(site) as server:
        with get(server, "/wait") as client:
            read_until(client, HELLO)
            settings = site / "site_app" / "settings.py"  # the autoreloader watches it only after a while
            until(lambda: settings.touch() or "drain" in printed_lines(server), "it reloads", server)
            assert read_all(client) == (b"0\r\n\r\n", True)
        assert until(lambda: printed_lines(server)[3:] and printed_lines(server), "it has ended") == [
            "drain",
            "http.disconnect",
            "finally event-stream disconnect",
            "shutdown",
        ]
        wait_until_listening(server)
        assert is_flow_server(server)

"""Laws of installing FlowServer, of its options and command line, and of the parts that need no socket."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import Any

import daphne.server
import pytest
from daphne.cli import CommandLineInterface
from daphne.management.commands import runserver

from streamserve.asgi.drain import Drain
from streamserve.asgi.flow import install as flow_server
from streamserve.asgi.flow.transport import FlowConfig, FlowControl, Inbox
from tests.support.servers.flow_driver import APP
from tests.support.servers.web_servers import ROOT


class OtherServer(daphne.server.Server):  # type: ignore[misc]
    """A server class of the site's own."""


@pytest.fixture(autouse=True)
def _stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock daphne classes, whatever the site under test has installed."""
    monkeypatch.setattr(CommandLineInterface, "server_class", daphne.server.Server)
    monkeypatch.setattr(runserver.Command, "server_cls", daphne.server.Server)


def test_this_daphne_has_all_it_needs() -> None:
    """The installed daphne has every attribute that FlowServer replaces."""
    assert flow_server.missing() == []


def test_install_replaces_the_stock_class() -> None:
    """`install` replaces the class of the `daphne` command and of runserver, with its options, and does so once."""
    drain = Drain()
    assert flow_server.serves_stock()
    assert flow_server.install(FlowConfig(drain_seconds=7), drain)
    assert not flow_server.serves_stock()
    ours = CommandLineInterface.server_class
    assert runserver.Command.server_cls is ours
    assert issubclass(ours, daphne.server.Server)
    assert (ours.options.drain_seconds, ours.drain) == (7, drain)
    assert not flow_server.install()
    assert CommandLineInterface.server_class is ours


def test_install_leaves_another_class_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of the site's own stays in its place; the other place gets FlowServer."""
    monkeypatch.setattr(CommandLineInterface, "server_class", OtherServer)
    assert flow_server.install()
    assert CommandLineInterface.server_class is OtherServer
    assert runserver.Command.server_cls.__name__ == "FlowServer"


@pytest.mark.parametrize(
    ("owner", "name"), [(daphne.server.Server, "application_checker"), (daphne.server.Server, "listen_success")]
)
def test_another_daphne_serves_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: Any, name: str
) -> None:
    """The log names what this daphne lacks, and the stock server serves."""
    monkeypatch.delattr(owner, name)
    with caplog.at_level(logging.WARNING):
        assert not flow_server.install()
    assert name in caplog.text
    assert "Stock daphne serves" in caplog.text
    assert flow_server.serves_stock()
    with pytest.raises(RuntimeError, match=name):
        flow_server.server_class()


def test_a_daphne_whose_run_works_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factory is replaced where `run` assigns it; a `run` that does not is noticed."""
    monkeypatch.setattr(daphne.server.Server, "run", lambda self: None)
    assert "http_factory in daphne.server.Server.run" in flow_server.missing()


def test_nothing_is_imported_before_it_is_needed() -> None:
    """Under uvicorn no reactor is installed: neither by the import nor by `install`."""
    script = (
        "import sys; from streamserve.asgi.flow.install import install, serves_stock; "
        "assert not install() and not serves_stock(); "
        "assert not [name for name in sys.modules if name.startswith(('daphne', 'twisted', 'django'))]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.mark.parametrize(
    ("name", "value"), [("connection_bytes", 0), ("stall_seconds", -1), ("body_bytes", -1), ("drain_seconds", -0.1)]
)
def test_invalid_options_are_named(name: str, value: float) -> None:
    """The error names the option and the values that it takes."""
    with pytest.raises(ValueError, match=name):
        FlowConfig(**{name: value})  # type: ignore[arg-type]


def test_the_command_line_names_what_is_wrong() -> None:
    """Like any command it prints the usage and the option, and exits with 2."""
    command = [sys.executable, "-m", "streamserve.asgi.flow", APP, "--connection-bytes", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "connection_bytes is 1; a connection needs at least 4096" in done.stderr


@pytest.mark.parametrize(("stall", "head", "check"), [(30, 10, 1.0), (1, 10, 0.25), (30, 2, 0.5), (0, 0, 1.0)])
def test_connections_are_checked_often_enough(stall: float, head: float, check: float) -> None:
    """The interval of the checks fits the shortest of the limits."""
    assert FlowConfig(stall_seconds=stall, head_seconds=head).check_seconds == check


async def test_a_released_flow_control_never_closes_again() -> None:
    """A pause after the release has no effect, so that a send to a client that left does not wait for ever."""
    control = FlowControl(None)
    await control.wait()
    control.pauseProducing()
    waiting = asyncio.create_task(control.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    control.stopProducing()
    await waiting
    control.pauseProducing()
    await control.wait()


async def test_an_inbox_stops_and_resumes_the_reading() -> None:
    """Reading stops at 64 unread messages or 1 MiB of them, and resumes when half of either is read."""

    class Transport:
        calls: list[str] = []  # noqa: RUF012

        def pauseProducing(self) -> None:
            self.calls.append("pause")

        def resumeProducing(self) -> None:
            self.calls.append("resume")

    transport = Transport()
    inbox = Inbox(transport)
    for message in ({"text": "x"}, {"bytes": b"x" * 2**20}):
        transport.calls.clear()
        while not transport.calls:
            inbox.put_nowait(message)
        while not inbox.empty():
            await inbox.get()
        assert transport.calls == ["pause", "resume"]


async def test_a_failing_hook_does_not_stop_the_drain(caplog: pytest.LogCaptureFixture) -> None:
    """A failing hook is logged; the other hooks are called, each once however often it was registered."""
    calls: list[str] = []

    class Target:
        def is_busy(self) -> bool:
            return False

        is_running = has_unsent = is_busy

        def has_newcomers(self) -> bool:
            return False

        def stop_listening(self) -> None:
            calls.append("stop")

        def end_all(self) -> None:
            calls.append("end")

        def cancel_all(self) -> None:
            calls.append("cancel")

    def bad() -> None:
        raise RuntimeError("a bad hook")

    def good() -> None:
        calls.append("good")

    drain = Drain()
    for hook in (bad, good, good):
        drain.on_drain(hook)
        drain.on_going_away(hook)
    await drain.conduct(Target(), 60)
    assert calls == ["good", "good", "stop", "end", "cancel"]
    assert [record.message for record in caplog.records] == ["a hook of the drain failed"] * 2

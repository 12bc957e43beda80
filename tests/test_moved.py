"""Import paths that documents of 0.1.0 named keep working for one version, with a warning that names the new path."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from streamserve._moved import COMMANDS, MOVED

# The names that the documents, or sites that follow them, import from each old path.
NAMES = {
    "streamserve.asgi.flow_server": "install",
    "streamserve.asgi.harden": "Hardening",
    "streamserve.asgi.callers": "Caller",
    "streamserve.asgi.respond": "respond",
    "streamserve.clients.host": "main",
    "streamserve.runtime": "get_streams",
    "streamserve.streams.delivery": "Delivery",
    "streamserve.streams.directory": "Streams",
    "streamserve.streams.file_log": "FileLog",
    "streamserve.streams.redis_log": "RedisLog",
    "streamserve.views": "chat_page",
}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_module_at_the_new_one(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The import gives the same module, and one warning that names both paths."""
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(DeprecationWarning, match="has moved to") as warned:
        module = importlib.import_module(old)
    monkeypatch.delitem(sys.modules, old)
    assert [str(one.message) for one in warned] == [f"{old} has moved to {MOVED[old]}"]
    assert module is importlib.import_module(MOVED[old])
    assert hasattr(module, NAMES[old])


def test_the_import_statement_names_its_own_line() -> None:
    """The warning points at the site's import, and a second import does not warn."""
    program = (
        "from streamserve.asgi.harden import Hardening\nimport streamserve.asgi.harden as again\nprint(again.__name__)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "streamserve.asgi.hardening\n", ran.stderr
    assert ran.stderr.startswith("<string>:1: DeprecationWarning: streamserve.asgi.harden has moved to ")
    assert ran.stderr.count("DeprecationWarning") == 1


def test_an_unknown_module_is_still_unknown() -> None:
    """A path that never existed raises ImportError."""
    with pytest.raises(ModuleNotFoundError, match=r"streamserve\.nowhere"):
        importlib.import_module("streamserve.nowhere")


def test_the_log_package_has_its_documented_names() -> None:
    """`streamserve.streams.log` was a module and is a folder."""
    from streamserve.streams.log import EventLog, MemoryLog, base

    assert (EventLog, MemoryLog) == (base.EventLog, base.MemoryLog)


@pytest.mark.parametrize("old", COMMANDS)
def test_an_old_command_runs_the_new_one(old: str) -> None:
    """`python -m <old path>` takes the new command's arguments and names the new command."""
    ran = subprocess.run([sys.executable, "-m", old, "--help"], capture_output=True, text=True, timeout=60)
    now = subprocess.run([sys.executable, "-m", COMMANDS[old], "--help"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == now.returncode == 0, ran.stderr
    assert ran.stdout.split()[2:] == now.stdout.split()[2:]  # all but "usage: <program>"
    assert ran.stderr == f"{old}:1: DeprecationWarning: python -m {old} is now python -m {COMMANDS[old]}\n"

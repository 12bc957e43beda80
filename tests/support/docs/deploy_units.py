"""The systemd units of docs/deploy/, parsed as systemd does."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.support.servers.web_servers import ROOT

FOLDER = ROOT / "docs" / "deploy"
WEB, ENGINE = FOLDER / "streamserve-web@.service", FOLDER / "streamserve-engine@.service"
WORKER = FOLDER / "streamserve-worker@.service"
# The placeholders in the units, and what a Python is given for them.
_ARGUMENTS = {"/srv/mysite/venv/bin/python": [], "/srv/mysite/venv/bin/daphne": ["-m", "daphne"]}


def read_unit(path: Path) -> dict[str, str]:
    """Return key → value; a repeated key is an error."""
    pairs = [line.split("=", 1) for line in path.read_text().splitlines() if line and line[0] not in "#["]
    unit = dict(pairs)
    assert len(unit) == len(pairs), f"a key of {path.name} stands twice"
    return unit


def command_of(path: Path, instance: str, python: str = sys.executable) -> list[str]:
    """Return the unit's command for the demo site, on that Python."""
    program, *arguments = shlex.split(read_unit(path)["ExecStart"].replace("%i", instance))
    return [python, *_ARGUMENTS[program], *(argument.replace("mysite.asgi", "project.asgi") for argument in arguments)]

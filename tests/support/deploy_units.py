"""The systemd units of docs/deploy/, parsed as systemd does."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.support.servers import ROOT

FOLDER = ROOT / "docs" / "deploy"
WEB, ENGINE = FOLDER / "streamserve-web@.service", FOLDER / "streamserve-engine@.service"
# The placeholders in the units, and their values in tests.
_PYTHON_HERE = {
    "/srv/mysite/venv/bin/python": [sys.executable],
    "/srv/mysite/venv/bin/daphne": [sys.executable, "-m", "daphne"],
}


def read_unit(path: Path) -> dict[str, str]:
    """Return key → value; a repeated key is an error."""
    pairs = [line.split("=", 1) for line in path.read_text().splitlines() if line and line[0] not in "#["]
    unit = dict(pairs)
    assert len(unit) == len(pairs), f"a key of {path.name} stands twice"
    return unit


def command_of(path: Path, instance: str) -> list[str]:
    """Return the unit's command for the demo site, on this Python."""
    program, *arguments = shlex.split(read_unit(path)["ExecStart"].replace("%i", instance))
    return [*_PYTHON_HERE[program], *(argument.replace("mysite.asgi", "project.asgi") for argument in arguments)]

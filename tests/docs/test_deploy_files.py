"""docs/deploy/: the units fit what the program does. nginx.conf runs in tests/e2e/test_nginx.py."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import get_commands

from streamserve.asgi.flow.transport import FlowConfig
from streamserve.clients.process.config import LaunchConfig
from streamserve.streams.config import JobConfig
from tests.support.docs.deploy_units import ENGINE, FOLDER, WEB, WORKER, command_of, read_unit

UNITS = [WEB, ENGINE, WORKER]
_SPARE_SECONDS = 20  # beside the drain: farewells, `finally`, the threads' end


def test_there_is_no_other_unit() -> None:
    """Each unit of the folder is looked at here."""
    assert sorted(FOLDER.glob("*.service")) == sorted(UNITS)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_restarts_what_ends_and_waits_for_its_drain(unit: Path) -> None:
    """SIGTERM to the main process alone, time enough to drain, up again in any case."""
    keys = read_unit(unit)
    drains = {
        WEB: FlowConfig().drain_seconds,
        ENGINE: LaunchConfig.__dataclass_fields__["drain_seconds"].default,
        WORKER: JobConfig().grace_seconds,
    }
    assert int(keys["TimeoutStopSec"]) >= drains[unit] + _SPARE_SECONDS
    assert (keys["Restart"], keys["KillMode"], keys["KillSignal"]) == ("always", "mixed", "SIGTERM")


def test_worker_and_engine_find_each_other() -> None:
    """One user, one folder, and the /tmp in which their socket lies."""
    web, *others = map(read_unit, UNITS)
    for key in ("User", "WorkingDirectory", "Environment", "EnvironmentFile"):
        assert [other[key] for other in others] == [web[key]] * len(others)
    assert {one["PrivateTmp"] for one in (web, *others)} == {"no"}


def test_the_commands_exist() -> None:
    """The engine's is one of ours; the worker's is daphne, on nginx's ports, and is asked at an address it has."""
    assert command_of(ENGINE, "chat")[1:] == ["manage.py", "streamserve_engine", "chat"]
    assert command_of(WORKER, "1")[1:] == ["manage.py", "streamserve_worker"]
    assert {"streamserve_engine", "streamserve_worker"} <= get_commands().keys()
    assert command_of(WEB, "8001")[1:] == ["-m", "daphne", *["-b", "127.0.0.1", "-p", "8001", "--proxy-headers"], _APP]
    assert read_unit(WEB)["ExecStartPost"].endswith(" http://127.0.0.1:%i/livez")
    servers = [line.split()[1] for line in (FOLDER / "nginx.conf").read_text().splitlines() if "server 127" in line]
    assert {server.removesuffix(";") for server in servers} == {"127.0.0.1:8001", "127.0.0.1:8002"}


_APP = "project.asgi:application"


def test_systemd_reads_the_units_without_a_word(tmp_path: Path) -> None:
    """`systemd-analyze verify`, with programs that are on this machine in the places of the site's."""
    systemd_analyze, curl = shutil.which("systemd-analyze"), shutil.which("curl")
    if systemd_analyze is None or curl is None:
        pytest.skip("systemd-analyze or curl is missing; what else is said of the units is tested")
    for unit, instance in ((WEB, "8001"), (ENGINE, "chat"), (WORKER, "1")):
        text = unit.read_text().replace("/usr/bin/curl", curl).replace("=/srv/mysite\n", f"={tmp_path}\n")
        for program in ("python", "daphne"):
            text = text.replace(f"/srv/mysite/venv/bin/{program}", sys.executable)
        (tmp_path / unit.name.replace("@", f"@{instance}")).write_text(text)
    files = [str(path) for path in tmp_path.glob("*.service")]
    done = subprocess.run([systemd_analyze, "verify", *files], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")

"""A vanished peer is noticed and freed: server and reader in a network of their own, packets dropped.

The peer sends no sign of leaving: only the kernel's time-outs, set short, detect it. The server needs `unshare -n` and
iptables.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from tests.proofs.support.vanishing import RETRIES
from tests.support.servers.web_servers import ROOT

_SECONDS = 240


@cache
def own_network() -> list[str]:
    """Return the command that runs another in a network of its own; skip where the kernel allows none."""
    if shutil.which("iptables", path=environment()["PATH"]) is None:
        reason = "needs iptables: apt-get install iptables"
        if os.environ.get("STREAMSERVE_REQUIRE") == "all":
            pytest.fail(reason)
        pytest.skip(reason)
    for command in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        tried = subprocess.run([*command, "iptables", "-S"], capture_output=True, env=environment(), timeout=60)
        if tried.returncode == 0:
            return command
    pytest.skip(
        "needs a network of its own with a firewall: run as root outside a container, in one with --privileged, or set "
        f"sysctl kernel.unprivileged_userns_clone=1 ({tried.stderr.decode().strip()})"
    )


def environment() -> dict[str, str]:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # the place of iptables, which is not on every PATH
    return {**os.environ, "PATH": path, "XTABLES_LOCKFILE": f"/tmp/streamserve-xtables-{os.getpid()}.lock"}


def vanish(kind: str) -> dict[str, Any]:
    """Run the program; return its findings."""
    command = [*own_network(), sys.executable, "-m", "tests.proofs.support.vanishing", kind]
    done = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=_SECONDS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any], *, state: str, most_unread: int) -> None:
    """The server noticed before the answer was whole; its sequence is in no later step, its resources are free."""
    assert found.pop("steps_for_others") > 0
    assert found.pop("steps_unread") <= most_unread
    assert found == {
        "state": state,
        "later_steps_of_it": 0,
        "left": {"running": 0, "waiting": 0, "blocks_used": 0},
        "connections": [1, 0],
        "next_reader": "done",
    }


def test_flow_server_notices_whatever_is_under_way() -> None:
    """Unacknowledged data (TCP_USER_TIMEOUT), and an idle connection (keepalive probes): parked, and aborted."""
    found = vanish("flow")
    check(found["data under way"], state="parked", most_unread=40)
    check(found["silence"], state="finished", most_unread=0)


def test_uvicorn_notices_when_the_system_gives_up() -> None:
    """It sets no time-out of its own: net.ipv4.tcp_retries2 decides, 15 by default, which is a quarter of an hour."""
    writable = subprocess.run([*own_network(), "test", "-w", str(RETRIES)], timeout=60).returncode == 0
    if not writable:
        pytest.skip(f"needs {RETRIES} of its own network to be writable: a container with --privileged")
    check(vanish("uvicorn")["data under way"], state="parked", most_unread=40)

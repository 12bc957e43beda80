"""Ports of tests: no two callers get the same, in however many processes and threads they ask."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.servers import ports
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import ROOT

ASK = "from tests.support.servers.ports import free_port; print([free_port() for _ in range(50)])"
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_port_is_given_twice() -> None:
    """Four processes that ask at once, and this one."""
    asking = [subprocess.Popen([sys.executable, "-c", ASK], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(4)]
    given = [free_port() for _ in range(50)]
    for process in asking:
        out, _ = process.communicate(timeout=60)
        given += [int(port) for port in out.decode().strip("[]\n").split(",")]
    assert len(set(given)) == 250


def test_a_port_that_listens_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that comes to it anew, as after 20,000 others, does not give it."""
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (tmp_path / f"streamserve-test-port-{os.getuid()}").write_text(f"{port - ports._FIRST - 1:016d}")
        assert free_port() == port + 1 or not ports._is_free(port + 1)


def test_no_outgoing_connection_takes_a_port() -> None:
    """They are none of those that the kernel gives by itself."""
    first = int(EPHEMERAL.read_text().split()[0])
    assert 1024 < free_port() < first

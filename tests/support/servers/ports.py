"""Ports for the servers of tests: each is given to one caller, whichever process of a test run asks."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path

# Below the ports that the kernel gives by itself (from 32768 on Linux), so that no outgoing connection takes one first.
_FIRST, _NUM = 12_000, 20_000


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free, and that no other caller on this machine gets for long.

    A port that the kernel names (port 0) can be given again, to a server of another test, before ours listens on it.
    """
    counter = os.open(Path(tempfile.gettempdir()) / f"streamserve-test-port-{os.getuid()}", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(counter, fcntl.LOCK_EX)
        last = int(os.pread(counter, 16, 0) or b"0")
        for number in range(last + 1, last + 1 + _NUM):
            port = _FIRST + number % _NUM
            if _is_free(port):
                os.pwrite(counter, b"%016d" % number, 0)
                return port
    finally:
        os.close(counter)  # and with it the lock
    raise RuntimeError(f"no port of {_FIRST} to {_FIRST + _NUM} is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: earlier connections may linger
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

"""A TCP relay before a server, as a network or a proxy that is slow: it holds back a request, or its answer.

It knows bytes and no HTTP but the end of a head. The planted delays are the only waits here.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.support.servers.relay import address_of, listening

_PIECE = 4096
_END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is planted into the answers that are asked for from now on, in seconds. A stall is after so many bytes."""

    way_in: float = 0.0
    """The request waits before it is passed on."""
    way_out: float = 0.0
    """The response waits before its first byte is passed on."""
    buffering: float = 0.0
    """The response's head is passed on, and its body kept back for so long."""
    stalls: tuple[tuple[int, float], ...] = ()
    """After so many bytes nothing is passed on for so long; what comes meanwhile follows at once."""


@dataclass(slots=True)
class SlowRelay:
    """Passes everything on; what follows a request for `path` as `plan` says."""

    upstream: tuple[str, int]
    path: bytes
    url: str = ""
    plan: Plan = field(default_factory=Plan)

    def serve(self, client: socket.socket) -> None:
        """Pass on both directions until either side ends."""
        with socket.create_connection(self.upstream) as server:
            asked = threading.Event()
            up = threading.Thread(target=self._upwards, args=(client, server, asked), daemon=True)
            up.start()
            with contextlib.suppress(OSError):
                self._downwards(client, server, asked)
            for one in (client, server):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            up.join()

    def _upwards(self, client: socket.socket, server: socket.socket, asked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while piece := client.recv(_PIECE):
                if self.path in piece:
                    time.sleep(self.plan.way_in)
                    asked.set()
                server.sendall(piece)
            server.shutdown(socket.SHUT_WR)

    def _downwards(self, client: socket.socket, server: socket.socket, asked: threading.Event) -> None:
        num_passed, stalls = 0, list(self.plan.stalls)
        while piece := server.recv(_PIECE):
            if asked.is_set():
                asked.clear()
                num_passed, stalls = 0, list(self.plan.stalls)
                time.sleep(self.plan.way_out)
                if self.plan.buffering:
                    head, end, piece = piece.partition(_END_OF_HEAD)
                    client.sendall(head + end)
                    time.sleep(self.plan.buffering)
            client.sendall(piece)
            num_passed += len(piece)
            while stalls and num_passed >= stalls[0][0]:
                time.sleep(stalls.pop(0)[1])


def slow_relay(server_url: str, path: str) -> AbstractContextManager[SlowRelay]:
    """Listen on a free port while the block runs."""
    return listening(SlowRelay(address_of(server_url), path.encode()))

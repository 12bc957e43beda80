"""A TCP relay before a server, which cuts one response short: a connection that breaks in the middle of a stream."""

from __future__ import annotations

import contextlib
import socket
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.support.servers.relay import address_of, listening

_PIECE = 4096


@dataclass
class CuttingRelay:
    """Cuts the first connection that has asked for `path`, once `num_bytes` of its answer have passed."""

    upstream: tuple[str, int]
    path: bytes
    num_bytes: int
    url: str = ""
    num_cut: int = 0
    requests: list[bytes] = field(default_factory=list)  # heads of those for the path

    def serve(self, client: socket.socket) -> None:
        """Pass on both directions until either side ends."""
        with socket.create_connection(self.upstream) as server:
            asked = threading.Event()
            up = threading.Thread(target=self._upwards, args=(client, server, asked), daemon=True)
            up.start()
            num_passed = 0
            with contextlib.suppress(OSError):
                while piece := server.recv(_PIECE):
                    client.sendall(piece)
                    num_passed += len(piece) if asked.is_set() else 0
                    if num_passed >= self.num_bytes and not self.num_cut:
                        self.num_cut += 1
                        break
            for one in (client, server):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            up.join()

    def _upwards(self, client: socket.socket, server: socket.socket, asked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while piece := client.recv(_PIECE):
                if self.path in piece:
                    self.requests.append(piece)
                    asked.set()
                server.sendall(piece)
            server.shutdown(socket.SHUT_WR)


def cutting(server_url: str, path: str, *, num_bytes: int) -> AbstractContextManager[CuttingRelay]:
    """Listen on a free port while the block runs."""
    return listening(CuttingRelay(address_of(server_url), path.encode(), num_bytes))

"""A TCP relay before a server, which cuts one response short: a connection that breaks in the middle of a stream."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_PIECE = 4096


@dataclass
class Relay:
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


@contextlib.contextmanager
def cutting(server_url: str, path: str, *, num_bytes: int) -> Iterator[Relay]:
    """Listen on a free port while the block runs."""
    target = urlsplit(server_url)
    assert target.hostname is not None
    assert target.port is not None
    relay = Relay((target.hostname, target.port), path.encode(), num_bytes)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            relay.serve(self.request)

    class Listener(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A connection that breaks is what this is for."""

    with Listener(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        relay.url = f"http://127.0.0.1:{listener.server_address[1]}"
        try:
            yield relay
        finally:
            listener.shutdown()
            thread.join()

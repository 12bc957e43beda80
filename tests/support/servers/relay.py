"""What the TCP relays of the tests share: a listener before a server, whose relay passes both directions on."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit


class Relay(Protocol):
    """Passes the connections of clients on. `url` is set once it listens."""

    url: str

    def serve(self, client: socket.socket) -> None:
        """Pass on both directions until either side ends."""
        ...


AnyRelay = TypeVar("AnyRelay", bound=Relay)


def address_of(server_url: str) -> tuple[str, int]:
    """Return host and port of a server's URL."""
    target = urlsplit(server_url)
    assert target.hostname is not None
    assert target.port is not None
    return target.hostname, target.port


@contextlib.contextmanager
def listening(relay: AnyRelay) -> Iterator[AnyRelay]:
    """Have `relay` serve a free port while the block runs."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            relay.serve(self.request)

    class Listener(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A connection that breaks is the client's to close, or what the relay is for."""

    with Listener(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, daemon=True)
        thread.start()
        relay.url = f"http://127.0.0.1:{listener.server_address[1]}"
        try:
            yield relay
        finally:
            listener.shutdown()
            thread.join()

"""The shapes of ASGI (asgi.readthedocs.io, HTTP & WebSocket 2.4, lifespan 2.0), as type names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def is_http1(scope: Scope) -> bool:
    """Return whether a response may end its connection by a header: HTTP/2 has no such header (RFC 9113, 8.2.2)."""
    return str(scope.get("http_version", "1.1")).startswith("1")

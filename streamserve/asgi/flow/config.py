"""`FlowConfig`: what FlowServer allows one connection, and how long it waits. A value; knows no server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig:
    """Bytes and seconds, for every connection.

    connection_bytes: unsent bytes the server holds for one reader before the app's `send` waits.
    stall_seconds: a reader that takes nothing for so long, while there is something for it, is cut off.
    vanish_seconds: a peer that answers no packet for so long is gone (Linux only, which cuts off who takes
        nothing for so long as well); 0 leaves that to the system.
    body_bytes: the largest request body; a larger one is answered 413 before it is stored.
    head_seconds: a request's head must be whole by then, and its body begun at 1 KiB/s; 0 waits for ever.
    drain_seconds: on SIGTERM, responses in flight may finish for so long.
    """

    connection_bytes: int = 256 * 1024
    stall_seconds: float = 30.0
    vanish_seconds: float = 30.0
    body_bytes: int = 32 * 1024 * 1024
    head_seconds: float = 10.0
    drain_seconds: float = 20.0

    def __post_init__(self) -> None:
        if self.connection_bytes < 4096:
            raise ValueError(f"connection_bytes is {self.connection_bytes}; a connection needs at least 4096")
        for name in ("stall_seconds", "vanish_seconds", "body_bytes", "head_seconds", "drain_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it takes 0 or more")

    @property
    def sweep_seconds(self) -> float:
        """How often connections are looked at: often enough for the shortest of the limits."""
        limits = [seconds for seconds in (self.stall_seconds, self.head_seconds) if seconds]
        return min(1.0, *(seconds / 4 for seconds in limits)) if limits else 1.0

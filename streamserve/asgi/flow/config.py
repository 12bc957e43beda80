"""`FlowConfig`: the limits and times of a connection under FlowServer. A value; knows no server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowConfig:
    """Bytes and seconds, for every connection.

    connection_bytes: unsent bytes held for one reader before the app's `send` waits.
    stall_seconds: a connection that takes no byte for so long, while bytes are unsent, is aborted.
    vanish_seconds: a connection whose peer acknowledges no packet for so long is closed (Linux only, which also
        closes one that takes nothing for so long); 0 leaves that to the system.
    body_bytes: the largest request body; a larger one gets a 413 before it is stored.
    head_seconds: a request's head must arrive within it, its body at 1 KiB/s after it; 0 is no limit.
    drain_seconds: how long responses in flight may take to finish after SIGTERM.
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
    def check_seconds(self) -> float:
        """The interval between checks of all connections: a quarter of the shortest limit, at most one second."""
        limits = [seconds for seconds in (self.stall_seconds, self.head_seconds) if seconds]
        return min(1.0, *(seconds / 4 for seconds in limits)) if limits else 1.0

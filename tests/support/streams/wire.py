"""`Wire`: a transport for tests that keeps what it is sent."""

from __future__ import annotations

import asyncio


class Wire:
    """`go` holds it; `num_waiting` sends are held."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.go = asyncio.Event()
        self.go.set()
        self.num_waiting = 0

    async def send(self, data: bytes) -> None:
        self.num_waiting += 1
        await self.go.wait()
        self.num_waiting -= 1
        self.sent.append(data)

    @property
    def data(self) -> bytes:
        return b"".join(self.sent)

"""What tests of routes ask with: a body, a logged-in caller, and sockets with chosen headers."""

from __future__ import annotations

from typing import Any

from channels.testing import WebsocketCommunicator

from streamserve import routing
from tests.conftest import Caller

PROMPT = {"prompt": "hello", "max_tokens": 3}


async def make_caller(user: Any) -> Caller:
    caller = Caller()
    await caller.client.aforce_login(user)
    return caller


def communicator(headers: list[tuple[bytes, bytes]]) -> WebsocketCommunicator:
    return WebsocketCommunicator(routing.application, "/ws/streams", headers=[(b"host", b"testserver"), *headers])

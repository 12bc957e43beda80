"""A socket of /ws/streams, and what its tests read from it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator

from tests.web.conftest import communicator

ASK = {"prompt": "tell me", "max_tokens": 8, "seed": 7}


def connect(key: str) -> WebsocketCommunicator:
    return communicator([(b"authorization", f"Bearer {key}".encode())])


@pytest.fixture
async def socket(alice_key: str) -> AsyncIterator[WebsocketCommunicator]:
    socket = connect(alice_key)
    connected, _ = await socket.connect()
    assert connected
    yield socket
    await socket.disconnect()


async def receive(socket: WebsocketCommunicator) -> dict[str, Any]:
    return json.loads(await socket.receive_from(timeout=30))  # type: ignore[no-any-return]


async def until_end(socket: WebsocketCommunicator) -> list[dict[str, Any]]:
    messages = [await receive(socket)]
    while messages[-1].get("event") not in ("done", "error"):
        messages.append(await receive(socket))
    return messages


def text_of(messages: list[dict[str, Any]]) -> str:
    return "".join(message["data"]["text"] for message in messages if message.get("event") == "token")

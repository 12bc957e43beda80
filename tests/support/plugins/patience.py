"""The clients of tests wait at least `SECONDS`; by themselves they wait one, five or ten, too few on a busy machine.

The test clients of Channels, httpx and websockets. A test that names a time itself is left alone by the last two.
"""

from __future__ import annotations

from typing import Any

import httpx
import websockets.sync.client
from asgiref.testing import ApplicationCommunicator
from httpx._config import DEFAULT_TIMEOUT_CONFIG

SECONDS = 60.0  # reached only by a test that fails

_receive_output, _wait = ApplicationCommunicator.receive_output, ApplicationCommunicator.wait


async def receive_output(self: ApplicationCommunicator, timeout: float = SECONDS) -> Any:  # noqa: ASYNC109
    return await _receive_output(self, max(timeout, SECONDS))


async def wait(self: ApplicationCommunicator, timeout: float = SECONDS) -> None:  # noqa: ASYNC109
    await _wait(self, max(timeout, SECONDS))


ApplicationCommunicator.receive_output = receive_output
ApplicationCommunicator.wait = wait
DEFAULT_TIMEOUT_CONFIG.__dict__.update(httpx.Timeout(SECONDS).as_dict())  # what all functions of httpx refer to
websockets.sync.client.connect.__kwdefaults__["open_timeout"] = SECONDS

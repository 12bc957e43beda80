"""The test clients of Channels wait at least `SECONDS`; by themselves they wait one, too little on a busy machine."""

from __future__ import annotations

from typing import Any

from asgiref.testing import ApplicationCommunicator

SECONDS = 60.0  # reached only by a test that fails

_receive_output, _wait = ApplicationCommunicator.receive_output, ApplicationCommunicator.wait


async def receive_output(self: ApplicationCommunicator, timeout: float = SECONDS) -> Any:  # noqa: ASYNC109
    return await _receive_output(self, max(timeout, SECONDS))


async def wait(self: ApplicationCommunicator, timeout: float = SECONDS) -> None:  # noqa: ASYNC109
    await _wait(self, max(timeout, SECONDS))


ApplicationCommunicator.receive_output = receive_output
ApplicationCommunicator.wait = wait

"""The control routes of the tests' own apps (wire_app.py): their JSON, and waits for a state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.support.servers.web_servers import Server

_DEADLINE_SECONDS = 60.0


def get(server: Server, path: str) -> dict[str, Any]:
    """Return the JSON answer of a control route."""
    value = httpx.get(server.url + path, timeout=_DEADLINE_SECONDS).raise_for_status().json()
    assert isinstance(value, dict)
    return value


def wait_for(server: Server, claim: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
    """Ask the server for its state until `claim` holds for it."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline:
        state = get(server, "/state")
        if claim(state):
            return state
        time.sleep(0.005)
    shown = {**state, "plans": state["plans"][-9:]}
    raise AssertionError(f"not within {_DEADLINE_SECONDS:.0f} s: {what}\n{shown}\n{server.output()}")

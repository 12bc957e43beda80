"""A remote client that waits for its server's refusal as long as that takes."""

from __future__ import annotations

import pytest

from streamserve.clients.remote import source


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is raised, however busy the machine is. By itself it is an event after `_ACCEPT_SECONDS`."""
    monkeypatch.setattr(source, "_ACCEPT_SECONDS", 60.0)

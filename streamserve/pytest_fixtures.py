"""pytest fixtures for sites that use streamserve: `pytest_plugins = ["streamserve.pytest_fixtures"]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from streamserve.testing import DaphneServer


@pytest.fixture
def streamserve_server(transactional_db: Any) -> Iterator[DaphneServer]:
    """The site of the test settings under a real daphne, on the test database; `.url` and `.websocket_url` reach it."""
    with DaphneServer() as server:
        yield server

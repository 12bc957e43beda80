"""Folders for engine processes; an engine that still listens there after a test is killed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.process.config import LaunchConfig
from streamserve.clients.process.link import spawn
from tests.support.engines.engine_processes import end_engine, spec_in


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket. Its engine (of `spec_in`) does not outlive the test."""
    with tempfile.TemporaryDirectory(prefix="engine-") as path:
        yield Path(path)
        end_engine(spec_in(path))


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[LaunchConfig]:
    """The spec of one running engine, for all tests of a file that leave it unchanged."""
    yield from _running()


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[LaunchConfig]:
    """The same, with steps so long that a test can act before the next one ends."""
    yield from _running(echo_step_seconds=0.03)


def _running(**fields: Any) -> Iterator[LaunchConfig]:
    with tempfile.TemporaryDirectory(prefix="engine-") as path:
        spec = spec_in(path, made_at=0.0, **fields)
        asyncio.run(spawn(spec))
        yield spec
        end_engine(spec)

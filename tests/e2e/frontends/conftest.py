"""Public front-end packages, run by Node and in Chromium against a daphne-served site."""

from __future__ import annotations

import pytest

from tests.support.servers.browser import browser
from tests.support.servers.node import node_of_tests

__all__ = ["browser"]


@pytest.fixture(scope="session")
def node() -> str:
    """Node's path; the test is skipped where Node or the packages of this folder are missing."""
    return node_of_tests()

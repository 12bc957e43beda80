"""Fixtures of the help pages' tests: the demo's passages, addresses and settings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.sites.help_desk import load_knowledge


@pytest.fixture
def site_of_help(settings: Any) -> None:
    """The demo site's addresses, and the demo model's way to answer."""
    settings.ROOT_URLCONF = "project.urls"
    settings.HELP_ANSWERS, settings.HELP_BESIDE_PAGES = "slots", False


@pytest.fixture
def knowledge(db: None, site_of_help: None) -> None:
    """The demo's passages, for tests of one thread."""
    load_knowledge()


@pytest.fixture
def shared_knowledge(transactional_db: None, site_of_help: None) -> None:
    """The demo's passages, seen by other threads too."""
    load_knowledge()

"""A folder for engine processes, which ends what listens in it; a site with users on real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import folder
from tests.proofs.users import Site, make_users, serving
from tests.support.servers import SERVERS

__all__ = ["folder", "site", "users"]


@pytest.fixture(scope="package")
def users(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a site with users, and their sessions."""
    folder = tmp_path_factory.mktemp("users")
    return folder, make_users(folder)


@pytest.fixture(scope="package", params=SERVERS)
def site(request: pytest.FixtureRequest, users: tuple[Path, list[str]]) -> Iterator[Site]:
    """tests/proofs/users_site.py under daphne with FlowServer, and under uvicorn."""
    with serving(request.param, *users) as site:
        site.control()  # begins all threads
        yield site

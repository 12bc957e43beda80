"""Every test of this folder is a proof. A folder for engine processes; a site with users on real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import folder
from tests.proofs.support.users import Site, make_users, serving
from tests.support.servers.web_servers import SERVERS

__all__ = ["folder", "site", "users"]
_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; the hook is given the items of all folders."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.proof)


@pytest.fixture(scope="package")
def users(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a site with users, and their sessions."""
    folder = tmp_path_factory.mktemp("users")
    return folder, make_users(folder)


@pytest.fixture(scope="package", params=SERVERS)
def site(request: pytest.FixtureRequest, users: tuple[Path, list[str]]) -> Iterator[Site]:
    """Serve tests/support/sites/users_site.py under daphne with FlowServer, and under uvicorn."""
    with serving(request.param, *users) as site:
        site.control()  # starts all threads
        yield site

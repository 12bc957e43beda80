"""The fixture `migrated`: the demo site's database for a new state folder, migrated once in a run and then copied."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.docs.demo_site import manage

Migrate = Callable[[Path], None]


@pytest.fixture(scope="session")
def migrated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Migrate:
    """Return what gives a state folder what `manage.py migrate` does, for sites with the demo's models."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # of xdist
        folder = folder.parent  # the workers' own lie in it
    whole = folder / "site.sqlite3"

    def migrate(state: Path) -> None:
        with (folder / "site.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not whole.exists():
                made = tmp_path_factory.mktemp("migrated")
                done = manage(made, "migrate", "--verbosity=0")
                assert done.returncode == 0, done.stderr
                shutil.move(made / "site.sqlite3", whole)
        shutil.copyfile(whole, state / "site.sqlite3")

    return migrate

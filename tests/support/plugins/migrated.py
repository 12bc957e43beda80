"""Databases of the demo site for new state folders: each is made once in a run by its commands, and then copied."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.docs.demo_site import manage

Migrate = Callable[..., None]
MIGRATE = ("migrate", "--verbosity=0")
KEY = "a-key-for-these-tests"
MAKE_KEY = ("streamserve_key", "create", "--key", KEY)

_made = pytest.StashKey[Path]()
_config: list[pytest.Config] = []


def pytest_configure(config: pytest.Config) -> None:
    """Keep the configuration: it knows the folder of this run."""
    _config.append(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Forget it, where pytest runs within a test."""
    _config.remove(config)


def prepare(state: Path, *commands: Sequence[str], **variables: str) -> None:
    """Do for a new state folder what `migrate` and then these commands do, for sites with the demo's models.

    A command that makes a key has to name it: the key is that of each such folder.
    """
    commands = (MIGRATE, *commands)
    name = hashlib.sha256(repr((commands, sorted(variables.items()))).encode()).hexdigest()[:16]
    folder = _folder_of_run()
    whole = folder / f"{name}.sqlite3"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            made = folder / f"{name}.state"
            made.mkdir()
            for command in commands:
                done = manage(made, *command, **variables)
                assert done.returncode == 0, done.stderr
            shutil.move(made / "site.sqlite3", whole)
    shutil.copyfile(whole, state / "site.sqlite3")


def _folder_of_run() -> Path:
    """Return a folder of this run, the same for all workers of xdist."""
    config = _config[-1]
    if _made not in config.stash:
        folder: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        if hasattr(config, "workerinput"):  # of xdist
            folder = folder.parent  # the workers' own lie in it
        config.stash[_made] = folder / "databases"
        config.stash[_made].mkdir(exist_ok=True)
    return config.stash[_made]


@pytest.fixture(scope="session")
def migrated() -> Migrate:
    """Return `prepare`."""
    return prepare

"""A site of its own with files and batches: its database, state folder and key, in processes that a test may kill."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import ROOT

SETTINGS = "tests.support.sites.batch_settings"


@dataclass
class BatchSite:
    """`env` are the variables of all its processes."""

    env: dict[str, str]
    key: str = ""
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        """Where its web process listens."""
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> httpx.Client:
        """Return a client of its tenant."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def manage(self, *arguments: str) -> str:
        """Run a management command to its end; return what it prints."""
        command = [sys.executable, str(ROOT / "manage.py"), *arguments]
        done = subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout


def make_site(folder: Path, variables: Mapping[str, str] | None = None) -> BatchSite:
    """Make the site's database and a key."""
    env = {name: value for name, value in os.environ.items() if name not in {"DJANGO_SETTINGS_MODULE", "KEY"}}
    env |= {"DJANGO_SETTINGS_MODULE": SETTINGS, "STREAMSERVE_STATE_DIR": str(folder), "PYTHONUNBUFFERED": "1"}
    site = BatchSite(env | dict(variables or {}))
    site.manage("migrate", "--verbosity=0")
    (site.key,) = [
        one for one in site.manage("streamserve_key", "create", "--name", "batches").split() if len(one) > 30
    ]
    return site


@contextlib.contextmanager
def engines_stopped(site: BatchSite) -> Iterator[None]:
    """Stop the site's engines after the block."""
    try:
        yield
    finally:
        for alias in ("echo", "helpdesk"):
            with contextlib.suppress(AssertionError):  # it was not started
                site.manage("streamserve_engine", alias, "--stop")


def start_worker(env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a worker of batches; what it prints is added to `log`."""
    with log.open("ab") as out:
        command = [sys.executable, "manage.py", "streamserve_worker", "--kinds", "batch"]
        return subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stdout=out, stderr=out)

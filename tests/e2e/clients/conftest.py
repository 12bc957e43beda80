"""A daphne-served site whose engine process has the trained model of tests/support/models/thinking_model.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.models.thinking_model import thinking_model
from tests.support.plugins.migrated import Migrate
from tests.support.servers.web_servers import ROOT, Server, daphne, wait_until_ready

MODEL = "thinker"


@pytest.fixture(scope="package")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of the site, with a state folder of its own."""
    return {
        "DJANGO_SETTINGS_MODULE": "tests.support.sites.thinker_settings",
        "STREAMSERVE_STATE_DIR": str(tmp_path_factory.mktemp("state")),
        "THINKER": str(thinking_model()),
    }


@pytest.fixture(scope="package")
def site(env: dict[str, str], migrated: Migrate) -> Iterator[Server]:
    """The site, with its model loaded: one for all tests."""
    migrated(Path(env["STREAMSERVE_STATE_DIR"]))
    with daphne("project.asgi:application", env=env) as server:
        wait_until_ready(server.url)
        yield server
    manage(env, "streamserve_engine", "--stop")


@pytest.fixture(scope="package")
def key(env: dict[str, str], site: Server) -> str:
    """An API key of the site."""
    (key,) = [line for line in manage(env, "streamserve_key", "create", "--name", "clients").split() if len(line) > 30]
    return key


def manage(env: dict[str, str], *arguments: str) -> str:
    """Run a management command of the site; return what it prints."""
    command = [sys.executable, str(ROOT / "manage.py"), *arguments]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def client(site: Server, key: str) -> Iterator[openai.OpenAI]:
    """The official client."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0, http_client=http) as client:
        yield client

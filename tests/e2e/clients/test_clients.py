"""SDKs that many programs use, each in a script of scripts/: the tool loop, structured output, reasoning.

They run in a venv of their own, STREAMSERVE_CLIENTS_VENV or .venv-clients, which .ci/run makes:
`python project/install.py --venv .venv-clients -r tests/e2e/clients/requirements.txt`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.clients.conftest import MODEL
from tests.support.servers.web_servers import Server

pytestmark = pytest.mark.proof

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("use_*.py"))
VENV = Path(os.environ.get("STREAMSERVE_CLIENTS_VENV") or ROOT / ".venv-clients")
_SECONDS = 180  # litellm alone takes a while to import


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python of the clients' venv."""
    python = VENV / "bin" / "python"
    if not python.exists():
        if os.environ.get("STREAMSERVE_REQUIRE") == "all":
            pytest.fail(f"the clients' venv {VENV} is missing")
        pytest.skip(f"needs the clients' venv: {VENV} or STREAMSERVE_CLIENTS_VENV")
    return python


@pytest.fixture(scope="module")
def worker(python: Path, site: Server, env: dict[str, str]) -> Iterator[None]:
    """A process that runs the site's batches; none without the venv, as it would end before it has begun."""
    command = [sys.executable, "manage.py", "streamserve_worker", "--kinds", "batch"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, stderr=subprocess.DEVNULL)
    yield
    process.terminate()
    assert process.wait(timeout=30) == 0


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_client_works(site: Server, key: str, python: Path, script: Path) -> None:
    """The script, which asserts what the client read, ends without an error."""
    environ = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    command = [str(python), str(script), site.url, key, MODEL]
    done = subprocess.run(command, cwd="/", env=environ, text=True, capture_output=True, timeout=_SECONDS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}\n{site.output()[-2000:]}"

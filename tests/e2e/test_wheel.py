"""The wheel, installed in a new venv, added to a new site by the README's own lines, streams."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.servers import daphne, wait_until_ready

ROOT = Path(__file__).resolve().parents[2]
README_MODEL = "Qwen/Qwen3-0.6B"

pytestmark = pytest.mark.proof


def readme_blocks() -> dict[str, str]:
    """Return the code blocks under "Add it to your own site", by the file name in their first comment."""
    section = (ROOT / "README.md").read_text().split("## Add it to your own site")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", section, re.DOTALL)
    return {name: code.replace(README_MODEL, "echo") for name, code in blocks}


def run(*command: str | Path, cwd: Path) -> str:
    """Run `command` without this repository on its path and return what it printed."""
    environ = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "DJANGO_SETTINGS_MODULE"}
    }
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new Django site with the built wheel and the README's lines in it; no torch anywhere."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=ROOT)
    (wheel,) = folder.glob("streamserve-*.whl")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    binaries = folder / "venv" / "bin"
    run(binaries / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    run(binaries / "django-admin", "startproject", "mysite", cwd=folder)
    project = folder / "mysite"
    for name, code in readme_blocks().items():
        with (project / "mysite" / name).open("a") as file:
            file.write("\n" + code)
    run(binaries / "python", "manage.py", "migrate", cwd=project)
    return project


def test_readme_lines_make_a_site_that_streams(site: Path) -> None:
    """Five lines in a new site: checks are silent, a key streams an answer to its terminal event, statics are found."""
    assert set(readme_blocks()) == {"settings.py", "urls.py"}
    python = site.parent / "venv" / "bin" / "python"
    assert "no issues" in run(python, "manage.py", "check", cwd=site)
    assert "torch" not in run(python, "-m", "pip", "list", cwd=site)
    key = run(python, "manage.py", "streamserve_key", "create", "--name", "test", cwd=site).split()[-1]
    with daphne("mysite.asgi:application", cwd=site, python=python) as server:
        wait_until_ready(server.url)
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": "hello", "max_tokens": 8}
        answer = httpx.post(f"{server.url}/streams", json=body, headers=headers, timeout=60)
    run(python, "manage.py", "streamserve_engine", "--stop", cwd=site)
    assert answer.status_code == 200, answer.text
    assert answer.text.count("event: done") == 1

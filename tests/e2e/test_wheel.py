"""The release's wheel and sdist, each installed in a new venv, added to a new site by the README's own blocks.

They stream on every server of the README: on this Python, with its newest Django, and the wheel also on the newest
Python of this machine. `make dist` runs this file on the archives that it has built (STREAMSERVE_DIST).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import dist, newest
from tests.support.docs.doc_blocks import Block, blocks_of, is_server
from tests.support.servers.ports import free_port
from tests.support.servers.sockets import open_socket
from tests.support.servers.web_servers import ROOT, run_server, wait_until_ready

SECTION = "Add it to your own site"
README_MODEL = "Qwen/Qwen3-0.6B"
README_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"

pytestmark = pytest.mark.proof


def readme(language: str) -> list[Block]:
    return [block for block in blocks_of("README.md", SECTION) if block.language == language]


def commands() -> list[str]:
    return [command for block in readme("sh") for command in block.commands]


SERVERS = [command for command in commands() if is_server(command)]


def environ(binaries: Path) -> dict[str, str]:
    """Return an environment with the venv's programs and without this repository."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "DJANGO_SETTINGS_MODULE"}}
    return {**kept, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"}


def run(command: str, cwd: Path, binaries: Path) -> str:
    """Run one command of the README, and return what it printed."""
    done = subprocess.run(command, shell=True, cwd=cwd, env=environ(binaries), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


class Site:
    """A new Django site with a built archive and the README's lines in it; no torch anywhere."""

    def __init__(self, folder: Path, archive: Path, python: str) -> None:
        subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
        self.binaries, self.project = folder / "venv" / "bin", folder / "mysite"
        self.output: dict[str, str] = {}
        for block in readme("sh")[:1]:
            for command in block.commands:
                if command != README_TORCH:  # 200 MB; the echo engine does without
                    self.run(command.replace('"./streamserve[engine]"', str(archive)), folder)
        for block in readme("python"):
            with (self.project / "mysite" / block.file_name).open("a") as file:
                file.write("\n" + block.code.replace(README_MODEL, "echo"))
        for command in commands():
            if command.startswith("python manage.py") and not is_server(command):
                self.run(command, self.project)
        self.run(f"pip install --quiet {hint_of('uvicorn')}", folder)

    def run(self, command: str, cwd: Path) -> None:
        """Run a command; keep its output."""
        self.output[command] = run(command, cwd, self.binaries)


def hint_of(server: str) -> str:
    """Return the packages that the comment beside a server's line names."""
    text = "\n".join(block.text for block in readme("sh"))
    found = re.search(rf"^{server} .*# pip install (.+)$", text, re.MULTILINE)
    assert found, server
    return found.group(1)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist and the wheel: those of `make dist`, or built now."""
    given = os.environ.get("STREAMSERVE_DIST")
    if given:
        return {kind: next((ROOT / given).glob(f"streamserve-*{kind}")) for kind in (".tar.gz", ".whl")}
    sdist, wheel = dist.build(tmp_path_factory.mktemp("dist"))
    return {".tar.gz": sdist, ".whl": wheel}


@pytest.fixture(scope="module", params=["wheel", "sdist", "wheel, newest Python"])
def site(
    request: pytest.FixtureRequest, archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    python = newest.find() if "newest" in request.param else sys.executable
    if python is None:
        pytest.skip("needs a Python 3.12 or later on this machine")
    archive = archives[".tar.gz" if request.param == "sdist" else ".whl"]
    site = Site(tmp_path_factory.mktemp("site"), archive, str(python))
    yield site
    run("python manage.py streamserve_engine --stop", site.project, site.binaries)


def test_the_archives_are_whole(archives: dict[str, Path]) -> None:
    """Each has every file of the package that git tracks, and no other; the version and README are the package's."""
    sdist, wheel = archives[".tar.gz"], archives[".whl"]
    assert [
        *dist.faults_of(sdist, dist.names_of_sdist(sdist)),
        *dist.faults_of(wheel, dist.names_of_wheel(wheel)),
    ] == []


def test_the_readme_has_the_lines_that_this_runs() -> None:
    """Three files, three servers, and the commands around them."""
    assert [block.file_name for block in readme("python")] == ["settings.py", "asgi.py", "urls.py"]
    assert [command.split()[0] for command in SERVERS] == ["python", "uvicorn", "daphne"]
    assert README_TORCH in commands()


def test_the_checks_are_silent(site: Site) -> None:
    """`manage.py check` has nothing to say, and nothing has installed PyTorch."""
    assert "no issues" in site.output["python manage.py check"]
    assert "torch" not in run("pip list", site.project, site.binaries)


@pytest.mark.parametrize("command", SERVERS)
def test_every_server_of_the_readme_serves_the_same(site: Site, command: str) -> None:
    """HTTP streams to its terminal event, the WebSocket answers, static files are there."""
    key = site.output["python manage.py streamserve_key create"].split()[-1]
    port = free_port()
    options = {"python": f"{port} --noreload", "daphne": f"-p {port}", "uvicorn": f"--port {port}"}
    arguments = shlex.split(f"{command} {options[command.split()[0]]}")
    arguments[0] = str(site.binaries / arguments[0])
    with run_server(arguments, port, site.project, environ(site.binaries)) as server:
        wait_until_ready(server.url)
        headers = {"Authorization": f"Bearer {key}"}
        ask = {"prompt": "hello", "max_tokens": 8}
        answer = httpx.post(f"{server.url}/streams", json=ask, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.text.count("event: done") == 1
        with open_socket(server.websocket_url, key) as socket:
            started = socket.ask("start", request=ask)
            assert socket.events(started["id"])[-1]["event"] == "done"
        assert httpx.get(f"{server.url}/static/streamserve/chat.js").status_code == 200
        assert "data-streamserve-chat" in httpx.get(f"{server.url}/chat/").text
        assert "not_wrapped" not in server.output()

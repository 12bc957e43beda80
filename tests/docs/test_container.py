"""Dockerfile and compose.yaml: their commands, run as a script, serve the demo site.

No image is built: that needs a daemon and a registry. Not shown are the base image, the packages of Debian, the user
and the download of the pinned packages; all else is run as it stands there (tests/support/docs/container.py).
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.checks.stream_checks import check_native, text_of
from tests.support.docs.container import Image, ignored, instructions, is_ignored, parsed
from tests.support.docs.demo_site import end_engines
from tests.support.docs.doc_blocks import blocks_of
from tests.support.docs.doc_site import DocSite
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import ROOT, wait_until_ready

pytestmark = pytest.mark.proof

KEY = "the-key-of-a-container-0001"
DOCKERFILE = ROOT / "Dockerfile"
[SERVICE] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """What the Dockerfile makes."""
    return Image(tmp_path_factory.mktemp("image")).build(DOCKERFILE)


@pytest.fixture(scope="module")
def port(image: Image) -> Iterator[int]:
    """A container under way: CMD in the environment of ENV, on loopback and a free port, with MODEL=echo."""
    port = free_port()
    environ = image.run_environ()
    state = Path(environ["STREAMSERVE_STATE_DIR"])
    state.mkdir(mode=0o700)
    environ |= {"HOST": "127.0.0.1", "PORT": str(port), "STREAMSERVE_DEMO_KEY": KEY, "STREAMSERVE_MODEL": "echo"}
    site = subprocess.Popen(image.command, cwd=image.folder, env=environ, stdout=subprocess.PIPE, text=True)
    assert site.stdout is not None
    try:
        assert any("Ctrl-C" in line for line in site.stdout), "it serves"
        wait_until_ready(f"http://127.0.0.1:{port}")
        yield port
    finally:
        site.send_signal(signal.SIGTERM)  # as `docker stop` sends it
        with contextlib.ExitStack() as stack:
            stack.callback(end_engines, state)
            site.communicate(timeout=60)
    assert site.returncode == 0


def test_the_commands_that_are_not_run_are_the_systems(image: Image) -> None:
    """Debian's packages, the user, and the folder that is the user's."""
    packages, user, folder = image.skipped
    assert re.search(r"install -y --no-install-recommends g\+\+ &&", packages)
    assert user == "useradd --create-home demo"
    assert folder == "mkdir -m 700 /srv/state && chown demo /srv/state"


def test_the_pins_are_installed_and_the_kernels_built(image: Image) -> None:
    """pip found every pinned package in its version; the build of the kernels names its library."""
    installed = next(text for command, text in image.output.items() if "install.py" in command)
    pins = re.findall(r"^[\w.-]+(?===)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert len(re.findall("^Requirement already satisfied: ", installed, re.MULTILINE)) >= len(pins)
    assert ".so" in next(text for command, text in image.output.items() if "native.build" in command)


def test_the_base_image_has_a_python_that_is_tested() -> None:
    """The one on which all tests run, by CI's and pyproject's own words."""
    [base] = [one.rest for one in instructions(DOCKERFILE) if one.word == "FROM"]
    version = base.removeprefix("python:").removesuffix("-slim")
    assert f">={version}" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]


def test_it_serves_pages_and_answers(image: Image, port: int) -> None:
    """The first page, an answer by the given key, and compose's own check of its health."""
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        assert "data-streamserve-chat" in client.get("/").text
        asked = {"prompt": "How do I pause my subscription?", "max_tokens": 8}
        answer = client.post("/streams", json=asked, headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200, answer.text
        assert text_of(check_native(answer.content)).strip()
    kind, *command = SERVICE["healthcheck"]["test"]
    assert kind == "CMD"
    check = [image.here(part).replace(":8000/", f":{port}/") for part in command]
    checked = subprocess.run(check, env=image.run_environ(), capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


def test_compose_gives_what_the_image_needs() -> None:
    """Its own folder as context, the port on loopback only, the volume where the state is, time to end."""
    words = {one.word: one.rest for one in instructions(DOCKERFILE)}
    assert (SERVICE["build"], SERVICE["init"]) == (".", True)
    assert SERVICE["ports"] == [f"127.0.0.1:${{PORT:-8000}}:{words['EXPOSE']}"]
    assert [volume.partition(":")[2] for volume in SERVICE["volumes"]] == [
        words["VOLUME"],
        f"/home/{words['USER']}/.cache",
    ]
    assert int(SERVICE["stop_grace_period"].removesuffix("s")) > 10
    environ: dict[str, Any] = SERVICE["environment"]
    assert environ == {"STREAMSERVE_MODEL": "${MODEL:-}", "STREAMSERVE_DEMO_KEY": "${KEY:-}"}


def test_an_image_holds_no_secret_of_this_machine() -> None:
    """Neither the state with the secret key, nor a repository or an environment; the site's own files are there."""
    patterns = ignored(ROOT / ".dockerignore")
    for name in ("state/secret_key", ".git/config", ".venv/bin/python", ".venv-docs/x", "project/__pycache__/a.pyc"):
        assert is_ignored(name, patterns), name
    for name in ("manage.py", "project/settings.py", "streamserve/conf.py", "project/demo_model/helpdesk/config.json"):
        assert not is_ignored(name, patterns), name


def test_the_pages_show_the_commands_that_there_are() -> None:
    """`docker compose up` takes this compose.yaml, and the variables before it are those of the service."""
    for page in ("README.md", "docs/deploy.md"):
        assert "docker compose up" in (ROOT / page).read_text(), page
    [block] = [block for block in blocks_of("docs/deploy.md", "Containers") if block.language == "console"]
    for name in re.findall(r"([A-Z]+)=", block.text):
        assert f"${{{name}:-" in (ROOT / "compose.yaml").read_text(), name


def test_the_lines_for_a_site_of_ones_own_serve_it(tmp_path: Path) -> None:
    """The extras are the package's; CMD serves README's site without DEBUG, and starts its engine."""
    blocks = blocks_of("docs/deploy.md", "Containers")
    [lines] = [parsed(block.text) for block in blocks if block.language == "dockerfile"]
    [extras] = re.findall(r"streamserve\[([\w,]+)\]", " ".join(one.rest for one in lines))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= known.keys()
    site = DocSite(tmp_path)
    for block in blocks:
        if block.file_name:
            site.write(block, replacing={"/srv/state": str(tmp_path / "state")})
    site.run(f"python manage.py streamserve_key create --key {KEY}")
    try:
        with site.serve(shlex.join(json.loads(lines[-1].rest)).replace("0.0.0.0", "127.0.0.1")) as server:
            wait_until_ready(server.url)
            asked, key = {"prompt": "hello", "max_tokens": 8}, {"Authorization": f"Bearer {KEY}"}
            answer = httpx.post(f"{server.url}/streams", json=asked, headers=key, timeout=60, trust_env=False)
            assert answer.status_code == 200, answer.text
            assert text_of(check_native(answer.content)).strip()
            assert httpx.get(f"{server.url}/chat/", trust_env=False).status_code == 404
    finally:
        site.close()

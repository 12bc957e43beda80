"""docs/quickstart.md and docs/deploy.md: their blocks run in a site that the README's blocks have made."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.docs.doc_blocks import blocks_of, is_server
from tests.support.docs.doc_site import DocSite
from tests.support.servers.web_servers import wait_until_ready

pytestmark = pytest.mark.proof

USER = "from django.contrib.auth.models import User; User.objects.create_user('alice')"
KEY = "a-key-of-the-tests-0001"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocSite]:
    site = DocSite(tmp_path_factory.mktemp("pages"))
    site.run(f'python manage.py shell -v 0 -c "{USER}"')
    site.run(f"python manage.py streamserve_key create --user alice --key {KEY}")
    yield site
    site.close()


def commands(page: str, heading: str) -> list[str]:
    return [command for block in blocks_of(page, heading) if block.language == "sh" for command in block.commands]


def test_the_quickstarts_commands_do_what_they_say(site: DocSite) -> None:
    """Keys, the terminal chat, the engine, the purge; `capacity` is for real models, and says so."""
    for command in commands("docs/quickstart.md", "Your own site"):
        if is_server(command):
            with site.background(command.split()):
                pass
        elif "revoke" in command:
            lines = site.output["python manage.py streamserve_key list"].splitlines()
            [laptop] = [line for line in lines if "laptop" in line]
            site.run(command.replace("ID", laptop.split()[0]))
        elif "streamserve_chat" in command:
            assert "Hello" in site.run(f"echo Hello | {command}")
        elif "streamserve_capacity" in command:
            site.run(command, ok=False)
        else:
            site.run(command)
    assert "revoked" in site.run("python manage.py streamserve_key list")


def test_the_quickstarts_test_passes(site: DocSite) -> None:
    """By `manage.py test`."""
    for block in blocks_of("docs/quickstart.md", "Tests of your site"):
        site.write(block)
    assert "OK" in site.run("python manage.py test")


def test_the_deployments_settings_and_commands_work(site: DocSite) -> None:
    """Settings, checks, migration, static files; then the command that shows what buffers, on two workers' engine."""
    folders = {'"/srv/mysite/models/chat"': '"echo"', "/srv/mysite": str(site.project)}
    for block in blocks_of("docs/deploy.md", "Settings"):
        if block.file_name:
            site.write(block, replacing=folders)
    for command in commands("docs/deploy.md", "Settings"):
        if not command.startswith("systemctl"):  # the units' commands: tests/proofs/restarts/test_rolling_restart.py
            site.run(command)
    assert "streamserve.E" not in site.output["python manage.py check --deploy"]
    assert (site.project / "static" / "streamserve" / "chat.js").exists()
    [doctor] = [command for command in commands("docs/deploy.md", "nginx") if "streamserve_doctor" in command]
    engine = site.background(["python", "manage.py", "streamserve_engine", "chat"])
    with engine, site.serve("daphne mysite.asgi:application") as server:
        wait_until_ready(server.url)
        doctor = doctor.replace("https://example.org", server.url).replace(" http://127.0.0.1:8001", "")
        said = site.run(f"{doctor} || true")  # "echo" can be too fast for the checks that leave an answer
        assert re.search(r"^0 found", said, re.MULTILINE), said

"""docs/python.md: every block runs, in a site that the README's blocks have made."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.support.checks.stream_checks import check_native
from tests.support.docs.doc_blocks import blocks_of
from tests.support.docs.doc_site import DocSite
from tests.support.servers.web_servers import wait_until_ready

pytestmark = pytest.mark.proof

PAGE = "docs/python.md"
CELERY = "def shared_task(function):\n    return function\n"  # Celery is not installed: a task is a function
FORKED = """
from multiprocessing import get_context
from shop.tasks import summarize
from django.contrib.auth import get_user_model
pk = get_user_model().objects.create_user("worker").pk
from django.db import connections
connections.close_all()
pool = get_context("fork").Pool(2)
print(len(pool.starmap(summarize, [("a text", pk)] * 4)))
pool.close()
pool.join()
"""
OWNERS = "from streamserve.models import Stream; print(*Stream.objects.values_list('owner', 'state').distinct())"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocSite]:
    site = DocSite(tmp_path_factory.mktemp("python"))
    with (site.project / "mysite" / "settings.py").open("a") as file:
        file.write('INSTALLED_APPS += ["shop"]\nSTREAMSERVE["ANONYMOUS"] = True\n')
    (site.project / "celery.py").write_text(CELERY)
    for block in blocks_of(PAGE):
        if block.file_name:
            site.write(block)
    yield site
    site.close()


def test_the_views_answer(site: DocSite) -> None:
    """Whole answers, one as the response, one by its address; a visitor's answer is the visitor's."""
    with site.serve("daphne mysite.asgi:application") as server:
        wait_until_ready(server.url)
        with httpx.Client(base_url=server.url, params={"what": "boats"}, timeout=60, trust_env=False) as client:
            assert client.get("/describe").json()["text"]
            assert client.get("/title").json()["title"]
            check_native(client.get("/tell").content)
            begun = client.get("/begin").json()
            assert begun["url"] == f"/streams/{begun['id']}/events"
            check_native(client.get(begun["url"]).content)


def test_the_command_prints_the_answer(site: DocSite) -> None:
    """It ends with the answer, by the engine that the site has."""
    (command,) = [command for block in blocks_of(PAGE) if block.language == "sh" for command in block.commands]
    assert site.run(command).endswith("A poem about the sea.")  # the echo engine


def test_the_task_runs_in_forked_workers(site: DocSite) -> None:
    """Two worker processes, two tasks each, for one user; every row has its end."""
    (site.project / "forked.py").write_text(FORKED)
    assert site.run("python -W ignore manage.py shell -v 0 -c 'import forked'").split()[-1] == "4"
    owners = site.run(f'python manage.py shell -v 0 -c "{OWNERS}"')
    assert "('user:1', 'finished')" in owners
    assert "running" not in owners


def test_errors_are_caught_as_the_page_shows(site: DocSite) -> None:
    """The last example returns a text, and None for a question that is refused for good."""
    code = "from shop.safe import answer_or_none as ask; print(bool(ask('a')), ask('x' * 500_000))"
    assert site.run(f'python manage.py shell -v 0 -c "{code}"').splitlines()[-1] == "True None"

"""docs/tutorial.md: every block is run, in the order of the page; its servers serve what the page says."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page

from tests.support.checks.stream_checks import check_native
from tests.support.docs.doc_blocks import Block, blocks_of, is_server
from tests.support.docs.doc_site import DocSite
from tests.support.servers.browser import ask, chromium, wait_for_status, watching
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.web_servers import Server, wait_until_ready

pytestmark = pytest.mark.proof

PAGE = "docs/tutorial.md"
ADDRESS = "http://127.0.0.1:8000"
# What a machine does once; the wheel's test does it (tests/e2e/test_wheel.py).
INSTALL = ["python3 -m venv venv", ". venv/bin/activate", "pip install ./streamserve", "cd mysite"]


def steps() -> dict[str, list[Block]]:
    """Return the page's blocks by the number of their step."""
    out: dict[str, list[Block]] = {}
    for block in blocks_of(PAGE):
        out.setdefault(block.heading[0], []).append(block)
    return out


STEPS = steps()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocSite]:
    site = DocSite(tmp_path_factory.mktemp("tutorial"), apply_readme=False)
    yield site
    site.close()


def follow(site: DocSite, step: str) -> list[str]:
    """Write the files of a step and run its commands; return those that are servers, or talk to one."""
    left = []
    for block in STEPS[step]:
        if block.file_name:
            site.write(block)
        for command in block.commands if block.language == "sh" else []:
            if command.startswith("export "):
                name, _, value = command.removeprefix("export ").partition("=")
                site.env[name] = value
            elif is_server(command) or ADDRESS in command:
                left.append(command)
            elif command not in INSTALL:
                site.run(command, site.folder if command.startswith("django-admin") else None)
    return left


@contextlib.contextmanager
def signed_in(server: Server) -> Iterator[httpx.Client]:
    """Sign in as the page does."""
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        client.get("/admin/login/")
        form = {"username": "ann", "password": "a-long-password", "csrfmiddlewaretoken": client.cookies["csrftoken"]}
        assert client.post("/admin/login/", data=form, headers={"referer": server.url}).status_code == 302
        yield client


def test_1_a_site_is_made(site: DocSite) -> None:
    """startproject and startapp; nothing else is left to run."""
    assert follow(site, "1") == []
    assert (site.project / "shop" / "views.py").exists()


def test_2_curl_sees_the_answer_stream(site: DocSite) -> None:
    """The checks are silent, and the page's own curl gets the events of one whole answer."""
    serve, curl = follow(site, "2")
    assert "no issues" in site.output["python manage.py check"]
    with site.serve(serve) as server:
        wait_until_ready(server.url)
        check_native(site.run(curl.replace(ADDRESS, server.url)).encode())


def test_3_the_chat_is_in_a_page_with_a_login(site: DocSite) -> None:
    """Without a login it leads to one; with it the page has the chat, its files are served, its streams answer."""
    (serve,) = follow(site, "3")
    with site.serve(serve) as server:
        wait_until_ready(server.url)
        assert httpx.get(f"{server.url}/help/").headers["location"].startswith("/admin/login/")
        with signed_in(server) as client:
            page = client.get("/help/").text
            for path in re.findall(r'(?:src|href)="(/static/[^"]+)"', page):
                assert client.get(path).status_code == 200, path
            [url] = re.findall(r'data-streams-url="([^"]+)"', page)
            headers = {"x-csrftoken": client.cookies["csrftoken"], "referer": server.url}
            check_native(client.post(url, json={"prompt": "Hello"}, headers=headers).content)


@pytest.mark.browser
def test_the_chats_page_fits_the_screen(site: DocSite) -> None:
    """On phones as on desktops the page is as wide and as high as the screen, before and after a question."""
    with site.serve("python manage.py runserver") as server, chromium() as browser:
        wait_until_ready(server.url)
        for width, height in ((360, 640), (390, 844), (1280, 800)):
            options = {
                "viewport": {"width": width, "height": height},
                "is_mobile": width < 600,
                "has_touch": width < 600,
            }
            with watching(browser, server.url, **options) as visit:
                visit.expect_complaint("404")  # the site has no icon
                check_fit(visit.page, server.url, width, height)


def check_fit(page: Page, url: str, width: int, height: int) -> None:
    """Sign in on a screen of that size, and ask twice."""
    page.goto(f"{url}/admin/login/?next=/help/")
    page.get_by_label("Username").fill("ann")
    page.get_by_label("Password").fill("a-long-password")
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{url}/help/")
    for _ in range(2):
        assert page.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
        assert page.evaluate("document.documentElement.scrollHeight") == height
        composer = page.locator(".ss-composer").bounding_box()
        assert composer is not None
        assert 0 < composer["y"] < composer["y"] + composer["height"] < height
        ask(page, "Hello " * 40)
        wait_for_status(page, "Answer complete")


def test_4_a_view_asks_the_model(site: DocSite) -> None:
    """The echo engine's title is the question."""
    assert follow(site, "4") == []
    with site.serve("python manage.py runserver") as server:
        wait_until_ready(server.url)
        with signed_in(server) as client:
            assert client.get("/title/?what=boats").json() == {"title": "A title for boats"}


def test_5_a_customer_is_answered_from_the_own_orders(site: DocSite) -> None:
    """Ann's prompt has her order; the key's has none; for a visitor there is no such pipeline."""
    assert follow(site, "5") == []
    asked, path = {"prompt": "When?"}, "/pipelines/my_orders"
    with site.serve("python manage.py runserver") as server:
        wait_until_ready(server.url)
        with signed_in(server) as client:
            headers = {"x-csrftoken": client.cookies["csrftoken"], "referer": server.url}
            assert (
                client.post(path, json=asked, headers=headers)
                .json()["text"]
                .startswith("The customer has ordered: a red boat.")
            )
        key = {"Authorization": "Bearer tutorial-key-0001"}
        found = httpx.post(f"{server.url}{path}", json=asked, headers=key, timeout=60).json()
        assert found["text"].startswith("The customer has ordered: nothing.")
        assert httpx.post(f"{server.url}{path}", json=asked, timeout=60).status_code == 401


def test_6_the_sites_own_test_passes(site: DocSite) -> None:
    """`manage.py test`, without pytest."""
    assert follow(site, "6") == []
    assert re.search(r"Ran 4 tests in .*\n\nOK", site.output["python manage.py test"])


def test_the_sites_own_test_passes_on_postgresql(site: DocSite) -> None:
    """No connection is left that would keep the test runner from dropping its database."""
    with PostgresServer() as server:
        (site.project / "mysite" / "on_postgres.py").write_text(
            f"""from mysite.settings import *
DATABASES = {{"default": {{
    "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres",
    "HOST": "127.0.0.1", "PORT": {server.port},
}}}}
"""
        )
        output = site.run("python manage.py test --settings mysite.on_postgres")
    assert re.search(r"Ran 4 tests in .*\n\nOK", output)


def test_7_it_is_deployed(site: DocSite) -> None:
    """Two web processes say that the engine is missing; once it runs, both answer by it."""
    site.close()  # the engine that runserver has started ends a minute after its last client
    engine, *workers = follow(site, "7")
    assert (site.project / "static" / "streamserve" / "chat.js").exists()
    headers = {"Authorization": "Bearer tutorial-key-0001"}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(site.serve(command)) for command in workers]
        for server in servers:
            refused = httpx.post(f"{server.url}/streams", json={"prompt": "a"}, headers=headers, timeout=60)
            words = "No engine runs for the model 'chat'. Start it with: manage.py streamserve_engine chat"
            assert (refused.status_code, refused.json()["error"]["message"]) == (503, words)
        stack.enter_context(site.background(shlex.split(engine)))
        for server in servers:
            wait_until_ready(server.url)
            check_native(httpx.post(f"{server.url}/streams", json={"prompt": "a"}, headers=headers, timeout=60).content)


def test_every_step_is_tested() -> None:
    """A new step needs its test."""
    names = [name for name in globals() if re.match(r"test_\d_", name)]
    assert sorted(STEPS) == sorted(name.split("_")[1] for name in names)

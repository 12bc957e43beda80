"""A site under a prefix: `include` under "ai/", and a script name from Django or from the server, on real servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from tests.support.plugins.migrated import KEY, MAKE_KEY, Migrate
from tests.support.servers.browser import ADMIN_NAME, ADMIN_PASSWORD, ADMINISTRATOR, MAKE_ADMINISTRATOR
from tests.support.servers.sockets import open_socket
from tests.support.servers.web_servers import Server, daphne, uvicorn, wait_until_ready

pytestmark = pytest.mark.proof

SETTINGS = "tests.support.sites.prefixed_site"
LOGIN = {"username": ADMIN_NAME, "password": ADMIN_PASSWORD}


class Site(NamedTuple):
    """A server, the script name in the paths that it is sent, and the one that a browser sees."""

    server: Server
    sent: str
    seen: str


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> dict[str, str]:
    """The variables of the site, whose database has a superuser and a key: one for all servers."""
    state = tmp_path_factory.mktemp("state")
    env = {"DJANGO_SETTINGS_MODULE": SETTINGS, "STREAMSERVE_MODEL": "echo", "STREAMSERVE_STATE_DIR": str(state)}
    migrated(state, MAKE_ADMINISTRATOR, MAKE_KEY, **ADMINISTRATOR)
    return env


@pytest.fixture(
    scope="module",
    params=["daphne", "daphne SCRIPT_NAME", "daphne --root-path", "uvicorn --root-path"],
)
def site(request: pytest.FixtureRequest, env: dict[str, str]) -> Iterator[Site]:
    """The site on each server. Paths are sent whole, but to `uvicorn --root-path`, which adds the name itself."""
    name, _, way = request.param.partition(" ")
    env = {**env, "SCRIPT_NAME": "/shop" if way == "SCRIPT_NAME" else ""}
    options = ["--root-path", "/shop"] if way == "--root-path" else []
    serve = {"daphne": daphne, "uvicorn": uvicorn}[name]
    with serve("project.asgi:application", *options, env=env) as server:
        seen = "/shop" if way else ""
        sent = "" if (name, way) == ("uvicorn", "--root-path") else seen
        wait_until_ready(f"{server.url}{sent}/ai")
        yield Site(server, sent, seen)


def test_http_and_websocket_answer_beside_each_other(site: Site) -> None:
    """POST /ai/streams streams to its end, and /ai/ws/streams takes a start."""
    server, sent, _ = site
    ask = {"prompt": "hello", "max_tokens": 4}
    answer = httpx.post(f"{server.url}{sent}/ai/streams", json=ask, timeout=60)
    assert answer.text.count("event: done") == 1, answer.text
    with open_socket(f"{server.websocket_url}{sent}/ai", KEY) as socket:
        started = socket.ask("start", request=ask)
        assert socket.events(started["id"])[-1]["event"] == "done"


def test_the_chat_page_names_addresses_under_the_prefix(site: Site) -> None:
    """Every address in the page is one that the browser can call."""
    server, sent, seen = site
    page = httpx.get(f"{server.url}{sent}/chat/").text
    assert f'data-streams-url="{seen}/ai/streams"' in page
    assert f'data-ready-url="{seen}/ai/readyz"' in page


def test_the_admin_shows_the_live_page(site: Site) -> None:
    """The login leads to the live page, whose event stream is under the prefix."""
    server, sent, seen = site
    with httpx.Client(base_url=f"{server.url}{sent}", follow_redirects=False) as client:
        client.get("/admin/login/")
        response = client.post(
            "/admin/login/",
            data={**LOGIN, "csrfmiddlewaretoken": client.cookies["csrftoken"]},
            headers={"referer": server.url},
        )
        assert response.status_code == 302, response.text
        page = client.get("/admin/streamserve/live/").text
        [events_url] = re.findall(r'data-events-url="([^"]+)"', page)
        assert events_url.startswith(f"{seen}/admin/")
        with client.stream("GET", events_url.removeprefix(seen)) as events:
            assert events.headers["content-type"].startswith("text/event-stream")
            assert next(events.iter_lines())

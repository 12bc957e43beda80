"""A tutorial's page: a bare `EventSource` on `/v1/completions/stream`, which reconnects by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import urlencode

import httpx
import pytest
from playwright.sync_api import Browser, Page

from tests.support.docs.demo_site import end_engines, environment
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import ANSWER_MS
from tests.support.servers.cutting_relay import cutting
from tests.support.servers.web_servers import daphne, wait_until_ready

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.pages.event_source_site"}
PATH = "/v1/completions/stream"
ASK = {"prompt": "The quiet river", "max_tokens": 120, "seed": 7, "ignore_eos": "true", "interval_ms": 20}
# As tutorials have it. `closes` False is a page that forgets to close at the end.
TUTORIAL = """<!doctype html><title>tutorial</title><pre id="out"></pre><p id="end"></p><script>
window.opens = 0;
const source = new EventSource("%(path)s?%(query)s");
source.onopen = () => { window.opens += 1; };
source.onmessage = (event) => {
  if (event.data === "[DONE]") {
    if (%(closes)s) source.close();
    document.getElementById("end").textContent = "done";
    return;
  }
  document.getElementById("out").textContent += JSON.parse(event.data).token;
};
source.onerror = (event) => {
  if (event.data) document.getElementById("end").textContent = JSON.parse(event.data).error.message;
  if (source.readyState === EventSource.CLOSED) document.title = "closed";
};
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("state")
    migrated(folder)
    with daphne("project.asgi:application", env=environment(folder, **SETTINGS)) as server:
        wait_until_ready(server.url)
        yield server.url
    end_engines(folder)


def open_tutorial(browser: Browser, origin: str, *, closes: bool = True, **fields: object) -> Page:
    """Open the page on the site's own origin."""
    page = browser.new_context().new_page()
    html = TUTORIAL % {"path": PATH, "query": urlencode({**ASK, **fields}), "closes": json.dumps(closes)}
    page.route("**/tutorial.html", lambda route: route.fulfill(content_type="text/html", body=html))
    page.goto(f"{origin}/tutorial.html")
    return page


def whole_text(site: str) -> str:
    """Return the same answer from `/v1/completions`."""
    fields = {name: value for name, value in ASK.items() if name != "interval_ms"} | {"ignore_eos": True}
    reply = httpx.post(f"{site}/v1/completions", json=fields, timeout=60, trust_env=False)
    return str(reply.json()["choices"][0]["text"])


def wait_for_end(page: Page) -> str:
    page.wait_for_function("document.getElementById('end').textContent !== ''", timeout=ANSWER_MS)
    return page.locator("#end").inner_text()


def test_the_page_shows_the_whole_answer(browser: Browser, site: str) -> None:
    """Every token once, then the end."""
    page = open_tutorial(browser, site)
    assert wait_for_end(page) == "done"
    assert page.evaluate("document.getElementById('out').textContent") == whole_text(site)
    page.context.close()


def test_a_broken_connection_is_resumed_by_the_browser(browser: Browser, site: str) -> None:
    """The browser comes back with the last id it saw: nothing is lost or doubled, and no second answer starts."""
    with cutting(site, PATH, num_bytes=2500) as relay:
        page = open_tutorial(browser, relay.url)
        assert wait_for_end(page) == "done"
        assert relay.num_cut == 1
        assert page.evaluate("window.opens") == 2
        assert page.evaluate("document.getElementById('out').textContent") == whole_text(site)
        ids = [b"last-event-id" in head.lower() for head in relay.requests]
        assert ids == [False, True]
        page.context.close()


def test_a_page_that_does_not_close_is_not_answered_again(browser: Browser, site: str) -> None:
    """After the end the browser asks once more with the last id; the 204 ends its attempts."""
    page = open_tutorial(browser, site, closes=False, max_tokens=4)
    assert wait_for_end(page) == "done"
    page.wait_for_function("document.title === 'closed'", timeout=ANSWER_MS)
    assert page.evaluate("window.opens") == 1
    page.context.close()


def test_the_page_reads_why_it_was_refused(browser: Browser, site: str) -> None:
    """A wrong field is an `error` event with its message; the browser then stops asking."""
    page = open_tutorial(browser, site, temperature=9)
    assert "temperature" in wait_for_end(page)
    page.wait_for_function("document.title === 'closed'", timeout=ANSWER_MS)
    assert page.evaluate("document.getElementById('out').textContent") == ""
    page.context.close()

"""Chromium for tests: a launched browser, a site to open, and a page that reports every unwanted action.

The browser is Debian's (`apt-get install chromium`); Playwright drives it and downloads none. Without it the tests
skip, or fail where STREAMSERVE_REQUIRE=all. tests/e2e/browser/conftest.py has the fixtures.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Locator,
    Page,
    Request,
    Route,
    expect,
    sync_playwright,
)

from tests.support.docs.demo_site import end_engines
from tests.support.plugins.migrated import MAKE_KEY, Migrate
from tests.support.servers.web_servers import ROOT, daphne, wait_until_ready

CHROMIUM_ARGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ADMIN_NAME, ADMIN_PASSWORD = "admin", "a password for tests only"
MAKE_ADMINISTRATOR = ("createsuperuser", "--noinput", "--username", ADMIN_NAME, "--email", "admin@example.com")
ADMINISTRATOR = {"DJANGO_SUPERUSER_PASSWORD": ADMIN_PASSWORD}
# The contrast of an element's text with what is painted behind it, by WCAG 2.2.
CONTRAST = """(element) => {
  const isMixed = (text) => text.startsWith('color(srgb'); // by color-mix: 0 to 1
  const parse = (text) => text.match(/[0-9.]+/g).map((v, i) => (isMixed(text) && i < 3 ? 255 * v : Number(v)));
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  let behind = element;
  while (behind && parse(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
  const painted = behind ? parse(getComputedStyle(behind).backgroundColor) : [255, 255, 255];
  const { color, opacity } = getComputedStyle(element);
  const ground = light(painted);
  const ink = light(parse(color).map((v, i) => v * opacity + (painted[i] ?? 0) * (1 - opacity)));
  return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
}"""
FAKE_ID = "0" * 32  # of `fake_answer`
ANSWER_MS = 60_000  # enough for a whole answer of the echo engine on a busy machine

expect.set_options(timeout=ANSWER_MS)


def chromium_path() -> str:
    """Return where Chromium is; skip, or fail if everything is required, when there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        missing = "Chromium is missing: apt-get install -y chromium"
        if os.environ.get("STREAMSERVE_REQUIRE") == "all":
            pytest.fail(missing)
        pytest.skip(missing)
    return path


@pytest.fixture(scope="package")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """Launch one Chromium for a folder's tests; each test has a context, hence storage and cookies, of its own.

    For a conftest: imported by a module it would last, with its event loop, for all tests that follow.
    """
    assert isinstance(request.node, pytest.Package), "import `browser` in a conftest, or use `chromium()` in a module"
    with chromium() as launched:
        yield launched


@contextmanager
def chromium() -> Iterator[Browser]:
    """Launch Chromium. Until the block ends this thread has an event loop, so Django's database is out of reach."""
    path = chromium_path()
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGS)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    """Serve the demo site with the echo engine through daphne, with a state folder of its own; yield its address."""
    with echo_site("tests.support.sites.pages.browser_site", tmp_path_factory.mktemp("state"), migrated) as url:
        yield url


@contextmanager
def echo_site(settings: str, state: Path, migrated: Migrate, prefix: str = "") -> Iterator[str]:
    """Serve a site with the echo engine, an administrator and KEY through daphne; yield its prefix's address."""
    env = {
        "DJANGO_SETTINGS_MODULE": settings,
        "STREAMSERVE_STATE_DIR": str(state),
        "STREAMSERVE_MODEL": "echo",
    }
    migrated(state, MAKE_ADMINISTRATOR, MAKE_KEY, **ADMINISTRATOR)
    with daphne("project.asgi:application", env=env) as server:
        wait_until_ready(server.url + prefix)
        yield server.url + prefix
    end_engines(state)


def manage(env: dict[str, str], *arguments: str) -> None:
    """Run a management command of the demo site."""
    clean = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), *arguments], env={**clean, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@dataclass
class Watched:
    """A page, and its unwanted actions: `complaints` and `off_origin` stay empty in a good test."""

    page: Page
    origin: str
    complaints: list[str] = field(default_factory=list)
    off_origin: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()

    def expect_complaint(self, *parts: str) -> None:
        """Name a failed request that a test causes on purpose, because browsers log every one."""
        self.expected += parts

    def listen(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        self.page.on("dialog", self._dialog)
        self.page.context.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.location["url"].endswith(f"/streams/{FAKE_ID}/timings"):
            return  # what was seen of an answer that is no stream of the server's
        if message.type in {"error", "warning"} and not any(part in message.text for part in self.expected):
            self.complaints.append(f"console: {message.text} ({message.location['url']})")

    def _dialog(self, dialog: Dialog) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Request) -> None:
        target = urlsplit(request.url)
        if target.scheme in {"http", "https", "ws", "wss"} and f"{target.scheme}://{target.netloc}" != self.origin:
            self.off_origin.append(request.url)

    def assert_quiet(self) -> None:
        assert self.complaints == []
        assert self.off_origin == []


@contextmanager
def watching(browser: Browser, origin: str, **options: Any) -> Iterator[Watched]:
    """Open an empty page in a context of its own; when the block ends, it must have no complaints.

    It asks for reduced motion: drawn by the CPU, a caret that breathes costs as much as the rest of the page.
    """
    common = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce"}
    context: BrowserContext = browser.new_context(**{**common, **options})
    context.set_default_timeout(ANSWER_MS)
    try:
        watched = Watched(page=context.new_page(), origin=origin)
        watched.listen()
        yield watched
        watched.assert_quiet()
    finally:
        context.close()


@contextmanager
def signed_in(
    browser: Browser, url: str, *, user: str = ADMIN_NAME, path: str = "/", **options: Any
) -> Iterator[Watched]:
    """Sign a user in, in a browser of its own, and open a page."""
    with watching(browser, url, **options) as visit:
        visit.expect_complaint("404")  # the admin has no icon
        page = visit.page
        page.goto(f"{url}/admin/login/?next={path}")
        page.get_by_label("Username").fill(user)
        page.get_by_label("Password").fill(ADMIN_PASSWORD)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url(f"{url}{path}")
        yield visit


@pytest.fixture
def watched(browser: Browser, site: str) -> Iterator[Watched]:
    """A page with the chat open."""
    with watching(browser, site) as page:
        page.page.goto(site)
        yield page


# --- the chat page ---------------------------------------------------------------------------------------------------


def ask(page: Page, question: str) -> None:
    """Type a question and press Enter."""
    page.get_by_label("Your question").fill(question)
    page.get_by_label("Your question").press("Enter")


def shorten_answers(page: Page, max_tokens: int = 300) -> None:
    """Bound the answers that the pages of this browser context ask for, where a test needs only their end.

    A whole one is made by the engine, sent by the server and drawn by each tab: some seconds of CPU.
    """

    def shorten(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}")
        route.continue_(post_data=json.dumps({**body, "max_tokens": max_tokens}))

    page.context.route("**/streams", shorten)


def status(page: Page) -> str:
    """Return the text of the page's one status region."""
    return page.get_by_role("status").first.inner_text()


def answer_text(page: Page, turn: int = -1) -> str:
    """Return the text on screen of an answer."""
    return page.locator(".ss-turn .ss-body").nth(turn).inner_text()


def wait_for_text(page: Page, length: int, turn: int = -1) -> None:
    """Wait until an answer on screen has `length` characters."""
    page.wait_for_function(
        "([turn, length]) => [...document.querySelectorAll('.ss-turn .ss-body')].at(turn)?.innerText.length >= length",
        arg=[turn, length],
        timeout=ANSWER_MS,
    )


def slow_down(page: Page, kilobytes_per_second: int | None) -> None:
    """Give the page a slow connection (None: a fast one again), so that an answer is unfinished when a test acts."""
    throughput = -1 if kilobytes_per_second is None else kilobytes_per_second * 1024
    conditions = {"offline": False, "latency": 0, "downloadThroughput": throughput, "uploadThroughput": -1}
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.emulateNetworkConditions", conditions)


def wait_for_status(page: Page, words: str) -> None:
    expect(page.get_by_role("status").first).to_have_text(words, timeout=ANSWER_MS)


_RECORDS = """(root) => {
  const key = document.querySelectorAll('[data-streamserve-chat]')[root].dataset.storageKey;
  const prefix = `${key}/${sessionStorage.getItem(key) ?? localStorage.getItem(key)}/`;
  return Object.keys(localStorage).filter((name) => name.startsWith(prefix) && !name.endsWith('/leaf')).sort();
}"""


def record_names(page: Page, root: int = 0) -> list[str]:
    """Return the keys of the records that hold the conversation of the page's chat, oldest first."""
    return list(page.evaluate(_RECORDS, root))


def stored_turns(page: Page, root: int = 0) -> list[dict[str, Any]]:
    """Return the conversation that the browser keeps."""
    names = record_names(page, root)
    return [json.loads(page.evaluate("(name) => localStorage.getItem(name)", name)) for name in names]


def store_turn(page: Page, **turn: Any) -> None:
    """Store a turn as an earlier visit would have."""
    page.evaluate(
        """(turn) => {
          const key = document.querySelector('[data-streamserve-chat]').dataset.storageKey;
          localStorage.setItem(key, '1-2');
          localStorage.setItem(`${key}/1-2/000000001-1`, JSON.stringify({ version: 2, revision: 1, ...turn }));
        }""",
        turn,
    )


def server_log(page: Page, stream_id: str, after: int = 0) -> list[dict[str, Any]]:
    """Return a finished stream's events after `after` as the server replays them, neighbouring tokens joined.

    Without the `meta` that is repeated before `done`: it is not in the log.
    """
    body = page.request.get(f"{origin_of(page)}/streams/{stream_id}/events?after={after}")
    assert body.status == 200
    return [_event(block) for block in body.text().split("\n\n") if "data: " in block and "id: " in block]


def _event(block: str) -> dict[str, Any]:
    fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
    return {"seq": int(fields["id"].rpartition("-")[2]), "type": fields["event"], "data": json.loads(fields["data"])}


def log_text(events: list[dict[str, Any]]) -> str:
    """Return the text that the events hold; a snapshot replaces all text before it."""
    text = ""
    for event in events:
        if event["type"] in {"token", "snapshot"}:
            text = event["data"]["text"] if event["type"] == "snapshot" else text + event["data"]["text"]
    return text


def origin_of(page: Page) -> str:
    target = urlsplit(page.url)
    return f"{target.scheme}://{target.netloc}"


def sse(*events: tuple[str, dict[str, Any]]) -> str:
    """Return a whole native stream, numbered from 1."""
    frames = [
        f"event: {name}\nid: aaaaaaaaaaaa-{seq}\ndata: {json.dumps(data)}\n\n"
        for seq, (name, data) in enumerate(events, 1)
    ]
    return "".join(frames)


def fake_answer(text: str, *, pieces: int = 7, ending: tuple[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return what `route.fulfill` needs to answer a question with `text`, cut into tokens of `pieces` characters."""
    tokens = [text[at : at + pieces] for at in range(0, len(text), pieces)]
    done = {"finish_reason": "stop", "totalTokens": len(tokens), "latency": 0.5, "breakdown": {"ttft": 0.1}}
    events: list[tuple[str, dict[str, Any]]] = [("meta", {"model": "echo", "stream_id": FAKE_ID, "created": 0})]
    events += [("token", {"text": token, "token_ids": [1], "index": 0, "choice": 0}) for token in tokens]
    body = sse(*events, ending or ("done", done))
    return {"status": 200, "body": body, "headers": {"Content-Type": "text/event-stream", "X-Stream-Id": FAKE_ID}}


def notice(page: Page) -> Locator:
    """Return the line under the last answer with its ending."""
    return page.locator(".ss-notice").last


def post_bodies(page: Page) -> list[dict[str, Any]]:
    """Collect what the page sends to POST /streams from now on."""
    bodies: list[dict[str, Any]] = []
    page.on(
        "request",
        lambda request: (
            bodies.append(json.loads(request.post_data or "{}"))
            if request.method == "POST" and request.url.endswith("/streams")
            else None
        ),
    )
    return bodies

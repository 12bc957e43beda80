"""docs/client.md: its page in Chromium, through a reload and a stop; its program on Node; the package beside it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

import streamserve
from tests.support.docs.doc_blocks import ROOT, blocks_of
from tests.support.plugins.migrated import KEY, Migrate
from tests.support.servers.browser import chromium, echo_site, sse
from tests.support.servers.node import node_of_tests

pytestmark = pytest.mark.proof

PAGE, SETTINGS = "docs/client.md", "tests.support.sites.pages.browser_site"
CLIENT = ROOT / "streamserve" / "static" / "streamserve"
_IMPORT = re.compile(r'from "\./([\w.]+)"')
_ANSWER = "document.querySelector('p').textContent"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium for this file."""
    with chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def site(state: Path, migrated: Migrate) -> Iterator[str]:
    with echo_site(SETTINGS, state, migrated) as url:
        yield url


@pytest.fixture
def page(browser: Browser, site: str) -> Iterator[Page]:
    """The page of the document, at an address of the site."""
    (html,) = [block.text for block in blocks_of(PAGE) if block.language == "html"]
    context = browser.new_context()
    page = context.new_page()
    page.route("**/mine/", lambda route: route.fulfill(body=html, content_type="text/html"))
    page.goto(site)  # for the cookies of the site
    page.goto(f"{site}/mine/")
    yield page
    context.close()


def submit(page: Page, question: str) -> None:
    page.get_by_role("textbox").fill(question)
    page.get_by_role("button", name="Ask").click()


def wait_for_more(page: Page, length: int) -> None:
    page.wait_for_function(f"{_ANSWER}.length > {length}", timeout=60_000)


def log_text(page: Page, stream_id: str) -> str:
    """Return the text of the log, once it has ended."""
    script = """async (id) => {
      const { resume } = await import('/static/streamserve/client.js');
      const answer = resume(id);
      for await (const event of answer) if (event.type === 'done') return [answer.text, event.data.finish_reason];
    }"""
    text, reason = page.evaluate(script, stream_id)
    return f"{reason}: {text}"


@pytest.mark.browser
def test_the_page_answers_through_a_reload(page: Page, site: str) -> None:
    """An answer that grows; after a reload it is there again, and grows on; stopped, it stays as it was shown."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    submit(page, "Tell me a long story.")
    wait_for_more(page, 40)
    before, stream_id = page.evaluate(f"[{_ANSWER}, sessionStorage.answer]")
    page.reload()
    wait_for_more(page, len(before) + 20)
    assert str(page.evaluate(_ANSWER)).startswith(before)
    page.get_by_role("button", name="Stop").click()
    page.wait_for_function("sessionStorage.answer === undefined", timeout=60_000)
    shown = page.evaluate(_ANSWER)
    assert log_text(page, stream_id).startswith("cancelled: " + shown)
    assert errors == []


@pytest.mark.browser
def test_a_structured_answer_grows_on_the_page(page: Page) -> None:
    """The list of the document gets each city as it is written."""
    (program,) = [block.text for block in blocks_of(PAGE, "A structured answer as it grows") if block.language == "js"]
    pieces = ['{"cities": ["Os', 'lo", "Ro', 'me"]}']
    tokens = [("token", {"text": piece, "token_ids": [1], "index": 0, "choice": 0}) for piece in pieces]
    body = sse(("meta", {}), *tokens, ("done", {"finish_reason": "stop"}))
    headers = {"Content-Type": "text/event-stream", "X-Stream-Id": "f" * 32}
    page.route("**/streams", lambda route: route.fulfill(body=body, headers=headers))
    page.evaluate("document.body.innerHTML = '<select></select>'; window.list = document.querySelector('select')")
    page.add_script_tag(content=program, type="module")
    expect(page.locator("option")).to_have_text(["Oslo", "Rome"])


@pytest.mark.browser
def test_another_client_reports_what_its_reader_saw(page: Page, site: str) -> None:
    """The `fetch` of the document, for the AI SDK: the server joins its report to the stream's phases."""
    (program,) = [block.text for block in blocks_of(PAGE, "What its reader saw") if block.language == "js"]
    page.add_script_tag(content=f"{program}\nwindow.measured = measured", type="module")
    page.wait_for_function("window.measured !== undefined")
    question = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "hello"}]}
    with page.expect_response(lambda response: response.url.endswith("/timings")) as reported:
        page.evaluate(
            """async (body) => {
              const [, token] = /csrftoken=([^;]+)/.exec(document.cookie);
              const headers = { 'Content-Type': 'application/json', 'X-CSRFToken': token };
              const request = { method: 'POST', headers, body: JSON.stringify(body) };
              return (await window.measured('/ai/chat', request)).text();
            }""",
            {"id": "c1", "messages": [question], "max_tokens": 20},
        )
    assert reported.value.status == 200
    state = page.request.get(reported.value.url.removesuffix("/timings")).json()
    assert sum(state["reader"]["whole"].values()) == pytest.approx(state["reader"]["last_paint"], abs=0.001)


def test_the_program_runs_on_node(site: str, state: Path, tmp_path: Path) -> None:
    """The package is installed from its folder, and the document's program prints an answer."""
    (program,) = [
        block.text for block in blocks_of(PAGE, "A page of your own, without a framework") if block.language == "js"
    ]
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "streamserve-client").symlink_to(CLIENT)
    (tmp_path / "ask.mjs").write_text(program)
    env = {"SITE": site, "KEY": KEY, "NO_PROXY": "*"}
    done = subprocess.run(
        [node_of_tests(), "ask.mjs"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 20


def test_the_package_is_whole() -> None:
    """Its version is ours; it has each module that its modules import, its types, and no other file."""
    package = json.loads((CLIENT / "package.json").read_text())
    assert package["version"] == streamserve.__version__
    modules, left = set[str](), ["client.js"]
    while left:
        name = left.pop()
        if name not in modules:
            modules.add(name)
            left += _IMPORT.findall((CLIENT / name).read_text())
    assert sorted(package["files"]) == sorted({*modules, "client.d.ts"})
    assert package["exports"]["."] == {"types": "./client.d.ts", "default": "./client.js"}

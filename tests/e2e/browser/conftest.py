"""One Chromium and one site for all tests of this folder; each test has a context, hence cookies, of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.support.servers.browser import Watched, browser, site, watched, watching

__all__ = ["browser", "site", "watched"]


@pytest.fixture(scope="module")
def lab(browser: Browser, site: str) -> Iterator[Watched]:
    """One open page for the tests that only call modules; its complaints are checked at the end."""
    with watching(browser, site) as page:
        page.page.goto(site)
        yield page


RENDER = """async ([text, cuts]) => {
  const { AnswerView } = await import('/static/streamserve/answer_view.js');
  const root = document.createElement('div');
  document.body.append(root);
  const view = new AnswerView(root);
  for (let end = cuts; cuts > 0 && end < text.length; end += cuts) view.update(text.slice(0, end), true);
  view.update(text, false);
  const nodes = [...root.querySelectorAll('*')].map((node) => [
    node.tagName, node.getAttributeNames(), ...['href', 'rel', 'target'].map((name) => node.getAttribute(name)),
  ]);
  const result = { html: root.innerHTML, text: root.innerText, nodes };
  root.remove();
  return result;
}"""


def render(page: Page, text: str, cuts: int = 0) -> dict[str, Any]:
    """Render `text` at once, or growing by `cuts` characters a time."""
    result: dict[str, Any] = page.evaluate(RENDER, [text, cuts])
    return result


def html(page: Page, text: str) -> str:
    """Return the markup of `text` without the wrapper and the directions."""
    markup = str(render(page, text)["html"]).replace(' dir="auto"', "").replace(' dir="ltr"', "")
    return markup.removeprefix('<div class="ss-text">').removesuffix("</div>")

"""The page of a share link in Chromium: markdown as nodes, nothing of a model's as HTML, and nothing to trip over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.support.checks.axe import axe_violations
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import echo_site, manage, watching

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]

SETTINGS = "tests.support.sites.pages.conversations_site"
TOKEN = "t" * 43
LOOKS = [{"color_scheme": "light"}, {"color_scheme": "dark", "viewport": {"width": 360, "height": 700}}]
ANSWER = """A **late fee** is charged when:

1. The invoice is *overdue*.

```python
fee = 3
```

<img src=x onerror=alert(1)> [bad](javascript:alert(1)) https://example.org/"""
PLANT = f"""
import hashlib, json
from streamserve.rows.conversations import Conversation, Message, Share
owned = Conversation.objects.create(owner="key:1", tenant="key:1", title="Late <i>fees</i>")
def message(words, **columns):
    cited = [{{"source": "help", "title": "Bills", "url": "/help/7/"}}, {{"source": "x", "url": "javascript:1"}}]
    content = {{"blocks": [{{"index": 0, "kind": "text", "text": words}}], "citations": cited, "steps": []}}
    return Message.objects.create(conversation=owned, content=json.dumps(content), **columns)
asked = message("What is " + "a very long word: " + "x" * 200, role="user")
given = message({ANSWER!r}, role="assistant", parent=asked)
Share.objects.create(conversation=owned, leaf=given.pk, digest=hashlib.sha256({TOKEN!r}.encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    """The address of a share link on the demo site."""
    state = tmp_path_factory.mktemp("state")
    env = {"DJANGO_SETTINGS_MODULE": SETTINGS, "STREAMSERVE_STATE_DIR": str(state), "STREAMSERVE_MODEL": "echo"}
    with echo_site(SETTINGS, state, migrated) as url:
        manage(env, "shell", "-c", PLANT)
        yield f"{url}/shared/{TOKEN}"


@pytest.mark.parametrize(
    "look", [{"color_scheme": "light"}, {"color_scheme": "dark", "viewport": {"width": 360, "height": 700}}]
)
def test_a_shared_branch_is_read_by_anyone(browser: Browser, link: str, look: dict[str, object]) -> None:
    """Without a login: rendered, safe, accessible in light and dark, and nothing scrolls sideways."""
    origin = link.partition("/shared")[0]
    with watching(browser, origin, **look) as visit:
        page = visit.page
        page.goto(link)
        expect(page.get_by_role("heading", name="Late <i>fees</i>")).to_be_visible()
        expect(page.locator(".ss-answer strong")).to_have_text("late fee")
        expect(page.locator(".ss-answer li em")).to_have_text("overdue")
        expect(page.locator(".ss-answer pre")).to_have_text("fee = 3")
        expect(page.locator(".ss-answer .ss-text")).to_contain_text("<img src=x onerror=alert(1)>")
        addresses = page.locator("main a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
        assert addresses == ["https://example.org/", "/help/7/"]
        assert axe_violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("document.cookie") == ""


def test_without_scripts_the_text_is_there(browser: Browser, link: str) -> None:
    """As its characters, in its own lines."""
    with watching(browser, link.partition("/shared")[0], java_script_enabled=False) as visit:
        visit.page.goto(link)
        expect(visit.page.locator("[data-markdown]")).to_contain_text("A **late fee** is charged when:")

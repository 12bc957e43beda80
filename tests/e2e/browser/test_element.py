"""The chat element beyond markdown: colours of code, formulas, the floating form, languages, and its calm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.support.checks.axe import axe_violations
from tests.support.plugins.migrated import Migrate
from tests.support.servers.browser import (
    CONTRAST,
    Watched,
    ask,
    echo_site,
    fake_answer,
    notice,
    shorten_answers,
    sse,
    wait_for_status,
    wait_for_text,
    watching,
)

pytestmark = [pytest.mark.proof, pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate) -> Iterator[str]:
    """Serve the pages of `element_site`; yield the site's address."""
    settings = "tests.support.sites.pages.element_site"
    with echo_site(settings, tmp_path_factory.mktemp("state"), migrated) as url:
        yield url


def answer_with(page: Page, *texts: str) -> None:
    """Answer the page's questions with these texts, in this order."""
    left = list(texts)

    def fulfil(route: Route) -> None:
        route.fulfill(**fake_answer(left.pop(0)))

    page.route("**/streams", fulfil)


def requested(page: Page) -> list[str]:
    """Collect the names of the vendored files that the page asks for from now on."""
    names: list[str] = []
    page.on("request", lambda request: "/vendor/" in request.url and names.append(request.url.rpartition("/")[2]))
    return names


# --- code ------------------------------------------------------------------------------------------------------------

CODE = 'def total(prices: dict[str, float]) -> float:\n    """<b>Sum</b>."""\n    return 1.19 * sum(prices)  # a & b'
FENCED = f"So:\n\n```python\n{CODE}\n```\n\n- An item:\n  ```python\n  {CODE.splitlines()[0]}\n  ```\n  and its end.\n"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_whole_code_block_has_colours_and_its_own_text(browser: Browser, pages: str, scheme: Any) -> None:
    """Each colour can be read; the library is loaded once, for the first block that names a language it knows."""
    with watching(browser, pages, color_scheme=scheme) as visit:
        page = visit.page
        names = requested(page)
        page.goto(f"{pages}/chat/")
        answer_with(page, "Plain:\n```\nx = 1\n```\n", FENCED, FENCED)
        ask(page, "Without a language")
        wait_for_status(page, "Answer complete")
        assert names == []
        for _ in range(2):
            ask(page, "With Python")
            wait_for_status(page, "Answer complete")
            expect(page.locator(".ss-turn").last.locator("li .ss-hl-keyword")).to_have_text(["def"])
        assert names == ["highlight.min.js"]
        block = page.locator(".ss-turn").last.locator(".ss-text > .ss-code code")
        assert block.inner_text() == CODE
        assert block.locator(".ss-hl-keyword").all_inner_texts() == ["def", "return"]
        colours = [token.evaluate(CONTRAST) for token in block.locator("span").all()]
        assert len(colours) > 8
        assert min(colours) >= 4.5


SELECT = """() => {
  const code = [...document.querySelectorAll('.ss-code code')].at(-1);
  getSelection().selectAllChildren(code);
}"""


def test_code_of_an_unknown_language_stays_plain(browser: Browser, pages: str) -> None:
    with watching(browser, pages) as visit:
        page = visit.page
        page.goto(f"{pages}/chat/")
        answer_with(page, "```nolanguage\nif x: y\n```\n\n```python\nif x: y\n```\n")
        ask(page, "Which?")
        expect(page.locator(".ss-code code").nth(1).locator("span")).to_have_text(["if"])  # its turn is after the first
        expect(page.locator(".ss-code code").first.locator("span")).to_have_count(0)


# --- formulas --------------------------------------------------------------------------------------------------------

FORMULAS = [r"\(\sqrt{x^2}\)", r"\[\frac{a}{b}\]", r"$$\pmb{x}$$", r"$f'(x)$", r"\({}_1^2 C\)"]
REFUSED = [
    r"\(\frac{1\)",
    r"\(\unknowncommand\)",
    r"\(\def\x{\x\x}\x\)",
    r"\(" + "x" * 2000 + r"\)",
]
HOSTILE = [
    r"\(\href{javascript:alert(1)}{x}\)",
    r"\(\includegraphics{https://evil.example/x.png}\)",
    r"\(\style{background:url(https://evil.example/x)}{x}\)",
    r"\(\class{ss-chat}{x}\)",
    r"\(\id{a}{x}\)",
    r"\(\text{<img src=x onerror=alert(1)>}\)",
    r"\(\rule{9999em}{9999em}\)",
]


def test_formulas_are_typeset_where_the_site_asks_for_it(browser: Browser, pages: str) -> None:
    """As MathML, with no inline style that the policy refuses; what cannot be read stays as it was written."""
    with watching(browser, pages) as visit:
        page = visit.page
        names = requested(page)
        page.goto(f"{pages}/chat/")
        answer_with(page, "No formula, $5 to $10.", "\n\n".join(FORMULAS + REFUSED + HOSTILE))
        ask(page, "Without")
        wait_for_status(page, "Answer complete")
        assert names == []
        ask(page, "With")
        wait_for_status(page, "Answer complete")
        expect(page.locator(".ss-math.is-set")).to_have_count(len(FORMULAS + HOSTILE) + len(REFUSED) - 1)
        shown = page.locator(".ss-math")
        for at in range(len(FORMULAS)):
            expect(shown.nth(at).locator("math")).to_have_count(1)
        for at, source in enumerate(REFUSED, len(FORMULAS)):
            expect(shown.nth(at)).to_have_text(source)
        expect(page.locator(".ss-math :is(a, img, [id], [onerror], .ss-chat)")).to_have_count(0)
        assert page.evaluate("document.querySelector('.ss-scroll').scrollHeight") < 5000
        assert set(names) - {"Temml.woff2"} == {"Temml-Local.css", "temml.min.js"}


# --- the floating form -----------------------------------------------------------------------------------------------


def test_the_floating_chat_is_opened_used_and_closed_by_keyboard(browser: Browser, pages: str) -> None:
    """Escape stops an answer, then closes; the focus goes in with the opening, and back to the button."""
    with watching(browser, pages) as visit:
        page = visit.page
        page.goto(f"{pages}/corner/")
        button = page.get_by_role("button", name="Open the chat")
        chat = page.get_by_role("dialog", name="Ask us")
        box = page.get_by_label("Your question")
        expect(chat).to_be_hidden()
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")  # past the link
        expect(button).to_be_focused()
        page.keyboard.press("Enter")
        expect(box).to_be_focused()
        expect(button).to_be_hidden()
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        wait_for_text(page, 40)
        page.keyboard.press("Escape")
        expect(notice(page)).to_contain_text("Stopped")
        expect(chat).to_be_visible()
        page.keyboard.press("Escape")
        expect(chat).to_be_hidden()
        expect(button).to_be_focused()


def test_the_floating_chat_stays_as_it_was_on_the_next_page(browser: Browser, pages: str) -> None:
    """Open with its conversation, or closed; where it was closed, its button tells that the answer has ended."""
    with watching(browser, pages) as visit:
        page = visit.page
        shorten_answers(page)
        page.goto(f"{pages}/corner/")
        page.get_by_role("button", name="Open the chat").click()
        ask(page, "Hello")
        wait_for_text(page, 40)
        page.get_by_role("link", name="Another page").click()
        page.wait_for_url(f"{pages}/other/")
        expect(page.get_by_role("dialog", name="Ask us")).to_be_visible()
        expect(page.locator(".ss-question p")).to_have_text(["Hello"])
        expect(page.locator(".ss-foot")).to_be_visible(timeout=60_000)
        held: list[Route] = []
        page.route("**/streams", lambda route: held.append(route))
        with page.expect_request("**/streams"):
            ask(page, "And now?")
        page.get_by_role("button", name="Close the chat").click()
        held[0].fulfill(**fake_answer("A short one."))
        expect(page.get_by_role("button", name="Answer complete. Open the chat")).to_be_visible()
        page.reload()
        expect(page.get_by_role("button", name="Open the chat", exact=True)).to_be_visible()
        expect(page.get_by_role("dialog", name="Ask us")).to_be_hidden()


def test_a_phone_shows_the_floating_chat_over_the_whole_page(browser: Browser, pages: str) -> None:
    with watching(browser, pages, viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True) as visit:
        page = visit.page
        page.goto(f"{pages}/corner/")
        page.get_by_role("button", name="Open the chat").tap()
        chat = page.get_by_role("dialog", name="Ask us")
        assert chat.bounding_box() == {"x": 0, "y": 0, "width": 390, "height": 800}
        expect(chat).to_be_focused()


# --- languages -------------------------------------------------------------------------------------------------------


def test_a_german_browser_is_shown_german(browser: Browser, pages: str) -> None:
    """The page, what the scripts say, and numbers."""
    with watching(browser, pages, locale="de-DE") as visit:
        page = visit.page
        page.goto(f"{pages}/chat/")
        assert page.locator("html").get_attribute("lang") == "de"
        expect(page.locator(".ss-hint").first).to_have_text("Enter sendet, Umschalt Enter beginnt eine Zeile")
        answer_with(page, "Ja. " * 20, "x")
        box = page.get_by_label("Ihre Frage")
        box.fill("Geht das?")
        box.press("Enter")
        wait_for_status(page, "Antwort fertig")
        expect(page.locator(".ss-figures")).to_contain_text("12 Tokens")
        expect(page.locator(".ss-figures")).to_contain_text(" Tok/s")
        expect(page.get_by_role("button", name="Kopieren")).to_be_visible()


def test_a_page_from_right_to_left_is_mirrored(browser: Browser, pages: str) -> None:
    """The floating form is in the other corner, a question at the other side; code and figures are read as written."""
    with watching(browser, pages, locale="ar") as visit:
        page = visit.page
        page.goto(f"{pages}/corner/")
        page.get_by_role("button", name="Open the chat").click()
        box = page.get_by_role("dialog", name="Ask us").bounding_box()
        assert box is not None
        assert box["x"] < 40
        page.goto(f"{pages}/chat/")
        answer_with(page, "مرحبا بالعالم\n\n```js\nlet a;\n```\n")
        ask(page, "كيف؟")
        wait_for_status(page, "Answer complete")
        sides = "(node) => [node.getBoundingClientRect().left, innerWidth - node.getBoundingClientRect().right]"
        left, right = page.locator(".ss-question p").evaluate(sides)
        assert left < right
        directions = "(nodes) => nodes.map((node) => getComputedStyle(node).direction)"
        assert page.locator(".ss-body p, .ss-body .ss-code").evaluate_all(directions) == ["rtl", "ltr"]
        assert set(page.locator(".ss-figures span").evaluate_all(directions)) == {"ltr"}
        assert page.locator(".ss-figures > *").evaluate_all("(all) => all.map((node) => node.tagName)")[:3] == [
            "SPAN",
            "I",  # a dot on the line, between what is read in its own direction
            "SPAN",
        ]


# --- calm ------------------------------------------------------------------------------------------------------------

# A part of an answer as models write it; `{n}` makes each another.
PART = """## Part {n}: what is *done*, and why

A paragraph of **plain prose** about item {n}, with `inline code`, a [link](https://example.com/{n}) and more words,
long enough to be broken into some lines on any screen that it may be read on, as most paragraphs of models are.

- first, with *emphasis* {n}
- second, with `code`
  - nested, and a few words more
- third, and \\(x_{n}^2\\)

```python
def part_{n}(values: list[int]) -> dict[str, int]:
    total = sum(value for value in values if value > {n})  # a comment
    return {{"total": total, "part": {n}}}
```

| column | number | words |
|---|---:|---|
| first | {n} | some words in a cell |
| second | {n}.5 | some more of them |

1. One thing, then
2. another thing, and at last
3. the third of them.

> A quote of part {n}, which goes on
> over two lines.

"""
CHARS_PER_TOKEN = 4
TOKENS_PER_FRAME = 60  # of the network, one each 16 ms
# The page's own fetch answers a question with `frames`, at the pace of a fast model, and the observers begin.
FEED = """(frames) => {
  const plain = window.fetch;
  window.fetch = (url, options = {}) => {
    if (options.method !== "POST" || !String(url).endsWith("/streams")) return plain(url, options);
    const encoder = new TextEncoder();
    const body = new ReadableStream({
      async start(controller) {
        for (const frame of frames) {
          controller.enqueue(encoder.encode(frame));
          await new Promise((resolve) => setTimeout(resolve, 16));
        }
        controller.close();
      },
    });
    const headers = { "Content-Type": "text/event-stream", "X-Stream-Id": "0".repeat(32) };
    return Promise.resolve(new Response(body, { headers }));
  };
  window.seen = { shifts: [], longTasks: [] };
  new PerformanceObserver((list) => {
    for (const { value, hadRecentInput, sources } of list.getEntries()) {
      if (!hadRecentInput) seen.shifts.push([value, ...sources.map(({ node }) => node?.className ?? node?.nodeName)]);
    }
  }).observe({ type: "layout-shift" });
  new PerformanceObserver((list) => seen.longTasks.push(...list.getEntries().map(({ duration }) => duration)))
    .observe({ type: "longtask" });
}"""


def frames(num_tokens: int) -> list[str]:
    """Return the network frames of an answer of so many tokens."""
    num_chars = num_tokens * CHARS_PER_TOKEN
    text = "".join(PART.format(n=number) for number in range(num_chars // len(PART) + 1))[:num_chars]
    tokens = [text[at : at + CHARS_PER_TOKEN] for at in range(0, num_chars, CHARS_PER_TOKEN)]
    done = {"finish_reason": "stop", "totalTokens": num_tokens, "latency": 5.0, "breakdown": {"ttft": 0.1}}
    events: list[tuple[str, dict[str, Any]]] = [("meta", {"model": "echo", "stream_id": "0" * 32, "created": 0})]
    events += [("token", {"text": token, "token_ids": [1], "index": 0, "choice": 0}) for token in tokens]
    each = [f"{event}\n\n" for event in sse(*events, ("done", done)).split("\n\n") if event]
    return ["".join(each[at : at + TOKENS_PER_FRAME]) for at in range(0, len(each), TOKENS_PER_FRAME)]


def open_with_answer(page: Page, url: str, num_tokens: int) -> None:
    page.route("**/streams/*/ack", lambda route: route.fulfill(status=204))
    page.goto(url)
    page.evaluate(FEED, frames(num_tokens))


def read_answer(page: Page) -> None:
    ask(page, "Tell me everything")
    wait_for_status(page, "Answer complete")
    expect(page.locator(".ss-hl-keyword").last).to_have_text("return")


def test_nothing_on_screen_moves_while_an_answer_grows(browser: Browser, pages: str) -> None:
    """No layout shift that the visitor has not caused: colours and formulas come without one, as does the end."""
    with watching(browser, pages) as visit:
        open_with_answer(visit.page, f"{pages}/chat/", 3000)
        read_answer(visit.page)
        assert visit.page.evaluate("seen.shifts") == []


@pytest.mark.proof
@pytest.mark.alone
def test_no_task_of_a_long_answer_holds_the_page_up(browser: Browser, pages: str) -> None:
    """Of 20,000 tokens at 3,700 a second, no task of the page's thread computes for more than 100 ms.

    The CPU time of each task, so that other work of the machine does not count; long tasks by the wall are printed.
    """
    with watching(browser, pages) as visit:
        page = visit.page
        open_with_answer(page, f"{pages}/chat/", 20_000)
        browser.start_tracing(page=page, categories=["toplevel", "disabled-by-default-devtools.timeline"])
        read_answer(page)
        events = json.loads(browser.stop_tracing())["traceEvents"]
        main = {
            (event["pid"], event["tid"])
            for event in events
            if event["name"] == "thread_name" and event["args"]["name"] == "CrRendererMain"
        }
        tasks = [
            event["tdur"] / 1000
            for event in events
            if event["name"].endswith("RunTask") and "tdur" in event and (event["pid"], event["tid"]) in main
        ]
        wall = sorted(page.evaluate("seen.longTasks"), reverse=True)
        print(f"{len(tasks)} tasks, the longest {max(tasks):.0f} ms of CPU; above 50 ms by the wall: {wall}")
        assert len(tasks) > 100
        assert max(tasks) <= 100
        assert page.evaluate("seen.shifts") == []


# --- accessibility ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{"width": 1280, "height": 900}, {"width": 390, "height": 800}])
def test_axe_finds_nothing(browser: Browser, pages: str, scheme: Any, size: Any) -> None:
    """On the chat page and the floating form, empty and with an answer; nothing is wider than a phone."""
    with watching(browser, pages, color_scheme=scheme, viewport=size) as visit:
        page = visit.page
        page.goto(f"{pages}/chat/")
        assert axe_violations(page) == []
        answer_with(page, FENCED + FORMULAS[1] + "\n\n|a|b|\n|-|-|\n|1|2|\n", "Short.")
        ask(page, "Everything")
        expect(page.locator("li .ss-hl-keyword")).to_have_text(["def"])
        expect(page.locator(".ss-math.is-math")).to_have_count(1)
        assert axe_violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.goto(f"{pages}/corner/")
        assert axe_violations(page) == []
        page.get_by_role("button", name="Open the chat").click()
        ask(page, "Short?")
        wait_for_status(page, "Answer complete")
        assert axe_violations(page) == []


def test_axe_finds_nothing_on_the_demos_first_page(watched: Watched) -> None:
    """Empty, and with an answer that shows how it was made."""
    page = watched.page
    assert axe_violations(page) == []
    shorten_answers(page)
    ask(page, "Hello")
    wait_for_status(page, "Answer complete")
    page.locator(".ss-made summary").click()
    assert axe_violations(page) == []

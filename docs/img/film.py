"""Take the README's moving picture: `python docs/img/film.py URL` writes film.svg, from the lab of the running demo.

It asks the lab, kills the web process that makes the answer, later the engine, and records when each character and each
line of "What happened" came. The picture shows that recording, with CSS animations alone, and begins again at its end.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from textwrap import TextWrapper

from playwright.sync_api import Page, sync_playwright

ARGS = ["--headless", "--no-sandbox", "--disable-gpu"]
SECONDS, HOLD_SECONDS = 16.0, 3.0
KILLS = ((3.0, "web"), (9.0, "engine"))
WIDTH, LINE, LEFT, TOP, SIDE = 880, 25, 28, 66, 560
CHARS = 56  # in a line of text
READ = """() => [
  document.querySelector('[data-lab-part=text]').textContent,
  [...document.querySelectorAll('[data-lab-part=events] li')].map((one) => one.lastChild.textContent.trim()),
]"""


@dataclass
class Film:
    """What was seen: the text so far by time, and each happening with its time."""

    texts: list[tuple[float, str]] = field(default_factory=list)
    happenings: list[tuple[float, str]] = field(default_factory=list)

    def time_of(self, num_chars: int) -> float:
        """Return when so many characters were there."""
        return next((at for at, text in self.texts if len(text) >= num_chars), SECONDS)


def record(page: Page, url: str) -> Film:
    """Ask, kill, and watch."""
    film = Film()
    page.goto(f"{url}/lab/")
    page.click("[data-lab-do=ask]")
    page.wait_for_function("() => document.querySelector('[data-lab-part=text]').textContent !== ''")
    began, kills = time.monotonic(), list(KILLS)
    while (now := time.monotonic() - began) < SECONDS:
        if kills and now >= kills[0][0]:
            page.click(f"[data-lab-do={kills.pop(0)[1]}]")
        text, happened = page.evaluate(READ)
        film.texts.append((now, text))
        film.happenings += [(now, words) for words in happened[len(film.happenings) :]]
        time.sleep(0.05)
    page.click("[data-lab-do=stop]")
    return film


def drawn(film: Film) -> str:
    """Return the picture."""
    text = film.texts[-1][1]
    lines = TextWrapper(CHARS).wrap(text.split("\n\n")[0])
    height = TOP + LINE * max(len(lines), 9) + 16
    styles, parts = [], []
    seen = 0
    for index, line in enumerate(lines):
        begin, seen = film.time_of(seen + 1), seen + len(line) + 1
        styles.append(
            _appears(
                f"l{index}", begin, film.time_of(seen), "clip-path: inset(0 100% 0 0)", "clip-path: inset(0 0 0 0)"
            )
        )
        parts.append(f'<text class="l{index}" x="{LEFT}" y="{TOP + LINE * index}">{escape(line)}</text>')
    wrapper, row = TextWrapper(36), 0
    for index, (at, words) in enumerate(film.happenings):
        kind = "bad" if "killed" in words else "good"
        styles.append(_appears(f"h{index}", at, at + 0.15, "opacity: 0", "opacity: 1"))
        for part in wrapper.wrap(words):
            y = TOP + 20 * row
            parts.append(f'<text class="side {kind} h{index}" x="{SIDE + 18}" y="{y}">{escape(part)}</text>')
            row += 1
    height = max(height, TOP + 20 * row + 10)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" \
aria-label="An answer is being written. Its web process is killed, then its engine; it goes on without a gap.">
<style>
text {{ font: 16px system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: #20242a }}
.head {{ font-size: 13px; fill: #656b73 }}
.side {{ font-size: 13.5px }}
.good {{ fill: #1f6b59 }}
.bad {{ fill: #a63a2b; font-weight: 600 }}
{"".join(styles)}@media (prefers-reduced-motion: reduce) {{ text {{ animation: none !important }} }}
</style>
<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="14" fill="#fff" stroke="#e3e0da"/>
<path d="M{SIDE} 18V{height - 18}" stroke="#e3e0da"/>
<text class="head" x="{LEFT}" y="34">What the reader sees</text>
<text class="head" x="{SIDE + 18}" y="34">What happens to the server</text>
{chr(10).join(parts)}
</svg>
"""


def _appears(name: str, begin: float, end: float, before: str, after: str) -> str:
    """Return the style of something that comes between two times of the film."""
    whole = SECONDS + HOLD_SECONDS
    first, last = 100 * begin / whole, 100 * max(end, begin + 0.05) / whole
    frames = f"0%, {first:.2f}% {{ {before} }} {last:.2f}%, 100% {{ {after} }}"
    return f"@keyframes {name} {{ {frames} }}\n.{name} {{ animation: {name} {whole:g}s linear infinite }}\n"


def main(url: str) -> None:
    """Record and write."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGS)
        film = record(browser.new_page(), url.rstrip("/"))
        browser.close()
    (Path(__file__).parent / "film.svg").write_text(drawn(film))


if __name__ == "__main__":
    main(sys.argv[1])

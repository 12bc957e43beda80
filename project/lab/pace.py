"""`pace`: an answer as slow as it is asked for, with which the lab compares deliveries. Each word is a token.

No model computes it: the run waits, and says word after word. Log, stream and delivery are those of every answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamserve import Run
from streamserve.protocol.errors import BadRequest

MOST = {"ttft": 10.0, "rate": 200.0}  # seconds, tokens a second
LEAST = {"ttft": 0.0, "rate": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is asked, what is thought before the answer ("" for nothing), and the answer."""

    name: str
    question: str
    thoughts: str = ""
    answer: str


SCENARIOS: Mapping[str, Scenario] = {
    "chat": Scenario(
        name="Short chat",
        question="Can I pause my subscription?",
        answer=(
            "Yes. Open Settings, choose Subscription, and press Pause. Your notebooks stay, you can read them, and "
            "nothing is charged while you are away. Press Resume when you are back."
        ),
    ),
    "long": Scenario(
        name="Long answer",
        question="Why does an answer stream at all?",
        answer=(
            "A model writes one token after another, and each of them is final as soon as it is there. Nothing is "
            "gained by holding the first sentence until the last one is written. A person reads about four words a "
            "second, and most models write faster than that. So a reader who gets every word as it is made can begin "
            "almost at once, and is never kept waiting after that: the writing stays ahead of the eyes.\n\n"
            "Three things spoil it. The first is a response that is collected somewhere, by a proxy, by a middleware "
            "that compresses, or by code that waits for the whole text. The server was quick, and the reader sees "
            "nothing. The second is unevenness: words that come in clumps make a reader stop and start, even if the "
            "average is high. The third is a page that works too hard. One that lays out the whole answer again for "
            "each token falls behind in a long answer, and what came in time is shown late.\n\n"
            "A good page therefore takes what has come and writes it once for each picture that the screen shows, "
            "sixty times a second. No eye sees more than that, and the page has time left for a click on Stop."
        ),
    ),
    "reasoning": Scenario(
        name="Reasoning",
        question="Three seats cost 45 dollars. What do five seats cost, with a tenth off?",
        thoughts=(
            "Three seats cost 45 dollars, so a seat costs 45 divided by 3, which is 15 dollars. Five seats cost 5 "
            "times 15, which is 75 dollars. A tenth of 75 is 7.50. Is the tenth taken off each seat, or off the sum? "
            "It makes no difference: 13.50 times 5 is 67.50 as well. So 75 less 7.50 leaves 67.50 dollars. Check it "
            "the other way round: 67.50 divided by 0.9 is 75. That is right."
        ),
        answer="Five seats cost $67.50: a seat costs $15, five cost $75, and a tenth off that is $7.50.",
    ),
}


async def pace(run: Run) -> None:
    """Say a known text at a given pace: `input` has `scenario`, `ttft` in seconds, and `rate` in tokens a second."""
    scenario = _scenario_of(run.input)
    ttft, rate = (_number(run.input, name) for name in ("ttft", "rate"))
    clock = asyncio.get_running_loop()
    due_at = clock.time() + ttft

    async def write(text: str) -> None:
        nonlocal due_at
        for token in tokens_of(text):
            await asyncio.sleep(due_at - clock.time())
            await run.say(token)
            due_at += 1 / rate

    if scenario.thoughts:
        await run.step("Thinking", write, scenario.thoughts, of=2, phase="thinking")
        await run.step("Answering", write, scenario.answer, of=2, phase="answering")
    else:
        await write(scenario.answer)


def tokens_of(text: str) -> list[str]:
    """Return the words, each with what follows it: a blank, or the break of a paragraph."""
    return re.findall(r"\S+\s*", text)


def _scenario_of(given: Mapping[str, Any]) -> Scenario:
    name = given.get("scenario")
    if not isinstance(name, str) or name not in SCENARIOS:
        raise BadRequest(f"'scenario' is one of {', '.join(SCENARIOS)}.", param="input.scenario")
    return SCENARIOS[name]


def _number(given: Mapping[str, Any], name: str) -> float:
    value, least, most = given.get(name), LEAST[name], MOST[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise BadRequest(f"{name!r} is a number from {least:g} to {most:g}.", param=f"input.{name}")
    return float(value)

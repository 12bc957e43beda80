"""Laws of the lab's `pace`: it says the scenario's text, token by token, thoughts before the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from project.lab.pace import SCENARIOS, pace, tokens_of
from streamserve.protocol.events import Status, Token
from tests.support.sites.help_desk import Ask, assistant_over
from tests.support.streams.hand_made import started_echo

FAST = {"ttft": 0.0, "rate": 200}


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    model = await started_echo()
    async with assistant_over(model, pace) as asking:
        yield asking
    await model.aclose()


@pytest.mark.parametrize("name", SCENARIOS)
async def test_each_word_is_a_token(ask: Ask, name: str) -> None:
    """Thoughts come in a first step, the answer in a second; without thoughts there is no step."""
    scenario = SCENARIOS[name]
    answer = await ask(input={"scenario": name, **FAST})
    said = [event.text for event in answer.events if isinstance(event, Token)]
    assert said == tokens_of(scenario.thoughts) + tokens_of(scenario.answer)
    assert answer.steps == (["Thinking", "Answering"] if scenario.thoughts else [])
    if scenario.thoughts:
        second = [at for at, event in enumerate(answer.events) if isinstance(event, Status)][1]
        before = "".join(event.text for event in answer.events[:second] if isinstance(event, Token))
        assert before == scenario.thoughts


def test_tokens_are_words_with_what_follows_them() -> None:
    """Joined, they are the text; a word that occurs twice ends no paragraph."""
    assert tokens_of("a b.\n\na c") == ["a ", "b.\n\n", "a ", "c"]
    assert tokens_of("") == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"scenario": "none"}, "'scenario' is one of chat, long, reasoning."),
        ({"scenario": ["chat"]}, "'scenario' is one of"),
        ({"ttft": 11}, "'ttft' is a number from 0 to 10."),
        ({"ttft": "1"}, "'ttft' is a number"),
        ({"rate": 0}, "'rate' is a number from 2 to 200."),
        ({"rate": True}, "'rate' is a number"),
        ({"rate": float("nan")}, "'rate' is a number"),
    ],
)
async def test_what_it_cannot_do_is_named(ask: Ask, wrong: dict[str, Any], words: str) -> None:
    """The error has the field and what it may be."""
    with pytest.raises(AssertionError, match="invalid_request") as caught:
        await ask(input={"scenario": "chat", **FAST, **wrong})
    assert words in str(caught.value)

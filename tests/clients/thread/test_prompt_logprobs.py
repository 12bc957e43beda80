"""The prompt's log-probabilities as events of a `ThreadClient`, over the echo engine."""

from __future__ import annotations

import pytest

from streamserve.clients.thread.rules import MOST_PROMPT_CANDIDATES
from streamserve.engine.echo import EchoTokenizer
from streamserve.protocol.events import Event, PositionLogprobs, Token
from streamserve.protocol.requests import GenerateRequest
from tests.support.engines.clients import ask, collect, echo_runner, ids, serving

PROMPT = "The quiet river and the old boat. " * 4
TOP = 5


async def answer(*requests: GenerateRequest, overlap: bool = False) -> list[list[Event]]:
    async with serving(echo_runner(can_overlap=overlap)) as client:
        return [await collect(await client.generate(request)) for request in requests]


def of_prompt(events: list[Event]) -> list[PositionLogprobs]:
    """Return what comes before the first id, which is all in choice 0."""
    found: list[PositionLogprobs] = []
    for event in events:
        if isinstance(event, Token) and not event.token_ids:
            assert (event.choice, event.text) == (0, "")
            assert not ids(events[: events.index(event)])
            found += event.logprobs or ()
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_each_token_of_the_prompt_is_there_once(n: int, overlap: bool) -> None:
    """In order, the first without a number, in events of bounded size; the answer is what it is without them."""
    plain, events = await answer(ask(PROMPT, n=n), ask(PROMPT, n=n, prompt_logprobs=TOP), overlap=overlap)
    shown = of_prompt(events)
    assert [one.chosen.token_id for one in shown] == list(EchoTokenizer().encode(ask(PROMPT)).token_ids)
    assert b"".join(one.chosen.bytes_ for one in shown) == PROMPT.encode()
    assert (shown[0].chosen.logprob, shown[0].top) == (None, ())
    for one in shown[1:]:
        assert one.chosen.logprob is not None
        assert one.chosen.logprob < 0
        assert 1 <= len(one.top) <= TOP
    sizes = [sum(1 + len(one.top) for one in event.logprobs or ()) for event in events if isinstance(event, Token)]
    assert max(sizes) <= 256
    for choice in range(n):
        assert ids(events, choice) == ids(plain, choice)


@pytest.mark.parametrize("num_shown", [1, 2, 40, len(PROMPT)])
async def test_a_resumed_request_shows_the_rest(num_shown: int) -> None:
    """What readers were shown does not come again; the numbers are those of the whole."""
    whole, rest = await answer(
        ask(PROMPT, prompt_logprobs=TOP), ask(PROMPT, prompt_logprobs=TOP, num_prompt_logprobs=num_shown)
    )
    assert of_prompt(rest) == of_prompt(whole)[num_shown:]
    assert ids(rest) == ids(whole)


async def test_the_bound_counts_tokens_and_candidates() -> None:
    """As many as may be are served."""
    most = MOST_PROMPT_CANDIDATES // len(PROMPT) - 1
    (events,) = await answer(ask(PROMPT, prompt_logprobs=most, max_tokens=1))
    assert len(of_prompt(events)) == len(PROMPT)

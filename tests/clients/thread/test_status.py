"""Laws of the `status` events before the first token: what an answer waits for, in order, and how often it is shown."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from streamserve.clients.base import Generation
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.events import Event, Status, Token
from tests.support.engines.clients import CONFIG, ask, asking, collect, echo_runner, ids, serving
from tests.support.engines.runners import GatedRunner

ONE_AT_A_TIME = replace(CONFIG, max_num_seqs=1)
SMALL_STEPS = replace(CONFIG, max_num_batched_tokens=8)


def before_the_text(events: list[Event]) -> list[tuple[str, int | None]]:
    """Return the statuses, which all come before the first token."""
    first = next(place for place, event in enumerate(events) if isinstance(event, Token))
    assert not any(isinstance(event, Status) for event in events[first:])
    statuses = events[:first]
    assert all(isinstance(event, Status) for event in statuses)
    return [(event.status, event.step) for event in statuses if isinstance(event, Status)]


async def waiting_behind(client: ThreadClient, runner: GatedRunner, num: int, max_tokens: int = 2) -> list[Generation]:
    """Return answers of which the first runs, with its first step held, and the others wait."""
    answers = [await client.generate(ask(max_tokens=max_tokens))]
    await runner.held()
    answers += [await client.generate(ask(f"question {number}", max_tokens=2)) for number in range(num)]
    return answers


async def test_an_answer_that_waits_for_nothing_has_no_status() -> None:
    """A lone short request is not announced: no event, and so no commit, comes before its first token."""
    async with serving() as client:
        events = await collect(await client.generate(ask()))
    assert not [event for event in events if isinstance(event, Status)]


async def test_a_full_batch_queues_what_comes() -> None:
    """An answer that a step was planned without shows its place, and again when that has halved."""
    runner = GatedRunner(echo_runner())
    async with serving(runner, ONE_AT_A_TIME) as client:
        answers = await waiting_behind(client, runner, 7)
        runner.open()
        statuses = [before_the_text(await collect(answer)) for answer in answers]
    generating = ("generating", None)
    assert statuses[0] == []
    assert statuses[1] == [("queued", 1), generating]
    assert statuses[2] == [("queued", 2), ("queued", 1), generating]
    assert statuses[5] == [("queued", 5), ("queued", 2), ("queued", 1), generating]
    assert statuses[7] == [("queued", 7), ("queued", 3), ("queued", 1), generating]


async def test_several_choices_have_one_place() -> None:
    """An answer of several choices shows the place of the one that is first in line."""
    runner = GatedRunner(echo_runner())
    async with serving(runner, ONE_AT_A_TIME) as client:
        first = await client.generate(ask(max_tokens=2))
        await runner.held()
        both = await client.generate(ask("another", n=2, max_tokens=2))
        runner.open()
        await collect(first)
        assert before_the_text(await collect(both)) == [("queued", 1), ("generating", None)]


async def test_a_long_prompt_shows_how_far_it_is_read() -> None:
    """A prompt of several steps shows its computed tokens: rising, below the whole, and at most eleven times."""
    prompt = "a long prompt, " * 24
    async with serving(config=SMALL_STEPS) as client:
        generation = await client.generate(ask(prompt, max_tokens=2))
        events = await collect(generation)
        num_steps = client.stats().steps
    *reading, last = before_the_text(events)
    assert last == ("generating", None)
    assert {name for name, _ in reading} == {"prefill"}
    shown = [step or 0 for _, step in reading]
    assert all(one < other for one, other in pairwise(shown))
    assert shown[0] == 8
    assert {event.of for event in events if isinstance(event, Status)} == {len(prompt), None}
    assert shown[-1] < len(prompt)
    assert 5 < len(shown) <= 11 < num_steps


async def test_what_was_queued_and_then_read_shows_both() -> None:
    """`queued` comes before `prefill`, and that before `generating`."""
    runner = GatedRunner(echo_runner())
    async with serving(runner, replace(SMALL_STEPS, max_num_seqs=1)) as client:
        first = await client.generate(ask("short", max_tokens=2))
        await runner.held()
        second = await client.generate(ask("twenty letters of it", max_tokens=2))
        runner.open()
        await collect(first)
        names = [name for name, _ in before_the_text(await collect(second))]
    assert names == ["queued", "prefill", "prefill", "generating"]


async def test_an_answer_that_continues_shows_none_of_it() -> None:
    """A reader that has tokens to read sees nothing of the queue in which the rest of its answer waits."""
    runner = GatedRunner(echo_runner(), hold_from=3)
    async with serving(runner, ONE_AT_A_TIME) as client:
        shown = ids(await collect(await client.generate(ask(max_tokens=3))))
        other = await client.generate(ask("another"))
        await runner.held()
        continued = await client.generate(*asking(max_tokens=9, output_token_ids=(shown,)))
        runner.open()
        await collect(other)
        rest = await collect(continued)
    assert len(ids(rest)) == 6
    assert not [event for event in rest if isinstance(event, Status)]


async def test_an_abort_in_the_queue_moves_the_others_up() -> None:
    """The place counts present answers only."""
    runner = GatedRunner(echo_runner())
    async with serving(runner, ONE_AT_A_TIME) as client:
        answers = await waiting_behind(client, runner, 4, max_tokens=9)
        runner.release(2)
        assert await anext(answers[4]) == Status(status="queued", step=4)
        for left in answers[1:4]:
            left.cancel()
        runner.open()
        assert before_the_text(await collect(answers[4])) == [("queued", 1), ("generating", None)]

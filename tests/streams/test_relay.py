"""Laws of the relay: batch after batch, each when the one before is committed, and an end whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from streamserve.protocol.events import Done, Event
from streamserve.streams.log.base import Settle
from streamserve.streams.relay import Relay
from tests.support.streams import ScriptedGeneration, ask, tok

DONE = Done(finish_reason="stop")


class Commits:
    """What was committed, and what waits until the test says how it goes."""

    def __init__(self, *, at_once: bool) -> None:
        self.batches: list[list[Event]] = []
        self.waiting: list[Callable[[int | Exception], None]] = []
        self._at_once = at_once

    def begin(self, batch: Sequence[Event], heard: Settle) -> None:
        self.batches.append(list(batch))
        assert not self.waiting, "one at a time"
        if self._at_once:
            heard(1)
        else:
            self.waiting.append(heard)

    def settle(self, result: int | Exception = 1) -> None:
        self.waiting.pop()(result)

    @property
    def events(self) -> list[Event]:
        return [event for batch in self.batches for event in batch]


def relaying(*, at_once: bool) -> tuple[ScriptedGeneration, Commits, Relay, asyncio.Task[None]]:
    generation, commits = ScriptedGeneration(ask()), Commits(at_once=at_once)
    relay = Relay(generation, list, commits.begin)
    generation.on_news = relay.go_on
    return generation, commits, relay, asyncio.create_task(relay.over())


@pytest.mark.parametrize("at_once", [True, False])
async def test_everything_is_committed_in_order(at_once: bool) -> None:
    """What comes during a commit is the next batch, sixteen events at most."""
    generation, commits, _, over = relaying(at_once=at_once)
    events = [tok(f"{number}") for number in range(100)]
    generation.push(events[0])
    generation.push(*events[1:40])
    generation.push(*events[40:], DONE, None)
    while commits.waiting:
        commits.settle()
    await over
    assert commits.events == [*events, DONE]
    assert max(map(len, commits.batches)) <= 16
    assert len(commits.batches) <= 12


@pytest.mark.parametrize("ending", ["terminal", "parked", "cancelled"])
@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_it_is_over_with_its_generation(ending: str, when: str) -> None:
    """Before the first event, while one is being committed, and after it."""
    generation, commits, relay, over = relaying(at_once=False)

    def end() -> None:
        if ending == "cancelled":
            generation.cancel()
            relay.go_on()
        else:
            generation.push(*([DONE] if ending == "terminal" else []), None)

    if when == "before":
        end()
    generation.push(*([] if generation.is_cancelled or when == "before" else [tok("a")]))
    if when == "during":
        end()
    while commits.waiting:
        commits.settle()
    if when == "after":
        end()
    while commits.waiting:
        commits.settle()
    async with asyncio.timeout(5):
        await over


async def test_what_a_commit_raises_ends_it() -> None:
    """Nothing more is taken."""
    generation, commits, _, over = relaying(at_once=False)
    generation.push(tok("a"))
    generation.push(tok("b"))
    commits.settle(OSError("no space"))
    with pytest.raises(OSError, match="no space"):
        await over
    generation.push(tok("c"))
    assert commits.events == [tok("a")]


async def test_what_a_generation_raises_ends_it() -> None:
    """After what it gave before."""
    generation, commits, _, over = relaying(at_once=True)
    generation.push(tok("a"), ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await over
    assert commits.events == [tok("a")]


@pytest.mark.parametrize("is_committing", [True, False])
async def test_cancelled_it_waits_for_the_commit_of_now(is_committing: bool) -> None:
    """So that who cancels may append what comes last; nothing else is taken."""
    generation, commits, _, over = relaying(at_once=False)
    await asyncio.sleep(0)
    if is_committing:
        generation.push(tok("a"))
    over.cancel()
    await asyncio.sleep(0)
    assert over.done() is not is_committing
    generation.push(tok("b"))
    if is_committing:
        commits.settle()
    with pytest.raises(asyncio.CancelledError):
        await over
    assert commits.events == ([tok("a")] if is_committing else [])

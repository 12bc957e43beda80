"""Laws of `Generation`: what its stream takes, when that is announced, and how it ends, whatever its source is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from streamserve.clients.base import Generation, Source
from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.events import Done, Error, Event, Token
from tests.support.engines.clients import collect, text
from tests.support.streams.hand_made import tok

LEAD = Park(reason="lead", resume_at_lead=128)
DONE = Done(finish_reason="stop")


class HandSource(Source):
    """Puts what the test puts; `held` is given when it is pulled, and then comes the end that `ends` says."""

    def __init__(self, max_queued: int | None = None) -> None:
        super().__init__(Accepted(num_prompt_tokens=3, max_tokens=99, seed=1), max_queued=max_queued)
        self.calls: list[object] = []
        self.held: list[Event] = []
        self.ends: Park | None = None

    def pull(self, most: int | None) -> list[Event]:
        events, self.held = (self.held, []) if most is None else (self.held[:most], self.held[most:])
        if self.ends is not None and not self.held:
            self.generation.close(parked=self.ends)
        return events

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool) -> None:
        self.calls.append((num_tokens, is_away))

    def cancel(self) -> None:
        self.calls.append("cancel")


@pytest.fixture
async def source() -> HandSource:
    return HandSource()


@pytest.fixture
async def generation(source: HandSource) -> Generation:
    return source.generation


@pytest.fixture
def calls(generation: Generation) -> list[bool]:
    """Whether it was open, at each announcement."""
    calls: list[bool] = []
    generation.on_news = lambda: calls.append(generation.is_open)
    return calls


async def test_ready_takes_what_is_there(generation: Generation) -> None:
    """`ready` gives all queued events at once and never waits; the iterator continues after them."""
    assert generation.ready() == []
    generation.put([tok("a")])
    generation.put([tok("b")])
    assert text(generation.ready()) == "ab"
    assert generation.ready() == []
    generation.put([tok("c"), DONE])
    assert [type(event) for event in await collect(generation)] == [Token, Done]


async def test_ready_takes_no_more_than_it_is_asked_for(generation: Generation, calls: list[bool]) -> None:
    """The rest stays for the next call of `ready` or the iterator, and is not announced again."""
    for letter in "abcd":
        generation.put([tok(letter)])
    assert text(generation.ready(2)) == "ab"
    assert text([await anext(generation)]) == "c"
    generation.put([tok("e")])
    assert calls == [True]
    assert text(generation.ready(9)) == "de"
    generation.put([tok("f")])
    assert calls == [True, True]


async def test_a_waiting_reader_continues_after_ready(generation: Generation) -> None:
    """A waiting `anext` is woken by the next event, also after a `ready`."""
    generation.put([tok("a")])
    generation.ready()
    waiting = asyncio.ensure_future(anext(generation))
    await asyncio.sleep(0)
    generation.put([tok("b")])
    assert text([await waiting]) == "b"


async def test_news_is_announced_once_until_taken(generation: Generation, calls: list[bool]) -> None:
    """Any number of events are one call; after `ready` the next is a call again; the end is always a call."""
    for letter in "abc":
        generation.put([tok(letter)])
    assert calls == [True]
    generation.ready()
    generation.put([tok("d")])
    assert calls == [True, True]
    generation.end([tok("e")], parked=LEAD)
    assert calls == [True, True, False]
    assert text(generation.ready()) == "de"
    assert calls == [True, True, False]


async def test_what_came_before_it_was_asked_for_hides_no_news(generation: Generation) -> None:
    """Events that were there before `on_news` was set do not keep the next ones from being announced."""
    generation.put([tok("a")])
    calls: list[bool] = []
    generation.on_news = lambda: calls.append(True)
    generation.put([tok("b")])
    assert calls == [True]


async def test_held_events_are_given_when_they_are_pulled(source: HandSource, generation: Generation) -> None:
    """As many as are asked for, after what is queued; the end follows the last of them, and needs no announcement."""
    generation.put([tok("a")])
    source.held, source.ends = [tok("b"), tok("c")], LEAD
    assert text(generation.ready(2)) == "ab"
    assert (generation.is_open, generation.parked) == (True, None)
    assert text(await collect(generation)) == "c"
    assert (generation.is_open, generation.parked) == (False, LEAD)


@pytest.mark.parametrize("terminal", [DONE, Error(code="timeout", message="late")])
async def test_nothing_follows_a_terminal_event(generation: Generation, terminal: Event) -> None:
    """Neither another event nor a park, wherever the terminal event came from."""
    generation.put([tok("a"), terminal])
    generation.put([tok("b")])
    generation.end(parked=LEAD)
    assert [type(event) for event in await collect(generation)] == [Token, type(terminal)]
    assert generation.parked is None


async def test_a_pulled_terminal_event_ends_it(source: HandSource, generation: Generation) -> None:
    """A source may give it among the events that it held."""
    source.held = [tok("a"), DONE]
    assert len(await collect(generation)) == 2
    assert not generation.is_open


async def test_cancel_is_no_news(source: HandSource, generation: Generation, calls: list[bool]) -> None:
    """`cancel` drops what is there, ends its source once, wakes an iterator, and does not call `on_news`."""
    reading = asyncio.ensure_future(collect(generation))
    await asyncio.sleep(0)
    generation.cancel()
    generation.cancel()
    assert await reading == []
    assert (source.calls, calls) == (["cancel"], [])


async def test_an_ended_generation_cancels_nothing(source: HandSource, generation: Generation) -> None:
    """Its source has ended by itself."""
    generation.put([DONE])
    generation.cancel()
    assert (source.calls, generation.ready()) == ([], [])


async def test_its_source_follows_the_reader(source: HandSource, generation: Generation) -> None:
    """Every position reaches the source, and whether the reader looks."""
    generation.reader_at((3,), is_away=True)
    generation.reader_at(None)
    assert source.calls == [((3,), True), (None, False)]


async def test_a_source_waits_while_the_queue_is_full() -> None:
    """`room` returns at once below the bound, and otherwise when something is taken or it is cancelled."""
    for free in (Generation.ready, Generation.cancel):
        generation = HandSource(max_queued=2).generation
        await generation.room()
        generation.put([tok("a"), tok("b")])
        waiting = asyncio.ensure_future(generation.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        free(generation)
        async with asyncio.timeout(60):
            await waiting

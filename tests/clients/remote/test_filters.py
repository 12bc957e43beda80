"""A model elsewhere behind output filters: no reader sees what they hide, or waits for what it will not be sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from streamserve.clients.filtered import FilteredClient
from streamserve.clients.pipeline.filters import Blocklist, OutputFilter
from streamserve.protocol.errors import CannotContinue
from streamserve.protocol.events import BlockText, ChoiceDone, Done, Error, Event, Token
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import ShownChoice
from tests.support.engines.clients import collect
from tests.support.servers.upstreams import (
    DONE,
    META,
    Upstream,
    chat,
    chatting,
    counts,
    delta,
    remote,
    says,
    usage,
)

SECRET = "my bluebird sings"
END = (delta(finish_reason="stop"), usage(), DONE)


def stopping() -> Blocklist:
    return Blocklist(["bluebird"])


def replacing() -> Blocklist:
    return Blocklist(["bluebird"], replacement="[…]")


def hiding() -> Blocklist:
    return Blocklist(["bluebird"], replacement="")


class Silent:
    """Lets nothing through but the last word."""

    def feed(self, text: str) -> str:
        return "end" if text == "end" else ""

    def flush(self) -> str:
        return ""


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Token) and event.choice == choice)


def num_pieces(events: list[Event]) -> int:
    return sum(isinstance(event, Token) and bool(event.text) for event in events)


async def answered(parts: tuple[bytes, ...], *makes: Callable[[], OutputFilter], **fields: Any) -> list[Event]:
    async with remote(Upstream(says(*parts))) as client:
        events: list[Event] = await collect(await FilteredClient(client, makes).generate(*chatting(**fields)))  # type: ignore[arg-type]
    check_events([META, *events])
    return events


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
@pytest.mark.parametrize(("make", "shown"), [(stopping, "my "), (replacing, "my […] sings")])
async def test_at_every_cut(field: str, make: Callable[[], OutputFilter], shown: str) -> None:
    """The first piece goes through the filters too, and a word that is in two."""
    for cut in range(1, len(SECRET)):
        pieces = [delta(**{field: piece}) for piece in (SECRET[:cut], SECRET[cut:])]
        events = await answered((*pieces, *END), make)
        assert text_of(events) == shown, cut
        assert isinstance(events[-1], Done)
        assert events[-1].finish_reason == ("content_filter" if make is stopping else "stop")


async def test_each_choice_has_its_own() -> None:
    """The one that a filter stops ends, and the other goes on."""
    parts = (delta(0, content=SECRET), delta(1, content="my dog"), delta(1, "stop"), delta(0, "stop"), DONE)
    events = await answered(parts, stopping, n=2)
    assert (text_of(events, 0), text_of(events, 1)) == ("my ", "my dog")
    ends = {event.choice: event.finish_reason for event in events if isinstance(event, ChoiceDone)}
    assert ends == {0: "content_filter", 1: "stop"}


async def test_what_is_hidden_holds_nothing_up() -> None:
    """A reader that has all that it was sent is not behind, though the filter has hidden many times its lead."""
    parts = (*(delta(content="x ") for _ in range(200)), delta(content="end"), *END)
    async with remote(Upstream(says(*parts)), lead_tokens=8) as client:
        events: list[Event] = await collect(
            await FilteredClient(client, [Silent]).generate(*chatting(reader_tokens=(0,)))
        )  # type: ignore[arg-type]
        assert (text_of(events), type(events[-1])) == ("end", Done)


async def test_a_reader_that_is_behind_holds_the_server() -> None:
    """Its position counts the pieces that it was sent: half of them were hidden."""
    parts = (*(delta(content=text) for _ in range(100) for text in ("bluebird ", "x ")), *END)
    async with remote(Upstream(says(*parts)), lead_tokens=8) as client:
        generation = await FilteredClient(client, [hiding]).generate(*chatting(reader_tokens=(0,)))
        num_read, events = 0, list[Event]()
        while generation.is_open:
            news = await anext(generation, None)
            events += [] if news is None else [news]
            if counts(client)["holds"] and num_read < (num_sent := num_pieces(events)):
                num_read = num_sent
                generation.reader_at((num_read,))
        assert counts(client)["holds"] >= 1
    assert text_of(events).split() == ["x"] * 100


async def test_an_answer_that_has_begun_is_not_continued() -> None:
    """What readers were shown is not what the model has said: a lost connection ends it, and so does a new request."""
    async with remote(Upstream(says(delta(content="my "), whole=False), says(*END))) as client:
        filtered = FilteredClient(client, [replacing])
        generation = await filtered.generate(chat())
        events: list[Event] = await collect(generation)  # type: ignore[arg-type]
        assert generation.parked is None
        assert isinstance(events[-1], Error)
        assert (events[-1].code, events[-1].retryable) == ("cannot_continue", True)
        shown = (ShownChoice(blocks=(BlockText(index=0, kind="text", text="my ", is_open=True),), num_tokens=1),)
        with pytest.raises(CannotContinue):
            await filtered.generate(*chatting(shown=shown))
        await collect(await filtered.generate(*chatting(shown=(ShownChoice(),))))


async def test_an_answer_of_which_nothing_came_is_asked_for_again() -> None:
    """Then there is nothing that a filter has changed."""
    async with remote(Upstream(says(delta(role="assistant"), whole=False))) as client:
        generation = await FilteredClient(client, [replacing]).generate(chat())
        assert await collect(generation) == []
        assert generation.parked is not None

"""Laws of a model's filters: no reader sees what they hide, however the answer is cut, and it goes on unharmed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable

import pytest

from streamserve.clients.factory import echo_client
from streamserve.clients.filtered import FilteredClient
from streamserve.clients.pipeline.filters import Blocklist, OutputFilter, Redaction
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.engine import Park
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import BlockStart, BlockStop, ChoiceDone, Done, Event, Token, Usage
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import Admission, GenerateRequest, Message, SamplingParams
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import collect
from streamserve.streams.registry import Streams
from tests.support.bodies.event_logs import META
from tests.support.streams.hand_made import ParkingClient, ScriptedClient, ask, tok, until

SECRET = "my bluebird sings"
CUTS = [(first, second) for first in range(1, len(SECRET)) for second in range(first + 1, len(SECRET) + 1)]
PARKS = [Park(reason="ahead")]
# What the echo engine answers: a thought, a text and a call, each with the word, and a text that ends within it.
ANSWERS = {
    "blocks": f"<think>{SECRET}</think>Well, {SECRET}.\n"
    '<tool_call>\n{"name": "say", "arguments": {"it": "bluebird"}}\n</tool_call>',
    "text": f"{SECRET} and bluebird, bluebirds and blue",
}
Make = Callable[[], OutputFilter]


def stopping() -> Blocklist:
    return Blocklist(["bluebird"])


def replacing() -> Blocklist:
    return Blocklist(["bluebird"], replacement="[…]")


def redacting() -> Redaction:
    return Redaction(r"blue\w+", "[…]", max_chars=20)


def text_of(events: Iterable[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Token) and event.choice == choice)


def done(num: int, reason: str = "stop") -> Done:
    return Done(finish_reason=reason, usage=Usage(prompt_tokens=3, completion_tokens=num))


async def through(script: list[Event], *makes: Make, at_once: int | None = None, **fields: object) -> list[Event]:
    """Return what becomes of an engine's events, taken `at_once` at a time (None: all); they keep the grammar."""
    scripted = ScriptedClient()
    generation = await FilteredClient(scripted, makes).generate(ask("scripted", **fields))
    scripted.last.push(*script)
    out: list[Event] = []
    while events := generation.ready(at_once):
        out += events
    check_events([META, *out])
    return out


@pytest.mark.parametrize("kind", ["text", "thinking", "tool_use"])
@pytest.mark.parametrize(
    ("make", "shown"), [(stopping, "my "), (replacing, "my […] sings"), (redacting, "my […] sings")]
)
async def test_at_every_cut_and_in_every_block(kind: str, make: Make, shown: str) -> None:
    """A word in one, two, three or many tokens: none of it is shown, and the ids of what was made are."""
    for pieces in (*([SECRET[:a], SECRET[a:b], SECRET[b:]] for a, b in CUTS), [SECRET], list(SECRET)):
        script: list[Event] = [tok(text) for text in pieces]
        if kind != "text":
            script = [BlockStart(choice=0, index=0, kind=kind), *script, BlockStop(choice=0, index=0)]
        for at_once in (1, None) if len(pieces) != 3 else (None,):
            events = await through([*script, done(len(pieces))], make, at_once=at_once)
            assert text_of(events) == shown, pieces
            end = events[-1]
            assert isinstance(end, Done)
            assert end.finish_reason == ("content_filter" if make is stopping else "stop")


async def test_blocks_are_filtered_each_by_itself() -> None:
    """A word that begins in a thought and ends in the text is none."""
    script = [
        BlockStart(choice=0, index=0, kind="thinking"),
        tok("blue"),
        BlockStop(choice=0, index=0),
        BlockStart(choice=0, index=1, kind="text"),
        Token(text="bird", token_ids=(8,), index=1),
        BlockStop(choice=0, index=1),
        done(2),
    ]
    assert text_of(await through(script, stopping)) == "bluebird"


async def test_a_stopped_choice_leaves_the_others() -> None:
    """It ends as `content_filter`, nothing of it follows, and its engine's later tokens are not counted."""
    script = [
        tok("a bluebird sings loudly", choice=0),
        tok("fine", choice=1),
        tok("more", choice=0),
        ChoiceDone(choice=0, finish_reason="stop"),
        tok(" too", choice=1),
        ChoiceDone(choice=1, finish_reason="length"),
        done(4),
    ]
    events = await through(script, stopping, n=2)
    assert [text_of(events, choice) for choice in (0, 1)] == ["a ", "fine too"]
    ends = {event.choice: event.finish_reason for event in events if isinstance(event, ChoiceDone)}
    assert ends == {0: "content_filter", 1: "length"}
    end = events[-1]
    assert isinstance(end, Done)
    assert (end.finish_reason, end.usage.completion_tokens) == ("content_filter", 3)


async def test_the_engine_is_stopped_with_the_last_choice() -> None:
    """When a filter has stopped every choice, nothing is computed any more."""
    scripted = ScriptedClient()
    generation = await FilteredClient(scripted, [stopping]).generate(ask("scripted", n=2))
    scripted.last.push(tok("bluebird sings loudly", choice=1), tok("bluebird sings loudly", choice=0))
    *_, end = generation.ready()
    assert isinstance(end, Done)
    assert end.finish_reason == "content_filter"
    assert scripted.last.is_cancelled
    assert not generation.is_open


async def test_the_engine_does_not_wait_for_readers_of_a_stopped_choice() -> None:
    """Its reader has all there is to read, so it holds up no other."""
    scripted = ScriptedClient()
    generation = await FilteredClient(scripted, [stopping]).generate(ask("scripted", n=2))
    scripted.last.push(tok("bluebird sings loudly", 1, choice=0), tok("x", 2, choice=1), tok("more", 3, 4, 5, choice=0))
    generation.ready()
    generation.reader_at((1, 0))
    assert scripted.last.positions == [(4, 0)]


async def test_log_probabilities_are_refused() -> None:
    """They would show the very tokens."""
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(BadRequest) as caught:
            await FilteredClient(ScriptedClient(), [stopping]).generate(ask("scripted", **{name: 0}))
        assert caught.value.param == name


@pytest.fixture
async def echo() -> AsyncIterator[ThreadClient]:
    """The echo engine, which answers the above."""
    client = echo_client(answers=ANSWERS, format_name="qwen3")
    client.start()
    await until(lambda: client.describe().state == "ready", "it is ready")
    yield client
    await client.aclose()


async def whole(client: FilteredClient | ParkingClient, question: str) -> list[Event]:
    streams = Streams({"m": client}, MemoryLog())  # type: ignore[dict-item]  # what a stream uses of a client
    messages = (Message(role="user", content=question),)
    request = GenerateRequest(model="m", messages=messages, sampling=SamplingParams(seed=5, max_tokens=400))
    try:
        stream = await streams.start(request, Admission(owner="u", tenant="t"))
        events = [logged.event for logged in await collect(streams, stream)]
    finally:
        await streams.aclose()
    check_events(events)
    return events


def shape(events: Iterable[Event]) -> tuple[list[object], list[int]]:
    """Return kind and text of each block, and all ids."""
    texts: dict[int, list[str]] = {}
    ids: list[int] = []
    for event in events:
        if isinstance(event, BlockStart):
            texts[event.index] = [f"{event.kind}: "]
        elif isinstance(event, Token):
            texts.setdefault(event.index, []).append(event.text)
            ids += event.token_ids
    return ["".join(pieces) for pieces in texts.values()], ids


@pytest.mark.parametrize("num_tokens", [2, 3, 7])
@pytest.mark.parametrize("make", [replacing, redacting, stopping])
@pytest.mark.parametrize("question", list(ANSWERS))
async def test_a_parked_answer_goes_on_as_if_it_had_not_been(
    echo: ThreadClient, question: str, make: Make, num_tokens: int
) -> None:
    """The engine gets its own ids back; the filters see again what they have seen, and readers see nothing twice."""
    client = FilteredClient(echo, [make])
    parking = ParkingClient(client, PARKS, num_tokens=num_tokens)
    events, parked = await whole(client, question), await whole(parking, question)
    assert shape(parked) == shape(events)
    assert parking.num_requests > 1
    assert not any("bluebird" in str(text) for text in shape(events)[0] if "bluebirds" not in str(text))
    ends = [one[-1] for one in (events, parked)]
    assert [end.finish_reason for end in ends if isinstance(end, Done)] == [ends[0].finish_reason] * 2

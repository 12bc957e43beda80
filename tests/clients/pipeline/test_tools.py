"""Laws of tools in a run: schemas from signatures, calls that are answered, and an end of the rounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest

from streamserve.clients.factory import echo_client
from streamserve.clients.pipeline.filters import Blocklist
from streamserve.clients.pipeline.run import Run
from streamserve.clients.pipeline.tools import WrongCall, function_tool
from streamserve.protocol.events import BlockStart, Done, Error, Event, Token
from streamserve.protocol.frames import encode_event
from streamserve.protocol.requests import Message
from streamserve.streams.log.base import Batch, MemoryLog
from streamserve.streams.store import answer_turn
from tests.clients.pipeline.conftest import Site, text_of
from tests.support.streams.hand_made import until

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'
ANSWERS = {"Weather report": "It is sunny.", "Missing: city": CALL, "sky": CALL, "wrong": WRONG, "again": CALL}


def weather(city: str, unit: Literal["C", "F"] = "C") -> str:
    """Return the weather of a city.

    Not sent to the model.
    """
    return f"Weather report of {city}: sunny, 20 {unit}"


def endless(city: str) -> str:
    """Return a text that makes the model ask again."""
    return "again"


endless.__name__ = "weather"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """The echo engine, which writes the calls above."""
    echo = echo_client(answers=ANSWERS, format_name="qwen3")
    echo.start()
    await until(lambda: echo.describe().state == "ready", "it is ready")
    site = Site(echo)
    yield site
    await site.streams.aclose()
    await echo.aclose()


def asking(question: str, *tools: Any, **options: Any) -> Any:
    """Return a pipeline that asks with these tools."""

    async def function(run: Run) -> None:
        await run.generate(question, tools=tools, max_tokens=200, **options)

    return function


async def test_a_call_is_answered_and_the_model_goes_on(site: Site) -> None:
    """The call is a block of the run, its result is the model's next turn, and the last answer is the run's text."""
    events: list[Event] = await site.run(asking("How is the sky?", weather))
    calls = [event for event in events if isinstance(event, BlockStart) and event.kind == "server_tool_use"]
    assert [call.name for call in calls] == ["weather"]
    assert text_of(events).endswith("It is sunny.")
    done = events[-1]
    assert isinstance(done, Done)
    assert done.finish_reason == "stop"


def results_of(events: list[Event]) -> dict[str, str]:
    """Return what each result shows, by the id of its call."""
    begun = {e.index: e for e in events if isinstance(e, BlockStart) and e.kind == "tool_result"}
    texts = {start.id or "": "" for start in begun.values()}
    for event in events:
        if isinstance(event, Token) and event.index in begun:
            assert event.token_ids == ()
            texts[begun[event.index].id or ""] += event.text
    return texts


async def test_readers_see_the_result_of_a_call(site: Site) -> None:
    """A block with the call's id and without a name; it is no text of the answer."""
    events = await site.run(asking("How is the sky?", weather))
    (call,) = [event for event in events if isinstance(event, BlockStart) and event.kind == "server_tool_use"]
    assert results_of(events) == {call.id: "Weather report of Oslo: sunny, 20 C"}
    assert all(event.name is None for event in events if isinstance(event, BlockStart) and event.kind == "tool_result")
    whole = await log_turn(events)
    assert (whole.content, whole.extra) == ("It is sunny.", {})


@pytest.mark.parametrize("options", [{"show_results": False}, {"show": False}])
async def test_results_may_stay_with_the_run(site: Site, options: dict[str, bool]) -> None:
    """An author who does not want them shown says so; an answer that is not shown shows none."""
    assert results_of(await site.run(asking("How is the sky?", weather, **options))) == {}


@pytest.mark.parametrize("stops", [False, True])
async def test_a_result_goes_through_the_filters(site: Site, stops: bool) -> None:
    """What no reader may see is not in a result either; the run goes on, and the function got the whole call."""

    def make() -> Blocklist:
        return Blocklist(["sunny, 20"], replacement=None if stops else "[…]")

    events = await site.run(asking("How is the sky?", weather), filters=[make])
    (shown,) = results_of(events).values()
    assert shown == ("Weather report of Oslo: " if stops else "Weather report of Oslo: […] C")
    assert text_of(events).endswith("It is sunny.")


async def log_turn(events: list[Event]) -> Message:
    """Return the events as a turn of the conversation, as a next one is asked with."""
    log = MemoryLog()
    batch = Batch("L" * 12, 1, 0, list(events), [encode_event(event) for event in events], True)
    assert await log.commit([batch]) == [len(events)]
    return await answer_turn(log, "L" * 12)


async def test_wrong_arguments_are_reported_to_the_model(site: Site) -> None:
    """The error is the call's result, and the model calls again; each call has an id of its own."""
    events = await site.run(asking("wrong", weather, seed=4))
    calls = [event for event in events if isinstance(event, BlockStart) and event.kind == "server_tool_use"]
    assert len({call.id for call in calls}) == len(calls) == 2
    assert text_of(events).endswith("It is sunny.")


async def test_the_rounds_have_an_end(site: Site) -> None:
    """A model that only calls ends the run in an error that says so."""
    events = await site.run(asking("sky", endless, max_rounds=2))
    assert isinstance(events[-1], Error)
    assert events[-1].code == "too_many_tool_rounds"
    assert sum(isinstance(event, BlockStart) and event.kind == "server_tool_use" for event in events) == 3


def test_the_schema_is_the_signature_s() -> None:
    """Types, choices, lists, what is required, and the first paragraph."""

    def search(words: list[str], limit: int | None = None, exact: bool = False, above: float = 0.0) -> str:
        """Search."""
        return ""

    assert function_tool(weather).tool.description == "Return the weather of a city."
    assert function_tool(weather).tool.parameters == {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    properties = function_tool(search).tool.parameters["properties"]
    assert properties["words"] == {"type": "array", "items": {"type": "string"}}
    assert [properties[name]["type"] for name in ("limit", "exact", "above")] == ["integer", "boolean", "number"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        (r'{"city": "\ud83d"}', "no JSON"),
        ('{"city": NaN}', "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("{}", "Missing: city"),
        ('{"city": "Oslo", "zip": 1}', "Unknown: zip"),
        ('{"city": 1}', "city must be"),
        ('{"city": "Oslo", "unit": "K"}', "unit must be"),
    ],
)
def test_wrong_arguments_are_named(arguments: str, match: str) -> None:
    """The error names what is wrong and what would be right."""
    with pytest.raises(WrongCall, match=match):
        function_tool(weather).arguments(arguments)
    assert function_tool(weather).arguments('{"city": "Oslo"}') == {"city": "Oslo"}


def test_a_function_that_cannot_be_told_is_refused() -> None:
    """A parameter without a type, of another type, and *args."""

    def untyped(a) -> str:  # type: ignore[no-untyped-def]
        return ""

    def other(a: dict[str, int]) -> str:
        return ""

    def many(*a: int) -> str:
        return ""

    for function, match in ((untyped, "no type"), (other, "use str"), (many, "args")):
        with pytest.raises(TypeError, match=match):
            function_tool(function)

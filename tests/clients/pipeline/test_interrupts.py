"""Laws of tools that ask first: where a run ends, what its continuation shows, and that no tool runs twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from streamserve.clients.factory import echo_client
from streamserve.clients.pipeline.filters import Redaction
from streamserve.clients.pipeline.interrupts import Interrupted, interrupted_of
from streamserve.clients.pipeline.run import Run
from streamserve.clients.pipeline.tools import tool
from streamserve.protocol.errors import Gone, StreamserveError
from streamserve.protocol.events import (
    Approval,
    BlockStart,
    Citation,
    Custom,
    Done,
    Error,
    Event,
    State,
    Status,
    Token,
    is_success,
)
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import Admission, Approved, GenerateRequest
from streamserve.streams.reader.follow import follow
from streamserve.streams.stream import Stream
from tests.clients.pipeline.conftest import Site, text_of
from tests.support.streams.hand_made import until


def call(name: str, **arguments: Any) -> str:
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = {
    "Paid 9 euros": "Both are paid.",
    "Paid": "It is paid.",
    "refused": "Then I leave it.",
    "one bill": "I pay." + call("pay", euros=5),
    "two bills": call("look") + call("pay", euros=5) + call("pay", euros=9),
    "small bill": call("pay", euros=1),
    "wrong bill": call("pay", dollars=1),
    "Bill found": "Found, I pay." + call("pay", euros=5),
    "first look": call("look"),
}


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """The echo engine, which writes the calls above."""
    echo = echo_client(answers=ANSWERS, format_name="qwen3")
    echo.start()
    await until(lambda: echo.describe().state == "ready", "it is ready")
    site = Site(echo)
    yield site
    await site.streams.aclose()
    for client in site.clients.values():
        await client.aclose()


class Shop:
    """Tools, and how often each was called."""

    def __init__(self, confirm: Any = True) -> None:
        self.calls: Counter[str] = Counter()

        def pay(euros: int) -> str:
            """Pay."""
            self.calls[f"pay {euros}"] += 1
            return f"Paid {euros} euros."

        def look() -> str:
            """Look."""
            self.calls["look"] += 1
            return "Bill found."

        self.tools = [tool(pay, confirm=confirm), look]

    def found(self) -> list[int]:
        self.calls["found"] += 1
        return [1, 2]

    def asking(self, question: str, **options: Any) -> Any:
        async def function(run: Run) -> None:
            await run.step("Look", self.found, of=1)
            run.cite("help", id="7")
            await run.generate(question, tools=self.tools, max_tokens=200, **options)

        return function


async def events_of(site: Site, stream: Stream) -> list[Event]:
    async with aclosing(follow(site.streams, stream)) as reading:
        events = [logged.event async for logged in reading]
    check_events(events)
    return events


async def resumed(site: Site, before: Stream, *answers: Approved) -> tuple[Stream, list[Event]]:
    """Continue an interrupted stream, as api/interrupts.py does."""
    interrupted = await site.streams.interrupts.find(before.id)
    assert interrupted is not None
    request = interrupted.request
    request = replace(request, continues=before.id, approvals=(*request.approvals, *answers))
    stream = await site.streams.start(request, Admission(owner="u1", tenant="t1"))
    return stream, await events_of(site, stream)


async def interrupted(site: Site, function: Any, filters: Any = ()) -> tuple[Stream, list[Event], list[Approval]]:
    site.serve(function, filters=filters)
    stream = await site.begin()
    events = await events_of(site, stream)
    end = events[-1]
    assert isinstance(end, Done), end
    assert end.finish_reason == "interrupt"
    return stream, events, [event for event in events if isinstance(event, Approval)]


def starts(events: list[Event]) -> list[tuple[str, str | None]]:
    return [(event.kind, event.id) for event in events if isinstance(event, BlockStart)]


async def test_a_call_that_is_allowed_runs_once_and_the_rest_follows(site: Site) -> None:
    """The second stream has the result and the answer, and nothing of the first: steps, citations, texts, counts."""
    shop = Shop()
    first, before, (approval,) = await interrupted(site, shop.asking("one bill"))
    assert (approval.name, approval.arguments, approval.message) == ("pay", '{"euros": 5}', None)
    assert shop.calls == {"found": 1}
    assert text_of(before).startswith("I pay.")
    _, after = await resumed(site, first, Approved(id=approval.id, allow=True))
    assert shop.calls == {"found": 1, "pay 5": 1}
    assert starts(after)[0] == ("tool_result", approval.id)
    assert text_of(after) == "Paid 5 euros.It is paid."
    assert not [event for event in after if isinstance(event, Citation | Status | Approval)]
    end = after[-1]
    assert isinstance(end, Done)
    assert (end.finish_reason, end.usage.completion_tokens) == (
        "stop",
        sum(len(one.token_ids) for one in tokens(after)),
    )
    first_end = before[-1]
    assert isinstance(first_end, Done)
    assert end.usage.prompt_tokens > 0
    assert first_end.usage.prompt_tokens > 0


def tokens(events: list[Event]) -> list[Token]:
    return [event for event in events if isinstance(event, Token)]


async def test_a_refused_call_does_not_run_and_the_model_is_told_why(site: Site) -> None:
    """The result says that the user has refused, with the user's words; the model answers to that."""
    shop = Shop()
    first, _, (approval,) = await interrupted(site, shop.asking("one bill"))
    _, after = await resumed(site, first, Approved(id=approval.id, allow=False, message="Too dear."))
    assert shop.calls == {"found": 1}
    assert text_of(after) == "The user has refused this call. Too dear.Then I leave it."


async def test_the_other_calls_of_the_turn_run_at_once(site: Site) -> None:
    """A call that needs no approval is answered before the run ends; those that need it are asked about together."""
    shop = Shop()
    first, before, approvals = await interrupted(site, shop.asking("two bills"))
    assert shop.calls == {"found": 1, "look": 1}
    assert "Bill found." in text_of(before)
    assert [approval.arguments for approval in approvals] == ['{"euros": 5}', '{"euros": 9}']
    answers = [Approved(id=one.id, allow="9" in one.arguments) for one in approvals]
    _, after = await resumed(site, first, *answers)
    assert shop.calls == {"found": 1, "look": 1, "pay 9": 1}
    assert starts(after)[:2] == [("tool_result", one.id) for one in approvals]


async def test_a_function_of_the_arguments_decides_and_asks(site: Site) -> None:
    """It returns the question, or False for a call that just runs; its own answer is kept like a step's result."""
    shop, asked_of = Shop(), Counter[int]()

    def confirm(euros: int) -> str | bool:
        asked_of[euros] += 1
        return f"Pay {euros} euros?" if euros > 1 else False

    shop = Shop(confirm)
    first, _, (approval,) = await interrupted(site, shop.asking("one bill"))
    assert approval.message == "Pay 5 euros?"
    await resumed(site, first, Approved(id=approval.id, allow=True))
    assert asked_of == {5: 1}
    events = await site.run(shop.asking("small bill"))
    assert is_success(events[-1])
    assert shop.calls["pay 1"] == 1


async def test_arguments_that_do_not_fit_are_not_asked_about(site: Site) -> None:
    """The model gets the error, as of any tool; the user is asked about calls that can run."""
    shop = Shop()
    events = await site.run(shop.asking("wrong bill", max_rounds=1))
    assert not [event for event in events if isinstance(event, Approval)]
    assert not shop.calls["pay 1"]


async def test_a_run_may_be_interrupted_again(site: Site) -> None:
    """Each continuation begins where the one before it has ended, and repeats nothing of any of them."""
    shop = Shop()

    async def twice(run: Run) -> None:
        await run.generate("one bill", tools=shop.tools, max_tokens=200)
        await run.say(" Next: ")
        await run.generate("two bills", tools=shop.tools, max_tokens=200)

    first, _, (approval,) = await interrupted(site, twice)
    second, middle = await resumed(site, first, Approved(id=approval.id, allow=True))
    assert isinstance(middle[-1], Done)
    assert middle[-1].finish_reason == "interrupt"
    assert text_of(middle).startswith("Paid 5 euros.It is paid. Next: ")
    approvals = [event for event in middle if isinstance(event, Approval)]
    _, last = await resumed(site, second, *(Approved(id=one.id, allow=True) for one in approvals))
    assert shop.calls == {"look": 1, "pay 5": 2, "pay 9": 1}
    assert starts(last)[:2] == [("tool_result", one.id) for one in approvals]
    assert text_of(last) == "Paid 5 euros.Paid 9 euros.Both are paid."


@pytest.mark.parametrize("way", ["gather", "group", "step", "caught"])
async def test_wherever_the_answer_stands_the_run_ends(site: Site, way: str) -> None:
    """Side by side with others, in a step, and in a function that catches what fails."""
    shop = Shop()

    async def function(run: Run) -> None:
        pay = {"tools": shop.tools, "max_tokens": 200}
        if way == "gather":
            await asyncio.gather(
                run.generate("Hello", max_tokens=300, ignore_eos=True), run.generate("one bill", **pay)
            )
        elif way == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(run.generate("one bill", **pay))
                group.create_task(run.generate("Hello", max_tokens=300, ignore_eos=True))
        elif way == "step":
            await run.step("Pay", run.generate, "one bill", **pay)
        else:
            try:
                await run.generate("one bill", **pay)
            except Exception:
                await run.say("It failed.")

    first, before, (approval,) = await interrupted(site, function)
    _, after = await resumed(site, first, Approved(id=approval.id, allow=True))
    assert is_success(after[-1])
    assert shop.calls == {"pay 5": 1}
    assert "It is paid." in text_of(after)
    assert "It failed." not in text_of([*before, *after])


async def test_a_hidden_answer_shows_the_call_that_it_asks_about(site: Site) -> None:
    """Nobody can allow what is not shown; its result stays hidden."""
    shop = Shop()
    first, before, (approval,) = await interrupted(site, shop.asking("one bill", show=False))
    assert starts(before) == [("server_tool_use", approval.id)]
    _, after = await resumed(site, first, Approved(id=approval.id, allow=True))
    assert starts(after) == []
    assert is_success(after[-1])
    assert shop.calls["pay 5"] == 1


async def test_filters_see_what_is_asked(site: Site) -> None:
    """What a filter hides of a call is hidden in the question too; the function gets what the model wrote."""
    shop = Shop(lambda euros: f"Pay {euros}?")
    filters = [lambda: Redaction(r"\d", "#", max_chars=2)]
    first, before, (approval,) = await interrupted(site, shop.asking("one bill"), filters)
    assert (approval.arguments, approval.message) == ('{"euros": #}', "Pay #?")
    _, after = await resumed(site, first, Approved(id=approval.id, allow=True))
    assert shop.calls["pay 5"] == 1
    assert "Paid # euros." in text_of(after)
    assert "5" not in text_of([*before, *after])


async def test_a_run_that_changes_its_mind_ends_and_runs_no_tool(site: Site) -> None:
    """The question was about another run: the error says what to put into steps."""
    shop, times = Shop(), Counter[str]()

    async def function(run: Run) -> None:
        times["begun"] += 1
        await run.say(f"{times['begun']}. ")
        await run.generate("one bill", tools=shop.tools, max_tokens=200)

    first, _, (approval,) = await interrupted(site, function)
    _, after = await resumed(site, first, Approved(id=approval.id, allow=True))
    assert isinstance(after[-1], Error)
    assert after[-1].code == "not_repeatable"
    assert not shop.calls


async def test_an_interrupt_is_kept_for_its_time(site: Site) -> None:
    """After `APPROVAL_SECONDS`, and once its continuation has ended, a run cannot be continued."""
    shop = Shop()
    first, _, (approval,) = await interrupted(site, shop.asking("one bill"))
    found = await site.streams.interrupts.find(first.id)
    assert found is not None
    request = replace(found.request, continues=first.id, approvals=(Approved(id=approval.id, allow=True),))
    await site.streams.interrupts.keep(first.id, replace(found, at=found.at - 86_401))
    assert await site.streams.interrupts.find(first.id) is None
    with pytest.raises(Gone):
        await site.streams.start(request, Admission(owner="u1", tenant="t1"))
    assert not shop.calls["pay 5"]


async def test_what_is_kept_comes_back_as_it_went(site: Site) -> None:
    """An interrupted run is JSON, head last: without it, it is not whole."""
    shop = Shop()
    first, _, _ = await interrupted(site, shop.asking("two bills"))
    found = await site.streams.interrupts.find(first.id)
    assert isinstance(found, Interrupted)
    entries = list(found.entries())
    assert interrupted_of(entries) == found
    assert interrupted_of(entries[:-1]) is None


async def test_a_second_continuation_runs_no_tool(site: Site) -> None:
    """Two answers at once: a run begins its function once its stream has its place, and one of two is refused."""
    from streamserve.api.idempotency import continuation_of

    shop = Shop()
    first, _, (approval,) = await interrupted(site, shop.asking("one bill"))
    found = await site.streams.interrupts.find(first.id)
    assert found is not None
    request: GenerateRequest = replace(
        found.request, continues=first.id, approvals=(Approved(id=approval.id, allow=True),)
    )
    admissions = [Admission(owner="u1", tenant="t1", once=continuation_of(first.id, None)) for _ in range(3)]
    begun = await asyncio.gather(
        *(site.streams.start(request, admission) for admission in admissions), return_exceptions=True
    )
    (stream,) = [one for one in begun if isinstance(one, Stream)]
    assert is_success((await events_of(site, stream))[-1])
    assert shop.calls["pay 5"] == 1
    assert not [one for one in begun if isinstance(one, StreamserveError)]  # KeyTaken, which StartOnce answers


async def test_the_state_of_a_run_goes_on(site: Site) -> None:
    """A change after the interrupt begins with the whole state, since its readers may have come for this stream."""
    shop = Shop()

    async def function(run: Run) -> None:
        run.state["bills"] = 1
        run.emit("found", 1)
        await run.generate("one bill", tools=shop.tools, max_tokens=200)
        run.state["paid"] = True
        run.state["bills"] = 0

    first, before, (approval,) = await interrupted(site, function)
    _, after = await resumed(site, first, Approved(id=approval.id, allow=True))
    states = [event.payload() for event in after if isinstance(event, State)]
    assert states[0] == {"snapshot": {"bills": 1, "paid": True}}
    assert len(states) == 2
    assert [event for event in before if isinstance(event, Custom)]
    assert not [event for event in after if isinstance(event, Custom)]

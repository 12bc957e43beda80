"""Laws of a run's state and of its own events: readers see each change once, in any number of attempts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import jsonpatch
import pytest

from streamserve.clients.pipeline.journal import Key
from streamserve.clients.pipeline.run import Run
from streamserve.clients.pipeline.state import RunState
from streamserve.clients.thread.client import ThreadClient
from streamserve.dialects.fold import Answer
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import Custom, Done, Error, Event, State
from streamserve.protocol.json_patch import MAX_VALUE_CHARS
from streamserve.protocol.requests import GenerateRequest
from tests.clients.pipeline.conftest import Site
from tests.clients.pipeline.test_journal import ASKED, Kept, attempt
from tests.support.streams.hand_made import Gate, started_echo

SHORT = {"max_tokens": 3, "ignore_eos": True}


@pytest.fixture
async def echo(gate: Gate) -> AsyncIterator[ThreadClient]:
    client = await started_echo(gate)
    gate.open()
    yield client
    await client.aclose()


def seen(events: list[Event]) -> Any:
    """Return the state that a reader has, by the package `jsonpatch`."""
    state: Any = None
    for event in events:
        if isinstance(event, State):
            payload = event.payload()
            assert len(payload) == 1
            state = payload["snapshot"] if "snapshot" in payload else jsonpatch.apply_patch(state, payload["delta"])
    return state


def names(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.name, event.value) for event in events if isinstance(event, Custom)]


def test_each_change_is_an_event() -> None:
    """The first has the whole state, later events a patch, or the whole state where several operations are longer."""
    events: list[State] = []
    state = RunState({"asked": "why"}, lambda event, change: events.append(event))
    assert state["asked"] == "why"
    state["passages"] = []
    state["passages"].append({"id": 7})
    state["passages"][0]["score"] = 0.5
    state["passages"][0]["score"] = 0.5
    state.update(step=2, of=4)
    state.update({str(index): index for index in range(20)})
    del state["asked"]
    assert [event.payload() for event in events[:3]] == [
        {"snapshot": {"asked": "why", "passages": []}},
        {"delta": [{"op": "add", "path": "/passages/-", "value": {"id": 7}}]},
        {"delta": [{"op": "add", "path": "/passages/0/score", "value": 0.5}]},
    ]
    assert [event.snapshot is None for event in events[3:]] == [False, False, True]
    assert len(events) == 6  # a value that is set again is no change
    assert seen(list(events)) == state == state.copy()
    state.clear()
    assert seen(list(events)) == {}


def change_at_random(root: Any, rng: random.Random) -> None:
    """Change a dict, or what behaves as a dict, in some depth."""
    name, kind = rng.choice("abc"), rng.randrange(3)
    value = root.get(name)
    if kind == 0 or value is None:
        root[name] = rng.choice([1, [], {"x": [1]}, "t"])
    elif hasattr(value, "append"):
        value.append({"n": rng.randrange(9)})
        value.insert(0, rng.randrange(9))
        value.extend([1, 2])
        value[0:1] = ["s"]
        value.pop()
    elif hasattr(value, "setdefault"):
        value.setdefault("y", []).append(rng.randrange(5))
        value.pop("x", None)
    else:
        del root[name]


def test_the_views_of_a_state_are_a_dict_and_lists() -> None:
    """Random changes of dicts and lists, in any depth, give readers the state that a plain dict would have."""
    events: list[State] = []
    state, plain = RunState({}, lambda event, change: events.append(event)), dict[str, Any]()
    for seed in range(400):
        for root in (state, plain):
            change_at_random(root, random.Random(seed))
        assert state == plain
    assert seen(list(events)) == plain


@pytest.mark.parametrize("value", [object(), {1: 2}, "x" * MAX_VALUE_CHARS])
def test_a_wrong_value_changes_nothing(value: Any) -> None:
    """What is no JSON, or too large, raises where it is set; the state and its readers keep what they had."""
    events: list[State] = []
    state = RunState({"a": [1]}, lambda event, change: events.append(event))
    with pytest.raises((TypeError, ValueError), match=r"run\.state"):
        state["b"] = value
    with pytest.raises((TypeError, ValueError), match=r"run\.state"):
        state["a"].append(value)
    assert state == {"a": [1]}
    assert events == []


def test_a_state_is_bounded_as_a_whole() -> None:
    """Many small values are too large together; the change that was too much is undone."""
    events: list[State] = []
    state = RunState({}, lambda event, change: events.append(event))
    state["texts"] = []
    texts = state["texts"]
    texts.extend(["x" * 1000] * 65)
    with pytest.raises(ValueError, match="the limit is 65,536"):
        texts.append("x" * 1000)
    texts.pop()
    assert len(texts) == len(seen(list(events))["texts"]) == 64


async def test_a_run_shows_its_state_and_events(site: Site) -> None:
    """In the order in which they come, from threads too; the state begins with the request's."""

    async def function(run: Run) -> None:
        run.state["seen"] = run.state["from"] + 1
        run.emit("chart", {"points": [1, 2]})
        await run.step("thread", on_a_thread, run)
        await run.say("text")
        run.state["done"] = True
        run.emit("empty")

    def on_a_thread(run: Run) -> None:
        run.state["thread"] = True
        run.emit("thread", 1)
        run.cite("help", id="7")

    events = await site.run(function, state={"from": 1})
    assert seen(events) == {"from": 1, "seen": 2, "thread": True, "done": True}
    assert names(events) == [("chart", '{"points":[1,2]}'), ("thread", "1"), ("empty", "null")]
    kinds = [event.type for event in events if event.type not in ("meta", "done")]
    assert kinds == ["state", "custom", "status", "state", "custom", "citation", "token", "state", "custom"]
    answer = Answer()
    for event in events:
        answer.feed(event)
    assert answer.state == seen(events)
    snapshot = answer.snapshot(9).payload()
    assert snapshot["state"] == seen(events)
    assert snapshot["customs"][0] == {"name": "chart", "value": {"points": [1, 2]}}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("", 1, "1 to 100"), ("x" * 101, 1, "1 to 100"), ("x", object(), "value of the event 'x' is a object")],
)
async def test_a_wrong_event_is_named(site: Site, name: str, value: Any, words: str) -> None:
    """The author learns which event it was; readers see nothing of it."""
    errors = []

    async def function(run: Run) -> None:
        try:
            run.emit(name, value)
        except (TypeError, ValueError) as error:
            errors.append(str(error))
        await run.say("on")

    events = await site.run(function)
    assert words in errors[0]
    assert names(events) == []


async def test_events_of_a_run_are_bounded(site: Site) -> None:
    """A run shows a thousand at most, and a mebibyte of values at most."""
    errors = []

    async def function(run: Run) -> None:
        for value in (1, "x" * 60_000):
            try:
                for _ in range(1001):
                    run.emit("x", value)
            except ValueError as error:
                errors.append(str(error))
            run._num_customs = run._num_custom_chars = 0

    events = await site.run(function)
    assert len(errors) == 2
    assert "1,000 events" in errors[0]
    assert len(names(events)) == 1000 + 1024 * 1024 // 60_002


class Author:
    """Pipelines that change their state outside of steps, within them, and side by side."""

    async def plain(self, run: Run) -> None:
        run.state["step"] = 1
        run.emit("begun", 1)
        await run.step("look", self.look, run)
        await run.generate("one", **SHORT)
        run.state["step"] = 2
        run.state["found"].append("later")
        await run.step("again", self.look, run)
        run.emit("ended", {"found": run.state["found"].copy()})
        await run.generate("two", **SHORT)
        run.state["step"] = 3

    async def look(self, run: Run) -> int:
        run.state.setdefault("found", [])
        run.state["found"].append(len(run.state["found"]))
        run.emit("looked", len(run.state["found"]))
        await run.step("inner", self.inner, run)
        return len(run.state["found"])

    async def inner(self, run: Run) -> None:
        run.state["inner"] = run.state.get("inner", 0) + 1

    async def side_by_side(self, run: Run) -> None:
        await asyncio.gather(*(run.step(f"s{index}", self.one, run, index) for index in range(3)))
        run.state["all"] = sorted(run.state["parts"])
        await run.generate("end", **SHORT)

    async def one(self, run: Run, index: int) -> int:
        for num in range(3):
            run.state.setdefault("parts", {})[str(index)] = num
            await asyncio.sleep(0)
        run.emit("part", index)
        await run.generate(f"part {index}", **SHORT)
        return index


@pytest.mark.parametrize("name", ["plain", "side_by_side"])
async def test_another_attempt_shows_no_change_twice(echo: ThreadClient, name: str) -> None:
    """Cut off after each event: both attempts together give readers the same state and events, and the run's end."""
    memo = Kept([], {}, None)
    cuts: list[tuple[list[Event], dict[Key, Any], Key | None]] = [([], {}, None)]
    events: list[Event] = []
    async for event in attempt(echo, getattr(Author(), name), memo):
        events.append(event)
        cuts.append((list(events), dict(memo.kept), memo.begun))
    wanted_state, wanted = seen(events), sorted(names(events))
    assert wanted_state["all" if name == "side_by_side" else "inner"]
    num_changes = sum(isinstance(event, State) for event in events)
    for shown, kept, begun in cuts[:-1]:
        rest = [event async for event in attempt(echo, getattr(Author(), name), Kept(list(shown), kept, begun))]
        whole = [*shown, *rest]
        assert isinstance(whole[-1], Done), whole[-1]
        assert seen(whole) == wanted_state, f"cut off after {len(shown)} events"
        assert sorted(names(whole)) == wanted, f"cut off after {len(shown)} events"
        if name == "plain":
            assert sum(isinstance(event, State) for event in whole) == num_changes


async def test_an_attempt_of_fewer_changes_ends_with_its_own_state(echo: ThreadClient) -> None:
    """Readers have the state of the run that ended, whatever an earlier attempt has shown."""

    async def first(run: Run) -> None:
        run.state.update(a=1)
        run.state["b"] = 2
        await run.say("text")

    async def second(run: Run) -> None:
        run.state["c"] = 3
        await run.say("text")

    shown = [event async for event in attempt(echo, first, Kept([], {}, None))][:-1]
    again = [event async for event in attempt(echo, second, Kept(shown, {}, None))]
    assert seen([*shown, *again]) == {"c": 3}


async def test_a_model_takes_no_state(echo: ThreadClient) -> None:
    """A state for a model is a mistake that its caller is told of."""
    request = GenerateRequest(model="echo", messages=ASKED.messages, state={"a": 1})
    with pytest.raises(BadRequest, match="state is for pipelines") as caught:
        await echo.generate(request)
    assert caught.value.param == "state"


async def test_a_run_that_raises_keeps_what_it_has_shown(site: Site) -> None:
    """Its end is an error; the state before it stands."""

    async def function(run: Run) -> None:
        run.state["a"] = 1
        raise RuntimeError("no")

    events = await site.run(function)
    assert seen(events) == {"a": 1}
    assert isinstance(events[-1], Error)

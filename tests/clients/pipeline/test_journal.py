"""Laws of a job's attempts: cut off after any event, another attempt shows the rest and nothing twice."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from streamserve.clients.pipeline.client import Pipeline, PipelineClient
from streamserve.clients.pipeline.filters import Redaction
from streamserve.clients.pipeline.journal import Key, Turns, joined
from streamserve.clients.pipeline.run import Run
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.errors import EngineUnavailable
from streamserve.protocol.events import BlockStart, BlockStop, Citation, Done, Error, Event, Status, Token
from streamserve.protocol.requests import Admission, GenerateRequest, Message, Resume, SamplingParams
from tests.support.streams.hand_made import Gate, started_echo

ASKED = GenerateRequest(
    model="p",
    messages=(Message(role="user", content="Where is my bill?"),),
    sampling=SamplingParams(seed=5),
)
ADMISSION = Admission(owner="", tenant="", stream_id="s")
SHORT = {"max_tokens": 6, "ignore_eos": True}


class Kept:
    """A `Memo` in memory: what an attempt begins with, and what it leaves."""

    converts = True

    def __init__(
        self, shown: list[Event], kept: Mapping[Key, Mapping[str, Any]], begun: Key | None, *, retries: bool = False
    ) -> None:
        self.shown, self.kept, self.begun = shown, dict(kept), begun
        self.retries, self.error = retries, asyncio.Event()

    async def load(self) -> None:
        pass

    async def keep(self, key: Key, value: Mapping[str, Any], seconds: float) -> None:
        self.kept.setdefault(key, value)

    async def begin(self, key: Key) -> None:
        self.begun = key

    def note_step(self, status: Status) -> None:
        pass

    def end_of(self, error: Error) -> Error | None:
        self.error.set()
        return None if self.retries else error


@pytest.fixture
async def echo(gate: Gate) -> AsyncIterator[ThreadClient]:
    client = await started_echo(gate)
    gate.open()
    yield client
    await client.aclose()


class Author:
    """Pipelines, and how often each step was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def found(self, name: str) -> dict[str, Any]:
        self.calls[name] += 1
        return {"name": name, "ids": [1, 2]}

    async def plain(self, run: Run) -> None:
        found = await run.step("read", self.found, "read", of=3)
        run.cite("help", id="7", title="Bills")
        await run.generate(f"{found['name']} one", **SHORT)
        run.cite("help", id="7", title="Bills")
        plan = await run.step("plan", run.generate, "a plan", show=False, of=3, **SHORT)
        await run.say(f" [{len(plan.text)}] ")
        await run.step("write", self.write, run, of=3)
        await run.generate(f"{found['ids']} three", **SHORT)

    async def write(self, run: Run) -> str:
        self.calls["write"] += 1
        await run.say("Two: ")
        run.cite("help", id="8")
        await run.generate("two", **SHORT)
        return str(await run.generate("two", **SHORT))

    async def side_by_side(self, run: Run) -> None:
        await asyncio.gather(*(run.generate(f"part {index}", **SHORT) for index in range(3)))
        await asyncio.gather(*(run.step(f"s{index}", run.generate, f"more {index}", **SHORT) for index in range(2)))


async def attempt(
    echo: ThreadClient, function: Callable[[Run], Any], memo: Kept, filters: Any = ()
) -> AsyncIterator[Event]:
    """Yield what one attempt shows."""
    one = Pipeline(name="p", function=function, filters=filters)
    client = PipelineClient(one, {"echo": echo}, default_model="echo", memo_of={"s": memo}.get)
    generation = await client.generate(ASKED, ADMISSION, Resume(output_token_ids=((),)))
    try:
        async for event in generation:
            if not (isinstance(event, Status) and event.status not in ("step", "trimmed")):
                yield event
    finally:
        generation.cancel()
        await client.aclose()


def folded(events: list[Event]) -> dict[str, Any]:
    """Return what readers have: texts and ids by block, blocks, steps, citations, the end without times."""
    texts, ids = Counter[int](), Counter[int]()
    text: dict[int, str] = {}
    for event in events:
        if isinstance(event, Token):
            text[event.index] = text.get(event.index, "") + event.text
            ids[event.index] += len(event.token_ids)
            texts[event.index] += 1
    (end,) = [event for event in events if isinstance(event, Done | Error)]
    assert isinstance(end, Done), end
    assert events[-1] is end
    return {
        "text": text,
        "ids": ids,
        "blocks": [event for event in events if isinstance(event, BlockStart | BlockStop)],
        "steps": [event for event in events if isinstance(event, Status)],
        "citations": [event for event in events if isinstance(event, Citation)],
        "end": (end.finish_reason, end.usage.prompt_tokens, end.usage.completion_tokens),
    }


def unordered(events: list[Event]) -> dict[str, Any]:
    """Return the same with the characters of each text sorted."""
    whole = folded(events)
    return {**whole, "text": {index: sorted(text) for index, text in whole["text"].items()}}


FILTERS = [lambda: Redaction(r"[aeiou]{2}", "__", max_chars=4)]


@pytest.mark.parametrize(("name", "filters"), [("plain", ()), ("plain", FILTERS), ("side_by_side", ())])
async def test_an_attempt_shows_the_rest_of_one_that_was_cut_off_anywhere(
    echo: ThreadClient, name: str, filters: Any
) -> None:
    """After each event of a run: the second attempt gives the same whole, and calls no kept step."""
    author = Author()
    memo = Kept([], {}, None)
    cuts: list[tuple[list[Event], dict[Key, Any], Key | None, Counter[str]]] = [([], {}, None, Counter())]
    events: list[Event] = []
    async for event in attempt(echo, getattr(author, name), memo, filters):
        events.append(event)
        cuts.append((list(events), dict(memo.kept), memo.begun, author.calls.copy()))
    # Which of several answers comes first is open until it is shown.
    compared = unordered if name == "side_by_side" else folded
    wanted = compared(events)
    assert wanted["text"]
    for shown, kept, begun, _ in cuts[:-1]:
        again = Author()
        second = Kept(list(shown), kept, begun)
        rest = [event async for event in attempt(echo, getattr(again, name), second, filters)]
        assert compared([*shown, *rest]) == wanted, f"cut off after {len(shown)} events"
        steps = {key[0] for key, value in kept.items() if "result" in value}
        assert not steps & set(again.calls), f"cut off after {len(shown)} events"


async def test_a_plain_answer_goes_on_from_its_tokens(echo: ThreadClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is asked to continue after the ids in the log, and not for what a kept answer had."""
    memo, shown = Kept([], {}, None), list[Event]()
    async for event in attempt(echo, Author().plain, memo):
        shown.append(event)
        if sum(isinstance(one, Token) for one in shown) == 3:
            break
    asked: list[Resume] = []
    generate = echo.generate

    async def noted(request: GenerateRequest, admission: Admission, resume: Resume) -> Any:
        asked.append(resume)
        return await generate(request, admission, resume)

    monkeypatch.setattr(echo, "generate", noted)
    # Of the steps the first alone: the run may be ahead of what was read.
    kept = dict([(key, value) for key, value in memo.kept.items() if "result" in value][:1])
    _ = [event async for event in attempt(echo, Author().plain, Kept(shown, kept, memo.begun))]
    ids = tuple(id for event in shown if isinstance(event, Token) for id in event.token_ids)
    assert [resume.output_token_ids for resume in asked] == [(ids,), (), (), (), ()]
    assert len(ids) == 3


@pytest.mark.parametrize("change", ["another text", "a shorter text", "a longer text"])
async def test_a_run_that_changes_its_mind_ends(echo: ThreadClient, change: str) -> None:
    """What was shown is not taken back: the job ends in `not_repeatable`, which says what to do."""

    async def first(run: Run) -> None:
        await run.say("It is noon.")
        await run.step("x", Author().found, "x")

    async def second(run: Run) -> None:
        await run.say({"another text": "It is one.", "a shorter text": "It", "a longer text": "It is noon."}[change])
        if change == "a longer text":
            await run.say(" Now.")

    memo = Kept([], {}, None)
    shown = [event async for event in attempt(echo, first, memo)][:-1]
    again = [event async for event in attempt(echo, second, Kept(shown, memo.kept, None))]
    end = again[-1]
    if change == "a longer text":  # more than before is no change
        assert isinstance(end, Done)
    else:
        assert isinstance(end, Error)
        assert (end.code, end.retryable) == ("not_repeatable", False)
        assert "steps" in end.message


async def test_a_run_that_asks_for_another_answer_ends(echo: ThreadClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for ever for the turn of the answer that was cut off: that does not come again."""
    monkeypatch.setattr("streamserve.clients.pipeline.journal._TURN_SECONDS", 0.1)

    def asking(prompt: str) -> Callable[[Run], Any]:
        async def function(run: Run) -> None:
            await run.generate(prompt, **SHORT)

        return function

    memo, shown = Kept([], {}, None), list[Event]()
    async for event in attempt(echo, asking("What is at noon?"), memo):
        shown.append(event)
        if isinstance(event, Token):
            break
    assert memo.begun is not None
    async with asyncio.timeout(60):
        again = [event async for event in attempt(echo, asking("What is at one?"), Kept(shown, {}, memo.begun))]
    end = again[-1]
    assert isinstance(end, Error)
    assert end.code == "not_repeatable"


async def test_an_answer_that_fails_the_second_time_holds_up_no_other(
    echo: ThreadClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The author catches the error and asks for something else: the run ends, since an answer had begun."""
    monkeypatch.setattr("streamserve.clients.pipeline.journal._TURN_SECONDS", 0.1)

    async def function(run: Run) -> None:
        try:
            await run.generate("What is at noon?", through=FILTERS[0](), **SHORT)
        except EngineUnavailable:
            await run.generate("What is at one?", **SHORT)

    memo, shown = Kept([], {}, None), list[Event]()
    async for event in attempt(echo, function, memo):
        shown.append(event)
        if isinstance(event, Token) and event.text:
            break
    generate, num_asked = echo.generate, itertools.count()

    async def failing_once(*asked: Any) -> Any:
        if next(num_asked) == 0:
            raise EngineUnavailable("The engine has died.", code="engine_died")
        return await generate(*asked)

    monkeypatch.setattr(echo, "generate", failing_once)
    async with asyncio.timeout(60):
        again = [event async for event in attempt(echo, function, Kept(shown, {}, memo.begun))]
    end = again[-1]
    assert isinstance(end, Error)
    assert end.code == "not_repeatable"


async def test_an_answer_takes_its_turn_again() -> None:
    """A citation amid an answer parts what its step has shown: the second part does not wait for later answers."""
    turns = Turns([("a", 0), ("b", 0)])
    async with asyncio.timeout(60):
        for key in [("a", 0), ("a", 0), ("b", 0), ("a", 0), ("c", 0)]:
            await turns.acquire(key)
            turns.release()
    assert not turns.is_held


def test_neighbouring_tokens_of_a_block_are_joined() -> None:
    """Tokens of a block become one event; those of other blocks, and what is no token, stay apart."""
    start, stop = BlockStart(choice=0, index=1, kind="thinking"), BlockStop(choice=0, index=1)
    tokens = [
        Token(text=text, token_ids=(id,), index=index)
        for id, (text, index) in enumerate([("a", 0), ("b", 0), ("c", 1)])
    ]
    last = Token(text="d", token_ids=(), index=1)
    whole = Token(text="ab", token_ids=(0, 1), index=0)
    assert joined([*tokens[:2], start, tokens[2], last, stop]) == [
        whole,
        start,
        Token(text="cd", token_ids=(2,), index=1),
        stop,
    ]
    assert joined([]) == []


async def test_a_result_that_is_no_json_is_not_kept(echo: ThreadClient) -> None:
    """The step hands it on as it is, and another attempt calls it again."""
    got: list[Any] = []

    async def function(run: Run) -> None:
        got.append(await run.step("set", lambda: {1, 2}))
        got.append(await run.step("list", lambda: (1, 2)))

    memo = Kept([], {}, None)
    _ = [event async for event in attempt(echo, function, memo)]
    assert got == [{1, 2}, [1, 2]]
    assert set(memo.kept) == {("list", 0)}


async def test_a_failed_attempt_shows_no_end_while_it_is_tried_again(echo: ThreadClient) -> None:
    """The last one does."""

    async def function(run: Run) -> None:
        raise RuntimeError("no")

    memo = Kept([], {}, None, retries=True)
    reading = asyncio.create_task(anext(attempt(echo, function, memo)))
    await asyncio.wait_for(memo.error.wait(), 60)
    assert not reading.done()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    (end,) = [event async for event in attempt(echo, function, Kept([], {}, None))]
    assert isinstance(end, Error)
    assert end.code == "pipeline_failed"


@pytest.mark.parametrize(
    ("result", "is_kept"),
    [
        ({"ids": [1, 2.5, None, True], "name": "é"}, True),
        ("text", True),
        ((1, 2), False),
        ([(1,)], False),
        ({1: "one"}, False),
        ([1.0], True),
        ({"at": float("nan")}, False),
        ({1, 2}, False),
    ],
    ids=repr,
)
async def test_a_stream_keeps_what_json_does_not_change(echo: ThreadClient, result: Any, is_kept: bool) -> None:
    """A run outside jobs gets each result as its function gave it; one that JSON would change is not kept."""
    got: list[Any] = []

    async def author(run: Run) -> None:
        got.append(await run.step("found", lambda: result))

    memo = Kept([], {}, None)
    memo.converts = False
    async for _ in attempt(echo, author, memo):
        pass
    assert got == [result]
    assert got[0] is result
    assert bool(memo.kept) is is_kept

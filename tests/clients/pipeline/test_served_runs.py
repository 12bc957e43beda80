"""Laws of a run in its site: its readers' pace, filters, parks, the registry of pipelines, and rows of batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from streamserve.clients.base import EngineClient
from streamserve.clients.pipeline import answers
from streamserve.clients.pipeline.client import PIPELINES, forget, pipeline
from streamserve.clients.pipeline.filters import Blocklist, Redaction
from streamserve.clients.pipeline.run import Run
from streamserve.protocol.engine import Park
from streamserve.protocol.errors import CannotContinue, EngineUnavailable, Overloaded, Refused
from streamserve.protocol.events import Done, Error, Event, Status, Token
from streamserve.protocol.requests import Admission, GenerateRequest, Resume
from streamserve.streams.reader.follow import follow
from tests.clients.pipeline.conftest import SHORT, Site, text_of
from tests.support.streams.hand_made import Gate, ParkingSource, started_echo, until

BUSY = EngineUnavailable("The engine is busy.")

# Readers and filters


async def test_a_slow_reader_holds_the_model_back() -> None:
    """Its tokens are computed no further ahead than for an answer of the model alone; all of it comes in the end."""
    echo = await started_echo(lead_tokens=16)
    site = Site(echo)

    async def function(run: Run) -> None:
        await run.generate("first", max_tokens=20, ignore_eos=True)
        await run.generate("second", max_tokens=200, ignore_eos=True)

    site.serve(function)
    stream = await site.begin()
    reading = follow(site.streams, stream, credit=8)
    num_tokens = most = 0
    async with aclosing(reading):
        async for logged in reading:
            if isinstance(logged.event, Token):
                num_tokens += len(logged.event.token_ids)
            most = max(most, stream.transcript.num_tokens - num_tokens)
            reading.ack(logged.seq)
    assert num_tokens == 220
    assert most <= 2 * (16 + 8)
    await site.streams.aclose()
    await echo.aclose()


@pytest.mark.parametrize("at", range(0, 40, 3))
async def test_a_filter_stops_the_answer(site: Site, at: int) -> None:
    """However the text is cut into tokens, no character of the word is shown; the end names the filter."""
    text = "The password is swordfish, as always."

    async def function(run: Run) -> None:
        await run.say(text[:at])
        await run.say(text[at:])
        await run.say("never")

    events = await site.run(function, filters=[lambda: Blocklist(["swordfish"])])
    assert text_of(events) == "The password is "
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "content_filter"


async def test_a_filter_replaces_and_the_ids_stay(site: Site) -> None:
    """The ids are the model's, whatever text is shown for them."""

    async def function(run: Run) -> None:
        await run.generate("hi", **SHORT)

    plain, filtered = await site.run(function), await site.run(function, filters=[lambda: Redaction(r"\w", "x")])

    def ids(events: list[Event]) -> list[int]:
        return [one for event in events if isinstance(event, Token) for one in event.token_ids]

    assert ids(filtered) == ids(plain)
    assert "".join("x" if c.isalnum() or c == "_" else c for c in text_of(plain)) == text_of(filtered)


async def test_a_park_continues_after_what_the_model_said(gate: Gate) -> None:
    """An operator's pause in the middle: the same ids and the same text, though readers see another one."""
    echo = await started_echo(gate)
    site = Site(echo)

    async def function(run: Run) -> None:
        await run.generate("hi", max_tokens=30, seed=5, ignore_eos=True)

    calm = await site.run(function, filters=[lambda: Redaction(r"[aeiou]", "*")])
    gate.allow(8)
    site.serve(function, filters=[lambda: Redaction(r"[aeiou]", "*")])
    stream = await site.begin()
    async with aclosing(follow(site.streams, stream)) as reading:
        events = [(await anext(reading)).event]
        await until(lambda: gate.is_holding, "a step is held")
        pause = asyncio.create_task(echo.control("pause"))
        await asyncio.sleep(0)  # the pause is asked for before the step ends
        gate.open()
        await pause
        await echo.control("resume")
        events += [logged.event async for logged in reading]
    assert echo.stats().parks > 0
    assert text_of(events) == text_of(calm)
    await site.streams.aclose()
    await echo.aclose()


# The registry


@pytest.fixture
def registered() -> Iterator[list[str]]:
    names: list[str] = []
    yield names
    for name in names:
        forget(name)


def test_a_pipeline_is_registered_by_its_name(registered: list[str]) -> None:
    """The decorator returns the function; the docstring is the description, its name in words the title."""

    @pipeline
    async def billing_test(run: Run) -> None:
        """Answer questions about bills."""

    @pipeline("other.name", model="echo", latency_class="document", title="The other")
    async def other(run: Run) -> None: ...

    registered += ["billing_test", "other.name"]
    assert PIPELINES["billing_test"].function is billing_test
    assert PIPELINES["billing_test"].description == "Answer questions about bills."
    assert [PIPELINES[name].title for name in registered[-2:]] == ["Billing test", "The other"]
    assert (PIPELINES["other.name"].model, PIPELINES["other.name"].latency_class) == ("echo", "document")


def test_what_is_no_pipeline_is_refused(registered: list[str]) -> None:
    """A name with a slash, a plain function, an unknown class, and a second one of the same name."""

    async def one(run: Run) -> None: ...

    async def two(run: Run) -> None: ...

    with pytest.raises(ValueError, match="no name"):
        pipeline("a/b")(one)
    with pytest.raises(TypeError, match="async"):
        pipeline("a")(lambda run: None)
    with pytest.raises(ValueError, match="latency_class"):
        pipeline("a", latency_class="fast")(one)
    registered.append("twice")
    pipeline("twice")(one)
    pipeline("twice")(one)  # a module may be imported again
    with pytest.raises(ValueError, match="two pipelines"):
        pipeline("twice")(two)


class Late:
    """The echo engine, which comes up after a few questions."""

    def __init__(self, echo: EngineClient) -> None:
        self._echo, self.num_asked = echo, 0
        self.classes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._echo, name)

    async def generate(self, request: GenerateRequest, *rest: Any) -> Any:
        self.num_asked += 1
        self.classes.append(request.latency_class)
        if self.num_asked <= 3:
            raise EngineUnavailable("model echo is loading.", code="engine_loading")
        return await self._echo.generate(request, *rest)


@pytest.mark.parametrize(("latency_class", "end"), [("batch", Done), ("chat", Error)])
async def test_a_row_of_a_batch_waits_for_its_engine(
    site: Site, monkeypatch: pytest.MonkeyPatch, latency_class: str, end: type[Event]
) -> None:
    """A row waits however long it takes; every other request is refused after a minute (here: at once)."""
    monkeypatch.setattr(answers, "ENGINE_SECONDS", 0.0)
    site.echo = late = Late(site.echo)

    async def one(run: Run) -> None:
        await run.generate(**SHORT)

    events = await site.run(one, latency_class=latency_class)
    assert isinstance(events[-1], end)
    assert late.num_asked == (4 if end is Done else 1)


class Full:
    """The echo engine: it parks its first answer after three tokens, and refuses requests by their number, from 0."""

    def __init__(self, echo: EngineClient, refusals: dict[int, Refused]) -> None:
        self._echo, self._refusals = echo, refusals
        self.requests, self.resumes = list[GenerateRequest](), list[Resume]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._echo, name)

    async def generate(self, request: GenerateRequest, admission: Admission, resume: Resume) -> Any:
        self.requests.append(request)
        self.resumes.append(resume)
        refused = self._refusals.get(len(self.requests) - 1)
        if refused is not None:
            raise refused
        generation = await self._echo.generate(request, admission, resume)
        is_first = len(self.requests) == 1
        return ParkingSource(generation, Park(reason="ahead"), 3).generation if is_first else generation


async def test_a_parked_answer_waits_for_a_full_engine(site: Site) -> None:
    """As a stream's does: it is asked again, as an answer that was accepted, and continues to the same text."""

    async def function(run: Run) -> None:
        await run.generate("hi", max_tokens=12, seed=5, ignore_eos=True)

    calm = await site.run(function)
    site.echo = full = Full(site.echo, {1: Overloaded("64 answers are waiting already."), 2: BUSY})
    events = await site.run(function)
    assert isinstance(events[-1], Done)
    assert text_of(events) == text_of(calm)
    assert [(one.was_admitted, bool(one.output_token_ids)) for one in full.resumes] == [(False, False)] + [
        (True, True)
    ] * 3
    shown = [event.status for event in events if isinstance(event, Status)]
    assert shown == ["waiting", "resumed"]


async def test_a_new_answer_of_a_run_waits_for_a_full_engine(site: Site) -> None:
    """The run was accepted: its second answer waits too."""
    site.echo = full = Full(site.echo, {0: Overloaded("full"), 1: BUSY})

    async def function(run: Run) -> None:
        await run.generate(**SHORT)

    events = await site.run(function)
    assert isinstance(events[-1], Done)
    assert [one.was_admitted for one in full.resumes] == [False] * 3


async def test_a_count_of_tokens_waits_for_a_full_engine(site: Site) -> None:
    """`trim` belongs to a run that was accepted; a wrong request is refused at once."""

    class Busy(Full):
        async def tokenize(self, request: GenerateRequest, *rest: Any) -> Any:
            self.requests.append(request)
            refused = self._refusals.get(len(self.requests) - 1)
            if refused is not None:
                raise refused
            return await self._echo.tokenize(request, *rest)

    kept: list[list[str]] = []

    async def function(run: Run) -> None:
        kept.append(await run.trim(["a" * 20, "b" * 20], 30))

    site.echo = busy = Busy(site.echo, {0: Overloaded("full"), 2: BUSY})
    assert isinstance((await site.run(function))[-1], Done)
    assert kept == [["a" * 20]]
    assert len(busy.requests) == 4
    site.echo = busy = Busy(busy._echo, {0: CannotContinue("No.")})
    assert isinstance((await site.run(function))[-1], Error)
    assert len(busy.requests) == 1


async def test_a_final_refusal_ends_the_run(site: Site) -> None:
    """Its code and message are the refusal's; the engine is not asked again."""
    site.echo = full = Full(site.echo, {1: CannotContinue("The answer was cut off. Ask again.")})

    async def function(run: Run) -> None:
        await run.generate("hi", max_tokens=12, ignore_eos=True)

    events = await site.run(function)
    end = Error(code="cannot_continue", message="The answer was cut off. Ask again.", retryable=True)
    assert events[-1] == end
    assert len(full.requests) == 2


async def test_answers_side_by_side_continue_after_their_reader(gate: Gate) -> None:
    """Two long answers, both far ahead of a slow reader: each notices what it has read, and both end."""
    echo = await started_echo(lead_tokens=16)
    site = Site(echo)

    async def function(run: Run) -> None:
        await asyncio.gather(*(run.generate(text, max_tokens=100, ignore_eos=True) for text in ("one", "two")))

    site.serve(function)
    stream = await site.begin()
    num_tokens = 0
    reading = follow(site.streams, stream, credit=8)
    async with aclosing(reading):
        async for logged in reading:
            num_tokens += len(logged.event.token_ids) if isinstance(logged.event, Token) else 0
            reading.ack(logged.seq)
    assert num_tokens == 200
    await site.streams.aclose()
    await echo.aclose()


async def test_a_row_of_a_batch_has_no_other_class(site: Site) -> None:
    """Whatever class its author asks for, it ranks below what users wait for."""
    site.echo = late = Late(site.echo)

    async def one(run: Run) -> None:
        await run.generate(**SHORT, latency_class="chat")

    await site.run(one, latency_class="batch")
    assert set(late.classes) == {"batch"}
    await site.run(one, latency_class="document")
    assert late.classes[-1] == "chat"


# Figures


async def test_a_runs_tpot_is_of_the_answers_that_it_shows(site: Site) -> None:
    """The mean gap of all their tokens: a step between two answers, and a hidden answer, are none of it."""

    async def function(run: Run) -> None:
        await run.generate("one", max_tokens=6, seed=1, ignore_eos=True)
        await run.generate("hidden", max_tokens=50, seed=1, ignore_eos=True, show=False)
        await run.generate("two", max_tokens=11, seed=1, ignore_eos=True)

    done = (await site.run(function))[-1]
    assert isinstance(done, Done)
    assert done.usage.completion_tokens == 17
    assert done.breakdown["tpot"] == pytest.approx(done.breakdown["decode"] / (5 + 10))
    assert 0 < done.breakdown["decode"] < done.latency
    measured = site.streams.measures.of("p").buckets["request_time_per_output_token_seconds"]
    await until(lambda: sum(measured.counts) == 1, "the run is measured")
    assert measured.total == pytest.approx(done.breakdown["tpot"])


async def test_a_run_of_a_token_or_none_has_no_tpot(site: Site) -> None:
    """There is no gap."""

    async def function(run: Run) -> None:
        await run.say("Nothing from a model.")
        await run.generate("one", max_tokens=1, ignore_eos=True)

    done = (await site.run(function))[-1]
    assert isinstance(done, Done)
    assert "tpot" not in done.breakdown


async def test_the_tpot_of_a_parked_answer_has_its_pauses(site: Site) -> None:
    """As of a plain stream: from its first token to its last."""
    site.echo = Full(site.echo, {1: BUSY})

    async def function(run: Run) -> None:
        await run.generate("hi", max_tokens=12, seed=5, ignore_eos=True)

    done = (await site.run(function))[-1]
    assert isinstance(done, Done)
    assert done.breakdown["tpot"] == pytest.approx(done.breakdown["decode"] / 11)


async def test_a_parked_answer_finds_none_of_its_own_tokens_in_the_cache(site: Site) -> None:
    """`cached_tokens` are what its first run has found, as of a plain stream, and not the blocks that the park left."""
    site.echo = Full(site.echo, {})

    async def function(run: Run) -> None:
        await run.generate("a question that fills several blocks " * 4, max_tokens=12, seed=5, ignore_eos=True)

    done = (await site.run(function))[-1]
    assert isinstance(done, Done)
    assert done.usage.prompt_tokens > 128
    assert done.usage.cached_tokens == 0

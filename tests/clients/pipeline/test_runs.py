"""Laws of a run: what it shows, in which order, and how it ends, on the echo engine behind a real stream."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from itertools import permutations
from typing import Any

import pytest

from streamserve.clients.pipeline.run import Answer, Run
from streamserve.protocol.errors import BadRequest, ProducerLost, StreamserveError
from streamserve.protocol.events import Citation, Done, Error, Status, Token
from streamserve.protocol.requests import Admission, GenerateRequest, Grammar, Message, Resume, SamplingParams, Tool
from streamserve.streams.reader.follow import follow
from tests.clients.pipeline.conftest import SHORT, Site, asked, text_of
from tests.support.streams.hand_made import Gate, until


async def whole(site: Site, **fields: Any) -> str:
    """Return what the model itself answers."""
    request = GenerateRequest(model="echo", **fields)
    return "".join([event.text async for event in await site.echo.generate(request) if isinstance(event, Token)])


async def test_steps_citations_and_the_answer_come_in_order(site: Site) -> None:
    """Each is shown when it happens; the answer is the model's own, and usage counts its tokens."""
    answers = []

    async def function(run: Run) -> None:
        found = await run.step("Looking it up", lambda text: text.upper(), run.question, of=2)
        run.cite("help", id="7", title="Bills", url="https://site.org/7")
        answers.append(await run.generate([{"role": "user", "content": found}], **SHORT))
        await run.step("Done", asyncio.sleep, 0, of=2)

    events = await site.run(function)
    kinds = [type(event).__name__ for event in events if not isinstance(event, Token)]
    assert kinds == ["Meta", "Status", "Citation", "Status", "Done"]
    steps = [event for event in events if isinstance(event, Status)]
    assert [(one.status, one.step, one.of, one.message) for one in steps] == [
        ("step", 1, 2, "Looking it up"),
        ("step", 2, 2, "Done"),
    ]
    done = events[-1]
    assert isinstance(done, Done)
    (answer,) = answers
    assert text_of(events) == str(answer)
    assert (done.finish_reason, done.usage.completion_tokens) == ("length", 6)
    assert done.usage.prompt_tokens == answer.usage.prompt_tokens > 0
    question = (Message(role="user", content="WHERE IS MY BILL?"),)
    assert await whole(site, messages=question, sampling=SamplingParams(**SHORT)) == str(answer)


async def test_answers_side_by_side_follow_each_other(site: Site, gate: Gate) -> None:
    """They are computed in the same steps, and shown one after the other, whole: first whose first token came first."""
    answers: list[Answer] = []

    async def function(run: Run) -> None:
        answers.extend(await asyncio.gather(*(run.generate(f"part {index}", **SHORT) for index in range(3))))

    gate.allow(0)
    running = asyncio.create_task(site.run(function))
    await until(lambda: len(site.echo._router) == 3, "all three are in the engine")  # type: ignore[attr-defined]
    gate.open()
    events = await running
    assert text_of(events) in {"".join(map(str, order)) for order in permutations(answers)}
    assert len({str(one) for one in answers}) == 3
    assert any(len(plan.chunks) == 3 for plan in gate.plans)


class Shout:
    """Shows an answer in capitals, and an end of its own."""

    def feed(self, text: str) -> str:
        return text.upper()

    def flush(self) -> str:
        return "!"


async def test_an_answer_may_go_through_a_filter_of_its_own(site: Site) -> None:
    """Readers see what it makes of the text; the author has what the model said, and the next answer is as it is."""
    answers = []

    async def function(run: Run) -> None:
        answers.append(await run.generate("one", through=Shout(), **SHORT))
        answers.append(await run.generate("two", **SHORT))

    events = await site.run(function)
    assert text_of(events) == f"{answers[0].text.upper()}!{answers[1].text}"
    assert answers[0].text != answers[0].text.upper()
    done = events[-1]
    assert isinstance(done, Done)
    assert done.usage.completion_tokens == 12


async def test_a_hidden_answer_is_not_shown(site: Site) -> None:
    """Its text is the author's alone, and its tokens are not among those of the run."""

    async def function(run: Run) -> None:
        plan = await run.generate("plan", show=False, **SHORT)
        await run.say(f"{len(plan.text) > 0}")

    events = await site.run(function)
    assert text_of(events) == "True"
    assert isinstance(events[-1], Done)
    assert events[-1].usage.completion_tokens == 0


@pytest.mark.parametrize(("result", "text"), [("plain", "plain"), ({"a": [1, "é"]}, '{"a": [1, "é"]}'), (None, "")])
async def test_what_a_function_returns_is_its_answer(site: Site, result: Any, text: str) -> None:
    """Where it has shown no text itself: a text as it is, anything else as JSON."""

    async def function(run: Run) -> Any:
        return result

    events = await site.run(function)
    assert text_of(events) == text
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "stop"


async def test_a_synchronous_step_runs_on_a_thread(site: Site) -> None:
    """It may block: the loop goes on."""
    threads = []

    async def function(run: Run) -> None:
        await run.step("wait", lambda: threads.append(threading.current_thread()))

    await site.run(function)
    assert threads[0] is not threading.main_thread()


async def test_input_reaches_the_function(site: Site) -> None:
    """A run may have input without a conversation."""

    async def function(run: Run) -> str:
        return f"{run.input['account']} {run.question!r} {len(run.messages)}"

    assert text_of(await site.run(function, messages=None, input={"account": 7})) == "7 '' 0"


# Ends


async def test_an_error_of_the_author_is_an_error_event(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Its text goes to the log, not to the reader."""

    async def function(run: Run) -> None:
        await run.say("so far ")
        raise RuntimeError("the secret of the site")

    events = await site.run(function)
    assert text_of(events) == "so far "
    assert isinstance(events[-1], Error)
    assert events[-1].code == "pipeline_failed"
    assert "secret" not in events[-1].message
    assert "the secret of the site" in caplog.text


async def test_an_error_of_the_model_is_the_run_s(site: Site) -> None:
    """A question that is too long for the model ends the run with the model's own words, unless the author helps."""
    long = "x" * 100_000

    async def careless(run: Run) -> None:
        await run.generate(long)

    async def careful(run: Run) -> str:
        try:
            await run.generate(long)
        except StreamserveError as error:
            return error.code
        return "?"

    ending = (await site.run(careless))[-1]
    assert isinstance(ending, Error)
    assert ending.code == "context_length_exceeded"
    assert text_of(await site.run(careful)) == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "match"),
    [({"max_tokns": 3}, "max_tokens"), ({"temperature": "hot"}, "temperature"), ({"model": "p"}, "no model")],
)
async def test_wrong_fields_of_generate_are_named(site: Site, fields: dict[str, Any], match: str) -> None:
    """As in a request: the name, and the nearest known one. A pipeline does not ask itself."""

    async def function(run: Run) -> None:
        with pytest.raises(StreamserveError, match=match):
            await run.generate("hi", **fields)

    assert isinstance((await site.run(function))[-1], Done)


async def test_a_stop_ends_what_runs(site: Site, gate: Gate) -> None:
    """It reaches the function's `await` and the engine: no step is planned after it."""
    cancelled = asyncio.Event()

    async def function(run: Run) -> None:
        try:
            await run.generate("hi", max_tokens=500, ignore_eos=True)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    site.serve(function)
    gate.allow(4)
    stream = await site.begin()
    async with aclosing(follow(site.streams, stream)) as reading:
        async for logged in reading:
            if isinstance(logged.event, Token):
                break
        await stream.stop()
    await asyncio.wait_for(cancelled.wait(), 60)
    gate.open()
    await until(lambda: site.echo.stats().running == 0, "the engine has freed it")
    assert stream.terminal is not None
    assert isinstance(stream.terminal, Done)
    assert stream.terminal.finish_reason == "cancelled"


async def test_a_deadline_reaches_every_await(site: Site) -> None:
    """`timeout_seconds` ends a run that waits for something else than a model, too."""
    cancelled = asyncio.Event()

    async def function(run: Run) -> None:
        try:
            await run.step("for ever", asyncio.Event().wait)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    ending = (await site.run(function, timeout_seconds=1.0))[-1]
    assert isinstance(ending, Error)
    assert ending.code == "timeout"
    await asyncio.wait_for(cancelled.wait(), 60)


async def test_a_run_goes_on_while_its_reader_is_away(site: Site) -> None:
    """It cannot be continued from its tokens, so it is not parked; the reader returns to a whole answer."""
    go_on, gone = asyncio.Event(), asyncio.Event()

    async def function(run: Run) -> None:
        await run.say("before ")
        gone.set()
        await go_on.wait()
        await run.say("after")

    site.serve(function)
    stream = await site.begin()
    async with aclosing(follow(site.streams, stream)) as reading:
        async for _ in reading:
            if gone.is_set():
                break
    go_on.set()
    async with aclosing(follow(site.streams, stream)) as reading:
        events = [logged.event async for logged in reading]
    assert text_of(events) == "before after"
    assert isinstance(events[-1], Done)


async def test_a_begun_run_is_not_begun_again(site: Site) -> None:
    """Another process cannot continue it: the error says so, and that the caller may ask again."""

    async def function(run: Run) -> None:
        raise AssertionError("it ran")

    site.serve(function)
    with pytest.raises(ProducerLost) as caught:
        await site.clients["p"].generate(asked(), resume=Resume(output_token_ids=((1,),)))
    assert (caught.value.code, caught.value.is_retryable) == ("producer_lost", True)


async def test_several_choices_are_refused(site: Site) -> None:
    """A pipeline gives one answer."""

    async def function(run: Run) -> None:
        raise AssertionError("it ran")

    site.serve(function)
    with pytest.raises(BadRequest, match="one answer"):
        await site.begin(n=2)


async def test_log_probabilities_of_its_prompts_are_refused(site: Site) -> None:
    """A pipeline's prompts are its own."""

    async def function(run: Run) -> None:
        raise AssertionError("it ran")

    site.serve(function)
    sampling = SamplingParams(prompt_logprobs=0)
    with pytest.raises(BadRequest) as caught:
        await site.clients["p"].generate(asked(sampling=sampling))
    assert (caught.value.param, caught.value.code) == ("prompt_logprobs", "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("grammar", {"grammar": Grammar(kind="regex", value="[a-z]+")}),
        ("tools", {"tools": (Tool(name="f"),)}),
        ("logprobs", {"sampling": SamplingParams(logprobs=0)}),
        ("continue_final_message", {"continue_final_message": True}),
    ],
)
async def test_what_promises_a_form_of_the_answer_is_refused(site: Site, name: str, fields: dict[str, Any]) -> None:
    """A run decides what its answer is made of; a field that would be ignored is named."""

    async def function(run: Run) -> None:
        raise AssertionError("it ran")

    site.serve(function)
    with pytest.raises(BadRequest) as caught:
        await site.clients["p"].generate(asked(**fields))
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


async def test_a_model_takes_no_input(site: Site) -> None:
    """`input` would be dropped silently."""
    with pytest.raises(BadRequest) as caught:
        await site.streams.start(
            GenerateRequest(model="echo", prompt="a", input={"b": 1}), Admission(owner="u", tenant="t")
        )
    assert caught.value.param == "input"


# Context


async def test_a_context_is_trimmed_to_its_limit(site: Site) -> None:
    """The first passages that fit, whole; what was left out is shown."""
    kept = []

    async def function(run: Run) -> None:
        kept.append(await run.trim(["alpha " * 10, "beta " * 10, "gamma " * 50], 140))
        kept.append(await run.trim(["a", "b"], 140))
        kept.append(await run.trim(["alpha " * 100], 5))

    events = await site.run(function)
    assert [len(one) for one in kept] == [2, 2, 0]
    trims = [event for event in events if isinstance(event, Status)]
    assert [(one.status, one.step, one.of) for one in trims] == [("trimmed", 2, 3), ("trimmed", 0, 1)]


async def test_a_prefix_is_warmed_meanwhile(site: Site) -> None:
    """The later answer finds it in the cache; without it, it finds less."""
    system = "You answer questions about bills. " * 20

    def messages(question: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": system}, {"role": "user", "content": question}]

    async def function(run: Run) -> None:
        run.warm(messages("?"))
        await run.step("search", until, lambda: site.echo.stats().prompt_tokens > 0, "it is warm")
        await run.generate(messages("Where?"), **SHORT)

    done = (await site.run(function))[-1]
    assert isinstance(done, Done)
    assert done.usage.cached_tokens >= 256


async def test_citations_are_bounded(site: Site) -> None:
    """An author's endless loop does not fill the log."""

    async def function(run: Run) -> None:
        for number in range(2000):
            run.cite("a", id=str(number))

    events = await site.run(function)
    assert isinstance(events[-1], Error)
    assert sum(isinstance(event, Citation) for event in events) == 1000

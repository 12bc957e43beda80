"""Laws of `ThreadClient`, with the echo engine on its real thread. Steps are held by a gate; nothing sleeps."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from streamserve.clients.acceptance import EngineFacts, LoadedEngine, Prepared
from streamserve.clients.base import Accepted
from streamserve.clients.engine_thread import Load, Progress
from streamserve.clients.factory import echo_client
from streamserve.clients.generation import LocalGeneration
from streamserve.clients.thread import ThreadClient
from streamserve.engine.config import EngineConfig
from streamserve.engine.echo import EchoRunner, EchoTokenizer
from streamserve.engine.plan import Runner
from streamserve.engine.tokenizer import Prompt, Tokenizer
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Overloaded, PromptTooLong
from streamserve.protocol.events import ChoiceDone, Done, Error, Event, Token
from streamserve.protocol.requests import GenerateRequest, SamplingParams
from tests.fakes import DEADLINE_SECONDS, DyingRunner, FaultyRunner, GatedRunner

CONFIG = EngineConfig(block_size=4, max_num_seqs=8, check_integrity=True)


def ask(prompt: str = "The quiet river", *, n: int = 1, **fields: Any) -> GenerateRequest:
    outer = {name: fields.pop(name) for name in ("output_token_ids", "timeout_seconds", "salt") if name in fields}
    sampling = SamplingParams(**{"temperature": 0.0, "seed": 7, "max_tokens": 12, **fields})
    return GenerateRequest(model="echo", prompt=prompt, sampling=sampling, n=n, **outer)


def echo_runner() -> EchoRunner:
    return EchoRunner(num_blocks=257, block_size=4)


def load_of(runner: Runner | Callable[[], Runner], tokenizer: Tokenizer | None = None, max_len: int = 512) -> Load:
    def load(progress: Progress) -> LoadedEngine:
        progress("weights", 0.5)
        made = runner() if callable(runner) else runner
        facts = EngineFacts(max_model_len=max_len, eos_token_ids=frozenset())
        return LoadedEngine(runner=made, tokenizer=tokenizer or EchoTokenizer(), facts=facts)

    return load


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110  # what is awaited happens on another thread
            await asyncio.sleep(0)


async def ready(client: ThreadClient) -> ThreadClient:
    client.start()
    await until(lambda: client.describe().state != "loading")
    assert client.describe().state == "ready", client.describe()
    return client


@asynccontextmanager
async def serving(
    runner: Runner | None = None, config: EngineConfig = CONFIG, **load: Any
) -> AsyncIterator[ThreadClient]:
    client = ThreadClient("echo", load_of(runner or echo_runner(), **load), config)
    try:
        yield await ready(client)
    finally:
        if isinstance(runner, GatedRunner):
            runner.open()
        await client.aclose()


async def collect(generation: LocalGeneration) -> list[Event]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return [event async for event in generation]


def text(events: list[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Token) and event.choice == choice)


def ids(events: list[Event], choice: int = 0) -> tuple[int, ...]:
    tokens = (event for event in events if isinstance(event, Token) and event.choice == choice)
    return tuple(token_id for event in tokens for token_id in event.token_ids)


async def test_streams_tokens_then_done() -> None:
    """A generation is tokens, then one `done` with usage and figures, then nothing."""
    async with serving() as client:
        generation = await client.generate(ask())
        events = await collect(generation)
    *tokens, done = events
    assert all(isinstance(token, Token) for token in tokens)
    assert isinstance(done, Done)
    assert (done.finish_reason, done.usage.prompt_tokens, done.usage.completion_tokens) == ("length", 15, 12)
    assert len(ids(events)) == 12
    assert done.breakdown.keys() == {"queue", "prefill", "decode", "ttft", "itl_p50", "itl_p95"}
    assert done.breakdown["ttft"] == pytest.approx(done.breakdown["queue"] + done.breakdown["prefill"])
    assert generation.accepted == replace(generation.accepted, num_prompt_tokens=15, max_tokens=12, seed=7)


async def test_same_question_same_answer_and_cached() -> None:
    """The second time the prompt is found in the prefix cache, and the answer is the same."""
    async with serving() as client:
        first, second = [await collect(await client.generate(ask())) for _ in range(2)]
    assert text(first) == text(second)
    assert isinstance(second[-1], Done)
    assert second[-1].usage.cached_tokens == 12


async def test_many_at_once_equal_each_alone() -> None:
    """Concurrent requests get the answers they would get alone."""
    prompts = [f"question {number}" * number for number in range(1, 13)]
    async with serving() as client:
        alone = [text(await collect(await client.generate(ask(prompt)))) for prompt in prompts]
    async with serving() as client:
        generations = await asyncio.gather(*(client.generate(ask(prompt)) for prompt in prompts))
        together = [text(events) for events in await asyncio.gather(*map(collect, generations))]
    assert together == alone


async def test_choices() -> None:
    """n answers have seeds of their own, each ends with `choice_done`, and one `done` counts them all."""
    async with serving() as client:
        events = await collect(await client.generate(ask(n=3, temperature=1.0)))
        single = await collect(await client.generate(ask(temperature=1.0, seed=8)))
    assert sorted(event.choice for event in events if isinstance(event, ChoiceDone)) == [0, 1, 2]
    assert len({text(events, choice) for choice in range(3)}) == 3
    assert text(events, 1) == text(single)
    assert isinstance(events[-1], Done)
    assert events[-1].usage.completion_tokens == 36
    assert events[-1].usage.prompt_tokens == 15


async def test_stop_string_ends_the_text_and_frees_the_sequence() -> None:
    """The text is cut before the stop string, `done` says stop, and the engine forgets the rest."""
    async with serving() as client:
        whole = text(await collect(await client.generate(ask(max_tokens=60))))
        stop = whole[20:25]
        events = await collect(await client.generate(ask(max_tokens=60, stop=(stop,))))
        await until(lambda: client.stats().running == 0)
        assert client.stats().blocks_used == 0
    assert text(events) == whole[: whole.index(stop)]
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "stop"
    assert events[-1].usage.completion_tokens == len(ids(events))


@pytest.mark.parametrize("cut", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("stop", [(), ("q",)])
async def test_resumed_request_yields_only_what_is_new(cut: int, stop: tuple[str, ...]) -> None:
    """With the tokens already shown, the rest of the same answer comes: no gap, nothing twice."""
    async with serving() as client:
        whole = await collect(await client.generate(ask(stop=stop)))
        shown: list[Event] = []
        for event in whole:
            if len(ids(shown)) >= cut:
                break
            shown.append(event)
        rest = await collect(await client.generate(ask(stop=stop, output_token_ids=(ids(shown),))))
    assert text(shown) + text(rest) == text(whole)
    assert ids(shown) + ids(rest) == ids(whole)
    assert isinstance(rest[-1], Done)
    assert isinstance(whole[-1], Done)
    assert (rest[-1].finish_reason, rest[-1].usage.completion_tokens) == (
        whole[-1].finish_reason,
        whole[-1].usage.completion_tokens,
    )


async def test_warm_fills_the_cache() -> None:
    """After `warm` the prompt is cached, and nothing was generated."""
    async with serving() as client:
        await client.warm(ask())
        assert client.stats().generation_tokens == 0
        events = await collect(await client.generate(ask()))
    assert isinstance(events[-1], Done)
    assert events[-1].usage.cached_tokens == 12


async def test_tokenize() -> None:
    """`tokenize` gives the ids that `generate` would see."""
    async with serving() as client:
        assert await client.tokenize(ask("hi")) == (104, 105)


async def test_cancelled_is_absent_from_the_next_plan() -> None:
    """A step is running; its reader leaves; the next plan holds the others only, and the blocks are free."""
    runner = GatedRunner(echo_runner(), hold_from=2)
    async with serving(runner) as client:
        leaving, staying = [await client.generate(ask(prompt)) for prompt in ("one", "another")]
        plan = await runner.held()
        while len(plan.chunks) < 2:
            runner.release()
            plan = await runner.held()
        leaving.cancel()
        runner.release()
        after = await runner.held()
        assert after.step_id == plan.step_id + 1
        assert [chunk.seq_id for chunk in after.chunks] == [plan.chunks[1].seq_id]
        assert client.stats().running == 1
        runner.open()
        assert isinstance((await collect(staying))[-1], Done)
        await until(lambda: client.stats().blocks_used == 0)


async def test_cancel_ends_the_iterator_without_an_event() -> None:
    """After `cancel`, also twice or late, the iterator just ends."""
    async with serving(GatedRunner(echo_runner(), hold_from=3)) as client:
        generation = await client.generate(ask())
        first = await anext(generation)
        generation.cancel()
        generation.cancel()
        assert await collect(generation) == []
        assert isinstance(first, Token)
    generation.cancel()


async def test_cancel_wakes_the_one_who_waits() -> None:
    """A reader that waits for the next event is told that none will come."""
    runner = GatedRunner(echo_runner())
    async with serving(runner) as client:
        generation = await client.generate(ask())
        waiting = asyncio.ensure_future(collect(generation))
        await runner.held()
        generation.cancel()
        assert await waiting == []


async def test_cancelling_while_tokenising_leaves_nothing() -> None:
    """A request that is withdrawn before it is accepted never reaches the engine."""
    gate = threading.Event()

    class Slow(EchoTokenizer):
        def encode(self, request: GenerateRequest) -> Prompt:
            assert gate.wait(DEADLINE_SECONDS)
            return super().encode(request)

    async with serving(tokenizer=Slow()) as client:
        task = asyncio.ensure_future(client.generate(ask()))
        await until(lambda: client._num_in_preparation == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        events = await collect(await client.generate(ask()))
        assert client.stats().prompt_tokens == 15
    assert isinstance(events[-1], Done)


async def test_leaving_at_every_moment_leaves_nothing() -> None:
    """Hundreds of readers that leave after none, some or all events: no block, sequence or entry is left."""
    rng = random.Random(5)

    async def read_some(client: ThreadClient, number: int) -> None:
        generation = await client.generate(ask(f"{number % 7} and so on", n=1 + number % 2, temperature=1.0))
        for _ in range(rng.choice([0, 0, 1, 2, 5, 100])):
            if await anext(generation, None) is None:
                break
        generation.cancel()

    async with serving() as client:
        await asyncio.gather(*(read_some(client, number) for number in range(150)))
        await until(lambda: client.stats().running == client.stats().waiting == client.stats().blocks_used == 0)
        assert (client._generations, client._unscheduled, client._num_in_preparation) == ({}, set(), 0)


async def test_engine_death_ends_everything_with_an_error() -> None:
    """Every open generation ends in one retryable error, and later requests are refused."""
    runner = GatedRunner(DyingRunner(echo_runner(), at_step=3))
    async with serving(runner) as client:
        generations = [await client.generate(ask(f"{number}", max_tokens=100)) for number in range(3)]
        runner.open()
        for events in await asyncio.gather(*map(collect, generations)):
            assert [event for event in events if not isinstance(event, Token)] == [events[-1]]
            assert isinstance(events[-1], Error)
            assert (events[-1].code, events[-1].retryable) == ("engine_died", True)
        assert client.describe().state == "failed"
        with pytest.raises(EngineUnavailable, match="not available"):
            await client.generate(ask())


async def test_failed_load_is_described() -> None:
    """What went wrong is said, as far as it is fit to be shown; requests are refused."""

    def load(progress: Progress) -> LoadedEngine:
        raise BadRequest("no model at /nowhere. Give a folder with config.json.")

    client = ThreadClient("broken", load)
    client.start()
    await until(lambda: client.describe().state == "failed")
    assert client.describe().message == "no model at /nowhere. Give a folder with config.json."
    with pytest.raises(EngineUnavailable, match=r"model broken is not available\.$"):
        await client.generate(ask())
    await client.aclose()


async def test_foreign_failure_is_not_shown() -> None:
    """The text of other libraries' exceptions goes to the log, not to clients."""

    def load(progress: Progress) -> LoadedEngine:
        raise OSError("/home/secret/path")

    client = ThreadClient("broken", load)
    client.start()
    await until(lambda: client.describe().state == "failed")
    assert "secret" not in client.describe().message
    assert "OSError" in client.describe().message
    await client.aclose()


async def test_first_request_begins_loading() -> None:
    """An engine that nobody started is started by the first request, which is told to come back."""
    gate = threading.Event()

    def load(progress: Progress) -> LoadedEngine:
        progress("weights", 0.25)
        assert gate.wait(DEADLINE_SECONDS)
        return load_of(echo_runner())(progress)

    client = ThreadClient("echo", load, CONFIG)
    assert client.describe().state == "idle"
    for _ in range(2):
        with pytest.raises(EngineUnavailable) as caught:
            await client.generate(ask())
        assert (caught.value.code, caught.value.retry_after) == ("engine_loading", 2)
    await until(lambda: client.describe().fraction == 0.25)
    assert (client.describe().state, client.describe().stage) == ("loading", "weights")
    gate.set()
    await ready(client)
    assert client.describe().max_model_len == 512
    assert isinstance((await collect(await client.generate(ask())))[-1], Done)
    await client.aclose()


async def test_closing_while_loading() -> None:
    """A load that is still running ends at its next progress report."""
    runner = echo_runner()
    entered, gate = threading.Event(), threading.Event()

    def load(progress: Progress) -> LoadedEngine:
        entered.set()
        assert gate.wait(DEADLINE_SECONDS)
        return load_of(runner)(progress)

    client = ThreadClient("echo", load)
    client.start()
    await asyncio.to_thread(entered.wait, DEADLINE_SECONDS)
    closing = asyncio.ensure_future(client.aclose())
    await until(lambda: client._thread._is_closing)
    gate.set()
    await closing
    assert client.describe().state == "failed"


async def test_close_ends_generations_and_frees_the_runner() -> None:
    """Every open generation gets an error, the thread ends, the runner is closed; later requests are refused."""
    runner = GatedRunner(echo_runner())
    client = await ready(ThreadClient("echo", load_of(runner), CONFIG))
    generation = await client.generate(ask())
    await runner.held()
    closing = asyncio.ensure_future(client.aclose())
    events = await collect(generation)
    runner.open()
    await closing
    assert [type(event) for event in events] == [Error]
    assert runner.is_closed
    with pytest.raises(EngineUnavailable):
        await client.generate(ask())
    await client.aclose()


async def test_accepted_in_the_moment_of_the_end() -> None:
    """A request that is accepted while the thread ends is told so, and does not wait for ever."""
    client = await ready(ThreadClient("echo", load_of(echo_runner()), CONFIG))
    accepted = client._accepted

    def end_first(prepared: Prepared) -> Accepted:
        client._thread.close()
        client._thread.join()
        return accepted(prepared)

    client._accepted = end_first  # type: ignore[method-assign]
    events = await collect(await client.generate(ask()))
    assert [event.code for event in events if isinstance(event, Error)] == ["engine_closed"]
    await client.aclose()


@pytest.mark.parametrize("fields", [{"stop_token_ids": (99_999,)}, {"output_token_ids": ((-1,),)}])
async def test_ids_the_model_lacks_are_refused(fields: dict[str, Any]) -> None:
    """An id that would break the whole step is one request's 400."""
    async with serving() as client:
        with pytest.raises(BadRequest) as caught:
            await client.generate(ask(**fields))
    assert caught.value.param in fields


async def test_unknown_class_is_refused() -> None:
    """A latency class the scheduler does not know never reaches it."""
    async with serving() as client:
        with pytest.raises(BadRequest, match="latency_class"):
            await client.generate(replace(ask(), latency_class="vip"))
        assert isinstance((await collect(await client.generate(ask(seed=2**63 - 1, n=2, temperature=1.0))))[-1], Done)


async def test_close_before_start() -> None:
    """An engine that never ran can be closed, and then does not start."""
    client = echo_client()
    await client.aclose()
    client.start()
    assert client.describe().state == "failed"


async def test_one_bad_sequence_costs_only_itself() -> None:
    """Its stream ends in a named error; its batch mate gets the answer it gets alone."""
    runner = FaultyRunner(echo_runner(), lambda step, seq_id: seq_id == 1 and step >= 3)
    async with serving(runner) as client:
        bad, good = [await client.generate(ask(prompt)) for prompt in ("bad", "good")]
        bad_events, good_events = await asyncio.gather(collect(bad), collect(good))
        alone = await collect(await client.generate(ask("good")))
    assert isinstance(bad_events[-1], Error)
    assert bad_events[-1].code == "numerical_error"
    assert text(good_events) == text(alone)


async def test_failing_choice_ends_the_request() -> None:
    """If one of several choices fails, the request ends in one error and the others are aborted."""
    runner = FaultyRunner(echo_runner(), lambda step, seq_id: seq_id == 2 and step >= 3)
    async with serving(runner) as client:
        events = await collect(await client.generate(ask(n=3, max_tokens=400)))
        await until(lambda: client.stats().running == 0)
    assert [type(event) for event in events if not isinstance(event, Token)] == [Error]


async def test_broken_text_side_costs_only_its_request() -> None:
    """A tokenizer that raises while decoding ends that stream with an error, and the engine serves on."""

    class Broken(EchoTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            if calls.pop():
                raise RuntimeError("no such token")
            return super().token_bytes(token_id)

    calls = [False] * 100 + [True, False]
    async with serving(tokenizer=Broken()) as client:
        assert isinstance((await collect(await client.generate(ask())))[-1], Error)
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)


async def test_broken_tokenizer_is_a_bad_request() -> None:
    """Whatever a tokenizer raises on a prompt is that request's 400."""

    class Broken(EchoTokenizer):
        def encode(self, request: GenerateRequest) -> Prompt:
            raise RuntimeError("internals")

    async with serving(tokenizer=Broken()) as client:
        with pytest.raises(BadRequest) as caught:
            await client.generate(ask())
    assert caught.value.code == "tokenizer_error"
    assert "internals" not in caught.value.message


async def test_too_long_names_the_numbers() -> None:
    """A request that can never fit is refused with its sizes, the limit and the way out."""
    async with serving() as client:
        with pytest.raises(PromptTooLong) as caught:
            await client.generate(ask("x" * 400, max_tokens=200))
        assert caught.value.message == (
            "prompt has 400 tokens; this model takes 512 with max_tokens=200. Shorten the prompt or lower max_tokens."
        )
        assert caught.value.param == "max_tokens"
        with pytest.raises(PromptTooLong, match=r"prompt has 512 tokens; this model takes 512\. Shorten the prompt\."):
            await client.generate(ask("x" * 512, max_tokens=None))


async def test_pool_limits_too() -> None:
    """If the memory holds less than the model's length, the memory is the limit, and a request that fills it runs."""
    async with serving(EchoRunner(num_blocks=11, block_size=4)) as client:
        assert client.describe().max_model_len == 40
        with pytest.raises(PromptTooLong):
            await client.generate(ask("x" * 20, max_tokens=21))
        events = await collect(await client.generate(ask("x" * 20, max_tokens=20)))
    assert isinstance(events[-1], Done)


@pytest.mark.parametrize(("default", "expected"), [(None, 412), (50, 50), (1000, 412)])
async def test_default_max_tokens_is_clamped(default: int | None, expected: int) -> None:
    """Without max_tokens an answer may take the default, or all that fits."""
    config = replace(CONFIG, default_max_tokens=default)
    async with serving(GatedRunner(echo_runner()), config) as client:
        generation = await client.generate(ask("x" * 100, max_tokens=None, seed=None))
        assert generation.accepted.max_tokens == expected
        assert 0 <= generation.accepted.seed < 2**63


async def test_queue_is_bounded() -> None:
    """Beyond the free seats and max_waiting, requests are refused with a time to come back; room comes back too."""
    runner = GatedRunner(echo_runner())
    async with serving(runner, replace(CONFIG, max_num_seqs=2, max_waiting=3)) as client:
        accepted = [await client.generate(ask(f"{number}")) for number in range(5)]
        assert [generation.accepted.queue_position for generation in accepted] == [0, 1, 2, 3, 4]
        with pytest.raises(Overloaded) as caught:
            await client.generate(ask())
        assert 1 <= caught.value.retry_after <= 120
        with pytest.raises(Overloaded):
            await client.generate(ask(n=4))
        accepted.pop().cancel()
        accepted.append(await client.generate(ask("again")))
        runner.open()
        assert all(isinstance(events[-1], Done) for events in await asyncio.gather(*map(collect, accepted)))
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)


async def test_tokenising_is_bounded() -> None:
    """A prompt that waits to be read has a place in the queue already."""
    gate = threading.Event()

    class Slow(EchoTokenizer):
        def encode(self, request: GenerateRequest) -> Prompt:
            assert gate.wait(DEADLINE_SECONDS)
            return super().encode(request)

    async with serving(config=replace(CONFIG, max_waiting=8), tokenizer=Slow()) as client:
        tasks = [asyncio.ensure_future(client.generate(ask())) for _ in range(16)]
        await until(lambda: client._num_in_preparation == 16)
        for refused in (client.generate(ask()), client.tokenize(ask())):
            with pytest.raises(Overloaded, match="16 answers are waiting already"):
                await refused
        gate.set()
        generations = await asyncio.gather(*tasks)
        assert all(isinstance(events[-1], Done) for events in await asyncio.gather(*map(collect, generations)))


async def test_timeout_is_an_error_event() -> None:
    """A request that runs into its own timeout ends in `error{timeout}`."""
    now = [100.0]
    runner = GatedRunner(echo_runner(), hold_from=2)
    client = await ready(ThreadClient("echo", load_of(runner), CONFIG, clock=lambda: now[0]))
    generation = await client.generate(ask(timeout_seconds=5.0))
    await runner.held()
    now[0] += 6
    runner.open()
    events = await collect(generation)
    assert isinstance(events[-1], Error)
    assert events[-1].code == "timeout"
    await client.aclose()


async def test_other_salt_shares_nothing() -> None:
    """Two tenants with the same prompt: no cached token across, the same answer."""
    async with serving() as client:
        first, second, again = [await collect(await client.generate(ask(salt=salt))) for salt in ("a", "b", "a")]
    cached = [events[-1].usage.cached_tokens for events in (first, second, again) if isinstance(events[-1], Done)]
    assert cached == [0, 0, 12]
    assert text(first) == text(second)


async def test_one_wake_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many answers a step serves, the loop is woken once."""
    runner = GatedRunner(echo_runner())
    async with serving(runner) as client:
        generations = [await client.generate(ask(f"{number}", max_tokens=20)) for number in range(8)]
        loop, wakes = asyncio.get_running_loop(), []
        original = loop.call_soon_threadsafe

        def count(callback: Any, *args: Any, **kwargs: Any) -> Any:
            if callback == client._deliver:
                wakes.append(len(args[0]))
            return original(callback, *args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        runner.open()
        await asyncio.gather(*map(collect, generations))
    assert len(wakes) <= len(runner.plans)
    assert max(wakes) == 8


async def test_logprobs_and_stats() -> None:
    """Log-probabilities come with their tokens; the figures count what was done."""
    async with serving() as client:
        events = await collect(await client.generate(ask(logprobs=2)))
        stats = client.stats()
    for event in events[:-1]:
        assert isinstance(event, Token)
        assert event.logprobs is not None
        assert len(event.logprobs) == len(event.token_ids)
        assert event.logprobs[0].chosen.token_id == event.token_ids[0]
    assert (stats.generation_tokens, stats.prompt_tokens, stats.running, stats.blocks_used) == (12, 15, 0, 0)
    assert stats.latency.keys() >= {"ttft_p50", "ttft_p95", "itl_p50", "itl_p95", "queue_p50"}
    assert stats.blocks_used + stats.blocks_cached + stats.blocks_free == stats.blocks_total


def test_loops_come_and_go() -> None:
    """A loop that is closed with requests open costs nothing; the next loop is served."""
    client = ThreadClient("echo", load_of(echo_runner()), CONFIG)

    async def leave_open() -> None:
        await ready(client)
        await client.generate(ask(max_tokens=490))

    async def ask_again() -> Event:
        events = await collect(await client.generate(ask()))
        await until(lambda: client.stats().running == 0)
        await client.aclose()
        return events[-1]

    asyncio.run(leave_open())
    assert isinstance(asyncio.run(ask_again()), Done)

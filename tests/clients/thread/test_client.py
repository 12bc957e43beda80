"""Laws of `ThreadClient`, with the echo engine on its real thread. Steps are held by a gate; nothing sleeps."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import replace
from typing import Any

import pytest

from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.echo import EchoTokenizer
from streamserve.engine.text.tokenizer import Prompt
from streamserve.protocol.errors import EngineUnavailable, StreamserveError
from streamserve.protocol.events import ChoiceDone, Done, Error, Event, Token
from streamserve.protocol.requests import GenerateRequest
from tests.support.engines.clients import (
    CONFIG,
    ask,
    asking,
    collect,
    echo_runner,
    ids,
    is_idle,
    load_of,
    ready,
    serving,
    text,
    until,
)
from tests.support.engines.runners import DEADLINE_SECONDS, FaultyRunner, GatedRunner, ProposingRunner


async def test_streams_tokens_then_done() -> None:
    """A generation is tokens, then one `done` with usage and timings, then nothing."""
    async with serving() as client:
        generation = await client.generate(ask())
        events = await collect(generation)
    *tokens, done = events
    assert all(isinstance(token, Token) for token in tokens)
    assert isinstance(done, Done)
    assert (done.finish_reason, done.usage.prompt_tokens, done.usage.completion_tokens) == ("length", 15, 12)
    assert len(ids(events)) == 12
    assert done.breakdown.keys() == {"queue", "prefill", "decode", "first_decode", "ttft", "itl_p50", "itl_p95"}
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
    """The text is cut before the stop string, `done` has reason stop, and the sequence ends."""
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


async def test_a_stop_string_amid_several_tokens_of_a_step() -> None:
    """Text, tokens and usage are those of one token a step."""
    prompt = tuple(b"The quiet river")
    async with serving() as client:
        whole = await collect(await client.generate(ask(max_tokens=60)))
        stops = [text(whole)[place : place + 5] for place in range(3, 60, 7)]
        wanted = [await collect(await client.generate(ask(max_tokens=60, stop=(stop,)))) for stop in stops]
    runner = ProposingRunner(echo_runner(), [(*prompt, *ids(whole))])
    async with serving(runner, replace(CONFIG, prefix_caching=False)) as client:
        found = [await collect(await client.generate(ask(max_tokens=60, stop=(stop,)))) for stop in stops]
    assert list(map(text, found)) == list(map(text, wanted))
    assert list(map(ids, found)) == list(map(ids, wanted))
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(one[-1], Done)
        assert isinstance(other[-1], Done)
        assert one[-1].usage.completion_tokens == other[-1].usage.completion_tokens
    assert sum(number * count for number, count in runner.num_kept.items()) > 0


@pytest.mark.parametrize("cut", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("stop", [(), ("q",)])
async def test_resumed_request_yields_only_what_is_new(cut: int, stop: tuple[str, ...]) -> None:
    """With the shown tokens, the rest of the same answer comes: no gap, nothing twice."""
    async with serving() as client:
        whole = await collect(await client.generate(ask(stop=stop)))
        shown: list[Event] = []
        for event in whole:
            if len(ids(shown)) >= cut:
                break
            shown.append(event)
        rest = await collect(await client.generate(*asking(stop=stop, output_token_ids=(ids(shown),))))
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


async def test_warm_reports_that_it_failed() -> None:
    """With an error of the catalogue: the step's own, and a pause in the middle of it."""
    async with serving(FaultyRunner(echo_runner(), lambda step, seq_id: True)) as client:
        with pytest.raises(StreamserveError) as caught:
            await client.warm(ask())
    assert caught.value.code == "numerical_error"
    runner = GatedRunner(echo_runner())
    async with serving(runner) as client:
        warming = asyncio.create_task(client.warm(ask()))
        await runner.held()
        pausing = asyncio.create_task(client.control("pause"))
        await asyncio.sleep(0)  # the pause is asked for before the step ends
        runner.open()
        await pausing
        with pytest.raises(EngineUnavailable) as paused:
            await warming
    assert paused.value.code == "engine_paused"


async def test_warm_is_no_answer() -> None:
    """It does not count in the metrics of recent answers."""
    async with serving() as client:
        await client.warm(ask())
        await until(lambda: is_idle(client))
        assert client._times.running_seconds() is None
        await collect(await client.generate(ask()))
        assert client._times.running_seconds() is not None


async def test_tokenize() -> None:
    """`tokenize` gives the ids of `generate`."""
    async with serving() as client:
        assert await client.tokenize(ask("hi")) == (104, 105)


async def test_cancelled_is_absent_from_the_next_plan() -> None:
    """After a cancel during a step, the next plan is without that sequence, and its blocks are free."""
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
        last = max(chunk.seq_id for chunk in plan.chunks)  # asked last; whose reader is hungrier decides their order
        assert [chunk.seq_id for chunk in after.chunks] == [last]
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


async def test_cancel_ends_a_waiting_anext() -> None:
    """A waiting `anext` ends with StopAsyncIteration."""
    runner = GatedRunner(echo_runner())
    async with serving(runner) as client:
        generation = await client.generate(ask())
        waiting = asyncio.ensure_future(collect(generation))
        await runner.held()
        generation.cancel()
        assert await waiting == []


async def test_cancelling_while_tokenising_leaves_nothing() -> None:
    """A request that is cancelled before it is accepted never reaches the engine."""
    gate = threading.Event()

    class Slow(EchoTokenizer):
        def encode(self, request: GenerateRequest) -> Prompt:
            assert gate.wait(DEADLINE_SECONDS)
            return super().encode(request)

    async with serving(tokenizer=Slow()) as client:
        task = asyncio.ensure_future(client.generate(ask()))
        await until(lambda: client._admission.num_in_preparation == 1)
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
        await until(lambda: is_idle(client))
        assert len(client._router) == 0


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
    """If one of several choices fails, the request ends in one error and the other choices are aborted."""
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
        first, second, again = [await collect(await client.generate(*asking(salt=salt))) for salt in ("a", "b", "a")]
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
            if callback == client._router._deliver:
                wakes.append(len(args[0]))
            return original(callback, *args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        runner.open()
        await asyncio.gather(*map(collect, generations))
    assert len(wakes) <= len(runner.plans)
    assert max(wakes) == 8


async def test_logprobs_and_stats() -> None:
    """Log-probabilities come with their tokens; the statistics count the work."""
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

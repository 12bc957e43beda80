"""Laws of the requests that a `ThreadClient` accepts and refuses: sizes, ids, the bounds of its queue."""

from __future__ import annotations

import asyncio
import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from streamserve.engine.config import LatencyClass
from streamserve.engine.echo import EchoRunner, EchoTokenizer
from streamserve.engine.text.tokenizer import Prompt
from streamserve.protocol.errors import BadRequest, Overloaded, PromptTooLong, UnmetNeeds
from streamserve.protocol.events import Done
from streamserve.protocol.requests import GenerateRequest
from tests.support.engines.clients import CONFIG, ask, asking, collect, echo_runner, is_idle, serving, until
from tests.support.engines.runners import DEADLINE_SECONDS, GatedRunner, PacedRunner

# Batch rows wait without a limit; a chat for next to nothing, and goes behind them.
IMPATIENT = {"document": LatencyClass(ttft_seconds=0.1), "chat": LatencyClass(ttft_seconds=1.0, max_queue_seconds=1e-9)}


@pytest.mark.parametrize("fields", [{"stop_token_ids": (99_999,)}, {"output_token_ids": ((-1,),)}])
async def test_ids_the_model_lacks_are_refused(fields: dict[str, Any]) -> None:
    """An id that would break the whole step is one request's 400."""
    async with serving() as client:
        with pytest.raises(BadRequest) as caught:
            await client.generate(*asking(**fields))
    assert caught.value.param in fields


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -1000),
        ("top_k", 2**40),
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("min_p", 1.5),
        ("presence_penalty", math.inf),
        ("frequency_penalty", -math.inf),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", -1),
        ("min_tokens", 1.5),
        ("logprobs", 10**6),
        ("stop", ("",)),
    ],
)
async def test_sampling_is_checked_again_at_the_engine(name: str, value: Any) -> None:
    """A value that the API has missed is that request's 400: it never reaches a step, which it would end for all."""
    async with serving() as client:
        with pytest.raises(BadRequest) as caught:
            await client.generate(ask(**{name: value}))
        assert (caught.value.param, caught.value.code) == (name, "invalid_value")
        assert is_idle(client)
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)


@pytest.mark.parametrize("n", [0, -1])
async def test_the_number_of_choices_is_checked_again(n: int) -> None:
    """No answer without a choice."""
    async with serving() as client:
        with pytest.raises(BadRequest) as caught:
            await client.generate(ask(n=n))
        assert caught.value.param == "n"
        assert is_idle(client)


async def test_unknown_class_is_refused() -> None:
    """A latency class the scheduler does not know never reaches it."""
    async with serving() as client:
        with pytest.raises(BadRequest, match="latency_class"):
            await client.generate(replace(ask(), latency_class="vip"))
        assert isinstance((await collect(await client.generate(ask(seed=2**63 - 1, n=2, temperature=1.0))))[-1], Done)


async def test_a_need_that_the_engine_lacks_is_refused() -> None:
    """A newer process's request with an unmet need is refused."""
    async with serving() as client:
        with pytest.raises(UnmetNeeds, match="canvas"):
            await client.generate(replace(ask(), needs=("canvas",)))
        assert is_idle(client)


async def test_reader_positions_are_one_for_each_choice() -> None:
    """Too few or too many are refused before anything reaches the engine."""
    async with serving() as client:
        for positions in ((), (1, 2, 3)):
            with pytest.raises(BadRequest, match="each of the 2 choices"):
                await client.generate(*asking(n=2, reader_tokens=positions))
        assert is_idle(client)


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
    """A prompt that leaves no room for a token is refused with its size, the limit and the way out."""
    async with serving() as client:
        for max_tokens in (None, 1, 200):
            with pytest.raises(PromptTooLong) as caught:
                await client.generate(ask("x" * 512, max_tokens=max_tokens))
            assert caught.value.message == (
                "prompt has 512 tokens; this model takes 512 with the answer. Shorten the prompt."
            )
            assert caught.value.param == "prompt"


async def test_longer_than_the_memory_names_both_limits() -> None:
    """Where the KV memory is what is too small, the message says so, and how many tokens the model itself takes."""
    async with serving(max_len=4096) as client:  # 256 blocks of 4 tokens
        with pytest.raises(PromptTooLong) as caught:
            await client.generate(ask("x" * 1024))
    assert caught.value.message == (
        "prompt has 1,024 tokens; the memory of this model holds 1,024 with the answer, of the 4,096 it takes. "
        "Shorten the prompt, or raise KV_CACHE_BYTES."
    )


@pytest.mark.parametrize("max_tokens", [12, 13, 200, 2**31 - 1])
async def test_a_maximum_is_lowered_to_what_fits(max_tokens: int) -> None:
    """`max_tokens` is a maximum: above what fits the answer ends with `length` where the model does."""
    async with serving() as client:
        generation = await client.generate(ask("x" * 500, max_tokens=max_tokens, ignore_eos=True))
        assert generation.accepted.max_tokens == 12
        done = (await collect(generation))[-1]
        assert isinstance(done, Done)
        assert (done.finish_reason, done.usage.completion_tokens) == ("length", 12)


async def test_pool_limits_too() -> None:
    """If the memory holds less than the model's length, the memory is the limit, and a request that fills it runs."""
    async with serving(EchoRunner(num_blocks=11, block_size=4)) as client:
        assert client.describe().max_model_len == 40
        with pytest.raises(PromptTooLong):
            await client.generate(ask("x" * 40, max_tokens=20))
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
    """Beyond the free seats and max_waiting, requests are refused with a Retry-After; room comes back too."""
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


async def test_a_full_queue_lets_another_tenant_in() -> None:
    """A flood has filled the queue: another tenant finds its share of it, and what it asks is answered."""
    runner = GatedRunner(echo_runner())
    async with serving(runner, replace(CONFIG, max_num_seqs=2, max_waiting=3)) as client:
        accepted = [await client.generate(*asking(f"{number}", tenant="flood")) for number in range(5)]
        for tenant in ("flood", "light", "light", "light"):
            try:
                accepted.append(await client.generate(*asking(tenant, tenant=tenant)))
            except Overloaded:
                continue
        assert [generation.accepted.queue_position for generation in accepted] == list(range(7)), "two of the light one"
        runner.open()
        assert all(isinstance(events[-1], Done) for events in await asyncio.gather(*map(collect, accepted)))


@pytest.mark.parametrize("again", [{"output_token_ids": ((5, 6),)}, {"was_admitted": True}])
async def test_a_full_queue_takes_back_what_was_accepted_once(again: dict[str, Any]) -> None:
    """An answer that was parked comes back to a full queue, before or after its first token; a new one is refused."""
    runner = GatedRunner(echo_runner())
    async with serving(runner, replace(CONFIG, max_num_seqs=2, max_waiting=3)) as client:
        accepted = [await client.generate(ask(f"{number}")) for number in range(5)]
        with pytest.raises(Overloaded):
            await client.generate(ask("new"))
        accepted += [await client.generate(*asking(f"back {number}", **again)) for number in range(3)]
        with pytest.raises(Overloaded, match="8 answers are waiting"):
            await client.generate(ask("new"))
        runner.open()
        assert all(isinstance(events[-1], Done) for events in await asyncio.gather(*map(collect, accepted)))


async def test_the_time_of_the_queue_is_bounded() -> None:
    """Once the step-time model exists, requests that would wait longer than their class may are refused at once."""
    config = replace(CONFIG, max_num_seqs=1, classes=IMPATIENT)
    runner = GatedRunner(PacedRunner(echo_runner(), seconds_per_token=0.0005))
    async with serving(runner, config) as client:
        rows = [ask("x" * number, max_tokens=20, latency_class="document") for number in range(1, 21)]
        accepted = [await client.generate(one) for one in rows]
        while not client.stats().queued_seconds:
            runner.release()
            await runner.held()
        with pytest.raises(Overloaded, match="would wait") as caught:
            await client.generate(ask())
        runner.open()
        assert 1 <= caught.value.retry_after <= 120
        assert all(isinstance(events[-1], Done) for events in await asyncio.gather(*map(collect, accepted)))
        assert isinstance((await collect(await client.generate(ask())))[-1], Done)


async def test_tokenising_is_bounded() -> None:
    """A prompt that waits for its tokenisation has a place in the queue already."""
    gate = threading.Event()

    class Slow(EchoTokenizer):
        def encode(self, request: GenerateRequest) -> Prompt:
            assert gate.wait(DEADLINE_SECONDS)
            return super().encode(request)

    async with serving(config=replace(CONFIG, max_waiting=8), tokenizer=Slow()) as client:
        tasks = [asyncio.ensure_future(client.generate(ask())) for _ in range(16)]
        await until(lambda: client._admission.num_in_preparation == 16)
        for refused in (client.generate(ask()), client.tokenize(ask())):
            with pytest.raises(Overloaded, match="16 answers are waiting already"):
                await refused
        gate.set()
        generations = await asyncio.gather(*tasks)
        assert all(isinstance(events[-1], Done) for events in await asyncio.gather(*map(collect, generations)))

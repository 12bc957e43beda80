"""Laws of `ThreadEmbedder`, on its real thread. Passes are held by a gate; nothing sleeps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from streamserve.clients.thread.embedder import ThreadEmbedder
from streamserve.engine.config import EmbedderConfig
from streamserve.engine.embedding import EchoEmbedder
from streamserve.engine.plan import Flight
from streamserve.protocol.embeddings import Embedded, EmbedRequest
from streamserve.protocol.engine import EMBEDS
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Overloaded, PromptTooLong, StreamserveError
from streamserve.protocol.requests import Admission, GenerateRequest

DEADLINE_SECONDS = 60.0


class GatedEmbedder(EchoEmbedder):
    """Computes a pass once the gate is open; notes what each pass had. It fails on texts that have "poison"."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun = threading.Event(), threading.Event()
        self.passes: list[list[str]] = []

    def embed(self, inputs: Sequence[Sequence[int]], dimensions: Sequence[int | None]) -> list[bytes | None]:
        texts = [bytes(ids).decode() for ids in inputs]
        self.passes.append(texts)
        self.begun.set()
        assert self.gate.wait(DEADLINE_SECONDS)
        if any("poison" in text for text in texts):
            raise RuntimeError("poison")
        return [
            None if text == "infinite" else one
            for text, one in zip(texts, super().embed(inputs, dimensions), strict=True)
        ]


@asynccontextmanager
async def serving(model: EchoEmbedder, **options: Any) -> AsyncIterator[ThreadEmbedder]:
    fields = {name: options.pop(name) for name in ("on_step",) if name in options}
    config = EmbedderConfig(alias="search", path="echo", **options)
    client = ThreadEmbedder(config, lambda progress: model, loads_at_once=True, **fields)
    client.start()
    try:
        yield client
    finally:
        if isinstance(model, GatedEmbedder):
            model.gate.set()
        await client.aclose()


def asked(*inputs: Any, **fields: Any) -> EmbedRequest:
    return EmbedRequest(model="search", inputs=inputs, **fields)


def of(tenant: str) -> Admission:
    return Admission(owner=tenant, tenant=tenant)


async def begun(model: GatedEmbedder) -> None:
    assert await asyncio.to_thread(model.begun.wait, DEADLINE_SECONDS)
    model.begun.clear()


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110  (the thread has no event here)
            await asyncio.sleep(0.005)


async def test_each_input_has_its_vector_in_order() -> None:
    """Texts and ids alike; tokens are counted, and so is what was computed."""
    async with serving(EchoEmbedder()) as client:
        found = await client.embed(asked("one two", "three", tuple(b"one two")))
        alone = await client.embed(asked("three"))
        assert found.vectors[0] == found.vectors[2]
        assert found.vectors[1] == alone.vectors[0]
        assert found.num_tokens == 7 + 5 + 7
        stats, model = client.stats(), client.describe()
    assert (stats.embedded_requests, stats.embedded_inputs, stats.prompt_tokens, stats.waiting) == (2, 4, 24, 0)
    assert (model.state, model.kind, model.dimensions, model.max_model_len) == ("ready", EMBEDS, 64, 8192)


async def test_requests_that_wait_share_a_pass() -> None:
    """What came while a pass was computed is in the next, whoever asked."""
    model = GatedEmbedder()
    async with serving(model) as client:
        first = asyncio.create_task(client.embed(asked("first")))
        await begun(model)
        later = [asyncio.create_task(client.embed(asked(f"later {name}"), of(name))) for name in "abc"]
        await until(lambda: client.stats().waiting == 4)
        model.gate.set()
        await asyncio.gather(first, *later)
    assert [sorted(texts) for texts in model.passes] == [["first"], ["later a", "later b", "later c"]]


async def test_a_cancelled_request_is_withdrawn() -> None:
    """What of it was not computed never is; the request beside it has its vectors."""
    model = GatedEmbedder()
    async with serving(model) as client:
        first = asyncio.create_task(client.embed(asked("first")))
        await begun(model)
        left = asyncio.create_task(client.embed(asked("left 1", "left 2"), of("a")))
        stays = asyncio.create_task(client.embed(asked("stays"), of("b")))
        await until(lambda: client.stats().waiting == 3)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert client.stats().waiting == 2
        model.gate.set()
        await asyncio.gather(first, stays)
    assert model.passes == [["first"], ["stays"]]


async def test_the_queue_is_bounded() -> None:
    """By characters, before anything is tokenised; a request that ended, or left, gives its own back."""
    model = GatedEmbedder()
    async with serving(model, max_waiting_chars=10) as client:
        first = asyncio.create_task(client.embed(asked("x" * 8)))
        await begun(model)
        with pytest.raises(Overloaded) as refused:
            await client.embed(asked("y" * 3))
        assert refused.value.retry_after >= 1
        assert client.stats().refused == 1
        second = asyncio.create_task(client.embed(asked("y" * 2)))
        await until(lambda: client.stats().waiting == 2)
        second.cancel()
        model.gate.set()
        await asyncio.gather(first, second, return_exceptions=True)
        assert len((await client.embed(asked("z" * 30))).vectors) == 1  # where nothing waits, one is taken


async def test_an_input_that_fails_fails_its_own_request_only() -> None:
    """Its pass is computed again in halves."""
    model = GatedEmbedder()
    async with serving(model) as client:
        first = asyncio.create_task(client.embed(asked("first")))
        await begun(model)
        texts = ["a", "poison", "b", "infinite"]
        later = [asyncio.create_task(client.embed(asked(text), of(text))) for text in texts]
        await until(lambda: client.stats().waiting == 5)
        model.gate.set()
        a, poison, b, infinite = await asyncio.gather(*later, return_exceptions=True)
        await first
        assert isinstance(a, Embedded)
        assert isinstance(b, Embedded)
        assert isinstance(poison, StreamserveError)
        assert isinstance(infinite, StreamserveError)
        assert infinite.code == "numerical_error"
        assert len((await client.embed(asked("next"))).vectors) == 1


@pytest.mark.parametrize(
    ("request_", "error", "code", "param"),
    [
        (asked("ok", (1, 2, 10_000)), BadRequest, "invalid_value", "input[1]"),
        (asked("ok", (-1,)), BadRequest, "invalid_value", "input[1]"),
        (asked("ok", ()), BadRequest, "invalid_value", "input[1]"),
        (asked("\ud800"), BadRequest, "invalid_request", "input[0]"),
        (asked("a" * 8193, first=7), PromptTooLong, "context_length_exceeded", "input[7]"),
        (asked("a", dimensions=65), BadRequest, "invalid_value", "dimensions"),
    ],
)
async def test_what_the_model_does_not_take_is_named(
    request_: EmbedRequest, error: type[BadRequest], code: str, param: str
) -> None:
    """With its place in the whole request."""
    async with serving(EchoEmbedder()) as client:
        with pytest.raises(error) as raised:
            await client.embed(request_)
    assert (raised.value.code, raised.value.param) == (code, param)


async def test_only_a_model_that_was_trained_so_is_cut() -> None:
    """The message names the setting that allows it."""
    model = EchoEmbedder()
    model.allows_fewer = False  # type: ignore[misc]
    async with serving(model) as client:
        with pytest.raises(BadRequest, match="MATRYOSHKA") as raised:
            await client.embed(asked("a", dimensions=8))
        assert raised.value.param == "dimensions"
        assert len((await client.embed(asked("a", dimensions=64))).vectors[0]) == 256


async def test_an_operator_pauses_and_resumes_it() -> None:
    """What was accepted is computed; ids are still counted."""
    async with serving(EchoEmbedder()) as client:
        await client.control("pause")
        assert client.describe().state == "paused"
        with pytest.raises(EngineUnavailable) as raised:
            await client.embed(asked("a"))
        assert raised.value.code == "engine_paused"
        assert await client.tokenize(GenerateRequest(model="search", prompt="ab")) == (97, 98)
        await client.control("resume")
        assert len((await client.embed(asked("a"))).vectors) == 1


async def test_what_waits_is_refused_when_it_is_closed() -> None:
    """The pass that is under way is finished."""
    model = GatedEmbedder()
    async with serving(model) as client:
        first = asyncio.create_task(client.embed(asked("first")))
        await begun(model)
        second = asyncio.create_task(client.embed(asked("second")))
        await until(lambda: client.stats().waiting == 2)
        closing = asyncio.create_task(client.aclose())
        await until(lambda: client._is_closing)
        model.gate.set()
        await closing
        assert isinstance(await first, Embedded)
        with pytest.raises(EngineUnavailable):
            await second
        with pytest.raises(EngineUnavailable):
            await client.embed(asked("third"))


async def test_a_model_that_cannot_be_loaded_says_why() -> None:
    """To operators; a caller is refused."""

    def fail(progress: Any) -> EchoEmbedder:
        raise EngineUnavailable("There is no folder at /nowhere.", code="load_failed")

    client = ThreadEmbedder(EmbedderConfig(alias="search", path="/nowhere"), fail, loads_at_once=True)
    client.start()
    assert client.describe().state == "failed"
    assert client.describe().message == "There is no folder at /nowhere."
    with pytest.raises(EngineUnavailable, match="not available"):
        await client.embed(asked("a"))
    await client.aclose()


async def test_each_pass_is_reported_to_the_watchdog() -> None:
    """When it begins, with the time that it may take, and when it is over."""
    seen: list[Flight] = []
    async with serving(EchoEmbedder(), on_step=seen.append) as client:
        await client.embed(asked("a"))
    assert [flight.seconds_allowed is None for flight in seen] == [False, True]

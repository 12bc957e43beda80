"""Laws of a remote client's limits: stops and slow readers reach the server, phases have times, places are few."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamserve.clients.base import Generation
from streamserve.clients.remote.places import Places
from streamserve.clients.remote.source import HTTPSource
from streamserve.protocol.errors import EngineUnavailable, Overloaded
from streamserve.protocol.events import Done, Error, Event, Status, Token
from streamserve.protocol.requests import Admission, GenerateRequest
from tests.support.engines.clients import collect, text
from tests.support.servers.upstreams import (
    DONE,
    LAST_CHUNK,
    PLAIN,
    STREAM_HEAD,
    WHOLE,
    Asked,
    Upstream,
    begins,
    chat,
    chatting,
    chunk,
    counts,
    delta,
    never,
    outcome,
    remote,
    turns,
    until,
    usage,
)


def source_of(generation: Generation) -> HTTPSource:
    source = generation._source
    assert isinstance(source, HTTPSource)
    return source


async def test_a_stop_closes_the_connection() -> None:
    """The server sees that its client has left, so it computes no more; the place is free again."""
    upstream = Upstream(begins(*PLAIN))
    async with remote(upstream, max_concurrent=1) as client:
        generation = await client.generate(chat())
        assert (await anext(generation)).text == "Hel"  # type: ignore[union-attr]
        generation.cancel()
        async with asyncio.timeout(60):
            await upstream.gone[0].wait()
        await until(lambda: client.stats().running == 0)
        assert not generation.is_open
        assert generation.ready() == []


async def test_a_caller_that_leaves_before_the_head_closes_it_too() -> None:
    """A request that is cancelled while it waits to be accepted leaves nothing at the server."""
    upstream = Upstream(never)
    async with remote(upstream) as client:
        task = asyncio.create_task(client.generate(chat()))
        await until(lambda: upstream.posts)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(60):
            await upstream.gone[0].wait()


async def test_a_slow_reader_holds_the_server() -> None:
    """What is not taken stays at the server: its writes wait, and what is held here has a bound."""
    sent = num_unsent = 0

    async def floods(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent, num_unsent
        writer.write(STREAM_HEAD)
        while True:
            writer.write(chunk(delta(content="x" * 1000)))
            num_unsent = writer.transport.get_write_buffer_size()
            await writer.drain()
            sent += 1

    async with remote(Upstream(floods)) as client:
        generation = await client.generate(chat())
        await until(lambda: num_unsent > 64 * 1024)  # asyncio's own limit: its write waits
        await turns()
        before = sent
        assert 64 <= len(generation._events) <= 64 + 64
        assert counts(client)["holds"] == 1
        await until(lambda: generation.ready() and sent > before)
        generation.cancel()


async def test_a_reader_behind_holds_the_server() -> None:
    """No more than `lead_tokens` beyond what the reader has received are read; then it is read on."""
    parts = [delta(content=str(number % 10)) for number in range(40)]

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for part in (*parts, *WHOLE[3:]):
            writer.write(chunk(part))
            await writer.drain()
            await turns(20)  # reads of their own
        writer.write(LAST_CHUNK)

    async with remote(Upstream(answer), lead_tokens=8) as client:
        generation = await client.generate(*chatting(reader_tokens=(0,)))
        await until(lambda: not source_of(generation).has_room)
        await turns(2000)
        held = sum(isinstance(one, Token) for one in generation.ready())
        assert 8 <= held < 30
        generation.reader_at(None)
        rest = await collect(generation)  # type: ignore[arg-type]
    assert len(text(rest)) == 40 - held
    assert isinstance(rest[-1], Done)


async def test_each_choice_has_gaps_of_its_own() -> None:
    """The first token of a second choice is no gap of the first choice."""
    has_first = asyncio.Event()

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunk(delta(0, content="a")))
        await has_first.wait()
        writer.write(chunk(delta(1, content="b") + delta(0, "stop") + delta(1, "stop") + usage() + DONE) + LAST_CHUNK)

    async with remote(Upstream(answer)) as client:
        generation = await client.generate(*chatting(n=2))
        await anext(generation)
        has_first.set()
        done = (await collect(generation))[-1]  # type: ignore[arg-type]
    assert isinstance(done, Done)
    assert (done.breakdown["first_decode"], done.breakdown["itl_p95"]) == (0.0, 0.0)


async def test_a_reader_that_stays_behind_parks_the_answer() -> None:
    """After HOLD_SECONDS the connection is closed, so that the server is free; the stream asks again later."""
    upstream = Upstream(begins(*[delta(content="x")] * 20))
    async with remote(upstream, lead_tokens=8, hold_seconds=0.01) as client:
        generation = await client.generate(*chatting(reader_tokens=(0,)))
        events = await collect(generation)  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            await upstream.gone[0].wait()
        assert client.stats().parks == 1
    assert all(isinstance(one, Token) for one in events)
    assert generation.parked is not None
    assert (generation.parked.reason, generation.parked.resume_at_lead) == ("lead", 4)


async def test_what_the_server_cannot_continue_is_held_instead() -> None:
    """Without a way to continue, a slow reader's connection stays open."""
    upstream = Upstream(begins(*[delta(content="x")] * 20), owned_by="someone")
    async with remote(upstream, lead_tokens=8, hold_seconds=0.01) as client:
        generation = await client.generate(*chatting(reader_tokens=(0,)))
        await until(lambda: counts(client)["holds"])
        await until(lambda: source_of(generation).is_ahead)
        await turns(2000)
        assert (generation.is_open, generation.can_park) == (True, False)
        assert not upstream.gone[0].is_set()
        generation.cancel()


@pytest.mark.parametrize(
    ("answer", "fields", "code"),
    [
        (never, {"first_token_seconds": 0.05}, "upstream_timeout"),
        (begins(delta(role="assistant")), {"first_token_seconds": 0.05}, "upstream_timeout"),
        (begins(delta(reasoning_content="Hm")), {"silence_seconds": 0.05}, "cannot_continue"),
    ],
    ids=["no head", "no token", "silence in a thought"],
)
async def test_each_phase_has_a_limit(answer: Any, fields: dict[str, float], code: str) -> None:
    """The first token, and the silence after it; the connection is closed."""
    upstream = Upstream(answer)
    async with remote(upstream, **fields) as client:
        found = await outcome(client)
        assert found[:2] == (code, True)
        async with asyncio.timeout(60):
            await upstream.gone[0].wait()


async def test_requests_beyond_the_places_wait_in_order() -> None:
    """They see their place in the queue; one more than may wait is refused, before anything is sent."""
    go = asyncio.Event()

    async def waits(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(STREAM_HEAD + b"".join(map(chunk, WHOLE)) + LAST_CHUNK)

    upstream = Upstream(waits)
    async with remote(upstream, max_concurrent=1, max_waiting=2) as client:
        first = asyncio.create_task(client.generate(chat("0")))
        await until(lambda: upstream.posts)
        waiting = [await client.generate(chat(str(number))) for number in (1, 2)]
        await until(lambda: client.stats().waiting == 2)
        with pytest.raises(Overloaded, match="2 answers are waiting"):
            await client.generate(chat("3"))
        assert (client.stats().running, len(upstream.posts)) == (1, 1)
        go.set()
        answers = [await collect(one) for one in (await first, *waiting)]  # type: ignore[arg-type]
    assert [text(events) for events in answers] == ["Hello."] * 3
    assert answers[1][:2] == [Status(status="queued", step=1), Status(status="generating")]
    assert [asked.body["messages"][0]["content"] for asked in upstream.posts] == ["0", "1", "2"]


async def test_a_full_queue_takes_back_what_was_accepted_once() -> None:
    """An answer whose connection was lost waits behind the others; a new one is refused."""
    async with remote(Upstream(never), max_concurrent=1, max_waiting=1) as client:
        asks = [asyncio.ensure_future(client.generate(chat())) for _ in range(2)]
        await until(lambda: client._upstreams.places.num_waiting == 1)
        with pytest.raises(Overloaded, match="1 answers are waiting"):
            await client.generate(chat())
        asks.append(asyncio.ensure_future(client.generate(*chatting(was_admitted=True))))
        await until(lambda: client._upstreams.places.num_waiting == 2)
        for one in asks:
            one.cancel()
        await asyncio.gather(*asks, return_exceptions=True)


async def test_tenants_take_turns_for_the_places() -> None:
    """A flood of one tenant fills the queue; another one is let in beyond it, and is served after one of the flood."""
    go = asyncio.Event()

    async def waits(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(STREAM_HEAD + b"".join(map(chunk, WHOLE)) + LAST_CHUNK)

    def asks(content: str, tenant: str) -> tuple[GenerateRequest, Admission]:
        return chat(content), Admission(owner=tenant, tenant=tenant)

    upstream = Upstream(waits)
    async with remote(upstream, max_concurrent=1, max_waiting=3) as client:
        first = asyncio.create_task(client.generate(*asks("0", "flood")))
        await until(lambda: upstream.posts)
        flood = [await client.generate(*asks(f"flood {number}", "flood")) for number in range(3)]
        await until(lambda: client.stats().waiting == 3)
        with pytest.raises(Overloaded):
            await client.generate(*asks("flood 3", "flood"))
        other = await client.generate(*asks("other", "other"))
        await until(lambda: client.stats().waiting == 4)
        with pytest.raises(Overloaded):  # its share of three places is one
            await client.generate(*asks("other 2", "other"))
        go.set()
        answers = [await collect(one) for one in (await first, *flood, other)]  # type: ignore[arg-type]
    assert [text(events) for events in answers] == ["Hello."] * 5
    assert answers[-1][0] == Status(status="queued", step=2)
    order = [asked.body["messages"][0]["content"] for asked in upstream.posts]
    assert order == ["0", "flood 0", "other", "flood 1", "flood 2"]


class OnePlace:
    """A place that one request has at a time."""

    def __init__(self) -> None:
        self.is_free = True
        self.places: Places[str] = Places(8, may_pick=lambda: self.is_free, give_back=self.release)

    async def take(self, tenant: str, seconds: float) -> str:
        return await self.places.take(tenant, seconds, self._pick)

    def release(self, where: str = "here") -> None:
        self.is_free = True
        self.places.turn()

    def _pick(self) -> str | None:
        was_free, self.is_free = self.is_free, False
        return "here" if was_free else None


async def test_a_place_is_not_lost_with_the_request_that_waited_for_it() -> None:
    """Requests that time out or are cancelled, also at the moment of their turn, leave every place to the others."""
    one = OnePlace()
    await one.take("a", 1.0)
    with pytest.raises(TimeoutError):
        await one.take("a", 0.0)
    waiting = [asyncio.create_task(one.take(tenant, 60.0)) for tenant in ("a", "b", "a")]
    await until(lambda: one.places.num_waiting == 3)
    waiting[0].cancel()
    one.release()  # to b or to a, before the cancelled task has run
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    served, left = await asyncio.wait(waiting[1:], return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in served] == ["here"]
    one.release()
    await left.pop()
    one.release()
    assert (one.is_free, one.places.num_waiting) == (True, 0)


async def test_a_place_that_never_comes_is_a_refusal() -> None:
    """A request waits for QUEUE_SECONDS."""
    async with remote(Upstream(never), max_concurrent=1, queue_seconds=0.05) as client:
        first = asyncio.create_task(client.generate(chat()))
        await until(lambda: client.stats().running)
        events: list[Event] = await collect(await client.generate(chat()))  # type: ignore[arg-type]
        first.cancel()
    assert isinstance(events[-1], Error)
    assert (events[-1].code, events[-1].retryable) == ("queue_timeout", True)


async def test_a_client_that_closes_ends_its_answers() -> None:
    """Each ends in an error, and every connection is closed."""
    upstream = Upstream(begins(*PLAIN))
    async with remote(upstream) as client:
        generation = await client.generate(chat())
        await until(lambda: source_of(generation).answer.has_begun)
        await client.aclose()
        events: list[Event] = await collect(generation)  # type: ignore[arg-type]
        await until(lambda: upstream.num_open == 0)
        with pytest.raises(EngineUnavailable):
            await client.generate(chat())
    assert isinstance(events[-1], Error)
    assert events[-1].code == "engine_closed"

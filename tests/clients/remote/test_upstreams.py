"""Laws of a model with several upstreams: which of them gets a request, and what a reader sees when it dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig
from streamserve.clients.remote.config import Upstream as Server
from streamserve.clients.remote.upstreams import _choose, affinity_of
from streamserve.protocol.errors import BadRequest, EngineUnavailable, Overloaded
from streamserve.protocol.events import Done, Error, Event, Status
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from tests.clients.remote.test_drops import WORDS, end_of, goes_on, start, words_of
from tests.support.engines.clients import collect, text
from tests.support.servers.upstreams import (
    DONE,
    JSON,
    LAST_CHUNK,
    PLAIN,
    STREAM_HEAD,
    WHOLE,
    Answer,
    Asked,
    Upstream,
    ask,
    begins,
    chat,
    chatting,
    chunk,
    counts,
    delta,
    never,
    outcome,
    raw,
    response,
    says,
    several,
    turns,
    until,
)

pytestmark = pytest.mark.usefixtures("patient")

FAILED = raw(response("500 Error", b'{"error": "oops"}', JSON))
TENANT = Admission(owner="o", tenant="t", salt="secret")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def up(client: RemoteClient) -> dict[str, float]:
    return {name: figures["up"] for name, figures in client.stats().upstreams.items()}


def asked_of(*upstreams: Upstream) -> list[int]:
    return [len(upstream.posts) for upstream in upstreams]


def first_of(client: RemoteClient, name: str, admission: Admission = TENANT) -> str:
    """Return a question that is asked of this upstream while all are there and idle."""
    for number in range(1000):
        request = chat(f"question {number}")
        chosen = _choose(affinity_of(request, admission), client.servers, client.servers)
        if chosen.name == name:
            return f"question {number}"
    raise AssertionError(name)


async def get(client: RemoteClient, question: str, **fields: Any) -> list[Event]:
    request, _, resume = chatting(question, **fields)
    return await collect(await client.generate(request, TENANT, resume))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer",
    [
        raw(b"", keeps=False),
        says(delta(role="assistant"), whole=False),
        says(delta(role="assistant"), DONE),
        raw(b"220 mail.example.org ESMTP\r\n", keeps=False),
        raw(response("200 OK", b"<html>", "Content-Type: text/html")),
        says(b'data: {"error": {"message": "CUDA error"}}\n\n'),
        says(b"data: {oops\n\n"),
        FAILED,
        raw(response("401 Unauthorized")),
        raw(response("404 Not Found")),
        raw(response("302 Found", b"", "Location: http://127.0.0.1:1/")),
        raw(response("429 Slow down", b"", "Retry-After: 7")),
        raw(response("503 Busy")),
    ],
    ids=[
        "no byte", "cut before a token", "empty", "smtp", "html", "error event", "no json",
        "500", "401", "404", "302", "429", "503",
    ],
)  # fmt: skip
async def test_what_fails_before_the_first_token_goes_to_another(answer: Answer) -> None:
    """The reader sees the whole answer once, and no sign of the first upstream."""
    bad, good = Upstream(answer), Upstream(says(*WHOLE))
    async with several(bad, good) as client:
        events = await get(client, first_of(client, "a"))
        assert text(events) == "Hello."
        assert isinstance(events[-1], Done)
        assert not any(isinstance(event, Status | Error) for event in events)
        assert client.stats().upstreams["a"]["moved"] == 1
        assert client.stats().upstreams["b"]["moved"] == 0
    assert len(good.posts) == 1


async def test_an_upstream_that_was_killed_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """Its requests go to the other; the log says once that it is away, and once that it is back."""
    caplog.set_level(logging.INFO, logger="streamserve.remote")
    first, second = Upstream(says(*WHOLE)), Upstream(says(*WHOLE))
    async with several(first, second, poll_seconds=0.05) as client:
        question, port = first_of(client, "a"), int(first.url.rsplit(":", 1)[1].split("/")[0])
        await get(client, question)
        await first.stop()
        for _ in range(20):
            assert text(await get(client, question)) == "Hello."
        await until(lambda: up(client) == {"a": 0.0, "b": 1.0})
        assert client.describe().state == "ready"
        assert "a: cannot connect" in client.describe().message
        await first.start(port)
        await until(lambda: up(client) == {"a": 1.0, "b": 1.0})
        before = len(first.posts)
        assert text(await get(client, question)) == "Hello."
        assert len(first.posts) == before + 1
        lines = [record.getMessage() for record in caplog.records if "upstream a" in record.getMessage()]
    assert [("ready" in line) for line in lines] == [True, False, True]
    assert asked_of(first, second) == [2, 20]


async def test_requests_in_flight_leave_an_upstream_that_says_nothing_more() -> None:
    """It accepts and is silent, for its probe too: what has no token goes to another, long before its time is over."""
    first, second = Upstream(says(*WHOLE)), Upstream(says(*WHOLE))
    async with several(first, second, poll_seconds=0.05, connect_seconds=0.1, first_token_seconds=600.0) as client:
        question = first_of(client, "a")
        first.is_frozen = True
        async with asyncio.timeout(60):
            assert text(await get(client, question)) == "Hello."
        assert up(client) == {"a": 0.0, "b": 1.0}
    assert asked_of(first, second) == [1, 1]


async def test_no_token_in_time_goes_to_another() -> None:
    """An upstream that lists its models and answers nothing costs FIRST_TOKEN_SECONDS, which are in `queue`."""
    first, second = Upstream(never), Upstream(says(*WHOLE))
    async with several(first, second, first_token_seconds=0.05) as client:
        events = await get(client, first_of(client, "a"))
    done = events[-1]
    assert isinstance(done, Done)
    assert done.breakdown["queue"] >= 0.05


async def test_after_the_first_token_another_continues() -> None:
    """The readers see the text once, and that it waited; the other upstream gets what was shown."""

    async def dies(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        return await goes_on(asked, writer, most=3)

    first, second = Upstream(dies), Upstream(dies)
    async with streaming(first, second) as (streams, client):
        events = await end_of(streams, await start(streams, Attachment(is_paced=False)))
        found = counts(client)
    assert words_of(events) == "".join(WORDS)
    assert isinstance(events[-1], Done)
    assert (found["lost"], found["continued"]) == (2, 2)
    assert sorted(asked_of(first, second)) == [1, 2]
    contents = {asked.body["messages"][-1]["content"] for asked in (*first.posts, *second.posts)}
    assert contents == {"Hello?", "The quiet river ", "The quiet river runs to the "}


async def test_an_error_in_the_middle_is_continued_elsewhere() -> None:
    """An upstream that is shut down in good order ends its answers by an error; another takes them up."""

    async def shuts_down(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        end = b'data: {"error": {"message": "the engine was shut down"}}\n\n'
        return bool(await says(*[delta(content=word) for word in WORDS[:2]], end)(asked, writer))

    first, second = Upstream(shuts_down, goes_on), Upstream(shuts_down, goes_on)
    async with streaming(first, second) as (streams, _):
        events = await end_of(streams, await start(streams, Attachment(is_paced=False)))
    assert words_of(events) == "".join(WORDS)


async def test_only_an_upstream_that_can_continues() -> None:
    """What an upstream of another kind cannot take up waits for one that can."""

    async def dies(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        return await goes_on(asked, writer, most=3)

    able, unable = Upstream(goes_on), Upstream(dies, owned_by="someone")
    async with streaming(able, unable) as (streams, client):
        question = first_of(client, "b", Admission(owner="u1", tenant="t1"))
        events = await end_of(streams, await start(streams, Attachment(is_paced=False), text=question))
    assert words_of(events) == "".join(WORDS)
    assert asked_of(able, unable) == [1, 1]


async def test_what_none_continues_ends_in_an_honest_error() -> None:
    """It says how much was shown, and that the question may be asked again; no other upstream is asked."""

    async def dies(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        return await goes_on(asked, writer, most=3)

    upstreams = Upstream(dies, owned_by="someone"), Upstream(dies, owned_by="someone")
    async with streaming(*upstreams) as (streams, _):
        events = await end_of(streams, await start(streams, Attachment(is_paced=False)))
    assert words_of(events) == "The quiet river "
    assert isinstance(events[-1], Error)
    assert (events[-1].code, events[-1].retryable) == ("cannot_continue", True)
    assert "after 3 tokens" in events[-1].message
    assert sum(asked_of(*upstreams)) == 1


async def test_an_answer_that_has_begun_waits_for_an_upstream_and_then_ends() -> None:
    """While all are away it waits for one to come back, as for any engine; then it may be asked for again."""

    async def stays(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await begins(delta(content=WORDS[0]))(asked, writer)

    upstreams = Upstream(stays), Upstream(stays)
    config = StreamConfig(resume_window_seconds=0.5)
    async with streaming(*upstreams, config=config, poll_seconds=0.05) as (streams, _):
        stream = await start(streams, Attachment(is_paced=False))
        await until(lambda: stream.last_seq >= 2)
        for upstream in upstreams:
            await upstream.stop()
        events = await end_of(streams, stream)
    assert words_of(events) == WORDS[0]
    assert [event.status for event in events if isinstance(event, Status)] == ["waiting"]
    assert isinstance(events[-1], Error)
    assert (events[-1].code, events[-1].retryable) == ("engine_unavailable", True)


async def test_a_refusal_of_the_request_is_the_callers_at_once() -> None:
    """What one upstream calls a bad request is not asked of the next."""
    bad = [Upstream(raw(response("400 Bad Request", b'{"message": "too warm"}', JSON))) for _ in range(2)]
    async with several(*bad) as client:
        with pytest.raises(BadRequest, match="too warm"):
            await ask(client)
    assert sum(asked_of(*bad)) == 1


async def test_a_busy_upstream_is_left_alone_for_as_long_as_it_asks() -> None:
    """A 429 moves the traffic until its Retry-After is over."""
    clock = Clock()
    first, second = Upstream(raw(response("429 Slow", b"", "Retry-After: 9")), says(*WHOLE)), Upstream(says(*WHOLE))
    async with several(first, second, clock=clock) as client:
        question = first_of(client, "a")
        for seconds in (0.0, 1.0, 7.0):
            clock.now += seconds
            assert text(await get(client, question)) == "Hello."
        assert asked_of(first, second) == [1, 3]
        clock.now += 1.5
        assert text(await get(client, question)) == "Hello."
    assert asked_of(first, second) == [2, 3]


async def test_when_all_are_busy_the_caller_gets_the_shortest_time() -> None:
    """At once, and without another request to any, until that time is over."""
    clock = Clock()
    upstreams = [Upstream(raw(response("429 Slow", b"", f"Retry-After: {seconds}"))) for seconds in (30, 9, 20)]
    async with several(*upstreams, clock=clock) as client:
        with pytest.raises(Overloaded) as caught:
            await get(client, "?")
        assert caught.value.retry_after == 9
        clock.now += 4.0
        with pytest.raises(Overloaded) as caught:
            await get(client, "?")
        assert caught.value.retry_after == 5
        assert asked_of(*upstreams) == [1, 1, 1]


async def test_three_failures_in_a_row_take_an_upstream_out_and_one_request_tries() -> None:
    """While it is on its way the others go elsewhere; its first token brings the upstream back."""
    clock, go = Clock(), asyncio.Event()

    async def waits(asked: Asked, writer: asyncio.StreamWriter) -> bool | None:
        await go.wait()
        return await says(*WHOLE)(asked, writer)

    first, second = Upstream(FAILED, FAILED, FAILED, waits), Upstream(says(*WHOLE))
    async with several(first, second, clock=clock) as client:
        question = first_of(client, "a")
        for _ in range(6):
            assert text(await get(client, question)) == "Hello."
        assert (asked_of(first, second), up(client)) == ([3, 6], {"a": 0.0, "b": 1.0})
        clock.now += 2.0
        trying = asyncio.create_task(get(client, question))
        await until(lambda: len(first.posts) == 4)
        assert text(await get(client, question)) == "Hello."
        assert asked_of(first, second) == [4, 7]
        go.set()
        assert text(await trying) == "Hello."
        assert up(client) == {"a": 1.0, "b": 1.0}
        assert text(await get(client, question)) == "Hello."
    assert asked_of(first, second) == [5, 7]


async def test_a_flapping_upstream_costs_no_answer() -> None:
    """It comes and goes twenty times, and cuts what it has begun; every answer comes whole from either."""
    flaps, steady = Upstream(raw(b"", keeps=False), says(*WHOLE)), Upstream(says(*WHOLE))
    async with several(flaps, steady, poll_seconds=0.02) as client:
        question, port = first_of(client, "a"), int(flaps.url.rsplit(":", 1)[1].split("/")[0])
        for _ in range(20):
            answers = [asyncio.create_task(get(client, question)) for _ in range(4)]
            await turns(10)
            await flaps.stop()
            for answer in answers:
                assert text(await answer) == "Hello."
            await flaps.start(port)
    assert len(steady.posts) >= 20


async def test_the_last_upstream_is_asked_though_it_fails() -> None:
    """A circuit moves requests; where there is no other it keeps none back."""
    clock = Clock()
    first, second = Upstream(*[FAILED] * 4, says(*WHOLE)), Upstream(FAILED)
    async with several(first, second, clock=clock) as client:
        for _ in range(4):
            with pytest.raises(EngineUnavailable):
                await get(client, "?")
        await until(lambda: up(client) == {"a": 0.0, "b": 0.0})
        assert text(await get(client, "?")) == "Hello."


async def test_all_dead_is_a_503_at_once() -> None:
    """Once the probes have found none, no request waits; and the answer of one that was there is the model's error."""
    upstreams = Upstream(never), Upstream(never)
    async with several(*upstreams, poll_seconds=0.05) as client:
        waiting = asyncio.create_task(outcome(client))
        await until(lambda: sum(asked_of(*upstreams)))
        for upstream in upstreams:
            await upstream.stop()
        async with asyncio.timeout(60):
            assert (await waiting)[:2] == ("engine_unavailable", True)
            await until(lambda: client.describe().state == "failed")
            with pytest.raises(EngineUnavailable) as caught:
                await client.generate(chat())
        assert (caught.value.http_status, caught.value.code) == (503, "engine_unavailable")


async def test_weights_hold_over_a_thousand_requests() -> None:
    """Of requests that have nothing in common each upstream gets its share."""
    upstreams = [Upstream(says(*WHOLE)) for _ in range(3)]
    weights = (3, 2, 1)
    async with several(*upstreams, own=[{"weight": weight} for weight in weights]) as client:
        limit = asyncio.Semaphore(12)

        async def get_one(number: int) -> None:
            async with limit:
                await get(client, f"question {number}")

        await asyncio.gather(*(get_one(number) for number in range(1000)))
    shares = [number / 1000 for number in asked_of(*upstreams)]
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - weight / 6) < 0.06, shares  # four standard deviations of 1,000 draws


async def test_a_conversation_stays_with_its_upstream() -> None:
    """Its prompts begin alike, so that its upstream has them in its cache; another tenant's may be elsewhere."""
    upstreams = [Upstream(says(*WHOLE)) for _ in range(4)]
    async with several(*upstreams) as client:
        request = chat("How does it begin?")
        for number in range(8):
            messages = (*(request.messages or ()), *(chat(f"turn {number}").messages or ()))
            longer = chat(messages=messages)
            await collect(await client.generate(longer, TENANT))  # type: ignore[arg-type]
        assert sorted(asked_of(*upstreams)) == [0, 0, 0, 8]
        for number in range(40):
            other = Admission(owner="o", tenant="t", salt=f"salt {number}")
            await collect(await client.generate(request, other))  # type: ignore[arg-type]
        assert all(asked_of(*upstreams))


async def test_affinity_gives_way_when_its_upstream_is_clearly_busier() -> None:
    """Of twelve answers of one prompt that run together its upstream has a quarter and one more than its share."""
    upstreams = [Upstream(begins(*PLAIN)) for _ in range(3)]
    async with several(*upstreams) as client:
        running = [await client.generate(chat("The same."), TENANT) for _ in range(12)]
        found = sorted(asked_of(*upstreams))
        for generation in running:
            generation.cancel()
    assert found == [0, 6, 6]


async def test_each_has_its_own_places_and_waits_are_shared() -> None:
    """What finds every place taken goes to the upstream that is free first; one more than may wait is refused."""
    go = [asyncio.Event(), asyncio.Event()]

    def waits(event: asyncio.Event) -> Callable[..., Any]:
        async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
            await event.wait()
            writer.write(STREAM_HEAD + b"".join(map(chunk, WHOLE)) + LAST_CHUNK)

        return answer

    first, second = Upstream(waits(go[0])), Upstream(waits(go[1]))
    own = [{"max_concurrent": 1, "max_waiting": 1}, {"max_concurrent": 2, "max_waiting": 1}]
    async with several(first, second, own=own) as client:
        running = [asyncio.create_task(client.generate(chat("one"), TENANT)) for _ in range(3)]
        await until(lambda: client.stats().running == 3)
        await until(lambda: asked_of(first, second) == [1, 2])
        waiting = [await client.generate(chat("one"), TENANT) for _ in range(2)]
        await until(lambda: client.stats().waiting == 2)
        with pytest.raises(Overloaded, match="2 answers are waiting"):
            await client.generate(chat("one"), TENANT)
        go[1].set()
        answers = [await collect(one) for one in waiting]  # type: ignore[arg-type]
        assert asked_of(first, second) == [1, 4]
        go[0].set()
        answers += [await collect(await one) for one in running]  # type: ignore[arg-type]
    assert [text(events) for events in answers] == ["Hello."] * 5
    assert [answers[0][0], answers[1][0]] == [Status(status="queued", step=1), Status(status="queued", step=2)]


async def test_a_full_queue_names_a_time_by_what_waits() -> None:
    """How long recent answers took, times the requests before it, over the places of the upstreams that are there."""
    clock, go = Clock(), asyncio.Event()

    async def waits(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        writer.write(STREAM_HEAD + b"".join(map(chunk, WHOLE)) + LAST_CHUNK)

    upstreams = Upstream(waits), Upstream(waits)
    async with several(*upstreams, clock=clock, max_concurrent=1, max_waiting=1) as client:
        first = asyncio.create_task(get(client, "first"))
        await until(lambda: sum(asked_of(*upstreams)))
        clock.now += 20.0
        go.set()
        await first
        go.clear()
        asks = [asyncio.create_task(get(client, "again")) for _ in range(4)]
        await until(lambda: client.stats().waiting == 2)
        with pytest.raises(Overloaded) as caught:
            await client.generate(chat("again"), TENANT)
        go.set()
        await asyncio.gather(*asks)
    assert caught.value.retry_after == 30  # three requests of 20 s in two places


async def test_requests_that_wait_are_told_when_no_upstream_is_left() -> None:
    """They end within the time of a probe, and not after QUEUE_SECONDS."""
    upstreams = Upstream(never), Upstream(never)
    async with several(*upstreams, max_concurrent=1, queue_seconds=600.0, poll_seconds=0.05) as client:
        running = [asyncio.create_task(client.generate(chat(), TENANT)) for _ in range(2)]
        await until(lambda: client.stats().running == 2)
        waiting = await client.generate(chat(), TENANT)
        await until(lambda: client.stats().waiting == 1)
        for upstream in upstreams:
            await upstream.stop()
        async with asyncio.timeout(60):
            await collect(waiting)  # type: ignore[arg-type]
        assert client.stats().waiting == 0
        await asyncio.gather(*running, return_exceptions=True)


async def test_a_slow_reader_holds_its_upstream_and_returns_to_it() -> None:
    """Not reading is the back-pressure, as with one upstream; parked, the answer is continued where its prompt is."""
    upstreams = [Upstream(begins(*[delta(content="x")] * 20)) for _ in range(3)]
    async with several(*upstreams, lead_tokens=8, hold_seconds=0.01) as client:
        request, _, resume = chatting(reader_tokens=(0,))
        generation = await client.generate(request, TENANT, resume)
        await collect(generation)  # type: ignore[arg-type]
        assert generation.parked is not None
        assert (generation.parked.reason, counts(client)["holds"]) == ("lead", 1)
        again = await client.generate(request, TENANT, resume)
        await until(lambda: sum(asked_of(*upstreams)) == 2)
        assert sorted(asked_of(*upstreams)) == [0, 0, 2]
        again.cancel()


async def test_what_one_upstream_lacks_the_model_lacks() -> None:
    """A field is refused whichever upstream would get the request, so that no answer depends on that."""
    able, unable = Upstream(says(*WHOLE)), Upstream(says(*WHOLE), owned_by="someone")
    async with several(able, unable) as client:
        for number in range(6):
            with pytest.raises(BadRequest, match=r"top_k is not supported by this model's server \(openai\)"):
                await get(client, f"{number}", top_k=5)
    assert asked_of(able, unable) == [0, 0]


async def test_names_of_the_model_and_keys_are_each_upstreams_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is seen by the other upstream."""
    monkeypatch.setenv("KEY_A", "sk-a")
    monkeypatch.setenv("KEY_B", "sk-b")
    first, second = Upstream(says(*WHOLE)), Upstream(says(*WHOLE))
    own = [{"remote_model": "org/m", "api_key_env": "KEY_A"}, {"api_key_env": "KEY_B"}]
    async with several(first, second, own=own, remote_model="m") as client:
        await get(client, first_of(client, "a"))
        await get(client, first_of(client, "b"))
        assert "sk-" not in repr(client.stats()) + repr(client.describe())
    for upstream, model, key in ((first, "org/m", "sk-a"), (second, "m", "sk-b")):
        assert [asked.body["model"] for asked in upstream.posts] == [model]
        assert {asked.headers["authorization"] for asked in upstream.asked} == {f"Bearer {key}"}


def test_an_upstream_has_the_name_of_its_host() -> None:
    """Without the login that an address may have; two of one name are refused."""
    assert Server(url="http://user:sk-1@10.0.0.5:8000/v1").label == "10.0.0.5:8000"
    assert Server(url="https://llm.example.org/v1").label == "llm.example.org"
    with pytest.raises(ValueError, match="two UPSTREAMS have the name x:1"):
        RemoteConfig(alias="m", upstreams=(Server(url="http://x:1/a"), Server(url="http://x:1/b")))
    with pytest.raises(ValueError, match="a URL or UPSTREAMS"):
        RemoteConfig(alias="m")


@asynccontextmanager
async def streaming(
    *upstreams: Upstream, config: StreamConfig | None = None, **fields: Any
) -> AsyncIterator[tuple[Streams, RemoteClient]]:
    async with several(*upstreams, **fields) as client:
        streams = Streams({"m": client}, MemoryLog(), config or StreamConfig())
        try:
            yield streams, client
        finally:
            await streams.aclose()

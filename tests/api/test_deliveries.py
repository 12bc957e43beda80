"""One pipeline by every delivery, to every end: one terminal event, the same text, and the same error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest
from channels.testing import WebsocketCommunicator

from streamserve import Run, pipeline, routing, run_pipeline
from streamserve.clients.pipeline.client import forget
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.events import Done, Error, Token
from streamserve.protocol.grammar import check_events
from streamserve.streams.reader.follow import collect
from streamserve.streams.stream import Stream
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.stream_checks import check_native, parse_sse, text_of
from tests.support.sites.batch_runs import Tenant, jsonl, line

pytestmark = pytest.mark.django_db(transaction=True)

NUM_TOKENS = 6
MORE = " And so it ends."


class Told:
    """A pipeline that ends as its question says; one that waits goes on with `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.text = ""  # that its model gave

    async def __call__(self, run: Run) -> None:
        way = run.question
        answer = await run.step("Answering", run.generate, "x", max_tokens=NUM_TOKENS, seed=3, ignore_eos=True, of=1)
        self.text = str(answer)
        if way == "error":
            raise StreamserveError("It broke.", code="it_broke")
        if way == "wait":
            await self.go.wait()
        await run.say(MORE)


class Site:
    """What the deliveries ask."""

    def __init__(self, key: str, told: Told) -> None:
        self.key, self.told = key, told
        self.caller, self.tenant = Caller(key=key), Tenant(key)
        self.leave: Callable[[], Awaitable[None]] | None = None  # set by deliveries that can be left by their reader

    def stream(self) -> Stream:
        """Return the one stream there is."""
        (stream,) = site.get_streams().all()
        return stream


def asked(way: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": way}]}


async def by_json(on: Site, way: str) -> tuple[str | None, str]:
    whole = (await on.caller.post("/pipelines/told", asked(way))).json()
    return (None, whole["error"]["code"]) if "error" in whole else (whole["text"], whole["finish_reason"])


async def by_chat(on: Site, way: str) -> tuple[str | None, str]:
    whole = (await on.caller.post("/v1/chat/completions", {**asked(way), "model": "told"})).json()
    if "error" in whole:
        return None, whole["error"]["code"]
    (choice,) = whole["choices"]
    return choice["message"]["content"], choice["finish_reason"]


async def by_stream(on: Site, way: str) -> tuple[str | None, str]:
    response = await on.caller.post("/pipelines/told", {**asked(way), "stream": True})
    on.leave = response.streaming_content.aclose
    frames = check_native(await body_of(response))
    end = frames[-1].json
    return (text_of(frames), end["finish_reason"]) if frames[-1].event == "done" else (None, end["code"])


async def by_chat_stream(on: Site, way: str) -> tuple[str | None, str]:
    response = await on.caller.post("/v1/chat/completions", {**asked(way), "model": "told", "stream": True})
    on.leave = response.streaming_content.aclose
    chunks = [json.loads(frame.data) for frame in parse_sse(await body_of(response)) if frame.data != "[DONE]"]
    if "error" in chunks[-1]:
        return None, chunks[-1]["error"]["code"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(one["delta"].get("content") or "" for one in choices), choices[-1]["finish_reason"]


async def by_socket(on: Site, way: str) -> tuple[str | None, str]:
    headers = [(b"host", b"testserver"), (b"authorization", f"Bearer {on.key}".encode())]
    socket = WebsocketCommunicator(routing.application, "/ws/streams", headers=headers)
    assert (await socket.connect())[0]
    await socket.send_json_to({"type": "start", "request": {**asked(way), "model": "told"}})
    text = ""
    try:
        while True:
            message = json.loads(await socket.receive_from(timeout=30))
            text += message["data"]["text"] if message.get("event") == "token" else ""
            if message.get("event") == "done":
                return text, message["data"]["finish_reason"]
            if message.get("event") == "error":
                return None, message["data"]["code"]
    finally:
        await socket.disconnect()


async def by_python(on: Site, way: str) -> tuple[str | None, str]:
    try:
        result = await run_pipeline("told", way, tenant="nightly")
    except StreamserveError as error:
        return None, error.code
    return result.text, result.finish_reason


async def by_batch(on: Site, way: str) -> tuple[str | None, str]:
    row = {**line("a", "/pipelines/told"), "body": asked(way)}
    batch = await on.tenant.run(jsonl([row]), "/pipelines/told")
    (one,) = await on.tenant.lines(batch["output_file_id"] or batch["error_file_id"])
    body = one["response"]["body"]
    return (None, body["error"]["code"]) if "error" in body else (body["text"], body["finish_reason"])


async def by_job(on: Site, way: str) -> tuple[str | None, str]:
    queued = (await on.caller.post("/jobs", {**asked(way), "pipeline": "told"})).json()
    for _ in range(600):
        job = (await on.caller.get(f"/jobs/{queued['job_id']}")).json()
        if job["status"] == "done":
            return job["result"]["text"], job["result"]["finish_reason"]
        if job["status"] in ("failed", "cancelled"):
            return None, job["error"]["code"] if job["error"] else job["status"]
        await asyncio.sleep(0.05)
    raise AssertionError(job)


DELIVERIES = {
    "json": by_json,
    "stream": by_stream,
    "chat": by_chat,
    "chat stream": by_chat_stream,
    "socket": by_socket,
    "python": by_python,
    "batch": by_batch,
    "job": by_job,
}
# Rows and jobs have no reader who could leave, and are stopped by routes of theirs: tests/api/batch, tests of jobs.
WITH_READER = [name for name in DELIVERIES if name not in ("batch", "job")]
# What a reader who leaves ends; the other runs go on.
ENDED_WITH_READER = {"json", "chat", "chat stream", "python"}


@pytest.fixture
async def on(transactional_db: Any, alice_key: str) -> AsyncIterator[Site]:
    told = Told()

    async def tell(run: Run) -> None:
        await told(run)

    pipeline("told")(tell)
    try:
        await until_ready()
        yield Site(alice_key, told)
        await site.reset()
    finally:
        forget("told")


async def in_log(stream: Stream) -> tuple[str, str]:
    """Return text and end as the log has them, whose events keep the grammar: one terminal event, the last."""
    events = [logged.event for logged in await collect(site.get_streams(), stream)]
    check_events(events)
    end = events[-1]
    text = "".join(event.text for event in events if isinstance(event, Token))
    return text, end.finish_reason if isinstance(end, Done) else end.code if isinstance(end, Error) else ""


async def waiting(on: Site) -> Stream:
    """Return the stream of a run that has answered, and waits."""
    streams = site.get_streams()
    await until(lambda: any(stream.transcript.num_tokens == NUM_TOKENS for stream in streams.all()))
    return on.stream()


@pytest.mark.parametrize("name", DELIVERIES)
async def test_to_the_end(on: Site, name: str) -> None:
    """The text of the model, and what the author says after it."""
    assert await DELIVERIES[name](on, "done") == (on.told.text + MORE, "length")
    assert on.told.text
    for stream in site.get_streams().all():
        assert await in_log(stream) == (on.told.text + MORE, "length")


@pytest.mark.parametrize("name", DELIVERIES)
async def test_to_an_error(on: Site, name: str) -> None:
    """A run that fails half way is its error's code by every delivery, and never half an answer."""
    assert await DELIVERIES[name](on, "error") == (None, "it_broke")
    for stream in site.get_streams().all():
        assert await in_log(stream) == (on.told.text, "it_broke")


@pytest.mark.parametrize("name", WITH_READER)
async def test_to_a_stop(on: Site, name: str) -> None:
    """Who stops it has what was there; a delivery of whole answers says `cancelled`."""
    delivery = asyncio.create_task(DELIVERIES[name](on, "wait"))
    stream = await waiting(on)
    await stream.stop()
    text, end = await delivery
    assert end == "cancelled"
    assert text == (on.told.text if name in ("stream", "socket") else None)
    assert await in_log(stream) == (on.told.text, "cancelled")


@pytest.mark.parametrize("name", WITH_READER)
async def test_to_a_reader_who_leaves(on: Site, name: str) -> None:
    """Who waits for a whole answer ends the run by leaving; a stream goes on, and is there for its reader's return."""
    delivery = asyncio.create_task(DELIVERIES[name](on, "wait"))
    stream = await waiting(on)
    delivery.cancel()
    with suppress(asyncio.CancelledError):
        await delivery
    if on.leave is not None:
        await on.leave()
    if name in ENDED_WITH_READER:
        async with asyncio.timeout(60):
            await stream.ended.wait()
        assert await in_log(stream) == (on.told.text, "abandoned")
        return
    on.told.go.set()
    response = await on.caller.get(f"/streams/{stream.id}/events", **{"last-event-id": f"{stream.log_id}-1"})
    async with aclosing(response.streaming_content) as chunks:
        frames = parse_sse(b"".join([chunk async for chunk in chunks]))
    assert (text_of(frames), frames[-1].json["finish_reason"]) == (on.told.text + MORE, "length")
    assert await in_log(stream) == (on.told.text + MORE, "length")

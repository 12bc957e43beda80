"""Laws of the framework-free app: the Django side's routes and errors, for callers that the host names."""

from __future__ import annotations

import asyncio
import json

import pytest

from streamserve.asgi import Caller, anyone, app
from streamserve.asgi.application import StreamApp
from streamserve.asgi.types import Message, Scope
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.limits import Limits
from tests.support.apps.app_calls import GOOD, ask, by_header, call, error_of, header, started
from tests.support.bodies.bad_bodies import bad_bodies
from tests.support.bodies.bad_fields import NATIVE, OPENAI
from tests.support.checks.joined import with_joined_text
from tests.support.checks.message_checks import check_message
from tests.support.checks.run_checks import check_run, events_of
from tests.support.checks.stream_checks import check_native, check_native_part, check_openai, check_tokens
from tests.support.checks.ui_message_checks import check_chunks
from tests.support.streams.hand_made import Gate, until

PATHS = {NATIVE: "/streams", OPENAI: "/v1/chat/completions"}


async def test_an_answer_in_every_form(ai: StreamApp) -> None:
    """Native, tokens, by query, OpenAI streamed and whole give the same text, each with the headers of a stream."""
    native = await ask(ai, "POST", "/streams", GOOD)
    text = "".join(frame.json["text"] for frame in check_native(native.body) if frame.event == "token")
    assert (native.start["status"], header(native, "x-accel-buffering")) == (200, "no")
    assert header(native, "content-type") == "text/event-stream; charset=utf-8"
    assert text
    assert check_tokens((await ask(ai, "POST", "/streams", {**GOOD, "format": "tokens"})).body) == text
    plain = await ask(ai, "GET", "/streams/new?prompt=still%20there%3F&max_tokens=8&seed=7&format=text")
    assert plain.body.decode() == text
    chunks = check_openai((await ask(ai, "POST", PATHS[OPENAI], {**GOOD, "stream": True})).body)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
    whole = await ask(ai, "POST", PATHS[OPENAI], GOOD)
    assert json.loads(whole.body)["choices"][0]["message"]["content"] == text
    listed = json.loads((await ask(ai, "GET", "/v1/models")).body)
    assert [model["id"] for model in listed["data"]] == ["echo"]


async def test_a_chat_of_the_ai_sdk(ai: StreamApp) -> None:
    """A UI message, replayed by the chat's id for its caller alone; nothing is kept without a database."""
    question = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "still there?"}]}
    body = {"id": "c1", "messages": [question], "max_tokens": 8, "seed": 7}
    asked = await ask(ai, "POST", "/ai/chat", body)
    page = check_chunks(asked.body)
    assert page.message["id"] == header(asked, "x-stream-id")
    assert check_chunks((await ask(ai, "GET", "/ai/chat/c1/stream")).body) == page
    assert (await ask(ai, "GET", "/ai/chat/c1/stream", None, "bob")).start["status"] == 204
    assert json.loads((await ask(ai, "GET", "/ai/chat/c1")).body) == {"id": "c1", "messages": []}
    assert json.loads((await ask(ai, "POST", "/ai/chat/c1/stop", {})).body) == {"id": "c1", "stopped": False}


async def test_a_reader_reports_what_it_measured(ai: StreamApp) -> None:
    """Once, kept with the stream in memory; another caller finds no such stream."""
    asked = await ask(ai, "POST", "/streams", GOOD)
    path = f"/streams/{header(asked, 'x-stream-id')}"
    times = {"headers": 90.0, "first_delta": 91.0, "ended": 92.0, "hidden": True}
    assert (await ask(ai, "POST", f"{path}/timings", times, "bob")).start["status"] == 404
    replies = [json.loads((await ask(ai, "POST", f"{path}/timings", times)).body)["counted"] for _ in range(2)]
    assert replies == [True, False]
    shown = json.loads((await ask(ai, "GET", path)).body)["reader"]
    assert shown.items() >= times.items()
    assert sum(shown["whole"].values()) == pytest.approx(92.0, abs=0.01)


async def test_an_agent_in_a_thread(ai: StreamApp) -> None:
    """A run of AG-UI, shown again by its id, for its caller alone; without a database a thread is kept in memory."""
    body = {"threadId": "t1", "runId": "r1", "messages": [{"id": "m1", "role": "user", "content": "still there?"}]}
    body["forwardedProps"] = {"max_tokens": 8, "seed": 7}
    run = await ask(ai, "POST", "/ag-ui/echo", body)
    events = events_of(run.body)
    check_run(events)
    again = await ask(ai, "POST", "/ag-ui/echo", body)
    assert header(again, "x-stream-id") == header(run, "x-stream-id")
    assert with_joined_text(events_of(again.body)) == with_joined_text(events)
    other = await ask(ai, "POST", "/ag-ui/echo", body, "bob")
    assert header(other, "x-stream-id") != header(run, "x-stream-id")
    followed = await ask(ai, "GET", "/ag-ui/echo/t1/stream", last_event_id=f"{header(run, 'x-stream-id')}")
    assert followed.start["status"] in (204, 410)
    resumed = await ask(ai, "GET", "/ag-ui/echo/t1/stream?after=3")
    check_run(events_of(resumed.body), is_part=True)
    stopped = await ask(ai, "POST", "/ag-ui/echo/t1/stop", {})
    assert json.loads(stopped.body) == {"threadId": "t1", "stopped": False}


async def test_a_message_in_anthropics_shape(ai: StreamApp) -> None:
    """Streamed, whole, resumed, counted and refused, for the same callers."""
    body = {"messages": [{"role": "user", "content": "still there?"}], "max_tokens": 8, "seed": 7}
    streamed = await ask(ai, "POST", "/v1/messages", {**body, "stream": True})
    message = check_message(streamed.body)
    whole = await ask(ai, "POST", "/v1/messages", body)
    assert json.loads(whole.body)["content"] == message["content"]
    assert header(whole, "request-id") == header(whole, "x-request-id")
    path = f"/v1/streams/{header(streamed, 'x-stream-id')}/events"
    assert check_message((await ask(ai, "GET", path, anthropic_version="2023-06-01")).body) == message
    counted = json.loads((await ask(ai, "POST", "/v1/messages/count_tokens", body)).body)
    usage = message["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    refused = await ask(ai, "POST", "/v1/messages", {**body, "max_tokens": 0})
    assert error_of(refused) == (400, "invalid_value")
    assert json.loads(refused.body)["request_id"] == header(refused, "request-id")


async def test_resume_state_and_the_end(ai: StreamApp) -> None:
    """A reader gets the events after its last one by Last-Event-ID, by `after` and at /streams/new; at the end, 204."""
    whole = await ask(ai, "POST", "/streams", GOOD)
    frames, stream_id = check_native(whole.body), header(whole, "x-stream-id")
    path = f"/streams/{stream_id}/events"
    for frame in frames[:-1]:
        rest = await ask(ai, "GET", path, last_event_id=frame.id)
        assert header(rest, "streamserve-from") == str(frame.seq + 1)
        assert check_native(rest.body, after=frame.seq)[-1] == frames[-1]
        by_number = await ask(ai, "GET", f"{path}?after={frame.seq}")
        at_new = await ask(ai, "GET", "/streams/new?prompt=other", last_event_id=frame.id)
        assert with_joined_text(by_number.body) == with_joined_text(at_new.body) == with_joined_text(rest.body)
    assert (await ask(ai, "GET", path, last_event_id=frames[-1].id)).start["status"] == 204
    state = json.loads((await ask(ai, "GET", f"/streams/{stream_id}")).body)
    assert (state["state"], state["finish_reason"], state["last_seq"]) == ("finished", "length", frames[-1].seq)
    assert error_of(await ask(ai, "GET", f"{path}?after=99999")) == (410, "unknown_event_id")
    assert error_of(await ask(ai, "GET", f"{path}?after=one")) == (400, "invalid_value")
    assert (await ask(ai, "GET", f"{path}?after=99999", accept="text/event-stream")).start["status"] == 204


async def test_a_stop_keeps_what_was_seen(ai: StreamApp, gate: Gate) -> None:
    """A stop ends the reader's stream where it was seen; a second stop changes nothing."""
    reader, stream_id = await started(ai, gate)
    stopping = call(ai, "POST", f"/streams/{stream_id}/stop", {"seen_seq": 1})
    await stopping.task
    gate.open()
    await reader.task
    assert check_native(reader.body)[-1].json["finish_reason"] == "cancelled"
    again = await ask(ai, "POST", f"/streams/{stream_id}/stop", b"")
    assert json.loads(again.body) == json.loads(stopping.body)
    assert json.loads(again.body)["finish_reason"] == "cancelled"


async def test_a_request_without_a_caller_is_401(ai: StreamApp) -> None:
    """Without a caller every route but the probes gives a 401 with its remedy; nothing is read or started."""
    stream_id = "0" * 32
    for method, path in [
        ("POST", "/streams"),
        ("GET", "/streams/new?prompt=x"),
        ("GET", f"/streams/{stream_id}"),
        ("GET", f"/streams/{stream_id}/events"),
        ("POST", f"/streams/{stream_id}/stop"),
        ("POST", PATHS[OPENAI]),
        ("GET", "/v1/models"),
    ]:
        refused = await ask(ai, method, path, GOOD, user="")
        assert error_of(refused) == (401, "unauthorized")
        assert header(refused, "www-authenticate") == "Bearer"
    assert ai.streams.all() == []
    assert json.loads((await ask(ai, "GET", "/livez", user="")).body) == {"live": True}
    assert json.loads((await ask(ai, "GET", "/readyz", user="")).body)["ready"] is True


async def test_another_owners_stream_is_unknown(ai: StreamApp) -> None:
    """A caller that may not read a stream gets the 404 of an id that never was; a tenant shares its streams."""
    mine = await ask(ai, "POST", "/streams", GOOD, user="ann@team")
    stream_id, last_id = header(mine, "x-stream-id"), check_native(mine.body)[0].id
    for method, path in [("GET", ""), ("GET", "/events"), ("POST", "/stop")]:
        for user, name in [("eve", stream_id), ("eve@other", stream_id), ("ann@team", "f" * 32)]:
            client = await ask(ai, method, f"/streams/{name}{path}", user=user)
            assert error_of(client) == (404, "stream_not_found")
    client = await ask(ai, "GET", "/streams/new?prompt=x", user="eve", last_event_id=last_id)
    assert error_of(client) == (410, "stream_expired")
    assert (await ask(ai, "GET", f"/streams/{stream_id}", user="bob@team")).start["status"] == 200


def test_authentication_is_required() -> None:
    """`authenticate` must be given and able to refuse; serving every caller needs the explicit `anyone`."""
    with pytest.raises(TypeError, match="authenticate"):
        app(models={"echo": "echo"})  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="anyone"):
        app(models={"echo": "echo"}, authenticate=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one"):
        app(models={}, authenticate=anyone)
    with pytest.raises(ValueError, match="None for an unknown caller"):
        Caller("")


@pytest.mark.parametrize("dialect", PATHS)
async def test_a_wrong_body_is_never_a_500(ai: StreamApp, dialect: str) -> None:
    """Every wrong body gets the status, code and param that the Django side gives."""
    corpus = [bad for bad in bad_bodies() if bad.is_for(dialect)]
    assert len(corpus) >= 200
    wrong = []
    for bad in corpus:
        client = await ask(ai, "POST", PATHS[dialect], bad.body, content_type=bad.content_type)
        error = json.loads(client.body)["error"]
        got = (client.start["status"], error["code"], bool(error["message"]))
        if got != (bad.status, bad.code, True) or (bad.param is not None and error["param"] != bad.param):
            wrong.append(f"{bad.name}: {got} {error}")
    assert wrong == []
    assert check_native((await ask(ai, "POST", "/streams", GOOD)).body)[-1].json["totalTokens"] == 8


async def test_a_body_over_the_limit_is_not_read_to_its_end(echo: ThreadClient) -> None:
    """Of an announced body nothing is read; of an unannounced one no more than the limit and one message."""
    received: list[Message] = []
    sent: list[Message] = []

    async def receive() -> Message:
        received.append({"type": "http.request", "body": b" " * 100, "more_body": True})
        return received[-1]

    async def send(message: Message) -> None:
        sent.append(message)

    async with app(models={"echo": echo}, authenticate=anyone, limits=Limits(max_body_bytes=1000)) as ai:
        scope = {"type": "http", "method": "POST", "path": "/streams", "headers": [(b"content-length", b"1001")]}
        await ai(scope, receive, send)
        assert (sent[0]["status"], len(received)) == (413, 0)
        await ai({**scope, "headers": []}, receive, send)
        assert (sent[2]["status"], len(received)) == (413, 11)


async def test_wrong_verbs_and_addresses(ai: StreamApp) -> None:
    """A 405 names the allowed verbs, and a 404 is in the dialect of the address."""
    wrong = await ask(ai, "GET", "/streams")
    assert (error_of(wrong), header(wrong, "allow")) == ((405, "method_not_allowed"), "POST")
    assert error_of(await ask(ai, "GET", "/elsewhere")) == (404, "unknown_url")
    unknown = json.loads((await ask(ai, "POST", "/v1/images/generations", {})).body)
    assert unknown["error"]["type"] == "invalid_request_error"
    head = await ask(ai, "HEAD", "/livez")
    assert (head.start["status"], header(head, "content-length"), head.body) == (200, "13", b"")
    twice = await ask(ai, "GET", "/streams/new?prompt=a&prompt=b")
    assert error_of(twice) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("prefix", "scope"),
    [
        ("", {"path": "/ai/livez", "root_path": "/ai"}),
        ("", {"path": "/livez", "root_path": "/ai"}),
        ("/ai/", {"path": "/ai/livez", "root_path": ""}),
        ("/ai", {"path": "/site/ai/livez", "root_path": "/site"}),
    ],
)
async def test_it_knows_its_routes_wherever_it_is_mounted(
    echo: ThreadClient, prefix: str, scope: dict[str, str]
) -> None:
    """A route is found whether the server or mount leaves its part of the path in or takes it off."""
    async with app(models={"echo": echo}, authenticate=anyone, prefix=prefix) as ai:
        assert (await ask(ai, "GET", "/", scope=scope)).start["status"] == 200
        assert (await ask(ai, "GET", "/", scope={**scope, "path": "/aix/livez"})).start["status"] == 404


async def test_limits_are_counted_for_each_owner(echo: ThreadClient, gate: Gate) -> None:
    """The second answer of one owner is a 429 with Retry-After; another owner has a limit of its own."""
    limits = Limits(max_streams_per_principal=1, max_queued_per_principal=0)
    async with app(models={"echo": echo}, authenticate=by_header, limits=limits) as ai:
        reader, _ = await started(ai, gate)
        refused = await ask(ai, "POST", "/streams", GOOD)
        assert error_of(refused) == (429, "too_many_streams")
        assert 1 <= int(header(refused, "retry-after") or 0) <= 120
        other, _ = await started(ai, gate, user="bob")
        gate.open()
        await asyncio.gather(reader.task, other.task)
        assert check_native((await ask(ai, "POST", "/streams", GOOD)).body)


async def test_an_owners_second_answer_waits(echo: ThreadClient, gate: Gate) -> None:
    """It begins when the first one ends; a client that leaves before that waits no more."""
    async with app(models={"echo": echo}, authenticate=by_header, limits=Limits(max_streams_per_principal=1)) as ai:
        reader, _ = await started(ai, gate)
        leaving, waiting = (call(ai, "POST", path, GOOD) for path in ("/streams", "/v1/chat/completions"))
        await until(lambda: ai.streams.num_waiting == 2, "both wait")
        leaving.leave()
        await leaving.task
        assert (ai.streams.num_waiting, len(ai.streams.all())) == (1, 1)
        gate.open()
        await asyncio.gather(reader.task, waiting.task)
        assert waiting.start["status"] == 200


async def test_requests_of_anyone_are_counted_by_their_address(echo: ThreadClient, gate: Gate) -> None:
    """Where nobody is known, one address takes no other one's places."""
    limits = Limits(max_streams_per_visitor=1, max_queued_per_principal=0)
    async with app(models={"echo": echo}, authenticate=anyone, limits=limits) as ai:
        reader, _ = await started(ai, gate)
        assert error_of(await ask(ai, "POST", "/streams", GOOD)) == (429, "too_many_streams")
        other = call(ai, "POST", "/streams", GOOD, scope={"client": ("203.0.113.7", 1)})
        await until(lambda: len(ai.streams.all()) == 2, "it begins")
        gate.open()
        await asyncio.gather(reader.task, other.task)


async def test_a_disconnect_frees_the_engine(ai: StreamApp, echo: ThreadClient, gate: Gate) -> None:
    """A native reader's leaving parks its answer, which can be resumed; an OpenAI reader's ends it."""
    reader, stream_id = await started(ai, gate)
    reader.leave()
    await reader.task
    parked = ai.streams.find(stream_id)
    assert parked is not None
    assert parked.state == "parked"
    seen = check_native_part(reader.body)
    for body in ({**GOOD, "stream": True}, GOOD):
        gate.allow(0)
        client = call(ai, "POST", PATHS[OPENAI], body)
        await until(lambda: len(ai.streams.all()) > 1 and ai.streams.all()[-1].readers.num_attached == 1, "it is read")
        stream = ai.streams.all()[-1]
        client.leave()
        await client.task
        await until(lambda one=stream: one.terminal is not None, "the answer has ended")
        assert stream.summary().finish_reason == "abandoned"
    gate.open()
    await until(lambda: echo.stats().blocks_used == 0, "the engine is free")
    rest = await ask(ai, "GET", f"/streams/{stream_id}/events", last_event_id=seen[-1].id)
    assert check_native(rest.body, after=seen[-1].seq)[-1].event == "done"


async def test_a_failure_is_a_500_with_an_id(echo: ThreadClient, caplog: pytest.LogCaptureFixture) -> None:
    """The cause goes to the log, its id to the client."""

    def broken(scope: Scope) -> Caller:
        raise KeyError("secret of the site")

    async with app(models={"echo": echo}, authenticate=broken) as ai:
        failed = await ask(ai, "POST", "/streams", GOOD, x_request_id="ticket-7")
    assert error_of(failed) == (500, "internal_error")
    assert b"ticket-7" in failed.body
    assert b"secret" not in failed.body
    assert "secret of the site" in caplog.text
    assert header(failed, "x-request-id") == "ticket-7"


async def test_a_key_of_a_request_starts_one_answer(ai: StreamApp) -> None:
    """The framework-free app keeps the keys in memory, by caller."""
    first = await ask(ai, "POST", "/streams", GOOD, idempotency_key="one")
    again = await ask(ai, "POST", "/streams", GOOD, idempotency_key="one")
    other = await ask(ai, "POST", "/streams", {**GOOD, "max_tokens": 3}, idempotency_key="one")
    bobs = await ask(ai, "POST", "/streams", GOOD, "bob", idempotency_key="one")
    assert header(again, "x-stream-id") == header(first, "x-stream-id") != header(bobs, "x-stream-id")
    assert check_native(again.body)[-1].data == check_native(first.body)[-1].data
    assert error_of(other) == (422, "idempotency_key_reused")

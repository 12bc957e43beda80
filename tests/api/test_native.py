"""The native routes through Django alone (no StreamMiddleware): answers, resumes and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import check_native, parse_sse, text_of
from tests.support.streams.hand_made import Gate
from tests.support.streams.log_lines import captured_events

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]


def ask(**fields: Any) -> dict[str, Any]:
    return {"prompt": "tell me", "max_tokens": 8, "seed": 7, **fields}


async def test_an_answer_streams_with_ids_and_headers(caller: Caller) -> None:
    """SSE from `: ok` to `done`, with headers that leave caches and proxies no choice."""
    response = await caller.post("/streams", ask())
    body = await body_of(response)
    assert body.startswith(b": ok\n\n")
    frames = check_native(body)
    assert frames[-1].json["totalTokens"] == 8
    assert response["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response["Cache-Control"] == "no-cache, no-transform"
    assert response["X-Accel-Buffering"] == "no"
    assert response["Content-Encoding"] == "identity"
    assert response["Streamserve-From"] == "1"
    assert len(response["X-Stream-Id"]) == 32
    assert "Content-Length" not in response
    assert "streamserve-handover" not in response


async def test_tokens_and_text_are_the_same_answer(caller: Caller) -> None:
    """Three formats, one text."""
    native = text_of(check_native(await body_of(await caller.post("/streams", ask()))))
    tokens = parse_sse(await body_of(await caller.post("/streams", ask(format="tokens"))))
    text = await body_of(await caller.post("/streams", ask(format="text")))
    assert tokens[-1].data == "[DONE]"
    assert "".join(frame.json["token"] for frame in tokens[:-1]) == native == text.decode()


async def test_a_row_records_how_its_stream_ended(caller: Caller, site_gate: Gate) -> None:
    """Owner, counts, times; the request is deleted, and the text was never kept."""
    await site.reset()
    await until_ready()
    site_gate.allow(0)
    response = await caller.post("/streams", ask(prompt="a secret question"))
    row = await StreamRow.objects.aget()
    assert (row.state, row.request["request"]["prompt"]) == ("running", "a secret question")
    site_gate.open()
    await body_of(response)
    await site.reset()
    row = await StreamRow.objects.aget()
    assert (row.state, row.finish_reason, row.completion_tokens) == ("finished", "length", 8)
    assert (row.request, row.text) == (None, "")
    assert row.ttft_seconds is not None
    assert row.tenant.startswith("user:")
    assert row.owner.startswith("key:")


async def test_the_state_of_a_stream(caller: Caller) -> None:
    """Current numbers from memory, final ones from the row."""
    response = await caller.post("/streams", ask())
    await body_of(response)
    path = f"/streams/{response['X-Stream-Id']}"
    state = (await caller.get(path)).json()
    assert state["state"] == "finished"
    assert state["finish_reason"] == "length"
    assert state["usage"]["completion_tokens"] == 8
    assert state["resumable"] is True
    await site.reset()
    kept = (await caller.get(path)).json()
    assert (kept["state"], kept["finish_reason"], kept["resumable"]) == ("finished", "length", False)


async def test_a_reader_acknowledges_what_it_shows(caller: Caller, lonely_key: str) -> None:
    """By the id of its response; the engine keeps to it. Another id, or another tenant's, counts nothing."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.005}):
        await until_ready()
        response = await caller.post("/streams", ask(max_tokens=4000, ignore_eos=True))
        path, reader_id = f"/streams/{response['X-Stream-Id']}/ack", response["Streamserve-Reader"]
        pieces = aiter(response.streaming_content)
        body = b""
        while body.count(b"event: token") < 3:
            body += await anext(pieces)
        stream = site.get_site().streams.find(response["X-Stream-Id"])
        assert stream is not None
        (reader,) = stream.readers.attached
        seq = parse_sse(body)[-1].seq
        taken = await caller.post(path, {"reader": reader_id, "seq": seq - 1, "away": True})
        assert (taken.status_code, taken.json()) == (200, {"counted": True})
        assert (reader.received_seq, reader.is_away) == (seq - 1, True)
        reader.acked_at += 3600.0  # a moment ago, however long the next call takes
        refused = [
            (await caller.post(path, body), code)
            for body, code in (
                ({"reader": reader_id, "seq": seq - 1}, "too_many_acks"),
                ({"reader": reader_id}, "missing_field"),
                ({"reader": reader_id, "seq": 1, "away": 1}, "invalid_type"),
            )
        ]
        assert [one.json()["error"]["code"] for one, _ in refused] == [code for _, code in refused]
        assert [one.status_code for one, _ in refused] == [429, 400, 400]
        for one, target, body in (
            (Caller(key=lonely_key), path, {"reader": reader_id, "seq": 1}),
            (caller, path, {"reader": "0" * 16, "seq": 1}),
            (caller, f"/streams/{'0' * 32}/ack", {"reader": reader_id, "seq": 1}),
        ):
            nothing = await one.post(target, body)
            assert (nothing.status_code, nothing.json()) == (200, {"counted": False})
            assert nothing.headers["connection"] == "close"  # the next may come to another process
        caller.client.defaults["http_version"] = "2"  # it has no such header
        nothing = await caller.post(path, {"reader": "0" * 16, "seq": 1})
        assert (nothing.json(), "connection" in nothing.headers) == ({"counted": False}, False)
        assert reader.received_seq == seq - 1
        reader.acked_at = 0.0  # long ago
        assert (await caller.post(path, {"reader": reader_id, "seq": 4001})).json()["error"]["code"] == "not_sent"
        reader.acked_at = 0.0  # long ago
        assert (await caller.post(path, {"reader": reader_id, "seq": seq})).json() == {"counted": True}
        assert not reader.is_away
        await stream.stop()
        await response.streaming_content.aclose()


async def test_events_resume_after_any_event(caller: Caller) -> None:
    """By `after` and by Last-Event-ID: the rest, without a gap or a double."""
    response = await caller.post("/streams", ask(max_tokens=20))
    frames = check_native(await body_of(response))
    path = f"/streams/{response['X-Stream-Id']}/events"
    whole = text_of(frames)
    for index, frame in enumerate(frames[:-1]):
        by_number = await caller.get(f"{path}?after={frame.seq}")
        by_id = await caller.get(path, **{"last-event-id": frame.id})
        rest = check_native(await body_of(by_number), after=frame.seq)
        assert text_of(frames[: index + 1]) + text_of(rest) == whole
        assert text_of(check_native(await body_of(by_id), after=frame.seq)) == text_of(rest)
        assert by_id["Streamserve-From"] == str(frame.seq + 1)


async def test_a_reader_that_has_the_end_gets_204(caller: Caller) -> None:
    """It stops an EventSource."""
    response = await caller.post("/streams", ask())
    last = check_native(await body_of(response))[-1]
    assert (await caller.get(f"/streams/{response['X-Stream-Id']}/events?after={last.seq}")).status_code == 204
    assert (await caller.get("/streams/new?prompt=x", **{"last-event-id": last.id})).status_code == 204


async def test_events_that_are_gone_are_410_or_204(caller: Caller) -> None:
    """410 for a program, 204 for an EventSource; a foreign or unknown event id never starts an answer."""
    response = await caller.post("/streams", ask())
    await body_of(response)
    await site.reset()
    sse = {"accept": "text/event-stream"}
    path = f"/streams/{response['X-Stream-Id']}/events"
    assert (await caller.get(path)).status_code == 410
    assert (await caller.get(path, **sse)).status_code == 204
    for event_id in ("abcdefabcdef-3", "nonsense", "-", "a" * 5000):
        assert (await caller.get("/streams/new?prompt=x", **{"last-event-id": event_id})).status_code == 410
        headers = {**sse, "last-event-id": event_id}
        assert (await caller.get("/streams/new?prompt=x", **headers)).status_code == 204
    assert await StreamRow.objects.acount() == 1


async def test_an_event_source_starts_and_resumes(caller: Caller) -> None:
    """GET /streams/new starts one; with the id of its event it continues the same one."""
    response = await caller.get("/streams/new?prompt=tell+me&max_tokens=12&seed=3")
    frames = check_native(await body_of(response))
    again = await caller.get("/streams/new?prompt=tell+me", **{"last-event-id": frames[1].id})
    assert again["X-Stream-Id"] == response["X-Stream-Id"]
    check_native(await body_of(again), after=frames[1].seq)
    assert await StreamRow.objects.acount() == 1


async def test_stop_is_idempotent_and_cuts_what_is_kept(caller: Caller) -> None:
    """`done` with `cancelled` and `kept_seq`; a second stop changes nothing."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "STORE": True, "ECHO_STEP_SECONDS": 0.01}):
        await until_ready()
        response = await caller.post("/streams", ask(max_tokens=1000, ignore_eos=True))
        chunks = aiter(response)
        got = b""
        while got.count(b"event: token") < 4:
            got += await anext(chunks)
        path = f"/streams/{response['X-Stream-Id']}"
        seen = parse_sse(got)[-2]
        stopped = await caller.post(f"{path}/stop", {"seen_seq": seen.seq})
        assert (stopped.json()["state"], stopped.json()["finish_reason"]) == ("finished", "cancelled")
        got += b"".join([chunk async for chunk in chunks])
        frames = check_native(got)
        assert frames[-1].json["kept_seq"] == seen.seq
        assert (await caller.post(f"{path}/stop")).json()["last_seq"] == stopped.json()["last_seq"]
        await site.reset()
        row = await StreamRow.objects.aget()
        assert row.text == text_of([frame for frame in frames[:-1] if frame.seq <= seen.seq])


async def test_the_body_is_looked_at_before_it_is_read(caller: Caller) -> None:
    """413 by its length, 415 by its type and its encoding; an empty stop is fine, a wrong one is not."""
    client, headers = caller.client, caller.headers
    big = b'{"prompt": "' + b"x" * 1_100_000 + b'"}'
    cases = [
        (413, {"data": big, "content_type": "application/json"}),
        (415, {"data": b"prompt=x", "content_type": "application/x-www-form-urlencoded"}),
        (415, {"data": b'{"prompt": "x"}', "content_type": "text/plain"}),
        (415, {"data": b"\x1f\x8b", "content_type": "application/json", "CONTENT_ENCODING": "gzip"}),
        (400, {"data": b" ", "content_type": "application/json"}),
    ]
    for status, case in cases:
        encoding = case.pop("CONTENT_ENCODING", None)
        extra = {**headers, **({"content-encoding": encoding} if encoding else {})}
        response = await client.generic("POST", "/streams", headers=extra, **case)
        assert response.status_code == status, (status, response.content)
        assert response.json()["error"]["code"]
    wrong = await caller.post(f"/streams/{'0' * 32}/stop", {"seen_seq": -1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "seen_seq")


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", "after=1e3", "after=1&after=2", "format=xml", "after=" + "9" * 99]
)
async def test_a_wrong_query_is_400(caller: Caller, query: str) -> None:
    """For numbers, words and repetition."""
    response = await caller.post("/streams", ask())
    await body_of(response)
    wrong = await caller.get(f"/streams/{response['X-Stream-Id']}/events?{query}")
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == query.partition("=")[0]


async def test_an_after_from_the_future_is_gone(caller: Caller) -> None:
    """An event that does not exist yet cannot be resumed from."""
    response = await caller.post("/streams", ask())
    await body_of(response)
    assert (await caller.get(f"/streams/{response['X-Stream-Id']}/events?after=9999")).status_code == 410


async def test_an_unknown_model_is_404_with_its_param(caller: Caller) -> None:
    """And nothing is created."""
    response = await caller.post("/streams", ask(model="nope"))
    assert response.status_code == 404
    assert response.json()["error"] == {**response.json()["error"], "code": "model_not_found", "param": "model"}
    assert await StreamRow.objects.acount() == 0


async def test_a_server_failure_is_a_json_500_without_details(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause goes to the log; the client gets the id to report. (The database fails; no stream is left.)"""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("disk /secret/path is full")

    monkeypatch.setattr(StreamRow, "save", fail)
    with captured_events() as lines:
        response = await caller.post("/streams", ask())
    assert response.status_code == 500
    assert response["Content-Type"] == "application/json"
    assert "secret" not in response.content.decode()
    assert response["X-Request-Id"] in response.json()["error"]["message"]
    (failed,) = [line for line in lines if line["event"] == "request_failed"]
    assert failed["request_id"] == response["X-Request-Id"]
    assert "/secret/path" in failed["cause"]
    assert all(stream.terminal is not None for stream in site.get_site().streams.all())


async def test_readyz_says_what_the_page_needs(caller: Caller) -> None:
    """And /livez needs nothing."""
    ready = await caller.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["models"][0]["alias"] == "echo"
    assert json.loads((await caller.get("/livez")).content) == {"live": True}


async def test_the_page_has_a_strict_policy_and_its_context(alice: Any) -> None:
    """No inline script can run; the element gets its addresses from the page."""
    caller = Caller()
    await caller.client.aforce_login(alice)
    page = await caller.get("/")
    assert page.status_code == 200
    policy = page["Content-Security-Policy"]
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert page.context["streamserve"]["streams_url"] == "/streams"
    assert page.context["streamserve"]["signed_in_as"] == "alice"
    assert b"<script>" not in page.content


async def test_a_stream_whose_process_died_is_not_shown_as_running(caller: Caller, alice: Any) -> None:
    """Its row is in state running; no process produces it any more."""
    row = {"id": "a" * 32, "log_id": "b" * 12, "owner": "x", "tenant": f"user:{alice.pk}", "model": "echo"}
    await StreamRow.objects.acreate(**row)
    state = (await caller.get(f"/streams/{'a' * 32}")).json()
    assert (state["state"], state["error_code"], state["resumable"]) == ("finished", "producer_lost", False)
    assert (await caller.post(f"/streams/{'a' * 32}/stop")).status_code == 200


async def test_a_call_is_a_block_of_the_answer(caller: Caller) -> None:
    """Tools in OpenAI's shape; the call comes as `block_start` with its name, and its arguments as tokens."""
    call = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Oslo"}}\n</tool_call>'
    model = {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": {"weather": call}}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "The weather?"}], "tools": [tool], "max_tokens": 200}
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "MODELS": {"echo": model}}):
        await until_ready()
        frames = check_native(await body_of(await caller.post("/streams", body)))
        refused = await caller.post("/streams", {"prompt": "The weather?", "tools": [tool]})
        await site.reset()
    [start] = [frame.json for frame in frames if frame.event == "block_start"]
    tokens = [frame.json for frame in frames if frame.event == "token"]
    assert (start["kind"], start["name"]) == ("tool_use", "look_up")
    assert json.loads("".join(one["text"] for one in tokens if one["index"] == start["index"])) == {"city": "Oslo"}
    assert frames[-1].json["finish_reason"] == "tool_calls"
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")

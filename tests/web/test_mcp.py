"""Laws of `/mcp`: what a client of each era of the protocol gets, who gets it, and what is refused how."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve import Run, pipeline, tool
from streamserve.clients.pipeline.client import forget
from streamserve.dialects.mcp import HANDSHAKE_VERSIONS, MODERN
from streamserve.models import Stream as StreamRow
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.sse_reader import read_events
from tests.support.sites.rows import in_row
from tests.support.streams.hand_made import Gate

pytest.importorskip("jsonschema", reason="needs jsonschema: pip install streamserve[mcp]")
pytestmark = pytest.mark.django_db(transaction=True)

SCHEMA = {
    "type": "object",
    "properties": {"year": {"type": "integer", "minimum": 2000}},
    "required": ["year"],
    "additionalProperties": False,
}
BOTH = {"accept": "application/json, text/event-stream"}
NEW = {"mcp-protocol-version": MODERN, **BOTH}
CALL = '<tool_call>\n{"name": "erase", "arguments": {}}\n</tool_call>'
MODELS = {
    "echo": {"PATH": "echo", "ANSWERS": {"": "x"}},
    "caller": {"PATH": "echo", "ANSWERS": {"": CALL}, "FORMAT": "qwen3"},
}
SITE = {"TESTING": True, "MCP_ENDPOINT": True, "MODELS": MODELS}


async def review(run: Run) -> None:
    """Review an account."""
    await run.step("Reading", _found, of=2)
    run.cite("help", id="7", title="Prices", url="https://example.org/7/")
    await run.step("Writing", run.generate, run.question, of=2, max_tokens=20, seed=1)


async def invoices(run: Run) -> str:
    """List a year's invoices."""
    return f"None in {run.input['year']}."


async def broken(run: Run) -> None:
    """Fail."""
    raise ValueError("secret reason")


@tool(confirm=True)
def erase() -> str:
    """Erase all."""
    raise AssertionError("nobody has allowed that")


async def asks(run: Run) -> None:
    """Ask before it goes on."""
    await run.generate("erase", model="caller", tools=[erase], max_tokens=60)


async def hidden(run: Run) -> None:
    """Not for keys."""


def _found() -> str:
    return "found"


@pytest.fixture
async def ready(transactional_db: Any) -> AsyncIterator[None]:
    pipeline("review", title="Review")(review)
    pipeline("invoices", input_schema=SCHEMA)(invoices)
    pipeline("broken")(broken)
    pipeline("asks")(asks)
    pipeline("hidden", permission="staff")(hidden)
    try:
        with override_settings(STREAMSERVE=SITE):
            await until_ready()
            yield
            await site.reset()
    finally:
        for name in ("review", "invoices", "broken", "asks", "hidden"):
            forget(name)


def message(method: str, id: Any = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def called(name: str, id: Any = 1, **arguments: Any) -> dict[str, Any]:
    return message("tools/call", id, name=name, arguments=arguments)


def modern(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a message of the newer era, and its headers."""
    envelope = "io.modelcontextprotocol/"
    meta = {f"{envelope}protocolVersion": MODERN, f"{envelope}clientCapabilities": {}}
    params = {**body["params"], "_meta": {**body["params"].get("_meta", {}), **meta}}
    headers = {**NEW, "mcp-method": body["method"]}
    if "name" in params:
        headers["mcp-name"] = params["name"]
    return {**body, "params": params}, headers


async def asked(caller: Caller, body: Any, **headers: str) -> dict[str, Any]:
    """Return the JSON of an answer."""
    response = await caller.post("/mcp", body, **headers)
    assert response.headers["content-type"].startswith("application/json"), response.headers
    return dict(json.loads(await body_of(response)), status=response.status_code)


async def session_of(caller: Caller, version: str = HANDSHAKE_VERSIONS[0]) -> dict[str, str]:
    """Shake hands; return the headers of what follows."""
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    response = await caller.post("/mcp", message("initialize", **params), **BOTH)
    assert response.json()["result"]["protocolVersion"] == version
    headers = {"mcp-session-id": response.headers["mcp-session-id"], "mcp-protocol-version": version, **BOTH}
    body = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert (await caller.post("/mcp", body, **headers)).status_code == 202
    return headers


async def events_of(response: Any) -> list[Any]:
    assert response.status_code == 200, await body_of(response)
    return [one for one in read_events(await body_of(response)) if one.data]


async def test_the_tools_are_the_caller_s_pipelines(ready: None, alice_key: str) -> None:
    """Name, title, description and schema: the pipeline's own, or a question; none that the caller may not use."""
    tools = (await asked(Caller(key=alice_key), message("tools/list")))["result"]["tools"]
    found = {tool.pop("name"): tool for tool in tools}
    assert found.keys() == {"review", "invoices", "broken", "asks"}
    assert found["invoices"]["inputSchema"] == SCHEMA
    assert found["review"]["inputSchema"]["required"] == ["question"]
    assert (found["review"]["title"], found["review"]["description"]) == ("Review", "Review an account.")


async def test_a_call_is_a_run_with_progress(ready: None, alice_key: str) -> None:
    """Each step is a progress with the caller's token; the result has the text and a link for each source."""
    caller = Caller(key=alice_key)
    headers = await session_of(caller)
    body = called("review", "seven", question="Why?")
    body["params"]["_meta"] = {"progressToken": "p"}
    response = await caller.post("/mcp", body, **headers)
    *progress, last = [json.loads(one.data) for one in await events_of(response)]
    assert [one["params"] for one in progress] == [
        {"progressToken": "p", "progress": 1, "total": 2, "message": "Reading"},
        {"progressToken": "p", "progress": 2, "total": 2, "message": "Writing"},
    ]
    assert last["id"] == "seven"
    result = last["result"]
    assert result["isError"] is False
    text, link = result["content"]
    assert text["text"]
    assert link == {"type": "resource_link", "uri": "https://example.org/7/", "name": "Prices"}
    row = await in_row(result["_meta"]["streamserve/run"]["stream_id"], state="finished")
    assert row.model == "review"


async def test_a_caller_that_takes_json_gets_json(ready: None, alice_key: str) -> None:
    """The same result at once, in both eras; a run that fails is a result that says so, without the reason."""
    caller = Caller(key=alice_key)
    whole = await asked(caller, called("invoices", year=2024), accept="application/json")
    assert whole["result"]["content"] == [{"type": "text", "text": "None in 2024."}]
    body, headers = modern(called("invoices", year=2024))
    newer = await asked(caller, body, **{**headers, "accept": "application/json"})
    assert newer["result"]["content"] == whole["result"]["content"]
    assert newer["result"]["resultType"] == "complete"
    failed = (await asked(caller, called("broken", question="?"), accept="application/json"))["result"]
    assert failed["isError"] is True
    assert failed["_meta"]["streamserve/run"]["code"] == "pipeline_failed"
    assert "secret reason" not in json.dumps(failed)


async def test_a_run_that_asks_its_user_is_an_error(ready: None, alice_key: str) -> None:
    """The caller is a program: it is told that nobody can be asked."""
    result = (await asked(Caller(key=alice_key), called("asks", question="?"), accept="application/json"))["result"]
    assert result["isError"] is True
    assert "nobody can be asked" in result["content"][-1]["text"]
    assert result["_meta"]["streamserve/run"]["finish_reason"] == "interrupt"


async def test_the_newer_era_needs_no_handshake(ready: None, alice_key: str) -> None:
    """`server/discover` names the versions; a request stands alone; its result is private to the caller."""
    caller = Caller(key=alice_key)
    body, headers = modern(message("server/discover"))
    found = (await asked(caller, body, **headers))["result"]
    assert found["supportedVersions"] == [MODERN, *HANDSHAKE_VERSIONS]
    assert found["capabilities"] == {"tools": {}}
    body, headers = modern(message("tools/list"))
    listed = (await asked(caller, body, **headers))["result"]
    assert (listed["cacheScope"], listed["resultType"]) == ("private", "complete")
    body, headers = modern(called("invoices", year=2024))
    (event,) = await events_of(await caller.post("/mcp", body, **headers))
    assert event.id == ""
    assert json.loads(event.data)["result"]["content"][0]["text"] == "None in 2024."


async def test_a_cut_response_is_resumed_by_its_last_event(ready: None, alice_key: str) -> None:
    """After each of its events, the first without data too, the rest comes by GET, under the request's own id."""
    caller = Caller(key=alice_key)
    headers = await session_of(caller)
    body = called("review", 41, question="Why?")
    body["params"]["_meta"] = {"progressToken": 5}
    response = await caller.post("/mcp", body, **headers)
    whole = read_events(await body_of(response))
    assert whole[0].data == ""
    for seen, event in enumerate(whole):
        got = await caller.get("/mcp", **headers, **{"last-event-id": event.id})
        if seen == len(whole) - 1:
            assert got.status_code == 204
            continue
        rest = await events_of(got)
        assert [(one.id, one.data) for one in rest] == [(one.id, one.data) for one in whole[seen + 1 :]]
        assert json.loads(rest[-1].data)["id"] == 41


async def test_a_response_is_resumed_by_its_owner_alone(ready: None, alice_key: str, lonely_key: str) -> None:
    """The id of an event is no secret: another caller gets a 404 for it, as for none."""
    caller = Caller(key=alice_key)
    response = await caller.post("/mcp", called("review", question="Why?"), **await session_of(caller))
    first = read_events(await body_of(response))[0]
    got = await Caller(key=lonely_key).get("/mcp", **BOTH, **{"last-event-id": first.id})
    assert (got.status_code, got.json()["error"]["data"]["code"]) == (404, "unknown_event_id")


async def test_a_request_that_is_sent_again_gets_the_same_run(ready: None, alice_key: str) -> None:
    """Within a session an id is of one run; another session's same id is of another run."""
    caller = Caller(key=alice_key)
    headers = await session_of(caller)
    first, second = [
        await events_of(await caller.post("/mcp", called("review", 3, question="?"), **headers)) for _ in range(2)
    ]
    assert first[-1].data == second[-1].data
    other = await session_of(caller)
    third = await events_of(await caller.post("/mcp", called("review", 3, question="?"), **other))
    assert await StreamRow.objects.acount() == 2
    assert third[-1].data != first[-1].data
    changed = await asked(caller, called("review", 3, question="another"), **headers)
    assert changed["error"]["data"]["code"] == "idempotency_key_reused"


async def test_a_cancelled_request_stops_its_run(
    transactional_db: Any, site_gate: Gate, ready: None, alice_key: str
) -> None:
    """The notification finds the run by session and id; from another session, or another caller, it does nothing."""
    caller = Caller(key=alice_key)
    headers, other = await session_of(caller), await session_of(caller)
    site_gate.allow(0)
    response = await caller.post("/mcp", called("review", 9, question="Why?"), **headers)
    streams = site.get_site().streams
    await until(lambda: any(one.model == "review" for one in streams.all()))
    (stream,) = [one for one in streams.all() if one.model == "review"]
    cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 9}}
    assert (await caller.post("/mcp", cancelled, **other)).status_code == 202
    assert stream.terminal is None
    assert (await caller.post("/mcp", cancelled, **headers)).status_code == 202
    await until(lambda: stream.terminal is not None)
    site_gate.open()
    (event,) = await events_of(response)
    assert json.loads(event.data)["result"]["_meta"]["streamserve/run"]["code"] == "cancelled"


async def test_a_session_is_of_its_caller(ready: None, alice_key: str, lonely_key: str) -> None:
    """Another caller's session, and one that was made up, are a 404, after which a client shakes hands again."""
    headers = await session_of(Caller(key=alice_key))
    for session in (headers["mcp-session-id"], "f" * 64, "é", "x" * 5000):
        refused = await asked(Caller(key=lonely_key), message("ping"), **{**headers, "mcp-session-id": session})
        assert refused["status"] == 404
        assert refused["error"]["data"]["code"] == "session_not_found"
    assert (await asked(Caller(key=alice_key), message("ping"), **headers))["result"] == {}


async def test_pages_of_other_origins_are_refused(ready: None, alice_key: str) -> None:
    """The protocol wants the origin checked, whatever key the page has."""
    caller = Caller(key=alice_key)
    for origin, status in (("http://testserver", 200), ("https://evil.example", 403), ("null", 403), ("http://[", 403)):
        assert (await asked(caller, message("ping"), origin=origin))["status"] == status
    with override_settings(STREAMSERVE={**SITE, "CORS_ORIGINS": ["https://app.example.org"]}):
        await site.reset()
        assert (await asked(caller, message("ping"), origin="https://app.example.org"))["status"] == 200


async def test_it_is_off_unless_the_site_turns_it_on(engine: None, alice_key: str) -> None:
    """Without MCP_ENDPOINT the address is a 404, in the protocol's form; without a key it is a 401."""
    refused = await asked(Caller(key=alice_key), message("ping"))
    assert (refused["status"], refused["error"]["data"]["code"]) == (404, "unknown_url")
    assert (await asked(Caller(), message("ping")))["status"] == 401


LIST = message("tools/list")
HOSTILE: list[tuple[Any, dict[str, str], int, str]] = [
    ([], {}, -32700, "invalid_json"),
    ([LIST], {}, -32700, "invalid_json"),
    ({}, {}, -32600, "invalid_value"),
    ({**LIST, "jsonrpc": "1.0"}, {}, -32600, "invalid_value"),
    ({**LIST, "id": None}, {}, -32600, "invalid_value"),
    ({**LIST, "id": True}, {}, -32600, "invalid_value"),
    ({**LIST, "id": 1.5}, {}, -32600, "invalid_value"),
    ({**LIST, "id": {"a": 1}}, {}, -32600, "invalid_value"),
    ({**LIST, "id": "x" * 5000}, {}, -32600, "invalid_value"),
    ({**LIST, "id": 2**70}, {}, -32600, "invalid_value"),
    ({**LIST, "method": 5}, {}, -32600, "missing_field"),
    ({**LIST, "method": "tools/call\n"}, {}, -32601, "unknown_method"),
    ({**LIST, "params": [1]}, {}, -32602, "invalid_type"),
    (message("tools/list", cursor="x"), {}, -32602, "invalid_value"),
    (message("resources/read", uri="file:///etc/passwd"), {}, -32601, "unknown_method"),
    (message("tools/call", name=5), {}, -32602, "pipeline_not_found"),
    (called("hidden", question="?"), {}, -32602, "pipeline_not_found"),
    (called("echo", question="?"), {}, -32602, "pipeline_not_found"),
    (message("tools/call", name="review", arguments="x"), {}, -32602, "invalid_type"),
    (called("review"), {}, -32602, "invalid_value"),
    (called("review", question=5), {}, -32602, "invalid_value"),
    (called("review", question="x", model="echo"), {}, -32602, "invalid_value"),
    (called("review", question="x" * 1_000_000), {}, -32602, "context_length_exceeded"),
    (called("invoices", year="2024"), {}, -32602, "invalid_value"),
    (called("invoices", year=1999), {}, -32602, "invalid_value"),
    (called("invoices"), {}, -32602, "invalid_value"),
    (LIST, {"mcp-protocol-version": "1900-01-01"}, -32022, "unsupported_protocol_version"),
    (LIST, {"mcp-protocol-version": MODERN}, -32602, "missing_field"),
    (modern(LIST)[0], {"mcp-protocol-version": MODERN}, -32020, "header_mismatch"),
    (modern(LIST)[0], {**NEW, "mcp-method": "tools/call"}, -32020, "header_mismatch"),
    (modern(called("review", question="?"))[0], {**NEW, "mcp-method": "tools/call"}, -32020, "header_mismatch"),
    (*modern(message("initialize")), -32601, "unknown_method"),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
async def test_hostile_messages_are_refused_in_the_protocol_s_way(ready: None, alice_key: str, number: int) -> None:
    """Each is an error with the protocol's code, and ours in its data; none starts a run."""
    body, headers, code, name = HOSTILE[number]
    refused = await asked(Caller(key=alice_key), body, **{**BOTH, **headers})
    assert (refused["error"]["code"], refused["error"]["data"]["code"]) == (code, name), refused
    assert refused["status"] in (200, 400, 404, 413)
    assert await StreamRow.objects.acount() == 0


@pytest.mark.parametrize(
    "last_id", ["", "x", "a-1", "a-1:m", "a-1:mWzFd", "a-1:m" + "A" * 9000, "é:m!!", "-1:mWzEsbnVsbF0"]
)
async def test_a_get_needs_the_id_of_an_event(ready: None, alice_key: str, last_id: str) -> None:
    """Without one it is a 405: nothing is sent unasked. An id of no event of the caller's is a 404."""
    response = await Caller(key=alice_key).get("/mcp", **BOTH, **{"last-event-id": last_id})
    assert response.status_code == (404 if last_id else 405)
    assert response.json()["error"]["data"]["code"] in ("unknown_event_id", "method_not_allowed")


async def test_an_input_is_checked_at_every_route(ready: None, alice_key: str) -> None:
    """`input_schema` holds for the JSON API as for MCP."""
    caller = Caller(key=alice_key)
    assert (await caller.post("/pipelines/invoices", {"input": {"year": 2024}})).json()["text"] == "None in 2024."
    refused = await caller.post("/pipelines/invoices", {"input": {"year": "2024"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert (await caller.post("/pipelines/invoices", {"input": {}})).status_code == 400

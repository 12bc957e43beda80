"""`/mcp`: the caller's pipelines as tools of the Model Context Protocol, over streamable HTTP. asyncio; framework-free.

A call is a run as any other: its stream has an id, limits and a row, and the response is one reader's view of it. In
the older era the id of a session and of a request are that run's key: `notifications/cancelled` finds it in whatever
process it runs, and a request that is sent again gets the same run. The server keeps no state of a session.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Caller, Reply, json_reply
from streamserve.api.idempotency import HEADER, once_for
from streamserve.api.pipelines import no_pipeline
from streamserve.api.resume import HeadOnly, stream_of_event
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.dialects import mcp, native
from streamserve.dialects.fold import Answer
from streamserve.dialects.mcp import MODERN, Asked, McpEncoder, Rpc
from streamserve.protocol.errors import (
    BadRequest,
    Forbidden,
    MethodNotAllowed,
    NotFound,
    StreamserveError,
    headers_of,
    to_body,
)
from streamserve.protocol.measures import RESPONSES
from streamserve.protocol.requests import GenerateRequest, Once
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import collect

_EVENT_STREAM = "text/event-stream"
_SESSION = "mcp-session-id"
_NONCE_CHARS, _SEAL_CHARS = 32, 32
NAME = "streamserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class McpEndpoint:
    """What the site decides about `/mcp`. `secret_of(owner)` seals the ids of a caller's sessions.

    `origins` are those of CORS_ORIGINS: pages there, and of the site itself, may call it.
    """

    version: str
    secret_of: Callable[[str], str]
    origins: Collection[str] = ()

    def new_session(self, caller: Caller) -> str:
        """Return the id of a new session."""
        nonce = secrets.token_hex(_NONCE_CHARS // 2)
        return nonce + self._seal(caller, nonce)

    def session_of(self, call: Call) -> str:
        """Return the id of the call's session, "" for none. Raises NotFound for an id that is not of this caller."""
        session = call.headers.get(_SESSION, "")
        if session and not hmac.compare_digest(
            session[_NONCE_CHARS:].encode(), self._seal(call.caller, session[:_NONCE_CHARS]).encode()
        ):
            message = "There is no session of that id. Send 'initialize' without Mcp-Session-Id."
            raise NotFound(message, code="session_not_found", param="Mcp-Session-Id")
        return session

    def _seal(self, caller: Caller, nonce: str) -> str:
        sealed = hashlib.sha256(f"{self.secret_of(caller.owner)}\n{nonce}".encode("utf-8", "surrogatepass"))
        return sealed.hexdigest()[:_SEAL_CHARS]

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Raise Forbidden for a page of another site: the protocol wants that, whatever the page has sent with it."""
        origin = headers.get("origin")
        if origin is None or origin in self.origins:
            return
        try:
            host = urlsplit(origin).netloc
        except ValueError:
            host = ""
        if not host or host != headers.get("host"):
            message = "A page of another origin calls. Name it in CORS_ORIGINS."
            raise Forbidden(message, code="cross_origin")


def mcp_off() -> NotFound:
    """Return the error of a site that offers no tools."""
    return NotFound("This site offers no MCP tools: MCP_ENDPOINT is off (docs/mcp.md).", code="unknown_url")


async def post_message(call: Call, answers: Answers, mcp_endpoint: McpEndpoint) -> Reply:
    """POST /mcp: one JSON-RPC message of the Model Context Protocol.

    A request is answered by JSON, a call of a tool by events where the caller accepts them; a notification by 202.
    """
    mcp_endpoint.check_origin(call.headers)
    body = await call.json(answers.limits)
    rpc = mcp.parse(body)
    try:
        version = mcp.version_of(call.headers)
    except BadRequest as error:
        return _failed(call, error, rpc, is_modern=True)
    is_modern = version == MODERN
    try:
        session = "" if is_modern else mcp_endpoint.session_of(call)
        if rpc.id is None:
            await _notified(call, answers, rpc, session)
            return Reply(status=202)
        if is_modern:
            mcp.check_modern(rpc, call.headers)
        if rpc.method == "tools/call":
            return await _called(call, answers, rpc, version, session)
        headers = {"Mcp-Session-Id": mcp_endpoint.new_session(call.caller)} if rpc.method == "initialize" else {}
        result = await _result(call, answers, rpc, mcp_endpoint.version, is_modern=is_modern)
        return json_reply(mcp.response_json(rpc.id, result, is_modern=is_modern), headers=headers)
    except StreamserveError as error:
        return _failed(call, error, rpc, is_modern=is_modern)


async def get_events(call: Call, answers: Answers, mcp_endpoint: McpEndpoint) -> Reply:
    """GET /mcp with a Last-Event-ID: the rest of a response that was cut off. Else 405: nothing is sent unasked."""
    mcp_endpoint.check_origin(call.headers)
    mcp_endpoint.session_of(call)
    last_id = call.headers.get("last-event-id", "")
    if not last_id:
        raise MethodNotAllowed("Nothing is sent here unasked. POST a message, or send the Last-Event-ID of a response.")
    resumed = mcp.resumed(last_id)
    stream, after = (None, 0) if resumed is None else await stream_of_event(call, answers, resumed[0])
    if resumed is None or stream is None or not 0 <= after <= stream.last_seq:
        raise NotFound("No event of yours has that id.", code="unknown_event_id", param="Last-Event-ID")
    if stream.terminal is not None and after >= stream.last_seq:
        return Reply(status=204)
    encoder = McpEncoder(stream, resumed[1])
    if call.is_head:
        return Reply(body=HeadOnly(encoder.content_type, stream.id))
    return Reply(body=Delivery(answers.streams, stream, encoder, after=after))


async def _notified(call: Call, answers: Answers, rpc: Rpc, session: str) -> None:
    """Take a notification: of a cancelled request its run is stopped, in whatever process."""
    request_id = rpc.params.get("requestId")
    if rpc.method != "notifications/cancelled" or not session or not mcp.is_id(request_id):
        return
    once = _once(call, session, request_id, {})
    record = None if once is None else await answers.streams.store.find(request_key=once.key)
    if record is None:
        return  # it has ended long ago, or has not begun
    found = await answers.find(call.caller, stream_id=record.id)
    if found.stream is not None:
        await found.stream.stop(None)


async def _result(call: Call, answers: Answers, rpc: Rpc, version: str, *, is_modern: bool) -> Mapping[str, Any]:
    """Return the result of what is no call of a tool. Raises NotFound for a method that is not here."""
    if rpc.method == "ping":
        return {}
    if rpc.method == "tools/list":
        if rpc.params.get("cursor") is not None:
            message = "The list of tools has one page: leave 'cursor' out."
            raise BadRequest(message, code="invalid_value", param="params.cursor")
        pipelines = await answers.pipelines_of(call.caller)
        return mcp.tools_json([_tool(one) for one in pipelines.values()], is_modern=is_modern)
    if rpc.method == "initialize" and not is_modern:
        return mcp.initialized_json(rpc.params.get("protocolVersion"), NAME, version)
    if rpc.method == "server/discover" and is_modern:
        return mcp.discovered_json(NAME, version)
    raise mcp.unknown_method(rpc.method)


def _tool(client: PipelineClient) -> dict[str, Any]:
    shown = client.as_json()
    return mcp.tool_json(client.alias, str(shown["title"]), str(shown["description"]), client.input_schema)


async def _called(call: Call, answers: Answers, rpc: Rpc, version: str, session: str) -> Reply:
    """Run a pipeline and return its events, or its result once it has ended."""
    asked = Asked.of(rpc, version, has_session=bool(session))
    name, arguments = rpc.params.get("name"), rpc.params.get("arguments") or {}
    pipelines = await answers.pipelines_of(call.caller)
    if not isinstance(name, str) or name not in pipelines:
        raise no_pipeline(str(name), pipelines, "params.name")
    if not isinstance(arguments, dict):
        raise BadRequest("'arguments' is an object.", code="invalid_type", param="params.arguments")
    call.named.append(name)
    request = _request(call, answers, pipelines[name], arguments)
    once = _once(call, session, asked.id, {"name": name, "arguments": arguments})
    wants_events = _EVENT_STREAM in call.headers.get("accept", "")
    on_disconnect = "park" if asked.is_resumable and wants_events else "abort"
    stream = await answers.begin(call, request, on_disconnect, once=once)
    if wants_events:
        return Reply(body=Delivery(answers.streams, stream, McpEncoder(stream, asked)))
    whole = Answer.of(await call.wait(collect(answers.streams, stream)))
    result = mcp.whole_json(whole, stream.id)
    response = mcp.response_json(asked.id, result, is_modern=asked.is_modern)
    return json_reply(response, headers={"X-Stream-Id": stream.id})


def _request(call: Call, answers: Answers, client: PipelineClient, arguments: Mapping[str, Any]) -> GenerateRequest:
    """Return the run's request: the question as a turn of the user's, or the input by the pipeline's own schema."""
    if client.input_schema:
        body: dict[str, Any] = {"model": client.alias, "input": arguments}
    else:
        question = arguments.get("question")
        if not isinstance(question, str) or not question or len(arguments) != 1:
            message = 'The arguments are {"question": text}, and nothing else.'
            raise BadRequest(message, code="invalid_value", param="params.arguments")
        body = {"model": client.alias, "messages": [{"role": "user", "content": question}]}
    try:
        parsed = native.parse(body, answers.limits, default_model="")
        client.check_input(parsed.generate)
    except BadRequest as error:
        error.param = "params.arguments"
        raise
    return answers.with_class(parsed.generate, parsed, call.caller, "pipelines")


def _once(call: Call, session: str, request_id: Any, asked: Mapping[str, Any]) -> Once | None:
    """Return the key of a request: its Idempotency-Key, or its id in its session. None where it has neither."""
    key = call.headers.get(HEADER)
    if key is None and session:
        key = "mcp-" + hashlib.sha256(f"{session}\n{json.dumps(request_id)}".encode()).hexdigest()
    return None if key is None else once_for(call.caller, key, "mcp", asked)


def _failed(call: Call, error: StreamserveError, rpc: Rpc, *, is_modern: bool) -> Reply:
    """Return an error under the id of the message that it answers, and count it."""
    RESPONSES.by_code[error.code] += 1
    body = to_body(error, call.request_id)
    status = mcp.status_of(body, is_modern=is_modern)
    return json_reply(mcp.error_json(body, rpc.id), status=status, headers=headers_of(error))

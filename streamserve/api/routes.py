"""`ROUTES`: every HTTP route of streamserve, in one table. Django's urlconf and the ASGI app are made from it.

Default deny: a `Route` cannot be built without an `Access`. A new route is a row here and a function that takes a
`Call` and the services that it names: one function a method. Values and endpoints only; the adapters authenticate the
caller.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

from streamserve.api import (
    ag_ui,
    ai_sdk,
    anthropic,
    attachments,
    durable,
    jobs,
    mcp,
    native,
    ops,
    pipelines,
    timings,
    usage,
)
from streamserve.api import conversation_routes as talk
from streamserve.api.batch import batches, files
from streamserve.api.call import Call, Endpoint, Reply, json_reply
from streamserve.api.conversations import conversations_off, shares_off
from streamserve.api.openai import chats, completions, embeddings, models, moderations, plain_tokens, responses, tokens
from streamserve.api.openai import conversations as openai_talk
from streamserve.api.openapi.endpoint import endpoint_of
from streamserve.dialects import mcp as mcp_dialect
from streamserve.dialects import native as native_dialect
from streamserve.dialects.ag_ui import events as ag_ui_events
from streamserve.dialects.anthropic import message as anthropic_message
from streamserve.dialects.openai import shapes
from streamserve.protocol.errors import (
    ErrorBody,
    MethodNotAllowed,
    NotFound,
    StreamserveError,
    headers_of,
    no_stream,
    to_body,
)
from streamserve.protocol.ids import is_stream_id
from streamserve.protocol.measures import RESPONSES
from streamserve.protocol.rates import RateLimited, Rates, anthropic_headers

KINDS = ("session", "key", "anonymous", "anyone")
CHAT_CALLERS = ("session", "key", "anonymous")
OPS_CALLERS = ("session", "key")
ANYONE = ("anyone",)

# What an endpoint may take beside its call, by the names of its parameters. A service with a default may be missing.
SERVICES = (
    "answers",
    "chats",
    "responses",
    "watches",
    "ops",
    "jobs",
    "files",
    "batches",
    "attachments",
    "conversations",
    "shares",
    "threads",
    "mcp_endpoint",
    "usage",
    "moderator",
)

# The variable parts of a path, in the syntax of Django's urlconf.
CONVERTERS = {
    "stream_id": "[0-9a-f]{32}",
    "path": r"[\s\S]+",  # line breaks too: an address may have any character
    "rest": r"[\s\S]*",
    "pipeline_name": "[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
    "part": "[^/]{1,200}",  # of a path: any text without a slash
    "chat_id": "[^/]{1,200}",  # a client's own id of a conversation
    "file_id": "[A-Za-z0-9_-]{1,64}",  # of a file, a batch or a response
}
# The errors of routes whose service the site's settings leave out.
_OFF: Mapping[str, Callable[[], StreamserveError]] = {
    "conversations": conversations_off,
    "attachments": conversations_off,
    "shares": shares_off,
    "mcp_endpoint": mcp.mcp_off,
    "usage": usage.usage_off,
    "moderator": moderations.moderation_off,
}
_PART = re.compile(r"<(\w+):(\w+)>")
_UNNAMED = "other"  # in `/metrics`: addresses where nothing is

# Answered while the server drains, and when it has as many connections as it takes: a supervisor asks them.
PROBES = ("livez", "health", "readyz", "metrics")

# The endpoints that start answers.
ASKING: frozenset[Endpoint] = frozenset(
    (
        native.start_stream,
        native.new_stream,
        native.approve,
        pipelines.get_run,
        pipelines.post_run,
        jobs.enqueue,
        chats.create_chat,
        responses.create_response,
        completions.completions,
        plain_tokens.get_tokens,
        plain_tokens.post_tokens,
        anthropic.messages,
        talk.ask,
        mcp.post_message,
        ai_sdk.start_chat,
        ag_ui.start_run,
    )
)

_OF_A_STREAM = (
    "",
    "events",
    "log",
    "stop",
    "approvals",
    "timings",
    "watch",
)  # what follows a stream's id in its addresses

_ANY = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The kinds of callers that may call a route, and the scope they need.

    `identifies`: a route for anyone, which shows more to callers that may chat. `takes_beacons`: a page may send it as
    it closes, by `navigator.sendBeacon`, which has no header for a CSRF token: its origin decides.
    """

    callers: tuple[str, ...]
    scope: str = "chat"
    open_in_debug: bool = False
    identifies: bool = False
    takes_beacons: bool = False

    def __post_init__(self) -> None:
        if not self.callers or not set(self.callers) <= set(KINDS):
            raise ValueError(f"callers are some of {', '.join(KINDS)}, not {self.callers!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One address. `path` has no leading slash; `error_json` is the shape of its errors, `name` its name for `reverse`.

    `endpoints`: method → function; what takes GET takes HEAD. A site serves the routes whose services it has; a
    route without services depends on neither engines, log nor database. `takes_file`: its bodies may be forms with a
    file.
    """

    path: str
    access: Access
    endpoints: Mapping[str, Endpoint]
    error_json: Callable[[ErrorBody], dict[str, Any]] = native_dialect.error_json
    name: str = ""
    takes_file: bool = False
    services: frozenset[str] = field(init=False)  # what its endpoints take
    needs: frozenset[str] = field(init=False)  # of these, what they cannot do without

    def __post_init__(self) -> None:
        with_head: dict[str, Endpoint] = {}
        taken: dict[str, bool] = {}
        for method, endpoint in self.endpoints.items():
            with_head[method] = endpoint
            if method == "GET":
                with_head["HEAD"] = endpoint
            for name, is_needed in _services_of(endpoint).items():
                taken[name] = taken.get(name, False) or is_needed
        object.__setattr__(self, "endpoints", with_head)
        object.__setattr__(self, "services", frozenset(taken))
        object.__setattr__(self, "needs", frozenset(name for name, is_needed in taken.items() if is_needed))

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that it takes."""
        return tuple(self.endpoints)

    def asks(self, method: str) -> bool:
        """Return whether a request with this method asks for an answer."""
        return self.endpoints.get(method) in ASKING

    async def reply(self, call: Call, services: Mapping[str, Any]) -> Reply:
        """Return what the endpoint of the call's method replies, and count it for `/metrics`."""
        for name in self.needs - services.keys():
            raise _OFF[name]()
        endpoint = self.endpoints[call.method]
        reply = await endpoint(call, **{name: services[name] for name in _services_of(endpoint) if name in services})
        self._count(reply.status)
        rates = call.started[-1].rates if call.started else reply.rates
        if rates is not None:
            reply = replace(reply, headers={**reply.headers, **self._rate_headers(rates, call.headers)})
        return reply

    def _rate_headers(self, rates: Rates, asked: Mapping[str, str]) -> dict[str, str]:
        """Return what is left of the caller's limits over time, in this route's dialect."""
        if self._is_anthropic(asked):
            return anthropic_headers(rates, datetime.now(UTC))
        return rates.headers()

    def _is_anthropic(self, asked: Mapping[str, str]) -> bool:
        is_named = self.path.partition("/")[0] == "v1" and anthropic_message.VERSION_HEADER in asked
        return is_named or self.error_json is anthropic_message.error_json

    def pattern(self) -> re.Pattern[str]:
        """Return the pattern of the whole path, with its leading slash."""
        parts = _PART.sub(lambda part: f"(?P<{part[2]}>{CONVERTERS[part[1]]})", self.path)
        return re.compile(f"/{parts}")

    def wrong_method(self, method: str) -> MethodNotAllowed:
        """Return the error for a method that this route does not take."""
        return MethodNotAllowed(f"This address takes {' and '.join(self.methods)}, not {method}.")

    def _count(self, status: int) -> None:
        RESPONSES.by_status[self.name or _UNNAMED, status] += 1

    def error_reply(self, error: StreamserveError, request_id: str, asked: Mapping[str, str]) -> Reply:
        """Return `error` in this route's dialect, with the headers of its status, and count it.

        `asked` are the request's headers: under /v1/ the header of Anthropic's API version chooses its shape.
        """
        self._count(error.http_status)
        RESPONSES.by_code[error.code] += 1
        headers = headers_of(error)
        if error.http_status == 405:
            headers["Allow"] = ", ".join(self.methods)
        if isinstance(error, RateLimited):
            headers |= self._rate_headers(error.rates, asked)
        error_json = self.error_json
        if self._is_anthropic(asked):
            error_json = anthropic_message.error_json
            headers |= anthropic.id_header(request_id)
        return json_reply(error_json(to_body(error, request_id)), status=error.http_status, headers=headers)


def failure(request_id: str) -> StreamserveError:
    """Return the error for a request that failed unexpectedly; the server's log has the cause."""
    return StreamserveError(f"The server failed on this request. Its log has the cause under {request_id}.")


@cache
def _services_of(endpoint: Endpoint) -> dict[str, bool]:
    """Return the services that an endpoint takes, and whether it needs each. Raises TypeError for an unknown name."""
    taken: dict[str, bool] = {}
    for name, parameter in list(inspect.signature(endpoint).parameters.items())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY:  # of another endpoint that calls it
            continue
        if name not in SERVICES:
            raise TypeError(f"an endpoint takes {', '.join(SERVICES)}, not {name!r}")
        taken[name] = parameter.default is parameter.empty
    return taken


_CHAT = Access(callers=CHAT_CALLERS)
_PAGE = Access(callers=CHAT_CALLERS, takes_beacons=True)
_KNOWN = Access(callers=("session", "key"))
_KEYS = Access(callers=("key",))
_OPEN = Access(callers=ANYONE)
_PROBE = Access(callers=ANYONE, identifies=True)
_WATCH = Access(callers=("session", "key"), scope="watch")
_OPS = Access(callers=OPS_CALLERS, scope="ops", open_in_debug=True)


def _native(
    name: str,
    path: str,
    access: Access,
    get: Endpoint | None = None,
    *,
    post: Endpoint | None = None,
    delete: Endpoint | None = None,
    **rest: Any,
) -> Route:
    given = {"GET": get, "POST": post, "DELETE": delete}
    endpoints = {method: endpoint for method, endpoint in given.items() if endpoint is not None}
    return Route(name=name, path=path, access=access, endpoints=endpoints, **rest)


_openai = partial(_native, error_json=shapes.error_json)
_ag_ui = partial(_native, error_json=ag_ui_events.error_json)
_anthropic = partial(_native, error_json=anthropic_message.error_json)


async def unknown(head: str, call: Call) -> Reply:
    """Any other address that begins with `head`: a 404 in its dialect, which names the address that was meant."""
    rest = call.params.get("path", "")
    stream_id, _, part = rest.partition("/")
    if head == "streams/" and stream_id and part in _OF_A_STREAM and not is_stream_id(stream_id):
        raise no_stream()
    asked, shown = f"/{head}{rest}", (call.path or f"/{head}{rest}")[:200]
    meant = re.sub("/+", "/", asked).rstrip("/")
    if meant != asked and any(route.pattern().fullmatch(meant) for route in ROUTES if route.name):
        meant = call.path.removesuffix(asked) + meant
        raise NotFound(f"There is nothing at {shown}. The address is {meant}, as it stands here.", code="unknown_url")
    if head == _SOCKET:
        raise NotFound(f"{shown} is the address of a WebSocket, and this was no handshake.", code="unknown_url")
    if head.startswith("v1"):
        raise models.unknown_url(shown)
    raise NotFound(f"There is nothing at {shown}. See docs/reference/routes.md for the routes.", code="unknown_url")


def unknown_route(path: str, **rest: Any) -> Route:
    """Return the route of addresses where nothing is: `path`, or with "<rest:path>" at its end all that begin so."""
    endpoint = partial(unknown, path.partition("<")[0])
    return Route(path=path, access=_OPEN, endpoints=dict.fromkeys(_ANY, endpoint), **rest)


_SOCKET = "ws/streams"
_ID, _JOB = "<stream_id:stream_id>", "jobs/<stream_id:job_id>"
_ATTACHMENT = "attachments/<stream_id:attachment_id>"
_FILE, _BATCH = "v1/files/<file_id:file_id>", "<file_id:batch_id>"
_CHATS, _MESSAGE_BATCHES = "v1/chat/completions", "v1/messages/batches"
_CONVERSATION = "v1/conversations/<file_id:conversation_id>"
_RESPONSE = "v1/responses/<file_id:response_id>"
_CHATCMPL = f"{_CHATS}/chatcmpl-{_ID}"

_THREAD = "ag-ui/<part:name>/<part:thread_id>"
_TALK = "conversations/<stream_id:conversation_id>"
_UI_CHAT = "ai/chat/<chat_id:chat_id>"

ROUTES: tuple[Route, ...] = (
    _native("streams", "streams", _CHAT, post=native.start_stream),
    _native("new_stream", "streams/new", _CHAT, native.new_stream),
    _native("stream", f"streams/{_ID}", _CHAT, native.stream_state),
    _native("stream_events", f"streams/{_ID}/events", _CHAT, native.stream_events),
    _native("stream_log", f"streams/{_ID}/log", _CHAT, durable.read_log),
    _native("stop_stream", f"streams/{_ID}/stop", _CHAT, post=native.stop_stream),
    _native("approve_stream", f"streams/{_ID}/approvals", _CHAT, post=native.approve),
    _native("ack_stream", f"streams/{_ID}/ack", _CHAT, post=native.ack_stream),
    _native("stream_timings", f"streams/{_ID}/timings", _PAGE, post=timings.report),
    _native("watch_stream", f"streams/{_ID}/watch", _WATCH, native.watch),
    unknown_route("streams/<rest:path>"),
    _native("pipelines", "pipelines", _CHAT, pipelines.pipelines),
    _native("pipeline", "pipelines/<pipeline_name:name>", _CHAT, pipelines.get_run, post=pipelines.post_run),
    unknown_route("pipelines/<rest:path>"),
    _native("jobs", "jobs", _CHAT, jobs.list_jobs, post=jobs.enqueue),
    _native("job", _JOB, _CHAT, jobs.job),
    _native("job_events", f"{_JOB}/events", _CHAT, jobs.job_events),
    _native("cancel_job", f"{_JOB}/cancel", _CHAT, post=jobs.cancel_job),
    unknown_route("jobs/<rest:path>"),
    _native("conversations", "conversations", _KNOWN, talk.list_conversations, post=talk.create),
    _native("conversation", _TALK, _KNOWN, talk.conversation, post=talk.change, delete=talk.delete),
    _native("conversation_messages", f"{_TALK}/messages", _KNOWN, talk.list_messages, post=talk.ask),
    _native("conversation_message", f"{_TALK}/messages/<stream_id:message_id>", _KNOWN, post=talk.rate),
    _native("export_conversation", f"{_TALK}/export", _KNOWN, talk.export),
    _native("conversation_shares", f"{_TALK}/shares", _KNOWN, talk.list_shares, post=talk.share),
    _native("conversation_share", f"{_TALK}/shares/<stream_id:share_id>", _KNOWN, delete=talk.revoke_share),
    unknown_route("conversations/<rest:path>"),
    _native(
        "attachments",
        "attachments",
        _KNOWN,
        attachments.list_attachments,
        post=attachments.upload,
        takes_file=True,
    ),
    _native("attachment", _ATTACHMENT, _KNOWN, attachments.attachment, delete=attachments.delete),
    _native("attachment_content", f"{_ATTACHMENT}/content", _KNOWN, attachments.content),
    unknown_route("attachments/<rest:path>"),
    _native("ai_chat", "ai/chat", _CHAT, post=ai_sdk.start_chat),
    _native("ai_chat_messages", _UI_CHAT, _CHAT, ai_sdk.chat_messages),
    _native("ai_chat_stream", f"{_UI_CHAT}/stream", _CHAT, ai_sdk.chat_stream),
    _native("stop_ai_chat", f"{_UI_CHAT}/stop", _CHAT, post=ai_sdk.stop_chat),
    unknown_route("ai/<rest:path>"),
    _ag_ui("ag_ui", "ag-ui/<part:name>", _CHAT, post=ag_ui.start_run),
    _ag_ui("ag_ui_messages", f"{_THREAD}/messages", _CHAT, ag_ui.thread_messages),
    _ag_ui("ag_ui_stream", f"{_THREAD}/stream", _CHAT, ag_ui.thread_stream),
    _ag_ui("stop_ag_ui", f"{_THREAD}/stop", _CHAT, post=ag_ui.stop_thread),
    unknown_route("ag-ui/<rest:path>", error_json=ag_ui_events.error_json),
    _native("usage", "usage", _KNOWN, usage.list_usage),
    _openai("chat_completions", _CHATS, _CHAT, chats.list_chats, post=chats.create_chat),
    _openai("chat_completion", _CHATCMPL, _CHAT, chats.chat, post=chats.annotate_chat, delete=chats.delete_chat),
    _openai("chat_completion_messages", f"{_CHATCMPL}/messages", _CHAT, chats.chat_messages),
    _openai("responses", "v1/responses", _CHAT, post=responses.create_response),
    _openai("response_tokens", "v1/responses/input_tokens", _CHAT, post=responses.count_tokens),
    _openai("response", _RESPONSE, _CHAT, responses.retrieve, delete=responses.delete),
    _openai("cancel_response", f"{_RESPONSE}/cancel", _CHAT, post=responses.cancel),
    _openai("response_input_items", f"{_RESPONSE}/input_items", _CHAT, responses.input_items),
    _openai("response_conversations", "v1/conversations", _KNOWN, post=openai_talk.create),
    _openai(
        "response_conversation",
        _CONVERSATION,
        _KNOWN,
        openai_talk.conversation,
        post=openai_talk.update,
        delete=openai_talk.delete,
    ),
    _openai("conversation_items", f"{_CONVERSATION}/items", _KNOWN, openai_talk.list_items, post=openai_talk.add_items),
    _openai(
        "conversation_item",
        f"{_CONVERSATION}/items/<file_id:item_id>",
        _KNOWN,
        openai_talk.item,
        delete=openai_talk.delete_item,
    ),
    _openai("completions", "v1/completions", _CHAT, post=completions.completions),
    _openai(
        "completions_stream", "v1/completions/stream", _CHAT, plain_tokens.get_tokens, post=plain_tokens.post_tokens
    ),
    _openai("embeddings", "v1/embeddings", _CHAT, post=embeddings.embeddings),
    _openai("moderations", "v1/moderations", _CHAT, post=moderations.moderations),
    _anthropic("messages", "v1/messages", _CHAT, post=anthropic.messages),
    _anthropic("count_tokens", "v1/messages/count_tokens", _CHAT, post=anthropic.count_tokens),
    _anthropic(
        "message_batches",
        _MESSAGE_BATCHES,
        _KNOWN,
        batches.list_messages,
        post=batches.create_messages,
        takes_file=True,
    ),
    _anthropic(
        "message_batch",
        f"{_MESSAGE_BATCHES}/{_BATCH}",
        _KNOWN,
        batches.message_batch,
        delete=batches.delete_messages,
    ),
    _anthropic("cancel_message_batch", f"{_MESSAGE_BATCHES}/{_BATCH}/cancel", _KNOWN, post=batches.cancel_messages),
    _anthropic("message_batch_results", f"{_MESSAGE_BATCHES}/{_BATCH}/results", _KNOWN, batches.message_results),
    _openai("chat_stream_events", f"v1/streams/{_ID}/events", _CHAT, models.stream_events),
    _openai("models", "v1/models", _CHAT, models.models),
    _openai("model", "v1/models/<path:model>", _CHAT, models.model),
    _openai("files", "v1/files", _KNOWN, files.list_files, post=files.upload, takes_file=True),
    _openai("file", _FILE, _KNOWN, files.file, delete=files.delete),
    _openai("file_content", f"{_FILE}/content", _KNOWN, files.content),
    _openai("batches", "v1/batches", _KNOWN, batches.list_batches, post=batches.create),
    _openai("batch", f"v1/batches/{_BATCH}", _KNOWN, batches.batch),
    _openai("cancel_batch", f"v1/batches/{_BATCH}/cancel", _KNOWN, post=batches.cancel),
    _native("mcp", "mcp", _KEYS, mcp.get_events, post=mcp.post_message, error_json=mcp_dialect.error_json),
    unknown_route("v1/messages/<rest:path>", error_json=anthropic_message.error_json),
    unknown_route("v1", error_json=shapes.error_json),
    unknown_route("v1/<rest:path>", error_json=shapes.error_json),
    _openai("tokenize", "tokenize", _CHAT, post=tokens.tokenize),
    _openai("detokenize", "detokenize", _CHAT, post=tokens.detokenize),
    _native("openapi", "openapi.json", _PROBE, endpoint_of(lambda: ROUTES, CONVERTERS)),
    _native("livez", "livez", _OPEN, ops.livez),
    _native("health", "health", _OPEN, ops.livez),
    _native("readyz", "readyz", _PROBE, ops.readyz),
    _native("metrics", "metrics", _OPS, ops.metrics),
    *(unknown_route(f"{name}/") for name in PROBES),
    unknown_route(_SOCKET),
)

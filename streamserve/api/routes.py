"""`ROUTES`: every HTTP route of streamserve, in one table. Django's urlconf and the ASGI app are made from it.

Default deny: a `Route` cannot be built without an `Access`. Values and endpoints only; the adapters authenticate the
caller.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from streamserve.api import anthropic, native, openai, ops, pipelines
from streamserve.api.batch import batches, files
from streamserve.api.call import Call, Reply, json_reply
from streamserve.dialects import native as native_dialect
from streamserve.dialects.anthropic import message as anthropic_message
from streamserve.dialects.openai import chat as openai_chat
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

KINDS = ("session", "key", "anonymous", "anyone")
CHAT_CALLERS = ("session", "key", "anonymous")
OPS_CALLERS = ("session", "key")
ANYONE = ("anyone",)

# The variable parts of a path, in the syntax of Django's urlconf.
CONVERTERS = {
    "stream_id": "[0-9a-f]{32}",
    "path": ".+",
    "rest": ".*",
    "pipeline_name": "[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
    "file_id": "[A-Za-z0-9_-]{1,64}",  # of a file or a batch
}
_PART = re.compile(r"<(\w+):(\w+)>")
_UNNAMED = "other"  # in `/metrics`: addresses where nothing is

# Answered while the server drains, and when it has as many connections as it takes: a supervisor asks them.
PROBES = ("livez", "health", "readyz", "metrics")

_OF_A_STREAM = ("", "events", "stop", "watch")  # what follows a stream's id in its addresses

_ANY = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The kinds of callers that may call a route, and the scope they need.

    `identifies`: a route for anyone, which says more to callers that may chat.
    """

    callers: tuple[str, ...]
    scope: str = "chat"
    open_in_debug: bool = False
    identifies: bool = False

    def __post_init__(self) -> None:
        if not self.callers or not set(self.callers) <= set(KINDS):
            raise ValueError(f"callers are some of {', '.join(KINDS)}, not {self.callers!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route. `path` has no leading slash; `error_json` is the shape of its errors, `name` its name for `reverse`.

    What takes GET takes HEAD. Without `needs_site` it does not depend on engines, log and database; one that
    `needs_rows` is the Django site's only. `takes_file`: its bodies may be forms with a file.
    """

    path: str
    endpoint: Callable[[Call, Any], Awaitable[Reply]]
    access: Access
    methods: tuple[str, ...] = ("GET",)
    error_json: Callable[[ErrorBody], dict[str, Any]] = native_dialect.error_json
    name: str = ""
    needs_site: bool = True
    needs_rows: bool = False
    takes_file: bool = False

    def __post_init__(self) -> None:
        if "GET" in self.methods and "HEAD" not in self.methods:
            at = self.methods.index("GET") + 1
            object.__setattr__(self, "methods", (*self.methods[:at], "HEAD", *self.methods[at:]))

    def pattern(self) -> re.Pattern[str]:
        """Return the pattern of the whole path, with its leading slash."""
        parts = _PART.sub(lambda part: f"(?P<{part[2]}>{CONVERTERS[part[1]]})", self.path)
        return re.compile(f"/{parts}")

    def wrong_method(self, method: str) -> MethodNotAllowed:
        """Return the error for a method that this route does not take."""
        return MethodNotAllowed(f"This address takes {' and '.join(self.methods)}, not {method}.")

    def count(self, status: int) -> None:
        """Count a response for `/metrics`. The adapters call it with each reply of the endpoint."""
        RESPONSES.by_status[self.name or _UNNAMED, status] += 1

    def error_reply(self, error: StreamserveError, request_id: str, asked: Mapping[str, str]) -> Reply:
        """Return `error` in this route's dialect, with the headers of its status, and count it.

        `asked` are the request's headers: under /v1/ that of Anthropic's API version chooses its shape.
        """
        self.count(error.http_status)
        RESPONSES.by_code[error.code] += 1
        headers = headers_of(error)
        if error.http_status == 405:
            headers["Allow"] = ", ".join(self.methods)
        error_json = self.error_json
        if self.path.partition("/")[0] == "v1" and anthropic_message.VERSION_HEADER in asked:
            error_json = anthropic_message.error_json
        if error_json is anthropic_message.error_json:
            headers |= anthropic.id_header(request_id)
        return json_reply(error_json(to_body(error, request_id)), status=error.http_status, headers=headers)


def failure(request_id: str) -> StreamserveError:
    """Return the error for a request that failed unexpectedly; the server's log has the cause."""
    return StreamserveError(f"The server failed on this request. Its log has the cause under {request_id}.")


_CHAT = Access(callers=CHAT_CALLERS)
_KNOWN = Access(callers=("session", "key"))
_OPEN = Access(callers=ANYONE)
_PROBE = Access(callers=ANYONE, identifies=True)
_WATCH = Access(callers=("session", "key"), scope="watch")
_OPS = Access(callers=OPS_CALLERS, scope="ops", open_in_debug=True)


def _openai(path: str, endpoint: Callable[[Call, Any], Awaitable[Reply]], access: Access, **rest: Any) -> Route:
    return _native(path, endpoint, access, error_json=openai_chat.error_json, **rest)


def _anthropic(path: str, endpoint: Callable[[Call, Any], Awaitable[Reply]], **rest: Any) -> Route:
    return _native(path, endpoint, _CHAT, methods=("POST",), error_json=anthropic_message.error_json, **rest)


def _message_batches(path: str, endpoint: Callable[[Call, Any], Awaitable[Reply]], **rest: Any) -> Route:
    path = f"v1/messages/batches{path}"
    return _native(path, endpoint, _KNOWN, error_json=anthropic_message.error_json, needs_rows=True, **rest)


def _stored(path: str, endpoint: Callable[[Call, Any], Awaitable[Reply]], **rest: Any) -> Route:
    return _openai(path, endpoint, _KNOWN, needs_rows=True, **rest)


def _native(path: str, endpoint: Callable[[Call, Any], Awaitable[Reply]], access: Access, **rest: Any) -> Route:
    return Route(path=path, endpoint=endpoint, access=access, **rest)


async def unknown(head: str, call: Call, site: None) -> Reply:
    """Any other address that begins with `head`: a 404 in its dialect, which names the address that was meant."""
    rest = call.params.get("path", "")
    stream_id, _, part = rest.partition("/")
    if head == "streams/" and stream_id and part in _OF_A_STREAM and not is_stream_id(stream_id):
        raise no_stream()
    asked, shown = f"/{head}{rest}", (call.path or f"/{head}{rest}")[:200]
    meant = re.sub("/+", "/", asked).rstrip("/")
    if meant != asked and any(route.pattern().fullmatch(meant) for route in ROUTES if not _is_unknown(route)):
        meant = call.path.removesuffix(asked) + meant
        raise NotFound(f"There is nothing at {shown}. The address is {meant}, as it stands here.", code="unknown_url")
    if head == _SOCKET:
        raise NotFound(f"{shown} is the address of a WebSocket, and this was no handshake.", code="unknown_url")
    if head.startswith("v1"):
        raise openai.unknown_url(shown)
    raise NotFound(f"There is nothing at {shown}. See docs/api.md for the routes.", code="unknown_url")


def _is_unknown(route: Route) -> bool:
    return isinstance(route.endpoint, partial)


def unknown_route(path: str, **rest: Any) -> Route:
    """Return the route of addresses where nothing is: `path`, or with "<rest:path>" at its end all that begin so."""
    endpoint = partial(unknown, path.partition("<")[0])
    return Route(path=path, endpoint=endpoint, access=_OPEN, methods=_ANY, needs_site=False, **rest)


_SOCKET = "ws/streams"
_ID, _JOB = "<stream_id:stream_id>", "jobs/<stream_id:job_id>"
_BATCH = "/<file_id:batch_id>"
_CHATCMPL = f"v1/chat/completions/chatcmpl-{_ID}"

ROUTES = (
    _native("streams", native.start_stream, _CHAT, methods=("POST",), name="streams"),
    _native("streams/new", native.new_stream, _CHAT, name="new_stream"),
    _native(f"streams/{_ID}", native.stream_state, _CHAT, name="stream"),
    _native(f"streams/{_ID}/events", native.stream_events, _CHAT, name="stream_events"),
    _native(f"streams/{_ID}/stop", native.stop_stream, _CHAT, methods=("POST",), name="stop_stream"),
    _native(f"streams/{_ID}/ack", native.ack_stream, _CHAT, methods=("POST",), name="ack_stream"),
    _native(f"streams/{_ID}/watch", native.watch, _WATCH, name="watch_stream"),
    unknown_route("streams/<rest:path>"),
    _native("pipelines", pipelines.pipelines, _CHAT, name="pipelines"),
    _native("pipelines/<pipeline_name:name>", pipelines.run, _CHAT, methods=("GET", "POST"), name="pipeline"),
    unknown_route("pipelines/<rest:path>"),
    _native("jobs", pipelines.jobs, _CHAT, methods=("GET", "POST"), name="jobs", needs_rows=True),
    _native(_JOB, pipelines.job, _CHAT, name="job", needs_rows=True),
    _native(f"{_JOB}/events", pipelines.job_events, _CHAT, name="job_events", needs_rows=True),
    _native(f"{_JOB}/cancel", pipelines.cancel_job, _CHAT, methods=("POST",), name="cancel_job", needs_rows=True),
    unknown_route("jobs/<rest:path>"),
    _openai("v1/chat/completions", openai.chat_completions, _CHAT, methods=("GET", "POST"), name="chat_completions"),
    _openai(_CHATCMPL, openai.chat_completion, _CHAT, methods=("GET", "POST", "DELETE"), name="chat_completion"),
    _openai(f"{_CHATCMPL}/messages", openai.chat_messages, _CHAT, name="chat_completion_messages", needs_rows=True),
    _openai("v1/completions", openai.completions, _CHAT, methods=("POST",), name="completions"),
    _openai("v1/completions/stream", openai.token_stream, _CHAT, methods=("GET", "POST"), name="completions_stream"),
    _anthropic("v1/messages", anthropic.messages, name="messages"),
    _anthropic("v1/messages/count_tokens", anthropic.count_tokens, name="count_tokens"),
    _message_batches("", batches.message_batches, methods=("GET", "POST"), name="message_batches", takes_file=True),
    _message_batches(_BATCH, batches.message_batch, methods=("GET", "DELETE"), name="message_batch"),
    _message_batches(f"{_BATCH}/cancel", batches.cancel_messages, methods=("POST",), name="cancel_message_batch"),
    _message_batches(f"{_BATCH}/results", batches.message_results, name="message_batch_results"),
    _openai(f"v1/streams/{_ID}/events", openai.stream_events, _CHAT, name="chat_stream_events"),
    _openai("v1/models", openai.models, _CHAT, name="models"),
    _openai("v1/models/<path:model>", openai.model, _CHAT, name="model"),
    _stored("v1/files", files.files, methods=("GET", "POST"), name="files", takes_file=True),
    _stored("v1/files/<file_id:file_id>", files.file, methods=("GET", "DELETE"), name="file"),
    _stored("v1/files/<file_id:file_id>/content", files.content, name="file_content"),
    _stored("v1/batches", batches.batches, methods=("GET", "POST"), name="batches"),
    _stored("v1/batches/<file_id:batch_id>", batches.batch, name="batch"),
    _stored("v1/batches/<file_id:batch_id>/cancel", batches.cancel, methods=("POST",), name="cancel_batch"),
    unknown_route("v1", error_json=openai_chat.error_json),
    unknown_route("v1/<rest:path>", error_json=openai_chat.error_json),
    _native("livez", ops.livez, _OPEN, name="livez", needs_site=False),
    _native("health", ops.livez, _OPEN, name="health", needs_site=False),
    _native("readyz", ops.readyz, _PROBE, name="readyz"),
    _native("metrics", ops.metrics, _OPS, name="metrics"),
    *(unknown_route(f"{name}/") for name in PROBES),
    unknown_route(_SOCKET),
)

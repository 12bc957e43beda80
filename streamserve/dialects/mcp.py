"""The Model Context Protocol's server side: JSON-RPC messages in, results, progress and errors out (docs/mcp.md).

    {"method": "tools/call", "id": 3, "params": {"name": "billing", "arguments": {"question": "…"}}}
    step of the run   ──►  notifications/progress, for a caller that sent a progressToken
    its end           ──►  the result with id 3: the text, `isError` for a run that failed

Two eras (modelcontextprotocol.io/specification): until 2025-11-25 a client shakes hands (`initialize`) and has a
session; from 2026-07-28 on each request stands alone and names its version in `_meta`. Pure; the package `mcp` is not
needed: a server of its own would own the HTTP connection, which here is the site's.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from streamserve.dialects.encoder import Frame, FrameIds, PieceEncoder
from streamserve.dialects.fields import Schema
from streamserve.dialects.fold import STEP, Answer, Cited, Delta, Failed, Piece, Succeeded
from streamserve.dialects.named import NamedStream
from streamserve.protocol.errors import BadRequest, ErrorBody, NotFound
from streamserve.protocol.events import INTERRUPT, TEXT, Citation, Done, GoingAway, LoggedEvent, Status
from streamserve.protocol.ids import event_id
from streamserve.protocol.sse import FIRST_BYTES, one_line_json

MODERN = "2026-07-28"
HANDSHAKE_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # the newest first
# From this version on a client takes an event without data, which gives it the id to resume from.
_PRIMED = "2025-11-25"
_ASSUMED = "2025-03-26"  # of a request that names none, by the specification

PARSE_ERROR, INVALID_REQUEST, UNKNOWN_METHOD, INVALID_PARAMS, INTERNAL = -32700, -32600, -32601, -32602, -32603
HEADER_MISMATCH, UNSUPPORTED_VERSION = -32020, -32022
_RPC_CODES = {
    "invalid_json": PARSE_ERROR,
    "unknown_method": UNKNOWN_METHOD,
    "pipeline_not_found": INVALID_PARAMS,
    "header_mismatch": HEADER_MISMATCH,
    "unsupported_protocol_version": UNSUPPORTED_VERSION,
}
_ENVELOPE = "io.modelcontextprotocol/"
VERSION_HEADER, METHOD_HEADER, NAME_HEADER = "mcp-protocol-version", "mcp-method", "mcp-name"
_MAX_ID_CHARS = 128
_MAX_INT = 2**53
RpcId = str | int

# The arguments of a pipeline that declares no schema of its own.
QUESTION: Mapping[str, Any] = {
    "type": "object",
    "properties": {"question": {"type": "string", "description": "What is asked, in words."}},
    "required": ["question"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rpc:
    """One message. `id` None: a notification; `method` "": a response, which asks for nothing here."""

    method: str = ""
    id: RpcId | None = None
    params: Mapping[str, Any]

    @property
    def progress_token(self) -> RpcId | None:
        """What the caller names the progress of this request with; None: it wants none."""
        meta = self.params.get("_meta")
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        return token if is_id(token) else None


def is_id(value: object) -> bool:
    """Return whether a value can be the id of a request, or a token: a text or an integer."""
    if isinstance(value, str):
        return len(value) <= _MAX_ID_CHARS
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INT


MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "id": {"type": ["string", "integer"], "maxLength": _MAX_ID_CHARS, "minimum": -_MAX_INT, "maximum": _MAX_INT},
        "method": {"type": "string"},
        "params": {"type": "object"},
    },
    "required": ["jsonrpc"],
}


def parse(body: Mapping[str, Any]) -> Rpc:
    """Check the envelope of a message. Raises BadRequest."""
    if body.get("jsonrpc") != "2.0":
        raise BadRequest('A message has "jsonrpc": "2.0".', code="invalid_value", param="jsonrpc")
    if "id" in body and not is_id(body["id"]):
        message = f"An id is an integer, or a text of at most {_MAX_ID_CHARS} characters."
        raise BadRequest(message, code="invalid_value", param="id")
    if "method" not in body and ("result" in body or "error" in body):
        return Rpc(params={})
    method, params = body.get("method"), body.get("params", {})
    if not isinstance(method, str) or not 0 < len(method) <= _MAX_ID_CHARS:
        raise BadRequest("A message names its 'method'.", code="missing_field", param="method")
    if not isinstance(params, dict):
        raise BadRequest("'params' is an object.", code="invalid_type", param="params")
    return Rpc(method=method, id=body.get("id"), params=params)


def version_of(headers: Mapping[str, str]) -> str:
    """Return the protocol version that the headers name. Raises BadRequest for a version that is not spoken here."""
    version = headers.get(VERSION_HEADER, _ASSUMED)
    if version != MODERN and version not in HANDSHAKE_VERSIONS:
        message = f"MCP-Protocol-Version is {version[:40]!r}; spoken here: {', '.join((MODERN, *HANDSHAKE_VERSIONS))}."
        raise BadRequest(message, code="unsupported_protocol_version", param="MCP-Protocol-Version")
    return version


def check_modern(rpc: Rpc, headers: Mapping[str, str]) -> None:
    """Raise BadRequest unless a request stands alone: version and capabilities in `_meta`, and headers that agree."""
    meta = rpc.params.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    for name in ("protocolVersion", "clientCapabilities"):
        if _ENVELOPE + name not in meta:
            raise BadRequest(f"'_meta' needs {_ENVELOPE}{name}.", code="missing_field", param="params._meta")
    named = rpc.params.get("name") if rpc.method == "tools/call" else None
    agree = (
        (VERSION_HEADER, headers.get(VERSION_HEADER), meta[_ENVELOPE + "protocolVersion"]),
        (METHOD_HEADER, headers.get(METHOD_HEADER), rpc.method),
        (NAME_HEADER, _decoded(headers.get(NAME_HEADER)) if named is not None else None, named),
    )
    for header, value, wanted in agree:
        if value != wanted:
            message = f"The header {header} does not say what the message says."
            raise BadRequest(message, code="header_mismatch", param=header)


def _decoded(value: str | None) -> str | None:
    """Return a header's value; `=?base64?…?=` is a value that no header can hold as it is."""
    if value is None or not (value.startswith("=?base64?") and value.endswith("?=")):
        return value
    try:
        return base64.b64decode(value[len("=?base64?") : -2], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def unknown_method(method: str) -> NotFound:
    """Return the error for a method that is not here."""
    return NotFound(f"There is no method {method[:64]!r} here: tools only.", code="unknown_method", param="method")


# What goes out


def response_json(id: RpcId, result: Mapping[str, Any], *, is_modern: bool) -> dict[str, Any]:
    """Return a response. Each result of the newer era says that it is whole."""
    kind = {"resultType": "complete"} if is_modern else {}
    return {"jsonrpc": "2.0", "id": id, "result": {**kind, **result}}


def error_json(error: ErrorBody, id: RpcId | None = None) -> dict[str, Any]:
    """Return an error as a JSON-RPC response. `data` has our code, by which docs/reference/errors.md explains it."""
    fallback = INTERNAL if error.http_status >= 500 or error.http_status == 429 else INVALID_REQUEST
    if error.http_status in (400, 413) and (error.param or "").startswith("params"):
        fallback = INVALID_PARAMS
    data: dict[str, Any] = {"code": error.code, "param": error.param, "request_id": error.request_id}
    if error.code == "unsupported_protocol_version":
        data["supported"] = [MODERN, *HANDSHAKE_VERSIONS]
    code = _RPC_CODES.get(error.code, fallback)
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": error.message, "data": data}}


def status_of(error: ErrorBody, *, is_modern: bool) -> int:
    """Return the HTTP status of an error of a message that could be read.

    In the older era a 404 says that the session is gone, so that what the message asked for is answered by a 200.
    """
    code = _RPC_CODES.get(error.code)
    if code == UNKNOWN_METHOD:
        return 404 if is_modern else 200
    if code == INVALID_PARAMS or (error.http_status == 400 and (error.param or "").startswith("params")):
        return 400 if is_modern else 200
    return error.http_status


def server_json(name: str, version: str) -> dict[str, Any]:
    """Return what both eras tell of the server."""
    return {"capabilities": {"tools": {}}, "serverInfo": {"name": name, "version": version}}


def initialized_json(asked: object, name: str, version: str) -> dict[str, Any]:
    """Return the result of a handshake: the version asked for if it is spoken here, else the newest."""
    spoken = asked if asked in HANDSHAKE_VERSIONS else HANDSHAKE_VERSIONS[0]
    return {"protocolVersion": spoken, **server_json(name, version)}


def discovered_json(name: str, version: str) -> dict[str, Any]:
    """Return what a client of the newer era asks first."""
    info = {_ENVELOPE + "serverInfo": {"name": name, "version": version}}
    versions = [MODERN, *HANDSHAKE_VERSIONS]
    return {**_PRIVATE, "supportedVersions": versions, "capabilities": {"tools": {}}, "_meta": info}


_PRIVATE = {"ttlMs": 0, "cacheScope": "private"}


def tools_json(tools: Sequence[Mapping[str, Any]], *, is_modern: bool) -> dict[str, Any]:
    """Return the list of tools, which is of this caller alone."""
    return {"tools": list(tools), **(_PRIVATE if is_modern else {})}


def tool_json(name: str, title: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pipeline as a tool."""
    return {"name": name, "title": title, "description": description, "inputSchema": schema or QUESTION}


def result_json(text: str, citations: Sequence[Citation], stream_id: str, done: Done) -> dict[str, Any]:
    """Return the result of a run: its text, and a link for each source that is on the web.

    A run that waits for its user's consent is an error: the protocol's caller is a program.
    """
    links = [
        {"type": "resource_link", "uri": one.url, "name": one.title or one.id}
        for one in citations
        if one.url and one.url.startswith(("http://", "https://"))
    ]
    about = {"stream_id": stream_id, "finish_reason": done.finish_reason, "usage": done.usage.as_json()}
    asks = done.finish_reason == INTERRUPT
    content = [{"type": "text", "text": text}, *links, *([{"type": "text", "text": _ASKS}] if asks else [])]
    return {"content": content, "isError": asks, "_meta": {"streamserve/run": about}}


_ASKS = "The run asks its user before it goes on, and nobody can be asked over MCP. Ask it at the site."


def failed_json(failed: Failed, stream_id: str) -> dict[str, Any]:
    """Return the result of a run that failed: the model that called it reads why."""
    about = {"stream_id": stream_id, "code": failed.code, "retryable": failed.retryable}
    text = [{"type": "text", "text": failed.message}]
    return {"content": text, "isError": True, "_meta": {"streamserve/run": about}}


def whole_json(answer: Answer, stream_id: str) -> dict[str, Any]:
    """Return the result of a whole answer."""
    if isinstance(answer.end, Failed):
        return failed_json(answer.end, stream_id)
    return result_json(answer.choices[0].text, answer.citations, stream_id, answer.done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The request whose response a stream shows. `is_resumable`: by GET with the id of the last event."""

    id: RpcId
    token: RpcId | None = None
    is_modern: bool = False
    is_resumable: bool = False
    is_primed: bool = False

    @classmethod
    def of(cls, rpc: Rpc, version: str, *, has_session: bool) -> Asked:
        """Return what a call asks for. Raises BadRequest for a notification, which has no response."""
        if rpc.id is None:
            raise BadRequest("A call of a tool needs an id.", code="missing_field", param="id")
        is_modern = version == MODERN
        return cls(
            id=rpc.id,
            token=rpc.progress_token,
            is_modern=is_modern,
            is_resumable=has_session and not is_modern,
            is_primed=version == _PRIMED,
        )


class McpEncoder(PieceEncoder):
    """A run as the events of one response: progress by steps, then the result.

    The ids of events carry the request's id, so that a reader who resumes gets its response under that id.
    """

    keepalive_event = PieceEncoder.keepalive

    def __init__(self, stream: NamedStream, asked: Asked) -> None:
        super().__init__(FrameIds("", "m"))
        self._stream, self._asked = stream, asked
        self._text, self._citations = StringIO(), list[Citation]()
        self._last_step = 0
        if asked.is_resumable and asked.is_primed:
            self.first_bytes = FIRST_BYTES + f"id: {self._id(0)}\ndata: \n\n".encode()

    def show(self, piece: Piece) -> Sequence[Frame]:
        """Return the frames of a piece."""
        if isinstance(piece, Delta):
            if piece.block.kind == TEXT and piece.block.choice == 0:
                self._text.write(piece.token.text)
        elif isinstance(piece, Cited):
            self._citations.append(piece.citation)
        elif isinstance(piece, Status):
            return self._progress(piece)
        elif isinstance(piece, Succeeded):
            return [self._response(result_json(self._text.getvalue(), self._citations, self._stream.id, piece.done))]
        elif isinstance(piece, Failed):
            return [self._response(failed_json(piece, self._stream.id))]
        return ()

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the event's frames; the last has an id where the response can be resumed."""
        frames = [one for piece in self.fold.feed(logged.event) for one in self.show(piece)]
        id_line = f"id: {self._id(logged.seq)}\n" if self._asked.is_resumable and logged.seq else ""
        return b"".join([f"{id_line}data: {data}\n\n".encode() for data, _ in frames])

    def going_away(self, notice: GoingAway) -> bytes:
        """Return nothing where the client comes back for the rest, else an error."""
        return b"" if self._asked.is_resumable else super().going_away(notice)

    def _progress(self, status: Status) -> Sequence[Frame]:
        """Return the progress of a step: the protocol wants numbers that grow."""
        if status.status != STEP or self._asked.token is None or (status.step or 0) <= self._last_step:
            return ()
        self._last_step = status.step or 0
        params: dict[str, Any] = {"progressToken": self._asked.token, "progress": self._last_step}
        if status.of is not None:
            params["total"] = status.of
        if status.message:
            params["message"] = status.message
        return [Frame(one_line_json({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}))]

    def _response(self, result: Mapping[str, Any]) -> Frame:
        return Frame(one_line_json(response_json(self._asked.id, result, is_modern=self._asked.is_modern)))

    def _id(self, seq: int) -> str:
        kept = json.dumps([self._asked.id, self._asked.token]).encode()
        return f"{event_id(self._stream.log_id, seq)}:m{base64.urlsafe_b64encode(kept).decode().rstrip('=')}"


def resumed(last_id: str) -> tuple[str, Asked] | None:
    """Return the event's id, and the request, of the id of an event; None for another text."""
    event, _, kept = last_id.partition(":m")
    try:
        values = json.loads(base64.b64decode(kept + "=" * (-len(kept) % 4), altchars=b"-_", validate=True))
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, list) or len(values) != 2 or not is_id(values[0]):
        return None
    token = values[1] if is_id(values[1]) else None
    return event, Asked(id=values[0], token=token, is_resumable=True)

"""`document`: the OpenAPI 3.1 document of the routes that a site serves, for one caller. Pure.

Paths, methods and who may call come from the table of routes, summaries from the endpoints' docstrings, bodies and
queries from the field tables that validate them (operations.py), replies from the functions that write them
(replies.py), statuses from what a method takes and does. A schema with a title becomes a component.
(Source: OpenAPI 3.1.1, spec.openapis.org.)
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from http import HTTPStatus
from typing import Any, Protocol

from streamserve import __version__
from streamserve.api.call import Endpoint
from streamserve.api.idempotency import KEY
from streamserve.api.openapi.operations import BYTES, EVENT_STREAM, FORM, ITSELF, JSON, OPERATIONS, Operation, run_body
from streamserve.api.openapi.replies import component
from streamserve.dialects.ag_ui import events as ag_ui_events
from streamserve.dialects.anthropic import message as anthropic_message
from streamserve.dialects.fields import Schema, Table, schema_of
from streamserve.dialects.mcp import error_json as mcp_error_json
from streamserve.dialects.openai import shapes
from streamserve.protocol.codes import CODES
from streamserve.protocol.errors import ErrorBody
from streamserve.protocol.limits import Limits

_PART = re.compile(r"<(\w+):(\w+)>")
# The address with which an endpoint's docstring begins.
_ADDRESS = re.compile(r"^[A-Z]+ /(?:\{[^}]*\}|[^\s:,])+(?: \{.*?\})?[:,] ")
_ERRORS: Mapping[Callable[[ErrorBody], dict[str, Any]], str] = {
    shapes.error_json: "OpenAIError",
    anthropic_message.error_json: "MessageError",
    ag_ui_events.error_json: "RunError",
    mcp_error_json: "RpcError",
}
# The statuses of errors: of every method, of those that not everyone may call, and by what they take and do.
_EVERY, _CLOSED, _WITH_BODY = (400, 429, 500, 503), (401, 403, 404), (408, 413, 415)
_ASKING, _RESUMING = (409, 410, 422, 504, 507), (410,)
_NAMES = {499: "Client Closed Request"}
_SCHEMES: Mapping[str, Any] = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key: docs/access.md."},
    "apiKey": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "An API key, as Anthropic's clients send it.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "sessionid",
        "description": "A signed-in session of the site: Django's SESSION_COOKIE_NAME.",
    },
    "csrf": {
        "type": "apiKey",
        "in": "header",
        "name": "X-CSRFToken",
        "description": "Django's CSRF token, which a session's unsafe methods send.",
    },
}
_TEXT = {"type": "string"}
_HEADERS: Mapping[str, Any] = {
    "X-Request-Id": {"schema": _TEXT, "description": "Under it the server's log has what happened."},
    "Retry-After": {"schema": _TEXT, "description": "After how many seconds to ask again."},
    "X-Stream-Id": {
        "schema": _TEXT,
        "description": "The answer that was started, for GET /streams/{id}/events.",
    },
    "ETag": {"schema": _TEXT, "description": "Send it as If-None-Match: 304 while the reply is the same."},
}
_KEY: Mapping[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "pattern": f"^{KEY.pattern}$"},
    "description": "Makes it safe to send the request again: the same key and body start one answer.",
}
_LAST: Mapping[str, Any] = {
    "name": "Last-Event-ID",
    "in": "header",
    "schema": {"type": "string"},
    "description": "The id of the last event that the reader has: the stream goes on after it.",
}


class Described(Protocol):
    """What is shown of a route."""

    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def endpoints(self) -> Mapping[str, Endpoint]: ...
    @property
    def error_json(self) -> Callable[[ErrorBody], dict[str, Any]]: ...
    @property
    def access(self) -> Any: ...
    @property
    def needs(self) -> frozenset[str]: ...


class Called(Protocol):
    """What is shown of a pipeline that the caller may use. A title may be a lazy translation."""

    @property
    def title(self) -> object: ...
    @property
    def description(self) -> str: ...
    @property
    def input_schema(self) -> Mapping[str, Any]: ...


def summary_of(endpoint: Endpoint) -> str:
    """Return what an endpoint does: the first line of its docstring, without its address."""
    first = (endpoint.__doc__ or "").strip().partition("\n")[0]
    text = _ADDRESS.sub("", first, count=1)
    return text[:1].upper() + text[1:]


def document(
    routes: Iterable[Described],
    *,
    converters: Mapping[str, str],
    served: Collection[str],
    limits: Limits,
    root: str = "/",
    pipelines: Mapping[str, Called] = {},
) -> dict[str, Any]:
    """Return the document. `served`: the services that the site has; `root`: the path before all addresses."""
    maker = _Maker(converters, limits)
    has_users = "watches" in served
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        is_served = route.needs <= set(served) and (has_users or route.access.scope == "chat")
        if route.name and is_served:
            paths[maker.address(route)] = maker.path(route, has_users=has_users)
    for name, one in pipelines.items():
        paths[f"/pipelines/{name}"] = maker.pipeline(name, one, paths["/pipelines/{name}"])
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "streamserve",
            "version": __version__,
            "description": "Streams of language models: native, and as the APIs of OpenAI, Anthropic and front ends.",
        },
        "servers": [{"url": root.rstrip("/") or "/"}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(maker.schemas.items())),
            "responses": dict(sorted(maker.responses.items())),
            "headers": dict(_HEADERS),
            **({"securitySchemes": dict(_SCHEMES)} if has_users else {}),
        },
    }


def text_of(shown: Mapping[str, Any], indent: int | None = None) -> str:
    """Return a document as JSON, in one line without an indent."""
    return json.dumps(shown, ensure_ascii=False, separators=(",", ": " if indent else ":"), indent=indent)


class _Maker:
    """Makes paths, and collects the components that they refer to."""

    def __init__(self, converters: Mapping[str, str], limits: Limits) -> None:
        self._converters, self._limits = converters, limits
        self.schemas: dict[str, Any] = {}
        self.responses: dict[str, Any] = {}

    def address(self, route: Described) -> str:
        """Return the path of a route as a template."""
        return "/" + _PART.sub(r"{\2}", route.path)

    def path(self, route: Described, *, has_users: bool) -> dict[str, Any]:
        """Return the methods of a route. What takes GET takes HEAD."""
        found = [
            {
                "name": part[2],
                "in": "path",
                "required": True,
                "schema": {"type": "string", "pattern": f"^{self._converters[part[1]]}$"},
            }
            for part in _PART.finditer(route.path)
        ]
        shown = {
            method.lower(): self._method(route, method, endpoint, has_users=has_users)
            for method, endpoint in route.endpoints.items()
            if method != "HEAD"
        }
        return {**({"parameters": found} if found else {}), **shown}

    def pipeline(self, name: str, pipeline: Called, generic: Mapping[str, Any]) -> dict[str, Any]:
        """Return the methods of one pipeline, whose input has a schema of its own."""
        title = str(pipeline.title)
        key = re.sub(r"\W", "_", name)
        methods: dict[str, Any] = {}
        for method in ("get", "post"):
            words = {"summary": title, "description": pipeline.description or title}
            methods[method] = {**generic[method], **words, "operationId": f"{method}_pipeline_{key}"}
        own = pipeline.input_schema
        if own:
            schema = dict(run_body(self._limits))
            asked = self._foreign(own, f"{key}Input")
            body = {**schema, "properties": {**schema["properties"], "input": asked}}
            content = {JSON: {"schema": self._component(f"{key}Request", body)}}
            methods["post"]["requestBody"] = {**generic["post"]["requestBody"], "content": content}
        return methods

    def _method(self, route: Described, method: str, endpoint: Endpoint, *, has_users: bool) -> dict[str, Any]:
        operation = OPERATIONS.get(endpoint, ITSELF)
        text = inspect.cleandoc(endpoint.__doc__ or "")
        rest = text.partition("\n\n")[2]
        out: dict[str, Any] = {
            "operationId": f"{method.lower()}_{route.name}",
            "tags": [_tag(route)],
            "summary": summary_of(endpoint),
            **({"description": rest} if rest else {}),
        }
        parameters = self._parameters(operation)
        if parameters:
            out["parameters"] = parameters
        body = self._body(operation)
        if body is not None:
            out["requestBody"] = body
        out["responses"] = self._responses(route, operation)
        if has_users:
            out["security"] = _security(route, method)
        return out

    def _parameters(self, operation: Operation) -> list[Any]:
        table = operation.query if isinstance(operation.query, Mapping) else operation.query(self._limits)
        found: list[Any] = [_parameter(name, self._hoist(schema_of(reader)), table) for name, reader in table.items()]
        if operation.has_key:
            found.append(_KEY)
        return [*found, _LAST] if operation.is_resuming else found

    def _body(self, operation: Operation) -> dict[str, Any] | None:
        if operation.form is not None:
            return {"required": True, "content": {FORM: {"schema": self._hoist(operation.form(self._limits))}}}
        if operation.body is None:
            return None
        schema = operation.body(self._limits)
        named = self._component(operation.takes, schema) if operation.takes else self._hoist(schema)
        return {"required": not operation.is_body_optional, "content": {JSON: {"schema": named}}}

    def _responses(self, route: Described, operation: Operation) -> dict[str, Any]:
        headers = _refs("X-Request-Id", *(["X-Stream-Id"] if operation.is_asking or operation.events else []))
        if 304 in operation.statuses:
            headers |= _refs("ETag")
        content: dict[str, Any] = {}
        if operation.reply:
            content[JSON] = {"schema": self._named(operation.reply)}
        if operation.events:
            # 3.1 has no word for the items of a stream; 3.2 calls it itemSchema.
            content[EVENT_STREAM] = {"x-itemSchema": self._named(operation.events)}
        for media in operation.media:
            binary = {} if media == BYTES else {"type": "string"}
            content[media] = {"schema": binary}
        name = HTTPStatus(operation.status).phrase
        found = {str(operation.status): {"description": name, "headers": headers, "content": content}}
        error = _ERRORS.get(route.error_json, "Error")
        for status in sorted({*self._statuses(route, operation)}):
            if status < 400:
                found[str(status)] = {"description": HTTPStatus(status).phrase, "headers": _refs("X-Request-Id")}
            else:
                found[str(status)] = self._error(error, status)
        if operation.says_why:
            found["503"] = {**found["200"], "description": HTTPStatus(503).phrase}
        return found

    def _statuses(self, route: Described, operation: Operation) -> Iterable[int]:
        yield from _EVERY
        yield from operation.statuses
        if route.access.callers != ("anyone",):
            yield from _CLOSED
        if operation.body is not None or operation.form is not None:
            yield from _WITH_BODY
        if operation.is_asking or operation.has_key:
            yield from _ASKING
        if operation.is_resuming:
            yield from (204, *_RESUMING)

    def _error(self, name: str, status: int) -> dict[str, Any]:
        key = f"{name}{status}"
        if key not in self.responses:
            codes = ", ".join(f"`{one.code}`" for one in CODES.values() if status in one.places)
            phrase = _NAMES.get(status) or HTTPStatus(status).phrase
            again = ["Retry-After"] if status in (429, 503, 507) else []
            self.responses[key] = {
                "description": f"{phrase}: {codes}" if codes else phrase,
                "headers": _refs("X-Request-Id", *again),
                "content": {JSON: {"schema": self._named(name)}},
            }
        return {"$ref": f"#/components/responses/{key}"}

    # Schemas

    def _named(self, name: str) -> dict[str, Any]:
        """Return a reference to a reply or an event."""
        return self._component(name, component(name))

    def _component(self, name: str, schema: Schema) -> dict[str, Any]:
        """Return a reference to `schema`, under this name, or one with a number where another schema has the name."""
        own, key, number = self._hoist(schema), name, 2
        while self.schemas.setdefault(key, own) != own:
            key, number = f"{name}{number}", number + 1
        return {"$ref": f"#/components/schemas/{key}"}

    def _hoist(self, schema: Any) -> Any:
        """Return a schema in which each part that has a title is a reference to a component."""
        if isinstance(schema, list | tuple):
            return [self._hoist(one) for one in schema]
        if not isinstance(schema, Mapping):
            return schema
        own = {name: self._hoist(one) for name, one in schema.items()}
        if isinstance(own.get("title"), str):
            return self._component(own.pop("title"), own)
        return own

    def _foreign(self, schema: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return a reference to a schema of the site's own: what it defines for itself becomes components too."""
        definitions = {**schema.get("$defs", {}), **schema.get("definitions", {})}

        def moved(part: Any) -> Any:
            if isinstance(part, list):
                return [moved(one) for one in part]
            if not isinstance(part, Mapping):
                return part
            out = {key: moved(one) for key, one in part.items() if key not in ("$defs", "definitions")}
            ref = out.get("$ref")
            if isinstance(ref, str) and ref.startswith(("#/$defs/", "#/definitions/")):
                out["$ref"] = f"#/components/schemas/{name}.{ref.rpartition('/')[2]}"
            return out

        for key, one in definitions.items():
            self.schemas[f"{name}.{key}"] = moved(one)
        self.schemas[name] = moved(schema)
        return {"$ref": f"#/components/schemas/{name}"}


def _parameter(name: str, schema: Any, table: Table) -> dict[str, Any]:
    is_needed = name in getattr(table, "needed", ())
    return {"name": name, "in": "query", "schema": schema, **({"required": True} if is_needed else {})}


def _refs(*names: str) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _security(route: Described, method: str) -> list[dict[str, list[str]]]:
    """Return what a caller needs: any of these. Where ANONYMOUS is on, visitors need nothing."""
    callers = route.access.callers
    if callers == ("anyone",):
        return []
    found: list[dict[str, list[str]]] = [{"key": []}, {"apiKey": []}]
    if "session" in callers:
        found.append({"session": []} if method == "GET" else {"session": [], "csrf": []})
    return found


_TAGS = {"v1/messages": "Anthropic", "v1": "OpenAI", "ai": "AI SDK", "ag-ui": "AG-UI", "mcp": "MCP"}
_OPERATIONS = ("livez", "health", "readyz", "metrics", "openapi.json")


def _tag(route: Described) -> str:
    for start, tag in _TAGS.items():
        if route.path == start or route.path.startswith(f"{start}/"):
            return tag
    first = route.path.partition("/")[0]
    return "Operations" if first in _OPERATIONS else "OpenAI" if first.endswith("tokenize") else first

"""`/openapi.json`: which routes it lists, for whom, and that it is one document with the tables that validate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from django.test.utils import override_settings
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from streamserve import Run, pipeline
from streamserve.api.openapi.document import document
from streamserve.api.openapi.operations import OPERATIONS
from streamserve.api.openapi.replies import EVENTS as STREAMED
from streamserve.api.openapi.replies import REPLIES
from streamserve.api.openapi.samples import EVENTS, MORE
from streamserve.api.routes import CONVERTERS, ROUTES, SERVICES
from streamserve.asgi import anyone, app
from streamserve.clients.pipeline.client import forget
from streamserve.dialects.fields import Fields, boolean, integer, object_schema, read, text
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.limits import Limits
from streamserve.web import site
from tests.conftest import Caller

pytestmark = pytest.mark.django_db(transaction=True)

TESTED = {"TESTING": True}


@pytest.fixture
def secret() -> Iterator[None]:
    """A pipeline that alice may not use, and one with an input of its own."""

    async def payroll(run: Run) -> None:
        """Read the payroll."""

    async def order(run: Run) -> None:
        """Find an order."""

    schema = {"type": "object", "properties": {"order": {"$ref": "#/$defs/Order"}}, "$defs": {"Order": {"minimum": 1}}}
    pipeline(permission="auth.add_user")(payroll)
    pipeline(input_schema=schema)(order)
    yield
    forget("payroll")
    forget("order")


def whole() -> dict[str, Any]:
    """Return the document of a site that serves everything."""
    return document(ROUTES, converters=CONVERTERS, served=SERVICES, limits=Limits())


def test_the_document_is_valid() -> None:
    """By the specification of OpenAPI 3.1, of a site with everything and of one without a database."""
    validate(whole())
    validate(document(ROUTES, converters=CONVERTERS, served={"answers", "ops", "responses"}, limits=Limits()))


def test_every_endpoint_has_its_operation() -> None:
    """A new route is described in OPERATIONS; only the document itself is not."""
    endpoints = {one for route in ROUTES if route.name and route.name != "openapi" for one in route.endpoints.values()}
    assert endpoints == set(OPERATIONS)


def test_every_field_of_a_body_says_what_it_takes() -> None:
    """No field of a request is described by nothing, but those that take anything."""
    anything = {"state", "input", "payload", "summary", "content", "output", "personality", "image_url", "file"}
    for name, schema in whole()["components"]["schemas"].items():
        if name.endswith("Request"):
            for field, one in schema.get("properties", {}).items():
                assert one or field in anything, f"{name}.{field}"


# Parts of replies that are described by nothing, and why.
LOOSE = {
    "is the site's own code's": r"\.(state|run_state|snapshot|value|result|progress)$|UIMessage.*\.data$",
    "is what a tool takes, or has returned": r"\.(input|output)$",
    "is a schema, as it was sent": r"\.(parameters|schema|inputSchema)$",
    "is empty when it begins": r"Event\.data\.(item|part|message)\.(content|summary|annotations|logprobs)\[]$",
    "has no fields": r"^StreamEvent\.data$|\.capabilities\.tools$",
    "is in OpenAPI's specification": r"^OpenAPI\.(paths|components)$",
}


def loose(schema: Any, path: str) -> Iterator[str]:
    """Yield the parts of a schema that say nothing: objects without fields, and what may be anything."""
    if "$ref" in schema:
        return
    kinds = schema.get("type", [])
    says_what = schema.keys() & {"type", "const", "enum", "anyOf"}
    is_bare = "object" in kinds and not schema.get("properties") and not schema.get("additionalProperties")
    if not says_what or is_bare:
        yield path
    for name, one in schema.get("properties", {}).items():
        yield from loose(one, f"{path}.{name}")
    for part in schema.get("anyOf", ()):
        yield from loose(part, path)
    for name, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(schema.get(name), dict):
            yield from loose(schema[name], path + mark)


def test_every_reply_says_what_it_has() -> None:
    """No part of a reply, an error or an event is an object without fields, or anything, but for LOOSE."""
    schemas = whole()["components"]["schemas"]
    found = {part for name in {*REPLIES, *STREAMED} for part in loose(schemas[name], name)}
    left = {part for part in found if not any(re.search(reason, part) for reason in LOOSE.values())}
    assert left == set()
    for why, reason in LOOSE.items():
        assert any(re.search(reason, part) for part in found), f"nothing {why} any more"


def test_every_reply_has_a_schema() -> None:
    """Each response with a JSON body names what is in it; 204 and 202 of MCP have no body."""
    shown = whole()
    for path, methods in shown["paths"].items():
        for method, operation in methods.items():
            if method == "parameters":
                continue
            for status, given in operation["responses"].items():
                found = given
                if "$ref" in given:
                    found = shown["components"]["responses"][given["$ref"].rpartition("/")[2]]
                body = found.get("content", {}).get("application/json")
                assert body is None or "$ref" in body["schema"], (path, method, status)
                assert body or status[0] != "4", (path, method, status)


def test_a_reader_is_described_by_its_own_bounds() -> None:
    """A table names what must be there, for the schema and for the reader."""
    table = Fields({"n": integer(1, 8), "name": text(1, 3), "flag": boolean}, "n")
    assert object_schema(table) == {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 1, "maximum": 8},
            "name": {"type": ["string", "null"], "minLength": 1, "maxLength": 3},
            "flag": {"type": ["boolean", "null"]},
        },
        "required": ["n"],
        "additionalProperties": False,
    }
    with pytest.raises(BadRequest) as raised:
        read({"n": None}, table)
    assert (raised.value.code, raised.value.param) == ("missing_field", "n")


def test_every_kind_of_event_is_described() -> None:
    """Each event of a native stream matches the schema of its name."""
    kinds = {
        one["properties"]["event"]["const"]: one for one in whole()["components"]["schemas"]["StreamEvent"]["anyOf"]
    }
    for event in (*EVENTS, *MORE):
        Draft202012Validator(kinds[event.type]).validate({"event": event.type, "data": event.payload()})


async def test_pipelines_are_shown_to_those_who_may_use_them(secret: None, engine: None, alice_key: str) -> None:
    """With the schemas of their inputs; for anyone else they do not exist."""
    shown = (await Caller(key=alice_key).get("/openapi.json")).json()
    assert "/pipelines/order" in shown["paths"]
    assert "/pipelines/payroll" not in shown["paths"]
    body = shown["paths"]["/pipelines/order"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/orderRequest"}
    schemas = shown["components"]["schemas"]
    assert schemas["orderInput"]["properties"]["order"] == {"$ref": "#/components/schemas/orderInput.Order"}
    assert schemas["orderInput.Order"] == {"minimum": 1}
    validate(shown)
    assert "order" not in str((await Caller().get("/openapi.json")).json()["paths"].keys() & {"/pipelines/order"})


OPTIONAL = {"CONVERSATIONS": "/conversations", "MCP_ENDPOINT": "/mcp", "USAGE": "/usage"}


@pytest.mark.parametrize("is_on", [True, False])
async def test_what_settings_leave_out_is_not_listed(transactional_db: Any, is_on: bool) -> None:
    """A route whose service the site lacks is none of its routes."""
    with override_settings(STREAMSERVE={**TESTED, **dict.fromkeys(OPTIONAL, is_on)}):
        await site.reset()
        paths = (await Caller().get("/openapi.json")).json()["paths"]
        await site.reset()
    assert {path in paths for path in OPTIONAL.values()} == {is_on}
    assert "/streams" in paths
    assert "/v1/moderations" not in paths


async def test_the_document_is_cached_by_its_etag(engine: None, alice_key: str) -> None:
    """304 while it is the same; a HEAD has the headers of the GET, and its length."""
    caller = Caller(key=alice_key)
    first = await caller.get("/openapi.json")
    assert first["Vary"].startswith("Authorization")
    again = await caller.get("/openapi.json", **{"if-none-match": first["ETag"]})
    assert (again.status_code, again.content, again["ETag"]) == (304, b"", first["ETag"])
    head = await caller.client.head("/openapi.json", headers=caller.headers)
    assert (head.status_code, head.content, head["ETag"]) == (200, b"", first["ETag"])
    assert head["Content-Length"] == str(len(first.content))


async def test_the_asgi_app_lists_what_it_serves() -> None:
    """Below its prefix: no jobs, no files, no metrics, and no way to authenticate, which is the host's own."""
    async with app(models={"echo": "echo"}, authenticate=anyone, prefix="/ai") as ai:
        transport = httpx.ASGITransport(app=ai)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            shown = (await client.get("/ai/openapi.json")).json()
    validate(shown)
    assert shown["servers"] == [{"url": "/ai"}]
    assert {"/streams", "/v1/chat/completions", "/v1/messages"} <= shown["paths"].keys()
    assert not {"/jobs", "/v1/files", "/metrics", "/conversations"} & shown["paths"].keys()
    assert "securitySchemes" not in shown["components"]


@pytest.mark.parametrize(
    ("address", "of"),
    [("/v1/messages/nothing", "type"), ("/v1/nothing%0Aelse", "error"), ("/conversations/x%0Ay", "error")],
)
async def test_an_unknown_address_is_a_404_in_its_dialect(engine: None, address: str, of: str) -> None:
    """Also below Anthropic's routes, and with a line break in it."""
    reply = await Caller().get(address)
    assert (reply.status_code, reply["Content-Type"]) == (404, "application/json")
    assert next(iter(reply.json())) == of

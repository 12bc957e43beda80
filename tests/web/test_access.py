"""Default deny: every route declares its callers and keeps to that. The matrix is made from the URLconf itself."""

from __future__ import annotations

import re
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Permission
from django.contrib.sessions.models import Session
from django.db import connection
from django.test import AsyncClient, Client
from django.test.utils import override_settings
from django.urls import URLPattern

from streamserve import urls
from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.api.routes import ANYONE, CHAT_CALLERS, ROUTES, SERVICES, Access, Route
from streamserve.models import ApiKey
from streamserve.models import Stream as StreamRow
from streamserve.testing import DaphneServer
from streamserve.web import site
from streamserve.web.auth import VISITOR_COOKIE
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import check_native
from tests.web.conftest import PROMPT, communicator, make_caller

_HEADS = ("streams", "pipelines", "jobs", "attachments", "conversations", "ai", "ag-ui", "v1")
_NOWHERE = {f"{head}/<rest:path>" for head in _HEADS}
_NOWHERE |= {"v1", "v1/messages/<rest:path>", "livez/", "health/", "readyz/", "metrics/", "ws/streams"}
OPEN_TO_ALL = {"livez", "health", "readyz", "openapi.json", *_NOWHERE}
UNKNOWN_ID = "0" * 32
_JSON_RPC_INVALID = -32600  # what MCP says instead
# tests/web/test_conversations.py, test_mcp.py and api/openai/test_moderations.py have them.
KEPT_BY_SETTING = {"conversations", "shares", "attachments", "mcp_endpoint", "moderator"}

pytestmark = pytest.mark.django_db(transaction=True)


def patterns() -> list[URLPattern]:
    """Return the patterns of the table's routes: but for the pages' and the doctor's."""
    patterns = (pattern for pattern in urls.urlpatterns if isinstance(pattern, URLPattern))
    return [pattern for pattern in patterns if pattern.name not in ("chat", "doctor", "shared")]


def route_of(pattern: URLPattern) -> Route:
    return pattern.callback.route  # type: ignore[attr-defined,no-any-return]


def address(pattern: URLPattern) -> str:
    path = re.sub("<stream_id:[a-z_]+>", UNKNOWN_ID, str(pattern.pattern))
    path = path.replace("<rest:path>", "nothing/at/all").replace("<path:model>", "nothing")
    path = path.replace("<file_id:file_id>", "file-none").replace("<file_id:batch_id>", "batch_none")
    path = re.sub("<(?:file_id|part):[a-z_]+>", "nothing", path)
    return "/" + path.replace("<pipeline_name:name>", "nothing")


def error_of(response: Any) -> dict[str, Any]:
    """Return the error in a response: AG-UI's is the body itself, an event."""
    body = response.json()
    return body if body.get("type") == "RUN_ERROR" else body["error"]  # type: ignore[no-any-return]


def test_the_urlconf_is_the_table() -> None:
    """Every row is a pattern, in the table's order; the open routes are these."""
    assert [route_of(pattern) for pattern in patterns()] == list(ROUTES)
    assert {str(one.pattern) for one in patterns() if route_of(one).access.callers == ANYONE} == OPEN_TO_ALL


def test_a_route_without_a_declaration_fails_the_import() -> None:
    """A row cannot be built without its access, nor an access without known kinds of callers."""

    async def endpoint(call: Call, answers: Answers) -> Reply:
        return json_reply({})

    with pytest.raises(TypeError, match="access"):
        Route(path="open", endpoints={"GET": endpoint})  # type: ignore[call-arg]
    for callers in ((), ("everybody",), (*CHAT_CALLERS, "")):
        with pytest.raises(ValueError, match="callers are some of"):
            Access(callers=callers)


def test_a_route_of_a_service_that_nobody_makes_fails_the_import() -> None:
    """An endpoint takes services by their names; another name is an error where the row is."""

    async def endpoint(call: Call, database: Any) -> Reply:
        return json_reply({})

    with pytest.raises(TypeError, match="not 'database'"):
        Route(path="open", access=Access(callers=ANYONE), endpoints={"GET": endpoint})


async def test_the_site_has_every_service(engine: None) -> None:
    """What an endpoint may take, the site gives it."""
    assert set(site.get_site().services.by_name) == set(SERVICES) - KEPT_BY_SETTING
    assert {name for route in ROUTES for name in route.services} == set(SERVICES)


def test_routes_handle_what_sites_turn_on() -> None:
    """The route itself handles CSRF, login and transactions."""
    for pattern in patterns():
        view: Any = pattern.callback
        assert view.csrf_exempt
        assert view.login_required is False
        assert "default" in view._non_atomic_requests


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: str(pattern.pattern))
async def test_a_closed_route_needs_credentials(pattern: URLPattern, engine: None) -> None:
    """Without credentials, and with wrong ones, a closed route answers 401 in its dialect, whatever the id."""
    if str(pattern.pattern) in OPEN_TO_ALL:
        return
    for headers in ({}, {"authorization": "Bearer " + "x" * 40}, {"x-api-key": "'; drop table"}):
        response = await AsyncClient().generic(
            route_of(pattern).methods[0], address(pattern), headers=headers, content_type="application/json"
        )
        assert response.status_code == 401, (pattern, headers)
        assert error_of(response)["message"]
        assert response["WWW-Authenticate"] == "Bearer"
        assert response["X-Request-Id"]


@pytest.mark.parametrize("pattern", patterns(), ids=lambda pattern: str(pattern.pattern))
async def test_other_verbs_are_405_with_allow(pattern: URLPattern, engine: None) -> None:
    """A 405 comes in the dialect, never as Django's page."""
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"} - set(route_of(pattern).methods):
        response = await AsyncClient().generic(method, address(pattern))
        assert response.status_code == 405, (pattern, method)
        assert error_of(response)["code"] in ("method_not_allowed", _JSON_RPC_INVALID)
        assert response["Allow"] == ", ".join(route_of(pattern).methods)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/streams/nothing", "stream_not_found"),
        ("/streams/nothing/nothing", "unknown_url"),
        ("/v1/nothing", "unknown_url"),
        (f"/streams/{UNKNOWN_ID}/nothing", "unknown_url"),
        ("/v1/uploads/x", "unknown_url"),
        ("/v1", "unknown_url"),
        ("/v1/", "unknown_url"),
        ("/streams/", "unknown_url"),
        ("/pipelines/a/b", "unknown_url"),
        ("/jobs/x", "unknown_url"),
        ("/livez/", "unknown_url"),
        ("/ws/streams", "unknown_url"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS"])
async def test_unknown_addresses_are_404_in_the_dialect(path: str, code: str, method: str) -> None:
    """A 404 is the dialect's error object, because SDKs read it. What is no stream id names no stream."""
    response = await AsyncClient(enforce_csrf_checks=True).generic(method, path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == code
    assert ("type" in response.json()["error"]) == path.startswith("/v1"), "OpenAI's form has a type"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/streams/", "/streams"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1//models", "/v1/models"),
        (f"/streams/{UNKNOWN_ID}/events/", f"/streams/{UNKNOWN_ID}/events"),
        ("/jobs/", "/jobs"),
        ("/readyz/", "/readyz"),
        ("/v1/chat/", None),
    ],
)
@pytest.mark.parametrize("prefix", ["", "/ai"])
async def test_a_slash_too_many_is_told_the_address(path: str, meant: str | None, prefix: str) -> None:
    """With the prefix under which the site has us; Anthropic's clients get it in their form."""
    with override_settings(ROOT_URLCONF="tests.site.prefixed_urls" if prefix else "tests.site.urls"):
        response = await AsyncClient().post(prefix + path, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 404
    assert response.json().get("type") == ("error" if path.startswith("/v1") else None)
    message = response.json()["error"]["message"]
    assert (f"The address is {prefix}{meant}," in message) == (meant is not None)
    assert f"{prefix}{path}" in message


GETS = [pattern for pattern in patterns() if "GET" in route_of(pattern).methods]


@pytest.mark.parametrize("pattern", GETS, ids=lambda pattern: str(pattern.pattern))
async def test_a_head_gets_what_a_get_gets_without_its_body(
    pattern: URLPattern, engine: None, alice: Any, alice_key: str
) -> None:
    """Status, type and length; no answer begins."""
    path, headers = address(pattern), {"authorization": f"Bearer {alice_key}"}
    if "stream_id" in path or UNKNOWN_ID in path:
        path = path.replace(UNKNOWN_ID, await start(Caller(key=alice_key)))
    before = await StreamRow.objects.acount()
    head = await AsyncClient().generic("HEAD", path + "?prompt=hi&max_tokens=2", headers=headers)
    assert await StreamRow.objects.acount() == before
    got = await AsyncClient().get(path + "?prompt=hi&max_tokens=2", headers=headers)
    assert (head.status_code, head.headers.get("Content-Type")) == (got.status_code, got.headers.get("Content-Type"))
    assert head.streaming == got.streaming
    assert head.streaming or head.content == b""
    whole = await body_of(got)
    # The HEAD of a log names its end, and reads nothing of it.
    if not got.streaming and path not in ("/metrics", "/readyz") and not path.endswith("/log"):
        assert head.headers["Content-Length"] == str(len(whole))


async def test_a_head_of_a_running_answer_leaves_it_alone(engine: None, alice_key: str) -> None:
    """It takes no reader's place, and its end parks nothing: whom the answer waits for still gets it whole."""
    caller = Caller(key=alice_key)
    running = await caller.post("/streams", {"prompt": "hi", "max_tokens": 400, "ignore_eos": True})
    chunks = aiter(running)
    data = await anext(chunks)
    path = f"/streams/{running['X-Stream-Id']}/events"
    for _ in range(3):
        head = await AsyncClient().generic("HEAD", path, headers={"authorization": f"Bearer {alice_key}"})
        assert (head.status_code, head["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
        assert (head["X-Stream-Id"], "Content-Length" in head.headers) == (running["X-Stream-Id"], False)
        assert list(head.streaming_content) == []
    async for chunk in chunks:
        data += chunk
    assert check_native(data)[-1].json["usage"]["completion_tokens"] == 400


async def start(caller: Caller) -> str:
    response = await caller.post("/streams", PROMPT)
    assert response.status_code == 200, response.content
    await body_of(response)
    return str(response["X-Stream-Id"])


async def test_only_the_tenant_reaches_a_stream(
    engine: None, alice: Any, bob: Any, staff: Any, alice_key: str, lonely_key: str, anonymous_site: None
) -> None:
    """A user and her key read the stream; another user, staff, another key and a visitor get an unknown id's 404."""
    owner = await make_caller(alice)
    stream_id = await start(owner)
    paths = [f"/streams/{stream_id}", f"/streams/{stream_id}/events"]
    hers = [owner, Caller(key=alice_key)]
    others = [await make_caller(bob), await make_caller(staff), Caller(key=lonely_key), Caller()]
    for path in paths:
        assert [(await caller.get(path)).status_code for caller in hers] == [200, 200]
        unknown = await others[0].get(path.replace(stream_id, UNKNOWN_ID))
        for caller in others:
            response = await caller.get(path)
            assert (response.status_code, response.json()) == (unknown.status_code, unknown.json())
            assert response.status_code == 404
    stop = f"/streams/{stream_id}/stop"
    assert (await Caller(key=alice_key).post(stop)).status_code == 200
    for caller in others[:3]:
        assert (await caller.post(stop)).status_code == 404


async def test_a_revoked_key_is_401_at_once(engine: None, lonely_key: str) -> None:
    """A key that this process revokes is 401 at its next request."""
    assert (await Caller(key=lonely_key).post("/streams", PROMPT)).status_code == 200
    await sync_to_async(ApiKey.objects.all().revoke)()
    response = await Caller(key=lonely_key).post("/streams", PROMPT)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


async def test_a_key_without_the_scope_is_403(engine: None, lonely_key: str, ops_key: str) -> None:
    """A `chat` key does not read metrics, and an `ops` key does not chat."""
    assert (await Caller(key=lonely_key).get("/metrics")).status_code == 403
    assert (await Caller(key=ops_key).get("/metrics")).status_code == 200
    refused = await Caller(key=ops_key).post("/v1/chat/completions", {"messages": []})
    assert refused.status_code == 403
    assert refused.json()["error"]["type"] == "permission_error"


async def test_metrics_need_the_permission_or_debug(engine: None, staff: Any, root: Any) -> None:
    """Metrics need the permission of the live page: staff alone is refused. In DEBUG they serve every caller."""
    assert (await (await make_caller(staff)).get("/metrics")).status_code == 403
    await staff.user_permissions.aadd(await Permission.objects.aget(codename="view_live"))
    for user in (staff, root):
        assert b"streamserve_kv_blocks_free" in (await (await make_caller(user)).get("/metrics")).content
    with override_settings(DEBUG=True):
        assert (await AsyncClient().get("/metrics")).status_code == 200


async def test_only_callers_that_may_chat_see_the_models_of_readyz(engine: None, alice: Any, ops_key: str) -> None:
    """A probe gets the status, and no name; a signed-in user gets the models, but not on a foreign page."""
    signed_in = await make_caller(alice)
    for caller, headers in ((Caller(), {}), (Caller(key="x" * 40), {}), (signed_in, {"origin": "http://evil.example"})):
        response = await caller.get("/readyz", **headers)
        assert (response.status_code, response.json()) == (
            200,
            {"ready": True, "reason": "", "log": "ok", "database": "ok"},
        )
        assert not response.cookies
    assert [model["alias"] for model in (await signed_in.get("/readyz")).json()["models"]] == ["echo"]


async def test_a_database_without_our_tables_names_the_command(engine: None) -> None:
    """A site whose `migrate` was forgotten is not ready, and the reason says how its tables are made."""
    table = StreamRow._meta.db_table
    rename = sync_to_async(lambda old, new: connection.cursor().execute(f"ALTER TABLE {old} RENAME TO {new}"))
    await site.reset()
    await rename(table, "elsewhere")
    try:
        response = await Caller().get("/readyz")
    finally:
        await rename("elsewhere", table)
        await site.reset()
    assert (response.status_code, response.json()["database"]) == (503, "unusable")
    assert response.json()["reason"].endswith("the database is unusable (manage.py migrate makes its tables)")


async def test_a_probe_loads_nothing(alice: Any) -> None:
    """A stranger's probe is 503 and starts no engine, a user's does; a server that starts up begins to load."""
    await site.reset()
    found = {"ready": False, "reason": "a model is idle", "log": "ok", "database": "ok"}
    assert (await Caller().get("/readyz")).json() == found
    client = next(iter(site.get_site().clients.values()))  # pipelines follow
    assert client.describe().state == "idle"
    await site.begin_to_serve()
    assert client.describe().state != "idle"
    await site.reset()
    assert (await (await make_caller(alice)).get("/readyz")).json()["models"][0]["state"] != "idle"
    await site.reset()


async def test_health_is_livez(transactional_db: Any) -> None:
    """/health answers as /livez does."""
    for path in ("/health", "/livez"):
        assert (await AsyncClient().get(path)).json() == {"live": True}


async def test_a_visitor_gets_a_tenant_of_their_own(anonymous_site: None, engine: None) -> None:
    """With ANONYMOUS a stream belongs to the browser; another one, and a forged cookie, get a 404; no session row."""
    mine, other = Caller(), Caller()
    stream_id = await start(mine)
    assert (await mine.get(f"/streams/{stream_id}")).status_code == 200
    assert (await other.get(f"/streams/{stream_id}")).status_code == 404
    row = await StreamRow.objects.aget(pk=stream_id)
    cookie = mine.client.cookies[VISITOR_COOKIE]
    assert row.tenant == f"anon:{cookie.value.partition(':')[0]}"
    assert cookie["httponly"]
    assert cookie["samesite"] == "Lax"
    other.client.cookies[VISITOR_COOKIE] = cookie.value.partition(":")[0] + ":forged"
    assert (await other.get(f"/streams/{stream_id}")).status_code == 404
    assert await Session.objects.acount() == 0


async def test_the_page_and_the_socket_give_a_visitor_the_cookie(anonymous_site: None, engine: None) -> None:
    """A visitor's first answer may come over a WebSocket: the page or the handshake sets the cookie before it."""
    client = AsyncClient()
    await client.get("/")
    sent = client.cookies[VISITOR_COOKIE].value
    await client.get("/")
    assert client.cookies[VISITOR_COOKIE].value == sent
    for cookie, num_set in ((None, 1), (sent, 0)):
        headers = [(b"origin", b"http://testserver")]
        if cookie is not None:
            headers.append((b"cookie", f"{VISITOR_COOKIE}={cookie}".encode()))
        socket = communicator(headers)
        await socket.send_input({"type": "websocket.connect"})
        accepted = await socket.receive_output(timeout=30)
        assert accepted["type"] == "websocket.accept"
        assert len([name for name, _ in accepted["headers"] if name == b"set-cookie"]) == num_set
        await socket.disconnect()


async def test_a_program_with_another_scheme_is_no_visitor(anonymous_site: None, engine: None, alice: Any) -> None:
    """Basic without cookies is a 401 that names Bearer; with cookies it is a proxy's. A bare Bearer is a wrong key."""
    for value, code in (
        ("Basic YTpi", "unknown_scheme"),
        ("Bearer", "invalid_api_key"),
        ("Bearer a b", "invalid_api_key"),
    ):
        response = await AsyncClient().post(
            "/streams", PROMPT, content_type="application/json", headers={"authorization": value}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (401, code)
    caller = await make_caller(alice)
    assert (await caller.get("/v1/models", authorization="Basic YTpi")).status_code == 200


async def test_wrong_keys_are_limited(engine: None, lonely_key: str, ops_key: str) -> None:
    """After 20 wrong keys in a minute an address gets 429; a key that was right before is still taken from there.

    A loopback address is a proxy's that names no client: one client's wrong keys harm none of the others.
    """

    async def status(key: str, address: str = "203.0.113.7") -> int:
        client = AsyncClient()
        scope = client._base_scope
        client._base_scope = lambda **request: {**scope(**request), "client": (address, 1)}
        return int((await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code)

    assert await status(lonely_key) == 200
    assert [await status("x" * 40) for _ in range(21)] == [401] * 20 + [429]
    assert await status(lonely_key) == 200
    assert await status(ops_key) == 429
    assert [await status("x" * 40, "127.0.0.1") for _ in range(21)] == [401] * 21
    assert await status(ops_key, "127.0.0.1") == 403  # a key of another scope


async def test_visitors_share_a_limit(transactional_db: Any) -> None:
    """Where one visitor has the only place, another gets 503 with Retry-After, and the same one 429."""
    limits = {"MAX_STREAMS_ANONYMOUS": 1, "MAX_STREAMS_PER_VISITOR": 1, "MAX_QUEUED_PER_PRINCIPAL": 0}
    slow = {"TESTING": True, "ANONYMOUS": True, "ECHO_STEP_SECONDS": 0.02, "LIMITS": limits}
    long = {"prompt": "hi", "max_tokens": 500, "ignore_eos": True}
    with override_settings(STREAMSERVE=slow):
        await until_ready()
        first, second = Caller(), Caller()
        await first.get("/")  # for the cookie
        running = await first.post("/streams", long)
        iterator = aiter(running)
        await anext(iterator)
        other = await second.post("/streams", long)
        again = await first.post("/streams", long)
        await iterator.aclose()
        assert (other.status_code, other.json()["error"]["code"]) == (503, "anonymous_places_taken")
        assert 1 <= int(other["Retry-After"]) <= 120
        assert (again.status_code, again.json()["error"]["code"]) == (429, "too_many_streams")
        # The first reader has left: the parked stream makes room.
        late = await second.post("/streams", {"prompt": "hi", "max_tokens": 2})
        assert late.status_code == 200
        await body_of(late)
        await site.reset()


async def test_a_sane_request_id_is_echoed(engine: None) -> None:
    """A sane request id is echoed; any other is replaced, because it is logged."""
    assert (await AsyncClient().get("/livez", headers={"x-request-id": "abc-1"}))["X-Request-Id"] == "abc-1"
    replaced = (await AsyncClient().get("/livez", headers={"x-request-id": "a b<c>"}))["X-Request-Id"]
    assert len(replaced) == 32


def test_under_wsgi_a_stream_is_503_asgi_required(lonely_key: str) -> None:
    """Under WSGI, as in Django's own test client, a stream is 503."""
    for path in ("/streams", "/v1/chat/completions"):
        response = Client().post(
            path, PROMPT, content_type="application/json", headers={"authorization": f"Bearer {lonely_key}"}
        )
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "asgi_required"


def test_an_unknown_websocket_path_is_no_failure(streamserve_server: DaphneServer) -> None:
    """The handshake is refused before the 101, and the server's log has no traceback."""
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with pytest.raises(InvalidStatus) as raised, connect(f"{streamserve_server.websocket_url}/ws/nothing", proxy=None):
        pass
    assert raised.value.response.status_code == 403  # daphne has no other
    assert "Traceback" not in streamserve_server.log()


def test_a_real_server_serves_the_users_fixture(streamserve_server: DaphneServer) -> None:
    """`streamserve.pytest_fixtures` gives other sites' tests a real server."""
    import httpx

    assert httpx.get(f"{streamserve_server.url}/livez").json() == {"live": True}

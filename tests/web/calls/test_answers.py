"""Laws of the Python API: one answer by every form, the caller's tenant, and clean ends. Docs: docs/python.md."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import SynchronousOnlyOperation
from django.test import AsyncClient, RequestFactory, override_settings

from streamserve import acomplete, complete, stream
from streamserve.models import ApiKey
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import BadRequest, Forbidden, NotFound, Unauthorized
from streamserve.testing import DaphneServer
from streamserve.web import site
from streamserve.web.auth import VISITOR_COOKIE
from streamserve.web.calls import background
from tests.conftest import until
from tests.support.checks.stream_checks import check_native, parse_sse, text_of
from tests.support.docs.demo_site import ROOT, end_engines, environment, manage
from tests.support.plugins.migrated import Migrate

pytestmark = pytest.mark.django_db(transaction=True)

ASK: dict[str, Any] = {"question": "tell me", "max_tokens": 12, "seed": 7}


@pytest.fixture
def background_site() -> Iterator[None]:
    """Calls from this thread; their engine and streams are closed after the test."""
    yield
    background.run(site.reset, "")


@pytest.fixture(scope="module")
def server(django_db_setup: None) -> Iterator[DaphneServer]:
    conf = {**settings.STREAMSERVE, "ANONYMOUS": True}
    with DaphneServer(settings={"ROOT_URLCONF": "tests.web.calls.views", "STREAMSERVE": conf}) as server:
        yield server


@pytest.fixture
def http(server: DaphneServer, alice_key: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {alice_key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30, trust_env=False) as client:
        yield client


async def test_async_forms_give_one_answer(engine: None, alice: Any) -> None:
    """`acomplete` and `async for` give the same text; the rows belong to the user."""
    whole = await acomplete(**ASK, user=alice)
    assert (whole.finish_reason, whole.usage.completion_tokens, whole.model) == ("length", 12, "echo")
    assert str(whole) == whole.text == "".join([text async for text in stream(**ASK, user=alice)])
    owners = [owner async for owner in StreamRow.objects.values_list("owner", "tenant")]
    assert owners == [(f"user:{alice.pk}", f"user:{alice.pk}")] * 2


def test_sync_forms_give_the_same_answer(background_site: None) -> None:
    """Without a running loop, from any thread: one background loop serves them all."""
    texts = [complete(**ASK).text, "".join(stream(**ASK))]
    thread = threading.Thread(target=lambda: texts.append(complete(**ASK).text))
    thread.start()
    thread.join()
    assert len(set(texts)) == 1
    assert texts[0]
    names = [one.name for one in threading.enumerate()]
    assert names.count("streamserve") == 1


async def test_a_blocking_call_on_the_loop_names_the_async_one() -> None:
    """It would wait for itself. So with a request, whose caller is looked up first."""
    for options in ({}, {"request": RequestFactory().get("/")}):
        with pytest.raises(SynchronousOnlyOperation, match="await acomplete"):
            complete(**ASK, **options)


async def test_leaving_the_loop_stops_the_answer(engine: None) -> None:
    """The engine makes nothing for a reader that has left."""
    async for _ in stream("tell me", ignore_eos=True, max_tokens=4000):
        break
    await until(lambda: all(one.terminal is not None for one in site.get_streams().all()))
    assert [one.summary().finish_reason for one in site.get_streams().all()] == ["abandoned"]


@pytest.mark.parametrize("name", ["whole", "awhole", "pieces"])
def test_views_wait_for_an_answer(http: httpx.Client, alice: Any, name: str) -> None:
    """Sync and async views of an ASGI server; the answer is the key's user's."""
    reply = http.get(f"/{name}")
    assert (reply.status_code, bool(reply.json()["text"])) == (200, True), reply.text
    assert StreamRow.objects.get().tenant == f"user:{alice.pk}"


def test_views_hand_a_stream_to_the_browser(http: httpx.Client) -> None:
    """As the response, or by its address: the browser reads the same text, and may resume."""
    whole = http.get("/whole").json()["text"]
    body = http.get("/streamed").content
    check_native(body)
    assert text_of(parse_sse(body)) == whole
    assert http.get("/astreamed").text == whole
    for name in ("started", "astarted"):
        body = http.get(http.get(f"/{name}").json()["url"]).content
        check_native(body)
        assert text_of(parse_sse(body)) == whole


@pytest.mark.parametrize("name", ["started", "astarted", "twice", "streamed"])
def test_a_new_visitor_reads_what_a_view_has_begun(server: DaphneServer, name: str) -> None:
    """The view's response sets the visitor's cookie, once; all answers of one request are one visitor's."""
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as visitor:
        reply = visitor.get(f"/{name}")
        assert len(reply.headers.get_list("set-cookie")) == 1
        if name == "streamed":
            urls = [f"/streams/{reply.headers['x-stream-id']}/events"]
        else:
            urls = reply.json().get("urls") or [reply.json()["url"]]
        for url in urls:
            check_native(visitor.get(url).content)
            assert httpx.get(f"{server.url}{url}", trust_env=False).status_code == 404
        assert "set-cookie" not in visitor.get(f"/{name}").headers


async def test_a_response_without_the_middleware_sets_the_cookie(engine: None) -> None:
    """Under Django's own handler, as in its test client, the response does it itself."""
    conf = {**settings.STREAMSERVE, "ANONYMOUS": True}
    with override_settings(ROOT_URLCONF="tests.web.calls.views", STREAMSERVE=conf):
        client = AsyncClient()
        response: Any = await client.get("/astreamed")
        assert b"".join([chunk async for chunk in response.streaming_content])
        assert VISITOR_COOKIE in client.cookies


def test_another_tenant_does_not_reach_it(http: httpx.Client, server: DaphneServer, lonely_key: str) -> None:
    """The address is no secret: it answers its tenant only."""
    url = http.get("/started").json()["url"]
    other = httpx.get(f"{server.url}{url}", headers={"Authorization": f"Bearer {lonely_key}"}, trust_env=False)
    assert other.status_code == 404


def test_wrong_calls_are_refused(background_site: None, alice: Any, ops_key: str) -> None:
    """An unknown model, a visitor, a key that may not chat, …: errors of the catalogue, each before the engine."""
    request = RequestFactory().get("/")
    request.user = AnonymousUser()
    by_ops_key = RequestFactory().get("/", headers={"Authorization": f"Bearer {ops_key}"})
    for options, error in [
        ({"model": "nothing"}, NotFound),
        ({"request": request}, Unauthorized),
        ({"request": by_ops_key}, Forbidden),
        ({"user": AnonymousUser()}, Unauthorized),
        ({"tenant": "t" * 60}, BadRequest),
        ({"user": alice, "tenant": "billing"}, BadRequest),
        ({"max_token": 3}, BadRequest),
    ]:
        with pytest.raises(error):
            complete("tell me", **options)
    assert not StreamRow.objects.exists()


COMMAND = """
from streamserve import complete
print(complete("tell me", max_tokens=4, seed=7).text)
"""
FORKED = """
import os
from streamserve import complete
child = os.fork()
print(complete("tell me", max_tokens=4, seed=7).text, flush=True)
if child:
    print("status", os.waitpid(child, 0)[1])
"""
FORKED_LATER = FORKED.replace("import complete\n", 'import complete\ncomplete("tell me", max_tokens=4, seed=7)\n')
STATES = "from streamserve.models import Stream; print(*Stream.objects.values_list('state', flat=True))"


@pytest.mark.parametrize(
    ("code", "num"),
    [
        pytest.param(COMMAND, 1, id="command"),
        pytest.param(FORKED, 2, id="forked", marks=pytest.mark.proof),
        pytest.param(FORKED_LATER, 2, id="later", marks=pytest.mark.proof),
    ],
)
def test_a_process_without_a_server_uses_the_engine_and_ends(
    tmp_path: Path, migrated: Migrate, code: str, num: int
) -> None:
    """A management command and a forked worker (Celery): the engine's process answers, nothing is left to say."""
    migrated(tmp_path)
    command = [
        sys.executable,
        "-W",
        "ignore:This process:DeprecationWarning",
        "manage.py",
        "shell",
        "-v",
        "0",
        "-c",
        code,
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=120)
        texts = [line for line in done.stdout.splitlines() if line and not line.startswith(("status", "{"))]
        assert (done.returncode, len(texts), len(set(texts))) == (0, num, 1), done
        assert [line for line in done.stderr.splitlines() if " INFO " not in line] == []
        assert "status" not in done.stdout or "status 0" in done.stdout
        assert manage(tmp_path, "shell", "-v", "0", "-c", STATES).stdout.split() == ["finished"] * (
            num + (code == FORKED_LATER)
        )
    finally:
        end_engines(tmp_path)


def test_importing_the_package_is_light() -> None:
    """`import streamserve` imports neither Django nor asyncio; the API comes with its first use."""
    code = "import sys, streamserve; print(*{'django', 'asyncio', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_key_of_nobody_owns_its_answers(http: httpx.Client, server: DaphneServer, lonely_key: str) -> None:
    """The row of a key without a user names the key."""
    httpx.get(f"{server.url}/awhole", headers={"Authorization": f"Bearer {lonely_key}"}, timeout=30, trust_env=False)
    assert StreamRow.objects.get().owner == f"key:{ApiKey.objects.get(name='lonely').pk}"

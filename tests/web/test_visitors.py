"""Laws of visitors without a cookie: in the counting all of one address are one caller, in all else strangers."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import AsyncClient, RequestFactory
from django.test.utils import override_settings

from streamserve import acomplete
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import QuotaExceeded
from streamserve.streams.store import ANONYMOUS, Group, groups_of
from streamserve.web import site
from streamserve.web.auth import VISITOR_COOKIE, visitor
from tests.conftest import body_of, until_ready
from tests.web.conftest import communicator

pytestmark = pytest.mark.django_db(transaction=True)

LONG = " ".join(["word"] * 200)  # several blocks
ENDLESS = {"prompt": "hi", "max_tokens": 500, "ignore_eos": True}


class Visitor:
    """A client at an address; it keeps its cookie only if it is told to."""

    def __init__(self, address: str = "203.0.113.7", cookie: str = "") -> None:
        self.address, self.cookie = address, cookie

    async def send(self, method: str, path: str, body: Any = None) -> Any:
        client = AsyncClient()
        scope = client._base_scope
        client._base_scope = lambda **request: {**scope(**request), "client": (self.address, 1)}
        if self.cookie:
            client.cookies[VISITOR_COOKIE] = self.cookie
        if method == "GET":
            return await client.get(path)
        return await client.post(path, body, content_type="application/json")

    async def cached_tokens(self, prompt: str) -> tuple[str, int]:
        """Ask; return the stream's id, and how many tokens of the prompt the cache had."""
        response = await self.send("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 2})
        assert response.status_code == 200, response.content
        details = response.json()["usage"].get("prompt_tokens_details") or {}
        self.cookie = self.cookie or response.cookies[VISITOR_COOKIE].value
        return response["X-Stream-Id"], details.get("cached_tokens", 0)


def test_requests_without_a_cookie_are_counted_by_their_address() -> None:
    """One address, of IPv6 a /64, is one place; each request is a tenant of its own; no row could have the address."""
    first, second = (visitor({}, "203.0.113.7") for _ in range(2))
    assert first.counted_as == second.counted_as
    assert len({first.owner, second.owner, first.tenant, second.tenant}) == 2
    assert first.counted_as in ANONYMOUS
    assert groups_of(first.counted_as) == (Group(first.counted_as), Group(first.counted_as, is_prefix=True), ANONYMOUS)
    assert "203" not in first.counted_as
    assert len(first.counted_as) <= 64
    assert visitor({}, "::ffff:203.0.113.7").counted_as == first.counted_as
    assert visitor({}, "203.0.113.8").counted_as != first.counted_as
    assert visitor({}, "2001:db8::1").counted_as == visitor({}, "2001:db8::ffff:2").counted_as
    assert visitor({}, "2001:db8:0:1::1").counted_as != visitor({}, "2001:db8::1").counted_as
    assert visitor({}, "").counted_as == visitor({}, "127.0.0.1").counted_as != first.counted_as


def test_a_cookie_counts_if_the_site_has_signed_it() -> None:
    """A signed cookie is a place of its own, within those of its address; an invented one is none.

    An address that may be a proxy's is no bound.
    """
    fresh = visitor({}, "203.0.113.7")
    known = visitor({"cookie": f"{VISITOR_COOKIE}={fresh.new_cookie}"}, "203.0.113.7")
    assert (known.new_cookie, known.owner) == ("", fresh.owner)
    assert known.counted_as != fresh.counted_as
    assert groups_of(known.counted_as)[1:] == groups_of(fresh.counted_as)[1:]
    near = visitor({"cookie": f"{VISITOR_COOKIE}={fresh.new_cookie}"}, "127.0.0.1")
    assert groups_of(near.counted_as) == (Group(near.owner), ANONYMOUS)
    assert len(known.counted_as) <= 64
    invented = visitor({"cookie": f"{VISITOR_COOKIE}={'0' * 32}:forged"}, "203.0.113.7")
    assert invented.counted_as == fresh.counted_as


async def test_visitors_of_one_address_share_nothing_but_the_counting(anonymous_site: None, engine: None) -> None:
    """Each gets 404 for the other's stream, and finds none of its blocks in the cache; its own it finds."""
    mine, other = Visitor(), Visitor()
    ids = []
    for one in (mine, other):
        stream_id, num_cached = await one.cached_tokens(LONG)
        assert num_cached == 0
        ids.append(stream_id)
    rows = [await StreamRow.objects.aget(pk=stream_id) for stream_id in ids]
    assert rows[0].counted_as == rows[1].counted_as
    assert len({row.owner for row in rows}) == len({row.tenant for row in rows}) == 2
    assert (await mine.send("GET", f"/streams/{ids[0]}")).status_code == 200
    assert (await mine.send("GET", f"/streams/{ids[1]}")).status_code == 404
    assert (await other.send("GET", f"/streams/{ids[0]}")).status_code == 404
    assert (await mine.cached_tokens(LONG))[1] > 0


async def test_one_address_takes_no_other_visitors_place(transactional_db: Any) -> None:
    """With as many answers open as an address may have its next is refused; visitors elsewhere and known ones begin."""
    limits = {"MAX_STREAMS_PER_VISITOR": 2, "MAX_QUEUED_PER_PRINCIPAL": 0}
    slow = {"TESTING": True, "ANONYMOUS": True, "ECHO_STEP_SECONDS": 0.02, "LIMITS": limits}
    with override_settings(STREAMSERVE=slow):
        await until_ready()
        known = Visitor()
        await known.cached_tokens("hi")
        open_ones = [aiter(await Visitor().send("POST", "/streams", ENDLESS)) for _ in range(2)]
        for one in open_ones:
            await anext(one)
        refused = await Visitor().send("POST", "/v1/completions", ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
        short = {"prompt": "hi", "max_tokens": 2}
        for welcome in (Visitor("203.0.113.8"), known):
            response = await welcome.send("POST", "/streams", short)
            assert response.status_code == 200
            await body_of(response)
        for one in open_ones:
            await one.aclose()
        await site.reset()


async def test_one_address_does_not_take_all_places_with_many_cookies(transactional_db: Any) -> None:
    """Visitors who have a cookie each share the places of their address: what is beyond them is refused there alone."""
    limits = {"MAX_STREAMS_PER_ADDRESS": 2, "MAX_QUEUED_PER_PRINCIPAL": 0}
    slow = {"TESTING": True, "ANONYMOUS": True, "ECHO_STEP_SECONDS": 0.02, "LIMITS": limits}
    with override_settings(STREAMSERVE=slow):
        await until_ready()
        crowd, elsewhere = [Visitor() for _ in range(3)], Visitor("203.0.113.8")
        for one in (*crowd, elsewhere):
            await one.cached_tokens("hi")
        open_ones = [aiter(await one.send("POST", "/streams", ENDLESS)) for one in crowd[:2]]
        for frames in open_ones:
            await anext(frames)
        refused = await crowd[2].send("POST", "/v1/completions", ENDLESS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_streams")
        assert "at your address" in refused.json()["error"]["message"]
        response = await elsewhere.send("POST", "/streams", {"prompt": "hi", "max_tokens": 2})
        assert response.status_code == 200
        await body_of(response)
        for frames in open_ones:
            await frames.aclose()
        await site.reset()


def test_the_places_of_other_processes_are_found_by_whom_they_are_counted_as(transactional_db: Any) -> None:
    """A stream counts for its `counted_as`, else for its owner, never for both; all visitors' by their prefix."""
    for index, (owner, counted_as) in enumerate(
        [
            ("anon:a", "anon:@x/"),
            ("anon:b", "anon:@x/"),
            ("anon:a", None),
            ("user:1", None),
            ("anon:c", "anon:@y/"),
            ("anon:a", "anon:@x/a"),
        ]
    ):
        StreamRow.objects.create(id=str(index), log_id=str(index), owner=owner, tenant=owner, counted_as=counted_as)
    StreamRow.objects.create(id="job", log_id="job", owner="user:1", tenant="user:1", on_disconnect="job")
    StreamRow.objects.create(id="over", log_id="over", owner="user:1", tenant="user:1", state="finished")

    def running_of(name: str, *, is_prefix: bool = False) -> list[str]:
        return [stream_id for stream_id, _ in StreamRow.objects.running_of(name, is_prefix)]

    assert running_of("anon:@x/") == ["0", "1"]
    assert running_of("anon:@x/", is_prefix=True) == ["0", "1", "5"]
    assert running_of("anon:@x/a") == ["5"]
    assert running_of("anon:a") == ["2"]
    assert running_of("anon:b") == []
    assert running_of("user:1") == ["3"]
    assert running_of("anon:", is_prefix=True) == ["0", "1", "2", "4", "5"]


async def test_sockets_and_calls_from_python_are_counted_by_their_address_too(transactional_db: Any) -> None:
    """The second socket without a cookie, and a view's call for such a request, find the address's place taken."""
    limits = {"MAX_STREAMS_PER_VISITOR": 1, "MAX_QUEUED_PER_PRINCIPAL": 0}
    slow = {"TESTING": True, "ANONYMOUS": True, "ECHO_STEP_SECONDS": 0.02, "LIMITS": limits}
    with override_settings(STREAMSERVE=slow):
        await until_ready()
        sockets = []
        for _ in range(2):
            sockets.append(communicator([(b"origin", b"http://testserver")]))
            sockets[-1].scope["client"] = ["203.0.113.7", 1]
            assert (await sockets[-1].connect())[0]
            await sockets[-1].send_json_to({"type": "start", "request": ENDLESS})
            answer = await sockets[-1].receive_json_from(timeout=30)
            if len(sockets) == 1:
                assert answer["type"] == "started"
        assert answer["error"]["code"] == "too_many_streams"
        with pytest.raises(QuotaExceeded):
            await acomplete("hi", request=RequestFactory().get("/", REMOTE_ADDR="203.0.113.7"))
        assert str(await acomplete("hi", request=RequestFactory().get("/", REMOTE_ADDR="203.0.113.8"), max_tokens=2))
        for socket in sockets:
            await socket.disconnect()
        await site.reset()

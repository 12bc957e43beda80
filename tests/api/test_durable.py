"""`/streams/{id}/log` through Django: what a Durable Streams client reads of an answer, whole, in parts and live."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from streamserve.api import durable
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import check_native
from tests.support.streams.hand_made import Gate, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

ASK = {"prompt": "tell me", "max_tokens": 8, "seed": 7}


async def ask(caller: Caller) -> tuple[str, list[Any]]:
    """Return the id of an answer that has ended, and its native frames that are in the log."""
    response = await caller.post("/streams", ASK)
    frames = [frame for frame in check_native(await body_of(response)) if frame.id is not None]
    return f"/streams/{response['X-Stream-Id']}/log", frames


def plain(response: Any) -> list[Any]:
    assert response.status_code == 200
    return json.loads(response.content)  # type: ignore[no-any-return]


async def test_the_items_are_the_events_of_the_log(caller: Caller) -> None:
    """Each event once, in order, with its number and its native data, none joined; the end is closed."""
    url, frames = await ask(caller)
    response = await caller.get(url)
    items = plain(response)
    assert [item["seq"] for item in items] == list(range(1, len(items) + 1))
    assert (items[0]["type"], items[-1]["type"]) == ("meta", "done")
    text = "".join(item["data"]["text"] for item in items if item["type"] == "token")
    assert text == "".join(frame.json["text"] for frame in frames if frame.event == "token")
    assert items[-1]["data"] == frames[-1].json
    assert response["Stream-Up-To-Date"] == response["Stream-Closed"] == "true"
    assert response["Cache-Control"] == "private, no-cache"
    assert response["X-Content-Type-Options"] == "nosniff"


async def test_every_offset_gives_the_rest(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in parts, each response leads to the next, and only the last is at the end."""
    url, _frames = await ask(caller)
    whole = plain(await caller.get(f"{url}?offset=-1"))
    monkeypatch.setattr(durable, "_MAX_EVENTS", 1)
    monkeypatch.setattr(durable, "PAGE", 3)
    items, offset, offsets = list[Any](), "-1", list[str]()
    while True:
        response = await caller.get(f"{url}?offset={offset}")
        items += plain(response)
        offset = response["Stream-Next-Offset"]
        offsets.append(offset)
        if "Stream-Up-To-Date" in response:
            break
        assert "Stream-Closed" not in response
    assert items == whole
    assert offsets == sorted(set(offsets))
    assert len(offsets) > 2
    end = await caller.get(f"{url}?offset={offset}")
    assert plain(end) == []
    assert end["Stream-Closed"] == "true"


async def test_a_tag_that_is_known_gets_304(caller: Caller) -> None:
    """The same read with its tag has no body; another tag has."""
    url, _frames = await ask(caller)
    first = await caller.get(url)
    again = await caller.get(url, **{"if-none-match": f'"other", W/{first["ETag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again["Stream-Next-Offset"] == first["Stream-Next-Offset"]
    assert (await caller.get(url, **{"if-none-match": '"other"'})).status_code == 200


async def test_head_names_the_end(caller: Caller) -> None:
    """No body, the offset behind the last event, and that nothing follows."""
    url, _frames = await ask(caller)
    whole = await caller.get(url)
    response = await caller.client.head(url, headers=caller.headers)
    assert (response.status_code, response.content) == (200, b"")
    assert response["Content-Type"] == "application/json"
    assert response["Stream-Next-Offset"] == whole["Stream-Next-Offset"]
    assert response["Stream-Closed"] == "true"
    assert "no-store" in response["Cache-Control"]


async def test_now_is_the_end(caller: Caller) -> None:
    """An empty array that no cache keeps."""
    url, _frames = await ask(caller)
    response = await caller.get(f"{url}?offset=now")
    assert plain(response) == []
    assert "no-store" in response["Cache-Control"]


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("?offset=a/b", 400, "offset"),
        ("?offset=", 400, "offset"),
        ("?offset=-1&offset=-1", 400, "offset"),
        ("?live=sse", 400, "offset"),
        ("?live=long-poll", 400, "offset"),
        ("?offset=-1&live=maybe", 400, "live"),
        ("?offset=abc-0000000000000001", 410, "offset"),
    ],
)
async def test_wrong_reads_are_refused(caller: Caller, query: str, status: int, param: str) -> None:
    """What cannot be read gets an error that names the parameter."""
    url, _frames = await ask(caller)
    response = await caller.get(url + query)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_unknown_streams_and_later_offsets(caller: Caller) -> None:
    """404 for no stream of the caller's; 410 for an offset behind the end."""
    url, _frames = await ask(caller)
    assert (await caller.get(f"/streams/{'0' * 32}/log")).status_code == 404
    offset = (await caller.get(url))["Stream-Next-Offset"]
    log_id, _, seq = offset.partition("-")
    assert (await caller.get(f"{url}?offset={log_id}-{int(seq) + 1:016d}")).status_code == 410


@pytest.mark.parametrize("live", ["sse", "long-poll"])
async def test_a_live_read_of_a_closed_stream_ends_at_once(caller: Caller, live: str) -> None:
    """At the end nothing is waited for; before it the rest comes."""
    url, _frames = await ask(caller)
    whole = await caller.get(url)
    rest = await caller.get(f"{url}?offset=-1&live={live}")
    end = await caller.get(f"{url}?offset={whole['Stream-Next-Offset']}&live={live}")
    if live == "long-poll":
        assert plain(rest) == plain(whole)
        assert rest["Stream-Cursor"].isdigit()
        assert (end.status_code, end["Stream-Closed"]) == (204, "true")
    else:
        assert items_of(await body_of(rest)) == plain(whole)
        assert end["Content-Type"] == "text/event-stream"
        assert b'"streamClosed":true' in await body_of(end)


def items_of(body: bytes) -> list[Any]:
    """Return the items of a body of SSE."""
    blocks = body.decode().split("\n\n")
    data = [block.partition("\ndata:")[2] for block in blocks if block.startswith("event: data\n")]
    return [item for one in data for item in json.loads(one)]


async def test_a_long_poll_waits_for_events(caller: Caller, site_gate: Gate) -> None:
    """A reader that has all events so far is answered by the next event; the answer is made for it."""
    await site.reset()
    await until_ready()
    site_gate.allow(0)
    response = await caller.post("/streams", ASK)
    url = f"/streams/{response['X-Stream-Id']}/log"
    tail = await caller.get(f"{url}?offset=now")
    assert "Stream-Closed" not in tail
    waiting = asyncio.create_task(caller.get(f"{url}?offset={tail['Stream-Next-Offset']}&live=long-poll"))
    body = asyncio.create_task(body_of(response))
    await asyncio.sleep(0)
    site_gate.open()
    async with asyncio.timeout(60):
        items = plain(await waiting)
        await body
    assert items[0]["seq"] == int(tail["Stream-Next-Offset"].partition("-")[2]) + 1


async def test_a_long_poll_without_news_gets_204(
    caller: Caller, site_gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the offset to ask again with, and a cursor."""
    await site.reset()
    await until_ready()
    monkeypatch.setattr(durable, "POLL_SECONDS", 0.01)
    site_gate.allow(0)
    response = await caller.post("/streams", ASK)
    url = f"/streams/{response['X-Stream-Id']}/log"
    tail = (await caller.get(f"{url}?offset=now"))["Stream-Next-Offset"]
    polled = await caller.get(f"{url}?offset={tail}&live=long-poll&cursor=999999999")
    assert (polled.status_code, polled["Stream-Next-Offset"], polled["Stream-Up-To-Date"]) == (204, tail, "true")
    assert polled["Stream-Cursor"] == "1000000000"
    site_gate.open()
    await body_of(response)


async def test_a_long_poll_holds_its_answer_while_its_client_stays(caller: Caller, site_gate: Gate) -> None:
    """While it waits it is the answer's reader; a client that goes has left at once, and the answer is parked."""
    await site.reset()
    await until_ready()
    site_gate.allow(0)
    response = await caller.post("/streams", ASK)
    stream = site.get_site().streams.find(response["X-Stream-Id"])
    assert stream is not None
    url = f"/streams/{stream.id}/log"
    tail = (await caller.get(f"{url}?offset=now"))["Stream-Next-Offset"]
    waiting = asyncio.create_task(caller.get(f"{url}?offset={tail}&live=long-poll"))
    await until(lambda: stream.readers.num_holding == 1, "the long-poll is a reader")
    assert stream.state == "running"
    waiting.cancel()
    await asyncio.wait([waiting])
    await until(lambda: stream.readers.num_holding == 0, "it has left")
    assert stream.state == "parked"
    site_gate.open()
    await body_of(response)

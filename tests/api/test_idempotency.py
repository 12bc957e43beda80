"""Laws of `Idempotency-Key`: a caller's key starts one answer, in whichever process and however often it is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.api.idempotency import StartOnce
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import BadRequest, KeyReused
from streamserve.protocol.requests import Admission, Once
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from streamserve.web import site
from tests.conftest import Caller, body_of, until_ready
from tests.support.checks.stream_checks import check_native, check_openai, text_of
from tests.support.streams.hand_made import ScriptedClient, ask, until
from tests.support.streams.stores import SharedRecords

pytestmark = pytest.mark.django_db(transaction=True)

ASK = {"prompt": "tell me", "max_tokens": 12}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
ONCE = Once(key="k", digest="d")


@pytest.fixture
def scripted() -> ScriptedClient:
    return ScriptedClient()


async def asked(caller: Caller, path: str, body: Any, key: str = "one") -> tuple[Any, bytes]:
    response = await caller.post(path, body, **{"idempotency-key": key})
    return response, await body_of(response)


async def test_the_same_request_has_the_same_answer(engine: None, caller: Caller) -> None:
    """A request that is sent again gets the first answer, from its beginning; another key starts another."""
    (first, text), (again, same), (other, _) = [await asked(caller, "/streams", ASK, key) for key in ("a", "a", "b")]
    assert again["X-Stream-Id"] == first["X-Stream-Id"]
    assert text_of(check_native(same)) == text_of(check_native(text))
    assert other["X-Stream-Id"] != first["X-Stream-Id"]
    assert await StreamRow.objects.acount() == 2


async def test_the_order_of_fields_does_not_matter(engine: None, caller: Caller) -> None:
    """The body is compared as JSON."""
    first, _ = await asked(caller, "/streams", ASK)
    again, _ = await asked(caller, "/streams", dict(reversed(ASK.items())))
    assert again["X-Stream-Id"] == first["X-Stream-Id"]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_openai_answers_are_given_once(engine: None, caller: Caller, is_streamed: bool) -> None:
    """A chat completion is repeated in its own shape, streamed or whole."""
    body = {**CHAT, "stream": is_streamed}
    (first, text), (again, same) = [await asked(caller, "/v1/chat/completions", body) for _ in range(2)]
    assert (first.status_code, first["X-Stream-Id"]) == (200, again["X-Stream-Id"])
    assert is_streamed or same == text
    assert not is_streamed or check_openai(same)[-1] == check_openai(text)[-1]
    assert await StreamRow.objects.acount() == 1


@pytest.mark.parametrize(
    ("path", "body"), [("/streams", {**ASK, "max_tokens": 3}), ("/v1/chat/completions", CHAT)], ids=["body", "route"]
)
async def test_another_request_is_refused(engine: None, caller: Caller, path: str, body: Any) -> None:
    """A key that comes with another body, or at another address, is a 422 with a way out."""
    await asked(caller, "/streams", ASK)
    response, _ = await asked(caller, path, body)
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "idempotency_key_reused"
    assert "new key" in response.json()["error"]["message"]


async def test_a_key_is_its_callers(engine: None, caller: Caller, lonely_key: str) -> None:
    """Another caller may use the same key, for another answer."""
    mine, _ = await asked(caller, "/streams", ASK)
    theirs, _ = await asked(Caller(key=lonely_key), "/streams", {**ASK, "prompt": "mine"})
    assert (theirs.status_code, theirs["X-Stream-Id"] == mine["X-Stream-Id"]) == (200, False)


@pytest.mark.parametrize("key", ["", "x" * 256, "two words"])
async def test_a_key_that_is_none(engine: None, caller: Caller, key: str) -> None:
    """An empty, an over-long or an unprintable key is a 400."""
    response, _ = await asked(caller, "/streams", ASK, key)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_idempotency_key")


async def test_ten_at_once_start_one_answer(engine: None, caller: Caller) -> None:
    """Requests that overlap in one process get one stream, although the caller may have six."""
    answers = await asyncio.gather(*(asked(caller, "/streams", ASK) for _ in range(10)))
    assert {response.status_code for response, _ in answers} == {200}
    assert len({response["X-Stream-Id"] for response, _ in answers}) == 1
    assert await StreamRow.objects.acount() == 1


async def test_a_key_outlives_the_process(tmp_path: Path, caller: Caller) -> None:
    """A key is in the database: the next process shows the same answer."""
    conf = {"MODELS": {"echo": {"PATH": "echo"}}, "CLIENT": "thread", "STATE_DIR": tmp_path}
    with override_settings(STREAMSERVE=conf):
        await until_ready()
        first, text = await asked(caller, "/streams", ASK)
        await site.reset()
        await until_ready()
        again, same = await asked(caller, "/streams", ASK)
        await site.reset()
    assert again["X-Stream-Id"] == first["X-Stream-Id"]
    assert text_of(check_native(same)) == text_of(check_native(text))


async def test_a_key_is_kept_as_long_as_the_events(engine: None, caller: Caller) -> None:
    """Once the events of its answer are gone, a key starts a new one."""
    first, _ = await asked(caller, "/streams", ASK)
    await site.reset()  # the log is in memory
    await until_ready()
    again, text = await asked(caller, "/streams", ASK)
    check_native(text)
    assert again["X-Stream-Id"] != first["X-Stream-Id"]


async def test_a_refused_request_keeps_no_key(engine: None, caller: Caller) -> None:
    """A request without an answer can be corrected under the same key."""
    refused, _ = await asked(caller, "/streams", {**ASK, "model": "none"})
    response, _ = await asked(caller, "/streams", ASK)
    assert (refused.status_code, response.status_code) == (404, 200)


# Two workers


class Workers:
    """Two registries over the same records and log."""

    def __init__(self, client: ScriptedClient) -> None:
        shared, log = SharedRecords(), MemoryLog()
        self.stores = [shared.worker(name) for name in ("one", "two")]
        self.streams = [Streams({"scripted": client}, log, store=store) for store in self.stores]
        self._once = [StartOnce(streams) for streams in self.streams]

    async def start(self, number: int, once: Once = ONCE) -> Stream:
        return await self._once[number](ask("scripted"), Admission(owner="u", tenant="t", once=once))

    async def aclose(self) -> None:
        for streams in self.streams:
            await streams.aclose()


async def test_two_workers_start_one_answer(scripted: ScriptedClient) -> None:
    """Of two workers that both find no key, one inserts it; the other cancels its run and shows that answer."""
    workers = Workers(scripted)
    for store in workers.stores:
        store.hold = asyncio.Event()
    starting = [asyncio.create_task(workers.start(number)) for number in (0, 1)]
    await until(lambda: all(store.calls["insert"] for store in workers.stores), "both insert")
    workers.stores[1].hold.set()
    await until(lambda: starting[1].done(), "one has begun")
    workers.stores[0].hold.set()
    one, two = await asyncio.gather(*starting)
    assert one.id == two.id
    assert [generation.is_cancelled for generation in scripted.sources] == [True, False]
    with pytest.raises(KeyReused):
        await workers.start(0, Once(key="k", digest="other"))
    await workers.aclose()


async def test_a_worker_that_dies_before_the_first_event_keeps_no_key(scripted: ScriptedClient) -> None:
    """A record without an event, whose worker is dead, blocks nothing: its key starts a new answer."""
    workers = Workers(scripted)
    log = workers.streams[0].log
    dies, commit = asyncio.Event(), log.commit

    async def hanging(batches: Any) -> Any:
        await dies.wait()
        return await commit(batches)

    log.commit = hanging
    dying = asyncio.create_task(workers.start(0))
    await until(lambda: workers.stores[0].calls["insert"], "its record is there")
    log.commit = commit
    workers.stores[1]._shared.dead.add("one")
    stream = await workers.start(1)
    assert stream.last_seq == 1
    dying.cancel()
    dies.set()
    await asyncio.gather(dying, return_exceptions=True)
    await workers.aclose()


async def test_a_failed_start_frees_the_lock(scripted: ScriptedClient) -> None:
    """After a failed start the next request with the key starts the answer."""
    workers = Workers(scripted)
    scripted.refusals.append(BadRequest("no"))
    with pytest.raises(BadRequest):
        await workers.start(0)
    assert (await workers.start(0)).last_seq == 1
    await workers.aclose()

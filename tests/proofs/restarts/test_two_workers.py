"""Two daphne processes, one engine process, one log: either worker serves every stream, and to its owner only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tests.proofs.support.workers import (
    OTHER_KEY,
    SECONDS,
    SETTINGS,
    STALLING,
    Reader,
    Site,
    client,
    quiet,
    two_workers,
)
from tests.support.checks.stream_checks import text_of

pytestmark = [pytest.mark.timeout(600), pytest.mark.cut_streams("workers are killed with -9")]

NUM_READERS = 20
NUM_TOKENS = 200


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with two_workers(tmp_path_factory.mktemp("site"), app=STALLING) as site:
        yield site


async def test_a_worker_that_comes_back_serves_its_own_readers(site: Site) -> None:
    """A worker killed under 20 readers and restarted alone serves them again, without a message to the engine."""
    url = site.servers[0].url
    texts = await asyncio.gather(*(quiet(url, number, NUM_TOKENS) for number in range(NUM_READERS)))
    readers = [Reader(number, NUM_TOKENS) for number in range(NUM_READERS)]
    site.stall(0, NUM_TOKENS // 4)
    reading = asyncio.gather(*(reader.begin(url) for reader in readers))
    await asyncio.gather(*(reader.seen(1) for reader in readers))
    assert (await site.stalled(0))["streams"] == NUM_READERS
    site.kill(0)
    await reading
    assert not any(reader.is_over for reader in readers)
    await asyncio.to_thread(site.start, 0)
    await asyncio.gather(*(reader.to_the_end(url) for reader in readers))
    assert [text_of(reader.frames) for reader in readers] == texts
    waits = sorted(reader.waits[0] for reader in readers)
    print(
        f"\nready again to the first event, {NUM_READERS} readers: median {median(waits):.3f} s, most {waits[-1]:.3f} s"
    )


async def begun(site: Site, number: int) -> tuple[Reader, asyncio.Task[None]]:
    """Return the reader of an answer that hangs in its middle, at the first worker."""
    reader = Reader(number, NUM_TOKENS)
    site.stall(0, NUM_TOKENS // 4)
    reading = asyncio.create_task(reader.begin(site.servers[0].url))
    await reader.seen(1)
    await site.stalled(0)
    return reader, reading


async def test_a_second_tab_at_the_other_worker(site: Site) -> None:
    """It follows live, and both have the same text to the last byte."""
    reader, reading = await begun(site, 3)
    second = Reader(3, NUM_TOKENS)
    async with client(site.servers[1].url) as http:
        state = (await http.get(f"/streams/{reader.id}")).json()
        assert (state["state"], state["resumable"]) == ("running", True)
    following = asyncio.create_task(second.follow(site.servers[1].url, reader.id))
    await second.seen(2)
    site.go_on(0)
    await asyncio.gather(reading, following)
    assert second.is_over
    assert text_of(second.frames) == text_of(reader.frames)
    assert not [frame for frame in second.frames if frame.event == "status"]


async def test_stop_at_the_other_worker(site: Site) -> None:
    """It ends the answer for its reader at the first worker, whose writes are refused from then on."""
    reader, reading = await begun(site, 4)
    async with client(site.servers[1].url) as http:
        stopped = (await http.post(f"/streams/{reader.id}/stop", json={"seen_seq": 4})).json()
        assert (stopped["state"], stopped["finish_reason"]) == ("finished", "cancelled")
        site.go_on(0)
        await asyncio.wait_for(reading, SECONDS)
        assert reader.frames[-1].json["finish_reason"] == "cancelled"
        assert reader.frames[-1].json["kept_seq"] == 4
        again = (await http.post(f"/streams/{reader.id}/stop")).json()
        assert again["last_seq"] == stopped["last_seq"] == reader.last_seq


async def test_another_tenant_finds_nothing_at_either_worker(site: Site) -> None:
    """For every operation, and by either id."""
    reader, reading = await begun(site, 5)
    async with client(site.servers[0].url) as http:
        log_id = (await http.get(f"/streams/{reader.id}")).json()["log_id"]
    for server in site.servers:
        async with client(server.url, OTHER_KEY) as http:
            assert (await http.get(f"/streams/{reader.id}")).status_code == 404
            assert (await http.get(f"/streams/{reader.id}/events")).status_code == 404
            assert (await http.post(f"/streams/{reader.id}/stop")).status_code == 404
            event_id = f"{log_id}-1"
            by_event = await http.get("/streams/new?prompt=x", headers={"Last-Event-ID": event_id})
            assert by_event.status_code == 410
    site.go_on(0)
    await reading
    assert reader.is_over


async def test_a_stream_without_returning_readers_is_ended(tmp_path: Path) -> None:
    """Its worker was killed: another ends it when the resume window is over."""
    with two_workers(tmp_path, app=STALLING, variables={**SETTINGS, "RESUME_WINDOW_SECONDS": "2"}) as site:
        reader, reading = await begun(site, 6)
        site.kill(0)
        await reading
        async with asyncio.timeout(SECONDS), client(site.servers[1].url) as http:
            while (state := (await http.get(f"/streams/{reader.id}")).json())["state"] != "finished":  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert state["finish_reason"] == "abandoned"

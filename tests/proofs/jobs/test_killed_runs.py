"""A web process is killed with -9 while runs of a pipeline are read from it: no job, so none can go on.

Two web processes of one site; the engine is a process of its own. Some runs are in a step, some in an answer.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import psycopg
import pytest

from tests.proofs.support.workers import KEY, SECONDS, Reader, Site, client, two_workers
from tests.support.checks.stream_checks import Frame, text_of
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.sockets import open_socket
from tests.support.servers.sockets import text_of as text_of_messages

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(600),
    pytest.mark.cut_streams("a web process is killed with -9"),
]

ON_DISCONNECT = ("abort", "park")
SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.jobs_site"}
PATH = "/pipelines/audit"
LOST = ("producer_lost", True)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        variables = dict(SETTINGS)
        if request.param == "postgres":
            variables["JOBS_POSTGRES"] = str(stack.enter_context(PostgresServer()).port)
        yield stack.enter_context(two_workers(tmp_path_factory.mktemp("site"), variables=variables))


@pytest.fixture
def site(made: Site) -> Site:
    """Both processes, and the gate at which runs wait in a step."""
    if made.servers[0].process.poll() is not None:
        made.start(0)
    (made.folder / "gate").touch()
    return made


async def test_a_run_ends_with_its_process(site: Site) -> None:
    """Its readers, old and new, get what was shown and one error, which says to ask again; so does its row."""
    num_before, (first, second) = num_waiting(site), site.servers
    in_steps = {Reader(number, 40): on_disconnect for number, on_disconnect in enumerate(ON_DISCONNECT)}
    in_answers = {Reader(number, 40): on_disconnect for number, on_disconnect in enumerate(ON_DISCONNECT, 10)}
    readers = in_steps | in_answers

    def begin(those: dict[Reader, str]) -> list[asyncio.Task[None]]:
        begun = [one.begin(first.url, PATH, stream=True, on_disconnect=how) for one, how in those.items()]
        return [asyncio.create_task(one) for one in begun]

    reading = begin(in_steps)
    await until_waiting(site, num_before + len(in_steps))
    reading += begin(in_answers)
    await asyncio.gather(*(one.seen(6) for one in in_answers))
    site.kill(0)
    await asyncio.gather(*reading)
    assert not any(one.is_over for one in readers)
    later = [Reader(one.number + 20, 40) for one in readers]
    await asyncio.gather(
        *(one.to_the_end(second.url) for one in readers),
        *(new.follow(second.url, one.id) for one, new in zip(readers, later, strict=True)),
    )
    for (one, on_disconnect), new in zip(readers.items(), later, strict=True):
        assert shown(new.frames) == shown(one.frames)
        await check_end(site, one, on_disconnect)


def shown(frames: list[Frame]) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text, and every other event with its id: readers get several tokens in one event, or one in each."""
    return text_of(frames), [(frame.id, frame.json) for frame in frames if frame.event != "token"]


async def check_end(site: Site, reader: Reader, on_disconnect: str) -> None:
    """Check what a reader has of a run, and the run's row."""
    assert sum(frame.event in ("done", "error") for frame in reader.frames) == 1
    end, row = reader.frames[-1], await end_of_row(site, reader.id)
    if end.event == "done":  # its reader had left, and the reaper saw that before the reader was back
        assert (on_disconnect, end.json["finish_reason"], row) == ("abort", "abandoned", ("finished", ""))
    else:
        assert ((end.json["code"], end.json["retryable"]), row) == (LOST, ("finished", "producer_lost"))


async def test_so_does_one_of_a_socket_and_one_of_json(site: Site) -> None:
    """A WebSocket resumes at the other process, JSON is asked for again with its key: both get the error, once."""
    num_before, (first, second) = num_waiting(site), site.servers
    json, headers = {"prompt": "account", "on_disconnect": "park"}, {"Idempotency-Key": f"after-{num_before}"}
    with open_socket(first.websocket_url, KEY) as socket, open_socket(second.websocket_url, KEY) as other:
        started = await asyncio.to_thread(socket.ask, "start", request={"model": "audit", "prompt": "account"})
        stream_id = str(started["id"])
        async with client(first.url) as http:
            calling = asyncio.create_task(http.post(PATH, json=json, headers=headers))
            await until_waiting(site, num_before + 2)
            site.kill(0)
            with pytest.raises(httpx.TransportError):
                await calling
        await asyncio.to_thread(socket.close_code)
        seen = [message["seq"] for message in socket.got if message["type"] == "event" and "seq" in message]
        other.send("resume", id=stream_id, after=seen[-1])
        events = await asyncio.to_thread(other.events, stream_id)
    async with client(second.url) as http:
        again = await http.post(PATH, json=json, headers=headers)
    whole = Reader(20, 40)
    await whole.follow(second.url, stream_id)
    assert text_of_messages([*socket.events(stream_id, last=len(seen)), *events]) == text_of(whole.frames)
    assert sum(event["event"] in ("done", "error") for event in events) == 1
    end = events[-1]["data"]
    assert (end["code"], end["retryable"], events[-1]["seq"]) == (*LOST, whole.frames[-1].seq)
    assert again.json()["error"]["code"] == "producer_lost"
    assert await end_of_row(site, stream_id) == ("finished", "producer_lost")


def num_waiting(site: Site) -> int:
    """Return how many runs have come to the gate so far."""
    calls = site.folder / "calls"
    return calls.read_text().count(" check ") if calls.exists() else 0


async def until_waiting(site: Site, num: int) -> None:
    async with asyncio.timeout(SECONDS):
        while num_waiting(site) < num:  # noqa: ASYNC110  (a file of another process)
            await asyncio.sleep(0.05)


async def end_of_row(site: Site, stream_id: str) -> tuple[str, str]:
    """Return the state and the error of the stream's row, as soon as it is finished."""
    query = "SELECT state, error_code FROM streamserve_stream WHERE id = "
    async with asyncio.timeout(SECONDS):
        while True:
            if "JOBS_POSTGRES" in site.variables:
                with psycopg.connect(host="127.0.0.1", port=site.variables["JOBS_POSTGRES"], user="postgres") as rows:
                    row = rows.execute(query + "%s", (stream_id,)).fetchone()
            else:
                with closing(sqlite3.connect(site.folder / "site.sqlite3")) as rows:
                    row = rows.execute(query + "?", (stream_id,)).fetchone()
            assert row is not None
            if row[0] == "finished":
                return row[0], row[1]
            await asyncio.sleep(0.1)

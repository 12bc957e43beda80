"""A web process is killed with -9 while runs of a pipeline are read from it: the other process continues each of them.

Two web processes of one site; the engine is a process of its own. Some runs are in a step, some in an answer.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing

import httpx
import psycopg
import pytest

from tests.proofs.scale import scaled
from tests.proofs.support.workers import KEY, SECONDS, Reader, Site, client, two_workers
from tests.support.checks.stream_checks import Frame, text_of
from tests.support.servers.postgres_server import PostgresServer
from tests.support.servers.sockets import open_socket
from tests.support.servers.sockets import text_of as text_of_messages

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(3600),
    pytest.mark.cut_streams("a web process is killed with -9"),
]

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.jobs_site"}
PATH = "/pipelines/audit"
NUM_RUNS = 6
NUM_KILLS = scaled(40)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        variables = dict(SETTINGS)
        if request.param == "postgres":
            variables["JOBS_POSTGRES"] = str(stack.enter_context(PostgresServer()).port)
        folder, is_demo = tmp_path_factory.mktemp("site"), request.param == "sqlite"
        yield stack.enter_context(two_workers(folder, is_demo=is_demo, variables=variables))


class Gate:
    """While it is shut, runs stay in their third step."""

    def __init__(self, site: Site) -> None:
        self._file = site.folder / "gate"

    def shut(self) -> None:
        self._file.touch()

    def open(self) -> None:
        self._file.unlink(missing_ok=True)


def begun(readers: list[Reader], url: str) -> list[asyncio.Task[None]]:
    """Begin these runs, and read them."""
    return [asyncio.create_task(reader.begin(url, PATH, stream=True)) for reader in readers]


async def wholes(site: Site, num: int) -> list[Reader]:
    """Return the readers of as many uninterrupted runs."""
    readers = [Reader(number, 40) for number in range(num)]
    await asyncio.gather(*begun(readers, site.servers[1].url))
    return readers


def shown(frames: list[Frame]) -> tuple[str, list[object], str]:
    """Return the text, the steps and citations, and how it ended."""
    marks = [one.json for one in frames if one.event == "citation" or one.json.get("status") == "step"]
    return text_of(frames), marks, f"{frames[-1].event} {frames[-1].json.get('finish_reason')}"


async def check_all(site: Site, readers: list[Reader], expected: list[Reader]) -> None:
    """Each reader has what an uninterrupted run shows; so has a new one; and the row says how it ended."""
    later = [Reader(reader.number, 40) for reader in readers]
    await asyncio.gather(*(new.follow(site.servers[1].url, one.id) for one, new in zip(readers, later, strict=True)))
    for reader, new, whole in zip(readers, later, expected, strict=True):
        assert shown(reader.frames) == shown(new.frames) == shown(whole.frames)
        assert sum(frame.event in ("done", "error") for frame in reader.frames) == 1
        assert await end_of_row(site, reader.id) == ("finished", "")


async def test_a_run_continues_at_the_other_process(site: Site) -> None:
    """In a step and in an answer: the rest without gap or repeat, and no function that finished is called again."""
    gate, expected = Gate(site), await wholes(site, 4)
    gate.shut()
    num_before, readers = num_waiting(site), [Reader(number, 40) for number in range(4)]
    in_steps, in_answers = readers[:2], readers[2:]
    first, second = site.servers
    reading = begun(in_steps, first.url)
    await until_waiting(site, num_before + len(in_steps))
    reading += begun(in_answers, first.url)
    await asyncio.gather(*(one.seen(6) for one in in_answers))
    site.kill(0)
    await asyncio.gather(*reading)
    assert not any(one.is_over for one in readers)
    in_check = [calls_of(site, one.id)["check"] for one in readers]  # an answer may have ended before the kill
    assert in_check[: len(in_steps)] == [1] * len(in_steps)
    num_before = num_waiting(site)
    resuming = [asyncio.create_task(one.to_the_end(second.url)) for one in readers]
    await until_waiting(site, num_before + len(readers))
    gate.open()
    await asyncio.gather(*resuming)
    await check_all(site, readers, expected)
    for reader, num in zip(readers, in_check, strict=True):
        assert calls_of(site, reader.id) == {"read": 1, "check": 1 + num}
    await asyncio.to_thread(site.start, 0)


async def test_kills_at_any_moment(site: Site) -> None:
    """A process with runs is killed, again and again: each reader returns to the other one and gets all of its run."""
    chance, expected, num_cut, num_repeated = random.Random(5), await wholes(site, NUM_RUNS), 0, 0
    for _ in range(NUM_KILLS):
        readers = [Reader(number, 40) for number in range(NUM_RUNS)]
        reading = begun(readers, site.servers[0].url)
        await chance.choice(readers).seen(chance.randrange(1, 120))
        site.kill(0)
        await asyncio.gather(*reading)
        cut = [reader for reader in readers if reader.id and not reader.is_over]
        num_cut += len(cut)
        await asyncio.gather(*(reader.to_the_end(site.servers[1].url) for reader in cut))
        begun_ones = [reader for reader in readers if reader.id]
        await check_all(site, begun_ones, [expected[reader.number] for reader in begun_ones])
        for reader in begun_ones:
            # A function whose result was not in the log yet when its process died is called again.
            num_repeated += sum(calls_of(site, reader.id).values()) - 2
        await asyncio.to_thread(site.start, 0)
    assert num_cut
    assert num_repeated <= num_cut
    print(
        f"\nkill -9 of a web process, runs of a pipeline: {NUM_KILLS} kills, {num_cut} readers cut off in {NUM_RUNS}"
        f" runs each; text, steps, citations = uninterrupted run for all; {num_repeated} functions were called again"
    )


async def test_so_does_a_run_of_a_socket_and_of_json(site: Site) -> None:
    """A WebSocket resumes at the other process, JSON is asked for again with its key: both get the whole answer."""
    gate, num_before, (first, second) = Gate(site), num_waiting(site), site.servers
    gate.shut()
    body = {"prompt": "account", "on_disconnect": "park"}
    headers = {"Idempotency-Key": f"after-{num_before}"}
    with open_socket(first.websocket_url, KEY) as socket, open_socket(second.websocket_url, KEY) as other:
        started = await asyncio.to_thread(socket.ask, "start", request={"model": "audit", "prompt": "account"})
        stream_id = str(started["id"])
        async with client(first.url) as http:
            calling = asyncio.create_task(http.post(PATH, json=body, headers=headers))
            await until_waiting(site, num_before + 2)
            site.kill(0)
            with pytest.raises(httpx.TransportError):
                await calling
        await asyncio.to_thread(socket.close_code)
        seen = [message["seq"] for message in socket.got if message["type"] == "event" and "seq" in message]
        other.send("resume", id=stream_id, after=seen[-1])
        gate.open()
        events = await asyncio.to_thread(other.events, stream_id)
    async with client(second.url) as http:
        again = await http.post(PATH, json=body, headers=headers)
    whole = Reader(20, 40)
    await whole.follow(second.url, stream_id)
    assert text_of_messages([*socket.events(stream_id, last=len(seen)), *events]) == text_of(whole.frames)
    assert sum(event["event"] in ("done", "error") for event in events) == 1
    assert (events[-1]["event"], events[-1]["seq"]) == ("done", whole.frames[-1].seq)
    assert again.status_code == 200
    assert again.json()["text"].endswith("The end.")
    assert await end_of_row(site, stream_id) == ("finished", "")
    await asyncio.to_thread(site.start, 0)


def calls_of(site: Site, stream_id: str) -> Counter[str]:
    """Return how often each function of a run was called."""
    lines = (line.split() for line in (site.folder / "calls").read_text().splitlines())
    return Counter(step for of, step, _ in lines if of == stream_id)


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

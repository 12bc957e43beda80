"""A site with LOG = "file", as it is by default, through its routes: what survives the process, what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.management import CommandError, call_command
from django.db.backends.utils import CursorWrapper
from django.test.utils import override_settings

from streamserve.conf import get_settings
from streamserve.models import Stream as StreamRow
from streamserve.streams.log.base import LogFull
from streamserve.streams.log.file_log import FileLog
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.stream_checks import Frame, check_native, check_native_part, parse_sse, text_of
from tests.support.streams.hand_made import Gate

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def shared(tmp_path: Path, transactional_db: Any, site_gate: Gate) -> AsyncIterator[Path]:
    """A site on a state folder of its own, with its engine in this process."""
    conf = {"MODELS": {"echo": {"PATH": "echo"}}, "CLIENT": "thread", "STATE_DIR": tmp_path, "ECHO_STEP_SECONDS": 0.01}
    with override_settings(STREAMSERVE=conf):
        await until_ready()
        yield tmp_path
        await site.reset()


@pytest.fixture
def caller(alice_key: str) -> Caller:
    return Caller(key=alice_key)


def ask(**fields: Any) -> dict[str, Any]:
    return {"prompt": "tell me", "max_tokens": 12, "seed": 7, "ignore_eos": True, **fields}


async def read_some(response: Any, num_tokens: int) -> bytes:
    """Read until that many tokens' frames have come, and leave."""
    out = b""
    chunks = aiter(response)
    while out.count(b"event: token") < num_tokens:
        out += await anext(chunks)
    await chunks.aclose()
    return out


async def left_half_read(caller: Caller, gate: Gate) -> tuple[str, list[Frame]]:
    """Start an answer whose reader leaves it; return its id and what was read. It is parked, and the gate is open."""
    gate.allow(8)
    response = await caller.post("/streams", ask(max_tokens=60))
    seen = check_native_part(await read_some(response, 1))
    stream = site.get_streams().find(response["X-Stream-Id"])
    assert stream is not None
    await until(lambda: stream.state == "parked")
    gate.open()
    return response["X-Stream-Id"], seen


async def test_streams_outlive_the_process(shared: Path, caller: Caller, site_gate: Gate) -> None:
    """A finished stream is replayed and an unfinished one resumes, by either kind of address."""
    whole = await caller.post("/streams", ask(max_tokens=60))
    text = text_of(check_native(await body_of(whole)))
    part_id, seen = await left_half_read(caller, site_gate)
    await site.reset()
    await until_ready()
    again = await caller.get(f"/streams/{whole['X-Stream-Id']}/events")
    assert text_of(check_native(await body_of(again))) == text
    state = (await caller.get(f"/streams/{part_id}")).json()
    assert (state["state"], state["error_code"], state["resumable"]) == ("parked", None, True)
    rest = await caller.get("/streams/new?prompt=x", **{"last-event-id": seen[-1].id})
    assert rest["X-Stream-Id"] == part_id
    assert text_of(seen + check_native(await body_of(rest), after=seen[-1].seq)) == text
    state = (await caller.get(f"/streams/{part_id}")).json()
    assert (state["state"], state["finish_reason"], state["usage"]["completion_tokens"]) == ("finished", "length", 60)
    assert await StreamRow.objects.acount() == 2


async def test_a_resume_elsewhere_is_one_select(
    shared: Path, caller: Caller, site_gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that takes a stream over reads its row once, and then claims it."""
    stream_id, seen = await left_half_read(caller, site_gate)
    await site.reset()
    await until_ready()
    statements: list[str] = []
    execute = CursorWrapper.execute

    def noted(cursor: Any, sql: str, params: Any = None) -> Any:
        if '"streamserve_stream"."id" = ' in sql:  # the reaper reads all rows, at its own times
            statements.append(sql.partition(" ")[0])
        return execute(cursor, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", noted)
    rest = await caller.get(f"/streams/{stream_id}/events?after={seen[-1].seq}")
    check_native(await body_of(rest), after=seen[-1].seq)
    await site.reset()
    assert statements == ["SELECT", "UPDATE", "UPDATE"]  # its row, the claim, the end


async def test_another_tenant_finds_nothing(shared: Path, caller: Caller, lonely_key: str) -> None:
    """Another tenant's stream is not found in memory, nor in the rows after a restart."""
    response = await caller.post("/streams", ask())
    frames = check_native(await body_of(response))
    other = Caller(key=lonely_key)
    for _ in range(2):
        assert (await other.get(f"/streams/{response['X-Stream-Id']}/events")).status_code == 404
        assert (await other.get("/streams/new?prompt=x", **{"last-event-id": frames[0].id})).status_code == 410
        await site.reset()
        await until_ready()


async def test_a_models_system_prompt_is_computed_once_for_all_tenants(
    shared: Path, caller: Caller, lonely_key: str
) -> None:
    """A second tenant finds its whole blocks; a body cannot claim that a prompt is the server's."""
    system = "You answer questions about orders and parcels, briefly and kindly. " * 2
    conf = {"MODELS": {"echo": {"PATH": "echo", "SYSTEM": system}}, "CLIENT": "thread", "STATE_DIR": shared}
    question = {"role": "user", "content": "Where is it?"}
    own = [{"role": "system", "content": system}, question]
    with override_settings(STREAMSERVE=conf):
        await site.reset()
        await until_ready()
        bodies = [{"messages": [question]}, {"messages": own}, {"messages": own, "has_public_system": True}]
        cached = []
        for who, body in ((caller, bodies[0]), *((Caller(key=lonely_key), body) for body in bodies[:2])):
            frames = check_native(await body_of(await who.post("/streams", {**body, "max_tokens": 2})))
            cached.append(json.loads(frames[-1].data)["usage"]["prompt_tokens_details"]["cached_tokens"])
        refused = await caller.post("/streams", bodies[2])
        await site.reset()
    assert cached == [0, (len(system) + 3) // 32 * 32, 0]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "has_public_system")


async def test_stop_after_a_restart(shared: Path, caller: Caller) -> None:
    """An answer of a process that is gone can still be stopped, and is cut where its user stopped reading."""
    response = await caller.post("/streams", ask(max_tokens=500))
    seen = parse_sse(await read_some(response, 3))
    await site.reset()
    await until_ready()
    path = f"/streams/{response['X-Stream-Id']}"
    stopped = (await caller.post(f"{path}/stop", {"seen_seq": seen[2].seq})).json()
    assert (stopped["state"], stopped["finish_reason"]) == ("finished", "cancelled")
    rest = check_native(await body_of(await caller.get(f"{path}/events")))
    assert rest[-1].json["kept_seq"] == seen[2].seq


async def test_no_room_in_the_log(shared: Path, caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new answer is refused before anything is streamed, and the engine keeps nothing of it."""

    async def refuse(batches: Any) -> Any:
        raise LogFull("The stream log's disk is full.", retry_after=30)

    monkeypatch.setattr(site.get_site().log, "commit", refuse)
    response = await caller.post("/streams", ask())
    assert (response.status_code, response["Retry-After"]) == (507, "30")
    assert not any(stream.is_live for stream in site.get_site().streams.all())
    monkeypatch.undo()
    await until(lambda: site.get_site().streams.writer.outage is None)
    assert (await caller.post("/streams", ask())).status_code == 200


async def test_a_log_that_is_down_for_a_while(shared: Path, caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running answer waits for the log and resumes: no error, no gap, and a commit in doubt is in once."""
    text = text_of(check_native(await body_of(await caller.post("/streams", ask(max_tokens=60)))))
    response = await caller.post("/streams", ask(max_tokens=60))
    log = site.get_site().log
    commit = log.commit
    num_refused = 0

    async def stumble(batches: Any) -> Any:
        nonlocal num_refused
        results = await commit(batches)
        if results[0] > 5 and not num_refused:
            num_refused += 1
            raise LogFull("The stream log's disk is full.")
        return results

    monkeypatch.setattr(log, "commit", stumble)
    frames = check_native(await body_of(response))
    assert num_refused == 1
    assert text_of(frames) == text


async def test_purge(shared: Path, caller: Caller) -> None:
    """Old logs are deleted and rows stay; `--dry-run` only prints what would be deleted."""
    response = await caller.post("/streams", ask())
    await body_of(response)
    await site.reset()
    later = time.time() + 3600
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamserve.management.commands.streamserve_purge.time.time", lambda: later)
        assert (await said("--dry-run")).startswith("Would delete 1 logs that were last written before ")
        assert (await said("--dry-run")).startswith("Would delete 1 logs")
        assert (await said()).startswith("Deleted 1 logs")
        assert (await said("--dry-run")).startswith("Would delete 0 logs")
    assert (await said()).startswith("Deleted 0 logs")
    await until_ready()
    assert (await caller.get(f"/streams/{response['X-Stream-Id']}/events")).status_code == 410
    assert (await StreamRow.objects.aget()).finish_reason == "length"


async def said(*arguments: str) -> str:
    out = StringIO()
    await asyncio.to_thread(call_command, "streamserve_purge", *arguments, stdout=out)
    return out.getvalue()


async def test_purge_of_logs_in_memory(transactional_db: Any) -> None:
    """The command has no access to logs in memory."""
    with pytest.raises(CommandError, match="by themselves"):
        await sync_to_async(call_command)("streamserve_purge")


async def test_a_process_leaves_no_lock(shared: Path) -> None:
    """A process holds a lock while it runs and leaves none; its log is the file that `LOG` names."""
    assert len(list((shared / "workers").glob("*.lock"))) == 1
    assert isinstance(site.get_site().log, FileLog)
    await site.get_site().log.purge(0)
    assert (shared / "streams.sqlite3").exists()
    assert get_settings().log == "file"
    await site.reset()
    assert list((shared / "workers").glob("*.lock")) == []

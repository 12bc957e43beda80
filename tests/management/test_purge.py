"""Laws of expiry: rows go when their days are over, by the command and by the reaper, and never before."""

from __future__ import annotations

import asyncio
import io
import re
import sqlite3
import threading
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from channels.db import database_sync_to_async
from django.core.management import CommandError, call_command
from django.db.models.signals import post_delete
from django.test.utils import override_settings
from django.utils import timezone

from streamserve.conf import get_settings
from streamserve.models import Batch, Conversation, Message, StoredFile, Stream, Watch
from streamserve.protocol.events import Done, Status, Token
from streamserve.rows.reaper import Reaper, row_ages
from streamserve.streams.log.base import append
from streamserve.web import resources, site

pytestmark = pytest.mark.django_db(transaction=True)


def conf(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"MODELS": {"m": {"PATH": "echo"}}, "CLIENT": "thread", "STATE_DIR": str(folder), **keys}


def planted(now: datetime) -> None:
    """Finished streams of 1 minute, 3 and 30 days ago, a running one of 30 days ago, watches of the same ages."""
    ages = {"a": timedelta(minutes=1), "b": timedelta(days=3), "c": timedelta(days=30)}
    fields = {"model": "m", "owner": "user:1", "tenant": "user:1"}
    for name, age in ages.items():
        ended = {"state": "finished", "created_at": now - age, "finished_at": now - age}
        Stream.objects.create(id=name * 32, log_id=name * 12, **ended, **fields)
        Watch.objects.create(stream_id=name * 32, username="u", began_at=now - age, ended_at=now - age)
    Stream.objects.create(id="d" * 32, log_id="d" * 12, created_at=now - ages["c"], **fields)


def left() -> tuple[str, str]:
    """Return the first letters of the rows that are there."""
    streams = Stream.objects.order_by("pk").values_list("pk", flat=True)
    watches = Watch.objects.order_by("stream_id").values_list("stream_id", flat=True)
    return "".join(pk[0] for pk in streams), "".join(pk[0] for pk in watches)


def printed(*options: str) -> str:
    out = io.StringIO()
    call_command("streamserve_purge", *options, stdout=out)
    return out.getvalue()


def counts(text: str) -> list[str]:
    """Return how many of each a run names, in its order."""
    return re.findall(r"(\d+) (logs|rows of streams|of watches|of jobs|files|batches)", text)


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({}, ("abcd", "abc")),
        ({"KEEP_STREAMS_DAYS": 7}, ("abd", "abc")),
        ({"KEEP_STREAMS_DAYS": 2, "KEEP_WATCHES_DAYS": 7}, ("ad", "ab")),
        ({"KEEP_STREAMS_DAYS": 0.0001}, ("ad", "abc")),  # what may still be replayed stays
    ],
)
def test_the_command_drops_rows_whose_days_are_over(tmp_path: Path, keys: Any, rows: tuple[str, str]) -> None:
    """0 keeps all; a running stream, and one whose events are kept, is never dropped."""
    planted(timezone.now())
    with override_settings(STREAMSERVE=conf(tmp_path, **keys)):
        announced = printed("--dry-run")
        assert left() == ("abcd", "abc")
        done = printed()
    assert counts(announced) == counts(done)
    assert left() == rows
    num_streams, num_watches = 4 - len(rows[0]), 3 - len(rows[1])
    assert f"Deleted {num_streams} rows of streams, {num_watches} of watches and 0 of jobs." in done


def test_the_command_drops_old_logs_but_not_those_of_queued_jobs(tmp_path: Path) -> None:
    """With a row or without one; a dry run counts the same, and leaves them."""
    fields = {"model": "m", "owner": "user:1", "tenant": "user:1", "created_at": timezone.now()}
    Stream.objects.create(id="e" * 32, log_id="queued", on_disconnect="job", **fields)
    Stream.objects.create(id="f" * 32, log_id="lost", **fields)
    kept = {"queued": False, "lost": False, "orphan": True, "new": True}

    async def write() -> None:
        log = resources.log_for(get_settings())
        for name, is_ended in kept.items():
            await append(log, name, 0, [Done(finish_reason="stop") if is_ended else Status(status="queued")])
        await log.aclose()

    with override_settings(STREAMSERVE=conf(tmp_path)):
        asyncio.run(write())
        with closing(sqlite3.connect(tmp_path / resources.LOG_FILE)) as database, database:
            database.execute("UPDATE logs SET touched_at = 1 WHERE log_id != 'new'")
        announced = printed("--dry-run")
        left = logs_of(tmp_path)
        done = printed()
    assert left == set(kept)
    assert counts(announced) == counts(done)
    assert "Deleted 2 logs" in done
    assert logs_of(tmp_path) == {"queued", "new"}


def logs_of(folder: Path) -> set[str]:
    with closing(sqlite3.connect(folder / resources.LOG_FILE)) as database:
        return {name for (name,) in database.execute("SELECT log_id FROM logs")}


async def test_the_reaper_does_the_same(tmp_path: Path) -> None:
    """Every web process, with its first round; not on the thread that every new answer waits for."""
    threads: set[str] = set()

    def note(**kwargs: Any) -> None:
        threads.add(threading.current_thread().name)

    post_delete.connect(note, sender=Watch)
    await database_sync_to_async(planted)(timezone.now())
    with override_settings(STREAMSERVE=conf(tmp_path, KEEP_STREAMS_DAYS=7, KEEP_WATCHES_DAYS=7)):
        own = site.get_site()
        assert own.work.liveness is not None
        await Stream.objects.filter(pk="d" * 32).adelete()
        await Reaper(own.streams, own.work.liveness, row_ages(own.settings)).round()
        await site.reset()
    post_delete.disconnect(note, sender=Watch)
    assert await database_sync_to_async(left)() == ("ab", "ab")
    assert threads
    assert "streamserve orm" not in threads


def test_the_command_drops_expired_files_and_old_batches(tmp_path: Path) -> None:
    """By BATCHES["KEEP_DAYS"]; what a batch still reads stays, however old it is."""
    now = timezone.now()
    old, past = now - timedelta(days=9), now - timedelta(seconds=1)
    fields = {"owner": "user:1", "tenant": "user:1"}
    for name, expires_at in (("expired", past), ("read", past), ("kept", now + timedelta(days=1))):
        StoredFile.objects.create(id=name, name=name, num_bytes=1, is_ready=True, expires_at=expires_at, **fields)
    ended = {"status": "completed", "state": "done", "finished_at": old}
    Batch.objects.create(id="old", input_file_id="kept", expires_at=old, **ended, **fields)
    Batch.objects.create(id="new", input_file_id="kept", expires_at=old, **{**ended, "finished_at": now}, **fields)
    Batch.objects.create(id="running", input_file_id="read", expires_at=old, created_at=old, **fields)
    with override_settings(STREAMSERVE=conf(tmp_path, BATCHES={"KEEP_DAYS": 7})):
        announced = printed("--dry-run")
        assert (StoredFile.objects.count(), Batch.objects.count()) == (3, 3)
        done = printed()
    assert counts(announced) == counts(done)
    assert "Deleted 1 files of batches and 1 batches." in done
    assert sorted(StoredFile.objects.values_list("pk", flat=True)) == ["kept", "read"]
    assert sorted(Batch.objects.values_list("pk", flat=True)) == ["new", "running"]


def test_an_answer_is_in_its_message_before_its_log_goes(tmp_path: Path) -> None:
    """The command writes what no process has written; a dry run counts its log as needed. A deletion is over then."""
    tenant = {"owner": "key:1", "tenant": "key:1"}
    for name in ("a", "b"):
        Stream.objects.create(id=name * 32, log_id=name, model="m", state="finished", **tenant)
    conversation = Conversation.objects.create(**tenant)
    Conversation.objects.create(deleted_at=timezone.now() - timedelta(hours=1), **tenant)
    Message.objects.create(conversation=conversation, role="assistant", state="running", stream_id="a" * 32)
    words = [Token(text="Because.", token_ids=(1,)), Done(finish_reason="stop")]

    async def write() -> None:
        log = resources.log_for(get_settings())
        for name in ("a", "b"):
            await append(log, name, 0, words)
        await log.aclose()

    with override_settings(STREAMSERVE=conf(tmp_path, CONVERSATIONS=True)):
        asyncio.run(write())
        with closing(sqlite3.connect(tmp_path / resources.LOG_FILE)) as database, database:
            database.execute("UPDATE logs SET touched_at = 1")
        assert "Would delete 1 logs" in printed("--dry-run")
        assert "Deleted 1 conversations." in printed()
    assert Message.objects.get().text == "Because."
    assert list(Conversation.objects.all()) == [conversation]


def test_a_log_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """By its file."""
    (tmp_path / "streams.sqlite3").mkdir()
    given = {"MODELS": {"echo": {"PATH": "echo"}}, "STATE_DIR": str(tmp_path)}
    with override_settings(STREAMSERVE=given), pytest.raises(CommandError, match=f"{tmp_path}/streams.sqlite3"):
        call_command("streamserve_purge")

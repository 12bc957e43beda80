"""Laws of `FileLog` alone: kill -9, full and failing disks, other processes, and what stays on the disk."""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import random
import resource
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamserve.protocol.events import Done, Token
from streamserve.protocol.frames import FrameError
from streamserve.streams.log import file_log, file_store
from streamserve.streams.log.base import Committed, LogFull, LogLost, LogUnavailable, append, make_batch, new_log_id
from streamserve.streams.log.file_database import SCHEMA_VERSION
from streamserve.streams.log.file_log import FileLog
from streamserve.streams.log.file_store import FileStore
from tests.proofs.scale import scaled
from tests.support.streams.hand_made import tok
from tests.support.streams.log_killing import Writer, check, kill_in_turn
from tests.support.streams.logs import everything, numbered

_DEADLINE_SECONDS = 60.0
_NOTICE_SECONDS = 0.1  # what `wait` promises
_BUSY_SECONDS = 1.0  # what a busy machine may add to one delay; not to the median


@pytest.fixture(autouse=True)
def no_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of a busy machine is not slow, unless a test says so: the thread would commit what the loop's may."""
    monkeypatch.setattr(file_log, "_SLOW_SECONDS", math.inf)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "streams.db"


@pytest.fixture
async def log(path: Path) -> AsyncIterator[FileLog]:
    log = FileLog(path)
    yield log
    await log.aclose()


# kill -9


@pytest.mark.proof
@pytest.mark.timeout(1200)
async def test_kill_9_takes_nothing_that_was_acknowledged(path: Path) -> None:
    """Every batch acknowledged before a kill -9 at a random moment is in the file whole, once and in order."""
    seed = random.randrange(2**32)
    rng, num_events = random.Random(seed), 0
    print(f"seed {seed}")
    for _ in range(scaled(70, least=4)):
        writers = [Writer(str(path), f"w{number}", [new_log_id() for _ in range(5)]) for number in range(3)]
        kill_in_turn(writers, rng)
        log = FileLog(path)
        num_events += await check(log, writers)
        await log.aclose()
    assert _is_sound(path)
    print(f"{num_events} acknowledged events")


@pytest.mark.proof
@pytest.mark.timeout(600)
async def test_fences_hold_between_racing_processes(path: Path) -> None:
    """Two producers that claim the same logs in turns, and are killed, never lower a log's fence."""
    rng = random.Random(7)
    for _ in range(scaled(40, least=2)):
        log_ids = [new_log_id() for _ in range(3)]
        writers = [Writer(str(path), f"w{number}", log_ids, f"{number + 1},2") for number in range(2)]
        for writer in writers:
            writer.wait()
        await asyncio.sleep(rng.uniform(0.1, 0.4))
        kill_in_turn(writers, rng)
        log = FileLog(path)
        await check(log, writers)
        await log.aclose()


@pytest.mark.proof
async def test_a_process_killed_while_making_the_file_leaves_none_that_hinders(path: Path) -> None:
    """An empty file and an unheld lock file, left by a process killed at creation, do not hinder the next one."""
    for name in (path, Path(f"{path}.lock")):
        _write(name, b"")
    log = FileLog(path)
    assert await append(log, "a", 1, [tok("x")]) == 1
    await log.aclose()


# Other processes


async def test_another_process_appends_during_a_read(path: Path, log: FileLog) -> None:
    """A reader in this process gets every event of other processes' writers once, in order, as it is committed."""
    log_ids = [new_log_id() for _ in range(3)]
    writer = Writer(str(path), "w", log_ids)
    try:
        await asyncio.to_thread(writer.wait)
        read = await asyncio.gather(*[_follow(log, log_id, 300) for log_id in log_ids])
    finally:
        writer.kill()
    for texts in read:
        assert texts == [f"w:1:{number}" for number in range(len(texts))]


@pytest.mark.proof
@pytest.mark.alone
async def test_what_another_process_appends_is_noticed_within_100_ms(path: Path, log: FileLog) -> None:
    """The median delay to notice another process's append is under 100 ms, and every delay is under a second."""
    other, log_id = FileLog(path), new_log_id()
    await append(other, log_id, 1, [tok("x")])
    delays = []
    for last_seq in range(1, 21):
        waiting = asyncio.create_task(log.wait(log_id, last_seq))
        await asyncio.sleep(random.uniform(0.06, 0.16))
        assert not waiting.done()
        await append(other, log_id, 1, [tok("y")])
        committed_at = time.monotonic()
        async with asyncio.timeout(_DEADLINE_SECONDS):
            await waiting
        delays.append(time.monotonic() - committed_at)
    await other.aclose()
    assert sorted(delays)[10] <= _NOTICE_SECONDS
    assert max(delays) <= _NOTICE_SECONDS + _BUSY_SECONDS


async def test_waiting_readers_share_one_poller_and_none_is_left(log: FileLog) -> None:
    """All waiting readers share one polling task, which ends when no reader waits."""
    log_ids = [new_log_id() for _ in range(50)]
    await asyncio.gather(*[append(log, log_id, 1, [tok("x")]) for log_id in log_ids])
    waiting = [asyncio.create_task(log.wait(log_id, 1)) for log_id in log_ids]
    await asyncio.sleep(0)
    assert sum(task.get_name() == "log poller" for task in asyncio.all_tasks()) == 1
    for task in waiting:
        task.cancel()
    async with asyncio.timeout(_DEADLINE_SECONDS):
        while any(task.get_name() == "log poller" for task in asyncio.all_tasks()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_threads_do_not_grow_with_streams(log: FileLog) -> None:
    """A log has one writer thread and two reader threads, however many streams there are."""
    await asyncio.gather(*[_use(log, new_log_id()) for _ in range(100)])
    assert sum(thread.name.startswith("log-") for thread in threading.enumerate()) <= 3


# Which thread commits


async def test_a_few_events_wake_no_thread(path: Path, log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the file is open, a commit of a few events is done when it is asked for, and the log's thread sleeps on."""
    log_ids = [new_log_id() for _ in range(4)]
    await _settle(log, log_ids)
    wakes: list[int] = []
    monkeypatch.setattr(log._writer._news, "notify", lambda: wakes.append(1))
    for number in range(2, 50):
        done = log.commit([make_batch(log_id, 1, number - 1, [tok("y")]) for log_id in log_ids])
        assert isinstance(done, Committed)
        assert done.results == [number] * 4
    assert wakes == []
    monkeypatch.undo()
    assert [await FileLog(path).last_seq(log_id) for log_id in log_ids] == [49] * 4


@pytest.mark.parametrize("what", ["many streams", "large events", "a log on the disk", "a slow disk"])
async def test_what_takes_long_is_committed_by_the_thread(path: Path, what: str) -> None:
    """A commit that would keep the event loop for long is left to the log's thread."""
    log = FileLog(path, is_full_sync=what == "a log on the disk")
    log_ids = [new_log_id() for _ in range(33 if what == "many streams" else 1)]
    await _settle(log, log_ids)
    if what == "a slow disk":
        log._writer._slow_until = math.inf
    text = "word " * 8000 if what == "large events" else "word"
    committing = log.commit([make_batch(log_id, 1, 1, [tok(text)]) for log_id in log_ids])
    assert not isinstance(committing, Committed)
    assert await committing == [2] * len(log_ids)
    await log.aclose()


async def test_the_loop_waits_for_no_other_process(path: Path, log: FileLog) -> None:
    """While another process writes, a commit is left to the thread, which waits; the next is done at once again."""
    log_id = new_log_id()
    await _settle(log, [log_id])
    with FileStore(path)._lock.held():
        committing = log.commit([make_batch(log_id, 1, 1, [tok("y")])])
        assert not isinstance(committing, Committed)
        task = asyncio.ensure_future(committing)
        await asyncio.sleep(0.01)
        assert not task.done()
    assert await task == [2]
    await _settle(log, [])
    assert isinstance(log.commit([make_batch(log_id, 1, 2, [tok("z")])]), Committed)
    assert await everything(log, log_id) == numbered([tok("x"), tok("y"), tok("z")])


async def test_what_the_loop_commits_is_moved_into_the_file(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread moves the write-ahead log into the file, whichever thread has committed."""
    monkeypatch.setattr(file_store, "_CHECKPOINT_WRITES", 20)
    log_id = new_log_id()
    await _settle(log, [log_id])
    for number in range(1, 30):
        await log.commit([make_batch(log_id, 1, number, [tok("y")])])
    async with asyncio.timeout(_DEADLINE_SECONDS):
        while log._writer._store._num_writes >= 20:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await log.last_seq(log_id) == 30


async def _settle(log: FileLog, log_ids: list[str]) -> None:
    """Begin these logs, with one event each, and wait until the log's thread has nothing to do."""
    await asyncio.gather(*[append(log, log_id, 1, [tok("x")]) for log_id in log_ids])
    async with asyncio.timeout(_DEADLINE_SECONDS):
        while log._writer._is_working:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.proof
async def test_a_stopped_process_blocks_the_log_for_a_bounded_time(path: Path) -> None:
    """A stopped process that holds the lock costs other processes LogUnavailable, and nothing once it continues."""
    log = FileLog(path, busy_seconds=0.3)
    await append(log, "a", 1, [tok("x")])
    holder = multiprocessing.get_context("spawn").Process(target=_hold_lock, args=(path,))
    holder.start()
    try:
        while not path.with_suffix(".held").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(LogUnavailable) as raised:
            await append(log, "a", 1, [tok("y")])
        assert (raised.value.code, raised.value.http_status) == ("log_down", 503)
        assert await log.read("a", 1) == []
    finally:
        holder.kill()
        holder.join()
    assert await append(log, "a", 1, [tok("z")]) == 2
    await log.aclose()


# Disks


async def test_a_full_disk_is_named_and_recovered_from(path: Path) -> None:
    """A full disk raises 507 `log_full`, reads still work, nothing is torn, and with room again writes succeed."""
    log = FileLog(path)
    kept = await _fill(log)
    await log.aclose()
    with contextlib.closing(sqlite3.connect(path)) as db:
        page_count = db.execute("PRAGMA page_count").fetchone()[0]

    class Tight(FileStore):
        num_pages = page_count + 20

        def _open(self):  # type: ignore[no-untyped-def]
            db = super()._open()
            db.execute(f"PRAGMA max_page_count = {Tight.num_pages}")
            return db

    log = FileLog(path)
    log._writer._store = Tight(path)
    log_id = new_log_id()
    with pytest.raises(LogFull) as raised:
        await _append_for_ever(log, log_id, tok("word " * 50))
    num_events = await log.last_seq(log_id)
    assert (raised.value.code, raised.value.http_status) == ("log_full", 507)
    for _ in range(3):
        with pytest.raises(LogFull):
            await append(log, log_id, 1, [tok("word " * 500)] * 20)
    assert await log.last_seq(log_id) == num_events
    assert await everything(log, kept) == numbered([tok("kept")] * 50)
    log._writer._store._db().execute("PRAGMA max_page_count = 1000000")
    assert await append(log, log_id, 1, [tok("word " * 500)] * 20) == num_events + 20
    await log.aclose()
    assert _is_sound(path)


def test_a_full_tmpfs_is_survived(tmp_path: Path) -> None:
    """A real 512 KiB file system that other files fill up refuses writes, and takes them once it has room again."""
    mount, fill = f"mount -t tmpfs -o size=512k none {tmp_path}", f"tests.support.streams.full_disk {tmp_path}"
    script = f"{mount} && exec {sys.executable} -m {fill}"
    result = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=120)
    if "Operation not permitted" in result.stderr or "unshare failed" in result.stderr:
        pytest.skip("mounting a tmpfs needs user namespaces or root")
    assert result.returncode == 0, result.stderr
    assert "full, recovered, retried, read, sound" in result.stdout


async def test_a_failing_write_is_named_and_recovered_from(path: Path, log: FileLog) -> None:
    """A disk that refuses writes (here by a file size limit) raises 503 `log_down` until it takes them again."""
    log_id = new_log_id()
    await append(log, log_id, 1, [tok("x")])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_size(f"{path}-wal"), hard))
    try:
        for _ in range(3):
            with pytest.raises(LogUnavailable) as raised:
                await append(log, log_id, 1, [tok("word " * 5000)])
            assert (raised.value.code, raised.value.http_status) == ("log_down", 503)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert await append(log, log_id, 1, [tok("y")]) == 2
    assert await everything(log, log_id) == numbered([tok("x"), tok("y")])
    assert _is_sound(path)


async def test_an_impossible_folder_is_named(tmp_path: Path) -> None:
    """A file in the folder's place raises 503 for reads and writes without a crash, and is tried again."""
    (tmp_path / "state").write_text("")
    log = FileLog(tmp_path / "state" / "streams.db")
    for call in (append(log, "a", 1, [tok("x")]), log.read("a", 0), log.last_seq("a")):
        with pytest.raises(LogUnavailable):
            await call
    (tmp_path / "state").unlink()
    assert await append(log, "a", 1, [tok("x")]) == 1
    await log.aclose()


async def test_a_folder_that_is_removed_is_made_anew(path: Path, log: FileLog) -> None:
    """What it held is lost, and said to be; what comes then is where other processes find it."""
    await append(log, "a", 1, [tok("x")])
    assert await everything(log, "a") == numbered([tok("x")])
    shutil.rmtree(path.parent)
    with pytest.raises(KeyError):
        await log.read("a", 0)
    (result,) = await log.commit([make_batch("a", 1, 1, [tok("y")])])
    assert isinstance(result, LogLost)
    assert await append(log, "b", 1, [tok("z")]) == 1
    other = FileLog(path)
    assert await everything(other, "b") == await everything(log, "b") == numbered([tok("z")])
    await other.aclose()


async def test_a_file_that_another_process_has_made_anew(path: Path, log: FileLog) -> None:
    """Both write the new file, one at a time: its lock is the new one too."""
    await append(log, "a", 1, [tok("x")])
    shutil.rmtree(path.parent)
    other = FileLog(path)
    await append(other, "b", 1, [tok("y")])
    assert await everything(log, "b") == numbered([tok("y")])
    appended = [append(log if number % 2 else other, f"log-{number}", 1, [tok("z")]) for number in range(50)]
    assert await asyncio.gather(*appended) == [1] * 50
    await other.aclose()
    assert {await log.last_seq(f"log-{number}") for number in range(50)} == {1}
    assert _is_sound(path)


async def test_a_file_that_is_no_log_is_left_alone(path: Path) -> None:
    """A file of another program or of a later version is not written to."""
    _write(path, b"not a database, but long enough to look at" * 100)
    log = FileLog(path)
    with pytest.raises(LogUnavailable):
        await append(log, "a", 1, [tok("x")])
    await log.aclose()
    assert _holds(path.parent, b"not a database, but long enough to look at" * 100)


async def test_a_later_version_is_refused(path: Path, log: FileLog) -> None:
    """The file holds its version; the message names both versions."""
    await append(log, "a", 1, [tok("x")])
    await log.aclose()
    db = sqlite3.connect(path)
    assert db.execute("PRAGMA user_version").fetchone()[0] == SCHEMA_VERSION
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    later = FileLog(path)
    with pytest.raises(LogUnavailable, match=f"version {SCHEMA_VERSION + 1}; this release knows {SCHEMA_VERSION}"):
        await append(later, "a", 1, [tok("y")])
    await later.aclose()


# What is on the disk


async def test_the_file_is_private(path: Path, log: FileLog) -> None:
    """All files that SQLite makes have mode 0600, because answers are private."""
    await append(log, "a", 1, [tok("x")])
    files = list(path.parent.iterdir())
    assert len(files) >= 4
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


async def test_what_was_purged_is_nowhere(path: Path, log: FileLog) -> None:
    """Purged text is in none of the files any more, and its room is given back."""
    for _ in range(30):
        await append(log, new_log_id(), 1, [*[tok("a secret canary " * 100)] * 10, Done(finish_reason="stop")])
    assert _holds(path.parent, b"secret canary")
    assert await log.purge(time.time() + 3600) == 30
    assert not _holds(path.parent, b"secret canary")
    assert _size(path) < 100_000


@pytest.mark.proof
async def test_the_write_ahead_log_does_not_grow_for_ever(path: Path, log: FileLog) -> None:
    """The write-ahead log is moved into the file while streams run."""
    log_ids = [new_log_id() for _ in range(100)]
    for _ in range(200):
        await asyncio.gather(*[append(log, log_id, 1, [tok("x" * 100)]) for log_id in log_ids])
    assert _size(f"{path}-wal") < 16 * 1024 * 1024


async def test_an_event_that_cannot_be_written_costs_only_its_append(log: FileLog) -> None:
    """An event with half a surrogate is refused before anything is queued."""
    with pytest.raises(FrameError):
        await append(log, "a", 1, [tok("fine"), tok("\ud800")])
    assert await append(log, "a", 1, [tok("x")]) == 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(st.text(), min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_text_comes_back(batches: list[list[str]], tmp_path: Path) -> None:
    """decode(encode(event)) holds through the file for any text in any batches, read from the file, not from memory."""
    path = tmp_path / "any.db"
    events = [[Token(text=text, token_ids=(len(text),)) for text in batch] for batch in batches]
    log_id = new_log_id()

    async def through() -> None:
        writer, reader = FileLog(path), FileLog(path)
        for batch in events:
            await append(writer, log_id, 1, batch)
        await append(writer, log_id, 1, [Done(finish_reason="stop")])
        flat = [event for batch in events for event in batch]
        assert await everything(reader, log_id, page=3) == numbered([*flat, Done(finish_reason="stop")])
        await writer.aclose()
        await reader.aclose()

    asyncio.run(through())


async def _use(log: FileLog, log_id: str) -> None:
    await append(log, log_id, 1, [tok("x")])
    assert await log.read(log_id, 1) == []


async def _fill(log: FileLog) -> str:
    log_id = new_log_id()
    for _ in range(50):
        await append(log, log_id, 1, [tok("kept")])
    return log_id


async def _follow(log: FileLog, log_id: str, num_events: int) -> list[str]:
    """Read as a reader does, from the start, until there are `number` texts."""
    texts: list[str] = []
    async with asyncio.timeout(_DEADLINE_SECONDS):
        while len(texts) < num_events:
            try:
                page = await log.read(log_id, len(texts), 64)
            except KeyError:
                await asyncio.sleep(0.01)
                continue
            assert [one.seq for one in page] == list(range(len(texts) + 1, len(texts) + 1 + len(page)))
            texts += [one.event.text for one in page if isinstance(one.event, Token)]
            if not page:
                await log.wait(log_id, len(texts))
    return texts


async def _append_for_ever(log: FileLog, log_id: str, event: Token) -> None:
    while True:
        await append(log, log_id, 1, [event])


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def _holds(folder: Path, data: bytes) -> bool:
    return any(data in file.read_bytes() for file in folder.iterdir())


def _size(path: Path | str) -> int:
    return Path(path).stat().st_size


def _hold_lock(path: Path) -> None:
    """Take the lock and sleep, in its own process."""
    with FileStore(path)._lock.held():
        path.with_suffix(".held").touch()
        time.sleep(60)


def _is_sound(path: Path) -> bool:
    db = sqlite3.connect(path)
    try:
        return bool(db.execute("PRAGMA integrity_check").fetchall() == [("ok",)])
    finally:
        db.close()

"""Laws of liveness on several hosts: keys in a real Redis and processes, both killed and stalled."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamserve.streams.lease.liveness import LIFE_SECONDS, RedisLiveness
from tests.support.servers.redis_server import RedisServer
from tests.support.streams.logs import redis_server

__all__ = ["redis_server"]

_DEADLINE_SECONDS = 60.0
LIFE = 0.6  # of a key in these tests, in seconds: shorter than the real three
NOBODY = "0123456789abcdef"
Start = Callable[[Path], tuple[str, subprocess.Popen[str]]]
PROGRAM = """
import sys
from pathlib import Path
from streamserve.streams.lease.liveness import RedisLiveness
workers = RedisLiveness(Path(sys.argv[1]), sys.argv[2], life_seconds=float(sys.argv[3]))
print(workers.own_id, flush=True)
sys.stdin.read()
"""


def wait_for(claim: Callable[[], bool], what: str) -> None:
    """Wait until `claim` holds."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not claim():
        assert time.monotonic() < deadline, f"not within {_DEADLINE_SECONDS:.0f} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def here(tmp_path: Path, redis_server: RedisServer) -> Iterator[RedisLiveness]:
    """A worker of this machine."""
    workers = RedisLiveness(tmp_path / "here", redis_server.url, life_seconds=LIFE)
    yield workers
    workers.close()


@pytest.fixture
def start(redis_server: RedisServer) -> Iterator[Start]:
    """Start a worker in its own process; its own folder stands for its own machine."""
    made: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> tuple[str, subprocess.Popen[str]]:
        command = [sys.executable, "-c", PROGRAM, str(folder), redis_server.url, str(LIFE)]
        made.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert made[-1].stdout is not None
        return made[-1].stdout.readline().strip(), made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def test_a_worker_of_another_machine_is_alive_until_it_closes(
    here: RedisLiveness, redis_server: RedisServer, tmp_path: Path
) -> None:
    """A worker of another machine is alive until it closes; an unknown id is dead once a first key could exist."""
    there = RedisLiveness(tmp_path / "there", redis_server.url, life_seconds=LIFE)
    wait_for(lambda: not here.is_alive(NOBODY), "an unknown worker is dead")
    assert here.is_alive(there.own_id)
    assert there.is_alive(here.own_id)
    assert here.is_alive(here.own_id)
    there.close()
    assert redis_server.command(f"EXISTS streamserve:worker:{there.own_id}") == ":0"
    wait_for(lambda: not here.is_alive(there.own_id), "it is known to have closed")
    here.tidy()
    wait_for(lambda: not here.is_alive(there.own_id), "it is found out again")


def test_the_key_lives_for_three_seconds(tmp_path: Path, redis_server: RedisServer) -> None:
    """A key that is not renewed expires after three seconds."""
    workers = RedisLiveness(tmp_path, redis_server.url)
    wait_for(lambda: redis_server.command(f"GET streamserve:worker:{workers.own_id}") == "$1", "it is there")
    assert 0 < int(redis_server.command(f"PTTL streamserve:worker:{workers.own_id}")[1:]) <= 1000 * LIFE_SECONDS == 3000
    workers.close()


@pytest.mark.proof
def test_a_stopped_process_is_dead_until_it_continues(here: RedisLiveness, start: Start, tmp_path: Path) -> None:
    """A stopped process is dead although it holds its lock, alive again once it continues, and dead once killed."""
    other, process = start(tmp_path / "here")
    assert here.is_alive(other)
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: not here.is_alive(other), "it is taken for dead")
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: here.is_alive(other), "it is alive again")
    process.kill()
    process.wait()
    assert not here.is_alive(other)


@pytest.mark.proof
def test_a_process_killed_on_this_host_is_dead_at_once(here: RedisLiveness, start: Start, tmp_path: Path) -> None:
    """A process killed on this host is dead by its lock, before its key expires, and `tidy` removes its file."""
    other, process = start(tmp_path / "here")
    assert here.is_alive(other)
    process.kill()
    process.wait()
    assert not here.is_alive(other)
    here.tidy()
    assert [path.stem for path in (tmp_path / "here").glob("*.lock")] == [here.own_id]


@pytest.mark.proof
@pytest.mark.parametrize("outage", ["killed", "stalled"])
def test_while_redis_is_away_no_worker_dies(tmp_path: Path, outage: str) -> None:
    """No worker dies while Redis is away, however long, nor when Redis returns without the keys."""
    with RedisServer(tmp_path) as redis:
        here, there = (RedisLiveness(tmp_path / name, redis.url, life_seconds=LIFE) for name in ("here", "there"))
        assert here.is_alive(there.own_id)
        wait_for(lambda: not here.is_alive(NOBODY), "keys are looked at")
        wait_for(lambda: here.is_alive(there.own_id), "its key has been seen")
        (redis.kill if outage == "killed" else redis.pause)()
        wait_for(lambda: here._beat_at == 0, "it is missed")
        over_at = time.monotonic() + 2 * LIFE
        while time.monotonic() < over_at:
            assert here.is_alive(there.own_id)
            time.sleep(0.02)
        (redis.start if outage == "killed" else redis.go_on)()
        wait_for(lambda: here._beat_at > 0, "it is back")
        back_at = here._beat_at
        while here._beat_at < back_at + LIFE:
            assert here.is_alive(there.own_id)
            time.sleep(0.02)
        wait_for(lambda: here.is_alive(there.own_id), "its key has been seen")
        there.close()
        wait_for(lambda: not here.is_alive(there.own_id), "the dead are found again")
        here.close()

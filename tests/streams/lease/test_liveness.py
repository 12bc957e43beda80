"""Who is alive, by locks that the kernel frees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from streamserve.streams.lease.liveness import Workers

PROGRAM = """
import sys
from pathlib import Path
from streamserve.streams.lease.liveness import Workers
workers = Workers(Path(sys.argv[1]))
print(workers.own_id, flush=True)
sys.stdin.read()
"""


def test_a_worker_is_alive_until_it_closes(tmp_path: Path) -> None:
    """For itself and for others; who never was is dead."""
    one, two = Workers(tmp_path / "workers"), Workers(tmp_path / "workers")
    assert one.is_alive(one.own_id)
    assert one.is_alive(two.own_id)
    assert two.is_alive(one.own_id)
    assert not one.is_alive("0123456789abcdef")
    two.close()
    assert not one.is_alive(two.own_id)
    one.close()
    assert list((tmp_path / "workers").iterdir()) == []


def test_a_killed_process_is_dead_at_once(tmp_path: Path) -> None:
    """Its file is left and says nothing; `tidy` takes it away, and leaves those of the living."""
    one = Workers(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        other = process.stdout.readline().strip()
        assert one.is_alive(other)
        one.tidy()
        assert one.is_alive(other)
        process.kill()
        process.wait()
    assert (tmp_path / f"{other}.lock").exists()
    assert not one.is_alive(other)
    one.tidy()
    assert [path.stem for path in tmp_path.glob("*.lock")] == [one.own_id]
    one.close()


def test_the_folder_is_ours_alone(tmp_path: Path) -> None:
    """Who may lock a file in it can seem to be a worker."""
    worker = Workers(tmp_path / "workers")
    assert (tmp_path / "workers").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "workers" / f"{worker.own_id}.lock").stat().st_mode & 0o777 == 0o600
    worker.close()

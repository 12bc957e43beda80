"""Laws of liveness on one host: a worker holds a lock that the kernel frees; other hosts are not judged."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from streamserve.streams.lease.liveness import Liveness, host_of, own_host

PROGRAM = """
import sys
from pathlib import Path
from streamserve.streams.lease.liveness import Liveness
workers = Liveness(Path(sys.argv[1]))
print(workers.own_id, flush=True)
sys.stdin.read()
"""


def test_a_worker_is_alive_until_it_closes(tmp_path: Path) -> None:
    """A worker sees itself and its siblings as alive until they close; an id that never existed is dead."""
    one, two = Liveness(tmp_path / "workers"), Liveness(tmp_path / "workers")
    assert one.is_alive(one.own_id)
    assert one.is_alive(two.own_id)
    assert two.is_alive(one.own_id)
    assert not one.is_alive(f"{one.host}-0123456789abcdef")
    assert not one.is_alive(f"{one.host}-0123456789abcdef")
    two.close()
    assert not one.is_alive(two.own_id)
    one.close()
    assert [path.name for path in (tmp_path / "workers").iterdir()] == ["host"]


def test_a_killed_process_is_dead_at_once(tmp_path: Path) -> None:
    """A killed process leaves its file without a lock; `tidy` removes that file and keeps those of living workers."""
    one = Liveness(tmp_path)
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


def test_the_folder_is_private(tmp_path: Path) -> None:
    """The liveness folder is private: a user who can lock a file in it could pose as a worker."""
    worker = Liveness(tmp_path / "workers")
    assert (tmp_path / "workers").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "workers" / f"{worker.own_id}.lock").stat().st_mode & 0o777 == 0o600
    worker.close()


def test_a_worker_whose_folder_is_removed_comes_back(tmp_path: Path) -> None:
    """Its siblings take it for dead until it looks after its file."""
    one, two = Liveness(tmp_path / "workers"), Liveness(tmp_path / "workers")
    shutil.rmtree(tmp_path / "workers")
    assert not two.is_alive(one.own_id)
    for worker in (one, two):
        worker.tidy()
    assert two.is_alive(one.own_id)
    assert one.is_alive(two.own_id)
    one.close()
    one.tidy()
    assert not two.is_alive(one.own_id)
    two.close()


def test_a_worker_of_another_host_is_not_judged(tmp_path: Path) -> None:
    """A worker id names its host, because the lock of another host's worker is not visible from this one."""
    here, there = Liveness(tmp_path / "here"), Liveness(tmp_path / "there")
    assert here.host != there.host
    assert (here.can_judge(there.own_id), here.is_alive(there.own_id)) == (False, True)
    there.close()
    assert here.is_alive(there.own_id)
    here.close()


def test_workers_of_one_folder_have_one_host(tmp_path: Path) -> None:
    """Workers of one folder share a host id, also after all of them ended; a copy of the folder is another host."""
    one = Liveness(tmp_path / "workers")
    one.close()
    two = Liveness(tmp_path / "workers")
    assert host_of(one.own_id) == host_of(two.own_id) == two.host
    assert not two.is_alive(one.own_id)
    two.close()
    shutil.copytree(tmp_path / "workers", tmp_path / "copy")
    assert own_host(tmp_path / "copy") != two.host


def test_an_id_fits_its_column(tmp_path: Path) -> None:
    """A worker id fits the 32 characters of `Stream.producer`."""
    worker = Liveness(tmp_path)
    assert len(worker.own_id) == 25
    worker.close()

"""Laws of the figures of a host: all processes are one sum, no counter falls at a kill, and none is waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from streamserve.api.host_figures import HostFigures
from streamserve.protocol.metrics import Sample
from streamserve.streams.lease.liveness import Liveness

_OTHER = """
import asyncio, sys
from pathlib import Path
from streamserve.api.host_figures import HostFigures
from streamserve.protocol.metrics import Sample
from streamserve.streams.lease.liveness import Liveness

folder, num = Path(sys.argv[1]), float(sys.argv[2])
samples = [Sample(name=name, value=num, labels={"model_name": "m"}) for name in ("stream_resumes", "streams_active")]
host = HostFigures(lambda: samples, Liveness(folder / "workers"), folder / "figures")
asyncio.run(host.read())
print("written", flush=True)
sys.stdin.read()
"""


def other(folder: Path, num: int) -> subprocess.Popen[str]:
    """Start a process that has counted so many, and wait until it has written that."""
    command = [sys.executable, "-c", _OTHER, str(folder), str(num)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


class Here:
    """This process's figures, on a folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.counts = Counter[str]()
        self.liveness = Liveness(folder / "workers")
        self.host = HostFigures(self.collect, self.liveness, folder / "figures", clock=clock)

    def collect(self) -> list[Sample]:
        names = ("stream_resumes", "streams_active")
        return [Sample(name=name, value=self.counts[name], labels={"model_name": "m"}) for name in names]

    async def shown(self) -> tuple[float, float]:
        """Return the counter, and the gauge."""
        figures = (await self.host.read()).figures
        return figures.total("stream_resumes"), figures.total("streams_active")

    async def aclose(self) -> None:
        await self.host.aclose()
        self.liveness.close()


async def test_a_killed_process_keeps_its_counts_and_not_its_gauges(tmp_path: Path) -> None:
    """Counters are of all that ever counted; gauges of those that live. A process that hangs is read all the same."""
    here = Here(tmp_path)
    here.counts.update(stream_resumes=1, streams_active=1)
    assert await here.shown() == (1, 1)
    first, second = other(tmp_path, 10), other(tmp_path, 100)
    assert await here.shown() == (111, 111)
    os.kill(first.pid, signal.SIGSTOP)
    assert await here.shown() == (111, 111)
    for process in (first, second):
        process.kill()
        process.communicate()
    here.counts.update(stream_resumes=1)
    assert [await here.shown() for _ in range(3)] == [(112, 1)] * 3
    # The dead are part of the past now, of which a process that begins knows.
    assert [path.stem for path in (tmp_path / "figures").glob("*.figures")].count("past") == 1
    assert len(list((tmp_path / "figures").glob("*.figures"))) == 2
    later = Here(tmp_path)
    assert await later.shown() == (112, 1)
    await here.aclose()
    assert await later.shown() == (112, 0)
    await later.aclose()
    again = Here(tmp_path)
    assert await again.shown() == (112, 0)
    await again.aclose()


async def test_a_process_that_is_added_to_the_past_twice_counts_once(tmp_path: Path) -> None:
    """The process that adds a dead process may die before it removes the file: the file is known, and not read."""
    here, other_one = Here(tmp_path), other(tmp_path, 10)
    [file] = [path for path in (tmp_path / "figures").glob("*.figures") if path.stem != "past"]
    data = file.read_bytes()
    other_one.kill()
    other_one.communicate()
    assert await here.shown() == (10, 0)
    file.write_bytes(data)  # as if it had not been removed
    assert [await here.shown() for _ in range(3)] == [(10, 0)] * 3
    assert not file.exists()
    await here.aclose()


async def test_a_disk_that_cannot_be_read_delays_nothing(tmp_path: Path) -> None:
    """Then the counts are those of before, and of this process what it has counted since."""
    here, other_one = Here(tmp_path), other(tmp_path, 10)
    assert (await here.shown())[0] == 10
    os.rename(tmp_path / "figures", tmp_path / "away")
    (tmp_path / "figures").write_text("no folder")
    here.counts.update(stream_resumes=5)
    assert (await here.shown())[0] == 15
    other_one.kill()
    other_one.communicate()
    await here.aclose()


async def test_a_window_is_what_was_counted_in_it(tmp_path: Path) -> None:
    """By marks of the minutes, which every process of the host shares; the last minute ends now."""
    clock = [60_000.0]
    here = Here(tmp_path, lambda: clock[0])
    for minute in range(13):
        clock[0] = 60_000.0 + 60 * minute
        await here.shown()
        here.counts.update(stream_resumes={0: 1, 1: 2, 4: 3}.get(minute, 0))
    later = Here(tmp_path, lambda: clock[0])
    shared = await later.host.read()
    await later.aclose()
    await here.aclose()
    assert shared.of_last(10, clock[0]).total("stream_resumes") == 3
    minutes = {
        int(at - 60_000) // 60: end.total("stream_resumes") - begin.total("stream_resumes")
        for at, begin, end in shared.by_minute(15, clock[0])
    }
    assert {minute: num for minute, num in minutes.items() if num} == {0: 1, 1: 2, 4: 3}
    assert list(minutes) == list(range(-2, 13))

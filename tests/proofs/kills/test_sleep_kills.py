"""Three models, memory for any two: web processes and engines are killed with -9 while readers ask all three.

Each model sleeps for the next again and again. Every answer has the text of an undisturbed run, and the engines
together stay within the budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.workers import SECONDS, Reader, Site, two_workers
from tests.support.checks.stream_checks import text_of
from tests.support.docs.demo_site import end_engines, manage, processes_of
from tests.support.engines.engine_processes import until
from tests.support.processes import command_of, parent_of, resident_bytes

pytestmark = [
    pytest.mark.timeout(7200 if IS_SOAK else 900),
    pytest.mark.cut_streams("a web process is killed with -9"),
]

SETTINGS = {
    "DJANGO_SETTINGS_MODULE": "tests.support.sites.sleeping_site",
    "ECHO_STEP_SECONDS": "0.02",
    "RESUME_WINDOW_SECONDS": "300",  # on a busy machine the import of PyTorch alone takes a minute
}
NUM_KILLS = scaled(100, least=6)
MOST_KILLS = 3  # while three answers are read
NUM_QUESTIONS = 3  # for each model
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")
    with two_workers(tmp_path_factory.mktemp("site"), variables=SETTINGS) as site:
        yield site
        site.close()
        end_engines(site.folder)


class Asker(Reader):
    """Asks one model, at either web process, and again where it is killed before the stream has a name."""

    def __init__(self, model: str, number: int) -> None:
        super().__init__(number, NUM_TOKENS)
        self.model = model
        self.num_requests = 0

    async def read(self, site: Site, chance: random.Random) -> None:
        """Read to the end, over as many connections as it takes."""
        async with asyncio.timeout(4 * SECONDS):
            while not self.is_over:
                url = site.servers[chance.randrange(2)].url
                self.num_requests += 1
                if not self.id:
                    await self.begin(url, model=self.model, temperature=0.7)
                elif self.frames:
                    await self.go_on(url)
                else:
                    await self.follow(url, self.id)

    @property
    def text(self) -> str:
        assert self.frames[-1].event == "done", self.frames[-1]
        return text_of(self.frames)


class Resident(threading.Thread):
    """Notes the most memory that the site's engines have held together, and how many processes that were."""

    def __init__(self, site: Site) -> None:
        super().__init__(daemon=True)
        self.site, self.peak, self.num_looks = site, (0, 0), 0
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.1):
            engines = engines_of(self.site)
            self.peak = max(self.peak, (held_bytes(engines), len(engines)))
            self.num_looks += 1

    def end(self) -> None:
        self._is_over.set()
        self.join()


def engines_of(site: Site) -> list[int]:
    """Return the engine processes, those that wait for memory too."""
    web = {server.process.pid for server in site.servers}
    return sorted(pid for pid in processes_of(site.folder) - web if "engine-" in command_of(pid))


def held_bytes(pids: Iterable[int]) -> int:
    """Return the memory of processes together. A child has its parent's until it begins a program of its own.

    An engine begins `g++ --version` when its model is loaded: on a busy machine the child waits for a core there.
    """
    sizes, parents = {pid: resident_bytes(pid) for pid in pids}, {pid: parent_of(pid) for pid in pids}
    return sum(size for pid, size in sizes.items() if parents[pid] not in sizes)


async def kill(site: Site, chance: random.Random) -> str:
    """Kill a web process, which is started again, or an engine."""
    engines = engines_of(site)
    if engines and chance.random() < 0.6:
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(engines), signal.SIGKILL)
        return "engine"
    index = chance.randrange(2)
    site.kill(index)
    await asyncio.to_thread(site.start, index)
    return "web process"


FORKED = """
import os, sys
held = bytearray(os.urandom(64 << 20))
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


def test_the_memory_of_a_child_is_its_parents() -> None:
    """Until it begins a program of its own: what both hold is there once."""
    with subprocess.Popen([sys.executable, "-c", FORKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert resident_bytes(child) > 64 << 20
        assert 64 << 20 < held_bytes([child, parent.pid]) < 2 * 64 << 20
        assert held_bytes([child]) > 64 << 20


async def test_models_that_sleep_for_each_other_lose_no_answer(site: Site) -> None:
    """100 kills: each text is right, the memory stays within the budget, and is given back in the end."""
    from tests.support.sites.sleeping_site import BUDGET, MODELS

    seed = int(os.environ.get("KILLS_SEED") or random.randrange(10**6))
    print(f"\nKILLS_SEED={seed}")
    chance, kills, num_answers, num_cut = random.Random(seed), Counter[str](), 0, 0
    resident = Resident(site)
    resident.start()
    right: dict[tuple[str, int], str] = {}
    for number in range(NUM_QUESTIONS * len(MODELS)):
        asker = Asker(MODELS[number % len(MODELS)], number)
        await asker.read(site, chance)
        right[asker.model, number] = asker.text
    assert len(set(right.values())) == len(right)
    while sum(kills.values()) < NUM_KILLS:
        askers = [Asker(*chance.choice([one for one in right if one[0] == model])) for model in MODELS]
        reading = asyncio.gather(*(one.read(site, chance) for one in askers))
        for _ in range(MOST_KILLS):
            num_events = sum(one.num_events for one in askers)
            await until(lambda: reading.done() or sum(one.num_events for one in askers) > num_events)  # noqa: B023
            if reading.done():
                break
            kills[await kill(site, chance)] += 1
        await reading
        for one in askers:
            assert one.text == right[one.model, one.number]
            num_answers += 1
            num_cut += one.num_requests - 1
    resident.end()
    for model in MODELS:
        done = manage(site.folder, "streamserve_engine", model, "--sleep", "--when-idle", **site.variables)
        assert done.returncode == 0 or "No engine runs" in done.stderr, done
    await until(lambda: not engines_of(site))
    peak, num_processes = resident.peak
    assert peak <= BUDGET, f"{num_processes} engines held {peak:,} bytes of {BUDGET:,}"
    print(
        f"sleep: {dict(kills)} killed with -9, {num_answers} answers of {len(MODELS)} models right, over {num_cut} "
        f"further connections; the engines held {peak >> 20} MiB at most ({num_processes} processes, "
        f"{resident.num_looks:,} looks) of "
        f"{BUDGET >> 20} MiB, and nothing in the end"
    )

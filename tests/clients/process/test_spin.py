"""However an engine starts, OpenMP's threads spin for a bounded time, unless the environment sets their wait policy.

libgomp prints its settings when it is loaded (OMP_DISPLAY_ENV), which is when torch is imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streamserve.clients.process.config import engine_paths
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model.openmp import NAMES, bound_spin
from tests.support.docs.demo_site import ROOT, environment
from tests.support.engines.engine_processes import connected, spec_in

SPIN_COUNT = re.compile(r"GOMP_SPINCOUNT = '(\d+)'")
BOUNDED = bound_spin({})["GOMP_SPINCOUNT"]
HELPDESK = ROOT / "project/demo_model/helpdesk"
# As a notebook does.
ON_A_THREAD = f"""
import time
from streamserve.clients.factory import make_client
from streamserve.engine.config import ModelConfig
client = make_client(ModelConfig(alias="helpdesk", path={str(HELPDESK)!r}, parity_probe=False, num_threads=1))
client.start()
while client.describe().state == "loading":
    time.sleep(0.05)
print(client.describe().state)
"""


@pytest.fixture(autouse=True)
def a_plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own processes do not spin; the engines under test start without that."""
    pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")
    if sys.platform != "linux":
        pytest.skip("libgomp is torch's OpenMP runtime on Linux only")
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")


async def started_by_a_worker(folder: Path) -> str:
    """As a client does that finds no engine."""
    model = ModelConfig(alias="echo", path=str(HELPDESK), parity_probe=False, num_threads=1)
    spec = spec_in(folder, model=model, engine=EngineConfig(num_blocks=64))
    async with connected(spec):
        return engine_paths(spec).log.read_text()


async def started_by_hand(folder: Path) -> str:
    """`manage.py streamserve_engine`, for systemd and containers."""
    command = [sys.executable, "manage.py", "streamserve_engine"]
    env = environment(folder, MODEL=str(HELPDESK), DTYPE="float32")
    seen = ""
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as engine:  # noqa: ASYNC220
        assert engine.stderr is not None
        try:
            while "GOMP_SPINCOUNT" not in seen and (line := engine.stderr.readline()):
                seen += line
        finally:
            engine.kill()
    return seen


async def on_a_thread(folder: Path) -> str:
    """An engine in the process that uses it, without Django."""
    command = [sys.executable, "-c", ON_A_THREAD]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)  # noqa: ASYNC221
    assert done.stdout.strip() == "ready", done.stderr
    return done.stderr


@pytest.mark.proof
@pytest.mark.parametrize("start", [started_by_a_worker, started_by_hand, on_a_thread])
async def test_an_engine_spins_for_a_bounded_time(folder: Path, start: Callable[..., object]) -> None:
    """Neither libgomp's own 300,000 rounds, nor none."""
    seen = await start(folder)  # type: ignore[misc]
    assert SPIN_COUNT.findall(seen) == [BOUNDED]
    assert 0 < int(BOUNDED) < 300_000


@pytest.mark.proof
@pytest.mark.parametrize("start", [started_by_a_worker, started_by_hand, on_a_thread])
async def test_the_users_environment_decides(
    folder: Path, start: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait policy that is set already stays: PASSIVE spins not at all."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert SPIN_COUNT.findall(await start(folder)) == ["0"]  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMES)
def test_any_word_about_waiting_is_left_alone(name: str) -> None:
    """OpenMP's own variable, libgomp's and libiomp's: where one of them is set, none is added."""
    assert bound_spin({name: "1", "PATH": "/bin"}) == {}
    assert bound_spin({"OMP_NUM_THREADS": "2"}).keys() == {"GOMP_SPINCOUNT", "KMP_BLOCKTIME"}

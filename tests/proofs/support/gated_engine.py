"""The engine process of the site that DJANGO_SETTINGS_MODULE names, each step of which waits until it is allowed.

python -m tests.proofs.support.gated_engine SOCKET     answers on that socket, a line of JSON each: see `GatedEngine`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from streamserve.engine.plan import StepPlan
from tests.support.processes import open_names, threads_of

_ROOT = Path(__file__).resolve().parents[3]
_READY_SECONDS = 240.0
# A step that is not allowed within that time fails the test.
_HOLD_SECONDS = 300.0
_PAUSE_SECONDS = 0.005


class Gate:
    """Records the sequences of each plan, and holds each step until it is allowed. Open at first."""

    def __init__(self) -> None:
        self.plans: list[list[tuple[int, int, int]]] = []  # of each chunk: sequence, tokens, blocks
        self.is_holding = False
        self.left: list[tuple[int, int]] = []  # of each cancelled sequence: how many plans there were by then
        self._num_allowed = float("inf")  # in all
        self._changed = threading.Condition()  # guards the three above

    def __call__(self, plan: StepPlan) -> None:
        """Record and hold the step. Runs on the engine thread before the step."""
        chunks = [(chunk.seq_id, len(chunk.token_ids), len(chunk.block_table)) for chunk in plan.chunks]
        with self._changed:
            self.plans.append(chunks)
            self.is_holding = True
            if not self._changed.wait_for(lambda: len(self.plans) <= self._num_allowed, _HOLD_SECONDS):
                raise TimeoutError(f"step {len(self.plans)} was never allowed")
            self.is_holding = False
            pause = _PAUSE_SECONDS if len(self.plans) < self._num_allowed < math.inf else 0.0
        time.sleep(pause)  # between steps that run by number: the engine must not outrun the leaving readers

    def hold(self) -> int:
        """Hold the next planned step, or keep the one that is held; return the number of plans."""
        with self._changed:
            self._num_allowed = len(self.plans) - self.is_holding
            return len(self.plans)

    def allow(self, num_steps: float) -> None:
        """Let so many more steps run, the held one first."""
        with self._changed:
            self._num_allowed = len(self.plans) - self.is_holding + num_steps
            self._changed.notify_all()

    def note_left(self, seq_ids: Iterable[int]) -> None:
        """Note that the engine's process has received their cancel."""
        with self._changed:
            self.left += [(seq_id, len(self.plans)) for seq_id in seq_ids]

    def take_left(self) -> list[int]:
        """Return, for each sequence cancelled since the last call, how many later plans hold it."""
        with self._changed:
            left, self.left = self.left, []
            plans = [{seq_id for seq_id, _, _ in plan} for plan in self.plans]
        return [sum(seq_id in plan for plan in plans[num_plans:]) for seq_id, num_plans in left]


def held_by(pid: int | str) -> dict[str, Any]:
    """Return a process's descriptors, by what they are open on, and its number of threads."""
    return {"fds": sorted(name.split(":")[0] for name in open_names(pid)), "threads": len(threads_of(pid))}


async def serve(path: str) -> int:
    """Run the command `manage.py streamserve_engine`, with the gate."""
    import django

    django.setup()
    from streamserve.clients.process.config import engine_paths, listening, locked, prepare_folder
    from streamserve.clients.process.server import EngineServer
    from streamserve.conf import get_settings
    from streamserve.engine.step_time import StepTime

    StepTime.note = lambda self, plan, seconds: None  # a held step says nothing of the time that steps take
    settings = get_settings()
    spec = replace(settings.engine_spec(settings.default_model), autostart=False)
    prepare_folder(engine_paths(spec))
    with locked(engine_paths(spec)) as is_ours, listening(engine_paths(spec)) as listener:
        assert is_ours
        host, gate = EngineServer(spec), Gate()
        host._client._thread._on_plan = gate
        _note_cancels(gate)
        control = await asyncio.start_unix_server(_Control(host, gate).attend, path)
        async with control:
            return await host.serve(listener)


def _note_cancels(gate: Gate) -> None:
    """Report each generation that a worker cancels to the gate, before the engine acts on it."""
    from streamserve.clients.process.server_session import ServerSession

    cancel = ServerSession.cancel

    def noted(self: Any, request_id: int) -> None:
        if request_id in self._generations:
            gate.note_left(self._generations[request_id]._source._open)
        cancel(self, request_id)

    ServerSession.cancel = noted


class _Control:
    """Answers the test's requests on the socket."""

    def __init__(self, host: Any, gate: Gate) -> None:
        self._host, self._gate = host, gate

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            words = line.decode().split()
            writer.write(json.dumps(self._do(*words)).encode() + b"\n")
            await writer.drain()
        self._gate.allow(float("inf"))
        self._host.stop("stopped")  # the test has ended, in any way

    def _do(self, name: str, number: str = "0") -> Any:
        match name:
            case "hold":
                return self._gate.hold()
            case "allow":
                return self._gate.allow(float(number))
            case "left":
                return self._gate.take_left()
            case "plans":
                return self._gate.plans[int(number) :]
        return {
            "is_holding": self._gate.is_holding,
            "num_plans": len(self._gate.plans),
            "stats": asdict(self._host._client.stats()),
            "open": sum(len(session._generations) + len(session._tasks) for session in self._host._sessions),
            "tasks": len(asyncio.all_tasks()),
        }


class GatedEngine:
    """The test's end of the socket of a running program. Made by `gated_engine`."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._socket = socket.socket(socket.AF_UNIX)
        deadline = time.monotonic() + _READY_SECONDS
        while self._socket.connect_ex(str(path)):
            assert process.poll() is None, "the engine ended"
            assert time.monotonic() < deadline, "the engine does not listen"
            time.sleep(0.02)
        self._lines = self._socket.makefile("rb")

    def hold(self) -> int:
        """Hold the next step; return the number of plans so far."""
        return int(self._ask("hold"))

    def open(self) -> None:
        """Hold no step any more."""
        self._ask("allow inf")

    def step(self, num_steps: int = 1) -> list[int]:
        """Let so many steps run, the held one first; wait until the next is held, and return its sequences."""
        return self.held(self.run(num_steps))

    def run(self, num_steps: int) -> int:
        """Let so many steps run and do not wait; return how many plans there are when the next is held."""
        wanted = self.state()["num_plans"] + num_steps
        self._ask(f"allow {num_steps}")
        return int(wanted)

    def left(self) -> list[int]:
        """Return, for each sequence cancelled since the last call, how many later plans hold it."""
        counts: list[int] = self._ask("left")
        return counts

    def held(self, num_plans: int = 0) -> list[int]:
        """Wait until a step is held, which is at least the `num_plans`th; return the sequences it computes."""
        self.until(lambda state: state["is_holding"] and state["num_plans"] >= num_plans, "a step is held")
        return [chunk[0] for chunk in self.plans(-1)[0]]

    def plans(self, start: int) -> list[list[tuple[int, int, int]]]:
        """Return the plans from number `start` on: of each chunk the sequence, how many tokens, how many blocks."""
        plans: list[list[tuple[int, int, int]]] = self._ask(f"plans {start}")
        return plans

    def state(self) -> dict[str, Any]:
        """Return what it holds now."""
        value: dict[str, Any] = self._ask("state")
        return value

    def until(self, claim: Any, what: str) -> dict[str, Any]:
        """Query until `claim(state)` is true, and return that state."""
        deadline = time.monotonic() + _READY_SECONDS
        while not claim(state := self.state()):
            assert time.monotonic() < deadline, f"not in time: {what}\n{state}"
            time.sleep(0.002)
        return state

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
        self._process.terminate()
        self._process.wait()

    def _ask(self, line: str) -> Any:
        self._socket.sendall(line.encode() + b"\n")
        answer = self._lines.readline()
        assert answer, "the engine ended"
        return json.loads(answer)


@contextlib.contextmanager
def gated_engine(folder: Path, env: Mapping[str, str]) -> Iterator[GatedEngine]:
    """Run the engine of the site that `env` names while the block runs."""
    path = folder / "gate"
    with (folder / "engine.out").open("wb") as out:
        command = [sys.executable, "-m", "tests.proofs.support.gated_engine", str(path)]
        process = subprocess.Popen(command, cwd=_ROOT, env={**env}, stdout=out, stderr=out)
        try:
            engine = GatedEngine(process, path)
            try:
                yield engine
            finally:
                engine.open()
                engine.close()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(sys.argv[1])))

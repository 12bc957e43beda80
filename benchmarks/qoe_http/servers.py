"""The servers that `benchmarks.qoe_http` and `benchmarks.peers` measure: the demo site with an engine, and vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks.paths.site import Site, free_port
from benchmarks.support.machine import progress

ROOT = Path(__file__).resolve().parents[2]
MODEL = "measured"
BLOCK_SIZE = 32
_READY_SECONDS, _END_SECONDS = 600.0, 10.0
# `classes`: alike for the order and refused after 2.5 s, as `contenders.one_class` has it. Nothing parks.
SETTINGS = """
STREAMSERVE["MODELS"] = {{{model!r}: {{
    "PATH": {path!r}, "DTYPE": {dtype!r}, "NUM_THREADS": {num_threads}, **{more!r},
    "ENGINE": {{
        "MAX_NUM_SEQS": {seats}, "NUM_BLOCKS": {num_blocks}, "BLOCK_SIZE": {block_size}, "MAX_MODEL_LEN": {max_len},
        **{engine!r},
    }},
}}}}
STREAMSERVE["LIMITS"] = {{"MAX_STREAMS_PER_PRINCIPAL": 10_000}}
LOGGING["loggers"] = {{}}
if {is_fcfs}:
    from streamserve.engine import config
    config.POLICY = config.Policy(
        min_ahead_seconds=1e6, max_debt_seconds=1e6, hungry_seconds=1e6, prompt_token_seconds=0.0
    )
    STREAMSERVE["MODELS"][{model!r}]["ENGINE"]["LEAD_TOKENS"] = 1_000_000
    STREAMSERVE["CLASSES"] = {{
        name: {{"TTFT_SECONDS": 0.5, "MAX_QUEUE_SECONDS": 2.5, "MAX_LATE_SECONDS": 2.0}}
        for name in ("chat", "completion", "document")
    }}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What every server serves, in how much memory.

    `num_threads`: of the engine, None for all cores. `max_len`: tokens of a prompt and its answer; `cache_len`: tokens
    whose keys and values are held at once; `cache_bytes`: what they take, for servers that are told bytes.
    """

    folder: Path
    dtype: str
    seats: int
    num_threads: int | None
    max_len: int = 2048
    cache_len: int = 65_536
    cache_bytes: int = 2 << 30


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers on a port of 127.0.0.1. `process`: what accepts the connections; `engine`: what computes.

    Each is the leader of a session of its own, in which its children are.
    """

    port: int
    key: str
    process: subprocess.Popen[bytes]
    engine: subprocess.Popen[bytes]


@contextlib.contextmanager
def site(
    model: Model,
    folder: Path,
    *,
    is_fcfs: bool,
    environ: Mapping[str, str] = MappingProxyType({}),
    more: Mapping[str, str] = MappingProxyType({}),
    engine: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """Serve the demo site with an engine process and one daphne worker under FlowServer while the block runs.

    `environ` is added to the environment of both, `more` to the model's settings, `engine` to its ENGINE. Raises
    RuntimeError.
    """
    folder.mkdir()
    own = Site(folder, ROOT, step_seconds=0.0)
    with (folder / "paths_settings.py").open("a") as settings:
        settings.write(
            SETTINGS.format(
                model=MODEL,
                path=str(model.folder),
                dtype=model.dtype,
                num_threads=model.num_threads,
                more=dict(more),
                engine=dict(engine),
                seats=model.seats,
                num_blocks=model.cache_len // BLOCK_SIZE,
                block_size=BLOCK_SIZE,
                max_len=model.max_len,
                is_fcfs=is_fcfs,
            )
        )
    own.environ |= environ
    own.prepare()
    port = free_port()
    daphne = ["-m", "daphne", "-b", "127.0.0.1", "-p", str(port), "--verbosity", "0", "project.asgi:application"]
    with contextlib.ExitStack() as stack:
        processes = {}
        for name, command in (("engine", ["manage.py", "streamserve_engine"]), ("worker", daphne)):
            log = folder / f"{name}.txt"
            processes[log] = stack.enter_context(running(log, [sys.executable, *command], own.environ))
        wait_until_ready(f"http://127.0.0.1:{port}/readyz", processes)
        yield Server(port, own.key, processes[folder / "worker.txt"], processes[folder / "engine.txt"])


@contextlib.contextmanager
def vllm(model: Model, folder: Path, python: Path) -> Iterator[Server]:
    """Serve the model with the vLLM of another environment, by its Python, with as many seats. Raises RuntimeError."""
    folder.mkdir()
    port = free_port()
    arguments = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.folder)]
    arguments += ["--served-model-name", MODEL, "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--max-num-seqs", str(model.seats), "--max-model-len", str(model.max_len)]
    arguments += ["--disable-log-stats", "--dtype", model.dtype]
    environ = peer_environ() | {"VLLM_CPU_KVCACHE_SPACE": str(-(-model.cache_bytes >> 30)), "VLLM_NO_USAGE_STATS": "1"}
    cores = sorted(os.sched_getaffinity(0))
    environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}-{cores[-1]}"
    openmp = next((python.parent.parent / "lib").glob("libiomp5.so"), None)
    if openmp is not None:  # without it vLLM warns that it is slow
        environ["LD_PRELOAD"] = str(openmp)
    with peer(folder, arguments, environ, port) as server:
        yield server


def peer_environ() -> dict[str, str]:
    """Return the environment of another project's server: this one's without what is said to Python and Django."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DJANGO"))}
    return environ | {"HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def peer(folder: Path, command: list[str], environ: Mapping[str, str], port: int) -> Iterator[Server]:
    """Run a server of one process that answers /health on `port`, logging into `folder`. Raises RuntimeError."""
    log = folder / "server.txt"
    with running(log, command, environ) as process:
        wait_until_ready(f"http://127.0.0.1:{port}/health", {log: process})
        yield Server(port, "none", process, process)


@contextlib.contextmanager
def running(log: Path, command: list[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own while the block runs; its output goes to `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and what is left of its session."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until_ready(url: str, processes: Mapping[Path, subprocess.Popen[bytes]]) -> None:
    """Wait until the address answers 200; raises RuntimeError with the end of its log when that does not happen.

    The processes are known by their logs. No proxy comes between.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    progress(f"waiting for {next(iter(processes)).parent.name}")
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        with contextlib.suppress(OSError), opener.open(url, timeout=5) as response:
            if response.status == 200:
                return
        ended = [log for log, process in processes.items() if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            log = (ended or list(processes))[0]
            why = "it has ended" if ended else f"in {_READY_SECONDS:.0f} s"
            raise RuntimeError(f"no answer, {why}:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.2)

"""Time from a POST to its response head and first event, and requests a second: two trees and Django, in turns.

    python -m benchmarks.intake [--tree DIR] [--connections 1 4 15 64] [--rounds 5] [--seconds 2] [--quick]
    python -m benchmarks.intake --limits --traces [--database postgres]

Each contender is the demo site on a folder of its own: one daphne worker under FlowServer, SQLite, the file log, the
echo engine in its process. `--database postgres` gives each a database of one PostgreSQL cluster, which is started for
the run. A request asks for one token on a connection of its own, with an API key. `--tree` adds the site of another
checkout, run by its own `.venv` if it has one. `--limits` adds this checkout with three windows of RATES, which have
room for every request; `--traces` this checkout with all spans recorded, and an exporter that sends them nowhere.
"StreamingHttpResponse" is a view of this checkout's site that sends the same two events without a key, a quota, a row
or a log. Contenders take turns, and each round begins with another. Printed are medians of all
requests, and their ratios to this checkout's; CPU is that of the worker's process, all threads, divided by the
requests: PostgreSQL's own is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.paths.site import Site, free_port
from benchmarks.support import postgres
from benchmarks.support.machine import describe_machine, parser, progress
from benchmarks.transport.servers import cpu_of

ROOT = Path(__file__).resolve().parents[1]
DJANGO = "StreamingHttpResponse"
PLAIN = """
import json

from django.http import StreamingHttpResponse
from django.urls import include, path
from django.views.decorators.csrf import csrf_exempt


async def events():
    yield b"event: token\\nid: abcdefghijkl-2\\ndata: " + json.dumps({"text": "Hi"}).encode() + b"\\n\\n"
    yield b"event: done\\nid: abcdefghijkl-3\\ndata: " + json.dumps({"finish_reason": "length"}).encode() + b"\\n\\n"


@csrf_exempt
async def plain(request):
    json.loads(request.body)
    return StreamingHttpResponse(events(), content_type="text/event-stream")


urlpatterns = [path("plain", plain), path("", include("project.urls"))]
"""
SETTINGS = """
ROOT_URLCONF = "intake_urls"
STREAMSERVE["LIMITS"] = {"MAX_STREAMS_PER_PRINCIPAL": 10_000}
LOGGING["loggers"] = {}
"""
LIMITS = """
STREAMSERVE["RATES"] = {
    "owner": {"REQUESTS_PER_MINUTE": 10**6, "TOKENS_PER_MINUTE": 10**9},
    "site": {"TOKENS_PER_MINUTE": 10**9},
}
"""
TRACES = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult


class Nowhere(SpanExporter):
    def export(self, spans):
        return SpanExportResult.SUCCESS


trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(BatchSpanProcessor(Nowhere()))
"""
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi there"}], "max_tokens": 1}).encode()
_END_SECONDS = 10.0


@dataclass
class Contender:
    """One address of one site. Seconds by number of connections; `rates` in requests a second, `cpu` of a request."""

    name: str
    path: str
    port: int
    key: str
    pid: int
    heads: dict[int, list[float]] = field(default_factory=dict)
    firsts: dict[int, list[float]] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)
    cpu: dict[int, list[float]] = field(default_factory=dict)


@contextlib.contextmanager
def serving(tree: Path, folder: Path, settings: str) -> Iterator[tuple[Site, int, int]]:
    """Serve the demo site of `tree` with an engine process while the block runs. Yield the site, its port and pid."""
    folder.mkdir()
    site = Site(folder, tree, step_seconds=0.0)
    with (folder / "paths_settings.py").open("a") as file:
        file.write(settings)
    (folder / "intake_urls.py").write_text(PLAIN)
    site.prepare()
    python = tree / ".venv/bin/python"
    command = [str(python) if python.exists() else sys.executable]
    port = free_port()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_process(site, "engine", [*command, "manage.py", "streamserve_engine"]))
        daphne = ["-m", "daphne", "-b", "127.0.0.1", "-p", str(port), "--verbosity", "0", "project.asgi:application"]
        worker = stack.enter_context(_process(site, "worker", [*command, *daphne]))
        deadline = time.monotonic() + 60
        while not site.is_ready(port):
            if worker.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the site of {tree} does not start:\n{(folder / 'worker.txt').read_text()}")
            time.sleep(0.1)
        yield site, port, worker.pid


@contextlib.contextmanager
def _process(site: Site, name: str, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with (site.folder / f"{name}.txt").open("wb") as output:
        process = subprocess.Popen(command, cwd=site.tree, env=site.environ, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ask(one: Contender, heads: list[float], firsts: list[float]) -> None:
    """Ask for one token on a new connection; note the seconds to the head and to the first event."""
    began, first = time.perf_counter(), None
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
    head = f"POST {one.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: Bearer {one.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    writer.write(head.encode() + BODY)
    status = await reader.readline()
    heads.append(time.perf_counter() - began)
    lines = []
    while line := await reader.readline():
        lines.append(line)
        if first is None and line.startswith(b"data:"):
            first = time.perf_counter() - began
    writer.close()
    if b" 200 " not in status or first is None or b"event: done\n" not in lines:
        raise RuntimeError(f"{one.name}: {status!r} {lines!r}")
    firsts.append(first)


async def load(one: Contender, num_connections: int, seconds: float) -> None:
    """Keep `num_connections` requests under way for `seconds`; note their times and the rate."""
    heads, firsts = one.heads.setdefault(num_connections, []), one.firsts.setdefault(num_connections, [])
    began, num_before, cpu = time.perf_counter(), len(firsts), cpu_of(one.pid)

    async def keep_asking() -> None:
        while time.perf_counter() < began + seconds:
            await ask(one, heads, firsts)

    await asyncio.gather(*(keep_asking() for _ in range(num_connections)))
    num = len(firsts) - num_before
    one.rates.setdefault(num_connections, []).append(num / (time.perf_counter() - began))
    one.cpu.setdefault(num_connections, []).append((cpu_of(one.pid) - cpu) / num)


def measure(contenders: list[Contender], chosen: argparse.Namespace) -> None:
    """Load all contenders in turns."""
    for one in contenders:
        asyncio.run(load(one, 1, 0.3))  # connects to the engine, compiles patterns
        one.heads, one.firsts, one.rates, one.cpu = {}, {}, {}, {}
    for number in range(chosen.rounds):
        progress(f"round {number + 1} of {chosen.rounds}")
        for num_connections in chosen.connections:
            turn = number % len(contenders)
            for one in contenders[turn:] + contenders[:turn]:
                asyncio.run(load(one, num_connections, chosen.seconds))


def report(contenders: list[Contender], connections: list[int]) -> None:
    """Print a line for each contender and number of connections; ratios are to the first contender."""
    ours = contenders[0]
    for num in connections:
        names = (
            f"{'head ms':>10}{'ratio':>8}{'first ms':>11}{'ratio':>8}{'req/s':>9}{'ratio':>8}{'CPU ms':>9}{'ratio':>8}"
        )
        print(f"\n{f'{num} connections':26}{names}")
        for one in contenders:
            columns = ""
            for name, width, factor in (("heads", 10, 1e3), ("firsts", 11, 1e3), ("rates", 9, 1.0), ("cpu", 9, 1e3)):
                value, base = median(getattr(one, name)[num]), median(getattr(ours, name)[num])
                columns += f"{value * factor:{width}.1f}{value / base:8.2f}"
            print(f"  {one.name:24}{columns}", flush=True)


@contextlib.contextmanager
def databases(kind: str) -> Iterator[Callable[[str], str]]:
    """Yield what makes the database of a site, and returns the lines of its settings; "" for the demo's SQLite."""
    if kind == "sqlite":
        yield lambda name: ""
        return
    port = free_port()

    def made(name: str) -> str:
        postgres.create(port, name)
        return postgres.settings(port, name)

    with postgres.cluster(port):
        yield made


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--tree", type=Path, metavar="DIR", help="another checkout to measure beside this one")
    options.add_argument("--connections", type=int, nargs="+", default=[1, 4, 15, 64])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    options.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    options.add_argument("--limits", action="store_true", help="also measure this checkout with limits over time")
    options.add_argument("--traces", action="store_true", help="also measure this checkout with spans recorded")
    options.add_argument("--quick", action="store_true", help="one short round, as a smoke test")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.seconds = 1, 0.5
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the echo engine computes nothing
    print(describe_machine())
    with tempfile.TemporaryDirectory(prefix="intake-") as name, contextlib.ExitStack() as stack:
        database = stack.enter_context(databases(chosen.database))

        def contender(words: str, tree: Path, folder: str, more: str = "") -> Contender:
            settings = SETTINGS + database(folder) + more
            site, port, pid = stack.enter_context(serving(tree, Path(name) / folder, settings))
            return Contender(words, "/streams", port, site.key, pid)

        ours = contender("this checkout", ROOT, "this")
        contenders = [ours]
        if chosen.tree is not None:
            tree = chosen.tree.resolve()
            contenders.append(contender(tree.name, tree, "other"))
        if chosen.limits:
            contenders.append(contender("with limits", ROOT, "limited", LIMITS))
        if chosen.traces:
            contenders.append(contender("with traces", ROOT, "traced", TRACES))
        contenders.append(Contender(DJANGO, "/plain", ours.port, ours.key, ours.pid))
        measure(contenders, chosen)
        report(contenders, chosen.connections)


if __name__ == "__main__":
    main()

"""How many of our functions four paths cross, and how many calls that takes: counted by a profiler in real processes.

    python -m benchmarks.paths [--tree DIR] [--list] [--json FILE] [--limit SECONDS]        (make paths, about 30 s)

DIR is the checkout that is measured, by the Python that runs this. Its demo site runs with an echo engine (80 ms a
step, `manage.py streamserve_engine`) and two web workers (daphne), all children under benchmarks/paths/child.py. What
DIR does by default stays: the process client, the file log, FlowServer. DEBUG is off; readers send an API key.

    1 prompt -> sampler      from: POST /streams enters the ASGI app
                             to:   the engine's runner returns from its first `launch` for it
      web worker             to:   the web worker is about to write to the engine. That it is accepted reaches the
                                   worker before the `launch` ends or after, as it happens: that is no part of it
    2 token -> socket        from: the web worker has read the bytes of the engine's frame
                             to:   it is about to write to the reader's socket; a token in the middle of an answer
      whole turn             to:   its event loop blocks after that write
    3 socket -> scheduler    from: the web worker reads the end of the reader's connection (EOF or a reset)
                             to:   the function that takes the sequence out of the scheduler returns, its blocks freed
      web worker             to:   the web worker is about to write to the engine
        after the disconnect from: `receive` gives the app http.disconnect
      engine                 from: the engine has read that
    4 resume -> first byte   from: GET /streams/{id}/events with a Last-Event-ID enters the ASGI app of the second
                                   worker; the first worker was killed in the middle of the answer
                             to:   the second worker is about to write the first byte of the response
      after its row          from: the first SELECT of the stream's row, which comes after the API key's
      until it goes on       to:   the runner returns from its next `launch`; engine included

What counts. A function is a frame whose code is a function of a file under DIR/streamserve and whose name does not
begin with "<". So module and class bodies, lambdas, comprehensions and generator expressions do not count, nor does
code that a dataclass generates, which has no file. A call is an entry as `sys.setprofile` reports it: a generator or
coroutine that is resumed is entered again, and "resumed" is how many of the calls do that. Each path is walked once
before it is measured. Nothing else is left out: all threads count, whatever they do between the two moments.

What stands for the rounds. Timers fall into some and not into others: the engine looks around every 0.2 s and sends its
state every second. So 1, 3 and 4 have the functions that every round entered, each with the fewest calls of any round;
of 2 it is the token with the median number of functions, and calls are the mean of all tokens. --json has every round.
In 1 the echo runner itself is 12 functions and 73 calls. In 2 what the log's writer thread does after its commit races
with the write to the socket: 64 functions or 67; the whole turn has them all. In 4 the calls grow with the number of
events in the log, here 4 to 6.

08ce18c, measured on two cores:

                             functions   calls  files
    1 prompt -> sampler            226     389     54
    2 token -> socket               67      76     22
      whole turn                    74      92     24
    3 socket -> scheduler           66      71     28
    4 resume -> first byte         145     259     42      2 SELECTs of the stream's row, then 1 UPDATE

The same for later trees: docs/benchmarks.md. An earlier count, whose means are not known, had 213, 323, 42 for 1 and
77, 98, 22 for 2. With lambdas and comprehensions counted, this program comes near them. For 1, with an engine thread in
the web worker, the log in memory, no API key and a bare "prompt", it counts 216, 427, 44. For 2 it counts 75, 88, 22 to
the socket and 82, 107, 24 in the whole turn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import Path
from statistics import fmean, median_low
from typing import Any

from benchmarks.paths.record import Missing, Record, Window
from benchmarks.paths.site import Reader, Running, running
from benchmarks.support.machine import describe_machine, parser, progress

ROOT = Path(__file__).resolve().parents[2]
# Longer than tokens share a frame (COALESCE_SECONDS), so that each has its own.
STEP_SECONDS = 0.08
ROUNDS = 7  # of which the first is not measured
NUM_TOKENS = 64  # of the answer of path 2, of which those in the middle count
NUM_AT_THE_ENDS = 7
REST_SECONDS = 0.4  # between rounds: what the one before has left to do is done
SPREAD_SECONDS = 0.2  # rests differ by up to this, the period of the engine's timer: else it falls into every round
PROMPT = {"messages": [{"role": "user", "content": "Hello"}], "seed": 1, "ignore_eos": True}


class TooLong(Exception):
    """Time is up."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a path or a part of it. `window` stands for all the rounds."""

    name: str
    window: Window
    rounds: list[Window]
    is_mean: bool = False

    @property
    def num_calls(self) -> float:
        """Calls of the window, or the mean of the rounds."""
        return fmean(one.calls.total() for one in self.rounds) if self.is_mean else self.window.calls.total()

    @property
    def num_resumed(self) -> float:
        """The same, of the calls that resume something."""
        return fmean(one.num_resumed for one in self.rounds) if self.is_mean else self.window.num_resumed

    def as_json(self) -> dict[str, Any]:
        """Return all there is."""
        return {
            "name": self.name.strip(),
            "functions": len(self.window.calls),
            "calls": self.num_calls,
            "resumed": self.num_resumed,
            "files": len(self.window.files),
            "sql": self.window.sql,
            "rounds": [[*one.size, len(one.files)] for one in self.rounds],
            "list": self.window.listing(),
        }


def measure(tree: Path) -> list[Row]:
    """Walk all four paths and return what was counted."""
    with running(tree, STEP_SECONDS) as at:

        def ask(num_tokens: int) -> Reader:
            return Reader(at.site, at.ports[0], "POST", "/streams", body=PROMPT | {"max_tokens": num_tokens})

        rests = itertools.cycle(REST_SECONDS + SPREAD_SECONDS * number / ROUNDS for number in range(ROUNDS))

        def leave(reader: Reader) -> Reader:
            reader.close()
            time.sleep(next(rests))
            return reader

        progress("1: prompts")
        for _ in range(ROUNDS):
            reader = ask(2)
            reader.read()
            leave(reader)
        progress("2: tokens")
        long = ask(NUM_TOKENS)
        long.read()
        leave(long)
        progress("3: readers who leave")
        leavers = []
        for _ in range(ROUNDS):
            reader = ask(NUM_TOKENS)
            reader.read(4)
            leavers.append(leave(reader))
        progress("4: readers whose worker is killed")
        first = Record("worker1", at.workers[0].record())  # now: to write it takes time, which the log would run ahead
        returned = [leave(again) for again in returning([ask(500) for _ in range(ROUNDS)], at)]
        second, core = Record("worker2", at.workers[1].record()), Record("engine", at.engine.record())
    return [
        *prompt_rows(first, core),
        *token_rows(first, long.port),
        *leaving_rows(first, core, [one.port for one in leavers]),
        *resume_rows(second, core, [one.port for one in returned]),
    ]


def returning(orphans: list[Reader], at: Running) -> Iterator[Reader]:
    """Kill the first worker; yield a reader at the second one for each of these, when it has its first tokens."""
    for reader in orphans:
        reader.read(4)
    at.workers[0].stop(signal.SIGKILL)
    for reader in orphans:
        reader.read_to_break()
        stream_id, last_id = reader.found(rb"x-stream-id: *(\S+)"), reader.found(rb"\nid: (\S+)")
        again = Reader(at.site, at.ports[1], "GET", f"/streams/{stream_id}/events", f"Last-Event-ID: {last_id}")
        again.read(4)
        yield again


def prompt_rows(worker: Record, engine: Record) -> list[Row]:
    """Path 1."""
    rounds = []
    for begin in worker.all("app POST /streams")[1:ROUNDS]:
        launched = engine.find("launch", begin.at).at
        sent_at = _last(worker, "send engine", begin.at, launched)
        parts = worker.window(begin.at, sent_at), engine.window(begin.at, launched)
        rounds.append((parts[0] + parts[1], *parts))
    return _rows(("1 prompt -> sampler", "  web worker", "  engine"), rounds)


def _last(record: Record, text: str, begin: int, end: int) -> int:
    """Return when the last mark of that text between two moments was made."""
    return max(mark.at for mark in record.all(text) if begin < mark.at < end)


def token_rows(worker: Record, port: int) -> list[Row]:
    """Path 2. The engine's frames about itself are written to no reader: such a one is skipped."""
    tokens = []
    frames = worker.all("recv engine")
    for begin, following in itertools.pairwise(frames):
        with contextlib.suppress(Missing):
            write = worker.find(f"send {port}", begin.at)
            if write.at < following.at:
                end = worker.find("wait", write.at, write.thread)
                tokens.append((worker.window(begin.at, write.at), worker.window(begin.at, end.at)))
    tokens = tokens[NUM_AT_THE_ENDS:-NUM_AT_THE_ENDS]
    names = "2 token -> socket", "  whole turn"
    return [
        Row(name, _median(windows), windows, is_mean=True)
        for name, windows in zip(names, map(list, zip(*tokens, strict=True)), strict=True)
    ]


def _median(windows: list[Window]) -> Window:
    """Return one with the median number of functions."""
    size = median_low(one.size for one in windows)
    return next(one for one in windows if one.size == size)


def leaving_rows(worker: Record, engine: Record, ports: list[int]) -> list[Row]:
    """Path 3."""
    rounds = []
    for port in ports[1:]:
        begin = worker.find(f"eof {port}").at
        disconnected_at = worker.find("disconnect", begin).at
        received_at = engine.find("recv engine", begin).at
        dropped = _end_of_drop(engine, received_at)
        sent_at = _last(worker, "send engine", begin, dropped)
        in_worker, in_engine = worker.window(begin, sent_at), engine.window(received_at, dropped)
        rounds.append((in_worker + in_engine, in_worker, worker.window(disconnected_at, sent_at), in_engine))
    return _rows(("3 socket -> scheduler", "  web worker", "    after the disconnect", "  engine"), rounds)


def _end_of_drop(engine: Record, begin: int) -> int:
    """Return when the sequence is out; where no scheduler is found, when the thread that steps comes to rest."""
    with contextlib.suppress(Missing):
        return engine.find("dropped", begin).at
    progress("the scheduler is not found: path 3 ends where the thread that steps comes to rest")
    thread = engine.all("launch")[0].thread
    moments = [one.at for one in engine.entries if one.at >= begin and one.thread == thread]
    rests = (
        at for at, following in itertools.pairwise([*moments, math.inf]) if following - at > REST_SECONDS / 2 * 1e9
    )
    return int(next(rests))


def resume_rows(worker: Record, engine: Record, ports: list[int]) -> list[Row]:
    """Path 4."""
    rounds = []
    for begin, port in zip(worker.all("app GET /streams/.*")[1:], ports[1:], strict=True):
        row, write = worker.find("sql SELECT streamserve_stream", begin.at), worker.find(f"send {port}", begin.at)
        goes_on = engine.find("launch", begin.at).at
        rounds.append(
            (
                worker.window(begin.at, write.at),
                worker.window(row.at, write.at),
                worker.window(begin.at, goes_on) + engine.window(begin.at, goes_on),
            )
        )
    return _rows(("4 resume -> first byte", "  after its row", "  until it goes on"), rounds)


def _rows(names: Sequence[str], rounds: Sequence[Sequence[Window]]) -> list[Row]:
    """Return a row for each column of `rounds`: what all of it have in common."""
    columns = map(list, zip(*rounds, strict=True))
    return [Row(name, reduce(and_, windows), windows) for name, windows in zip(names, columns, strict=True)]


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooLong in the block, wherever it waits, when time is up. Main thread."""

    def raise_it(number: int, frame: object) -> None:
        raise TooLong(f"not done after {seconds:.0f} s. On a busy machine give it more: --limit")

    signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def print_table(rows: list[Row]) -> None:
    """Print a line a row."""
    print(f"{'':28}{'functions':>10}{'calls':>8}{'resumed':>9}{'files':>7}   SQL")
    for row in rows:
        window = row.window
        sql = ", ".join(f"{number} {kind}" for kind, number in window.sql.items())
        calls, resumed = f"{row.num_calls:.0f}", f"{row.num_resumed:.0f}"
        print(f"{row.name:28}{len(window.calls):10}{calls:>8}{resumed:>9}{len(window.files):7}   {sql}".rstrip())


def print_list(rows: list[Row]) -> None:
    """Print the functions of each path."""
    for row in rows:
        if row.name.startswith(" ") and row.name != "  whole turn":
            continue
        print(f"\n{row.name.strip()}")
        for one in row.window.listing():
            place = f"{one['file']}:{one['line']}"
            print(f"  {one['calls']:4} x  {one['process']:8}{one['thread']:26}{place:56}{one['function']}")


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--tree", type=Path, default=ROOT, help="the checkout to measure (default: this one)")
    options.add_argument("--list", action="store_true", help="print every function, in the order of first entry")
    options.add_argument("--json", type=Path, help="write everything to this file")
    options.add_argument("--limit", type=float, default=60.0, help="seconds until it gives up (default: 60)")
    chosen = options.parse_args()
    tree = chosen.tree.resolve()
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=tree, capture_output=True, text=True)
    commit = git.stdout.strip() or "no commit"
    try:
        with limited(chosen.limit):
            rows = measure(tree)
    except TooLong as problem:
        sys.exit(str(problem))
    print(f"{tree} at {commit}\n{describe_machine()}\n")
    print_table(rows)
    if chosen.list:
        print_list(rows)
    if chosen.json:
        text = json.dumps({"tree": str(tree), "commit": commit, "paths": [row.as_json() for row in rows]}, indent=1)
        chosen.json.write_text(text)


if __name__ == "__main__":
    main()

"""First tokens and inter-token latency over HTTP: our site, the same with threads that sleep, and vLLM.

    python -m benchmarks.peers [--model S|helpdesk|DIR] [--streams 1,8,32] [--rounds 3] [--vllm PYTHON] [--quick]

Every server stays up; in each round each of them gets the same number of streams at once of POST /v1/completions, one
server after the other, and then one prompt of `--long` tokens. Prompts are drawn anew every time, so that no cache
knows them. `ITL` is the time from the first to the last content of an answer by its tokens, `TTFT` the time from the
request to its first content; the medians over the streams of a round, and of these over the rounds.

    ours        the demo site: an engine process and one daphne worker under FlowServer
    passive     the same with OMP_WAIT_POLICY=PASSIVE: torch's threads sleep whenever they wait
    spin N      the same with GOMP_SPINCOUNT=N, for each N of `--spin`
    vllm        vLLM's own server. `--vllm` is the Python of its environment
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.qoe_http.readers import Prompts, post
from benchmarks.qoe_http.servers import MODEL, Model, Server, site, vllm
from benchmarks.support.machine import describe_machine, parser, progress
from benchmarks.support.shape import model_folder

OURS, PASSIVE, VLLM = "ours", "passive", "vllm"
_SEATS = 64


@dataclass(frozen=True, slots=True)
class Reading:
    """What one reader measured, in milliseconds; `itl` of one token is 0."""

    ttft: float
    itl: float


def main() -> None:
    """Serve, measure in rounds, print."""
    options = parse_options()
    print(describe_machine())
    with tempfile.TemporaryDirectory(prefix="peers-") as name:
        parent = Path(name)
        folder, dtype = model_folder(options.model, options.keep or parent)
        model = Model(folder=folder, dtype=dtype, seats=_SEATS, num_threads=None)
        with serving(model, parent, options) as servers:
            asyncio.run(measure(servers, Prompts(folder), options))


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--model", default="S", help="S, helpdesk or a folder")
    options.add_argument("--keep", type=Path, metavar="DIR", help="where S is made, and found the next time")
    options.add_argument("--streams", default="1,8,32", help="streams at once, separated by commas")
    options.add_argument("--prompt", type=int, default=89, help="tokens of a prompt")
    options.add_argument("--new", type=int, default=64, help="tokens of an answer")
    options.add_argument("--long", type=int, default=1000, help="tokens of the long prompt")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--spin", default="", metavar="N,N", help="our site with these GOMP_SPINCOUNT too")
    options.add_argument("--vllm", type=Path, metavar="PYTHON", help="vLLM too, by the Python of its environment")
    options.add_argument("--quick", action="store_true", help="one round of short answers, as a smoke test")
    chosen = options.parse_args()
    if chosen.quick:
        chosen.rounds, chosen.new, chosen.streams = 1, 8, "1,4"
    return chosen


@contextlib.contextmanager
def serving(model: Model, parent: Path, options: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """Run all servers while the block runs."""
    environs = {OURS: {}, PASSIVE: {"OMP_WAIT_POLICY": "PASSIVE"}}
    environs |= {f"spin {count}": {"GOMP_SPINCOUNT": count} for count in options.spin.split(",") if count}
    with contextlib.ExitStack() as stack:
        servers = {}
        for name, environ in environs.items():
            servers[name] = stack.enter_context(site(model, parent / name, is_fcfs=False, environ=environ))
        if options.vllm is not None:
            servers[VLLM] = stack.enter_context(vllm(model, parent / VLLM, options.vllm))
        yield servers


async def measure(servers: dict[str, Server], prompts: Prompts, options: argparse.Namespace) -> None:
    """Measure all servers in rounds, and print the medians and the ratios to ours."""
    streams = [int(number) for number in options.streams.split(",")]
    names = list(servers)
    for name in names:
        await at_once(servers[name], prompts, 2, options.prompt, 8, f"warm {name}")
    seen: dict[tuple[str, str], list[list[Reading]]] = {}
    for number in range(options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            progress(f"round {number + 1} of {options.rounds}, {name}, load average {os.getloadavg()[0]:.1f}")
            await at_once(servers[name], prompts, 1, options.prompt, 8, f"{number} {name} first")  # it was idle
            for k in streams:
                readings = await at_once(servers[name], prompts, k, options.prompt, options.new, f"{number} {name} {k}")
                seen.setdefault((f"{k} at once", name), []).append(readings)
            readings = await at_once(servers[name], prompts, 1, options.long, 8, f"{number} {name} long")
            seen.setdefault((f"{options.long} tokens", name), []).append(readings)
    for (what, name), rounds in sorted(seen.items(), key=lambda item: list(seen).index(item[0])):
        ttft, itl = summary(rounds)
        ours = summary(seen[what, OURS])
        ratio = f"{ttft / ours[0]:5.2f} of ours" + (f", ITL {itl / ours[1]:5.2f}" if ours[1] else "")
        print(f"{what:>12}  {name:8} TTFT {ttft:8.1f} ms  ITL {itl:7.1f} ms  {ratio}", flush=True)


def summary(rounds: list[list[Reading]]) -> tuple[float, float]:
    """Return TTFT and ITL: medians of the rounds' medians."""
    return (
        median(median(one.ttft for one in readings) for readings in rounds),
        median(median(one.itl for one in readings) for readings in rounds),
    )


async def at_once(
    server: Server, prompts: Prompts, num_streams: int, prompt_len: int, answer_len: int, seed: str
) -> list[Reading]:
    """Begin so many streams at once; return what their readers measured."""
    asked = (prompts.draw(prompt_len, f"{seed} {number}") for number in range(num_streams))
    return list(await asyncio.gather(*(read(server, prompt, answer_len) for prompt in asked)))


async def read(server: Server, prompt: str, answer_len: int) -> Reading:
    """Read one stream; raises RuntimeError or ServerFault if its answer is refused or short."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": answer_len, "temperature": 0.8, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began_at = time.perf_counter()
    first_at = last_at = 0.0
    num_tokens = 0
    async for data in post(server, "/v1/completions", body):
        if any(choice.get("text") for choice in data.get("choices", ())):
            last_at = time.perf_counter()
            first_at = first_at or last_at
        if data.get("usage"):
            num_tokens = data["usage"]["completion_tokens"]
    if num_tokens != answer_len or not first_at:
        raise RuntimeError(f"an answer had {num_tokens} of {answer_len} tokens")
    return Reading((first_at - began_at) * 1e3, (last_at - first_at) / max(1, num_tokens - 1) * 1e3)


if __name__ == "__main__":
    main()

"""The linear layers of a model's shape in every back end: milliseconds a step and GB/s of weights.

    python -m benchmarks.linear [--shape S,qwen3-0.6b] [--rows 1,8,32,128] [--threads 2] [--level avx2] [--cpu-time]

All linear layers of some decoder layers and the head, with random weights; more of them than the caches hold, so that
a step reads its weights from memory. The back ends take turns, and the least of the rounds counts: other work on the
machine only adds. `--cpu-time` (with one thread): time of the thread instead of the clock's, for a busy machine.
`floor` is what reading the weights takes at the speed of a sum over a large tensor.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.support.machine import describe_machine, parser, progress
from streamserve.engine.model.linear.base import PLAIN, BackEnd, Linear
from streamserve.engine.model.linear.choose import BACK_ENDS, is_right
from streamserve.engine.model.linear.native import BYTES_PER_WEIGHT, native_back_end, quantizing_back_end
from streamserve.native.levels import cpu_flags, usable_levels
from streamserve.native.library import open_library

# (out_features, in_features) of a decoder layer, as our layers fuse them: qkv, o, gate and up, down; and of the head.
SHAPES = {
    "S": ([(960, 576), (576, 576), (3072, 576), (576, 1536)], (49_152, 576), 30),
    "qwen3-0.6b": ([(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)], (151_936, 1024), 28),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOST_WEIGHTS = 40_000_000  # of the decoder layers that are made; the time of the others is computed from theirs
ROUNDS = 5


def main() -> None:
    """Print a table for each shape and dtype."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    print(f"{describe_machine()}, torch {torch.__version__}, {options.threads} threads")
    clock = time.thread_time if options.cpu_time else time.perf_counter
    speed = memory_speed(clock)
    print(f"memory is read at {speed / 1e9:.1f} GB/s")
    rows = [int(part) for part in options.rows.split(",")]
    for shape in options.shape.split(","):
        for dtype in options.dtype.split(","):
            print(f"\n{shape} {dtype}: ms a step (GB/s of weights)")
            print(f"  {'rows':<16}" + "".join(f"{num_rows:>16}" for num_rows in rows))
            for name, cells, floor in measure(shape, DTYPES[dtype], rows, options.level, clock, speed):
                print(f"  {name:<16}" + "".join(f"{cell:>16}" for cell in cells) + f"   floor {floor:.1f}", flush=True)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    options = parser(__doc__)
    options.add_argument("--shape", default="S")
    options.add_argument("--dtype", default="bf16,fp32")
    options.add_argument("--rows", default="1,8,32,128")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--level", default=usable_levels(cpu_flags())[0].name, help="of the native library")
    options.add_argument("--cpu-time", action="store_true")
    return options.parse_args()


def measure(
    shape: str, dtype: torch.dtype, rows: list[int], level_name: str, clock: Callable[[], float], speed: float
) -> Iterator[tuple[str, list[str], float]]:
    """Yield each back end's name, its cells by number of rows, and the floor of one row in milliseconds."""
    layer, head, num_layers = SHAPES[shape]
    num_made = max(1, min(num_layers, MOST_WEIGHTS // sum(n * k for n, k in layer)))
    weights = [0.05 * torch.randn(size) for _ in range(num_made) for size in layer] + [0.05 * torch.randn(head)]
    made = {end.name: [end.make(weight.to(dtype), None) for weight in weights] for end in ends(dtype, level_name)}
    inputs = {n: {k: torch.randn(n, k).to(dtype) for k in {w.shape[1] for w in weights}} for n in rows}
    share = num_layers / num_made
    best = {name: dict.fromkeys(rows, math.inf) for name in made}
    for number in range(ROUNDS):
        progress(f"{shape} {dtype} round {number + 1} of {ROUNDS}")
        for num_rows in rows:
            for name, linears in made.items():
                body, top = linears[:-1], linears[-1:]
                seconds = share * timed(body, inputs[num_rows], clock) + timed(top, inputs[num_rows], clock)
                best[name][num_rows] = min(best[name][num_rows], seconds)
    for name, linears in made.items():
        num_bytes = share * sum(one.num_bytes for one in linears[:-1]) + linears[-1].num_bytes
        cells = [f"{1e3 * seconds:.1f} ({num_bytes / seconds / 1e9:.1f})" for seconds in best[name].values()]
        yield name, cells, 1e3 * num_bytes / speed


def ends(dtype: torch.dtype, level_name: str) -> list[BackEnd]:
    """Return the back ends that are right on this machine: torch's own first."""
    level = next(level for level in usable_levels(cpu_flags()) if level.name == level_name)
    library = open_library(compiles=True, level=level)
    right = [end for end in (*BACK_ENDS, native_back_end(library)) if is_right(end, dtype, torch.device("cpu"))]
    return [PLAIN, *right, *(quantizing_back_end(library, kind) for kind in BYTES_PER_WEIGHT)]


def timed(linears: list[Linear], inputs: dict[int, torch.Tensor], clock: Callable[[], float]) -> float:
    """Return the seconds that all of them take, one after another."""
    with torch.inference_mode():
        started_at = clock()
        for linear in linears:
            linear(inputs[linear.in_features])
        return clock() - started_at


def memory_speed(clock: Callable[[], float]) -> float:
    """Return bytes a second of a sum over 512 MB."""
    numbers = torch.ones(1 << 27)
    seconds = math.inf
    for _ in range(ROUNDS):
        started_at = clock()
        numbers.sum()
        seconds = min(seconds, clock() - started_at)
    return numbers.nbytes / seconds


if __name__ == "__main__":
    main()

"""What a model takes in memory and how long it loads, in each form: measured in a process of its own.

    python -m benchmarks.memory MODEL [--forms float32,bfloat16,int8,int4] [--probe] [--kept] [--most-gb 8] [--json]

MODEL is a folder, a GGUF file, a hub id, a shape of benchmarks/support/shape.py (random weights), or `llama-3-8b`: a
GGUF file of random Q4_0 blocks in the shape of Llama 3 8B, 4.6 GB, written into the temporary folder and removed again.
Each process loads the model, answers a few tokens, and says:

    load     seconds on the wall, and of all processor cores together
    peak     the most memory that was resident, mapped pages of files included, until the answer was there
    after    what is resident then, and how much of it is the process's own (not a file's)

`--kept` loads each form twice in a fresh cache, and prints the second load too: what was packed is kept. Then two
processes load it at once, and the last row has what one of them takes of the memory: shared pages count as a half
(PSS). `--most-gb`: fail if a peak is above it. Sizes are in GB of 10^9 bytes. The kernels are compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.llama_8b import NAME as BIG
from benchmarks.support.llama_8b import write as write_big
from benchmarks.support.machine import describe_machine, progress
from benchmarks.support.shape import SHAPES, model_folder
from streamserve.native.build import build
from streamserve.native.levels import best_level

AS_STORED = "as stored"
FORMS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
    AS_STORED: {},
}
PROMPT_LEN, NUM_TOKENS, BLOCK_SIZE, NUM_BLOCKS = 24, 8, 32, 64
KB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One load. Sizes in bytes; `tokens` are the answer's."""

    load_seconds: float
    cpu_seconds: float
    peak_bytes: int
    resident_bytes: int
    own_bytes: int
    linears: str
    tokens: list[int]
    shared_bytes: int | None = None  # PSS, beside another process

    def line(self, form: str) -> str:
        """Return a row of the table."""
        sizes = " / ".join(f"{size / 1e9:.2f}" for size in (self.peak_bytes, self.resident_bytes, self.own_bytes))
        pss = "" if self.shared_bytes is None else f"{self.shared_bytes / 1e9:.2f}"
        return f"| {form} | {self.load_seconds:.1f} / {self.cpu_seconds:.1f} | {sizes} | {pss} | {self.linears} |"


def measure(fields: dict[str, Any]) -> tuple[Figures, Any]:
    """Load a model and let it answer; `fields` are those of its config. Its runner holds the memory."""
    import torch

    from streamserve.engine.capacity import NULL_BLOCKS, blocks_for_tokens
    from streamserve.engine.config import EngineConfig, ModelConfig
    from streamserve.engine.model.batch import build_batch
    from streamserve.engine.model.kernels import open_kernels
    from streamserve.engine.model.load.start import load_runner
    from streamserve.engine.plan import Chunk, StepPlan

    open_kernels()
    before, cpu_before = time.perf_counter(), time.process_time()
    runner = load_runner(
        ModelConfig(alias="m", device="cpu", **fields), EngineConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    )
    load_seconds, cpu_seconds = time.perf_counter() - before, time.process_time() - cpu_before
    length = PROMPT_LEN + NUM_TOKENS
    num_groups = len(runner.windows)
    end = NULL_BLOCKS + num_groups * blocks_for_tokens(length, BLOCK_SIZE)
    table, *others = (tuple(range(NULL_BLOCKS + group, end, num_groups)) for group in range(num_groups))
    token_ids, found = list(range(2, 2 + PROMPT_LEN)), []
    with torch.inference_mode():
        for start in (0, *range(PROMPT_LEN, length - 1)):
            chunk = Chunk(
                seq_id=0, start=start, token_ids=tuple(token_ids), block_table=table, other_tables=tuple(others)
            )
            batch = build_batch(StepPlan(step_id=0, chunks=(chunk,)), BLOCK_SIZE, runner.loaded.device)
            logits = runner.forward(batch, batch.last_rows)[1]
            assert logits is not None
            token_ids = [int(logits[0].argmax())]
            found += token_ids
    sizes = memory_of_this_process()
    figures = Figures(
        load_seconds=load_seconds,
        cpu_seconds=cpu_seconds,
        peak_bytes=sizes["VmHWM"],
        resident_bytes=sizes["VmRSS"],
        own_bytes=sizes["RssAnon"],
        linears=runner.linears,
        tokens=found,
    )
    return figures, runner


def memory_of_this_process(status: Path = Path("/proc/self/status")) -> dict[str, int]:
    """Return the sizes that Linux gives, in bytes, by their names there."""
    lines = (line.split() for line in status.read_text().splitlines())
    return {words[0].removesuffix(":"): int(words[1]) * KB for words in lines if words[-1] == "kB"}


def in_a_process(fields: dict[str, Any], cache: Path | None = None) -> Figures:
    """Measure in a process of its own; `cache`: where what is packed is kept."""
    return in_processes(fields, 1, cache)[0]


def in_processes(fields: dict[str, Any], number: int, cache: Path | None = None) -> list[Figures]:
    """Measure in so many processes at once, which end when all have answered."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if cache is not None:
        copy_kernels(cache / "streamserve" / "native")
        environment["XDG_CACHE_HOME"] = str(cache)
    command = [sys.executable, "-m", "benchmarks.memory", "--child", json.dumps(fields)]
    children = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(number)
    ]
    found = []
    for child in children:
        assert child.stdout is not None
        found.append(json.loads(child.stdout.readline()))
    if number > 1:
        for child, figures in zip(children, found, strict=True):
            figures["shared_bytes"] = memory_of_this_process(Path(f"/proc/{child.pid}/smaps_rollup"))["Pss"]
    for child in children:
        child.communicate()
    return [Figures(**figures) for figures in found]


def copy_kernels(folder: Path) -> None:
    """Put the compiled kernels into a cache that is new."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    library = build(best_level())
    shutil.copy(library, folder / library.name)


def measured(path: str, forms: list[str], *, probe: bool, is_kept: bool) -> Iterator[tuple[str, Figures]]:
    """Yield each form's figures, and with `is_kept` those of its second load."""
    for form in forms:
        progress(f"loading {form}")
        fields = {"path": path, **FORMS[form], "parity_probe": probe, "keep_packed": is_kept}
        if not is_kept:
            yield form, in_a_process(fields)
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield form, in_a_process(fields, Path(folder))
            yield f"{form}, second load", in_a_process(fields, Path(folder))
            yield f"{form}, two at once", in_processes(fields, 2, Path(folder))[0]


def main() -> int:
    """Print the table; return 1 if a peak is above the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="S")
    parser.add_argument("--forms", default="")
    parser.add_argument("--probe", action="store_true", help="with the comparison that a load makes by default")
    parser.add_argument("--kept", action="store_true", help="a second load too")
    parser.add_argument("--most-gb", type=float, help="fail above this peak")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        figures, _runner = measure(json.loads(options.child))
        print(json.dumps(asdict(figures)), flush=True)
        sys.stdin.read()  # until the parent has looked at this process
        return 0
    with tempfile.TemporaryDirectory(prefix="streamserve-memory-") as folder:
        path = options.model
        if path == BIG:
            progress("writing random weights, 4.6 GB")
            path = str(write_big(Path(folder) / f"{BIG}.gguf"))
        elif path in SHAPES:
            path = str(model_folder(path, Path(folder))[0])
        is_file = path.endswith(".gguf")
        forms = options.forms.split(",") if options.forms else [AS_STORED] if is_file else list(FORMS)[:-1]
        found = list(measured(path, forms, probe=options.probe, is_kept=options.kept))
    if options.json:
        print(json.dumps({form: asdict(figures) for form, figures in found}, indent=2))
    else:
        print(f"{describe_machine()}\n\n| form | load s: wall / CPU | GB: peak / after / own | PSS | linear layers |")
        print("|---|---|---|---|---|")
        print("\n".join(figures.line(form) for form, figures in found))
    above = [form for form, figures in found if options.most_gb and figures.peak_bytes > options.most_gb * 1e9]
    if above:
        print(f"above {options.most_gb:g} GB: {', '.join(above)}", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())

"""Our engine beside transformers `generate` and transformers continuous batching, in turns, in one run.

    python -m benchmarks.engine [--dtype bf16,fp32] [--streams 1,8,32] [--quick] [--cpu-time]
    python -m benchmarks.engine --plain      our decoder layers beside transformers' own
    python -m benchmarks.engine --variants   only ours: plain, with KV in int8, and with adapters

A random model of SmolLM2-135M's shape is built locally. Every contender decodes as many streams over as long a
context and never stops early; all sample (temperature 0.8, top-p 0.95; with `--greedy-peers` only ours).
The contenders take turns round after round, so that a busy machine slows all of them alike: read the ratios.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.support.contenders import GREEDY, SAMPLED, Contender, ContinuousBatching, Generate, Ours, choose_clock
from benchmarks.support.machine import processor
from benchmarks.support.random_adapter import save_random_adapter

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
SMOLLM2_135M = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_theta": 100_000.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LONG_PROMPT_LEN = 1024
TAIL_LEN = 16  # what follows the shared prefix


def main() -> None:
    """Run the chosen measurements and print the tables."""
    options = parse_options()
    print_machine(options)
    for name in options.dtype.split(","):
        with tempfile.TemporaryDirectory() as folder:
            build_model(Path(folder), DTYPES[name])
            print(f"\n{name}", flush=True)
            run = run_variants if options.variants else run_plain if options.plain else run_dtype
            run(folder, DTYPES[name], options)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16,fp32")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps, no continuous batching")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds of one thread: for a busy machine")
    parser.add_argument(
        "--plain", action="store_true", help="only ours, with our decoder layers and with transformers'"
    )
    parser.add_argument("--variants", action="store_true", help="only ours: plain, KV in int8, and with adapters")
    parser.add_argument("--greedy-peers", action="store_true", help="only ours samples")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help="decode steps a round")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens before the decode steps")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.steps = options.steps or (8 if options.quick else 24)
    options.streams = [int(number) for number in options.streams.split(",")]
    if options.cpu_time:
        choose_clock("cpu")
        options.threads = 1
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def print_machine(options: argparse.Namespace) -> None:
    """Print the machine and the versions of the libraries."""
    print(f"{processor()}, {torch.get_num_threads()} threads, python {platform.python_version()}, ", end="")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"prompt {options.prompt_len} + {options.steps} new tokens, medians of {options.rounds} rounds, ms", end="")
    print(" of CPU time" if options.cpu_time else "")


def build_model(folder: Path, dtype: str, shape: dict[str, Any] = SMOLLM2_135M) -> None:
    """Write a random model of the given shape, whose `model_type` is Llama's if it names none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = AutoConfig.for_model(**{"model_type": "llama", **shape})
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def run_dtype(folder: str, dtype: str, options: argparse.Namespace) -> None:
    """Measure decode, first token, and shared prefix; print a line for each."""
    how = GREEDY if options.greedy_peers else SAMPLED
    contenders: list[Contender] = [Ours(folder, dtype), Generate(folder, dtype, how=how)]
    if not options.quick:
        contenders.append(ContinuousBatching(folder, dtype, how=how))
    names = "".join(f"{contender.name:>14}" for contender in contenders)
    print(f"{'':24}{names}   ours / generate")
    for num_streams in options.streams:
        times = take_turns(
            contenders, lambda one, n=num_streams: one.decode(n, options.prompt_len, options.steps), options
        )
        print_line(f"decode step, {num_streams} streams", times)
    print_line("first token, 1k prompt", take_turns(contenders, lambda one: one.first_token(LONG_PROMPT_LEN), options))
    ours = contenders[0]
    assert isinstance(ours, Ours)
    print_shared_prefix(ours, options)
    for contender in contenders:
        contender.close()


def run_plain(folder: str, dtype: str, options: argparse.Namespace) -> None:
    """Measure our decoder layers and transformers' own over the same memory; print a line for each shape."""
    contenders = [Ours(folder, dtype), Ours(folder, dtype, on_transformers=True)]
    print(f"{'':24}{'our layers':>14}{'HF layers':>14}   ours / HF")
    for num_streams in options.streams:
        times = take_turns(
            contenders, lambda one, n=num_streams: one.decode(n, options.prompt_len, options.steps), options
        )
        print_line(f"decode step, {num_streams} streams", times)
    print_line("first token, 1k prompt", take_turns(contenders, lambda one: one.first_token(LONG_PROMPT_LEN), options))
    for contender in contenders:
        contender.close()


def run_variants(folder: str, dtype: str, options: argparse.Namespace) -> None:
    """Measure what keys in eight bits and adapters cost; print a line for each shape, and ratios to the plain engine.

    Adapters have rank 16 in all linear layers; beside streams without an adapter, a step takes two passes.
    """
    adapters = {}
    for name in ("a", "b"):
        save_random_adapter(Path(folder) / name, Path(folder), rank=16)
        adapters[name] = str(Path(folder) / name)
    contenders = [
        Ours(folder, dtype),
        Ours(folder, dtype, kv_dtype="int8"),
        Ours(folder, dtype, adapters=adapters, of_streams=("a",)),
        Ours(folder, dtype, adapters=adapters, of_streams=("a", "b")),
        Ours(folder, dtype, adapters=adapters, of_streams=("a", "")),
    ]
    titles = ("plain", "int8 KV", "an adapter", "two adapters", "half of them")
    print(f"{'':24}{''.join(f'{title:>20}' for title in titles)}")

    def measure(title: str, run: Callable[[Any], float]) -> None:
        times = take_turns(contenders, run, options)
        cells = [f"{statistics.median(times[0]) * 1000:20.1f}"]
        for seen in times[1:]:
            ratio = statistics.median(ours / plain for ours, plain in zip(seen, times[0], strict=True))
            cells.append(f"{statistics.median(seen) * 1000:12.1f}  ({ratio:.2f})")
        print(f"{title:24}{''.join(cells)}", flush=True)

    for num_streams in options.streams:
        measure(
            f"decode step, {num_streams} streams",
            lambda one, n=num_streams: one.decode(n, options.prompt_len, options.steps),
        )
    measure("first token, 1k prompt", lambda one: one.first_token(LONG_PROMPT_LEN))
    for contender in contenders:
        contender.close()


def take_turns(
    contenders: Sequence[Contender], measure: Callable[[Any], float], options: argparse.Namespace
) -> list[list[float]]:
    """Let every contender run once unmeasured, then `rounds` times in turns; return seconds by contender."""
    times: list[list[float]] = [[] for _ in contenders]
    for number in range(options.rounds + 1):
        for contender, seen in zip(contenders, times, strict=True):
            seconds = measure(contender)
            if number > 0:
                seen.append(seconds)
    return times


def print_line(title: str, times: list[list[float]]) -> None:
    """Medians in milliseconds, and the median ratio of the rounds: both contenders of a round saw the same machine."""
    medians = "".join(f"{statistics.median(seen) * 1000:14.1f}" for seen in times)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(times[0], times[1], strict=True))
    print(f"{title:24}{medians}{ratio:18.2f}", flush=True)


def print_shared_prefix(ours: Ours, options: argparse.Namespace) -> None:
    """Time to first token with a 1k prefix that the prefix cache holds, and with one that it does not."""
    cold, warm = [], []
    for number in range(options.rounds):
        cold.append(ours.first_token_after_prefix(LONG_PROMPT_LEN, TAIL_LEN, prefix=number))
        warm.append(ours.first_token_after_prefix(LONG_PROMPT_LEN, TAIL_LEN, prefix=number))
    ratio = statistics.median(w / c for w, c in zip(warm, cold, strict=True))
    print(f"1k prefix cold {statistics.median(cold) * 1000:.1f}, ", end="")
    print(f"warm {statistics.median(warm) * 1000:.1f}, ratio {ratio:.3f} (through EngineCore)", flush=True)


if __name__ == "__main__":
    started_at = time.monotonic()
    main()
    print(f"\n{time.monotonic() - started_at:.0f} s")

"""What freeing keys before a window brings: answers of a long context at once, and tokens a second.

    python -m benchmarks.windows [--shapes mistral,gemma3] [--length 8192] [--requests 12] [--kv-mb 96] [--rounds 2]

Small models with random weights and the windows, the layers' order and the heads of Mistral 0.1 (all layers: 4,096) and
Gemma 3 (five of six: 1,024) are loaded once, and served from the same amount of KV memory: freeing what lies before the
windows, and with everything kept. In turns, both get as many requests at once, each `--length` tokens long with an
answer of `--answer`. A line has: the most answers in memory at once, the seconds until all are there, and tokens a
second, of all steps, and of those steps that hold no prompt. Seconds are CPU time of one thread, for a busy machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import build_model
from benchmarks.support.machine import describe_machine
from streamserve.engine.capacity import MIB
from streamserve.engine.config import CLASSES, EngineConfig, ModelConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.model.load.start import choose_num_blocks, load_runner
from streamserve.engine.model.runner import ModelRunner
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.requests import NO_CALLER, Resume, SamplingParams

_VOCAB = 8192
_SMALL = {
    "vocab_size": _VOCAB, "hidden_size": 512, "intermediate_size": 1024, "max_position_embeddings": 32_768,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "mistral": {
        **_SMALL, "model_type": "mistral", "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "sliding_window": 4096,
    },
    "gemma3": {
        **_SMALL, "model_type": "gemma3_text", "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 1024,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
    },
}  # fmt: skip
_PATIENT = {name: replace(one, max_queue_seconds=1e9, max_late_seconds=1e9) for name, one in CLASSES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One run of all requests."""

    most_at_once: int
    seconds: float
    tokens_a_second: float
    decodes_a_second: float


def serve(runner: ModelRunner, config: EngineConfig, options: argparse.Namespace) -> Served:
    """Serve all requests, and measure."""
    core = EngineCore(runner, config, time.monotonic)
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=options.answer, ignore_eos=True)
    for seq_id in range(options.requests):
        prompt = random.Random(seq_id).choices(range(2, _VOCAB), k=options.length - options.answer)
        core.add(
            SequenceRequest(
                seq_id=seq_id, prompt_token_ids=tuple(prompt), admission=NO_CALLER, resume=Resume(), sampling=sampling
            )
        )
    most, total, decoding, num_tokens, num_decoded = 0, 0.0, 0.0, 0, 0
    while core.has_work:
        began, computed = time.process_time(), core.stats.prompt_tokens
        num_new = sum(len(update.token_ids) for update in core.step())
        seconds = time.process_time() - began
        most, total, num_tokens = max(most, core.stats.running), total + seconds, num_tokens + num_new
        if core.stats.prompt_tokens == computed:
            decoding, num_decoded = decoding + seconds, num_decoded + num_new
    return Served(
        most_at_once=most,
        seconds=total,
        tokens_a_second=num_tokens / total,
        decodes_a_second=num_decoded / decoding if decoding else 0.0,
    )


def measure(name: str, options: argparse.Namespace) -> None:
    """Print the lines of one shape."""
    config = EngineConfig(
        kv_cache_bytes=options.kv_mb * MIB,
        classes=_PATIENT,
        prefix_caching=False,
        speculation="off",
        step_seconds=600.0,
    )
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder), "bfloat16", SHAPES[name])
        freeing = load_runner(ModelConfig(alias="m", path=folder, device="cpu", dtype=options.dtype), config)
    longest = freeing.max_model_len
    keeping = ModelRunner(
        freeing.loaded,
        block_size=config.block_size,
        num_blocks=choose_num_blocks(freeing.loaded, config, longest),
        max_model_len=longest,
    )
    runners = {"freed": freeing, "all kept": keeping}
    found: dict[str, list[Served]] = {how: [] for how in runners}
    for _ in range(options.rounds):
        for how, runner in runners.items():
            found[how].append(serve(runner, config, options))
    for how, runs in found.items():
        seconds, tokens, decodes = (
            statistics.median(getattr(run, field) for run in runs)
            for field in ("seconds", "tokens_a_second", "decodes_a_second")
        )
        most = max(run.most_at_once for run in runs)
        print(f"| {name}, {how} | {most} | {seconds:.1f} | {tokens:.1f} | {decodes:.1f} |", flush=True)


def main() -> None:
    """Measure the shapes of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt with its answer")
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--kv-mb", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{describe_machine()}\n\n| | at once | s | tokens/s | tokens/s of decodes |\n|---|---|---|---|---|", flush=True
    )
    for name in options.shapes.split(","):
        measure(name, options)


if __name__ == "__main__":
    main()

"""Our engine on CUDA beside transformers, in turns: decode steps, first tokens, and their share of the roofline.

    python -m benchmarks.gpu [--shapes 135m,1b,8b] [--streams 1,8,64,256] [--hf-batching] [--json FILE]

Needs a GPU with torch and triton; no Django, no hub: weights are random. The roofline of a decode step is the time in
which its bytes (linear layers, and the keys and values of its streams) are read at the rate of a large copy, which
is measured here.
`torch alone` is our engine without Triton kernels and CUDA graphs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.support.contenders import SAMPLED, ContinuousBatching, Generate, Ours
from benchmarks.support.random_model import random_runner
from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.model.decoder.decoder import Decoder

_LLAMA = {"model_type": "llama", "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 65_536}
SHAPES: dict[str, dict[str, Any]] = {
    "135m": _LLAMA
    | {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "1b": _LLAMA
    | {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": _LLAMA
    | {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
BLOCK_SIZE = 32
KV_BYTES = 32 << 30
PROMPT_LEN = 512
LONG_PROMPTS = (1024, 32_768)
COPY_BYTES = 4 << 30
TIMED_PER_PROMPT = 3


class OursRandom(Ours):
    """Our whole engine over random weights."""

    def __init__(self, shape: dict[str, Any], most_rows: int, *, has_kernels: bool) -> None:
        self.name = "ours" if has_kernels else "torch alone"
        head_dim = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
        self.token_bytes = shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * 2 * 2
        num_blocks = KV_BYTES // (self.token_bytes * BLOCK_SIZE)
        self.config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_num_seqs=most_rows,
            max_num_batched_tokens=8192,
            prefill_chunk=4096,
        )
        self.runner = random_runner(
            shape,
            dtype=torch.bfloat16,
            device="cuda",
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            most_rows=most_rows,
            has_kernels=has_kernels,
        )
        decoder = self.runner.loaded.model
        assert isinstance(decoder, Decoder)
        # What a step reads: of an embedding that is not the head, a row for each token.
        self.weight_bytes = sum(linear.num_bytes for linear in decoder.linears)
        self.core = EngineCore(self.runner, self.config, time.monotonic)
        self.seq_id = 0

    def decode(self, num_streams: int, prompt_len: int, num_steps: int) -> float:
        """Seconds of one decode step of `num_streams` streams whose prompts are computed."""
        self.start(num_streams, prompt_len, num_steps + 40)
        self.time_steps(num_streams, 4)
        seconds = self.time_steps(num_streams, num_steps)
        self.stop(num_streams)
        return seconds


class GenerateRandom(Generate):
    """transformers `generate` over random weights."""

    def __init__(self, shape: dict[str, Any]) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**shape)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model, self.device, self.how, self.seed = model.eval(), "cuda", SAMPLED, 0


class BatchingRandom(GenerateRandom, ContinuousBatching):
    """transformers continuous batching over random weights, with its own choice of memory."""

    num_blocks = None
    most_requests = 256


def copy_rate() -> float:
    """Bytes a second that a large copy on the device reads and writes."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return 2 * COPY_BYTES / statistics.median(seconds[1:])


def measure(name: str, make: Callable[[], Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds by load of one contender, which is alone on the device."""
    contender = make()
    found: dict[str, Any] = {}
    for num_streams in options.streams:
        if num_streams > options.most.get(contender.name, num_streams):
            continue
        contender.decode(num_streams, PROMPT_LEN, 4)
        times = [contender.decode(num_streams, PROMPT_LEN, options.steps) for _ in range(options.rounds)]
        found[f"decode {num_streams}"] = 1000 * statistics.median(times)
    for length in LONG_PROMPTS:
        contender.first_token(length)
        times = [contender.first_token(length) for _ in range(TIMED_PER_PROMPT)]
        found[f"first token {length}"] = 1000 * statistics.median(times)
    if isinstance(contender, OursRandom):
        found["weight bytes"], found["token bytes"] = contender.weight_bytes, contender.token_bytes
    contender.close()
    del contender
    gc.collect()
    torch.cuda.empty_cache()
    print(
        f"  {name}: " + ", ".join(f"{load} {ms:.2f}" for load, ms in found.items() if "bytes" not in load), flush=True
    )
    return found


def print_table(ours: dict[str, Any], others: dict[str, dict[str, Any]], rate: float) -> None:
    """Print ours beside the others, and its share of the roofline."""
    print(f"{'':20}{'ours, ms':>10}{'roofline':>10}{'share':>8}" + "".join(f"{name:>14}" for name in others))
    for load, ms in ours.items():
        if "bytes" in load:
            continue
        floor = ""
        if load.startswith("decode"):
            num_bytes = ours["weight bytes"] + int(load.split()[1]) * PROMPT_LEN * ours["token bytes"]
            least = 1000 * num_bytes / rate
            floor = f"{least:>10.2f}{least / ms:>8.2f}"
        beside = "".join(f"{one[load] / ms:>12.2f} x" if load in one else f"{'':>14}" for one in others.values())
        print(f"{load:20}{ms:>10.2f}{floor:>18}{beside}", flush=True)


def main() -> None:
    """Print a table for each shape, in bf16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="135m,1b,8b")
    parser.add_argument("--streams", default="1,8,64,256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--ours", action="store_true", help="only ours")
    parser.add_argument(
        "--hf-batching", action="store_true", help="transformers' continuous batching too (minutes for the 8b shape)"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a CUDA GPU that torch sees; benchmarks.engine runs on a CPU.")
    options.streams = [int(number) for number in options.streams.split(",")]
    options.most = {"generate": 64, "torch alone": 64}
    rate = copy_rate()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{machine}; a copy moves {rate / 1e12:.2f} TB/s; prompts of {PROMPT_LEN}; ms", flush=True)
    results: dict[str, Any] = {"machine": machine, "copy bytes a second": rate}
    for name in options.shapes.split(","):
        shape = SHAPES[name]
        most = max(options.streams)
        print(f"\n{name}, bf16", flush=True)
        ours = measure("ours", lambda s=shape, m=most: OursRandom(s, m, has_kernels=True), options)
        others: dict[str, dict[str, Any]] = {}
        if not options.ours:
            peers: dict[str, Callable[[], Any]] = {
                "torch alone": lambda s=shape: OursRandom(s, 64, has_kernels=False),
                "generate": lambda s=shape: GenerateRandom(s),
            }
            if options.hf_batching:
                peers["hf batching"] = lambda s=shape: BatchingRandom(s)
            for peer, make in peers.items():
                try:
                    others[peer] = measure(peer, make, options)
                except Exception as error:  # a peer that cannot do it is named, and does not end the run
                    print(f"  {peer}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)
        print_table(ours, others, rate)
        results[name] = {"ours": ours, **others}
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

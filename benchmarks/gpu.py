"""Our engine on CUDA, overlapped and step by step, and transformers `generate`, in turns: decode step and first token.

    python -m benchmarks.gpu [--streams 1,8,32,64] [--shape 135m|1b]

Needs a GPU; no Django, no hub. Gather and SDPA behind Hugging Face code, no CUDA graphs yet: read the ratios.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from benchmarks.engine import LONG_PROMPT_LEN, SMOLLM2_135M, build_model, print_line, take_turns
from benchmarks.support.contenders import Generate, Ours
from streamserve.engine.core import EngineCore

SHAPES = {
    "135m": SMOLLM2_135M,
    "1b": SMOLLM2_135M
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


class StepByStep(Ours):
    """The same engine, which collects every step before it launches the next."""

    name = "step by step"

    def __init__(self, folder: str, dtype: str, device: str, num_blocks: int) -> None:
        super().__init__(folder, dtype, device, num_blocks)
        self.core = EngineCore(self.runner, replace(self.config, overlap=False), time.monotonic)


def main() -> None:
    """Print one table in bf16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,32,64")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a CUDA GPU that torch sees; benchmarks.engine runs on a CPU.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        build_model(Path(folder), "bfloat16", SHAPES[options.shape])
        contenders = [
            Ours(folder, "bfloat16", "cuda", num_blocks=4096),
            Generate(folder, "bfloat16", "cuda"),
            StepByStep(folder, "bfloat16", "cuda", num_blocks=4096),
        ]
        names = "".join(f"{contender.name:>14}" for contender in contenders)
        print(f"{'bf16 ' + options.shape:24}{names}   ours / generate")
        for num_streams in (int(number) for number in options.streams.split(",")):
            times = take_turns(contenders, lambda one, n=num_streams: one.decode(n, 128, options.steps), options)
            print_line(f"decode step, {num_streams} streams", times)
        times = take_turns(contenders, lambda one: one.first_token(LONG_PROMPT_LEN), options)
        print_line("first token, 1k prompt", times)


if __name__ == "__main__":
    main()

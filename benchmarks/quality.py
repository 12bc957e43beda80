"""What a model loses by the precision that it is computed in: against its own weights in float32.

    python -m benchmarks.quality MODEL [--dtype bfloat16] [--quantize int8] [--kv-dtype int8] [--check] [--json]

MODEL is a folder, a GGUF file, or a hub id. The reference is the model's weights (dequantised, if they are quantised)
in float32, computed by torch. Both read the fixed text benchmarks/support/quality_text.txt, and predict its tokens:

    KL            of the reference's distribution from the other, in nats: how much is said differently
    perplexity    of the text, and its ratio to the reference's
    agreement     share of the positions where both think the same token the likeliest
    greedy        share of the tokens that both answer with, up to the first that differs, in continuations of the text

With `--check` the command fails beyond the bounds of docs/quantised.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from streamserve.engine.capacity import NULL_BLOCKS, blocks_for_tokens
from streamserve.engine.config import KV_DTYPES, EngineConfig, ModelConfig
from streamserve.engine.model.batch import build_batch
from streamserve.engine.model.load.source import resolve
from streamserve.engine.model.load.start import load_runner
from streamserve.engine.model.runner import ModelRunner
from streamserve.engine.plan import Chunk, StepPlan
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.protocol.requests import GenerateRequest

TEXT = Path(__file__).parent / "support" / "quality_text.txt"
NUM_TOKENS = 512  # of the text
GREEDY_STARTS, NUM_GREEDY = (64, 160, 256), 16
BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a precision may lose."""

    kl: float
    perplexity_ratio: float
    agreement: float


# By what weights are rounded to. Of small models: larger ones lose less.
BOUNDS = {
    "": Bounds(kl=0.01, perplexity_ratio=1.03, agreement=0.88),
    "int8": Bounds(kl=0.01, perplexity_ratio=1.03, agreement=0.88),
    "int4": Bounds(kl=0.12, perplexity_ratio=1.15, agreement=0.75),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The figures of one comparison."""

    num_tokens: int
    kl: float
    worst_kl: float
    perplexity: float
    reference_perplexity: float
    agreement: float
    greedy: float
    linears: str

    @property
    def perplexity_ratio(self) -> float:
        """Return how much the perplexity is of the reference's."""
        return self.perplexity / self.reference_perplexity

    def complaints(self, bounds: Bounds) -> list[str]:
        """Return what is beyond the bounds."""
        return [
            f"{name} {value:.4g} (bound {bound:g})"
            for name, value, bound, is_right in (
                ("KL", self.kl, bounds.kl, self.kl <= bounds.kl),
                (
                    "perplexity ratio",
                    self.perplexity_ratio,
                    bounds.perplexity_ratio,
                    self.perplexity_ratio <= bounds.perplexity_ratio,
                ),
                ("agreement", self.agreement, bounds.agreement, self.agreement >= bounds.agreement),
            )
            if not is_right
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a runner makes of the text: logits (num_tokens, vocab_size), greedy continuations, its linear layers."""

    logits: torch.Tensor
    greedy: list[list[int]]
    linears: str


def read(model: ModelConfig, token_ids: Sequence[int], kv_dtype: str = KV_DTYPES[0]) -> Reading:
    """Load a model, let it read the tokens and continue them, and free it again."""
    num_blocks = 2 * NULL_BLOCKS + blocks_for_tokens(len(token_ids) + NUM_GREEDY, BLOCK_SIZE)
    runner = load_runner(model, EngineConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE, kv_dtype=kv_dtype))
    try:
        with torch.inference_mode():
            logits = run(runner, token_ids, 0, list(range(len(token_ids))))
            starts = [start for start in GREEDY_STARTS if start + NUM_GREEDY <= len(token_ids)]
            greedy = [continued(runner, token_ids[:start]) for start in starts]
        return Reading(logits=logits, greedy=greedy, linears=runner.linears)
    finally:
        runner.close()


def run(runner: ModelRunner, token_ids: Sequence[int], start: int, rows: list[int]) -> torch.Tensor:
    """Compute tokens at positions from `start` on; return float32 logits (len(rows), vocab_size)."""
    num_groups, num_blocks = len(runner.windows), blocks_for_tokens(start + len(token_ids), BLOCK_SIZE)
    end = NULL_BLOCKS + num_groups * num_blocks
    table, *others = (tuple(range(NULL_BLOCKS + group, end, num_groups)) for group in range(num_groups))
    chunk = Chunk(seq_id=0, start=start, token_ids=tuple(token_ids), block_table=table, other_tables=tuple(others))
    batch = build_batch(StepPlan(step_id=0, chunks=(chunk,)), runner.block_size, runner.loaded.device)
    logits = runner.forward(batch, rows)[1]
    assert logits is not None
    return logits.float().cpu()


def continued(runner: ModelRunner, token_ids: Sequence[int]) -> list[int]:
    """Return the greedy continuation."""
    found: list[int] = []
    logits = run(runner, token_ids, 0, [len(token_ids) - 1])
    for index in range(NUM_GREEDY):
        found.append(int(logits[0].argmax()))
        logits = run(runner, found[-1:], len(token_ids) + index, [0])
    return found


def compare(reference: Reading, found: Reading, token_ids: Sequence[int]) -> Quality:
    """Return the figures."""
    wanted, given = (reading.logits.log_softmax(dim=-1) for reading in (reference, found))
    kl = (wanted.exp() * (wanted - given)).sum(dim=-1)  # (num_tokens,)
    targets = torch.tensor(token_ids[1:])[:, None]
    losses = [-table[:-1].gather(1, targets).mean() for table in (given, wanted)]
    agreement = (wanted.argmax(dim=-1) == given.argmax(dim=-1)).float().mean()
    same = [
        next((index for index, pair in enumerate(zip(*both, strict=True)) if pair[0] != pair[1]), NUM_GREEDY)
        for both in zip(reference.greedy, found.greedy, strict=True)
    ]
    return Quality(
        num_tokens=len(token_ids),
        kl=float(kl.mean()),
        worst_kl=float(kl.max()),
        perplexity=float(losses[0].exp()),
        reference_perplexity=float(losses[1].exp()),
        agreement=float(agreement),
        greedy=sum(same) / max(1, NUM_GREEDY * len(same)),
        linears=found.linears,
    )


def tokens_of(path: str, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    """Return the first tokens of the text, by the model's tokenizer."""
    found = HFTokenizer(path).encode(GenerateRequest(model="m", prompt=TEXT.read_text())).token_ids
    return found[:num_tokens]


def plain(path: str) -> ModelConfig:
    """Return the config of the reference: torch, float32, nothing rounded."""
    return ModelConfig(
        alias="m", path=path, dtype="float32", device="cpu", packed=False, native=False, parity_probe=False
    )


def served(path: str, dtype: str, quantize: str) -> ModelConfig:
    """Return the config of a model as a site has it."""
    return ModelConfig(
        alias="m", path=path, dtype=dtype, device="cpu", quantize=quantize, parity_probe=False, keep_packed=False
    )


def main() -> int:
    """Run the comparison; return 1 with `--check` for a model beyond the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", choices=("int8", "int4"), default="")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default=KV_DTYPES[0], help="how keys and values are kept")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--check", action="store_true", help="fail beyond the bounds")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args()
    path = str(resolve(options.model))
    token_ids = tokens_of(path, options.tokens)
    reference = read(plain(path), token_ids)
    reading = read(served(path, options.dtype, options.quantize), token_ids, options.kv_dtype)
    found = compare(reference, reading, token_ids)
    if options.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print(f"linear layers    {found.linears}")
        print(f"KL               {found.kl:.5f} nats a token, {found.worst_kl:.3f} at most")
        print(
            f"perplexity       {found.perplexity:.3f} of {found.num_tokens} tokens, {found.perplexity_ratio:.4f} times "
            f"that of float32 ({found.reference_perplexity:.3f})"
        )
        print(f"same likeliest   {found.agreement:.1%} of the tokens")
        print(f"same answers     {found.greedy:.0%} of greedy tokens, up to the first that differs")
    complaints = found.complaints(BOUNDS[options.quantize])
    if options.check and complaints:
        print(f"beyond the bounds: {', '.join(complaints)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

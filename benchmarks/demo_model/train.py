"""Train the demo model: `python -m benchmarks.demo_model.train`. Corpus, tokenizer, one cosine, export.

Runs on two CPU cores in under an hour; `--resume` continues from a checkpoint, written every two minutes. The order of
batches depends on the seed alone. It does not use the held-out questions, which are for `quality.py`.
"""

import argparse
import math
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    from benchmarks.demo_model.batches import Batch, Encoded

HELPDESK = Path(__file__).parents[2] / "project" / "demo_model" / "helpdesk"
CHECKPOINTS = Path(__file__).parents[2] / ".cache" / "demo_model"
_PEAK_LR, _WARMUP_STEPS = 2e-3, 100
# From this share of the run on, half of the questions are disturbed.
_DISTRACTION_FROM = 0.12
_CHECKPOINT_SECONDS, _PROGRESS_STEPS = 120.0, 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The inputs that determine the result. The run and its cosine end at `max_tokens` or `max_minutes`."""

    seed: int
    max_tokens: int
    max_minutes: float
    batch_tokens: int
    corpus_sha256: str


@dataclass(slots=True)
class Progress:
    """The progress of the run; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    recent: list[float] = field(default_factory=list)

    def share(self, settings: Settings) -> float:
        """Return the finished share of the run, 0 to 1: the larger one of tokens and time."""
        return min(1.0, max(self.tokens / settings.max_tokens, self.seconds / (60 * settings.max_minutes)))

    def add(self, loss: float, num_tokens: int, seconds: float) -> None:
        """Count one step; the loss shown is the mean of the last hundred."""
        self.step += 1
        self.tokens += num_tokens
        self.seconds += seconds
        self.recent = [*self.recent[-99:], loss]
        self.loss = sum(self.recent) / len(self.recent)


def main() -> None:
    """Parse the command line and train."""
    args = _parser().parse_args()
    import torch

    from benchmarks.demo_model.corpus import corpus_sha256, examples
    from benchmarks.demo_model.tokens import encode_example, train_tokenizer

    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    corpus = list(examples())
    digest = corpus_sha256(corpus)
    print(f"corpus: {len(corpus):,} examples, sha256 {digest}", flush=True)
    tokenizer = train_tokenizer(corpus)
    encoded = [encode_example(tokenizer, example) for example in corpus]
    num_tokens = sum(len(token_ids) for token_ids, _ in encoded)
    print(f"tokens: {num_tokens:,} in one epoch, vocabulary {tokenizer.get_vocab_size():,}", flush=True)
    settings = Settings(
        seed=args.seed,
        max_tokens=args.tokens,
        max_minutes=args.minutes,
        batch_tokens=args.batch_tokens,
        corpus_sha256=digest,
    )
    train(settings, tokenizer, encoded, out=args.out, is_resumed=args.resume)


def train(settings: Settings, tokenizer: "Tokenizer", encoded: "list[Encoded]", *, out: Path, is_resumed: bool) -> None:
    """Run to the end and export to `out`."""
    from benchmarks.demo_model.batches import groups
    from benchmarks.demo_model.model import build_model, export

    model = build_model(tokenizer, settings.seed)
    optimizer = _optimizer(model)
    progress = _load(model, optimizer, settings) if is_resumed else Progress()
    print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, from step {progress.step}", flush=True)
    stream = groups(encoded, seed=settings.seed, batch_tokens=settings.batch_tokens)
    for _ in range(progress.step):
        next(stream)
    saved_at = progress.seconds
    while progress.share(settings) < 1:
        _step(model, optimizer, _next_batch(stream, tokenizer, progress, settings), progress, settings)
        if progress.step % _PROGRESS_STEPS == 0:
            print(_line(progress, settings), flush=True)
        if progress.seconds - saved_at >= _CHECKPOINT_SECONDS:
            _save(model, optimizer, progress, settings)
            saved_at = progress.seconds
    _save(model, optimizer, progress, settings)
    export(model, tokenizer, out, _record(settings, progress))
    print(f"{_line(progress, settings)}\nsaved to {out}", flush=True)


def _next_batch(
    stream: "Iterator[list[Encoded]]", tokenizer: "Tokenizer", progress: Progress, settings: Settings
) -> "Batch":
    """Return clean questions at first, while the language is learned, then questions with noise."""
    from benchmarks.demo_model.batches import to_batch
    from benchmarks.demo_model.distraction import distract
    from benchmarks.demo_model.tokens import END, PAD, ROLE_TOKENS, TEXT_IDS, token_id

    rows = next(stream)
    if progress.share(settings) >= _DISTRACTION_FROM:
        rng = Random(f"{settings.seed}/{progress.step}")
        user_id, end_id = token_id(tokenizer, ROLE_TOKENS["user"]), token_id(tokenizer, END)
        rows = [distract(rng, row, user_id=user_id, end_id=end_id, text_ids=TEXT_IDS) for row in rows]
    return to_batch(rows, token_id(tokenizer, PAD))


def _step(
    model: "LlamaForCausalLM",
    optimizer: "torch.optim.Optimizer",
    batch: "Batch",
    progress: Progress,
    settings: Settings,
) -> None:
    import torch

    from benchmarks.demo_model.model import answer_loss

    started_at = time.monotonic()
    for group in optimizer.param_groups:
        group["lr"] = _learning_rate(progress, settings)
    loss = answer_loss(model, batch)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    progress.add(loss.item(), batch.num_tokens, time.monotonic() - started_at)


def _learning_rate(progress: Progress, settings: Settings) -> float:
    """Return the rate: a short warm-up, then one cosine to 1 % of the peak."""
    warmup = min(1.0, (progress.step + 1) / _WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * progress.share(settings)))
    return _PEAK_LR * warmup * max(cosine, 0.01)


def _optimizer(model: "LlamaForCausalLM") -> "torch.optim.Optimizer":
    """Return AdamW with decay on matrices only."""
    import torch

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=_PEAK_LR, betas=(0.9, 0.98), fused=True)


def _line(progress: Progress, settings: Settings) -> str:
    share, rate = progress.share(settings), progress.tokens / max(progress.seconds, 1e-9)
    eta = progress.seconds * (1 - share) / max(share, 1e-9) / 60
    return (
        f"step {progress.step:>6} | {progress.tokens / 1e6:6.2f} M tokens | {rate:7,.0f} tokens/s | "
        f"loss {progress.loss:.4f} | {100 * share:5.1f} % | ETA {eta:4.1f} min"
    )


def _save(
    model: "LlamaForCausalLM", optimizer: "torch.optim.Optimizer", progress: Progress, settings: Settings
) -> None:
    """Write the checkpoint to a temporary file and rename it, so that a kill never leaves half a file."""
    import torch

    CHECKPOINTS.mkdir(parents=True, exist_ok=True)
    (CHECKPOINTS / ".gitignore").write_text("*\n", encoding="utf-8")
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": asdict(progress),
        "settings": asdict(settings),
    }
    torch.save(state, CHECKPOINTS / "checkpoint.tmp")
    os.replace(CHECKPOINTS / "checkpoint.tmp", CHECKPOINTS / "checkpoint.pt")


def _load(model: "LlamaForCausalLM", optimizer: "torch.optim.Optimizer", settings: Settings) -> Progress:
    """Read the last checkpoint; without one the run starts from the beginning."""
    import torch

    path = CHECKPOINTS / "checkpoint.pt"
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    if state["settings"] != asdict(settings):
        raise SystemExit(
            f"{path} was made with other settings: {state['settings']}. Use the same ones, or leave out --resume."
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def _record(settings: Settings, progress: Progress) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        **asdict(settings),
        "tokens": progress.tokens,
        "steps": progress.step,
        "minutes": round(progress.seconds / 60, 1),
        "tokens_per_second": round(progress.tokens / progress.seconds),
        "final_loss": round(progress.loss, 4),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the demo model from the corpus this folder generates.")
    parser.add_argument("--out", type=Path, default=HELPDESK, help="folder to export to (default: %(default)s)")
    parser.add_argument(
        "--tokens", type=int, default=12_000_000, help="end after this many tokens (default: %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=60, help="end after this many minutes (default: %(default)s)")
    parser.add_argument(
        "--batch-tokens", type=int, default=1024, help="tokens in a batch, with padding (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="for start values and the order of batches (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in .cache/demo_model")
    return parser


if __name__ == "__main__":
    main()

"""The parity probe: at every load, the paged path against the same weights in transformers' plain eager attention.

Structure does not show whether an architecture is correct over an external KV memory (several call our attention once
per layer and are still wrong); numbers do. Costs one short forward and a few steps. Runs once, at load. For a decoder
of our own layers transformers' model is loaded for it, before the decoder, and freed again.

    prompt  [ chunk | chunk | … | chunk | decode | decode | decode ]   in scattered blocks, beside a second sequence
    compare the logits after each part with the logits of one plain forward over the whole prompt
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from streamserve.engine.capacity import NULL_BLOCKS, blocks_for_tokens
from streamserve.engine.model.attention import implementation
from streamserve.engine.model.batch import build_batch
from streamserve.engine.model.hf import HFModel
from streamserve.engine.model.linear.onednn import is_native
from streamserve.engine.model.load.loader import Source, read_weights
from streamserve.engine.model.load.source import UnsupportedModel
from streamserve.engine.model.runner import ModelRunner
from streamserve.engine.plan import Chunk, StepPlan

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}  # |difference| / |reference|
QUANTIZED = 0.15  # where inputs of linear layers are rounded to int8
NUM_DECODES = 5
NUM_LAST_CHUNKS = 3
NUM_NEIGHBOUR_TOKENS = 5
NOISE_FACTOR = 2.0  # a mixture of experts magnifies rounding: the model's own answer to noise is the yardstick
LOOSEST = 0.4  # wrong attention is off by more
LONGEST_ON_CPU = 256
LONGEST_ON_CUDA = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTokens:
    """The prompt of a probe, and the lengths of the parts that it is computed in."""

    tokens: tuple[int, ...]
    parts: tuple[int, ...]

    @classmethod
    def of(
        cls, windows: Sequence[int], *, block_size: int, max_model_len: int, device: torch.device, vocab_size: int
    ) -> ProbeTokens:
        """Take three blocks and a bit; past the sliding windows by two blocks where that stays affordable."""
        shortest = 3 * block_size + NUM_DECODES + 2
        limit = LONGEST_ON_CPU if device.type == "cpu" else LONGEST_ON_CUDA
        wanted = [window + 2 * block_size for window in windows]
        length = min(max([shortest, *(one for one in wanted if one <= limit)]), max_model_len)
        parts = tuple(probe_chunks(length, block_size))
        return cls(tokens=tuple(probe_tokens(length, vocab_size)), parts=parts)

    @classmethod
    def for_runner(cls, runner: ModelRunner) -> ProbeTokens:
        """Return what probes this runner."""
        return cls.of(
            [layer.sliding_window for layer in runner.layers.values() if layer.sliding_window],
            block_size=runner.block_size,
            max_model_len=runner.max_model_len,
            device=runner.loaded.device,
            vocab_size=runner.vocab_size,
        )

    @property
    def rows(self) -> list[int]:
        """The last position of each part: where logits are compared."""
        return [end - 1 for end in accumulate(self.parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What transformers computes in plain eager attention: logits (num_parts, vocab_size), after each part.

    `noisy` has the same with every embedding changed by a unit in the last place, where that is worth knowing.
    """

    tokens: ProbeTokens
    logits: torch.Tensor
    noisy: torch.Tensor | None = None
    has_experts: bool = False

    @classmethod
    def of(
        cls,
        source: Source,
        tokens: ProbeTokens,
        *,
        has_experts: bool,
        rounded: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Reference:
        """Load transformers' model, compute, and free it again.

        `rounded`: what becomes of a linear layer's weight, and of the embedding's.
        """
        model = read_weights(source)
        if rounded is not None:
            _round_weights(model, rounded)
        with torch.inference_mode(), _fast_linears(model):
            logits = _plain_logits(model, tokens)
            noisy = None
            if has_experts and model.dtype is not torch.float32:
                with _rounding_noise(model):
                    noisy = _plain_logits(model, tokens)
        del model
        gc.collect()
        return cls(tokens=tokens, logits=logits, noisy=noisy, has_experts=has_experts)

    @classmethod
    def of_model(cls, model: Any, tokens: ProbeTokens) -> Reference:
        """Compute with a model of transformers that is in memory."""
        with torch.inference_mode(), implementation(model, "eager"):
            logits = _plain_logits(model, tokens)
            if model.dtype is torch.float32:
                return cls(tokens=tokens, logits=logits)
            with _rounding_noise(model):
                return cls(tokens=tokens, logits=logits, noisy=_plain_logits(model, tokens))


def probe(runner: ModelRunner, reference: Reference | None = None) -> float:
    """Return the relative error of the paged path; raise `UnsupportedModel` if it is above the dtype's tolerance."""
    model, dtype = runner.loaded.model, runner.loaded.dtype
    if reference is None:
        tokens = ProbeTokens.for_runner(runner)
        if isinstance(model, HFModel):
            reference = Reference.of_model(model.model, tokens)
        else:
            reference = Reference.of(runner.loaded.source, tokens, has_experts=True)
    with torch.inference_mode():
        paged = _paged_logits(runner, reference.tokens)
    tolerance, rounding = TOLERANCE[dtype], dtype
    if "_int" in runner.loaded.linears:
        may_part = reference.noisy is not None or reference.has_experts
        tolerance = LOOSEST if may_part else max(tolerance, QUANTIZED)
        rounding = torch.bfloat16 if may_part else dtype  # a rounded input may send a token to another expert
    error = judged_error(row_errors(paged, reference.logits), rounding)
    if error > tolerance and reference.noisy is not None:
        noise = judged_error(row_errors(reference.noisy, reference.logits), dtype)
        tolerance = min(max(tolerance, NOISE_FACTOR * noise), LOOSEST)
    if not error <= tolerance:  # NaN must not pass
        raise UnsupportedModel(
            f"Models of type {runner.loaded.model_type} are not supported: over paged memory the logits differ from "
            f"transformers' own by {error:.2g} (tolerance {tolerance:.2g}). Choose another model."
        )
    return error


def probe_tokens(num_tokens: int, vocab_size: int) -> list[int]:
    """Tokens without meaning or repetition, the same on every machine."""
    return [(1 + i * 7919 + i * i * 31) % max(1, min(vocab_size - 1, 20_000)) for i in range(num_tokens)]


def probe_chunks(num_tokens: int, block_size: int) -> list[int]:
    """Lengths of the parts: some that end inside a block, a part that spans several, then single tokens."""
    parts: list[int] = []
    sizes = [1, block_size + 3, 7, 2 * block_size]
    remaining = num_tokens - NUM_DECODES
    while remaining > 0:
        parts.append(min(sizes[len(parts) % len(sizes)], remaining))
        remaining -= parts[-1]
    return parts + [1] * (num_tokens - sum(parts))


def row_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """|found - wanted| / |wanted| of every row, both (num_rows, vocab_size); infinite where `found` is not."""
    if found.shape != wanted.shape:  # a head that gives other rows than those it is asked for
        return torch.full((len(wanted),), float("inf"))
    difference = (found.float() - wanted.float()).norm(dim=-1)
    return difference / wanted.float().norm(dim=-1).clamp_min(1e-12)


def judged_error(errors: torch.Tensor, dtype: torch.dtype) -> float:
    """The worst row in float32. In shorter types the worse of two medians: of the decodes, and of the last chunks.

    Rounding alone can send a token to another expert and spoil a row; wrong attention spoils all late rows.
    """
    if dtype is torch.float32 or errors.isnan().any():
        return float(errors.max())
    chunks, decodes = errors[:-NUM_DECODES], errors[-NUM_DECODES:]
    return float(torch.maximum(decodes.median(), chunks[-NUM_LAST_CHUNKS:].median()))


def _round_weights(model: Any, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    for module in model.modules():
        if type(module) is torch.nn.Linear or (module is embedding and not is_tied):
            module.weight = torch.nn.Parameter(rounded(module.weight.detach()), requires_grad=False)
    if is_tied:
        embedding.weight = head.weight


def _plain_logits(model: Any, tokens: ProbeTokens) -> torch.Tensor:
    index = torch.tensor(tokens.rows, device=model.device)
    input_ids = torch.tensor([tokens.tokens], device=model.device)
    return model(input_ids=input_ids, use_cache=False, logits_to_keep=index).logits[0]


@contextmanager
def _rounding_noise(model: Any) -> Iterator[None]:
    """Change every embedding by one unit in the last place, up and down in turns."""

    def nudge(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        signs = torch.ones_like(output)
        signs[..., ::2] = -1
        return output * (1 + signs * torch.finfo(output.dtype).eps)

    hook = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()


class _FloatLinears(TorchFunctionMode):  # type: ignore[misc]  # torch is not type-checked here
    """Compute linear layers of half precision in float32: ten times faster on a processor without it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is linear:
            inputs, weight, *bias = args
            floats = [None if one is None else one.float() for one in bias]
            return linear(inputs.float(), weight.float(), *floats).to(inputs.dtype)
        return function(*args, **(kwargs or {}))


def _fast_linears(model: Any) -> AbstractContextManager[Any]:
    is_slow = model.device.type == "cpu" and not is_native(model.dtype)
    return _FloatLinears() if is_slow else nullcontext()


def _paged_logits(runner: ModelRunner, tokens: ProbeTokens) -> torch.Tensor:
    """Run the parts one after another in memory of their own; return the logits after each."""
    num_blocks = blocks_for_tokens(len(tokens.tokens), runner.block_size)
    # Backwards and with gaps, the neighbour's block in the middle: no table is the identity, in no group of layers.
    stride = 2 * num_blocks + 1
    starts = [NULL_BLOCKS + group * stride for group in range(len(runner.windows))]
    tables = [tuple(range(start + 2 * num_blocks, start, -2)) for start in starts]
    neighbours = [(start + num_blocks - 1 + num_blocks % 2,) for start in starts]
    own_kv, runner.kv = runner.kv, runner.new_kv(NULL_BLOCKS + stride * len(starts), is_int8=False)
    logits, start = [], 0
    try:
        for size in tokens.parts:
            part = tokens.tokens[start : start + size]
            chunk = Chunk(seq_id=0, start=start, token_ids=part, block_table=tables[0], other_tables=tuple(tables[1:]))
            other = _neighbour_chunk(
                tokens.tokens, 1 + start % min(NUM_NEIGHBOUR_TOKENS, runner.block_size), neighbours
            )
            batch = build_batch(StepPlan(step_id=0, chunks=(other, chunk)), runner.block_size, runner.loaded.device)
            row = batch.last_rows[batch.chunks.index(chunk)]
            logits.append(runner.forward(batch, [row])[1])
            start += size
    finally:
        runner.kv = own_kv
    return torch.cat([part for part in logits if part is not None])


def _neighbour_chunk(tokens: Sequence[int], size: int, tables: Sequence[tuple[int, ...]]) -> Chunk:
    """A second sequence in the batch: prefilled again each step, so that it always shares the pass."""
    token_ids = tuple(tokens[-size:])
    return Chunk(seq_id=1, start=0, token_ids=token_ids, block_table=tables[0], other_tables=tuple(tables[1:]))

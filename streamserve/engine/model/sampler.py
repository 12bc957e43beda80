"""Choose the next token of every sampling row of a step, together.

Order: rules (bias, allowed ids, bad words), ban, mask, penalties, temperature, top-k, top-p, min-p, then
`argmax(log p + Gumbel(seed, position, token))`. The draw depends only on the row's own logits and (seed, position).
Knows logits and `SampleSpec`s; no sequences, no model.

Why top-p needs no sort: a token belongs to the nucleus iff the tokens likelier than it hold less than `top_p`. The
winner among all tokens, if it is in the nucleus, is the winner among the nucleus. If it is not, neither is anything
less likely: cut there and draw again. It succeeds the first time with probability `top_p`. (On a GPU without kernels,
where the check means waiting, rows are sorted after all.) Nothing here waits for a GPU.

The noise is counter-based: the same number for the same (seed, position, token), on every device, in every batch. A
sampled token is `argmax(log p + Gumbel)`; equally `argmin(E / p)` with E exponential, which saves a logarithm. The
constants are from `splitmix64` and from `lowbias32` (C. Wellons, "Prospecting for hash functions", 2018). The noise
is made in 32-bit integers that wrap; shifts keep the sign, which mixes as well and saves an operation on every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from streamserve.engine.model.batch import on_device, to_device
from streamserve.engine.model.token_rules import PenaltyCounts, RuleTensors
from streamserve.engine.plan import RawLogprobs, SampleSpec

MAX_CUTS = 16  # after that many refusals a row is sorted instead
_TINY = 1e-9
_LEAST_TEMPERATURE = 1e-30  # as good as greedy, and above what float32 rounds to 0
# What a grammar allows has at least this logit: more than what it forbids, and finite whatever is done to it later.
_LEAST_ALLOWED = -1e20
_MASK64 = (1 << 64) - 1
_MIX_1, _MIX_2 = 0x7FEB352D, -2073254261  # the second is 0x846CA68B as a signed number
_TENSORS = ("token_ids", "finite", "chosen_logprobs", "top_logprobs", "top_ids")


@dataclass(frozen=True, slots=True)
class Draws:
    """The result of the sampler: tensors still on the device, so that `collect` decides when to wait.

    token_ids (num_rows,); finite (num_rows,) bool; chosen_logprobs and top (values, ids) for rows with
    logprobs. A row that is not finite has an arbitrary token id.
    """

    token_ids: torch.Tensor
    finite: torch.Tensor
    logprob_rows: tuple[int, ...] = ()
    chosen_logprobs: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field name."""
        return {name: found for name in _TENSORS if (found := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What a runner keeps on the device for the draws of its sequences, and this step's newest tokens (num_rows,)."""

    last_token_ids: torch.Tensor
    rules: RuleTensors
    counts: PenaltyCounts | None = None  # updated for the specs of this step


class DrawKernels(Protocol):
    """What draws in one call: `kernels.Kernels` on a CPU, `cuda.kernels.GPUKernels` on a GPU."""

    def draw(
        self, logits: torch.Tensor, shapes: Sequence[tuple[float, float, float]], keys: Sequence[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw from each row of logits: token ids (num_rows,), and which rows are finite."""
        ...


def sample(
    logits: torch.Tensor,
    specs: Sequence[SampleSpec],
    metadata: SamplingMetadata | None = None,
    kernels: DrawKernels | None = None,
) -> Draws:
    """Choose a token for each row of `logits` (num_rows, vocab_size) by its spec.

    `metadata` are for specs with rules or penalties. `kernels` draw the same tokens faster.
    """
    logits = logits.float()
    if kernels is not None:
        return _sample_by_kernel(logits, specs, metadata, kernels)
    finite = torch.isfinite(logits.amax(dim=-1))  # NaN and +inf win the maximum; all -inf loses to nothing
    shaped = _shape(logits, specs, metadata)
    greedy = [row for row, spec in enumerate(specs) if spec.sampling.temperature <= 0]
    drawn = [row for row, spec in enumerate(specs) if spec.sampling.temperature > 0]
    if not drawn:
        token_ids = shaped.argmax(dim=-1)
    elif not greedy:
        token_ids = _draw(shaped, specs)
    else:
        token_ids = torch.empty(len(specs), dtype=torch.int64, device=logits.device)
        index = _index(greedy, logits.device)
        token_ids.index_copy_(0, index, shaped.index_select(0, index).argmax(dim=-1))
        index = _index(drawn, logits.device)
        token_ids.index_copy_(0, index, _draw(shaped.index_select(0, index), [specs[row] for row in drawn]))
    return _with_logprobs(logits, specs, token_ids, finite)


def _sample_by_kernel(
    logits: torch.Tensor, specs: Sequence[SampleSpec], metadata: SamplingMetadata | None, kernels: DrawKernels
) -> Draws:
    shaped = _shape(logits, specs, metadata)
    samplings = [spec.sampling for spec in specs]
    shapes = [
        (max(one.temperature, _LEAST_TEMPERATURE) if one.temperature > 0 else 0.0, max(one.top_p, _TINY), one.min_p)
        for one in samplings
    ]
    keys = [
        (sampling.top_k, *row_key(sampling.seed or 0, spec.position))
        for spec, sampling in zip(specs, samplings, strict=True)
    ]
    token_ids, finite = kernels.draw(shaped, shapes, keys)
    if shaped is not logits:  # finite is said of what the model gave
        finite = torch.isfinite(logits.amax(dim=-1))
    return _with_logprobs(logits, specs, token_ids, finite)


def _shape(logits: torch.Tensor, specs: Sequence[SampleSpec], metadata: SamplingMetadata | None) -> torch.Tensor:
    """Return logits with rules, bans, masks and penalties applied: the same tensor where no row asks for any."""
    banning = [row for row, spec in enumerate(specs) if spec.banned_token_ids]
    masked = [row for row, spec in enumerate(specs) if spec.mask is not None]
    has_rules = any(spec.rules is not None for spec in specs)
    penalises = any(spec.penalty_slot is not None for spec in specs)
    if not (banning or masked or has_rules or penalises):
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    if has_rules:
        assert metadata is not None, "rules without tensors of them"
        metadata.rules.apply(logits, specs, metadata.last_token_ids)
    for row in banning:
        logits[row].index_fill_(0, _index(specs[row].banned_token_ids, logits.device), float("-inf"))
    if masked:
        _mask(logits, masked, [specs[row] for row in masked])
    if penalises:
        assert metadata is not None, "a penalty without counts"
        assert metadata.counts is not None, "a penalty without counts"
        metadata.counts.penalise(logits, specs)
    return logits


def _mask(logits: torch.Tensor, rows: list[int], specs: Sequence[SampleSpec]) -> None:
    """Leave to these rows only what their grammars allow, in place.

    A token that is allowed and was banned stays possible where nothing else is: no row is without a token. The masks go
    to the device as bits, eight to a byte, the lowest id first.
    """
    packed = torch.frombuffer(bytearray(b"".join(spec.mask or b"" for spec in specs)), dtype=torch.uint8)
    packed = to_device(packed.view(len(rows), -1), logits.device)  # (num_masked, vocab_size / 8)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (packed[:, :, None] >> bits).bitwise_and_(1).bool().flatten(1)[:, : logits.shape[1]]
    if allowed.shape[1] < logits.shape[1]:  # a model may have more logits than its tokenizer has ids
        allowed = torch.nn.functional.pad(allowed, (0, logits.shape[1] - allowed.shape[1]))
    for place, spec in enumerate(specs):
        if spec.mask_end_ids:
            allowed[place].index_fill_(0, _index(spec.mask_end_ids, logits.device), True)
    index = _index(rows, logits.device)
    kept = logits.index_select(0, index).clamp_min_(_LEAST_ALLOWED).masked_fill_(~allowed, float("-inf"))
    logits.index_copy_(0, index, kept)


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """Draw from each row; temperatures are positive. (num_rows, vocab_size) -> (num_rows,)."""
    device = logits.device
    # The difference first: a quotient by a small temperature overflows, and inf - inf is no number.
    temperatures = _column([max(spec.sampling.temperature, _LEAST_TEMPERATURE) for spec in specs], device)
    logits = _keep_top_k(logits, [spec.sampling.top_k for spec in specs])
    weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperatures).exp_()  # p up to a factor; at most 1
    keys = on_device([row_key(spec.sampling.seed or 0, spec.position) for spec in specs], torch.int32, device)
    noise = exponential(keys, logits.shape[1])
    floor = _column([spec.sampling.min_p for spec in specs], device)  # relative to the likeliest, which has 1
    scores = torch.div(weights, noise, out=noise)
    if any(spec.sampling.min_p > 0 for spec in specs):
        scores.masked_fill_(weights < floor, 0.0)
    if all(spec.sampling.top_p >= 1 for spec in specs):
        return scores.argmax(dim=-1)
    return _winner_in_nucleus(scores, weights, [spec.sampling.top_p for spec in specs])


def _keep_top_k(logits: torch.Tensor, top_ks: Sequence[int]) -> torch.Tensor:
    """Rule out what is less likely than a row's k-th likeliest token (ties with it stay); 0 means no limit."""
    vocab_size = logits.shape[1]
    limits = [k if 0 < k < vocab_size else 0 for k in top_ks]
    if not any(limits):
        return logits
    largest = logits.topk(max(limits), dim=-1).values  # (num_rows, largest k)
    index = _index([max(k, 1) - 1 for k in limits], logits.device)[:, None]
    unlimited = on_device([k == 0 for k in limits], torch.bool, logits.device)[:, None]
    lowest = largest.gather(1, index).masked_fill(unlimited, float("-inf"))
    return logits.masked_fill(logits < lowest, float("-inf"))


def _winner_in_nucleus(scores: torch.Tensor, weights: torch.Tensor, top_ps: Sequence[float]) -> torch.Tensor:
    """The best score among each row's nucleus: the likeliest tokens that together hold `top_p` (ties stay together)."""
    budget = _column([max(top_p, _TINY) for top_p in top_ps], weights.device) * weights.sum(dim=-1, keepdim=True)
    budget.masked_fill_(_column([float(top_p >= 1) for top_p in top_ps], weights.device) > 0, float("inf"))
    if weights.device.type != "cpu":  # to look whether the winner is in would be to wait for the GPU
        return _winner_by_sorting(scores, weights, budget)
    winners = scores.argmax(dim=-1)
    rows = _outside(weights, winners, budget).nonzero()[:, 0]
    for _ in range(MAX_CUTS):
        if not len(rows):
            return winners
        open_weights, open_scores = weights[rows], scores[rows]
        own = open_weights.gather(1, winners[rows, None])
        scores[rows] = open_scores = open_scores.masked_fill_(open_weights <= own, 0.0)
        winners[rows] = open_scores.argmax(dim=-1)
        rows = rows[_outside(open_weights, winners[rows], budget[rows])]
    if len(rows):
        winners[rows] = _winner_by_sorting(scores[rows], weights[rows], budget[rows])
    return winners


def _outside(weights: torch.Tensor, winners: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """Which rows' winners lie outside the nucleus: what is likelier than the winner fills the budget. (num_rows,)."""
    own = weights.gather(1, winners[:, None])  # (num_rows, 1)
    above = weights.masked_fill(weights <= own, 0.0).sum(dim=-1, keepdim=True)
    return (above >= budget)[:, 0]


def _winner_by_sorting(scores: torch.Tensor, weights: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    ordered = weights.sort(dim=-1, descending=True).values
    before = ordered.cumsum(dim=-1) - ordered
    # (num_rows, 1): the place of the nucleus' least likely; of a row of NaN, which has none, the first.
    last = ((before < budget).sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    return scores.masked_fill(weights < ordered.gather(1, last), 0.0).argmax(dim=-1)


def _column(numbers: Sequence[float], device: torch.device) -> torch.Tensor:
    return on_device(numbers, torch.float32, device)[:, None]


def _index(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return on_device(numbers, torch.int64, device)


def _with_logprobs(
    logits: torch.Tensor, specs: Sequence[SampleSpec], token_ids: torch.Tensor, finite: torch.Tensor
) -> Draws:
    rows = tuple(row for row, spec in enumerate(specs) if spec.sampling.logprobs is not None)
    if not rows:
        return Draws(token_ids, finite)
    index = _index(rows, logits.device)
    logprobs = torch.log_softmax(logits.index_select(0, index), dim=-1)
    most = min(max(spec.sampling.logprobs or 0 for spec in specs), logits.shape[1])
    top = logprobs.topk(most, dim=-1)
    chosen = logprobs.gather(1, token_ids.index_select(0, index)[:, None])[:, 0]
    return Draws(token_ids, finite, rows, chosen, top.values, top.indices)


def raw_logprobs(draws: Draws, specs: Sequence[SampleSpec]) -> dict[int, RawLogprobs]:
    """Bring the log probabilities of a step to Python numbers, by row."""
    if draws.chosen_logprobs is None or draws.top_logprobs is None or draws.top_ids is None:
        return {}
    chosen = draws.chosen_logprobs.tolist()
    values, ids = draws.top_logprobs.tolist(), draws.top_ids.tolist()
    found = {}
    for place, row in enumerate(draws.logprob_rows):
        wanted = specs[row].sampling.logprobs or 0
        top = tuple(zip(ids[place][:wanted], values[place][:wanted], strict=True))
        found[row] = RawLogprobs(chosen=chosen[place], top=top)
    return found


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Return two signed 32-bit keys for one draw, the second odd. `seed` counts modulo 2^64."""
    mixed = _splitmix64(_splitmix64(seed & _MASK64) ^ (position & _MASK64))
    return _signed(mixed >> 32), _signed(mixed & 0xFFFFFFFF | 1)


def exponential(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return exponential noise (num_rows, vocab_size), mean 1, in (0, inf). keys (num_rows, 2) int32: `row_key`s."""
    bits = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    _mix_(bits.mul_(-1640531527), _MIX_1)  # 2^32 / golden ratio, as a signed number: the part that all rows share
    bits = bits[None, :] ^ keys[:, :1]  # (num_rows, vocab_size)
    _mix_(bits.mul_(keys[:, 1:]), _MIX_2)
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32)
    # Small values stay exact down to 2^-32, so that ties are rare even with the largest vocabularies.
    uniform.add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    return uniform.log1p_().neg_()


def _mix_(x: torch.Tensor, factor: int) -> torch.Tensor:
    x.bitwise_xor_(x >> 16).mul_(factor)
    return x.bitwise_xor_(x >> 15)


def _splitmix64(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number

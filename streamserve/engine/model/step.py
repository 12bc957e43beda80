"""A launched step, and its result once that has arrived on the host. Engine thread only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from streamserve.engine.model.batch import StepBatch
from streamserve.engine.model.load.device import HostCopy
from streamserve.engine.model.sampler import Draws, raw_logprobs
from streamserve.engine.plan import Chunk, RawLogprobs, Sampled, SampleSpec, StepPlan, StepResult

NUMERICAL_ERROR = "numerical_error"
_HEALTHY = "healthy"


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tensors may still be in the making. `rows[seq_id]` is where its token stands in `draws`."""

    plan: StepPlan
    chunks: tuple[Chunk, ...]  # in the batch's order
    rows: dict[int, int]
    specs: tuple[SampleSpec, ...]  # by row
    draws: Draws | None
    copy: HostCopy  # of `draws`, and one flag for each chunk

    @classmethod
    def of(cls, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor, draws: Draws | None) -> LaunchedStep:
        """Put together what a pass gave, and send it on its way to the host. hidden (num_tokens, hidden_size)."""
        sampling = [chunk for chunk in batch.chunks if chunk.sample is not None]
        tensors = {} if draws is None else draws.tensors()
        return cls(
            plan=plan,
            chunks=batch.chunks,
            rows={chunk.seq_id: row for row, chunk in enumerate(sampling)},
            specs=tuple(chunk.sample for chunk in sampling if chunk.sample is not None),
            draws=draws,
            copy=HostCopy({**tensors, _HEALTHY: _healthy_chunks(hidden, batch)}),
        )

    def result(self) -> StepResult:
        """Wait for the step; its tokens as plain numbers, in the plan's order."""
        arrived = self.copy.wait()
        found = {}
        if self.draws is not None:
            draws = replace(self.draws, **{name: arrived[name] for name in self.draws.tensors()})
            found = dict(self._samples(draws))
        for chunk, is_healthy in zip(self.chunks, arrived[_HEALTHY].tolist(), strict=True):
            if not is_healthy:
                found[chunk.seq_id] = _failed(chunk.seq_id)
        sampled = (found.get(chunk.seq_id) for chunk in self.plan.chunks)
        return StepResult(step_id=self.plan.step_id, sampled=tuple(one for one in sampled if one is not None))

    def _samples(self, draws: Draws) -> Iterator[tuple[int, Sampled]]:
        logprobs = raw_logprobs(draws, self.specs)
        token_ids, finite = draws.token_ids.tolist(), draws.finite.tolist()
        for seq_id, row in self.rows.items():
            yield seq_id, _succeeded(seq_id, token_ids[row], logprobs.get(row)) if finite[row] else _failed(seq_id)


def _healthy_chunks(hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
    """One flag per chunk: all of its last hidden states are finite."""
    rows = torch.isfinite(hidden.float().sum(dim=-1))  # (num_tokens,)
    num_decodes = len(batch.chunks) - len(batch.prefills)
    flags = [rows[:num_decodes], *(rows[span.rows].all()[None] for span in batch.prefills)]
    return torch.cat(flags)


def _succeeded(seq_id: int, token_id: int, logprobs: RawLogprobs | None) -> Sampled:
    return Sampled(seq_id=seq_id, token_id=token_id, logprobs=logprobs)


def _failed(seq_id: int) -> Sampled:
    return Sampled(seq_id=seq_id, token_id=None, error=NUMERICAL_ERROR)

"""`ModelRunner`: plans in, tokens out, through a language model over our KV memory.

Holds the model and the KV memory; knows no requests. A `LaunchedStep` is its handle of a step, and becomes its result
once that has arrived on the host. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar, cast

import torch

from streamserve.engine.capacity import blocks_for_tokens
from streamserve.engine.kv.groups import ONE_GROUP, Windows
from streamserve.engine.model.batch import HostCopy, StepBatch, build_batch, on_device
from streamserve.engine.model.cuda.kernels import GPUKernels
from streamserve.engine.model.decoder.decoder import Decoder
from streamserve.engine.model.kv_cache import Groups, KVCache, windows_of
from streamserve.engine.model.load.loader import LoadedModel, end_token_ids
from streamserve.engine.model.prompt_scores import Scores, score
from streamserve.engine.model.sampler import Draws, SamplingMetadata, raw_logprobs, sample
from streamserve.engine.model.token_rules import PenaltyCounts, RuleTensors
from streamserve.engine.plan import (
    Chunk,
    DraftModel,
    Progress,
    Runner,
    Sampled,
    SampleSpec,
    StepOutOfMemory,
    StepPlan,
    StepResult,
    no_progress,
)

T = TypeVar("T")

NUMERICAL_ERROR = "numerical_error"
_HEALTHY = "healthy"
# Messages of allocators that raise no type of their own: torch's on the CPU, C++, cuBLAS and cuDNN.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "ALLOC_FAILED", "out of memory")


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose tensors may not be computed yet. `rows[seq_id]` are the rows of its tokens in `draws`."""

    plan: StepPlan
    chunks: tuple[Chunk, ...]  # in the batch's order
    rows: dict[int, range]
    specs: tuple[SampleSpec, ...]  # by row
    draws: Draws | None
    copy: HostCopy  # of `draws` and of scores, and one flag for each chunk

    @classmethod
    def of(
        cls, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor, draws: Draws | None, scores: Scores | None
    ) -> LaunchedStep:
        """Start copying the results of a pass to the host. hidden (num_tokens, hidden_size)."""
        ends = list(accumulate(len(chunk.samples) for chunk in batch.chunks))
        tensors = {} if draws is None else draws.tensors()
        if scores is not None:
            tensors |= scores.tensors()
        return cls(
            plan=plan,
            chunks=batch.chunks,
            rows={
                chunk.seq_id: range(end - len(chunk.samples), end)
                for chunk, end in zip(batch.chunks, ends, strict=True)
                if chunk.samples
            },
            specs=tuple(spec for chunk in batch.chunks for spec in chunk.samples),
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
        scores = Scores.by_sequence(arrived, self.chunks)
        for chunk, is_healthy in zip(self.chunks, arrived[_HEALTHY].tolist(), strict=True):
            if not is_healthy or scores.get(chunk.seq_id, ()) is None:
                found[chunk.seq_id] = _failed(chunk.seq_id)
        sampled = (found.get(chunk.seq_id) for chunk in self.plan.chunks)
        return StepResult(
            step_id=self.plan.step_id,
            sampled=tuple(one for one in sampled if one is not None),
            scores={seq_id: one for seq_id, one in scores.items() if one is not None},
        )

    def _samples(self, draws: Draws) -> Iterator[tuple[int, Sampled]]:
        logprobs = raw_logprobs(draws, self.specs)
        token_ids, finite = draws.token_ids.tolist(), draws.finite.tolist()
        for chunk in self.chunks:
            rows = self.rows.get(chunk.seq_id)
            if rows is None:
                continue
            if not all(finite[rows.start : rows.stop]):
                yield chunk.seq_id, _failed(chunk.seq_id)
                continue
            kept = chunk.kept(token_ids[rows.start : rows.stop])
            of_kept = tuple(map(logprobs.get, rows[: len(kept)]))
            yield chunk.seq_id, Sampled(seq_id=chunk.seq_id, token_ids=kept, logprobs=of_kept)


class ModelRunner:
    """Runs plans on one model. See `plan.Runner` for the contract.

    `can_overlap`: by default on a GPU; on a CPU, where `launch` does all the work, it works too and gains nothing.
    `has_int8_kv`: keys and values are kept in eight bits. `groups`: the layers that have a block table each, so that
    what lies before their window is freed; none: all layers have one, and keep everything.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        can_overlap: bool | None = None,
        has_int8_kv: bool = False,
        groups: Groups = (),
    ) -> None:
        self.loaded = loaded
        self.has_int8_kv = has_int8_kv
        self.layers = loaded.layers
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.vocab_size = loaded.vocab_size
        self.eos_token_ids = end_token_ids(loaded.source)
        self.num_parameters = loaded.num_parameters
        self.dtype = str(loaded.dtype).removeprefix("torch.")
        self.device = str(loaded.device)
        self.revision = loaded.revision
        self.linears = loaded.linears
        self.groups = groups
        self.windows: Windows = windows_of(groups, loaded.layers, max_model_len)
        self.can_overlap = loaded.device.type == "cuda" if can_overlap is None else can_overlap
        self.kv = self.new_kv(num_blocks)
        self.draft: DraftModel | None = None
        self._last: LaunchedStep | None = None  # the next plan may take its tokens from the device
        self._counts: PenaltyCounts | None = None  # from the first penalty on
        self._rules = RuleTensors(loaded.device)

    def new_kv(self, num_blocks: int, *, is_int8: bool | None = None) -> KVCache:
        """Allocate KV memory of this model's shape; `is_int8` None: as its own is."""
        return KVCache(
            self.layers,
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
            is_int8=self.has_int8_kv if is_int8 is None else is_int8,
            groups=self.groups,
        )

    def take_draft(self, runner: ModelRunner) -> None:
        """Let another model propose from now on, with as many blocks; it is closed with this one.

        It has this model's tables: those of one group.
        """
        runner.num_blocks, runner.groups, runner.windows = self.num_blocks, (), ONE_GROUP
        runner.kv = runner.new_kv(self.num_blocks)
        weight = runner.loaded.weight_bytes / self.loaded.weight_bytes
        self.draft = DraftModel(runner=cast(Runner, runner), weight=weight, max_len=runner.max_model_len)

    @property
    def has_gpu_kernels(self) -> bool:
        """Whether the GPU's kernels compute."""
        return isinstance(self.loaded.kernels, GPUKernels)

    def leave_kernels(self) -> None:
        """Compute with torch from now on."""
        self.loaded.model.use(None)
        self.loaded = replace(self.loaded, kernels=None)

    def capture(self, most_rows: int, progress: Progress = no_progress) -> None:
        """Capture steps of up to `most_rows` decodes as CUDA graphs, where the model can be; takes seconds."""
        model = self.loaded.model
        if isinstance(model, Decoder):
            most_blocks = min(blocks_for_tokens(self.max_model_len, self.block_size), self.num_blocks)
            model.capture(
                self.kv,
                most_rows=most_rows,
                most_blocks=most_blocks,
                on_progress=lambda fraction: progress("graphs", fraction),
            )

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Run the step; on a GPU this returns while it is still working."""
        return self._within_memory(lambda: self._launch(plan))

    def collect(self, handle: LaunchedStep) -> StepResult:
        """Wait for the step and return its tokens as plain numbers, in the plan's order."""
        return self._within_memory(handle.result)

    def _within_memory(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = str(error)
        # Out here, as the exception held the frames that hold the step's tensors.
        give_back_memory(self.loaded.device)
        raise StepOutOfMemory(message)

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        with torch.inference_mode():
            batch = build_batch(plan, self.block_size, self.loaded.device, groups_decodes=not self.has_gpu_kernels)
            self._fill_pending(batch)
            specs = {
                last - len(chunk.samples) + 1 + index: spec
                for last, chunk in zip(batch.last_rows, batch.chunks, strict=True)
                for index, spec in enumerate(chunk.samples)
            }
            hidden, logits = self.forward(batch, list(specs))
            scores = None
            if any(chunk.scores is not None for chunk in batch.chunks):
                scores = score(self.loaded.model, hidden, batch)
            draws = None if logits is None else self._sample(logits, specs, batch)
            step = LaunchedStep.of(plan, batch, hidden, draws, scores)
        self._last = step
        return step

    def _sample(self, logits: torch.Tensor, specs: dict[int, SampleSpec], batch: StepBatch) -> Draws:
        """Draw by `specs`, which are by row of the batch. logits (len(specs), vocab_size)."""
        wanted = tuple(specs.values())
        penalises = any(spec.penalty_slot is not None for spec in wanted)
        if not penalises and all(spec.rules is None for spec in wanted):
            return sample(logits, wanted, kernels=self.loaded.kernels)
        last_rows = on_device(list(specs), torch.int64, logits.device)
        last_token_ids = batch.input_ids[0].index_select(0, last_rows)
        if penalises:
            self._counts = self._counts or PenaltyCounts(logits.shape[1], logits.device)
            self._counts.update(wanted, last_token_ids)
        metadata = SamplingMetadata(last_token_ids, self._rules, self._counts)
        return sample(logits, wanted, metadata, self.loaded.kernels)

    def _fill_pending(self, batch: StepBatch) -> None:
        """Put tokens of the step before into the batch, from device to device."""
        pending, device = batch.pending, self.loaded.device
        if not pending:
            return
        assert self._last is not None, "a pending token without a step before"
        assert self._last.draws is not None, "a pending token of a step that gives none"
        places = on_device(list(pending), torch.int64, device)
        source = on_device([self._last.rows[seq_id][-1] for seq_id in pending.values()], torch.int64, device)
        batch.input_ids[0].index_copy_(0, places, self._last.draws.token_ids.index_select(0, source))

    def forward(self, batch: StepBatch, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the last hidden states (num_tokens, hidden) and the logits (len(rows), vocab_size) of `rows`."""
        model = self.loaded.model
        hidden = model.forward(self.kv, batch)
        if not rows:
            return hidden, None
        return hidden, model.logits(hidden, on_device(rows, torch.int64, self.loaded.device))

    def close(self) -> None:
        """Free the model, its draft model and the KV memory; the runner is unusable afterwards."""
        if self.draft is not None:
            self.draft.runner.close()
        del self.loaded, self.kv, self._last, self._counts, self._rules


def _healthy_chunks(hidden: torch.Tensor, batch: StepBatch) -> torch.Tensor:
    """One flag per chunk: all of its last hidden states are finite."""
    rows = torch.isfinite(hidden.float().sum(dim=-1))  # (num_tokens,)
    if not batch.prefills:
        return rows
    return torch.cat([rows[: batch.num_decodes], *(rows[span.rows].all()[None] for span in batch.prefills)])


def _failed(seq_id: int) -> Sampled:
    return Sampled(seq_id=seq_id, error=NUMERICAL_ERROR)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an exception of torch means too little memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def give_back_memory(device: torch.device) -> None:
    """Return what torch keeps for later to the GPU, so that it can be cut anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
